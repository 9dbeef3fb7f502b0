"""Pools, external allocators, handles, and figures of a device's memory."""

from gpumem._resource.handle cimport Handle, handle_of
from gpumem._resource.pool_driver cimport device_figures, no_way_between, peer_is_reached
