"""The operations of include/atomics.h, which documents the memory order of each."""

from libc.stdint cimport int32_t, uint32_t, uint64_t, uint8_t

cdef extern from "atomics.h" nogil:
    int32_t count_add(int32_t* count, int32_t by)
    bint count_retain_live(int32_t* count)
    int32_t count_now(const int32_t* count)
    uint64_t count64_add(uint64_t* count, uint64_t by)
    uint64_t sum_add(uint64_t* total, uint64_t by)
    bint sum_try(uint64_t* total, uint64_t by, uint64_t limit)
    bint peak_try(uint64_t* peak, uint64_t* seen, uint64_t value)

    uint8_t load8(const uint8_t* word)
    void store8(uint8_t* word, uint8_t value)
    uint32_t load32(const uint32_t* word)
    void store32(uint32_t* word, uint32_t value)
    uint64_t load64(const uint64_t* word)
    void store64(uint64_t* word, uint64_t value)
    void locked_add64(uint64_t* word, uint64_t by)
    void locked_raise64(uint64_t* peak, uint64_t value)

    uint8_t published8(const uint8_t* word)
    void publish8(uint8_t* word, uint8_t value)
    uint32_t published32(const uint32_t* word)
    void publish32(uint32_t* word, uint32_t value)
    uint64_t published64(const uint64_t* word)
    void publish64(uint64_t* word, uint64_t value)
    void* published_pointer(const void* at)
    void publish_pointer(void** at, void* value)

    void version_begin(uint32_t* version)
    uint32_t version_of(const uint32_t* version)

    bint flag_take(uint32_t* flag)
    void* pointer_swap(void** at, void* value)
    bint pointer_try(void** at, void* seen, void* value)
    bint head_try(uint64_t* head, uint64_t* seen, uint64_t wanted)
    uint64_t head_take(uint64_t* head)
