"""An arena on a GPU: the memory is real, stream order holds, numbers agree with the driver."""

import subprocess
import sys

import numpy as np
import pytest
from helpers.child import python

import gpumem
from gpumem.replay import replay
from gpumem.traces import samples

MIB = 1 << 20


def upload(driver, buffer, array, stream=0):
    driver.call(driver.cuMemcpyHtoDAsync, buffer.ptr, array.ctypes.data, array.nbytes, stream)


def download(driver, buffer, stream=0):
    array = np.empty(buffer.nbytes, np.uint8)
    driver.call(driver.cuMemcpyDtoHAsync, array.ctypes.data, buffer.ptr, array.nbytes, stream)
    driver.call(driver.cuStreamSynchronize, stream)
    return array


def test_devices_lists_cuda_first_then_the_host():
    found = gpumem.devices()
    assert found[0] == gpumem.Device("cuda:0") == gpumem.default_device()
    assert found[-1].type == "host"


def test_device_properties_equal_the_drivers(driver):
    device = gpumem.Device("cuda:0")
    assert device.name == driver.call(driver.cuDeviceGetName, 256, 0).split(b"\0")[0].decode()
    assert bytes.fromhex(device.uuid) == bytes(driver.call(driver.cuDeviceGetUuid, 0).bytes)
    assert device.total_bytes == driver.call(driver.cuMemGetInfo)[1]
    assert device.capabilities["virtual_memory"]
    assert device.capabilities["memory_pools"]


def test_driver_table_is_complete_for_cuda_12_and_later():
    assert gpumem.driver_status().missing == ()


def test_unknown_cuda_device_is_refused_with_the_count():
    with pytest.raises(ValueError, match=r"cuda:63.*cuda devices?\b"):
        gpumem.Arena("cuda:63")


def test_bytes_written_through_the_driver_are_read_back(arena, driver):
    rng = np.random.default_rng(7)
    kept = []
    for nbytes in (1, 255, 256, 4097, MIB, 3 * MIB + 5, 64 * MIB):
        array = rng.integers(0, 256, nbytes, np.uint8)
        buffer = arena.allocate(nbytes)
        upload(driver, buffer, array)
        kept.append((buffer, array))
    for buffer, array in kept:
        assert np.array_equal(download(driver, buffer), array)


def test_blocks_do_not_overlap_under_random_use(arena, driver):
    seed = 20261120
    print("seed", seed)
    rng = np.random.default_rng(seed)
    live = []
    for step in range(2000):
        if live and rng.random() < 0.48:
            buffer, mark = live.pop(int(rng.integers(len(live))))
            got = download(driver, buffer)
            assert (got == mark).all(), f"step {step}: {buffer} lost its bytes"
            buffer.close()
        else:
            buffer = arena.allocate(int(2 ** rng.uniform(0, 20)))
            mark = step % 251
            driver.call(driver.cuMemsetD8Async, buffer.ptr, mark, buffer.nbytes, 0)
            live.append((buffer, mark))
    arena.check_invariants()


def test_steady_state_on_one_stream_makes_no_driver_call(arena):
    for _ in range(3):
        buffers = [arena.allocate(n) for n in (MIB, 4096, 300_000)]
        del buffers
    before = arena.stats().driver_calls
    for _ in range(1000):
        buffers = [arena.allocate(n) for n in (MIB, 4096, 300_000)]
        del buffers
    assert arena.stats().driver_calls == before


def test_block_with_unfinished_work_is_not_reused_by_another_stream(driver):
    arena = gpumem.Arena("cuda:0", {"initial_chunk_size_bytes": MIB})
    first, second = gpumem.Stream("cuda:0"), gpumem.Stream("cuda:0")
    flag = gpumem.Arena("cuda:0/host_accessible").allocate(8)
    word = np.frombuffer(flag, np.uint64)
    word[0] = 0
    busy = arena.allocate(MIB, first)
    address = busy.ptr
    driver.call(driver.cuStreamWaitValue64, first.ptr, flag.ptr, 1, 0)
    busy.close()
    other = arena.allocate(MIB, second)
    assert other.ptr != address, "a block was handed over while its stream was blocked"
    other.close()
    again = arena.allocate(MIB, first)
    assert again.ptr == address, "the same stream gets its block back at once"
    again.close()
    word[0] = 1
    first.synchronize()
    arena.reset_stream(first)
    held = [arena.allocate(MIB, second) for _ in range(3)]
    assert address in [buffer.ptr for buffer in held]


