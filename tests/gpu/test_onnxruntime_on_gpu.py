"""ONNX Runtime's CUDA provider on gpumem's memory: tensors in place, an arena behind it."""

import numpy as np
import pytest
from helpers import child

import gpumem

ort = pytest.importorskip("onnxruntime", reason="ONNX Runtime is not installed")
pytest.importorskip("onnx", reason="onnx, which makes the models, is not installed")
if "CUDAExecutionProvider" not in ort.get_available_providers():
    pytest.skip("this ONNX Runtime has no CUDA provider", allow_module_level=True)

from bench.onnx_sessions import chain  # noqa: E402  # needs what is checked above
from gpumem.integrations import onnxruntime as integration  # noqa: E402

MIB = 1 << 20
WIDTH, LAYERS = 512, 4
# PyTorch and a session take blocks from one arena in turns, and look at all bytes. The session's
# memory is freed between its kernels, PyTorch's while its own are queued.
IN_TURNS = """
import numpy as np
import gpumem
from gpumem.integrations import onnxruntime as integration
from gpumem.integrations import torch as torch_integration

arena = gpumem.Arena("cuda:0")
torch_integration.enable(arena)
import torch
import onnxruntime as ort
from bench.onnx_sessions import chain

WIDTH, LAYERS = 512, 4
memory = integration.allocator(arena)
providers = [("CUDAExecutionProvider", memory.provider_options)]
session = ort.InferenceSession(chain(LAYERS, WIDTH), providers=providers)
assert session.get_providers()[0] == "CUDAExecutionProvider"
rng = np.random.default_rng(5)
side = torch.cuda.Stream()
arrays = {rows: rng.normal(size=(rows, WIDTH)).astype("f4") for rows in (64, 700, 2048)}
first = {rows: session.run(None, {"x0": array})[0] for rows, array in arrays.items()}
kept = []
for turn in range(300):
    rows = (64, 700, 2048)[turn % 3]
    for stream in (torch.cuda.current_stream(), side):
        with torch.cuda.stream(stream):
            block = torch.full(((turn % 7 + 1) << 18,), turn, dtype=torch.int32, device="cuda")
            for _ in range(3):
                block += 1
            kept.append((stream, turn + 3, block))
    (result,) = session.run(None, {"x0": arrays[rows]})
    assert np.array_equal(result, first[rows]), f"turn {turn}: ONNX Runtime computed other bytes"
    while len(kept) > 4:
        stream, expected, block = kept.pop(turn % 4)
        with torch.cuda.stream(stream):
            bad = (block != expected).sum()
        stream.synchronize()
        assert int(bad) == 0, f"turn {turn}: {int(bad)} wrong elements of PyTorch"
        del block
assert arena.stats().in_use > memory.blocks > 0
blocks = memory.blocks
del session
assert memory.blocks < blocks
memory.close()
"""


def session_over(memory, layers=LAYERS, width=WIDTH):
    providers = [("CUDAExecutionProvider", memory.provider_options)]
    session = ort.InferenceSession(chain(layers, width), providers=providers)
    assert session.get_providers()[0] == "CUDAExecutionProvider"
    return session


@pytest.fixture
def memory(arena):
    memory = integration.allocator(arena)
    yield memory
    memory.close()


def test_tensors_are_read_and_written_in_place(arena, memory):
    session = session_over(memory)
    x = gpumem.full((64, WIDTH), 1, "f4", resource=arena)
    y = gpumem.zeros((64, WIDTH), "f4", resource=arena)
    gpumem.Device("cuda:0").synchronize()
    binding = integration.bind(session, {"x0": x}, {f"x{LAYERS}": y})
    session.run_with_iobinding(binding)
    assert binding.get_outputs()[0].data_ptr() == y.ptr
    expected = session.run(None, {"x0": np.ones((64, WIDTH), "f4")})[0]
    assert np.array_equal(y.to("host").numpy(), expected)
    assert expected.any()
    del binding, session


def test_weights_and_activations_come_from_the_arena(arena, memory):
    weights = LAYERS * 4 * WIDTH**2
    session = session_over(memory)
    assert weights <= arena.stats().in_use <= weights + 2 * MIB
    session.run(None, {"x0": np.ones((8192, WIDTH), "f4")})
    assert arena.stats().max_in_use >= weights + 8192 * WIDTH * 4
    del session
    assert memory.blocks == 0


def test_run_frees_memory_that_it_no_longer_needs(arena, memory):
    session = session_over(memory, 16, 1024)
    weights = 16 * 4 * 1024**2
    session.run(None, {"x0": np.ones((8192, 1024), "f4")})
    assert arena.stats().reserved > weights + 8192 * 1024 * 4
    memory.shrink()
    assert arena.stats().reserved <= 1.02 * weights + 2 * MIB
    del session


def test_sessions_keep_within_the_arenas_limit():
    with gpumem.Arena("cuda:0", {"max_mem": 64 * MIB, "oom_wait_ms": 0}) as arena:
        memory = integration.allocator(arena)
        session = session_over(memory)
        session.run(None, {"x0": np.ones((1024, WIDTH), "f4")})
        with pytest.raises(Exception, match="Alloc"):
            session.run(None, {"x0": np.ones((64 << 10, WIDTH), "f4")})
        assert arena.stats().max_reserved <= 64 * MIB
        session.run(None, {"x0": np.ones((1024, WIDTH), "f4")})
        del session
        memory.close()


def test_pytorch_and_onnx_runtime_use_one_arena_in_turns():
    pytest.importorskip("torch", reason="PyTorch is not installed")
    # Not run_quietly: the two frameworks warn of things of their own.
    done = child.run(f"import warnings; warnings.simplefilter('ignore')\n{IN_TURNS}")
    assert done.returncode == 0, done.stderr
