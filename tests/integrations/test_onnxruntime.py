"""ONNX Runtime's integration: bound tensors with the real one; a session's memory by its functions.

The CUDA provider calls the functions as these tests do; no GPU is needed.
"""

import ctypes
import gc
import sys
import types
import weakref
from functools import partial

import numpy as np
import pytest
from helpers.driver import HostDriver
from helpers.waiting import opened_soon

import gpumem
import gpumem.integrations.onnxruntime as integration
from gpumem import observe
from gpumem.errors import (
    ClosedError,
    ConfigError,
    IntegrationError,
    InUseError,
    MissingFrameworkError,
)

MIB = 1 << 20
SHAPE = (4, 3)
LEGACY = gpumem.Stream.from_handle("host", 1)  # the legacy default stream


# ---- bound tensors -------------------------------------------------------------------------------


@pytest.fixture
def session():
    """A session of ``y = x + w``; the first dimension has a name."""
    onnx = pytest.importorskip("onnx", reason="onnx is not installed")
    ort = pytest.importorskip("onnxruntime", reason="ONNX Runtime is not installed")
    helper, kind = onnx.helper, onnx.TensorProto.FLOAT
    graph = helper.make_graph(
        [helper.make_node("Add", ["x", "w"], ["y"]), helper.make_node("Neg", ["y"], ["z"])],
        "sum",
        [helper.make_tensor_value_info("x", kind, ["batch", 3])],
        [helper.make_tensor_value_info(name, kind, ["batch", 3]) for name in ("y", "z")],
        [helper.make_tensor("w", kind, [3], [1.0, 2.0, 3.0])],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9)
    return ort.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])


def made(shape=SHAPE, dtype="float32", memory="host"):
    return gpumem.zeros(shape, dtype, memory=memory)


@pytest.mark.parametrize("memory", ["host", "host/host_accessible"])
def test_run_reads_and_writes_bound_tensors_where_they_lie(session, memory):
    x, y, z = (made(memory=memory) for _ in range(3))
    binding = integration.bind(session, {"x": x}, {"y": y, "z": z})
    for value in (1.0, 5.0):  # the same binding, other bytes
        x.numpy()[:] = value
        session.run_with_iobinding(binding)
        assert np.array_equal(y.numpy(), value + np.tile([1, 2, 3], (4, 1)))
        assert np.array_equal(z.numpy(), -y.numpy())
    assert binding.get_outputs()[0].data_ptr() == y.ptr


def test_output_that_is_not_named_is_onnx_runtimes(session):
    x, y = made(), made()
    binding = integration.bind(session, {"x": x}, {"y": y})
    session.run_with_iobinding(binding)
    assert np.array_equal(binding.get_outputs()[1].numpy(), -y.numpy())


def test_binding_keeps_its_tensors_alive(session):
    arena = gpumem.Arena("host")
    x = gpumem.zeros(SHAPE, "float32", resource=arena)
    binding = integration.bind(session, {"x": x})
    del x
    assert arena.stats().in_use
    session.run_with_iobinding(binding)
    del binding
    assert not arena.stats().in_use


@pytest.mark.parametrize(
    ("inputs", "outputs", "reason"),
    [
        ({}, {}, "inputs: x of the model are missing"),
        ({"x": SHAPE, "q": SHAPE}, {}, "input 'q': the model has 'x'"),
        ({"x": SHAPE}, {"q": SHAPE}, "output 'q': the model has 'y', 'z'"),
        ({"x": (4, 2)}, {}, r"input 'x': its shape is \(4, 2\), the model's is \['batch', 3\]"),
        ({"x": (12,)}, {}, r"input 'x': its shape is \(12,\)"),
        ({"x": SHAPE}, {"y": (4, 4)}, r"output 'y': its shape is \(4, 4\)"),
    ],
)
def test_name_that_the_model_does_not_have_is_refused(session, inputs, outputs, reason):
    inputs, outputs = ({n: made(s) for n, s in each.items()} for each in (inputs, outputs))
    with pytest.raises(ConfigError, match=reason):
        integration.bind(session, inputs, outputs)


def test_tensors_that_do_not_fit_are_refused(session):
    with pytest.raises(ConfigError, match="its dtype is float64, the model's is float32"):
        integration.bind(session, {"x": made(dtype="float64")})
    with pytest.raises(ConfigError, match=r"its strides are .*; expected a contiguous one"):
        integration.bind(session, {"x": made((3, 4)).T})
    with pytest.raises(ConfigError, match="output 'y': the tensor is read-only"):
        integration.bind(session, {"x": made()}, {"y": made().as_read_only()})


