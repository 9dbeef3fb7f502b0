"""Tags of an arena: which of them sleep, in which order, and how a refused sleep is undone."""

import contextlib
import os
from collections.abc import Iterable
from dataclasses import replace
from functools import partial

cimport cython
from libc.stdint cimport uint64_t
from libc.string cimport memset

from gpumem._arena.arena cimport Arena, default_stream_of
from gpumem._arena.graph_pool cimport children_of
from gpumem._arena.open cimport count_of, why_regions
from gpumem._arena.status cimport counters_of, raise_status, under_pressure
from gpumem._native.arena.api cimport (
    arena_admits, arena_can_sleep, ARENA_CLOSED, ARENA_DEAD, arena_events, ARENA_IN_USE,
    arena_is_idle, ARENA_OK, ARENA_OVER_BUDGET, arena_sleep, arena_sleeps_with, arena_state,
    arena_turn, arena_views, arena_wake, ArenaCore, devices_are_quiet, sleep_sums,
    SleepSums, STATE_ASLEEP, STATE_CLOSING, STATE_FALLING, STATE_OPEN, tag_adopt, tag_count,
)
from gpumem._native.driver cimport context_is_dead, DriverDevice, synchronize_device
from gpumem._native.pages cimport STORE_DEVICE, STORE_FILE, STORE_HOST, StorePlace
from gpumem._support.contexts cimport Opened, opened_tag
from gpumem._support.events cimport event_source_join
from gpumem._support.lease cimport views_alive

from gpumem._arena.sleep_file import SleepFile
from gpumem._support.arguments import require
from gpumem._support.contexts import ContextBlock, tags as tag_variable
from gpumem._support.releases import release_retired
from gpumem._support.texts import counted
from gpumem.device import Device
from gpumem.errors import AsleepError, ConfigError, GpumemError, InUseError

UNTAGGED = "default"
MODES = ("keep", "drop", "stay")

cdef enum:
    ROOM_PAGE = 4096        # bytes


# ---- the tags of an arena ------------------------------------------------------------------------


cdef object tagged_as(Arena arena, object name, object asleep):
    from gpumem._events.labels import label_of

    cdef Tag tag
    require_virtual(arena)
    require("asleep", asleep, str, "one of 'keep', 'drop', 'stay'")
    label = label_of(name)
    if asleep not in MODES:
        raise ConfigError(f"invalid asleep = {asleep!r}: expected one of 'keep', 'drop', 'stay'")
    if name == UNTAGGED:
        mode, inner = "keep", arena
    else:
        tag = find_or_open(arena, name, asleep)
        mode, inner = tag.asleep, tag.arena
    if mode != asleep:
        raise ConfigError(f"invalid asleep = {asleep!r} of tag {name!r}: it is {mode!r}")
    return ContextBlock(tag_variable, OpenedTag(arena, inner, label), f"tag {name!r}",
                        partial(arena.tag, name, asleep=asleep))


cdef Tag find_or_open(Arena arena, str name, str asleep):
    cdef Tag tag = arena.tags.get(name) if arena.tags is not None else None
    if tag is not None:
        return tag
    tag = Tag()
    tag.asleep = asleep
    tag.arena = open_tag(arena, name)
    if arena.tags is None:
        arena.tags = {}
    # Another thread may have opened it first. Or it closes the arena and has listed its tags.
    if arena_admits(arena.core) == ARENA_CLOSED:
        raise_status(arena, 0, 0, arena.default_slot, ARENA_CLOSED)
    return arena.tags.setdefault(name, tag)


cdef Arena open_tag(Arena arena, str name):
    cdef Arena inner
    config = replace(arena.config, backing=arena.backing, max_mem=0)
    inner = Arena(arena.memory, config, budget=arena.budget, count=count_of(arena),
                  default_stream=default_stream_of(arena), debug_heap=arena.debug_heap or False,
                  name=f"{arena.name}, tag {name}")
    inner.pressure_tensors = arena.pressure_tensors
    for peer in arena.peers:
        inner.enable_peer(peer)
    # From here on the limit and the counters of the arena include those of its tag.
    tag_adopt(inner.core, arena.core)
    event_source_join(arena_events(inner.core), arena_events(arena.core))
    return inner


