"""Recordings of resources, into a ring or a file."""

from __future__ import annotations

import contextlib
import fcntl
import itertools
import os
import warnings
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple, Self

import numpy as np

from gpumem._arena.graph_pool import GraphPool
from gpumem._buffer.resource import MemoryResource
from gpumem._events import recorder
from gpumem._events.events import (
    LIVE,
    Block,
    Events,
    RecordedResource,
    events_of,
    read,
    slots_of,
    text_of_live,
)
from gpumem._snapshots.snapshot import snapshot
from gpumem._support.arguments import is_integer, is_number, is_same_file, require
from gpumem._support.closing import Uncopied
from gpumem._support.files import require_writable
from gpumem.errors import ClosedError, ConfigError, GpumemError, InUseError
from gpumem.report import Report, write_report
from gpumem.traces import Trace
from gpumem.traces.formats import busiest
from gpumem.traces.gpumem_recording import traces_of

MAX_EVENTS = 1 << 28
_ALWAYS = (1 << 32) - 1
_BLOCKS_OF_A_TEXT = 400  # of at most 100 bytes each; a text has at most 60,000
_MAX_TEXTS = (1 << 16) - 1  # of 26 million blocks


class LiveBlocks(NamedTuple):
    """Blocks that were live when `written` events had been written."""

    written: int
    blocks: list[tuple[RecordedResource, Block]]


