"""ExternalAllocator: an existing allocator, called by callbacks, as a resource."""

cimport cython
from cpython.ref cimport Py_DECREF, Py_INCREF, PyObject
from libc.stdint cimport int64_t, uint32_t, uint64_t, uintptr_t

from gpumem._buffer cimport (
    BlockLedger, Buffer, ledger_count_call, ledger_counters, ledger_end, ledger_is_default,
    ledger_keep, ledger_make, ledger_move, ledger_return, ledger_stream, LedgerBlock,
    LedgerCounters, MemoryResource, resource_begin, resource_init,
)
from gpumem._native.driver cimport (
    AWAIT_EVENT, AWAIT_STREAM, context_enter, context_is_dead, context_leave, context_relax,
    context_restore, CU_EVENT_DISABLE_TIMING, CUDA_ERROR_NOT_READY, CUDA_SUCCESS, CUevent, CUstream,
    CUstreamCaptureMode, device_enter, DeviceContext, may_capture, point_wait,
)
from gpumem._support.clock cimport clock_ns, sleep_ns
from gpumem._support.interpreter cimport (
    interpreter_release, interpreter_restore, PyGILState_Check, PyThreadState,
)
from gpumem._support.lock cimport lock_acquire, lock_release
from gpumem._support.process cimport (
    call_soon, call_unraisable, process_interrupted, raise_interrupt,
)
from gpumem._support.retired cimport (
    queue_add, queue_put_first, queue_retired, retire, Retired, RetiredQueue,
)

from gpumem._support.releases import on_release
from gpumem._support.sizes import exact_size
from gpumem.errors import ConfigError, OutOfMemoryError, SourceError
from gpumem.stats import OutOfMemoryReport


# Blocks that users freed and that wait for a stream or for the interpreter lock. A view may be
# dropped on any thread, so blocks arrive in a list without a lock. `waiting` is the queue that they
# move to; the interpreter lock guards it.
cdef Retired* arriving = NULL
cdef RetiredQueue waiting = RetiredQueue(NULL, NULL)

cdef enum:
    OOM_WAIT = 1000000000       # ns, an arena's `oom_wait_ms` where none is set
    MAX_PAUSE = 1000000         # ns

cdef uint64_t NO_WAIT = 0
cdef uint64_t NO_END = <uint64_t>-1     # of a wait


