"""The driver calls behind each kind of import. Each undoes what it did if a later step fails.

A function takes a duplicate of the caller's descriptor. cuImportExternalMemory owns a descriptor
once it succeeded, then the duplicate forgets its number; every other call leaves it to the
duplicate, whose end closes it.
"""

import errno
import os

from cpython.object cimport PyObject
from cpython.ref cimport Py_INCREF
from libc.errno cimport errno as c_errno
from libc.stdint cimport uint64_t, uintptr_t
from libc.string cimport memset

from gpumem._driver cimport (
    CU_MEM_ACCESS_FLAGS_PROT_READ,
    CU_MEM_ACCESS_FLAGS_PROT_READWRITE,
    CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR,
    CU_MEM_LOCATION_TYPE_DEVICE,
    CU_MEMHOSTREGISTER_DEVICEMAP,
    CU_MEMHOSTREGISTER_PORTABLE,
    CU_MEMHOSTREGISTER_READ_ONLY,
    CUDA_EXTERNAL_MEMORY_BUFFER_DESC,
    CUDA_EXTERNAL_MEMORY_DEDICATED,
    CUDA_EXTERNAL_MEMORY_HANDLE_DESC,
    CUDA_SUCCESS,
    CUdeviceptr,
    CUexternalMemoryHandleType,
    CUmemAccessDesc,
    CUmemAllocationProp,
    CUresult,
    CUstreamCaptureMode,
    DriverDevice,
    Place,
    check,
    place_enter,
    place_leave,
    place_relax,
    place_restore,
)
from gpumem._handle cimport Handle
from gpumem._support.memory cimport MAP_FAILED, MAP_SHARED, PROT_READ, PROT_WRITE, mmap
from gpumem.interop._mapping cimport Mapping, mapping_end, mapping_new
from gpumem.interop._memory cimport external_memory

from gpumem.device import MemoryInfo, MemoryKind
from gpumem.errors import AlignmentError, BadHandleError, DeviceMismatchError

cdef extern from "<string.h>" nogil:
    char* strerror(int number)

cdef enum:
    PAGE = 4096                     # bytes; of the CPU's own pages


# ---- memory of a graphics driver -----------------------------------------------------------------

def import_external(wanted, int driver_type, Handle file, start=0):
    """Import an allocation by the driver's external memory, and map it whole.

    `start` is how many bytes of the file come before the allocation.
    """
    cdef DriverDevice place = wanted.device._open()
    cdef CUDA_EXTERNAL_MEMORY_HANDLE_DESC handle
    memset(&handle, 0, sizeof(handle))
    handle.type = <CUexternalMemoryHandleType>driver_type
    handle.handle.fd = file.fileno()
    return map_external(wanted, place, &handle, file, start)


def import_windows(wanted, int driver_type, Handle handle):
    """The same by an NT handle, or by a name where `handle` is None; the handle stays ours."""
    cdef DriverDevice place = wanted.device._open()
    cdef CUDA_EXTERNAL_MEMORY_HANDLE_DESC given
    cdef bytes name
    memset(&given, 0, sizeof(given))
    given.type = <CUexternalMemoryHandleType>driver_type
    if handle is None:
        name = wanted.descriptor.handle.encode("utf-16-le") + b"\0\0"
        given.handle.win32.name = <const char*>name
    else:
        given.handle.win32.handle = <void*><uintptr_t><int>handle.fileno()
    return map_external(wanted, place, &given, None, 0)


cdef object map_external(object wanted, DriverDevice place,
                         CUDA_EXTERNAL_MEMORY_HANDLE_DESC* handle, Handle file, uint64_t start):
    cdef Mapping* mapping = new_mapping(place, wanted.descriptor.size)
    cdef CUDA_EXTERNAL_MEMORY_BUFFER_DESC all_of_it
    cdef CUstreamCaptureMode before
    cdef CUresult code
    cdef const char* call = "cuImportExternalMemory"
    memset(&all_of_it, 0, sizeof(all_of_it))
    all_of_it.offset = start
    all_of_it.size = mapping.nbytes
    handle.size = start + mapping.nbytes
    if wanted.dedicated:
        handle.flags = CUDA_EXTERNAL_MEMORY_DEDICATED
    with nogil:
        code = place_enter(&place.place)
        if code == CUDA_SUCCESS:
            before = place_relax(&place.place)
            code = place.place.table.cuImportExternalMemory(&mapping.external, handle)
            if code == CUDA_SUCCESS:
                call = "cuExternalMemoryGetMappedBuffer"
                code = place.place.table.cuExternalMemoryGetMappedBuffer(
                    &mapping.buffer, mapping.external, &all_of_it)
            place_restore(&place.place, before)
            place_leave(&place.place)
    if mapping.external != NULL and file is not None:
        file.fd = -1                # the driver's now
    finish(mapping, place, code, call)
    mapping.address = mapping.buffer
    return external_memory(wanted.descriptor, wanted.memory, mapping)


