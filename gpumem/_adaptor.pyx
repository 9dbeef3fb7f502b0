"""Adaptors below their Python classes: blocks, counters, leases; see _adaptor.pxd."""

from cpython.ref cimport Py_DECREF, Py_INCREF, Py_XDECREF, PyObject
from libc.stdint cimport int64_t, uint32_t, uint64_t, uintptr_t
from libc.stdlib cimport calloc, free

from gpumem._budget cimport account_of, admit_or_raise
from gpumem._budget_core cimport budget_drop, budget_uncharge
from gpumem._buffer cimport (
    Buffer,
    MemoryResource,
    buffer_end,
    buffer_of,
    buffer_share,
    resource_adapt,
    size_of,
)
from gpumem._deferred cimport Deferred, defer, report_unraisable, run_deferred
from gpumem._driver cimport CUstream, place_is_dead
from gpumem._lease cimport Lease, Uses, lease_create, lease_drop
from gpumem._stream cimport stream_handle
from gpumem._support.lock cimport lock_acquire, lock_init, lock_release

from gpumem.errors import ClosedError, InUseError, OutOfMemoryError
from gpumem.out_of_memory import LimitInForce, OutOfMemoryReport

cdef extern from *:
    """
    #include <pthread.h>
    #include <time.h>
    static inline int64_t gm_now(void) {
        struct timespec now;
        clock_gettime(CLOCK_REALTIME, &now);
        return (int64_t)now.tv_sec * 1000000000 + now.tv_nsec;
    }
    /* As threading.get_ident has it. */
    static inline uint64_t gm_thread(void) { return (uint64_t)pthread_self(); }
    """
    int64_t gm_now() noexcept nogil
    uint64_t gm_thread() noexcept nogil

cdef uint64_t NO_LIMIT = <uint64_t>-1


