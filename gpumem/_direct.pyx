"""Resources whose every block is one call to somebody else; see _direct.pxd."""

from cpython.ref cimport Py_INCREF, Py_XDECREF, PyObject
from libc.stdint cimport int32_t, uint32_t, uint64_t, uintptr_t
from libc.stdlib cimport calloc, free, realloc

from gpumem._bfc cimport ABSURD
from gpumem._budget cimport account_of, admit_or_raise
from gpumem._budget_core cimport budget_charged, budget_drop, budget_room, budget_uncharge
from gpumem._buffer cimport (
    Buffer,
    MemoryResource,
    buffer_of,
    empty_buffer,
    refuse_shareable,
    resource_init,
    size_of,
)
from gpumem._core_settings cimport alignment_of
from gpumem._driver cimport CUstream, place_is_dead, process_is_exiting
from gpumem._lease cimport Lease, Uses, lease_create, uses_add, uses_free
from gpumem._recorder cimport (
    REC_ALLOC,
    REC_FAILURE,
    REC_FREE,
    RecEvent,
    RecNoted,
    TAP_DIRECT,
    tap_close,
    tap_name,
    tap_note,
    tap_open,
)
from gpumem._stream cimport Stream, stream_handle
from gpumem._support.lock cimport lock_acquire, lock_release
from gpumem._support.streams cimport LEGACY_STREAM, PER_THREAD_STREAM

from gpumem.device import _reapers
from gpumem.errors import ClosedError, InUseError, OutOfMemoryError
from gpumem.out_of_memory import absurd

cdef extern from *:
    """
    #include <sys/syscall.h>
    #include <unistd.h>
    static inline int32_t gm_direct_count(int32_t *count, int32_t by) {
        return __atomic_add_fetch(count, by, __ATOMIC_ACQ_REL);
    }
    static inline int32_t gm_direct_thread(void) { return (int32_t)syscall(SYS_gettid); }
    static inline void *gm_direct_swap(void **at, void *value) {
        return __atomic_exchange_n(at, value, __ATOMIC_ACQ_REL);
    }
    static inline int gm_direct_try(void **at, void *seen, void *value) {
        return __atomic_compare_exchange_n(at, &seen, value, 0, __ATOMIC_ACQ_REL,
                                           __ATOMIC_RELAXED);
    }
    """
    int32_t gm_direct_count(int32_t* count, int32_t by) noexcept nogil
    int32_t gm_direct_thread() noexcept nogil
    void* gm_direct_swap(void** at, void* value) noexcept nogil
    int gm_direct_try(void** at, void* seen, void* value) noexcept nogil

cdef extern from "Python.h":
    int Py_AddPendingCall(int (*function)(void*) noexcept, void* argument) noexcept nogil


# Cores that nothing refers to; what they keep goes when somebody has the interpreter lock. A
# stack without a lock, because the last reference may go anywhere, also in a fork's child.
cdef void* at_their_end = NULL