cdef Arena arena_of_tag(Arena arena):
    cdef Opened opened = opened_tag(arena.core)
    if opened is None or (<OpenedTag>opened).inner is arena:
        return None
    return (<OpenedTag>opened).inner


cdef list named_tags(Arena arena, object tags):
    known = {UNTAGGED: arena}
    if arena.tags is not None:
        known |= {name: (<Tag>tag).arena for name, tag in arena.tags.items()}
    if tags is None:
        return list(known.items())
    names = [tags] if isinstance(tags, str) else tags
    if not isinstance(names, Iterable):
        raise TypeError(f"tags must be a str or several, not {type(tags).__name__}")
    names = list(names)
    for name in names:
        if name not in known:
            raise ValueError(
                f"arena {arena.name!r} has no tag {name!r}; it has "
                f"{', '.join(map(repr, known))}. `with arena.tag({name!r})` marks blocks that "
                "sleep together; gpumem.observe.tag only names blocks in reports")
    return [(name, known[name]) for name in dict.fromkeys(names)]


cdef list arenas_of_tags(Arena arena):
    return [] if arena.tags is None else [(<Tag>tag).arena for tag in arena.tags.values()]


cdef str mode_of(Arena arena, str name):
    return "keep" if name == UNTAGGED else (<Tag>arena.tags[name]).asleep


cdef int require_idle_tags(Arena arena) except -1:
    cdef Arena each
    if arena.tags is None:
        return 0
    release_retired()
    for name, each in named_tags(arena, None):
        # Rows of virtual tensors that have ended count as used until their pages are reclaimed.
        counts = counters_of(each)
        if counts["in_use"] > counts["rows_in_use"] or counts["live_spans"]:
            raise InUseError(f"arena {arena.name!r} cannot be closed: blocks or virtual tensors "
                             f"with tag {name!r} are in use; close them and drop their views "
                             "first")
    return 0


# ---- a change that waits for no thread -----------------------------------------------------------


cdef int hold(list arenas, int state, list held) except -1:
    cdef Arena each
    cdef bint turned
    for each in arenas:
        with nogil:
            turned = arena_turn(each.core, STATE_OPEN, state)
        try:
            if turned:
                held.append(each)
        except MemoryError:
            let_go([each], state)
            let_go(held, state)
            raise
        if not turned and arena_state(each.core) in (STATE_CLOSING, STATE_FALLING):
            let_go(held, state)
            raise InUseError(f"arena {each.name!r} is in use: another thread is closing it or "
                             "putting it to sleep")
    return 0


cdef int let_go(list held, int state) except -1:
    cdef Arena each
    for each in held:
        with nogil:
            arena_turn(each.core, state, STATE_OPEN)
    held.clear()
    return 0


cdef int close_if_idle(Arena arena) except -1:
    cdef Arena each
    cdef bint quiet
    if arena.tags is not None:      # their close releases retired memory, which may wait
        with nogil:
            quiet = devices_are_quiet()
        if not quiet:
            return 0
    for each in [arena, *children_of(arena)]:
        with nogil:
            quiet = arena_is_idle(each.core)
        if not quiet:
            return 0
    with contextlib.suppress(InUseError):
        arena.close()
    return 0


@cython.final
@cython.no_gc_clear     # `__dealloc__` needs the arena
cdef class OpenedTag(Opened):
    """A tag that a context may have open: its arena's allocations look which one they have."""

    cdef Arena arena
    cdef Arena inner

    def __cinit__(self, Arena arena not None, Arena inner not None, label):
        self.arena, self.inner = arena, inner
        self.tag.arena, self.tag.tagged, self.tag.label = arena.core, inner.core, label
        tag_count(arena.core, 1)

    def __init__(self, *arguments):
        pass    # `__cinit__` has made it

    def __dealloc__(self):
        if self.arena is not None:
            tag_count(self.arena.core, -1)


# ---- sleep and wake ------------------------------------------------------------------------------