class Recording(recorder.RecordedBlock, Uncopied):
    """Events of resources from now until `stop`; made by `record`.

    Attributes
    ----------
    path : Path or None
        The file, absolute; None of a ring.

    Examples
    --------
    >>> import gpumem, gpumem.observe
    >>> arena = gpumem.Arena("host")
    >>> recording = gpumem.observe.record(arena)
    >>> arena.allocate(1000).close()
    >>> recording.stop()
    >>> recording.running, recording.lost, recording.trace().events     # one alloc, one free
    (False, 0, 2)
    """

    def __init__(
        self,
        resources: list[MemoryResource | GraphPool] | None,
        path: Path | None,
        capacity: int,
        sampling: int,
        native: bool,
    ) -> None:
        if not is_integer(sampling, 0, 2**32 - 1):
            raise ValueError(f"invalid sampling = {sampling!r}: expected 0 to 2**32 - 1")
        self.path = path
        self._taken: Events | None = None
        self._live: LiveBlocks | None = None
        self._process = os.getpid()
        self._slots = 0 if path is not None else 1 << (capacity - 1).bit_length()
        file = -1 if path is None else _open_alone(path)
        try:
            self._handle = recorder.RecorderHandle(self._slots, file, sampling, native)
        except BaseException:
            if file >= 0:
                os.close(file)  # ends its lock
            raise
        try:
            self._handle.begin(resources)
            if path is not None:
                self._write_live()
        except BaseException:
            self._handle.end()
            with contextlib.suppress(OSError):
                self._handle.finish_file()
            raise

    @property
    def running(self) -> bool:
        """Whether events are being written."""
        return self._handle.writing

    @property
    def lost(self) -> int:
        """Number of lost events: a ring's oldest, and those that did not fit on a full disk."""
        return self._handle.lost

    @property
    def failed(self) -> OSError | None:
        """The error that ended a recording into a file, such as a full disk; else None."""
        code = self._handle.failed
        return OSError(code, os.strerror(code), str(self.path)) if code else None

    def events(self) -> Events:
        """Return the events recorded so far; of a ring, those that it still holds.

        Raises
        ------
        OSError
            The file cannot be read.
        """
        if self.path is not None:
            # The file of a running recording may count fewer.
            return replace(read(self.path), lost=self.lost)
        if self._taken is not None:
            return self._taken
        rows = np.zeros((self._slots, 6), np.uint64)
        slots = slots_of(rows[: self._handle.read_ring(rows)])
        names: dict[str, dict[int, str]] = self._handle.names()
        names["threads"] = {
            number: str(recorder.thread_id(number))
            for number in np.unique(slots["thread"]).tolist()
        }
        return events_of(
            slots, names, began=self._handle.began_at, process=self._process, lost=self.lost
        )

    def trace(self, device: int | None = None) -> Trace:
        """Return the recorded events as a `gpumem.traces.Trace`.

        If a ring has lost its oldest events, the trace begins with the blocks that were live at the
        oldest event left, in place of their allocations.

        Parameters
        ----------
        device : int, optional
            Index of the memory in the order of names; by default the busiest memory.

        Raises
        ------
        TraceError
            Nothing was allocated.
        """
        return busiest(self._traces(device))

    def report(self, path: str | os.PathLike[str], *, title: str | None = None) -> Report:
        """Write a page of HTML that shows the recorded run; see `write_report`.

        Parameters
        ----------
        path : str or path
            The page.
        title : str, optional
            Its heading.

        Raises
        ------
        InUseError
            The recording still runs; the page's replays would be recorded, too.
        TraceError
            Nothing was allocated.
        OSError
            The page cannot be written.
        ConfigError
            The page is the file of the recording.

        Examples
        --------
        >>> import os, tempfile, gpumem, gpumem.observe
        >>> arena = gpumem.Arena("host")
        >>> with gpumem.observe.record(arena) as recording:
        ...     arena.allocate(1000).close()
        >>> page = os.path.join(tempfile.mkdtemp(), "report.html")
        >>> recording.report(page).peak_live_bytes
        1000
        """
        if self.running:
            raise InUseError("the recording still runs: stop() it before its report")
        if is_same_file(path, [self.path]):
            raise ConfigError(
                f"invalid path = {os.fspath(path)!r}: expected another file than that of the "
                "recording"
            )
        return write_report(self._traces(None), path, title=title)

    def _traces(self, device: int | None) -> list[Trace]:
        """Return a trace of each memory, or of one."""
        name = self.path.stem if self.path is not None else "recording"
        live = self._live if self._taken is not None else self._live_now()
        events = self.events()
        if self._taken is None and live is not None and not self._covers(live):
            live = None
        return traces_of(events, name, device, None if live is None else live.blocks)

    def stop(self) -> None:
        """Stop recording. Idempotent. A fork's child leaves its parent's file alone.

        Raises
        ------
        OSError
            The file cannot be completed; its events can be read all the same.

        Warns
        -----
        RuntimeWarning
            Events are missing: a ring has lost its oldest, the disk is full, or another process has
            shortened the file.
        """
        if not self._handle.running and self._handle.file < 0:
            return
        try:
            # Before the end: blocks have their tags only while something is recorded.
            live = self._live_now()
        finally:
            self._handle.end()
        if self._slots:
            self._taken = self.events()
            self._live = live if live is not None and self._covers(live) else None
        if gaps := self._gaps(shortened=self._handle.finish_file()):
            warnings.warn(gaps, RuntimeWarning, stacklevel=2)

    def _gaps(self, *, shortened: bool) -> str:
        """Describe the missing events; "" if there are none."""
        if os.getpid() != self._process:
            return ""
        if self.failed is not None:
            return f"{self.path} lacks {self.lost:,} events: {self.failed.strerror}"
        if shortened:
            return f"{self.path} lacks events: another process has shortened it"
        if not self.lost:
            return ""
        return (
            f"the recording has lost its {self.lost:,} oldest events: it holds {self._slots:,} "
            "(capacity=); a file (path=) holds all"
        )

    def __enter__(self) -> Self:
        if not self.running:
            raise ClosedError("this Recording has stopped: make another one to record again")
        return self

    def __repr__(self) -> str:
        where = self.path if self.path is not None else f"memory, the last {self._slots} events"
        return (
            f"<gpumem.observe.Recording into {where}: {'running' if self.running else 'stopped'}>"
        )

    def _live_now(self) -> LiveBlocks | None:
        """Return the live blocks of the recorded resources if a ring has lost events, else None."""
        if not self._slots or not self._handle.writing or not self.lost:
            return None
        written = self._handle.written
        try:
            found = list(self._resources_now())
        except (GpumemError, MemoryError):
            return None
        return LiveBlocks(written, [(of, block) for of, blocks in found for block in blocks])

    def _write_live(self) -> None:
        """Write the blocks live at the beginning into the file; later events complete them."""
        number = itertools.count()
        with contextlib.suppress(GpumemError, MemoryError):
            for resource, blocks in self._resources_now():
                for at in range(0, len(blocks), _BLOCKS_OF_A_TEXT):
                    text = text_of_live(resource, blocks[at : at + _BLOCKS_OF_A_TEXT])
                    self._handle.define(LIVE, min(next(number), _MAX_TEXTS), text)

    def _resources_now(self) -> Iterator[tuple[RecordedResource, list[Block]]]:
        """Yield each recorded resource and its live blocks."""
        keys = self._handle.keys
        for found in snapshot().resources:
            # Arenas of tags that were opened later are recorded with the arena.
            of_tag = found.kind == "arena" and found.parent is not None
            key = found.parent if of_tag else found.key
            if not found.upstreams and (keys is None or key in keys):
                yield RecordedResource(found.memory, found.kind, found.name), list(found.live)

    def _covers(self, live: LiveBlocks) -> bool:
        """Return whether the ring still holds every event since `live` was taken."""
        return self._handle.written - self._slots <= live.written


