"""Copies between every kind of memory of a machine with a GPU: right bytes, order, few calls."""

import gc
import itertools

import numpy as np
import pytest
from helpers.threads import in_threads
from helpers.waiting import wait_until

import gpumem
from gpumem._testing.copies import set_staged_from

MIB = 1 << 20
MEMORIES = ["cuda:0", "cuda:0/host_accessible", "cuda:0/managed", "host", "numpy"]


@pytest.fixture
def stream():
    return gpumem.Stream("cuda:0")


def place(array, memory):
    """Put an array into a memory, by the simplest way."""
    if memory == "numpy":
        return array.copy()
    tensor = gpumem.empty(array.shape, array.dtype, memory=memory)
    gpumem.copy(tensor, array)
    return tensor


def fetch(array):
    if isinstance(array, np.ndarray):
        return array
    whole = np.empty(array.shape, array.dtype)
    gpumem.copy(whole, array)
    return whole


@pytest.mark.parametrize(("to", "origin"), list(itertools.product(MEMORIES, MEMORIES)))
@pytest.mark.parametrize("given", [False, True], ids=["own stream", "stream"])
def test_every_pair_of_memories_copies_small_large_and_strided(to, origin, given, stream):
    rng = np.random.default_rng(5)
    for shape in [(), (7,), (3, 5), (2, 3, 4), (1 << 22,), (300, 70, 50)]:
        data = rng.integers(0, 1 << 30, shape, np.int32)
        dst, src = place(np.zeros(shape, np.int32), to), place(data, origin)
        gpumem.copy(dst, src, *([stream] if given else []))
        stream.synchronize()
        assert (fetch(dst) == data).all()
        if len(shape) == 3:
            cut = np.s_[1:, ::2, 1:-1]
            dst = place(np.zeros(shape, np.int32), to)
            gpumem.copy(dst[cut], src[cut], *([stream] if given else []))
            stream.synchronize()
            expected = np.zeros(shape, np.int32)
            expected[cut] = data[cut]
            assert (fetch(dst) == expected).all()


@pytest.mark.parametrize("seed", range(60))
def test_random_copy_equals_numpys(seed):
    rng = np.random.default_rng(seed)
    print("seed", seed)
    rank = int(rng.integers(1, 5))
    shape = tuple(int(n) for n in rng.integers(1, 14, rank))
    dtype = rng.choice(["u1", "i2", "f4", "c8", "c16"])
    data = rng.integers(0, 100, shape).astype(dtype)
    axes = tuple(int(a) for a in rng.permutation(rank))
    cut = tuple(slice(None, None, int(rng.choice([1, 1, 2, -1, -2]))) for _ in range(rank))
    memories = rng.choice(MEMORIES, 2)
    source = place(data, memories[0])
    target = np.zeros([shape[a] for a in np.argsort(axes)], dtype)
    dst = place(target, memories[1])
    want = data[cut]
    spare = tuple(slice(0, n) for n in [want.shape[a] for a in np.argsort(axes)])
    set_staged_from(int(rng.choice([1, 1 << 40])))
    try:
        gpumem.copy(permuted(dst[spare], axes), source[cut])
        got = np.transpose(fetch(dst)[spare], axes)
    finally:
        set_staged_from(-1)
    assert (got == want).all(), (shape, dtype, axes, cut, memories)


def permuted(array, axes):
    if isinstance(array, np.ndarray):
        return np.transpose(array, axes)
    if array.memory.host_accessible:
        return np.transpose(array.numpy(), axes)
    torch = pytest.importorskip("torch", reason="permutes a GPU's tensor for this test")
    return torch.from_dlpack(array).permute(*axes)


def test_pinned_copy_is_asynchronous_and_stream_ordered(stream, driver):
    flag = gpumem.Arena("cuda:0/host_accessible").allocate(8)
    word = np.frombuffer(flag, np.uint64)
    word[0] = 0
    pinned = place(np.full(MIB, 7, np.uint8), "cuda:0/host_accessible")
    device = place(np.zeros(MIB, np.uint8), "cuda:0")
    driver.call(driver.cuStreamWaitValue64, stream.ptr, flag.ptr, 1, 0)
    gpumem.copy(device, pinned, stream)
    assert not stream.query(), "the copy did not return before it was done"
    del pinned
    word[0] = 1
    assert (fetch(device) == 7).all()