def test_tensor_with_a_closed_buffer_is_not_bound(session):
    x, closed = made(), made()
    closed.buffer.close()
    for inputs, outputs in (({"x": closed}, {}), ({"x": x}, {"y": closed})):
        with pytest.raises(ClosedError):
            integration.bind(session, inputs, outputs)
    x.buffer.close()  # nothing has held it


@pytest.mark.parametrize("memory", ["host", "host/host_accessible"])
def test_binding_has_the_memory_of_closed_buffers_until_it_is_gone(session, memory):
    arena = gpumem.Arena(memory)
    x, y = (gpumem.zeros(SHAPE, "float32", resource=arena) for _ in range(2))
    binding = integration.bind(session, {"x": x.as_read_only()}, {"y": y})
    x.buffer.close()
    y.buffer.close()
    others = [gpumem.full(SHAPE, 7, "float32", resource=arena) for _ in range(2)]
    session.run_with_iobinding(binding)
    assert np.array_equal(binding.get_outputs()[0].numpy(), np.tile([1, 2, 3], (4, 1)))
    assert all((other.numpy() == 7).all() for other in others)
    del binding, others
    assert not arena.stats().in_use


def test_tensors_without_rows_are_bound(session):
    binding = integration.bind(session, {"x": made((0, 3))}, {"y": made((0, 3))})
    session.run_with_iobinding(binding)
    assert [each.shape() for each in binding.get_outputs()] == [[0, 3], [0, 3]]


def test_row_of_every_second_one_is_contiguous(session):
    x, y = made((4, 3))[::2][:1], made((1, 3))
    assert x.strides == (24, 4)
    x.fill(2)
    session.run_with_iobinding(integration.bind(session, {"x": x}, {"y": y}))
    assert y.tolist() == [[3, 4, 5]]


def test_array_that_is_not_gpumems_is_a_type_error(session):
    for given in (np.zeros(SHAPE, "float32"), None):
        said = f"'[xy]': expected a gpumem.Tensor, not a {type(given).__name__}"
        for inputs, outputs in (({"x": given}, {}), ({"x": made()}, {"y": given})):
            with pytest.raises(TypeError, match=said):
                integration.bind(session, inputs, outputs)


# ---- a session's memory --------------------------------------------------------------------------


@pytest.fixture
def ort(monkeypatch):
    """As much of ONNX Runtime as a session's memory needs."""
    module = types.ModuleType("onnxruntime")
    module.__version__ = "1.32.0"
    monkeypatch.setitem(sys.modules, "onnxruntime", module)
    monkeypatch.setattr(integration, "_device_type", "host")
    return module


@pytest.fixture
def arena():
    with gpumem.Arena("host", oom_wait_ms=0) as arena:
        yield arena


@pytest.fixture
def memory(ort, arena):
    try:
        memory = integration.allocator(arena)
    except IntegrationError as error:
        pytest.skip(str(error))
    yield memory
    memory.close()


class Provider:
    """The CUDA provider: it has addresses in its options, and nothing else."""

    def __init__(self, options):
        address = {name: int(options[f"gpu_external_{name}"]) for name in ("alloc", "free")}
        self.alloc = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_size_t)(address["alloc"])
        self.free = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(address["free"])
        self.empty_cache = ctypes.CFUNCTYPE(None)(int(options["gpu_external_empty_cache"]))


def test_blocks_are_the_arenas_for_the_legacy_default_stream(memory, arena):
    provider = Provider(memory.provider_options)
    assert memory.provider_options["device_id"] == "0"
    assert memory.provider_options["do_copy_in_default_stream"] == "1"
    block = provider.alloc(3 * MIB)
    ctypes.memset(block, 7, 3 * MIB)
    assert (arena.stats().requested_in_use, memory.blocks) == (3 * MIB, 1)
    provider.free(block)
    assert (arena.stats().in_use, memory.blocks) == (0, 0)
    with arena.allocate(3 * MIB, LEGACY) as others:
        assert others.ptr == block


def test_freed_block_goes_to_another_stream_behind_the_legacy_streams_work(memory, arena):
    provider, side = Provider(memory.provider_options), gpumem.Stream("host")
    block = provider.alloc(3 * MIB)
    with HostDriver().block(LEGACY):
        provider.free(block)
        assert provider.alloc(3 * MIB) == block
        provider.free(block)
        with arena.allocate(3 * MIB, side) as others:
            assert others.ptr != block


