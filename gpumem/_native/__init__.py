"""The allocator and the drivers below it: C structs and functions, without the interpreter.

Every function here is ``noexcept nogil``, returns a status and may be called from any thread. The
Python classes and the allocator hooks of other libraries call the same functions. From the bottom:
``driver`` (the table of driver functions), ``bfc`` (the chunk table), ``pages`` and ``backing``
(where memory comes from), ``budget`` (limits), ``arena`` (the allocator).
"""
