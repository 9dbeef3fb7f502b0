"""The driver's counters of a device's memory, next to those of this process."""

from libc.stdint cimport uint64_t
from libc.string cimport memcpy, strcmp

from gpumem._buffer cimport BlockLedger, ledger_counters, LedgerCounters, MemoryResource
from gpumem._native.arena.api cimport (
    arena_backing, arena_in_use, arena_is_graph_pool, arena_reserved, ArenaCore,
)
from gpumem._native.driver cimport context_enter, context_leave, CUDA_SUCCESS, DeviceContext
from gpumem._support.events cimport event_sources_visit, EventSource, OWNER_ARENA, OWNER_LEDGER

from gpumem._resource.nvml import processes_on
from gpumem.errors import ConfigError, PeerAccessError


cdef struct Held:
    const void* owner
    char[32] memory
    uint64_t here           # bytes that this process's resources hold
    uint64_t idle           # of them, what others than the owner do not use, and could give back


cdef dict device_figures(MemoryResource resource, DeviceContext* context, const void* owner):
    cdef size_t free_bytes = 0
    cdef size_t total = 0
    cdef bint known = False
    cdef Held held
    cdef bytes memory = str(resource.memory).encode()[:sizeof(held.memory) - 1]
    held.owner = owner
    held.here = 0
    held.idle = 0
    memcpy(held.memory, <const char*>memory, len(memory) + 1)
    # Both readings are of different moments, hence the limit at 0 below.
    event_sources_visit(add_held, &held)
    with nogil:
        if context_enter(context) == CUDA_SUCCESS:
            # A failure leaves the figures out: this is part of another error's report.
            known = context.table.cuMemGetInfo(&free_bytes, &total) == CUDA_SUCCESS
            context_leave(context)
    return {
        "device_total": total if known else None,
        "device_free": free_bytes if known else None,
        "held_here": held.here,
        "idle_elsewhere": held.idle,
        "held_by_others": max(0, <object>total - free_bytes - held.here) if known else None,
        "processes": () if context.is_host else processes_on(resource.memory.device.uuid),
    }


cdef void add_held(EventSource* source, void* context) noexcept nogil:
    # Without the resources' locks: approximate figures. Under the sources' lock none can be freed.
    cdef Held* held = <Held*>context
    if strcmp(source.memory, held.memory) == 0:
        if source.owner_is == OWNER_ARENA:
            add_arena(<ArenaCore*>source.owner, held)
        elif source.owner_is == OWNER_LEDGER:
            add_blocks(<BlockLedger*>source.owner, held)


cdef void add_arena(ArenaCore* arena, Held* held) noexcept nogil:
    cdef uint64_t reserved = arena_reserved(arena)
    cdef uint64_t in_use = arena_in_use(arena)
    if arena_backing(arena).source != NULL:
        return              # its source is counted, if that is a resource of gpumem
    held.here += reserved
    # Not of a graph pool: a graph may write wherever that has memory.
    if arena != held.owner and reserved > in_use and not arena_is_graph_pool(arena):
        held.idle += reserved - in_use


cdef void add_blocks(BlockLedger* ledger, Held* held) noexcept nogil:
    # Without memory that a driver's pool caches beyond its blocks, which only the driver counts,
    # and without a user's class, whose memory another resource may have counted already.
    cdef LedgerCounters now = ledger_counters(ledger)
    if not ledger.is_users:
        held.here += now.in_use + now.waiting


cdef bint peer_is_reached(MemoryResource resource, object device) except -1:
    own = resource.memory.device
    if device.type != own.type or device == own:
        raise ConfigError(f"invalid peer {str(device)!r} of {resource.name!r} on "
                          f"{resource.memory}: expected another {own.type} device")
    return resource.driver_device.is_reached_by(device.index)


cdef object no_way_between(object peer, object own):
    return PeerAccessError(f"{peer} cannot access the memory of {own}: the driver has no way "
                           "between them")
