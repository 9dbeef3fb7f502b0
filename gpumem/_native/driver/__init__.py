"""The table of driver functions, and what fills it: a CUDA driver or the host device.

``table`` holds it with the device contexts and errors; ``cuda`` and ``host`` fill it. ``hostdev``
is the host device: C without Python, of which a reader of the allocator may skip all.
"""
