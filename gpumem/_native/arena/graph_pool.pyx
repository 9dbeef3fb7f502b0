"""Graph pools below the interpreter."""

from libc.stdint cimport uint32_t, uint64_t

from gpumem._native.arena.allocation_events cimport note_allocate
from gpumem._native.arena.arena cimport arena_create
from gpumem._native.arena.bookkeeping cimport arena_join_as, finish_allocate
from gpumem._native.arena.family cimport arena_drop, arena_retain, part_next, pool_join, tag_now
from gpumem._native.arena.release cimport give_up_views
from gpumem._native.arena.streams cimport complete_done_streams
from gpumem._native.arena.types cimport (
    ARENA_NO_METADATA, ARENA_OK, ARENA_STALE, arena_state, ArenaCore, ArenaSettings, Block,
    EXTEND_SAME_AS_REQUESTED, is_graph_pool, LARGE_SPACE, REUSE_NEVER, root_of, SMALL_SPACE, SPACES,
    STATE_ASLEEP,
)
from gpumem._native.backing cimport Backing, backing_init, numa_init, THE_DEVICE
from gpumem._native.bfc cimport Bfc, bfc_allocate_range, BFC_NO_METADATA, BFC_OK, NIL, SPLIT_NEVER
from gpumem._native.driver cimport (
    context_enter, context_leave, CUDA_ERROR_NOT_SUPPORTED, CUDA_SUCCESS, CUgraph, CUresult,
    CUuserObject,
)
from gpumem._native.pages cimport pages_are_exportable, Space, space_reserves, space_restore
from gpumem._support.atomics cimport count_add
from gpumem._support.events cimport event_source_name, event_source_open, is_recorded, OWNER_ARENA
from gpumem._support.lock cimport lock_acquire, lock_release


cdef enum:
    NO_DESTRUCTOR_SYNC = 1      # CU_USER_OBJECT_NO_DESTRUCTOR_SYNC: the driver takes no other
    MOVE_REFERENCE = 1          # CU_GRAPH_USER_OBJECT_MOVE: ours becomes the graph's
    # Bytes, where its arena has regions. They double up to here only, and a larger block has one of
    # its own size: a graph's memory is not shared with other work.
    POOL_REGION = 33554432
    FIRST_REGION = 2097152


cdef ArenaCore* pool_create(ArenaCore* owner, ArenaCore* part_of, const Backing* given,
                            bint splits, bint captured) noexcept nogil:
    cdef ArenaSettings settings = owner.settings
    cdef Backing backing
    cdef ArenaCore* pool
    backing_init(&backing, owner.context)
    # Another kind of memory, or a source, cannot be had a second time; pools are not nested.
    if given == NULL and owner.backing.reserve != backing.reserve or is_graph_pool(owner):
        return NULL
    if given != NULL:
        backing = given[0]
        backing.forget = NULL       # the caller's until nothing can fail
    settings.max_mem = 0            # the parent's holds for both
    settings.initial_chunk = settings.initial_growth_chunk = FIRST_REGION
    if not splits:
        settings.extend = EXTEND_SAME_AS_REQUESTED
    # Streams of a capture may run at the same time at every launch, whatever has completed now.
    settings.reuse = REUSE_NEVER
    settings.ort_split = False
    settings.paged = owner.settings.paged and captured and splits and given == NULL
    settings.move_budget = 1
    settings.passthrough = False
    settings.oom_wait = 0
    pool = arena_create(&settings, backing)
    if pool == NULL:
        return NULL
    if not splits:
        pool.table.split_rule = SPLIT_NEVER
    if not arena_join_as(pool, owner):
        arena_drop(pool)
        return NULL
    if given != NULL:
        pool.backing.forget = given.forget
    pool_adopt(pool, owner, part_of)
    # Opened as an event source only when it is complete: readers may then look at it.
    event_source_name(&pool.events, owner.events.memory, b"graph pool", owner.events.name)
    event_source_open(&pool.events, pool, OWNER_ARENA)
    return pool


cdef void pool_adopt(ArenaCore* pool, ArenaCore* owner, ArenaCore* part_of) noexcept nogil:
    # A handle each for the regions of what can sleep. No peer is added meanwhile.
    cdef int i
    pool.settings.max_extend = min(pool.settings.max_extend, <uint64_t>POOL_REGION)
    lock_acquire(&owner.grow_lock)
    if owner.settings.paged and pool.backing.source == NULL:
        pool.access = owner.access
        if not pool.settings.paged:
            numa_init(&pool.backing, pool.context, THE_DEVICE)
            pool.backing.exportable = pages_are_exportable()
            pool.backing.access = &pool.access
    for i in range(SPACES):
        pool.spaces[i].keeps_views = True
    pool_join(pool, owner, part_of)
    lock_release(&owner.grow_lock)