cdef class DirectResource(MemoryResource):
    """Base of resources that make one call for every block.

    It has no constructor of its own: make a `DriverPool` or an `ExternalAllocator`.
    """

    def __dealloc__(self):
        # The subclass keeps its attributes until here (no_gc_clear).
        if self.core == NULL:
            return
        Py_INCREF(self.kept)
        self.core.kept = <PyObject*>self.kept
        direct_drop(self.core)
        reap()

    @property
    def closed(self):
        """Whether `close` was called."""
        return self.core == NULL or bool(self.core.closed)

    def allocate(self, nbytes, stream=None, *, alignment=None, shareable=False):
        """Hand out a block.

        Parameters
        ----------
        nbytes : int
            Size in bytes; 0 gives a valid empty Buffer with pointer 0.
        stream : stream, optional
            The stream whose work uses the block first, and on which it goes back; None is the
            default stream of this resource.
        alignment : int, optional
            Bytes, a power of two up to 2 MiB. Where the other side promises less, that much more
            is asked for.
        shareable : bool
            True is refused: its blocks share memory with others. A `DriverPool` made with
            ``shareable=True`` exports them all the same.

        Returns
        -------
        Buffer
            Owns the block; dropping or closing it gives the block back.

        Raises
        ------
        TypeError, ValueError
            `nbytes` is no integer, or negative; `alignment` or `stream` is not accepted.
        OutOfMemoryError
            There is no memory left; nothing is changed.
        ConfigError
            `shareable`.
        ClosedError
            It is closed, or belongs to the parent of a fork.
        """
        cdef uint64_t size = size_of(nbytes)
        cdef uint64_t bound = 0 if alignment is None else alignment_of(alignment)
        cdef uint32_t slot = DEFAULT_SLOT
        self.require_open()
        refuse_shareable(self, shareable)
        self.slot_of(stream, &slot)
        return self.hand_out(size, slot, bound, False)

    def allocate_persistent(self, nbytes):
        """Hand out a long-lived block (weights).

        Parameters
        ----------
        nbytes : int
            Size in bytes.

        Raises
        ------
        TypeError, ValueError, OutOfMemoryError, ClosedError
            As `allocate`.
        """
        cdef uint64_t size = size_of(nbytes)
        return self.hand_out(size, DEFAULT_SLOT, 0, True)

    def reserve(self, nbytes):
        """Alias of `allocate_persistent`, ONNX Runtime's name."""
        return self.allocate_persistent(nbytes)

    def reset_stream(self, stream):
        """Declare a stream drained: its blocks go back on the default stream from now on.

        The caller has synchronised the stream. Required before the owner of a stream given as a
        raw handle destroys it; a stream given as an object is kept alive instead.

        Raises
        ------
        ClosedError
            It is closed, or belongs to the parent of a fork.
        """
        cdef uint32_t slot
        self.require_open()
        self.slot_of(stream, &slot)
        if slot != DEFAULT_SLOT:
            drain(self.core, slot)
            self.streams.pop(slot, None)

    def close(self):
        """Give it up. Idempotent.

        Raises
        ------
        InUseError
            A buffer, or a view of one, is still alive; nothing is changed.
        """
        cdef DirectCounters now
        if self.closed:
            return
        if place_is_dead(&self.place.place):
            self.core.closed = True
            return
        if close_core(self.core) != DIRECT_OK:
            now = direct_counters(self.core)
            raise InUseError(f"{self!r} cannot be closed: {now.requested} bytes in {now.live} "
                             "blocks are in use")
        self.settle()
        self.streams.clear()

    def __enter__(self):
        return self

    def __exit__(self, *exception):
        self.close()

    def __repr__(self):
        state = ", closed" if self.closed else ""
        return f"<gpumem.{type(self).__name__} {self.name!r} on {self.memory}{state}>"

    cdef int take(self, DirectBlock* block) except -1:
        raise NotImplementedError

    cdef int recover(self) except -1:
        return 0

    cdef int settle(self) except -1:
        return 0

    cdef int begin(self, DirectCore* core, memory, default_stream, name, budget,
                   count) except -1:
        """Fill in a core of zeros, which this object owns from here on."""
        cdef CUstream handle = NULL
        self.core = core
        core.references = 1
        resource_init(self, memory, name)
        core.place = &self.place.place
        core.account = account_of(budget, count, self.name, &core.counts_in_use)
        self.budget = budget
        self.kept = self.streams
        stream_handle(default_stream, self.place, &handle)
        core.streams = <StreamSlot*>calloc(1, sizeof(StreamSlot))
        if core.streams == NULL:
            raise MemoryError("no host memory for a resource's books")
        if <uintptr_t>handle == PER_THREAD_STREAM:
            self.default_per_thread = True
            handle = <CUstream><uintptr_t>LEGACY_STREAM     # waits for every thread's own
        core.streams[DEFAULT_SLOT].handle = handle
        core.stream_count = 1
        if default_stream is not None and not hasattr(default_stream, "__index__"):
            self.streams[DEFAULT_SLOT] = default_stream
        tap_name(&core.tap, str(self.memory).encode(), type(self).__name__.encode(),
                 self.name.encode("utf-8", "replace"))
        core.tap.budget = budget_charged(core.account)
        tap_open(&core.tap, core, TAP_DIRECT)
        return 0

    cdef int require_open(self) except -1:
        if self.closed:
            raise ClosedError(f"{self!r} takes no calls any more")
        return self.require_own()

    cdef int require_own(self) except -1:
        if self.core == NULL:
            raise ClosedError(f"this {type(self).__name__} was never initialised")
        if place_is_dead(&self.place.place):
            raise ClosedError(f"{self!r} belongs to the parent process, or the interpreter is "
                              "ending")
        return 0

    cdef Buffer hand_out(self, uint64_t requested, uint32_t slot, uint64_t alignment,
                         bint persistent):
        cdef uint64_t size = requested
        cdef uint64_t base
        cdef DirectBlock* block
        self.require_open()
        if requested == 0:
            return empty_buffer(self, slot)
        if alignment > self.granule:
            size += alignment - self.granule
        if size >= ABSURD:
            raise OutOfMemoryError.of(absurd(
                str(self.memory), requested, size, resource=self.name,
                stream=self.stream_at(slot)))
        block = self.claim(requested, size, slot, persistent)
        try:
            self.charge(block)
            self.take(block)
        except BaseException as error:
            if isinstance(error, MemoryError):
                note_block(block, REC_FAILURE)
            direct_unclaim(block)
            raise
        base = block.base
        return self.deliver(block, (base + alignment - 1) & ~(alignment - 1) if alignment else base)

    cdef DirectBlock* claim(self, uint64_t requested, uint64_t size, uint32_t slot,
                            bint persistent) except NULL:
        cdef DirectBlock* block = NULL
        cdef int status = claim_block(self.core, requested, size, slot, persistent, &block)
        if status == DIRECT_CLOSED:
            raise ClosedError(f"{self!r} takes no calls any more")
        if status != DIRECT_OK:
            raise MemoryError("no host memory for a block's books")
        return block

    cdef int charge(self, DirectBlock* block) except -1:
        if self.core.account == NULL:
            return 0
        if budget_room(self.core.account) < block.size:
            self.recover()
        now = direct_counters(self.core)
        admit_or_raise(self.core.account, block.size, {
            "asked": block.requested, "in_use": now.in_use, "reserved": now.in_use + now.waiting,
            "memory": str(self.memory),
            "stream": <uintptr_t>direct_stream_at(self.core, block.slot)})
        block.charged = block.size
        return 0

    cdef Buffer deliver(self, DirectBlock* block, uint64_t address):
        handed_out(block)
        try:
            return buffer_of(self, address, block.requested, block.size, <uintptr_t>block,
                             block.slot)
        except BaseException:
            self.core.give(block)
            raise

    # ---- what buffers ask ------------------------------------------------------------------------

    cdef int slot_of(self, object stream, uint32_t* slot) except -1:
        cdef CUstream handle = NULL
        if stream is None and self.default_per_thread:
            stream = PER_THREAD_STREAM
        if stream is None:
            slot[0] = DEFAULT_SLOT
            return 0
        self.require_own()
        stream_handle(stream, self.place, &handle)
        if find_stream(self.core, handle, slot) != DIRECT_OK:
            raise MemoryError("no host memory for a stream's books")
        if hasattr(stream, "__index__"):
            return 0            # a handle: its owner resets it before it ends
        # A stream that ends with its object must be that object; of others the first will do.
        if slot[0] not in self.streams or (isinstance(stream, Stream) and (<Stream>stream).owned):
            self.streams[slot[0]] = stream
        return 0

    cdef uint64_t stream_at(self, uint32_t slot) noexcept:
        return <uintptr_t>self.core.streams[slot].handle

    cdef void give_back(self, Buffer buffer) noexcept:
        cdef DirectBlock* block = <DirectBlock*><uintptr_t>buffer.handle
        block.slot = buffer.slot
        block.uses = buffer.uses
        with nogil:
            block.core.give(block)

    cdef Lease* lease(self, Buffer buffer) except NULL:
        cdef Lease* lease = lease_create(buffer.handle, buffer.address, buffer.block_bytes,
                                         buffer.slot, NULL, release_lease)
        if lease == NULL:
            raise MemoryError("no host memory for a view's lease")
        return lease

    cdef int record(self, Uses** uses, uint32_t slot) except -1:
        cdef bint added
        if not uses_add(uses, slot, &added):
            raise MemoryError("no host memory to note a stream")
        return 0


