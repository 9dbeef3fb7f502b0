"""gpumem's side of include/gpumem.h: an arena's functions for C.

They are thin over `allocator_hooks`, which PyTorch's hooks call too: streams by native handle,
blocks by address, no interpreter.
"""

from cpython.pycapsule cimport PyCapsule_GetPointer, PyCapsule_New
from libc.stddef cimport size_t
from libc.stdint cimport int32_t, uint32_t, uint64_t, uint8_t, uintptr_t
from libc.stdlib cimport calloc, free
from libc.string cimport memcpy, strdup

from gpumem._arena cimport allocate_under_pressure, Arena, arena_take_on, raise_status
from gpumem._buffer cimport Buffer, Stream
from gpumem._native.arena.api cimport (
    AllocatorHook, ARENA_ASLEEP, ARENA_CAPTURING, ARENA_CLOSED, arena_context, arena_counts,
    ARENA_DEAD, ARENA_DRIVER_REFUSED, ARENA_NO_METADATA, ARENA_NO_STREAM_SLOT, ARENA_OK,
    ARENA_OVER_BUDGET, arena_refusal, arena_shrink, ARENA_STALE, arena_stream, ArenaCore,
    ArenaCounts, hook_allocate, hook_core, hook_create, hook_drop, hook_free, hook_free_on,
    hook_live, hook_record,
)
from gpumem._native.driver cimport (
    context_enter, context_is_dead, context_leave, CUDA_ERROR_OUT_OF_MEMORY, CUDA_SUCCESS, CUgraph,
    CUresult, CUstream, DeviceContext, stream_captures,
)
from gpumem._support.atomics cimport count_add, load32, published32, store32
from gpumem._support.process cimport defer, Deferred, interrupt_again, process_is_exiting
from gpumem._support.streams cimport LEGACY_STREAM

from gpumem._support.events import FRAMEWORKS
from gpumem.errors import ClosedError, ConfigError, OutOfMemoryError


cdef extern from "gpumem.h" nogil:
    enum:
        GPUMEM_VERSION
        GPUMEM_OK
        GPUMEM_OUT_OF_MEMORY
        GPUMEM_INVALID
        GPUMEM_NOT_FOUND
        GPUMEM_CLOSED
        GPUMEM_CAPTURING
        GPUMEM_NO_HOST_MEMORY
        GPUMEM_DRIVER_ERROR
        GPUMEM_STATUSES
    const char* GPUMEM_CAPSULE

    ctypedef struct gpumem_stats:
        size_t size
        uint64_t in_use
        uint64_t max_in_use
        uint64_t reserved
        uint64_t max_reserved
        uint64_t limit
        uint64_t allocations
        uint64_t frees

    # The functions take a gpumem_arena*, which Cython cannot name before it is defined.
    ctypedef struct gpumem_calls:
        uint32_t version
        uint32_t size
        int (*allocate)(gpumem_arena*, size_t, size_t, void*, void**)
        int (*deallocate)(gpumem_arena*, void*)
        int (*deallocate_on)(gpumem_arena*, void*, void*)
        int (*record_stream)(gpumem_arena*, void*, void*)
        int (*stats)(gpumem_arena*, gpumem_stats*)
        int (*shrink)(gpumem_arena*, uint64_t*)
        const char* (*text)(int)
        int (*synchronize)(gpumem_arena*, void*)
        char* (*report)(gpumem_arena*, size_t, void*, int)
        void (*retain)(gpumem_arena*)
        void (*release)(gpumem_arena*)

    ctypedef struct gpumem_arena:
        const gpumem_calls* calls
        const void* identity
        int32_t device

cdef enum:
    MAX_ALIGNMENT = 256     # every block has it

# An arena that C uses. `handed` has the Arena as long as there are references.
cdef struct Handed:
    gpumem_arena arena          # the first member: the part that C sees
    AllocatorHook* hook
    bint captures               # streams may capture graphs: the driver is queried for it
    uint32_t refused            # ArenaStatus of the last allocation that failed (atomic)
    int32_t references          # the capsule's, those of `retain`, its captured blocks' (atomic)
    Deferred end

cdef dict handed = {}           # address of a Handed -> its Arena
# Of all arenas, since a block may be freed through any of them.
cdef dict captured = {}         # address of a graph pool's block -> Buffer, address of its Handed
cdef int32_t captured_blocks = 0    # entries of it (atomic): so that a free knows without Python
cdef gpumem_calls calls
cdef const char* texts[16]