@cython.final
@cython.no_gc_clear
cdef class ExternalAllocator(MemoryResource):
    """An existing allocator, called by callbacks, as a resource.

    Every allocation and every free is one call of a callback; no memory is cached or added. A
    callback is a Python callable, or the integer address of a C function with the
    signature of ONNX Runtime's options ``gpu_external_alloc``, ``gpu_external_free`` and
    ``gpu_external_empty_cache``. C functions are called without the interpreter lock, and all with
    the device of `memory` current.

    Parameters
    ----------
    alloc : callable or int
        ``alloc(nbytes) -> address``; ``void *alloc(size_t)``. None or 0 means that there is no
        memory. An exception reaches the caller of `allocate`, with nothing changed. Addresses are
        multiples of ``memory.alignment``; of 16, as those of ``malloc``, where that is the default
        and the CPU reaches the memory.
    free : callable or int
        ``free(address)``; ``void free(void *)``. May run on any thread. An exception is passed to
        `sys.unraisablehook`, Ctrl-C's to the main thread; the block counts as freed.
    empty_cache : callable or int, optional
        ``empty_cache()``; ``void empty_cache(void)``. Called by `shrink`, after a persistent
        block was freed, and once when `alloc` has no memory, before it is called again.
    memory : MemoryInfo, Device or str
        Where the addresses are.
    budget : Budget, optional
        The budget that its blocks are charged to, before they are allocated.
    count : {"reserved", "in_use"}
        The charge ends when `free` has returned, or when the user frees the block.
    default_stream : stream, optional
        `alloc` and `free` are ordered by this stream; None is the device's legacy default stream.
    name : str, optional
        Name used in error messages and reports.

    Attributes
    ----------
    callbacks : tuple
        `alloc`, `free` and `empty_cache`, as they were given.

    Raises
    ------
    ConfigError
        `alloc` or `free` is missing: they come together.
    SourceError
        Raised by `allocate`, with nothing changed. `alloc` returned an address that is misaligned,
        or a block that overlaps one that is not freed yet: it is freed at once. Or it returned the
        address of a block that is not freed yet: that is kept.
    TypeError, ValueError
        A callback is neither a callable nor an integer, or an address that cannot be one; the
        memory does not exist here.

    Examples
    --------
    >>> import ctypes, gpumem
    >>> libc = ctypes.CDLL(None)
    >>> address = [ctypes.cast(f, ctypes.c_void_p).value for f in (libc.malloc, libc.free)]
    >>> with gpumem.ExternalAllocator(*address, memory="host") as allocator:
    ...     allocator.allocate(100).nbytes
    100

    Notes
    -----
    Callbacks do not receive the stream. The external allocator must return memory that the stream
    of the allocation may use at once. A block of the default stream is freed at once, because the
    external allocator orders that stream. A block of another stream (``allocate(..., stream)``,
    ``buffer.close(stream)``) is freed when the work queued on that stream is done: at once if the
    stream is idle, else by a later call of gpumem; while a graph is captured on it, by a call after
    the capture. If `alloc` has no memory, or the budget no room, an allocation waits for such
    blocks for up to a second, and `close` until the streams are done; Ctrl-C ends both waits, and a
    later call frees the blocks that `close` waited for.

    The last view of a block may be dropped on a thread that does not run Python. A C function is
    called there; a Python callable is called soon after by the main thread, or by the next call
    of this allocator. After the interpreter began to end, and in a fork's child, nothing is
    called.
    """

    def __init__(self, alloc, free, empty_cache=None, *, memory, budget=None, count="reserved",
                 default_stream=None, name=None):
        """Take the arguments that the class describes."""
        cdef ExternalCore* core
        if self.ledger != NULL:
            raise TypeError("ExternalAllocator.__init__ called twice")
        if alloc is None or free is None:
            missing = "alloc" if alloc is None else "free"
            raise ConfigError(f"invalid {missing} = None: alloc and free are given together")
        function_alloc = address_of("alloc", alloc)
        function_free = address_of("free", free)
        function_empty = 0 if empty_cache is None else address_of("empty_cache", empty_cache)
        resource_init(self, memory, name)
        resource_begin(
            self,
            ledger_make(sizeof(ExternalCore), sizeof(ExternalBlock), external_free, NULL),
            "ExternalAllocator", default_stream, budget, count)
        core = external(self.ledger)
        core.alignment = alignment_of(self.memory, self.cpu_can_read)
        self.callbacks = (alloc, free, empty_cache)
        self.alloc = <ExternalAlloc><void*><uintptr_t>function_alloc
        core.free = <ExternalFree><void*><uintptr_t>function_free
        core.free_object = <PyObject*>free
        core.empty_cache = <ExternalEmptyCache><void*><uintptr_t>function_empty
        core.empty_cache_object = <PyObject*>empty_cache if empty_cache is not None else NULL

    def __dealloc__(self):
        # Blocks of C functions may outlive the object; their streams stay with them (no_gc_clear).
        ledger_keep(self.ledger, self.streams)

    def shrink(self):
        """Call `empty_cache`, if there is one.

        Returns
        -------
        ShrinkReport
            Nothing released: an external allocator does not report it.

        Raises
        ------
        ClosedError
            It is closed, or belongs to the parent of a fork.
        Exception
            The exception of `empty_cache`.
        """
        self.require_open()
        free_own(self, NO_WAIT)
        self.call_empty_cache()
        ledger_count_call(self.ledger, 1)
        return MemoryResource.shrink(self)

    def stats(self):
        """Return the counters of this moment as `Stats`; reserved counts blocks not yet freed.

        Raises
        ------
        ClosedError
            It belongs to the parent of a fork.
        """
        self.require_own()
        free_waiting()
        return MemoryResource.stats(self)

    # ---- blocks ----------------------------------------------------------------------------------

    cdef int take_block(self, LedgerBlock* block) except -1:
        free_waiting()
        block.base = self.call_alloc(block.size)
        # Memory may be held by blocks that wait for a stream, and by the allocator's own cache.
        if block.base == 0 and free_own(self, NO_WAIT):
            block.base = self.call_alloc(block.size)
        if block.base == 0:
            waited = free_own(self, clock_ns() + OOM_WAIT)
            # Both are emptied before one more try; without either a try would fail again.
            if self.call_empty_cache() or waited:
                block.base = self.call_alloc(block.size)
        if block.base == 0:
            raise_out_of_memory(self, block)
        return self.hold(block)

    cdef int hold(self, LedgerBlock* block) except -1:
        """Note an address that was just returned, unless it cannot be used."""
        cdef ExternalCore* core = external(self.ledger)
        cdef LedgerBlock other
        if block.base & (core.alignment - 1):
            free_unusable(core, block.base)
            wrong = f"is not a multiple of {core.alignment}"
        elif not held_add(core, <ExternalBlock*>block, &other):
            wrong = "it returned before and that is not freed"
            # The same address is not freed: a block in use lies there.
            if other.base != block.base:
                free_unusable(core, block.base)
                wrong = f"overlaps {exact_size(other.size)} at {other.base:#x} that {wrong}"
        else:
            if needs_interpreter(block):
                block.owner = <PyObject*>self
                Py_INCREF(self)
            return 0
        raise SourceError(f"alloc of {self!r} returned {block.base:#x} for "
                          f"{exact_size(block.size)}, which {wrong}")

    cdef uint64_t call_alloc(self, uint64_t nbytes) except? 0:
        cdef void* address
        device_enter(self.ledger.context, "cuCtxPushCurrent")
        ledger_count_call(self.ledger, 0)
        try:
            if self.alloc != NULL:
                with nogil:
                    address = self.alloc(nbytes)
                return <uintptr_t>address
            given = self.callbacks[0](nbytes)
        finally:
            context_leave(self.ledger.context)
        # Without an allocation, which could fail: the memory behind the address would be lost.
        if type(given) is int and 0 <= given < 1 << 64:
            return given
        return 0 if given is None else number_of("alloc returned", given, 0)

    cdef bint call_empty_cache(self) except -1:
        """Call `empty_cache`; False: there is none."""
        cdef ExternalCore* core = external(self.ledger)
        if core.empty_cache_object == NULL:
            return False
        device_enter(self.ledger.context, "cuCtxPushCurrent")
        try:
            if core.empty_cache == NULL:
                self.callbacks[2]()
            else:
                with nogil:
                    core.empty_cache()
        finally:
            context_leave(self.ledger.context)
        return True

    cdef int make_room(self, uint64_t nbytes) except -1:
        # Waiting blocks are charged only if a charge lasts until the memory is freed.
        if not self.ledger.counts_in_use and free_own(self, NO_WAIT) < <int64_t>nbytes:
            free_own(self, clock_ns() + OOM_WAIT)
        return 0

    cdef int finish_close(self) except -1:
        free_own(self, NO_END)
        # A block that waits for a capture still needs its stream.
        if ledger_counters(self.ledger).waiting == 0:
            self.streams.clear()
        return 0

    cdef void free_buffer(self, Buffer buffer) noexcept:
        # Caller holds the interpreter lock, which Python callables need.
        cdef LedgerBlock* block = <LedgerBlock*><uintptr_t>buffer.handle
        ledger_move(block, buffer.slot)
        block.uses = buffer.uses
        external_free(block)


