"""What the arena is made of above C."""

from gpumem._resource.arena.debug_heap cimport Heap, make_heap
from gpumem._resource.arena.graph_pool cimport (
    capture_on, Captures, GraphPool, is_in_graph_pool, make_pool,
)
from gpumem._resource.arena.reports cimport (
    allocate_under_pressure, Asking, count_of, join_budget, least_limit, raise_in_use,
    raise_over_budget, raise_status, relieve, retained_regions, tensors_relieve, under_pressure,
)
from gpumem._resource.arena.settings cimport (
    add_listed_peers, ArenaBase, choose_backing, name_upstream, note_registration, require_pages,
    require_shareable, require_transport, settings_from, takes_pages, warn_of_idle_settings,
)
from gpumem._resource.arena.sleep cimport SleepingArena
from gpumem._resource.arena.source cimport make_source, Source, source_keep
