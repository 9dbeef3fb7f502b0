"""`Arena`, and the functions around it that other folders call."""

from gpumem._arena.arena cimport Arena, arena_bad_free, arena_take_on, arena_take_on_legacy
from gpumem._arena.graph_pool cimport GraphPool, is_in_graph_pool
from gpumem._arena.open cimport require_pages
from gpumem._arena.status cimport (
    allocate_under_pressure, collect_garbage, make_room, Pressure, raise_status,
)
from gpumem._arena.tags cimport arena_of_tag
