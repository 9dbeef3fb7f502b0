"""The allocator below the interpreter."""

from gpumem._native.arena.bookkeeping cimport (
    arena_add_figures, arena_copy, arena_copy_free, ArenaCopy, ArenaFigures, block_note, BlockCopy,
    invariant_text, PageCopy, TableCopy,
)
from gpumem._native.arena.allocator_hooks cimport (
    AllocatorHook, hook_allocate, hook_allocate_range, hook_arena, hook_counts, hook_create,
    hook_drop, hook_find, hook_free, hook_free_on, HOOK_KINDS, HOOK_LARGE, hook_let_go, hook_live,
    hook_record, hook_reset_peak, hook_retain, hook_share, hook_slot, HOOK_SMALL, HookBlock,
    HookCounts, HookLive, hooks_blocks, hooks_bytes, hooks_of, HookSums,
)
from gpumem._native.arena.arena cimport (
    arena_check, arena_close, arena_close_wait, arena_copy_blocks, arena_create, arena_debug,
    arena_is_idle, arena_lease, arena_leave, arena_move_lease, arena_prepare, arena_reset_peaks,
    arena_set_limit, arena_shrink, arena_shrink_after_work, arenas_release_after_work,
    arenas_release_retired, arenas_release_retired_wait, devices_are_quiet, pool_adopt, pool_begin,
    pool_create, pool_end, pool_retain_with, pool_sleeps,
)
from gpumem._native.arena.debug_heap.guards cimport (
    heap_copy, heap_counts, heap_findings, heap_note_stack, heap_wants_stack, HeapCounts,
)
from gpumem._native.arena.debug_heap.heap cimport (
    heap_bad_free, heap_check, heap_create, heap_drop, heap_hold, heap_let_go, heap_narrow,
    heap_pump,
)
from gpumem._native.arena.debug_heap.types cimport (
    DebugHeap, HEAP_DOUBLE_FREE, HEAP_FREED, HEAP_INVALID_FREE, HEAP_LATE_WRITE, HEAP_LIVE,
    HEAP_NO_STACK, HEAP_OVERRUN, HEAP_QUARANTINED, HEAP_STRAY_WRITE, HEAP_STREAM_GONE,
    HEAP_UNDERRUN, HeapBlock, HeapFinding, HeapHooks, HeapSettings, HeapSite, HeapState,
)
from gpumem._native.arena.detours cimport arena_allocate_fast, arena_free, arena_free_used
from gpumem._native.arena.family cimport (
    arena_drop, arena_retain_live, OpenTag, part_next, tag_adopt, tag_close, tag_next, tag_now,
    tag_open,
)
from gpumem._native.arena.growth cimport arena_add_peer, arena_page_around, list_for_transport
from gpumem._native.arena.slow_path cimport (
    arena_allocate, arena_allocate_slow, Lack, span_commit, span_wait,
)
from gpumem._native.arena.spans cimport (
    room_for_streams, span_close, span_drop, span_is_held, span_open, span_record, span_release,
    span_view, span_view_end,
)
from gpumem._native.arena.streams cimport (
    arena_record, arena_reset_stream, arena_stream, arena_stream_is_callers, slot_drop, slot_retain,
)
from gpumem._native.arena.sleep cimport arena_sleep, arena_wake, sleep_sums, SleepSums
from gpumem._native.arena.thread_cache cimport caches_flush
from gpumem._native.arena.types cimport (
    ALLOCATE_INTERRUPTIBLE, ALLOCATE_PERSISTENT, ALLOCATE_SHAREABLE, ALLOCATE_TRANSPORT,
    apart_bytes, APART_SHAREABLE, APART_TRANSPORT, ARENA_BEYOND_DEVICE, arena_can_sleep,
    ARENA_CAPTURING, ARENA_CLOSED, ARENA_DEAD, ARENA_DRIVER_REFUSED, arena_extensions,
    ARENA_HALF_ASLEEP, arena_in_use, ARENA_IN_USE, ARENA_INTERRUPTED, arena_is_open, arena_limit,
    arena_max_in_use, ARENA_MISS, ARENA_NO_COPY, ARENA_NO_METADATA, ARENA_NO_STREAM_SLOT, ARENA_OK,
    ARENA_OVER_BUDGET, ARENA_OVER_LIMIT, arena_reserved, arena_reserved_now, arena_shrinkages,
    ARENA_STALE, arena_state, ARENA_TAGGED, ArenaCore, ArenaSettings, ArenaSpan, ArenaStats,
    backing_calls, Block, BlockNote, EXTEND_NEXT_POWER_OF_TWO, EXTEND_SAME_AS_REQUESTED,
    family_held, family_held_peak, family_level, family_limit, is_graph_pool, LARGE_SPACE,
    last_refusal, last_refused_call, MAX_STREAMS, move_clock, REUSE_COMPLETED, REUSE_NEVER,
    REUSE_WAIT, root_of, SMALL_SPACE, SpanView, STATE_ASLEEP, STATE_CLOSED, StreamSlot, ThreadCache,
)
