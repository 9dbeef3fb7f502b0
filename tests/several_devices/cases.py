"""What holds on several devices of one type: host devices here, GPUs in tests/gpu.

A case takes the names of the devices, two or more. It runs on the host device in a process of its
own, because the number of host devices is set once, and on GPUs in the test's process.
"""

from __future__ import annotations

import ctypes
import itertools
import multiprocessing
from collections.abc import Callable, Sequence
from typing import Self

import numpy as np
from helpers.driver import HostDriver

import gpumem
from gpumem import interop, observe
from gpumem.interop import HostTimeline

KIB, MIB = 1 << 10, 1 << 20
CASES: dict[str, Callable[[Sequence[str]], None]] = {}
ALONE: set[str] = set()  # names of cases that need a process of their own on GPUs, too
BACKINGS = ({}, {"backing": "regions"})


def case(function: Callable[[Sequence[str]], None]) -> Callable[[Sequence[str]], None]:
    """Add a case, by the function's name."""
    CASES[function.__name__] = function
    return function


def pairs(devices: Sequence[str]) -> list[tuple[str, str]]:
    """Return every ordered pair of two devices."""
    return list(itertools.permutations(devices, 2))


def fetch(tensor) -> np.ndarray:
    """Copy a tensor or buffer, of any device, to NumPy."""
    tensor = gpumem.from_dlpack(tensor).view("u1") if isinstance(tensor, gpumem.Buffer) else tensor
    whole = np.empty(tensor.shape, tensor.dtype)
    gpumem.copy(whole, tensor)
    return whole


class Gate:
    """Holds streams of any device back until it is opened, or the ``with`` block ends."""

    def __init__(self, *streams: gpumem.Stream) -> None:
        self._timeline = HostTimeline.create()
        for stream in streams:
            self._timeline.enqueue_wait(stream, 1)

    def open(self) -> None:
        if self._timeline.value() == 0:
            self._timeline.signal(1)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.open()


def fill(device: str, block: gpumem.Buffer, value: int, stream: gpumem.Stream) -> None:
    """Fill a block as a kernel would: the block's own order knows nothing of it."""
    HostDriver(device).fill(block, value, stream)


def let_run(device: str) -> None:
    """Let a device run what nothing holds back: it ends work of a stream that was queued later."""
    stream, block = gpumem.Stream(device), gpumem.zeros(MIB, "u1", memory=device).buffer
    for value in range(10):
        fill(device, block, value, stream)
        stream.synchronize()


def refused(error: type[BaseException], call: Callable[..., object], *arguments: object):
    """Return what a call raises, which must be of a class."""
    try:
        call(*arguments)
    except error as raised:
        return raised
    raise AssertionError(f"no {error.__name__}")


# ---- arenas, tensors, copies ---------------------------------------------------------------------


@case
def arenas_take_memory_of_their_own_device(devices):
    for device in devices:
        others = [each for each in devices if each != device]
        before = {each: gpumem.Device(each).free_bytes for each in devices}
        arena = gpumem.Arena(device)
        buffer = arena.allocate(256 * MIB)
        assert str(buffer.memory) == str(buffer.stream.device) == device
        assert gpumem.Device(device).free_bytes <= before[device] - 256 * MIB
        for each in others:
            assert gpumem.Device(each).free_bytes >= before[each] - 128 * MIB
        error = refused(ValueError, arena.allocate, 8, gpumem.Stream(others[0]))
        assert others[0] in str(error)
        error = refused(ValueError, buffer.record_stream, gpumem.Stream(others[0]))
        assert device in str(error)
        buffer.close()
        arena.check_invariants()
        arena.close()


@case
def default_resources_serve_each_memory_of_each_device(devices):
    kinds = ("", "/host_accessible", "/managed")
    memories = [device + kind for device in devices for kind in kinds]
    found = {memory: gpumem.get_default_resource(memory) for memory in memories}
    assert len({id(each) for each in found.values()}) == len(memories)
    for memory, resource in found.items():
        assert str(resource.memory) == memory
        tensor = gpumem.full(1000, 3, "i4", memory=memory)
        assert tensor.buffer.resource is resource
        assert (fetch(tensor) == 3).all()
        assert (fetch(tensor.to(devices[-1])) == 3).all()


