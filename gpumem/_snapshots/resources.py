"""One resource of a snapshot: its regions, its blocks and their owners."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gpumem._events.events import Block, Frame
from gpumem._snapshots import columns

USED = columns.STATES.index("used")


@dataclass(frozen=True)
class Region:
    """Memory, or addresses, that a resource has reserved from the driver.

    Attributes
    ----------
    address, nbytes : int
    kind : str
        ``"region"``; ``"persistent"``: of a single block; ``"range"``: addresses for pages;
        ``"virtual"``: a page of a virtual tensor, all of it one block.

    Examples
    --------
    >>> import gpumem
    >>> arena = gpumem.Arena("host", {"backing": "regions"})
    >>> weights = arena.allocate_persistent(1 << 20)
    >>> [region.kind for region in arena.snapshot().resources[0].regions]
    ['persistent']
    """

    address: int
    nbytes: int
    kind: str


@dataclass(frozen=True)
class Names:
    """The values that numbers in columns stand for."""

    tags: Mapping[int, str] = field(default_factory=dict)
    frameworks: Mapping[int, str] = field(default_factory=dict)
    threads: Mapping[int, int] = field(default_factory=dict)
    stacks: Mapping[int, tuple[Frame, ...]] = field(default_factory=dict)


@dataclass(frozen=True)
class ResourceSnapshot:
    """One resource of a snapshot.

    Attributes
    ----------
    key : int
        Identifies it in this process while it lives.
    name, kind, memory : str
        As in recorded events; the kind of an adaptor is its class.
    parent : int or None
        Key of the arena that a graph pool belongs to.
    upstreams : tuple of int
        Keys of the resources below an adaptor.
    source : int or None
        Key of the resource that the memory of an arena comes from (`Arena` with `source`), below
        adaptors; each region of the arena lies in a block of it.
    backing : str or None
        Backing of an arena, ``"regions"`` or ``"virtual"``.
    limit : int
        Limit of reserved bytes; 0: no limit.
    counts : mapping of str to int
        Bytes and counts: ``in_use``, ``requested_in_use``, ``reserved``, ``max_in_use``,
        ``max_reserved``, ``num_allocs``, ``num_frees``; of an arena also ``free``, ``cached`` (in
        the caches of threads), ``pending_free``, ``waiting`` (free, but marked with a stream),
        ``holes``, ``largest_free``.
    regions : tuple of Region
    pages : ndarray of (address, nbytes)
        Physical pages of a paged arena, where they are mapped.
    records : ndarray
        Every block as a row: ``address``, ``nbytes``, ``allocated_nbytes``, ``stream``,
        ``generation``, ``number``, ``time``, ``region``, ``thread``, ``tag``, ``stack``,
        ``framework``, ``state``.
    held : int
        Nanoseconds for which other threads could not allocate from it.

    Examples
    --------
    >>> import gpumem
    >>> arena = gpumem.Arena("host")
    >>> buffers = [arena.allocate(nbytes) for nbytes in (1000, 2000)]
    >>> (found,) = arena.snapshot().resources
    >>> found.counts["requested_in_use"], found.by_owner()
    (3000, {'untagged': 3072})
    """

    key: int
    name: str
    kind: str
    memory: str
    parent: int | None
    upstreams: tuple[int, ...]
    source: int | None
    backing: str | None
    limit: int
    counts: Mapping[str, int]
    regions: tuple[Region, ...]
    pages: NDArray[np.void]
    records: NDArray[np.void]
    held: int
    names: Names = field(repr=False)
    taken: int = field(repr=False)  # its time, on the clock of the column `time`

    @property
    def blocks(self) -> list[Block]:
        """Every block, region by region in the order of addresses."""
        return list(self.iter_blocks())

    @property
    def live(self) -> list[Block]:
        """The blocks that are used."""
        return list(self.iter_blocks(self.records[self.records["state"] == USED]))

    def iter_blocks(self, records: NDArray[np.void] | None = None) -> Iterator[Block]:
        """Make a `Block` of each row; of all by default."""
        names = self.names
        for row in (self.records if records is None else records).tolist():
            address, nbytes, allocated, stream, _, number, at, region, thread, tag, stack = row[:11]
            yield Block(
                address,
                nbytes,
                allocated,
                columns.STATES[row[12]],
                region,
                stream,
                names.frameworks.get(row[11]),
                names.tags.get(tag),
                names.stacks.get(stack, ()),
                names.threads.get(thread),
                number if at else None,
                self.taken - at if at else None,
            )

    def by_owner(self) -> dict[str, int]:
        """Return bytes in use by tag, else by framework, the largest first."""
        return self._by(lambda tag, framework: tag or framework or "untagged")

    def by_framework(self) -> dict[str, int]:
        """Return bytes in use by framework where that is known, the largest first."""
        found = self._by(lambda _, framework: framework or "")
        found.pop("", None)
        return found

    def _by(self, owner_of: Any) -> dict[str, int]:
        used = self.records[self.records["state"] == USED]
        pairs = used["tag"].astype(np.int64) << 8 | used["framework"]
        found: Counter[str] = Counter()
        for pair in np.unique(pairs).tolist():
            owner = owner_of(self.names.tags.get(pair >> 8), self.names.frameworks.get(pair & 255))
            found[owner] += int(used["allocated_nbytes"][pairs == pair].sum())
        return dict(found.most_common())


def counted_once(resources: Iterable[ResourceSnapshot]) -> list[ResourceSnapshot]:
    """Leave out adaptors, and blocks that are regions of arenas with a source among the others."""
    found = [each for each in resources if not each.upstreams]
    sources = {each.key: each.source for each in found}
    regions = {
        each.key: [region.address for region in each.regions if region.nbytes]
        for each in found
        if each.source is not None
    }
    return [_without(each, _addresses_of_others(each.key, sources, regions)) for each in found]


def _without(resource: ResourceSnapshot, addresses: list[int]) -> ResourceSnapshot:
    """Leave out the blocks in which an address lies."""
    if not addresses:
        return resource
    begins = resource.records["address"]
    ends = begins + resource.records["allocated_nbytes"]
    kept = np.ones(len(begins), bool)
    for address in addresses:
        kept &= (np.uint64(address) < begins) | (np.uint64(address) >= ends)
    return replace(resource, records=resource.records[kept])


def resource_of(plain: Mapping[str, Any], names: Names, taken: int) -> ResourceSnapshot:
    """Make one of the dict that `columns.describe` returns."""
    regions = tuple(
        Region(address, nbytes, columns.REGION_KINDS[kind])
        for address, nbytes, kind in plain["regions"].tolist()
    )
    return ResourceSnapshot(**{**plain, "regions": regions}, names=names, taken=taken)


def _addresses_of_others(
    key: int, sources: Mapping[int, int | None], regions: Mapping[int, Iterable[int]]
) -> list[int]:
    """Return where the regions begin that may lie in blocks of a resource.

    The region's bytes in use count instead of the block that it lies in.

    Parameters
    ----------
    key : int
        Of the resource.
    sources : mapping of int to int or None
        By key of a resource, the key of the resource that supplies its memory.
    regions : mapping of int to addresses
        By key, the addresses of the regions of each resource that another one supplies.
    """
    # Its own regions, and those that its memory comes from, begin where blocks of its own do.
    below: set[int] = set()
    at: int | None = key
    while at is not None and at not in below:
        below.add(at)
        at = sources.get(at)
    return [address for each in regions.keys() - below for address in regions[each]]