# ---- arguments -----------------------------------------------------------------------------------

def address_of(what, function):
    """Return a C function's address, or 0 for a Python callable."""
    if callable(function):
        return 0
    return number_of(f"{what} =", function, 1)


def number_of(what, value, int low):
    """Return an address; `what` names its origin in errors."""
    if isinstance(value, bool) or not hasattr(value, "__index__"):
        raise TypeError(f"invalid {what} {value!r}: expected "
                        + ("a callable or the address of a C function" if low else
                           "an address, or None"))
    number = value.__index__()
    if not low <= number < 1 << 64:
        raise ValueError(f"{what} {number} is not an address from {low} to 2**64 - 1")
    return number


cdef uint64_t alignment_of(object memory, bint cpu_can_read) except 0:
    # Blocks of malloc are usable: 256 bytes are the alignment of a GPU's own memory.
    return 16 if cpu_can_read and memory.alignment == 256 else memory.alignment


cdef int raise_out_of_memory(ExternalAllocator allocator, LedgerBlock* block) except -1:
    cdef LedgerCounters now = ledger_counters(allocator.ledger)
    raise OutOfMemoryError.of(OutOfMemoryReport(
        str(allocator.memory), block.requested, block.size, allocator.name,
        <uintptr_t>ledger_stream(block.ledger, block.slot), in_use=now.in_use,
        reserved=now.in_use + now.waiting, waiting=now.waiting,
        remedies=("free buffers, or see the external allocator for the reason",)))


