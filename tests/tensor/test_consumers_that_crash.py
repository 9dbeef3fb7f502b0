"""What makes some consumer abort, read wrong bytes or write where nobody may, a process for each.

A capsule that breaks one of these rules takes the process down, so each runs in one of its own and
has to come to its end: the consumer reads the right bytes, or refuses with an exception.
"""

import importlib.util

import pytest
from helpers import child

SETUP = """
import gc, warnings
warnings.simplefilter("ignore")
import numpy as np
import gpumem

def tensor_of(array, memory="host"):
    tensor = gpumem.empty(array.shape, array.dtype, memory=memory)
    tensor.numpy()[...] = array
    return tensor

def refused(call, *errors):
    try:
        call()
    except errors as error:
        return error
    raise AssertionError("not refused")

values = np.arange(24, dtype="f4").reshape(4, 6)
tensor = tensor_of(values)
"""

NUMPY = {
    "negative strides": """
refused(lambda: np.from_dlpack(tensor[::-1]), BufferError)
assert (np.from_dlpack(gpumem.from_dlpack(tensor[::-1], copy=True)) == values[::-1]).all()
""",
    "padded rows, strided columns, no elements, no dimensions": """
for key in (np.s_[:, :5], np.s_[::2, 1::3], np.s_[:0], np.s_[1, 2], np.s_[:, None]):
    assert np.array_equal(np.from_dlpack(tensor[key]), values[key])
""",
    "a broadcast": """
wide = gpumem.asarray(np.broadcast_to(values[:1], (5, 6)))
assert wide.strides == (0, 4)
if wide.read_only:
    wide = gpumem.asarray(np.lib.stride_tricks.as_strided(values, (5, 6), (0, 4)))
assert np.array_equal(np.from_dlpack(wide), np.broadcast_to(values[:1], (5, 6)))
""",
    "misaligned elements": """
odd = gpumem.zeros(41, "u1", memory="host")[1:]
seen = odd.view("f4")
seen.numpy()[...] = np.arange(10)
assert np.from_dlpack(seen).tolist() == list(range(10))
""",
    "views that outlive everything": """
kept = np.from_dlpack(tensor)
del tensor
gc.collect()
assert (kept == values).all()
""",
    "bfloat16, which it has no dtype for": """
half = gpumem.zeros(3, "bfloat16", memory="host")
refused(lambda: np.from_dlpack(half), BufferError, RuntimeError)
assert np.from_dlpack(half.view("u2")).dtype == np.uint16
""",
}

TORCH = {
    "negative strides": """
refused(lambda: torch.from_dlpack(tensor[::-1]), BufferError)
refused(lambda: torch.from_dlpack(tensor[:, ::-2]), BufferError)
assert torch.from_dlpack(gpumem.from_dlpack(tensor[::-1], copy=True)).tolist() == (
    values[::-1].tolist())
""",
    "an offset, padded rows, no elements, no dimensions": """
for key in (np.s_[1:, 1:], np.s_[::2, 1::3], np.s_[:0], np.s_[1, 2], np.s_[:, None]):
    assert np.array_equal(torch.from_dlpack(tensor[key]).numpy(), values[key])
""",
    "a copy is one": """
copy = torch.from_dlpack(tensor, copy=True)
copy += 1
assert np.array_equal(tensor.numpy(), values)
shared = torch.from_dlpack(tensor, copy=False)
shared += 1
assert np.array_equal(tensor.numpy(), values + 1)
""",
    "pinned and managed memory": """
for memory, named in (("host/host_accessible", "cuda_host"), ("host/managed", "cuda_managed")):
    other = tensor_of(values, memory)
    refused(lambda: torch.from_dlpack(other.export_as(named)), BufferError, RuntimeError)
    assert np.array_equal(torch.from_dlpack(other.export_as("cpu")).numpy(), values)
""",
    "read-only memory without its flag": """
held = tensor.as_read_only()
refused(lambda: torch.utils.dlpack.from_dlpack(held.__dlpack__()), BufferError)
assert torch.from_dlpack(held).tolist() == values.tolist()     # it ignores the flag, so: no writes
""",
    "a tensor that is dropped after ours, at the end of the process": """
import sys
sys.modules["kept"] = torch.from_dlpack(tensor)
del tensor
""",
    "gradients": """
theirs = torch.ones(3, requires_grad=True)
refused(lambda: gpumem.from_dlpack(theirs), BufferError)
assert gpumem.from_dlpack(theirs.detach()).numpy().tolist() == [1, 1, 1]
""",
    "conjugate and negative bits": """
theirs = torch.ones(3, dtype=torch.complex64).conj()
refused(lambda: gpumem.from_dlpack(theirs), BufferError, RuntimeError)
""",
    "what it lays out itself comes in": """
for theirs in (torch.arange(24.).reshape(4, 6).T, torch.ones(1).expand(5), torch.empty(0, 3),
               torch.tensor(5.)):
    ours = gpumem.from_dlpack(theirs)
    assert np.array_equal(ours.numpy(), theirs.numpy())
""",
}

