"""What is handed out and what is counted: blocks, arenas and budgets in plain Python."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from .work import Op, Queue

QUANTUM = 256  # bytes
PAGE = 2 << 20  # bytes, the largest that is mapped as one


def rounded(nbytes: int) -> int:
    return -(-nbytes // QUANTUM) * QUANTUM


def pages_of(nbytes: int) -> int:
    return -(-nbytes // PAGE) * PAGE


@dataclass(eq=False)
class Block:
    """A block, what its bytes are, and who holds it.

    `refs` are those who refer to its Buffer ("user", a session's binding, a run's results): when
    the last is gone, it is freed on its own stream. `views` keep the memory itself, also after the
    Buffer was closed.
    """

    name: str
    arena: Arena
    start: int
    nbytes: int
    first: int  # address of the piece that it lies in: padding of an alignment comes before it
    size: int  # of that piece
    requested: int  # with what an alignment takes
    own: Queue
    buffer: Any = None  # while the user has it
    persistent: bool = False
    shareable: bool = False
    refs: set[Any] = field(default_factory=set)
    views: list[Any] = field(default_factory=list)
    writes: list[tuple[Op | None, int]] = field(default_factory=list)
    uses: list[Op] = field(default_factory=list)  # what of it may be unfinished
    recorded: set[Op] = field(default_factory=set)  # those that gpumem itself knows of
    leased: set[Op] = field(default_factory=set)  # runs elsewhere: it is in use until they end
    freed_on: Queue | None = None  # where it was closed, or is freed once views have ended

    def __str__(self) -> str:
        return self.name

    @property
    def end(self) -> int:
        return self.start + self.nbytes

    @property
    def last(self) -> int:
        """Where its piece ends. Who has the block is ordered behind what used any of the piece."""
        return self.first + self.size

    @property
    def closed(self) -> bool:
        return self.freed_on is not None

    @property
    def live(self) -> bool:
        return bool(self.views) or (bool(self.refs) and not self.closed)

    @property
    def byte(self) -> int:
        """What it holds when everything queued is done."""
        return self.writes[-1][1]

    @property
    def byte_now(self) -> int | None:
        """What it holds now; None if that is open."""
        sure = [byte for op, byte in self.writes if op is None or op.sure]
        possible = [byte for op, byte in self.writes if op is None or op.possible]
        return sure[-1] if sure and len(sure) == len(possible) else None

    def used_by(self, op: Op, byte: int | None = None, *, recorded: bool = False) -> None:
        """Note work that reads it, or writes a byte."""
        self.uses = [use for use in self.uses if not use.sure]
        self.uses.append(op)
        if recorded:
            self.recorded.add(op)
        if byte is not None:
            self.writes.append((op, byte))

    def unordered(self, queue: Queue, *, to_free: bool = False) -> list[Op]:
        """Return the work that later work of a stream does not come after by itself."""
        known = self.recorded if to_free else ()
        return [
            use for use in self.uses if use.queue is not queue and not use.sure and use not in known
        ]


@dataclass(eq=False)
class Freed:
    """A range that was freed while work that uses it was queued."""

    arena: Arena
    start: int
    end: int
    ops: list[Op]

    @property
    def unfinished(self) -> list[Op]:
        return [op for op in self.ops if not op.possible]

    def without(self, block: Block) -> list[Freed]:
        """Return what is left of it when the piece of a block lies over it."""
        ends = (self.start, min(self.end, block.first)), (max(self.start, block.last), self.end)
        return [Freed(self.arena, start, end, self.ops) for start, end in ends if start < end]


@dataclass(eq=False)
class Arena:
    """What an arena has handed out, and its counters."""

    name: str
    real: Any
    budget: Budget | None = None
    count: str = "reserved"
    limit: int = 0
    live: dict[int, Block] = field(default_factory=dict)
    allocs: int = 0
    frees: int = 0
    persistent: int = 0
    max_in_use: int = 0
    max_size: int = 0
    max_reserved: int = 0
    suspended: bool = False
    was_refused: bool = False  # by a budget whose callback makes room for another try
    has_retired: bool = False  # memory that goes back in the next call that may block
    owner: Any = None  # the session whose arena it is

    def __post_init__(self) -> None:
        self.is_paged = self.real.backing == "virtual"
        self.device = self.real.memory.device
        self.policy = self.real.config.stream_reuse
        self.may_be_padded = self.real.config.split_rule == "ort" and self.count == "in_use"
        self.passes = not self.real.config.enable  # a free waits for the device

    def __str__(self) -> str:
        return self.name

    @property
    def in_use(self) -> int:
        return sum(block.size for block in self.live.values())

    @property
    def shareable(self) -> int:
        """Bytes of shareable blocks, which stay when it is suspended."""
        return sum(block.size for block in self.live.values() if block.shareable)

    def reserved_with_pools(self) -> int:
        """Return the bytes that it and its graph pools hold, which sleep with it."""
        return sum(each.stats().reserved for each in (self.real, *self.real._children()))

    def piece_at(self, address: int) -> int:
        """Return where the piece begins that a used address lies in."""
        return max(block.address for block in self.real.blocks() if block.address <= address)

    def handed_out(self, block: Block) -> None:
        self.live[block.start] = block
        self.allocs += 1
        self.max_in_use = max(self.max_in_use, self.in_use)
        self.max_size = max(self.max_size, block.size)
        if self.was_refused:
            self.restart_counters()

    def took_back(self, block: Block) -> None:
        del self.live[block.start]
        self.frees += 1
        self.has_retired |= block.persistent or block.shareable

    def counters(self) -> dict[str, int]:
        """Return what `stats` must show."""
        return {
            "limit": self.limit or None,
            "in_use": self.in_use,
            "requested_in_use": sum(block.requested for block in self.live.values()),
            "num_allocs": self.allocs,
            "num_frees": self.frees,
            "num_reserves": self.persistent,
            "max_in_use": self.max_in_use,
            "max_alloc_size": self.max_size,
        }

    def restart_counters(self) -> None:
        """Take over what a refused block has left in the counters.

        Under the "ort" rule a block's padding is known once it is found; a budget that counts
        blocks may refuse it then, and the block goes back.
        """
        self.was_refused = False
        stats = self.real.stats()
        self.allocs = stats.num_allocs
        # Not num_frees: what a callback has freed may not be entered as taken back yet.
        self.frees = stats.num_allocs - len(self.live)
        self.max_in_use, self.max_size = stats.max_in_use, stats.max_alloc_size

    def take_over_peak(self) -> None:
        """With several threads the peak leaves out what caches of other threads do meanwhile.

        It may count what one has freed into another one's cache, and not what one has taken out of
        its own cache while another one allocated.
        """
        stats = self.real.stats()
        assert stats.max_in_use >= stats.in_use, f"{self}: {stats}"
        self.max_in_use = stats.max_in_use

    def check(self) -> None:
        stats = self.real.stats()
        for name, value in self.counters().items():
            found = getattr(stats, name)
            assert found == value, f"{self}: {name} is {found}, expected {value}"
        assert stats.reserved >= (0 if self.suspended else self.in_use), f"{self}: {stats}"
        self.max_reserved = max(self.max_reserved, stats.reserved)
        assert stats.max_reserved >= self.max_reserved, f"{self}: {stats}"
        if self.suspended:
            stays = stats.reserved - self.shareable
            assert stays == 0 or (stays > 0 and self.has_retired), f"{self} is suspended: {stats}"

    def check_blocks(self, used: list[Any]) -> None:
        """Compare what the arena says of used blocks: none missing, none more, no overlap."""
        used = sorted(used, key=lambda block: block.address)
        ends = [(block.address, block.address + block.allocated_nbytes) for block in used]
        for (_, end), (start, _) in itertools.pairwise(ends):
            assert end <= start, f"{self}: blocks overlap"
        mine = sorted(self.live.values(), key=lambda one: one.start)
        assert len(used) == len(mine), f"{self}: {len(used)} blocks are used, expected {len(mine)}"
        for info, block in zip(used, mine, strict=True):
            inside = info.address <= block.start and block.end <= (
                info.address + info.allocated_nbytes
            )
            assert inside, f"{self}: {block} is at {block.start:#x}, found {info}"
            assert info.allocated_nbytes == block.size, f"{self}: {block} of {block.size}: {info}"

    @property
    def charge(self) -> int:
        """What it must have charged to its budget."""
        stats = self.real.stats()
        return stats.in_use if self.count == "in_use" else stats.reserved


@dataclass(eq=False)
class Budget:
    """A level of a tree of limits."""

    real: Any
    parent: Budget | None = None
    arenas: list[Arena] = field(default_factory=list)
    children: list[Budget] = field(default_factory=list)
    reservations: list[Any] = field(default_factory=list)
    used: int = 0  # when it was last looked at
    peak: int = 0

    def __post_init__(self) -> None:
        self.name = self.real.name
        if self.parent is not None:
            self.parent.children.append(self)

    def __str__(self) -> str:
        return self.name

    def path(self) -> Iterator[Budget]:
        level: Budget | None = self
        while level is not None:
            yield level
            level = level.parent

    def expected(self) -> int:
        """Return what is held here and below: of arenas, their graph pools, reservations."""
        pools = sum(held for name, held in self.real.holders() if name.endswith(", graph pool"))
        return (
            pools
            + sum(arena.charge for arena in self.arenas)
            + sum(one.nbytes for one in self.reservations if one.state in ("pending", "committed"))
            + sum(child.expected() for child in self.children)
        )

    def pending(self) -> int:
        own = sum(one.nbytes for one in self.reservations if one.state == "pending")
        return own + sum(child.pending() for child in self.children)

    def check(self) -> None:
        real, expected = self.real, self.expected()
        assert real.used == expected, f"{self}: {real.used} bytes used, expected {expected}"
        assert real.pending == self.pending(), f"{self}: {real.pending} bytes pending"
        self.check_limit()

    def check_limit(self) -> None:
        """Look that no limit was passed; also before it changes."""
        real = self.real
        if real.limit is not None:
            # One that was lowered is not passed further.
            assert real.used <= max(real.limit, self.used), f"{self}: {real.used} bytes used"
            assert real.peak <= max(real.limit, self.peak), f"{self}: peak {real.peak}"
        assert real.peak >= max(self.peak, real.used), f"{self}: peak {real.peak}"
        self.used, self.peak = real.used, real.peak
