"""Buffer: a block of memory and the right to it."""

from _thread import get_ident

cimport cython
from cpython.buffer cimport PyBUF_FORMAT, PyBUF_ND, PyBUF_STRIDES, PyBUF_WRITABLE
from cpython.exc cimport PyErr_Fetch, PyErr_Restore
from cpython.object cimport PyObject, PyTypeObject
from libc.stdint cimport int64_t, uint32_t, uint64_t, uintptr_t

from gpumem._buffer.dlpack cimport (
    call_first, DL_CPU, dlpack_bytes, dlpack_check_stream, dlpack_device_from, dlpack_read_call,
    dlpack_wants_versioned, DLDevice, DLPackCall, same_device, vectorcall,
)
from gpumem._buffer.ledger cimport (
    DEFAULT_SLOT, ledger_drop_slot, ledger_find_stream, ledger_is_vacant, ledger_lease, ledger_move,
    ledger_retain_slot, ledger_stream, LedgerBlock,
)
from gpumem._buffer.stream cimport order_stream, order_view, Stream, stream_handle
from gpumem._native.backing cimport HOST_SIDE, managed_advise, managed_prefetch
from gpumem._native.driver cimport (
    check, context_is_dead, CU_MEM_ADVISE_SET_ACCESSED_BY, CU_MEM_ADVISE_SET_PREFERRED_LOCATION,
    CU_MEM_ADVISE_SET_READ_MOSTLY, CU_MEM_ADVISE_UNSET_ACCESSED_BY,
    CU_MEM_ADVISE_UNSET_PREFERRED_LOCATION, CU_MEM_ADVISE_UNSET_READ_MOSTLY, CUmem_advise, CUresult,
    CUstream,
)
from gpumem._support.instances cimport destructor, forbid_instantiation, replace_dealloc
from gpumem._support.lease cimport Lease, lease_drop_buffer, lease_retain, Uses, uses_add
from gpumem._support.memory cimport require_memory
from gpumem._support.streams cimport LEGACY_STREAM, PER_THREAD_STREAM

from gpumem._buffer.holders import BLOCKS
from gpumem._support.sizes import format_size
from gpumem.device import Device, devices, MemoryKind
from gpumem.errors import ClosedError, ConfigError


cdef extern from "Python.h":
    void set_references "Py_SET_REFCNT" (PyObject* dying, Py_ssize_t count)
    PyObject* PyErr_Occurred() noexcept     # borrowed
    ctypedef struct PyFrameObject:
        pass
    PyFrameObject* PyEval_GetFrame()        # borrowed

cdef char* BYTES_FORMAT = "B"

cdef dict ADVICE = {
    "read_mostly": <int>CU_MEM_ADVISE_SET_READ_MOSTLY,
    "unset_read_mostly": <int>CU_MEM_ADVISE_UNSET_READ_MOSTLY,
    "preferred_location": <int>CU_MEM_ADVISE_SET_PREFERRED_LOCATION,
    "unset_preferred_location": <int>CU_MEM_ADVISE_UNSET_PREFERRED_LOCATION,
    "accessed_by": <int>CU_MEM_ADVISE_SET_ACCESSED_BY,
    "unset_accessed_by": <int>CU_MEM_ADVISE_UNSET_ACCESSED_BY,
}


cdef Buffer buffer_of(ResourceBase resource, uint64_t address, uint64_t requested,
                      uint64_t nbytes, uint64_t handle, uint32_t slot):
    cdef Buffer buffer = Buffer.__new__(Buffer)
    buffer.resource = resource
    buffer.home = resource
    buffer.address = address
    buffer.requested_bytes = requested
    buffer.block_bytes = nbytes
    buffer.handle = handle
    buffer.slot = slot
    return buffer


cdef Buffer empty_buffer(ResourceBase resource, uint32_t slot):
    return buffer_of(resource, 0, 0, 0, 0, slot)


