# distutils: language = c++
"""Allocators below Python, gpumem's core among them, and the timed loops over them."""

from libc.stdint cimport uint32_t, uint64_t, uintptr_t
from libc.stdlib cimport calloc, free

import numpy as np

from gpumem._arena cimport Arena
from gpumem._native.arena.api cimport (
    AllocatorHook, arena_allocate, arena_free, ARENA_OK, ArenaCore, Block, hook_allocate,
    hook_create, hook_drop, hook_free_on,
)
from gpumem._native.arena.types cimport ArenaCore as Core, SPACES
from gpumem._native.bfc cimport Chunk
from gpumem._native.driver cimport CUstream
from gpumem._native.pages cimport Page

from gpumem.integrations.c._calls import address_of, capsule_of

cdef extern from "gpumem.h" nogil:
    ctypedef struct gpumem_calls:
        int (*allocate)(gpumem_arena*, size_t, size_t, void*, void**) noexcept nogil
        int (*deallocate_on)(gpumem_arena*, void*, void*) noexcept nogil
    ctypedef struct gpumem_arena:
        const gpumem_calls* calls

cdef extern from "subject.h" nogil:
    const uint64_t FAILED

    struct CSubject "Subject":
        void* state
        uint64_t (*allocate)(void*, uint64_t, uint32_t) noexcept
        void (*release)(void*, uint64_t, uint32_t) noexcept
        void (*destroy)(void*) noexcept

    struct Step:
        uint64_t size
        uint64_t slot

    CSubject subject_nothing()
    CSubject subject_binned_sets(uint64_t)
    CSubject subject_best_fit(uint64_t)
    CSubject subject_bitmap_bins(uint64_t)
    CSubject subject_malloc(void*, void*)
    uint64_t run_pairs(const CSubject*, uint64_t*, const Step*, size_t, uint32_t)
    bint run_latencies(const CSubject*, uint64_t*, const Step*, size_t, uint32_t, float*, float*)
    uint64_t run_threads(const CSubject* const*, uint64_t**, const Step**, size_t, const uint32_t*, int)
    uint64_t run_handoff(const CSubject*, const Step*, size_t, uint32_t)

MOST_THREADS = 2


cdef uint64_t core_allocate(void* arena, uint64_t size, uint32_t stream) noexcept nogil:
    cdef Block block
    if arena_allocate(<ArenaCore*>arena, size, stream, &block) != ARENA_OK:
        return FAILED
    return block.handle


cdef void core_release(void* arena, uint64_t handle, uint32_t stream) noexcept nogil:
    arena_free(<ArenaCore*>arena, handle, stream)


# A hook, and the C functions over one: blocks by address, streams by native handle.
cdef struct ByAddress:
    AllocatorHook* hook
    gpumem_arena* arena
    CUstream streams[2]


cdef uint64_t hook_take(void* state, uint64_t size, uint32_t thread) noexcept nogil:
    cdef ByAddress* given = <ByAddress*>state
    cdef uint64_t address
    if hook_allocate(given.hook, size, given.streams[thread], 0, &address) != ARENA_OK:
        return FAILED
    return address


cdef void hook_release(void* state, uint64_t address, uint32_t thread) noexcept nogil:
    hook_free_on(address, (<ByAddress*>state).streams[thread])


cdef uint64_t table_take(void* state, uint64_t size, uint32_t thread) noexcept nogil:
    cdef ByAddress* given = <ByAddress*>state
    cdef void* address
    if given.arena.calls.allocate(given.arena, size, 256, <void*>given.streams[thread],
                                  &address) != 0:
        return FAILED
    return <uint64_t>address


cdef void table_release(void* state, uint64_t address, uint32_t thread) noexcept nogil:
    cdef ByAddress* given = <ByAddress*>state
    given.arena.calls.deallocate_on(given.arena, <void*>address, <void*>given.streams[thread])


cdef void end_by_address(void* state) noexcept nogil:
    if (<ByAddress*>state).hook != NULL:
        hook_drop((<ByAddress*>state).hook)
    free(state)


