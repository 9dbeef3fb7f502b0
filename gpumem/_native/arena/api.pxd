"""The arena's face: every name of `_native/arena` that other folders may cimport.

`ArenaCore`, `ArenaSpan`, `SpanView`, `AllocatorHook` and `DebugHeap` are opaque here. A function
that an inner module implements is described in the .pxd that its section names. Every function may
be called from any thread, with the interpreter lock or without it.
"""

from libc.stdint cimport int32_t, uint32_t, uint64_t, uint8_t

from gpumem._native.arena.values cimport *        # all of its names are the face's
from gpumem._native.backing cimport Backing, Mapped
from gpumem._native.budget cimport BudgetCore
from gpumem._native.driver cimport Access, CUgraph, CUresult, CUstream, DeviceContext
from gpumem._native.pages cimport MappedPage, MoveBudget, StorePlace
from gpumem._support.atomics cimport count_now
from gpumem._support.events cimport EventSource
from gpumem._support.lease cimport Lease, Uses, ViewCount

# Returns whether an allocation leaves the fast path. Debug heaps, open tags and some budgets are
# reasons.
cdef inline bint arena_takes_detours(const ArenaCore* arena) noexcept nogil:
    return count_now(<int32_t*>&(<const ArenaFront*>arena).detour) != 0


# ---- Blocks; see fast_path, detours, slow_path ---------------------------------------------------


cdef int (*allocate_fast)(ArenaCore* arena, uint64_t nbytes, uint32_t stream_slot,
                          Block* block) noexcept nogil
cdef int (*free_fast)(ArenaCore* arena, uint64_t handle, uint32_t stream_slot) noexcept nogil
cdef int (*allocate_detoured)(ArenaCore* arena, uint64_t nbytes, uint32_t stream_slot,
                              Block* block) noexcept nogil
cdef int (*free_detoured)(ArenaCore* arena, uint64_t handle, uint32_t stream_slot) noexcept nogil
cdef int (*arena_free_used)(ArenaCore* arena, uint64_t handle, uint32_t stream_slot,
                            Uses* uses) noexcept nogil
cdef int (*arena_allocate_slow)(ArenaCore* arena, uint64_t nbytes, uint32_t stream_slot,
                                uint32_t flags, Block* block) noexcept nogil
cdef int (*arena_allocate)(ArenaCore* arena, uint64_t nbytes, uint32_t stream_slot,
                           Block* block) noexcept nogil


cdef inline int arena_allocate_fast(ArenaCore* arena, uint64_t nbytes, uint32_t stream_slot,
                                    Block* block) noexcept nogil:
    cdef int status = allocate_fast(arena, nbytes, stream_slot, block)
    if unlikely(status == ARENA_DETOUR):
        return allocate_detoured(arena, nbytes, stream_slot, block)
    return status

cdef inline int arena_free(ArenaCore* arena, uint64_t handle,
                           uint32_t stream_slot) noexcept nogil:
    cdef int status = free_fast(arena, handle, stream_slot)
    if unlikely(status == ARENA_DETOUR):
        return free_detoured(arena, handle, stream_slot)
    return status


# ---- Life; see arena, bookkeeping, thread_cache, growth ------------------------------------------


cdef ArenaCore* (*arena_create)(const ArenaSettings* settings, Backing backing) noexcept nogil
cdef int (*arena_close)(ArenaCore* arena) noexcept nogil
cdef int (*arena_close_wait)(ArenaCore* arena) noexcept nogil
cdef bint (*arena_is_idle)(ArenaCore* arena) noexcept nogil
cdef void (*arena_leave)(ArenaCore* arena) noexcept nogil
cdef bint (*arenas_release_retired)(bint with_wait, bint* stays) noexcept nogil
cdef void (*arenas_release_after_work)() noexcept nogil
cdef bint (*devices_are_quiet)() noexcept nogil
cdef int (*arena_prepare)(ArenaCore* arena, uint64_t nbytes) noexcept nogil
cdef int (*arena_shrink)(ArenaCore* arena, bint after_work, uint64_t* released) noexcept nogil
cdef void (*arena_set_limit)(ArenaCore* arena, uint64_t nbytes) noexcept nogil
cdef void (*arena_reset_peaks)(ArenaCore* arena) noexcept nogil
cdef int (*arena_check)(ArenaCore* arena) noexcept nogil
cdef Lease* (*arena_lease)(ArenaCore* arena, uint64_t handle, uint32_t stream_slot) noexcept nogil
cdef void (*arena_move_lease)(ArenaCore* arena, Lease* lease, uint32_t stream_slot) noexcept nogil
cdef void (*arena_debug)(ArenaCore* arena, DebugHeap* heap) noexcept nogil
cdef const char* (*invariant_text)(int number) noexcept nogil
cdef bint (*caches_flush)(ArenaCore* arena) noexcept nogil
# Whether memory is out, so that freed memory may help a request with this status.
cdef bint (*memory_is_out)(const ArenaCore* arena, uint64_t nbytes, int status) noexcept nogil
cdef CUresult (*arena_add_peer)(ArenaCore* arena, int device) noexcept nogil
cdef bint (*arena_page_around)(ArenaCore* arena, uint64_t address, MappedPage* found) noexcept nogil
cdef CUresult (*list_for_transport)(ArenaCore* arena, uint64_t address) noexcept nogil