def reap():
    """Let go of what was kept for blocks whose resource is gone."""
    cdef DirectCore* core = <DirectCore*>gm_direct_swap(&at_their_end, NULL)
    cdef DirectCore* next_core
    while core != NULL:
        next_core = core.next
        tap_close(&core.tap)
        Py_XDECREF(core.kept)
        free(core.streams)
        free(core)
        core = next_core


cdef int reap_soon(void* nothing) noexcept:
    reap()
    return 0


_reapers.insert(0, reap)       # what is let go here may hold arenas


# ---- below the interpreter -----------------------------------------------------------------------

cdef void release_lease(Lease* lease) noexcept nogil:
    cdef DirectBlock* block = <DirectBlock*><uintptr_t>lease.handle
    block.slot = lease.stream
    block.uses = lease.uses
    block.core.give(block)


cdef void direct_drop(DirectCore* core) noexcept nogil:
    cdef void* seen
    if gm_direct_count(&core.references, -1) != 0:
        return
    core.end(core)
    budget_drop(core.account)
    while True:
        seen = at_their_end
        core.next = <DirectCore*>seen
        if gm_direct_try(&at_their_end, seen, core):
            break
    if not process_is_exiting():
        Py_AddPendingCall(reap_soon, NULL)


# ---- a block's way through the books -------------------------------------------------------------

