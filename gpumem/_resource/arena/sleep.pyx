"""Sleeping: tags, sleep and wake."""

import contextlib
import os
import weakref
from collections.abc import Iterable
from dataclasses import replace

cimport cython
from cpython.ref cimport Py_DECREF, Py_INCREF
from libc.stdint cimport uint64_t
from libc.string cimport memset

from gpumem._native.arena cimport (
    APART_SHAREABLE, APART_TRANSPORT, arena_can_sleep, ARENA_DEAD, arena_is_idle, arena_is_open,
    ARENA_OK, ARENA_OVER_BUDGET, arena_reset_peaks, arena_sleep, arena_state, arena_wake, ArenaCore,
    devices_are_quiet, heap_hold, heap_let_go, OpenTag, sleep_sums, SleepSums, STATE_ASLEEP,
    tag_adopt, tag_close, tag_now, tag_open,
)
from gpumem._native.backing cimport mapped_around
from gpumem._native.driver cimport context_is_dead, DriverDevice, synchronize_device
from gpumem._native.pages cimport STORE_DEVICE, STORE_FILE, STORE_HOST, StorePlace
from gpumem._resource.arena.reports cimport (
    count_of, raise_status, ReportingArena, sum_of_stats, under_pressure,
)
from gpumem._resource.arena.settings cimport why_regions
from gpumem._support.atomics cimport count_now, load64
from gpumem._support.events cimport event_source_join
from gpumem._support.lease cimport views_alive

from gpumem._support.arguments import require
from gpumem._support.providers import provided
from gpumem._support.releases import release_retired
from gpumem._support.texts import counted
from gpumem.device import Device
from gpumem.errors import ConfigError, GpumemError, InUseError, SuspendedError

UNTAGGED = "default"
MODES = ("keep", "drop", "stay")


