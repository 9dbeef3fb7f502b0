"""Opening an arena: its settings below the interpreter, its backing, budget and peers."""

import warnings

from libc.stdint cimport uint32_t, uint64_t
from libc.string cimport memset

from gpumem._arena.arena cimport Arena, REGION_OF_MANY, SHARED_REGION, TRANSPORT_REGION
from gpumem._arena.debug_heap cimport make_heap
from gpumem._arena.source cimport make_source, source_init, source_keep
from gpumem._budget cimport account_of, Budget
from gpumem._buffer cimport alignment_in, MemoryResource, resource_init
from gpumem._native.arena.api cimport (
    APART_SHAREABLE, APART_TRANSPORT, arena_access, arena_add_peer, arena_apart, arena_backing,
    arena_can_sleep, arena_charges_in_use, arena_context, arena_create, arena_events,
    arena_is_paged, arena_join_budget, arena_set_apart, ArenaCore, arenas_release_retired,
    ArenaSettings, EXTEND_NEXT_POWER_OF_TWO, EXTEND_SAME_AS_REQUESTED, list_for_transport,
    REUSE_COMPLETED, REUSE_NEVER, REUSE_WAIT,
)
from gpumem._native.backing cimport (
    Backing, backing_frees_in_order, backing_init, file_init, listed_init, managed_init, numa_init,
    numa_try, pinned_init, shared_init, THE_DEVICE,
)
from gpumem._native.bfc cimport round_to_quantum
from gpumem._native.budget cimport budget_ceiling, budget_charged, BUDGET_UNLIMITED, BudgetCore
from gpumem._native.driver cimport (
    Access, access_has, check, context_allow, context_is_dead, CU_MEM_LOCATION_TYPE_DEVICE,
    CUDA_SUCCESS, CUresult, DeviceContext, DriverDevice,
)
from gpumem._resource cimport no_way_between, peer_is_reached
from gpumem._support.atomics cimport published32
from gpumem._support.events cimport event_source_name, event_source_open, EventSource, OWNER_ARENA

from gpumem._support.arguments import MISSING, refuse_call, require
from gpumem.config import _suits_limit, ArenaConfig
from gpumem.device import Device, MemoryKind
from gpumem.errors import ConfigError, ConfigWarning, DriverError, PeerAccessError


cdef tuple KEYWORDS = ("memory", "config", "source", "budget", "count", "default_stream",
                       "debug_heap", "name")

HOST_KINDS = (MemoryKind.HOST, MemoryKind.HOST_ACCESSIBLE)


cdef int arena_open(Arena arena, object memory, object config, tuple excess, object source,
                    object budget, object count, object debug_heap, object name,
                    dict given) except -1:
    cdef ArenaSettings settings
    cdef Backing backing
    if memory is MISSING or excess:
        refuse_call("Arena", "memory", "a memory such as 'cuda:0' or 'host'",
                    (memory, config, *excess), (), most=2, keywords=KEYWORDS)
    resource_init(arena, memory, name)
    arena.config = ArenaConfig._given(config, given, arena.memory, KEYWORDS)
    arena.config._require_arena()
    settings_from(arena.config, &settings)
    arena.extra = extra_for(alignment_in(arena.memory))
    arena.source = make_source(arena, arena.config, source)
    settings.paged = (arena.source is None and arena.config.numa_node is None
                      and takes_pages(arena, ceiling_of(budget, count)))
    warn_of_idle_settings(arena, settings.paged)
    with nogil:
        arenas_release_retired()
    choose_backing(arena, &backing)
    arena.core = arena_create(&settings, backing)
    if arena.core == NULL:
        raise MemoryError("out of host memory while allocating arena metadata, or out of "
                          f"addresses on {memory}")
    arena.stale, arena.relievers = [], []
    add_listed_peers(arena)
    join_budget(arena, budget, count)
    if arena.source is not None:
        source_keep(arena_backing(arena.core), arena.source)
    open_event_source(arena)
    arena.heap = make_heap(arena.core, debug_heap, arena)
    return 0


cdef int open_event_source(Arena arena) except -1:
    memory, name = str(arena.memory).encode(), arena.name.encode("utf-8", "replace")
    if arena.source is not None:
        name_upstream(arena)
    event_source_name(arena_events(arena.core), memory, b"arena", name)
    event_source_open(arena_events(arena.core), arena.core, OWNER_ARENA)
    return 0


