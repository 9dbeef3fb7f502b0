"""The functions of gpumem.h, over arenas of the host device."""

import contextlib
import ctypes
import gc
import os
import re
import threading
import weakref
from pathlib import Path

import pytest
from helpers import child
from helpers.c_arena import (
    CLOSED,
    DRIVER_ERROR,
    INVALID,
    NOT_FOUND,
    OUT_OF_MEMORY,
    Calls,
    CArena,
    Failed,
    Stats,
)
from helpers.driver import HostDriver
from helpers.graph import Graph
from helpers.threads import in_a_thread
from helpers.waiting import opened_soon

import gpumem
import gpumem.integrations.c
from gpumem import Arena, Budget, Stream, observe
from gpumem.errors import ClosedError, ConfigError

HEADER = Path(gpumem.get_include(), "gpumem.h").read_text()


@pytest.fixture
def arena():
    arena = Arena("host", {"oom_wait_ms": 0})
    yield arena
    arena.check_invariants()


@pytest.fixture
def c(arena):
    return CArena(arena)


def refusal(call, *arguments):
    with pytest.raises(Failed) as failed:
        call(*arguments)
    return failed.value.status


# ---- the header ----------------------------------------------------------------------------------


def test_table_has_the_headers_version_and_members(c):
    (version,) = re.findall(r"#define GPUMEM_VERSION (\d+)", HEADER)
    assert c.calls.version == int(version)
    assert c.calls.size == ctypes.sizeof(Calls)
    members = re.findall(r"\(\*(\w+)\)\(", HEADER)
    assert members == [name for name, _ in Calls._fields_[2:]]
    assert c.face.device == -1


def test_each_status_of_the_header_has_a_text_of_its_own(c):
    (listed,) = re.findall(r"enum gpumem_status \{(.*?)\};", HEADER, re.DOTALL)
    numbers = [int(number) for number in re.findall(r"GPUMEM_\w+ = (\d+)", listed)]
    assert numbers == list(range(8))
    assert len({c.text(number) for number in numbers}) == len(numbers)
    for unknown in (-1, len(numbers), 1 << 20):
        assert c.text(unknown) == "not a status of gpumem"


# ---- blocks --------------------------------------------------------------------------------------


def test_block_is_the_arenas_and_can_be_written(c, arena, stream):
    address = c.allocate(1000, stream)
    assert address % 256 == 0
    ctypes.memset(address, 7, 1000)
    assert arena.stats().requested_in_use == 1000
    c.deallocate(address)
    assert arena.stats().in_use == 0


def test_no_bytes_are_null_and_null_can_be_freed(c, arena):
    assert c.allocate(0) is None
    c.deallocate(None)
    c.deallocate_on(None)
    held = [c.allocate(256) for _ in range(200)]  # so that every part of the table has entries
    c.record_stream(None, Stream("host"))
    assert arena.stats().num_allocs == len(held)
    for address in held:
        c.deallocate(address)


def test_alignment_is_a_power_of_two_up_to_256(c, arena):
    for accepted in (0, 1, 8, 256):
        c.deallocate(c.allocate(100, alignment=accepted))
    for refused in (3, 257, 512, 1 << 40):
        with pytest.raises(Failed, match="a power of two up to 256") as failed:
            c.allocate(100, alignment=refused)
        assert failed.value.status == INVALID
    assert arena.stats().in_use == 0


def test_out_of_memory_is_a_status_that_leaves_the_arena_as_it_was(c, arena):
    arena.set_limit(4 << 20)
    assert refusal(c.allocate, 8 << 20) == OUT_OF_MEMORY
    assert refusal(c.allocate, (1 << 64) - 1) == OUT_OF_MEMORY
    c.deallocate(c.allocate(1 << 10))


@pytest.mark.parametrize("nbytes", [(1 << 48) - 256, (1 << 48) - 255, (1 << 48) - 1, 1 << 48])
def test_block_of_all_addresses_is_refused_with_free_blocks_there(c, arena, nbytes):
    # A search for it must not leave the bins.
    blocks = [c.allocate(200_001 * number + 1) for number in range(8)]
    for address in blocks[::2]:
        c.deallocate(address)
    assert refusal(c.allocate, nbytes) == OUT_OF_MEMORY
    arena.check_invariants()
    for address in blocks[1::2]:
        c.deallocate(address)


