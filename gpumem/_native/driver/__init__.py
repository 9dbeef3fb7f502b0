"""The table of driver functions, filled by a CUDA driver or by the host device.

``table`` has device contexts and errors, and fills the table of CUDA; ``host`` fills that of the
host device. ``hostdev`` is the host device: C without Python, which a reader of the allocator may
skip.
"""
