"""gpumem's side of PyTorch's hooks: an arena for each device; see hooks.h."""

from cpython.ref cimport Py_DECREF, Py_INCREF
from libc.stddef cimport size_t
from libc.stdint cimport int32_t, uint32_t, uint64_t, uint8_t, uintptr_t
from libc.stdio cimport fprintf, snprintf, stderr
from libc.stdlib cimport calloc, free, malloc
from libc.string cimport memcpy, memset, strdup, strncpy

from gpumem._arena cimport allocate_under_pressure, Arena, collect_garbage, raise_status
from gpumem._native.arena.api cimport (
    ALLOCATE_PERSISTENT, AllocatorHook, arena_add_figures, ARENA_BEYOND_DEVICE, ARENA_CAPTURING,
    arena_context, arena_copy, arena_copy_free, arena_counts, ARENA_DEAD, arena_driver_calls,
    ARENA_DRIVER_REFUSED, arena_drop, ARENA_OK, ARENA_OVER_BUDGET, ARENA_OVER_LIMIT, arena_parent,
    arena_reset_peaks, arena_set_limit, arena_shrink, arena_stream, ArenaCopy, ArenaCore,
    ArenaCounts, ArenaFigures, arenas_release_after_work, caches_flush, family_counts, FamilyCounts,
    hook_allocate, hook_allocate_range, hook_core, hook_counts, hook_create, hook_drop, hook_find,
    hook_free, HOOK_KINDS, hook_label, HOOK_LARGE, hook_let_go, hook_peak_since, hook_record,
    hook_reset_peak, hook_retain, HOOK_SMALL, HookBlock, HookCounts, HookLive, hooks_blocks,
    hooks_of, HookSums, memory_is_out, part_next, pool_begin, pool_create, pool_end, TableCopy,
    tag_next,
)
from gpumem._native.backing cimport Backing, backing_init
from gpumem._native.bfc cimport (
    Chunk, CHUNK_HOLE, CHUNK_PENDING_FREE, CHUNK_USED, NIL, QUANTUM, Region, SLOT_RELEASED,
)
from gpumem._native.driver cimport (
    context_enter, context_leave, CUDA_ERROR_INVALID_VALUE, CUDA_ERROR_OUT_OF_MEMORY, CUDA_SUCCESS,
    CUresult, CUstream, DeviceContext,
)
from gpumem._support.atomics cimport load64, publish_pointer, published_pointer, sum_add
from gpumem._support.contexts cimport begin_foreign_lock, end_foreign_lock
from gpumem._support.events cimport FRAMEWORK_TORCH
from gpumem._support.interpreter cimport interpreter_release, interpreter_restore, PyThreadState
from gpumem._support.memory cimport array_reserve
from gpumem._support.process cimport (
    BoundedCall, call_drop, call_within, interrupt_again, process_is_exiting,
)

from threading import RLock

from gpumem._support.sizes import format_size
from gpumem.device import Device
from gpumem.errors import ConfigError
from gpumem.integrations.torch import _sharing
from gpumem.integrations.torch._messages import out_of_memory
from gpumem.stats import collection_text


cdef extern from "hooks.h" nogil:
    enum:
        TORCH_DEVICES
        TORCH_PINNED
        TORCH_ARENAS
        TORCH_ALL
        TORCH_SMALL
        TORCH_LARGE
        TORCH_FREE
        TORCH_PENDING
        TORCH_USED
        TORCH_NOTHING_FREED
        TORCH_FREED
        TORCH_NO_INTERPRETER
        TORCH_RELIEVED

    ctypedef struct TorchFigures:
        uint64_t allocs, frees, requested, requested_freed, allocated, allocated_freed
        uint64_t peak_blocks, peak_requested, peak_allocated
        uint64_t pending, pending_bytes, reserved, segments, idle, idle_bytes

    ctypedef struct TorchStats:
        TorchFigures* parts
        uint64_t peak_reserved, retries, waits, device_allocs, device_frees, failures

    ctypedef struct TorchBlock:
        uint64_t address, size, requested, stream
        uint64_t* pool
        uint32_t segment
        int32_t device
        uint8_t state, is_small, is_expandable

    ctypedef struct TorchPoolBytes:
        uint64_t* pool
        uint64_t reserved

    ctypedef struct TorchSource:
        void* (*reserve)(TorchSource* self, size_t nbytes) noexcept nogil
        void (*release)(TorchSource* self, void* address) noexcept nogil
        void (*forget)(TorchSource* self) noexcept nogil

    ctypedef struct TorchCalls:
        void** hooks
        int (*allocate)(void* hook, size_t nbytes, void* stream, void** address)
        int (*allocate_alone)(int device, size_t nbytes, void* stream, void** address)
        int (*release)(void* address)
        int (*record)(void* address, void* stream)
        void* (*find)(int device)
        void (*shrink)()
        void (*shrink_pinned)()
        void (*shrink_pool)(const uint64_t* id)
        void (*limit)(int device, double fraction)
        int (*block)(void* address, TorchBlock* found)
        TorchBlock* (*blocks)(size_t* count)
        size_t (*live)(void* pool, uint64_t* addresses, size_t capacity)
        uint64_t (*changes)()
        void (*stats)(int device, TorchStats* now)
        void (*reset_peaks)(int device)
        size_t (*pool_bytes)(int device, TorchPoolBytes* found, size_t capacity)
        size_t (*largest)(int device)
        void* (*open_pool)(void* hook, const uint64_t* id, TorchSource* source, int splits,
                           int captured)
        void (*begin_pool)(void* pool)
        void (*retain_pool)(void* pool)
        void (*drop_pool)(void* pool)
        int (*restore)(void* pool, const TorchBlock* block)
        char* (*add_peer)(int owner, int device)
        int (*copy)(void* to, void* dst, void* origin, const void* src, size_t nbytes, void* stream)
        char* (*share)(void* address, size_t* offset, char** reason)
        void* (*open_shared)(const char* text, void** address, char** reason)
        void (*close_shared)(void* opened)
        char* (*report)(int device, size_t nbytes, void* stream, int status, int* is_memory)
        int (*is_memory)(int status)
        int (*collect)(int device, size_t nbytes, int status, char** said)

