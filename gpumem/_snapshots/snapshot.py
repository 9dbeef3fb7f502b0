"""The state of memory at one moment: every resource, region and block, and its owner."""

from __future__ import annotations

import json
import os
import pickle
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.lib.recfunctions import repack_fields
from numpy.typing import NDArray

from gpumem._events import recorder
from gpumem._events.events import Block, Events, stack_of
from gpumem._snapshots import columns
from gpumem._snapshots.json_form import resources_as_dict, resources_from_dict
from gpumem._snapshots.resources import (
    USED,
    Names,
    ResourceSnapshot,
    counted_once,
    resource_of,
)
from gpumem._snapshots.torch_form import torch_snapshot
from gpumem._support.arguments import require, require_each
from gpumem._support.brackets import parse_json
from gpumem._support.files import open_regular
from gpumem._support.sizes import format_size
from gpumem._support.texts import counted, shown
from gpumem.errors import SnapshotError

FORMAT = "gpumem.snapshot"
VERSION = 1
SCHEMA = Path(__file__).with_name("snapshot.schema.json")
"""The JSON schema of saved snapshots."""

# A dict of other keys, types or numbers raises one of these.
_MALFORMED = (KeyError, TypeError, ValueError, AttributeError, OverflowError, RecursionError)
_COUNTS = ("in_use", "requested_in_use", "reserved", "free", "cached", "pending_free", "num_allocs")


@dataclass(frozen=True)
class SnapshotDiff:
    """The changes from one snapshot to a later one of the same process.

    Attributes
    ----------
    counts : mapping of str to mapping of str to int
        Changes of the counts by the name of the resource; unchanged counts are left out.
    added, removed : tuple of (str, Block)
        Blocks that are used only in the later one, and only in the earlier one, with the name of
        their resource. A block that was freed and allocated again in between is in both.

    Examples
    --------
    >>> import gpumem
    >>> arena = gpumem.Arena("host", name="cache")
    >>> before = arena.snapshot()
    >>> buffer = arena.allocate(1000)
    >>> change = before.diff(arena.snapshot())
    >>> [(name, block.nbytes) for name, block in change.added], change.removed_bytes
    ([('cache', 1000)], 0)
    """

    counts: Mapping[str, Mapping[str, int]]
    added: tuple[tuple[str, Block], ...]
    removed: tuple[tuple[str, Block], ...]

    @property
    def added_bytes(self) -> int:
        """Bytes of the blocks that were added."""
        return sum(block.allocated_nbytes for _, block in self.added)

    @property
    def removed_bytes(self) -> int:
        """Bytes of the blocks that were removed."""
        return sum(block.allocated_nbytes for _, block in self.removed)

    def __str__(self) -> str:
        lines = [f"{counted(len(self.added), 'block')} of {format_size(self.added_bytes)} more"]
        lines += [
            f"{counted(len(self.removed), 'block')} of {format_size(self.removed_bytes)} less"
        ]
        for name, changes in self.counts.items():
            lines.append(f"{name}: " + ", ".join(f"{k} {v:+}" for k, v in changes.items()))
        return "\n".join(lines)