cdef enum BlockCall:
    FREE                        # on the stream that the block was allocated for
    FREE_ON_STREAM              # on the given one
    RECORD                      # the given stream uses the block too


# ---- the functions -------------------------------------------------------------------------------

cdef int allocate(gpumem_arena* arena, size_t nbytes, size_t alignment, void* stream,
                  void** address) noexcept nogil:
    cdef AllocatorHook* hook = (<Handed*>arena).hook
    cdef int status
    address[0] = NULL
    if alignment > MAX_ALIGNMENT or alignment & (alignment - 1):
        return GPUMEM_INVALID
    if nbytes == 0:
        return GPUMEM_OK
    if (<Handed*>arena).captures and is_capturing(hook, <CUstream>stream):
        return allocate_captured(<Handed*>arena, nbytes, <CUstream>stream, <uint64_t*>address)
    status = hook_allocate(hook, nbytes, <CUstream>stream, 0, <uint64_t*>address)
    if status == ARENA_OK:
        return GPUMEM_OK
    if status == ARENA_OVER_BUDGET:
        status = allocate_under_pressure(hook, nbytes, <CUstream>stream, 0, <uint64_t*>address)
    store32(&(<Handed*>arena).refused, status)
    return status_of(hook_core(hook), status)


cdef int deallocate(gpumem_arena* arena, void* address) noexcept nogil:
    return call_block(FREE, <uint64_t>address, NULL)


cdef int deallocate_on(gpumem_arena* arena, void* address, void* stream) noexcept nogil:
    return call_block(FREE_ON_STREAM, <uint64_t>address, <CUstream>stream)


cdef int record_stream(gpumem_arena* arena, void* address, void* stream) noexcept nogil:
    return call_block(RECORD, <uint64_t>address, <CUstream>stream)


cdef inline int call_block(BlockCall call, uint64_t address, CUstream stream) noexcept nogil:
    cdef int status = GPUMEM_OK
    if address == 0 or is_captured(call, address, stream, &status):
        return status
    if call == FREE:
        status = hook_free(address)
    elif call == FREE_ON_STREAM:
        status = hook_free_on(address, stream)
    else:
        status = hook_record(address, stream)
    return status_of(NULL, status)


# ---- captures: a graph pool's blocks are Buffers, by address -------------------------------------

cdef bint is_capturing(AllocatorHook* hook, CUstream stream) noexcept nogil:
    cdef uint64_t capture
    cdef CUgraph graph
    cdef CUresult refusal
    # The legacy stream cannot capture.
    if <uint64_t>stream <= LEGACY_STREAM or context_is_dead(arena_context(hook_core(hook))):
        return False
    return stream_captures(arena_context(hook_core(hook)), stream, &capture, &graph, &refusal)


cdef int allocate_captured(Handed* given, uint64_t nbytes, CUstream stream,
                           uint64_t* address) noexcept with gil:
    cdef Buffer buffer
    arena = handed[<uintptr_t>given]
    store32(&given.refused, ARENA_OK)       # it has no report
    try:
        buffer = arena_take_on(arena, nbytes, stream_of(arena, stream))
    except OutOfMemoryError:
        return GPUMEM_OUT_OF_MEMORY
    except BaseException as error:
        interrupt_again(error)
        return GPUMEM_CAPTURING
    captured[buffer.address] = buffer, <uintptr_t>given
    retain(&given.arena)
    count_add(&captured_blocks, 1)
    address[0] = buffer.address
    return GPUMEM_OK


cdef inline bint is_captured(BlockCall call, uint64_t address, CUstream stream,
                             int* status) noexcept nogil:
    # Returns False if no such block begins there; nothing is done then.
    return published32(<uint32_t*>&captured_blocks) != 0 and not process_is_exiting() and (
        call_captured(call, address, stream, status))


cdef bint call_captured(BlockCall call, uint64_t address, CUstream stream,
                        int* status) noexcept with gil:
    cdef Buffer buffer
    cdef uintptr_t given
    if address not in captured:
        return False
    buffer, given = captured[address]
    status[0] = GPUMEM_OK
    try:
        named = None if call == FREE else stream_of(handed[given], stream)
        if call == RECORD:
            buffer.record_stream(named)
            return True
        # Before the free: after it the address may be allocated again at once.
        del captured[address]
        buffer.close(named)
    except ClosedError:
        pass        # in a fork's child, blocks are left to the driver
    except BaseException as error:
        interrupt_again(error)
        if call != RECORD:
            captured[address] = buffer, given
        status[0] = GPUMEM_DRIVER_ERROR
        return True
    count_add(&captured_blocks, -1)
    release(<gpumem_arena*>given)
    return True


