"""The functions that PyTorch calls, over arenas of the host device."""

import ctypes
import gc
import os
import random
import re
import subprocess
import sys
import threading
import time
from typing import ClassVar

import pytest
from helpers import child, shared_object
from helpers.driver import HostDriver
from helpers.graph import RELAXED, Graph
from helpers.interrupting import reaches_the_caller
from helpers.pressure import arena_that_releases_under_pressure
from helpers.threads import in_threads
from helpers.torch_caller import ALL, FREED, NO_INTERPRETER, Block, Caller, Refused

import gpumem
from gpumem import Arena, Budget, Device, Stream
from gpumem._buffer.holders import BLOCKS
from gpumem._testing import torch_hooks
from gpumem._testing.torch_hooks import out_of_memory_text
from gpumem.errors import ConfigError, OutOfMemoryError

MIB = 1 << 20


@pytest.fixture(scope="module")
def caller():
    return Caller()


@pytest.fixture
def arena():
    """An arena that serves device 0; a fresh one takes over after the test."""
    arena = Arena("host", {"oom_wait_ms": 0})
    torch_hooks.serve(0, arena)
    yield arena
    torch_hooks.serve(0, Arena("host"))
    arena.check_invariants()


def test_arena_of_memory_with_a_larger_alignment_is_refused(arena):
    other = Arena(gpumem.MemoryInfo("host", alignment=512))
    with pytest.raises(gpumem.ConfigError, match="invalid alignment = 512"):
        torch_hooks.serve(0, other)


def touch(address, nbytes, value=7):
    ctypes.memset(address, value, nbytes)


def test_torch_block_comes_from_the_devices_arena(caller, arena):
    address = caller.alloc(1000)
    touch(address, 1000)
    assert arena.stats().requested_in_use == 1000
    caller.free(address)
    assert arena.stats().in_use == 0


def test_live_blocks_never_share_an_address(caller, arena, rng):
    live = {}
    for _ in range(20_000):
        if live and rng.random() < 0.5:
            address = rng.choice(list(live)) if rng.random() < 0.1 else next(iter(live))
            caller.free(address)
            del live[address]
        else:
            nbytes = rng.choice([1, 255, 256, 4096, 70_000, 300_000])
            address = caller.alloc(nbytes)
            assert address not in live
            live[address] = nbytes
    assert arena.stats().requested_in_use == sum(live.values())
    assert caller.live_bytes() == sum(live.values())
    for address, nbytes in live.items():
        assert caller.block(address).requested == nbytes
        caller.free(address)
    assert arena.stats().in_use == 0


def test_recorded_stream_delays_reuse(caller, arena, stream):
    other = Stream("host")
    address = caller.alloc(4096, stream=stream.ptr)
    with HostDriver().block(other):
        caller.record_stream(address, other.ptr)
        caller.free(address)
        again = caller.alloc(4096, stream=stream.ptr)
        assert again != address
        assert [block.address for block in arena.blocks() if block.pending_free] == [address]
    other.synchronize()
    arena.shrink()
    assert not [block for block in arena.blocks() if block.pending_free]
    caller.free(again)


@pytest.mark.parametrize("recorded", [False, True])
def test_empty_cache_releases_memory_that_queued_work_still_uses(
    caller, arena, stream, host, recorded
):
    other = Stream("host")
    host.set_lag(50_000_000)
    with arena.tag("activations"):
        addresses = [caller.alloc(64 << 20, stream=stream.ptr)]
    addresses.append(caller.alloc(64 << 20, stream=stream.ptr))
    for address in addresses:
        if recorded:
            caller.record_stream(address, other.ptr)
        caller.free(address)
    arena.shrink()
    assert arena.stats().reserved >= 64 << 20
    caller.shrink()
    assert arena.stats().reserved == 0


