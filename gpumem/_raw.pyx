"""Blocks of resources written in Python: one call makes a block, one ends it."""

from threading import get_ident

cimport cython
from cpython.object cimport PyObject
from cpython.ref cimport Py_DECREF, Py_INCREF
from libc.stdint cimport uint32_t, uint64_t, uintptr_t
from libc.stdlib cimport calloc, free

from gpumem._bfc cimport ABSURD
from gpumem._budget cimport account_of, admit_or_raise
from gpumem._budget_core cimport budget_charged, budget_drop, budget_uncharge
from gpumem._deferred cimport Deferred, defer, report_unraisable
from gpumem._driver cimport CUstream, DriverDevice, place_is_dead, process
from gpumem._lease cimport Lease, lease_create
from gpumem._recorder cimport (
    REC_ALLOC,
    REC_FAILURE,
    REC_FREE,
    RecEvent,
    RecNoted,
    TAP_RAW,
    tap_close,
    tap_name,
    tap_note,
    tap_open,
)
from gpumem._stream cimport Stream, stream_handle
from gpumem._support.streams cimport LEGACY_STREAM, PER_THREAD_STREAM

from gpumem.errors import ClosedError, InUseError, OutOfMemoryError
from gpumem.out_of_memory import absurd
from gpumem.stats import Stats


cdef RawBooks raw_books(DriverDevice place, object memory, dict streams, str name, object budget,
                        object count):
    cdef RawBooks books = RawBooks.__new__(RawBooks)
    books.account = account_of(budget, count, name, &books.counts_in_use)
    books.place = place
    books.memory = memory
    books.streams = streams
    books.streams[DEFAULT_SLOT] = Stream.from_handle(memory.device, 0)
    books.slots = {(0, 0): DEFAULT_SLOT}
    books.threads = {}
    tap_name(&books.tap, str(memory).encode(), b"user", name.encode("utf-8", "replace"))
    books.tap.budget = budget_charged(books.account)
    tap_open(&books.tap, <void*>books, TAP_RAW)
    return books


@cython.final
cdef class RawBooks:
    """Streams, counters and blocks of one resource."""

    def __dealloc__(self):
        tap_close(&self.tap)
        budget_drop(self.account)

    # ---- blocks ----------------------------------------------------------------------------------

    cdef RawBlock* take(self, object resource, uint64_t requested, uint64_t alignment,
                        uint32_t slot, bint persistent) except NULL:
        cdef uint64_t promised = self.memory.alignment
        cdef uint64_t size = requested
        cdef RawBlock* block
        if alignment > promised:
            size += alignment - promised
        if size >= ABSURD:
            raise OutOfMemoryError.of(absurd(
                str(self.memory), requested, size, stream=self.streams[slot].ptr,
                in_use=self.in_use, reserved=self.in_use))
        block = <RawBlock*>calloc(1, sizeof(RawBlock))
        if block == NULL:
            raise MemoryError("no host memory for a block's books")
        block.deferred.run = give_leased
        block.size = size
        block.requested = requested
        block.slot = slot
        block.generation = process.generation
        self.live += 1      # so that nobody closes the resource meanwhile
        try:
            self.charge(size, requested, slot)
            self.ask(resource, block, self.streams[slot])
        except BaseException as error:
            if isinstance(error, MemoryError):
                note_block(self, block, REC_FAILURE)
            self.live -= 1
            free(block)
            raise
        self.num_allocs += 1
        self.num_reserves += persistent
        self.requested += requested
        self.in_use += size
        self.max_in_use = max(self.max_in_use, self.in_use)
        self.max_block = max(self.max_block, size)
        block.number = self.num_allocs
        block.older = self.newest
        if block.older != NULL:
            block.older.newer = block
        self.newest = block
        note_block(self, block, REC_ALLOC)
        return block

    cdef void give(self, object resource, RawBlock* block) noexcept:
        # The only way back for a block.
        cdef RawBlock gone = block[0]
        if place_is_dead(&self.place.place) or gone.generation != process.generation:
            free(block)
            return
        note_block(self, block, REC_FREE)
        if block.newer != NULL:
            block.newer.older = block.older
        else:
            self.newest = block.older
        if block.older != NULL:
            block.older.newer = block.newer
        free(block)
        self.num_frees += 1
        self.requested -= gone.requested
        self.in_use -= gone.size
        if self.counts_in_use:
            self.uncharge(gone.size)
        call_deallocate(resource, gone.base, gone.size, stream_for_free(self, gone.slot))
        if not self.counts_in_use:
            self.uncharge(gone.size)
        self.live -= 1

    cdef int ask(self, object resource, RawBlock* block, object stream) except -1:
        try:
            block.base = call_allocate(resource, block.size, stream)
        except BaseException:
            self.uncharge(block.size)
            raise
        return 0

    cdef int charge(self, uint64_t size, uint64_t requested, uint32_t slot) except -1:
        if self.account != NULL:
            admit_or_raise(self.account, size, {
                "asked": requested, "in_use": self.in_use, "reserved": self.in_use,
                "memory": str(self.memory), "stream": self.streams[slot].ptr})
        return 0

    cdef void uncharge(self, uint64_t size) noexcept:
        if self.account != NULL:
            budget_uncharge(self.account, size)

    # ---- streams ---------------------------------------------------------------------------------

    cdef int find_slot(self, object stream, uint32_t* slot) except -1:
        cdef CUstream handle = NULL
        stream_handle(stream, self.place, &handle)
        number = <uintptr_t>handle
        if number == LEGACY_STREAM:
            number = 0
        thread = get_ident() if number == PER_THREAD_STREAM else 0
        found = self.slots.get((number, thread))
        # A stream that ends with its object must be that object; of others the first will do.
        if found is None or (isinstance(stream, Stream) and (<Stream>stream).owned):
            kept = stream if isinstance(stream, Stream) else Stream.from_handle(
                self.memory.device, number, None if isinstance(stream, int) else stream)
            if found is None:
                found = len(self.streams)
            self.streams[found] = kept
            self.slots[number, thread] = found
            if thread:
                self.threads[found] = thread
        slot[0] = found
        return 0

    cdef int reset(self, object stream) except -1:
        cdef uint32_t slot = DEFAULT_SLOT
        self.find_slot(stream, &slot)
        if slot != DEFAULT_SLOT:
            self.slots = {key: kept for key, kept in self.slots.items() if kept != slot}
            self.threads.pop(slot, None)
            self.streams[slot] = self.streams[DEFAULT_SLOT]
        return 0

    # ---- life ------------------------------------------------------------------------------------

    cdef int require_open(self, object resource) except -1:
        if self.closed:
            raise ClosedError(f"{resource!r} takes no calls any more")
        if place_is_dead(&self.place.place):
            raise ClosedError(f"{resource!r} belongs to the parent process, or the interpreter is "
                              "ending")
        return 0

    cdef int close(self, object resource) except -1:
        if self.live and not place_is_dead(&self.place.place):
            raise InUseError(f"{resource!r} cannot be closed: {self.requested} bytes in "
                             f"{self.live} blocks are in use")
        self.closed = True
        return 0

    cdef object stats(self):
        return Stats(
            limit=0,
            in_use=self.in_use,
            requested_in_use=self.requested,
            reserved=self.in_use,
            max_in_use=self.max_in_use,
            max_reserved=self.max_in_use,
            num_allocs=self.num_allocs,
            num_frees=self.num_frees,
            num_reserves=self.num_reserves,
            num_extensions=0,
            num_regions=0,
            num_shrinkages=0,
            max_alloc_size=self.max_block,
            largest_free=0,
            pages_moved=0,
            driver_calls=self.num_allocs + self.num_frees,
        )