# ---- frees ---------------------------------------------------------------------------------------

cdef inline ExternalCore* external(BlockLedger* ledger) noexcept nogil:
    return <ExternalCore*>ledger


cdef inline bint needs_interpreter(LedgerBlock* block) noexcept nogil:
    cdef ExternalCore* core = external(block.ledger)
    return core.free == NULL or (block.persistent and core.empty_cache == NULL
                                 and core.empty_cache_object != NULL)


cdef void external_free(LedgerBlock* block) noexcept nogil:
    """Free a user's block, on any thread, with the interpreter lock or without."""
    cdef bint done
    ledger_return(block, True)
    if context_is_dead(block.ledger.context):
        ledger_end(block, True)
        return
    # It is freed at once if no stream and no lock has to be waited for; else by a later call.
    done = streams_are_done(block)
    if (done and (PyGILState_Check() or not needs_interpreter(block))
            and reaches_driver(block.ledger.context)):
        call_free_of(block)
    else:
        queue_for_later(block)


cdef bint reaches_driver(DeviceContext* context) noexcept nogil:
    # False inside a function that a stream runs on the host: no device can be made current there.
    if context_enter(context) != CUDA_SUCCESS:
        return False
    context_leave(context)
    return True


cdef void queue_for_later(LedgerBlock* block) noexcept nogil:
    retire(&arriving, &block.deferred.link, block)
    # A thread with the interpreter lock leaves it to the next call of gpumem.
    if not PyGILState_Check():
        call_soon(free_arrived)


cdef inline void call_free_of(LedgerBlock* block) noexcept nogil:
    if needs_interpreter(block):
        call_free_with_interpreter(block)
    else:
        call_free(block)


cdef void call_free(LedgerBlock* block) noexcept nogil:
    """Call C functions, without the interpreter lock."""
    cdef ExternalCore* core = external(block.ledger)
    # A C function may block, or wait for a thread that needs the interpreter lock.
    cdef PyThreadState* state = interpreter_release()
    cdef bint entered
    held_remove(core, <ExternalBlock*>block)    # first: the address may be returned again at once
    entered = context_enter(core.ledger.context) == CUDA_SUCCESS
    core.free(<void*><uintptr_t>block.base)
    if block.persistent and core.empty_cache != NULL:
        core.empty_cache()
    if entered:
        context_leave(core.ledger.context)
    ledger_count_call(&core.ledger, 0)
    ledger_end(block, True)
    interpreter_restore(state)


cdef void call_free_with_interpreter(LedgerBlock* block) noexcept with gil:
    cdef ExternalCore* core = external(block.ledger)
    cdef ExternalAllocator owner = <ExternalAllocator>block.owner
    cdef bint entered = context_enter(core.ledger.context) == CUDA_SUCCESS
    held_remove(core, <ExternalBlock*>block)    # first: the address may be returned again at once
    free_address(core, block.base)
    if block.persistent and core.empty_cache != NULL:
        with nogil:
            core.empty_cache()
    elif block.persistent and core.empty_cache_object != NULL:
        call_unraisable(<object>core.empty_cache_object, (), <object>core.empty_cache_object)
    if entered:
        context_leave(core.ledger.context)
    ledger_count_call(&core.ledger, 0)
    ledger_end(block, True)
    Py_DECREF(owner)


