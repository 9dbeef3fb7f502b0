"""Opening an arena: its settings below the interpreter, backing, budget, peers and source."""

import threading
import warnings

cimport cython
from cpython.ref cimport Py_DECREF, Py_INCREF
from libc.stdint cimport uint32_t, uint64_t, uintptr_t
from libc.string cimport memset

from gpumem._arena.arena cimport Arena, REGION_OF_MANY, SHARED_REGION, TRANSPORT_REGION
from gpumem._arena.debug_heap cimport make_heap
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
    numa_try, pages_exist, pinned_init, shared_init, THE_DEVICE,
)
from gpumem._native.bfc cimport QUANTUM, round_to_quantum
from gpumem._native.budget cimport budget_ceiling, budget_charged, BUDGET_UNLIMITED, BudgetCore
from gpumem._native.driver cimport (
    Access, access_has, check, context_allow, context_is_dead, CU_MEM_LOCATION_TYPE_DEVICE,
    CU_MEMORYTYPE_DEVICE, CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL, CU_POINTER_ATTRIBUTE_DEVICE_POINTER,
    CU_POINTER_ATTRIBUTE_IS_MANAGED, CU_POINTER_ATTRIBUTE_MEMORY_TYPE, CUDA_ERROR_DEINITIALIZED,
    CUDA_ERROR_OUT_OF_MEMORY, CUDA_ERROR_UNKNOWN, CUDA_SUCCESS, CUdeviceptr, CUpointer_attribute,
    CUresult, DeviceContext, DriverDevice, pointer_attribute,
)
from gpumem._resource cimport no_way_between, peer_is_reached
from gpumem._support.atomics cimport published32
from gpumem._support.events cimport event_source_name, event_source_open, EventSource, OWNER_ARENA
from gpumem._support.instances cimport forbid_instantiation
from gpumem._support.memory cimport require_memory
from gpumem._support.process cimport call_unraisable

from gpumem._buffer.stream import Stream
from gpumem._buffer.transport import hold
from gpumem._support.arguments import MISSING, refuse_call, require
from gpumem._support.out_of_memory import kept_mappings
from gpumem._support.sizes import exact_size
from gpumem.config import _suits_limit, ArenaConfig
from gpumem.device import Device, MemoryKind
from gpumem.errors import (
    ConfigError, ConfigWarning, DriverError, GpumemError, OutOfMemoryError, PeerAccessError,
    SourceError,
)
from gpumem.stats import advised, OutOfMemoryReport


cdef tuple KEYWORDS = ("memory", "config", "source", "budget", "count", "default_stream",
                       "debug_heap", "name")

# Addresses end here on every machine that CUDA runs on.
cdef uint64_t END_OF_ADDRESSES = <uint64_t>1 << 56

# Bytes of the regions that small blocks of pinned memory share, which double: the largest one is a
# huge page.
cdef enum:
    FIRST_SHARED = 65536
    LARGEST_SHARED = 2097152

HOST_KINDS = (MemoryKind.HOST, MemoryKind.HOST_ACCESSIBLE)


cdef int arena_open(Arena arena, object memory, object config, tuple excess, object source,
                    object budget, object count, object debug_heap, object name,
                    dict given) except -1:
    cdef ArenaSettings settings
    cdef bint stays
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
    settings.exact = takes_exact_regions(arena)
    if settings.exact:
        settings.initial_chunk = settings.initial_growth_chunk = FIRST_SHARED
        settings.max_extend = LARGEST_SHARED
    settings.paged = (arena.source is None and arena.config.numa_node is None
                      and takes_pages(arena, ceiling_of(budget, count)))
    without = arena.config._without_effect(paged=settings.paged, exact=settings.exact)
    for key, why in without.items():
        warnings.warn(f"{key} = {getattr(arena.config, key)!r} has no effect on an arena on "
                      f"{arena.memory}: {why}", ConfigWarning, stacklevel=1)
    with nogil:
        arenas_release_retired(False, &stays)
    choose_backing(arena, &backing)
    arena.core = arena_create(&settings, backing)
    if arena.core == NULL:
        raise_out_of_memory(arena, "metadata")
    arena.stale, arena.pressure_tensors = [], []
    add_listed_peers(arena)
    join_budget(arena, budget, count)
    if arena.source is not None:
        Py_INCREF(arena.source)
        arena_backing(arena.core).source = <void*>arena.source
    open_event_source(arena)
    arena.heap = make_heap(arena.core, debug_heap, arena)
    return 0


