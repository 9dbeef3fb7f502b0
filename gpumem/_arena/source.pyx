"""Memory of a user's source under an arena; see _arena/source.pxd.

Callables get the interpreter lock, which is safe because no thread waits for a grow lock while
holding it. Their exceptions are kept until the status has reached the calling thread.
"""

import threading

cimport cython
from cpython.ref cimport Py_DECREF, Py_INCREF
from libc.stdint cimport uint64_t, uintptr_t

from gpumem._buffer cimport MemoryResource
from gpumem._native.arena.api cimport arena_backing, ArenaCore
from gpumem._native.backing cimport Backing, backing_init, pages_exist
from gpumem._native.bfc cimport QUANTUM
from gpumem._native.driver cimport (
    context_is_dead, CU_MEMORYTYPE_DEVICE, CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL,
    CU_POINTER_ATTRIBUTE_DEVICE_POINTER, CU_POINTER_ATTRIBUTE_IS_MANAGED,
    CU_POINTER_ATTRIBUTE_MEMORY_TYPE, CUDA_ERROR_DEINITIALIZED, CUDA_ERROR_OUT_OF_MEMORY,
    CUDA_ERROR_UNKNOWN, CUDA_SUCCESS, CUdeviceptr, CUpointer_attribute, CUresult, DeviceContext,
    DriverDevice, pointer_attribute,
)
from gpumem._support.instances cimport forbid_instantiation
from gpumem._support.process cimport call_unraisable

from gpumem._buffer.stream import Stream
from gpumem._buffer.transport import hold
from gpumem._support.sizes import exact_size
from gpumem.device import MemoryKind
from gpumem.errors import ConfigError, GpumemError, SourceError


# Addresses end here on every machine that CUDA runs on.
cdef uint64_t END_OF_ADDRESSES = <uint64_t>1 << 56


# ---- the argument of Arena -----------------------------------------------------------------------

cdef Source make_source(MemoryResource arena, object config, object given):
    cdef Source source
    if given is None:
        return None
    if config.backing == "virtual":
        raise ConfigError("invalid backing = 'virtual' with a source: a source supplies "
                          "regions")
    source = Source.__new__(Source)
    source.given = given
    source.memory = arena.memory
    source.driver_device = arena.driver_device
    source.held = {}
    source.errors = {}
    # A resource has allocate() too, but with streams: it is wrapped before callables are read.
    if isinstance(given, MemoryResource):
        given = upstream_of(arena, given)
    if isinstance(given, tuple):
        read_functions(source, given)
    else:
        source.allocate = callable_of(given, "allocate")
        source.free = callable_of(given, "free")
    return source


cdef object upstream_of(MemoryResource arena, MemoryResource resource):
    below, memory = resource.memory, arena.memory
    if (below.device, below.kind) != (memory.device, memory.kind):
        raise ConfigError(f"invalid source = {resource!r} for an arena on {memory}: expected "
                          "a resource of the same memory")
    return Upstream(resource)


cdef int read_functions(Source source, tuple pair) except -1:
    if len(pair) != 2 or not all(type(one) is int and 0 < one < 1 << 64 for one in pair):
        raise TypeError(f"source = {pair!r} is not a pair of addresses of C functions")
    source.c_allocate = <AllocateFunction><uintptr_t>pair[0]
    source.c_free = <FreeFunction><uintptr_t>pair[1]
    return 0


cdef object callable_of(object given, str name):
    method = getattr(given, name, None)
    if not callable(method):
        raise TypeError(f"source = {given!r} has no {name}(): expected an object with "
                        "allocate(nbytes) and free(address, nbytes), a MemoryResource, or the "
                        "addresses of two C functions")
    return method


@cython.embedsignature(False)     # its functions have signatures
class Upstream:
    """A resource as a source: each region of the arena is one of its buffers.

    Buffers are allocated and freed on a stream of the source's own. It is synchronised after an
    allocation, so that every stream of the arena may use the region at once.
    """

    def __init__(self, resource):
        self.resource = resource
        self.stream = Stream(resource.memory.device)
        self.buffers = {}

    def allocate(self, nbytes):
        """Return the address of a new buffer of the resource."""
        buffer = self.resource.allocate(nbytes, self.stream)
        self.stream.synchronize()
        # More than one only if the resource returns an address twice: the first is in use. Held,
        # because the resource does not know of the blocks in it, and may be an arena that sleeps.
        self.buffers.setdefault(buffer.ptr, []).append((buffer, hold(buffer)))
        return buffer.ptr

    def free(self, address, nbytes):
        """Close the buffer: its users are done."""
        for buffer, held in self.buffers.pop(address):
            held.release()
            buffer.close()


# ---- calling it ----------------------------------------------------------------------------------

