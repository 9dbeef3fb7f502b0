"""Allocators that libraries call from Python, for streams of their own.

`Blocks` is for libraries that free by address. `CupyAllocator` makes CuPy's objects: CuPy expects a
MemoryPointer to a memory object. Here that is an UnownedMemory, with the `gpumem.Buffer` as owner.
The array owns the pointer, which owns the memory, which owns the buffer; the end of the last of
them frees the block on the stream for which it was allocated.
"""

import gc

cimport cython
from cpython.object cimport PyObject, PyTypeObject
from cpython.pycapsule cimport PyCapsule_GetPointer, PyCapsule_IsValid
from cpython.ref cimport Py_DECREF, Py_INCREF
from libc.stdint cimport int32_t, intptr_t, uint64_t, uint8_t, uintptr_t

from gpumem._arena cimport Arena, arena_bad_free, arena_take_on, arena_take_on_legacy
from gpumem._buffer cimport Buffer, MemoryResource, ResourceBase, size_of, Stream
from gpumem._native.arena.api cimport arena_events
from gpumem._support.events cimport FRAMEWORK_CUPY, is_recorded, thread_set_framework
from gpumem._support.process cimport report_unraisable
from gpumem._support.streams cimport LEGACY_STREAM

from gpumem.errors import ClosedError, InvalidFreeError, OutOfMemoryError


cdef extern from "Python.h":
    ctypedef object (*newfunc)(PyTypeObject*, PyObject*, PyObject*)
    ctypedef struct PyTypeObjectOpen "PyTypeObject":
        newfunc tp_new

cdef enum:
    MAX_QUICK_DEVICES = 64      # devices with a resource that is found without a dict
    HEAD_BYTES = 16             # of every object: reference count and type


cdef inline Buffer allocate_on(MemoryResource resource, uint64_t nbytes, Stream stream):
    # `stream` is None for the legacy default stream.
    if type(resource) is not Arena:
        return resource.allocate(nbytes, 0 if stream is None else stream)
    if stream is None:
        return arena_take_on_legacy(<Arena>resource, nbytes)
    return arena_take_on(<Arena>resource, nbytes, stream)


cdef inline Stream view_of(ResourceBase resource, object owner, uintptr_t handle, Stream last):
    # The library's stream object is the owner, so that its stream lives while memory is marked with
    # it. `last` is the view of the caller's last call, and mostly the right one.
    if (last is None or last.owner is not owner
            or last.driver_device is not resource.driver_device):
        return Stream.from_handle(resource.memory.device, handle, owner)
    return last


# ---- blocks by address ---------------------------------------------------------------------------

@cython.final
cdef class Blocks:
    """The live blocks of one resource, by address.

    Parameters
    ----------
    find : callable
        Returns the resource; called once, at the first block.
    """

    cdef object find
    cdef MemoryResource found
    cdef dict live              # address -> Buffer
    cdef Stream last_stream     # of the last call; its owner is the caller's stream object

    def __init__(self, find):
        self.find = find
        self.live = {}

    @property
    def resource(self):
        """The resource that allocates the blocks."""
        return self.source()

    def __len__(self):
        return len(self.live)

    def __contains__(self, address):
        return address in self.live

    def allocate(self, nbytes, stream):
        """Return the address of a block for work on a stream; 0 for no bytes.

        Parameters
        ----------
        nbytes : int
        stream : object with ``__cuda_stream__``
            Kept alive while memory is marked with it. While it captures, a graph pool serves it.

        Raises
        ------
        OutOfMemoryError, ClosedError, TypeError, ValueError
            As the resource's `allocate`.
        """
        cdef MemoryResource resource = self.source()
        cdef uint64_t size = size_of(nbytes, resource)
        cdef Buffer buffer
        if size == 0:
            return 0
        buffer = allocate_on(resource, size, self.stream_of(resource, stream))
        self.live[buffer.address] = buffer
        return buffer.address

    def free(self, address, stream):
        """Free the block that begins at an address, on a stream.

        Raises
        ------
        InvalidFreeError
            No block begins there.
        """
        cdef Buffer buffer
        if not address:
            return
        buffer = self.live.get(address)
        if buffer is None:
            if type(self.source()) is Arena:
                arena_bad_free(<Arena>self.found, address)
            raise InvalidFreeError(f"no block of {self.source()!r} begins at {address:#x}")
        try:
            named = self.stream_of(buffer.resource, stream)
            # Before the free: after it the address may be allocated again at once. Reading the
            # stream may have run other code, which has freed the block.
            if self.live.get(address) is buffer:
                del self.live[address]
            buffer.close(0 if named is None else named)
        except ClosedError:
            pass        # at exit, or in a fork's child, the driver releases blocks

    def deallocate(self, address, nbytes, stream):
        """Do as `free`, but report an exception instead of raising it: RMM's callback."""
        try:
            self.free(address, stream)
        except BaseException as error:
            report_unraisable(error, self)

    cdef MemoryResource source(self):
        if self.found is None:
            self.found = self.find()
        return self.found

    cdef Stream stream_of(self, ResourceBase resource, object stream):
        """Return gpumem's view of a stream; None for the legacy default stream."""
        cdef uintptr_t handle = stream.__cuda_stream__()[1]
        if handle <= LEGACY_STREAM:
            return None
        self.last_stream = view_of(resource, stream, handle, self.last_stream)
        return self.last_stream