cdef int raise_out_of_memory(Arena arena, str reason) except -1:
    with kept_mappings:
        raise OutOfMemoryError.of(
            advised(OutOfMemoryReport(str(arena.memory), 0, 0, arena.name), reason))


cdef int open_event_source(Arena arena) except -1:
    memory, name = str(arena.memory).encode(), arena.name.encode("utf-8", "replace")
    if arena.source is not None:
        name_upstream(arena)
    event_source_name(arena_events(arena.core), memory, b"arena", name)
    event_source_open(arena_events(arena.core), arena.core, OWNER_ARENA)
    return 0


cdef void name_upstream(Arena arena) noexcept:
    # Names to observers the resource of the process that supplies the arena's memory.
    cdef const EventSource* below = NULL
    resource = (<Source>arena.source).given
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
    # The chunk table counts sizes in whole quanta.
    settings.initial_growth_chunk = round_to_quantum(config.initial_growth_chunk_size_bytes)
    settings.max_extend = round_to_quantum(config.max_power_of_two_extend_bytes)
    settings.max_dead = config.max_dead_bytes_per_chunk
    settings.extend = (EXTEND_SAME_AS_REQUESTED if config.extend_strategy == "same_as_requested"
                       else EXTEND_NEXT_POWER_OF_TWO)
    settings.reuse = {"completed": REUSE_COMPLETED, "wait": REUSE_WAIT,
                      "never": REUSE_NEVER}[config.stream_reuse]
    settings.ort_split = config.split_rule == "ort"
    settings.passthrough = not config.enable
    settings.oom_wait = <uint64_t>config.oom_wait_ms * 1000000      # ns
    settings.move_share = config.page_move_threshold
    settings.move_budget = config.page_move_budget
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


cdef bint takes_exact_regions(Arena arena):
    return (arena.memory.kind is MemoryKind.HOST_ACCESSIBLE and arena.source is None
            and arena.config._suits_exact_regions)


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


# ---- Memory apart: shareable blocks, and blocks that a transport can register --------------------


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
    require_apart(arena, "transport = 'ipc'", why_not_registrable(arena))
    make_for_transport(arena)
    return TRANSPORT_REGION


cdef int require_shareable(Arena arena) except -1:
    """Make the backing of shareable blocks with the first of them."""
    cdef ArenaCore* core = arena.core
    cdef DeviceContext* context = &arena.driver_device.context
    cdef Backing backing
    node = arena.config.numa_node
    if arena_apart(core, APART_SHAREABLE) != NULL:
        return 0
    require_apart(arena, "shareable = True", why_not_shareable(arena))
    if by_handle(arena):
        shared_init(&backing, context, THE_DEVICE if node is None else node)
    else:
        file_init(&backing, context)
    backing.access = arena_access(core)
    arena_set_apart(core, APART_SHAREABLE, &backing)
    return 0


cdef int require_apart(Arena arena, str setting, str reason) except -1:
    if reason:
        raise ConfigError(f"invalid {setting} for arena {arena.name!r} on {arena.memory}: {reason}")
    return 0


cdef int make_for_transport(Arena arena) except -1:
    """Make the backing of blocks that are driver allocations of their own."""
    # Other processes may have these open. Pages cannot be opened, and regions are released
    # without regard to other processes. It is not needed where the arena's own regions are released
    # only when no process can use them.
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
    require_memory(code == CUDA_SUCCESS, "noting a registration")
    return 0


cdef str why_not_registrable(Arena arena):
    if arena.source is not None:
        return "its memory is provided by `source=`"
    if arena.memory.kind is MemoryKind.MANAGED:
        return "managed memory migrates"
    return ""