@cython.final
@cython.no_gc_clear
cdef class Source:
    """One source of one arena."""

    cdef CUresult reserve(self, uint64_t size, uint64_t* address) noexcept:
        thread = threading.get_ident()
        # Per thread: the status reaches the calling thread without the exception.
        self.errors.pop(thread, None)
        self.caller = thread
        try:
            self.take(size, address)
        except MemoryError as refusal:
            self.errors[thread] = refusal
            return CUDA_ERROR_OUT_OF_MEMORY
        except BaseException as error:
            self.errors[thread] = error
            return CUDA_ERROR_UNKNOWN
        finally:
            self.caller = None
        return CUDA_SUCCESS if address[0] else CUDA_ERROR_OUT_OF_MEMORY

    cdef int take(self, uint64_t size, uint64_t* address) except -1:
        """Call the source for a region; address 0: it has none."""
        cdef void* pointer
        address[0] = 0
        if self.allocate is None:
            with nogil:
                pointer = self.c_allocate(size)
            given = <uintptr_t>pointer
        else:
            given = self.allocate(size)
        if given is None:
            return 0
        if isinstance(given, bool) or not hasattr(given, "__index__"):
            raise SourceError(f"{self.given!r} gave {given!r} for {exact_size(size)}: expected "
                              "an address, or None")
        given = given.__index__()
        if given == 0:
            return 0
        wrong = self.overlap_of(given, size)
        if wrong:
            # It is not freed: the source would release memory that the arena allocates from.
            raise SourceError(f"{self.given!r} gave {given:#x} for {exact_size(size)}, which "
                              f"{wrong}")
        wrong = self.what_is_wrong(given, size)
        if wrong:
            # The source keeps its own count, so a region is freed also if it is unusable.
            self.give_unusable(given, size)
            raise SourceError(f"{self.given!r} gave {given:#x} for {exact_size(size)}, which "
                              f"{wrong}")
        # Recorded before the arena has it, so that an overlap with the next region is found.
        self.held[given] = size
        address[0] = given
        return 0

    def overlap_of(self, given, size):
        """Return what a region shares with one that the arena has, "" if nothing."""
        for address, nbytes in self.held.items():
            if given < address + nbytes and address < given + size:
                return f"overlaps {exact_size(nbytes)} at {address:#x} that it gave before"
        return ""

    def what_is_wrong(self, given, size):
        """Return why a region is not usable, "" if it is."""
        if not 0 < given <= END_OF_ADDRESSES - size:
            return "is not an address"
        if given % QUANTUM:
            return f"is not a multiple of {QUANTUM}"
        if self.memory.kind is MemoryKind.HOST:
            return "" if pages_exist(given, size) else "is not all mapped"
        # The first and the last byte: one driver call for each page would take too long.
        for byte in (given, given + size - 1):
            if not is_memory_of(self.driver_device, self.memory.kind, byte):
                return f"is not {self.memory.kind.value} memory of {self.memory.device}"
        return ""

    def give_unusable(self, address, size):
        """Free a region that was not accepted; a failure must not hide the reason."""
        if 0 < address < 1 << 64:
            self.give(address, size)

    cdef int give(self, uint64_t address, uint64_t size) noexcept:
        # A failure has no caller: a shrink, a close or a finalizer goes on.
        if self.free is None:
            with nogil:
                self.c_free(<void*><uintptr_t>address, size)
        else:
            call_unraisable(self.free, (address, size), self.given)
        return 0

    cdef void release(self, uint64_t address, uint64_t size) noexcept:
        self.held.pop(address, None)
        # A release may happen inside a reserve of the same thread: the outer caller is restored.
        self.caller, before = threading.get_ident(), self.caller
        self.give(address, size)
        self.caller = before

    cdef bint is_inside(self) except -1:
        # Another thread may call the arena at the same time; it waits for the grow lock.
        return self.caller is not None and self.caller == threading.get_ident()

    cdef int require_outside(self) except -1:
        if self.is_inside():
            raise GpumemError(f"{self.given!r} calls the arena that it is the source of, which is "
                              "waiting for it")
        return 0


cdef bint is_memory_of(DriverDevice driver_device, object kind, CUdeviceptr byte):
    """Tell whether the driver reports a byte as this kind of memory of the device."""
    # The type alone would accept another device's memory.
    if kind is MemoryKind.DEVICE:
        return (attribute_of(driver_device, CU_POINTER_ATTRIBUTE_MEMORY_TYPE, byte)
                == <int>CU_MEMORYTYPE_DEVICE
                and attribute_of(driver_device, CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL, byte)
                == <uint64_t>driver_device.ordinal)
    if kind is MemoryKind.MANAGED and not attribute_of(
            driver_device, CU_POINTER_ATTRIBUTE_IS_MANAGED, byte):
        return False
    return attribute_of(driver_device, CU_POINTER_ATTRIBUTE_DEVICE_POINTER, byte) == byte


cdef uint64_t attribute_of(DriverDevice driver_device, CUpointer_attribute which,
                           CUdeviceptr byte) noexcept:
    """Return an attribute of an address; all ones where the driver has none."""
    cdef uint64_t value
    cdef CUresult code = pointer_attribute(&driver_device.context, which, byte, &value)
    return value if code == CUDA_SUCCESS else <uint64_t>-1


# ---- the backing ---------------------------------------------------------------------------------

cdef void source_init(Backing* backing, DeviceContext* context) noexcept:
    # The driver keeps the functions that a source does not provide.
    backing_init(backing, context)
    backing.reserve = source_reserve
    backing.release = source_release
    backing.forget = source_forget
    backing.waits = False
    backing.call = "a source"


cdef void source_keep(Backing* backing, Source source) noexcept:
    Py_INCREF(source)
    backing.source = <void*>source


cdef CUresult source_reserve(Backing* self, uint64_t size, uint64_t* address) noexcept nogil:
    with gil:
        return (<Source>self.source).reserve(size, address)


cdef CUresult source_release(Backing* self, uint64_t address, uint64_t size) noexcept nogil:
    # In a fork's child the memory is the parent's.
    if context_is_dead(self.context):
        return CUDA_ERROR_DEINITIALIZED
    # The grow lock is held; see the top of this file.
    with gil:
        (<Source>self.source).release(address, size)
    return CUDA_SUCCESS


cdef void source_forget(Backing* self) noexcept nogil:
    if self.source == NULL:
        return
    with gil:
        Py_DECREF(<Source>self.source)
        self.source = NULL


cdef object source_error(ArenaCore* core):
    if arena_backing(core).source == NULL:
        return None
    # Once: an exception would keep its frames alive.
    return (<Source>arena_backing(core).source).errors.pop(threading.get_ident(), None)


forbid_instantiation(Source)
