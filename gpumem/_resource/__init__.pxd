"""Pools, external allocators, handles, and what holds a device's memory."""

from gpumem._resource.handle cimport Handle, handle_of
