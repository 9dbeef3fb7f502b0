"""A worker's results: tensors on the device as long as there is room, else in pinned host memory.

The worker's earlier mapping lies beneath. It keeps everything else, receives spilled results, and
writes to disk when host memory is short.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Container, Iterator, MutableMapping
from dataclasses import dataclass
from threading import RLock
from typing import Any

from gpumem._budget import Budget, Reservation
from gpumem._buffer.resource import MemoryResource
from gpumem._tensor import Tensor, copy, empty
from gpumem.device import MemoryInfo, MemoryKind
from gpumem.errors import BudgetExceededError
from gpumem.interop.memory._external_memory import ImportedMemory, mapping_of


@dataclass(frozen=True)
class Away:
    """Stands for a tensor of the device that is in host memory for now."""

    tensor: Tensor


@dataclass
class Result:
    """A result with tensors on the device."""

    value: Any
    others: list[int]  # addresses of the `OthersBlock`s that its other tensors lie in


@dataclass
class OthersBlock:
    """Another worker's block that is mapped here, whole even where a view of it was sent."""

    charge: Reservation
    results: int  # that lie in it


def pinned_copy(tensor: Tensor) -> Tensor:
    """Return a contiguous copy in pinned memory of the tensor's device."""
    memory = MemoryInfo(tensor.device, MemoryKind.HOST_ACCESSIBLE)
    made = empty(tensor.shape, tensor.dtype, memory=memory)
    copy(made, tensor)
    return made