# Python's collector of cycles does not see buffers and tensors: a header for it and its time would
# cost every allocation. A buffer in a cycle with its resource is freed by `close`.
@cython.final
@cython.no_gc
@cython.freelist(256)
cdef class Buffer:
    """A block of memory and the right to it.

    Made by `Arena.allocate`. Dropping the last reference, `close`, or leaving a ``with`` block
    frees it; views made through NumPy, DLPack or the buffer protocol keep the memory until they
    have ended, too.

    Attributes
    ----------
    resource : MemoryResource
        The allocator that made it.

    Examples
    --------
    >>> import gpumem
    >>> arena = gpumem.Arena("host")
    >>> buffer = arena.allocate(1000)
    >>> view = memoryview(buffer)
    >>> del buffer                       # the view has the memory now
    >>> view[999] = 7
    >>> view.release()
    >>> arena.stats().in_use
    0
    """

    def __init__(self):
        raise TypeError("a Buffer is made by an allocator's allocate()")

    @property
    def ptr(self):
        """Address of the first byte; 0 for an empty buffer. ClosedError once it is closed."""
        if self.is_closed:
            refuse_closed()
        return self.address

    @property
    def nbytes(self):
        """Requested bytes; every view shows these."""
        return self.requested_bytes

    @property
    def allocated_nbytes(self):
        """Bytes of its block, padding included."""
        return self.block_bytes

    @property
    def memory(self):
        """The MemoryInfo it lives in."""
        return made(self).memory

    @property
    def stream(self):
        """The stream it is freed on.

        The legacy default stream stands for two streams that cannot be named: another thread's
        default stream, which it waits for, and a raw handle after its ``reset_stream``.
        """
        cdef ResourceBase resource = made(self)
        kept = resource.streams.get(self.slot)
        if isinstance(kept, Stream):
            return kept
        return Stream.from_handle(resource.memory.device, resource.stream_at(self.slot), kept)

    @property
    def closed(self):
        """Whether it was closed."""
        return bool(self.is_closed)

    def close(self, stream=None):
        """Free the block on `stream` (None: its own). Idempotent.

        The free is ordered as by ``cudaFreeAsync``: after the work queued on `stream` now, and
        after no other work. Work on other streams, also on the block's own if `stream` is another,
        must be ordered before the free by an event, or noted by `record_stream`.

        Views of it stay valid and keep the memory until the last of them has ended; the block is
        then freed on `stream`.

        Parameters
        ----------
        stream : stream, optional
            None is the stream that the block was allocated for.

        Raises
        ------
        TypeError, ValueError
            `stream` is not a stream, or is one of another device; or the memory is another
            library's and `stream` not its own. Nothing is changed.

        Examples
        --------
        >>> import gpumem
        >>> arena, stream = gpumem.Arena("host"), gpumem.Stream("host")
        >>> buffer = arena.allocate(1000)
        >>> stream.wait(buffer.stream.record())      # after the work that used the block
        >>> buffer.close(stream)
        >>> buffer.closed, arena.stats().in_use
        (True, 0)
        """
        if self.is_closed:
            return
        if stream is not None:
            made(self).slot_of(stream, &self.slot)
            if self.is_closed:      # reading another library's stream ran its code
                return
            if self.shared != NULL:
                self.resource.move_lease(self.shared, self.slot)
        buffer_end(self)

    def record_stream(self, stream):
        """Note that work on another stream also uses the block.

        A freed block is not allocated again, on any stream, until the work that `stream` had queued
        at the moment of the free has completed. Until then the block is neither in use nor free:
        `Arena.stats` counts it in ``reserved`` only. Under ``stream_reuse="wait"`` an allocating
        stream may wait for that work on the device instead. Views that outlive the buffer keep the
        note. A resource that a user has written gets the block at once, on a stream that waits for
        the recorded streams on the device.

        This call queues no work, and the free does not call the driver. Recording a stream twice,
        or the stream that the block is freed on, changes nothing. ``reset_stream(stream)`` by a raw
        handle voids the note, unless the stream is named again.

        Parameters
        ----------
        stream : stream
            Of the same device. None is the allocator's default stream.

        Raises
        ------
        TypeError, ValueError
            `stream` is not a stream, or is one of another device; or the memory is another
            library's: record the stream with that library.
        ClosedError
            The buffer is closed.

        Notes
        -----
        PyTorch's ``Tensor.record_stream``.

        Examples
        --------
        >>> import gpumem
        >>> arena, side = gpumem.Arena("host"), gpumem.Stream("host")
        >>> buffer = arena.allocate(4096)
        >>> buffer.record_stream(side)      # queue work on `side`, then:
        >>> buffer.close()                  # reusable once that work is done
        """
        cdef uint32_t slot
        cdef ResourceBase resource = made(self)
        if not self.is_closed:
            resource.slot_of(stream, &slot)
        if self.is_closed:              # reading a stream may have run foreign code
            raise ClosedError("this buffer is closed")
        if self.block_bytes == 0:
            return
        resource.record(self, self.resource.uses_of(self), slot)

    # ---- other views of the memory ---------------------------------------------------------------

    def tensor(self, shape, dtype, *, offset=0):
        """Return the block, or a part of it, as elements in C order.

        Parameters
        ----------
        shape : int or sequence of int
        dtype : dtype
            As `gpumem.empty`.
        offset : int
            Bytes from the start of the block, a multiple of the dtype's alignment.

        Returns
        -------
        Tensor
            Keeps the block, as every view.

        Raises
        ------
        ValueError
            The elements do not fit.
        ClosedError
            The buffer is closed.

        Examples
        --------
        >>> import gpumem
        >>> buffer = gpumem.Arena("host").allocate("1KiB")
        >>> buffer.tensor((4, 8), "float32", offset=512).shape
        (4, 8)
        """
        from gpumem._tensor import tensor_of

        return tensor_of(self, shape, dtype, offset)

    def register(self):
        """Keep the block in place while a transport (UCX, NCCL, a network card) has it registered.

        Returns
        -------
        gpumem.interop.Registration
            Holds the block until its ``release``, also when this buffer is closed.

        Raises
        ------
        ClosedError
            The buffer is closed.
        ValueError
            The buffer is empty.

        Examples
        --------
        >>> import gpumem
        >>> buffer = gpumem.Arena("host").allocate(4096, transport="ipc")
        >>> with buffer.register() as registration:
        ...     registration.nbytes
        4096
        """
        from gpumem._buffer.transport import register    # it needs this module

        return register(self)

    def transports(self):
        """Return how others can reach the memory, as `gpumem.interop.transports` does.

        Examples
        --------
        >>> import gpumem
        >>> gpumem.Arena("host").allocate(4096, shareable=True).transports().host
        True
        """
        from gpumem._buffer.transport import transports

        return transports(self)

    # ---- managed memory: hints -------------------------------------------------------------------

    def prefetch(self, destination=None, stream=None):
        """Move the pages of managed memory, in the order of a stream.

        This is a hint: the bytes are the same wherever the pages are.

        Parameters
        ----------
        destination : Device or str, optional
            A device, or ``"host"`` for the CPU's memory; None is the buffer's own device.
        stream : stream, optional
            Where the move is queued; None is the buffer's own stream.

        Raises
        ------
        ValueError
            The memory is not managed, or the destination is not of its driver.
        ClosedError
            The buffer is closed.
        DriverError
            The driver refused: a device without concurrent access to managed memory, or no such
            device.

        Examples
        --------
        >>> import gpumem
        >>> with gpumem.Arena("host/managed").allocate(1 << 20) as buffer:
        ...     buffer.prefetch()
        ...     buffer.prefetch("host")
        """
        cdef ResourceBase resource = require_managed(self, "prefetched")
        cdef CUstream handle = NULL
        cdef Lease* lease
        cdef CUresult code
        cdef int where = side_of(resource.memory, destination)
        if stream is None:
            handle = <CUstream><uintptr_t>resource.stream_at(self.slot)
        else:
            stream_handle(stream, resource.driver_device, &handle)
        if self.block_bytes == 0:
            return
        lease = access_begin(self)
        with nogil:
            code = managed_prefetch(&resource.driver_device.context, self.address,
                                    self.requested_bytes, where, handle)
        access_end(self, lease)
        check(resource.driver_device.context.table, code, "cuMemPrefetchAsync")

    def advise(self, advice, location=None):
        """Tell the driver how managed memory will be used.

        The driver keeps advice for whole pages, so a small buffer's neighbours share it, and for as
        long as the arena holds the memory.

        Parameters
        ----------
        advice : str
            ``"read_mostly"``, ``"preferred_location"``, ``"accessed_by"``, or one of them after
            ``"unset_"``; the meanings are cuMemAdvise's.
        location : Device or str, optional
            The device, or ``"host"`` for the CPU; None is the buffer's own device. Not used for
            ``read_mostly`` and ``unset_preferred_location``.

        Raises
        ------
        ValueError
            Unknown advice, memory that is not managed, or a location that is not its driver's.
        ClosedError
            The buffer is closed.
        DriverError
            The driver refused.

        Examples
        --------
        >>> import gpumem
        >>> with gpumem.Arena("host/managed").allocate(1 << 20) as buffer:
        ...     buffer.advise("preferred_location", "host")
        """
        cdef ResourceBase resource = require_managed(self, "advised")
        cdef Lease* lease
        cdef CUresult code
        cdef int where = side_of(resource.memory, location)
        cdef int number
        if not isinstance(advice, str) or advice not in ADVICE:
            accepted = ", ".join(f'"{name}"' for name in ADVICE)
            raise ValueError(f"advice {advice!r} is not one of {accepted}")
        number = ADVICE[advice]
        if self.block_bytes == 0:
            return
        lease = access_begin(self)
        with nogil:
            code = managed_advise(&resource.driver_device.context, self.address,
                                  self.requested_bytes, <CUmem_advise>number, where)
        access_end(self, lease)
        check(resource.driver_device.context.table, code, "cuMemAdvise")

    def __enter__(self):
        return self

    def __exit__(self, *exception):
        self.close()

    def __len__(self):
        return self.requested_bytes

    def __repr__(self):
        state = ", closed" if self.is_closed else ""
        return (f"<gpumem.Buffer {format_size(self.requested_bytes)} at {self.address:#x} in "
                f"{made(self).memory}{state}>")

    # ---- views -----------------------------------------------------------------------------------

    def __getbuffer__(self, Py_buffer* view, int flags):
        if not made(self).cpu_can_read:
            raise BufferError(f"{self.home.memory} is not readable by the CPU: copy it to host "
                              "memory first")
        if flags & PyBUF_WRITABLE and self.home.is_read_only:
            raise BufferError("this buffer is read-only")
        try:
            order_view(self)
        except KeyboardInterrupt as error:
            note_discarded(self, error)
            raise
        view.internal = buffer_share(self)
        show_bytes(view, flags, self.address, <Py_ssize_t*>&self.requested_bytes,
                   self.home.is_read_only)
        view.obj = self

    def __releasebuffer__(self, Py_buffer* view):
        drop_share(view.internal)

    def __array__(self, dtype=None, *, copy=None):
        """Return the bytes as a NumPy array of uint8.

        NumPy reads the buffer protocol first. If that fails, it calls this method and passes its
        exception on.
        """
        import numpy
        raise_discarded(self)
        return numpy.array(memoryview(self), dtype, copy=copy)

    def __dlpack_device__(self):
        """Return DLPack's (device type, device id)."""
        cdef ResourceBase resource = made(self)
        return resource.dl_device.device_type, resource.dl_device.device_id

    def __dlpack__(self, *, stream=None, max_version=None, dl_device=None, copy=None):
        """Return a DLPack capsule over the bytes: one dimension of uint8.

        Parameters
        ----------
        stream : int, optional
            The consumer's stream, by the protocol: it waits for the buffer's own stream. The CPU
            waits for the work that gpumem queued there, as for any view of the bytes. A default
            stream is recorded as by `record_stream`; for another stream, which may end before the
            block does, its owner calls that.
        max_version : tuple of int, optional
            The newest DLPack the consumer reads; from (1, 0) it gets a versioned capsule.
        dl_device : tuple of int, optional
            Must be the buffer's own device.
        copy : bool, optional
            True is refused: a Buffer only exports itself.

        Raises
        ------
        BufferError
            The requested export is not possible.
        """
        cdef DLPackCall call
        call.stream = <PyObject*>stream
        call.max_version = <PyObject*>max_version
        call.dl_device = <PyObject*>dl_device
        call.copy = <PyObject*>copy
        return buffer_dlpack(self, &call)

    @property
    def __cuda_array_interface__(self):
        """Version 3 of the CUDA array interface; absent on memory that CUDA does not reach.

        Its stream is the buffer's own if gpumem has queued work on the bytes, else None.
        """
        cdef ResourceBase resource = made(self)
        if resource.memory.device.type != "cuda":
            raise AttributeError(f"{resource.memory} memory is not accessible to CUDA")
        require_open(self)
        cdef uint64_t stream = resource.stream_at(self.slot) or LEGACY_STREAM
        order_stream(self, <CUstream><uintptr_t>stream)
        return {"shape": (self.requested_bytes,), "typestr": "|u1", "strides": None,
                "data": (self.address, bool(resource.is_read_only)), "version": 3,
                "stream": stream if self.queued else None}


