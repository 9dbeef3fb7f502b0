"""Buffer: a block of memory and the right to it; MemoryResource: what hands out buffers."""

cimport cython
from cpython.buffer cimport PyBUF_FORMAT, PyBUF_ND, PyBUF_STRIDES, PyBUF_WRITABLE
from cpython.long cimport PyLong_AsSsize_t
from libc.stdint cimport uint32_t, uint64_t, uintptr_t

from gpumem._backing_managed cimport HOST_SIDE, managed_advise, managed_prefetch
from gpumem._bfc cimport ABSURD
from gpumem._deferred cimport run_deferred
from gpumem._dlpack cimport (
    DL_CPU,
    DL_CUDA,
    DL_CUDA_MANAGED,
    DL_READ_ONLY,
    DL_UINT,
    DLDevice,
    Export,
    dlpack_capsule,
    dlpack_check_stream,
    dlpack_device_from,
    dlpack_export,
    dlpack_wants_versioned,
    same_device,
)
from gpumem._driver cimport (
    CU_MEM_ADVISE_SET_ACCESSED_BY,
    CU_MEM_ADVISE_SET_PREFERRED_LOCATION,
    CU_MEM_ADVISE_SET_READ_MOSTLY,
    CU_MEM_ADVISE_UNSET_ACCESSED_BY,
    CU_MEM_ADVISE_UNSET_PREFERRED_LOCATION,
    CU_MEM_ADVISE_UNSET_READ_MOSTLY,
    CUDA_SUCCESS,
    CUmem_advise,
    CUresult,
    CUstream,
    Place,
    check,
    place_enter,
    place_is_dead,
    place_leave,
)
from gpumem._lease cimport Lease, Uses, lease_drop_buffer, lease_retain
from gpumem._raw cimport (
    DEFAULT_SLOT,
    RawBlock,
    RawBooks,
    raw_address,
    raw_alignment,
    raw_books,
    raw_lease,
)
from gpumem._stream cimport Stream, stream_handle

from gpumem._arguments import require
from gpumem.device import Device, MemoryInfo, MemoryKind
from gpumem.errors import ClosedError, ConfigError
from gpumem.stats import ShrinkReport

on_resource = NULL

cdef char* BYTES_FORMAT = "B"

# Makes snapshots; the package sets it, since what does is above this module.
cdef object snapshot_of = None

cdef dict ADVICE = {
    "read_mostly": <int>CU_MEM_ADVISE_SET_READ_MOSTLY,
    "unset_read_mostly": <int>CU_MEM_ADVISE_UNSET_READ_MOSTLY,
    "preferred_location": <int>CU_MEM_ADVISE_SET_PREFERRED_LOCATION,
    "unset_preferred_location": <int>CU_MEM_ADVISE_UNSET_PREFERRED_LOCATION,
    "accessed_by": <int>CU_MEM_ADVISE_SET_ACCESSED_BY,
    "unset_accessed_by": <int>CU_MEM_ADVISE_UNSET_ACCESSED_BY,
}


