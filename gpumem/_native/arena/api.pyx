"""The arena's face: calls of inner modules, and reads of fields."""

from gpumem._native.arena cimport (
    allocator_hooks as hooks, arena as life, bookkeeping, detours, family, fast_path, growth, sleep
    as sleeping, slow_path, spans, streams, thread_cache, types,
)
from gpumem._native.arena.allocator_hooks cimport AllocatorHook as Hook
from gpumem._native.arena.debug_heap cimport guards, heap as debug_heap
from gpumem._native.arena.debug_heap.types cimport DebugHeap as Heap
from gpumem._native.arena.types cimport (
    ArenaCore as Core, ArenaSpan as CoreSpan, SpanView as CoreView, StreamSlot,
)
from gpumem._native.backing cimport mapped_around
from gpumem._native.bfc cimport bfc_largest_free
from gpumem._native.budget cimport budget_drop, budget_move, budget_rename
from gpumem._native.driver cimport CUDA_SUCCESS
from gpumem._support.atomics cimport load32, load64
from gpumem._support.lock cimport lock_acquire, lock_release



cdef int allocate_fast(ArenaCore* arena, uint64_t nbytes, uint32_t stream_slot,
                       Block* block) noexcept nogil:
    return fast_path.allocate_fast(arena, nbytes, stream_slot, block)


cdef int free_fast(ArenaCore* arena, uint64_t handle, uint32_t stream_slot) noexcept nogil:
    return fast_path.free_fast(arena, handle, stream_slot)


cdef int allocate_detoured(ArenaCore* arena, uint64_t nbytes, uint32_t stream_slot,
                           Block* block) noexcept nogil:
    return detours.allocate_detoured(arena, nbytes, stream_slot, block)


cdef int free_detoured(ArenaCore* arena, uint64_t handle, uint32_t stream_slot) noexcept nogil:
    return detours.free_detoured(arena, handle, stream_slot)


cdef int arena_free_used(ArenaCore* arena, uint64_t handle, uint32_t stream_slot,
                         Uses* uses) noexcept nogil:
    return detours.arena_free_used(arena, handle, stream_slot, uses)


cdef int arena_allocate_slow(ArenaCore* arena, uint64_t nbytes, uint32_t stream_slot,
                             uint32_t flags, Block* block) noexcept nogil:
    return slow_path.arena_allocate_slow(arena, nbytes, stream_slot, flags, block)


cdef int arena_allocate(ArenaCore* arena, uint64_t nbytes, uint32_t stream_slot,
                        Block* block) noexcept nogil:
    return slow_path.arena_allocate(arena, nbytes, stream_slot, block)


cdef ArenaCore* arena_create(const ArenaSettings* settings, Backing backing) noexcept nogil:
    return life.arena_create(settings, backing)


cdef int arena_close(ArenaCore* arena) noexcept nogil:
    return life.arena_close(arena)


cdef int arena_close_wait(ArenaCore* arena) noexcept nogil:
    return life.arena_close_wait(arena)


cdef bint arena_is_idle(ArenaCore* arena) noexcept nogil:
    return life.arena_is_idle(arena)


cdef void arena_leave(ArenaCore* arena) noexcept nogil:
    life.arena_leave(arena)


cdef bint arenas_release_retired() noexcept nogil:
    return life.arenas_release_retired()


cdef bint arenas_release_retired_wait() noexcept nogil:
    return life.arenas_release_retired_wait()


cdef void arenas_release_after_work() noexcept nogil:
    life.arenas_release_after_work()


cdef bint devices_are_quiet() noexcept nogil:
    return life.devices_are_quiet()


cdef int arena_prepare(ArenaCore* arena, uint64_t nbytes) noexcept nogil:
    return life.arena_prepare(arena, nbytes)


cdef int arena_shrink(ArenaCore* arena, uint64_t* released) noexcept nogil:
    return life.arena_shrink(arena, released)