class Store(MutableMapping[Any, Any]):
    """The mapping of a worker's results.

    Tensors are found in a value itself and in lists, tuples and dicts of it. Of a result with
    tensors of `memory` the least recently used is spilled first. Safe to use from many threads: a
    task that allocates spills on its own thread.

    Parameters
    ----------
    base : MutableMapping
        The worker's mapping so far; it may hold results, which stay there.
    resource : MemoryResource
        Allocates tensors that return to the device.
    budget : Budget
        Charged once for each block of another worker that results lie in.
    """

    def __init__(
        self, base: MutableMapping[Any, Any], resource: MemoryResource, budget: Budget
    ) -> None:
        self.base = base
        self._resource = resource
        self._place = (resource.memory.device, resource.memory.kind)
        self._budget = budget
        self._lock = RLock()  # an allocation under it may spill
        self._here: OrderedDict[Any, Result] = OrderedDict()  # the least recently used first
        self._away: dict[Any, int] = {}  # bytes of spilled results, by key
        self._others: dict[int, OthersBlock] = {}  # by address

    # ---- the mapping -----------------------------------------------------------------------------

    def __getitem__(self, key: Any) -> Any:
        with self._lock:
            found = self._here.get(key)
            if found is not None:
                self._here.move_to_end(key)
                return found.value
            value = self.base[key]
            if key in self._away:
                value = _replaced(value, Away, self._back)
                del self[key]
                self[key] = value
            return value

    def __setitem__(self, key: Any, value: Any) -> None:
        with self._lock:
            if key in self:
                del self[key]
            is_away = any(isinstance(each, Away) for each in _leaves(value))
            here = [each for each in _leaves(value) if self._is_here(each)]
            if is_away:
                self._put_away(key, value)
            elif here:
                self._put_here(key, value, here)
            else:
                self.base[key] = value

    def __delitem__(self, key: Any) -> None:
        with self._lock:
            found = self._here.pop(key, None)
            if found is None:
                del self.base[key]
                self._away.pop(key, None)
            else:
                self._leave(found.others)

    def __contains__(self, key: object) -> bool:
        return key in self._here or key in self.base

    def __iter__(self) -> Iterator[Any]:
        with self._lock:
            return iter([*self._here, *self.base])

    def __len__(self) -> int:
        return len(self._here) + len(self.base)

    def __getattr__(self, name: str) -> Any:
        # Dask queries the mapping beneath for the bytes that it holds and has spilled to disk.
        if name == "base":
            raise AttributeError(name)
        return getattr(self.base, name)

    # ---- spilled results ------------------------------------------------------------------------

    def spill(self, nbytes: int) -> int:
        """Move results to pinned memory, the least recently used first.

        It ends when `nbytes` are freed, or no result is left. A tensor that a task uses keeps its
        memory until the task is done, and Dask's profiler keeps one for a moment, with the frames
        that it samples: the next result is spilled in its place. Returns the bytes that were freed.
        """
        freed = 0
        with self._lock:
            while freed < nbytes and self._here:
                before = self._resource.stats().in_use + self.imported
                self._spill_first()
                freed += before - self._resource.stats().in_use - self.imported
        return freed

    @property
    def spilled(self) -> int:
        """Bytes of the tensors that are away from the device."""
        with self._lock:
            return sum(self._away.values())

    def blocks(self, resources: Container[MemoryResource]) -> tuple[int, set[int]]:
        """Return how many blocks of these resources results lie in, and the ids of all blocks.

        No buffer outlives the lock here, so that a spill by another thread frees memory at once.
        """
        with self._lock:
            return self._blocks(resources)

    @property
    def imported(self) -> int:
        """Bytes of the other workers' blocks that results lie in."""
        with self._lock:
            return sum(each.charge.nbytes for each in self._others.values())

    def _put_here(self, key: Any, value: Any, here: list[Tensor]) -> None:
        imported = [each for each in here if isinstance(each.buffer.resource, ImportedMemory)]
        blocks = dict(mapping_of(each.buffer) for each in imported if not each.buffer.closed)
        entered: list[int] = []
        try:
            for address, nbytes in blocks.items():
                self._enter(address, nbytes)
                entered.append(address)
        except BudgetExceededError:
            self._leave(entered)
            self._put_away(key, _replaced(value, Tensor, self._sent_away))
            return
        self._here[key] = Result(value, entered)

    def _enter(self, address: int, nbytes: int) -> None:
        """Count a result that lies in another worker's block; the first one charges it."""
        block = self._others.get(address)
        if block is None:
            charge = self._budget.reserve(nbytes)  # which may spill other results
            charge.commit()
            block = self._others[address] = OthersBlock(charge, 0)
        block.results += 1

    def _leave(self, addresses: list[int]) -> None:
        for address in addresses:
            block = self._others[address]
            block.results -= 1
            if not block.results:
                self._others.pop(address).charge.release()

    def _blocks(self, resources: Container[MemoryResource]) -> tuple[int, set[int]]:
        leaves = (leaf for each in self._here.values() for leaf in _leaves(each.value))
        found = {id(leaf.buffer): leaf.buffer for leaf in leaves if self._is_here(leaf)}
        opened = {key: each for key, each in found.items() if not each.closed}
        own = sum(each.nbytes > 0 and each.resource in resources for each in opened.values())
        return own, set(opened)

    def _spill_first(self) -> None:
        key = next(iter(self._here))
        # Made before the result is removed: without room for it nothing changes.
        value = _replaced(self._here[key].value, Tensor, self._sent_away)
        del self[key]
        self._put_away(key, value)

    def _put_away(self, key: Any, value: Any) -> None:
        self.base[key] = value
        self._away[key] = sum(
            each.tensor.nbytes for each in _leaves(value) if isinstance(each, Away)
        )

    def _is_here(self, leaf: Any) -> bool:
        return isinstance(leaf, Tensor) and (leaf.device, leaf.memory.kind) == self._place

    def _sent_away(self, tensor: Tensor) -> Any:
        return Away(pinned_copy(tensor)) if self._is_here(tensor) else tensor

    def _back(self, away: Away) -> Tensor:
        made = empty(away.tensor.shape, away.tensor.dtype, resource=self._resource)
        copy(made, away.tensor)
        return made


def _leaves(value: Any) -> Iterator[Any]:
    if type(value) in (list, tuple):
        for each in value:
            yield from _leaves(each)
    elif type(value) is dict:
        yield from _leaves(list(value.values()))
    else:
        yield value


def _replaced(value: Any, kind: type, by: Callable[[Any], Any]) -> Any:
    """Return the value with each leaf of a type replaced."""
    if type(value) in (list, tuple):
        return type(value)(_replaced(each, kind, by) for each in value)
    if type(value) is dict:
        return {key: _replaced(each, kind, by) for key, each in value.items()}
    return by(value) if isinstance(value, kind) else value
