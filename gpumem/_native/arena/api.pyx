"""The arena's face: calls of inner modules, and reads of fields."""

from gpumem._native.arena cimport (
    allocator_hooks as hooks, arena as life, bookkeeping, detours, family, fast_path, growth,
    sleep as sleeping, slow_path, spans, streams, thread_cache, types,
)
from gpumem._native.arena.allocator_hooks cimport AllocatorHook as Hook
from gpumem._native.arena.debug_heap cimport guards, heap as debug_heap
from gpumem._native.arena.debug_heap.types cimport DebugHeap as Heap
from gpumem._native.arena.types cimport (
    ArenaCore as Core, ArenaSpan as CoreSpan, SpanView as CoreView, StreamSlot,
)
from gpumem._native.backing cimport mapped_around
from gpumem._native.budget cimport budget_drop, budget_move, budget_rename
from gpumem._native.driver cimport CUDA_SUCCESS
from gpumem._support.atomics cimport load32, load64
from gpumem._support.lock cimport lock_acquire, lock_release


# Each is set while this module is imported, and then never again.
allocate_fast = fast_path.allocate_fast
free_fast = fast_path.free_fast
allocate_detoured = detours.allocate_detoured
free_detoured = detours.free_detoured
arena_free_used = detours.arena_free_used
arena_allocate_slow = slow_path.arena_allocate_slow
arena_allocate = slow_path.arena_allocate
arena_create = life.arena_create
arena_close = life.arena_close
arena_close_wait = life.arena_close_wait
arena_is_idle = life.arena_is_idle
arena_leave = life.arena_leave
arenas_release_retired = life.arenas_release_retired
arenas_release_after_work = life.arenas_release_after_work
devices_are_quiet = life.devices_are_quiet
arena_prepare = life.arena_prepare
arena_shrink = life.arena_shrink
arena_set_limit = life.arena_set_limit
arena_reset_peaks = life.arena_reset_peaks
arena_check = life.arena_check
arena_lease = life.arena_lease
arena_move_lease = life.arena_move_lease
arena_debug = life.arena_debug
invariant_text = bookkeeping.invariant_text
caches_flush = thread_cache.caches_flush
memory_is_out = growth.memory_is_out
arena_add_peer = growth.arena_add_peer
arena_page_around = growth.arena_page_around
list_for_transport = growth.list_for_transport
arena_stream = streams.arena_stream
arena_stream_is_callers = streams.arena_stream_is_callers
slot_retain = streams.slot_retain
slot_drop = streams.slot_drop
arena_record = streams.arena_record
arena_reset_stream = streams.arena_reset_stream
arena_drop = family.arena_drop
arena_retain_live = family.arena_retain_live
tag_count = family.tag_count
tag_now = family.tag_now
tag_adopt = family.tag_adopt
tag_next = family.tag_next
part_next = family.part_next
pool_create = life.pool_create
pool_adopt = life.pool_adopt
pool_begin = life.pool_begin
pool_end = life.pool_end
pool_retain_with = life.pool_retain_with
arena_turn = sleeping.arena_turn
arena_sleep = sleeping.arena_sleep
arena_wake = sleeping.arena_wake
arenas_release_kept = sleeping.arenas_release_kept
sleep_sums = sleeping.sleep_sums
span_open = spans.span_open
span_close = spans.span_close
span_drop = spans.span_drop
span_record = spans.span_record
span_view = spans.span_view
span_view_end = spans.span_view_end
span_is_held = spans.span_is_held
span_release = spans.span_release
room_for_streams = spans.room_for_streams
span_commit = slow_path.span_commit
span_wait = slow_path.span_wait
arena_copy = bookkeeping.arena_copy
arena_copy_free = bookkeeping.arena_copy_free
arena_add_figures = bookkeeping.arena_add_figures
arena_counts = bookkeeping.arena_counts
arena_counts_now = bookkeeping.arena_counts_now
family_counts = bookkeeping.family_counts
block_note = bookkeeping.block_note
hook_create = hooks.hook_create
hook_retain = hooks.hook_retain
hook_drop = hooks.hook_drop
hook_let_go = hooks.hook_let_go
hook_allocate = hooks.hook_allocate
hook_allocate_range = hooks.hook_allocate_range
hook_free = hooks.hook_free
hook_free_on = hooks.hook_free_on
hook_record = hooks.hook_record
hook_find = hooks.hook_find
hook_arena = hooks.hook_arena
hook_share = hooks.hook_share
hooks_of = hooks.hooks_of
hooks_blocks = hooks.hooks_blocks
hooks_bytes = hooks.hooks_bytes
hook_counts = hooks.hook_counts
hook_peak_since = hooks.hook_peak_since
hook_live = hooks.hook_live
hook_reset_peak = hooks.hook_reset_peak
heap_create = debug_heap.heap_create
heap_drop = debug_heap.heap_drop
heap_narrow = debug_heap.heap_narrow
heap_bad_free = debug_heap.heap_bad_free
heap_pump = debug_heap.heap_pump
heap_check = debug_heap.heap_check
heap_copy = guards.heap_copy
heap_findings = guards.heap_findings
heap_wants_stack = guards.heap_wants_stack
heap_note_stack = guards.heap_note_stack
arena_can_sleep = types.arena_can_sleep
arena_is_graph_pool = types.is_graph_pool
arena_clock = types.move_clock
arena_driver_calls = types.backing_calls
arena_refusal = types.last_refusal


