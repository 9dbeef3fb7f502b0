"""Sleep and wake: memory goes back, bytes wait on the host, addresses stay."""

from __future__ import annotations

import resource

import numpy as np
import pytest
from helpers import child
from helpers.arrays import fill, holds
from helpers.driver import HostDriver
from helpers.quiesce import held_by_kind

import gpumem

KIB, MIB = 1 << 10, 1 << 20


@pytest.fixture
def held(make_arena):
    """An arena with blocks of every sort: large, small, persistent; each holds its number."""
    arena = make_arena()
    buffers = [arena.allocate(size) for size in (70 * MIB, 300, 5 * MIB, 40 * KIB, 33 * MIB + 1)]
    buffers += [arena.allocate_persistent(size) for size in (1000, 3 * MIB, 100 * KIB)]
    for number, buffer in enumerate(buffers):
        fill(buffer, number + 1)
    yield arena, buffers
    if arena.asleep:
        arena.wake()
    for buffer in buffers:
        buffer.close()


@pytest.mark.parametrize("apart", [{"shareable": True}, {"transport": "ipc"}])
def test_sleep_returns_what_it_released_without_blocks_that_stay(host, apart, arena):
    with arena.allocate(MIB), arena.allocate(3 * MIB, **apart) as stays:
        fill(stays, 7)
        before, used = arena.stats(), host.used(0)
        released = arena.sleep()
        assert released == used - host.used(0) == before.reserved - arena.stats().reserved > 0
        arena.wake()
        assert holds(stays, 7)


def test_sleep_releases_memory_and_wake_restores_bytes_in_place(held, host):
    arena, buffers = held
    gap = arena.allocate(20 * MIB)
    gap.close()
    addresses = [buffer.ptr for buffer in buffers]
    before, used = arena.stats(), host.used(0)
    given = arena.sleep()
    assert arena.asleep
    assert given > 0
    assert host.used(0) == used - before.reserved
    assert arena.stats().reserved == 0
    assert arena.stats().in_use == arena.stats().asleep_bytes == before.in_use
    arena.check_invariants()
    arena.wake()
    assert not arena.asleep
    assert [buffer.ptr for buffer in buffers] == addresses
    assert all(holds(buffer, number + 1) for number, buffer in enumerate(buffers))
    assert arena.stats().asleep_bytes == 0
    assert arena.stats().reserved <= before.reserved
    arena.check_invariants()


def test_sleep_releases_every_handle_of_much_memory(host, arena):
    # Handles are released in groups of 128 MiB, some groups behind their copies.
    with arena.tag("weights", asleep="drop"):
        blocks = [arena.allocate(64 * MIB) for _ in range(24)]
    used = host.used(0)
    assert arena.sleep() == used - host.used(0) == 24 * 64 * MIB
    arena.wake()
    assert host.used(0) == used
    for block in blocks:
        block.close()


def test_sleep_unmaps_neighbouring_pages_of_a_group_in_one_call(host, arena):
    with arena.tag("weights", asleep="drop"):
        blocks = [arena.allocate(64 * MIB) for _ in range(8)]
    unmaps, releases = host.call_count("cuMemUnmap"), host.call_count("cuMemRelease")
    arena.sleep()
    # 256 handles of 2 MiB, in four groups of 128 MiB.
    assert host.call_count("cuMemRelease") - releases == 256
    assert host.call_count("cuMemUnmap") - unmaps == 4
    arena.wake()
    for block in blocks:
        block.close()


def test_persistent_blocks_sleep_too(host, arena):
    used = host.used(0)
    weights = [arena.allocate_persistent(10 * KIB) for _ in range(100)]
    assert arena.stats().reserved == host.used(0) - used == 2 * MIB
    arena.sleep()
    assert host.used(0) == used
    arena.wake()
    del weights
    arena.shrink()
    assert arena.stats().reserved == host.used(0) - used == 0


def test_peaks_can_be_reset_while_asleep(make_arena):
    arena = make_arena({"backing": "virtual"})
    weights = arena.allocate_persistent(1 << 20)
    arena.sleep()
    arena.reset_peaks()
    assert arena.stats().max_reserved == arena.stats().reserved == 0
    arena.wake()
    assert arena.stats().max_reserved == arena.stats().reserved > 0
    weights.close()


def test_sleeping_arena_refuses_allocation(held):
    arena, _ = held
    arena.sleep()
    for call in (arena.allocate, arena.allocate_persistent, arena.prepare):
        for size in (0, 100, 5 * MIB):
            if call != arena.prepare or size:
                with pytest.raises(gpumem.errors.AsleepError, match="wake"):
                    call(size)
    arena.sleep()  # again: nothing to do
    arena.shrink()
    assert arena.stats().reserved == 0
    arena.wake()
    arena.wake()
    arena.allocate(5 * MIB).close()