def test_wait_policy_waits_on_the_device(driver):
    arena = gpumem.Arena("cuda:0", {"initial_chunk_size_bytes": MIB, "stream_reuse": "wait"})
    first, second = gpumem.Stream("cuda:0"), gpumem.Stream("cuda:0")
    flag = gpumem.Arena("cuda:0/host_accessible").allocate(8)
    word = np.frombuffer(flag, np.uint64)
    word[0] = 0
    busy = arena.allocate(MIB, first)
    address = busy.ptr
    driver.call(driver.cuStreamWaitValue64, first.ptr, flag.ptr, 1, 0)
    driver.call(driver.cuMemsetD8Async, address, 1, MIB, first.ptr)
    busy.close()
    taken = arena.allocate(MIB, second)
    assert taken.ptr == address
    driver.call(driver.cuMemsetD8Async, address, 2, MIB, second.ptr)
    assert not second.query()
    word[0] = 1
    assert (download(driver, taken, second.ptr) == 2).all()


def test_pinned_memory_is_shared_by_numpy_and_gpu(driver):
    pinned = gpumem.Arena("cuda:0/host_accessible").allocate(MIB)
    view = np.from_dlpack(pinned)
    driver.call(driver.cuMemsetD8Async, pinned.ptr, 9, MIB, 0)
    driver.call(driver.cuStreamSynchronize, 0)
    assert (view == 9).all()


def test_managed_memory_is_shared_by_numpy_and_gpu(driver):
    managed = gpumem.Arena("cuda:0/managed").allocate(4096)
    view = np.frombuffer(managed, np.uint8)
    view[:] = 5
    driver.call(driver.cuMemsetD8Async, managed.ptr, 6, 2048, 0)
    driver.call(driver.cuStreamSynchronize, 0)
    assert view[0] == 6
    assert view[4095] == 5


def test_driver_pool_is_stream_ordered(driver):
    with gpumem.DriverPool("cuda:0", {"release_threshold": 1 << 30}) as pool:
        stream = gpumem.Stream("cuda:0")
        for value in range(50):
            with pool.allocate(MIB, stream) as buffer:
                driver.call(driver.cuMemsetD8Async, buffer.ptr, value, MIB, stream.ptr)
                assert (download(driver, buffer, stream.ptr) == value).all()
        stream.synchronize()
        assert pool.stats().in_use == 0
        assert pool.shrink().released_bytes > 0


def test_cpu_views_of_device_memory_are_refused(arena):
    buffer = arena.allocate(4096)
    with pytest.raises(BufferError, match="copy it to host memory"):
        memoryview(buffer)
    assert buffer.__dlpack_device__() == (2, 0)
    assert buffer.__cuda_array_interface__["data"] == (buffer.ptr, False)


def test_torch_and_cupy_see_the_same_bytes(arena, driver):
    torch = pytest.importorskip("torch", reason="torch is not installed")
    cupy = pytest.importorskip("cupy", reason="CuPy is not installed")
    buffer = arena.allocate(1000)
    tensor = torch.from_dlpack(buffer)
    assert tensor.data_ptr() == buffer.ptr
    tensor.fill_(42)
    torch.cuda.synchronize()
    array = cupy.asarray(buffer)
    assert array.data.ptr == buffer.ptr
    assert int(array.sum()) == 42_000
    address = buffer.ptr
    buffer.close()
    assert int(tensor.sum()) == 42_000, "a view keeps the memory"
    assert arena.stats().requested_in_use == 1000
    del tensor
    assert arena.stats().in_use == 0
    assert arena.allocate(1000).ptr == address


def test_out_of_memory_leaves_the_arena_unchanged():
    with gpumem.Arena("cuda:0") as arena:
        small = arena.allocate(MIB)
        before = arena.stats()
        with pytest.raises(gpumem.OutOfMemoryError) as caught:
            arena.allocate(1 << 40)
        assert caught.value.requested_nbytes == 1 << 40
        after = arena.stats()
        assert (after.in_use, after.reserved) == (before.in_use, before.reserved)
        arena.check_invariants()
        small.close()


def test_close_returns_memory_to_the_driver():
    device = gpumem.Device("cuda:0")
    arena = gpumem.Arena(device)
    before = device.free_bytes
    buffer = arena.allocate(1 << 30)
    assert device.free_bytes <= before - (1 << 30)
    buffer.close()
    arena.close()
    assert device.free_bytes >= before - (2 << 20)