cdef void name_upstream(Arena arena) noexcept:
    # Tells observers which resource of the process supplies the arena's memory.
    cdef const EventSource* below = NULL
    resource = arena.source.given
    # An adaptor's blocks are those of its upstream.
    while hasattr(resource, "upstreams"):
        resource = resource.upstreams[0]
    if isinstance(resource, Arena):
        below = arena_events((<Arena>resource).core)
    elif isinstance(resource, MemoryResource) and (<MemoryResource>resource).ledger != NULL:
        below = &(<MemoryResource>resource).ledger.events
    if below != NULL:
        arena_events(arena.core).upstream = below.serial
        arena_events(arena.core).upstream_owner = below.owner


# ---- Settings ------------------------------------------------------------------------------------


cdef int settings_from(object config, ArenaSettings* settings) except -1:
    memset(settings, 0, sizeof(ArenaSettings))
    settings.max_mem = config.max_mem
    settings.initial_chunk = config.initial_chunk_size_bytes
    # Sizes in bytes, in whole quanta, as the chunk table counts them.
    settings.initial_growth_chunk = round_to_quantum(config.initial_growth_chunk_size_bytes)
    settings.max_extend = round_to_quantum(config.max_power_of_two_extend_bytes)
    settings.max_dead = config.max_dead_bytes_per_chunk
    settings.extend = (EXTEND_SAME_AS_REQUESTED if config.extend_strategy == "same_as_requested"
                       else EXTEND_NEXT_POWER_OF_TWO)
    settings.reuse = {"completed": REUSE_COMPLETED, "wait": REUSE_WAIT,
                      "never": REUSE_NEVER}[config.stream_reuse]
    settings.ort_split = config.split_rule == "ort"
    settings.passthrough = not config.enable
    # Nanoseconds.
    settings.oom_wait = <uint64_t>config.oom_wait_ms * 1000000
    settings.move_share = config.page_move_threshold
    settings.move_budget = config.page_move_budget
    return 0


cdef int warn_of_idle_settings(Arena arena, bint paged) except -1:
    """Warn of settings that are not the defaults and have no effect on this arena."""
    for name, why in arena.config._without_effect(paged=paged).items():
        warnings.warn(f"{name} = {getattr(arena.config, name)!r} has no effect on an arena on "
                      f"{arena.memory}: {why}", ConfigWarning, stacklevel=1)
    return 0


cdef bint takes_pages(Arena arena, uint64_t limit) except *:
    """Tell whether pages back it; ConfigError where they are requested and cannot be had."""
    config = arena.config
    if config.backing == "regions" or not config.enable:
        return False
    if config.backing == "auto" and not (config.suits_pages and _suits_limit(limit)):
        return False
    # "auto" falls back to regions; a backing that was named must not change silently.
    problem = pages_problem(arena.memory)
    if problem and config.backing == "virtual":
        raise ConfigError(f"invalid backing = 'virtual' for {arena.memory}: {problem}")
    return not problem


cdef str pages_problem(object memory):
    if memory.kind not in (MemoryKind.DEVICE, MemoryKind.HOST):
        return "expected a device's own memory"
    capability = memory.device.capabilities["virtual_memory"]
    return "" if capability else capability.reason


cdef str why_regions(Arena arena):
    config = arena.config
    problem = pages_problem(arena.memory)
    if arena.source is not None:
        return "its memory comes from a source"
    if problem:
        return f"{arena.memory} cannot have them: {problem}"
    if not config.enable:
        return "enable = False"
    if config.numa_node is not None:
        return f"numa_node = {config.numa_node}"
    setting = ("backing = 'regions'" if config.backing == "regions"
               else config._for_regions or "its limit")
    return f"{setting}; with backing = 'virtual' it can"


cdef int require_pages(Arena arena) except -1:
    has_source = arena.source is not None
    problem = "its memory comes from a source" if has_source else pages_problem(arena.memory)
    if problem:
        raise ConfigError(f"arena {arena.name!r} on {arena.memory} cannot have virtual tensors: "
                          f"{problem}")
    return 0


# ---- The choice of a backing ---------------------------------------------------------------------


cdef int choose_backing(Arena arena, Backing* backing) except -1:
    cdef DeviceContext* context = &arena.driver_device.context
    # Settings are refused before anything is opened.
    require_settings(arena)
    if arena.source is not None:
        source_init(backing, context)
    elif arena.config.numa_node is not None:
        require_node(arena, arena.config.numa_node)
        numa_init(backing, context, arena.config.numa_node)
    elif arena.memory.kind is MemoryKind.HOST_ACCESSIBLE:
        pinned_init(backing, context)
    elif arena.memory.kind is MemoryKind.MANAGED:
        managed_init(backing, context)
    else:
        backing_init(backing, context)
    return 0


# ---- Memory apart: shareable blocks, and blocks that a transport can register -------------------


