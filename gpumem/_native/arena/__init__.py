"""The allocator: ``arena`` is the fast path, ``slow`` what happens when memory is out."""
