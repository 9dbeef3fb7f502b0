"""Backings: functions that reserve and release the regions of an arena.

``backing`` has device and managed memory, host memory that is pinned, physical handles that are
mapped whole, and files that other processes may map.
"""
