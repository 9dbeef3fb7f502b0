"""The driver's word on a device's memory, next to what is held here."""

from libc.stdint cimport uint64_t
from libc.string cimport memcpy, strcmp

from gpumem._buffer cimport BlockLedger, ledger_counters, LedgerCounters, MemoryResource
from gpumem._native.arena cimport arena_in_use, arena_reserved, ArenaCore
from gpumem._native.driver cimport context_enter, context_leave, CUDA_SUCCESS, DeviceContext
from gpumem._support.events cimport Tap, TAP_ARENA, TAP_LEDGER, taps_visit

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
    taps_visit(add_held, &held)
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


cdef void add_held(Tap* tap, void* context) noexcept nogil:
    # Without the resources' locks: a moment's figures. Under the taps' lock no resource can go.
    cdef Held* held = <Held*>context
    if strcmp(tap.memory, held.memory) == 0:
        if tap.owner_is == TAP_ARENA:
            add_arena(<const ArenaCore*>tap.owner, held)
        elif tap.owner_is == TAP_LEDGER:
            add_blocks(<BlockLedger*>tap.owner, held)


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