cdef void free_unusable(ExternalCore* core, uint64_t address) noexcept:
    """Free an address that no block has, at once."""
    cdef bint entered = context_enter(core.ledger.context) == CUDA_SUCCESS
    free_address(core, address)
    if entered:
        context_leave(core.ledger.context)
    ledger_count_call(&core.ledger, 0)


cdef void free_address(ExternalCore* core, uint64_t address) noexcept:
    if core.free != NULL:
        with nogil:
            core.free(<void*><uintptr_t>address)
    else:
        try:
            given = (address,)
        except MemoryError:     # the next request for a few bytes may succeed
            given = (address,)
        call_unraisable(<object>core.free_object, given, <object>core.free_object)


# ---- addresses that are not freed yet ------------------------------------------------------------

cdef bint held_add(ExternalCore* core, ExternalBlock* block, LedgerBlock* other) noexcept nogil:
    """Add a block; False: `other` is a copy of one that lies there."""
    cdef ExternalBlock* found
    lock_acquire(&core.ledger.lock)
    # The block that its address lies in comes first, because that may be the address of both.
    found = find_overlap(core.held, block.block.base, 1)
    if found == NULL:
        found = find_overlap(core.held, block.block.base, block.block.size)
    if found == NULL:
        held_insert(&core.held, block)
    else:
        other[0] = found.block
    lock_release(&core.ledger.lock)
    return found == NULL


cdef ExternalBlock* find_overlap(ExternalBlock* root, uint64_t base, uint64_t size) noexcept nogil:
    cdef LedgerBlock* at
    while root != NULL:
        at = &root.block
        if at.base >= base and at.base - base >= size:
            root = root.lower
        elif base >= at.base and base - at.base >= at.size:
            root = root.higher
        else:
            break
    return root


cdef inline uint64_t priority(const ExternalBlock* block) noexcept nogil:
    # A parent's priority is higher. It is a hash, so the tree is about as deep as a balanced one.
    cdef uint64_t mixed = block.block.base * <uint64_t>0x9E3779B97F4A7C15
    return (mixed ^ mixed >> 32) * <uint64_t>0x9E3779B97F4A7C15


cdef inline ExternalBlock** side_of(ExternalBlock* parent,
                                    const ExternalBlock* block) noexcept nogil:
    return &parent.lower if block.block.base < parent.block.base else &parent.higher


cdef void held_insert(ExternalBlock** link, ExternalBlock* block) noexcept nogil:
    cdef ExternalBlock* below
    cdef ExternalBlock** lower = &block.lower
    cdef ExternalBlock** higher = &block.higher
    while link[0] != NULL and priority(link[0]) >= priority(block):
        link = side_of(link[0], block)
    below = link[0]
    link[0] = block
    # The subtree that was there is divided into its two children.
    while below != NULL:
        if below.block.base < block.block.base:
            lower[0] = below
            lower = &below.higher
            below = below.higher
        else:
            higher[0] = below
            higher = &below.lower
            below = below.lower
    lower[0] = NULL
    higher[0] = NULL


cdef void held_remove(ExternalCore* core, ExternalBlock* block) noexcept nogil:
    cdef ExternalBlock** link = &core.held
    cdef ExternalBlock* lower
    cdef ExternalBlock* higher
    lock_acquire(&core.ledger.lock)
    while link[0] != block:
        link = side_of(link[0], block)
    lower, higher = block.lower, block.higher
    # Its two children become one tree.
    while lower != NULL and higher != NULL:
        if priority(lower) >= priority(higher):
            link[0] = lower
            link = &lower.higher
            lower = lower.higher
        else:
            link[0] = higher
            link = &higher.lower
            higher = higher.lower
    link[0] = lower if lower != NULL else higher
    lock_release(&core.ledger.lock)


