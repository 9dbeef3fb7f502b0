"""VirtualTensor: a tensor of rows that get memory and release it, at addresses that stay."""

from bisect import bisect_left, bisect_right
from weakref import ref

cimport cython
from libc.stdint cimport int64_t, uint32_t, uint64_t, uintptr_t

from gpumem._arena cimport (
    Arena, arena_of_tag, make_room, Pressure, raise_status, require_pages,
)
from gpumem._budget cimport report_errors
from gpumem._buffer cimport (
    Buffer, buffer_of, empty_buffer, MemoryResource, Place, PLACE_SLEEPS, resource_init,
    ResourceBase,
)
from gpumem._native.arena.api cimport (
    ARENA_IN_USE, ARENA_INTERRUPTED, ARENA_NO_METADATA, ARENA_OK, arena_views, ArenaSpan, Lack,
    room_for_streams, slot_drop, slot_retain, span_arena, span_close, span_commit,
    span_drop, span_figures, span_is_held, span_open, span_record, span_release, span_view,
    span_view_end, span_view_first, span_view_last, span_wait, SpanView,
)
from gpumem._native.driver cimport DriverDevice
from gpumem._native.pages cimport GRANULE, MAX_PAGE_GRANULES, round_to_granule
from gpumem._support.contexts cimport innermost_label
from gpumem._support.instances cimport forbid_instantiation
from gpumem._support.lease cimport Lease, lease_create, Uses, uses_free
from gpumem._support.memory cimport require_memory
from gpumem._support.process cimport raise_interrupt
from gpumem._tensor.layout cimport (
    element_of, ElementType, layout_c_strides, layout_size, MAX_RANK, shape_from,
)
from gpumem._tensor.tensor cimport Tensor, tensor_new

from gpumem._support.arguments import require
from gpumem._support.closing import close_after_body
from gpumem._support.forks import ForkLock
from gpumem._support.sizes import format_size
from gpumem.errors import ClosedError, InUseError


cdef enum:
    DEFAULT_STEPS = 64          # of a tensor's rows, where no step is named