cdef int claim_block(DirectCore* core, uint64_t requested, uint64_t size, uint32_t slot,
                     bint persistent, DirectBlock** out) noexcept nogil:
    """Count a block before it is taken, so that nobody closes the resource meanwhile."""
    cdef DirectBlock* block = <DirectBlock*>calloc(1, sizeof(DirectBlock))
    cdef bint closed
    if block == NULL:
        return DIRECT_NO_METADATA
    lock_acquire(&core.lock)
    closed = core.closed
    if not closed:
        core.counters.live += 1
    lock_release(&core.lock)
    if closed:
        free(block)
        return DIRECT_CLOSED
    gm_direct_count(&core.references, 1)
    block.core = core
    block.requested = requested
    block.size = size
    block.slot = slot
    block.persistent = persistent
    out[0] = block
    return DIRECT_OK


cdef void direct_unclaim(DirectBlock* block) noexcept nogil:
    cdef DirectCore* core = block.core
    uncharge(block)
    lock_acquire(&core.lock)
    core.counters.live -= 1
    lock_release(&core.lock)
    free(block)
    direct_drop(core)


cdef void uncharge(DirectBlock* block) noexcept nogil:
    # A fork's child has an empty budget: the block is its parent's.
    if block.charged and not place_is_dead(block.core.place):
        budget_uncharge(block.core.account, block.charged)
    block.charged = 0


cdef void handed_out(DirectBlock* block) noexcept nogil:
    cdef DirectCounters* counters = &block.core.counters
    lock_acquire(&block.core.lock)
    counters.num_allocs += 1
    counters.num_reserves += block.persistent
    counters.requested += block.requested
    counters.in_use += block.size
    counters.max_in_use = max(counters.max_in_use, counters.in_use)
    counters.max_held = max(counters.max_held, counters.in_use + counters.waiting)
    counters.max_block = max(counters.max_block, block.size)
    block.number = counters.num_allocs
    block.older = block.core.newest
    if block.older != NULL:
        block.older.newer = block
    block.core.newest = block
    lock_release(&block.core.lock)
    note_block(block, REC_ALLOC)


cdef void direct_returned(DirectBlock* block) noexcept nogil:
    cdef DirectCounters* counters = &block.core.counters
    if place_is_dead(block.core.place):
        return
    note_block(block, REC_FREE)
    lock_acquire(&block.core.lock)
    if block.newer != NULL:
        block.newer.older = block.older
    else:
        block.core.newest = block.older
    if block.older != NULL:
        block.older.newer = block.newer
    counters.live -= 1
    counters.num_frees += 1
    counters.requested -= block.requested
    counters.in_use -= block.size
    counters.waiting += block.size
    lock_release(&block.core.lock)
    if block.core.counts_in_use:
        uncharge(block)


cdef void note_block(DirectBlock* block, uint32_t kind) noexcept nogil:
    cdef RecEvent event
    cdef RecNoted noted
    if block.core.tap.recorder == NULL:
        return
    event.kind = kind
    event.address = block.base
    event.nbytes = block.requested
    event.block = block.size
    event.stream = <uint64_t>direct_stream_at(block.core, block.slot)
    tap_note(&block.core.tap, &event, True, &noted)