# ---- Streams; see streams ------------------------------------------------------------------------


cdef int (*arena_stream)(ArenaCore* arena, CUstream handle, bint retain, uint32_t* stream_slot,
                         bint* fresh) noexcept nogil
cdef bint (*arena_stream_is_callers)(ArenaCore* arena, uint32_t stream_slot) noexcept nogil
cdef void (*slot_retain)(ArenaCore* arena, uint32_t stream_slot) noexcept nogil
cdef void (*slot_drop)(ArenaCore* arena, uint32_t stream_slot) noexcept nogil
cdef int (*arena_record)(ArenaCore* arena, Uses** uses, uint32_t stream_slot) noexcept nogil
cdef bint (*arena_reset_stream)(ArenaCore* arena, uint32_t stream_slot, bint may_end) noexcept nogil


# ---- Arenas of tags, and graph pools; see family, arena, sleep -----------------------------------


cdef void (*arena_drop)(ArenaCore* arena) noexcept nogil
cdef bint (*arena_retain_live)(ArenaCore* arena) noexcept nogil
cdef void (*tag_count)(ArenaCore* arena, int32_t by) noexcept nogil
cdef ArenaCore* (*tag_now)(const ArenaCore* arena) noexcept nogil
cdef void (*tag_adopt)(ArenaCore* tagged, ArenaCore* arena) noexcept nogil
cdef ArenaCore* (*tag_next)(ArenaCore* arena, ArenaCore* before) noexcept nogil
cdef ArenaCore* (*part_next)(ArenaCore* pool, ArenaCore* before) noexcept nogil
cdef ArenaCore* (*pool_create)(ArenaCore* owner, ArenaCore* part_of, const Backing* given,
                               bint splits, bint captured) noexcept nogil
cdef void (*pool_adopt)(ArenaCore* pool, ArenaCore* owner, ArenaCore* part_of) noexcept nogil
cdef void (*pool_begin)(ArenaCore* pool) noexcept nogil
cdef void (*pool_end)(ArenaCore* pool) noexcept nogil
cdef CUresult (*pool_retain_with)(ArenaCore* pool, CUgraph graph) noexcept nogil
cdef bint (*arena_turn)(ArenaCore* arena, uint32_t before, uint32_t after) noexcept nogil
cdef int (*arena_sleep)(ArenaCore* arena, const StorePlace* place) noexcept nogil
cdef int (*arena_wake)(ArenaCore* arena) noexcept nogil
cdef SleepSums (*sleep_sums)(ArenaCore* arena) noexcept nogil
cdef uint64_t (*arenas_release_kept)(const ArenaCore* owner) noexcept nogil


# ---- Virtual tensors; see spans, slow_path -------------------------------------------------------


cdef int (*span_open)(ArenaCore* arena, uint64_t nbytes, uint64_t page_bytes, uint32_t stream_slot,
                      ArenaSpan** out) noexcept nogil
cdef int (*span_close)(ArenaSpan* span) noexcept nogil
cdef void (*span_drop)(ArenaSpan* span) noexcept nogil
cdef int (*span_record)(ArenaSpan* span, uint32_t stream_slot, uint64_t first,
                        uint64_t last) noexcept nogil
cdef SpanView* (*span_view)(ArenaSpan* span, uint64_t first, uint64_t last) noexcept nogil
cdef void (*span_view_end)(void* view) noexcept nogil
cdef bint (*span_is_held)(ArenaSpan* span, uint64_t first, uint64_t last) noexcept nogil
cdef int (*span_release)(ArenaSpan* span, uint32_t first, uint32_t last, uint32_t spare,
                         uint32_t spare_end, Uses* room) noexcept nogil
cdef Uses* (*room_for_streams)(ArenaSpan* span, Uses* uses) noexcept nogil
cdef int (*span_commit)(ArenaSpan* span, uint32_t first, uint32_t spare, uint32_t last,
                        Lack* lack) noexcept nogil
cdef int (*span_wait)(ArenaSpan* span, int status, Lack* lack, uint64_t* until) noexcept nogil