cdef class MemoryResource:
    """Base of everything that hands out `Buffer` objects of one memory.

    To make one of your own, derive from it and write two methods, `allocate_raw` and
    `deallocate_raw`; sizes, streams, alignment, statistics, views, their lifetime and the rules at
    fork and exit come from here.

    Parameters
    ----------
    memory : MemoryInfo, Device or str
        Where the blocks live. Its `alignment` is what `allocate_raw` promises; its kind says who
        can reach the blocks, and so which views a Buffer gives.
    name : str, optional
        For people; the memory's name by default.
    budget : Budget, optional
        What its blocks are charged to, before `allocate_raw` is called.
    count : {"reserved", "in_use"}
        Until when: until `deallocate_raw` has returned, or until the user has given the block back.

    Attributes
    ----------
    memory : MemoryInfo
    name : str
    budget : Budget or None
        What it charges.

    Raises
    ------
    TypeError
        Of a class that has no `allocate_raw` and `deallocate_raw`, or a second initialisation.
    ValueError
        The memory does not exist here.

    Examples
    --------
    >>> import ctypes
    >>> import gpumem
    >>> class Plain(gpumem.MemoryResource):
    ...     def __init__(self):
    ...         super().__init__(gpumem.MemoryInfo("host", alignment=1))
    ...         self.blocks = {}
    ...     def allocate_raw(self, nbytes, stream):
    ...         block = ctypes.create_string_buffer(nbytes)
    ...         self.blocks[ctypes.addressof(block)] = block
    ...         return ctypes.addressof(block)
    ...     def deallocate_raw(self, ptr, nbytes, stream):
    ...         del self.blocks[ptr]
    >>> resource = Plain()
    >>> with resource.allocate(100, alignment=256) as buffer:
    ...     buffer.ptr % 256, resource.stats().requested_in_use
    (0, 100)
    >>> resource.blocks
    {}

    Notes
    -----
    The two methods may be called from any thread that runs Python, by several at once. A block
    whose last view was dropped on another thread goes back soon after, on the main thread or in
    the next call of this resource. `deallocate_raw` is not called after the interpreter has begun
    to end, and in a fork's child neither is; the child makes a resource of its own.
    """

    def __init__(self, memory, *, name=None, budget=None, count="reserved"):
        if self.memory is not None:
            raise TypeError(f"this {type(self).__name__} was initialised before")
        require_hooks(type(self))
        resource_init(self, memory, name)
        self.raw = raw_books(self.place, self.memory, self.streams, self.name, budget, count)
        self.budget = budget

    def allocate_raw(self, nbytes, stream):
        """Take a block from wherever the memory comes from; written by a derived class.

        Parameters
        ----------
        nbytes : int
            Bytes, at least 1.
        stream : Stream
            The stream whose work uses the block first. The block may be used by work that is
            queued on it from now on, and by no other.

        Returns
        -------
        int
            The address of the first byte, a multiple of ``self.memory.alignment``.

        Raises
        ------
        MemoryError
            There is no room. This and every other exception reaches the caller of `allocate`
            as it is, with nothing changed; so do TypeError and ValueError for what is returned and
            is no such address.
        """
        raise NotImplementedError(f"{type(self).__name__} has no allocate_raw")

    def deallocate_raw(self, ptr, nbytes, stream):
        """Take a block back; written by a derived class. Called once for each block.

        Parameters
        ----------
        ptr, nbytes : int
            What `allocate_raw` returned and was asked for.
        stream : Stream
            Work that was queued on it before now may still use the block. It need not be the
            stream of the allocation.

        Notes
        -----
        Runs inside finalizers: it must not wait. What it raises is reported to
        ``sys.unraisablehook``, and the block counts as freed.
        """
        raise NotImplementedError(f"{type(self).__name__} has no deallocate_raw")

    def allocate(self, nbytes, stream=None, *, alignment=None, shareable=False):
        """Hand out a block.

        Parameters
        ----------
        nbytes : int
            Size in bytes; 0 gives a valid empty Buffer with pointer 0.
        stream : stream, optional
            The stream whose work uses the block first, and on which it goes back; None is the
            device's legacy default stream.
        alignment : int, optional
            Bytes, a power of two up to 2 MiB. Beyond what the memory promises, so much more is
            asked for.
        shareable : bool
            True is refused: only an `Arena` makes memory that other processes may be given.

        Returns
        -------
        Buffer
            Owns the block; dropping or closing it gives the block back.

        Raises
        ------
        TypeError, ValueError
            An argument is not accepted, or what `allocate_raw` returned is no address.
        MemoryError
            There is no room; OutOfMemoryError for a size that no machine has.
        ConfigError
            `shareable`.
        ClosedError
            It is closed, or belongs to the parent of a fork.
        """
        cdef uint64_t size = size_of(nbytes)
        cdef uint64_t multiple = raw_alignment(alignment)
        refuse_shareable(self, shareable)
        return raw_buffer(self, size, stream, multiple, False)

    def allocate_persistent(self, nbytes):
        """Hand out a long-lived block (weights), on the default stream.

        Parameters
        ----------
        nbytes : int
            Size in bytes.

        Raises
        ------
        TypeError, ValueError, MemoryError, ClosedError
            As `allocate`.
        """
        return raw_buffer(self, size_of(nbytes), None, 0, True)

    def reserve(self, nbytes):
        """Alias of `allocate_persistent`, ONNX Runtime's name."""
        return self.allocate_persistent(nbytes)

    def shrink(self):
        """Give back what can be spared: here nothing, since nothing is kept.

        Returns
        -------
        ShrinkReport

        Examples
        --------
        >>> import gpumem
        >>> gpumem.limit(gpumem.Arena("host"), 1 << 20).shrink()
        ShrinkReport(released_bytes=0, kept=())
        """
        open_books(self)
        return ShrinkReport(0, ())

    def reset_stream(self, stream):
        """Declare a stream drained: its blocks go back on the default stream from now on.

        The caller has synchronised the stream. Required before the owner of a stream given as a
        raw handle destroys it; a stream given as an object is kept alive instead.
        """
        open_books(self).reset(stream)

    def stats(self):
        """Return the counters of this moment as `Stats`; reserved is what is in use.

        Raises
        ------
        ClosedError
            It belongs to the parent of a fork.
        """
        cdef RawBooks books = books_of(self)
        if place_is_dead(&self.place.place):
            books.require_open(self)
        run_deferred()
        return books.stats()

    def snapshot(self):
        """Return the state of this moment, every block of it, as `gpumem.observe.Snapshot`.

        Raises
        ------
        ClosedError
            It belongs to the parent of a fork.

        Examples
        --------
        >>> import gpumem
        >>> arena = gpumem.Arena("host", name="cache")
        >>> buffer = arena.allocate(1000)
        >>> [(each.name, len(each.live)) for each in arena.snapshot().resources]
        [('cache', 1)]
        """
        return take_snapshot(self)

    @property
    def is_arena(self):
        """Whether it sub-allocates and can be shrunk."""
        return False

    @property
    def closed(self):
        """Whether `close` was called."""
        return self.raw is None or self.raw.closed

    def close(self):
        """Take no calls any more. Idempotent.

        Raises
        ------
        InUseError
            A buffer, or a view of one, is still alive; nothing is changed.
        """
        run_deferred()
        books_of(self).close(self)

    def __enter__(self):
        return self

    def __exit__(self, *exception):
        self.close()

    def __repr__(self):
        state = ", closed" if self.closed else ""
        return f"<{type(self).__name__} {self.name!r} on {self.memory}{state}>"

    # ---- what buffers ask ------------------------------------------------------------------------

    cdef Buffer obtain(self, uint64_t nbytes):
        return self.allocate(nbytes)

    cdef int slot_of(self, object stream, uint32_t* slot) except -1:
        if stream is None:
            slot[0] = DEFAULT_SLOT
            return 0
        return open_books(self).find_slot(stream, slot)

    cdef uint64_t stream_at(self, uint32_t slot) noexcept:
        return (<Stream>self.streams[slot]).ptr

    cdef void give_back(self, Buffer buffer) noexcept:
        cdef RawBlock* block = <RawBlock*><uintptr_t>buffer.handle
        block.slot = buffer.slot
        self.raw.give(self, block)

    cdef Lease* lease(self, Buffer buffer) except NULL:
        return raw_lease(self, self.raw, <RawBlock*><uintptr_t>buffer.handle, buffer.slot)

    cdef void move_lease(self, Lease* lease, uint32_t slot) noexcept:
        lease.stream = slot

    cdef int record(self, Uses** uses, uint32_t slot) except -1:
        raise TypeError(f"{self!r} cannot hold a block back for another stream")

    cdef int require_present(self) except -1:
        return 0

    cdef int before_cpu(self, Buffer buffer) except -1:
        return 0

    cdef int before_stream(self, Buffer buffer, CUstream stream) except -1:
        return 0