cdef int region_for(Arena arena, object shareable, object transport) except -1:
    require("shareable", shareable, bool, "True or False")
    if transport is None:
        if not shareable:
            return REGION_OF_MANY
        require_shareable(arena)
        return SHARED_REGION
    if not isinstance(transport, str) or transport != "ipc":
        raise ValueError(f"invalid transport = {transport!r}: expected None or 'ipc'")
    if shareable:
        raise ConfigError("invalid transport = 'ipc' with shareable = True: memory is made for "
                          "one of the two")
    require_registrable(arena)
    return TRANSPORT_REGION


cdef int require_shareable(Arena arena) except -1:
    """Make the backing of shareable blocks with the first of them."""
    cdef ArenaCore* core = arena.core
    cdef DeviceContext* context = &arena.driver_device.context
    cdef Backing backing
    node = arena.config.numa_node
    if arena_apart(core, APART_SHAREABLE) != NULL:
        return 0
    reason = why_not_shareable(arena)
    if reason:
        raise ConfigError(f"invalid shareable = True for arena {arena.name!r} on {arena.memory}: "
                          f"{reason}")
    if by_handle(arena):
        shared_init(&backing, context, THE_DEVICE if node is None else node)
    else:
        file_init(&backing, context)
    backing.access = arena_access(core)
    arena_set_apart(core, APART_SHAREABLE, &backing)
    return 0


cdef int require_registrable(Arena arena) except -1:
    """Make the backing of blocks that are driver allocations of their own."""
    # Other processes may have these open. Pages cannot be opened, and regions are released
    # without regard to them.
    reason = why_not_registrable(arena)
    if reason:
        raise ConfigError(f"invalid transport = 'ipc' for arena {arena.name!r} on {arena.memory}: "
                          f"{reason}")
    return make_for_transport(arena)


cdef int make_for_transport(Arena arena) except -1:
    # Not needed where the arena's own regions are released only when no process can use them.
    cdef ArenaCore* core = arena.core
    cdef Backing backing
    if not arena_is_paged(core) and not backing_frees_in_order(arena_backing(core)):
        return 0
    if arena_apart(core, APART_TRANSPORT) == NULL:
        listed_init(&backing, &arena.driver_device.context)
        arena_set_apart(core, APART_TRANSPORT, &backing)
        for device in peers_of(arena):
            allow_context(core, device._open())
    return 0


cdef int note_registration(Arena arena, uint64_t address) except -1:
    cdef ArenaCore* core = arena.core
    cdef CUresult code
    make_for_transport(arena)
    if arena_is_paged(core) or arena_apart(core, APART_TRANSPORT) == NULL:
        return 0
    with nogil:
        code = list_for_transport(core, address)
    if code != CUDA_SUCCESS:
        raise MemoryError("out of host memory while noting a registration")
    return 0


cdef str why_not_registrable(Arena arena):
    if arena.source is not None:
        return "its memory is provided by `source=`"
    if arena.memory.kind is MemoryKind.MANAGED:
        return "managed memory migrates"
    return ""


cdef bint by_handle(Arena arena):
    # As a physical handle of the driver's; other host memory is a file, which any process can map.
    return arena.memory.kind is MemoryKind.DEVICE or arena.config.numa_node is not None


cdef str why_not_shareable(Arena arena):
    if arena.source is not None:
        return "its memory is provided by `source=`"
    if arena.memory.kind is MemoryKind.MANAGED:
        return "managed memory cannot be given to another process"
    needs = "posix_fd_handles" if by_handle(arena) else "host_register"
    return arena.memory.device.capabilities[needs].reason


# ---- Checks of settings by memory ---------------------------------------------------------------


cdef int require_settings(Arena arena) except -1:
    """Raise ConfigError for a setting that this memory has no use for."""
    config = arena.config
    where = arena.memory if arena.source is None else "memory of a source"
    if config.numa_node is None:
        return 0
    # A node is a place of host memory; device memory has one place only.
    if arena.source is not None or arena.memory.kind not in HOST_KINDS:
        raise ConfigError(f"invalid numa_node = {config.numa_node} for {where}: expected "
                          "host or host_accessible memory")
    if config.backing == "virtual":
        raise ConfigError(f"invalid numa_node = {config.numa_node} with backing = "
                          "'virtual': memory of a node is reserved as regions")
    return 0


cdef int require_node(Arena arena, int node) except -1:
    """Raise ConfigError, with the driver's words, if it makes no memory of a node."""
    cdef CUresult code
    cdef const char* call = NULL
    capability = arena.memory.device.capabilities["virtual_memory"]
    if not capability:
        raise ConfigError(f"invalid numa_node = {node} on {arena.memory}: "
                          f"{capability.reason}")
    # One page is made and released: a driver reports an invalid node only then.
    with nogil:
        code = numa_try(&arena.driver_device.context, node, &call)
    # The user gave a setting, so the driver's refusal is reported as one of it.
    try:
        check(arena.driver_device.context.table, code, call.decode())
    except DriverError as refusal:
        raise ConfigError(f"invalid numa_node = {node} on {arena.memory}: "
                          f"{refusal}") from refusal
    return 0


