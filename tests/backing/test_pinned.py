"""Pinned host memory: large regions are made by several threads and registered, small are not."""

import os

import numpy as np
import pytest
from helpers import child
from helpers.arrays import fill, holds
from helpers.threads import in_threads, with_a_context_stack_of_its_own
from helpers.waiting import wait_until

import gpumem

KIB, MIB = 1 << 10, 1 << 20
PINNED = "host/host_accessible"
EXACT = {"extend_strategy": "same_as_requested"}
OUT_OF_MEMORY, NOT_SUPPORTED, UNKNOWN = 2, 801, 999


def mappings():
    """Yield (start, end, resident bytes, flags) of this process's mappings."""
    with open("/proc/self/smaps") as lines:
        for line in lines:
            word, *rest = line.split()
            if "-" in word and ":" not in word:
                start, end = (int(part, 16) for part in word.split("-"))
            elif word == "Rss:":
                resident = int(rest[0]) * KIB
            elif word == "VmFlags:":
                yield start, end, resident, rest


def mapping_at(address):
    found = [one for one in mappings() if one[0] <= address < one[1]]
    return found[0] if found else None


def mapped_bytes():
    """Bytes of the mappings that a fork does not copy: those that pinned regions make."""
    return sum(end - start for start, end, _, flags in mappings() if "dc" in flags)


def held(host):
    """What is alive that a region is made of."""
    return mapped_bytes(), host.live()["allocations"]