def test_copy_accepts_torch_and_cupy_arrays():
    torch = pytest.importorskip("torch", reason="torch is not installed")
    cupy = pytest.importorskip("cupy", reason="CuPy is not installed")
    source = torch.arange(MIB, dtype=torch.int32, device="cuda") * 3
    target = cupy.zeros(MIB, cupy.int32)
    gpumem.copy(target, source)
    assert int(cupy.abs(target - cupy.arange(MIB, dtype=cupy.int32) * 3).sum()) == 0
    pinned = torch.zeros(MIB, dtype=torch.int32, pin_memory=True)
    gpumem.copy(pinned, target)
    torch.cuda.synchronize()
    assert (pinned.numpy() == np.arange(MIB, dtype=np.int32) * 3).all()


def test_dropped_torch_source_lives_until_the_copy_is_done(stream, driver):
    torch = pytest.importorskip("torch", reason="torch is not installed")
    flag = gpumem.Arena("cuda:0/host_accessible").allocate(8)
    word = np.frombuffer(flag, np.uint64)
    word[0] = 0
    source = torch.full((MIB,), 5, dtype=torch.uint8, device="cuda")
    torch.cuda.synchronize()
    device = place(np.zeros(MIB, np.uint8), "cuda:0")
    driver.call(driver.cuStreamWaitValue64, stream.ptr, flag.ptr, 1, 0)
    gpumem.copy(device, source, stream)
    held = torch.cuda.memory_allocated()
    del source
    assert torch.cuda.memory_allocated() == held, "torch got its memory back early"
    word[0] = 1
    stream.synchronize()
    assert (fetch(device) == 5).all()
    # Another thread gives it back, soon after the stream is done.
    wait_until(lambda: torch.cuda.memory_allocated() < held)


def test_pinned_torch_tensor_is_copied_asynchronously(stream, driver):
    torch = pytest.importorskip("torch", reason="torch is not installed")
    flag = gpumem.Arena("cuda:0/host_accessible").allocate(8)
    word = np.frombuffer(flag, np.uint64)
    word[0] = 0
    pinned = torch.full((4 * MIB,), 3, dtype=torch.uint8, pin_memory=True)
    device = place(np.zeros(4 * MIB, np.uint8), "cuda:0")
    driver.call(driver.cuStreamWaitValue64, stream.ptr, flag.ptr, 1, 0)
    gpumem.copy(device, pinned, stream)
    assert not stream.query()
    word[0] = 1
    stream.synchronize()
    assert (fetch(device) == 3).all()


# ---- driver calls, counted as the nodes of a graph that captures them ----------------------------


def captured(driver, stream, work):
    """Capture work, run it once from its graph, and return how many nodes that has."""
    driver.call(driver.cuStreamBeginCapture, stream.ptr, driver.CUstreamCaptureMode(2))
    try:
        work()
    finally:
        graph = driver.call(driver.cuStreamEndCapture, stream.ptr)
    _, count = driver.call(driver.cuGraphGetNodes, graph)
    ready = driver.call(driver.cuGraphInstantiate, graph, 0)
    driver.call(driver.cuGraphLaunch, ready, stream.ptr)
    stream.synchronize()
    driver.call(driver.cuGraphExecDestroy, ready)
    driver.call(driver.cuGraphDestroy, graph)
    return count


def on_stream(array, memory, stream):
    tensor = gpumem.empty(array.shape, array.dtype, memory=memory, stream=stream)
    gpumem.copy(tensor, array, stream)
    stream.synchronize()
    return tensor


BOXES = [
    ((1 << 20,), np.s_[:], 1),
    ((64, 32, 16, 8), np.s_[:], 1),  # contiguous elements are a line whatever their rank
    ((300, 400), np.s_[:, 7:200], 1),
    ((300, 400), np.s_[::3, 7:200], 1),
    ((40, 30, 50), np.s_[3:, 2:20, 5:45], 1),
    ((40, 30, 50), np.s_[:, ::2, 5:45], 1),
    ((3, 20, 30, 50), np.s_[:, 1:, 2:20, 5:45], 3),  # a fourth dimension: one for each index
]
PAIRS = [
    ("cuda:0", "cuda:0"),
    ("cuda:0", "cuda:0/host_accessible"),
    ("cuda:0/host_accessible", "cuda:0"),
]


