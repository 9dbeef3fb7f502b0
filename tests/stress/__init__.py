"""A long-running search for wrong bytes: ``python -m tests.stress --help``.

Several threads share one small arena. Every block is filled on a stream with a pattern that names
its writer, used on other streams, read back on a stream, and freed in every way there is, while
the work of all of them is still queued. A byte that is not its owner's means that memory
was handed on too early, or that two blocks lie on the same memory.

`patterns`  fills and checks, queued on streams
`blocks`    the blocks of one thread, and behind which stream's work they are
`worker`    what one thread does, at random
`crossings` its copies, imports, sessions and timelines
`scenario`  one arena with its settings, its threads and its end
"""