# ---- physical memory of the driver's virtual memory management -----------------------------------

def import_physical(wanted, Handle file):
    """Import a physical allocation and map it whole."""
    cdef DriverDevice place = wanted.device._open()
    cdef Mapping* mapping = new_mapping(place, wanted.descriptor.size)
    cdef CUmemAllocationProp prop
    cdef CUresult code
    cdef const char* call = NULL
    cdef int fd = file.fileno()
    cdef bint read_only = wanted.descriptor.read_only
    memset(&prop, 0, sizeof(prop))
    with nogil:
        code = import_physical_here(mapping, fd, read_only, &prop, &call)
    if mapping.physical and prop.location.type == CU_MEM_LOCATION_TYPE_DEVICE and (
            prop.location.id != place.place.device):
        mapping_free(mapping)
        raise DeviceMismatchError(f"this memory lies on device {prop.location.id}, not on "
                                  f"{wanted.device}")
    finish(mapping, place, code, call)
    memory = wanted.memory
    if prop.location.type != CU_MEM_LOCATION_TYPE_DEVICE:
        memory = MemoryInfo(wanted.device, MemoryKind.HOST_ACCESSIBLE)
    return external_memory(wanted.descriptor, memory, mapping)


cdef CUresult import_physical_here(Mapping* mapping, int fd, bint read_only,
                                   CUmemAllocationProp* prop, const char** call) noexcept nogil:
    cdef Place* place = mapping.place
    cdef CUresult code = place_enter(place)
    cdef CUstreamCaptureMode before
    if code != CUDA_SUCCESS:
        return code
    before = place_relax(place)
    call[0] = "cuMemImportFromShareableHandle"
    code = place.table.cuMemImportFromShareableHandle(
        &mapping.physical, <void*><uintptr_t>fd, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR)
    if code == CUDA_SUCCESS:
        call[0] = "cuMemGetAllocationPropertiesFromHandle"
        code = place.table.cuMemGetAllocationPropertiesFromHandle(prop, mapping.physical)
    if code == CUDA_SUCCESS:
        call[0] = "cuMemAddressReserve"
        code = place.table.cuMemAddressReserve(&mapping.address, mapping.nbytes, 0, 0, 0)
    if code == CUDA_SUCCESS:
        mapping.range_bytes = mapping.nbytes
        call[0] = "cuMemMap"
        code = place.table.cuMemMap(mapping.address, mapping.nbytes, 0, mapping.physical, 0)
    if code == CUDA_SUCCESS:
        mapping.is_mapped = True
        call[0] = "cuMemSetAccess"
        code = allow(mapping, prop, read_only)
    place_restore(place, before)
    place_leave(place)
    return code


cdef CUresult allow(Mapping* mapping, const CUmemAllocationProp* prop,
                    bint read_only) noexcept nogil:
    # Memory of a CPU's node is the CPU's to reach, too.
    cdef CUmemAccessDesc access[2]
    access[0].location.type = CU_MEM_LOCATION_TYPE_DEVICE
    access[0].location.id = mapping.place.device
    access[0].flags = CU_MEM_ACCESS_FLAGS_PROT_READWRITE
    if read_only:
        access[0].flags = CU_MEM_ACCESS_FLAGS_PROT_READ
    access[1].location = prop.location
    access[1].flags = access[0].flags
    return mapping.place.table.cuMemSetAccess(
        mapping.address, mapping.nbytes, access,
        1 if prop.location.type == CU_MEM_LOCATION_TYPE_DEVICE else 2)


# ---- host memory ---------------------------------------------------------------------------------

