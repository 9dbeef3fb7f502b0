"""Memory goes back to the driver without a wait for work that the arena has nothing to do with.

A held stream never ends here: whatever waits for it fails, see `without_waiting`.
"""

import gc
import os
import threading

import numpy as np
import pytest
from helpers.driver import HostDriver
from helpers.graph import Graph
from helpers.interrupting import interrupted, more_calls
from helpers.quiesce import quiesce
from helpers.threads import in_a_thread, running
from helpers.waiting import opened_soon, wait_until, without_waiting

import gpumem
from gpumem import interop
from gpumem._testing.arenas import release_retired

MIB = 1 << 20
HOUR_MS = 3_600_000
UNKNOWN = 999  # CUDA_ERROR_UNKNOWN
POLICIES = ["completed", "wait", "never"]
WAITS = [0, 50]
REGIONS = {"backing": "regions", "extend_strategy": "same_as_requested", "split_rule": "tight"}


@pytest.fixture
def gate(host, streams, driver):
    """Hold streams[0], once the host device is at rest: to bring it there waits for all streams."""
    with driver.block(streams[0]) as gate:
        yield gate
        gate.open()
        for stream in streams:
            stream.synchronize()


def memory(host):
    """How much the driver has given: regions, and pages."""
    live = host.live()
    return live["allocations"] + live["handles"]


def alive(host):
    live = host.live()
    return {name: live[name] for name in ("allocations", "handles", "mappings", "imports")}


def free_behind(arena, driver, stream, nbytes=3 * MIB, recorded=None):
    """Free a block that a stream still writes; its region is idle."""
    buffer = arena.allocate(nbytes, recorded or stream)
    if recorded is not None:
        buffer.record_stream(stream)
    driver.fill(buffer, 1, stream)
    buffer.close()


# ---- allocate ------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("wait_ms", WAITS)
@pytest.mark.parametrize(("taker", "recorded"), [(0, None), (1, None), (1, 1)])
def test_allocate_leaves_a_region_with_unfinished_work(
    make_arena, streams, driver, gate, policy, wait_ms, taker, recorded
):
    """Also with work of the requesting stream, which is as endless, or of a recorded one."""
    arena = make_arena(
        REGIONS | {"max_mem": 4 * MIB, "stream_reuse": policy, "oom_wait_ms": wait_ms}
    )
    free_behind(arena, driver, streams[0], recorded=recorded and streams[recorded])
    with without_waiting(gate), pytest.raises(gpumem.OutOfMemoryError):
        arena.allocate(4 * MIB, streams[taker])
    assert arena.stats().reserved == 3 * MIB
    gate.open()
    streams[0].synchronize()
    arena.allocate(4 * MIB, streams[taker]).close()


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("wait_ms", WAITS)
def test_allocate_gives_a_region_back_beside_a_stream_it_never_saw(
    make_arena, streams, driver, gate, policy, wait_ms
):
    arena = make_arena(
        REGIONS | {"max_mem": 4 * MIB, "stream_reuse": policy, "oom_wait_ms": wait_ms}
    )
    free_behind(arena, driver, streams[1])
    streams[1].synchronize()
    with without_waiting(gate):
        arena.allocate(4 * MIB, streams[2]).close()


@pytest.mark.parametrize("policy", POLICIES)
def test_allocate_waits_for_work_that_holds_a_region(make_arena, streams, driver, host, policy):
    config = {"max_mem": 4 * MIB, "stream_reuse": policy, "oom_wait_ms": HOUR_MS}
    arena = make_arena(REGIONS | config)
    host.set_lag(30_000_000)
    free_behind(arena, driver, streams[0])
    arena.allocate(4 * MIB, streams[0]).close()


def test_allocation_does_not_wait_twice_for_the_same_work(make_arena, streams, driver, gate, host):
    arena = make_arena(REGIONS | {"max_mem": 4 * MIB, "oom_wait_ms": 20})
    free_behind(arena, driver, streams[0])
    queries = []
    for _ in range(2):
        with without_waiting(gate), pytest.raises(gpumem.OutOfMemoryError):
            arena.allocate(4 * MIB, streams[1])
        queries.append(host.call_count("cuEventQuery"))
    assert queries[1] - queries[0] <= 4