def test_block_freed_while_asleep_is_not_restored(held, host):
    arena, buffers = held
    arena.sleep()
    for buffer in (buffers[0], buffers[1], buffers[6]):
        buffer.close()
    copies = host.call_count("cuMemcpyHtoDAsync")
    arena.wake()
    assert host.call_count("cuMemcpyHtoDAsync") > copies
    kept = [n for n in range(len(buffers)) if n not in (0, 1, 6)]
    assert all(holds(buffers[n], n + 1) for n in kept)
    live = sum(buffers[n].nbytes for n in kept)
    assert arena.stats().reserved <= live + 10 * MIB + 32 * MIB
    arena.check_invariants()
    del buffers[6], buffers[0:2]
    with arena.allocate(70 * MIB) as again:
        fill(again, 9)


def test_sleeping_arena_can_be_closed(host):
    before = held_by_kind()
    arena = gpumem.Arena("host")
    buffer = arena.allocate(10 * MIB)
    lasting = arena.allocate_persistent(1000)
    arena.sleep()
    with pytest.raises(gpumem.errors.InUseError):
        arena.close()
    buffer.close()
    lasting.close()
    arena.close()
    with pytest.raises(gpumem.errors.ClosedError):
        arena.wake()
    with pytest.raises(gpumem.errors.ClosedError):
        arena.sleep()
    del arena, buffer, lasting
    assert gpumem.Device("host").free_bytes > 0
    assert held_by_kind()["handles"] == before["handles"]
    assert held_by_kind()["mappings"] == before["mappings"]


def test_dropped_sleeping_arena_leaves_nothing(host):
    assert gpumem.Device("host").free_bytes > 0
    before = held_by_kind()
    arena = gpumem.Arena("host")
    buffer = arena.allocate(10 * MIB)
    arena.sleep()
    del arena, buffer
    assert gpumem.Device("host").free_bytes > 0
    assert held_by_kind() == before


def test_sleep_is_refused_while_cpu_views_exist(arena):
    buffer = arena.allocate(MIB)
    view = np.frombuffer(buffer, np.uint8)
    with pytest.raises(gpumem.errors.InUseError, match="view"):
        arena.sleep()
    assert not arena.asleep
    view[:] = 3
    del view
    orphan = np.from_dlpack(arena.allocate(MIB))
    with pytest.raises(gpumem.errors.InUseError):
        arena.sleep()
    del orphan
    arena.sleep()
    with pytest.raises(gpumem.errors.AsleepError):
        memoryview(buffer)
    with pytest.raises(gpumem.errors.AsleepError):
        buffer.__dlpack__()
    arena.wake()
    assert holds(buffer, 3)
    buffer.close()


@pytest.mark.parametrize("see", [memoryview, np.from_dlpack, np.asarray])
def test_a_view_of_sleeping_memory_is_refused_without_a_wait(make_arena, see):
    arena, stream = make_arena(), gpumem.Stream("host")
    tensor = gpumem.full(1000, 7, "u1", resource=arena, stream=stream)
    seen = tensor if see is np.from_dlpack else tensor.buffer
    arena.sleep()
    with HostDriver().block(stream), pytest.raises(gpumem.errors.AsleepError):
        see(seen)
    arena.wake()
    assert (tensor.numpy() == 7).all()


def test_sleep_waits_for_queued_work(driver, stream, arena):
    buffers = [arena.allocate(4 * MIB, stream) for _ in range(3)]
    for number, buffer in enumerate(buffers):
        driver.fill(buffer, number + 1, stream)
    buffers.pop(0).close()
    arena.sleep()
    arena.wake()
    assert [holds(buffer, number + 2) for number, buffer in enumerate(buffers)] == [True, True]
    driver.fill(buffers[0], 9, stream)
    stream.synchronize()
    assert holds(buffers[0], 9), "a stream works through the old pointers"
    buffers.clear()


def test_wake_without_memory_can_be_retried(held, leave_room, host):
    arena, buffers = held
    arena.sleep()
    capacity = host.capacity(0)
    leave_room(20 * MIB)
    used = host.used(0)
    with pytest.raises(gpumem.OutOfMemoryError):
        arena.wake()
    assert arena.asleep
    assert host.used(0) == used
    arena.check_invariants()
    host.set_capacity(0, capacity)
    arena.wake()
    assert all(holds(buffer, number + 1) for number, buffer in enumerate(buffers))


def test_sleep_without_host_memory_leaves_the_arena_usable(held):
    arena, buffers = held
    limits = resource.getrlimit(resource.RLIMIT_AS)
    with open("/proc/self/statm") as file:
        mapped = int(file.read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (mapped + 16 * MIB, limits[1]))
    try:
        with pytest.raises(gpumem.OutOfMemoryError, match="host"):
            arena.sleep()
    finally:
        resource.setrlimit(resource.RLIMIT_AS, limits)
    assert not arena.asleep
    assert all(holds(buffer, number + 1) for number, buffer in enumerate(buffers))
    arena.allocate(MIB).close()


