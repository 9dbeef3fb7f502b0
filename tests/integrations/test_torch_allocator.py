"""gpumem's allocator in the place of PyTorch's, with PyTorch's c10 libraries, on the host device.

It needs a PyTorch that is unpacked: GPUMEM_TORCH names its folder ``torch``.
"""

import ctypes

import pytest
from helpers import torch_library
from helpers.driver import HostDriver
from helpers.pressure import arena_that_releases_under_pressure
from helpers.torch_library import Refused

from gpumem import Arena, Stream, observe
from gpumem._testing import torch_hooks

pytestmark = pytest.mark.skipif(
    torch_library.unpacked() is None,
    reason=f"{torch_library.VARIABLE} names no folder of an unpacked PyTorch",
)

MIB = 1 << 20
STATE, ALLOC, ALL = 1, 2, 3  # of RecordContext


@pytest.fixture
def driver(torch_driver):
    return torch_driver


@pytest.fixture
def arena(driver):
    """An arena that serves device 0; a fresh one takes over after the test."""
    arena = Arena("host", {"oom_wait_ms": 0})
    torch_hooks.serve(0, arena)
    driver.reset_accumulated()
    driver.reset_peaks()
    yield arena
    driver.history(0, 1, 0, 1, "")
    torch_hooks.serve(0, Arena("host"))
    arena.check_invariants()


@pytest.fixture
def uncached(driver):
    """Without caching every block has memory of its own."""
    driver.enable(0)
    yield
    driver.enable(1)


# ---- blocks --------------------------------------------------------------------------------------


def test_allocator_takes_the_place_of_pytorchs(driver):
    assert driver.start(1) == "gpumem 1 1"


def test_block_is_allocated_from_the_arena_and_freed_to_it(driver, arena):
    address = driver.alloc(1000)
    ctypes.memset(address, 7, 1000)
    assert arena.stats().requested_in_use == 1000
    assert driver.base(address) == "1 1024"
    driver.free(address)
    assert arena.stats().in_use == 0
    assert driver.alloc(0) is None
    driver.free(0)


def test_stream_recorded_for_a_block_delays_its_reuse(driver, arena, stream, torch_stream):
    other = torch_stream
    address = driver.alloc(4096, stream.ptr)
    with HostDriver().block(other):
        driver.record(address, other.ptr)
        driver.free(address)
        stats = driver.stats()
        assert stats["allocation"][0] == [0, 1, 1, 1]
        assert stats["active"][0] == [1, 1, 1, 0]
        assert stats["active_bytes"][0] == [4096, 4096, 4096, 0]
        again = driver.alloc(4096, stream.ptr)
        assert again != address
        states = [
            block[2] for segment in driver.snapshot(0, 0)["segments"] for block in segment["blocks"]
        ]
        assert states.count(1) == 1
    other.synchronize()
    driver.empty_cache()
    assert driver.stats()["active"][0][0] == 1
    driver.free(again)


def test_empty_cache_gives_idle_memory_back(driver, arena):
    driver.free(driver.alloc(64 * MIB))
    assert driver.stats()["reserved_bytes"][0][0] >= 64 * MIB
    driver.empty_cache()
    assert driver.stats()["reserved_bytes"][0][0] == 0


def test_freed_blocks_side_by_side_are_one_piece_of_a_snapshot(driver, arena):
    addresses = [driver.alloc(512) for _ in range(11)]
    for address in addresses[:5] + addresses[7:]:
        driver.free(address)
    (segment,) = driver.snapshot(0, 0)["segments"]
    assert [block[2] for block in segment["blocks"]] == [0, 2, 2, 0]
    for address in addresses[5:7]:
        driver.free(address)


def test_without_caching_a_block_has_memory_of_its_own_which_no_statistic_counts(driver, arena):
    idle = driver.alloc(4096)
    driver.free(idle)
    before = driver.stats()["requested_bytes"]
    held = arena.stats().reserved
    driver.enable(0)
    try:
        address = driver.alloc(4096)
    finally:
        driver.enable(1)
    assert address != idle
    assert arena.stats().reserved > held
    assert arena.stats().num_reserves == 1
    assert driver.stats()["requested_bytes"] == before
    driver.free(address)
    assert driver.stats()["requested_bytes"] == before
    driver.empty_cache()
    assert arena.stats().reserved == 0