cdef class SleepingArena(ReportingArena):
    """What an arena does to sleep and to wake; `gpumem.Arena` adds the rest."""

    def tag(self, name, *, asleep="keep"):
        """Tag the blocks that the calling thread allocates, so that they can sleep by themselves.

        A context manager. Blocks of a tag lie on pages of their own, and count in the arena's
        limit, budget and `stats`; PyTorch's tensors over this arena are blocks as well. Tags can be
        nested; the innermost counts. Recordings and reports show the tag, as `gpumem.observe.tag`.
        Blocks without a tag have the tag ``"default"``, which is "keep".

        Parameters
        ----------
        name : str
            The tag; opened again, it goes on.
        asleep : {"keep", "drop", "stay"}
            What `sleep` does with its blocks: "keep" lets their bytes come back with `wake`;
            "drop" the memory alone, with any bytes; "stay" leaves them where they are.

        Raises
        ------
        TypeError, ValueError
            `name` is not a str, is empty, or there are too many names.
        ConfigError
            `asleep` is something else, or not what the tag was opened with before; or the arena has
            regions or a source, whose addresses cannot be kept.
        ClosedError
            The arena is closed, or belongs to the parent of a fork.
        GpumemError
            On entering: this context was used before. On leaving: it is not entered, or another
            thread has entered.

        Examples
        --------
        >>> import gpumem
        >>> arena = gpumem.Arena("host")
        >>> with arena.tag("cache", asleep="drop"):
        ...     cache = arena.allocate(1 << 20)
        >>> weights = arena.allocate(1 << 20)
        >>> arena.sleep("cache"), arena.asleep
        (2097152, ('cache',))
        >>> arena.wake()
        """
        cdef Tag tag
        self.require_own()
        self.require_open()
        require_virtual(self)
        require("name", name, str, "a str")
        require("asleep", asleep, str, "one of 'keep', 'drop', 'stay'")
        if not name:
            raise ValueError("a tag has at least one character")
        if asleep not in MODES:
            raise ConfigError(f"invalid asleep = {asleep!r}: expected one of 'keep', 'drop', "
                              "'stay'")
        observed = provided("tag")(name)
        if name == UNTAGGED:
            mode, inner = "keep", self
        else:
            tag = self.tags.get(name) if self.tags is not None else None
            if tag is None:
                tag = Tag()
                tag.asleep = asleep
                tag.arena = self._open_tag(name)
                if self.tags is None:
                    self.tags = {}
                tag = self.tags.setdefault(name, tag)
            mode, inner = tag.asleep, tag.arena
        if mode != asleep:
            raise ConfigError(f"invalid asleep = {asleep!r} of tag {name!r}: it is {mode!r}")
        return Tagged(self, inner, name, observed)

    def sleep(self, tags=None, to="host", *, registered="refuse"):
        """Give memory back to the driver; the bytes of "keep" blocks wait elsewhere.

        Addresses stay: after `wake`, pointers, tensors over them and captured graphs are valid as
        before. Virtual tensors and blocks of graph pools sleep with the tag that they were made
        under; no graph that uses one is launched meanwhile. Waits for everything queued on the
        device; Ctrl-C ends that wait, and the arena goes on. From here to `wake` no work may touch
        what sleeps: what a kernel reads or writes there is undefined, mostly an illegal address.
        Python's views, copies and exports of it raise `SuspendedError`, and so does allocating, or
        committing rows, under a tag that sleeps. Blocks may be dropped and rows released, and are
        then not copied back. Shareable blocks and those for a transport stay as they are, as others
        may use them. What sleeps already goes on sleeping.

        Parameters
        ----------
        tags : str or iterable of str, optional
            Which tags; ``"default"`` is the blocks without one. None: all.
        to : str, Device or path
            Where bytes wait: "host", in pinned memory, some of which stays for the next time (see
            `ArenaConfig.sleep_keep_bytes`); another device, as "cuda:1"; or a file, which must not
            exist, and which `wake` and the end of the arena or the process remove. A text with a
            slash is a path.
        registered : {"refuse", "stay"}
            What a registration of a block does (see `Buffer.register`), other than of a block for
            ``transport="ipc"``; a block that is the memory of another arena (`source`); and a
            PyTorch tensor that was sent to another process: it refuses this call, or its whole tag
            stays awake.

        Returns
        -------
        int
            Bytes that the device has back.

        Raises
        ------
        InUseError
            A registration of a block is held, or another process was given the memory of a block
            that is not freed, under "refuse". Or, of memory that the CPU reads, a
            view of a block is alive.
            Nothing is changed.
        ConfigError
            The arena has regions: their addresses cannot be kept. Or `registered` is invalid.
        ValueError
            There is no such tag or device.
        OutOfMemoryError
            There is no room for the copy; the arena goes on as before.
        OSError
            The file cannot be written; the arena goes on as before.
        DriverError
            The driver refused; the arena goes on as before. Tags of "drop" go to sleep after all
            others: if it refused one of these, the blocks of "drop" tags may have any bytes.
        SuspendedError
            The driver refused a step, and then to undo what was done: those tags that `asleep`
            tells are asleep, what they keep is safe, and some memory has not gone back. `wake`
            completes it.
        ClosedError
            The arena is closed, or belongs to the parent of a fork.

        Examples
        --------
        >>> import gpumem
        >>> arena = gpumem.Arena("host")
        >>> weights = arena.allocate_persistent(1 << 20)
        >>> arena.sleep(), arena.stats().reserved
        (2097152, 0)
        >>> arena.wake()
        >>> weights.close()
        """
        cdef ArenaBase each
        cdef SleepSums before
        self._require_sleeper()
        if registered not in ("refuse", "stay"):
            raise ConfigError(f"invalid registered = {registered!r}: expected 'refuse' or 'stay'")
        sleepers = []
        for name, each in self._named(tags):
            parts = [each, *[pool for pool in self._children()
                             if (<ArenaBase>pool).core.sleeps_with == each.core]]
            shared = sleep_sums(each.core).shared_blocks
            if not arena_is_open(each.core) or self._mode(name) == "stay" or (
                    registered == "stay"
                    and (shared or any([(<ArenaBase>part).registered for part in parts]))):
                continue
            if shared:
                raise InUseError(f"arena {each.name!r} cannot sleep: {shared} of its blocks were "
                                 "sent to other processes; free them here first, or call "
                                 "sleep(registered=\"stay\")")
            for part in parts:
                require_untouched(part, name)
            sleepers.append((name, each))
        # A refusal wakes those that sleep by then, and nothing brings a dropped tag's bytes back.
        sleepers.sort(key=lambda sleeper: self._mode(sleeper[0]) == "drop")
        # Ctrl-C ends this wait; those below are for what was queued meanwhile.
        synchronize_device(&self.driver_device.context)
        place = SleepPlace(self, to, self.config.sleep_keep_bytes)
        done = []
        released = 0
        try:
            for name, each in sleepers:
                before = sleep_sums(each.core)
                if self._mode(name) == "drop":
                    put_to_sleep(each, None)
                else:
                    put_to_sleep(each, place)
                    place.used_by(self, each, name)
                done.append((name, each))
                released += before.held - sleep_sums(each.core).held
        except BaseException as error:
            wake_all(self, done, error)
            raise
        finally:
            place.close()
            self._forget_files()
        return released

    def wake(self, tags=None):
        """Make the memory of sleeping blocks again, at the same addresses, with its bytes.

        Returns when they are there. What is awake stays so.

        Parameters
        ----------
        tags : str or iterable of str, optional
            Which tags; None: all that sleep. In any order.

        Raises
        ------
        OutOfMemoryError, DriverError
            The driver refused, or its budget (BudgetExceededError); the tag is still asleep, and
            this can be tried again.
        ConfigError, ValueError, ClosedError
            As `sleep`.

        Examples
        --------
        >>> import gpumem
        >>> arena = gpumem.Arena("host")
        >>> buffer = arena.allocate(1000)
        >>> with memoryview(buffer) as view:
        ...     view[0] = 7
        >>> address, _ = buffer.ptr, arena.sleep()
        >>> arena.wake()
        >>> buffer.ptr == address, memoryview(buffer)[0]
        (True, 7)
        """
        cdef ArenaBase each
        self._require_sleeper()
        try:
            for _, each in self._named(tags):
                wake_up(each)
        finally:
            self._forget_files()

    @property
    def asleep(self):
        """The tags that are asleep, a tuple of str; ``"default"`` is the blocks without one."""
        cdef ArenaBase each
        return tuple([name for name, each in self._named(None)
                      if arena_state(each.core) == STATE_ASLEEP])

    def stats(self):
        """Return the counters of this moment as `Stats`; those of all tags together.

        The highest of bytes in use and reserved are sums of each tag's own.

        Examples
        --------
        >>> import gpumem
        >>> arena = gpumem.Arena("host")
        >>> buffer = arena.allocate(1000)
        >>> stats = arena.stats()
        >>> stats.requested_in_use, stats.in_use, stats.reserved >= stats.in_use
        (1000, 1024, True)
        """
        total = ReportingArena.stats(self)
        if self.tags is None:
            return total
        return sum_of_stats([total] + [each.stats() for each in self._beside()])

    def reset_peaks(self):
        """Begin to look for the highest `max_in_use` and `max_reserved` anew, from what is now.

        Examples
        --------
        >>> import gpumem
        >>> arena = gpumem.Arena("host")
        >>> arena.allocate(1 << 20).close()
        >>> peak = arena.stats().max_in_use
        >>> arena.reset_peaks()
        >>> peak, arena.stats().max_in_use
        (1048576, 0)
        """
        self.require_own()
        with nogil:
            arena_reset_peaks(self.core)
        for each in self._beside():
            each.reset_peaks()

    def blocks(self):
        """Return every block, used and free, as a list of `BlockInfo` in address order.

        Examples
        --------
        >>> import gpumem
        >>> arena = gpumem.Arena("host")
        >>> buffer = arena.allocate(1000)
        >>> [(block.nbytes, block.allocated_nbytes) for block in arena.blocks() if block.used]
        [(1000, 1024)]
        """
        cdef ArenaBase each
        found = []
        for name, each in self._named(None):
            asleep = arena_state(each.core) == STATE_ASLEEP
            for block in ReportingArena.blocks(each):
                gone = asleep and not stays(each.core, block.address)
                found.append(replace(block, tag=name, asleep=gone) if gone or name != UNTAGGED
                             else block)
        return sorted(found, key=lambda block: block.address)

    def check_heap(self, *, wait=True):
        """Look for invalid writes, in every block of the debug heap.

        That is: guards of live blocks, guards and bytes of freed ones in quarantine. The same
        happens to each block when it is freed and before its memory is used again, once the streams
        that it was freed on and recorded for are done; those findings are reported by the next
        call that may raise. Each wrong byte is reported once. Blocks of graph pools and shareable
        ones have no guards and are not looked at, nor is anything that is asleep.

        Parameters
        ----------
        wait : bool
            Wait for all work that is queued on the device first, so that nothing is missed. False
            looks at what is there now; blocks whose streams are not done are left for later.

        Returns
        -------
        tuple of HeapReport
            What was found now, if `DebugHeapOptions.on_error` is not "raise".

        Raises
        ------
        HeapCorruptionError, InvalidFreeError
            What was found, under "raise".
        ConfigError
            The arena has no debug heap.
        ClosedError
            The arena is closed, or belongs to the parent of a fork.
        DriverError
            The driver refused to wait, or to copy.

        Examples
        --------
        >>> import gpumem, ctypes
        >>> arena = gpumem.Arena("host", debug_heap=True)
        >>> buffer = arena.allocate(100)
        >>> _ = ctypes.memset(buffer.ptr + 100, 7, 1)
        >>> try:
        ...     arena.check_heap()
        ... except gpumem.errors.HeapCorruptionError as error:
        ...     found = error.reports[0]
        >>> found.kind, found.offset, found.found[:2].hex(" ")
        ('overrun', 100, '07 fd')
        """
        found = ReportingArena.check_heap(self, wait=wait)
        for each in self._beside():
            found += each.check_heap(wait=False)
        return found

    def outstanding(self):
        """Return the live blocks of an arena with a debug heap, tag by tag, the oldest first.

        Returns
        -------
        list of OutstandingBlock
            Address, size, number and the place of allocation of each.

        Raises
        ------
        ConfigError
            The arena has no debug heap. `gpumem.adaptors.track` lists the blocks of any resource.
        ClosedError
            The arena belongs to the parent of a fork.

        Examples
        --------
        >>> import gpumem
        >>> arena = gpumem.Arena("host", debug_heap=True)
        >>> buffer = arena.allocate(100)
        >>> [(block.nbytes, block.number) for block in arena.outstanding()]
        [(100, 1)]
        """
        cdef ArenaBase each
        found = []
        for name, each in self._named(None):
            asleep = arena_state(each.core) == STATE_ASLEEP
            found += [replace(block, tag=name, asleep=asleep)
                      for block in ReportingArena.outstanding(each)]
        return found

    cdef ArenaBase tagged(self):
        cdef Tag tag
        cdef ArenaCore* core = tag_now(self.core)
        if core != NULL:
            for tag in self.tags.values():
                if tag.arena.core == core:
                    return tag.arena
        return None

    def _named(self, tags):
        # Of each tag the name and the arena, in the order of opening; the untagged blocks first.
        known = {UNTAGGED: self}
        if self.tags is not None:
            known |= {name: (<Tag>tag).arena for name, tag in self.tags.items()}
        if tags is None:
            return list(known.items())
        names = [tags] if isinstance(tags, str) else tags
        if not isinstance(names, Iterable):
            raise TypeError(f"tags must be a str or several, not {type(tags).__name__}")
        names = list(names)
        for name in names:
            if name not in known:
                raise ValueError(
                    f"arena {self.name!r} has no tag {name!r}; it has "
                    f"{', '.join(map(repr, known))}. `with arena.tag({name!r})` marks blocks that "
                    "sleep together; gpumem.observe.tag only names blocks in reports")
        return [(name, known[name]) for name in dict.fromkeys(names)]

    def _open_tag(self, name):
        cdef ArenaBase inner
        config = replace(self.config, backing=self.backing, max_mem=0)
        inner = type(self)(self.memory, config, budget=self.budget, count=count_of(self.core),
                           default_stream=self._default_stream(),
                           debug_heap=self.debug_heap or False, name=f"{self.name}, tag {name}")
        inner.relievers = self.relievers
        for peer in self.peers:
            inner.enable_peer(peer)
        # From here on the limit and the counters of this arena include the tag's.
        tag_adopt(inner.core, self.core)
        event_source_join(&inner.core.events, &self.core.events)
        return inner

    def _beside(self):
        # The arenas of tags.
        return [each for _, each in self._named(None)[1:]]

    def _close_tags(self):
        # All or none: refused while a block of any tag is in use.
        cdef ArenaBase each
        if self.tags is None:
            return
        release_retired()
        for name, each in self._named(None):
            # Virtual tensors that have ended count as used until their pages are looked for.
            if (ReportingArena.stats(each).in_use > load64(&each.core.span_used)
                    or count_now(&each.core.live_spans)):
                raise InUseError(f"arena {self.name!r} cannot be closed: blocks or virtual tensors "
                                 f"with tag {name!r} are in use; close them and drop their views "
                                 "first")
        for each in self._beside():
            each.close()

    def _close_if_idle(self):
        cdef ArenaBase each
        cdef bint quiet
        if self.tags is not None:       # their close releases what is retired, which may wait
            with nogil:
                quiet = devices_are_quiet()
            if not quiet:
                return
        for each in [self, *self._children()]:
            with nogil:
                quiet = arena_is_idle(each.core)
            if not quiet:
                return
        with contextlib.suppress(InUseError):
            self.close()

    def _mode(self, name):
        return "keep" if name == UNTAGGED else (<Tag>self.tags[name]).asleep

    def _require_sleeper(self):
        self.require_own()
        self.require_open()
        if context_is_dead(&self.driver_device.context):
            raise_status(self, 0, 0, self.default_slot, ARENA_DEAD)
        require_virtual(self)

    def _forget_files(self):
        # A file goes with the last tag whose bytes it has.
        if self.files:
            asleep = self.asleep
            self.files = {name: file for name, file in self.files.items() if name in asleep}