# ---- fields --------------------------------------------------------------------------------------


cdef uint64_t arena_serial(const ArenaCore* arena) noexcept nogil:
    return (<const Core*>arena).serial


cdef DeviceContext* arena_context(const ArenaCore* arena) noexcept nogil:
    return (<const Core*>arena).context


cdef bint arena_is_paged(const ArenaCore* arena) noexcept nogil:
    return (<const Core*>arena).settings.paged


cdef ArenaCore* arena_parent(const ArenaCore* arena) noexcept nogil:
    return (<const Core*>arena).parent


cdef ArenaCore* arena_sleeps_with(const ArenaCore* arena) noexcept nogil:
    return (<const Core*>arena).sleeps_with


cdef EventSource* arena_events(ArenaCore* arena) noexcept nogil:
    return &(<Core*>arena).events


cdef ViewCount* arena_views(ArenaCore* arena) noexcept nogil:
    return &(<Core*>arena).views


cdef DebugHeap* arena_heap(const ArenaCore* arena) noexcept nogil:
    return (<const Core*>arena).heap


cdef MoveBudget* arena_move_budget(ArenaCore* arena) noexcept nogil:
    return &(<Core*>arena).move_budget


cdef void arena_set_clock(ArenaCore* arena, uint64_t nanoseconds) noexcept nogil:
    (<Core*>arena).replayed_at = nanoseconds


cdef void arena_set_oom_wait(ArenaCore* arena, uint64_t nanoseconds) noexcept nogil:
    (<Core*>arena).settings.oom_wait = nanoseconds


cdef uint64_t arena_held_by_pools(ArenaCore* arena) noexcept nogil:
    cdef Core* root = <Core*>types.root_of(arena)
    cdef Core* pool
    cdef uint64_t held = 0
    # No pool ends while the lock is held.
    lock_acquire(&root.lock)
    pool = root.pools
    while pool != NULL:
        if pool != arena:
            held += types.arena_reserved_now(pool)
        pool = pool.next_child
    lock_release(&root.lock)
    return held


cdef uint32_t arena_stream_count(const ArenaCore* arena) noexcept nogil:
    return (<const Core*>arena).table.stream_slot_count


cdef CUstream arena_stream_handle(const ArenaCore* arena, uint32_t slot) noexcept nogil:
    return (<const Core*>arena).streams[slot].handle


cdef StreamState arena_stream_state(const ArenaCore* arena, uint32_t slot) noexcept nogil:
    return (<const Core*>arena).streams[slot].state