cdef enum:
    MAX_HOOKS = 1024        # that one visit of all hooks includes

# A visit of one arena: `to` is the caller's, `hook` the one that led to the arena.
ctypedef void (*Visit)(ArenaCore* arena, void* to, const AllocatorHook* hook) noexcept nogil

cdef TorchCalls calls
memset(&calls, 0, sizeof(calls))

PINNED = TORCH_PINNED       # the number of pinned memory, in the place of a device's

cdef dict served = {}       # device -> its Arena, which lives as long as it is here
# Functions from a device to the Arena of one that is not in `served`; at True of pinned memory.
cdef dict finders = {}
cdef object reliever = None     # frees bytes of a device before a refusal; returns their number
# The finder may return a new arena each time, and none may replace one that serves. A thread that
# finds one may need another device's arena for it.
cdef object finding = RLock()
cdef uint64_t failures[TORCH_ARENAS]        # refusals of memory on each device
memset(failures, 0, sizeof(failures))

cdef void* uncounted[TORCH_ARENAS]          # its hook of blocks that no statistics count
memset(uncounted, 0, sizeof(uncounted))

# max_mem of each arena's settings in bytes; a memory fraction does not raise it.
cdef uint64_t configured[TORCH_ARENAS]

# oom_collect_ms of each arena's settings.
cdef uint64_t collect_ms[TORCH_ARENAS]

cdef extern from *:
    """
    static _Thread_local int gm_refuses_at_once;    /* requests of this thread */
    """
    int gm_refuses_at_once

cdef enum:
    MAX_SAID = 1024         # bytes of a text about a garbage collection
    PINNED_LABEL = -1       # of the hooks of pinned memory; no pool of PyTorch's has this number


cdef inline AllocatorHook* hook_of(int device) noexcept nogil:
    if not 0 <= device < TORCH_ARENAS:
        return NULL
    return <AllocatorHook*>published_pointer(&calls.hooks[device])


# ---- blocks --------------------------------------------------------------------------------------

cdef int allocate(void* hook, size_t nbytes, void* stream, void** address) noexcept nogil:
    return allocate_with(<AllocatorHook*>hook, nbytes, <CUstream>stream, 0, <uint64_t*>address)


cdef inline int allocate_with(AllocatorHook* hook, uint64_t nbytes, CUstream stream,
                              uint32_t flags, uint64_t* address) noexcept nogil:
    cdef int status = hook_allocate(hook, nbytes, stream, flags, address)
    if status == ARENA_OVER_BUDGET:
        status = allocate_under_pressure(hook, nbytes, stream, flags, address)
    return status


cdef int allocate_alone(int device, size_t nbytes, void* stream, void** address) noexcept nogil:
    cdef void* hook = published_pointer(&uncounted[device])
    return allocate_with(<AllocatorHook*>hook, nbytes, <CUstream>stream, ALLOCATE_PERSISTENT,
                         <uint64_t*>address)


cdef int release(void* address) noexcept nogil:
    return hook_free(<uint64_t>address)


cdef int record(void* address, void* stream) noexcept nogil:
    return hook_record(<uint64_t>address, <CUstream>stream)


cdef int block(void* address, TorchBlock* found) noexcept nogil:
    cdef HookBlock known
    if not hook_find(<uint64_t>address, &known):
        return False
    found.address = known.address
    found.size = known.size
    found.requested = known.nbytes
    found.stream = known.stream
    found.pool[0], found.pool[1] = known.label[0], known.label[1]
    found.segment = 0
    found.device = known.device
    found.state = TORCH_USED
    found.is_small = found.is_expandable = False
    return True


