"""gpumem's side of PyTorch's hooks: an arena for each device; see hooks.h."""

from libc.stddef cimport size_t
from libc.stdint cimport uint32_t, uint64_t, uintptr_t
from libc.stdlib cimport malloc
from libc.string cimport memcpy, memset

from gpumem._budget cimport Relief
from gpumem._core cimport Arena
from gpumem._native.arena cimport (
    ALLOCATE_PERSISTENT, AllocatorHook, ARENA_CAPTURING, ARENA_DEAD, arena_drop, ARENA_OK,
    ARENA_OVER_BUDGET, arena_set_limit, arena_shrink, ARENA_STALE, ArenaCore, hook_allocate,
    hook_counts, hook_create, hook_drop, hook_free, hook_record, hook_reset_peak, hook_retain,
    hook_size, hook_slot, HookCounts, pool_begin, pool_create,
)
from gpumem._native.driver cimport (
    context_enter, context_leave, CUDA_SUCCESS, CUstream, DeviceContext,
)
from gpumem._resource.arena cimport arena_relieve, raise_status
from gpumem._support.events cimport FRAMEWORK_TORCH
from gpumem._support.process cimport process, process_is_exiting

from gpumem.device import Device
from gpumem.errors import ConfigError
from gpumem.integrations.torch._errors import out_of_memory


cdef extern from "hooks.h" nogil:
    enum:
        TORCH_DEVICES
        TORCH_HOOKS

    ctypedef struct TorchCalls:
        int (*allocate)(void* hook, size_t nbytes, void* stream, void** address)
        int (*allocate_segment)(void* hook, size_t nbytes, void* stream, void** address)
        int (*release)(void* address)
        int (*record)(void* address, void* stream)
        size_t (*size)(void* address)
        void* (*find)(int device)
        void (*shrink)(void* hook)
        void (*limit)(int device, double fraction)
        void* (*open_pool)(void* hook)
        void (*begin_pool)(void* pool)
        void (*retain_pool)(void* pool)
        void (*drop_pool)(void* pool)
        char* (*add_peer)(int owner, int device)
        int (*copy)(void* to, void* dst, void* origin, const void* src, size_t nbytes, void* stream)
        char* (*report)(int device, size_t nbytes, void* stream, int status, int* is_memory)

    void torch_hooks_init(const TorchCalls* calls)
    void torch_hooks_set(int device, void* hook)
    void* torch_hooks_get(int device)
    void torch_hooks_set_thrower(void (*thrower)(const char* text))
    bint torch_hooks_adopt(void* object, void* table, const void* enable_peer, const void* copy)
    void torch_hooks_addresses(uintptr_t* addresses)

# Names of the hooks, in the order of torch_hooks_addresses.
NAMES = ("alloc", "alloc_segment", "free", "init", "reset", "memory_fraction", "base_alloc",
         "record_stream", "begin_pool", "end_pool", "release_pool")

cdef dict served = {}       # device -> its Arena, which lives as long as it is here
cdef object finder = None   # a function from a device to the Arena of one that is not in `served`
cdef dict failures = {}     # device -> how often memory was out

# Bytes: max_mem of each arena's settings, which a memory fraction does not raise.
cdef uint64_t configured[64]


# ---- called by the hooks -------------------------------------------------------------------------

cdef int allocate(void* hook, size_t nbytes, void* stream, void** address) noexcept nogil:
    cdef int status = hook_allocate(<AllocatorHook*>hook, nbytes, <CUstream>stream, 0,
                                    <uint64_t*>address)
    if status == ARENA_OVER_BUDGET:
        status = allocate_under_pressure(<AllocatorHook*>hook, nbytes, <CUstream>stream,
                                         <uint64_t*>address)
    return status


cdef int allocate_under_pressure(AllocatorHook* hook, size_t nbytes, CUstream stream,
                                 uint64_t* address) noexcept nogil:
    cdef Relief relief
    cdef int status = ARENA_OVER_BUDGET
    memset(&relief, 0, sizeof(relief))
    while status == ARENA_OVER_BUDGET and arena_relieve(hook.arena, &relief):
        status = hook_allocate(hook, nbytes, stream, 0, address)
    return status


cdef int allocate_segment(void* hook, size_t nbytes, void* stream,
                          void** address) noexcept nogil:
    # A capturing stream is refused ordinary blocks, because its graph would use them after their
    # free. A segment stays with the caching allocator, which has its own rules for captures.
    cdef int status = allocate(hook, nbytes, stream, address)
    if status == ARENA_CAPTURING:
        status = hook_allocate(<AllocatorHook*>hook, nbytes, <CUstream>stream, ALLOCATE_PERSISTENT,
                               <uint64_t*>address)
    return status


