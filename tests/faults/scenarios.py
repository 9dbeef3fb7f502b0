"""The programs: each uses one part of gpumem as a user does, and ends with nothing left."""

from __future__ import annotations

import ctypes
import os
import pickle
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import count
from typing import Any

import numpy as np

import gpumem
from gpumem import adaptors, interop
from gpumem._testing import host_device
from gpumem._testing.copies import (
    SLOT_BYTES,
    SLOTS_IN_FLIGHT,
    set_pipeline,
    set_staged_from,
    set_threads,
)
from gpumem.errors import BudgetExceededError, OutOfMemoryError
from gpumem.interop import Handle, Importer, MemoryDescriptor, MemoryHandleType

from ..helpers.driver import HostDriver
from ..helpers.graph import RELAXED, Graph
from .stage import Stage, Wrong

KIB, MIB = 1 << 10, 1 << 20
LAG_NS = 200_000  # so that work is unfinished when its memory is wanted
PAGED = {"backing": "virtual", "page_move_threshold": 0}
SCENARIOS: dict[str, Callable[[Stage], None]] = {}


def scenario(program: Callable[[Stage], None]) -> Callable[[Stage], None]:
    SCENARIOS[program.__name__] = program
    return program


def sized(stage: Stage, nbytes: int) -> int:
    """Return a size near one, by the seed."""
    return nbytes - stage.rng.randrange(nbytes // 8)


def streams_of(stage: Stage, number: int) -> list[gpumem.Stream]:
    return [stage.do("make a stream", gpumem.Stream, "host") for _ in range(number)]


def arena_of(
    stage: Stage, name: str, memory: str = "host", config: Any = None, **named: Any
) -> Any:
    made = stage.do(f"make {name}", gpumem.Arena, memory, config, name=name, **named)
    return stage.watch(made)


# ---- arenas --------------------------------------------------------------------------------------


@scenario
def pages(stage: Stage) -> None:
    """An arena over pages grows, moves pages, shrinks and grows again."""
    first, second = streams_of(stage, 2)
    arena = arena_of(stage, "pages", config=PAGED)
    stage.do("prepare", arena.prepare, sized(stage, 4 * MIB))
    sizes = (4 * MIB, 3000, 6 * MIB, 300, 2 * MIB)
    blocks = [stage.take(arena, sized(stage, size), first) for size in sizes]
    kept = stage.hold(stage.do("persistent", arena.allocate_persistent, MIB))
    stage.drop(blocks[0], blocks[2])
    large = stage.take(arena, sized(stage, 9 * MIB), first)  # pages move
    other = stage.take(arena, sized(stage, 3 * MIB), second)
    stage.do("record", large.record_stream, second)
    stage.drop(large)
    stage.do("shrink", arena.shrink)
    again = stage.take(arena, sized(stage, 5 * MIB), second)
    stage.do("limit", arena.set_limit, 64 * MIB)
    stage.refuse("too much", OutOfMemoryError, arena.allocate, 65 * MIB)
    stage.drop(blocks[1], blocks[3], blocks[4], kept, other, again)
    stage.do("shrink", arena.shrink)
    stage.close(arena)


@scenario
def streams(stage: Stage) -> None:
    """Regions with streams that wait for each other's memory, also when it is out."""
    many = streams_of(stage, 3)
    driver = HostDriver()
    host_device.set_lag(LAG_NS)
    for reuse in ("wait", "completed"):
        limits = {"backing": "regions", "split_rule": "tight", "max_mem": 4 * MIB}
        arena = arena_of(stage, reuse, config=limits | {"stream_reuse": reuse})
        for turn, stream in enumerate(many):
            blocks = [stage.take(arena, sized(stage, 600 * KIB), stream) for _ in range(4)]
            for held in stage.held[-4:]:  # still queued when it is freed
                driver.fill(held.buffer, held.byte, stream)
            stage.do("record", blocks[0].record_stream, many[turn - 1])
            stage.drop(*blocks)
        stage.do("reset", arena.reset_stream, many[0])
        whole = stage.do("wait for memory", arena.allocate, 3 * MIB, many[1])
        stage.refuse("too much", OutOfMemoryError, arena.allocate, 2 * MIB, many[2])
        stage.drop(whole)
        stage.do("shrink", arena.shrink)
        stage.close(arena)
    for stream in many:
        stage.do("synchronize", stream.synchronize)
    host_device.set_lag(0)


@scenario
def pools(stage: Stage) -> None:
    """A driver's pool with a limit and a budget, and one that a config describes."""
    first, second = streams_of(stage, 2)
    budget = gpumem.Budget(32 * MIB, name="pools")
    stage.budgets.append(budget)
    config = {"max_size": 32 * MIB, "release_threshold": 8 * MIB}
    make = gpumem.DriverPool
    pool = stage.watch(stage.do("make", make, "host", config, budget=budget, name="pool"))
    blocks = [stage.take(pool, sized(stage, 2 * MIB), first) for _ in range(4)]
    stage.drop(blocks[0], stream=second)
    stage.do("record", blocks[1].record_stream, second)
    stage.drop(blocks[1])
    stage.do("stats", pool.stats)
    aligned = stage.take(pool, sized(stage, 64 * KIB), second, alignment=4096)
    kept = stage.hold(stage.do("persistent", pool.allocate_persistent, MIB))
    stage.do("shrink", pool.shrink)
    stage.refuse("too much", OutOfMemoryError, pool.allocate, 40 * MIB)
    stage.drop(*blocks[2:], aligned, kept)
    settings = {"use_cuda_mempool": True, "max_mem": 16 * MIB}
    second_pool = stage.do("from config", gpumem.MemoryResource.from_config, "host", settings)
    block = stage.take(stage.watch(second_pool), MIB, second)
    stage.drop(block)
    stage.close(second_pool)
    default = stage.do("default", gpumem.DriverPool.default, "host")
    stage.drop(stage.take(default, MIB, first))
    stage.do("synchronize", first.synchronize)
    stage.close(pool)
    stage.budgets.clear()


@scenario
def memories(stage: Stage) -> None:
    """Arenas of pinned, managed, prefetched and passed-through memory."""
    (stream,) = streams_of(stage, 1)
    kinds: dict[str, tuple[str, Any]] = {
        "pinned": ("host/host_accessible", {"initial_chunk_size_bytes": MIB}),
        "pinned on a node": ("host/host_accessible", {"numa_node": 0}),
        "managed": ("host/managed", {"initial_chunk_size_bytes": MIB}),
        "passed through": ("host", {"enable": False}),
        "pinned, passed through": ("host/host_accessible", {"enable": False}),
    }
    for name, (memory, config) in kinds.items():
        arena = arena_of(stage, name, memory, config)
        one = stage.take(arena, sized(stage, 300 * KIB), stream)
        two = stage.take(arena, sized(stage, 3 * MIB), stream)
        shared = stage.take(arena, 5000, shareable=True) if name != "managed" else None
        if name == "managed":
            stage.do("prefetch", two.prefetch, "host", stream)
            stage.do("advise", two.advise, "read_mostly")
            stage.do("advise", two.advise, "preferred_location", "host")
        stage.drop(one)
        stage.do("shrink", arena.shrink)
        stage.drop(two, *([shared] if shared else []))
        stage.close(arena)


# ---- copies --------------------------------------------------------------------------------------


@contextmanager
def staged_copies() -> Iterator[None]:
    """Send every copy from and to memory that the driver does not know through small slots."""
    set_staged_from(0)
    set_pipeline(1 << 16, 2)
    set_threads(3)
    try:
        yield
    finally:
        set_staged_from(-1)
        set_pipeline(SLOT_BYTES, SLOTS_IN_FLIGHT)
        set_threads(0)


@scenario
def copies(stage: Stage) -> None:
    """Copies between all memories: queued, pitched, overlapping, staged; fills and conversions."""
    (stream,) = streams_of(stage, 1)
    size = sized(stage, 300_000)
    arena = arena_of(stage, "copies")
    pinned = arena_of(stage, "pinned copies", "host/host_accessible")
    # The target of a copy that is refused is freed into the cache.
    stage.loose = ("pinned copies.reserved",)
    values = np.arange(size, dtype=np.uint32).astype(np.uint8)

    def to(dst: Any, src: Any, expected: Any) -> None:
        stage.do("copy", gpumem.copy, dst, src, stream)
        stream.synchronize()
        seen = dst if isinstance(dst, np.ndarray) else dst.numpy()
        assert (seen == expected).all()

    def made(of: Any, shape: Any = size, dtype: str = "u1") -> Any:
        return stage.do("empty", gpumem.empty, shape, dtype, resource=of, stream=stream)

    one, two = made(arena), made(arena)
    host, back = made(pinned), np.zeros(size, np.uint8)
    to(host, values, values)
    to(one, host, values)
    to(two, one, values)
    to(back, two, values)
    with staged_copies():
        back[:] = 0
        to(one, values[::-1].copy(), values[::-1])
        to(back, one, values[::-1])
    to(one[1:], one[:-1], values[:0:-1])
    table, other = (made(arena, (300, 400), "i4") for _ in range(2))
    numbers = np.arange(120_000, dtype=np.int32).reshape(300, 400)
    to(table, numbers, numbers)
    to(other[:, 15:100], table[:, 5:90], numbers[:, 5:90])
    to(other[::2, ::3], table[::2, ::3], numbers[::2, ::3])
    zeros = stage.do("zeros", gpumem.zeros, size, "u1", resource=arena, stream=stream)
    nines = stage.do("full", gpumem.full, 1000, 9, "i2", resource=arena, stream=stream)
    assert stage.do("numpy", nines.numpy).sum() == 9000
    packed = stage.do("contiguous", table[:, 5:90].contiguous, stream)
    with gpumem.using_resource(pinned):
        moved = stage.do("to", table.to, "host/host_accessible", stream, copy=True)
    assert stage.do("item", nines[3:4].item) == 9
    assert (stage.do("numpy", moved.numpy) == numbers).all()
    ready = stage.do("dlpack", np.from_dlpack, nines)
    del one, two, host, zeros, nines, packed, moved, table, other, ready
    stage.do("synchronize", stream.synchronize)
    stage.close(arena, pinned)


# ---- sessions ------------------------------------------------------------------------------------


@scenario
def sessions(stage: Stage) -> None:
    """Sessions whose runs are queued, captured and launched, with shared and private arenas."""
    size = 4096
    # A session keeps outputs and staging memory of a failed run for the next one.
    stage.loose = ("used", "reserved", "in_use", "blocks")
    managed = arena_of(stage, "managed inputs", "host/managed")
    x = stage.do("full", gpumem.full, size, 5, "u1", resource=managed)
    environment = stage.do("environment", gpumem.Environment)
    shared = stage.watch(stage.do("register", environment.register, "host"))

    def work(ctx: Any) -> None:
        with ctx.allocator.allocate(size) as scratch:
            gpumem.copy(gpumem.from_dlpack(scratch), ctx.inputs["x"], ctx.stream)
            gpumem.copy(ctx.output("y", size, "u1"), gpumem.from_dlpack(scratch), ctx.stream)

    for options in ({"enable_cuda_graph": True}, {"private_arena": True}):
        session = stage.do("session", gpumem.Session, "host", options, environment)
        stage.do("bind", session.bind_input, "x", x)
        stage.do("bind", session.bind_output, "y")
        for _ in range(4):
            stage.do("run", session.run, work)
            assert (session.outputs()["y"].numpy() == 5).all()
        y = stage.do("full", gpumem.full, size, 0, "u1", resource=managed)
        stage.do("bind", session.bind_output, "y", y)
        stage.do("run", session.run, work, synchronize=False)
        stage.do("synchronize", session.compute_stream.synchronize)
        assert (y.numpy() == 5).all()
        stage.do("run", session.run, work, shrink=True)
        stage.do("close session", session.close)
    del session, x, y
    stage.unwatch(shared)
    del shared
    stage.do("release", environment.release, "host")
    stage.do("close environment", environment.close)
    stage.close(managed)


@scenario
def graphs(stage: Stage) -> None:
    """Captures of a user's own: a graph pool with the blocks of two captures."""
    for backing in ("regions", "virtual"):
        captured_twice(stage, backing)


def captured_twice(stage: Stage, backing: str) -> None:
    (stream,) = streams_of(stage, 1)
    arena = arena_of(stage, f"graphs, {backing}", config={"backing": backing})
    driver = HostDriver()
    pool: Any = None
    for _ in range(2):
        capture = arena.capture(stream, pool=pool)
        pool = stage.do("enter", capture.__enter__)
        with Graph(driver, stream, RELAXED) as graph:
            size = sized(stage, 100 * KIB)
            with stage.do("allocate", arena.allocate, size, stream) as block:
                driver.fill(block, 3, stream)
            # Pages of what was freed move to the larger one.
            blocks = [stage.do("allocate", arena.allocate, 2 * MIB, stream) for _ in range(4)]
            for block in blocks[::2]:
                block.close()
            stage.do("allocate", arena.allocate, 4 * MIB, stream).close()
            for block in blocks[1::2]:
                block.close()
        graph.destroy()
        stage.do("leave", capture.__exit__, None, None, None)
    stage.do("close pool", pool.close)
    stage.close(arena)


# ---- other processes -----------------------------------------------------------------------------


def through_a_socket(handle: Handle) -> Handle:
    """Return what another process would receive."""
    one, other = socket.socketpair()
    with one, other:
        note = pickle.dumps((handle.kind, handle.contents))
        socket.send_fds(one, [note], [handle.fileno()])
        said, (number,), _, _ = socket.recv_fds(other, 1 << 16, 1)
    kind, contents = pickle.loads(said)
    return Handle(number, kind=kind, contents=contents)


@scenario
def sharing(stage: Stage) -> None:
    """Memory and timelines are exported, sent through a socket, attached, used and closed."""
    (stream,) = streams_of(stage, 1)
    arena = arena_of(stage, "shared", config=PAGED)
    pool = stage.watch(
        stage.do("pool", gpumem.DriverPool, "host", {"shareable": True}, name="shared pool")
    )
    for resource in (arena, pool):
        more = {"shareable": True} if resource is arena else {}
        block = stage.take(resource, sized(stage, 8 * KIB), stream, **more)
        exported = stage.do("export", interop.export, block)
        with exported, through_a_socket(exported) as received:
            there = stage.do("attach", interop.attach, received)
        byte = stage.held[-1].byte
        assert (there.numpy()[:64] == byte).all()
        stage.drop(block)  # the import keeps the memory
        if resource is arena:
            assert (there.numpy()[:64] == byte).all()
        del there
    stage.do("device", lambda: gpumem.Device("host").free_bytes)
    timelines(stage, stream)
    imports(stage, stream)
    stage.do("synchronize", stream.synchronize)
    stage.close(arena, pool)


def timelines(stage: Stage, stream: gpumem.Stream) -> None:
    importer = Importer.for_device("host")
    host = stage.do("timeline", interop.HostTimeline.create, 0, "host")
    with stage.do("export", host.export) as handle:
        received = through_a_socket(handle)
        there = stage.do("attach", interop.attach, received, device="host")
        wanted = interop.SemaphoreDescriptor(received, interop.SemaphoreType.TIMELINE_OPAQUE_FD)
        driver = stage.do("import", importer.import_semaphore, wanted, consume=True)
    for timeline, value in zip((host, there, driver), count(1)):
        stage.do("enqueue_wait", timeline.enqueue_wait, stream, value)
        stage.do("signal", host.signal, value)
        stage.do("synchronize", stream.synchronize)
    for timeline, value in zip((host, there, driver), count(4)):
        stage.do("enqueue_signal", timeline.enqueue_signal, stream, value)
        stage.do("wait", host.wait, value, timeout=60)
    stage.do("synchronize", stream.synchronize)
    for timeline in (driver, there, host):
        stage.do("close timeline", timeline.close)


def imports(stage: Stage, stream: gpumem.Stream) -> None:
    importer = Importer.for_device("host")
    size = 1 << 16
    fd = os.memfd_create("faults", os.MFD_CLOEXEC)
    try:
        os.truncate(fd, size)
        for kind in (MemoryHandleType.MEMFD, MemoryHandleType.OPAQUE_FD):
            wanted = MemoryDescriptor(fd, kind, size)
            memory = stage.do("import", importer.import_memory, wanted)
            tensor = stage.do("tensor", memory.tensor, 100, "u1", offset=32, stream=stream)
            stage.do("copy", gpumem.copy, tensor, np.full(100, 7, np.uint8), stream)
            stage.do("synchronize", stream.synchronize)
            assert os.pread(fd, 100, 32) == bytes([7]) * 100
            del tensor
            inside = stage.watch(stage.do("resource", memory.resource, name="imported"))
            stage.drop(stage.take(inside, 1000, stream))
            stage.close(inside)
            stage.do("close import", memory.close)
    finally:
        os.close(fd)


# ---- sleeping, debugging, budgets, adaptors ----------------------------------------------------


@scenario
def sleeping(stage: Stage) -> None:
    """Arenas sleep and wake with live, freed, persistent and tagged blocks."""
    first, second = streams_of(stage, 2)
    for name, heap in {"plain": None, "debugged": {"quarantine_bytes": MIB}}.items():
        arena = arena_of(stage, name, config=PAGED, debug_heap=heap)
        sizes = (600 * KIB, 900, 3 * MIB)
        blocks = [stage.take(arena, sized(stage, size), first) for size in sizes]
        blocks.append(stage.hold(stage.do("persistent", arena.allocate_persistent, 64 * KIB)))
        with arena.tag("tagged"):
            blocks.append(stage.take(arena, sized(stage, 2 * MIB), first))
            rows = stage.do("make rows", partial(arena.virtual, (32, MIB), "uint8", step=2))
        stage.do("commit", rows.commit, 3)
        rows.numpy()[:] = 5
        pool = stage.do("capture", capture_block, stage, arena, first)
        for _ in range(2):
            stage.do("sleep", arena.sleep)
            stage.refuse("allocate", gpumem.errors.AsleepError, arena.allocate, 1)
            stage.drop(blocks.pop(0))
            for tag in ("default", "tagged"):
                stage.do("wake", arena.wake, tag)
            blocks.append(stage.take(arena, sized(stage, 300 * KIB), second))
            if not (rows.numpy() == 5).all():
                raise Wrong("rows of a virtual tensor changed while they slept")
        stage.drop(*blocks)
        stage.do("close rows", rows.close)
        stage.do("close the pool", pool.close)
        stage.do("shrink", arena.shrink)
        stage.close(arena)


def capture_block(stage: Stage, arena: Any, stream: Any) -> Any:
    # Without a graph: a pool has the memory, and keeps it.
    with arena.capture(stream) as pool:
        arena.allocate(sized(stage, 3 * MIB), stream).close()
    return pool


@scenario
def growing(stage: Stage) -> None:
    """Virtual tensors grow and shrink under a limit, with queued work, spare pages and views."""
    stream, other = streams_of(stage, 2)
    driver = HostDriver()
    arena = arena_of(stage, "growing", config=PAGED | {"max_mem": 32 * MIB})
    make = partial(arena.virtual, (64, MIB), "uint8", step=2, ahead=4, stream=stream)
    rows: Any = stage.do("make", make)
    stage.do("commit", rows.commit, 3)
    rows.numpy()[:] = 5
    stage.do("commit", rows.commit, 10, 13)
    block = stage.take(arena, sized(stage, 6 * MIB), stream)
    stage.refuse("too much", OutOfMemoryError, rows.commit, 40)
    stage.do("record", rows.record_stream, other)
    host_device.set_lag(LAG_NS)
    driver.call("cuMemsetD8Async", rows.ptr + 10 * MIB, 7, MIB, other.ptr)
    stage.do("release", rows.release, 10, 13)
    stage.do("grow", rows.resize, 20)  # rows 10 to 13 may still be there
    view: Any = stage.do("view", rows.tensor, 0, 3)
    stage.refuse("in use", gpumem.errors.InUseError, rows.resize, 2)
    host_device.set_lag(0)
    if not (view.numpy() == 5).all():
        raise Wrong("rows that were committed have other bytes")
    stage.do("shrink", rows.resize, 3)
    stage.drop(block)
    stage.do("shrink", arena.shrink)
    more: Any = stage.do("make", arena.virtual, (16, MIB), "uint8", committed=5, name="more")
    stage.do("close", more.close)
    del view
    stage.do("close", rows.close)
    del rows, more
    stage.do("shrink", arena.shrink)
    stage.close(arena)


@scenario
def debugging(stage: Stage) -> None:
    """Debug heaps over device and pinned memory: quarantine, checks, no false report."""
    stage.loose = ("used", "reserved")  # a block whose fill is refused is freed into the cache
    first, second = streams_of(stage, 2)
    for memory in ("host", "host/host_accessible"):
        arena = arena_of(stage, memory, memory, debug_heap={"quarantine_bytes": MIB})
        sizes = (100, 300_000, 700_000)
        blocks = [stage.take(arena, sized(stage, size), first) for size in sizes]
        stage.drop(blocks.pop())
        assert stage.do("check", arena.check_heap) == ()
        stage.do("record", blocks[0].record_stream, second)
        stage.drop(*blocks)
        large = stage.take(arena, sized(stage, 2 * MIB), second)
        assert stage.do("check", arena.check_heap) == ()
        stage.drop(large)
        stage.do("shrink", arena.shrink)
        assert stage.do("check", arena.check_heap) == ()
        stage.close(arena)


@scenario
def budgets(stage: Stage) -> None:
    """A tree of budgets over arenas of all backings, with a reservation and pressure."""
    root = gpumem.Budget(24 * MIB, soft=20 * MIB, name="root")
    tenants = [
        gpumem.Budget(limit, parent=root, name=f"tenant {limit}") for limit in (None, 9 * MIB)
    ]
    stage.budgets += [root, *tenants]
    one = arena_of(stage, "paged", config=PAGED, budget=tenants[0])
    config = {"backing": "regions", "split_rule": "tight"}
    two = arena_of(stage, "in regions", config=config, budget=tenants[1])
    three = arena_of(stage, "counted", config={"enable": False}, budget=tenants[0], count="in_use")
    root.on_pressure = lambda budget, nbytes: one.shrink()
    blocks = [stage.take(arena, sized(stage, 3 * MIB)) for arena in (one, two, three)]
    reservation = tenants[1].reserve(MIB)
    stage.refuse("too much", BudgetExceededError, two.allocate, 8 * MIB)
    reservation.cancel()
    stage.drop(blocks[0])
    blocks[0] = stage.take(three, sized(stage, 14 * MIB))  # `one` shrinks
    assert root.used == sum(tenant.used for tenant in tenants)
    tenants[1].limit = 5 * MIB
    stage.refuse("too much", BudgetExceededError, two.allocate, 6 * MIB)
    stage.drop(*blocks)
    stage.do("shrink", two.shrink)
    root.on_pressure = None
    stage.close(one, two, three)
    assert [budget.used for budget in stage.budgets] == [0, 0, 0]
    stage.budgets.clear()


@scenario
def adapted(stage: Stage) -> None:
    """Adaptors in adaptors over an arena, a pool and pinned memory."""
    first, second = streams_of(stage, 2)
    small = arena_of(stage, "small", config={"max_mem": 2 * MIB, "backing": "regions"})
    pool = stage.watch(stage.do("pool", gpumem.DriverPool, "host", name="pool behind"))
    pinned = arena_of(stage, "pinned", "host/host_accessible")
    events: list[Any] = []
    limited = stage.watch(adaptors.limit(pool, 4 * MIB, name="limited"))
    both = adaptors.fallback(small, limited, pinned)
    logged = adaptors.log(adaptors.track(adaptors.annotate(both)), events.append)
    blocks = [stage.take(logged, sized(stage, MIB), first) for _ in range(8)]
    assert min(both.served) > 0
    stage.do("record", blocks[1].record_stream, second)
    stage.drop(blocks[1], blocks[4])
    stage.drop(blocks[5], stream=second)
    freeing = adaptors.on_failure(small, lambda nbytes, error, *_: False)
    stage.refuse("too much", OutOfMemoryError, freeing.allocate, 3 * MIB)
    stage.do("shrink", logged.shrink)
    stage.drop(*(blocks[i] for i in (0, 2, 3, 6, 7)))
    assert limited.used == 0
    stage.unwatch(limited)
    stage.do("synchronize", first.synchronize)
    stage.close(logged, limited, small, pool, pinned)


@scenario
def external(stage: Stage) -> None:
    """Memory of callbacks, charged to a tenant's budget, whose holders are listed."""
    given: dict[int, Any] = {}

    def alloc(nbytes: int) -> int:
        block = ctypes.create_string_buffer(nbytes)
        given[ctypes.addressof(block)] = block
        return ctypes.addressof(block)

    (stream,) = streams_of(stage, 1)
    root = stage.do("budget", lambda: gpumem.Budget(8 * MIB, name="root"))
    tenant = stage.do("tenant", lambda: gpumem.Budget(6 * MIB, parent=root, name="tenant"))
    stage.budgets += [root, tenant]
    make = partial(gpumem.ExternalAllocator, alloc, given.pop, memory="host", budget=tenant)
    resource = stage.watch(stage.do("make", make))
    blocks = [stage.take(resource, sized(stage, MIB), stream) for _ in range(3)]
    stage.refuse("too much", BudgetExceededError, resource.allocate, 4 * MIB)
    assert stage.do("holders", root.holders)
    stage.drop(*blocks)
    stage.do("synchronize", stream.synchronize)
    stage.close(resource)
    assert not given
    stage.budgets.clear()