@case
def copies_of_every_pair_are_right_on_every_stream(devices):
    data = np.random.default_rng(3).integers(0, 1 << 30, (60, 40, 30), np.int32)
    cut = np.s_[1:, ::2, 1:-1]
    for (origin, to), config in itertools.product(pairs(devices), BACKINGS):
        here, there = gpumem.Arena(origin, config), gpumem.Arena(to, config)
        source = gpumem.empty(data.shape, data.dtype, resource=here)
        gpumem.copy(source, data)
        for stream in (None, gpumem.Stream(to), gpumem.Stream(origin)):
            # The device of the stream copies, the destination's where there is none.
            assert there.peers == ()
            target = gpumem.zeros(data.shape, data.dtype, resource=there)
            gpumem.copy(target, source, stream)
            assert (fetch(target) == data).all(), (origin, to, stream)
            target = gpumem.zeros(data.shape, data.dtype, resource=there)
            gpumem.copy(target[cut], source[cut], stream)
            assert (fetch(target)[cut] == data[cut]).all(), (origin, to, stream)
            assert fetch(target).sum() == data[cut].sum()
        assert [str(each) for each in here.peers] == [to]
        assert [str(each) for each in there.peers] == [origin]


@case
def copies_along_a_ring_are_ordered_on_all_devices(devices):
    streams = [gpumem.Stream(device) for device in devices]
    tensors = [
        gpumem.zeros(MIB, "u1", memory=device, stream=stream)
        for device, stream in zip(devices, streams, strict=True)
    ]
    last = gpumem.zeros(MIB, "u1", memory=devices[0], stream=streams[0])
    for device in devices:
        gpumem.Device(device).synchronize()
    with Gate(streams[0]) as gate:
        fill(devices[0], tensors[0].buffer, 7, streams[0])
        for index, (source, target) in enumerate(itertools.pairwise([*tensors, last])):
            gpumem.copy(target, source, streams[index])
        assert not any(stream.query() for stream in streams)
        gate.open()
    assert all((fetch(each) == 7).all() for each in (*tensors, last))


@case
def source_is_not_reused_before_another_device_has_copied_it(devices):
    for origin, to in pairs(devices):
        arena = gpumem.Arena(origin, {"backing": "regions", "initial_chunk_size_bytes": MIB})
        side, stream = gpumem.Stream(origin), gpumem.Stream(to)
        source = gpumem.full(MIB, 4, "u1", resource=arena, stream=side)
        target = gpumem.zeros(MIB, "u1", memory=to)
        for device in devices:
            gpumem.Device(device).synchronize()
        with Gate(stream):
            gpumem.copy(target, source, stream)
            del source
            spoiler = gpumem.full(MIB, 99, "u1", resource=arena, stream=gpumem.Stream(origin))
        assert (fetch(target) == 4).all()
        assert (fetch(spoiler) == 99).all()


# ---- peers ---------------------------------------------------------------------------------------


@case
def work_of_every_peer_reaches_every_arena(devices):
    for owner in devices:
        arena = gpumem.Arena(owner, {"peers": list(devices)})
        assert [str(each) for each in arena.peers] == [each for each in devices if each != owner]
        blocks = [arena.allocate(40 * MIB), arena.allocate(1000), arena.allocate_persistent(MIB)]
        for value, (device, block) in enumerate(itertools.product(devices, blocks), 1):
            stream = gpumem.Stream(device)
            fill(device, block, value, stream)
            stream.synchronize()
            assert (fetch(block) == value).all(), (owner, device)


@case
def peers_of_one_arena_write_in_the_order_of_events(devices):
    arena = gpumem.Arena(devices[0], {"peers": list(devices)})
    block = arena.allocate(MIB)
    streams = [gpumem.Stream(device) for device in devices]
    with Gate(streams[0]) as gate:
        for value, (device, stream) in enumerate(zip(devices, streams, strict=True)):
            if value:
                stream.wait(streams[value - 1].record())
            fill(device, block, value, stream)
        assert not any(stream.query() for stream in streams)
        gate.open()
    streams[-1].synchronize()
    assert (fetch(block) == len(devices) - 1).all()


