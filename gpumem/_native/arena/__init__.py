"""The allocator: blocks of regions or pages, for streams and threads.

In the order of an allocation: ``cache`` (blocks that threads keep), ``arena`` (the fast path,
frees, life and death), ``slow`` (what happens, in order, when memory is out), ``streams`` (when a
freed block is reusable, also by another stream), ``growth`` (more memory and less). Beside it:
``bookkeeping`` and ``metadata_copy``, ``events`` for recorders, ``hooks`` of other libraries,
``graph_pool``, ``planned`` (offsets of a plan), ``suspend``, ``debug_heap`` and ``guards``.
"""