def test_moved_pages_keep_their_bytes_in_stream_order(driver):
    seed = 20261121
    print("seed", seed)
    rng = np.random.default_rng(seed)
    arena = gpumem.Arena(
        "cuda:0", {"backing": "virtual", "page_move_threshold": 0, "stream_reuse": "wait"}
    )
    streams = [gpumem.Stream("cuda:0") for _ in range(3)]
    live = []
    for step in range(1500):
        stream = streams[int(rng.integers(3))]
        if live and (rng.random() < 0.48 or sum(b.nbytes for b, _, _ in live) > 256 * MIB):
            buffer, mark, owner = live.pop(int(rng.integers(len(live))))
            assert (download(driver, buffer, owner.ptr) == mark).all(), f"step {step}: {buffer}"
            buffer.close()
        else:
            buffer = arena.allocate(int(2 ** rng.uniform(12, 25)), stream)
            mark = step % 251
            # Twice: the second write must be the one that stays, wherever the page was before.
            driver.call(driver.cuMemsetD8Async, buffer.ptr, 255, buffer.nbytes, stream.ptr)
            driver.call(driver.cuMemsetD8Async, buffer.ptr, mark, buffer.nbytes, stream.ptr)
            live.append((buffer, mark, stream))
        if step % 100 == 0:
            arena.check_invariants()
    for buffer, mark, owner in live:
        assert (download(driver, buffer, owner.ptr) == mark).all()
    assert arena.stats().pages_moved > 0


def test_page_with_pending_work_moves_for_its_own_stream_without_waiting(driver):
    arena = gpumem.Arena("cuda:0", {"backing": "virtual", "max_mem": 32 * MIB})
    stream = gpumem.Stream("cuda:0")
    flag = gpumem.Arena("cuda:0/host_accessible").allocate(8)
    word = np.frombuffer(flag, np.uint64)
    word[0] = 0
    blocks = [arena.allocate(4 * MIB, stream) for _ in range(8)]
    driver.call(driver.cuStreamWaitValue64, stream.ptr, flag.ptr, 1, 0)
    for block in blocks:
        driver.call(driver.cuMemsetD8Async, block.ptr, 1, block.nbytes, stream.ptr)
    for block in blocks[::2]:
        block.close()
    large = arena.allocate(16 * MIB, stream)
    assert arena.stats().pages_moved > 0
    driver.call(driver.cuMemsetD8Async, large.ptr, 2, large.nbytes, stream.ptr)
    assert not stream.query(), "the move waited for the stream"
    word[0] = 1
    assert (download(driver, large, stream.ptr) == 2).all()
    for block in blocks[1::2]:
        assert (download(driver, block, stream.ptr) == 1).all()


@pytest.mark.parametrize("name", sorted(samples()))
def test_moves_keep_reserved_within_two_per_cent_of_the_peak(name):
    result = replay(name, "cuda:0", config={"backing": "virtual"})
    assert result.failed_allocs == 0
    assert result.fragmentation <= 1.02


@pytest.mark.parametrize("name", sorted(samples()))
def test_real_trace_replays_without_a_failed_allocation(name):
    result = replay(name, "cuda:0")
    assert result.failed_allocs == 0
    assert result.peak_reserved_bytes >= result.peak_requested_bytes > 0


def test_exit_with_everything_open_prints_nothing():
    script = (
        "import gpumem\n"
        "a = gpumem.Arena('cuda:0')\n"
        "s = gpumem.Stream('cuda:0')\n"
        "kept = [a.allocate(1 << 20, s) for _ in range(4)]\n"
        "e = s.record()\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_forked_child_may_not_use_the_parents_arena():
    script = (
        "import os, gpumem\n"
        "a = gpumem.Arena('cuda:0')\n"
        "b = a.allocate(1 << 20)\n"
        "pid = os.fork()\n"
        "if pid == 0:\n"
        "    try:\n"
        "        a.allocate(1 << 20)\n"
        "    except gpumem.errors.ClosedError:\n"
        "        del b\n"
        "        os._exit(7)\n"
        "    os._exit(1)\n"
        "assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 7\n"
        "b.close(); a.check_invariants(); a.close()\n"
    )
    assert python("-W", "ignore::DeprecationWarning", "-c", script).stderr == ""