# ---- waiting -------------------------------------------------------------------------------------

# A block waits for the stream it was freed on, and for those recorded for it: its marks, numbered
# from 0. Each has an event after the work queued at the free; NULL: wait for the whole stream.
cdef inline uint32_t mark_count(const LedgerBlock* block) noexcept nogil:
    return 1 if block.uses == NULL else 1 + block.uses.count


cdef inline CUevent* mark_event(LedgerBlock* block, uint32_t mark) noexcept nogil:
    if mark == 0:
        return &(<ExternalBlock*>block).event
    return <CUevent*>&block.uses.at[mark - 1].until


cdef inline uint32_t mark_slot(const LedgerBlock* block, uint32_t mark) noexcept nogil:
    return block.slot if mark == 0 else block.uses.at[mark - 1].slot


cdef bint streams_are_done(LedgerBlock* block) noexcept nogil:
    """Return whether every stream has passed the block; record events after queued work."""
    cdef bint done = True
    cdef uint32_t mark
    for mark in range(mark_count(block)):
        # The loop continues after a stream that is not done: each needs its event now.
        mark_event(block, mark)[0] = NULL
        done &= stream_is_done(block.ledger, mark_slot(block, mark), mark_event(block, mark))
    return done


cdef bint stream_is_done(BlockLedger* ledger, uint32_t slot, CUevent* event) noexcept nogil:
    cdef DeviceContext* context = ledger.context
    cdef PyThreadState* state = NULL
    cdef CUstream stream
    cdef bint done
    if ledger_is_default(ledger, slot) or context_enter(context) != CUDA_SUCCESS:
        return True         # the external allocator orders it; without a context no work is queued
    # Without an event, because none could be made or a capture would include it, the stream is
    # queried again later.
    stream = ledger_stream(ledger, slot)
    done = is_idle(context, stream)
    if (not done and not may_capture(context, stream)
            and context.table.cuEventCreate(event, CU_EVENT_DISABLE_TIMING) == CUDA_SUCCESS):
        # The stream's queue may be full, and wait for a Python thread.
        state = interpreter_release()
        if context.table.cuEventRecord(event[0], stream) != CUDA_SUCCESS:
            context.table.cuEventDestroy(event[0])
            event[0] = NULL         # has_passed then queries the whole stream
        interpreter_restore(state)
    context_leave(context)
    return done


cdef bint is_idle(DeviceContext* context, CUstream stream) noexcept nogil:
    return (not may_capture(context, stream)
            and context.table.cuStreamQuery(stream) != CUDA_ERROR_NOT_READY)


cdef bint all_have_passed(LedgerBlock* block) noexcept nogil:
    """Return whether every stream has passed the block."""
    cdef uint32_t mark
    if context_is_dead(block.ledger.context):
        return True
    for mark in range(mark_count(block)):
        if not has_passed(block.ledger, mark_slot(block, mark), mark_event(block, mark)[0]):
            return False
    return True


cdef bint has_passed(BlockLedger* ledger, uint32_t slot, CUevent event) noexcept nogil:
    """Return whether a stream has reached an event; without an event, whether it is idle."""
    cdef DeviceContext* context = ledger.context
    cdef CUstreamCaptureMode mode
    cdef bint done
    if ledger_is_default(ledger, slot) or context_enter(context) != CUDA_SUCCESS:
        return True
    mode = context_relax(context)       # the calling thread may capture on another stream
    if event != NULL:
        done = context.table.cuEventQuery(event) != CUDA_ERROR_NOT_READY
    else:
        done = is_idle(context, ledger_stream(ledger, slot))
    context_restore(context, mode)
    context_leave(context)
    return done


