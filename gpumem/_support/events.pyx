"""The functions of include/recorder.h, with their state; see events.pxd."""

from libc.stdint cimport int32_t, uint16_t, uint32_t, uint64_t, uint8_t

from gpumem._support.contexts cimport innermost_label
from gpumem._support.process cimport process


cdef extern from "recorder.h" nogil:
    int rec_init(const uint32_t* generation, uint16_t (*label)(bint may_wait) noexcept nogil)
    void rec_source_name(EventSource*, const char* memory, const char* kind, const char* name)
    void rec_source_open(EventSource*, void* owner, uint32_t owner_is)
    void rec_source_join(EventSource*, const EventSource* other)
    void rec_source_close(EventSource*)
    void rec_note(EventSource*, const RecEvent*, bint may_wait, RecNoted*)
    uint8_t rec_set_framework(uint8_t)
    Recorder* rec_make_ring(uint64_t slots, uint32_t sampling)
    Recorder* rec_make_file(int file, uint32_t sampling, int* code)
    int rec_begin(Recorder*, EventSource* only)
    void rec_end(Recorder*)
    int rec_finish_file(const Recorder*)
    void rec_free(Recorder*)
    void rec_define(Recorder*, uint32_t what, uint32_t number, const char* text, size_t length)
    void rec_mark(Recorder*, uint32_t kind, uint64_t address, uint16_t label, uint16_t module)
    bint rec_read_ring(const Recorder*, uint64_t number, uint64_t* words)
    void rec_set_stacks(uint16_t (*number)(int native) noexcept nogil)
    int32_t rec_thread_id(uint16_t number)
    void rec_visit(void (*visit)(EventSource*, void*) noexcept nogil, void* context)

# The texts of the numbers in events: labels in the order in which they were first named, frameworks
# in that of include/recorder_types.h. 0 is none.
label_texts = [""]
FRAMEWORKS = ("", "torch", "cupy", "numba", "jax", "rmm", "cuda.core", "c", "onnxruntime",
              "virtual tensors")

if rec_init(&process.generation, innermost_label) != 0:
    raise MemoryError("the process has no thread-specific key left")

event_source_name = rec_source_name
event_source_open = rec_source_open
event_source_join = rec_source_join
event_source_close = rec_source_close
event_source_note = rec_note
event_sources_visit = rec_visit
thread_set_framework = rec_set_framework
recorder_ring = rec_make_ring
recorder_file = rec_make_file
recorder_begin = rec_begin
recorder_end = rec_end
recorder_finish_file = rec_finish_file
recorder_free = rec_free
recorder_define = rec_define
recorder_mark = rec_mark
recorder_read_ring = rec_read_ring
recorder_set_stacks = rec_set_stacks
recorder_thread_id = rec_thread_id