cdef inline void show_bytes(Py_buffer* view, int flags, uint64_t address, Py_ssize_t* nbytes,
                            bint read_only) noexcept:
    # Describes bytes as the buffer protocol wants them. `nbytes` lives as long as the view.
    view.buf = <void*><uintptr_t>address
    view.len = nbytes[0]
    view.readonly = read_only
    view.itemsize = 1
    view.format = BYTES_FORMAT if flags & PyBUF_FORMAT else NULL
    view.ndim = 1
    view.shape = nbytes if flags & PyBUF_ND else NULL
    view.strides = &view.itemsize if (flags & PyBUF_STRIDES) == PyBUF_STRIDES else NULL
    view.suboffsets = NULL


# The body of Buffer.__dlpack__.
cdef object buffer_dlpack(Buffer buffer, const DLPackCall* call):
    cdef DLDevice device = made(buffer).dl_device
    cdef bint versioned = dlpack_wants_versioned(<object>call.max_version)
    if (call.dl_device != <PyObject*>None
            and not same_device(dlpack_device_from(<object>call.dl_device), device)):
        raise BufferError(f"this buffer is on DLPack device {buffer.__dlpack_device__()}, "
                          f"not on {<object>call.dl_device}")
    if call.copy != <PyObject*>None and <object>call.copy:
        raise BufferError("a Buffer exports its memory without a copy: expected copy=None or "
                          "copy=False")
    dlpack_check_stream(device, <object>call.stream)
    if buffer.home.is_read_only and not versioned:
        raise BufferError("read-only memory needs a versioned DLPack capsule: call with "
                          "max_version=(1, 0)")
    if device.device_type == DL_CPU:
        order_view(buffer)
    elif call.stream == <PyObject*>None or <object>call.stream != -1:
        stream = <object>call.stream or 1
        order_stream(buffer, <CUstream><uintptr_t><uint64_t>stream)
        buffer_note_consumer(buffer, stream)
    return dlpack_bytes(buffer.address, buffer.requested_bytes, device, buffer.home.is_read_only,
                        versioned, buffer_share(buffer))