# ---- segments of PyTorch's own allocator, by the signatures of CUDAPluggableAllocator.h ----------

cdef void* allocate_segment(size_t nbytes, int device, void* stream) noexcept nogil:
    # NULL: PyTorch releases idle segments and calls again.
    cdef AllocatorHook* hook = hook_of(device)
    cdef uint64_t address = 0
    cdef int status
    if hook == NULL or nbytes == 0:
        return NULL
    begin_foreign_lock()        # PyTorch's allocator holds its own
    status = allocate_with(hook, nbytes, <CUstream>stream, 0, &address)
    # A capturing stream is refused ordinary blocks, because its graph would use them after their
    # free. A segment stays with PyTorch's allocator, which has its own rules for captures.
    if status == ARENA_CAPTURING:
        allocate_with(hook, nbytes, <CUstream>stream, ALLOCATE_PERSISTENT, &address)
    end_foreign_lock()
    return <void*>address


cdef void free_segment(void* address, size_t nbytes, int device, void* stream) noexcept nogil:
    cdef int status
    if address == NULL:
        return
    status = hook_free(<uint64_t>address)
    # PyTorch frees in destructors, where an exception would end the process.
    if status != ARENA_OK:
        fprintf(stderr, "gpumem: PyTorch freed %zu bytes at %p of cuda:%d, refused with status "
                        "%d\n", nbytes, address, device, status)


# ---- limits, idle memory, statistics -------------------------------------------------------------

cdef void shrink() noexcept nogil:
    # Queued work ends first, as in PyTorch's own `empty_cache`: cudaFree waits for it.
    cdef int device
    release_ended_pools()
    for device in range(TORCH_DEVICES):
        if hook_of(device) != NULL:
            each_part(hook_of(device), shrink_part, NULL)
    if not process_is_exiting():
        drop_idle_mappings()


cdef void shrink_pinned() noexcept nogil:
    if hook_of(TORCH_PINNED) != NULL:
        each_part(hook_of(TORCH_PINNED), shrink_part, NULL)


cdef void drop_idle_mappings() noexcept with gil:
    # They are mappings of other processes' blocks.
    _sharing.drop_idle()


cdef void shrink_pool(const uint64_t* id) noexcept nogil:
    cdef AllocatorHook* found[MAX_HOOKS]
    cdef uint64_t count = hooks_of(FRAMEWORK_TORCH, found, MAX_HOOKS)
    cdef uint64_t i
    for i in range(count):
        if hook_label(found[i])[0] == id[0] and hook_label(found[i])[1] == id[1]:
            pool_end(hook_core(found[i]))
            each_part(found[i], shrink_part, NULL)
        hook_let_go(found[i])
    release_ended_pools()


cdef void release_ended_pools() noexcept nogil:
    # Pools without a block end. A Python thread may have to end the work that is waited for.
    cdef PyThreadState* interpreter = interpreter_release()
    arenas_release_after_work()
    interpreter_restore(interpreter)


cdef void shrink_part(ArenaCore* part, void* unused, const AllocatorHook* hook) noexcept nogil:
    # A Python thread may have to end the work that is waited for.
    cdef PyThreadState* interpreter = interpreter_release()
    cdef uint64_t released
    arena_shrink(part, True, &released)
    interpreter_restore(interpreter)


cdef void limit(int device, double fraction) noexcept nogil:
    cdef ArenaCore* arena = hook_core(hook_of(device))
    cdef size_t free_bytes, total
    cdef uint64_t nbytes
    if not device_memory(arena_context(arena), &free_bytes, &total):
        return
    nbytes = max(<uint64_t>(fraction * total), 1)   # 0 bytes would be no limit
    if configured[device] != 0:
        nbytes = min(nbytes, configured[device])
    arena_set_limit(arena, nbytes)


cdef bint device_memory(DeviceContext* context, size_t* free_bytes, size_t* total) noexcept nogil:
    cdef bint known
    if context_enter(context) != CUDA_SUCCESS:
        return False
    known = context.table.cuMemGetInfo(free_bytes, total) == CUDA_SUCCESS
    context_leave(context)
    return known


cdef size_t largest(int device) noexcept nogil:
    # It is a free block, or the memory that the driver and the arena's limit leave.
    cdef ArenaCore* arena = hook_core(hook_of(device))
    cdef size_t free_bytes = 0
    cdef size_t total
    cdef ArenaCounts counts
    cdef FamilyCounts family = family_counts(arena)
    device_memory(arena_context(arena), &free_bytes, &total)
    if family.limit:
        free_bytes = min(free_bytes, family.limit - min(family.limit, family.held))
    arena_counts(arena, &counts)
    return max(free_bytes, counts.largest_free)


