"""Resources of a snapshot as plain values, and back; snapshot.schema.json describes the form."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from gpumem._events import recorder
from gpumem._events.events import Block, Frame
from gpumem._snapshots import columns
from gpumem._snapshots.resources import Names, ResourceSnapshot, resource_of
from gpumem._support.arguments import require

# Types of the values of a resource; NumPy would convert other types silently.
_KINDS: dict[str, tuple[type, ...]] = {
    "key": (int,),
    "name": (str,),
    "kind": (str,),
    "memory": (str,),
    "parent": (int, type(None)),
    "upstreams": (list,),
    "backing": (str, type(None)),
    "limit": (int,),
    "held_ns": (int,),
    "counts": (dict,),
    "regions": (list,),
    "pages": (list,),
    "blocks": (list,),
}


# These keys hold the attributes of the same names, unchanged.
_SAME = ("key", "name", "kind", "memory", "parent", "backing", "limit")


def resources_as_dict(resources: Sequence[ResourceSnapshot]) -> dict[str, Any]:
    """Return the values of the keys ``stacks`` and ``resources``."""
    places: dict[tuple[Frame, ...], int] = {}  # of stacks in their list
    plain = [_resource_as_dict(found, places) for found in resources]
    return {"stacks": [[list(frame) for frame in stack] for stack in places], "resources": plain}


def resources_from_dict(plain: dict[str, Any]) -> tuple[ResourceSnapshot, ...]:
    """Make resources of these values; exceptions from a malformed dict are not converted."""
    for key in ("stacks", "resources"):
        require(key, plain[key], list, "list")
    for found in plain["resources"]:
        for key, kinds in _KINDS.items():
            require(key, found[key], kinds, " or ".join(kind.__name__ for kind in kinds))
        require("source", found.get("source"), (int, type(None)), "int or None")
        require("reserved in counts", found["counts"].get("reserved"), int, "int")
        for number in (*found["counts"].values(), *found["upstreams"]):
            require("number in counts or upstreams", number, int, "int")
    taken = int(plain["time"])
    rows = _Rows(taken, len(plain["stacks"]))
    records = [
        np.array([rows.row_of(block) for block in found["blocks"]], columns.BLOCK)
        for found in plain["resources"]
    ]
    stacks = {
        number: tuple(Frame(str(file), int(line), str(name)) for file, line, name in frames)
        for number, frames in enumerate(plain["stacks"], start=1)
    }
    names = Names(
        {number: tag for tag, number in rows.tags.items()},
        dict(enumerate(recorder.FRAMEWORKS[1:], start=1)),
        {number: thread for thread, number in rows.threads.items()},
        stacks,
    )
    return tuple(
        resource_of(_described(found, blocks), names, taken)
        for found, blocks in zip(plain["resources"], records, strict=True)
    )


def _resource_as_dict(
    found: ResourceSnapshot, places: dict[tuple[Frame, ...], int]
) -> dict[str, Any]:
    generations = found.records["generation"].tolist()
    return {
        **{key: getattr(found, key) for key in _SAME},
        "upstreams": list(found.upstreams),
        "source": found.source,
        "held_ns": found.held,
        "counts": dict(found.counts),
        "regions": [vars(region).copy() for region in found.regions],
        "pages": [{"address": at, "nbytes": nbytes} for at, nbytes in found.pages.tolist()],
        "blocks": [
            _block_as_dict(block, generation, places)
            for block, generation in zip(found.iter_blocks(), generations, strict=True)
        ],
    }


def _block_as_dict(
    block: Block, generation: int, places: dict[tuple[Frame, ...], int]
) -> dict[str, Any]:
    plain: dict[str, Any] = {
        "address": block.address,
        "allocated_nbytes": block.allocated_nbytes,
        "state": block.state,
        "region": block.region,
        "stream": block.stream,
        "generation": generation,
    }
    if block.state == "used":
        plain["nbytes"] = block.nbytes
    if block.framework is not None:
        plain["framework"] = block.framework
    if block.age is not None:
        plain |= {"number": block.number, "age_ns": block.age, "thread": block.thread or 0}
    if block.tag is not None:
        plain["tag"] = block.tag
    if block.stack:
        plain["stack"] = places.setdefault(block.stack, len(places))
    return plain


class _Rows:
    """Makes rows of BLOCK, with numbers for tags and threads."""

    def __init__(self, taken: int, stacks: int) -> None:
        self.tags: dict[str, int] = {}
        self.threads: dict[int, int] = {}
        self._taken = taken
        self._stacks = stacks

    def row_of(self, block: dict[str, Any]) -> tuple[int, ...]:
        """Make one row; values that were not recorded are 0."""
        tag, framework, stack = block.get("tag"), block.get("framework"), block.get("stack")
        if stack is not None and not 0 <= stack < self._stacks:
            raise ValueError(f"stack is {stack}, expected 0..{self._stacks - 1}")
        recorded = "age_ns" in block
        return (
            block["address"],
            block.get("nbytes", 0),
            block["allocated_nbytes"],
            block["stream"],
            block["generation"],
            block.get("number", 0),
            self._taken - block["age_ns"] if recorded else 0,
            block["region"],
            _number(self.threads, int(block.get("thread", 0))) if recorded else 0,
            _number(self.tags, str(tag)) if tag is not None else 0,
            stack + 1 if stack is not None else 0,
            recorder.FRAMEWORKS.index(framework) if framework is not None else 0,
            columns.STATES.index(block["state"]),
        )


def _number(numbers: dict[Any, int], what: Any) -> int:
    return numbers.setdefault(what, len(numbers) + 1)


def _described(found: dict[str, Any], blocks: Any) -> dict[str, Any]:
    regions = [
        (region["address"], region["nbytes"], columns.REGION_KINDS.index(region["kind"]))
        for region in found["regions"]
    ]
    pages = [(page["address"], page["nbytes"]) for page in found["pages"]]
    return {
        **{key: found[key] for key in (*_SAME, "counts")},
        "upstreams": tuple(found["upstreams"]),
        "source": found.get("source"),
        "regions": np.array(regions, columns.REGION),
        "pages": np.array(pages, columns.PAGE),
        "records": blocks,
        "held": found["held_ns"],
    }