cdef bint wait_until_passed(LedgerBlock* block, uint64_t until,
                            bint* interrupted) noexcept nogil:
    """Wait for every stream to pass the block, until a time of `clock_ns` or Ctrl-C."""
    cdef uint32_t mark
    cdef uint64_t begin = clock_ns()
    cdef uint64_t now = begin
    cdef bint done = all_have_passed(block)
    if not done and until == NO_END:
        for mark in range(mark_count(block)):
            if not interrupted[0]:
                wait_for_mark(block.ledger, mark_slot(block, mark), mark_event(block, mark)[0],
                              interrupted)
        return not interrupted[0] and all_have_passed(block)
    while not done and now < until and not interrupted[0]:
        sleep_ns(min(1 + (now - begin) // 128, <uint64_t>MAX_PAUSE))
        interrupted[0] = process_interrupted()
        done = all_have_passed(block)
        now = clock_ns()
    return done


cdef void wait_for_mark(BlockLedger* ledger, uint32_t slot, CUevent event,
                        bint* interrupted) noexcept nogil:
    cdef CUstream stream
    if has_passed(ledger, slot, event):
        return
    if event != NULL:
        point_wait(ledger.context, AWAIT_EVENT, event, interrupted)
        return
    # A capture may only end on this thread, so it is not waited for.
    stream = ledger_stream(ledger, slot)
    if not may_capture(ledger.context, stream):
        point_wait(ledger.context, AWAIT_STREAM, stream, interrupted)


cdef bint free_waiting():
    """Free the oldest blocks that all streams have passed; return whether one was freed.

    Callbacks may call this again, and other threads too while a C function runs or a stream is
    waited for: a block is unlinked first.
    """
    cdef LedgerBlock* block
    cdef bint freed = False
    while True:
        queue_retired(&waiting, &arriving)
        # Only the oldest is examined, because every call of a resource calls this.
        if waiting.oldest == NULL or not all_have_passed(<LedgerBlock*>waiting.oldest.thing):
            return freed
        block = unlink_first(NULL)
        end_waiting(block)
        freed = True


cdef int64_t free_own(ExternalAllocator of, uint64_t until) except -1:
    """Free all waiting blocks of an allocator, waiting until a time; return the freed bytes.

    Blocks that are not done by then, or that Ctrl-C ended the wait for, stay the oldest.
    """
    cdef RetiredQueue kept = RetiredQueue(NULL, NULL)
    cdef LedgerBlock* block
    cdef int64_t freed = 0
    cdef bint interrupted = False
    cdef bint done
    while not interrupted:
        queue_retired(&waiting, &arriving)
        block = unlink_first(of.ledger)
        if block == NULL:
            break
        with nogil:
            done = wait_until_passed(block, until, &interrupted)
        if done:
            freed += block.size
            end_waiting(block)
        else:
            queue_add(&kept, &block.deferred.link)
    queue_put_first(&waiting, &kept)
    if interrupted:
        raise_interrupt()
    return freed


cdef void end_waiting(LedgerBlock* block) noexcept:
    cdef DeviceContext* context = block.ledger.context
    cdef CUevent event
    cdef uint32_t mark
    if context_is_dead(context):
        ledger_end(block, True)
        return
    for mark in range(mark_count(block)):
        event = mark_event(block, mark)[0]
        if event != NULL and context_enter(context) == CUDA_SUCCESS:
            context.table.cuEventDestroy(event)
            context_leave(context)
    call_free_of(block)


cdef LedgerBlock* unlink_first(const BlockLedger* of) noexcept:
    """Unlink the oldest block, with `of` that ledger's oldest; NULL: there is none."""
    cdef Retired* before = NULL
    cdef Retired* link = waiting.oldest
    while of != NULL and link != NULL and (<LedgerBlock*>link.thing).ledger != of:
        before = link
        link = link.next
    if link == NULL:
        return NULL
    if before == NULL:
        waiting.oldest = link.next
    else:
        before.next = link.next
    # The queue is singly linked: its end moves if the last block is unlinked.
    if waiting.newest == link:
        waiting.newest = before
    return <LedgerBlock*>link.thing


cdef void free_arrived() noexcept:
    free_waiting()


on_release("callbacks", lambda may_wait: free_waiting())     # a callback may release arenas