def test_stream_that_was_reset_is_named_again_by_every_call(c, arena):
    driver, stream, other = HostDriver(), Stream("host"), Stream("host")
    c.deallocate(c.allocate(1 << 20, stream))
    c.deallocate(c.allocate(1 << 20, other))
    arena.reset_stream(stream.ptr)
    address = c.allocate(1 << 20, other)
    with driver.block(stream):
        c.record_stream(address, stream)
        c.deallocate(address)
        assert c.allocate(1 << 20, other) != address
    stream.synchronize()
    c.deallocate(c.allocate(40 << 20, stream))
    stream.synchronize()
    arena.shrink()
    assert arena.stats().reserved < 40 << 20


def test_address_without_a_block_is_not_found(c, arena, stream):
    address = c.allocate(4096, stream)
    for call in (c.deallocate, c.deallocate_on, lambda at: c.record_stream(at, stream)):
        assert refusal(call, address + 256) == NOT_FOUND
    c.deallocate(address)
    assert refusal(c.deallocate, address) == NOT_FOUND


def test_live_blocks_never_share_a_byte(c, arena, rng, streams):
    live = {}
    for _ in range(3000):
        if live and rng.random() < 0.5:
            address, (nbytes, value) = live.popitem()
            assert ctypes.string_at(address, nbytes) == bytes([value]) * nbytes
            c.deallocate_on(address, rng.choice(streams))
        else:
            nbytes, value = rng.choice([1, 256, 300, 5000, 70_000]), rng.randrange(256)
            address = c.allocate(nbytes, rng.choice(streams))
            ctypes.memset(address, value, nbytes)
            live[address] = nbytes, value
    assert arena.stats().requested_in_use == sum(nbytes for nbytes, _ in live.values())
    for address in live:
        c.deallocate(address)
    assert arena.stats().in_use == 0


# ---- streams -------------------------------------------------------------------------------------


def test_recorded_stream_delays_reuse(c, stream):
    other = Stream("host")
    address = c.allocate(4096, stream)
    with HostDriver().block(other):
        c.record_stream(address, other)
        c.deallocate(address)
        assert c.allocate(4096, stream) != address


def test_block_freed_on_another_stream_is_reused_there_at_once(c, stream):
    other = Stream("host")
    address = c.allocate(4096, stream)
    with HostDriver().block(other):
        c.deallocate_on(address, other)
        assert c.allocate(4096, stream) != address
        assert c.allocate(4096, other) == address


def test_more_streams_than_a_hook_remembers_are_freed_on(c, arena):
    streams = [Stream("host") for _ in range(80)]
    for each in streams:
        c.deallocate_on(c.allocate(4096, streams[0]), each)
    assert arena.stats().in_use == 0


@contextlib.contextmanager
def captured(driver, stream):
    """Let a stream capture a graph inside a ``with`` block; the graph is dropped."""
    with Graph(driver, stream) as graph:
        yield
    graph.destroy()


def test_capturing_stream_is_served_by_a_graph_pool_if_c_captures(arena, stream):
    c = CArena(arena, captures=True)
    warm = c.allocate(4096, stream)
    c.deallocate_on(warm, stream)
    with captured(HostDriver(), stream):
        inside = c.allocate(4096, stream)
        assert inside != warm
        c.deallocate_on(inside, stream)
        again = c.allocate(4096, stream)
    assert c.allocate(4096, stream) == warm
    c.deallocate_on(again, stream)
    c.deallocate(warm)
    assert arena.stats().in_use == 0
    assert refusal(c.deallocate, again) == NOT_FOUND


def test_captured_block_is_freed_on_its_own_stream_unless_another_is_named(arena, stream):
    c = CArena(arena, captures=True)
    with captured(HostDriver(), stream):
        first = c.allocate(4096, stream)
        c.deallocate(first)
        again = c.allocate(4096, stream)
        assert again == first
        c.record_stream(again, stream)
    c.deallocate(again)
    assert arena.stats().in_use == 0