def test_block_freed_on_a_busy_stream_is_not_reused_by_another(caller, arena, stream):
    other = Stream("host")
    address = caller.alloc(4096, stream=stream.ptr)
    with HostDriver().block(stream):
        caller.free(address)
        taken = caller.alloc(4096, stream=other.ptr)
        assert taken != address
        assert caller.alloc(4096, stream=stream.ptr) == address
    stream.synchronize()
    caller.free(address)
    caller.free(taken)


def test_out_of_memory_throws_the_arenas_report(caller, arena):
    arena.set_limit(1 << 20)
    before = caller.stats().failures
    with pytest.raises(Refused, match=r"out of memory: asked for 2.0 MiB") as refused:
        caller.alloc(2 << 20)
    assert "max_mem" in str(refused.value)
    assert caller.stats().failures == before + 1
    assert arena.stats().in_use == 0


def test_out_of_memory_message_begins_like_pytorchs(caller, arena):
    arena.set_limit(1 << 20)
    with pytest.raises(Refused) as refused:
        caller.alloc(2 << 20)
    first, report, *_ = str(refused.value).split("\n")
    total, free = re.fullmatch(
        r"CUDA out of memory\. Tried to allocate 2\.00 MiB\. "
        r"GPU 0 has a total capacity of (\S+) GiB of which (\S+) GiB is free\.",
        first,
    ).groups()
    assert float(total) == pytest.approx(Device("host").total_bytes / 2**30, abs=0.006)
    assert float(free) <= float(total)
    assert report.startswith("gpumem: host:0 is out of memory: asked for 2.0 MiB")


def test_out_of_memory_reports_pytorchs_share_of_a_shared_arena(caller, arena):
    address = caller.alloc(3 << 20)
    mine = arena.allocate(1 << 20)
    arena.set_limit(arena.stats().reserved)
    with pytest.raises(OutOfMemoryError) as caught:
        arena.allocate(64 << 20)
    assert caught.value.report.by_framework == {"torch": 3 << 20}
    with pytest.raises(Refused, match=r"in use by torch 3\.0 MiB"):
        caller.alloc(64 << 20)
    caller.free(address)
    mine.close()


@pytest.mark.parametrize(
    ("nbytes", "said"),
    [
        (1024, "1024 bytes"),
        (1536, "1.50 KiB"),
        (20 << 20, "20.00 MiB"),
        (8 * 10**8 << 30, "800000000.00 GiB"),
        ((1 << 60) + 1, "more than 1EB memory"),
    ],
)
def test_out_of_memory_sizes_use_pytorchs_units(nbytes, said):
    assert out_of_memory_text(0, nbytes, None) == f"CUDA out of memory. Tried to allocate {said}."


def segments():
    """Return the two functions that PyTorch's own allocator calls for its segments."""
    pointer, size = ctypes.c_void_p, ctypes.c_size_t
    allocate, free = torch_hooks.segment_functions()
    return (
        ctypes.CFUNCTYPE(pointer, size, ctypes.c_int, pointer)(allocate),
        ctypes.CFUNCTYPE(None, pointer, size, ctypes.c_int, pointer)(free),
    )


def test_segment_that_is_refused_is_null(arena):
    allocate, free = segments()
    arena.set_limit(1 << 20)
    assert allocate(2 << 20, 0, None) is None
    free(allocate(4096, 0, None), 4096, 0, None)
    assert arena.stats().in_use == 0


def test_segment_of_no_bytes_is_null_and_null_is_freed_without_effect(arena):
    allocate, free = segments()
    assert allocate(0, 0, None) is None
    free(None, 0, 0, None)
    assert arena.stats().num_allocs == 0


def test_double_free_of_a_segment_is_reported_on_stderr(arena, capfd):
    allocate, free = segments()
    address = allocate(4096, 0, None)
    free(address, 4096, 0, None)
    free(address, 4096, 0, None)
    assert f"PyTorch freed 4096 bytes at {address:#x} of cuda:0" in capfd.readouterr().err
    assert arena.stats().in_use == 0


