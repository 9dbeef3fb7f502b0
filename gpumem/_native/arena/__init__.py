"""The allocator: blocks of regions or pages, for streams and threads.

In the order of an allocation: ``fast_path`` (allocation and free), with ``thread_cache`` (the
blocks that threads cache); ``slow_path`` (what happens, in order, when memory is out); ``streams``
(when a freed block is reusable, also by another stream); ``growth`` (more memory and less).
``arena`` is its life, from creation to close. Beside them: ``bookkeeping`` and ``metadata_copy``,
``allocation_events`` for recorders, ``allocator_hooks`` that other libraries call, ``graph_pool``,
``planned`` (offsets of a plan), ``sleep`` and ``debug_heap``.
"""