cdef class Adaptor(MemoryResource):
    """Base of adaptors: a resource that hands out other resources' blocks under its own name.

    Made by `gpumem.adaptors`; what an adaptor lacks, its upstream answers.

    Attributes
    ----------
    upstreams : tuple of MemoryResource
        Where its blocks come from.
    """

    def __init__(self, upstreams, *, name=None, limit=None, tells=False, budget=None):
        cdef bint in_use
        if self.memory is not None:
            raise TypeError(f"this {type(self).__name__} was initialised before")
        for upstream in upstreams:
            if not isinstance(upstream, MemoryResource):
                raise TypeError(f"{upstream!r} is not a MemoryResource")
        self.upstreams = tuple(upstreams)
        self.tells = tells
        self.ledger.limit = NO_LIMIT if limit is None else limit
        resource_adapt(self, self.upstreams[0], name)
        self.ledger.place = &self.place.place
        lock_init(&self.ledger.lock)
        self.ledger.account = account_of(budget, "reserved", self.name, &in_use)
        self.budget = budget

    def __dealloc__(self):
        budget_drop(self.ledger.account)

    @property
    def upstream(self):
        """Where its blocks come from; the first of several."""
        return self.upstreams[0]

    # ---- blocks ----------------------------------------------------------------------------------

    def allocate(self, nbytes, stream=None, *, alignment=None, **options):
        """Hand out a block of the upstream's.

        Parameters
        ----------
        nbytes, stream, alignment, **options
            As the upstream's ``allocate`` takes them.

        Returns
        -------
        Buffer
            Its `resource` is this adaptor, through which it is freed.

        Raises
        ------
        ClosedError
            This adaptor is closed.
        Exception
            What the upstream raises, as it is.
        """
        if alignment is not None:
            options["alignment"] = alignment
        return self.hand_out(nbytes, stream, options, False)

    def allocate_persistent(self, nbytes):
        """Hand out a long-lived block of the upstream's; see its ``allocate_persistent``."""
        return self.hand_out(nbytes, None, {}, True)

    cdef Buffer hand_out(self, object nbytes, object stream, dict options, bint persistent):
        cdef uint64_t size = size_of(nbytes)
        cdef Buffer inner
        require_open(self)
        if not admit(&self.ledger, size):
            raise_over_limit(self, size)
        try:
            charge(self, size)
        except BaseException:
            uncount(&self.ledger, size)
            raise
        try:
            inner = self._serve(size, stream, options, persistent)
            return adopt(self, inner, size, persistent)
        except BaseException:
            cancel(&self.ledger, size)
            raise

    def _serve(self, nbytes, stream, options, persistent):
        return serve_from(self.upstreams[0], nbytes, stream, options, persistent)

    def _note(self, buffer, persistent):
        """Return what to keep with a new block, None for nothing."""
        return None

    def _taken_back(self, address, nbytes, stream, time, thread):
        """Hear of the end of a block; asked for by `tells`."""

    # ---- the rest --------------------------------------------------------------------------------

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

    @property
    def closed(self):
        """Whether `close` was called."""
        return bool(self.is_closed)

    def close(self):
        """Take no calls any more; the upstream stays open. Idempotent.

        Raises
        ------
        InUseError
            A buffer of this adaptor, or a view of one, is still alive; nothing is changed.
        """
        cdef Counts now
        run_deferred()
        if self.is_closed:
            return
        if not place_is_dead(&self.place.place):
            now = counts_of(&self.ledger)
            if now.current_blocks:
                raise InUseError(f"{self!r} cannot be closed: {now.current_bytes} bytes in "
                                 f"{now.current_blocks} blocks are in use")
        self.is_closed = True

    def __getattr__(self, name):
        if name.startswith("_") or self.upstreams is None or len(self.upstreams) != 1:
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        return getattr(self.upstreams[0], name)

    def __repr__(self):
        state = ", closed" if self.is_closed else ""
        return f"<gpumem.{type(self).__name__} around {self.upstreams[0]!r}{state}>"

    def _counts(self):
        require_own(self)
        run_deferred()
        now = counts_of(&self.ledger)
        return (now.current_bytes, now.current_blocks, now.peak_bytes, now.peak_blocks,
                now.total_bytes, now.total_blocks)

    def _reset_peaks(self):
        require_own(self)
        reset_peaks(&self.ledger)

    def _note_of(self, Buffer buffer not None):
        if buffer.resource is not self:
            raise ValueError(f"{buffer!r} is not one of {self!r}")
        if buffer.is_closed:
            raise ClosedError("this buffer is closed")
        if buffer.block_bytes == 0:
            return self.upstreams[0]
        return <object>(<AdaptedBlock*><uintptr_t>buffer.handle).note

    def _live(self):
        """Return (address, bytes, note) of every live block, the oldest first."""
        cdef AdaptedBlock* block
        cdef Counts now
        cdef AdaptedBlock* found
        cdef uint64_t count = 0
        cdef uint64_t i
        require_own(self)
        now = counts_of(&self.ledger)
        found = <AdaptedBlock*>calloc(now.current_blocks + 1, sizeof(AdaptedBlock))
        if found == NULL:
            raise MemoryError("no host memory for a list of blocks")
        # Notes go with the interpreter lock only, which is held here: they stay.
        lock_acquire(&self.ledger.lock)
        block = self.ledger.newest
        while block != NULL and count < now.current_blocks:
            found[count] = block[0]
            count += 1
            block = block.older
        lock_release(&self.ledger.lock)
        try:
            return [(found[i].address, found[i].asked,
                     <object>found[i].note if found[i].note != NULL else None)
                    for i in reversed(range(count))]
        finally:
            free(found)

    # ---- what buffers ask ------------------------------------------------------------------------

    cdef int slot_of(self, object stream, uint32_t* slot) except -1:
        return (<MemoryResource>self.upstreams[0]).slot_of(stream, slot)

    cdef uint64_t stream_at(self, uint32_t slot) noexcept:
        return (<MemoryResource>self.upstreams[0]).stream_at(slot)

    cdef int record(self, Uses** uses, uint32_t slot) except -1:
        return (<MemoryResource>self.upstreams[0]).record(uses, slot)

    cdef void give_back(self, Buffer buffer) noexcept:
        cdef AdaptedBlock* block = <AdaptedBlock*><uintptr_t>buffer.handle
        cdef Buffer inner = <Buffer>block.inner
        Py_DECREF(inner)        # the variable holds it now
        block.inner = NULL
        block.stream = buffer.home.stream_at(buffer.slot)
        inner.slot = buffer.slot
        inner.uses = buffer.uses
        buffer.uses = NULL
        buffer_end(inner)
        take_back(block)
        tell(self, block)

    cdef Lease* lease(self, Buffer buffer) except NULL:
        cdef AdaptedBlock* block = <AdaptedBlock*><uintptr_t>buffer.handle
        cdef Buffer inner = <Buffer>block.inner
        cdef Lease* lease = lease_create(buffer.handle, buffer.address, buffer.block_bytes,
                                         buffer.slot, NULL, release_lease)
        if lease == NULL:
            raise MemoryError("no host memory for a view's lease")
        try:
            block.lease = buffer_share(inner)
        except BaseException:
            free(lease)
            raise
        block.inner = NULL
        block.stream = buffer.home.stream_at(buffer.slot)
        Py_DECREF(inner)        # the variable holds it until here
        buffer_end(inner)
        Py_INCREF(self)
        block.adaptor = <PyObject*>self
        return lease

    cdef void move_lease(self, Lease* lease, uint32_t slot) noexcept:
        cdef AdaptedBlock* block = <AdaptedBlock*><uintptr_t>lease.handle
        lease.stream = slot
        block.stream = (<MemoryResource>block.home).stream_at(slot)