cdef int arena_shrink_after_work(ArenaCore* arena, uint64_t* released) noexcept nogil:
    return life.arena_shrink_after_work(arena, released)


cdef void arena_set_limit(ArenaCore* arena, uint64_t nbytes) noexcept nogil:
    life.arena_set_limit(arena, nbytes)


cdef void arena_reset_peaks(ArenaCore* arena) noexcept nogil:
    life.arena_reset_peaks(arena)


cdef int arena_check(ArenaCore* arena) noexcept nogil:
    return life.arena_check(arena)


cdef BlockCopy* arena_copy_blocks(ArenaCore* arena, uint32_t* count) noexcept nogil:
    return life.arena_copy_blocks(arena, count)


cdef Lease* arena_lease(ArenaCore* arena, uint64_t handle, uint32_t stream_slot) noexcept nogil:
    return life.arena_lease(arena, handle, stream_slot)


cdef void arena_move_lease(ArenaCore* arena, Lease* lease, uint32_t stream_slot) noexcept nogil:
    life.arena_move_lease(arena, lease, stream_slot)


cdef void arena_debug(ArenaCore* arena, DebugHeap* heap) noexcept nogil:
    life.arena_debug(arena, heap)


cdef const char* invariant_text(int number) noexcept nogil:
    return bookkeeping.invariant_text(number)


cdef bint caches_flush(ArenaCore* arena) noexcept nogil:
    return thread_cache.caches_flush(arena)


cdef CUresult arena_add_peer(ArenaCore* arena, int device) noexcept nogil:
    return growth.arena_add_peer(arena, device)


cdef bint arena_page_around(ArenaCore* arena, uint64_t address, MappedPage* found) noexcept nogil:
    return growth.arena_page_around(arena, address, found)


cdef CUresult list_for_transport(ArenaCore* arena, uint64_t address) noexcept nogil:
    return growth.list_for_transport(arena, address)


cdef int arena_stream(ArenaCore* arena, CUstream handle, uint32_t* stream_slot,
                      bint* fresh) noexcept nogil:
    return streams.arena_stream(arena, handle, stream_slot, fresh)


cdef bint arena_stream_is_callers(ArenaCore* arena, uint32_t stream_slot) noexcept nogil:
    return streams.arena_stream_is_callers(arena, stream_slot)


cdef void slot_retain(ArenaCore* arena, uint32_t stream_slot) noexcept nogil:
    streams.slot_retain(arena, stream_slot)


cdef void slot_drop(ArenaCore* arena, uint32_t stream_slot) noexcept nogil:
    streams.slot_drop(arena, stream_slot)


cdef int arena_record(ArenaCore* arena, Uses** uses, uint32_t stream_slot) noexcept nogil:
    return streams.arena_record(arena, uses, stream_slot)


cdef bint arena_reset_stream(ArenaCore* arena, uint32_t stream_slot,
                             bint may_end) noexcept nogil:
    return streams.arena_reset_stream(arena, stream_slot, may_end)


cdef void arena_drop(ArenaCore* arena) noexcept nogil:
    family.arena_drop(arena)


cdef bint arena_retain_live(ArenaCore* arena) noexcept nogil:
    return family.arena_retain_live(arena)


cdef void tag_open(OpenTag* tag) noexcept nogil:
    family.tag_open(tag)


cdef bint tag_close(OpenTag* tag) noexcept nogil:
    return family.tag_close(tag)


cdef ArenaCore* tag_now(const ArenaCore* arena) noexcept nogil:
    return family.tag_now(arena)


cdef void tag_adopt(ArenaCore* tagged, ArenaCore* arena) noexcept nogil:
    family.tag_adopt(tagged, arena)


cdef ArenaCore* tag_next(ArenaCore* arena, ArenaCore* before) noexcept nogil:
    return family.tag_next(arena, before)


cdef ArenaCore* part_next(ArenaCore* pool, ArenaCore* before) noexcept nogil:
    return family.part_next(pool, before)