cdef object quick_dlpack(PyObject* method, PyObject* const* arguments, size_t count,
                         PyObject* names):
    cdef DLPackCall call
    if dlpack_read_call(<PyTypeObject*>Buffer, arguments, count, names, &call):
        return buffer_dlpack(<Buffer>arguments[0], &call)
    return general_dlpack(method, arguments, count, names)


cdef vectorcall general_dlpack = call_first(Buffer.__dict__["__dlpack__"], quick_dlpack)


cdef inline ResourceBase made(Buffer buffer):
    # Buffer.__new__ makes one without a block.
    if buffer.home is None:
        raise TypeError("a Buffer is made by an allocator's allocate(); this one was not")
    return buffer.home


cdef ResourceBase require_managed(Buffer buffer, str what):
    """Return the resource of an open buffer of managed memory; else raise."""
    cdef ResourceBase resource = made(buffer)
    require_open(buffer)
    if resource.memory.kind is not MemoryKind.MANAGED:
        raise ValueError(f"{resource.memory} is not managed memory and cannot be {what}")
    if context_is_dead(&resource.driver_device.context):
        raise ClosedError("this buffer belongs to the parent process")
    return resource


cdef void buffer_end(Buffer buffer) noexcept:
    if buffer.is_closed:
        return
    buffer.is_closed = True
    if buffer.block_bytes == 0:
        return
    if buffer.shared != NULL:
        lease_drop_buffer(buffer_hand_over(buffer))
    else:
        buffer.resource.free_buffer(buffer)