def serve_from(MemoryResource upstream, nbytes, stream, options, persistent):
    """Ask one upstream as its adaptor was asked."""
    if persistent:
        return upstream.allocate_persistent(nbytes)
    return upstream.allocate(nbytes, stream, **options)


def report(error, where):
    """Tell ``sys.unraisablehook`` of an exception that nobody can be given."""
    report_unraisable(error, where)


def handle_or_zero(MemoryResource resource, stream):
    """Read a handle for the record of a failure, whose reason the stream may be."""
    cdef CUstream handle = NULL
    try:
        stream_handle(stream, resource.place, &handle)
    except Exception:
        return 0
    return <uintptr_t>handle


cdef int require_open(Adaptor adaptor) except -1:
    if adaptor.upstreams is None:
        raise TypeError(f"this {type(adaptor).__name__} was never initialised")
    run_deferred()
    if adaptor.is_closed:
        raise ClosedError(f"{adaptor!r} takes no calls any more")
    return require_own(adaptor)


cdef int require_own(Adaptor adaptor) except -1:
    # A thread of the parent may have held the lock at the fork.
    if place_is_dead(&adaptor.place.place):
        raise ClosedError(f"{adaptor!r} belongs to the parent process, or the interpreter is "
                          "ending")
    return 0


cdef int raise_over_limit(Adaptor adaptor, uint64_t size) except -1:
    cdef Counts now = counts_of(&adaptor.ledger)
    limit = LimitInForce("limit", adaptor.ledger.limit, now.current_bytes)
    raise OutOfMemoryError.of(OutOfMemoryReport(
        str(adaptor.memory), size, size, adaptor.name, limits=(limit,), in_use=now.current_bytes,
        reserved=now.current_bytes, largest_free=limit.limit - now.current_bytes,
        remedies=("free buffers of this adaptor, or raise its limit",)))


# ---- a block's way through the ledger ------------------------------------------------------------

cdef Buffer adopt(Adaptor adaptor, Buffer inner, uint64_t asked, bint persistent):
    """Make a Buffer of the adaptor's of one that an upstream handed out."""
    cdef Buffer buffer
    cdef AdaptedBlock* block
    if inner is None or inner.is_closed or inner.requested_bytes < asked:
        raise TypeError(f"{adaptor.upstreams!r} returned {inner!r}: an adaptor takes an open "
                        f"Buffer of at least {asked} bytes")
    buffer = buffer_of(adaptor, inner.address, inner.requested_bytes, 0, 0, inner.slot)
    buffer.home = inner.home
    if inner.block_bytes == 0:
        cancel(&adaptor.ledger, asked)
        return buffer
    note = adaptor._note(inner, persistent)
    block = <AdaptedBlock*>calloc(1, sizeof(AdaptedBlock))
    if block == NULL:
        raise MemoryError("no host memory for a block's books")
    block.deferred.run = tell_of_leased
    block.ledger = &adaptor.ledger
    block.asked = asked
    block.address = inner.address
    block.home = <PyObject*>inner.home
    block.inner = <PyObject*>inner
    Py_INCREF(inner)
    if note is not None:
        block.note = <PyObject*>note
        Py_INCREF(note)
    buffer.block_bytes = inner.block_bytes
    buffer.handle = <uintptr_t>block
    list_block(block)
    return buffer


