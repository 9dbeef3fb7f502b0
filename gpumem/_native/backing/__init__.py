"""Where an arena's regions come from: functions that reserve and release them.

``backing`` has device and managed memory, host memory that is pinned, physical handles that are
mapped whole, and files that other processes may map.
"""
