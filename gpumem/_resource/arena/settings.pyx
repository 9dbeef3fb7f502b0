"""An arena as it is set up: from an ArenaConfig to the C struct, its backing, limit and peers."""

import warnings

from cpython.object cimport Py_TPFLAGS_BASETYPE
from libc.stdint cimport uint32_t, uint64_t
from libc.string cimport memset

from gpumem._buffer cimport MemoryResource, size_of
from gpumem._native.arena cimport (
    APART_SHAREABLE, APART_TRANSPORT, arena_add_peer, arena_can_sleep, arena_in_use,
    arena_reserved, arena_set_limit, arena_state, ArenaCore, ArenaSettings, caches_flush,
    EXTEND_NEXT_POWER_OF_TWO, EXTEND_SAME_AS_REQUESTED, list_for_transport, REUSE_COMPLETED,
    REUSE_NEVER, REUSE_WAIT, STATE_CLOSED,
)
from gpumem._native.backing cimport (
    Backing, backing_frees_in_order, backing_init, file_init, listed_init, managed_init, numa_init,
    numa_try, pinned_init, shared_init, THE_DEVICE,
)
from gpumem._native.bfc cimport round_to_quantum
from gpumem._native.driver cimport (
    access_has, check, context_allow, context_is_dead, CU_MEM_LOCATION_TYPE_DEVICE, CUDA_SUCCESS,
    CUresult, DeviceContext, DriverDevice,
)
from gpumem._resource.arena.source cimport Source, source_init
from gpumem._resource.device_memory cimport no_way_between, peer_is_reached
from gpumem._support.atomics cimport load64, published32
from gpumem._support.events cimport EventSource
from gpumem._support.process cimport process

from gpumem._support.sizes import format_size
from gpumem.config import _suits_limit
from gpumem.device import Device, MemoryKind
from gpumem.errors import (
    ClosedError, ConfigError, ConfigWarning, DriverError, PeerAccessError,
)


