"""Taps, recorders and the state of each thread; see _support/events.pxd and include/recorder.h."""

from libc.stdint cimport int32_t, uint16_t, uint32_t, uint64_t, uint8_t

from gpumem._support.process cimport process


cdef extern from "recorder.h" nogil:
    ctypedef struct RecThread:
        uint16_t tag
        uint8_t framework

    int rec_init(const uint32_t* generation)
    RecThread* rec_thread()
    void rec_source_name(EventSource* source, const char* memory, const char* kind,
                         const char* name)
    void rec_source_open(EventSource* source)
    void rec_source_close(EventSource* source)
    void rec_note(EventSource* source, const RecEvent* event, int may_wait, RecNoted* noted)
    Recorder* rec_make_ring(uint64_t slots, uint32_t sampling)
    Recorder* rec_make_file(int file, uint32_t sampling, int* code)
    int rec_begin(Recorder* recorder, EventSource* only)
    void rec_end(Recorder* recorder)
    int rec_finish_file(Recorder* recorder)
    void rec_free(Recorder* recorder)
    void rec_define(Recorder* recorder, unsigned what, unsigned number, const char* text,
                    size_t length)
    int rec_read_ring(const Recorder* recorder, uint64_t number, uint64_t* words)
    void rec_visit(void (*visit)(EventSource* source, void* context) noexcept nogil, void* context)
    uint16_t (*rec_stack)() noexcept nogil
    int32_t* rec_thread_ids

# What numbers in events mean: tags by the order in which they were first named, frameworks by that
# of include/recorder_types.h. 0 is none.
tag_texts = [""]
FRAMEWORKS = ("", "torch", "cupy", "numba", "jax", "rmm", "cuda.core")

if rec_init(&process.generation) != 0:
    raise MemoryError("the process has no thread-specific key left")


cdef void event_source_name(EventSource* source, const char* memory, const char* kind,
                            const char* name) noexcept nogil:
    rec_source_name(source, memory, kind, name)


cdef void event_source_open(EventSource* source, void* owner, uint32_t owner_is) noexcept nogil:
    source.owner = owner
    source.owner_is = owner_is
    rec_source_open(source)


cdef void event_source_close(EventSource* source) noexcept nogil:
    rec_source_close(source)


cdef void event_source_note(EventSource* source, const RecEvent* event, bint may_wait,
                            RecNoted* noted) noexcept nogil:
    rec_note(source, event, may_wait, noted)


cdef uint16_t thread_set_tag(uint16_t tag) noexcept nogil:
    cdef RecThread* thread = rec_thread()
    cdef uint16_t before
    if thread == NULL:
        return 0
    before = thread.tag
    thread.tag = tag
    return before


cdef uint8_t thread_set_framework(uint8_t framework) noexcept nogil:
    cdef RecThread* thread = rec_thread()
    cdef uint8_t before
    if thread == NULL:
        return 0
    before = thread.framework
    thread.framework = framework
    return before


cdef Recorder* recorder_ring(uint64_t slots, uint32_t sampling) noexcept nogil:
    return rec_make_ring(slots, sampling)


cdef Recorder* recorder_file(int file, uint32_t sampling, int* code) noexcept nogil:
    return rec_make_file(file, sampling, code)


cdef int recorder_begin(Recorder* recorder, EventSource* only) noexcept nogil:
    return rec_begin(recorder, only)


cdef void recorder_end(Recorder* recorder) noexcept nogil:
    rec_end(recorder)


cdef int recorder_finish_file(Recorder* recorder) noexcept nogil:
    return rec_finish_file(recorder)


cdef void recorder_free(Recorder* recorder) noexcept nogil:
    rec_free(recorder)


cdef void recorder_define(Recorder* recorder, uint32_t what, uint32_t number, const char* text,
                          size_t length) noexcept nogil:
    rec_define(recorder, what, number, text, length)


cdef bint recorder_read_ring(const Recorder* recorder, uint64_t number,
                             uint64_t* words) noexcept nogil:
    return rec_read_ring(recorder, number, words)


cdef void recorder_set_stacks(uint16_t (*number)() noexcept nogil) noexcept nogil:
    global rec_stack
    rec_stack = number


cdef int32_t recorder_thread_id(uint16_t number) noexcept nogil:
    return rec_thread_ids[number]


cdef void event_sources_visit(void (*visit)(EventSource* source, void* context) noexcept nogil,
                              void* context) noexcept nogil:
    rec_visit(visit, context)
