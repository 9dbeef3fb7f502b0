"""Arenas for staged copies; see _copy_ring.pxd."""

from gpumem._buffer cimport Buffer
from gpumem._core cimport Arena
from gpumem._driver cimport DriverDevice, place_is_dead

from gpumem.device import Device, MemoryInfo, MemoryKind
from gpumem.errors import DriverError, OutOfMemoryError

# Bytes: room for some copies at once, each with its own ring.
STAGING_LIMIT = 256 << 20

# Device -> its arena; made anew in a fork's child.
cdef dict arenas = {}


cdef Buffer ring_memory(DriverDevice place, object nbytes):
    try:
        return staging_arena(f"{place.type}:{place.ordinal}").allocate(nbytes)
    except (OutOfMemoryError, DriverError):
        return None


def staging_arena(device):
    """Return the pinned arena that large copies from and to pageable memory go through.

    One per device, made at the first use, shared by all copies and limited to 256 MiB. Between
    copies all of it is idle: ``staging_arena(device).shrink()`` gives it back to the system, and
    the next copy takes it again. A copy that gets none of it goes through ordinary memory.

    Parameters
    ----------
    device : Device or str
        The device that is copied to and from.

    Returns
    -------
    Arena
        On the device's HOST_ACCESSIBLE memory. Do not close it.

    Raises
    ------
    ValueError
        Unknown device.

    Examples
    --------
    >>> import gpumem
    >>> gpumem.staging_arena("host").shrink().kept
    ()
    """
    cdef Arena arena
    device = Device(device)
    arena = arenas.get(device)
    if arena is None or arena.closed or place_is_dead(&arena.place.place):
        memory = MemoryInfo(device, MemoryKind.HOST_ACCESSIBLE)
        arena = arenas[device] = Arena(memory, {"max_mem": STAGING_LIMIT},
                                       name=f"staging for {device}")
    return arena