@case
def work_of_every_peer_reaches_virtual_tensors(devices):
    """Pages that were there before a peer was enabled, and pages that came after."""
    for device, peer in pairs(devices):
        arena = gpumem.Arena(device)
        rows = arena.virtual((16, MIB), "u1", step=2, committed=2)
        arena.enable_peer(peer)
        rows.commit(6)
        stream = gpumem.Stream(peer)
        rows_there = rows.tensor(0, 6)
        HostDriver(peer).call("cuMemsetD8Async", rows.ptr, 7, 6 * MIB, stream.ptr)
        stream.synchronize()
        assert (fetch(rows_there) == 7).all()
        # A copy to the other device lets it access the tensor's arena, as one from a block does.
        other = gpumem.Arena(device).virtual((4, MIB), "u1", committed=2)
        gpumem.copy(gpumem.empty(MIB, "u1", memory=peer), other.tensor(0, 1)[0], stream)
        assert other.arena.peers == (gpumem.Device(peer),)


@case
def pages_of_peers_are_counted_once(devices):
    arenas = [gpumem.Arena(device) for device in devices]
    blocks = [arena.allocate((number + 1) * MIB) for number, arena in enumerate(arenas)]
    before = [(arena.stats(), gpumem.Device(arena.memory.device).free_bytes) for arena in arenas]
    for arena, device in itertools.product(arenas, devices):
        if str(arena.memory.device) != device:
            arena.enable_peer(device)
    for arena, (stats, free), block in zip(arenas, before, blocks, strict=True):
        assert arena.stats().reserved == stats.reserved
        assert arena.stats().requested_in_use == block.nbytes
        # A GPU's driver needs some tables for the mappings.
        assert gpumem.Device(arena.memory.device).free_bytes >= free - 64 * MIB
        arena.check_invariants()


# ---- sessions ------------------------------------------------------------------------------------


def copy_by_a_kernel(context) -> None:
    """Copy x to y as a kernel would: with no other order than the run's stream."""
    x = context.inputs["x"]
    y = context.output("y", x.shape, x.dtype)
    driver = HostDriver(str(context.stream.device))
    driver.call("cuMemcpyDtoDAsync", y.ptr, x.ptr, x.nbytes, context.stream.ptr)


@case
def session_waits_for_inputs_that_another_device_still_writes(devices):
    for origin, here in pairs(devices):
        side = gpumem.Stream(origin)
        x = gpumem.zeros(MIB, "u1", memory=origin, stream=side)
        side.synchronize()
        with gpumem.Session(here) as session, Gate(side) as gate:
            fill(origin, x.buffer, 5, side)
            session.bind_input("x", x)
            session.bind_output("y")
            session.run(copy_by_a_kernel, synchronize=False)
            let_run(here)
            assert not session.compute_stream.query()
            gate.open()
            session.compute_stream.synchronize()
            assert str(session.outputs()["y"].memory) == here
            assert (fetch(session.outputs()["y"]) == 5).all(), (origin, here)


def write_sevens(context) -> None:
    y = context.output("y", MIB, "u1")
    HostDriver(str(context.stream.device)).fill(y.buffer, 7, context.stream)


@case
def session_waits_for_outputs_that_another_device_still_uses(devices):
    for owner, here in pairs(devices):
        side = gpumem.Stream(owner)
        y = gpumem.zeros(MIB, "u1", memory=owner, stream=side)
        side.synchronize()
        with gpumem.Session(here) as session, Gate(side) as gate:
            fill(owner, y.buffer, 9, side)
            session.bind_output("y", y)
            session.run(write_sevens, synchronize=False)
            let_run(here)
            assert not session.compute_stream.query()
            gate.open()
            session.compute_stream.synchronize()
            gpumem.Device(owner).synchronize()
            assert (fetch(y) == 7).all(), (owner, here)


@case
def output_in_another_devices_arena_waits_for_the_work_before_it(devices):
    for owner, here in pairs(devices):
        arena = gpumem.Arena(owner, {"backing": "regions", "initial_chunk_size_bytes": MIB})
        own = gpumem.Stream.from_handle(owner, 0)  # that of blocks whose stream is not named
        before = arena.allocate(MIB)
        with gpumem.Session(here) as session, Gate(own) as gate:
            fill(owner, before, 9, own)
            before.close()
            session.bind_output("y", arena)
            session.run(write_sevens, synchronize=False)
            let_run(here)
            gate.open()
            session.compute_stream.synchronize()
            gpumem.Device(owner).synchronize()
            y = session.outputs()["y"]
            assert y.buffer.resource is arena
            assert (fetch(y) == 7).all(), (owner, here)