def test_device_without_an_arena_is_looked_up_once(caller):
    asked = []
    arena = Arena("host")

    def find(index):
        asked.append(index)
        return arena

    torch_hooks.set_finder(find)
    try:
        first, second = caller.alloc(4096, device=5), caller.alloc(4096, device=5)
        assert asked == [5]
        assert arena.stats().num_allocs == 2
        caller.free(first)
        caller.free(second)
        torch_hooks.set_finder(None)
        with pytest.raises(Refused, match="no arena serves cuda:6"):
            caller.alloc(4096, device=6)
    finally:
        torch_hooks.set_finder(None)


def test_threads_that_are_first_at_once_find_one_arena(caller):
    """A second one would end the hook of the first while threads allocate with it."""
    together = threading.Barrier(4)
    found = []

    def find(index):
        time.sleep(0.1)  # the others look meanwhile
        found.append(Arena("host"))
        return found[-1]

    def work():
        together.wait()
        for _ in range(100):
            caller.free(caller.alloc(8, device=7))

    torch_hooks.set_finder(find)
    try:
        in_threads(work, together.parties)
    finally:
        torch_hooks.set_finder(None)
    assert [arena.stats().num_allocs for arena in found] == [400]


def test_interrupt_of_what_finds_an_arena_reaches_the_main_thread(caller):
    def find(index):
        raise KeyboardInterrupt

    torch_hooks.set_finder(find)
    try:
        reaches_the_caller(lambda: caller.alloc(4096, device=6))
    finally:
        torch_hooks.set_finder(None)


@pytest.mark.parametrize("number", [-1, torch_hooks.PINNED + 1])
def test_device_out_of_range_is_refused(number):
    with pytest.raises(ConfigError, match=f"device {number} is not from 0 to 63"):
        torch_hooks.serve(number, Arena("host"))


def test_blocks_outlive_the_switch_to_another_arena(caller):
    first, second = Arena("host"), Arena("host")
    torch_hooks.serve(1, first)
    address = caller.alloc(4096, device=1)
    torch_hooks.serve(1, second)
    touch(address, 4096)
    caller.free(address)
    assert first.stats().in_use == 0
    assert second.stats().num_allocs == 0


def test_empty_cache_releases_idle_memory(caller, arena):
    caller.free(caller.alloc(64 << 20))
    assert arena.stats().reserved
    caller.shrink()
    assert arena.stats().reserved == 0


def test_memory_fraction_never_raises_the_arenas_limit(caller):
    total = gpumem.Device("host").total_bytes
    arena = Arena("host")
    torch_hooks.serve(2, arena)
    caller.limit(0.5, device=2)
    assert arena.stats().limit == int(total * 0.5)
    bounded = Arena("host", {"max_mem": 1 << 20})
    torch_hooks.serve(2, bounded)
    caller.limit(0.5, device=2)
    assert bounded.stats().limit == 1 << 20


def test_peaks_count_torchs_requested_bytes(caller, arena):
    other = arena.allocate(1 << 20)  # of another library
    first, second = caller.alloc(1000), caller.alloc(2000)
    caller.free(first)
    caller.free(second)
    assert caller.stats().parts[ALL].peak_requested == 3000
    third = caller.alloc(100)
    caller.reset_peaks()
    assert caller.stats().parts[ALL].peak_requested == 100
    caller.free(third)
    other.close()


@pytest.mark.parametrize("backing", ["virtual", "regions"])
def test_reserved_peak_counts_no_memory_that_the_driver_refused(caller, host, backing):
    arena = Arena("host", {"oom_wait_ms": 0, "backing": backing})
    torch_hooks.serve(9, arena)
    block = caller.alloc(MIB, device=9)
    caller.reset_peaks(device=9)
    held = caller.stats(device=9).peak_reserved
    for function in ("cuMemCreate", "cuMemAlloc"):
        host.fail(function, 1, 2, times=0)
    with pytest.raises(Refused):
        caller.alloc(64 * MIB, device=9)
    host.clear_faults()
    assert caller.stats(device=9).peak_reserved == held == arena.stats().reserved
    caller.free(block)
    arena.close()