JAX = {
    "what it shares and what it copies": """
array = jax.numpy.from_dlpack(tensor)
assert np.array_equal(array, values)
transposed = gpumem.asarray(np.ascontiguousarray(values).T)
assert np.array_equal(jax.numpy.from_dlpack(transposed), values.T)
""",
    "less than 64 bytes of alignment": """
flat = tensor.reshape(-1)[1:]
try:
    assert np.array_equal(jax.numpy.from_dlpack(flat), values.reshape(-1)[1:])
except (BufferError, ValueError, RuntimeError):
    pass
""",
    "rows with gaps, negative strides": """
for part, expected in ((tensor[:, :5], values[:, :5]), (tensor[::-1], values[::-1])):
    try:
        assert np.array_equal(jax.numpy.from_dlpack(part), expected)
    except (BufferError, ValueError, RuntimeError, jax.errors.JaxRuntimeError):
        pass
    whole = gpumem.from_dlpack(part, copy=True)
    assert np.array_equal(jax.numpy.from_dlpack(whole), expected)
""",
    "managed memory": """
other = tensor_of(values, "host/managed")
assert np.array_equal(jax.numpy.from_dlpack(other.export_as("cpu")), values)
""",
    "its arrays are not written": """
theirs = jax.numpy.arange(3.)
ours = gpumem.from_dlpack(theirs)
assert ours.numpy().tolist() == [0, 1, 2]
kept = ours.numpy()
del theirs, ours
gc.collect()
assert kept.tolist() == [0, 1, 2]
""",
}

ONNXRUNTIME = {
    "an offset, which it would ignore": """
value = onnxruntime.OrtValue.from_dlpack(tensor[2:])
assert np.array_equal(value.numpy(), values[2:])
""",
    "a deleter, without which it aborts": """
value = onnxruntime.OrtValue.from_dlpack(tensor)
assert np.array_equal(value.numpy(), values)
del tensor, value
gc.collect()
""",
    "rows with gaps and turned ones": """
for part in (tensor[:, :5], tensor[:, ::2], gpumem.asarray(values.T)):
    refused(lambda: onnxruntime.OrtValue.from_dlpack(part), Exception)
    value = onnxruntime.OrtValue.from_dlpack(part.contiguous())
    assert np.array_equal(value.numpy(), part.numpy())
""",
    "bool, which it takes as bytes": """
flags = gpumem.full(3, True, memory="host")
try:
    onnxruntime.OrtValue.from_dlpack(flags)
except Exception:
    pass
assert onnxruntime.OrtValue.from_dlpack(flags.view("u1")).numpy().tolist() == [1, 1, 1]
""",
    "no elements, no dimensions": """
for part in (tensor[:0], tensor[1, 2]):
    value = onnxruntime.OrtValue.from_dlpack(part)
    assert value.numpy().tolist() == part.numpy().tolist()
""",
    "read-only memory": """
refused(lambda: onnxruntime.OrtValue.from_dlpack(tensor.as_read_only()), BufferError)
""",
    "its values come in": """
value = onnxruntime.OrtValue.ortvalue_from_numpy(values)
assert np.array_equal(gpumem.from_dlpack(value).numpy(), values)
""",
}

CASES = [
    pytest.param(library, body, id=f"{library}: {name}")
    for library, bodies in (
        ("numpy", NUMPY),
        ("torch", TORCH),
        ("jax", JAX),
        ("onnxruntime", ONNXRUNTIME),
    )
    for name, body in bodies.items()
]


@pytest.mark.parametrize(("library", "body"), CASES)
def test_process_of_a_fragile_consumer_survives(library, body):
    if importlib.util.find_spec(library) is None:
        pytest.skip(f"{library} is not installed")
    done = child.run(f"{SETUP}\nimport {library}\n{body}\nprint('the end')")
    assert (done.returncode, done.stdout) == (0, "the end\n"), done.stderr