cdef bint by_handle(Arena arena):
    # Shared memory is a physical handle of the driver's; other host memory is a file, which any
    # process can map.
    return arena.memory.kind is MemoryKind.DEVICE or arena.config.numa_node is not None


cdef str why_not_shareable(Arena arena):
    if arena.source is not None:
        return "its memory is provided by `source=`"
    if arena.memory.kind is MemoryKind.MANAGED:
        return "managed memory cannot be given to another process"
    needs = "posix_fd_handles" if by_handle(arena) else "host_register"
    return arena.memory.device.capabilities[needs].reason


# ---- Checks of settings by memory ----------------------------------------------------------------


cdef int require_settings(Arena arena) except -1:
    """Raise ConfigError for a setting that this memory cannot have."""
    config = arena.config
    where = arena.memory if arena.source is None else "memory of a source"
    if config.numa_node is None:
        return 0
    # Only host memory has nodes.
    if arena.source is not None or arena.memory.kind not in HOST_KINDS:
        raise ConfigError(f"invalid numa_node = {config.numa_node} for {where}: expected "
                          "host or host_accessible memory")
    if config.backing == "virtual":
        raise ConfigError(f"invalid numa_node = {config.numa_node} with backing = "
                          "'virtual': memory of a node is reserved as regions")
    return 0


cdef int require_node(Arena arena, int node) except -1:
    """Raise ConfigError, with the driver's error, if it cannot make memory of a node."""
    cdef CUresult code
    cdef const char* call = NULL
    capability = arena.memory.device.capabilities["virtual_memory"]
    if not capability:
        raise ConfigError(f"invalid numa_node = {node} on {arena.memory}: "
                          f"{capability.reason}")
    # One page is made and released: a driver reports an invalid node only then.
    with nogil:
        code = numa_try(&arena.driver_device.context, node, &call)
    if code == CUDA_ERROR_OUT_OF_MEMORY:
        raise_out_of_memory(arena, "driver")
    # The user passed a setting, so another refusal of the driver is reported as an invalid setting.
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
            or not is_own and (<Source>arena.source).is_inside()):
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
    require_memory(arena_join_budget(arena.core, account, in_use, title),
                   "naming an arena's account")
    return 0


cdef str count_of(Arena arena):
    return "in_use" if arena_charges_in_use(arena.core) else "reserved"


cdef uint64_t ceiling_of(object budget, object count) except? 0:
    # A budget of blocks in use does not limit how much the arena holds.
    if isinstance(budget, Budget) and count == "reserved":
        return budget_ceiling((<Budget>budget).core)
    return BUDGET_UNLIMITED


# ---- Its source: Python callables, C functions, another resource ---------------------------------
#
# Callables get the interpreter lock, which is safe because no thread waits for a grow lock while
# holding it. Their exceptions are kept until the status has reached the calling thread.


cdef Source make_source(MemoryResource arena, object config, object given):
    cdef Source source
    if given is None:
        return None
    if config.backing == "virtual":
        raise ConfigError("invalid backing = 'virtual' with a source: a source supplies "
                          "regions")
    source = Source.__new__(Source)
    source.given = given
    source.memory = arena.memory
    source.driver_device = arena.driver_device
    source.held = {}
    source.errors = {}
    # A resource has allocate() too, but with streams: it is wrapped before callables are read.
    if isinstance(given, MemoryResource):
        if (given.memory.device, given.memory.kind) != (arena.memory.device, arena.memory.kind):
            raise ConfigError(f"invalid source = {given!r} for an arena on {arena.memory}: "
                              "expected a resource of the same memory")
        given = Upstream(given)
    if isinstance(given, tuple):
        if len(given) != 2 or not all(type(one) is int and 0 < one < 1 << 64 for one in given):
            raise TypeError(f"source = {given!r} is not a pair of addresses of C functions")
        source.c_allocate = <AllocateFunction><uintptr_t>given[0]
        source.c_free = <FreeFunction><uintptr_t>given[1]
    else:
        source.allocate = callable_of(given, "allocate")
        source.free = callable_of(given, "free")
    return source