def test_reserved_peak_is_that_of_an_arena_and_its_tags_together(caller):
    arena = Arena("host", {"oom_wait_ms": 0, "backing": "virtual"})
    torch_hooks.serve(9, arena)
    with arena.tag("weights"):
        tagged = arena.allocate(32 * MIB)
    block = arena.allocate(32 * MIB)
    held = arena.stats().reserved
    tagged.close()
    block.close()
    arena.shrink()
    assert caller.stats(device=9).peak_reserved == held >= 64 * MIB
    arena.close()


# ---- pools of captured graphs --------------------------------------------------------------------


def test_memory_freed_in_a_capture_is_reused_only_in_the_pools_captures(caller, arena, stream):
    pool = caller.open_pool(1)
    address = caller.alloc(4096, stream=stream.ptr, pool=pool)
    caller.free(address)
    assert caller.alloc(4096, stream=stream.ptr, pool=pool) == address
    caller.free(address)
    outside = [caller.alloc(4096, stream=stream.ptr) for _ in range(100)]
    assert address not in outside
    assert arena.stats().num_allocs == 100
    for each in outside:
        caller.free(each)
    caller.begin_pool(pool)  # a second graph in the same pool
    assert caller.alloc(4096, stream=stream.ptr, pool=pool) == address
    caller.free(address)
    caller.drop_pool(pool)


def test_block_of_a_capture_sleeps_with_the_tag_of_its_thread(caller, arena, stream):
    pool = caller.open_pool(1)
    plain = caller.alloc(4096, stream=stream.ptr, pool=pool)
    with arena.tag("weights"):
        tagged = caller.alloc(4096, stream=stream.ptr, pool=pool)
        with arena.tag("default"):
            other = caller.alloc(4096, stream=stream.ptr, pool=pool)
    for address in (plain, tagged, other):
        touch(address, 4096)
    assert arena.sleep("weights") == 2 << 20
    for address in (plain, other):
        assert ctypes.string_at(address, 4096) == b"\x07" * 4096
    arena.sleep()
    arena.wake()
    for address in (plain, tagged, other):
        assert ctypes.string_at(address, 4096) == b"\x07" * 4096
        caller.free(address)
    caller.drop_pool(pool)


def test_empty_cache_leaves_the_memory_that_is_kept_for_the_next_sleep(caller, arena):
    address = caller.alloc(8 * MIB)
    arena.sleep()
    arena.wake()
    kept = arena.stats().kept_for_sleep
    assert kept >= 8 * MIB
    caller.shrink()
    assert arena.stats().kept_for_sleep == kept
    caller.free(address)
    arena.shrink()
    assert arena.stats().kept_for_sleep == 0


def test_graph_pool_is_released_with_its_last_graph_and_block(caller, stream):
    arena = Arena("host", {"max_mem": 64 << 20, "oom_wait_ms": 0})
    torch_hooks.serve(3, arena)
    pool = caller.open_pool(9, device=3)
    address = caller.alloc(48 << 20, device=3, stream=stream.ptr, pool=pool)
    caller.drop_pool(pool)
    touch(address, 48 << 20)  # a tensor that outlived its graph
    with pytest.raises(Refused, match="out of memory"):
        caller.alloc(32 << 20, device=3)  # one limit for both
    caller.free(address)
    caller.free(caller.alloc(32 << 20, device=3))


def test_graph_pool_over_a_source_is_refused(caller):
    upstream = Arena("host")
    arena = Arena("host", source=upstream)
    torch_hooks.serve(4, arena)
    with pytest.raises(Refused, match="no pool can be opened beside the arena of cuda:4"):
        caller.open_pool(1, device=4)
    caller.free(caller.alloc(4096, device=4))