def test_interrupt_ends_the_wait_for_work_that_holds_a_region(
    make_arena, streams, driver, gate, host
):
    arena = make_arena(REGIONS | {"max_mem": 4 * MIB, "oom_wait_ms": HOUR_MS})
    free_behind(arena, driver, streams[0])
    with interrupted(more_calls(host, "cuEventQuery", 20), gate):
        arena.allocate(4 * MIB, streams[0])
    assert arena.stats().reserved == 3 * MIB


@pytest.mark.parametrize("memory", ["host", "host/host_accessible"])
def test_freed_persistent_blocks_are_released_when_their_work_is_done(
    make_arena, streams, driver, gate, memory
):
    arena = make_arena(REGIONS, memory, default_stream=streams[0])
    buffer = arena.allocate_persistent(MIB)
    driver.fill(buffer, 1, streams[0])
    buffer.close()
    with without_waiting(gate):
        kept = arena.allocate(MIB, streams[1])
    assert arena.stats().reserved == 2 * MIB
    gate.open()
    streams[0].synchronize()
    more = arena.allocate(3 * MIB, streams[1])
    assert arena.stats().reserved == 4 * MIB
    del kept, more


KINDS = {
    "persistent": lambda arena: arena.allocate_persistent(MIB),
    "shareable": lambda arena: arena.allocate(MIB, shareable=True),
    "transport": lambda arena: arena.allocate(MIB, transport="ipc"),
}


@pytest.mark.parametrize("debug_heap", [False, {"quarantine_bytes": 0}])
@pytest.mark.parametrize(
    ("spec", "kind"),
    [
        *(("host", kind) for kind in KINDS),
        *(("host/host_accessible", kind) for kind in KINDS),
        ("host/managed", "persistent"),
    ],
)
def test_a_loop_of_blocks_with_their_own_region_holds_at_most_one_of_them(
    make_arena, host, spec, kind, debug_heap
):
    """Also where the driver would wait for the device: no stream is at work here."""
    arena = make_arena(REGIONS, spec, debug_heap=debug_heap)
    held = []
    for _ in range(5):
        KINDS[kind](arena).close()
        held.append((arena.stats().reserved, len(os.listdir("/proc/self/fd")), memory(host)))
    assert held[1:] == [held[1]] * 4


@pytest.mark.parametrize("spec", ["host", "host/host_accessible", "host/managed"])
def test_a_loop_of_dropped_arenas_holds_the_memory_of_at_most_one(host, spec):
    held = []
    for _ in range(5):
        arena = gpumem.Arena(spec, REGIONS)
        arena.allocate(MIB).close()
        held.append(memory(host))
        del arena
    assert held[1:] == [held[1]] * 4


@pytest.mark.parametrize("memory", ["host/host_accessible", "host/managed"])
def test_pinned_memory_of_freed_persistent_blocks_stays_while_a_stream_works(
    make_arena, streams, driver, gate, memory
):
    arena = make_arena(REGIONS, memory)
    other = make_arena(REGIONS)
    kept = other.allocate(MIB, streams[0])
    driver.fill(kept, 1, streams[0])
    arena.allocate_persistent(MIB).close()
    with without_waiting(gate):
        arena.allocate_persistent(MIB).close()
    assert arena.stats().reserved == 2 * MIB
    gate.open()
    streams[0].synchronize()
    arena.allocate_persistent(MIB).close()
    assert arena.stats().reserved == MIB


# ---- shrink and close ----------------------------------------------------------------------------


@pytest.mark.parametrize("policy", POLICIES)
def test_shrink_leaves_a_region_with_unfinished_work(make_arena, streams, driver, gate, policy):
    arena = make_arena(REGIONS | {"stream_reuse": policy})
    free_behind(arena, driver, streams[0])
    free_behind(arena, driver, streams[1], nbytes=4 * MIB)
    streams[1].synchronize()
    with without_waiting(gate):
        report = arena.shrink()
    assert report.released_bytes == 4 * MIB
    (region,) = report.retained
    assert "whose work is not known to be done" in region.reason
    gate.open()
    streams[0].synchronize()
    assert arena.shrink().released_bytes == 3 * MIB


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("shareable", [False, True])
def test_shrink_and_close_do_not_wait_for_a_stream_they_never_saw(
    make_arena, streams, driver, gate, policy, shareable
):
    arena = make_arena(REGIONS | {"stream_reuse": policy, "numa_node": 0 if shareable else None})
    for end in (arena.shrink, arena.close):
        if shareable:
            arena.allocate(MIB, streams[1], shareable=True).close()
        free_behind(arena, driver, streams[1])
        streams[1].synchronize()
        with without_waiting(gate):
            end()
        assert arena.stats().reserved == 0