@cython.final
cdef class Tagged:
    """The context in which a thread's allocations of an arena have a tag."""

    cdef readonly str name
    cdef SleepingArena arena
    cdef ArenaBase inner
    cdef object observed                # the context of the observers' tag
    cdef OpenTag open
    cdef bint used
    cdef bint is_open                   # it has a reference to itself: the thread's list has `open`

    def __cinit__(self, SleepingArena arena not None, ArenaBase inner not None, name, observed):
        self.arena, self.inner, self.name, self.observed = arena, inner, name, observed
        self.open.arena, self.open.tagged = arena.core, inner.core

    def __enter__(self):
        if self.used:
            raise GpumemError(f"tag {self.name!r} was entered before: call tag() for each use")
        self.used = True
        self.observed.__enter__()
        Py_INCREF(self)
        self.is_open = True
        tag_open(&self.open)

    def __exit__(self, *exception):
        if not self.is_open:
            raise GpumemError(f"tag {self.name!r} is not entered")
        if not tag_close(&self.open):
            raise GpumemError(f"tag {self.name!r} was entered by another thread: leave it on that "
                              "thread")
        self.is_open = False
        Py_DECREF(self)
        self.observed.__exit__(*exception)


@cython.final
cdef class SleepPlace:
    """Where the bytes of one call of sleep go."""

    cdef StorePlace place
    cdef DriverDevice device            # kept as long as its memory is used
    cdef object file

    def __cinit__(self, SleepingArena arena not None, to, uint64_t keep):
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

    cdef StorePlace* make_room(self, uint64_t nbytes) except NULL:
        # A file has its blocks before it is written through a mapping, where a full disk would be
        # a signal.
        if self.place.kind == STORE_FILE:
            self.place.room = nbytes + ROOM_PAGE - nbytes % ROOM_PAGE
            os.posix_fallocate(self.place.file, self.place.offset, self.place.room)
        return &self.place

    def used_by(self, SleepingArena arena not None, ArenaBase each not None, name):
        if self.place.kind == STORE_FILE and sleep_sums(each.core).copied:
            self.place.offset += self.place.room
            self.place.room = 0
            arena.files = {**(arena.files or {}), name: self.file}

    def close(self):
        # Mappings keep the file.
        if self.place.file >= 0:
            os.close(self.place.file)
            self.place.file = -1
            self.file = None


