"""Adaptors below their Python classes: blocks, counters, leases."""

cimport cython
from cpython.ref cimport Py_DECREF, Py_INCREF, Py_XDECREF, PyObject
from libc.stdint cimport uint32_t, uint64_t, uintptr_t
from libc.stdlib cimport free

from gpumem._budget cimport account_of, Budget, limit_of
from gpumem._buffer cimport (
    BlockLedger, Buffer, buffer_end, buffer_hand_over, buffer_lease, buffer_of, DEFAULT_SLOT,
    ledger_cancel, ledger_copy_blocks, ledger_counters, ledger_deliver, ledger_end, ledger_lease,
    ledger_make, ledger_reset_peaks, ledger_return, LedgerBlock, LedgerCounters, MemoryResource,
    resource_adapt, resource_charge, resource_claim, ResourceBase, size_of, stream_handle,
)
from gpumem._native.budget cimport budget_load
from gpumem._native.driver cimport context_is_dead, CUstream
from gpumem._support.clock cimport time_of_day_ns
from gpumem._support.lease cimport Lease, lease_drop_buffer, Uses
from gpumem._support.memory cimport require_memory
from gpumem._support.process cimport (
    call_unraisable, defer, Deferred, report_unraisable, run_deferred,
)

from gpumem.stats import larger_than, LimitInForce, OutOfMemoryReport
from gpumem._support.sizes import exact_size
from gpumem.errors import ClosedError, OutOfMemoryError


cdef extern from "Python.h":
    unsigned long PyThread_get_thread_ident() noexcept nogil     # as threading.get_ident