cdef object callable_of(object given, str name):
    method = getattr(given, name, None)
    if not callable(method):
        raise TypeError(f"source = {given!r} has no {name}(): expected an object with "
                        "allocate(nbytes) and free(address, nbytes), a MemoryResource, or the "
                        "addresses of two C functions")
    return method


@cython.embedsignature(False)     # its functions have signatures
class Upstream:
    """A resource as a source: each region of the arena is one of its buffers.

    Buffers are allocated and freed on a stream of the source's own. It is synchronised after an
    allocation, so that every stream of the arena may use the region at once.
    """

    def __init__(self, resource):
        self.resource = resource
        self.stream = Stream(resource.memory.device)
        self.buffers = {}

    def allocate(self, nbytes):
        """Return the address of a new buffer of the resource."""
        buffer = self.resource.allocate(nbytes, self.stream)
        self.stream.synchronize()
        # There is a second buffer only if the resource returns an address twice: the first is in
        # use. A buffer is held because its resource does not know of the blocks in it, and may be
        # an arena that sleeps.
        self.buffers.setdefault(buffer.ptr, []).append((buffer, hold(buffer)))
        return buffer.ptr

    def free(self, address, nbytes):
        """Close the buffer: its users are done."""
        for buffer, held in self.buffers.pop(address):
            held.release()
            buffer.close()


# ---- Calls of the source -------------------------------------------------------------------------


@cython.final
@cython.no_gc_clear
cdef class Source:
    """One source of one arena."""

    cdef CUresult reserve(self, uint64_t size, uint64_t* address) noexcept:
        thread = threading.get_ident()
        # Exceptions are kept by thread, because only the status reaches the calling thread.
        self.errors.pop(thread, None)
        self.caller = thread
        try:
            self.request_region(size, address)
        except MemoryError as refusal:
            self.errors[thread] = refusal
            return CUDA_ERROR_OUT_OF_MEMORY
        except BaseException as error:
            self.errors[thread] = error
            return CUDA_ERROR_UNKNOWN
        finally:
            self.caller = None
        return CUDA_SUCCESS if address[0] else CUDA_ERROR_OUT_OF_MEMORY

    cdef int request_region(self, uint64_t size, uint64_t* address) except -1:
        """Request a region from the source; address 0: it has none."""
        cdef void* pointer
        address[0] = 0
        if self.allocate is None:
            with nogil:
                pointer = self.c_allocate(size)
            given = <uintptr_t>pointer
        else:
            given = self.allocate(size)
        if given is None:
            return 0
        if isinstance(given, bool) or not hasattr(given, "__index__"):
            raise SourceError(f"{self.given!r} returned {given!r} for {exact_size(size)}: expected "
                              "an address, or None")
        given = given.__index__()
        if given == 0:
            return 0
        wrong = self.why_overlapping(given, size)
        if not wrong:
            wrong = self.why_unusable(given, size)
            # The source keeps its own count, so an unusable region is freed. One that overlaps is
            # not: the source would release memory that the arena allocates from.
            if wrong and 0 < given < 1 << 64:
                self.free_region(given, size)
        if wrong:
            raise SourceError(f"{self.given!r} returned {given:#x} for {exact_size(size)}, which "
                              f"{wrong}")
        # Recorded before the arena has it, so that an overlap with the next region is found.
        self.held[given] = size
        address[0] = given
        return 0

    def why_overlapping(self, given, size):
        """Return which region of the arena's a new one overlaps, "" if none."""
        for address, nbytes in self.held.items():
            if given < address + nbytes and address < given + size:
                return f"overlaps {exact_size(nbytes)} at {address:#x} that it returned before"
        return ""

    def why_unusable(self, given, size):
        """Return why a region is not usable, "" if it is."""
        if not 0 < given <= END_OF_ADDRESSES - size:
            return "is not an address"
        if given % QUANTUM:
            return f"is not a multiple of {QUANTUM}"
        if self.memory.kind is MemoryKind.HOST:
            return "" if pages_exist(given, size) else "is not all mapped"
        # The first and the last byte: one driver call for each page would take too long.
        for byte in (given, given + size - 1):
            if not is_memory_of(self.driver_device, self.memory.kind, byte):
                return f"is not {self.memory.kind.value} memory of {self.memory.device}"
        return ""

    cdef int free_region(self, uint64_t address, uint64_t size) noexcept:
        # A failure cannot be raised: a shrink, a close or a finalizer continues.
        if self.free is None:
            with nogil:
                self.c_free(<void*><uintptr_t>address, size)
        else:
            call_unraisable(self.free, (address, size), self.given)
        return 0

    cdef void release(self, uint64_t address, uint64_t size) noexcept:
        self.held.pop(address, None)
        # A release may happen inside a reserve of the same thread: the outer caller is restored.
        self.caller, before = threading.get_ident(), self.caller
        self.free_region(address, size)
        self.caller = before

    cdef bint is_inside(self) except -1:
        # Another thread may call the arena at the same time; it waits for the grow lock.
        return self.caller is not None and self.caller == threading.get_ident()

    cdef int require_outside(self) except -1:
        if self.is_inside():
            raise GpumemError(f"{self.given!r} calls the arena that it is the source of, which is "
                              "waiting for it")
        return 0