cdef class ArenaBase(MemoryResource):
    """What an arena was made with, and how that is changed; `gpumem.Arena` adds the rest."""

    def __cinit__(self, *arguments, **keywords):
        # Only Arena makes a core, and it alone is final: another class would have none.
        if type(self).__flags__ & Py_TPFLAGS_BASETYPE:
            raise TypeError(f"{type(self).__name__} is made as an Arena")

    @property
    def peers(self):
        """The other devices that may access the arena's memory, a tuple of `Device`.

        Those of the settings, of `enable_peer`, and with ``peers="on_use"`` those that used it.
        """
        return peers_of(self, self.core)

    def enable_peer(self, device):
        """Let kernels and copies of another device access the arena's memory, now and later.

        Pages, shareable blocks and the arena's graph pools get it for what they have now and with
        whatever is added or moved later; each page costs the driver about as much again for each
        peer. Regions get it for all memory of the device in this process, by the driver's switch
        between two contexts. Code that uses the memory on the other device orders that use with the
        arena's streams, as between any two streams. Idempotent, and never undone.

        With ``ArenaConfig.peers = "on_use"`` gpumem's copies between devices, and PyTorch's, do
        this where they need it; kernels of another library need this call.

        Parameters
        ----------
        device : Device or str
            Another device of the same type, such as ``"cuda:1"``.

        Raises
        ------
        PeerAccessError
            The driver has no way between the two devices; copies still work, through its own
            staging.
        DriverError
            The driver refused; the peer has no access, as before.
        ConfigError
            `device` is the arena's own, or of another type.
        ValueError
            There is no such device.
        ClosedError
            The arena is closed, or belongs to the parent of a fork.

        Examples
        --------
        >>> import gpumem
        >>> arena = gpumem.Arena("host:0")
        >>> others = [device for device in gpumem.devices() if device.type == "host"][1:]
        >>> for device in others:
        ...     arena.enable_peer(device)
        >>> list(arena.peers) == others
        True
        """
        self.require_open()
        self.require_outside_source()
        peer = Device(device)
        add_peer(self, self.core, peer)
        for child in self._children():
            child.enable_peer(peer)

    cdef bint let_access(self, DriverDevice peer) except -1:
        # A source may have memory that a context's access does not extend to, such as a pool's.
        cdef bint is_own = self.source is None
        if access_has(&self.core.access, peer.context.device):
            return is_own
        if (self.config.peers != "on_use" or context_is_dead(self.core.context)
                or not is_own and self.source.is_inside()):
            return False
        # Without access the driver copies too, at a tenth of the speed.
        try:
            add_peer(self, self.core, Device(f"{peer.type}:{peer.ordinal}"))
        except (PeerAccessError, DriverError):
            return False
        return is_own

    def set_limit(self, nbytes):
        """Change what the arena may hold from the device, as ``max_mem`` of its settings does.

        What it holds beyond a lower limit stays, until a `shrink` or the next growth gives idle
        memory back. `stats` tells the limit in force; `config` keeps what the arena was made with.

        Parameters
        ----------
        nbytes : int or str
            Bytes, or a text such as ``"2GiB"``; 0 is unlimited.

        Raises
        ------
        TypeError, ValueError
            `nbytes` is not an integer, or not from 0 to 2**63 - 1.
        ClosedError
            The arena is closed, or belongs to the parent of a fork.

        Examples
        --------
        >>> import gpumem
        >>> arena = gpumem.Arena("host")
        >>> arena.set_limit(1 << 30)
        >>> arena.stats().limit
        1073741824
        """
        cdef uint64_t limit = size_of(nbytes, None)
        self.require_open()
        with nogil:
            arena_set_limit(self.core, limit)

    @classmethod
    def staging(cls, device):
        """Return the pinned arena that large copies from and to pageable memory go through.

        One per device, made at the first use, shared by all copies and limited to 256 MiB. Between
        copies all of it is idle: ``Arena.staging(device).shrink()`` gives it back to the system,
        and the next copy takes it again. A copy that gets none of it goes through ordinary memory.

        Parameters
        ----------
        device : Device or str
            The device that is copied to and from.

        Returns
        -------
        Arena
            On the device's HOST_ACCESSIBLE memory. Do not close it.

        Raises
        ------
        ValueError
            Unknown device.

        Examples
        --------
        >>> import gpumem
        >>> gpumem.Arena.staging("host").shrink().retained
        ()
        """
        from gpumem._copy.staged import staging_arena

        return staging_arena(device)

    @property
    def backing(self):
        """What backs it: "virtual" or "regions"; where the setting is "auto", what that chose."""
        return "virtual" if self.core.settings.paged else "regions"

    @property
    def is_arena(self):
        """True: it sub-allocates and can be shrunk."""
        return True

    @property
    def closed(self):
        """Whether `close` has given everything back."""
        return arena_state(self.core) == STATE_CLOSED

    def __repr__(self):
        if arena_state(self.core) == STATE_CLOSED:
            return f"<gpumem.Arena {self.name!r} on {self.memory}, closed>"
        # Cached blocks would count as in use. A fork's child leaves its parent's locks alone.
        if self.driver_device.context.generation == process.generation:
            caches_flush(self.core)
        used = arena_in_use(self.core) + load64(&self.core.span_used)
        held = arena_reserved(self.core) + load64(&self.core.spanned)
        return (f"<gpumem.Arena {self.name!r} on {self.memory}: "
                f"{format_size(used)} in use, {format_size(held)} reserved>")

    cdef int require_outside_source(self) except -1:
        # A source that calls its own arena would wait for itself.
        if self.source is not None:
            self.source.require_outside()
        return 0

    cdef int require_open(self) except -1:
        if arena_state(self.core) == STATE_CLOSED:
            raise ClosedError(f"arena {self.name!r} is closed")
        return 0

    cdef int require_own(self) except -1:
        # A thread of the parent may have held the lock at the fork: the child leaves it alone.
        if self.driver_device.context.generation != process.generation:
            raise ClosedError(f"arena {self.name!r} belongs to the parent process")
        return 0


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


cdef int warn_of_idle_settings(MemoryResource arena, object config, bint paged) except -1:
    """Warn of settings that are not the defaults and have no effect on this arena."""
    for name, why in config._without_effect(paged=paged).items():
        warnings.warn(f"{name} = {getattr(config, name)!r} has no effect on an arena on "
                      f"{arena.memory}: {why}", ConfigWarning, stacklevel=1)
    return 0