cdef int refuse_closed() except -1:
    raise ClosedError("this buffer is closed")


cdef Lease* share_first(Buffer buffer) except? NULL:
    if buffer.block_bytes == 0:
        return NULL
    lease_retain(buffer_lease(buffer))
    return buffer.shared


cdef Lease* access_begin(Buffer buffer) except? NULL:
    cdef ResourceBase home = buffer.home.registrar()
    cdef Lease* lease = buffer_share(buffer)
    home.accesses += 1
    return lease


cdef int access_end(Buffer buffer, Lease* lease) except -1:
    cdef ResourceBase home = buffer.home.registrar()
    home.accesses -= 1
    drop_share(lease)
    return 0


cdef Lease* buffer_lease(Buffer buffer) except NULL:
    require_open(buffer)
    if buffer.shared == NULL:
        buffer.shared = buffer.resource.lease(buffer)
        require_memory(buffer.shared != NULL, "sharing a block")
        buffer.shared.uses = buffer.uses
        buffer.uses = NULL
    return buffer.shared


cdef Lease* buffer_hand_over(Buffer buffer) noexcept:
    cdef Lease* lease = buffer.shared
    buffer.is_closed = True
    buffer.shared = NULL
    return lease


cdef int buffer_note_consumer(Buffer buffer, uint64_t stream) except -1:
    # A default stream never ends. The owner of another library's memory orders its consumers.
    if (stream <= PER_THREAD_STREAM and not buffer.home.is_foreign
            and stream != (buffer.home.stream_at(buffer.slot) or LEGACY_STREAM)):
        buffer.record_stream(stream)
    return 0