def set_observers(snapshot, report):
    """Say who makes snapshots, and who pages of them."""
    global snapshot_of, report_of
    snapshot_of, report_of = snapshot, report


def take_snapshot(resource):
    """Return a resource's snapshot; what else has a method of this name calls it, too."""
    return snapshot_of(resource)


def write_page(resource, path, title):
    """Write a page of a resource's snapshot."""
    return report_of(resource, path, title)


cdef int require_hooks(object cls) except -1:
    """Raise TypeError for a class that cannot hand anything out."""
    if cls.allocate is not MemoryResource.allocate:
        return 0    # it hands out what another resource made
    for hook in ("allocate_raw", "deallocate_raw"):
        if getattr(cls, hook) is getattr(MemoryResource, hook):
            raise TypeError(f"{cls.__name__} has no {hook}: a class of MemoryResource writes "
                            "allocate_raw and deallocate_raw")
    return 0


cdef int refuse_shareable(MemoryResource resource, object shareable) except -1:
    require("shareable", shareable, bool, "True or False")
    if shareable:
        raise ConfigError(f"shareable = True is not accepted by {resource!r}: an Arena makes "
                          "memory that other processes may be given")
    return 0


cdef RawBooks books_of(MemoryResource resource):
    if resource.raw is None:
        raise TypeError(f"this {type(resource).__name__} was never initialised: its __init__ calls "
                        "super().__init__(memory)")
    return resource.raw