@case
def sessions_of_an_environment_use_the_arena_of_their_device(devices):
    values = np.arange(MIB, dtype="f4")
    with gpumem.Environment() as environment:
        arenas = [environment.register(device) for device in devices]
        for device, arena in zip(devices, arenas, strict=True):
            with gpumem.Session(device, environment=environment) as session:
                x = gpumem.empty(MIB, "f4", memory=devices[0])
                gpumem.copy(x, values)
                session.bind_input("x", x)
                session.bind_output("y")
                session.run(copy_by_a_kernel)
                y = session.outputs()["y"]
                assert y.buffer.resource is arena is session.allocator()
                assert session.device_for_outputs() == [gpumem.Device(device)]
                assert (fetch(y) == values).all()
                del y


# ---- timelines -----------------------------------------------------------------------------------


@case
def timeline_orders_streams_of_every_pair(devices):
    for first, then in pairs(devices):
        timeline = HostTimeline.create()
        streams = gpumem.Stream(first), gpumem.Stream(then)
        with Gate(streams[0]):
            timeline.enqueue_wait(streams[1], 1)
            timeline.enqueue_signal(streams[0], 1)
            timeline.enqueue_signal(streams[1], 2)
            assert not any(stream.query() for stream in streams)
            assert timeline.value() == 0
            refused(gpumem.errors.InUseError, timeline.close)
        timeline.wait(2, timeout=60)
        timeline.close(timeout=60)


@case
def one_timeline_goes_round_all_devices(devices):
    timeline = HostTimeline.create()
    block = gpumem.Arena(devices[0], {"peers": list(devices)}).allocate(MIB)
    streams = [gpumem.Stream(device) for device in devices]
    with Gate(streams[0]) as gate:
        for value in range(3 * len(devices)):
            stream = streams[value % len(devices)]
            if value:
                timeline.enqueue_wait(stream, value)
            fill(str(stream.device), block, value, stream)
            timeline.enqueue_signal(stream, value + 1)
        assert timeline.value() == 0
        gate.open()
    timeline.wait(3 * len(devices), timeout=60)
    timeline.close(timeout=60)
    assert (fetch(block) == value).all()


# ---- limits, figures, reports --------------------------------------------------------------------


@case
def one_budget_holds_for_several_devices(devices):
    budget = gpumem.Budget(64 * MIB, name="all")
    arenas = [gpumem.Arena(device, budget=budget) for device in devices]
    blocks = [arena.allocate(4 * MIB) for arena in arenas]
    for arena, device in itertools.product(arenas, devices):
        if str(arena.memory.device) != device:
            arena.enable_peer(device)
    assert budget.used == sum(arena.stats().reserved for arena in arenas)
    assert dict(budget.holders()) == {arena.name: arena.stats().reserved for arena in arenas}
    error = refused(gpumem.OutOfMemoryError, lambda: arenas[-1].allocate(64 * MIB))
    assert "budget 'all'" in str(error)
    assert all(device in str(error) for device in devices)  # which hold it
    del blocks
    for arena in arenas:
        arena.close()
    assert budget.used == 0


@case
def budgets_of_devices_are_their_own(devices):
    budgets = [gpumem.Budget.of_device(device) for device in devices]
    assert len({id(each) for each in budgets}) == len(devices)
    before = [each.used for each in budgets]
    arena = gpumem.Arena(devices[-1], budget=budgets[-1])
    arena.allocate(4 * MIB)
    assert [each.used for each in budgets[:-1]] == before[:-1]
    assert budgets[-1].used == before[-1] + arena.stats().reserved


@case
def out_of_memory_text_is_of_the_arenas_device(devices):
    held = [
        gpumem.Arena(device).allocate((number + 1) * 32 * MIB)
        for number, device in enumerate(devices)
    ]
    for device, other in pairs(devices):
        arena = gpumem.Arena(device, {"max_mem": 8 * MIB, "peers": [other]}, name="small")
        block = arena.allocate(MIB)
        error = refused(gpumem.OutOfMemoryError, arena.allocate, 20 * MIB)
        assert str(error).startswith(f"{device} is out of memory"), str(error)
        assert str(error.report.memory) == error.device == device
        assert other not in str(error)
        del block
    del held


