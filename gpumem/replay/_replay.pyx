"""The replay loop: a trace's events against an arena, without the interpreter per event."""

from libc.stdint cimport int16_t, int32_t, int64_t, int8_t, uint32_t, uint64_t
from libc.stdlib cimport calloc, free, malloc
from libc.string cimport memset

from gpumem._arena cimport Arena
from gpumem._native.arena.api cimport (
    arena_allocate, arena_free, ARENA_OK, arena_set_clock, arena_set_oom_wait, ArenaCore, Block,
    slot_retain,
)
from gpumem._native.driver.host cimport host_advance_clock
from gpumem._support.clock cimport clock_ns
from gpumem._support.columns cimport column_of
from gpumem._support.process cimport process_interrupted, raise_interrupt


cdef enum:
    ALLOC = 0
    FREE_COMPLETED = 2
    CLOCK_EVERY = 16            # events; one may take a millisecond, in the driver or in a search
    SIGNALS_EVERY = 50000000    # ns: a check takes the interpreter lock

# A checked trace's columns.
cdef struct Columns:
    const int8_t* action
    const int32_t* block
    const int64_t* size     # bytes
    const int16_t* stream   # index into the slots of the pass
    const int64_t* time_us
    size_t count            # of events

# Counters of one pass.
cdef struct Pass:
    uint64_t executed       # allocations, failed ones included, and frees
    uint64_t failed         # allocations
    uint64_t requested      # bytes live, as requested
    uint64_t peak_requested
    uint64_t served         # bytes live of the allocations that did not fail
    uint64_t peak_served
    uint64_t nanoseconds


def run(Arena arena not None, list streams, trace, bint virtual_clock):
    """Replay a trace on an arena, once, and free what is live at the end.

    Parameters
    ----------
    arena : Arena
        A fresh one.
    streams : list
        One stream per stream number of the trace.
    trace : Trace
        Checked when it was made: block and stream numbers are indices.
    virtual_clock : bool
        Move the host device's virtual clock along with the trace's times.

    Returns
    -------
    tuple of int
        executed, failed, peak_requested and peak_served (bytes), nanoseconds.
    """
    cdef Pass counts
    cdef Columns columns = columns_of(trace)
    cdef int32_t blocks = trace.allocs      # block numbers are below it
    cdef uint64_t* handles = <uint64_t*>malloc((blocks + 1) * sizeof(uint64_t))
    cdef int64_t* sizes = <int64_t*>malloc((blocks + 1) * sizeof(int64_t))
    cdef char* live = <char*>calloc(blocks + 1, 1)
    cdef uint32_t* slots = <uint32_t*>malloc((len(streams) + 1) * sizeof(uint32_t))
    cdef uint32_t i
    cdef bint interrupted
    try:
        if handles == NULL or sizes == NULL or live == NULL or slots == NULL:
            raise MemoryError("out of host memory while preparing a replay")
        if virtual_clock:
            arena_set_oom_wait(arena.core, 0)   # no work ends while the trace stands still
        for i in range(<uint32_t>len(streams)):
            arena.slot_of(streams[i], &slots[i])
            slot_retain(arena.core, slots[i])
        with nogil:
            interrupted = replay_pass(arena.core, slots, &columns, handles, sizes, live,
                                      virtual_clock, &counts)
            for i in range(<uint32_t>blocks):
                if live[i]:
                    arena_free(arena.core, handles[i], slots[0])
        if interrupted:
            raise_interrupt()
    finally:
        free(handles)
        free(sizes)
        free(live)
        free(slots)
    return (counts.executed, counts.failed, counts.peak_requested, counts.peak_served,
            counts.nanoseconds)


cdef Columns columns_of(trace) except *:
    cdef Columns columns
    cdef size_t count = trace.events
    columns.count = count
    columns.action = <const int8_t*>column_of(trace.action, count, sizeof(int8_t))
    columns.block = <const int32_t*>column_of(trace.block, count, sizeof(int32_t))
    columns.size = <const int64_t*>column_of(trace.size, count, sizeof(int64_t))
    columns.stream = <const int16_t*>column_of(trace.stream, count, sizeof(int16_t))
    columns.time_us = <const int64_t*>column_of(trace.time_us, count, sizeof(int64_t))
    return columns


cdef bint replay_pass(ArenaCore* arena, const uint32_t* slots, const Columns* columns,
                      uint64_t* handles, int64_t* sizes, char* live, bint virtual_clock,
                      Pass* counts) noexcept nogil:
    # Returns whether Ctrl-C ended it; the exception is then set.
    cdef size_t event
    cdef int32_t b
    cdef int64_t size
    cdef uint32_t slot
    cdef int64_t now = 0
    cdef Block block
    cdef uint64_t begin = clock_ns()
    cdef uint64_t checked = 0
    memset(counts, 0, sizeof(Pass))
    for event in range(columns.count):
        if event % CLOCK_EVERY == 0 and is_interrupted(&checked):
            return True
        b = columns.block[event]
        if b < 0:
            continue            # allocated before the recording began
        if columns.time_us[event] > now:
            if virtual_clock:
                host_advance_clock(<uint64_t>(columns.time_us[event] - now) * 1000)
            now = columns.time_us[event]
            arena_set_clock(arena, <uint64_t>now * 1000)
        slot = slots[columns.stream[event]]
        if columns.action[event] == ALLOC:
            size = columns.size[event]
            counts.executed += 1
            counts.requested += <uint64_t>size
            if counts.requested > counts.peak_requested:
                counts.peak_requested = counts.requested
            sizes[b] = size
            if size and arena_allocate(arena, <uint64_t>size, slot, &block) != ARENA_OK:
                counts.failed += 1
            elif size:
                handles[b] = block.handle
                live[b] = 1
                counts.served += <uint64_t>size
                if counts.served > counts.peak_served:
                    counts.peak_served = counts.served
        elif columns.action[event] == FREE_COMPLETED:
            counts.executed += 1
            counts.requested -= <uint64_t>sizes[b]
            if live[b]:
                live[b] = 0
                counts.served -= <uint64_t>sizes[b]
                arena_free(arena, handles[b], slot)
    counts.nanoseconds = clock_ns() - begin
    return False


cdef inline bint is_interrupted(uint64_t* checked) noexcept nogil:
    cdef uint64_t now = clock_ns()
    if now - checked[0] < SIGNALS_EVERY:
        return False
    checked[0] = now
    return process_interrupted()
