"""Blocks of a cache that grows and shrinks: numbers for an engine, memory in virtual tensors.

`BlockPool` hands out block numbers. A block is a row (or some) of every tensor of the pool, such as
the keys and the values of each layer: block 7 lies at row 7 of all of them. The pool decides which
numbers have memory; it never touches bytes and queues no work. The engine does both.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, SupportsIndex, TypeAlias

import numpy as np
import numpy.typing as npt

from gpumem._support.arguments import refuse, require, require_integer
from gpumem._support.forks import ForkLock
from gpumem._support.sizes import format_size
from gpumem._support.texts import counted
from gpumem._tensor import VirtualTensor
from gpumem._tensor.row_groups import BARE, COMING, HELD, RowGroups, blocks_of_pages, enough
from gpumem.errors import OutOfMemoryError

__all__ = ["BlockPool"]

Blocks: TypeAlias = npt.NDArray[np.int64]
Numbers: TypeAlias = Sequence[SupportsIndex] | npt.NDArray[np.integer[Any]]
OnEvict: TypeAlias = Callable[[Blocks], object]

# Of a block. TARGET: bytes are about to be copied there; GOING: `on_evict` is told of it.
FREE, LIVE, CACHED, TARGET, GOING = range(5)


class BlockPool:
    """Numbers of blocks over virtual tensors that grow and shrink with them.

    Blocks are handed out so that whole pages become free: a *group* is the blocks that fill a whole
    number of pages in every tensor. `allocate` keeps the blocks of a sequence together, since they
    end together, and fills the lowest groups with what is left over. Groups get memory by one
    commit for each tensor and run of groups. A group without a block loses its memory, by one
    release likewise, behind the work that is queued on the tensors' streams (see
    `gpumem.VirtualTensor`). What long-lived blocks hold half empty `compact` frees; with few blocks
    a group, as in one tensor whose row has the keys and values of all layers, that is little.

    A block has a count of references, so that requests with the same beginning share blocks. With
    ``free(blocks, cache=True)`` a block whose count ends keeps its bytes until it is evicted:
    `share` brings it back; otherwise it goes when memory is wanted, the blocks that free a group
    first.

    Safe to use from many threads; it is their engine's matter that work on freed blocks is queued
    before. An `allocate` that waits for memory holds up only others that lack memory.

    Parameters
    ----------
    tensors : sequence of VirtualTensor
        Different ones, with the same number of rows; nothing else commits or releases their rows.
    block_rows : int, optional
        Rows of a block.
    spare : int, optional
        Groups without blocks that keep their memory, so that a pool whose size swings by a few
        blocks does not call the driver each time.
    on_evict : callable, optional
        ``on_evict(blocks)`` is called with cached blocks that the pool is about to give to others,
        so that the engine forgets their contents; if it raises, they stay cached. It may use the
        pool, but must not wait for another thread's `allocate`.

    Attributes
    ----------
    tensors : tuple of VirtualTensor
    capacity : int
        Blocks that there can be.
    group_blocks : int
        Blocks of a group.
    block_nbytes : int
        Bytes of a block in all tensors together.

    Raises
    ------
    TypeError, ValueError
        An invalid argument.

    Examples
    --------
    >>> import gpumem
    >>> from gpumem.kv import BlockPool
    >>> arena = gpumem.Arena("host")
    >>> keys, values = (arena.virtual((4096, 16, 512), "float32", step=64) for _ in range(2))
    >>> pool = BlockPool([keys, values])
    >>> pool.group_blocks, pool.held_nbytes
    (64, 0)
    >>> prompt = pool.allocate(100)
    >>> pool.held_nbytes == pool.floor_nbytes == 2 * 128 * 32768
    True
    >>> pool.free(prompt[10:])
    >>> [(int(a), int(b)) for a, b in pool.compact()], pool.held_nbytes
    ([], 4194304)
    """

    def __init__(
        self,
        tensors: Iterable[VirtualTensor],
        *,
        block_rows: int = 1,
        spare: int = 0,
        on_evict: OnEvict | None = None,
    ) -> None:
        require("tensors", tensors, Iterable, "VirtualTensors")
        self.tensors = tuple(tensors)
        for tensor in self.tensors:
            require("tensors", tensor, VirtualTensor, "VirtualTensors")
        if not self.tensors:
            raise ValueError("a BlockPool needs at least one tensor")
        rows = [len(tensor) for tensor in self.tensors]
        most = min(rows)
        if most != max(rows):
            raise ValueError(f"the tensors of a BlockPool must have equally many rows, not {rows}")
        for number, tensor in enumerate(self.tensors):
            if any(tensor is other for other in self.tensors[:number]):
                raise ValueError(f"{tensor!r} is there twice: a BlockPool needs different tensors")
        require_integer("block_rows", block_rows, 1, most)
        require_integer("spare", spare, 0, most)
        if on_evict is not None and not callable(on_evict):
            refuse("on_evict", on_evict, "a callable or None")
        self.block_rows = block_rows
        self.capacity = most // block_rows
        self.block_nbytes = sum(tensor.row_nbytes * block_rows for tensor in self.tensors)
        self.group_blocks = min(blocks_of_pages(self.tensors, block_rows), self.capacity)
        self.spare = spare
        self.on_evict = on_evict
        self._references = np.zeros(self.capacity, np.int32)
        self._states = np.zeros(self.capacity, np.int8)
        self._freed_at = np.zeros(self.capacity, np.int64)  # of cached blocks, a running number
        self._groups = RowGroups(self.tensors, block_rows, self.group_blocks, self.capacity)
        self._sizes, self._taken = self._groups.sizes, self._groups.taken
        self._memory = self._groups.memory
        # The moves that are planned: where a TARGET's bytes come from, and where an origin's go to,
        # as long as it is not freed; -1: nowhere.
        self._planned_from = np.full(self.capacity, -1, np.int64)
        self._planned_to = np.full(self.capacity, -1, np.int64)
        self._turn = 0
        self._growth = ForkLock()  # giving memory to groups; taken before the other one
        self._lock = ForkLock()  # all of the above: no wait for memory, no callback under it

    # ---- what it holds ---------------------------------------------------------------------------

    @property
    def live(self) -> int:
        """Blocks with references."""
        return int((self._states == LIVE).sum())

    @property
    def cached(self) -> int:
        """Blocks without references that keep their bytes."""
        return int((self._states == CACHED).sum())

    @property
    def held_nbytes(self) -> int:
        """Bytes that the tensors hold."""
        return sum(tensor.held_nbytes for tensor in self.tensors)

    @property
    def floor_nbytes(self) -> int:
        """Bytes that blocks with contents need at least: of each tensor, rounded up to pages."""
        taken = int(self._taken.sum()) * self.block_rows
        pages = ((-(-taken * t.row_nbytes // t.page_nbytes), t.page_nbytes) for t in self.tensors)
        return sum(count * size for count, size in pages)

    def references(self, blocks: Numbers) -> npt.NDArray[np.int32]:
        """Return the count of references of each block; 0 for cached and free ones."""
        return self._references[self._read(blocks)]

    def __repr__(self) -> str:
        return (
            f"<gpumem.kv.BlockPool of {self.capacity} blocks in {len(self.tensors)} tensors: "
            f"{self.live} live, {self.cached} cached, {format_size(self.held_nbytes)} held>"
        )

    # ---- blocks ----------------------------------------------------------------------------------

    def allocate(self, count: int, *, near: Numbers = ()) -> Blocks:
        """Hand out blocks, with one reference each.

        First from the groups of `near`. Then as many as fill whole groups from empty ones, which
        get memory if that takes no wait and no callback. The rest from the lowest groups with room:
        address-ordered first fit (Wilson et al., "Dynamic Storage Allocation: A Survey and Critical
        Review", 1995). If memory is lacking, groups get it; if that is refused, cached blocks are
        evicted, and it is tried again.

        Parameters
        ----------
        count : int
            How many.
        near : sequence of int, optional
            Blocks that end at the same time: those of the sequence. The last comes first.

        Returns
        -------
        ndarray of int64
            Their numbers. Their bytes are arbitrary.

        Raises
        ------
        TypeError, ValueError
            `count` is not an integer, or negative.
        OutOfMemoryError
            There are not so many numbers, or the tensors got no memory; nothing but cached blocks
            has changed.
        DriverError, SuspendedError, ClosedError
            As `VirtualTensor.commit`.

        Examples
        --------
        >>> import gpumem
        >>> from gpumem.kv import BlockPool
        >>> pool = BlockPool([gpumem.Arena("host").virtual((1024, 1 << 20), "int8", step=4)])
        >>> pool.allocate(3), pool.held_nbytes
        (array([0, 1, 2]), 4194304)
        """
        require_integer("count", count, 0)
        groups = self._read(near)[::-1] // self.group_blocks
        beside = groups[np.sort(np.unique(groups, return_index=True)[1])]
        found = self._take_at_once(count, beside)
        if found is not None:
            return found
        # One thread at a time gives memory to groups: the next one takes what this one leaves.
        with self._growth:
            while found is None:
                try:
                    found = self._grow(count, beside)
                except OutOfMemoryError:
                    with self._lock:
                        found = self._take(count, beside)  # others may have freed some meanwhile
                        missing = self._groups.missing(count) if found is None else 0
                        going = self._begin_eviction(self._eviction_order()[0][:missing])
                        if found is None and not len(going):
                            # What earlier turns have brought.
                            self._groups.give_back(self._groups.idle(self.spare))
                            raise
                    self._evict(going, self.spare)
            return found

    def share(self, blocks: Numbers) -> None:
        """Add a reference to each block, live or cached.

        Raises
        ------
        TypeError, ValueError
            No such blocks, or some are free; nothing is changed.

        Examples
        --------
        >>> import gpumem
        >>> from gpumem.kv import BlockPool
        >>> pool = BlockPool([gpumem.Arena("host").virtual((1024, 4096), "int8")])
        >>> prefix = pool.allocate(2)
        >>> pool.share(prefix)
        >>> pool.free(prefix)
        >>> pool.live
        2
        """
        with self._lock:
            found = self._read(blocks)
            self._require(found, "shared", LIVE, CACHED)
            self._states[found] = LIVE
            np.add.at(self._references, found, 1)

    def free(self, blocks: Numbers, *, cache: bool = False) -> None:
        """Drop a reference to each block; groups that have no block left lose their memory.

        Parameters
        ----------
        blocks : sequence of int
            The same block may be there twice, if it has two references.
        cache : bool, optional
            What has no reference left keeps its bytes until it is evicted.

        Raises
        ------
        TypeError, ValueError
            No such blocks, or more than there are references; nothing is changed.
        InUseError
            A group would lose its memory, but a tensor of some of its rows, or a view of one, is
            alive; nothing is changed.

        Examples
        --------
        >>> import gpumem
        >>> from gpumem.kv import BlockPool
        >>> pool = BlockPool([gpumem.Arena("host").virtual((1024, 4096), "int8")])
        >>> blocks = pool.allocate(2)
        >>> pool.free(blocks, cache=True)
        >>> pool.live, pool.cached, pool.held_nbytes
        (0, 2, 2097152)
        >>> pool.evict(2).tolist(), pool.held_nbytes
        ([0, 1], 0)
        """
        require("cache", cache, bool, "True or False")
        with self._lock:
            found = self._read(blocks)
            self._require(found, "freed", LIVE)
            dropped, times = np.unique(found, return_counts=True)
            short = self._references[dropped] < times
            if short.any():
                block, count = dropped[short][0], times[short][0]
                raise ValueError(
                    f"block {block} is freed {count} times, but has "
                    f"{counted(int(self._references[block]), 'reference')}"
                )
            ended = dropped[self._references[dropped] == times]
            if not cache:  # what may be refused comes first
                idle = self._groups.idle(self.spare, ended)
                idle = idle[np.isin(idle, ended // self.group_blocks)]
                self._groups.release(idle)
            self._references[dropped] -= times.astype(np.int32)
            if cache:
                self._states[ended] = CACHED
                self._turn += 1
                self._freed_at[ended] = self._turn
            else:
                self._release(ended, self.spare)

    # ---- eviction --------------------------------------------------------------------------------

    def eviction_order(self, count: int | None = None) -> Blocks:
        """Return cached blocks in the order in which they are best evicted.

        First those of groups without live blocks, with the fewest blocks to evict: each of them
        gives pages back. Then the others, the longest unused first.

        Examples
        --------
        >>> import gpumem
        >>> from gpumem.kv import BlockPool
        >>> pool = BlockPool([gpumem.Arena("host").virtual((1024, 1 << 20), "int8", step=2)])
        >>> blocks = pool.allocate(4)
        >>> pool.free(blocks[[0, 2, 3]], cache=True)    # pages of blocks 0 and 1, 2 and 3
        >>> pool.eviction_order()
        array([2, 3, 0])
        """
        require_integer("count", 0 if count is None else count, 0)
        with self._lock:
            return self._eviction_order()[0][:count]

    def _eviction_order(self) -> tuple[Blocks, int]:
        """Return it, and how many of its first blocks lie in groups without live ones."""
        cached = np.flatnonzero(self._states == CACHED)
        groups = cached // self.group_blocks
        held = np.bincount(groups, minlength=len(self._taken))
        # A group with anything else than cached blocks stays, whatever is evicted.
        stays = (held < self._taken)[groups]
        cost = np.where(stays, self._freed_at[cached], held[groups])
        order = np.lexsort((cached, np.where(stays, 0, groups), cost, stays))
        return cached[order], int((~stays).sum())

    def evict(self, count: int) -> Blocks:
        """Free up to so many cached blocks, in `eviction_order`, and return them.

        Groups that have no block left lose their memory, all but `spare` ones, later if a tensor of
        some of their rows is alive. Calls `on_evict` before.

        Examples
        --------
        See `free`.
        """
        require_integer("count", count, 0)
        with self._lock:
            going = self._begin_eviction(self._eviction_order()[0][:count])
        self._evict(going, self.spare)
        return going

    def _begin_eviction(self, blocks: Blocks) -> Blocks:
        self._states[blocks] = GOING
        self._planned_to[blocks] = -1
        return blocks

    def _evict(self, going: Blocks, spare: int) -> int:
        """Free them, without the lock; return the bytes of the groups that lost their memory."""
        if not len(going):
            return 0
        try:
            if self.on_evict is not None:
                self.on_evict(going)
            with self._lock:
                groups = self._release(going, spare)
        except BaseException:
            with self._lock:
                self._states[going[self._states[going] == GOING]] = CACHED
            raise
        return self._nbytes_of(groups)

    def relieve(self, nbytes: int) -> int:
        """Evict cached blocks until pages of so many bytes are unused; return the bytes.

        Spare groups go first. Then whole groups with cached blocks; those beside live ones stay, as
        they would give nothing back.
        For `VirtualTensor.on_pressure` and `Budget.on_pressure`.

        Examples
        --------
        >>> import gpumem
        >>> from gpumem.kv import BlockPool
        >>> arena = gpumem.Arena("host", {"max_mem": 8 << 20})
        >>> rows = arena.virtual((64, 1 << 20), "int8", step=2)
        >>> pool = BlockPool([rows])
        >>> rows.on_pressure = lambda tensor, nbytes: pool.relieve(nbytes)
        >>> pool.free(pool.allocate(8), cache=True)
        >>> arena.allocate(4 << 20).nbytes, pool.cached
        (4194304, 4)
        """
        require_integer("nbytes", nbytes, 0)
        with self._lock:
            given = self._nbytes_of(self._groups.give_back(self._groups.idle(0)))
            order, useful = self._eviction_order()
            groups = order[:useful] // self.group_blocks
            count = min(-(-max(nbytes - given, 0) // self.block_nbytes), useful)
            going = self._begin_eviction(order[:useful][np.isin(groups, groups[:count])])
        return given + self._evict(going, 0)

    # ---- compaction ------------------------------------------------------------------------------

    def compact(self, limit: int | None = None) -> Blocks:
        """Plan moves after which blocks with contents lie in as few groups as they fit into.

        The emptiest groups are emptied into the fullest. The numbers moved to are taken from here
        on: copy the rows in every tensor, on the streams that use them, change the engine's
        tables, then call `moved` with the same pairs.

        Parameters
        ----------
        limit : int, optional
            The most moves. Groups are emptied whole: fewer moves empty fewer groups.

        Returns
        -------
        ndarray of int64, of shape (moves, 2)
            From, to.

        Examples
        --------
        >>> import gpumem
        >>> from gpumem.kv import BlockPool
        >>> rows = gpumem.Arena("host").virtual((64, 1 << 20), "int8", step=4)
        >>> pool = BlockPool([rows])
        >>> blocks = pool.allocate(8)
        >>> pool.free(blocks[[0, 1, 5, 6, 7]])      # 2, 3 and 4 are left, in two pages
        >>> moves = pool.compact()
        >>> moves.tolist()
        [[4, 0]]
        >>> for here, there in moves:
        ...     rows.full.numpy()[there] = rows.full.numpy()[here]
        >>> pool.moved(moves)
        >>> pool.held_nbytes == pool.floor_nbytes == 4 << 20
        True
        """
        require_integer("limit", 0 if limit is None else limit, 0)
        with self._lock:
            order = np.argsort(-self._taken, kind="stable")
            order = order[self._taken[order] > 0]
            needed = enough(self._sizes[order], int(self._taken.sum()))
            kept, emptied = order[:needed], order[needed:][::-1]
            targets = self._free_in(kept, self.capacity)
            sources: list[Blocks] = []
            count = 0
            for group in emptied:
                inside = self._blocks_of(np.array([group]))
                # What is being copied to cannot be copied from, and nothing moves twice.
                blocks = inside[np.isin(self._states[inside], (LIVE, CACHED))]
                blocks = blocks[self._planned_to[blocks] < 0]
                more = count + len(blocks)
                if more > len(targets) or (limit is not None and more > limit):
                    break
                sources.append(blocks)
                count = more
            origin = np.concatenate([np.empty(0, np.int64), *sources])
            targets = targets[:count]
            self._states[targets] = TARGET
            self._planned_from[targets], self._planned_to[origin] = origin, targets
            np.add.at(self._taken, targets // self.group_blocks, 1)
            return np.stack([origin, targets], axis=1)

    def moved(self, moves: Blocks | Sequence[Sequence[int]]) -> None:
        """End the moves that `compact` planned: references go to the new numbers.

        A block that was freed meanwhile is not moved, whoever has its number by now; the number
        that it would have got is free.

        Raises
        ------
        TypeError, ValueError
            Not moves of `compact`, or some that were ended before; nothing is changed.
        """
        pairs = np.asarray(moves)
        if pairs.size and (pairs.ndim != 2 or pairs.shape[1] != 2):
            raise ValueError(f"invalid shape of moves = {pairs.shape}: expected (moves, 2)")
        origin, targets = self._read(pairs).reshape(-1, 2).T
        with self._lock:
            wrong = self._planned_from[targets] != origin
            once = np.unique(targets, return_index=True)[1]
            wrong[np.setdiff1d(np.arange(len(targets)), once)] = True
            if wrong.any():
                here, there = origin[wrong][0], targets[wrong][0]
                raise ValueError(
                    f"block {here} cannot be moved to {there}: expected pairs of compact, each once"
                )
            kept = self._planned_to[origin] == targets  # the others were freed
            here, there = origin[kept], targets[kept]
            for values in (self._references, self._freed_at, self._states):
                values[there] = values[here]
            self._references[here] = 0
            self._planned_from[targets] = -1
            self._release(np.concatenate([here, targets[~kept]]), self.spare)

    # ---- memory ----------------------------------------------------------------------------------

    def trim(self) -> None:
        """Take the memory of all groups without blocks, or live tensors of rows; spare ones too."""
        with self._lock:
            # Those too for which the host had no memory when they were to lose it.
            self._groups.give_back(np.flatnonzero((self._taken == 0) & (self._memory != COMING)))

    def _take(self, count: int, beside: Blocks) -> Blocks | None:
        """Hand out free blocks with memory; None if there are less."""
        if self._groups.missing(count) > 0:
            return None
        found = self._free_in(self._groups.to_fill(count, beside), count)
        self._states[found] = LIVE
        self._references[found] = 1
        np.add.at(self._taken, found // self.group_blocks, 1)
        return found

    def _take_at_once(self, count: int, beside: Blocks) -> Blocks | None:
        """Hand out blocks, or None, without a wait for memory, of whole groups if it is there."""
        with self._lock:
            groups = self._groups.wished(count, beside)
            if not len(groups) or not self._growth.enter_if_free():
                return self._take(count, beside)
            self._memory[groups] = COMING
        try:
            found = self._commit(groups, count, beside, needed=False)
        finally:
            self._growth.leave()
        with self._lock:
            return self._take(count, beside) if found is None else found

    def _grow(self, count: int, beside: Blocks) -> Blocks | None:
        """Give memory to groups and hand out blocks; None if others took too many meanwhile."""
        with self._lock:
            found = self._take(count, beside)
            if found is not None:
                return found
            groups, missing = self._groups.to_bring(count)
            if missing:
                raise OutOfMemoryError(
                    f"a BlockPool of {self.capacity} blocks lacks {missing} of those asked for: "
                    f"{self.live} are live, {self.cached} cached; free some, or make a larger pool"
                )
            self._memory[groups] = COMING
        return self._commit(groups, count, beside, needed=True)

    def _commit(self, groups: Blocks, count: int, beside: Blocks, needed: bool) -> Blocks | None:
        """Give memory to COMING groups and hand out blocks, or None."""
        try:
            # Without the lock: it may wait for what another thread frees, and calls other pools.
            if needed:
                self._groups.commit(groups)
            elif not self._groups.commit_if_free(groups):
                return None
            with self._lock:
                self._memory[groups] = HELD
                return self._take(count, beside)
        finally:
            with self._lock:
                groups = groups[self._memory[groups] == COMING]
                self._memory[groups] = BARE
                self._groups.give_back(groups)

    def _release(self, blocks: Blocks, spare: int) -> Blocks:
        """Make blocks free; return the groups that lost their memory, all idle but `spare`."""
        self._states[blocks] = FREE
        self._planned_to[blocks] = -1
        np.subtract.at(self._taken, blocks // self.group_blocks, 1)
        return self._groups.give_back(self._groups.idle(spare))

    def _nbytes_of(self, groups: Blocks) -> int:
        return int(self._sizes[groups].sum()) * self.block_nbytes

    def _free_in(self, groups: Blocks, count: int) -> Blocks:
        """Return up to so many free blocks of groups, in their order."""
        room = self._sizes[groups] - self._taken[groups]
        blocks = self._blocks_of(groups[: enough(room, count)])
        found: Blocks = blocks[self._states[blocks] == FREE]
        return found[:count]

    def _blocks_of(self, groups: Blocks) -> Blocks:
        blocks = (groups[:, None] * self.group_blocks + np.arange(self.group_blocks)).reshape(-1)
        return blocks[blocks < self.capacity]

    # ---- arguments -------------------------------------------------------------------------------

    def _read(self, blocks: Numbers) -> Blocks:
        found = np.asarray(blocks)
        if found.size and found.dtype.kind not in "iu":
            refuse("blocks", blocks, "integers")
        found = found.reshape(-1)
        wrong = found[(found < 0) | (found >= self.capacity)]
        if len(wrong):
            raise ValueError(f"invalid block = {wrong[0]}: expected 0 to {self.capacity - 1}")
        return found.astype(np.int64)

    def _require(self, blocks: Blocks, what: str, *states: int) -> None:
        wrong = blocks[~np.isin(self._states[blocks], states)]
        if len(wrong):
            raise ValueError(f"block {wrong[0]} cannot be {what}: it is not handed out")