@pytest.mark.parametrize("policy", POLICIES)
def test_close_waits_for_the_streams_of_its_arena(streams, driver, gate, policy):
    arena = gpumem.Arena("host", REGIONS | {"stream_reuse": policy})
    free_behind(arena, driver, streams[0])
    with opened_soon(gate):
        arena.close()
        assert streams[0].query(), "given back while a stream used it"


@pytest.mark.parametrize("debug_heap", [False, True])
def test_interrupt_ends_a_close_of_regions(streams, driver, gate, host, debug_heap):
    arena = gpumem.Arena("host", REGIONS, debug_heap=debug_heap)
    free_behind(arena, driver, streams[0])
    with interrupted(more_calls(host, "cuEventQuery", 20), gate):
        arena.close()
    assert not arena.closed
    arena.allocate(256, streams[1]).close()
    gate.open()
    arena.close()


def test_region_that_a_closing_arena_cannot_return_is_returned_at_its_end(host):
    quiesce()
    before = memory(host)
    arena = gpumem.Arena("host", REGIONS)
    arena.allocate(MIB).close()
    host.fail("cuMemFreeAsync", 1, UNKNOWN, 0)
    arena.close()
    host.clear_faults()
    assert memory(host) == before + 1
    del arena
    release_retired()
    assert memory(host) == before


def test_source_gets_its_memory_back_beside_a_stream_the_arena_never_saw(streams, driver, gate):
    below = gpumem.Arena("host")
    arena = gpumem.Arena("host", source=below)
    free_behind(arena, driver, streams[1])
    streams[1].synchronize()
    with without_waiting(gate):
        assert arena.shrink().released_bytes > 0
        arena.close()
    below.close()


def test_disabled_arena_does_not_wait_for_a_stream_it_never_saw(make_arena, streams, driver, gate):
    arena = make_arena({"enable": False})
    with without_waiting(gate):
        arena.allocate(MIB, streams[1]).close()
    assert arena.stats().reserved == 0


def test_disabled_arena_keeps_a_block_until_its_streams_are_done(make_arena, streams, driver, gate):
    arena = make_arena({"enable": False, "max_mem": 4 * MIB, "oom_wait_ms": 0})
    with without_waiting(gate):
        free_behind(arena, driver, streams[0])
        free_behind(arena, driver, streams[0], nbytes=MIB, recorded=streams[1])
        with pytest.raises(gpumem.OutOfMemoryError):
            arena.allocate(MIB, streams[1])
    assert arena.stats().reserved == 4 * MIB
    gate.open()
    streams[0].synchronize()
    arena.allocate(4 * MIB, streams[1]).close()
    assert arena.stats().reserved == 0


# ---- memory whose free waits in the driver -------------------------------------------------------


@pytest.mark.parametrize("memory", ["host/host_accessible", "host/managed"])
def test_allocation_that_may_not_wait_gives_no_pinned_or_managed_region_back(
    make_arena, streams, gate, memory
):
    arena = make_arena(REGIONS | {"max_mem": 4 * MIB, "oom_wait_ms": 0}, memory)
    arena.allocate(3 * MIB, streams[1]).close()
    streams[1].synchronize()
    with without_waiting(gate), pytest.raises(gpumem.OutOfMemoryError):
        arena.allocate(4 * MIB, streams[1])
    gate.open()
    arena.shrink()
    arena.allocate(4 * MIB, streams[1]).close()


@pytest.mark.parametrize("memory", ["host/host_accessible", "host/managed"])
def test_allocation_that_may_wait_gives_pinned_and_managed_regions_back(
    make_arena, streams, memory
):
    arena = make_arena(REGIONS | {"max_mem": 4 * MIB}, memory)
    arena.allocate(3 * MIB, streams[1]).close()
    arena.allocate(4 * MIB, streams[1]).close()