class SleepFile:
    """The file of one call of sleep, removed when no tag has its bytes there any more."""

    def __init__(self, to):
        # The program may change its working directory before the file is removed.
        path = os.path.abspath(os.fsdecode(to))
        self.descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        weakref.finalize(self, remove_file, path, os.fstat(self.descriptor), os.getpid())


def remove_file(path, made, process):
    """Remove a file that this process made, unless the path names another one by now."""
    with contextlib.suppress(OSError):
        if os.getpid() == process and os.path.samestat(os.lstat(path), made):
            os.unlink(path)


cdef enum:
    ROOM_PAGE = 4096


cdef int put_to_sleep(ArenaBase arena, SleepPlace place) except -1:
    cdef StorePlace* to = NULL if place is None else place.make_room(sleep_sums(arena.core).room)
    cdef int status
    with nogil:
        if arena.core.heap != NULL:
            heap_hold(arena.core)
        status = arena_sleep(arena.core, to)
        if arena.core.heap != NULL:
            heap_let_go(arena.core)
    if status != ARENA_OK:
        raise_status(arena, arena.stats().in_use, 0, arena.default_slot, status)
    return 0


cdef int wake_all(SleepingArena arena, list named, object refusal) except -1:
    """Undo for the tags that were asleep before another one was refused."""
    cdef ArenaBase each
    failed = []
    for name, each in named:
        try:
            wake_up(each)
        except (GpumemError, MemoryError):
            failed.append(name)
    if failed:
        raise SuspendedError(f"tags {', '.join(failed)} of arena {arena.name!r} are asleep, and "
                             f"could not be woken after a refusal ({refusal}); wake() can be tried"
                             ) from refusal
    return 0


