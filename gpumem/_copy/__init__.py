"""Copies between any two memories.

``plan`` turns a strided copy into rows and boxes. ``copy`` chooses how they are moved: by the CPU,
by the driver, or by both through pinned memory with worker threads (``staged``, ``workers``).
"""