cdef void stats(int device, TorchStats* now) noexcept nogil:
    cdef AllocatorHook* hook = hook_of(device)
    cdef HookCounts counts
    cdef ArenaFigures figures
    memset(now, 0, sizeof(TorchStats))
    if hook == NULL:
        return
    counts = hook_counts(hook)
    memset(&figures, 0, sizeof(figures))
    if device == TORCH_PINNED:
        each_part(hook, add_figures, &figures)
    else:
        each_arena(device, add_figures, &figures)
    fill(&now.parts[<int>TORCH_LARGE], &counts, &figures, <int>HOOK_LARGE)
    fill(&now.parts[<int>TORCH_SMALL], &counts, &figures, <int>HOOK_SMALL)
    sum_parts(now, &counts.peaks[<int>HOOK_KINDS])
    now.peak_reserved = max(family_counts(hook_core(hook)).held_peak,
                            now.parts[<int>TORCH_ALL].reserved)
    now.retries, now.waits = figures.retries, figures.waits
    now.device_allocs, now.device_frees = figures.extensions, figures.shrinkages
    now.failures = load64(&failures[device])


cdef void fill(TorchFigures* part, const HookCounts* counts, const ArenaFigures* figures,
               int kind) noexcept nogil:
    cdef const HookSums* sums = &counts.sums[kind]
    cdef const HookLive* peaks = &counts.peaks[kind]
    part.allocs, part.frees = sums.allocs, sums.frees
    part.requested, part.requested_freed = sums.requested, sums.requested_freed
    part.allocated, part.allocated_freed = sums.allocated, sums.allocated_freed
    part.pending, part.pending_bytes = figures.pending[kind], figures.pending_bytes[kind]
    part.reserved, part.segments = figures.reserved[kind], figures.segments[kind]
    part.idle, part.idle_bytes = figures.idle[kind], figures.idle_bytes[kind]
    set_peaks(part, peaks)


cdef void set_peaks(TorchFigures* part, const HookLive* peaks) noexcept nogil:
    part.peak_blocks = peaks.blocks
    part.peak_requested = peaks.requested
    part.peak_allocated = peaks.allocated


