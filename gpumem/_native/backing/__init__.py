"""Where an arena's regions come from: functions that reserve and release them.

``device`` has device and managed memory, ``pinned`` host memory that the driver maps, ``physical``
handles that are mapped whole and files that other processes may map.
"""