@pytest.fixture(params=["a live block", "a freed block", "a block before an idle stream's"])
def at_work(request, make_arena, streams, gate):
    """The held stream has a block of another arena."""
    arena = make_arena(REGIONS)
    block = arena.allocate(MIB, streams[0])
    idle = arena.allocate(MIB, streams[2])
    if request.param != "a block before an idle stream's":
        idle.close()
    if request.param == "a freed block":
        block.close()
    yield arena
    block.close()
    idle.close()


@pytest.mark.parametrize("wait_ms", WAITS)
@pytest.mark.parametrize("memory", ["host/host_accessible", "host/managed"])
def test_growth_leaves_dropped_memory_that_waits_for_a_busy_stream(
    make_arena, streams, gate, host, at_work, memory, wait_ms
):
    arena = make_arena(REGIONS | {"oom_wait_ms": wait_ms}, memory)
    before = alive(host)
    drop = {"host/managed": of_managed, "host/host_accessible": of_pinned}[memory]
    drop(streams[1])
    streams[1].synchronize()
    gc.collect()
    with without_waiting(gate):
        arena.allocate(2 * MIB, streams[1]).close()
    gate.open()
    streams[0].synchronize()
    arena.shrink()
    assert alive(host) == before


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("memory", ["host/host_accessible", "host/managed"])
@pytest.mark.parametrize("debug_heap", [False, True])
def test_allocation_waits_at_most_its_limit_for_a_delayed_release_of_a_region(
    streams, gate, at_work, memory, policy, debug_heap
):
    settings = REGIONS | {"max_mem": 5 * MIB, "oom_wait_ms": 50, "stream_reuse": policy}
    arena = gpumem.Arena(memory, settings, debug_heap=debug_heap)
    arena.allocate(3 * MIB, streams[1]).close()
    streams[1].synchronize()
    with without_waiting(gate), pytest.raises(gpumem.OutOfMemoryError):
        arena.allocate(4 * MIB, streams[1])
    gate.open()
    streams[0].synchronize()
    arena.allocate(4 * MIB, streams[1]).close()


@pytest.mark.parametrize("memory", ["host/host_accessible", "host/managed"])
def test_allocation_waits_until_a_delayed_region_can_be_released(
    make_arena, streams, gate, host, at_work, memory
):
    arena = make_arena(REGIONS | {"max_mem": 5 * MIB, "oom_wait_ms": HOUR_MS}, memory)
    arena.allocate(3 * MIB, streams[1]).close()
    streams[1].synchronize()
    found = []
    thread = threading.Thread(target=lambda: found.append(arena.allocate(4 * MIB, streams[1])))
    asked = host.call_count("cuStreamQuery")
    thread.start()
    wait_until(lambda: host.call_count("cuStreamQuery") > asked + 100)
    assert not found
    gate.open()
    thread.join()
    assert found[0].nbytes == 4 * MIB


@pytest.mark.parametrize("memory", ["host/host_accessible", "host/managed"])
def test_interrupt_ends_the_wait_for_a_delayed_release_of_a_region(
    make_arena, streams, gate, host, at_work, memory
):
    arena = make_arena(REGIONS | {"max_mem": 5 * MIB, "oom_wait_ms": HOUR_MS}, memory)
    arena.allocate(3 * MIB, streams[1]).close()
    streams[1].synchronize()
    with interrupted(more_calls(host, "cuStreamQuery", 100), gate):
        arena.allocate(4 * MIB, streams[1])
    assert arena.stats().reserved == 3 * MIB


def of_pinned(stream):
    gpumem.Arena("host/host_accessible", REGIONS).allocate(MIB, stream)


def of_managed(stream):
    gpumem.Arena("host/managed", REGIONS).allocate(MIB, stream)


def for_ipc(stream):
    gpumem.Arena("host", {"backing": "virtual"}).allocate(MIB, stream, transport="ipc")


def of_file(stream):
    gpumem.Arena("host/host_accessible", REGIONS).allocate(MIB, stream, shareable=True)


def a_registered_region(stream):
    gpumem.Arena("host", REGIONS).allocate(MIB, stream).register()


def an_import(stream):
    fd = os.memfd_create("test")
    os.truncate(fd, MIB)
    kind = interop.MemoryHandleType.OPAQUE_FD
    importer = interop.Importer.for_device("host")
    importer.import_memory(interop.MemoryDescriptor(fd, kind, MIB)).tensor(MIB, "u1")
    os.close(fd)