@dataclass(frozen=True)
class Snapshot:
    """Resources at one moment; made by `snapshot` and by each resource's ``snapshot()``.

    Attributes
    ----------
    resources : tuple of ResourceSnapshot
        The oldest first.
    time : int
        Nanoseconds since 1970.
    process : int
        Process id.

    Examples
    --------
    >>> import gpumem, gpumem.observe
    >>> arena = gpumem.Arena("host", name="cache")
    >>> buffer = arena.allocate(1000)
    >>> snapshot = arena.snapshot()
    >>> again = gpumem.observe.Snapshot.from_dict(snapshot.as_dict())
    >>> again.resource("cache").live == snapshot.resource("cache").live
    True
    """

    resources: tuple[ResourceSnapshot, ...]
    time: int
    process: int

    def __post_init__(self) -> None:
        require_each("resources", self.resources, ResourceSnapshot, "a ResourceSnapshot")

    @property
    def held(self) -> int:
        """The longest that threads could not allocate from a resource, in nanoseconds."""
        return max((resource.held for resource in self.resources), default=0)

    def resource(self, name: str) -> ResourceSnapshot:
        """Return the resource of a name.

        Raises
        ------
        LookupError
            There is none.
        """
        require("name", name, str, "a str")
        for found in self.resources:
            if found.name == name:
                return found
        known = ", ".join(sorted({found.name for found in self.resources}))
        raise LookupError(f"no resource is named {name!r}; there are: {known}")

    # ---- as JSON ---------------------------------------------------------------------------------

    def as_dict(self) -> dict[str, Any]:
        """Return plain values, as ``gpumem/_snapshots/snapshot.schema.json`` describes them."""
        return {
            "format": FORMAT,
            "version": VERSION,
            "time": self.time,
            "process": self.process,
            **resources_as_dict(self.resources),
        }

    def to_json(self) -> str:
        """Return `as_dict` as JSON."""
        return json.dumps(self.as_dict())

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the snapshot to a file, as JSON; a name that ends in ``.pickle`` in PyTorch's form.

        Raises
        ------
        OSError
            The file cannot be written.
        """
        if str(path).endswith(".pickle"):
            Path(path).write_bytes(pickle.dumps(self.to_torch(), protocol=4))
        else:
            Path(path).write_text(self.to_json(), "utf-8")

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Snapshot:
        """Read a snapshot that was saved as JSON.

        Raises
        ------
        OSError
            The file cannot be read.
        SnapshotError
            The file is not a snapshot, or is one of a newer version.
        """
        try:
            with open_regular(path) as file:
                plain = parse_json(file.read())
        except ValueError as error:
            raise SnapshotError(f"{path}: not a snapshot: {error}") from None
        return cls.from_dict(plain)

    @classmethod
    def from_dict(cls, plain: object) -> Snapshot:
        """Make a snapshot of the result of `as_dict`.

        Raises
        ------
        SnapshotError
            The file is not a snapshot, or is one of a newer version.
        """
        if not isinstance(plain, dict) or plain.get("format") != FORMAT:
            raise SnapshotError(f"not a snapshot: its format is not {FORMAT!r}")
        if plain.get("version") != VERSION:
            raise SnapshotError(
                f"a snapshot of version {shown(plain.get('version'))}, expected {VERSION}"
            )
        try:
            resources = resources_from_dict(plain)
            return cls(resources, int(plain["time"]), int(plain["process"]))
        except _MALFORMED as error:
            raise SnapshotError(f"not a snapshot: {type(error).__name__}: {error}") from None

    # ---- others ----------------------------------------------------------------------------------

    def to_torch(self, events: Events | None = None) -> dict[str, Any]:
        """Return it in the form of PyTorch's memory snapshots, for its tools.

        Parameters
        ----------
        events : Events, optional
            Recorded events, for the history that the tools draw.

        Returns
        -------
        dict
            Pickled, it opens in PyTorch's ``memory_viz`` and ``torch.cuda._memory_viz``.
        """
        require("events", events, (Events, type(None)), "Events or None")
        return torch_snapshot(self.resources, events)

    def diff(self, other: Snapshot) -> SnapshotDiff:
        """Return the changes from this one to a later one.

        Raises
        ------
        TypeError
            `other` is not a Snapshot.

        Examples
        --------
        >>> import gpumem
        >>> arena = gpumem.Arena("host")
        >>> before = arena.snapshot()
        >>> kept = arena.allocate(1000)
        >>> [(name, block.nbytes) for name, block in before.diff(arena.snapshot()).added]
        [('host:0', 1000)]
        """
        require("other", other, Snapshot, "a Snapshot")
        before = {found.key: found for found in self.resources}
        after = {found.key: found for found in other.resources}
        counts: dict[str, dict[str, int]] = {}
        added: list[tuple[str, Block]] = []
        removed: list[tuple[str, Block]] = []
        for key, found in (before | after).items():
            name, old, new = found.name, before.get(key), after.get(key)
            was, now = (each.counts if each else {} for each in (old, new))
            changes = {count: now.get(count, 0) - was.get(count, 0) for count in _COUNTS}
            if any(changes.values()):
                counts[name] = {count: by for count, by in changes.items() if by}
            added += [(name, block) for block in _only_in(new, old)]
            removed += [(name, block) for block in _only_in(old, new)]
        return SnapshotDiff(counts, tuple(added), tuple(removed))

    def by_owner(self) -> dict[str, int]:
        """Return bytes in use by tag, else by framework, of arenas and other sources of blocks.

        A block that is the memory of an arena with `source` counts as what is in use of it.
        """
        found: Counter[str] = Counter()
        for resource in counted_once(self.resources):
            found.update(resource.by_owner())
        return dict(found.most_common())

    def __repr__(self) -> str:
        blocks = sum(
            int(np.count_nonzero(found.records["state"] == USED)) for found in self.resources
        )
        resources = counted(len(self.resources), "resource")
        return f"<gpumem.observe.Snapshot: {resources}, {counted(blocks, 'used block')}>"


def snapshot(resource: object = None) -> Snapshot:
    """Return the present state of memory: every region and block.

    Other threads run, but cannot allocate from an arena while its metadata is copied
    (`ResourceSnapshot.held`), some milliseconds with a hundred thousand blocks.

    Parameters
    ----------
    resource : MemoryResource or GraphPool, optional
        The resource; for an adaptor, also everything below it; for an arena or a graph pool, also
        the memory of each of its tags, as a resource of its own with the arena as its `parent`.
        None: every live resource of the process, also arenas of which only views are left, but not
        adaptors.

    Returns
    -------
    Snapshot

    Raises
    ------
    TypeError
        `resource` is not a resource.
    ClosedError
        It belongs to the parent of a fork.

    Notes
    -----
    Blocks have a tag, thread, age and stack if they were allocated during a recording (`record`).
    Resources are copied one after another, not all at the same moment.

    Examples
    --------
    >>> import gpumem, gpumem.observe
    >>> arena = gpumem.Arena("host", name="weights")
    >>> buffer = arena.allocate(1000)
    >>> [block.nbytes for block in gpumem.observe.snapshot(arena).resources[0].live]
    [1000]
    """
    found = columns.all_of_them() if resource is None else _described(resource, {})
    names = _names_in(found)
    taken = time.monotonic_ns()  # the clock of the blocks' times
    resources = tuple(resource_of(plain, names, taken) for plain in found)
    return Snapshot(resources, time.time_ns(), os.getpid())


# ---- taking a snapshot ---------------------------------------------------------------------------


def _described(resource: Any, found: dict[int, dict[str, Any]]) -> list[dict[str, Any]]:
    """Describe a resource and all resources below it, each once."""
    plain = columns.describe(resource)
    if plain["key"] not in found:
        found[plain["key"]] = plain
        for each in (*columns.parts_of(resource), *getattr(resource, "upstreams", ())):
            _described(each, found)
    return list(found.values())


def _names_in(found: list[dict[str, Any]]) -> Names:
    """Look up the values that the numbers in all columns stand for."""
    numbers = {
        column: {n for plain in found for n in _numbers(plain["records"][column])}
        for column in ("tag", "framework", "thread", "stack")
    }
    labels, stacks = recorder.labels_and_stacks()
    return Names(
        {n: labels[n] for n in numbers["tag"]},
        {n: recorder.FRAMEWORKS[n] for n in numbers["framework"]},
        {n: recorder.thread_id(n) for n in numbers["thread"]},
        {n: stack_of(stacks[n]) for n in numbers["stack"]},
    )


def _numbers(column: NDArray[Any]) -> list[int]:
    """Return the numbers in a column except 0, which stands for nothing."""
    found: list[int] = np.unique(column[column != 0]).tolist()
    return found


def _only_in(one: ResourceSnapshot | None, other: ResourceSnapshot | None) -> Iterator[Block]:
    """Iterate over the used blocks of one that the other does not have."""
    if one is None:
        return
    used = one.records[one.records["state"] == USED]
    if other is not None:
        theirs = other.records[other.records["state"] == USED]
        mine = _identities(used)
        used = used[~np.isin(mine, _identities(theirs))]
    yield from one.iter_blocks(used)


def _identities(records: NDArray[np.void]) -> NDArray[np.void]:
    """Return an identity of each block, which differs from earlier blocks at its address."""
    return repack_fields(records[["address", "generation"]])