cdef object stream_of(Arena arena, CUstream stream):
    return Stream.from_handle(arena.memory.device, <uintptr_t>stream or LEGACY_STREAM)


# ---- streams, figures and texts ------------------------------------------------------------------

cdef int stats(gpumem_arena* arena, gpumem_stats* wanted) noexcept nogil:
    cdef ArenaCore* core = hook_core((<Handed*>arena).hook)
    cdef ArenaCounts counts
    cdef gpumem_stats now
    if wanted.size < sizeof(gpumem_stats):
        return GPUMEM_INVALID
    if context_is_dead(arena_context(core)):
        return GPUMEM_CLOSED
    arena_counts(core, &counts)
    now.in_use = counts.in_use
    now.max_in_use = counts.max_in_use
    now.reserved = counts.reserved
    now.max_reserved = counts.max_reserved
    now.allocations = counts.num_allocs
    now.frees = counts.num_frees
    now.limit = counts.limit
    now.size = wanted.size
    memcpy(wanted, &now, sizeof(now))
    return GPUMEM_OK


cdef int shrink(gpumem_arena* arena, uint64_t* released) noexcept nogil:
    cdef ArenaCore* core = hook_core((<Handed*>arena).hook)
    cdef uint64_t nbytes = 0
    cdef int status = arena_shrink(core, False, &nbytes)
    if released != NULL:
        released[0] = nbytes
    return status_of(core, status)


cdef int status_of(const ArenaCore* core, int status) noexcept nogil:
    # `core` is the arena of a refusal by the driver; NULL where no driver is called.
    if status == ARENA_OK:
        return GPUMEM_OK
    if status == ARENA_STALE:
        return GPUMEM_NOT_FOUND
    if status == ARENA_CLOSED or status == ARENA_ASLEEP or status == ARENA_DEAD:
        return GPUMEM_CLOSED
    if status == ARENA_CAPTURING:
        return GPUMEM_CAPTURING
    if status == ARENA_NO_METADATA or status == ARENA_NO_STREAM_SLOT:
        return GPUMEM_NO_HOST_MEMORY
    if (status == ARENA_DRIVER_REFUSED and core != NULL
            and arena_refusal(core) != CUDA_ERROR_OUT_OF_MEMORY):
        return GPUMEM_DRIVER_ERROR
    return GPUMEM_OUT_OF_MEMORY


cdef const char* text(int status) noexcept nogil:
    if 0 <= status < GPUMEM_STATUSES:
        return texts[status]
    return "not a status of gpumem"


cdef int synchronize(gpumem_arena* arena, void* stream) noexcept nogil:
    cdef DeviceContext* context = arena_context(hook_core((<Handed*>arena).hook))
    cdef CUresult code
    if context_is_dead(context):
        return GPUMEM_CLOSED
    if context_enter(context) != CUDA_SUCCESS:
        return GPUMEM_DRIVER_ERROR
    code = context.table.cuStreamSynchronize(<CUstream>stream)
    context_leave(context)
    return GPUMEM_OK if code == CUDA_SUCCESS else GPUMEM_DRIVER_ERROR


cdef char* report(gpumem_arena* arena, size_t nbytes, void* stream, int status) noexcept nogil:
    cdef Handed* given = <Handed*>arena
    cdef int refused = load32(&given.refused)
    # The status may be of another call: an earlier one, another thread's, or `synchronize`.
    if (process_is_exiting() or status == GPUMEM_OK or status == GPUMEM_CAPTURING
            or status_of(hook_core(given.hook), refused) != status):
        return NULL
    return explain(given, nbytes, <CUstream>stream, refused)


cdef char* explain(Handed* given, size_t nbytes, CUstream stream,
                   int refused) noexcept with gil:
    cdef Arena arena = handed[<uintptr_t>given]
    cdef uint32_t slot = 0
    cdef bint fresh
    try:
        if refused != ARENA_DEAD:
            arena_stream(hook_core(given.hook), stream, False, &slot, &fresh)
        raise_status(arena, nbytes, 0, slot, refused)
    except BaseException as error:
        interrupt_again(error)
        encoded = str(error).encode("utf-8", "replace")
        return strdup(encoded)
    return NULL


