"""Snapshots: every region and block of resources at one moment. Users import `gpumem.observe`."""
