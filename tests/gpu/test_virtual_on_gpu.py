"""Virtual tensors on a GPU: pages behind work, captured graphs, PyTorch over all rows."""

import numpy as np
import pytest
from helpers.examples import add_example

import gpumem

add_example("paged_server")

from block_pool import BlockPool  # noqa: E402

MIB = 1 << 20
ROWS = 256  # of 1 MiB


def cache_of(arena, **settings):
    return arena.virtual((ROWS, MIB), "uint8", **{"step": 8} | settings)


def byte_at(driver, address):
    seen = np.zeros(1, np.uint8)
    driver.call(driver.cuMemcpyDtoH, seen.ctypes.data, address, 1)
    return int(seen[0])


def free_bytes(driver):
    return driver.call(driver.cuMemGetInfo)[0]


def test_rows_take_and_give_the_devices_memory(driver):
    arena = gpumem.Arena("cuda:0")
    cache = cache_of(arena)
    base = free_bytes(driver)
    cache.commit(ROWS)
    assert base - free_bytes(driver) >= ROWS * MIB
    driver.call(driver.cuMemsetD8, cache.ptr, 3, ROWS * MIB)
    cache.release(8, ROWS)
    driver.call(driver.cuCtxSynchronize)
    arena.shrink()
    assert cache.held_nbytes == 8 * MIB
    assert base - free_bytes(driver) <= 16 * MIB
    assert byte_at(driver, cache.ptr + 8 * MIB - 1) == 3
    cache.close()
    arena.close()


def test_release_does_not_wait_and_pages_stay_until_the_work_is_done(arena, driver):
    stream = gpumem.Stream("cuda:0")
    cache = cache_of(arena, committed=ROWS, stream=stream)
    for _ in range(200):  # some tens of milliseconds
        driver.call(driver.cuMemsetD8Async, cache.ptr, 5, ROWS * MIB, stream.ptr)
    cache.release(0, ROWS)
    was_busy = not stream.query()
    held = cache.held_nbytes
    stream.synchronize()  # an illegal address would show here
    arena.shrink()
    assert cache.held_nbytes == 0
    assert not was_busy or held == ROWS * MIB


def test_graph_runs_through_a_thousand_steps_of_growing_and_shrinking(arena, driver):
    stream = gpumem.Stream("cuda:0")
    cache = cache_of(arena, committed=8, stream=stream)
    mode = driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED
    driver.call(driver.cuStreamBeginCapture, stream.ptr, mode)
    driver.call(driver.cuMemcpyDtoDAsync, cache.ptr + MIB, cache.ptr, MIB, stream.ptr)
    graph = driver.call(driver.cuStreamEndCapture, stream.ptr)
    ready = driver.call(driver.cuGraphInstantiate, graph, 0)
    rng = np.random.default_rng(11)
    for step in range(1000):
        cache.resize(8 + int(rng.integers(0, ROWS - 8)))
        driver.call(driver.cuMemsetD8Async, cache.ptr, step % 251, MIB, stream.ptr)
        driver.call(driver.cuGraphLaunch, ready, stream.ptr)
        if step % 50 == 0:
            stream.synchronize()
            assert byte_at(driver, cache.ptr + 2 * MIB - 1) == step % 251
    stream.synchronize()
    driver.call(driver.cuGraphExecDestroy, ready)
    driver.call(driver.cuGraphDestroy, graph)
    cache.close()


def test_torch_tensor_of_all_rows_is_valid_through_commits(arena):
    torch = pytest.importorskip("torch")
    cache = arena.virtual((4096, 16, 8, 64), "float16", step=64)
    rows = torch.from_dlpack(cache.full)
    cache.commit(64)
    rows[:64] = 1
    cache.commit(2048)
    rows[64:2048] = 2
    assert float(rows[:2048].float().sum()) == 16 * 8 * 64 * (64 + 2 * 1984)
    held = torch.from_dlpack(cache)
    assert held.shape == (2048, 16, 8, 64)
    with pytest.raises(gpumem.errors.InUseError):
        cache.release(0, 1)
    del held
    torch.cuda.synchronize()
    cache.release(64, 2048)
    assert float(rows[:64].float().sum()) == 16 * 8 * 64 * 64


def test_attention_over_moved_blocks_is_that_of_before(arena):
    torch = pytest.importorskip("torch")
    tensor = arena.virtual((8192, 2, 16, 8, 64), "float16", step=64)
    pool = BlockPool(tensor)
    rows = torch.from_dlpack(tensor.full)
    blocks = pool.allocate(1024)
    rows[:1024].normal_()
    pool.free(np.delete(blocks, np.s_[::16]))
    query = torch.randn(1, 8, 1, 64, device="cuda", dtype=torch.float16)

    def picked(table):
        return [rows[table, i].reshape(1, -1, 8, 64).transpose(1, 2) for i in range(2)]

    def copy(origins, targets):
        rows[targets] = rows[origins]

    def attend(picked):
        return torch.nn.functional.scaled_dot_product_attention(query, *picked)

    kept = blocks[::16]
    at_first = picked(kept)
    before = attend(at_first)
    there = pool.compact(copy)
    assert pool.floor_nbytes == tensor.used_nbytes
    moved = picked([there.get(int(block), int(block)) for block in kept])
    assert all(map(torch.equal, moved, at_first))
    # cuDNN's attention differs in the last bit now and then, also of the same memory.
    assert torch.allclose(attend(moved), before, atol=1e-4)