cdef bint is_memory_of(DriverDevice driver_device, object kind, CUdeviceptr byte):
    """Tell whether the driver reports a byte as this kind of memory of the device."""
    # The type alone would accept another device's memory.
    if kind is MemoryKind.DEVICE:
        return (attribute_of(driver_device, CU_POINTER_ATTRIBUTE_MEMORY_TYPE, byte)
                == <int>CU_MEMORYTYPE_DEVICE
                and attribute_of(driver_device, CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL, byte)
                == <uint64_t>driver_device.ordinal)
    if kind is MemoryKind.MANAGED and not attribute_of(
            driver_device, CU_POINTER_ATTRIBUTE_IS_MANAGED, byte):
        return False
    return attribute_of(driver_device, CU_POINTER_ATTRIBUTE_DEVICE_POINTER, byte) == byte


cdef uint64_t attribute_of(DriverDevice driver_device, CUpointer_attribute which,
                           CUdeviceptr byte) noexcept:
    """Return an attribute of an address; all ones where the driver has none."""
    cdef uint64_t value
    cdef CUresult code = pointer_attribute(&driver_device.context, which, byte, &value)
    return value if code == CUDA_SUCCESS else <uint64_t>-1


# ---- The backing that calls it -------------------------------------------------------------------


cdef void source_init(Backing* backing, DeviceContext* context) noexcept:
    # The driver keeps the functions that a source does not provide.
    backing_init(backing, context)
    backing.reserve = source_reserve
    backing.release = source_release
    backing.forget = source_forget
    backing.waits = False
    backing.call = "a source"


cdef CUresult source_reserve(Backing* self, uint64_t size, uint64_t* address) noexcept nogil:
    with gil:
        return (<Source>self.source).reserve(size, address)


cdef CUresult source_release(Backing* self, uint64_t address, uint64_t size) noexcept nogil:
    # In a fork's child the memory is the parent's.
    if context_is_dead(self.context):
        return CUDA_ERROR_DEINITIALIZED
    # Caller holds the grow lock; see the head of this section.
    with gil:
        (<Source>self.source).release(address, size)
    return CUDA_SUCCESS


cdef void source_forget(Backing* self) noexcept nogil:
    if self.source == NULL:
        return
    with gil:
        Py_DECREF(<Source>self.source)
        self.source = NULL


cdef int require_outside_source(Arena arena) except -1:
    if arena.source is not None:
        (<Source>arena.source).require_outside()
    return 0


cdef object source_error(ArenaCore* core):
    if arena_backing(core).source == NULL:
        return None
    # It is removed, because an exception keeps its frames alive.
    return (<Source>arena_backing(core).source).errors.pop(threading.get_ident(), None)


forbid_instantiation(Source)