cdef int side_of(object memory, object location) except? -2:
    own = memory.device
    if location is None:
        return own.index
    device = Device(location)
    if device.type not in ("host", own.type) or device not in devices():
        raise ValueError(f"{device} is not a device that {memory} can move to: expected "
                         f'a {own.type} device that is there, or "host"')
    return HOST_SIDE if device.type == "host" else device.index


# ---- the owners of NumPy arrays ------------------------------------------------------------------

@cython.final
@cython.no_gc
cdef class ArrayOwner:
    """The base of a NumPy array: bytes of a buffer, and a lease that keeps them."""

    cdef void* lease
    cdef uint64_t address
    cdef Py_ssize_t nbytes
    cdef bint read_only

    def __dealloc__(self):
        drop_share(self.lease)

    def __getbuffer__(self, Py_buffer* view, int flags):
        # A view needs no lease of its own: `view.obj` keeps this object.
        if flags & PyBUF_WRITABLE and self.read_only:
            raise BufferError("this memory is read-only")
        show_bytes(view, flags, self.address, &self.nbytes, self.read_only)
        view.internal = NULL
        view.obj = self


cdef object array_owner(Buffer buffer, uint64_t address, int64_t nbytes, bint read_only):
    cdef ArrayOwner owner = ArrayOwner.__new__(ArrayOwner)
    # This comes first: it raises if the buffer is closed, before anything has to be undone.
    owner.lease = buffer_share(buffer)
    owner.address = address
    owner.nbytes = nbytes
    owner.read_only = read_only
    return owner


forbid_instantiation(ArrayOwner)


@cython.final
@cython.no_gc_clear
cdef class Leases:
    """Claims on buffers' blocks: the blocks live at least as long as this object."""

    cdef list leases            # addresses
    cdef readonly set _homes    # resources that the blocks lie in

    def __cinit__(self):
        self.leases = []
        self._homes = set()

    def add(self, Buffer buffer not None):
        """Keep a buffer's block alive, also when the buffer is closed."""
        if buffer.block_bytes:
            self._homes.add(buffer.home)
            self.leases.append(<uintptr_t>buffer_share(buffer))

    def __dealloc__(self):
        for lease in self.leases:
            drop_share(<void*><uintptr_t>lease)