# ---- CuPy's objects -----------------------------------------------------------------------------

# CuPy's own functions, by the signatures that its compiled modules export them with.
ctypedef int (*DeviceFunction)(int) except? -1
ctypedef intptr_t (*StreamFunction)(int) except? -1
cdef char* DEVICE_SIGNATURE = "int (int __pyx_skip_dispatch)"
cdef char* STREAM_SIGNATURE = "intptr_t (int)"


@cython.final
cdef class CurrentStream:
    """Reads CuPy's current device and stream, by its C functions or by its Python functions."""

    cdef DeviceFunction device_function
    cdef StreamFunction stream_function
    cdef object get_device_id       # the Python functions, if there are no C functions
    cdef object get_stream

    def __init__(self, get_device_id, get_stream, capsules=None):
        self.get_device_id = get_device_id
        self.get_stream = get_stream
        device, stream = capsules or (None, None)
        if (device is not None and PyCapsule_IsValid(device, DEVICE_SIGNATURE)
                and stream is not None and PyCapsule_IsValid(stream, STREAM_SIGNATURE)):
            self.device_function = <DeviceFunction>PyCapsule_GetPointer(device, DEVICE_SIGNATURE)
            self.stream_function = <StreamFunction>PyCapsule_GetPointer(stream, STREAM_SIGNATURE)

    @property
    def compiled(self):
        """Whether CuPy's C functions are used."""
        return self.device_function != NULL

    cdef int device(self) except -1:
        if self.device_function != NULL:
            return self.device_function(0)
        return self.get_device_id()

    cdef intptr_t stream(self, int device) except? -1:
        if self.stream_function != NULL:
            return self.stream_function(device)
        return self.get_stream(device).ptr


# The layouts of CuPy's two classes; `PointerMaker` checks them.
cdef struct UnownedMemoryLayout:
    char[HEAD_BYTES] head
    intptr_t ptr
    size_t size
    int32_t device_id
    PyObject* owner

cdef struct MemoryPointerLayout:
    char[HEAD_BYTES] head
    void* methods
    intptr_t ptr
    int32_t device_id
    PyObject* memory


@cython.final
cdef class PointerMaker:
    """Makes CuPy's MemoryPointer over an UnownedMemory.

    It calls the two classes. If their objects have the layouts above, it fills in objects that
    CuPy's own tp_new made instead, which takes a quarter of the time.
    """

    cdef object memory_type
    cdef object pointer_type
    cdef bint known                     # the layouts hold

    def __init__(self, memory_type, pointer_type):
        self.memory_type = memory_type
        self.pointer_type = pointer_type
        self.known = self.has_layouts()

    @property
    def fills_in(self):
        """Whether objects are filled in, without a call of their classes."""
        return self.known

    cdef bint has_layouts(self) except -1:
        """Compare an object of each class with its layout, with a different value in each field."""
        cdef UnownedMemoryLayout* memory
        cdef MemoryPointerLayout* pointer
        cdef uint64_t ptr = 1 << 40
        cdef uint64_t size = 1 << 41
        cdef int device = 77
        for kind in (self.memory_type, self.pointer_type):
            if (not isinstance(kind, type) or kind.__itemsize__ or kind.__dictoffset__
                    or kind.__basicsize__ != sizeof(MemoryPointerLayout)):
                return False
        owner = object()
        inner = self.memory_type(ptr, size, owner, device)
        outer = self.pointer_type(inner, 0)
        memory = <UnownedMemoryLayout*><PyObject*>inner
        pointer = <MemoryPointerLayout*><PyObject*>outer
        return (<uint64_t>memory.ptr == ptr and memory.size == size and memory.device_id == device
                and memory.owner == <PyObject*>owner and <uint64_t>pointer.ptr == ptr
                and pointer.device_id == device and pointer.memory == <PyObject*>inner)

    cdef object make(self, Buffer buffer, int device):
        cdef UnownedMemoryLayout* memory
        cdef MemoryPointerLayout* pointer
        if not self.known:
            inner = self.memory_type(buffer.address, buffer.requested_bytes, buffer, device)
            return self.pointer_type(inner, 0)
        inner = new(self.memory_type)
        memory = <UnownedMemoryLayout*><PyObject*>inner
        memory.ptr = buffer.address
        memory.size = buffer.requested_bytes
        memory.device_id = device
        put(&memory.owner, buffer)
        outer = new(self.pointer_type)
        pointer = <MemoryPointerLayout*><PyObject*>outer
        pointer.ptr = buffer.address
        pointer.device_id = device
        put(&pointer.memory, inner)
        return outer