@cython.no_gc_clear
cdef class Adaptor(MemoryResource):
    """Base of adaptors: a resource that allocates other resources' blocks under its own name.

    Made by `gpumem.adaptors`. Attributes that an adaptor lacks are those of its upstream.

    Attributes
    ----------
    upstreams : tuple of MemoryResource
        Sources of its blocks.
    """

    def __init__(self, upstreams, *, name=None, limit=None, tells=False):
        if self.memory is not None:
            raise TypeError(f"__init__ of {type(self).__name__} called twice")
        for upstream in upstreams:
            if not isinstance(upstream, MemoryResource):
                raise TypeError(f"{upstream!r} is not a MemoryResource")
        self.upstreams = tuple(upstreams)
        self.tells = tells
        resource_adapt(self, self.upstreams[0], name)
        self.ledger = ledger_make(sizeof(BlockLedger), sizeof(AdaptedBlock), free_leased, NULL)
        require_memory(self.ledger != NULL, "allocating a resource's metadata")
        self.ledger.context = &self.driver_device.context
        if isinstance(limit, Budget):
            self.budget = limit
            self.ledger.account = account_of(limit, "reserved", self.name,
                                             &self.ledger.counts_in_use)
        elif limit is not None:
            self.ledger.account = limit_of(limit, self.name)

    @property
    def upstream(self):
        """Source of its blocks; the first of several."""
        return self.upstreams[0]

    # ---- blocks ----------------------------------------------------------------------------------

    def allocate(self, nbytes, stream=None, *, alignment=None, **options):
        """Allocate a block from the upstream.

        Parameters
        ----------
        nbytes, stream, alignment, **options
            As of the upstream's ``allocate``.

        Returns
        -------
        Buffer
            Its `resource` is this adaptor, through which it is freed.

        Raises
        ------
        ClosedError
            This adaptor is closed.
        Exception
            The upstream's exceptions, unchanged.
        """
        if alignment is not None:
            options["alignment"] = alignment
        return self.allocate_from(nbytes, stream, options, False)

    def allocate_persistent(self, nbytes):
        """Allocate a long-lived block from the upstream; see its ``allocate_persistent``."""
        return self.allocate_from(nbytes, None, {}, True)

    cdef Buffer allocate_from(self, object nbytes, object stream, dict options, bint persistent):
        cdef uint64_t size = size_of(nbytes, self)
        cdef LedgerBlock* block
        self.require_open()
        block = resource_claim(self, size, size, DEFAULT_SLOT, persistent)
        try:
            resource_charge(self, block)
            return adopt(self, self._serve(size, stream, options, persistent),
                         <AdaptedBlock*>block)
        except BaseException:
            ledger_cancel(block)
            raise

    cdef int make_room(self, uint64_t nbytes) except -1:
        # With a budget its callbacks run next. Without one the adaptor's own limit has refused.
        if self.budget is None:
            raise_over_limit(self, nbytes)
        return 0

    def _serve(self, nbytes, stream, options, persistent):
        return serve_from(self.upstreams[0], nbytes, stream, options, persistent)

    def _note(self, buffer, persistent):
        """Return an object that is kept with a new block until it is freed, or None."""
        return None

    def _on_free(self, address, nbytes, stream, time, thread, note):
        """Called when a block is freed, with its note, if `tells` is true."""

    # ---- the upstream's calls --------------------------------------------------------------------

    def shrink(self):
        """Shrink the upstream; see its ``shrink``."""
        return self.upstreams[0].shrink()

    def reset_stream(self, stream):
        """Declare a stream drained to the upstream; see its ``reset_stream``."""
        for upstream in self.upstreams:
            upstream.reset_stream(stream)

    def stats(self):
        """Return the upstream's `Stats`."""
        return self.upstreams[0].stats()

    @property
    def is_arena(self):
        """Whether the upstream sub-allocates and can be shrunk."""
        return self.upstreams[0].is_arena

    def __getattr__(self, name):
        if name.startswith("_") or self.upstreams is None or len(self.upstreams) != 1:
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        return getattr(self.upstreams[0], name)

    def __repr__(self):
        state = ", closed" if self.closed else ""
        return f"<gpumem.{type(self).__name__} around {self.upstreams[0]!r}{state}>"

    def _counts(self):
        cdef LedgerCounters now
        self.require_own()
        run_deferred()
        now = ledger_counters(self.ledger)
        return (now.in_use, now.num_allocs - now.num_frees, now.max_in_use, now.max_blocks,
                now.total_bytes, now.num_allocs)

    def _reset_peaks(self):
        self.require_own()
        ledger_reset_peaks(self.ledger)

    def _limit(self):
        """Return an adaptor's limit and the bytes left below it; None where a budget has none."""
        cdef uint64_t limit
        self.require_own()
        if self.budget is not None:
            return self.budget.limit, self.budget.free
        if self.ledger.account == NULL:
            return None
        limit = budget_load(&self.ledger.account.limit)
        return limit, limit - min(limit, budget_load(&self.ledger.account.used))

    def _note_of(self, Buffer buffer not None):
        if buffer.resource is not self:
            raise ValueError(f"{buffer!r} is not one of {self!r}")
        if buffer.is_closed:
            raise ClosedError("this buffer is closed")
        if buffer.block_bytes == 0:
            return self.upstreams[0]
        return <object>(<AdaptedBlock*><uintptr_t>buffer.handle).note

    def _live(self):
        """Return (address, bytes, number, note) of every live block, the oldest first."""
        cdef uint64_t i, count = 0
        cdef AdaptedBlock* found
        self.require_own()
        found = <AdaptedBlock*>ledger_copy_blocks(self.ledger, &count)
        require_memory(found != NULL, "copying a list of blocks")
        # A note is only dropped under the interpreter lock, which is held here.
        try:
            return [(found[i].block.base, found[i].block.requested, found[i].block.number,
                     <object>found[i].note if found[i].note != NULL else None)
                    for i in reversed(range(count))]
        finally:
            free(found)

    # ---- calls of buffers ------------------------------------------------------------------------

    cdef int slot_of(self, object stream, uint32_t* slot) except -1:
        return (<MemoryResource>self.upstreams[0]).slot_of(stream, slot)

    cdef uint64_t stream_at(self, uint32_t slot) noexcept:
        return (<MemoryResource>self.upstreams[0]).stream_at(slot)

    cdef Uses** uses_of(self, Buffer buffer) except NULL:
        # The uses lie with the inner block, where its upstream may note streams, too.
        cdef AdaptedBlock* block = <AdaptedBlock*><uintptr_t>buffer.handle
        cdef Buffer inner
        if block.inner == NULL:
            return block.uses
        inner = <Buffer>block.inner
        if inner.is_closed:         # an upstream may close a buffer that it made
            raise ClosedError("this buffer is closed")
        return inner.resource.uses_of(inner)

    cdef void free_buffer(self, Buffer buffer) noexcept:
        cdef AdaptedBlock* block = <AdaptedBlock*><uintptr_t>buffer.handle
        cdef Buffer inner = <Buffer>block.inner
        Py_DECREF(inner)        # the variable owns it now
        block.inner = NULL
        block.stream = buffer.home.stream_at(buffer.slot)
        if inner.shared == NULL:
            inner.slot = buffer.slot
        else:                   # the upstream has views of it
            inner.resource.move_lease(inner.shared, buffer.slot)
        buffer_end(inner)
        note_free(block)
        finish(self, block)

    cdef Lease* lease(self, Buffer buffer) except? NULL:
        cdef AdaptedBlock* block = <AdaptedBlock*><uintptr_t>buffer.handle
        cdef Buffer inner = <Buffer>block.inner
        cdef Lease* lease = ledger_lease(&block.block, buffer.address, buffer.block_bytes)
        if lease == NULL:
            return NULL
        try:
            buffer_lease(inner)
            block.uses = inner.resource.uses_of(inner)
        except BaseException:
            free(lease)
            raise
        # Its upstream counts the views of this lease, and not the lease itself.
        block.lease = buffer_hand_over(inner)
        lease.owner_views = block.lease.owner_views
        block.inner = NULL
        block.stream = buffer.home.stream_at(buffer.slot)
        Py_DECREF(inner)        # the variable owns it until here
        Py_INCREF(self)
        block.block.owner = <PyObject*>self
        return lease

    cdef ResourceBase given_now(self):
        return (<MemoryResource>self.upstreams[0]).given_now()

    cdef void move_lease(self, Lease* lease, uint32_t slot) noexcept:
        cdef AdaptedBlock* block = <AdaptedBlock*><uintptr_t>lease.handle
        lease.stream_slot = slot
        (<MemoryResource>block.upstream).move_lease(block.lease, slot)
        block.stream = (<MemoryResource>block.home).stream_at(slot)