def test_onnx_runtime_and_others_in_turns_never_see_each_others_bytes(memory, rng):
    """Each block is filled and then copied out, by queued work alone, and freed at once."""
    driver, provider = HostDriver(), Provider(memory.provider_options)
    sides = [gpumem.Stream("host") for _ in range(2)]
    nbytes, count = 64 << 10, 300
    seen = gpumem.zeros((count, nbytes), "uint8", memory="host/host_accessible")
    LEGACY.synchronize()  # the zeros are queued work too
    gates, values = [], []
    for number in range(count):
        value, out = rng.randrange(256), seen.ptr + number * nbytes
        if rng.random() < 0.1:  # queued work piles up behind it
            gates.append(driver.block(rng.choice([LEGACY, *sides])))
        if rng.random() < 0.5:
            block = provider.alloc(nbytes)
            stream, free = LEGACY, partial(provider.free, block)
        else:
            stream = rng.choice([LEGACY, *sides])
            buffer = memory.resource.allocate(nbytes, stream)
            block, free = buffer.ptr, buffer.close
        driver.call("cuMemsetD8Async", block, value, nbytes, stream.ptr)
        driver.call("cuMemcpyAsync", out, block, nbytes, stream.ptr)
        values.append(value)
        free()
        if gates and rng.random() < 0.1:
            gates.pop(0).open()
    for gate in gates:
        gate.open()
    for stream in (LEGACY, *sides):
        stream.synchronize()
    assert np.array_equal(seen.numpy(), np.repeat(np.uint8(values)[:, None], nbytes, axis=1))


def test_shrink_waits_for_the_legacy_stream_and_releases_all_but_weights(memory, arena):
    provider = Provider(memory.provider_options)
    weights = provider.alloc(4 * MIB)
    gate = HostDriver().block(LEGACY)
    for _ in range(2):  # of runs
        provider.free(provider.alloc(24 * MIB))
    with opened_soon(gate):
        assert memory.shrink().released_bytes
    assert arena.stats().reserved <= 1.02 * 4 * MIB
    provider.free(weights)


def test_empty_cache_gives_memory_back_as_shrink_does(memory, arena):
    provider = Provider(memory.provider_options)
    provider.free(provider.alloc(3 * MIB))
    assert arena.stats().reserved
    LEGACY.synchronize()
    provider.empty_cache()
    assert arena.stats().reserved == 0


def test_empty_cache_after_each_weight_shrinks_only_where_more_than_a_64th_is_idle(memory, arena):
    provider = Provider(memory.provider_options)
    others = provider.alloc(8 * MIB)
    weights = [provider.alloc(MIB) for _ in range(300)]
    shrinks = 0
    for weight in weights:
        provider.free(weight)
        LEGACY.synchronize()
        before = arena.stats()
        with observe.record(arena) as recording:
            provider.empty_cache()
        found = [each.action for each in recording.events()].count("shrink")
        assert found == (before.reserved > before.in_use + before.in_use // 64)
        shrinks += found
    assert 0 < shrinks < len(weights)
    assert arena.stats().reserved == 8 * MIB
    provider.free(others)


def test_sessions_and_others_have_one_limit(memory, arena):
    provider = Provider(memory.provider_options)
    arena.set_limit(16 * MIB)
    with arena.allocate(8 * MIB, LEGACY):
        assert provider.alloc(12 * MIB) is None
    block = provider.alloc(12 * MIB)
    assert block
    provider.free(block)


def test_close_refuses_while_a_session_has_blocks_and_then_refuses_sessions(memory, arena):
    other = integration.allocator(arena)
    provider, alive = Provider(other.provider_options), weakref.ref(other)
    block = provider.alloc(MIB)
    with pytest.raises(InUseError, match=r"1 blocks of .* delete the sessions first"):
        other.close()
    provider.free(block)
    other.close()
    other.close()
    del other
    gc.collect()
    assert alive() is None
    assert provider.alloc(MIB) is None
    provider.free(None)
    provider.empty_cache()


def test_status_names_the_arenas_of_open_sessions(memory, arena):
    assert integration.status().resources == {0: arena}
    memory.close()
    assert integration.status() == gpumem.integrations.Status(False, {})


def test_object_that_cannot_be_a_sessions_memory_is_refused(ort, monkeypatch):
    with pytest.raises(TypeError, match=r"expected a gpumem\.Arena"):
        integration.allocator(None)
    monkeypatch.setattr(integration, "_device_type", "cuda")
    with pytest.raises(ConfigError, match=r"ONNX Runtime needs .* memory of a cuda device"):
        integration.allocator(gpumem.Arena("host"))
    monkeypatch.setattr(integration, "_device_type", "host")
    ort.get_build_info = lambda: "ORT Build Info: cuda-plugin-ep=1, cmake"
    with pytest.raises(IntegrationError, match="is a plugin, which computes on a stream"):
        integration.allocator(gpumem.Arena("host"))
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    with pytest.raises(MissingFrameworkError, match="pip install onnxruntime-gpu"):
        integration.allocator(gpumem.Arena("host"))