def test_arena_of_regions_cannot_sleep(make_arena):
    arena = make_arena({"backing": "regions"})
    for call in (arena.sleep, arena.wake):
        with pytest.raises(gpumem.ConfigError, match="virtual"):
            call()
    assert not arena.asleep


@pytest.mark.parametrize(
    ("memory", "settings", "reason"),
    [
        ("host", {"max_mem": "4MiB"}, "max_mem = 4194304; with backing = 'virtual' it can"),
        ("host", {"extend_strategy": 1}, "extend_strategy = 'same_as_requested'; with"),
        ("host", {"enable": False}, "enable = False$"),
        ("host/pinned", {}, "host_accessible cannot have them: expected a device's own"),
        ("host", {"source": gpumem.Arena("host")}, "its memory comes from a source$"),
    ],
)
def test_error_of_an_arena_that_cannot_sleep_says_why(memory, settings, reason):
    source = settings.get("source")
    config = {name: value for name, value in settings.items() if name != "source"}
    arena = gpumem.Arena(memory, config, source=source)
    with pytest.raises(gpumem.ConfigError, match=reason):
        arena.sleep()


@pytest.mark.parametrize(
    ("to", "error"),
    [("weights", ValueError), ("weights.asleep", ValueError), (5, TypeError), (None, TypeError)],
)
def test_place_of_sleep_that_is_none_is_refused_by_name(held, to, error):
    arena, _ = held
    with pytest.raises(error, match=r"^(invalid to = .* or a path with a '/'|to must be )"):
        arena.sleep(to=to)
    assert not arena.asleep


@pytest.mark.parametrize(
    ("code", "error", "text"),
    [
        (2, gpumem.errors.AsleepError, r"asleep in part.*cuMemCreate"),  # OUT_OF_MEMORY
        (4, gpumem.errors.ClosedError, "shutting down"),  # DEINITIALIZED: the process ends
    ],
)
def test_failed_sleep_that_cannot_be_undone_is_reported(held, host, code, error, text):
    arena, buffers = held
    host.fail("cuMemUnmap", 2, 1)  # INVALID_VALUE
    host.fail("cuMemCreate", 1, code, 1)  # of the first page, to undo the sleep
    try:
        with pytest.raises(error, match=text):
            arena.sleep()
    finally:
        host.clear_faults()
    assert arena.asleep
    arena.check_invariants()
    with pytest.raises(gpumem.errors.AsleepError):
        arena.allocate(100)
    arena.wake()
    assert all(holds(buffer, number + 1) for number, buffer in enumerate(buffers))
    arena.sleep()
    assert arena.stats().reserved == 0


def test_failed_wait_releases_no_memory_under_a_copy(held, host):
    arena, buffers = held
    host.fail("cuStreamSynchronize", 1, 2)
    try:
        arena.sleep()
    finally:
        host.clear_faults()
    host.fail("cuStreamSynchronize", 1, 2)
    try:
        arena.wake()
    finally:
        host.clear_faults()
    assert all(holds(buffer, number + 1) for number, buffer in enumerate(buffers))


ON_ANOTHER_DEVICE = """
import gpumem
from gpumem._testing import host_device as host
gpumem.device.set_host_device_count(2)
MIB = 1 << 20
arena = gpumem.Arena("host:0")
blocks = [arena.allocate(180 * MIB) for _ in range(3)]
for number, block in enumerate(blocks):
    memoryview(block)[9] = number
def whole():
    return [memoryview(block)[9] for block in blocks] == [0, 1, 2]
held = host.used(0)
# Groups of 512 MiB: the first one has gone back when the second unmap is refused.
host.fail("cuMemUnmap", 2, 1)
try:
    arena.sleep(to="host:1")
    raise SystemExit("not refused")
except gpumem.errors.DriverError:
    host.clear_faults()
assert arena.asleep == () and whole() and (host.used(0), host.used(1)) == (held, 0)
arena.check_invariants()
assert arena.sleep(to="host:1") == held == host.used(1) and host.used(0) == 0
arena.wake()
assert whole() and (host.used(0), host.used(1)) == (held, 0)
# The last copy is queued before the first group is unmapped: refused, it leaves no page to be made
# again, and the sleep makes no more handles than the store's.
def handles_and_copies():
    return host.call_count("cuMemCreate"), host.call_count("cuMemcpyPeerAsync")
before = handles_and_copies()
arena.sleep(to="host:1")
chunks, copies = (now - then for now, then in zip(handles_and_copies(), before))
arena.wake()
before, _ = handles_and_copies()
host.fail("cuMemcpyPeerAsync", copies, 1)
try:
    arena.sleep(to="host:1")
    raise SystemExit("not refused")
except gpumem.errors.DriverError:
    host.clear_faults()
assert handles_and_copies()[0] - before <= chunks
assert arena.asleep == () and whole() and (host.used(0), host.used(1)) == (held, 0)
"""


def test_sleep_on_another_device_gives_memory_back_in_groups_and_undoes_a_refusal():
    child.run_quietly(ON_ANOTHER_DEVICE)