cdef void direct_gone(DirectBlock* block) noexcept nogil:
    cdef DirectCore* core = block.core
    direct_forget(block)
    direct_drop(core)


cdef void direct_forget(DirectBlock* block) noexcept nogil:
    cdef DirectCore* core = block.core
    if not place_is_dead(core.place):
        lock_acquire(&core.lock)
        core.counters.waiting -= block.size
        lock_release(&core.lock)
    uncharge(block)
    uses_free(block.uses)
    free(block)


cdef int close_core(DirectCore* core) noexcept nogil:
    cdef int status = DIRECT_OK
    lock_acquire(&core.lock)
    if core.counters.live:
        status = DIRECT_IN_USE
    else:
        core.closed = True
    lock_release(&core.lock)
    return status


cdef DirectCounters direct_counters(DirectCore* core) noexcept nogil:
    cdef DirectCounters now
    lock_acquire(&core.lock)
    now = core.counters
    lock_release(&core.lock)
    return now


cdef dict counted_fields(const DirectCounters* now):
    return {
        "in_use": now.in_use,
        "requested_in_use": now.requested,
        "max_in_use": now.max_in_use,
        "num_allocs": now.num_allocs,
        "num_frees": now.num_frees,
        "num_reserves": now.num_reserves,
        "num_extensions": 0,
        "num_regions": 0,
        "num_shrinkages": now.num_shrinks,
        "max_alloc_size": now.max_block,
        "largest_free": 0,
        "pages_moved": 0,
        "driver_calls": now.calls,
    }


cdef void direct_count_call(DirectCore* core, uint64_t shrinks) noexcept nogil:
    lock_acquire(&core.lock)
    core.counters.calls += 1
    core.counters.num_shrinks += shrinks
    lock_release(&core.lock)


# ---- streams -------------------------------------------------------------------------------------

cdef inline CUstream named(CUstream handle) noexcept nogil:
    # Handles 0 and 1 are both the legacy default stream.
    return NULL if <uintptr_t>handle == LEGACY_STREAM else handle


cdef int find_stream(DirectCore* core, CUstream handle, uint32_t* slot) noexcept nogil:
    """Find a stream's slot, or make one; each thread's own default stream is its own."""
    cdef int32_t thread = 0
    cdef StreamSlot* grown
    cdef uint32_t i
    cdef int status = DIRECT_OK
    if <uintptr_t>handle == PER_THREAD_STREAM:
        thread = gm_direct_thread()
    lock_acquire(&core.lock)
    for i in range(core.stream_count):
        if (named(core.streams[i].handle) == named(handle) and core.streams[i].thread == thread
                and not core.streams[i].drained):
            break
    else:
        i = core.stream_count
        grown = <StreamSlot*>realloc(core.streams, (i + 1) * sizeof(StreamSlot))
        if grown == NULL:
            status = DIRECT_NO_METADATA
        else:
            core.streams = grown
            grown[i].handle = handle
            grown[i].thread = thread
            grown[i].drained = False
            core.stream_count += 1
    lock_release(&core.lock)
    slot[0] = i
    return status


cdef void drain(DirectCore* core, uint32_t slot) noexcept nogil:
    lock_acquire(&core.lock)
    core.streams[slot] = core.streams[DEFAULT_SLOT]
    core.streams[slot].drained = True
    lock_release(&core.lock)


cdef CUstream direct_stream_at(DirectCore* core, uint32_t slot) noexcept nogil:
    cdef StreamSlot stream
    lock_acquire(&core.lock)
    stream = core.streams[slot]
    lock_release(&core.lock)
    if stream.thread and stream.thread != gm_direct_thread():
        # Another thread's default stream cannot be named here; the legacy stream waits for it.
        return <CUstream><uintptr_t>LEGACY_STREAM
    return stream.handle


cdef bint direct_is_default(DirectCore* core, uint32_t slot) noexcept nogil:
    cdef bint answer
    lock_acquire(&core.lock)
    answer = slot == DEFAULT_SLOT or core.streams[slot].drained
    lock_release(&core.lock)
    return answer
