"""Real consumers and producers, where they are installed."""

import gc

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
    assert np.array_equal(gpumem.from_dlpack(array).numpy(), array)


def test_tvm_ffi_uses_the_c_exchange_api():
    ffi = pytest.importorskip("tvm_ffi", reason="apache-tvm-ffi is not installed")
    tensor = gpumem.full((2, 3), 4, "f4", memory="host")
    assert np.array_equal(np.from_dlpack(ffi.from_dlpack(tensor)), tensor.numpy())
