"""Buffers, the base of every memory resource, streams, and the order of work on them.

``buffer`` has `Buffer`, ``resource`` `MemoryResource`, ``stream`` streams, events and the
order of accesses, ``dlpack`` the capsules, ``ledger`` the blocks of resources that allocate one by
one.
"""
