"""Fuzzers of everything that gpumem reads: ``python -m tests.fuzz --help``.

Files, shared pages, handles, settings and environment variables are made by others, so they may
hold anything. Whatever they hold, a reader returns, or raises an error of `gpumem.errors` in
bounded time and memory.

`targets`    what reads an input, and how its inputs are built
`mutation`   changes of bytes
`structure`  changes of JSON, pickles, archives, slots and protocol buffers, which stay readable
`child`      tries inputs in a process of its own, and judges what happens
`engine`     watches that process, and begins it anew after a crash or a hang
`guided`     the same inputs and changes, guided by coverage, if the package atheris is installed
`corpus`     a folder of small inputs for each reader; every input that once failed is kept there
`seeds`      writes the corpus: ``python -m tests.fuzz.seeds``
"""