# ---- Copies and counters; see bookkeeping --------------------------------------------------------


cdef bint (*arena_copy)(ArenaCore* arena, ArenaCopy* copy) noexcept nogil
cdef void (*arena_copy_free)(ArenaCopy* copy) noexcept nogil
cdef void (*arena_add_figures)(ArenaCore* arena, ArenaFigures* figures) noexcept nogil
cdef void (*arena_counts)(ArenaCore* arena, ArenaCounts* counts) noexcept nogil
cdef void (*arena_counts_now)(const ArenaCore* arena, ArenaCounts* counts) noexcept nogil
cdef FamilyCounts (*family_counts)(const ArenaCore* arena) noexcept nogil
cdef bint (*block_note)(const ArenaCore* arena, bint small, uint32_t index, uint32_t generation,
                        BlockNote* note) noexcept nogil


# ---- Hooks of other libraries; see allocator_hooks -----------------------------------------------


cdef AllocatorHook* (*hook_create)(ArenaCore* arena, AllocatorHook* counted, bint counts,
                                   uint8_t framework) noexcept nogil
cdef void (*hook_retain)(AllocatorHook* hook) noexcept nogil
cdef void (*hook_drop)(AllocatorHook* hook) noexcept nogil
cdef void (*hook_let_go)(AllocatorHook* hook) noexcept nogil
cdef int (*hook_allocate)(AllocatorHook* hook, uint64_t nbytes, CUstream stream, uint32_t flags,
                          uint64_t* address) noexcept nogil
cdef int (*hook_allocate_range)(AllocatorHook* hook, uint64_t address, uint64_t size,
                                uint64_t nbytes, CUstream stream) noexcept nogil
cdef int (*hook_free)(uint64_t address) noexcept nogil
cdef int (*hook_free_on)(uint64_t address, CUstream stream) noexcept nogil
cdef int (*hook_record)(uint64_t address, CUstream stream) noexcept nogil
cdef bint (*hook_find)(uint64_t address, HookBlock* block) noexcept nogil
cdef ArenaCore* (*hook_arena)(uint64_t address, uint64_t* nbytes) noexcept nogil
cdef int (*hook_share)(uint64_t address) noexcept nogil
cdef uint64_t (*hooks_of)(uint8_t framework, AllocatorHook** found, uint64_t most) noexcept nogil
cdef uint64_t (*hooks_blocks)(const ArenaCore* arena, uint64_t* addresses, uint8_t* frameworks,
                              uint64_t most) noexcept nogil
cdef void (*hooks_bytes)(const ArenaCore* arena, uint64_t* by_framework) noexcept nogil
cdef HookCounts (*hook_counts)(AllocatorHook* hook) noexcept nogil
cdef HookLive (*hook_peak_since)(AllocatorHook* hook, HookLive* now) noexcept nogil
cdef uint64_t (*hook_live)(const AllocatorHook* hook) noexcept nogil
cdef void (*hook_reset_peak)(AllocatorHook* hook) noexcept nogil


# ---- Debug heap; see debug_heap.heap, debug_heap.guards ------------------------------------------


cdef DebugHeap* (*heap_create)(const HeapSettings* settings, const HeapHooks* hooks) noexcept nogil
cdef void (*heap_drop)(DebugHeap* heap) noexcept nogil
cdef CUresult (*heap_narrow)(ArenaCore* arena, uint64_t handle, uint64_t address,
                             uint64_t nbytes) noexcept nogil
cdef void (*heap_bad_free)(uint64_t address) noexcept nogil
cdef void (*heap_pump)(ArenaCore* arena) noexcept nogil
cdef CUresult (*heap_check)(ArenaCore* arena) noexcept nogil
cdef HeapBlock* (*heap_copy)(DebugHeap* heap, bint freed, uint64_t* count) noexcept nogil
cdef HeapFinding* (*heap_findings)(DebugHeap* heap, uint64_t* lost) noexcept nogil
cdef bint (*heap_wants_stack)(DebugHeap* heap) noexcept nogil
cdef void (*heap_note_stack)(uint32_t stack) noexcept nogil


# ---- Fields of an arena --------------------------------------------------------------------------