def test_captured_block_can_be_freed_through_any_arena_after_its_own_has_no_reference(stream):
    arena = Arena("host")
    c, alive = CArena(arena, captures=True), weakref.ref(arena)
    with captured(HostDriver(), stream):
        address = c.allocate(4096, stream)
    c = None
    del arena
    gc.collect()
    assert alive() is not None  # the block has a reference
    ctypes.memset(address, 7, 4096)
    CArena(Arena("host")).deallocate(address)
    gc.collect()
    assert alive() is None


# ---- statistics ----------------------------------------------------------------------------------


def test_stats_are_those_of_the_arena(c, arena):
    arena.set_limit(1 << 30)
    with arena.allocate(1 << 16):
        address = c.allocate(1000)
        ours, theirs = c.stats(), arena.stats()
        assert ours.in_use == theirs.in_use == (1 << 16) + 1024
        assert (ours.reserved, ours.max_reserved) == (theirs.reserved, theirs.max_reserved)
        assert (ours.allocations, ours.frees, ours.limit) == (2, 0, 1 << 30)
        c.deallocate(address)
    assert (c.stats().frees, c.stats().max_in_use) == (2, (1 << 16) + 1024)


def test_stats_fill_no_more_than_the_callers_struct(c):
    size = ctypes.sizeof(Stats)
    assert c.stats(size + 64).size == size + 64
    assert refusal(c.stats, size - 8) == INVALID


def test_report_says_why_memory_was_refused(c, arena):
    arena.set_limit(4 << 20)
    status = refusal(c.allocate, 8 << 20)
    assert "asked for 8.0 MiB" in c.report(8 << 20, status)
    assert c.report(100, INVALID) is None
    assert c.report(100, DRIVER_ERROR) is None  # it would be about another call
    arena.close()
    assert "is closed" in c.report(100, refusal(c.allocate, 100))
    assert c.report(8 << 20, OUT_OF_MEMORY) is None


def test_report_has_names_that_no_encoding_has_with_question_marks(c, arena):
    arena.set_limit(4 << 20)
    with observe.record(arena), observe.tag("model-\udcff"):
        kept = arena.allocate(1 << 20)
        status = refusal(c.allocate, 8 << 20)
        assert "model-?" in c.report(8 << 20, status)
    kept.close()


def test_synchronize_waits_for_the_streams_work(c, stream):
    gate = HostDriver().block(stream)
    with opened_soon(gate):
        c.synchronize(stream)
        assert stream.query()


def test_report_names_c_as_the_holder(c, arena):
    arena.set_limit(4 << 20)
    c.allocate(1 << 18)
    with pytest.raises(gpumem.OutOfMemoryError) as refused:
        arena.allocate(8 << 20)
    assert refused.value.report.by_framework["c"] == 1 << 18


def test_shrink_gives_idle_memory_back(c, arena):
    c.deallocate(c.allocate(4 << 20))
    assert c.shrink() > 0
    assert arena.stats().reserved == 0


# ---- budgets and debug heaps ---------------------------------------------------------------------


def test_pressure_callback_makes_room_for_c():
    budget = Budget("1MiB")
    arena = Arena("host", budget=budget, oom_wait_ms=0, count="in_use")
    held = [arena.allocate(768 << 10)]
    budget.on_pressure = lambda *_: held.clear()
    c = CArena(arena)
    address = c.allocate(512 << 10)
    assert not held
    c.deallocate(address)


def test_debug_heap_finds_a_write_of_c_past_the_end_of_a_block():
    found = []
    arena = Arena("host", debug_heap={"on_error": found.append})
    c = CArena(arena)
    address = c.allocate(1000)
    ctypes.memset(address, 7, 1001)
    c.deallocate(address)
    arena.check_heap()
    assert [each.kind for each in found] == ["overrun"]
    assert (c.stats().in_use, c.stats().frees) == (0, 1)


# ---- lifetime ------------------------------------------------------------------------------------


def test_capsule_keeps_its_arena_alive():
    arena = Arena("host")
    c, alive = CArena(arena), weakref.ref(arena)
    del arena
    gc.collect()
    assert alive() is not None
    c.deallocate(c.allocate(1000))
    del c
    gc.collect()
    assert alive() is None