cdef ArenaCore* pool_create(ArenaCore* owner, ArenaCore* part_of, const Backing* given, bint splits,
                            bint captured) noexcept nogil:
    return life.pool_create(owner, part_of, given, splits, captured)


cdef void pool_adopt(ArenaCore* pool, ArenaCore* owner, ArenaCore* part_of) noexcept nogil:
    life.pool_adopt(pool, owner, part_of)


cdef void pool_begin(ArenaCore* pool) noexcept nogil:
    life.pool_begin(pool)


cdef void pool_end(ArenaCore* pool) noexcept nogil:
    life.pool_end(pool)


cdef bint pool_sleeps(ArenaCore* pool) noexcept nogil:
    return life.pool_sleeps(pool)


cdef CUresult pool_retain_with(ArenaCore* pool, CUgraph graph) noexcept nogil:
    return life.pool_retain_with(pool, graph)


cdef int arena_sleep(ArenaCore* arena, const StorePlace* place) noexcept nogil:
    return sleeping.arena_sleep(arena, place)


cdef int arena_wake(ArenaCore* arena) noexcept nogil:
    return sleeping.arena_wake(arena)


cdef SleepSums sleep_sums(ArenaCore* arena) noexcept nogil:
    return sleeping.sleep_sums(arena)


cdef int span_open(ArenaCore* arena, uint64_t nbytes, uint64_t page_bytes, uint32_t stream_slot,
                   ArenaSpan** out) noexcept nogil:
    return spans.span_open(arena, nbytes, page_bytes, stream_slot, out)


cdef int span_close(ArenaSpan* span) noexcept nogil:
    return spans.span_close(span)


cdef void span_drop(ArenaSpan* span) noexcept nogil:
    spans.span_drop(span)


cdef int span_record(ArenaSpan* span, uint32_t stream_slot, uint64_t first,
                     uint64_t last) noexcept nogil:
    return spans.span_record(span, stream_slot, first, last)


cdef SpanView* span_view(ArenaSpan* span, uint64_t first, uint64_t last) noexcept nogil:
    return spans.span_view(span, first, last)


cdef void span_view_end(void* view) noexcept nogil:
    spans.span_view_end(view)


cdef bint span_is_held(ArenaSpan* span, uint64_t first, uint64_t last) noexcept nogil:
    return spans.span_is_held(span, first, last)


cdef int span_release(ArenaSpan* span, uint32_t first, uint32_t last, uint32_t spare,
                      uint32_t spare_end, Uses* room) noexcept nogil:
    return spans.span_release(span, first, last, spare, spare_end, room)


cdef Uses* room_for_streams(ArenaSpan* span, Uses* uses) noexcept nogil:
    return spans.room_for_streams(span, uses)


cdef int span_commit(ArenaSpan* span, uint32_t first, uint32_t spare, uint32_t last,
                     Lack* lack) noexcept nogil:
    return slow_path.span_commit(span, first, spare, last, lack)


cdef int span_wait(ArenaSpan* span, int status, const Lack* lack, uint64_t* until) noexcept nogil:
    return slow_path.span_wait(span, status, lack, until)


cdef bint arena_copy(ArenaCore* arena, ArenaCopy* copy) noexcept nogil:
    return bookkeeping.arena_copy(arena, copy)


cdef void arena_copy_free(ArenaCopy* copy) noexcept nogil:
    bookkeeping.arena_copy_free(copy)


cdef void arena_add_figures(ArenaCore* arena, ArenaFigures* figures) noexcept nogil:
    bookkeeping.arena_add_figures(arena, figures)


cdef void arena_counts(ArenaCore* arena, ArenaCounts* counts) noexcept nogil:
    bookkeeping.arena_counts(arena, counts)


cdef void arena_counts_now(const ArenaCore* arena, ArenaCounts* counts) noexcept nogil:
    bookkeeping.arena_counts_now(arena, counts)


cdef bint block_note(const ArenaCore* arena, bint small, uint32_t index, uint32_t generation,
                     BlockNote* note) noexcept nogil:
    return bookkeeping.block_note(arena, small, index, generation, note)