cdef RawBooks open_books(MemoryResource resource):
    cdef RawBooks books = books_of(resource)
    run_deferred()
    books.require_open(resource)
    return books


cdef Buffer raw_buffer(MemoryResource resource, uint64_t size, object stream, uint64_t alignment,
                       bint persistent):
    cdef RawBooks books = open_books(resource)
    cdef uint32_t slot = DEFAULT_SLOT
    cdef RawBlock* block
    resource.slot_of(stream, &slot)
    if size == 0:
        return empty_buffer(resource, slot)
    block = books.take(resource, size, alignment, slot, persistent)
    try:
        return buffer_of(resource, raw_address(block, alignment), size, block.size,
                         <uintptr_t>block, slot)
    except BaseException:
        books.give(resource, block)
        raise


cdef int resource_init(MemoryResource resource, object memory, object name) except -1:
    """Fill in what every resource has; opens the device."""
    require("name", name, (str, type(None)), "a str or None")
    resource.memory = MemoryInfo.parse(memory)
    resource.name = str(resource.memory) if name is None else name
    resource.place = resource.memory.device._open()
    resource.cpu_can_read = resource.memory.host_accessible
    resource.dl_device = dlpack_device_of(resource.memory)
    resource.streams = {}
    if on_resource != NULL:
        on_resource()
    return 0


cdef int resource_adapt(MemoryResource resource, MemoryResource upstream, object name) except -1:
    if upstream.memory is None:
        raise TypeError(f"this {type(upstream).__name__} was never initialised")
    require("name", name, (str, type(None)), "a str or None")
    resource.memory = upstream.memory
    resource.name = upstream.name if name is None else name
    resource.place = upstream.place
    resource.cpu_can_read = upstream.cpu_can_read
    resource.is_read_only = upstream.is_read_only
    resource.dl_device = upstream.dl_device
    resource.streams = upstream.streams
    return 0


cdef DLDevice dlpack_device_of(object memory) except *:
    # Host memory goes out as CPU memory, also when it is pinned: most consumers refuse the rest.
    cdef DLDevice device
    device.device_id = 0
    if memory.kind is MemoryKind.DEVICE:
        device.device_type = DL_CUDA
        device.device_id = memory.device.index
    elif memory.kind is MemoryKind.MANAGED:
        device.device_type = DL_CUDA_MANAGED
    else:
        device.device_type = DL_CPU
    return device


cdef uint64_t size_of(object nbytes) except? <uint64_t>-1:
    cdef Py_ssize_t size
    if type(nbytes) is not int:
        if isinstance(nbytes, bool) or not hasattr(nbytes, "__index__"):
            raise TypeError(f"nbytes must be an integer, not {type(nbytes).__name__}")
        nbytes = nbytes.__index__()
    try:
        size = PyLong_AsSsize_t(nbytes)
    except OverflowError:
        size = -1 if nbytes < 0 else <Py_ssize_t>ABSURD
    if size < 0:
        raise ValueError(f"nbytes = {nbytes} is negative: it takes 0 or more bytes")
    return size