# ---- references ----------------------------------------------------------------------------------

cdef void retain(gpumem_arena* arena) noexcept nogil:
    count_add(&(<Handed*>arena).references, 1)


cdef void release(gpumem_arena* arena) noexcept nogil:
    # The Arena's reference needs the interpreter, which this thread may not have.
    if count_add(&(<Handed*>arena).references, -1) == 0:
        defer(&(<Handed*>arena).end)


cdef void end(Deferred* work) noexcept:
    cdef Handed* ended = <Handed*>(<char*>work - <size_t>&(<Handed*>NULL).end)
    kept = handed.pop(<uintptr_t>ended)
    hook_drop(ended.hook)
    free(ended)
    del kept        # last, since it may run Python


cdef void end_capsule(object capsule) noexcept:
    release(<gpumem_arena*>PyCapsule_GetPointer(capsule, GPUMEM_CAPSULE))


def capsule_of(Arena arena not None, framework, bint captures=False):
    """Return a capsule that has an arena as ``gpumem_arena *``, and keeps it alive.

    Parameters
    ----------
    arena : Arena
    framework : str
        The caller, for reports: one of `gpumem._support.events.FRAMEWORKS`.
    captures : bool
        Whether a stream that captures a graph is served by a graph pool.

    Raises
    ------
    ConfigError
        The arena's memory has an alignment above 256.
    MemoryError
        Out of host memory.
    """
    cdef uint8_t number = FRAMEWORKS.index(framework)
    cdef Handed* given
    if arena.extra:
        raise ConfigError(f"invalid alignment = {arena.memory.alignment} of an arena for C: "
                          f"expected at most {MAX_ALIGNMENT}")
    arena.require_open()
    given = <Handed*>calloc(1, sizeof(Handed))
    if given != NULL:
        given.hook = hook_create(arena.core, NULL, False, number)
    if given == NULL or given.hook == NULL:
        free(given)
        raise MemoryError("out of host memory while making an arena's handle for C")
    device = arena.memory.device
    given.arena = gpumem_arena(&calls, arena.core, device.index if device.type == "cuda" else -1)
    given.references = 1
    given.captures = captures
    given.end.run = end
    handed[<uintptr_t>given] = arena
    return PyCapsule_New(given, GPUMEM_CAPSULE, end_capsule)


def address_of(capsule):
    """Return the ``gpumem_arena *`` of a capsule as an int, valid as long as the capsule."""
    return <uintptr_t>PyCapsule_GetPointer(capsule, GPUMEM_CAPSULE)


def live_blocks(capsule):
    """Return how many blocks are allocated that C took through this capsule's arena."""
    cdef Handed* given = <Handed*>PyCapsule_GetPointer(capsule, GPUMEM_CAPSULE)
    return hook_live(given.hook)


def arenas():
    """Return the arenas that C has now, in the order in which they were passed to C."""
    return list(handed.values())


calls.version = GPUMEM_VERSION
calls.size = sizeof(gpumem_calls)
calls.allocate = allocate
calls.deallocate = deallocate
calls.deallocate_on = deallocate_on
calls.record_stream = record_stream
calls.stats = stats
calls.shrink = shrink
calls.text = text
calls.synchronize = synchronize
calls.report = report
calls.retain = retain
calls.release = release
texts[<int>GPUMEM_OK] = b"no error"
texts[<int>GPUMEM_OUT_OF_MEMORY] = (
    b"out of memory: of the device, or under the arena's limit or budget")
texts[<int>GPUMEM_INVALID] = (
    b"invalid argument: alignment is a power of two up to 256, or 0; gpumem_stats.size is at least "
    b"the first version's")
texts[<int>GPUMEM_NOT_FOUND] = b"no live block begins at the address"
texts[<int>GPUMEM_CLOSED] = b"the arena is closed, asleep, or belongs to a fork's parent"
texts[<int>GPUMEM_CAPTURING] = (
    b"the stream captures a graph: allocate in Python, inside Arena.capture")
texts[<int>GPUMEM_NO_HOST_MEMORY] = b"out of host memory for the description of a block"
texts[<int>GPUMEM_DRIVER_ERROR] = b"the driver failed"
