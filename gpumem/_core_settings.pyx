"""From an ArenaConfig to the C struct; see _core_settings.pxd."""

from libc.stdint cimport uint64_t
from libc.string cimport memset

from gpumem._arena_types cimport (
    ArenaSettings,
    EXTEND_NEXT_POWER_OF_TWO,
    EXTEND_SAME_AS_REQUESTED,
    REUSE_COMPLETED,
    REUSE_NEVER,
    REUSE_WAIT,
)
from gpumem._bfc cimport round_to_quantum
from gpumem._buffer cimport MemoryResource

from gpumem.config import _PAGED_FROM
from gpumem.device import MemoryKind
from gpumem.errors import ConfigError


cdef int settings_from(object config, ArenaSettings* settings) except -1:
    memset(settings, 0, sizeof(ArenaSettings))
    settings.max_mem = config.max_mem
    settings.initial_chunk = config.initial_chunk_size_bytes
    settings.initial_growth_chunk = round_to_quantum(config.initial_growth_chunk_size_bytes)
    settings.max_extend = round_to_quantum(config.max_power_of_two_extend_bytes)
    settings.max_dead = config.max_dead_bytes_per_chunk
    settings.extend = (EXTEND_SAME_AS_REQUESTED if config.extend_strategy == "same_as_requested"
                       else EXTEND_NEXT_POWER_OF_TWO)
    settings.reuse = {"completed": REUSE_COMPLETED, "wait": REUSE_WAIT,
                      "never": REUSE_NEVER}[config.stream_reuse]
    settings.ort_split = config.split_rule == "ort"
    settings.passthrough = not config.enable
    settings.oom_wait = <uint64_t>config.oom_wait_ms * 1000000
    settings.move_share = config.page_move_threshold
    settings.move_budget = config.page_move_budget
    return 0


cdef bint takes_pages(MemoryResource arena, object config, uint64_t limit) except *:
    if config.backing == "regions" or not config.enable:
        return False
    if config.backing == "auto" and (not config.suits_pages or limit < _PAGED_FROM):
        return False
    problem = pages_problem(arena.memory)
    if problem and config.backing == "virtual":
        raise ConfigError(f"backing = 'virtual' is not accepted for {arena.memory}: {problem}")
    return not problem


cdef str pages_problem(object memory):
    if memory.kind not in (MemoryKind.DEVICE, MemoryKind.HOST):
        return "it takes a device's own memory"
    capability = memory.device.capabilities["virtual_memory"]
    return "" if capability else capability.reason