cdef Buffer buffer_of(MemoryResource resource, uint64_t address, uint64_t requested,
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


cdef Buffer empty_buffer(MemoryResource resource, uint32_t slot):
    return buffer_of(resource, 0, 0, 0, 0, slot)


@cython.final
@cython.no_gc
@cython.freelist(256)
cdef class Buffer:
    """A block of memory and the right to it.

    Made by `Arena.allocate`. Dropping the last reference, `close`, or leaving a ``with`` block
    frees it; views made through NumPy, DLPack or the buffer protocol keep the memory until they
    are gone too.

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

    def __dealloc__(self):
        buffer_end(self)

    @property
    def ptr(self):
        """Address of the first byte; 0 for an empty buffer."""
        return self.address

    @property
    def nbytes(self):
        """Bytes that were asked for; what every view shows."""
        return self.requested_bytes

    @property
    def requested(self):
        """The same as `nbytes`."""
        return self.requested_bytes

    @property
    def allocated(self):
        """Bytes of the block behind it, padding included."""
        return self.block_bytes

    @property
    def memory(self):
        """The MemoryInfo it lives in."""
        return made(self).memory

    @property
    def stream(self):
        """The stream it is freed on."""
        cdef MemoryResource resource = made(self)
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

        The free is ordered as ``cudaFreeAsync`` orders one: behind what is queued on `stream` now,
        and behind nothing else. Work on other streams, the block's own too when another is named,
        must be ordered before it by an event, or be told of by `record_stream`.

        Views of it stay valid and keep the memory until the last of them is gone; the block is
        freed on `stream` then.

        Parameters
        ----------
        stream : stream, optional
            None is the stream that the block was allocated for.

        Raises
        ------
        TypeError, ValueError
            `stream` is no stream, or one of another device; nothing is changed.

        Examples
        --------
        >>> import gpumem
        >>> arena, stream = gpumem.Arena("host"), gpumem.Stream("host")
        >>> buffer = arena.allocate(1000)
        >>> stream.wait(buffer.stream.record())      # behind the work that used the block
        >>> buffer.close(stream)
        >>> buffer.closed, arena.stats().in_use
        (True, 0)
        """
        if self.is_closed:
            return
        if stream is not None:
            made(self).slot_of(stream, &self.slot)
            if self.is_closed:      # meanwhile: reading a foreign stream runs foreign code
                return
            if self.shared != NULL:
                self.resource.move_lease(self.shared, self.slot)
        buffer_end(self)

    def record_stream(self, stream):
        """Note that work on another stream uses the block, too.

        When the block is freed, by whatever and on whatever stream, nobody gets it, not even its
        own stream, before the work that is queued on `stream` at that moment is known to be done;
        under ``stream_reuse="wait"`` a taker's stream may wait for that on the device instead.
        Views that outlive the buffer keep the note. Until then the block is neither in use nor
        free: `Arena.stats` counts it in ``reserved`` only.

        Nothing is queued on any stream by this call, and the free calls no driver. Recording a
        stream twice changes nothing, nor does the one that the block is freed on. After
        ``reset_stream(stream)`` by a raw handle the note is void unless the stream was named
        again.

        Parameters
        ----------
        stream : stream
            Of the same device. None is the allocator's default stream.

        Raises
        ------
        TypeError, ValueError
            `stream` is no stream, or one of another device.
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
        >>> buffer.close()                  # held back until that work is done
        """
        cdef uint32_t slot
        cdef MemoryResource resource = made(self)
        if not self.is_closed:
            resource.slot_of(stream, &slot)
        if self.is_closed:              # perhaps meanwhile: reading a stream runs foreign code
            raise ClosedError("this buffer is closed")
        if self.block_bytes == 0:
            return
        resource.record(&self.uses if self.shared == NULL else &self.shared.uses, slot)

    # ---- managed memory: hints -------------------------------------------------------------------

    def prefetch(self, destination=None, stream=None):
        """Move the pages of managed memory, in the order of a stream.

        A hint: the bytes are the same wherever the pages are.

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
        cdef MemoryResource resource = require_managed(self, "prefetched")
        cdef Place* place = &resource.place.place
        cdef CUstream handle = NULL
        cdef CUresult code
        cdef int where = side_of(resource, destination)
        if stream is None:
            handle = <CUstream><uintptr_t>resource.stream_at(self.slot)
        else:
            stream_handle(stream, resource.place, &handle)
        if self.block_bytes == 0:
            return
        with nogil:
            code = place_enter(place)
            if code == CUDA_SUCCESS:
                code = managed_prefetch(place, self.address, self.requested_bytes, where, handle)
                place_leave(place)
        check(place.table, code, "cuMemPrefetchAsync")

    def advise(self, advice, location=None):
        """Tell the driver how managed memory will be used.

        The driver keeps advice for whole pages, so that a small buffer's neighbours share it, and
        as long as the arena holds the memory.

        Parameters
        ----------
        advice : str
            ``"read_mostly"``, ``"preferred_location"``, ``"accessed_by"``, or one of them after
            ``"unset_"``; the meanings are cuMemAdvise's.
        location : Device or str, optional
            The device meant, or ``"host"`` for the CPU; None is the buffer's own device. Without
            a meaning for ``read_mostly`` and ``unset_preferred_location``.

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
        cdef MemoryResource resource = require_managed(self, "advised")
        cdef Place* place = &resource.place.place
        cdef CUresult code
        cdef int number
        cdef int where = side_of(resource, location)
        if advice not in ADVICE:
            accepted = ", ".join(f'"{name}"' for name in ADVICE)
            raise ValueError(f"advice {advice!r} is not one of {accepted}")
        number = ADVICE[advice]
        if self.block_bytes == 0:
            return
        with nogil:
            code = place_enter(place)
            if code == CUDA_SUCCESS:
                code = managed_advise(place, self.address, self.requested_bytes,
                                      <CUmem_advise>number, where)
                place_leave(place)
        check(place.table, code, "cuMemAdvise")

    def __enter__(self):
        return self

    def __exit__(self, *exception):
        self.close()

    def __len__(self):
        return self.requested_bytes

    def __repr__(self):
        state = ", closed" if self.is_closed else ""
        return (f"<gpumem.Buffer {self.requested_bytes} bytes at {self.address:#x} in "
                f"{made(self).memory}{state}>")

    # ---- views -----------------------------------------------------------------------------------

    def __getbuffer__(self, Py_buffer* view, int flags):
        if not made(self).cpu_can_read:
            raise BufferError(f"{self.home.memory} is not readable by the CPU: copy it to host "
                              "memory first")
        if flags & PyBUF_WRITABLE and self.home.is_read_only:
            raise BufferError("this buffer is read-only")
        self.home.before_cpu(self)
        view.internal = buffer_share(self)
        view.buf = <void*>self.address
        view.len = self.requested_bytes
        view.readonly = self.home.is_read_only
        view.itemsize = 1
        view.format = BYTES_FORMAT if flags & PyBUF_FORMAT else NULL
        view.ndim = 1
        view.shape = <Py_ssize_t*>&self.requested_bytes if flags & PyBUF_ND else NULL
        view.strides = &view.itemsize if (flags & PyBUF_STRIDES) == PyBUF_STRIDES else NULL
        view.suboffsets = NULL
        view.obj = self

    def __releasebuffer__(self, Py_buffer* view):
        drop_share(view.internal)

    def __dlpack_device__(self):
        """Return DLPack's (device type, device id)."""
        cdef MemoryResource resource = made(self)
        return resource.dl_device.device_type, resource.dl_device.device_id

    def __dlpack__(self, *, stream=None, max_version=None, dl_device=None, copy=None):
        """Return a DLPack capsule over the bytes: one dimension of uint8.

        Parameters
        ----------
        stream : int, optional
            The consumer's stream, by the protocol; a Buffer has no pending work of its own.
        max_version : tuple of int, optional
            The newest DLPack the consumer reads; from (1, 0) it gets a versioned capsule.
        dl_device : tuple of int, optional
            Must be the buffer's own device.
        copy : bool, optional
            True is refused: a Buffer only exports itself.

        Raises
        ------
        BufferError
            The export asked for is not possible.
        """
        cdef Export* exported
        cdef DLDevice device = made(self).dl_device
        cdef bint versioned = dlpack_wants_versioned(max_version)
        if dl_device is not None and not same_device(dlpack_device_from(dl_device), device):
            raise BufferError(f"this buffer is on DLPack device {self.__dlpack_device__()}, "
                              f"not on {dl_device}")
        if copy:
            raise BufferError("a Buffer exports its own memory only: copy=True is not possible")
        dlpack_check_stream(device, stream)
        if self.home.is_read_only and not versioned:
            raise BufferError("read-only memory needs a versioned DLPack capsule: ask with "
                              "max_version=(1, 0)")
        if device.device_type == DL_CPU:
            self.home.before_cpu(self)
        elif stream is None or stream != -1:
            self.home.before_stream(self, <CUstream><uintptr_t><uint64_t>(stream or 1))
        exported = dlpack_export(1, DL_READ_ONLY if self.home.is_read_only else 0, 0, versioned,
                                 buffer_share(self))
        exported.tensor.data = <void*>self.address
        exported.tensor.device = device
        exported.tensor.dtype.code = DL_UINT
        exported.tensor.dtype.bits = 8
        exported.tensor.dtype.lanes = 1
        exported.tensor.shape[0] = self.requested_bytes
        exported.tensor.strides[0] = 1
        return dlpack_capsule(exported)

    @property
    def __cuda_array_interface__(self):
        """Version 3 of the CUDA array interface; absent on memory that CUDA does not reach."""
        cdef MemoryResource resource = made(self)
        if resource.memory.device.type != "cuda":
            raise AttributeError(f"CUDA does not reach {resource.memory}")
        if self.is_closed:
            raise ClosedError("this buffer is closed")
        return {"shape": (self.requested_bytes,), "typestr": "|u1", "strides": None,
                "data": (self.address, bool(resource.is_read_only)), "version": 3, "stream": None}


cdef inline MemoryResource made(Buffer buffer):
    # Buffer.__new__ alone makes one that nobody handed out.
    if buffer.home is None:
        raise TypeError("a Buffer is made by an allocator's allocate(); this one was not")
    return buffer.home


cdef int side_of(MemoryResource resource, object location) except? -2:
    """Return the ordinal of the device that a location names, or HOST_SIDE."""
    home = resource.memory.device
    if location is None:
        return home.index
    device = Device(location)
    if device.type == "host":
        return HOST_SIDE
    if device.type != home.type:
        raise ValueError(f"{device} is not a device that {resource.memory} can move to: it takes "
                         f'a {home.type} device or "host"')
    return device.index


cdef MemoryResource require_managed(Buffer buffer, str what):
    """Return the resource of an open buffer of managed memory; else raise."""
    cdef MemoryResource resource = made(buffer)
    if buffer.is_closed:
        raise ClosedError("this buffer is closed")
    if resource.memory.kind is not MemoryKind.MANAGED:
        raise ValueError(f"{resource.memory} is not managed memory and cannot be {what}")
    if place_is_dead(&resource.place.place):
        raise ClosedError("this buffer belongs to the parent process")
    return resource


cdef void buffer_end(Buffer buffer) noexcept:
    if buffer.is_closed:
        return
    buffer.is_closed = True
    if buffer.block_bytes == 0:
        return
    if buffer.shared != NULL:
        lease_drop_buffer(buffer.shared)
        buffer.shared = NULL
    else:
        buffer.resource.give_back(buffer)


cdef Lease* buffer_share(Buffer buffer) except? NULL:
    """Return one more reference to the block, for a view; NULL for an empty buffer."""
    if buffer.is_closed:
        raise ClosedError("this buffer is closed")
    if buffer.block_bytes == 0:
        return NULL
    buffer.resource.require_present()
    if buffer.shared == NULL:
        buffer.shared = buffer.resource.lease(buffer)
        buffer.shared.uses = buffer.uses
        buffer.uses = NULL
    lease_retain(buffer.shared)
    return buffer.shared