# ---- threads -------------------------------------------------------------------------------------


def test_recording_has_the_stacks_of_threads_that_allocate_without_the_interpreter_lock(
    caller, arena
):
    def allocate_here(number):
        own = Stream("host")
        for _ in range(200):
            caller.free(caller.alloc(4096 * number, stream=own.ptr))

    with gpumem.observe.record(arena, capacity=1 << 13, stacks=1.0) as recording:
        in_threads(allocate_here, range(1, 5))
    events = [event for event in recording.events() if event.action == "alloc"]
    assert len(events) == 800
    for event in events:
        assert any(frame.name.endswith("allocate_here") for frame in event.stack)


def test_threads_on_streams_of_their_own_never_share_bytes(caller, arena, rng):
    seed = rng.randrange(1 << 32)
    failures = []
    handed_over = []
    lock = threading.Lock()

    def work(number):
        rng = random.Random(seed + number)
        own = Stream("host")
        mine = []
        for step in range(1500):
            nbytes = rng.choice([64, 4096, 100_000])
            address = caller.alloc(nbytes, stream=own.ptr)
            touch(address, nbytes, number + 1)
            mine.append((address, nbytes))
            if len(mine) > 8:
                address, nbytes = mine.pop(rng.randrange(len(mine)))
                if set(ctypes.string_at(address, nbytes)) != {number + 1}:
                    failures.append((number, step))
                with lock:
                    handed_over.append(address)
            with lock:
                given = handed_over.pop() if handed_over and rng.random() < 0.9 else None
            if given is not None:
                caller.free(given)  # often another thread's
        for address, _ in mine:
            caller.free(address)
        own.synchronize()

    in_threads(work, range(6))
    for address in handed_over:
        caller.free(address)
    assert not failures
    assert arena.stats().in_use == 0
    counts = caller.stats().parts[ALL]
    assert counts.allocated == counts.allocated_freed
    assert counts.allocs == counts.frees


# ---- the end -------------------------------------------------------------------------------------


