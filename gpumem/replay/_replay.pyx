"""The replay loop: a trace's events against an arena, without the interpreter per event."""

from libc.stdint cimport int8_t, int16_t, int32_t, int64_t, uint32_t, uint64_t
from libc.stdlib cimport calloc, free, malloc
from posix.time cimport CLOCK_MONOTONIC, clock_gettime, timespec

from gpumem._arena cimport arena_allocate, arena_free
from gpumem._arena_slots cimport slot_claim
from gpumem._arena_types cimport ARENA_OK, ArenaCore, Block
from gpumem._core cimport Arena
from gpumem._host cimport host_advance_clock

cdef enum:
    ALLOC = 0
    FREE_COMPLETED = 2

# What one pass counts.
cdef struct Pass:
    uint64_t executed       # allocations and frees carried out or refused
    uint64_t failed         # allocations refused
    uint64_t requested      # bytes live, as requested
    uint64_t peak_requested
    uint64_t nanoseconds


def run(Arena arena not None, list streams, const int8_t[::1] action, const int32_t[::1] block,
        const int64_t[::1] size, const int16_t[::1] stream, const int64_t[::1] time_us,
        int32_t blocks, bint virtual_clock):
    """Replay checked arrays on an arena, once, and free what is left at the end.

    Parameters
    ----------
    arena : Arena
        A fresh one.
    streams : list
        One stream per stream number of the trace.
    action, block, size, stream, time_us : arrays
        As `Trace` holds them; the caller has validated them.
    blocks : int
        Block numbers are below this.
    virtual_clock : bool
        Move the host device's virtual clock along with the trace's times.

    Returns
    -------
    tuple of int
        executed, failed, peak_requested (bytes), nanoseconds.
    """
    cdef Pass counts
    cdef uint64_t* handles = <uint64_t*>malloc((blocks + 1) * sizeof(uint64_t))
    cdef int64_t* sizes = <int64_t*>malloc((blocks + 1) * sizeof(int64_t))
    cdef char* live = <char*>calloc(blocks + 1, 1)
    cdef uint32_t* slots = <uint32_t*>malloc((len(streams) + 1) * sizeof(uint32_t))
    cdef uint32_t i
    try:
        if handles == NULL or sizes == NULL or live == NULL or slots == NULL:
            raise MemoryError("no host memory for a replay")
        if virtual_clock:
            arena.core.settings.oom_wait = 0    # no work ends while the trace stands still
        for i in range(<uint32_t>len(streams)):
            arena.slot_of(streams[i], &slots[i])
            slot_claim(arena.core, slots[i])
        with nogil:
            replay_pass(arena.core, slots, action, block, size, stream, time_us, handles, sizes,
                        live, virtual_clock, &counts)
            for i in range(<uint32_t>blocks):
                if live[i]:
                    arena_free(arena.core, handles[i], slots[0])
    finally:
        free(handles)
        free(sizes)
        free(live)
        free(slots)
    return counts.executed, counts.failed, counts.peak_requested, counts.nanoseconds


cdef void replay_pass(ArenaCore* arena, const uint32_t* slots, const int8_t[::1] action,
                      const int32_t[::1] block, const int64_t[::1] size,
                      const int16_t[::1] stream, const int64_t[::1] time_us, uint64_t* handles,
                      int64_t* sizes, char* live, bint virtual_clock, Pass* counts) noexcept nogil:
    cdef Py_ssize_t event
    cdef int32_t b
    cdef int64_t now = 0
    cdef Block taken
    cdef uint64_t begin = monotonic_ns()
    counts.executed = 0
    counts.failed = 0
    counts.requested = 0
    counts.peak_requested = 0
    for event in range(action.shape[0]):
        b = block[event]
        if b < 0:
            continue            # allocated before the recording began
        if virtual_clock and time_us[event] > now:
            host_advance_clock(<uint64_t>(time_us[event] - now) * 1000)
            now = time_us[event]
        if action[event] == ALLOC:
            counts.executed += 1
            counts.requested += <uint64_t>size[event]
            if counts.requested > counts.peak_requested:
                counts.peak_requested = counts.requested
            sizes[b] = size[event]
            if size[event] and arena_allocate(arena, <uint64_t>size[event], slots[stream[event]],
                                              &taken) != ARENA_OK:
                counts.failed += 1
            elif size[event]:
                handles[b] = taken.handle
                live[b] = 1
        elif action[event] == FREE_COMPLETED:
            counts.executed += 1
            counts.requested -= <uint64_t>sizes[b]
            if live[b]:
                live[b] = 0
                arena_free(arena, handles[b], slots[stream[event]])
    counts.nanoseconds = monotonic_ns() - begin


cdef inline uint64_t monotonic_ns() noexcept nogil:
    cdef timespec now
    clock_gettime(CLOCK_MONOTONIC, &now)
    return <uint64_t>now.tv_sec * 1000000000 + <uint64_t>now.tv_nsec
