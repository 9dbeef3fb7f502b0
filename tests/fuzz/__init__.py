"""Fuzzers of everything that gpumem reads: ``python -m tests.fuzz --help``.

Files, shared pages, handles, settings and environment variables come from others, so they may hold
anything. A reader returns, or raises an error of `gpumem.errors`, in bounded time and memory.
hypothesis chooses, repeats and shortens the changes.

`targets`  the readers
`changes`  changes of bytes, and of JSON, pickles, archives, slots and models, which stay readable
`judge`    tries inputs on a target, and raises what is wrong
`corpus`   a folder of small inputs for each reader; every input that once failed is kept there
"""