# ---- Peers: other devices that may access the memory ---------------------------------------------


cdef int add_listed_peers(Arena arena) except -1:
    config = arena.config
    why = ""
    if config.peers != "on_use" and every_device_reaches(arena):
        why = "every device reaches it"
    elif not isinstance(config.peers, str) and all(
            [device == arena.memory.device for device in config.peers]):
        why = 'it is the arena\'s own device; "none" names no other'
    if why:
        warnings.warn(f"peers = {config._text_of('peers')!r} has no effect on an arena on "
                      f"{arena.memory}: {why}", ConfigWarning, stacklevel=1)
    if isinstance(config.peers, str):
        return 0
    for device in config.peers:
        # The same settings may be for the arenas of all these devices.
        if device != arena.memory.device:
            add_peer(arena, device)
    return 0


cdef int add_peer(Arena arena, object device) except -1:
    cdef ArenaCore* core = arena.core
    cdef bint has_pages_alone = not has_regions(core)
    cdef int number = device.index       # the driver's number of it, too
    cdef CUresult code
    cdef bint is_reached = peer_is_reached(arena, device)
    if access_has(arena_access(core), number) or every_device_reaches(arena):
        return 0
    if not is_reached:
        raise no_way_between(device, arena.memory.device)
    # A context of the peer takes memory there, and only regions need one.
    if not has_pages_alone:
        allow_context(core, device._open())
    with nogil:
        code = arena_add_peer(core, number)
    check(arena_context(core).table, code, "cuMemSetAccess")
    # Another thread may have made the first region without knowing of this peer.
    if has_pages_alone and has_regions(core):
        allow_context(core, device._open())
    return 0


cdef bint let_peer(Arena arena, DriverDevice peer) except -1:
    # A source may have memory that a context's access does not extend to, such as a pool's.
    cdef bint is_own = arena.source is None
    if access_has(arena_access(arena.core), peer.context.device):
        return is_own
    if (arena.config.peers != "on_use" or context_is_dead(arena_context(arena.core))
            or not is_own and arena.source.is_inside()):
        return False
    # Without access the driver copies too, at a tenth of the speed.
    try:
        add_peer(arena, Device(f"{peer.type}:{peer.ordinal}"))
    except (PeerAccessError, DriverError):
        return False
    return is_own


cdef inline bint has_regions(ArenaCore* core) noexcept:
    return not arena_can_sleep(core) or arena_apart(core, APART_TRANSPORT) != NULL


cdef int allow_context(ArenaCore* core, DriverDevice peer) except -1:
    cdef CUresult code
    with nogil:
        code = context_allow(arena_context(core), &peer.context)
    return check(arena_context(core).table, code, "cuCtxEnablePeerAccess")


cdef bint every_device_reaches(Arena arena):
    # Every device reaches pinned and managed memory, except memory that the driver maps for a node.
    return (arena.memory.kind in (MemoryKind.HOST_ACCESSIBLE, MemoryKind.MANAGED)
            and not arena_backing(arena.core).has_handles)


cdef tuple peers_of(Arena arena):
    cdef Access* access = arena_access(arena.core)
    cdef uint32_t i
    own = arena.memory.device
    found = [access.places[i].location.id for i in range(1, published32(&access.count))
             if access.places[i].location.type == CU_MEM_LOCATION_TYPE_DEVICE]
    return tuple([Device(f"{own.type}:{number}") for number in found])


# ---- Its budget ----------------------------------------------------------------------------------


cdef int join_budget(Arena arena, object budget, object count) except -1:
    cdef bint in_use = False
    cdef BudgetCore* account = account_of(budget, count, arena.name, &in_use)
    title = arena.name.encode("utf-8", "replace")
    arena.budget = budget
    arena_events(arena.core).budget = budget_charged(account)
    if not arena_join_budget(arena.core, account, in_use, title):
        raise MemoryError("out of host memory while naming an arena's account")
    return 0


cdef str count_of(Arena arena):
    return "in_use" if arena_charges_in_use(arena.core) else "reserved"


cdef uint64_t ceiling_of(object budget, object count) except? 0:
    # A budget of blocks in use does not limit how much the arena holds.
    if isinstance(budget, Budget) and count == "reserved":
        return budget_ceiling((<Budget>budget).core)
    return BUDGET_UNLIMITED