@pytest.mark.parametrize("nbytes", [2 * MIB, 3 * MIB + 4 * KIB, 70 * MIB + 256])
def test_large_pinned_region_is_registered_in_whole_populated_pages(make_arena, host, nbytes):
    before = host.call_count("cuMemHostRegister"), host.call_count("cuMemHostAlloc")
    buffer = make_arena(EXACT, PINNED).allocate(nbytes)
    after = host.call_count("cuMemHostRegister"), host.call_count("cuMemHostAlloc")
    assert after == (before[0] + 1, before[1])
    start, end, resident, flags = mapping_at(buffer.ptr)
    assert start % (2 * MIB) == 0
    assert end - start == -(-nbytes // 4096) * 4096
    assert resident == end - start
    assert {"hg", "dc"} <= set(flags), "huge pages, and no copy in a fork's child"


def test_small_pinned_region_is_allocated_by_the_driver(make_arena, host):
    before = host.call_count("cuMemHostRegister"), host.call_count("cuMemHostAlloc")
    make_arena(EXACT, PINNED).allocate(2 * MIB - 256).close()
    after = host.call_count("cuMemHostRegister"), host.call_count("cuMemHostAlloc")
    assert after == (before[0], before[1] + 1)


@pytest.fixture
def kept(make_arena):
    """An arena that has kept 40 MiB for its next sleep."""
    arena = make_arena()
    with arena.allocate(40 * MIB):
        arena.sleep()
        arena.wake()
        yield lambda: arena.stats().kept_for_sleep


def test_host_memory_kept_for_sleep_is_released_before_a_refusal(make_arena, host, kept):
    pinned = make_arena({"max_mem": 16 * MIB}, PINNED)
    with pinned.allocate(10 * MIB), pytest.raises(gpumem.OutOfMemoryError):
        pinned.allocate(10 * MIB)
    assert kept() == 40 * MIB, "it does not help against a limit"
    host.fail("cuMemHostRegister", 1, OUT_OF_MEMORY)
    with pinned.allocate(11 * MIB):
        assert kept() == 0


def test_host_memory_kept_for_sleep_gives_way_to_the_sleep_of_another_arena(make_arena, host, kept):
    other = make_arena()
    with other.allocate(40 * MIB) as block:
        fill(block, 7)
        host.fail("cuMemHostRegister", 1, OUT_OF_MEMORY)
        other.sleep()
        assert kept() == 0
        other.wake()
        assert holds(block, 7)
    other.check_invariants()


def test_page_population_leaves_no_thread(make_arena):
    before = set(os.listdir("/proc/self/task"))  # some of earlier tests may just be ending
    make_arena(EXACT, PINNED).allocate(200 * MIB).close()
    wait_until(lambda: set(os.listdir("/proc/self/task")) <= before)


def test_released_pinned_region_is_unmapped(make_arena, host):
    before = held(host)
    arena = make_arena(EXACT, PINNED)
    buffers = [arena.allocate(size * MIB) for size in (1, 5, 33)]
    assert mapped_bytes() == before[0] + 38 * MIB
    del buffers
    arena.shrink()
    assert held(host) == before


def test_several_pinned_arenas_grow_concurrently(make_arena):
    arenas = [make_arena(EXACT, PINNED) for _ in range(4)]
    seen = []

    def work(number):
        for _ in range(5):
            with arenas[number % 2].allocate((number + 2) * MIB) as buffer:
                np.frombuffer(buffer, np.uint8)[:] = number
                seen.append((np.frombuffer(buffer, np.uint8) == number).all())

    in_threads(work, range(4))
    assert len(seen) == 20
    assert all(seen)


@pytest.mark.parametrize("call", ["cuMemHostRegister", "cuMemHostGetDevicePointer"])
def test_region_falls_back_to_driver_allocation_when_registration_fails(make_arena, host, call):
    before = held(host)
    arena = make_arena(EXACT, PINNED)
    calls = host.call_count("cuMemHostAlloc")
    host.fail(call, 1, NOT_SUPPORTED)
    with arena.allocate(4 * MIB) as buffer:
        np.frombuffer(buffer, np.uint8)[:] = 1
        assert host.call_count("cuMemHostAlloc") == calls + 1
        assert mapped_bytes() == before[0], "what was mapped for it is gone"
    arena.shrink()
    assert held(host) == before


def test_failed_registration_leaves_no_page(make_arena, host):
    before = held(host)
    arena = make_arena({**EXACT, "max_mem": 64 * MIB}, PINNED)
    host.fail("cuMemHostRegister", 1, OUT_OF_MEMORY, 0)
    with pytest.raises(gpumem.OutOfMemoryError):
        arena.allocate(8 * MIB)
    assert held(host) == before
    assert arena.stats().reserved == 0


def test_region_is_released_later_after_a_failed_release(make_arena, host):
    before = held(host)
    arena = make_arena(EXACT, PINNED)
    arena.allocate(8 * MIB).close()
    host.fail("cuMemHostUnregister", 1, UNKNOWN)
    arena.shrink()
    assert arena.stats().reserved == 8 * MIB
    with arena.allocate(8 * MIB) as buffer:  # it is as good as before
        np.frombuffer(buffer, np.uint8)[:] = 1
    arena.shrink()
    assert arena.stats().reserved == 0
    assert held(host) == before


def test_request_beyond_host_memory_is_refused_before_pages_are_populated(make_arena):
    arena = make_arena(EXACT, PINNED)
    with pytest.raises(gpumem.OutOfMemoryError):
        arena.allocate(1 << 42)


def test_pages_stay_mapped_when_unregistration_fails(make_arena, host):
    arena = make_arena(EXACT, PINNED)
    buffer = arena.allocate(2 * MIB)
    address = buffer.ptr
    host.fail("cuMemHostUnregister", 1, UNKNOWN)
    buffer.close()
    arena.shrink()
    assert mapping_at(address), "the device may still write there"


@pytest.mark.parametrize("error", [OUT_OF_MEMORY, UNKNOWN])
@with_a_context_stack_of_its_own
def test_failure_of_any_driver_call_leaves_nothing_behind(host, error):
    before = held(host)
    for call in range(1, 100):
        arena = gpumem.Arena(PINNED, EXACT)
        host.fail(None, call, error)
        calls = host.call_count()
        try:
            with arena.allocate(3 * MIB), arena.allocate(MIB):
                pass
        except (gpumem.OutOfMemoryError, gpumem.errors.DriverError):
            pass
        reached = host.call_count() - calls >= call
        host.clear_faults()
        arena.check_invariants()
        arena.close()
        assert held(host) == before, f"call {call}"
        if not reached:
            break
    assert call > 8


def test_fork_and_exit_with_pinned_memory_are_quiet():
    child.run_quietly("""
        import os, warnings, gpumem
        warnings.simplefilter("ignore", DeprecationWarning)
        arena = gpumem.Arena("host/host_accessible", {"extend_strategy": "same_as_requested"})
        buffer, view = arena.allocate(3 << 20), memoryview(arena.allocate(4 << 20))
        if os.fork() == 0:
            try:
                arena.allocate(1)
            except gpumem.errors.ClosedError:
                buffer.close()
                arena.close()
                other = gpumem.Arena("host/host_accessible")
                memoryview(other.allocate(8 << 20))[:] = bytes(8 << 20)
            else:
                print("the parent's arena served its child")
        else:
            assert os.wait()[1] == 0
            view[:] = bytes(4 << 20)
    """)


# ---- Copies of sleeping memory -------------------------------------------------------------------


def words(buffer):
    return np.frombuffer(buffer, "uint64")


@pytest.fixture
def awake(make_arena):
    """An arena and its 600 MiB that are used, so that their copy has three parts."""
    arena = make_arena({"sleep_keep_bytes": 0})
    with arena.allocate(600 * MIB) as buffer:
        words(buffer)[:] = np.arange(buffer.nbytes // 8)
        yield arena, buffer
        if arena.asleep:
            arena.wake()
        assert (words(buffer) == np.arange(buffer.nbytes // 8)).all()


def test_pinned_copy_of_sleeping_memory_is_registered_in_parts(awake, host):
    arena, buffer = awake
    before, calls = mapped_bytes(), host.call_count("cuMemHostRegister")
    arena.sleep()
    assert mapped_bytes() - before == buffer.nbytes
    assert host.call_count("cuMemHostRegister") - calls == 3
    arena.wake()
    assert mapped_bytes() == before


def test_refused_sleep_leaves_no_page_and_no_thread(awake, host):
    arena, _ = awake
    before, threads = held(host), set(os.listdir("/proc/self/task"))
    host.fail("cuMemcpyDtoHAsync", 1, UNKNOWN)
    with pytest.raises(gpumem.errors.DriverError, match="cuMemcpyDtoHAsync"):
        arena.sleep()
    assert held(host) == before
    wait_until(lambda: set(os.listdir("/proc/self/task")) <= threads)


@pytest.mark.parametrize("part", [1, 2, 3])
def test_part_of_a_copy_that_cannot_be_registered_comes_from_the_driver(awake, host, part):
    arena, _ = awake
    before, calls = held(host), host.call_count("cuMemHostAlloc")
    host.fail("cuMemHostRegister", part, NOT_SUPPORTED, 2)
    arena.sleep()
    assert host.call_count("cuMemHostAlloc") == calls + 1
    arena.wake()
    assert held(host) == before