DROPPED = [of_pinned, of_managed, for_ipc, of_file, a_registered_region, an_import]


@pytest.mark.parametrize("backing", ["regions", "virtual"])
@pytest.mark.parametrize("wait_ms", WAITS)
@pytest.mark.parametrize("drop", DROPPED)
def test_allocation_leaves_dropped_memory_with_a_delayed_release(
    make_arena, streams, gate, host, drop, wait_ms, backing
):
    arena = make_arena({"backing": backing, "max_mem": 4 * MIB, "oom_wait_ms": wait_ms})
    before = alive(host)
    kept = arena.allocate(2 * MIB, streams[1])
    drop(streams[1])
    streams[1].synchronize()
    gc.collect()
    with without_waiting(gate):
        arena.allocate(2 * MIB, streams[1]).close()
        with pytest.raises(gpumem.OutOfMemoryError):
            arena.allocate(4 * MIB, streams[1])
        kept.close()
        arena.close()
    assert alive(host) != before
    gate.open()
    streams[0].synchronize()
    gpumem.Device("host").free_bytes  # noqa: B018  # may wait
    assert alive(host) == before


@pytest.mark.parametrize("wait_ms", WAITS)
def test_pressure_callback_that_drops_pinned_memory_makes_no_request_wait(
    make_arena, streams, gate, host, wait_ms
):
    dropped = [gpumem.Arena("host/host_accessible", REGIONS)]
    dropped[0].allocate(MIB).close()

    def drop(budget, nbytes):
        dropped.clear()

    budget = gpumem.Budget(4 * MIB, on_pressure=drop)
    arena = make_arena(REGIONS | {"oom_wait_ms": wait_ms}, budget=budget)
    before = alive(host)
    with without_waiting(gate), pytest.raises(gpumem.OutOfMemoryError):
        arena.allocate(5 * MIB, streams[1])
    assert not dropped
    assert alive(host) == before
    gate.open()
    arena.shrink()
    assert alive(host) != before


# ---- dropped arenas ------------------------------------------------------------------------------


@pytest.mark.parametrize("backing", ["regions", "virtual"])
@pytest.mark.parametrize("default_stream", [False, True])
def test_dropped_arena_with_unfinished_work_stays_for_a_later_call(
    make_arena, host, backing, default_stream
):
    """Its streams end with it, so that nobody could record an event on them later."""
    quiesce()
    arena = make_arena(REGIONS)
    kept, driver, stream = arena.allocate(MIB), HostDriver(), gpumem.Stream("host")
    if default_stream:
        stream = gpumem.Stream.from_handle("host", 0)
    with driver.block(stream) as gate:
        before = memory(host)
        dropped = gpumem.Arena("host", {"backing": backing})
        free_behind(dropped, driver, stream)
        held = memory(host)
        del dropped, stream
        gc.collect()
        with without_waiting(gate):
            arena.allocate(3 * MIB, gpumem.Stream("host")).close()
            arena.shrink()
            gpumem.Arena("host").close()
        assert memory(host) == held > before
    gpumem.Device("host").synchronize()
    arena.shrink()
    assert memory(host) == before
    kept.close()


def test_event_that_was_refused_once_does_not_keep_the_memory_of_a_dropped_arena(host):
    quiesce()
    driver, stream = HostDriver(), gpumem.Stream("host")
    before = memory(host)
    with driver.block(stream):
        arena = gpumem.Arena("host", REGIONS)
        free_behind(arena, driver, stream)
        host.fail("cuEventRecord", 1, UNKNOWN, 1)
        del arena, stream
        host.clear_faults()
        release_retired()
        assert memory(host) > before

    def is_back():  # without a wait for the device
        release_retired()
        return memory(host) == before

    wait_until(is_back, patience_s=20)


def test_arena_in_a_cycle_records_its_streams_before_they_end(host):
    quiesce()
    driver, stream = HostDriver(), gpumem.Stream("host")
    with driver.block(stream) as gate:
        before = memory(host)
        arena = gpumem.Arena("host", REGIONS)
        free_behind(arena, driver, stream)
        cycle = [arena, stream]
        cycle.append(cycle)
        del arena, cycle, stream
        with without_waiting(gate):
            gc.collect()
            release_retired()
        assert memory(host) > before
    gpumem.Device("host").synchronize()
    release_retired()
    assert memory(host) == before


