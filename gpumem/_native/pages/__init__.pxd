"""Physical pages that move under reserved addresses."""

from gpumem._native.pages.execute cimport (
    plan_note, space_drop_dormant, space_execute, space_finish, space_list_pages, space_map_kept,
    space_undo,
)
from gpumem._native.pages.plan cimport (
    plan_free, space_allocate_lower, space_plan, space_plan_trim, space_restore,
)
from gpumem._native.pages.sleep cimport (
    FILE_FAILED, kept_for_sleep, Sleeper, sleeper_add_page, sleeper_add_piece, sleeper_forget,
    sleeper_forget_pages,
    sleeper_lacks, sleeper_release, sleeper_release_kept, sleeper_sleep, sleeper_wake, SleepPiece,
    STORE_DEVICE, STORE_FILE, STORE_HOST, StorePlace,
)
from gpumem._native.pages.space cimport (
    budget_earn, budget_fill, budget_init, budget_rested, budget_slack, budget_spend, MappedPage,
    MoveBudget, orphan_add, orphans_release, pages_are_exportable, pages_check, pages_invariant,
    pages_make_exportable, range_reserve, space_add_range, space_create, space_destroy,
    space_give_up_views, space_page_around, space_reserves, space_set_access,
)
from gpumem._native.pages.span cimport (
    Span, span_free, span_lacks, SPAN_LEAVING, span_list_bytes, span_list_pages, span_map,
    span_page_at, span_page_bytes, span_page_in_use, span_reserve, span_set_access, span_settle,
    SPAN_SPARE, span_unmap, SPAN_USED, span_uses, SpanPage,
)
from gpumem._native.pages.types cimport (
    Action, ACTION_CREATE, ACTION_MOVE, ACTION_RELEASE, ActionKind, address_of, bytes_of, Demand,
    GRANULE, GRANULE_BITS, MAX_PAGE_GRANULES, Page, Piece, Plan, PLAN_NO_MEMORY, PLAN_NO_PLACE,
    PLAN_OK, PlanResult, Range, round_to_granule, Space,
)
