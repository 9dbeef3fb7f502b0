"""Real consumers and producers, where they are installed."""

import gc
import sys

import numpy as np
import pytest
from helpers import child

import gpumem


def test_torch_and_gpumem_share_memory_both_ways(arena):
    torch = pytest.importorskip("torch", reason="torch is not installed")
    tensor = gpumem.zeros((3, 4), "f4", resource=arena)
    seen = torch.from_dlpack(tensor[1:, ::2])
    seen += 1
    assert tensor.numpy().sum() == 4
    del tensor
    gc.collect()
    assert arena.stats().in_use > 0
    del seen
    assert arena.stats().in_use == 0
    theirs = torch.arange(6).reshape(2, 3).T
    ours = gpumem.from_dlpack(theirs)
    assert ours.strides == (8, 24)
    ours.numpy()[0, 0] = 9
    assert theirs[0, 0] == 9
    for dtype in ("bfloat16", "float8_e4m3fn", "float8_e5m2", "?", "c8"):
        assert torch.from_dlpack(gpumem.zeros(3, dtype, memory="host")).shape == (3,)


def test_torch_imports_managed_and_pinned_memory_as_cpu():
    torch = pytest.importorskip("torch", reason="torch is not installed")
    for memory in ("host/managed", "host/host_accessible"):
        tensor = gpumem.full(3, 5, "i4", memory=memory)
        assert torch.from_dlpack(tensor.export_as("cpu")).tolist() == [5, 5, 5]


def test_torch_does_not_abort_on_negative_strides():
    pytest.importorskip("torch", reason="torch is not installed")
    child.run_quietly("""
import gpumem, torch
try:
    torch.from_dlpack(gpumem.zeros(3, "f4", memory="host")[::-1])
except BufferError:
    pass
else:
    raise AssertionError
""")


def test_onnxruntime_reads_the_real_address():
    onnxruntime = pytest.importorskip("onnxruntime", reason="onnxruntime is not installed")
    tensor = gpumem.from_dlpack(np.arange(8, dtype="f4"))[2:]
    value = onnxruntime.OrtValue.from_dlpack(tensor)
    assert value.numpy().tolist() == [2, 3, 4, 5, 6, 7]


def test_jax_shares_memory():
    jax = pytest.importorskip("jax", reason="jax is not installed")
    tensor = gpumem.full((2, 3), 4, "f4", memory="host")
    array = jax.numpy.from_dlpack(tensor)
    assert np.array_equal(array, tensor.numpy())
    for tensor in (gpumem.from_dlpack(array), gpumem.asarray(array)):
        assert np.array_equal(tensor.numpy(), array)
        assert tensor.read_only


class OldProducer:
    """An array with a capsule from before DLPack 1.0, which has no flag for read-only memory."""

    def __init__(self, array):
        self.array = array

    def __dlpack__(self, **options):
        return self.array.__dlpack__()

    def __dlpack_device__(self):
        return 1, 0


class ShownReadOnly(OldProducer):
    def __buffer__(self, flags):
        return memoryview(self.array).toreadonly()


@pytest.mark.parametrize(
    ("kind", "read_only"),
    [
        (OldProducer, False),
        (type("ArrayImpl", (OldProducer,), {"__module__": "jaxlib._jax"}), True),
        pytest.param(
            ShownReadOnly,
            True,
            marks=pytest.mark.skipif(
                sys.version_info < (3, 12), reason="__buffer__ of Python classes is new in 3.12"
            ),
        ),
    ],
)
def test_memory_of_immutable_arrays_is_read_only_without_a_flag_of_dlpack(kind, read_only):
    array = np.ones(3)
    for tensor in (gpumem.from_dlpack(kind(array)), gpumem.asarray(kind(array))):
        assert tensor.read_only == tensor[1:].view("u1").read_only == read_only
        if not read_only:
            continue
        for write in (
            lambda it: it.fill(2),
            lambda it: it.__setitem__(0, 2),
            lambda it: it.__setitem__(slice(None), np.zeros(3)),
            lambda it: gpumem.copy(it, np.zeros(3)),
            lambda it: gpumem.Session("host").bind_output("y", it),
            lambda it: it.numpy(writable=True),
            lambda it: it.__dlpack__(),
        ):
            with pytest.raises(BufferError, match=r"read-only"):
                write(tensor)
    assert array.tolist() == [1, 1, 1]


def test_tvm_ffi_uses_the_c_exchange_api():
    ffi = pytest.importorskip("tvm_ffi", reason="apache-tvm-ffi is not installed")
    tensor = gpumem.full((2, 3), 4, "f4", memory="host")
    assert np.array_equal(np.from_dlpack(ffi.from_dlpack(tensor)), tensor.numpy())