def test_frees_during_exit_are_silent(caller):
    script = f"""
import atexit, sys
sys.path[:0] = {sys.path!r}
late = []
atexit.register(lambda: late[0]())     # runs after what gpumem registers
import gpumem
from gpumem._testing import torch_hooks
from helpers.torch_caller import Caller
caller = Caller()
torch_hooks.serve(0, gpumem.Arena("host"))
address = caller.alloc(4096)
late.append(lambda: (caller.free(address), print("freed")))
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, "freed\n", "")


def test_second_free_is_refused(caller, arena):
    address = caller.alloc(4096)
    assert caller.free(address) == 0
    assert caller.free(address) != 0
    assert arena.stats().in_use == 0


def test_forks_child_leaves_its_parents_blocks_alone(caller, arena):
    address = caller.alloc(4096)
    process = os.fork()
    if process == 0:
        status = 1
        try:
            status = caller.free(address)  # the parent's, which this process does not know
            caller.shrink()
        finally:
            os._exit(status)
    assert os.waitpid(process, 0)[1] == 0
    assert arena.stats().requested_in_use == 4096
    caller.free(address)
    assert arena.stats().in_use == 0


# ---- budgets -------------------------------------------------------------------------------------


def test_budget_callback_runs_for_a_hook_without_the_gil(caller):
    arena, kept, asked = arena_that_releases_under_pressure(300 << 20)
    budget = arena.budget
    torch_hooks.serve(7, arena)
    kept.append(arena.allocate(200 << 20))
    address = caller.alloc(200 << 20, device=7)
    assert asked
    assert not kept
    assert budget.used <= budget.limit
    with pytest.raises(Refused, match="budget"):
        caller.alloc(200 << 20, device=7)
    caller.free(address)
    arena.shrink()
    assert budget.used == 0


def test_budget_callback_runs_for_a_segment_inside_a_capture(stream):
    allocate, free = segments()
    arena, kept, _ = arena_that_releases_under_pressure(300 << 20)
    torch_hooks.serve(8, arena)
    kept.append(arena.allocate(200 << 20))
    with Graph(HostDriver(), stream, RELAXED) as graph:
        address = allocate(200 << 20, 8, stream.ptr)
    assert address
    assert not kept
    free(address, 200 << 20, 8, None)
    graph.destroy()


def test_error_of_a_budget_callback_in_a_hook_is_told(caller, monkeypatch):
    told = []
    monkeypatch.setattr("sys.unraisablehook", lambda hook: told.append(str(hook.exc_value)))

    def fail(budget, nbytes):
        raise ValueError("nothing can go")

    arena = Arena("host", {"oom_wait_ms": 0}, budget=Budget(64 << 20, on_pressure=fail))
    torch_hooks.serve(9, arena)
    with pytest.raises(Refused, match="budget"):
        caller.alloc(200 << 20, device=9)
    assert set(told) == {"nothing can go"}


@pytest.mark.parametrize("count", ["reserved", "in_use"])
def test_graph_pool_is_charged_to_its_arenas_budget(caller, stream, count):
    budget = Budget(64 << 20)
    arena = Arena("host", {"oom_wait_ms": 0}, budget=budget, count=count, name="training")
    torch_hooks.serve(8, arena)
    pool = caller.open_pool(1, device=8)
    address = caller.alloc(32 << 20, device=8, stream=stream.ptr, pool=pool)
    assert budget.used == 32 << 20
    assert budget.holders() == (("training", 32 << 20),)
    with pytest.raises(Refused, match="budget"):
        caller.alloc(48 << 20, device=8, stream=stream.ptr, pool=pool)
    caller.free(address)
    caller.drop_pool(pool)
    arena.shrink()
    assert budget.used == 0


# ---- blocks that are restored --------------------------------------------------------------------


class Pool:
    """A pool of device 0; its blocks are described as `Block`."""

    def __init__(self, caller, number, captured=False):
        self.caller = caller
        self.pool = caller.open_pool(number, captured=captured)

    def allocate(self, nbytes):
        return self.caller.block(self.caller.alloc(nbytes, pool=self.pool))

    def free(self, *blocks):
        for block in blocks:
            assert self.caller.free(block.address) == 0

    def restore(self, block):
        return self.caller.restore(self.pool, block)

    def begin(self):
        self.caller.begin_pool(self.pool)

    def drop(self):
        self.caller.drop_pool(self.pool)


@pytest.fixture(params=[False, True], ids=["regions", "pages"])
def pool(caller, arena, request):
    pool = Pool(caller, 901, captured=request.param)
    yield pool
    pool.drop()


def at(block, begin, size):
    """A block elsewhere in the memory of another one."""
    return Block(block.address + begin, size, size, block.stream, block.pool)


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 2, 0)])
def test_blocks_are_restored_where_they_were_in_any_order(pool, order):
    blocks = [pool.allocate(nbytes) for nbytes in (1 << 20, 4000, 3 << 20)]
    pool.free(*blocks)
    pool.begin()
    assert [pool.restore(blocks[i]) for i in order] == [True] * 3
    for block in blocks:
        found = pool.caller.block(block.address)
        assert (found.size, found.requested) == (block.size, block.requested)
        assert not pool.restore(block)  # it is live
    other = pool.allocate(1 << 20)
    for block in blocks:
        assert other.address >= block.address + block.size or (
            other.address + other.size <= block.address
        )
        touch(block.address, block.size)
    pool.free(*blocks, other)


def test_block_is_not_restored_where_its_bytes_are_not_free(pool):
    first, second = (pool.allocate(MIB) for _ in range(2))
    far = pool.allocate(64 * MIB)  # in a region of its own, if there are regions
    pool.free(first, far)
    pool.begin()
    assert not pool.restore(second)
    assert not pool.restore(at(second, 256, 256))  # inside a live block
    assert not pool.restore(at(first, 0, 1 << 40))  # larger than what is free
    assert not pool.restore(at(first, 1 << 40, 256))  # beyond all memory
    assert pool.caller.block(first.address) is None
    assert pool.restore(at(first, 512, 256))  # in the middle of free bytes
    assert pool.restore(at(first, 0, 512))
    assert not pool.restore(at(first, 0, 1024))
    assert pool.restore(at(first, 768, first.size - 768))
    assert pool.restore(far)
    pool.free(at(first, 0, 0), at(first, 512, 0), at(first, 768, 0), second, far)


def test_blocks_are_restored_where_pages_have_moved_away(caller, arena, rng):
    """A tree of graphs restores earlier live blocks, which blocks of later graphs have replaced."""
    pool = Pool(caller, 902, captured=True)
    live, then = [], []
    for step in range(1500):
        if len(live) > 20:
            pool.free(live.pop(rng.randrange(len(live))))
        else:
            live.append(pool.allocate(int(2 ** rng.uniform(12, 24))))
        if step % 150 == 149:
            then.append(list(live))
    pool.free(*live)
    rng.shuffle(then)
    for blocks in then:
        pool.begin()
        assert all([pool.restore(block) for block in blocks])
        for value, block in enumerate(blocks):
            ctypes.memset(block.address, value, block.size)
        for value, block in enumerate(blocks):
            assert ctypes.string_at(block.address, block.size) == bytes([value]) * block.size
        pool.free(*blocks)
    pool.drop()


# ---- several devices beneath PyTorch's own allocator ---------------------------------------------


def test_arenas_that_are_introduced_give_each_other_access_as_their_settings_allow():
    child.run_quietly("""
        import gpumem
        from gpumem._testing import torch_hooks
        gpumem.device.set_host_device_count(3)
        arenas = [gpumem.Arena(f"host:{i}") for i in range(2)]
        closed_off = gpumem.Arena("host:2", {"peers": "none"})
        torch_hooks.introduce([*arenas, closed_off])
        peers = [[each.index for each in arena.peers] for arena in arenas]
        assert peers == [[1, 2], [0, 2]] and closed_off.peers == ()
    """)


# ---- garbage before a refusal --------------------------------------------------------------------

HOLD = """\
#include <stddef.h>
#include <unistd.h>