cdef inline void put(PyObject** field, object value) noexcept:
    # tp_new has set the field to None: the reference to None ends here.
    Py_INCREF(value)
    before = <object>field[0]
    field[0] = <PyObject*>value
    Py_DECREF(before)


cdef tuple nothing = ()


cdef inline object new(object kind):
    return (<PyTypeObjectOpen*><PyObject*>kind).tp_new(
        <PyTypeObject*><PyObject*>kind, <PyObject*>nothing, NULL)


@cython.final
cdef class CupyAllocator:
    """CuPy's allocator function over gpumem's resources; made by `gpumem.integrations.cupy`.

    `malloc` is the function that CuPy calls. Its memory belongs to the stream that is current in
    CuPy, and is freed on that stream.
    """

    cdef readonly object resources      # of `gpumem.integrations._common.resources`
    cdef CurrentStream current
    cdef PointerMaker maker
    cdef object no_memory               # turns gpumem's OutOfMemoryError into CuPy's
    cdef dict found                     # device -> its resource
    cdef PyObject* quick[MAX_QUICK_DEVICES]  # the same for low device numbers; `found` owns them
    cdef Stream last_stream             # CuPy's stream object that was current last, as its owner

    def __init__(self, resources, CurrentStream current not None, PointerMaker maker not None,
                 no_memory):
        self.resources = resources
        self.current = current
        self.maker = maker
        self.no_memory = no_memory
        self.found = {}

    def malloc(self, size):
        """Return a ``cupy.cuda.MemoryPointer`` to a block of `size` bytes.

        Parameters
        ----------
        size : int
            Bytes; 0 returns a null pointer.

        Raises
        ------
        TypeError, ValueError
            `size` is not a number of bytes.
        cupy.cuda.memory.OutOfMemoryError
            Memory is out, also after a garbage collection. It is a `gpumem.OutOfMemoryError` and a
            ``CUDARuntimeError`` as well.
        """
        cdef uint64_t nbytes = size_of(size, None)
        cdef int device = self.current.device()
        cdef Buffer buffer
        try:
            buffer = self.allocate(nbytes, device)
        except OutOfMemoryError:
            buffer = None
        if buffer is None:
            buffer = self.allocate_again(nbytes, device)
        return self.maker.make(buffer, device)

    cdef Buffer allocate_again(self, uint64_t nbytes, int device):
        # Arrays may be left in reference cycles; CuPy's own pool collects here, too.
        gc.collect()
        try:
            return self.allocate(nbytes, device)
        except OutOfMemoryError as error:
            refusal = error
        raise self.no_memory(refusal) from refusal

    cdef Buffer allocate(self, uint64_t nbytes, int device):
        cdef MemoryResource resource
        cdef intptr_t handle = self.current.stream(device)
        cdef uint8_t before
        if 0 <= device < MAX_QUICK_DEVICES and self.quick[device] != NULL:
            resource = <MemoryResource>self.quick[device]
        else:
            resource = self.resource_of(device)
        if type(resource) is Arena and not is_recorded(arena_events((<Arena>resource).core)):
            return self.allocate_from(resource, nbytes, device, handle)
        before = thread_set_framework(FRAMEWORK_CUPY)
        try:
            return self.allocate_from(resource, nbytes, device, handle)
        finally:
            thread_set_framework(before)

    cdef Buffer allocate_from(self, MemoryResource resource, uint64_t nbytes, int device,
                              intptr_t handle):
        cdef Stream stream = None
        if handle != 0:
            owner = self.current.get_stream(device)
            stream = view_of(resource, owner, owner.ptr, self.last_stream)
            self.last_stream = stream
        return allocate_on(resource, nbytes, stream)

    cdef MemoryResource resource_of(self, int device):
        resource = self.found.get(device)
        if resource is None:
            resource = self.found.setdefault(device, self.resources.of(device))
            if 0 <= device < MAX_QUICK_DEVICES:
                self.quick[device] = <PyObject*>resource
        return resource