cdef bint takes_pages(MemoryResource arena, object config, uint64_t limit) except *:
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


cdef str why_regions(ArenaBase arena):
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


cdef int require_pages(MemoryResource arena, bint has_source) except -1:
    # What a virtual tensor's pages need, whatever backs the arena's blocks.
    problem = "its memory comes from a source" if has_source else pages_problem(arena.memory)
    if problem:
        raise ConfigError(f"arena {arena.name!r} on {arena.memory} cannot have virtual tensors: "
                          f"{problem}")
    return 0


# ---- The choice of a backing ---------------------------------------------------------------------


HOST_KINDS = (MemoryKind.HOST, MemoryKind.HOST_ACCESSIBLE)


cdef int choose_backing(MemoryResource arena, object config, Source source,
                        Backing* backing) except -1:
    cdef DeviceContext* context = &arena.driver_device.context
    # Settings are refused before anything is opened.
    require_settings(arena, config, source)
    if source is not None:
        source_init(backing, context)
    elif config.numa_node is not None:
        require_node(arena, config.numa_node)
        numa_init(backing, context, config.numa_node)
    elif arena.memory.kind is MemoryKind.HOST_ACCESSIBLE:
        pinned_init(backing, context)
    elif arena.memory.kind is MemoryKind.MANAGED:
        managed_init(backing, context)
    else:
        backing_init(backing, context)
    return 0


cdef void name_upstream(ArenaBase arena) noexcept:
    cdef const EventSource* below = NULL
    resource = arena.source.given
    # An adaptor's blocks are those of its upstream.
    while hasattr(resource, "upstreams"):
        resource = resource.upstreams[0]
    if isinstance(resource, ArenaBase):
        below = &(<ArenaBase>resource).core.events
    elif isinstance(resource, MemoryResource) and (<MemoryResource>resource).ledger != NULL:
        below = &(<MemoryResource>resource).ledger.events
    if below != NULL:
        arena.core.events.upstream = below.serial
        arena.core.events.upstream_owner = below.owner


cdef int require_shareable(MemoryResource arena, object config, Source source,
                           ArenaCore* core) except -1:
    cdef DeviceContext* context = &arena.driver_device.context
    cdef Backing backing
    if core.apart[APART_SHAREABLE].reserve != NULL:
        return 0
    reason = why_not_shareable(arena, config, source)
    if reason:
        raise ConfigError(f"invalid shareable = True for arena {arena.name!r} on {arena.memory}: "
                          f"{reason}")
    if by_handle(arena, config):
        shared_init(&backing, context, THE_DEVICE if config.numa_node is None else config.numa_node)
    else:
        file_init(&backing, context)
    backing.access = &core.access
    if core.apart[APART_SHAREABLE].reserve == NULL:      # else another thread was faster
        core.apart[APART_SHAREABLE] = backing
    return 0


cdef int require_transport(MemoryResource arena, object transport, bint shareable, Source source,
                           ArenaCore* core) except -1:
    if not isinstance(transport, str) or transport != "ipc":
        raise ValueError(f"invalid transport = {transport!r}: expected None or 'ipc'")
    if shareable:
        raise ConfigError("invalid transport = 'ipc' with shareable = True: memory is made for "
                          "one of the two")
    reason = why_not_registrable(arena, source)
    if reason:
        raise ConfigError(f"invalid transport = 'ipc' for arena {arena.name!r} on {arena.memory}: "
                          f"{reason}")
    return make_for_transport(arena, core)


cdef int make_for_transport(MemoryResource arena, ArenaCore* core) except -1:
    # Not where the arena's own regions go back as memory must that others may have open.
    cdef Backing backing
    if not core.settings.paged and not backing_frees_in_order(&core.backing):
        return 0
    if core.apart[APART_TRANSPORT].reserve == NULL:
        listed_init(&backing, &arena.driver_device.context)
        core.apart[APART_TRANSPORT] = backing
        for device in peers_of(arena, core):
            allow_context(core, device._open())
    return 0


