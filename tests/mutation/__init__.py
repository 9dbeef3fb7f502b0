"""Mutation testing of the allocator's core: ``python -m tests.mutation --help``.

One small error at a time is written into a copy of the tree, the modules that it touches are built
again, and the tests of the core run, the likely ones first, until one fails. A mutant that no test
notices is a *survivor*: a behaviour without a test, or a change without an effect.

`cython_source`  reads tokens and statements of Cython's language
`mutants`        makes the mutants of a file
`tree`           a copy of the checkout: builds modules, runs tests
`in_order`       a plugin of pytest in the copy: the order of tests, time limits, what failed
`equivalent`     mutants without an effect, listed with their reasons in equivalent.txt
`campaign`       worker processes, the results, the table

Only Cython is mutated: not the C headers beside it, nor declarations, docstrings, and checks of
invariants. What a mutant leaks shows under the sanitizers alone (`tests/sanitizers`).
"""