cdef ArenaCore* pool_for_tag(ArenaCore* pool) noexcept nogil:
    cdef ArenaCore* owner = tag_now(root_of(pool))
    cdef ArenaCore* part
    if owner == NULL or owner == pool.sleeps_with or pool.sleeps_with == NULL:
        return pool
    part = part_next(pool, NULL)
    while part != NULL and part.sleeps_with != owner:
        part = part_next(pool, part)
    if part == NULL:
        part = pool_create(owner, pool, NULL, pool.table.split_rule != SPLIT_NEVER,
                           pool.settings.paged)
    # The pool refers to it. Two threads may have made one each: both serve.
    if part != NULL:
        arena_drop(part)
    return part


cdef void pool_begin(ArenaCore* pool) noexcept nogil:
    cdef ArenaCore* part = part_next(pool, NULL)
    complete_done_streams(pool)
    while part != NULL:
        complete_done_streams(part)
        part = part_next(pool, part)


cdef void pool_end(ArenaCore* pool) noexcept nogil:
    cdef ArenaCore* part = part_next(pool, NULL)
    give_up_views(pool)
    while part != NULL:
        give_up_views(part)
        part = part_next(pool, part)
    pool_begin(pool)


cdef bint pool_sleeps(ArenaCore* pool) noexcept nogil:
    cdef ArenaCore* part = part_next(pool, NULL)
    cdef bint asleep = arena_state(pool) == STATE_ASLEEP
    while part != NULL:
        asleep = asleep or arena_state(part) == STATE_ASLEEP
        part = part_next(pool, part)
    return asleep


cdef CUresult pool_retain_with(ArenaCore* pool, CUgraph graph) noexcept nogil:
    cdef CUuserObject counted = NULL
    cdef CUresult code
    if pool.context.table.cuUserObjectCreate == NULL:
        return CUDA_ERROR_NOT_SUPPORTED
    code = context_enter(pool.context)
    if code != CUDA_SUCCESS:
        return code
    # Counted before the driver may call graph_ended, which it does on another thread.
    retain_for_graph(pool)
    code = pool.context.table.cuUserObjectCreate(&counted, pool, graph_ended, 1, NO_DESTRUCTOR_SYNC)
    if code != CUDA_SUCCESS:
        graph_ended(pool)
    else:
        code = pool.context.table.cuGraphRetainUserObject(graph, counted, 1, MOVE_REFERENCE)
        # Releasing the last reference calls graph_ended.
        if code != CUDA_SUCCESS:
            pool.context.table.cuUserObjectRelease(counted, 1)
    context_leave(pool.context)
    return code


cdef void retain_for_graph(ArenaCore* pool) noexcept nogil:
    arena_retain(pool)
    count_add(&pool.graphs, 1)
    count_add(&pool.parent.graphs, 1)


cdef void graph_ended(void* retained) noexcept nogil:
    # On a thread of the driver's, which must not call the driver: dropping only retires the pool.
    cdef ArenaCore* pool = <ArenaCore*>retained
    count_add(&pool.parent.graphs, -1)
    count_add(&pool.graphs, -1)
    arena_drop(pool)


# ---- a block at a given place --------------------------------------------------------------------

cdef int arena_allocate_range(ArenaCore* arena, uint64_t address, uint64_t size, uint64_t requested,
                              uint32_t stream_slot, Block* block) noexcept nogil:
    cdef int status = BFC_OK
    cdef uint32_t index = NIL
    cdef Bfc* table = &arena.table
    cdef Space* space = &arena.spaces[LARGE_SPACE]
    cdef bint backed = True
    lock_acquire(&arena.lock)
    if arena.settings.paged:
        if space_reserves(&arena.spaces[SMALL_SPACE], address, size):
            table = &arena.small
            space = &arena.spaces[SMALL_SPACE]
        backed = (space_reserves(space, address, size)
                  and space_restore(space, address, address + size))
    if backed:
        index = bfc_allocate_range(table, address, size, requested, stream_slot, &status)
    if index != NIL:
        finish_allocate(arena, NULL, table, index, block)
    lock_release(&arena.lock)
    if index == NIL:
        return ARENA_NO_METADATA if status == BFC_NO_METADATA else ARENA_STALE
    if is_recorded(&arena.events):
        note_allocate(arena, requested, stream_slot, block)
    return ARENA_OK