cdef int release(void* address) noexcept nogil:
    # At exit memory is left to the driver. In a fork's child a block that is not found may be its
    # parent's.
    cdef int status = hook_free(<uint64_t>address)
    if status == ARENA_DEAD or status == ARENA_STALE and process.generation != 0:
        return ARENA_OK
    return status


cdef int record(void* address, void* stream) noexcept nogil:
    return hook_record(<uint64_t>address, <CUstream>stream)


cdef size_t size(void* address) noexcept nogil:
    return hook_size(<uint64_t>address)


cdef void shrink(void* hook) noexcept nogil:
    cdef uint64_t released
    arena_shrink((<AllocatorHook*>hook).arena, &released)


cdef void limit(int device, double fraction) noexcept nogil:
    cdef AllocatorHook* hook = <AllocatorHook*>torch_hooks_get(device)
    cdef DeviceContext* context = hook.arena.context
    cdef size_t free_bytes, total
    cdef uint64_t most
    if context_enter(context) != CUDA_SUCCESS:
        return
    if context.table.cuMemGetInfo(&free_bytes, &total) == CUDA_SUCCESS:
        most = <uint64_t>(fraction * total)
        if configured[device] != 0:
            most = min(most, configured[device])
        arena_set_limit(hook.arena, most)
    context_leave(context)


cdef void* open_pool(void* hook) noexcept nogil:
    cdef ArenaCore* pool = pool_create((<AllocatorHook*>hook).arena, NULL)
    cdef AllocatorHook* opened
    if pool == NULL:
        return NULL
    opened = hook_create(pool, <AllocatorHook*>hook, FRAMEWORK_TORCH)
    arena_drop(pool)        # the hook has a reference of its own
    return opened


cdef void begin_pool(void* pool) noexcept nogil:
    pool_begin((<AllocatorHook*>pool).arena)


cdef void retain_pool(void* pool) noexcept nogil:
    hook_retain(<AllocatorHook*>pool)


cdef void drop_pool(void* pool) noexcept nogil:
    hook_drop(<AllocatorHook*>pool)


cdef int copy(void* to, void* dst, void* origin, const void* src, size_t nbytes,
              void* stream) noexcept nogil:
    # In the context of the stream, which PyTorch has made current.
    cdef DeviceContext* target = (<AllocatorHook*>to).arena.context
    cdef DeviceContext* source = (<AllocatorHook*>origin).arena.context
    return target.table.cuMemcpyPeerAsync(<uint64_t>dst, target.primary, <uint64_t>src,
                                          source.primary, nbytes, <CUstream>stream)


# ---- slow paths, with the interpreter ------------------------------------------------------------

cdef void* find(int device) noexcept nogil:
    return NULL if process_is_exiting() else find_arena(device)


cdef void* find_arena(int device) noexcept with gil:
    if finder is None:
        return NULL
    try:
        serve(device, finder(device))
    except Exception:
        return NULL
    return torch_hooks_get(device)


cdef char* add_peer(int owner, int device) noexcept nogil:
    return NULL if process_is_exiting() else admit(owner, device)


cdef char* admit(int owner, int device) noexcept with gil:
    cdef Arena arena
    try:
        if owner not in served and find_arena(owner) == NULL:
            return NULL
        arena = served[owner]
        peer = Device(f"{arena.memory.device.type}:{device}")
        if arena.config.peers == "on_use":
            arena.enable_peer(peer)
        elif peer not in arena.peers:
            return c_string(f"gpumem: {peer} may not access the memory of {arena.memory}: "
                            f"arena {arena.name!r} has peers = {arena.config._text_of('peers')!r}")
    except Exception as error:
        return c_string(f"gpumem: {error}")
    return NULL


cdef char* report(int device, size_t nbytes, void* stream, int status,
                  int* is_memory) noexcept nogil:
    return NULL if process_is_exiting() else explain(device, nbytes, stream, status, is_memory)


cdef char* explain(int device, size_t nbytes, void* stream, int status,
                   int* is_memory) noexcept with gil:
    cdef AllocatorHook* hook = <AllocatorHook*>torch_hooks_get(device)
    cdef uint32_t slot = 0
    cdef Arena arena = served[device]
    if status == ARENA_CAPTURING:
        return c_string("gpumem: an allocation on a stream that captures a graph has no pool: "
                        "capture with torch.cuda.graph")
    try:
        hook_slot(hook, <CUstream>stream, &slot)
        raise_status(arena, nbytes, 0, slot, status)
    except MemoryError as error:
        failures[device] = failures.get(device, 0) + 1
        is_memory[0] = True
        words = out_of_memory(device, nbytes, getattr(error, "report", None))
        return c_string(f"{words}\ngpumem: {error}")
    except Exception as error:
        return c_string(f"gpumem: {error}")
    return NULL