cdef uint64_t arena_serial(const ArenaCore* arena) noexcept nogil
cdef DeviceContext* arena_context(const ArenaCore* arena) noexcept nogil
cdef bint arena_is_paged(const ArenaCore* arena) noexcept nogil
cdef bint (*arena_can_sleep)(const ArenaCore* arena) noexcept nogil
cdef bint (*arena_is_graph_pool)(const ArenaCore* arena) noexcept nogil
# The arena that it is a graph pool or a tag of; NULL: none.
cdef ArenaCore* arena_parent(const ArenaCore* arena) noexcept nogil
# The arena that has the tag of a graph pool's blocks.
cdef ArenaCore* arena_sleeps_with(const ArenaCore* arena) noexcept nogil
cdef EventSource* arena_events(ArenaCore* arena) noexcept nogil
cdef ViewCount* arena_views(ArenaCore* arena) noexcept nogil
cdef DebugHeap* arena_heap(const ArenaCore* arena) noexcept nogil
cdef MoveBudget* arena_move_budget(ArenaCore* arena) noexcept nogil
# Now, in ns; in a replay the time of its trace.
cdef uint64_t (*arena_clock)(const ArenaCore* arena) noexcept nogil
# For replays of a trace: sets that time, or the time that an allocation waits for work.
cdef void arena_set_clock(ArenaCore* arena, uint64_t nanoseconds) noexcept nogil
cdef void arena_set_oom_wait(ArenaCore* arena, uint64_t nanoseconds) noexcept nogil

# Bytes that the arena's graph pools hold, without the arena itself; takes the root's lock.
cdef uint64_t arena_held_by_pools(ArenaCore* arena) noexcept nogil
# Calls of the driver for its memory, so far.
cdef uint64_t (*arena_driver_calls)(const ArenaCore* arena) noexcept nogil


# ---- Streams by slot -----------------------------------------------------------------------------


cdef uint32_t arena_stream_count(const ArenaCore* arena) noexcept nogil
cdef CUstream arena_stream_handle(const ArenaCore* arena, uint32_t slot) noexcept nogil
cdef StreamState arena_stream_state(const ArenaCore* arena, uint32_t slot) noexcept nogil
# Why the driver records no event on a stream that freed memory waits for; CUDA_SUCCESS: it does,
# or no memory waits.
cdef CUresult arena_stream_refusal(const ArenaCore* arena, uint32_t slot) noexcept nogil


# ---- Where its memory comes from -----------------------------------------------------------------


cdef Backing* arena_backing(ArenaCore* arena) noexcept nogil
# The devices that may access its mapped memory.
cdef Access* arena_access(ArenaCore* arena) noexcept nogil
# The driver's last refusal, and the name of the call.
cdef CUresult (*arena_refusal)(const ArenaCore* arena) noexcept nogil
cdef const char* arena_refused_call(const ArenaCore* arena) noexcept nogil
# The backing of blocks with memory of their own; NULL: none was made.
cdef Backing* arena_apart(ArenaCore* arena, int kind) noexcept nogil
# Sets it, unless another thread was faster. Caller holds the interpreter lock.
cdef void arena_set_apart(ArenaCore* arena, int kind, const Backing* backing) noexcept nogil
# Copies the mapping of that backing that has the address; False: none. Takes the grow lock.
cdef bint arena_find_apart(ArenaCore* arena, int kind, uint64_t address,
                           Mapped* found) noexcept nogil


# ---- Its budget ----------------------------------------------------------------------------------


# Before its first block: charges an account, if any, for the bytes it holds or for its blocks in
# use, and names its own level. False: out of host memory.
cdef bint arena_join_budget(ArenaCore* arena, BudgetCore* account, bint in_use,
                            const char* name) noexcept nogil
cdef BudgetCore* arena_account(const ArenaCore* arena) noexcept nogil
cdef bint arena_charges_in_use(const ArenaCore* arena) noexcept nogil
# Bytes that the budget refused last.
cdef uint64_t arena_over_budget(const ArenaCore* arena) noexcept nogil


# ---- Fields of hooks, virtual tensors and debug heaps --------------------------------------------


cdef ArenaCore* hook_core(const AllocatorHook* hook) noexcept nogil
# Two numbers by which the hook's caller knows it.
cdef uint64_t* hook_label(const AllocatorHook* hook) noexcept nogil

cdef struct SpanFigures:
    uint64_t base               # first address
    uint64_t nbytes             # of its addresses
    uint64_t held               # of its pages
    uint64_t used               # of pages with committed rows
    bint closed

cdef SpanFigures span_figures(const ArenaSpan* span) noexcept nogil
cdef ArenaCore* span_arena(const ArenaSpan* span) noexcept nogil
# The bytes that a view shows, from the span's base.
cdef uint64_t span_view_first(const SpanView* view) noexcept nogil
cdef uint64_t span_view_last(const SpanView* view) noexcept nogil

cdef const HeapSettings* heap_settings(const DebugHeap* heap) noexcept nogil
cdef bint heap_has_findings(const DebugHeap* heap) noexcept nogil
# Returns whether its arena has ended.
cdef bint heap_is_gone(const DebugHeap* heap) noexcept nogil
