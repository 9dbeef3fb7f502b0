"""Calls of the two methods that users write."""

from libc.stdint cimport uint64_t

from gpumem._support.deferred cimport report_unraisable


cdef int require_raw_methods(object cls, object base) except -1:
    if cls.allocate is not base.allocate:
        return 0    # it hands out what another resource made
    for method in ("allocate_raw", "deallocate_raw"):
        if getattr(cls, method) is getattr(base, method):
            raise TypeError(f"{cls.__name__} has no {method}: a class of MemoryResource writes "
                            "allocate_raw and deallocate_raw")
    return 0


cdef uint64_t user_allocate(object resource, uint64_t size, object stream) except 0:
    cdef uint64_t alignment = resource.memory.alignment
    given = resource.allocate_raw(size, stream)
    where = f"{type(resource).__name__}.allocate_raw({size}, ...) returned"
    if isinstance(given, bool) or not hasattr(given, "__index__"):
        raise TypeError(f"{where} {given!r}: it returns an address as an integer, or raises "
                        "MemoryError")
    number = given.__index__()
    if not 0 < number < 1 << 64:
        raise ValueError(f"{where} {number}: it returns an address from 1 to 2**64 - 1, or "
                         "raises MemoryError")
    if number % alignment:
        user_deallocate(resource, number, size, stream)
        raise ValueError(f"{where} {number:#x}, which is not a multiple of {alignment}, "
                         "the alignment that its memory promises")
    return number


cdef int user_deallocate(object resource, uint64_t address, uint64_t size, object stream) noexcept:
    try:
        resource.deallocate_raw(address, size, stream)
    except BaseException as error:
        report_unraisable(error, resource)
    return 0