@cython.final
cdef class Accesses:
    """Accesses of buffers that are under way until the end of a ``with`` block, by a run say."""

    cdef list homes             # what counts them

    def __cinit__(self):
        self.homes = []

    def add(self, Buffer buffer not None):
        """Begin one of a buffer; ClosedError or AsleepError if it cannot be used."""
        require_open(buffer)
        self.add_home(buffer.home)

    def add_given(self, ResourceBase resource not None):
        """Begin one of the memory that this thread would be given by a resource now."""
        self.add_home(resource.given_now())

    def add_home(self, ResourceBase home not None):
        """Begin one of a resource's own memory."""
        cdef ResourceBase counter = home.registrar()
        self.homes.append(None)     # may run other code: none runs from the check to the count
        home.require_present()
        counter.accesses += 1
        self.homes[len(self.homes) - 1] = counter

    def __enter__(self):
        return self

    def __exit__(self, *exception):
        for home in self.homes:
            if home is not None:
                (<ResourceBase>home).accesses -= 1
        self.homes = []


# ---- the end of a Buffer -------------------------------------------------------------------------

# Replaces Cython's call of `__dealloc__`, which saves an exception also where none is set.
cdef destructor dealloc_object


cdef void dealloc(PyObject* self) noexcept:
    set_references(self, 1)     # a free may run code of users, which may take references
    end(self)
    set_references(self, 0)
    dealloc_object(self)


cdef void end(PyObject* self) noexcept:
    cdef PyObject* kind = NULL
    cdef PyObject* value = NULL
    cdef PyObject* trace = NULL
    if PyErr_Occurred() == NULL:
        buffer_end(<Buffer>self)
        return
    PyErr_Fetch(&kind, &value, &trace)
    buffer_end(<Buffer>self)
    PyErr_Restore(kind, value, trace)


dealloc_object = replace_dealloc(<PyTypeObject*>Buffer, dealloc)


# ---- the resource of a buffer --------------------------------------------------------------------

@cython.no_gc_clear
cdef class ResourceBase:
    """The methods that a Buffer calls of its resource.

    They are written for resources with a ledger; arenas and adaptors override most of them.
    """

    cdef int slot_of(self, object stream, uint32_t* slot) except -1:
        cdef CUstream handle = NULL
        cdef bint vacated
        if stream is None and self.ledger != NULL and self.ledger.default_per_thread:
            stream = PER_THREAD_STREAM
        if stream is None:
            slot[0] = DEFAULT_SLOT
            return 0
        self.require_own()
        stream_handle(stream, self.driver_device, &handle)
        require_memory(ledger_find_stream(self.ledger, handle, slot, &vacated),
                       "recording a stream")
        # The slot is retained here, because released objects and a stream's attributes may run code
        # of users, which names other streams. No such code runs from the return to the slot's use.
        try:
            if vacated:
                release_vacant(self, slot[0])
            self.keep_stream(stream, handle, slot[0])
        finally:
            ledger_drop_slot(self.ledger, slot[0])
        return 0

    cdef int store_stream(self, uint32_t slot, object stream) except -1:
        self.streams[slot] = stream
        return 0

    cdef bint let_access(self, DriverDevice peer) except -1:
        return False

    cdef int keep_stream(self, object stream, CUstream handle, uint32_t slot) except -1:
        cdef bint is_handle = hasattr(stream, "__index__")  # its owner resets it first
        # A stream that ends with its object must be kept by that object; for any other stream the
        # first object is enough.
        if slot in self.streams and not (isinstance(stream, Stream) and (<Stream>stream).owned):
            return 0
        if self.ledger.is_users and not isinstance(stream, Stream):
            stream = Stream.from_handle(self.memory.device, <uintptr_t>handle,
                                        None if is_handle else stream)
        elif is_handle:
            return 0
        return self.store_stream(slot, stream)

    cdef uint64_t stream_at(self, uint32_t slot) noexcept:
        return <uintptr_t>ledger_stream(self.ledger, slot)

    cdef void free_buffer(self, Buffer buffer) noexcept:
        cdef LedgerBlock* block = <LedgerBlock*><uintptr_t>buffer.handle
        ledger_move(block, buffer.slot)
        block.uses = buffer.uses
        block.deferred.run(&block.deferred)

    cdef Lease* lease(self, Buffer buffer) except? NULL:
        return ledger_lease(<LedgerBlock*><uintptr_t>buffer.handle, buffer.address,
                            buffer.block_bytes)

    cdef void move_lease(self, Lease* lease, uint32_t slot) noexcept:
        lease.stream_slot = slot
        if self.ledger != NULL:
            ledger_move(<LedgerBlock*><uintptr_t>lease.handle, slot)

    cdef Uses** uses_of(self, Buffer buffer) except NULL:
        return &buffer.uses if buffer.shared == NULL else &buffer.shared.uses

    cdef int record(self, Buffer buffer, Uses** uses, uint32_t slot) except -1:
        cdef bint added
        require_memory(uses_add(uses, slot, &added), "recording a stream")
        if added:
            ledger_retain_slot(self.ledger, slot)
        return 0

    cdef int require_present(self) except -1:
        return 0

    cdef ResourceBase given_now(self):
        return self

    cdef object hold_bytes(self, Buffer buffer, uint64_t low, uint64_t high):
        return None

    cdef int before_cpu(self, Buffer buffer) except -1:
        return 0

    cdef int before_stream(self, Buffer buffer, CUstream stream,
                           DriverDevice driver_device) except -1:
        return 0

    cdef Place place_of(self, Buffer buffer) noexcept:
        return PLACE_FIXED

    cdef ResourceBase registrar(self):
        return self

    cdef int before_registration(self, Buffer buffer) except -1:
        return 0

    cdef int require_own(self) except -1:
        require_made(self)
        # A thread of the parent may have held the lock at the fork.
        if context_is_dead(&self.driver_device.context):
            raise ClosedError(f"{self!r} belongs to the parent process, or the interpreter is "
                              "ending")
        return 0