cdef int note_registration(MemoryResource arena, ArenaCore* core, uint64_t address) except -1:
    cdef CUresult code
    make_for_transport(arena, core)
    if core.settings.paged or core.apart[APART_TRANSPORT].reserve == NULL:
        return 0
    with nogil:
        code = list_for_transport(core, address)
    if code != CUDA_SUCCESS:
        raise MemoryError("out of host memory while noting a registration")
    return 0


cdef str why_not_registrable(MemoryResource arena, Source source):
    if source is not None:
        return "its memory is provided by `source=`"
    if arena.memory.kind is MemoryKind.MANAGED:
        return "managed memory migrates"
    return ""


cdef bint by_handle(MemoryResource arena, object config):
    # As a physical handle of the driver's; other host memory is a file, which anybody can map.
    return arena.memory.kind is MemoryKind.DEVICE or config.numa_node is not None


cdef str why_not_shareable(MemoryResource arena, object config, Source source):
    if source is not None:
        return "its memory is provided by `source=`"
    if arena.memory.kind is MemoryKind.MANAGED:
        return "managed memory cannot be given to another process"
    needs = "posix_fd_handles" if by_handle(arena, config) else "host_register"
    return arena.memory.device.capabilities[needs].reason


cdef int require_settings(MemoryResource arena, object config, Source source) except -1:
    """Raise ConfigError for a setting that this memory has no use for."""
    where = arena.memory if source is None else "memory of a source"
    if config.numa_node is None:
        return 0
    # A node is a place of host memory; device memory has one place only.
    if source is not None or arena.memory.kind not in HOST_KINDS:
        raise ConfigError(f"invalid numa_node = {config.numa_node} for {where}: expected "
                          "host or host_accessible memory")
    if config.backing == "virtual":
        raise ConfigError(f"invalid numa_node = {config.numa_node} with backing = "
                          "'virtual': memory of a node is reserved as regions")
    return 0


cdef int require_node(MemoryResource arena, int node) except -1:
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


# ---- Peers: which other devices may touch the memory ---------------------------------------------


cdef int add_listed_peers(MemoryResource arena, ArenaCore* core, object config) except -1:
    why = ""
    if config.peers != "on_use" and is_everybodys(arena, core):
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
            add_peer(arena, core, device)
    return 0


cdef int add_peer(MemoryResource arena, ArenaCore* core, object device) except -1:
    cdef bint has_pages_alone = not has_regions(core)
    cdef int number = device.index       # the driver's number of it, too
    cdef CUresult code
    cdef bint is_reached = peer_is_reached(arena, device)
    if access_has(&core.access, number) or is_everybodys(arena, core):
        return 0
    if not is_reached:
        raise no_way_between(device, arena.memory.device)
    # A context of the peer takes memory there, and only regions need one.
    if not has_pages_alone:
        allow_context(core, device._open())
    with nogil:
        code = arena_add_peer(core, number)
    check(core.context.table, code, "cuMemSetAccess")
    # Another thread has made the first region meanwhile, and did not know of this peer.
    if has_pages_alone and has_regions(core):
        allow_context(core, device._open())
    return 0


cdef inline bint has_regions(const ArenaCore* core) noexcept:
    return not arena_can_sleep(core) or core.apart[APART_TRANSPORT].reserve != NULL


cdef int allow_context(ArenaCore* core, DriverDevice peer) except -1:
    cdef CUresult code
    with nogil:
        code = context_allow(core.context, &peer.context)
    return check(core.context.table, code, "cuCtxEnablePeerAccess")


cdef bint is_everybodys(MemoryResource arena, const ArenaCore* core):
    # Pinned and managed memory is every device's, except for what the driver maps for a node.
    return (arena.memory.kind in (MemoryKind.HOST_ACCESSIBLE, MemoryKind.MANAGED)
            and not core.backing.has_handles)


cdef tuple peers_of(MemoryResource arena, const ArenaCore* core):
    cdef uint32_t i
    own = arena.memory.device
    found = [core.access.places[i].location.id for i in range(1, published32(&core.access.count))
             if core.access.places[i].location.type == CU_MEM_LOCATION_TYPE_DEVICE]
    return tuple([Device(f"{own.type}:{number}") for number in found])