typedef int Allocate(void *, size_t, void *, void **);
typedef int Collect(int, size_t, int, char **);

/* Without the interpreter: is refused once the other thread holds it, and then ends its wait. */
int refuse(Allocate *allocate, Collect *collect, void *hook, size_t nbytes, char **said, int begin,
           int end) {
    char byte = 0;
    void *address;
    if (read(begin, &byte, 1) != 1) return -1;
    int outcome = collect(0, nbytes, allocate(hook, nbytes, NULL, &address), said);
    return write(end, &byte, 1) == 1 ? outcome : -1;
}

/* With the interpreter. */
int hold(Allocate *allocate, void *hook, void **address, int begin, int end) {
    char byte = 0;
    if (write(begin, &byte, 1) != 1) return -1;
    int status = allocate(hook, 4096, NULL, address);
    return read(end, &byte, 1) == 1 ? status : -1;
}
"""


class TensorInACycle:
    """A Python object over a block, as PyTorch's tensors, and the thread that freed it."""

    freed_on: ClassVar[list[int]] = []

    def __init__(self, caller, nbytes):
        self.caller, self.address, self.this = caller, caller.alloc(nbytes), self

    def __del__(self):
        self.freed_on.append(threading.get_native_id())
        assert self.caller.free(self.address) == 0


@pytest.fixture
def uncollected():
    """Garbage stays until gpumem collects it."""
    gc.disable()
    yield
    gc.enable()


def test_thread_without_the_interpreter_is_served_from_garbage(caller, arena, uncollected):
    arena.set_limit(8 * MIB)
    TensorInACycle(caller, 6 * MIB)
    caller.free(caller.alloc(6 * MIB))
    assert TensorInACycle.freed_on.pop() != threading.get_native_id()
    assert arena.stats().in_use == 0