@cython.final
cdef class SpanMemory(MemoryResource):
    """The resource of buffers over a virtual tensor; it allocates from the tensor's arena."""

    cdef Arena arena
    cdef ArenaSpan* span        # a reference; NULL: none was opened
    cdef uint64_t row_nbytes
    cdef object lock            # no callback is called under it
    cdef list edges             # where committed rows begin and end, in turn

    def __dealloc__(self):
        if self.span != NULL:
            span_drop(self.span)

    @property
    def closed(self):
        """Whether the tensor was closed."""
        return bool(span_figures(self.span).closed)

    def allocate(self, nbytes, stream=None, **settings):
        """Allocate a block of the tensor's arena."""
        return self.arena.allocate(nbytes, stream, **settings)

    cdef Buffer obtain(self, uint64_t nbytes):
        return (<MemoryResource>self.arena).obtain(nbytes)

    cdef int slot_of(self, object stream, uint32_t* slot) except -1:
        return self.arena.slot_of(stream, slot)

    cdef uint64_t stream_at(self, uint32_t slot) noexcept:
        return self.arena.stream_at(slot)

    cdef void free_buffer(self, Buffer buffer) noexcept:
        span_view_end(<void*><uintptr_t>buffer.handle)

    cdef object hold_bytes(self, Buffer buffer, uint64_t low, uint64_t high):
        cdef const SpanView* view = <const SpanView*><uintptr_t>buffer.handle
        cdef uint64_t base = span_figures(self.span).base
        cdef uint64_t first = (low - base) // self.row_nbytes
        cdef uint64_t last = (high - base + self.row_nbytes - 1) // self.row_nbytes
        # Only the view of `full` holds no rows.
        if span_view_first(view) != span_view_last(view):
            return None
        with self.lock:
            self.require_usable()
            self.require_rows(first, last)
            return self.view_of(first, last, last - first, buffer.slot)

    cdef Buffer view_of(self, uint64_t first, uint64_t last, uint64_t count, uint32_t slot):
        # A buffer of `count` rows from `first` on, of which those up to `last` are held.
        cdef uint64_t nbytes = count * self.row_nbytes
        # It has no block until all that can fail is done.
        cdef Buffer buffer = buffer_of(
            self, span_figures(self.span).base + first * self.row_nbytes, nbytes, 0, 0, slot)
        cdef SpanView* view = span_view(self.span, first * self.row_nbytes, last * self.row_nbytes)
        require_memory(view != NULL, "viewing a virtual tensor")
        buffer.handle = <uintptr_t>view
        buffer.block_bytes = nbytes
        return buffer

    cdef uint64_t committed_from(self, uint64_t first) except? <uint64_t>-1:
        # The end of the committed rows that begin with `first`. Caller holds `lock`.
        place = bisect_right(self.edges, first)
        return self.edges[place] if place % 2 else first

    cdef int require_rows(self, uint64_t first, uint64_t last) except -1:
        behind = self.committed_from(first)
        if last > behind:
            raise ValueError(f"rows {first} to {last} of {self.name} are not all committed: "
                             f"expected last = {behind} at most")
        return 0

    cdef int require_usable(self) except -1:
        self.arena.require_own()
        return self.require_open()

    cdef int require_open(self) except -1:
        if span_figures(self.span).closed:
            raise ClosedError(f"{self.name} is closed")
        return 0

    cdef Lease* lease(self, Buffer buffer) except? NULL:
        cdef Lease* lease = lease_create(buffer.handle, buffer.address, buffer.requested_bytes,
                                         buffer.slot, NULL, release_view)
        if lease != NULL:
            lease.owner_views = arena_views(span_arena(self.span))
        return lease

    cdef int record(self, Buffer buffer, Uses** uses, uint32_t slot) except -1:
        # The span keeps the notes after the view has ended, until its rows are released.
        cdef const SpanView* view = <const SpanView*><uintptr_t>buffer.handle
        return note_stream(self.span, slot, span_view_first(view), span_view_last(view))

    cdef bint let_access(self, DriverDevice peer) except -1:
        return (<MemoryResource>self.arena).let_access(peer)

    cdef int require_present(self) except -1:
        self.require_open()
        return (<MemoryResource>self.arena).require_present()

    cdef Place place_of(self, Buffer buffer) noexcept:
        return PLACE_SLEEPS

    cdef ResourceBase registrar(self):
        return self.arena

    cdef int before_registration(self, Buffer buffer) except -1:
        cdef const SpanView* view = <const SpanView*><uintptr_t>buffer.handle
        if span_view_first(view) == span_view_last(view):
            raise ValueError(f"{self.name}: expected a tensor of committed rows, which cannot be "
                             "released while it is registered")
        return 0


cdef int note_stream(ArenaSpan* span, uint32_t slot, uint64_t first, uint64_t last) except -1:
    require_memory(span_record(span, slot, first, last) == ARENA_OK, "recording a stream")
    return 0


cdef void release_view(Lease* lease) noexcept nogil:
    span_view_end(<void*><uintptr_t>lease.handle)