def serve_from(MemoryResource upstream not None, nbytes, stream, options, persistent):
    """Allocate from one upstream with the arguments of the adaptor's call."""
    if persistent:
        return upstream.allocate_persistent(nbytes)
    return upstream.allocate(nbytes, stream, **options)


def report(error, where):
    """Pass an exception that has no caller to ``sys.unraisablehook``."""
    report_unraisable(error, where)


def handle_or_zero(MemoryResource resource not None, stream):
    """Return a stream's handle for the event of a failure; 0 if the stream is the reason."""
    cdef CUstream handle = NULL
    try:
        stream_handle(stream, resource.driver_device, &handle)
    except Exception:
        return 0
    return <uintptr_t>handle


cdef int raise_over_limit(Adaptor adaptor, uint64_t size) except -1:
    most, room = adaptor._limit()
    limit = LimitInForce("limit", most, most - room)
    remedy = (larger_than(limit.what) if size > most
              else "free buffers of this adaptor, or raise its limit")
    raise OutOfMemoryError.of(OutOfMemoryReport(
        str(adaptor.memory), size, size, adaptor.name, limits=(limit,), in_use=limit.used,
        reserved=limit.used, largest_free=room,
        remedies=(remedy,)))


# ---- a block from its allocation to its free -----------------------------------------------------

cdef Buffer adopt(Adaptor adaptor, Buffer inner, AdaptedBlock* block):
    """Make a Buffer of the adaptor around a Buffer that an upstream allocated."""
    cdef Buffer buffer
    cdef uint64_t requested = block.block.requested
    if inner is None or inner.is_closed or inner.requested_bytes < requested:
        raise TypeError(f"{adaptor.upstreams!r} returned {inner!r}: expected an open Buffer of at "
                        f"least {exact_size(requested)}")
    if inner.block_bytes:
        note = adaptor._note(inner, block.block.persistent)
    buffer = buffer_of(adaptor, inner.address, inner.requested_bytes, 0, 0, inner.slot)
    buffer.home = inner.home
    if inner.block_bytes == 0:
        ledger_cancel(&block.block)
        return buffer
    block.block.deferred.run = finish_leased
    block.block.base = inner.address
    block.home = <PyObject*>inner.home
    block.upstream = <PyObject*>inner.resource
    block.inner = <PyObject*>inner
    Py_INCREF(inner)
    if note is not None:
        block.note = <PyObject*>note
        Py_INCREF(note)
    buffer.block_bytes = inner.block_bytes
    buffer.handle = <uintptr_t>block
    ledger_deliver(&block.block)
    return buffer


cdef void free_leased(LedgerBlock* freed) noexcept nogil:
    """Free a block after the end of its last view, on any thread, without the interpreter lock."""
    cdef AdaptedBlock* block = <AdaptedBlock*>freed
    lease_drop_buffer(block.lease)
    note_free(block)
    defer(&freed.deferred)


cdef void note_free(AdaptedBlock* block) noexcept nogil:
    """Count a block that the upstream has freed."""
    block.time = time_of_day_ns()
    block.thread = PyThread_get_thread_ident()
    ledger_return(&block.block, False)


cdef void finish_leased(Deferred* work) noexcept:
    cdef AdaptedBlock* block = <AdaptedBlock*>work
    cdef Adaptor adaptor = <Adaptor>block.block.owner
    Py_DECREF(adaptor)      # the variable owns it now
    finish(adaptor, block)


cdef void finish(Adaptor adaptor, AdaptedBlock* block) noexcept:
    """Drop a freed block's note and call `_on_free`, with the interpreter lock."""
    cdef AdaptedBlock gone = block[0]
    cdef object note = <object>gone.note if gone.note != NULL else None
    ledger_end(&block.block, True)
    Py_XDECREF(gone.note)   # the variable owns it now
    if not adaptor.tells or context_is_dead(&adaptor.driver_device.context):
        return
    call_unraisable(adaptor._on_free, (gone.block.base, gone.block.requested, gone.stream,
                                       gone.time, gone.thread, note), adaptor)
