"""A run comes after what is queued on the memory of its inputs, wherever it was queued."""

from __future__ import annotations

import os

from helpers import child
from helpers.driver import HostDriver

import gpumem
from gpumem.interop import Importer, MemoryDescriptor, MemoryHandleType

NBYTES = 4096


def test_run_comes_after_a_copy_that_is_queued_into_imported_memory():
    descriptor = os.memfd_create("pages")
    os.truncate(descriptor, NBYTES)
    described = MemoryDescriptor(descriptor, MemoryHandleType.MEMFD, NBYTES)
    memory = Importer.for_device("host").import_memory(described, consume=True)
    x = memory.tensor((NBYTES,), "u1")
    driver, loader = HostDriver(), gpumem.Stream("host")
    source = gpumem.full((NBYTES,), 7, "u1", memory="host", stream=loader)

    def work(ctx):
        y = ctx.output("y", NBYTES, "u1")
        driver.call("cuMemcpyAsync", y.ptr, ctx.inputs["x"].ptr, NBYTES, ctx.stream.ptr)

    with gpumem.Session("host") as session:
        session.bind_input("x", x)
        session.bind_output("y")
        with driver.block(loader):
            gpumem.copy(x, source, loader)
            session.run(work, synchronize=False)
            assert_unfinished(session.compute_stream)
        session.compute_stream.synchronize()
        assert set(session.outputs()["y"].numpy().tolist()) == {7}


def assert_unfinished(stream):
    """A stream that waits for nothing has done its work before another one has done much more."""
    driver, beside = HostDriver(), gpumem.Stream("host")
    memory = gpumem.Arena("host").allocate(NBYTES, beside)
    for _ in range(100):
        driver.fill(memory, 0, beside)
        beside.synchronize()
    assert not stream.query()


TWO_DEVICES = """
import ctypes
import gpumem
from helpers.driver import HostDriver
from session.test_order import assert_unfinished
gpumem.device.set_host_device_count(2)
loader, other = gpumem.Stream("host:1"), gpumem.Arena("host:1")
first, second = HostDriver("host:0"), HostDriver("host:1")
FUNCTION = ctypes.CFUNCTYPE(None, ctypes.c_void_p)
kept = []
def launch(stream, function):
    kept.append(FUNCTION(lambda _: function()))
    first.call("cuLaunchHostFunc", stream.ptr, ctypes.cast(kept[-1], ctypes.c_void_p), None)
"""


def run_on_two_devices(script):
    child.run_quietly(TWO_DEVICES + script)


def test_run_comes_after_what_is_queued_on_an_inputs_stream_of_another_device():
    run_on_two_devices("""
x = other.allocate(4096, loader)
def work(ctx):
    y = ctx.output("y", 4096, "u1")
    places = y.ptr, ctx.inputs["x"].ptr
    launch(ctx.stream, lambda: ctypes.memmove(*places, 4096))
with gpumem.Session("host:0") as session:
    session.bind_input("x", x)
    session.bind_output("y")
    with second.block(loader):
        second.fill(x, 7, loader)
        session.run(work, synchronize=False)
        assert_unfinished(session.compute_stream)
    session.compute_stream.synchronize()
    assert set(session.outputs()["y"].numpy().tolist()) == {7}
    """)


def test_output_on_another_device_is_written_after_what_used_its_memory():
    run_on_two_devices("""
default = gpumem.Stream.from_handle("host:1", 1)
used = other.allocate(4096)
with gpumem.Session("host:0") as session:
    session.bind_output("y", other)
    with second.block(default):
        second.fill(used, 3, default)
        address = used.ptr
        used.close()
        def work(ctx):
            y = ctx.output("y", 4096, "u1")
            assert y.ptr == address
            launch(ctx.stream, lambda: ctypes.memset(address, 7, 4096))
        session.run(work, synchronize=False)
        assert_unfinished(session.compute_stream)
    session.compute_stream.synchronize()
    assert set(session.outputs()["y"].numpy().tolist()) == {7}
    """)