cdef AllocatorHook* hook_create(ArenaCore* arena, AllocatorHook* counted, bint counts,
                                uint8_t framework) noexcept nogil:
    return hooks.hook_create(arena, counted, counts, framework)


cdef void hook_retain(AllocatorHook* hook) noexcept nogil:
    hooks.hook_retain(hook)


cdef void hook_drop(AllocatorHook* hook) noexcept nogil:
    hooks.hook_drop(hook)


cdef void hook_let_go(AllocatorHook* hook) noexcept nogil:
    hooks.hook_let_go(hook)


cdef int hook_allocate(AllocatorHook* hook, uint64_t nbytes, CUstream stream, uint32_t flags,
                       uint64_t* address) noexcept nogil:
    return hooks.hook_allocate(hook, nbytes, stream, flags, address)


cdef int hook_allocate_range(AllocatorHook* hook, uint64_t address, uint64_t size, uint64_t nbytes,
                             CUstream stream) noexcept nogil:
    return hooks.hook_allocate_range(hook, address, size, nbytes, stream)


cdef int hook_free(uint64_t address) noexcept nogil:
    return hooks.hook_free(address)


cdef int hook_free_on(uint64_t address, CUstream stream) noexcept nogil:
    return hooks.hook_free_on(address, stream)


cdef int hook_record(uint64_t address, CUstream stream) noexcept nogil:
    return hooks.hook_record(address, stream)


cdef bint hook_find(uint64_t address, HookBlock* block) noexcept nogil:
    return hooks.hook_find(address, block)


cdef ArenaCore* hook_arena(uint64_t address, uint64_t* nbytes) noexcept nogil:
    return hooks.hook_arena(address, nbytes)


cdef int hook_share(uint64_t address) noexcept nogil:
    return hooks.hook_share(address)


cdef uint64_t hooks_of(uint8_t framework, AllocatorHook** found, uint64_t most) noexcept nogil:
    return hooks.hooks_of(framework, found, most)


cdef uint64_t hooks_blocks(const ArenaCore* arena, uint64_t* addresses, uint8_t* frameworks,
                           uint64_t most) noexcept nogil:
    return hooks.hooks_blocks(arena, addresses, frameworks, most)


cdef void hooks_bytes(const ArenaCore* arena, uint64_t* by_framework) noexcept nogil:
    hooks.hooks_bytes(arena, by_framework)


cdef int hook_slot(AllocatorHook* hook, CUstream stream, uint32_t* stream_slot) noexcept nogil:
    return hooks.hook_slot(hook, stream, stream_slot)


cdef HookCounts hook_counts(AllocatorHook* hook) noexcept nogil:
    return hooks.hook_counts(hook)


cdef uint64_t hook_live(const AllocatorHook* hook) noexcept nogil:
    return hooks.hook_live(hook)


cdef void hook_reset_peak(AllocatorHook* hook) noexcept nogil:
    hooks.hook_reset_peak(hook)


cdef DebugHeap* heap_create(const HeapSettings* settings, const HeapHooks* hooks) noexcept nogil:
    return debug_heap.heap_create(settings, hooks)


cdef void heap_drop(DebugHeap* heap) noexcept nogil:
    debug_heap.heap_drop(heap)


cdef CUresult heap_narrow(ArenaCore* arena, uint64_t handle, uint64_t address,
                          uint64_t nbytes) noexcept nogil:
    return debug_heap.heap_narrow(arena, handle, address, nbytes)


cdef void heap_bad_free(uint64_t address) noexcept nogil:
    debug_heap.heap_bad_free(address)


cdef void heap_pump(ArenaCore* arena) noexcept nogil:
    debug_heap.heap_pump(arena)


cdef CUresult heap_check(ArenaCore* arena) noexcept nogil:
    return debug_heap.heap_check(arena)


cdef void heap_hold(ArenaCore* arena) noexcept nogil:
    debug_heap.heap_hold(arena)


