"""The allocator: blocks of regions or pages, for streams and threads.

In the order of an allocation: ``fast_path`` (allocation and free), with ``thread_cache`` (the
blocks that threads cache); ``detours`` (debug heap, tags, recorded streams, recorders, budgets of
blocks in use, pass-through); ``slow_path`` (the steps that are taken, in order, when memory is
out); ``streams`` (when a freed block is reusable, also by another stream); ``growth`` and
``release`` (memory from the driver, and its release). ``arena`` creates and closes an arena, and
makes graph pools; ``family`` has its tags and children. Next to them: ``bookkeeping`` (charges,
events, copies of the metadata), ``spans`` (virtual tensors), ``allocator_hooks`` that other
libraries call, ``sleep`` and ``debug_heap``.
"""