@case
def statistics_name_every_device(devices):
    arenas = [gpumem.Arena(device, name=f"arena of {device}") for device in devices]
    blocks = [arena.allocate((number + 1) * MIB) for number, arena in enumerate(arenas)]
    arenas[0].enable_peer(devices[1])
    seen = {each.name: each for each in observe.snapshot().resources}
    text = observe.prometheus_text()
    for arena, device, block in zip(arenas, devices, blocks, strict=True):
        of_one = arena.snapshot().resources[0]
        for shown in (seen[arena.name], of_one):
            assert str(shown.memory) == device
            assert block.ptr in {each.address for each in shown.blocks}
        assert f'name="arena of {device}",memory="{device}",kind="arena"' in text
        line = next(
            line
            for line in text.splitlines()
            if line.startswith("gpumem_requested_bytes") and arena.name in line
        )
        assert int(line.split()[-1]) == block.nbytes


# ---- resources of users, pools, other processes, addresses ---------------------------------------


class OverAnArena(gpumem.MemoryResource):
    """Notes which context is current when it is called."""

    def __init__(self, device: str) -> None:
        super().__init__(device)
        self._arena = gpumem.Arena(device)
        self._blocks: dict[int, gpumem.Buffer] = {}
        self.current: list[int] = []

    def allocate_raw(self, nbytes, stream):
        block = self._arena.allocate(nbytes, stream)
        self._blocks[block.ptr] = block
        self.current.append(current_context(str(self.memory.device)))
        return block.ptr

    def deallocate_raw(self, ptr, nbytes, stream):
        self.current.append(current_context(str(self.memory.device)))
        self._blocks.pop(ptr).close(stream)


def current_context(device: str) -> int:
    """Ask a device's driver which context is current on this thread."""
    context = ctypes.c_uint64()
    HostDriver(device).call_as_it_is("cuCtxGetCurrent", ctypes.byref(context))
    return context.value


@case
def resources_of_users_are_called_with_their_device_current(devices):
    contexts = {}
    for device in devices:
        with HostDriver(device).current():
            contexts[device] = current_context(device)
    assert len(set(contexts.values())) == len(devices)
    for device, other in pairs(devices):
        resource = OverAnArena(device)
        with HostDriver(other).current():
            gpumem.full(1000, 3, "u1", resource=resource).to("host")
            assert current_context(other) == contexts[other]
        assert resource.current == [contexts[device]] * 2


@case
def pools_of_every_device_are_their_own(devices):
    pools = [gpumem.DriverPool(device) for device in devices]
    for pool, device in zip(pools, devices, strict=True):
        other = next(each for each in devices if each != device)
        with pool.allocate(MIB, gpumem.Stream(device)) as block:
            assert str(block.memory) == device
            assert pool.stats().in_use == MIB
            assert sum(each.stats().in_use for each in pools) == MIB
            target = gpumem.zeros(MIB, "u1", memory=other)
            fill(device, block, 7, block.stream)
            gpumem.copy(target, block)
            assert (fetch(target) == 7).all()
            gpumem.copy(block, gpumem.full(MIB, 9, "u1", memory=other))
            assert (fetch(block) == 9).all()
        assert str(gpumem.DriverPool.default(device).memory) == device
    for pool in pools:
        gpumem.Device(pool.memory.device).synchronize()
        pool.close()


@case
def peers_of_a_pool_reach_its_blocks(devices):
    for device in devices:
        pool = gpumem.DriverPool(device)
        with pool.allocate(MIB) as before:
            others = [each for each in devices if each != device]
            assert pool.peers == ()
            for number, other in enumerate(others, 1):
                pool.enable_peer(other)
                assert [str(each) for each in pool.peers] == others[:number]
            refused(gpumem.ConfigError, pool.enable_peer, device)
            refused(ValueError, pool.enable_peer, device.partition(":")[0] + ":63")
            with pool.allocate(MIB) as after:
                gpumem.Device(device).synchronize()
                for value, other in enumerate(others, 1):
                    stream = gpumem.Stream(other)
                    for block in (before, after):
                        fill(other, block, value, stream)
                        stream.synchronize()
                        assert (fetch(block) == value).all()
        gpumem.Device(device).synchronize()
        pool.close()
        refused(gpumem.errors.ClosedError, pool.enable_peer, others[0])