cdef uint64_t put_to_sleep(Arena arena, object tags, object to, object registered) except? 0:
    cdef Arena each
    cdef SleepSums before
    cdef StorePlace* to_place
    cdef uint64_t released = 0
    cdef Py_ssize_t asleep = 0      # of those that fall
    require_sleeper(arena)
    if registered not in ("refuse", "stay"):
        raise ConfigError(f"invalid registered = {registered!r}: expected 'refuse' or 'stay'")
    stays = registered == "stay"
    sleepers = find_sleepers(arena, tags, stays)
    everything = named_tags(arena, None)
    place = SleepPlace(arena, to, arena.config.sleep_keep_bytes)
    falling = []        # those that fall asleep, in this order, with the parts that are held
    try:
        # From here on no view and no access begins: the second look finds all that there are.
        for name, each, parts in sleepers:
            held = []
            falling.append((name, each, held))
            hold(parts, STATE_FALLING, held)
            if not may_sleep(each, parts, stays):
                let_go(held, STATE_FALLING)
                falling.pop()
        # Ctrl-C ends this wait; later waits are for work that was queued after it.
        synchronize_device(&arena.driver_device.context)
        for name, each, held in falling:
            before = sleep_sums(each.core)
            to_place = NULL if mode_of(arena, name) == "drop" else place.make_room(each)
            held.clear()        # from here on its parts sleep, or are open again
            sleep_one(each, to_place)
            asleep += 1
            if to_place != NULL:
                place.note_use(each)
            released += before.held - sleep_sums(each.core).held
    except BaseException as error:
        for _, _, held in falling:
            let_go(held, STATE_FALLING)
        wake_all(arena, falling[:asleep], error)
        raise
    finally:
        place.close()
        forget_files(everything)
    return released


cdef list find_sleepers(Arena arena, object tags, bint registered_stay):
    # Name, arena, and the arena with its graph pools, of each tag that is to sleep.
    cdef Arena each, part
    sleepers = []
    for name, each in named_tags(arena, tags):
        parts = [each, *[part for part in children_of(arena)
                         if arena_sleeps_with(part.core) == each.core]]
        if (arena_state(each.core) < STATE_ASLEEP and mode_of(arena, name) != "stay"
                and may_sleep(each, parts, registered_stay)):
            sleepers.append((name, each, parts))
    # A refusal wakes the tags that sleep by then, and the bytes of a "drop" tag are lost: so these
    # are the last.
    return sorted(sleepers, key=lambda sleeper: mode_of(arena, sleeper[0]) == "drop")


cdef bint may_sleep(Arena each, list parts, bint registered_stay) except -1:
    # False: it stays awake. Raises if it is in use.
    cdef Arena part
    shared = sleep_sums(each.core).shared_blocks
    if registered_stay and (shared or any([(<Arena>part).registered for part in parts])):
        return False
    if shared:
        raise InUseError(f"arena {each.name!r} cannot sleep: {shared} of its blocks were "
                         "sent to other processes; free them here first, or call "
                         "sleep(registered=\"stay\")")
    for part in parts:
        require_untouched(part)
    return True


cdef int sleep_one(Arena arena, StorePlace* to) except -1:
    cdef int status
    with nogil:
        status = arena_sleep(arena.core, to)
    if status != ARENA_OK:
        if status == ARENA_IN_USE:
            raise InUseError(f"arena {arena.name!r} cannot sleep: another thread has woken it or "
                             "made a graph pool meanwhile")
        raise_status(arena, sleep_sums(arena.core).room, 0, arena.default_slot, status)
    return 0


cdef int wake_tags(Arena arena, object tags) except -1:
    cdef Arena each
    require_sleeper(arena)
    everything = named_tags(arena, None)
    try:
        for _, each in named_tags(arena, tags):
            wake_one(each)
    finally:
        forget_files(everything)
    return 0


cdef int wake_all(Arena arena, list named, object refusal) except -1:
    """Wake the tags that were put to sleep before another one was refused."""
    cdef Arena each
    failed = []
    for name, each, _ in named:
        try:
            wake_one(each)
        except (GpumemError, MemoryError):
            failed.append(name)
    if failed:
        raise AsleepError(f"tags {', '.join(failed)} of arena {arena.name!r} are asleep, and "
                          f"could not be woken after a refusal ({refusal}); wake() can be tried"
                          ) from refusal
    return 0


cdef int wake_one(Arena arena) except -1:
    cdef int status
    with nogil:
        status = arena_wake(arena.core)
    if status == ARENA_OVER_BUDGET:
        status = under_pressure(arena, wake_again, sleep_sums(arena.core).room)
    if status != ARENA_OK:
        raise_status(arena, sleep_sums(arena.core).room, 0, arena.default_slot, status)
    return 0


