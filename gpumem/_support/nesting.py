"""Resources that get their memory from other resources of the process: which bytes count where."""

from __future__ import annotations

from collections.abc import Iterable, Mapping


def addresses_of_others(
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