@pytest.mark.parametrize(("to", "origin"), PAIRS)
@pytest.mark.parametrize(("shape", "cut", "calls"), BOXES)
def test_strided_copy_uses_the_fewest_three_dimensional_driver_calls(
    to, origin, shape, cut, calls, stream, driver
):
    data = np.arange(np.prod(shape), dtype=np.float32).reshape(shape)
    dst, src = (on_stream(np.zeros_like(data), to, stream), on_stream(data, origin, stream))
    assert captured(driver, stream, lambda: gpumem.copy(dst[cut], src[cut], stream)) == calls
    expected = np.zeros_like(data)
    expected[cut] = data[cut]
    assert (fetch(dst) == expected).all()


def test_pitched_to_contiguous_copy_is_one_driver_call(stream, driver):
    data = np.arange(40 * 30 * 50, dtype=np.int16).reshape(40, 30, 50)
    src = on_stream(data, "cuda:0", stream)[:, 3:20, 5:45]
    dst = on_stream(np.zeros(src.shape, np.int16), "cuda:0", stream)
    assert captured(driver, stream, lambda: gpumem.copy(dst, src, stream)) == 1
    assert (fetch(dst) == data[:, 3:20, 5:45]).all()


# ---- large pageable copies -----------------------------------------------------------------------


def test_concurrent_large_strided_staged_copies():
    failures = []

    def work(number):
        rng = np.random.default_rng(number)
        stream = gpumem.Stream("cuda:0")
        data = rng.integers(0, 1 << 30, (2100, 2048, 3), np.int32)
        cut = np.s_[number:2048, ::2, :]
        device = gpumem.zeros(data.shape, "i4", memory="cuda:0", stream=stream)
        back = np.zeros_like(data)
        gpumem.copy(device[cut], data[cut], stream)
        data_then, data[...] = data.copy(), 0  # a pageable source may change at once
        gpumem.copy(back[cut], device[cut], stream)
        if (back[cut] != data_then[cut]).any() or back[:number].any() or back[:, 1::2].any():
            failures.append(number)

    in_threads(work, range(6))
    assert not failures


# ---- who lives until a copy is done --------------------------------------------------------------


def test_pinned_torch_destination_is_written_asynchronously_and_kept_alive(stream, gate):
    torch = pytest.importorskip("torch", reason="torch is not installed")
    device = place(np.full(MIB, 7, np.uint8), "cuda:0")
    stream.synchronize()
    target = torch.zeros(MIB, dtype=torch.uint8, pin_memory=True)
    seen = target.numpy()
    address = target.data_ptr()
    gate.hold(stream)
    gpumem.copy(target, device, stream)
    assert not stream.query()
    assert (seen == 0).all()
    del target, seen
    gc.collect()
    others = [torch.empty(MIB, dtype=torch.uint8, pin_memory=True) for _ in range(4)]
    assert address not in [other.data_ptr() for other in others], "torch handed it out again"
    gate.open()
    stream.synchronize()


def test_pinned_torch_array_is_written_when_the_stream_is_done(stream, gate):
    torch = pytest.importorskip("torch", reason="torch is not installed")
    device = place(np.full(MIB, 7, np.uint8), "cuda:0")
    target = torch.zeros(MIB, dtype=torch.uint8, pin_memory=True)
    gate.hold(stream)
    gpumem.copy(target, device, stream)
    assert not gate.is_open
    gate.open()
    stream.synchronize()
    assert (target.numpy() == 7).all()
    gpumem.copy(target, place(np.full(MIB, 8, np.uint8), "cuda:0"))
    assert (target.numpy() == 8).all(), "without a stream a copy to it is done on return"


def test_numpy_waits_for_a_tensor_over_torchs_pinned_memory(stream, gate):
    torch = pytest.importorskip("torch", reason="torch is not installed")
    device = place(np.full(MIB, 7, np.uint8), "cuda:0")
    target = gpumem.from_dlpack(torch.zeros(MIB, dtype=torch.uint8, pin_memory=True))
    gate.hold(stream)
    gate.open_after(0.3)
    gpumem.copy(target, device, stream)
    assert (target.numpy() == 7).all()


def test_buffers_are_not_reused_before_the_copy_is_done(stream, gate):
    arena = gpumem.Arena("cuda:0", {"initial_chunk_size_bytes": MIB})
    source = gpumem.full(MIB, 4, "u1", resource=arena)
    target = gpumem.zeros(MIB, "u1", memory="cuda:0", stream=stream)
    other = gpumem.Stream("cuda:0")
    gpumem.Device("cuda:0").synchronize()
    gate.hold(stream)
    gpumem.copy(target, source, stream)
    del source
    spoiler = gpumem.full(MIB, 99, "u1", resource=arena, stream=other)
    gate.open()
    stream.synchronize()
    assert (fetch(target) == 4).all()
    assert (fetch(spoiler) == 99).all()


