"""Copies between any two memories.

``plan`` turns a strided copy into rows and boxes, ``copy`` chooses who moves them: the CPU, the
driver (``driver``), or both through pinned memory with worker threads (``staged``, ``workers``).
"""