cdef char* c_string(str text) noexcept:
    cdef bytes encoded = text.encode()
    cdef char* copy = <char*>malloc(len(encoded) + 1)
    if copy != NULL:
        memcpy(copy, <const char*>encoded, len(encoded) + 1)
    return copy


# ---- called by gpumem.integrations.torch ---------------------------------------------------------

def addresses():
    """Return the address of each hook as a dict from its name in NAMES."""
    cdef uintptr_t found[16]
    torch_hooks_addresses(found)
    return {name: found[i] for i, name in enumerate(NAMES)}


def serve(device, Arena arena not None):
    """Let an arena serve a device from now on, and keep the arena alive.

    No thread may allocate while an arena replaces another one. Blocks of the other one stay valid.

    Raises
    ------
    ConfigError
        `device` is not from 0 to 63, or the arena's memory has an alignment above 256.
    """
    cdef AllocatorHook* before
    cdef AllocatorHook* hook
    if not 0 <= device < TORCH_DEVICES:
        raise ConfigError(f"device {device} is not from 0 to {TORCH_DEVICES - 1}")
    if arena.extra:
        raise ConfigError(f"invalid alignment = {arena.memory.alignment} of an arena beneath "
                          "PyTorch, whose blocks have 256: expected at most 256")
    if served.get(device) is arena:
        return
    hook = hook_create(arena.core, NULL, FRAMEWORK_TORCH)
    if hook == NULL:
        raise MemoryError("out of host memory while making an allocator hook")
    before = <AllocatorHook*>torch_hooks_get(device)
    configured[device] = arena.config.max_mem
    served[device] = arena
    torch_hooks_set(device, hook)
    if before != NULL:
        hook_drop(before)


def introduce(arenas):
    """Let each of several arenas' devices access the others' memory, as their settings say."""
    cdef Arena owner, other
    for owner in arenas:
        for other in arenas:
            if other is not owner:
                owner.let_access(other.driver_device)


def adopt(uintptr_t allocator, uintptr_t table, uintptr_t enable_peer, uintptr_t copy):
    """Take over what PyTorch asks of its allocator about other devices; False: it cannot be.

    Addresses: of the object, of its class's table, and of two virtual functions of the class.
    """
    return torch_hooks_adopt(<void*>allocator, <void*>table, <const void*>enable_peer,
                             <const void*>copy)


def set_finder(function):
    """Set ``function(ordinal)``, which returns the Arena of a device that none serves yet."""
    global finder
    finder = function


def arenas():
    """Return the arenas by the ordinals of the devices that they serve."""
    return dict(served)


def counts(device):
    """Return the counts of PyTorch's allocations and frees on a device, as a dict.

    ``allocs`` and ``frees`` are blocks; ``allocated``, ``freed`` and ``peak``, the highest of their
    difference, requested bytes; ``failures`` the number of times that memory was out.
    """
    cdef AllocatorHook* hook = <AllocatorHook*>torch_hooks_get(device)
    cdef HookCounts now
    if hook == NULL:
        return dict.fromkeys(("allocs", "frees", "allocated", "freed", "peak", "failures"), 0)
    now = hook_counts(hook)
    return {**now, "failures": failures.get(device, 0)}


def reset_peak(device):
    """Set the peak of `counts` to the present value."""
    if torch_hooks_get(device) != NULL:
        hook_reset_peak(<AllocatorHook*>torch_hooks_get(device))


def set_thrower(uintptr_t address):
    """Set the C function that throws PyTorch's own exception if memory is out; 0: RuntimeError."""
    torch_hooks_set_thrower(<void (*)(const char*) noexcept nogil>address)


cdef TorchCalls calls
calls.allocate = allocate
calls.allocate_segment = allocate_segment
calls.release = release
calls.record = record
calls.size = size
calls.find = find
calls.shrink = shrink
calls.limit = limit
calls.open_pool = open_pool
calls.begin_pool = begin_pool
calls.retain_pool = retain_pool
calls.drop_pool = drop_pool
calls.report = report
calls.add_peer = add_peer
calls.copy = copy
torch_hooks_init(&calls)