def test_view_that_outlives_its_arena_keeps_the_memory_until_the_device_is_waited_for(host):
    """The stream that it is freed on may be gone, so only the whole device can be asked."""
    quiesce()
    driver, stream = HostDriver(), gpumem.Stream("host")
    arena = gpumem.Arena("host", REGIONS)
    buffer = arena.allocate(MIB, stream)
    array = np.from_dlpack(buffer)
    with driver.block(stream) as gate:
        driver.fill(buffer, 1, stream)
        held = memory(host)
        del buffer, arena
        gc.collect()
        release_retired()
        del array, stream
        with without_waiting(gate):
            release_retired()
        assert memory(host) == held
    gpumem.Device("host").synchronize()
    release_retired()
    assert memory(host) == held - 1


@pytest.mark.parametrize("backing", ["regions", "virtual", "heap", "rows"])
def test_memory_of_a_dropped_arena_stays_while_a_recorded_stream_uses_it(host, backing):
    """A view outlived the arena, and was freed on the default stream."""
    quiesce()
    driver, stream = HostDriver(), gpumem.Stream("host")
    arena = (
        gpumem.Arena("host", debug_heap=True)
        if backing == "heap"
        else gpumem.Arena("host", backing="regions" if backing == "regions" else "virtual")
    )
    if backing == "rows":
        made = arena.virtual((8, MIB), "uint8", committed=4)
        array = np.from_dlpack(made.tensor())
    else:
        made = arena.allocate(4 * MIB)
        array = np.from_dlpack(made)
    made.record_stream(stream)
    with driver.block(stream) as gate:
        driver.call("cuMemsetD8Async", array.ctypes.data, 1, MIB, stream.ptr)
        held = memory(host)
        del made, arena
        gc.collect()
        del array
        with without_waiting(gate):
            for _ in range(3):
                release_retired()
        assert memory(host) == held
    stream.synchronize()
    gpumem.Device("host").synchronize()
    release_retired()
    assert memory(host) < held


def test_dropped_graph_pool_gives_its_memory_back(make_arena, host):
    arena = make_arena(REGIONS)
    stream = gpumem.Stream("host")
    quiesce()
    before = memory(host)
    for _ in range(3):
        with arena.capture(stream) as pool:
            arena.allocate(MIB, stream).close()
        del pool
        quiesce()
        assert memory(host) == before


# ---- captures and threads ------------------------------------------------------------------------


@pytest.mark.parametrize("end", ["shrink", "close", "allocate", "drop"])
def test_region_is_released_under_another_threads_capture(streams, driver, end):
    """In mode global a free that is not relaxed fails, and invalidates the capture."""
    arena = gpumem.Arena("host", REGIONS | {"max_mem": 4 * MIB})
    other = gpumem.Arena("host", REGIONS)
    arena.allocate(3 * MIB, streams[1]).close()
    work = {
        "shrink": arena.shrink,
        "close": arena.close,
        "allocate": lambda: arena.allocate(4 * MIB, streams[1]).close(),
        "drop": lambda: other.allocate(MIB).close(),
    }
    act = work.pop(end)
    work.clear()
    with Graph(driver, streams[2]) as graph:
        if end == "drop":
            del arena
        in_a_thread(act)
    graph.destroy()


def test_other_threads_give_regions_back_while_one_waits_for_memory(
    make_arena, streams, driver, gate, host
):
    arena = make_arena(REGIONS | {"max_mem": 4 * MIB, "oom_wait_ms": HOUR_MS})
    free_behind(arena, driver, streams[0])
    served = []
    queried = more_calls(host, "cuEventQuery", 20)
    with running(lambda: served.append(arena.allocate(4 * MIB, streams[1]))):
        wait_until(queried)
        with without_waiting(gate):
            other = gpumem.Arena("host", REGIONS)
            for _ in range(20):
                other.allocate(MIB, streams[2]).close()
                other.shrink()
                arena.shrink()
                arena.allocate(MIB, streams[2]).close()
            other.close()
        assert not served
        gate.open()
    assert len(served) == 1
    served.clear()