cdef class Subject:
    """One allocator with `slots` blocks, at first none of them allocated, for each thread."""

    cdef CSubject subject
    cdef uint32_t streams[2]        # slots, of a gpumem arena
    cdef uint64_t* handles[2]
    cdef size_t slots
    cdef object owner

    def __cinit__(self, size_t slots, *arguments):
        cdef size_t i
        self.slots = slots
        for thread in range(MOST_THREADS):
            self.handles[thread] = <uint64_t*>calloc(slots, sizeof(uint64_t))
            if self.handles[thread] == NULL:
                raise MemoryError(f"no memory for {slots} handles")
            for i in range(slots):
                self.handles[thread][i] = FAILED

    def __dealloc__(self):
        cdef size_t i
        for thread in range(MOST_THREADS):
            for i in range(self.slots if self.handles[thread] != NULL else 0):
                if self.handles[thread][i] != FAILED:
                    self.subject.release(self.subject.state, self.handles[thread][i],
                                         self.streams[thread])
            free(self.handles[thread])
        if self.subject.destroy != NULL:
            self.subject.destroy(self.subject.state)

    def pairs(self, const Step[::1] steps):
        """Replace blocks, step by step; returns nanoseconds in all."""
        cdef uint64_t spent
        with nogil:
            spent = run_pairs(&self.subject, self.handles[0], &steps[0], steps.shape[0],
                              self.streams[0])
        return required(spent)

    def latencies(self, const Step[::1] steps):
        """Return the nanoseconds of each free and of each allocation, two arrays."""
        cdef float[::1] frees = np.empty(steps.shape[0], np.float32)
        cdef float[::1] allocations = np.empty(steps.shape[0], np.float32)
        cdef bint done
        with nogil:
            done = run_latencies(&self.subject, self.handles[0], &steps[0], steps.shape[0],
                                 self.streams[0], &frees[0], &allocations[0])
        required(done)
        return np.asarray(frees), np.asarray(allocations)

    def threads(self, int threads, const Step[::1] first, const Step[::1] second,
                Subject other=None):
        """Replace blocks in one or two threads at once; mean nanoseconds of a thread.

        The second thread uses the allocator and the blocks of `other`, if given.
        """
        cdef const Step* steps[2]
        cdef const CSubject* subjects[2]
        cdef uint64_t* handles[2]
        cdef uint64_t spent
        if other is None:
            other = self
        steps[0] = &first[0]
        steps[1] = &second[0]
        subjects[0] = &self.subject
        subjects[1] = &other.subject
        handles[0] = self.handles[0]
        handles[1] = other.handles[1]
        with nogil:
            spent = run_threads(subjects, handles, steps, first.shape[0], self.streams, threads)
        return required(spent)

    def handoff(self, const Step[::1] steps):
        """Allocate in one thread, free in another; nanoseconds in all."""
        cdef uint64_t spent
        with nogil:
            spent = run_handoff(&self.subject, &steps[0], steps.shape[0], self.streams[0])
        return required(spent)


cdef uint64_t required(uint64_t spent) except 0:
    if spent == 0:
        raise MemoryError("an allocator under test had no memory left")
    return spent


def nothing(size_t slots):
    """Make the allocator that does nothing: the cost of the loop itself."""
    cdef Subject made = Subject(slots)
    made.subject = subject_nothing()
    return made


def binned_sets(size_t slots, uint64_t nbytes):
    """Make 21 power-of-two bins of ordered sets over one range, ONNX Runtime's split rule."""
    cdef Subject made = Subject(slots)
    made.subject = subject_binned_sets(nbytes)
    return made


def best_fit(size_t slots, uint64_t nbytes):
    """Make one ordered set over one range, exact split."""
    cdef Subject made = Subject(slots)
    made.subject = subject_best_fit(nbytes)
    return made


def bitmap_bins(size_t slots, uint64_t nbytes):
    """Make two levels of bitmaps over lists of chunks of one range; takes the first that fits."""
    cdef Subject made = Subject(slots)
    made.subject = subject_bitmap_bins(nbytes)
    return made


def c_library(size_t slots, uintptr_t malloc_address, uintptr_t free_address):
    """Make an allocator of a C library's two functions."""
    cdef Subject made = Subject(slots)
    made.subject = subject_malloc(<void*>malloc_address, <void*>free_address)
    return made


def core(size_t slots, Arena arena not None, list streams):
    """Make gpumem's core below Python, with one stream per thread."""
    cdef Subject made = Subject(slots)
    cdef int i
    for i in range(MOST_THREADS):
        arena.slot_of(streams[i], &made.streams[i])
    made.owner = arena, streams
    made.subject.state = arena.core
    made.subject.allocate = core_allocate
    made.subject.release = core_release
    return made


cdef ByAddress* by_address(Subject made, list streams) except NULL:
    cdef ByAddress* state = <ByAddress*>calloc(1, sizeof(ByAddress))
    cdef int i
    if state == NULL:
        raise MemoryError("no memory for a hook")
    for i in range(len(streams)):
        state.streams[i] = <CUstream><uintptr_t>streams[i].ptr
        made.streams[i] = i
    made.subject.state = state
    made.subject.destroy = end_by_address
    return state


def hook(size_t slots, Arena arena not None, list streams):
    """Make an allocator hook of an arena, which frees by address, with one stream per thread."""
    cdef Subject made = Subject(slots)
    made.owner = arena, streams
    by_address(made, streams).hook = hook_create(arena.core, NULL, False, 0)
    made.subject.allocate, made.subject.release = hook_take, hook_release
    return made


def c_functions(size_t slots, Arena arena not None, list streams):
    """Make the functions of gpumem.h over an arena, with one stream per thread."""
    cdef Subject made = Subject(slots)
    capsule = capsule_of(arena, "c")
    made.owner = capsule, streams
    by_address(made, streams).arena = <gpumem_arena*><uintptr_t>address_of(capsule)
    made.subject.allocate, made.subject.release = table_take, table_release
    return made


def chunk_bytes():
    """Return the bytes of one chunk's record."""
    return sizeof(Chunk)


def chunk_records(Arena arena not None):
    """Return the records of chunks ever used at once, of both tables of an arena."""
    return (<Core*>arena.core).table.count + (<Core*>arena.core).small.count


def page_table_bytes(Arena arena not None):
    """Return the bytes of an arena's records of pages, and of which page lies at which address."""
    cdef uint64_t nbytes = 0
    cdef int i
    for i in range(SPACES):
        nbytes += (<Core*>arena.core).spaces[i].page_count * sizeof(Page)
        nbytes += (<Core*>arena.core).spaces[i].granules * sizeof(uint32_t)
    return nbytes
