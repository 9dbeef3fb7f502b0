"""Which stream a tensor over other libraries' memory belongs to."""

from __future__ import annotations

import numpy as np
import pytest
from helpers import child

import gpumem
from gpumem.interop import HostTimeline


def default_stream():
    return gpumem.Stream.from_handle("host", 1)


@pytest.mark.parametrize("read", [gpumem.asarray, gpumem.from_dlpack])
def test_import_belongs_to_the_stream_that_is_named(read):
    own = gpumem.Stream("host")
    array = np.arange(4.0)
    assert read(array, stream=own).buffer.stream == own
    assert read(array).buffer.stream == default_stream()
    assert read(array, stream=own.ptr).buffer.stream == own


def test_import_keeps_the_stream_that_it_belongs_to():
    tensor = gpumem.asarray(np.arange(4.0), stream=gpumem.Stream("host"))
    gpumem.copy(gpumem.zeros(4, "f8", memory="host"), tensor)
    assert tensor.numpy().tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize("read", [gpumem.asarray, gpumem.from_dlpack])
def test_tensor_of_gpumem_takes_no_other_stream(read):
    tensor = gpumem.zeros(4, "f8", memory="host")
    with pytest.raises(ValueError, match="belongs to a stream already"):
        read(tensor, stream=gpumem.Stream("host"))


def test_stream_of_another_device_or_type_is_refused_and_leaves_the_memory_to_its_producer():
    child.run_quietly("""
        import numpy as np, gpumem
        gpumem.device.set_host_device_count(2)
        array = np.zeros(4)
        for stream, error in ((gpumem.Stream("host:1"), ValueError), ("side", TypeError)):
            for read in (gpumem.asarray, gpumem.from_dlpack):
                try:
                    read(array, stream=stream)
                except error:
                    pass
                else:
                    raise AssertionError((read, stream))
        array[:] = 1
    """)


@pytest.mark.parametrize("own", [None, gpumem.Stream("host")])
def test_stream_that_the_memorys_owner_does_not_know_is_refused(own):
    array = np.zeros(4)
    buffer = gpumem.asarray(array, stream=own).buffer
    for use in (buffer.record_stream, buffer.close):
        with pytest.raises(ValueError, match=r"accepts no stream: expected the buffer's own"):
            use(gpumem.Stream("host"))
        with pytest.raises(TypeError, match="is not a stream"):
            use("side")
        assert not buffer.closed
    for stream in (None, buffer.stream):
        buffer.record_stream(stream)
    buffer.close(buffer.stream)
    assert buffer.closed


@pytest.mark.parametrize("memory", ["host", "host/host_accessible", "host/managed"])
@pytest.mark.parametrize("read", [gpumem.asarray, gpumem.from_dlpack, lambda array: array])
def test_copy_of_others_memory_holds_up_its_stream_alone(read, memory, stream):
    known = gpumem.full(5000, 7, "u1", memory=memory)
    target = gpumem.zeros(5000, "u1", memory="host/managed", stream=stream)
    source = read(known.numpy())
    with HostTimeline.create() as timeline:
        stream.wait(timeline.point(1))
        gpumem.copy(target, source, stream)
        unrelated = gpumem.zeros(5000, "u1", memory="host/managed")
        unrelated.numpy()  # waits for the default stream, with a value that this thread signals
        timeline.signal(1)
    assert (target.numpy() == 7).all()


@pytest.mark.parametrize("read", [gpumem.asarray, gpumem.from_dlpack])
def test_tensor_over_others_memory_waits_for_the_copy_into_it(read, host, stream):
    target = read(gpumem.zeros(5000, "u1", memory="host/managed").numpy())
    source = gpumem.full(5000, 7, "u1", memory="host/managed", stream=stream)
    host.set_lag(5_000_000)
    gpumem.copy(target, source, stream)
    assert (target.numpy() == 7).all()