cdef int release_vacant(ResourceBase resource, uint32_t fresh) except -1:
    # Vacant slots, and perhaps the fresh one, named other streams before. Their objects are
    # released together at the end, because that may run code that names streams.
    cdef list released
    try:
        released = []
        for slot in list(resource.streams):
            if slot == fresh or ledger_is_vacant(resource.ledger, slot):
                released.append(resource.streams.pop(slot))
    except MemoryError:
        resource.streams.pop(fresh, None)       # the caller does not use the slot
        raise
    return 0


cdef int require_made(ResourceBase resource) except -1:
    if resource.ledger == NULL and resource.memory is not None:
        raise ConfigError(f"{resource!r} neither allocates nor counts blocks: others own its "
                          "memory")
    if resource.ledger == NULL:
        refuse_forgotten(resource)
        raise ClosedError(f"this {type(resource).__name__} was never initialised")
    return 0


cdef int refuse_forgotten(ResourceBase resource) except -1:
    # Only an __init__ that is written in Python can forget its base.
    if hasattr(type(resource).__init__, "__code__"):
        raise TypeError(f"this {type(resource).__name__} was never initialised: its __init__ calls "
                        "super().__init__(memory)")
    return 0


# ---- Ctrl-C in NumPy's reads ---------------------------------------------------------------------

cdef tuple discarded = None     # the call of `__getbuffer__` that Ctrl-C ended last


cdef int note_discarded(object exporter, object error) except -1:
    global discarded
    if isinstance(error, KeyboardInterrupt):
        discarded = this_call(exporter)
    return 0


cdef int raise_discarded(object exporter) except -1:
    global discarded
    if discarded is not None:
        noted, discarded = discarded, None
        # Another caller of `__getbuffer__` has raised the exception itself.
        if noted == this_call(exporter):
            raise KeyboardInterrupt
    return 0


cdef tuple this_call(object exporter):
    # Identifies the instruction of Python code that called into C.
    cdef PyObject* frame = <PyObject*>PyEval_GetFrame()
    instruction = -1 if frame == NULL else (<object>frame).f_lasti
    return get_ident(), id(exporter), <uintptr_t>frame, instruction


BLOCKS[Buffer] = lambda buffer: (
    0 if (<Buffer>buffer).is_closed else (<Buffer>buffer).address, (<Buffer>buffer).block_bytes)