def record(
    resource: MemoryResource | GraphPool | None = None,
    path: str | os.PathLike[str] | None = None,
    *,
    capacity: int = 1 << 16,
    stacks: float | bool = 0.0,
    native: bool = False,
) -> Recording:
    """Record allocations, frees, growth, page moves and failures, from now on.

    Events of all callers are recorded: Python, PyTorch, CuPy and Numba over gpumem, and views that
    end on any thread. Without a recording, an allocation only reads one more word.

    Parameters
    ----------
    resource : MemoryResource or GraphPool, optional
        The resource to record; for an adaptor, the resources below it; of an arena the blocks of
        all tags. None: every resource of the process, also those made later.
    path : str or path, optional
        A file, which is overwritten, begins with the blocks that are live, and grows by 48 bytes
        per event, which `read` reads. If the process is killed, the file holds
        the events until then. None: a ring in memory.
    capacity : int, optional
        Number of events in a ring, rounded up to a power of two; new events overwrite the oldest.
    stacks : float or bool, optional
        Record the Python stack of this share of the allocations, 0.0 to 1.0; True is all of them,
        False none. Each takes the interpreter lock, and one or two microseconds with 40 frames; 20
        or more at its first time in a recording.
    native : bool, optional
        Include native frames in this recording's stacks.

    Returns
    -------
    Recording
        It has begun; `stop` it, or use it as a context manager.

    Raises
    ------
    TypeError
        `resource` is not a resource, or `native` is not a bool.
    ConfigError
        `capacity` or `stacks` is out of range.
    InUseError
        A resource is being recorded already, or another recording writes into the file.
    OSError
        The file cannot be made, or the disk is full.
    MemoryError
        The host has no memory for the ring, or to attach the recording.

    Notes
    -----
    A forked child writes nothing into its parent's file. For a resource with ``enable=False`` every
    block is also memory reserved from the driver.

    Examples
    --------
    >>> import gpumem, gpumem.observe
    >>> arena = gpumem.Arena("host")
    >>> with gpumem.observe.record(arena) as recording:
    ...     with gpumem.observe.tag("weights"):
    ...         buffer = arena.allocate(1000)
    ...     buffer.close()
    >>> [(event.action, event.nbytes, event.tag) for event in recording.events()
    ...  if event.action != "reserve"]
    [('alloc', 1000, 'weights'), ('free', 1000, None)]
    """
    if not is_integer(capacity, 1, MAX_EVENTS):
        raise ConfigError(f"invalid capacity = {capacity!r}: expected 1 to {MAX_EVENTS}")
    if not isinstance(stacks, bool) and not is_number(stacks, 0, 1):
        raise ConfigError(f"invalid stacks = {stacks!r}: expected 0.0 to 1.0")
    require("native", native, bool, "True or False")
    if isinstance(resource, str | os.PathLike):
        raise TypeError(
            f"invalid resource = {resource!r}: expected a MemoryResource, a GraphPool "
            f"or None; a path goes to path="
        )
    resources = None if resource is None else recorder.resources_below(resource)
    # Absolute, as it is read again, perhaps from another working directory.
    file = None if path is None else Path(path).absolute()
    return Recording(resources, file, capacity, round(stacks * _ALWAYS), native)


def _open_alone(path: Path) -> int:
    """Open an empty file that no other recording writes into."""
    require_writable(path)
    file = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.ftruncate(file, 0)
    except BaseException as error:
        os.close(file)
        if isinstance(error, BlockingIOError):
            raise InUseError(f"{path} is being written by another recording") from None
        raise
    return file
