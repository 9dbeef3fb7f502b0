# distutils: language = c++
"""Timed loops over budgets and over arenas that charge them, below Python."""

from libc.stdint cimport int64_t, uint32_t, uint64_t
from libc.stdlib cimport calloc, free

from gpumem._arena cimport Arena
from gpumem._budget cimport Budget
from gpumem._native.arena.api cimport arena_allocate, arena_free, ARENA_OK, Block
from gpumem._native.budget.tree cimport budget_charge, BUDGET_REFUSED, budget_uncharge, BudgetCore
from gpumem._support.clock cimport clock_ns

cdef extern from "<pthread.h>" nogil:
    ctypedef struct pthread_t:
        pass
    int pthread_create(pthread_t* thread, void* attributes, void* (*run)(void*) noexcept nogil,
                       void* argument)
    int pthread_join(pthread_t thread, void** result)

cdef extern from *:
    """
    /* A mark of the bench's own: the bytes granted to threads, counted after each grant. */
    static inline int64_t mark_add(int64_t *mark, int64_t by) {
        return __atomic_add_fetch(mark, by, __ATOMIC_SEQ_CST);
    }
    static inline void mark_highest(int64_t *highest, int64_t value) {
        int64_t seen = __atomic_load_n(highest, __ATOMIC_RELAXED);
        while (value > seen && !__atomic_compare_exchange_n(highest, &seen, value, 1,
                                                            __ATOMIC_RELAXED, __ATOMIC_RELAXED)) {}
    }
    """
    int64_t mark_add(int64_t* mark, int64_t by) noexcept nogil
    void mark_highest(int64_t* highest, int64_t value) noexcept nogil

cdef enum:
    HELD = 32               # charges that one thread holds at most
    NBYTES = 4096

cdef struct Racer:
    BudgetCore* budget
    uint64_t operations
    uint64_t seed
    int64_t* mark
    int64_t* highest
    uint64_t granted
    uint64_t refused


def charge_pairs(Budget budget not None, uint64_t count):
    """Charge 4096 bytes and refund them, `count` times; returns nanoseconds in all."""
    cdef uint64_t begin, _
    with nogil:
        begin = clock_ns()
        for _ in range(count):
            budget_charge(budget.core, NBYTES)
            budget_uncharge(budget.core, NBYTES)
        begin = clock_ns() - begin
    return begin


def arena_pairs(Arena arena not None, uint64_t count):
    """Allocate 4096 bytes and free them, `count` times; returns nanoseconds in all."""
    cdef uint64_t begin, _
    cdef uint64_t failed = 0
    cdef Block block
    with nogil:
        begin = clock_ns()
        for _ in range(count):
            if arena_allocate(arena.core, NBYTES, 1, &block) == ARENA_OK:
                arena_free(arena.core, block.handle, 1)
            else:
                failed += 1
        begin = clock_ns() - begin
    if failed:
        raise MemoryError(f"{failed} allocations failed")
    return begin


cdef void* run_racer(void* argument) noexcept nogil:
    cdef Racer* racer = <Racer*>argument
    cdef uint64_t held[HELD]
    cdef uint32_t count = 0
    cdef uint32_t chosen
    cdef uint64_t _, nbytes
    for _ in range(racer.operations):
        racer.seed = racer.seed * <uint64_t>6364136223846793005 + <uint64_t>1442695040888963407
        if count == HELD or (count and racer.seed >> 63):
            chosen = <uint32_t>(racer.seed >> 33) % count
            mark_add(racer.mark, -<int64_t>held[chosen])
            budget_uncharge(racer.budget, held[chosen])
            count -= 1
            held[chosen] = held[count]
            continue
        nbytes = 1 + (racer.seed >> 40) % 100
        if budget_charge(racer.budget, nbytes) == BUDGET_REFUSED:
            racer.refused += 1
            continue
        racer.granted += 1
        mark_highest(racer.highest, mark_add(racer.mark, <int64_t>nbytes))
        held[count] = nbytes
        count += 1
    for chosen in range(count):
        mark_add(racer.mark, -<int64_t>held[chosen])
        budget_uncharge(racer.budget, held[chosen])
    return NULL


def race(Budget budget not None, uint32_t threads, uint64_t operations):
    """Charge and refund from many threads; return the counts and the highest sum granted."""
    cdef Racer* racers = <Racer*>calloc(threads, sizeof(Racer))
    cdef pthread_t* handles = <pthread_t*>calloc(threads, sizeof(pthread_t))
    cdef int64_t mark = 0
    cdef int64_t highest = 0
    cdef uint32_t i
    cdef uint32_t started = 0
    cdef uint64_t begin
    if racers == NULL or handles == NULL:
        free(racers)
        free(handles)
        raise MemoryError("no memory for threads")
    for i in range(threads):
        racers[i] = Racer(budget.core, operations, 12345 + i, &mark, &highest, 0, 0)
    with nogil:
        begin = clock_ns()
        while started < threads:
            if pthread_create(&handles[started], NULL, run_racer, &racers[started]) != 0:
                break
            started += 1
        for i in range(started):
            pthread_join(handles[i], NULL)
        begin = clock_ns() - begin
    granted = sum(racers[i].granted for i in range(threads))
    refused = sum(racers[i].refused for i in range(threads))
    free(racers)
    free(handles)
    return {"threads": started, "operations": started * operations, "granted": granted,
            "refused": refused, "limit": budget.limit, "highest granted": highest,
            "overshoot": max(0, highest - budget.limit), "left charged": budget.used,
            "ns per operation": begin // (operations * started)}