cdef void note_block(RawBooks books, const RawBlock* block, uint32_t kind) noexcept:
    cdef RecEvent event
    cdef RecNoted noted
    if books.tap.recorder == NULL:
        return
    event.kind = kind
    event.address = block.base
    event.nbytes = block.requested
    event.block = block.size
    event.stream = books.streams[block.slot].ptr
    tap_note(&books.tap, &event, True, &noted)


# ---- what the class of the user does ----------------------------------------------------------

cdef uint64_t call_allocate(object resource, uint64_t size, object stream) except 0:
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
        call_deallocate(resource, number, size, stream)
        raise ValueError(f"{where} {number:#x}, which is no multiple of {alignment}: that is "
                         "the alignment that its memory promises")
    return number


cdef int call_deallocate(object resource, uint64_t address, uint64_t size, object stream) noexcept:
    try:
        resource.deallocate_raw(address, size, stream)
    except BaseException as error:
        report_unraisable(error, resource)
    return 0


cdef object stream_for_free(RawBooks books, uint32_t slot):
    # Another thread's default stream cannot be named here; the legacy stream waits for it.
    if books.threads.get(slot, get_ident()) != get_ident():
        return books.streams[DEFAULT_SLOT]
    return books.streams[slot]


# ---- leases --------------------------------------------------------------------------------------

cdef Lease* raw_lease(object resource, RawBooks books, RawBlock* block,
                      uint32_t slot) except NULL:
    cdef Lease* lease = lease_create(<uintptr_t>block, block.base, block.size, slot, NULL,
                                     release_lease)
    if lease == NULL:
        raise MemoryError("no host memory for a view's lease")
    Py_INCREF(resource)
    block.resource = <PyObject*>resource
    block.books = <PyObject*>books
    return lease


cdef void release_lease(Lease* lease) noexcept nogil:
    cdef RawBlock* block = <RawBlock*><uintptr_t>lease.handle
    block.slot = lease.stream
    defer(&block.deferred)


cdef void give_leased(Deferred* work) noexcept:
    cdef RawBlock* block = <RawBlock*>work
    resource = <object>block.resource
    Py_DECREF(resource)     # the variable holds it now
    (<RawBooks>block.books).give(resource, block)


cdef uint64_t raw_alignment(object alignment) except? 1:
    # NumPy's integers count, a bool does not.
    number = alignment
    if alignment is None:
        return 0
    if not isinstance(alignment, int) and hasattr(alignment, "__index__"):
        number = alignment.__index__()
    if (isinstance(number, bool) or not isinstance(number, int)
            or not 1 <= number <= 1 << 21 or number & (number - 1)):
        raise ValueError(f"alignment {alignment!r} is not a power of two from 1 to 2097152")
    return number