def test_caching_stays_off_where_pytorchs_variable_forbids_it(driver, arena, uncached, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setenv("PYTORCH_NO_CUDA_MEMORY_CACHING", "1")
        driver.enable(1)
    address = driver.alloc(4096)
    assert driver.stats()["requested_bytes"][0][0] == 0
    assert arena.stats().in_use == 4096
    driver.free(address)


def test_without_caching_blocks_of_a_replaced_arena_are_freed_in_it(driver, arena, uncached):
    address = driver.alloc(4096)
    torch_hooks.serve(0, Arena("host"))
    driver.free(address)
    assert arena.stats().in_use == 0


def test_empty_cache_of_a_pool_releases_its_idle_memory_and_no_other(
    driver, arena, stream, numbers
):
    number, other = next(numbers), next(numbers)
    driver.free(driver.alloc(64 * MIB))
    blocks = {}
    for each in (number, other):
        with driver.allocating_to(each, stream):
            blocks[each] = driver.alloc(64 * MIB, stream.ptr), driver.alloc(64 * MIB, stream.ptr)
        driver.free(blocks[each][0])
    held = driver.stats()["reserved_bytes"][0][0]
    driver.empty_cache(number)  # a graph may write what is idle
    assert driver.stats()["reserved_bytes"][0][0] == held
    driver.release(number)
    driver.empty_cache(number)
    assert held - driver.stats()["reserved_bytes"][0][0] == 64 * MIB
    driver.free(blocks[number][1])
    driver.empty_cache(number)
    assert held - driver.stats()["reserved_bytes"][0][0] == 128 * MIB
    driver.free(blocks[other][1])
    driver.release(other)


def test_memory_fraction_bounds_the_arena(driver, arena):
    assert driver.fraction(0.25) == 0.25
    assert arena.stats().limit == arena.memory.device.total_bytes // 4
    assert driver.fraction(0.0) == 0.0
    with pytest.raises(Refused, match="out of memory"):
        driver.alloc(1)
    with pytest.raises(Refused, match="within"):
        driver.fraction(1.5)


def test_memory_fraction_is_that_of_the_settings_until_one_is_set(driver):
    assert driver.fraction_now(1) == torch_library.FIRST_FRACTION


def test_largest_block_is_what_free_memory_and_the_limit_leave(driver, arena):
    arena.set_limit(64 * MIB)
    assert driver.cache_info() == 64 * MIB
    address = driver.alloc(48 * MIB)
    assert driver.cache_info() <= 16 * MIB
    driver.free(address)
    assert driver.cache_info() >= 48 * MIB


# ---- memory is out -------------------------------------------------------------------------------


def test_out_of_memory_is_pytorchs_error_and_is_observed(driver, arena):
    driver.observe()
    driver.fraction(0.5)
    arena.set_limit(MIB)
    with pytest.raises(
        Refused, match=r"^CUDA out of memory\. Tried to allocate 2\.00 MiB"
    ) as refused:
        driver.alloc(2 * MIB)
    assert refused.value.out_of_memory
    assert driver.stats()["num_ooms"] == 1
    assert driver.observed()[-1] == [0, 2 * MIB, torch_library.DEVICE_BYTES // 2]


def test_out_of_memory_with_a_tag_that_no_encoding_has_is_pytorchs_error(driver, arena):
    arena.set_limit(2 * MIB)
    with observe.record(arena), observe.tag("model-\udcff"):
        kept = arena.allocate(MIB)
        with pytest.raises(Refused, match=r"CUDA out of memory(.|\n)*model-\?") as refused:
            driver.alloc(2 * MIB)
    assert refused.value.out_of_memory
    kept.close()


def test_closed_arena_is_no_out_of_memory(driver):
    arena = Arena("host")
    torch_hooks.serve(0, arena)
    arena.close()
    with pytest.raises(Refused, match="closed") as refused:
        driver.alloc(4096)
    assert not refused.value.out_of_memory
    torch_hooks.serve(0, Arena("host"))


def test_pool_serves_other_allocations_when_their_memory_is_out(driver, stream, numbers):
    arena = Arena("host", {"oom_wait_ms": 0, "max_mem": 32 * MIB})
    torch_hooks.serve(0, arena)
    spare, plain = next(numbers), next(numbers)
    for number, when_out in ((plain, 0), (spare, 1)):
        driver.make_pool(number, 0, when_out, 0)
        with driver.allocating_to(number, stream):
            driver.free(driver.alloc(12 * MIB, stream.ptr))
        driver.release(number)
    address = driver.alloc(12 * MIB, stream.ptr)
    segments = driver.snapshot(spare, 0)["segments"]
    assert any(s["address"] <= address < s["address"] + s["total"] for s in segments)
    driver.free(address)
    driver.release(plain)
    with pytest.raises(Refused) as refused:
        driver.alloc(64 * MIB, stream.ptr)
    assert refused.value.out_of_memory
    driver.release(spare)


@pytest.mark.parametrize("caching", [1, 0])
def test_budget_callback_runs_before_memory_is_out(driver, caching, uncached):
    arena, kept, _ = arena_that_releases_under_pressure(300 * MIB)
    torch_hooks.serve(0, arena)
    kept.append(arena.allocate(200 * MIB))
    driver.enable(caching)
    driver.free(driver.alloc(200 * MIB))
    assert not kept
    torch_hooks.serve(0, Arena("host"))


# ---- statistics ----------------------------------------------------------------------------------


def test_statistics_count_blocks_requested_bytes_and_padding(driver, arena):
    first, second = driver.alloc(1000), driver.alloc(3 * MIB)
    driver.free(second)
    stats = driver.stats()
    assert stats["allocation"][0] == [1, 2, 2, 1]
    assert stats["requested_bytes"][0] == [1000, 1000 + 3 * MIB, 1000 + 3 * MIB, 3 * MIB]
    assert stats["allocated_bytes"][0] == [1024, 1024 + 3 * MIB, 1024 + 3 * MIB, 3 * MIB]
    assert stats["reserved_bytes"][0][0] == arena.stats().reserved
    assert stats["inactive_split_bytes"][0][0] == arena.stats().reserved - 1024
    assert stats["segment"][0][0] == stats["num_device_alloc"] - stats["num_device_free"] >= 1
    for name, part in stats.items():
        if isinstance(part, list) and name != "pools":
            assert part[0][0] == part[1][0] + part[2][0]
    driver.free(first)


def test_reset_of_peaks_and_of_sums_keeps_what_is_live(driver, arena):
    first = driver.alloc(1024)
    driver.free(driver.alloc(MIB))
    driver.reset_peaks()
    assert driver.stats()["allocated_bytes"][0][:2] == [1024, 1024]
    driver.reset_accumulated()
    assert driver.stats()["allocation"][0] == [1, 1, 0, 0]
    driver.free(first)
    assert driver.stats()["allocation"][0] == [0, 1, 0, 1]


def test_reserved_counts_the_memory_of_pools_and_its_peak(driver, arena, stream, numbers):
    number = next(numbers)
    with driver.allocating_to(number, stream):
        address = driver.alloc(8 * MIB, stream.ptr)
    held = driver.stats()["reserved_bytes"][0]
    assert held[0] >= 8 * MIB
    driver.free(address)
    driver.release(number)
    driver.empty_cache()
    after = driver.stats()["reserved_bytes"][0]
    assert after[0] == 0
    assert after[1] >= held[0]


def test_statistics_name_the_bytes_of_each_pool(driver, arena, stream, numbers):
    if driver.stats()["pools"] is None:
        pytest.skip("this PyTorch does not count them")
    number = next(numbers)
    with driver.allocating_to(number, stream):
        address = driver.alloc(64 * MIB, stream.ptr)
    assert driver.stats()["pools"] == [[number, 64 * MIB, 64 * MIB]]
    driver.free(address)
    driver.release(number)
    driver.empty_cache()
    assert driver.stats()["pools"] == [[number, 0, 64 * MIB]]
    driver.reset_peaks()
    assert driver.stats()["pools"] == []


def test_profiler_hears_of_a_block_and_of_its_end(driver, arena):
    kept = driver.alloc(1024)
    assert driver.profiled(2048) == [[2048, 3072, True], [-2048, 1024, True]]
    driver.free(kept)


# ---- pools ---------------------------------------------------------------------------------------


def test_stream_of_a_pool_allocates_there_and_others_do_not(driver, arena, stream, numbers):
    number = next(numbers)
    with driver.allocating_to(number, stream):
        inside, outside = driver.alloc(4096, stream.ptr), driver.alloc(4096)
    assert arena.stats().num_allocs == 1
    assert driver.live(number, [inside])
    assert not driver.live(number, [outside])
    assert not driver.live(number, [])
    (segment,) = driver.snapshot(number, 0)["segments"]
    assert segment["pool"] == number
    assert segment["address"] <= inside < segment["address"] + segment["total"]
    driver.free(inside)
    driver.free(outside)
    assert driver.live(number, [])
    driver.release(number)


def test_pool_is_used_until_its_last_release(driver, arena, stream, numbers):
    number = next(numbers)
    assert driver.use_count(number) == 0
    driver.make_pool(number, 0, 0, 0)
    with driver.allocating_to(number, stream):
        assert driver.use_count(number) == 2
    driver.release(number)
    assert driver.use_count(number) == 1
    driver.release(number)
    assert driver.use_count(number) == 0
    with pytest.raises(Refused, match="has no pool"):
        driver.live(number, [])


def test_blocks_outlive_their_pool(driver, arena, stream, numbers):
    number = next(numbers)
    with driver.allocating_to(number, stream):
        address = driver.alloc(MIB, stream.ptr)
    driver.release(number)
    ctypes.memset(address, 1, MIB)
    assert [segment["pool"] for segment in driver.snapshot(0, 0)["segments"]] == [number]
    driver.free(address)
    driver.empty_cache()
    assert driver.snapshot(0, 0)["segments"] == []


def test_mem_pool_keeps_unfinished_work_of_one_stream_from_another(driver, arena, stream, numbers):
    number, other = next(numbers), Stream("host")
    driver.make_pool(number, 0, 0, 0)
    with driver.allocating_to(number, stream):
        address = driver.alloc(4096, stream.ptr)
    with HostDriver().block(stream):
        driver.free(address)
        with driver.allocating_to(number, other):
            taken = driver.alloc(4096, other.ptr)
        assert taken != address
    stream.synchronize()
    driver.free(taken)
    for _ in range(3):
        driver.release(number)


def test_mem_pool_over_another_allocator_draws_from_it(driver, arena, stream, numbers):
    number = next(numbers)
    driver.make_pool(number, 1, 0, 0)
    assert driver.foreign() == [0, 0, True]
    with driver.allocating_to(number, stream):
        addresses = [driver.alloc(MIB, stream.ptr) for _ in range(3)]
    assert driver.foreign() == [2, 0, True]
    assert len(driver.snapshot(number, 0)["segments"]) == 2
    for address in addresses:
        ctypes.memset(address, 3, MIB)
        driver.free(address)
    driver.release(number)
    driver.release(number)
    driver.empty_cache()
    assert driver.foreign() == [2, 2, False]


@pytest.mark.parametrize("queued", [False, True])
@pytest.mark.parametrize("foreign", [0, 1])
def test_memory_of_an_ended_pool_is_released_once_its_last_block_is_free(
    driver, arena, stream, numbers, foreign, queued
):
    number = next(numbers)
    driver.make_pool(number, foreign, 0, 0)
    with driver.allocating_to(number, stream):
        address = driver.alloc(16 * MIB, stream.ptr)
    driver.release(number)
    driver.release(number)
    driver.empty_cache()
    held = driver.stats()["reserved_bytes"][0][0]
    assert held >= 16 * MIB  # what a limit of memory counts too
    if queued:
        with HostDriver().block(stream):
            driver.free(address)
    else:
        driver.free(address)
    driver.empty_cache()
    assert driver.stats()["reserved_bytes"][0][0] == 0
    if foreign:
        assert driver.foreign() == [1, 1, False]


def test_allocator_of_a_pool_that_was_never_used_is_let_go(driver, arena, numbers):
    number = next(numbers)
    driver.make_pool(number, 1, 0, 0)
    driver.release(number)
    assert driver.foreign() == [0, 0, False]


def test_pool_that_does_not_split_has_a_segment_for_each_block(driver, arena, stream, numbers):
    number = next(numbers)
    driver.make_pool(number, 1, 0, 1)
    with driver.allocating_to(number, stream):
        addresses = [driver.alloc(MIB, stream.ptr) for _ in range(2)]
        assert len(driver.snapshot(number, 0)["segments"]) == 2
        driver.free(addresses[0])
        again = driver.alloc(1000, stream.ptr)
        assert again == addresses[0]
    for address in (again, addresses[1]):
        driver.free(address)
    driver.release(number)
    driver.release(number)


# ---- checkpoints ---------------------------------------------------------------------------------


def test_checkpoint_brings_back_the_blocks_that_were_live(driver, arena, stream, numbers):
    number = next(numbers)
    with driver.allocating_to(number, stream):
        a, b, c = (driver.alloc(nbytes, stream.ptr) for nbytes in (5000, 300_000, MIB))
        driver.free(b)
        driver.checkpoint(number, 1)
        driver.free(a)
        d = driver.alloc(2 * MIB, stream.ptr)
        freed, allocated = driver.restore(1)
        assert sorted(freed) == sorted([c, d])
        assert sorted(allocated) == sorted([a, c])
        assert driver.live(number, [a, c])
        assert driver.base(a) == "1 5120"
        assert driver.alloc(300_000, stream.ptr) == b  # free, as it was
    for address in (a, b, c):
        driver.free(address)
    driver.release(number)


@pytest.mark.parametrize("freed", [range(5), [*range(5), *range(7, 11)], range(3, 7), range(11)])
def test_snapshot_of_a_pool_is_the_same_once_its_checkpoint_is_restored(
    driver, arena, stream, numbers, freed
):
    number = next(numbers)
    # The stream is blocked, so that the work of freed blocks is unfinished.
    with driver.allocating_to(number, stream), HostDriver().block(stream):
        addresses = [driver.alloc(512, stream.ptr) for _ in range(11)]
        for i in freed:
            driver.free(addresses[i])
        driver.checkpoint(number, 1)
        before = driver.snapshot(number, 0)["segments"]
        driver.restore(1)
        assert driver.snapshot(number, 0)["segments"] == before
    for address in set(addresses) - {addresses[i] for i in freed}:
        driver.free(address)
    driver.release(number)


def test_checkpoints_of_random_states_are_exact(driver, arena, stream, numbers, rng):
    number = next(numbers)
    with driver.allocating_to(number, stream):
        live, states = {}, []
        for step in range(400):
            if states and rng.random() < 0.05:
                name, then = rng.choice(states)
                driver.restore(name)
                live = dict(then)
            elif live and rng.random() < 0.45:
                address = rng.choice(list(live))
                driver.free(address)
                del live[address]
            else:
                nbytes = rng.choice([1, 700, 40_000, 3 * MIB])
                live[driver.alloc(nbytes, stream.ptr)] = nbytes
            if rng.random() < 0.1:
                driver.checkpoint(number, step)
                states.append((step, dict(live)))
            assert driver.live(number, list(live))
    for address in live:
        driver.free(address)
    driver.release(number)


# ---- memory history ------------------------------------------------------------------------------


def test_history_records_allocations_frees_and_memory_of_the_device(driver, arena):
    driver.history(1, 1000, ALL, 1, "")
    address = driver.alloc(1000)
    driver.free(address)
    driver.empty_cache()
    traces = driver.snapshot(0, 1)["traces"]
    actions = [entry["action"] for entry in traces]
    assert actions[0] in ("segment_alloc", "segment_map")
    assert actions[1:4] == ["alloc", "free_requested", "free_completed"]
    assert actions[4] in ("segment_free", "segment_unmap")
    assert actions[5:] == []
    assert [entry["action"] for entry in driver.snapshot(0, 1)["traces"]][5:] == ["snapshot"]
    assert [entry["addr"] for entry in traces[1:4]] == [address] * 3
    assert [entry["size"] for entry in traces[1:4]] == [1000] * 3
    assert all(entry["stack"] for entry in traces[1:4])
    assert traces[1]["stack"] != traces[2]["stack"]
    assert all(entry["time"] > 1.6e15 for entry in traces)  # microseconds since 1970
    came = [e["size"] for e in traces if e["action"] in ("segment_alloc", "segment_map")]
    went = [e["size"] for e in traces if e["action"] in ("segment_free", "segment_unmap")]
    assert sum(came) == sum(went) > 0


def test_live_blocks_keep_their_stack_and_free_ones_do_not(driver, arena):
    driver.history(1, 1000, STATE, 1, "")
    first, second = driver.alloc(1000), driver.alloc(1000)
    driver.free(first)
    snapshot = driver.snapshot(0, 1)
    blocks = [block for segment in snapshot["segments"] for block in segment["blocks"]]
    assert [bool(block[3]) for block in blocks if block[2] == 2] == [True]
    assert not any(block[3] for block in blocks if block[2] != 2)
    assert not any(entry["stack"] for entry in snapshot["traces"])  # only states have them
    driver.free(second)


def test_history_has_a_limit_skips_and_ends(driver, arena):
    assert driver.history(1, 3, ALLOC, 1, "free_completed") == 1
    for _ in range(5):
        driver.free(driver.alloc(1000))
    actions = [entry["action"] for entry in driver.snapshot(0, 1)["traces"]]
    assert actions == ["free_requested", "alloc", "free_requested"]
    assert driver.history(0, 1, 0, 1, "") == 0
    driver.free(driver.alloc(1000))
    assert driver.snapshot(0, 1)["traces"] == []
    with pytest.raises(Refused, match="Unknown TraceEntry action: sneeze"):
        driver.history(1, 3, ALLOC, 1, "sneeze")


def test_entries_carry_metadata_compile_contexts_and_annotations(driver, arena):
    driver.history(1, 100, ALLOC, 1, "")
    driver.mark("frame 1", "epoch 3")
    driver.free(driver.alloc(1000))
    driver.mark("", "")
    driver.free(driver.alloc(1000))
    driver.annotate()
    snapshot = driver.snapshot(0, 1)
    marked, plain = [e for e in snapshot["traces"] if e["action"] == "alloc"]
    assert (marked["compiling"], marked["metadata"]) == ("frame 1", "epoch 3")
    assert (plain["compiling"], plain["metadata"]) == ("N/A", "")
    assert snapshot["annotations"] == 1


def test_history_of_memory_that_is_out_names_the_request(driver, arena):
    driver.history(1, 100, ALLOC, 1, "")
    arena.set_limit(MIB)
    with pytest.raises(Refused):
        driver.alloc(2 * MIB)
    (entry,) = [e for e in driver.snapshot(0, 1)["traces"] if e["action"] == "oom"]
    assert (entry["size"], entry["addr"]) == (2 * MIB, 1 << 30)


def test_entries_of_a_pool_name_it(driver, arena, stream, numbers):
    number = next(numbers)
    driver.history(1, 100, ALLOC, 1, "")
    with driver.allocating_to(number, stream):
        driver.free(driver.alloc(1000, stream.ptr))
    traces = driver.snapshot(0, 1)["traces"]
    assert {e["pool"] for e in traces if e["action"] != "snapshot"} == {number}
    driver.release(number)


def test_trackers_hear_without_history(driver, arena):
    driver.track()
    driver.free(driver.alloc(1000))
    actions = [entry["action"] for entry in driver.tracked()]
    assert actions[-3:] == ["alloc", "free_requested", "free_completed"]
    assert driver.snapshot(0, 1)["traces"] == []


# ---- other processes and devices -----------------------------------------------------------------


def test_copy_between_two_devices_is_the_drivers(driver, arena, stream):
    torch_hooks.serve(1, arena)
    one, two = driver.alloc(4096), driver.alloc(4096)
    ctypes.memset(one, 5, 4096)
    ctypes.memset(two, 0, 4096)
    with HostDriver().current():
        assert driver.copy(two, 1, one, 0, 4096, stream.ptr) == 0
    stream.synchronize()
    assert ctypes.string_at(two, 4096) == bytes([5]) * 4096
    for address in (one, two):
        driver.free(address)


class Tensor:
    """A Python object over a block, in a reference cycle."""

    def __init__(self, driver, nbytes):
        self.driver, self.address, self.this = driver, driver.alloc(nbytes), self

    def __del__(self):
        self.driver.free(self.address)


def test_allocation_is_served_from_garbage(driver, arena):
    arena.set_limit(8 * MIB)
    Tensor(driver, 6 * MIB)
    driver.free(driver.alloc(6 * MIB))
    assert arena.stats().in_use == 0


def test_error_ends_with_the_bytes_that_a_collection_freed(driver, arena):
    arena.set_limit(8 * MIB)
    keeper = driver.alloc(MIB)
    Tensor(driver, 6 * MIB)
    with pytest.raises(Refused, match=r"a garbage collection before this error freed 6.0 MiB\Z"):
        driver.alloc(8 * MIB)
    driver.free(keeper)
