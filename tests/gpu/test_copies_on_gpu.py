"""Copies between every kind of memory of a machine with a GPU: right bytes, order, few calls."""

import itertools

import numpy as np
import pytest

import gpumem
from gpumem._copy import set_staged_from

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
def test_random_layouts_arrive_as_numpys(seed):
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


def test_a_pinned_copy_is_queued_and_comes_after_what_the_stream_waits_for(stream, driver):
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


def test_torchs_and_cupys_arrays_are_ends_of_copies():
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


def test_a_dropped_torch_source_lives_until_the_copy_is_done(stream, driver):
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
    for _ in range(1000):
        if torch.cuda.memory_allocated() < held:
            return
        stream.synchronize()
    raise AssertionError("torch never got its memory back")


def test_the_cpus_arrays_that_torch_pinned_are_copied_asynchronously(stream, driver):
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