cdef bint admit(Ledger* ledger, uint64_t size) noexcept nogil:
    """Count a block before it is taken, so that no limit is passed; False: it would be."""
    cdef Counts* counts = &ledger.counts
    cdef bint room
    lock_acquire(&ledger.lock)
    room = size <= ledger.limit - counts.current_bytes
    if room:
        counts.current_bytes += size
        counts.current_blocks += 1
    lock_release(&ledger.lock)
    return room


cdef int charge(Adaptor adaptor, uint64_t size) except -1:
    cdef Counts now
    if adaptor.ledger.account == NULL or size == 0:
        return 0
    now = counts_of(&adaptor.ledger)
    return admit_or_raise(adaptor.ledger.account, size, {
        "in_use": now.current_bytes - size, "reserved": now.current_bytes - size,
        "memory": str(adaptor.memory)})


cdef void uncharge(Ledger* ledger, uint64_t size) noexcept nogil:
    if ledger.account != NULL:
        budget_uncharge(ledger.account, size)


cdef void cancel(Ledger* ledger, uint64_t size) noexcept nogil:
    uncharge(ledger, size)
    uncount(ledger, size)


cdef void uncount(Ledger* ledger, uint64_t size) noexcept nogil:
    lock_acquire(&ledger.lock)
    ledger.counts.current_bytes -= size
    ledger.counts.current_blocks -= 1
    lock_release(&ledger.lock)


cdef void list_block(AdaptedBlock* block) noexcept nogil:
    cdef Ledger* ledger = block.ledger
    cdef Counts* counts = &ledger.counts
    lock_acquire(&ledger.lock)
    counts.peak_bytes = max(counts.peak_bytes, counts.current_bytes)
    counts.peak_blocks = max(counts.peak_blocks, counts.current_blocks)
    counts.total_bytes += block.asked
    counts.total_blocks += 1
    block.older = ledger.newest
    if ledger.newest != NULL:
        ledger.newest.newer = block
    ledger.newest = block
    lock_release(&ledger.lock)


cdef void take_back(AdaptedBlock* block) noexcept nogil:
    """Forget a block that the upstream has back. After a fork the child leaves the books alone."""
    cdef Ledger* ledger = block.ledger
    if place_is_dead(ledger.place):
        return
    block.time = gm_now()
    block.thread = gm_thread()
    lock_acquire(&ledger.lock)
    if block.newer != NULL:
        block.newer.older = block.older
    else:
        ledger.newest = block.older
    if block.older != NULL:
        block.older.newer = block.newer
    ledger.counts.current_bytes -= block.asked
    ledger.counts.current_blocks -= 1
    lock_release(&ledger.lock)
    uncharge(ledger, block.asked)


cdef void reset_peaks(Ledger* ledger) noexcept nogil:
    lock_acquire(&ledger.lock)
    ledger.counts.peak_bytes = ledger.counts.current_bytes
    ledger.counts.peak_blocks = ledger.counts.current_blocks
    lock_release(&ledger.lock)


cdef Counts counts_of(Ledger* ledger) noexcept nogil:
    cdef Counts now
    lock_acquire(&ledger.lock)
    now = ledger.counts
    lock_release(&ledger.lock)
    return now


cdef void release_lease(Lease* lease) noexcept nogil:
    cdef AdaptedBlock* block = <AdaptedBlock*><uintptr_t>lease.handle
    block.lease.stream = lease.stream
    block.lease.uses = lease.uses
    lease_drop(block.lease)
    take_back(block)
    defer(&block.deferred)


cdef void tell_of_leased(Deferred* work) noexcept:
    cdef AdaptedBlock* block = <AdaptedBlock*>work
    adaptor = <Adaptor>block.adaptor
    Py_DECREF(adaptor)      # the variable holds it now
    tell(adaptor, block)


cdef void tell(Adaptor adaptor, AdaptedBlock* block) noexcept:
    """Do what a block's end needs the interpreter for, and free the block."""
    cdef AdaptedBlock gone = block[0]
    free(block)
    Py_XDECREF(gone.note)
    if not adaptor.tells or place_is_dead(gone.ledger.place):
        return
    try:
        adaptor._taken_back(gone.address, gone.asked, gone.stream, gone.time, gone.thread)
    except BaseException as error:
        report_unraisable(error, adaptor)