@cython.final
cdef class VirtualTensor:
    """A tensor of rows that get memory and release it, while its addresses stay.

    Made by `Arena.virtual`. Addresses of all rows are reserved once; `commit` maps memory for rows,
    `release` unmaps it. Kernels, captured graphs and tensors of other libraries that have the
    address of a row may use it whenever the row is committed: neither its address nor the access to
    it changes. An access to a row that is not committed is an error of the program, as to any other
    address without memory: the device reports an illegal address, the CPU a fault.

    Pages are driver allocations of `page_nbytes` each. That is the largest power of two from 2 to
    32 MiB that is at most one step: a driver call costs as much for a large page as for a small
    one, and a page is released only when none of its rows is committed. A commit makes the missing
    pages of its rows, and gives access to neighbouring pages in one call.

    A release returns at once. Work that is queued on the tensor's stream, and on every stream that
    `record_stream` noted for the rows, may still use them: their pages are released when an event
    after that work has completed. Later commits, releases, shrinks and allocations that are out of
    memory poll that event. Until then the pages count in `Arena.stats` as reserved, and a commit of
    the same rows reuses them. If a limit is reached, a commit waits for that work for at most
    ``ArenaConfig.oom_wait_ms``.

    Pages are charged to the arena's limit and budget like blocks, and count in its statistics.
    Safe to use from many threads.

    Attributes
    ----------
    arena : Arena
        The arena of its memory: the one that made it, or that of the tag it was made under.
    full : Tensor
        All rows, committed or not, at one address; pass it to kernels and libraries once, before or
        after rows are committed. It does not hold rows: record a stream other than the tensor's
        that uses it by `record_stream`. Where gpumem itself reads or writes its elements
        (`Tensor.fill`, `Tensor.item`, `copy`, ...), the rows in their range of addresses are held
        meanwhile, and one that is not committed is the error that `tensor` raises. It is valid
        until this object is closed, and keeps the memory if this object ends before it.
    shape : tuple of int
        The maximum number of rows, and the shape of one.
    dtype : numpy.dtype
    ptr : int
        Address of row 0.
    row_nbytes, page_nbytes : int
        Bytes of a row, and of a page.
    ahead : int
        Rows after its last row for which a commit that makes pages makes more.
    on_pressure : callable or None
        May be set.
    name : str

    Examples
    --------
    >>> import gpumem
    >>> arena = gpumem.Arena("host")
    >>> cache = arena.virtual((1 << 20, 16), "float32", committed=1000)
    >>> cache.numpy()[:] = 1.0
    >>> cache.commit(100_000)
    >>> rows = cache.tensor(0, 1000)
    >>> float(rows.numpy().sum()), cache.ptr == rows.ptr == cache.full.ptr
    (16000.0, True)
    >>> del rows
    >>> cache.resize(500)
    >>> cache.committed, cache.held_nbytes
    (500, 2097152)
    """

    cdef readonly Arena arena
    cdef readonly Tensor full
    cdef readonly tuple shape
    cdef readonly uint64_t row_nbytes
    cdef readonly uint64_t page_nbytes
    cdef readonly uint64_t ahead
    cdef readonly str name
    cdef object pressure
    cdef SpanMemory home
    cdef ElementType element
    cdef ArenaSpan* span        # of `home`
    cdef uint64_t max_rows
    cdef uint32_t slot
    cdef object __weakref__

    # ---- what it is ------------------------------------------------------------------------------

    @property
    def dtype(self):
        """The numpy.dtype of its elements."""
        return self.element.dtype

    @property
    def ptr(self):
        """Address of row 0; it never changes. ClosedError once it is closed."""
        self.home.require_open()
        return span_figures(self.span).base

    @property
    def memory(self):
        """The MemoryInfo it lives in."""
        return self.arena.memory

    @property
    def device(self):
        """The Device of its memory."""
        return self.arena.memory.device

    @property
    def rows(self):
        """The committed rows, a tuple of (first, last) pairs in order, each `last` exclusive."""
        edges = self.home.edges
        return tuple(zip(edges[::2], edges[1::2], strict=True))

    @property
    def committed(self):
        """How many rows are committed, from row 0 on without a gap."""
        return self.home.edges[1] if self.home.edges and self.home.edges[0] == 0 else 0

    @property
    def held_nbytes(self):
        """Bytes of its pages, including those ahead and those that wait for their release."""
        return span_figures(self.span).held

    @property
    def used_nbytes(self):
        """Bytes of the pages that committed rows lie in."""
        return span_figures(self.span).used

    @property
    def on_pressure(self):
        """The callback, or None. May be set."""
        return self.pressure

    @on_pressure.setter
    def on_pressure(self, value):
        if value is not None and not callable(value):
            raise TypeError(f"invalid on_pressure = {value!r}: expected a callable or None")
        self.pressure = value
        if value is None:
            return
        with self.home.lock:
            # Tensors that have ended are removed here.
            known = [each for each in self.arena.pressure_tensors if each() not in (None, self)]
            self.arena.pressure_tensors[:] = [*known, ref(self)]

    @property
    def closed(self):
        """Whether `close` was called."""
        return bool(span_figures(self.span).closed)

    def __len__(self):
        return self.max_rows

    def __repr__(self):
        if span_figures(self.span).closed:
            return f"<gpumem.VirtualTensor {self.name!r}, closed>"
        return (f"<gpumem.VirtualTensor {self.name!r} {self.shape} {self.dtype} at {self.ptr:#x} "
                f"in {self.memory}: {format_size(self.held_nbytes)} of "
                f"{format_size(span_figures(self.span).nbytes)} held>")

    # ---- more and fewer rows ---------------------------------------------------------------------

    def commit(self, first, last=None):
        """Map memory for rows; rows that have memory are left unchanged.

        ``commit(rows)`` is for the first `rows` rows, ``commit(first, last)`` for those from
        `first` to `last`, exclusive, as in `range`. The bytes of rows that had no memory are
        arbitrary. The memory is there when the call returns, without any order of streams. It may
        be called while a graph is captured.

        Raises
        ------
        TypeError, ValueError
            No such rows.
        OutOfMemoryError
            The arena's limit, its budget (BudgetExceededError) or the driver refused, after idle
            memory of the arena and the callbacks of its other virtual tensors; nothing is changed.
        DriverError
            The driver failed; nothing is changed.
        AsleepError
            The arena is asleep.
        ClosedError
            The tensor or its arena is closed, or belongs to the parent of a fork.

        Examples
        --------
        >>> import gpumem
        >>> cache = gpumem.Arena("host").virtual((1000, 1 << 20), "int8", step=2)
        >>> cache.commit(3)
        >>> cache.commit(10, 12)
        >>> cache.rows, cache.held_nbytes
        (((0, 3), (10, 12)), 6291456)
        """
        cdef uint64_t begin, end
        if last is None:
            self.read_rows(0, first, &begin, &end, "rows")
        else:
            self.read_rows(first, last, &begin, &end)
        self.commit_rows(begin, end)

    def release(self, first, last):
        """Release rows from `first` to `last`, exclusive; rows without memory are left unchanged.

        Returns at once. A page without a committed row is released to the driver when the work
        queued now on the tensor's stream, and on those recorded for its rows, is done. Pages ahead
        stay for `ahead` rows after the last row that is still committed.

        Raises
        ------
        TypeError, ValueError
            No such rows.
        InUseError
            A tensor of some of these rows, or a view of one, is alive; nothing is changed.
        ClosedError
            The tensor is closed, or belongs to the parent of a fork.

        Examples
        --------
        >>> import gpumem
        >>> cache = gpumem.Arena("host").virtual((1000, 1 << 20), "int8", committed=10)
        >>> rows = cache.tensor(0, 2)
        >>> cache.release(4, 8)
        >>> try:
        ...     cache.release(0, 4)
        ... except gpumem.errors.InUseError:
        ...     cache.rows
        ((0, 4), (8, 10))
        """
        cdef uint64_t begin, end
        cdef Uses* room = NULL
        self.read_rows(first, last, &begin, &end)
        with self.home.lock:
            self.home.require_usable()
            self.require_free(begin, end)
            self.release_rows(begin, end, &room)

    def resize(self, rows):
        """Commit the first `rows` rows, and release all rows after them.

        Raises
        ------
        InUseError
            As `release`; nothing is changed.
        TypeError, ValueError, OutOfMemoryError, DriverError, AsleepError, ClosedError
            As `commit`; nothing is changed.

        Examples
        --------
        >>> import gpumem
        >>> cache = gpumem.Arena("host").virtual((1000, 1 << 20), "int8", committed=10, step=2)
        >>> cache.resize(4)
        >>> cache.rows, cache.held_nbytes
        (((0, 4),), 4194304)
        """
        cdef uint64_t begin, end
        cdef Uses* room
        self.read_rows(0, rows, &begin, &end, "rows")
        with self.home.lock:
            self.home.require_usable()
            self.require_free(end, self.max_rows)
        # The room is made before rows are committed, so that the release after them cannot fail.
        room = room_for_streams(self.span, NULL)
        if room == NULL:
            raise_status(self.arena, 0, 0, self.slot, ARENA_NO_METADATA)
        try:
            self.commit_rows(begin, end)
            with self.home.lock:
                self.require_free(end, self.max_rows)
                self.release_rows(end, self.max_rows, &room)
        finally:
            uses_free(room)

    cdef int commit_rows(self, uint64_t first, uint64_t last) except -1:
        cdef Pressure pressure = None
        cdef uint32_t begin, end, ahead
        cdef int status
        cdef Lack lack
        cdef uint64_t nbytes
        cdef uint64_t until = 0
        lack.refunds_until = 0
        begin = self.page_at(first)
        end = self.page_after(last) if last > first else begin
        ahead = self.page_after(min(last + self.ahead, self.max_rows)) if last > first else begin
        innermost_label(False)      # read with the interpreter lock, for events without it
        while True:
            with self.home.lock:
                self.home.require_usable()
                with nogil:
                    status = span_commit(self.span, begin, end, ahead, &lack)
                if status == ARENA_OK:
                    set_rows(self.home.edges, first, last, True)
                    break
            # The lock is released here, because another thread may release memory. While Ctrl-C's
            # exception is set, no function of Python may be called.
            with nogil:
                status = span_wait(self.span, status, &lack, &until)
            if status == ARENA_INTERRUPTED:
                raise_interrupt()
            if status == ARENA_OK:
                continue
            until = 0       # after a callback the wait begins again
            nbytes = rows_missing(self.home.edges, first, last) * self.row_nbytes
            # Callbacks run without the lock: they may release rows of any tensor.
            pressure = Pressure() if pressure is None else pressure
            if make_room(self.arena, status, nbytes, self, pressure):
                continue
            raise_status(self.arena, nbytes, 0, self.slot, status, pressure)
        if pressure is not None:
            report_errors(pressure.errors)

    cdef int release_rows(self, uint64_t first, uint64_t last, Uses** room) except -1:
        # The first and the last of their pages may have other rows, too. It owns `room`, if any.
        cdef Uses* taken
        cdef list edges = list(self.home.edges)
        cdef uint32_t begin, end, ahead, ahead_end
        cdef uint64_t behind
        cdef int status
        set_rows(edges, first, last, False)
        begin = self.page_at(first)
        end = self.page_after(last) if last > first else begin
        while begin < end and self.has_rows(edges, begin):
            begin += 1
        while begin < end and self.has_rows(edges, end - 1):
            end -= 1
        behind = edges[len(edges) - 1] if edges else 0
        ahead = self.page_after(behind)
        ahead_end = self.page_after(min(behind + self.ahead, self.max_rows))
        taken = room[0]
        room[0] = NULL
        with nogil:
            status = span_release(self.span, begin, end, ahead, ahead_end, taken)
        if status != ARENA_OK:
            raise_status(self.arena, 0, 0, self.slot, status)
        self.home.edges = edges
        return 0

    cdef bint has_rows(self, list edges, uint32_t page) except -1:
        cdef uint64_t begin = page * self.page_nbytes // self.row_nbytes
        cdef uint64_t end = ((page + 1) * self.page_nbytes + self.row_nbytes - 1) // self.row_nbytes
        place = bisect_right(edges, begin)
        return place % 2 == 1 or (place < len(edges) and edges[place] < end)

    cdef inline uint32_t page_at(self, uint64_t row) noexcept:
        return <uint32_t>(row * self.row_nbytes // self.page_nbytes)

    cdef inline uint32_t page_after(self, uint64_t row) noexcept:
        # Returns the first page without a byte of the rows before `row`.
        return <uint32_t>((row * self.row_nbytes + self.page_nbytes - 1) // self.page_nbytes)

    cdef int read_rows(self, object first, object last, uint64_t* begin, uint64_t* end,
                       str name="last") except -1:
        begin[0] = row_number("first", first, 0, self.max_rows)
        end[0] = row_number(name, last, begin[0], self.max_rows)
        return 0

    cdef int require_free(self, uint64_t first, uint64_t last) except -1:
        if first != last and span_is_held(self.span, first * self.row_nbytes,
                                          last * self.row_nbytes):
            raise InUseError(f"rows {first} to {last} of {self.name} cannot be released: a tensor "
                             "of some of them, or a view of it, is alive; drop it first")
        return 0

    # ---- its rows as tensors ---------------------------------------------------------------------

    def tensor(self, first=0, last=None):
        """Return committed rows as a Tensor, which holds them: it prevents their release.

        Views of it, in NumPy, PyTorch or any library, also hold them.

        Parameters
        ----------
        first, last : int, optional
            As in `range`; None: up to the end of the committed rows that begin with `first`.

        Raises
        ------
        TypeError, ValueError
            No such rows, or some are not committed.
        ClosedError
            The tensor is closed, or belongs to the parent of a fork.

        Examples
        --------
        >>> import gpumem
        >>> cache = gpumem.Arena("host").virtual((1000, 8), "int32", committed=10)
        >>> cache.tensor().shape, cache.tensor(4, 6).shape
        ((10, 8), (2, 8))
        """
        cdef uint64_t begin = row_number("first", first, 0, self.max_rows)
        cdef uint64_t end = begin
        with self.home.lock:
            self.home.require_usable()
            end = (self.home.committed_from(begin) if last is None
                   else row_number("last", last, begin, self.max_rows))
            self.home.require_rows(begin, end)
            return self.tensor_of(begin, end, end - begin)

    cdef Tensor tensor_of(self, uint64_t first, uint64_t last, uint64_t count):
        # `count` rows, of which those from `first` to `last` are held.
        cdef uint64_t address = span_figures(self.span).base + first * self.row_nbytes
        cdef Buffer buffer
        cdef Tensor made
        cdef int i
        if count == 0:
            buffer = empty_buffer(self.home, self.slot)
        else:
            buffer = self.home.view_of(first, last, count, self.slot)
        made = tensor_new(buffer, self.element, address, <int>len(self.shape))
        made.lengths[0] = count
        made.count = count
        for i in range(1, made.rank):
            made.lengths[i] = self.shape[i]
            made.count *= made.lengths[i]
        layout_c_strides(made.rank, made.lengths, self.element.itemsize, made.steps)
        return made

    def numpy(self):
        """Return the committed rows from row 0 on as a NumPy array, which holds them.

        Waits for work that gpumem queued on the tensor's stream, as `Tensor.numpy` does.

        Raises
        ------
        BufferError
            The CPU cannot read the memory.
        ClosedError
            The tensor is closed.

        Examples
        --------
        >>> import gpumem
        >>> cache = gpumem.Arena("host").virtual(1000, "int32", committed=10)
        >>> cache.numpy().shape
        (10,)
        """
        return self.tensor().numpy()

    def __dlpack_device__(self):
        """Return DLPack's (device type, device id)."""
        return self.full.__dlpack_device__()

    def __dlpack__(self, *, stream=None, max_version=None, dl_device=None, copy=None):
        """Return a DLPack capsule over the committed rows from row 0 on, as `Tensor.__dlpack__`.

        The consumer's tensor holds these rows. `full` exports all rows and holds none.
        """
        return self.tensor().__dlpack__(stream=stream, max_version=max_version,
                                        dl_device=dl_device, copy=copy)

    def record_stream(self, stream, first=0, last=None):
        """Note that work on another stream uses committed rows: their release is ordered after it.

        A note ends with the release of its rows, as for the block of a `Buffer`: their pages are
        released once the work that the stream has queued by then is done. Rows that are committed
        later need a new note. A release of other rows does not wait for it, if they have their own
        pages. Recording a stream for the same rows twice changes nothing. If graphs with rows of
        the tensor are launched on a stream, note it for these rows before they are released.

        The tensor's own stream needs no note, nor do default streams of DLPack's consumers: those
        of `full` are noted for all rows as long as the tensor is open, those of other tensors for
        their rows. ``Arena.reset_stream(stream)`` by a raw handle voids the notes of the stream.

        Parameters
        ----------
        stream : stream
            Of the same device.
        first, last : int, optional
            As in `range`; None: up to the last row. Rows that are not committed are not noted.

        Raises
        ------
        TypeError, ValueError
            `stream` is not a stream, or is one of another device; or no such rows.
        ClosedError
            The tensor is closed, or belongs to the parent of a fork.

        Examples
        --------
        >>> import gpumem
        >>> side = gpumem.Stream("host")
        >>> cache = gpumem.Arena("host").virtual(1000, "int32", committed=10)
        >>> cache.record_stream(side)       # queue work there, then:
        >>> cache.release(0, 10)            # the memory is released when that work is done
        """
        cdef uint32_t slot = 0
        cdef uint64_t begin, end
        self.home.require_usable()
        self.read_rows(first, self.max_rows if last is None else last, &begin, &end)
        self.arena.slot_of(stream, &slot)
        # Other threads may run from here on: the slot keeps its stream.
        slot_retain(self.arena.core, slot)
        try:
            with self.home.lock:
                self.home.require_usable()
                for low, high in self.rows:
                    if max(low, begin) < min(high, end):
                        note_stream(self.span, slot, max(low, begin) * self.row_nbytes,
                                    min(high, end) * self.row_nbytes)
        finally:
            slot_drop(self.arena.core, slot)

    def close(self):
        """Release all rows. Idempotent; the addresses are released with the last view of `full`.

        Raises
        ------
        InUseError
            A tensor of rows, or a view of one, is alive; nothing is changed.
        ClosedError
            The tensor belongs to the parent of a fork.

        Examples
        --------
        >>> import gpumem
        >>> arena = gpumem.Arena("host")
        >>> with arena.virtual(1000, "int32", committed=10) as cache:
        ...     cache.held_nbytes
        2097152
        >>> arena.stats().virtual
        0
        """
        cdef int status
        if span_figures(self.span).closed:
            return
        self.arena.require_own()
        with self.home.lock:
            with nogil:
                status = span_close(self.span)
            if status == ARENA_IN_USE:
                raise InUseError(f"{self.name} cannot be closed: a tensor of its rows, or a view "
                                 "of one, is alive; drop it first")
            if status != ARENA_OK:
                raise_status(self.arena, 0, 0, self.slot, status)
            self.home.edges = []
        self.full.buffer.close()

    def __enter__(self):
        return self

    def __exit__(self, kind, error, trace):
        close_after_body(self.close, error)


# ---- rows ----------------------------------------------------------------------------------------

cdef uint64_t row_number(str name, object value, uint64_t least,
                         uint64_t most) except? <uint64_t>-1:
    if isinstance(value, bool) or not hasattr(value, "__index__"):
        raise TypeError(f"invalid {name} = {value!r}: expected an integer")
    number = value.__index__()
    if not least <= number <= most:
        whole = ", the rows that the tensor has" if name == "rows" else ""
        raise ValueError(f"invalid {name} = {number}: expected {least} to {most}{whole}")
    return number


cdef int set_rows(list edges, uint64_t first, uint64_t last, bint committed) except -1:
    # Rows are committed between an edge of even place and the next one. Edges between `first` and
    # `last` are removed, and an end that lies in or at rows of the same state is not an edge.
    if first == last:
        return 0
    low = bisect_left(edges, first)
    high = bisect_right(edges, last)
    edges[low:high] = [first] * (low % 2 != committed) + [last] * (high % 2 != committed)
    return 0


cdef uint64_t rows_missing(list edges, uint64_t first, uint64_t last) except? <uint64_t>-1:
    cdef uint64_t missing = last - first
    for begin, end in zip(edges[::2], edges[1::2], strict=True):
        if begin < last and end > first:
            missing -= min(end, last) - max(begin, first)
    return missing


# ---- making one ----------------------------------------------------------------------------------

def make_virtual(Arena arena not None, shape, dtype, *, committed, step, ahead, stream, on_pressure,
                 name):
    """Make a virtual tensor; the body of `Arena.virtual`."""
    cdef int64_t lengths[MAX_RANK]
    cdef int rank = shape_from(shape, lengths)
    cdef Arena tagged = arena_of_tag(arena)
    cdef VirtualTensor made = VirtualTensor.__new__(VirtualTensor)
    cdef int64_t size
    cdef uint64_t nbytes, page
    cdef int status
    require("name", name, (str, type(None)), "a str or None")
    made.element = element_of(dtype)
    size = layout_size(rank, lengths, made.element.itemsize)
    if rank == 0 or size == 0:
        raise ValueError(f"invalid shape = {shape!r}: expected one dimension or more, and elements")
    if size < 0:
        raise ValueError(f"shape {shape!r} of {made.element.dtype} has more than 2**63 - 1 bytes")
    require_pages(arena)
    arena = arena if tagged is None else <Arena>tagged
    made.arena = arena
    made.shape = tuple([lengths[i] for i in range(rank)])
    made.max_rows = lengths[0]
    made.row_nbytes = size // lengths[0] * made.element.itemsize
    made.name = "virtual tensor" if name is None else name
    made.ahead = row_number("ahead", ahead, 0, made.max_rows)
    row_number("committed", committed, 0, made.max_rows)
    if step is None:
        step = max(made.max_rows // DEFAULT_STEPS, 1)
    page = page_for(row_number("step", step, 1, made.max_rows) * made.row_nbytes)
    made.page_nbytes = page
    made.home = SpanMemory.__new__(SpanMemory)
    resource_init(made.home, arena.memory, made.name)
    made.home.arena = arena
    made.home.row_nbytes = made.row_nbytes
    made.home.lock = ForkLock()
    made.home.edges = []
    arena.slot_of(stream, &made.slot)
    # Other threads may run from here on: the slot keeps its stream.
    slot_retain(arena.core, made.slot)
    nbytes = round_to_granule(made.max_rows * made.row_nbytes)
    with nogil:
        status = span_open(arena.core, nbytes, page, made.slot, &made.home.span)
    slot_drop(arena.core, made.slot)
    if status != ARENA_OK:
        made.home.span = NULL
        raise_status(arena, nbytes, 0, made.slot, status)
    made.span = made.home.span
    made.full = made.tensor_of(0, 0, made.max_rows)
    made.on_pressure = on_pressure
    made.commit(committed)
    return made


cdef uint64_t page_for(uint64_t nbytes) noexcept:
    # The largest page that is at most one step.
    cdef uint64_t page = GRANULE
    while page < <uint64_t>GRANULE * MAX_PAGE_GRANULES and page * 2 <= nbytes:
        page *= 2
    return page


forbid_instantiation(SpanMemory)
forbid_instantiation(VirtualTensor)