@case
def tensor_is_attached_on_its_device_whichever_is_current(devices):
    context = multiprocessing.get_context("spawn")
    for device in devices:
        block = gpumem.Arena(device).allocate(MIB, shareable=True)
        fill(device, block, 7, block.stream)
        mine, theirs = context.Pipe()
        with mine, interop.export(block) as handle:
            other = context.Process(target=answer_from_there, args=(theirs, list(devices)))
            other.start()
            mine.send(handle)
            assert mine.poll(120)
            assert mine.recv() == (device, [7])
            other.join(60)
            assert other.exitcode == 0
        theirs.close()
        assert (fetch(block) == 9).all()


def answer_from_there(connection, devices: Sequence[str]) -> None:
    """Attach what arrives, tell what it holds and where, and fill it with nines."""
    if devices[0].startswith("host"):
        gpumem.device.set_host_device_count(len(devices))
    with connection, HostDriver(devices[0]).current(), connection.recv() as handle:
        tensor = interop.attach(handle)
        found = sorted(set(fetch(tensor).tolist()))
        gpumem.copy(tensor, np.full(MIB, 9, "u1"))
        gpumem.Device(tensor.device).synchronize()
        connection.send((str(tensor.memory), found))


@case
def imported_memory_is_copied_to_and_from_every_other_device(devices):
    for device, other in pairs(devices):
        block = gpumem.Arena(device).allocate(MIB, shareable=True)
        with interop.export(block) as handle:
            tensor = interop.attach(handle)
        assert str(tensor.device) == device
        there = gpumem.zeros(MIB, "u1", memory=other)
        for stream in (None, gpumem.Stream(device), gpumem.Stream(other)):
            fill(device, block, 7, block.stream)
            gpumem.Device(device).synchronize()
            gpumem.copy(there, tensor, stream)
            assert (fetch(there) == 7).all(), (device, other, stream)
            gpumem.copy(tensor, gpumem.full(MIB, 9, "u1", memory=other), stream)
            assert (fetch(tensor) == 9).all(), (device, other, stream)
        gpumem.Device(other).synchronize()


@case
def questions_about_memory_open_no_other_device(devices):
    arena = gpumem.Arena(devices[-1])
    plain, block = arena.allocate(MIB), arena.allocate(MIB, shareable=True)
    gpumem.driver_status()
    assert plain.transports() == interop.transports(plain.ptr)
    with interop.export(block) as handle:
        assert str(interop.attach(handle).device) == devices[-1]
    if devices[-1].startswith("cuda"):
        assert str(gpumem.asarray(OnlyCudaArray(block)).device) == devices[-1]
    for device in devices[:-1]:
        assert not gpumem.Device(device)._is_open()


ALONE.add(questions_about_memory_open_no_other_device.__name__)


class OnlyCudaArray:
    """Shows a block by an interface that names an address and no device."""

    def __init__(self, block: gpumem.Buffer) -> None:
        self.__cuda_array_interface__ = gpumem.from_dlpack(block).__cuda_array_interface__


# ---- sleep ---------------------------------------------------------------------------------------


@case
def tags_sleep_in_the_memory_of_another_device(devices: Sequence[str]) -> None:
    rng = np.random.default_rng(5)
    for here, there in pairs(devices):
        with gpumem.Arena(here) as arena:
            with arena.tag("a"):
                blocks = [arena.allocate(5 * MIB + 3), arena.allocate(700)]
                rows = arena.virtual((32, MIB), "uint8", committed=3)
            blocks.append(arena.allocate(2 * MIB))
            wanted = [rng.integers(0, 256, each.nbytes, "u1") for each in blocks]
            for block, values in zip(blocks, wanted, strict=True):
                gpumem.copy(gpumem.from_dlpack(block).view("u1"), values)
            in_rows = rng.integers(0, 256, (3, MIB), "u1")
            gpumem.copy(rows.tensor(), in_rows)
            free = gpumem.Device(there).free_bytes
            arena.sleep("a", to=there)
            assert free - gpumem.Device(there).free_bytes >= 5 * MIB
            arena.sleep("default", to=there)
            assert set(arena.asleep) == {"default", "a"}
            arena.wake("default")
            arena.wake("a")
            for block, values in zip(blocks, wanted, strict=True):
                assert (fetch(block) == values).all()
            assert (fetch(rows.tensor()) == in_rows).all()
            arena.sleep(to=there)
            blocks.pop(0).close()
            arena.wake()
            assert (fetch(blocks[0]) == wanted[1]).all()
            rows.close()
            for block in blocks:
                block.close()
