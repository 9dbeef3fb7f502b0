"""Sessions on a GPU: what is aliased, what is copied, and that the bytes arrive."""

from __future__ import annotations

import numpy as np
import pytest
from helpers.resources import Over

import gpumem

LENGTH = 1 << 16

pytestmark = pytest.mark.skipif(not gpumem.driver_status().available, reason="needs a CUDA device")


def same(ctx):
    gpumem.copy(ctx.output("y", LENGTH, "f4"), ctx.inputs["x"], ctx.stream)


@pytest.mark.parametrize("unified", [False, True])
@pytest.mark.parametrize("copies_alone", [False, True])
def test_session_inputs_and_outputs_in_every_memory(unified, copies_alone):
    if unified and copies_alone:
        pytest.skip("one stream for everything has no stream for copies")
    options = {
        "use_ep_level_unified_stream": unified,
        "do_copy_in_default_stream": not copies_alone,
    }
    values = np.arange(LENGTH, dtype="f4")
    expected = {"cuda:0": "alias", "cuda:0/host_accessible": "alias", "cuda:0/managed": "alias"}
    with gpumem.Session("cuda:0", options) as session:
        for source in (None, *expected):
            x = values if source is None else gpumem.asarray(values, memory=source)
            session.bind_input("x", x)
            for target in (None, *expected):
                array = np.zeros(LENGTH, "f4")
                session.bind_output("y", array if target is None else target)
                plan = session.copy_plan()
                assert plan["x"].action == expected.get(source, "copy")
                assert plan["y"].action == expected.get(target, "copy")
                session.run(same)
                y = session.outputs()["y"]
                if target is None:
                    assert (array == values).all()
                else:
                    assert (y.to("host").numpy() == values).all()
                    assert str(y.memory) == target


def test_pinned_outputs_need_no_copy_and_outlive_the_session():
    values = np.arange(LENGTH, dtype="f4")
    with gpumem.Session("cuda:0") as session:
        session.bind_input("x", values)
        session.bind_output("y", "cuda:0/host_accessible")
        session.run(same)
        y = session.outputs()["y"]
        view = y.numpy()
        assert view.ctypes.data == y.ptr
        assert session.device_for_outputs() == [gpumem.Device("cuda:0")]
    del y
    assert (view == values).all()


def test_session_on_a_user_stream_and_the_legacy_stream():
    stream = gpumem.Stream("cuda:0")
    for options in (
        {"user_compute_stream": stream},
        {"user_compute_stream": 0, "has_user_compute_stream": True},
    ):
        with gpumem.Session("cuda:0", options) as session:
            session.bind_input("x", np.ones(LENGTH, "f4"))
            session.bind_output("y", "cuda:0/host_accessible")
            session.run(same)
            assert (session.outputs()["y"].numpy() == 1).all()
    stream.synchronize()


def test_session_on_the_host_reads_pinned_memory_after_what_a_stream_of_the_gpu_writes(gate):
    stream, seen = gpumem.Stream("cuda:0"), []
    x = gpumem.empty(LENGTH, "u1", memory="cuda:0/host_accessible", stream=stream)
    source = gpumem.full(LENGTH, 7, "u1", memory="cuda:0", stream=stream)
    with gpumem.Session("host") as session:
        session.bind_input("x", x)
        gate.hold(stream)
        gpumem.copy(x, source, stream)
        gate.open_after(0.1)
        session.run(lambda ctx: seen.append(ctx.inputs["x"].numpy(sync=False).copy()))
    assert set(seen[0].tolist()) == {7}


def test_fallback_to_pinned_memory_is_reported():
    first = gpumem.adaptors.limit(gpumem.Arena("cuda:0"), 1000)
    both = gpumem.adaptors.fallback(first, gpumem.Arena("cuda:0/host_accessible"))
    with both.allocate(2000) as buffer:
        assert str(buffer.memory) == "cuda:0/host_accessible"
        np.frombuffer(buffer, np.uint8)[:] = 7
    with both.allocate(500) as buffer, pytest.raises(BufferError):
        memoryview(buffer)


def test_python_resource_over_a_driver_pool():
    resource = Over(gpumem.DriverPool("cuda:0"))
    tensor = gpumem.full(1000, 3, "f4", resource=resource)
    assert (tensor.to("host").numpy() == 3).all()
    del tensor
    assert not resource.blocks


def test_session_runs_are_captured_on_own_and_user_streams():
    calls = []

    def work(ctx):
        calls.append(ctx.stream.capturing)
        with ctx.allocator.allocate(4 * LENGTH, ctx.stream) as buffer:
            scratch = gpumem.from_dlpack(buffer).view("f4")
            gpumem.copy(scratch, ctx.inputs["x"], ctx.stream)
            gpumem.copy(ctx.output("y", LENGTH, "f4"), scratch, ctx.stream)

    for options in ({}, {"user_compute_stream": gpumem.Stream("cuda:0")}):
        calls.clear()
        array, x = np.zeros(LENGTH, "f4"), np.zeros(LENGTH, "f4")
        with gpumem.Session("cuda:0", {"enable_cuda_graph": True} | options) as session:
            session.bind_input("x", x)
            session.bind_output("y", array)
            for value in range(1, 20):
                x[:] = value
                session.run(work)
                assert (array == value).all(), value
                # What the graph writes to must not be handed out to others in between.
                others = [gpumem.full(LENGTH, 77, "f4", memory="cuda:0") for _ in range(4)]
                session.run(work)
                assert all((other.to("host").numpy() == 77).all() for other in others)
        assert calls == [False, True]


def test_torch_kernels_are_replayed():
    torch = pytest.importorskip("torch", reason="PyTorch is not installed")
    calls = []

    def work(ctx):
        calls.append(ctx.stream.capturing)
        with torch.cuda.stream(torch.cuda.ExternalStream(ctx.stream.ptr)):
            x = torch.from_dlpack(ctx.inputs["x"])
            torch.mul(x, 3, out=torch.from_dlpack(ctx.output("y", LENGTH, "f4")))

    x = gpumem.zeros(LENGTH, "f4", memory="cuda:0/managed")
    with gpumem.Session("cuda:0", {"enable_cuda_graph": True}) as session:
        session.bind_input("x", x.export_as("cuda"))
        session.bind_output("y", "cuda:0")
        for value in range(1, 8):
            gpumem.copy(x, np.full(LENGTH, value, "f4"))
            session.run(work)
            assert (session.outputs()["y"].to("host").numpy() == 3 * value).all()
    assert calls == [False, True]
