"""The driver's word on a device's memory, next to what is held here."""

from libc.stdint cimport uint64_t
from libc.string cimport memcpy, strcmp

from gpumem._buffer cimport BlockLedger, ledger_counters, LedgerCounters, MemoryResource
from gpumem._native.arena cimport arena_in_use, arena_reserved, ArenaCore
from gpumem._native.driver cimport context_enter, context_leave, CUDA_SUCCESS, DeviceContext
from gpumem._support.events cimport event_sources_visit, EventSource, OWNER_ARENA, OWNER_LEDGER

from gpumem._resource.nvml import processes_on


cdef struct Held:
    const void* owner
    char[32] memory
    uint64_t here           # bytes that this process's resources hold
    uint64_t idle           # of them, what others than the owner hold and nobody uses


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
    event_sources_visit(add_held, &held)
    with nogil:
        if context_enter(context) == CUDA_SUCCESS:
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
    # Without the resources' locks: a moment's figures. Under the sources' lock none can go.
    cdef Held* held = <Held*>context
    if strcmp(source.memory, held.memory) == 0:
        if source.owner_is == OWNER_ARENA:
            add_arena(<const ArenaCore*>source.owner, held)
        elif source.owner_is == OWNER_LEDGER:
            add_blocks(<BlockLedger*>source.owner, held)


cdef void add_arena(const ArenaCore* arena, Held* held) noexcept nogil:
    cdef uint64_t reserved = arena_reserved(arena)
    cdef uint64_t in_use = arena_in_use(arena)
    if arena.backing.source != NULL:
        return              # what is under it counts, where it is ours
    held.here += reserved
    if arena != held.owner and reserved > in_use:
        held.idle += reserved - in_use


cdef void add_blocks(BlockLedger* ledger, Held* held) noexcept nogil:
    # What a driver's pool keeps beyond its blocks only the driver knows; where the blocks of a
    # user's class come from only the user does.
    cdef LedgerCounters now = ledger_counters(ledger)
    if not ledger.is_users:
        held.here += now.in_use + now.waiting