cdef void sum_parts(TorchStats* now, const HookLive* peaks) noexcept nogil:
    # A part is an array of sums, except for its peaks.
    cdef uint64_t* both = <uint64_t*>&now.parts[<int>TORCH_ALL]
    cdef const uint64_t* a = <const uint64_t*>&now.parts[<int>TORCH_SMALL]
    cdef const uint64_t* b = <const uint64_t*>&now.parts[<int>TORCH_LARGE]
    cdef size_t i
    for i in range(sizeof(TorchFigures) // sizeof(uint64_t)):
        both[i] = a[i] + b[i]
    set_peaks(&now.parts[<int>TORCH_ALL], peaks)


cdef void reset_peaks(int device) noexcept nogil:
    if hook_of(device) != NULL:
        hook_reset_peak(hook_of(device))
        arena_reset_peaks(hook_core(hook_of(device)))


cdef size_t pool_bytes(int device, TorchPoolBytes* found, size_t capacity) noexcept nogil:
    cdef AllocatorHook* hooks[MAX_HOOKS]
    cdef uint64_t many = hooks_of(FRAMEWORK_TORCH, hooks, MAX_HOOKS)
    cdef ArenaCore* arena
    cdef ArenaFigures figures
    cdef size_t count = 0
    cdef uint64_t i
    for i in range(many):
        arena = hook_core(hooks[i])
        if arena_parent(arena) != NULL and arena_context(arena).ordinal == device:
            if count < capacity:
                memset(&figures, 0, sizeof(figures))
                each_part(hooks[i], add_figures, &figures)
                found[count].pool[0] = hook_label(hooks[i])[0]
                found[count].pool[1] = hook_label(hooks[i])[1]
                found[count].reserved = figures.reserved[0] + figures.reserved[1]
            count += 1
        hook_let_go(hooks[i])
    return count


cdef void add_figures(ArenaCore* arena, void* figures, const AllocatorHook* hook) noexcept nogil:
    arena_add_figures(arena, <ArenaFigures*>figures)


# ---- visits of all memory ------------------------------------------------------------------------

cdef void each_arena(int device, Visit visit, void* to) noexcept nogil:
    # Visits the arenas of one device, or of all (-1): those of its hooks, those of their tags, and
    # pools that have ended and still have blocks.
    cdef AllocatorHook* found[MAX_HOOKS]
    cdef uint64_t count = hooks_of_devices(found)
    cdef uint64_t i
    for i in range(count):
        if ((device < 0 or arena_context(hook_core(found[i])).ordinal == device)
                and not seen(found, i)):
            each_part(found[i], visit, to)
    for i in range(count):
        hook_let_go(found[i])


cdef void each_part(AllocatorHook* hook, Visit visit, void* to) noexcept nogil:
    # Visits the arena of a hook and those of its tags; or a pool, and its parts that serve the
    # blocks of tags.
    cdef ArenaCore* arena = hook_core(hook)
    cdef bint is_pool = arena_parent(arena) != NULL
    cdef ArenaCore* each
    if is_pool:
        visit(arena, to, hook)
    each = part_next(arena, NULL) if is_pool else tag_next(arena, NULL)
    while each != NULL:
        visit(each, to, hook)
        each = part_next(arena, each) if is_pool else tag_next(arena, each)


cdef uint64_t hooks_of_devices(AllocatorHook** found) noexcept nogil:
    # Returns at most MAX_HOOKS, each with a reference for the caller.
    cdef uint64_t many = hooks_of(FRAMEWORK_TORCH, found, MAX_HOOKS)
    cdef uint64_t count = 0
    cdef uint64_t i
    for i in range(many):
        if hook_label(found[i])[0] == <uint64_t>PINNED_LABEL:
            hook_let_go(found[i])
        else:
            found[count] = found[i]
            count += 1
    return count


cdef bint seen(AllocatorHook** found, uint64_t number) noexcept nogil:
    # An arena that serves a second time has two hooks.
    cdef uint64_t i
    for i in range(number):
        if hook_core(found[i]) == hook_core(found[number]):
            return True
    return False


cdef uint64_t changes() noexcept nogil:
    cdef uint64_t count = 0
    each_arena(-1, add_changes, &count)
    return count


cdef void add_changes(ArenaCore* arena, void* count, const AllocatorHook* hook) noexcept nogil:
    (<uint64_t*>count)[0] += arena_driver_calls(arena)


cdef struct Addresses:
    uint64_t* at
    size_t capacity
    size_t count


cdef size_t live(void* pool, uint64_t* addresses, size_t capacity) noexcept nogil:
    cdef Addresses found = Addresses(addresses, capacity, 0)
    each_part(<AllocatorHook*>pool, add_live, &found)
    return found.count


cdef void add_live(ArenaCore* arena, void* to, const AllocatorHook* hook) noexcept nogil:
    cdef Addresses* found = <Addresses*>to
    cdef size_t known = min(found.count, found.capacity)
    found.count += hooks_blocks(arena, found.at + known, NULL, found.capacity - known)


cdef struct Blocks:
    TorchBlock* at
    uint32_t count
    uint32_t capacity
    uint32_t segments
    bint failed


cdef TorchBlock* blocks(size_t* count) noexcept nogil:
    cdef Blocks found
    memset(&found, 0, sizeof(found))
    each_arena(-1, add_blocks, &found)
    if found.failed:
        free(found.at)
        found.at = NULL
    elif found.at == NULL:
        found.at = <TorchBlock*>malloc(sizeof(TorchBlock))
    count[0] = found.count if found.at != NULL else 1
    return found.at


cdef void add_blocks(ArenaCore* arena, void* to, const AllocatorHook* hook) noexcept nogil:
    cdef Blocks* found = <Blocks*>to
    cdef ArenaCopy copy
    cdef int table
    caches_flush(arena)         # cached blocks are free too, and merge
    if not arena_copy(arena, &copy):
        found.failed = True
        return
    for table in range(2):
        add_table(found, &copy, &copy.tables[table], table == 1, hook)
    arena_copy_free(&copy)


cdef void add_table(Blocks* found, const ArenaCopy* copy, const TableCopy* table, bint is_small,
                    const AllocatorHook* hook) noexcept nogil:
    cdef const Region* region
    cdef const Chunk* chunk
    cdef uint32_t i, index
    for i in range(table.region_count):
        region = &table.regions[i]
        index = region.first if region.size else NIL
        found.segments += 1
        while index != NIL:
            chunk = &table.chunks[index]
            if chunk.state == CHUNK_HOLE:
                found.segments += 1     # a segment begins after a hole
            elif room_for_block(found):
                write_block(&found.at[found.count], copy, chunk, hook)
                found.at[found.count].segment = found.segments
                found.at[found.count].is_small = is_small
                found.at[found.count].is_expandable = region.is_range
                found.count += not continues(&found.at[found.count], found)
            index = chunk.next


cdef bint continues(const TorchBlock* at, Blocks* found) noexcept nogil:
    # A free piece that follows another one: the arena separates pieces with unfinished work, and
    # PyTorch's snapshots do not.
    cdef TorchBlock* before = &found.at[found.count - 1]
    if (found.count == 0 or before.segment != at.segment
            or before.state != TORCH_FREE or at.state != TORCH_FREE):
        return False
    before.size += at.size
    return True


cdef void write_block(TorchBlock* at, const ArenaCopy* copy, const Chunk* chunk,
                      const AllocatorHook* hook) noexcept nogil:
    at.address = chunk.address
    at.size = chunk.size
    at.stream = copy.streams[chunk.stream_slot] if chunk.stream_slot != SLOT_RELEASED else 0
    at.pool[0], at.pool[1] = hook_label(hook)[0], hook_label(hook)[1]
    at.device = arena_context(hook_core(hook)).ordinal
    at.state = (TORCH_USED if chunk.state == CHUNK_USED else
                TORCH_PENDING if chunk.state == CHUNK_PENDING_FREE else TORCH_FREE)
    at.requested = chunk.requested if at.state == TORCH_USED else 0


cdef bint room_for_block(Blocks* found) noexcept nogil:
    if not array_reserve(<void**>&found.at, &found.capacity, found.count + 1, 256,
                         sizeof(TorchBlock)):
        found.failed = True
    return not found.failed


# ---- pools ---------------------------------------------------------------------------------------

cdef void* open_pool(void* hook, const uint64_t* id, TorchSource* source, int splits,
                     int captured) noexcept nogil:
    cdef AllocatorHook* beside = <AllocatorHook*>hook
    cdef AllocatorHook* opened
    cdef Backing backing
    cdef ArenaCore* pool
    if source != NULL:
        backing_init(&backing, arena_context(hook_core(beside)))
        backing.reserve = source_reserve
        backing.release = source_release
        backing.forget = source_forget
        backing.waits = True
        backing.call = b"a MemPool's allocator"
        backing.source = source
    pool = pool_create(hook_core(beside), NULL, &backing if source != NULL else NULL, splits,
                       captured)
    if pool == NULL:
        return NULL
    opened = hook_create(pool, beside, True, FRAMEWORK_TORCH)
    arena_drop(pool)        # the hook has a reference of its own
    if opened != NULL:
        hook_label(opened)[0], hook_label(opened)[1] = id[0], id[1]
    return opened


cdef CUresult source_reserve(Backing* self, uint64_t size, uint64_t* address) noexcept nogil:
    cdef TorchSource* source = <TorchSource*>self.source
    sum_add(&self.calls, 1)
    address[0] = <uint64_t>source.reserve(source, size)
    if address[0] == 0:
        return CUDA_ERROR_OUT_OF_MEMORY
    # Blocks begin at multiples of 256, which every allocator of CUDA's keeps to.
    if address[0] & (QUANTUM - 1):
        source.release(source, <void*>address[0])
        return CUDA_ERROR_INVALID_VALUE
    return CUDA_SUCCESS


cdef CUresult source_release(Backing* self, uint64_t address, uint64_t size) noexcept nogil:
    cdef TorchSource* source = <TorchSource*>self.source
    sum_add(&self.calls, 1)
    source.release(source, <void*>address)
    return CUDA_SUCCESS


cdef void source_forget(Backing* self) noexcept nogil:
    cdef TorchSource* source = <TorchSource*>self.source
    source.forget(source)


cdef void begin_pool(void* pool) noexcept nogil:
    pool_begin(hook_core(<AllocatorHook*>pool))


cdef void retain_pool(void* pool) noexcept nogil:
    hook_retain(<AllocatorHook*>pool)


cdef void drop_pool(void* pool) noexcept nogil:
    hook_drop(<AllocatorHook*>pool)


cdef int restore(void* pool, const TorchBlock* block) noexcept nogil:
    return hook_allocate_range(<AllocatorHook*>pool, block.address, block.size, block.requested,
                               <CUstream>block.stream)


# ---- copies --------------------------------------------------------------------------------------

cdef int copy(void* to, void* dst, void* origin, const void* src, size_t nbytes,
              void* stream) noexcept nogil:
    # PyTorch has made the context of the stream current.
    cdef DeviceContext* target = arena_context(hook_core(<AllocatorHook*>to))
    cdef DeviceContext* source = arena_context(hook_core(<AllocatorHook*>origin))
    return target.table.cuMemcpyPeerAsync(<uint64_t>dst, target.primary, <uint64_t>src,
                                          source.primary, nbytes, <CUstream>stream)


# ---- slow paths, with the interpreter ------------------------------------------------------------

cdef void* find(int device) noexcept nogil:
    return NULL if process_is_exiting() else find_arena(device)


cdef void* find_arena(int device) noexcept with gil:
    found = finders.get(device == TORCH_PINNED)
    if found is None:
        return NULL
    try:
        with finding:
            if hook_of(device) == NULL:     # no other thread has found it since then
                serve(device, found(device))
    except BaseException as error:
        interrupt_again(error)
        return NULL
    return hook_of(device)


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
    except BaseException as error:
        return c_string(words_of(error))
    return NULL


cdef int is_memory(int status) noexcept nogil:
    return status in (ARENA_OVER_LIMIT, ARENA_DRIVER_REFUSED, ARENA_BEYOND_DEVICE,
                      ARENA_OVER_BUDGET)


cdef char* share(void* address, size_t* offset, char** reason) noexcept nogil:
    return NULL if process_is_exiting() else share_block(address, offset, reason)


cdef char* share_block(void* address, size_t* offset, char** reason) noexcept with gil:
    try:
        text, before = _sharing.share_block(<uintptr_t>address)
        offset[0] = before
        return c_string(text)
    except BaseException as error:
        reason[0] = c_string(words_of(error))
    return NULL


cdef void* open_shared(const char* text, void** address, char** reason) noexcept nogil:
    return NULL if process_is_exiting() else open_block(text, address, reason)


cdef void* open_block(const char* text, void** address, char** reason) noexcept with gil:
    # The caller gets a reference.
    try:
        opened = _sharing.open_block(text.decode())
        address[0] = <void*><uintptr_t>opened.address
        Py_INCREF(opened)
        return <void*>opened
    except BaseException as error:
        reason[0] = c_string(words_of(error))
    return NULL


cdef void close_shared(void* opened) noexcept nogil:
    if not process_is_exiting():
        close_block(opened)


cdef void close_block(void* opened) noexcept with gil:
    (<object>opened).close()
    Py_DECREF(<object>opened)


cdef char* report(int device, size_t nbytes, void* stream, int status,
                  int* is_memory) noexcept nogil:
    return NULL if process_is_exiting() else explain(device, nbytes, stream, status, is_memory)


cdef char* explain(int device, size_t nbytes, void* stream, int status,
                   int* is_memory) noexcept with gil:
    cdef AllocatorHook* hook = hook_of(device)
    cdef uint32_t slot = 0
    cdef bint fresh
    cdef Arena arena = served[device]
    if status == ARENA_CAPTURING:
        return c_string("gpumem: an allocation on a stream that captures a graph has no pool: "
                        "capture with torch.cuda.graph")
    try:
        if status != ARENA_DEAD:
            arena_stream(hook_core(hook), <CUstream>stream, False, &slot, &fresh)
        raise_status(arena, nbytes, 0, slot, status)
    except MemoryError as error:
        sum_add(&failures[device], 1)
        is_memory[0] = True
        if device == TORCH_PINNED:
            return c_string(f"gpumem: {error}")
        words = out_of_memory(device, nbytes, getattr(error, "report", None))
        return c_string(f"{words}\ngpumem: {error}")
    except BaseException as error:
        return c_string(words_of(error))
    return NULL


cdef struct Garbage:        # one collection; both threads see it
    BoundedCall call
    int device
    bint relieved
    size_t nbytes
    char said[MAX_SAID]     # empty: it freed nothing


cdef int collect(int device, size_t nbytes, int status, char** said) noexcept nogil:
    cdef Garbage* garbage
    cdef int outcome = TORCH_NOTHING_FREED
    if (collect_ms[device] == 0 or gm_refuses_at_once or process_is_exiting()
            or not memory_is_out(hook_core(hook_of(device)), nbytes, status)):
        return outcome
    garbage = <Garbage*>calloc(1, sizeof(Garbage))
    if garbage == NULL:
        return outcome
    garbage.call.run = collect_for
    garbage.device, garbage.nbytes = device, nbytes
    if not call_within(&garbage.call, collect_ms[device] * 1_000_000):
        outcome = TORCH_NO_INTERPRETER
        said[0] = late_text(nbytes, collect_ms[device])
        sum_add(&failures[device], 1)
    elif garbage.said[0]:
        outcome = TORCH_RELIEVED if garbage.relieved else TORCH_FREED
        said[0] = strdup(garbage.said)
    call_drop(&garbage.call)
    return outcome


cdef void collect_for(BoundedCall* call) noexcept:
    # Finalizers find the device's context current, also on a thread that was made for them.
    cdef Garbage* garbage = <Garbage*>call
    cdef Arena arena = served[garbage.device]
    if context_enter(arena_context(arena.core)) != CUDA_SUCCESS:
        return
    try:
        released = reliever(garbage.device, garbage.nbytes) if reliever is not None else 0
        garbage.relieved = released != 0
        text = (collection_text(*(collect_garbage(arena) or (0, ()))) if released == 0
                else f"{format_size(released)} left the GPU before this error"
                ).encode("utf-8", "replace")
        strncpy(garbage.said, <bytes>text, MAX_SAID - 1)
    except BaseException as error:
        interrupt_again(error)
    context_leave(arena_context(arena.core))


cdef char* late_text(size_t nbytes, uint64_t ms) noexcept nogil:
    cdef char text[MAX_SAID]
    snprintf(text, MAX_SAID, "CUDA out of memory. Tried to allocate %zu bytes.\n"
             "gpumem: nothing was collected and reported, because another thread kept the "
             "interpreter lock for %llu ms (oom_collect_ms)", nbytes, <unsigned long long>ms)
    return strdup(text)


cdef str words_of(object error):
    # PyTorch raises the words; Ctrl-C's exception is raised after PyTorch's error.
    interrupt_again(error)
    return f"gpumem: {str(error) or type(error).__name__}"


cdef char* c_string(str text) noexcept:
    cdef bytes encoded = text.encode("utf-8", "replace")
    cdef char* copy = <char*>malloc(len(encoded) + 1)
    if copy != NULL:
        memcpy(copy, <const char*>encoded, len(encoded) + 1)
    return copy


# ---- called by gpumem.integrations.torch ---------------------------------------------------------

def segment_functions():
    """Return the addresses of the two functions for `torch._C._cuda_customAllocator`."""
    return <uintptr_t>&allocate_segment, <uintptr_t>&free_segment


def serve(device, Arena arena not None):
    """Let an arena serve a device, or pinned memory (PINNED), from now on; it is kept alive.

    No thread may allocate while an arena replaces another one. Blocks of the other one stay valid.

    Raises
    ------
    ConfigError
        `device` is not from 0 to 63 or PINNED, or the arena's memory has an alignment above 256.
    """
    cdef AllocatorHook* before
    cdef AllocatorHook* hook
    cdef AllocatorHook* alone
    if not 0 <= device < TORCH_ARENAS:
        raise ConfigError(f"device {device} is not from 0 to {TORCH_DEVICES - 1}")
    if arena.extra:
        raise ConfigError(f"invalid alignment = {arena.memory.alignment} of an arena beneath "
                          "PyTorch: expected at most 256")
    if served.get(device) is arena:
        return
    hook = hook_create(arena.core, NULL, True, FRAMEWORK_TORCH)
    alone = hook_create(arena.core, NULL, False, FRAMEWORK_TORCH)
    if hook == NULL or alone == NULL:
        drop(hook)
        drop(alone)
        raise MemoryError("out of host memory while making an allocator hook")
    if device == TORCH_PINNED:
        hook_label(hook)[0] = hook_label(alone)[0] = <uint64_t>PINNED_LABEL
    before = hook_of(device)
    configured[device] = arena.config.max_mem
    collect_ms[device] = arena.config.oom_collect_ms
    served[device] = arena
    publish_pointer(&calls.hooks[<int>device], hook)
    drop(before)
    before = <AllocatorHook*>uncounted[<int>device]
    publish_pointer(&uncounted[<int>device], alone)
    drop(before)


cdef void drop(AllocatorHook* hook) noexcept nogil:
    if hook != NULL:
        hook_drop(hook)


def introduce(arenas):
    """Let each of several arenas' devices access the others' memory, as their settings say."""
    cdef Arena owner, other
    for owner in arenas:
        for other in arenas:
            if other is not owner:
                owner.let_access(other.driver_device)


def set_finder(function, *, pinned=False):
    """Set ``function(ordinal)``, which returns the Arena of a device that none serves yet.

    With `pinned`, ``function(PINNED)`` for the arena of pinned memory.
    """
    finders[pinned] = function


def set_reliever(function):
    """Set ``function(ordinal, nbytes)``, which frees memory before a request is refused.

    It returns the bytes that are free then.
    """
    global reliever
    reliever = function


def refuse_at_once(bint at_once):
    """Let this thread's requests be refused without the reliever and a collection, or not."""
    global gm_refuses_at_once
    gm_refuses_at_once = at_once


def live_bytes(int device):
    """Return the bytes of a device's blocks, and the highest since the last call."""
    cdef AllocatorHook* hook = hook_of(device)
    cdef HookLive now, highest
    if hook == NULL:
        return 0, 0
    highest = hook_peak_since(hook, &now)
    return now.allocated, highest.allocated


def arenas():
    """Return the arenas by the ordinals of the devices that they serve."""
    return {device: arena for device, arena in served.items() if device != TORCH_PINNED}


def pinned():
    """Return the arena that serves PyTorch's pinned memory; None: none does yet."""
    return served.get(TORCH_PINNED)


def table():
    """Return the address of the table of functions that PyTorch's side calls."""
    return <uintptr_t>&calls


calls.allocate = allocate
calls.allocate_alone = allocate_alone
calls.release = release
calls.record = record
calls.find = find
calls.shrink = shrink
calls.shrink_pinned = shrink_pinned
calls.shrink_pool = shrink_pool
calls.limit = limit
calls.block = block
calls.blocks = blocks
calls.live = live
calls.changes = changes
calls.stats = stats
calls.reset_peaks = reset_peaks
calls.pool_bytes = pool_bytes
calls.largest = largest
calls.open_pool = open_pool
calls.begin_pool = begin_pool
calls.retain_pool = retain_pool
calls.drop_pool = drop_pool
calls.restore = restore
calls.add_peer = add_peer
calls.copy = copy
calls.share = share
calls.open_shared = open_shared
calls.close_shared = close_shared
calls.report = report
calls.is_memory = is_memory
calls.collect = collect