cdef CUresult arena_stream_refusal(const ArenaCore* arena, uint32_t slot) noexcept nogil:
    cdef const StreamSlot* stream = &(<const Core*>arena).streams[slot]
    return stream.refusal if load32(&stream.dirty) or stream.pending_frees else CUDA_SUCCESS


cdef Backing* arena_backing(ArenaCore* arena) noexcept nogil:
    return &(<Core*>arena).backing


cdef Access* arena_access(ArenaCore* arena) noexcept nogil:
    return &(<Core*>arena).access


cdef const char* arena_refused_call(const ArenaCore* arena) noexcept nogil:
    # Without a call of the arena's own it was the backing that called.
    cdef const char* own = types.last_refused_call(arena)
    return own if own != NULL else (<const Core*>arena).backing.call


cdef Backing* arena_apart(ArenaCore* arena, int kind) noexcept nogil:
    cdef Backing* backing = &(<Core*>arena).apart[kind]
    return backing if backing.reserve != NULL else NULL


cdef void arena_set_apart(ArenaCore* arena, int kind, const Backing* backing) noexcept nogil:
    cdef Core* core = <Core*>arena
    if core.apart[kind].reserve == NULL:
        core.apart[kind] = backing[0]


cdef bint arena_find_apart(ArenaCore* arena, int kind, uint64_t address,
                           Mapped* found) noexcept nogil:
    cdef Core* core = <Core*>arena
    cdef Mapped* mapped
    lock_acquire(&core.grow_lock)
    mapped = mapped_around(&core.apart[kind], address)
    if mapped != NULL:
        found[0] = mapped[0]
    lock_release(&core.grow_lock)
    return mapped != NULL


cdef bint arena_join_budget(ArenaCore* arena, BudgetCore* account, bint in_use,
                            const char* name) noexcept nogil:
    cdef Core* core = <Core*>arena
    # `detour` takes allocations off the fast path, which charges nothing.
    if in_use:
        core.in_use_level = account
        core.detour += 1
    elif account != NULL:
        budget_move(types.family_level(core), account.parent)
        budget_drop(account)
    return budget_rename(core.level, name)


cdef BudgetCore* arena_account(const ArenaCore* arena) noexcept nogil:
    cdef const Core* core = <const Core*>arena
    return types.family_level(core) if core.in_use_level == NULL else core.in_use_level


cdef bint arena_charges_in_use(const ArenaCore* arena) noexcept nogil:
    return (<const Core*>arena).in_use_level != NULL


cdef uint64_t arena_over_budget(const ArenaCore* arena) noexcept nogil:
    return load64(&(<const Core*>arena).over_budget)


cdef ArenaCore* hook_core(const AllocatorHook* hook) noexcept nogil:
    return (<const Hook*>hook).arena


cdef uint64_t* hook_label(const AllocatorHook* hook) noexcept nogil:
    return (<Hook*>hook).label


cdef SpanFigures span_figures(const ArenaSpan* span) noexcept nogil:
    cdef const CoreSpan* core = <const CoreSpan*>span
    cdef SpanFigures found
    found.base = core.pages.base
    found.nbytes = core.pages.nbytes
    found.held = load64(&core.pages.held)
    found.used = load64(&core.pages.used)
    found.closed = load32(&core.closed) != 0
    return found


cdef ArenaCore* span_arena(const ArenaSpan* span) noexcept nogil:
    return (<const CoreSpan*>span).arena


cdef uint64_t span_view_first(const SpanView* view) noexcept nogil:
    return (<const CoreView*>view).first


cdef uint64_t span_view_last(const SpanView* view) noexcept nogil:
    return (<const CoreView*>view).last


cdef const HeapSettings* heap_settings(const DebugHeap* heap) noexcept nogil:
    return &(<const Heap*>heap).settings


cdef bint heap_has_findings(const DebugHeap* heap) noexcept nogil:
    return (<const Heap*>heap).findings != NULL


cdef bint heap_is_gone(const DebugHeap* heap) noexcept nogil:
    return (<const Heap*>heap).gone