def test_thread_with_the_interpreter_collects_garbage_itself(caller, arena, uncollected):
    arena.set_limit(8 * MIB)
    TensorInACycle(caller, 6 * MIB)
    collect = ctypes.PYFUNCTYPE(ctypes.c_int)(caller.address_of("collect"))
    said = ctypes.c_void_p()
    over_limit = 1  # ARENA_OVER_LIMIT
    nbytes = ctypes.c_size_t(6 * MIB)
    assert collect(0, nbytes, over_limit, ctypes.byref(said)) == FREED
    assert TensorInACycle.freed_on.pop() == threading.get_native_id()
    text = ctypes.string_at(said.value).decode()
    ctypes.CDLL(None).free(said)
    assert text == "a garbage collection before this error freed 6.0 MiB"


def test_refusal_names_the_cycle_that_held_a_tensor(caller, arena, uncollected, monkeypatch):
    monkeypatch.setitem(BLOCKS, TensorInACycle, lambda tensor: (tensor.address, 6 * MIB))
    arena.set_limit(8 * MIB)
    TensorInACycle(caller, 6 * MIB)
    keeper = caller.alloc(MIB)
    with pytest.raises(Refused, match=r"freed 6\.0 MiB, which reference cycles held: ") as refused:
        caller.alloc(8 * MIB)
    assert str(refused.value).endswith("TensorInACycle.this -> TensorInACycle (6.0 MiB)")
    caller.free(keeper)


def test_thread_that_keeps_the_interpreter_and_allocates_delays_a_refusal_no_longer_than_set(
    caller, tmp_path
):
    arena = Arena("host", {"oom_wait_ms": 0, "oom_collect_ms": 50, "max_mem": 8 * MIB})
    torch_hooks.serve(0, arena)
    keeper = caller.alloc(4 * MIB)
    failures = caller.stats().failures
    path = shared_object.build(tmp_path, HOLD)
    (begin, begins), (end, ends) = os.pipe(), os.pipe()
    said, small, hook = ctypes.c_void_p(), ctypes.c_void_p(), ctypes.c_void_p(caller.hook(0))
    allocate, collect = (ctypes.c_void_p(caller.address_of(f)) for f in ("allocate", "collect"))
    outcomes = []

    def refuse():
        call = ctypes.CDLL(path).refuse
        nbytes = ctypes.c_size_t(6 * MIB)
        outcomes.append(call(allocate, collect, hook, nbytes, ctypes.byref(said), begin, ends))

    thread = threading.Thread(target=refuse)
    thread.start()
    # It waits for the other thread with the interpreter lock held.
    assert ctypes.PyDLL(path).hold(allocate, hook, ctypes.byref(small), begins, end) == 0
    thread.join()
    assert outcomes == [NO_INTERPRETER]
    assert ctypes.string_at(said.value).decode() == (
        "CUDA out of memory. Tried to allocate 6291456 bytes.\ngpumem: nothing was collected and "
        "reported, because another thread kept the interpreter lock for 50 ms (oom_collect_ms)"
    )
    ctypes.CDLL(None).free(said)
    assert caller.stats().failures == failures + 1
    for each in (keeper, small.value):
        caller.free(each)
    for each in (begin, begins, end, ends):
        os.close(each)
    torch_hooks.serve(0, Arena("host"))


def test_no_garbage_is_collected_below_pytorchs_lock(arena, uncollected):
    arena.set_limit(8 * MIB)
    garbage = [arena.allocate(6 * MIB)]
    garbage.append(garbage)
    alive = arena.stats().num_frees
    del garbage
    segment = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_void_p)(
        torch_hooks.segment_functions()[0]
    )
    assert segment(6 * MIB, 0, None) is None
    assert arena.stats().num_frees == alive
    gc.collect()