cdef void heap_let_go(ArenaCore* arena) noexcept nogil:
    debug_heap.heap_let_go(arena)


cdef HeapCounts heap_counts(DebugHeap* heap) noexcept nogil:
    return guards.heap_counts(heap)


cdef HeapBlock* heap_copy(DebugHeap* heap, bint freed, uint64_t* count) noexcept nogil:
    return guards.heap_copy(heap, freed, count)


cdef HeapFinding* heap_findings(DebugHeap* heap, uint64_t* lost) noexcept nogil:
    return guards.heap_findings(heap, lost)


cdef bint heap_wants_stack(DebugHeap* heap) noexcept nogil:
    return guards.heap_wants_stack(heap)


cdef void heap_note_stack(uint32_t stack) noexcept nogil:
    guards.heap_note_stack(stack)


# ---- fields --------------------------------------------------------------------------------------


cdef uint64_t arena_serial(const ArenaCore* arena) noexcept nogil:
    return (<const Core*>arena).serial


cdef DeviceContext* arena_context(const ArenaCore* arena) noexcept nogil:
    return (<const Core*>arena).context


cdef bint arena_is_paged(const ArenaCore* arena) noexcept nogil:
    return (<const Core*>arena).settings.paged


cdef bint arena_can_sleep(const ArenaCore* arena) noexcept nogil:
    return types.arena_can_sleep(arena)


cdef bint arena_is_graph_pool(const ArenaCore* arena) noexcept nogil:
    return types.is_graph_pool(arena)


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


cdef uint64_t arena_clock(const ArenaCore* arena) noexcept nogil:
    return types.move_clock(arena)


cdef void arena_set_clock(ArenaCore* arena, uint64_t nanoseconds) noexcept nogil:
    (<Core*>arena).replayed_at = nanoseconds


cdef void arena_set_oom_wait(ArenaCore* arena, uint64_t nanoseconds) noexcept nogil:
    (<Core*>arena).settings.oom_wait = nanoseconds


cdef uint64_t arena_in_use(const ArenaCore* arena) noexcept nogil:
    return types.arena_in_use(arena) + load64(&(<const Core*>arena).span_used)


cdef uint64_t arena_reserved(const ArenaCore* arena) noexcept nogil:
    return types.arena_reserved(arena) + load64(&(<const Core*>arena).spanned)


cdef uint64_t family_limit(const ArenaCore* arena) noexcept nogil:
    return types.family_limit(arena)


cdef uint64_t family_held(const ArenaCore* arena) noexcept nogil:
    return types.family_held(arena)


cdef uint64_t family_held_peak(const ArenaCore* arena) noexcept nogil:
    return types.family_held_peak(arena)


cdef uint64_t arena_rows_in_use(const ArenaCore* arena) noexcept nogil:
    return load64(&(<const Core*>arena).span_used)


cdef uint64_t arena_sleeping_bytes(const ArenaCore* arena) noexcept nogil:
    return load64(&(<const Core*>arena).sleeper.nbytes)


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


cdef uint64_t arena_largest_free(ArenaCore* arena) noexcept nogil:
    cdef Core* core = <Core*>arena
    cdef uint64_t largest
    lock_acquire(&core.lock)
    largest = max(bfc_largest_free(&core.table), bfc_largest_free(&core.small))
    lock_release(&core.lock)
    return largest


cdef uint64_t arena_driver_calls(const ArenaCore* arena) noexcept nogil:
    return types.backing_calls(arena)


cdef int32_t arena_graphs(ArenaCore* arena) noexcept nogil:
    return count_now(&(<Core*>arena).graphs)


cdef int32_t arena_live_spans(ArenaCore* arena) noexcept nogil:
    return count_now(&(<Core*>arena).live_spans)


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


cdef CUresult arena_refusal(const ArenaCore* arena) noexcept nogil:
    return types.last_refusal(arena)


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


cdef uint64_t* hook_label(AllocatorHook* hook) noexcept nogil:
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
