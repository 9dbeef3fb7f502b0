"""Events of resources, written into rings and files; include/recorder.h says how.

A resource has an `EventSource` in its C struct, which is opened when the resource is complete and
closed before the struct is freed. An event is described only where `is_recorded(&events)`:
without a recorder that test is the whole cost. Everything here may be called from any thread,
without the interpreter.

The functions are variables: their module fills them in when it is imported.
"""

from libc.stdint cimport int32_t, uint16_t, uint32_t, uint64_t, uint8_t

from gpumem._support.atomics cimport published_pointer

cdef extern from "recorder_types.h" nogil:
    const char* REC_MAGIC
    enum:
        REC_ALLOC
        REC_FREE
        REC_FREE_REQUESTED
        REC_FREE_COMPLETED
        REC_FAILURE
        REC_RESERVE
        REC_RELEASE
        REC_ASLEEP
        REC_MOVE
        REC_SHRINK
        REC_RESET
        REC_PHASE_BEGIN
        REC_PHASE_END
        REC_CATEGORY
        REC_TAGS
        REC_FRAMEWORKS
        REC_STACKS
        REC_REFUSALS
        FRAMEWORK_TORCH
        FRAMEWORK_CUPY
        FRAMEWORK_VIRTUAL

    ctypedef struct Recorder:
        uint64_t serial
        uint32_t generation
        uint32_t sampling
        uint64_t began
        uint64_t began_at
        int file
        uint32_t failed
        uint64_t mask
        char** names
        uint32_t resources
        uint32_t native
        uint64_t next
        uint64_t allocations
        uint64_t missed

    enum:
        OWNER_ARENA
        OWNER_LEDGER

    ctypedef struct EventSource:
        Recorder* recorder
        void* owner
        uint32_t owner_is
        EventSource* older
        uint32_t generation
        uint16_t number
        char[32] memory
        char[24] kind
        char[64] name
        uint64_t serial
        uint64_t budget
        uint64_t upstream
        const void* upstream_owner
        uint64_t told_allocs
        uint64_t told_frees

    ctypedef struct RecEvent:
        uint32_t kind
        uint64_t address
        uint64_t nbytes
        uint64_t block
        uint64_t stream

    ctypedef struct RecNoted:
        uint64_t number
        uint64_t time
        uint64_t seal
        uint64_t recorder

# A recording may begin or end after this: `event_source_note` checks again.
cdef inline bint is_recorded(const EventSource* source) noexcept nogil:
    return published_pointer(&source.recorder) != NULL

# ---- for resources -------------------------------------------------------------------------------

# Names the resource from now on; longer texts are cut.
cdef void (*event_source_name)(EventSource* source, const char* memory, const char* kind,
                               const char* name) noexcept nogil
# `owner` is the resource's struct, of the kind `owner_is`, for readers of the list of sources.
cdef void (*event_source_open)(EventSource* source, void* owner, uint32_t owner_is) noexcept nogil
# The recorder of `other` records `source`, too, from now on: a part of a resource, opened later.
cdef void (*event_source_join)(EventSource* source, const EventSource* other) noexcept nogil
# Idempotent; does nothing for a source that was never opened.
cdef void (*event_source_close)(EventSource* source) noexcept nogil
# Writes an event. Without `may_wait` (the caller holds a lock) it is given up where the file would
# have to grow first. `noted` says what was written.
cdef void (*event_source_note)(EventSource* source, const RecEvent* event, bint may_wait,
                               RecNoted* noted) noexcept nogil

# Memory was reserved from the driver or released to it (`origin` is 0, or REC_ASLEEP), or moved
# from the address `origin`; recorded or not, and with any lock.
cdef inline void note_page(EventSource* source, uint32_t kind, uint64_t address, uint64_t nbytes,
                           uint64_t origin) noexcept nogil:
    cdef RecEvent event
    cdef RecNoted _noted
    if is_recorded(source):
        event = RecEvent(kind, address, nbytes, nbytes, origin)
        event_source_note(source, &event, False, &_noted)

# ---- for the calling thread ----------------------------------------------------------------------

# Sets the framework of the calling thread's next events; returns the previous one.
cdef uint8_t (*thread_set_framework)(uint8_t framework) noexcept nogil

# ---- for recordings ------------------------------------------------------------------------------

cdef Recorder* (*recorder_ring)(uint64_t slots, uint32_t sampling) noexcept nogil
cdef Recorder* (*recorder_file)(int file, uint32_t sampling, int* code) noexcept nogil
# Attaches it to one source; NULL: to all, and to those that open later. An errno; EBUSY: one of
# them has another recorder already, and nothing changed.
cdef int (*recorder_begin)(Recorder* recorder, EventSource* only) noexcept nogil
# When it returns, no thread writes with the recorder.
cdef void (*recorder_end)(Recorder* recorder) noexcept nogil
cdef int (*recorder_finish_file)(const Recorder* recorder) noexcept nogil
cdef void (*recorder_free)(Recorder* recorder) noexcept nogil
# Writes the text of a number into a file; does nothing for a ring.
cdef void (*recorder_define)(Recorder* recorder, uint32_t what, uint32_t number, const char* text,
                             size_t length) noexcept nogil
# Writes an event of the program: a phase of a number, or the category and the module of the block
# at an address. Caller keeps the recorder from ending.
cdef void (*recorder_mark)(Recorder* recorder, uint32_t kind, uint64_t address, uint16_t label,
                           uint16_t module) noexcept nogil
# Copies the event of a ring that has the number; False if it was overwritten.
cdef bint (*recorder_read_ring)(const Recorder* recorder, uint64_t number,
                                uint64_t* words) noexcept nogil
# The function that numbers the calling thread's stack, called without a lock; NULL: none.
cdef void (*recorder_set_stacks)(uint16_t (*number)(int native) noexcept nogil) noexcept nogil
# The system's id of a thread by its number.
cdef int32_t (*recorder_thread_id)(uint16_t number) noexcept nogil

# ---- for readers of every resource ---------------------------------------------------------------

# Calls `visit` for each open source, the newest first, while none can close.
cdef void (*event_sources_visit)(void (*visit)(EventSource* source, void* context) noexcept nogil,
                                 void* context) noexcept nogil
