"""Waiting for other streams when memory is out; see _arena_wait.pxd."""

from libc.stdint cimport uint32_t, uint64_t
from posix.time cimport nanosleep, timespec

from gpumem._arena_streams cimport is_worth_asking, release_completed
from gpumem._arena_types cimport ArenaCore, StreamSlot
from gpumem._support.atomics cimport load32, load64
from gpumem._support.clock cimport clock_ns
from gpumem._support.lock cimport lock_acquire, lock_release

cdef enum:
    FIRST_PAUSE = 20000         # ns between two looks at the events; doubles
    LONGEST_PAUSE = 1000000


cdef bint wait_for_streams(ArenaCore* arena, uint32_t taker, uint64_t* until) noexcept nogil:
    cdef uint64_t before = load64(&arena.completions)
    cdef uint64_t pause = FIRST_PAUSE
    cdef uint64_t now = clock_ns()
    if until[0] == 0:
        until[0] = now + arena.settings.oom_wait
    while True:
        release_completed(arena, taker)
        if load64(&arena.completions) != before:
            return True
        if now >= until[0]:
            give_up(arena)
            return False
        if not is_there_hope(arena, taker):
            return False
        sleep(pause if pause < until[0] - now else until[0] - now)
        pause = pause * 2 if pause < LONGEST_PAUSE else LONGEST_PAUSE
        now = clock_ns()


cdef bint is_there_hope(ArenaCore* arena, uint32_t taker) noexcept nogil:
    # Does unfinished work hold memory that the taker may have once it is done?
    cdef uint32_t stream_slot
    cdef bint hope = False
    cdef const StreamSlot* stream
    lock_acquire(&arena.lock)
    for stream_slot in range(1, arena.table.stream_slot_count):
        stream = &arena.streams[stream_slot]
        if not stream.silent and is_worth_asking(arena, stream_slot, taker):
            if stream.event_epoch:
                hope = hope or stream.event_epoch != stream.gave_up
            else:
                hope = hope or stream.asking or load32(&stream.dirty)
    lock_release(&arena.lock)
    return hope


cdef void give_up(ArenaCore* arena) noexcept nogil:
    cdef uint32_t stream_slot
    lock_acquire(&arena.lock)
    for stream_slot in range(1, arena.table.stream_slot_count):
        arena.streams[stream_slot].gave_up = arena.streams[stream_slot].event_epoch
    lock_release(&arena.lock)


cdef void sleep(uint64_t nanoseconds) noexcept nogil:
    cdef timespec pause
    pause.tv_sec = 0
    pause.tv_nsec = <long>nanoseconds
    nanosleep(&pause, NULL)