def test_reference_keeps_the_arena_usable_until_any_thread_drops_it():
    arena = Arena("host")
    c, alive = CArena(arena), weakref.ref(arena)
    c.retain()
    c.capsule = None
    del arena
    gc.collect()
    address = c.allocate(1000)
    in_a_thread(c.release)
    gc.collect()
    # A block does not need the reference. Its arena is alive, and finds it.
    assert alive() is None
    assert CArena(Arena("host")).deallocate(address) is None


def test_arena_without_references_ends_with_its_last_block():
    device, other = gpumem.Device("host"), CArena(Arena("host"))
    before = device.free_bytes
    c = CArena(Arena("host"))
    blocks = [c.allocate(1000) for _ in range(300)]
    del c
    gc.collect()
    for address in blocks:
        assert device.free_bytes < before
        other.deallocate(address)
    assert refusal(other.deallocate, blocks[0]) == NOT_FOUND
    assert device.free_bytes == before


def test_reference_may_be_dropped_while_threads_free_blocks():
    device, other = gpumem.Device("host"), CArena(Arena("host"))
    before = device.free_bytes
    refused = []
    for _ in range(30):
        c = CArena(Arena("host"))
        blocks = [c.allocate(1000) for _ in range(300)]
        ready = threading.Barrier(3)

        def free(addresses, ready=ready):
            ready.wait()
            for address in addresses:
                try:
                    other.deallocate(address)
                except Failed as failed:
                    refused.append(failed)

        threads = [threading.Thread(target=free, args=[blocks[i::2]]) for i in range(2)]
        for thread in threads:
            thread.start()
        ready.wait()
        del c
        for thread in threads:
            thread.join()
    gc.collect()
    assert refused == []
    assert device.free_bytes == before


def test_closed_arena_is_refused_to_c_and_refuses_c(c, arena):
    arena.close()
    assert refusal(c.allocate, 1000) == CLOSED
    with pytest.raises(ClosedError):
        gpumem.integrations.c.allocator(arena)


def test_arena_asleep_refuses_c(c, arena):
    arena.sleep()
    assert refusal(c.allocate, 1000) == CLOSED
    arena.wake()
    c.deallocate(c.allocate(1000))


def test_two_capsules_of_an_arena_have_one_identity(c, arena):
    assert CArena(arena).face.identity == c.face.identity
    assert CArena(Arena("host")).face.identity != c.face.identity


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
def test_forks_child_frees_nothing_and_is_refused():
    child.run_quietly("""
        import os
        from helpers.c_arena import CLOSED, CArena, Failed
        import gpumem
        c = CArena(gpumem.Arena("host"))
        address = c.allocate(1000)
        pid = os.fork()
        if pid == 0:
            c.deallocate(address)
            try:
                c.allocate(1000)
            except Failed as failed:
                os._exit(0 if failed.status == CLOSED else 2)
            os._exit(3)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
        c.deallocate(address)
    """)


def test_blocks_and_references_may_be_left_at_exit():
    child.run_quietly("""
        from helpers.c_arena import CArena
        import gpumem
        c = CArena(gpumem.Arena("host"))
        c.allocate(1000)
        c.retain()
    """)


# ---- Python --------------------------------------------------------------------------------------


def test_status_names_the_arenas_that_c_has(arena):
    gc.collect()  # errors of other tests may be left in reference cycles, with what they saw
    assert not gpumem.integrations.c.status().enabled
    capsule = gpumem.integrations.c.allocator(arena)
    assert gpumem.integrations.c.status().resources == {0: arena}
    del capsule
    assert gpumem.integrations.c.status() == gpumem.integrations.Status(False, {})


def test_object_that_is_no_arena_is_refused():
    for wrong in (None, "host", gpumem.get_default_resource("host")):
        if not isinstance(wrong, Arena):
            with pytest.raises(TypeError, match=r"expected a gpumem\.Arena"):
                gpumem.integrations.c.allocator(wrong)
    for wrong in (None, 1, "yes"):
        with pytest.raises(TypeError, match=f"captures = {wrong!r}: expected True or False"):
            gpumem.integrations.c.allocator(Arena("host"), captures=wrong)
    with pytest.raises(ConfigError, match="invalid alignment = 512"):
        gpumem.integrations.c.allocator(Arena(gpumem.MemoryInfo("host", alignment=512)))