@pytest.mark.parametrize("memory", ["numpy", "cuda:0/host_accessible"])
def test_copy_out_comes_after_held_work(memory, arena, stream, gate, tmp_path):
    source = gpumem.zeros(5 * MIB + 3, "uint32", resource=arena)
    there = place(np.zeros(source.shape, source.dtype), memory)
    there = there if memory == "numpy" else there.numpy()
    gpumem.Device("cuda:0").synchronize()
    gate.hold(stream)
    source.fill(7, stream)
    copying = arena.copy_out({"a": source}, to={"a": there}, limit="4MiB")
    in_file = arena.copy_out({"a": source}, tmp_path / "file", limit="4MiB")
    assert not copying.done
    gate.open()
    array = copying.wait()["a"]
    assert (array == 7).all()
    assert in_file.wait().read_bytes().endswith(array.tobytes())


# ---- between host memories, and fills of them ----------------------------------------------------

KNOWN = MEMORIES[:3]


@pytest.mark.parametrize(("to", "origin"), list(itertools.product(KNOWN, KNOWN)))
@pytest.mark.parametrize("shape", [(1000,), (4 * MIB,), (500, 20)], ids=str)
def test_copy_returns_before_a_held_stream_has_come_to_it(to, origin, shape, stream, gate):
    data = np.arange(np.prod(shape), dtype=np.uint32).reshape(shape)
    dst, src = place(np.zeros_like(data), to), place(data, origin)
    gpumem.Device("cuda:0").synchronize()
    gate.hold(stream)
    gpumem.copy(dst, src, stream)
    assert not gate.is_open
    assert not stream.query()
    gate.open()
    assert (fetch(dst) == data).all()


@pytest.mark.parametrize("pinned", ["cuda:0/host_accessible"])
def test_layout_that_only_the_cpu_copies_is_queued_between_pinned_memories(pinned, stream, gate):
    data = np.arange(90_000, dtype=np.int32).reshape(300, 300)
    dst, src = place(np.zeros_like(data), pinned), place(data, pinned)
    gate.hold(stream)
    gpumem.copy(dst, np.transpose(src.numpy()), stream)
    assert not gate.is_open
    gate.open()
    assert (fetch(dst) == data.T).all()


def test_pageable_source_may_change_while_its_copy_to_pinned_memory_is_queued(stream, gate):
    dst, array = place(np.zeros(MIB, np.uint8), "cuda:0/host_accessible"), np.full(MIB, 7, np.uint8)
    gate.hold(stream)
    gpumem.copy(dst, array, stream)
    assert not gate.is_open
    array[:] = 9
    gate.open()
    stream.synchronize()
    assert (dst.numpy() == 7).all()


@pytest.mark.parametrize("memory", KNOWN)
@pytest.mark.parametrize("dtype", ["u1", "i2", "f4", "f8", "c16", "V12"])
def test_fill_returns_before_a_held_stream_has_come_to_it(memory, dtype, stream, gate):
    value = np.frombuffer(bytes(range(1, 17)), np.dtype(dtype), 1)[0]
    gate.hold(stream)
    tensor = gpumem.full(1001, value, dtype, memory=memory, stream=stream)
    assert not gate.is_open
    gate.open()
    assert fetch(tensor).tobytes() == np.full(1001, value, dtype).tobytes()


@pytest.mark.parametrize("dtype", ["f8", "c16"])
def test_captured_fill_and_pinned_copy_are_nodes(dtype, stream, driver):
    pinned = gpumem.Arena("cuda:0/host_accessible")
    first = gpumem.full(100, 0, dtype, resource=pinned, stream=stream)
    second = gpumem.full(100, 0, dtype, resource=pinned, stream=stream)
    spare = gpumem.empty(100, dtype, resource=pinned, stream=stream)
    stream.synchronize()
    del spare
    made = []

    def work():
        made.append(gpumem.full(100, 1.5, dtype, resource=pinned, stream=stream))
        gpumem.copy(first, made[0], stream)
        gpumem.copy(second, first, stream)

    captured(driver, stream, work)
    assert (second.numpy() == np.full(100, 1.5, dtype)).all()
