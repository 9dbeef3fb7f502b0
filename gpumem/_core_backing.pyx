"""The choice of a backing; see _core_backing.pxd."""

from gpumem._backing cimport Backing, Side, SIDE_DEVICE, SIDE_HOST, SIDE_NONE, backing_init
from gpumem._backing_file cimport file_init
from gpumem._backing_managed cimport managed_init
from gpumem._backing_physical cimport THE_DEVICE, numa_init, numa_try, shared_init
from gpumem._backing_pinned cimport pinned_init
from gpumem._buffer cimport MemoryResource
from gpumem._core_source cimport Source, source_init
from gpumem._driver cimport CUresult, Place, check

from gpumem.device import MemoryKind
from gpumem.errors import ConfigError, DriverError

HOST_KINDS = (MemoryKind.HOST, MemoryKind.HOST_ACCESSIBLE)
# Settings that only managed memory has, with the values that ask for nothing.
HINTS = {
    "managed_read_mostly": False,
    "managed_preferred_location": "none",
    "managed_accessed_by": "none",
    "managed_prefetch": "none",
}


cdef int choose_backing(MemoryResource arena, object config, Source source,
                        Backing* backing) except -1:
    cdef Place* place = &arena.place.place
    require_settings(arena, config, source)
    if source is not None:
        source_init(backing, place)
    elif config.numa_node is not None:
        require_node(arena, config.numa_node)
        numa_init(backing, place, config.numa_node)
    elif arena.memory.kind is MemoryKind.HOST_ACCESSIBLE:
        pinned_init(backing, place)
    elif arena.memory.kind is MemoryKind.MANAGED:
        managed_init(backing, place)
        read_hints(config, backing)
    else:
        backing_init(backing, place)
    return 0


cdef int shareable_init(MemoryResource arena, object config, Backing* backing) except -1:
    if by_handle(arena, config):
        shared_init(backing, &arena.place.place,
                    THE_DEVICE if config.numa_node is None else config.numa_node)
    else:
        file_init(backing, &arena.place.place)
    return 0


cdef bint by_handle(MemoryResource arena, object config):
    # As a physical handle of the driver's; other host memory is a file, which anybody can map.
    return arena.memory.kind is MemoryKind.DEVICE or config.numa_node is not None


cdef str why_not_shareable(MemoryResource arena, object config, Source source):
    if source is not None:
        return "its memory is somebody else's"
    if arena.memory.kind is MemoryKind.MANAGED:
        return "managed memory cannot be given to another process"
    needs = "posix_fd_handles" if by_handle(arena, config) else "host_register"
    return arena.memory.device.capabilities[needs].reason


cdef int require_settings(MemoryResource arena, object config, Source source) except -1:
    """Raise ConfigError for a setting that this memory has no use for."""
    where = arena.memory if source is None else "memory of a source"
    if source is not None or arena.memory.kind is not MemoryKind.MANAGED:
        for name, nothing in HINTS.items():
            value = getattr(config, name)
            if value != nothing:
                raise ConfigError(f"{name} = {value!r} is not accepted for {where}: it takes "
                                  f"managed memory, or {nothing!r}")
    if config.numa_node is None:
        return 0
    if source is not None or arena.memory.kind not in HOST_KINDS:
        raise ConfigError(f"numa_node = {config.numa_node} is not accepted for {where}: it takes "
                          "host or host_accessible memory")
    if config.backing == "virtual":
        raise ConfigError(f"numa_node = {config.numa_node} is not accepted with backing = "
                          "'virtual': a node's memory is taken in regions")
    return 0


cdef int require_node(MemoryResource arena, int node) except -1:
    """Raise ConfigError, with the driver's words, if it makes no memory of a node."""
    cdef CUresult code
    cdef const char* call = NULL
    capability = arena.memory.device.capabilities["virtual_memory"]
    if not capability:
        raise ConfigError(f"numa_node = {node} is not accepted on {arena.memory}: "
                          f"{capability.reason}")
    with nogil:
        code = numa_try(&arena.place.place, node, &call)
    try:
        check(arena.place.place.table, code, call.decode())
    except DriverError as refusal:
        raise ConfigError(f"numa_node = {node} is not accepted on {arena.memory}: "
                          f"{refusal}") from refusal
    return 0


cdef int read_hints(object config, Backing* backing) except -1:
    backing.hints.read_mostly = config.managed_read_mostly
    backing.hints.preferred_location = side_of(config.managed_preferred_location)
    backing.hints.accessed_by = side_of(config.managed_accessed_by)
    backing.hints.prefetch = side_of(config.managed_prefetch)
    return 0


cdef Side side_of(str name) except *:
    return {"none": SIDE_NONE, "device": SIDE_DEVICE, "host": SIDE_HOST}[name]
