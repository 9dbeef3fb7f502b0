"""Shared by every layer: locks, atomics, process state, deferred work. Imports nothing above."""
