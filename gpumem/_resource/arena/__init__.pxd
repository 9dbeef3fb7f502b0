"""What the arena is made of above C."""

from gpumem._resource.arena.debug_heap cimport Heap, make_heap
from gpumem._resource.arena.graph_pool cimport Captures, GraphPool, make_pool
from gpumem._resource.arena.reports cimport (
    arena_relieve, arena_stats, block_list, count_of, join_budget, least_limit, raise_over_budget,
    raise_status, relieve, retained_regions, under_pressure,
)
from gpumem._resource.arena.settings cimport (
    choose_backing, settings_from, shareable_init, takes_pages, why_not_shareable,
)
from gpumem._resource.arena.source cimport make_source, Source, source_keep