cdef int wake_again(ArenaCore* core, uint64_t nbytes) noexcept nogil:
    return arena_wake(core)


cdef int forget_files(list everything) except -1:
    # A file is removed with the last tag that has bytes in it.
    cdef Arena each
    for _, each in everything:
        if arena_state(each.core) == STATE_OPEN:
            each.sleep_file = None
    return 0


cdef int require_sleeper(Arena arena) except -1:
    arena.require_own()
    arena.require_open()
    if context_is_dead(&arena.driver_device.context):
        raise_status(arena, 0, 0, arena.default_slot, ARENA_DEAD)
    return require_virtual(arena)


cdef int require_virtual(Arena arena) except -1:
    if not arena_can_sleep(arena.core):
        raise ConfigError(f"arena {arena.name!r} cannot sleep, because it has regions instead of "
                          f"pages: {why_regions(arena)}")
    return 0


cdef int require_untouched(Arena arena) except -1:
    what = f"arena {arena.name!r} cannot sleep"
    if arena.registered:
        raise InUseError(f"{what}: transports, or arenas over its blocks, hold "
                         f"{counted(arena.registered, 'registration')}; release them, or call "
                         "sleep(registered=\"stay\")")
    if arena.accesses:
        raise InUseError(f"{what}: other threads copy or fill its blocks "
                         f"({counted(arena.accesses, 'operation')} under way)")
    # A registration counts as a view; those left are of blocks that a sleep leaves.
    views = views_alive(arena_views(arena.core)) - arena.registered_fixed
    if arena.cpu_can_read and views:
        raise InUseError(f"{what}: the CPU could read {counted(views, 'view')} of its blocks; drop "
                         "these views first")
    return 0


# ---- where the bytes are kept --------------------------------------------------------------------


@cython.final
cdef class SleepPlace:
    """The place to which one call of sleep copies bytes."""

    cdef StorePlace place
    cdef DriverDevice device            # kept as long as its memory is used
    cdef object file

    def __cinit__(self, Arena arena not None, to, uint64_t keep):
        memset(&self.place, 0, sizeof(StorePlace))
        self.place.kind = STORE_HOST
        self.place.keep = keep
        self.place.file = -1
        if isinstance(to, Device) or isinstance(to, str) and os.sep not in to:
            if to == "host" and not isinstance(to, Device):
                return
            try:
                device = Device(to)
            except ValueError:
                raise ValueError(f"invalid to = {to!r}: expected \"host\", a device such as "
                                 f"\"{arena.memory.device.type}:1\", or a path with a "
                                 f"{os.sep!r}; several tags are one list") from None
            if device.type != arena.memory.device.type or device == arena.memory.device:
                raise ValueError(f"invalid to = {str(to)!r} for an arena on {arena.memory}: "
                                 "expected \"host\", another device of its type, or a path")
            self.device = device._open()
            self.place.kind, self.place.keep = STORE_DEVICE, 0
            self.place.device = &self.device.context
            return
        if not isinstance(to, (str, bytes, os.PathLike)):
            raise TypeError(f"to must be \"host\", a Device or its name, or a path, not "
                            f"{type(to).__name__}")
        self.file = SleepFile(to)
        self.place.kind, self.place.keep = STORE_FILE, 0
        self.place.file = self.file.descriptor

    cdef StorePlace* make_room(self, Arena arena) except NULL:
        # A full disk refuses the sleep before a byte is copied.
        if self.place.kind == STORE_FILE:
            nbytes = sleep_sums(arena.core).room
            self.place.room = nbytes + ROOM_PAGE - nbytes % ROOM_PAGE
            self.file.nbytes = self.place.offset + self.place.room
            arena.sleep_file = self.file
            try:
                os.posix_fallocate(self.place.file, self.place.offset, self.place.room)
            except OSError as error:
                raise self.file.error(arena.name, error.errno) from None
        return &self.place

    def note_use(self, Arena arena not None):
        if self.place.kind == STORE_FILE and sleep_sums(arena.core).copied:
            self.place.offset += self.place.room
            self.place.room = 0
        else:
            arena.sleep_file = None

    def close(self):
        self.file = None