cdef int wake_up(ArenaBase arena) except -1:
    cdef int status
    with nogil:
        status = arena_wake(arena.core)
    if status == ARENA_OVER_BUDGET:
        status = under_pressure(arena, wake_again, arena.stats().in_use)
    if status != ARENA_OK:
        raise_status(arena, arena.stats().in_use, 0, arena.default_slot, status)
    return 0


cdef int wake_again(ArenaCore* core, uint64_t nbytes) noexcept nogil:
    return arena_wake(core)


cdef int require_virtual(ArenaBase arena) except -1:
    if not arena_can_sleep(arena.core):
        raise ConfigError(f"arena {arena.name!r} cannot sleep, because it has regions instead of "
                          f"pages: {why_regions(arena)}")
    return 0


cdef bint stays(ArenaCore* core, uint64_t address) noexcept:
    # Shareable blocks and those for a transport.
    return (mapped_around(&core.apart[APART_SHAREABLE], address) != NULL
            or mapped_around(&core.apart[APART_TRANSPORT], address) != NULL)


cdef int require_untouched(ArenaBase arena, str name) except -1:
    what = f"arena {arena.name!r} cannot sleep"
    if arena.registered:
        raise InUseError(f"{what}: transports, or arenas over its blocks, hold "
                         f"{counted(arena.registered, 'registration')}; release them, or call "
                         "sleep(registered=\"stay\")")
    # A registration counts as a view; those left are of blocks that a sleep leaves.
    views = views_alive(&arena.core.views) - arena.registered_fixed
    if arena.cpu_can_read and views:
        raise InUseError(f"{what}: the CPU could read {counted(views, 'view')} of its blocks; drop "
                         "these views first")
    return 0