def import_file(wanted, Handle file):
    """Map a file in memory, shared, and make its pages known to the driver."""
    cdef DriverDevice place = wanted.device._open()
    cdef Mapping* mapping
    cdef bint read_only = wanted.descriptor.read_only
    cdef void* pages
    cdef int number
    require_bytes(file, wanted.descriptor.size)
    mapping = new_mapping(place, wanted.descriptor.size)
    pages = mmap(NULL, mapping.nbytes, PROT_READ if read_only else PROT_READ | PROT_WRITE,
                 MAP_SHARED, file.fileno(), 0)
    if pages == MAP_FAILED:
        number = c_errno
        mapping_free(mapping)
        raise BadHandleError(number, f"descriptor cannot be mapped "
                             f"{'to read' if read_only else 'to write'}: "
                             f"{strerror(number).decode()}")
    mapping.address = <uintptr_t>pages
    mapping.file_bytes = mapping.nbytes
    return register(wanted, place, mapping)


def import_host(wanted, address, owner):
    """Make pages of this process known to the driver."""
    cdef DriverDevice place = wanted.device._open()
    cdef Mapping* mapping
    if address % PAGE:
        raise AlignmentError(f"address {address:#x} of a HOST_ALLOCATION is not a multiple of a "
                             f"page's {PAGE} bytes")
    mapping = new_mapping(place, wanted.descriptor.size)
    mapping.address = address
    if owner is not None:
        Py_INCREF(owner)
        mapping.owner = <PyObject*>owner
    return register(wanted, place, mapping)


cdef object register(object wanted, DriverDevice place, Mapping* mapping):
    cdef unsigned int flags = CU_MEMHOSTREGISTER_PORTABLE | CU_MEMHOSTREGISTER_DEVICEMAP
    cdef CUdeviceptr seen = 0
    cdef CUstreamCaptureMode before
    cdef CUresult code
    cdef const char* call = "cuMemHostRegister"
    if wanted.descriptor.read_only:
        flags |= CU_MEMHOSTREGISTER_READ_ONLY
    with nogil:
        code = place_enter(&place.place)
        if code == CUDA_SUCCESS:
            before = place_relax(&place.place)
            code = place.place.table.cuMemHostRegister(<void*>mapping.address, mapping.nbytes,
                                                       flags)
            mapping.is_registered = code == CUDA_SUCCESS
            if code == CUDA_SUCCESS:
                call = "cuMemHostGetDevicePointer"
                code = place.place.table.cuMemHostGetDevicePointer(
                    &seen, <void*>mapping.address, 0)
            place_restore(&place.place, before)
            place_leave(&place.place)
    finish(mapping, place, code, call)
    if seen != mapping.address:
        mapping_free(mapping)
        raise DeviceMismatchError(f"{wanted.device} sees these pages at another address than the "
                                  "CPU")
    return external_memory(wanted.descriptor, wanted.memory, mapping)


# ---- another resource's --------------------------------------------------------------------------

def import_buffer(wanted, buffer):
    """Take a Buffer for the memory; it is kept until the last view is gone."""
    cdef Mapping* mapping = new_mapping(wanted.device._open(), wanted.descriptor.size)
    mapping.address = buffer.ptr
    Py_INCREF(buffer)
    mapping.owner = <PyObject*>buffer
    return external_memory(wanted.descriptor, wanted.memory, mapping)


# ---- what they share -----------------------------------------------------------------------------

cdef Mapping* new_mapping(DriverDevice place, uint64_t nbytes) except NULL:
    cdef Mapping* mapping = mapping_new(&place.place, nbytes)
    if mapping == NULL:
        raise MemoryError("no host memory for an import's books")
    return mapping


cdef void mapping_free(Mapping* mapping) noexcept:
    cdef const char* call = NULL
    with nogil:
        mapping_end(mapping, &call)


cdef int finish(Mapping* mapping, DriverDevice place, CUresult code, const char* call) except -1:
    """Undo an import that failed, and raise."""
    if code != CUDA_SUCCESS:
        mapping_free(mapping)
        check(place.place.table, code, call.decode())
    return 0


def require_bytes(Handle file, size):
    """Raise BadHandleError for a file that is smaller than it is said to be."""
    try:
        there = os.fstat(file.fileno()).st_size
    except OSError as error:
        raise BadHandleError(error.errno, error.strerror) from None
    if there < size:
        raise BadHandleError(errno.EINVAL, f"the descriptor's file has {there} bytes, not {size}")
