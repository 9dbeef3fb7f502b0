"""Views outlive what they came from, ends never block, a fork's child lives by the rules."""

from __future__ import annotations

import gc
import os
import threading

import numpy as np
import pytest
from helpers.child import run, run_quietly
from helpers.dlpack import consume
from helpers.driver import HostDriver
from helpers.interrupting import interrupted, more_calls
from helpers.threads import in_a_thread, running
from helpers.waiting import opened_soon, without_waiting

import gpumem
from gpumem import interop
from gpumem.errors import ClosedError, InUseError
from gpumem.interop import MemoryDescriptor, MemoryHandleType

pytestmark = pytest.mark.usefixtures("nothing_left")

KINDS = ["MEMFD", "OPAQUE_FD"]


@pytest.mark.parametrize("kind", KINDS)
def test_view_keeps_the_mapping_alive(importer, describe, fd, kind):
    memory = importer.import_memory(describe(handle_type=MemoryHandleType[kind]))
    view = memory.tensor(100, "u1").numpy()
    importer.close()
    del memory
    gc.collect()
    gpumem.Device("host").free_bytes  # noqa: B018  # ends what nobody refers to
    view[:] = 9
    assert os.pread(fd, 100, 0) == bytes([9] * 100)


def test_close_with_exports_is_refused_without_a_change(memory):
    tensor = memory.tensor(4, "u1")
    view = memoryview(tensor)
    del tensor
    with pytest.raises(InUseError, match="1 tensors"):
        memory.close()
    assert not memory.closed
    assert memory.tensor(4, "u1").nbytes == 4
    view.release()
    memory.close()
    assert memory.closed
    memory.close()


def test_close_waits_for_the_last_export_up_to_its_timeout(memory):
    kept = [memory.tensor(4, "u1").numpy()]
    with pytest.raises(InUseError):
        memory.close(timeout=0.01)
    threading.Timer(0.05, kept.clear).start()
    memory.close(timeout=60)
    assert memory.closed


@pytest.mark.parametrize("thread", ["main", "other"])
@pytest.mark.parametrize("timeout", [0, 0.01])
@pytest.mark.parametrize("kind", KINDS)
def test_close_does_not_wait_for_the_device_beyond_its_timeout(
    importer, describe, kind, timeout, thread, stream
):
    memory = importer.import_memory(describe(handle_type=MemoryHandleType[kind]))
    refused = []

    def close():
        try:
            memory.close(timeout=timeout)
        except InUseError as error:
            refused.append(str(error))

    with HostDriver().block(stream) as gate:
        with without_waiting(gate):
            if thread == "main":
                close()
            else:
                in_a_thread(close)
        assert not stream.query()
        assert [f"not done within {timeout} s" in text for text in refused] == [True]
        assert not memory.closed
        assert (memory.tensor(4, "u1").nbytes, memory.exports) == (4, 0)
        gate.open()
        memory.close(timeout=60)
    assert memory.closed


def test_interrupt_ends_a_close_with_a_timeout(importer, describe, host):
    memory, stream = importer.import_memory(describe()), gpumem.Stream("host")
    with HostDriver().block(stream) as gate:
        with interrupted(more_calls(host, "cuEventQuery", 20), gate):
            memory.close(timeout=3600)
        assert not memory.closed
        assert memory.exports == 0
        gate.open()
    memory.close(timeout=60)


def test_closed_memory_refuses_every_call(memory):
    memory.close()
    for use in (
        lambda: memory.tensor(1, "u1"),
        lambda: memory.resource(),
        lambda: memory.set_ready(None),
        lambda: memory.ptr,
    ):
        with pytest.raises(ClosedError):
            use()
    assert memory.exports == 0
    assert "closed" in repr(memory)


def test_external_memory_cannot_be_constructed_directly():
    from gpumem.interop import ExternalMemory

    with pytest.raises(TypeError, match="import_memory"):
        ExternalMemory()


def test_deleter_without_the_gil_ends_the_export(memory):
    consumed = consume(memory.tensor(4, "u1").__dlpack__(max_version=(1, 0)))
    assert memory.exports == 1
    consumed.delete()
    assert memory.exports == 0


def test_unused_and_refused_capsules_end_the_export(memory):
    capsule = memory.tensor(4, "u1").__dlpack__(max_version=(1, 0))
    del capsule
    with pytest.raises(BufferError):
        memory.tensor(4, "u1").__dlpack__(dl_device=(2, 0))
    assert memory.exports == 0


def test_dropped_memory_is_released_at_the_next_call_that_may_wait(importer, describe, host):
    memory = importer.import_memory(describe(handle_type=MemoryHandleType.OPAQUE_FD))
    tensor = memory.tensor(4, "u1")
    ended = host.call_count("cuDestroyExternalMemory")
    del memory, tensor
    gc.collect()  # what earlier tests left may end here, too, with calls of its own
    assert host.call_count("cuDestroyExternalMemory") == ended
    assert host.live()["imports"] == 1
    importer.import_memory(describe()).close()
    assert host.live()["imports"] == 0


def test_memory_stays_mapped_while_a_stream_uses_it(importer, describe, host, fd):
    host.set_lag(20_000_000)
    stream = gpumem.Stream("host")
    memory = importer.import_memory(describe(handle_type=MemoryHandleType.OPAQUE_FD))
    source = gpumem.full(1 << 16, 7, "u1", memory="host", stream=stream)
    gpumem.copy(memory.tensor(1 << 16, "u1"), source, stream)
    memory.close()  # waits for the copy
    assert os.pread(fd, 1 << 16, 0) == bytes([7]) * (1 << 16)


@pytest.mark.parametrize("end", ["close", "drop"])
def test_block_of_another_pool_is_freed_after_every_streams_work(importer, end):
    driver, side = HostDriver(), gpumem.Stream("host")
    pool = gpumem.DriverPool("host", {"shareable": True})
    buffer = pool.allocate(1 << 16)
    with pool.export_handle() as handle:
        memory = importer.import_memory(
            MemoryDescriptor(
                handle,
                MemoryHandleType.CUDA_POOL_FD,
                1 << 16,
                pool_pointer=pool.export_buffer(buffer),
            )
        )
    tensor = memory.tensor(1 << 16, "u1")
    tensor.buffer.record_stream(side)
    gate = driver.block(side)
    driver.fill(tensor.buffer, 7, side)
    with opened_soon(gate):
        del tensor
        if end == "close":
            memory.close()
        else:
            del memory
            gpumem.Device("host").free_bytes  # noqa: B018  # ends what nobody refers to
        assert side.query(), "given back while a stream used it"
    buffer.close()
    pool.close()


def test_memory_tensors_are_shared_through_dlpack(memory):
    array = np.from_dlpack(memory.tensor((2, 3), "i4"))
    array[...] = 4
    assert gpumem.from_dlpack(memory.tensor((2, 3), "i4")).numpy().sum() == 24


def test_import_does_not_wait_for_unsignalled_values(importer, describe, host):
    stream = gpumem.Stream("host")
    with interop.HostTimeline.create() as timeline:
        timeline.enqueue_wait(stream, 1)
        before = host.live()["imports"]  # the timeline's own
        for kind in KINDS:  # each is dropped at once, and given back when that waits for nobody
            importer.import_memory(describe(handle_type=MemoryHandleType[kind]))
        held = host.live()["imports"]
        timeline.signal(1)
        stream.synchronize()
        gpumem.Device("host").free_bytes  # noqa: B018
        assert (held, host.live()["imports"]) == (before + 1, before)


AWAITED = """
import mmap, os
import gpumem
from gpumem._testing import host_device
from gpumem.errors import AlignmentError, DriverError, InUseError
from gpumem.interop import HostTimeline, Importer, MemoryDescriptor, MemoryHandleType as Kind

fd = os.memfd_create("test")
os.truncate(fd, 4096)
pages = mmap.mmap(-1, 4096)
importer, stream = Importer.for_device("host"), gpumem.Stream("host")

def make(handle, kind, **more):
    return importer.import_memory(MemoryDescriptor(handle, kind, 4096, **more))

def alive():
    gpumem.Device("host").free_bytes
    live = host_device.live()
    return live["allocations"], live["imports"]

timeline = HostTimeline.create()
timeline.enqueue_wait(stream, 1)            # signalled by this thread, and only at the end
before = alive()
"""
GONE = """
timeline.signal(1)
stream.synchronize()
assert alive() == before, (alive(), before)
"""


@pytest.mark.parametrize(
    "end", ["memory.close()", "memory.close(timeout=60)", "with memory: pass", "del memory"]
)
@pytest.mark.parametrize(
    "handle", ["fd, Kind.MEMFD", "fd, Kind.OPAQUE_FD", "pages, Kind.HOST_ALLOCATION"]
)
def test_close_does_not_wait_for_a_value_that_its_thread_has_yet_to_signal(handle, end):
    run_quietly(
        AWAITED
        + f"""
memory = make({handle})
{end}
assert alive() != before
"""
        + GONE
    )


def test_failed_import_does_not_wait_for_a_value_that_its_thread_has_yet_to_signal():
    run_quietly(
        AWAITED
        + """
for kind, call in ((Kind.MEMFD, "cuMemHostGetDevicePointer"),
                   (Kind.OPAQUE_FD, "cuExternalMemoryGetMappedBuffer")):
    host_device.fail(call, 1, 1)
    try:
        make(fd, kind)
    except DriverError as error:
        assert error.call == call
    else:
        raise SystemExit(f"{call} did not fail")
"""
        + GONE
    )


def test_close_of_pages_without_an_owner_is_refused_while_a_stream_may_use_them():
    run_quietly(
        AWAITED
        + """
import ctypes, threading
address = ctypes.addressof(ctypes.c_char.from_buffer(pages))
memory = make(address, Kind.HOST_ALLOCATION)
for timeout in (None, 0, 0.01):
    try:
        memory.close(timeout=timeout)
    except InUseError as error:
        assert "timeline" in str(error) and not memory.closed
    else:
        raise SystemExit("its user may free the pages now")
thread = threading.Thread(target=memory.close, kwargs={"timeout": 60})
thread.start()
timeline.signal(1)
thread.join()
assert memory.closed and alive() == before
"""
    )


def test_memory_closed_while_arguments_are_read_raises(memory):
    class Shape:
        def __index__(self):
            memory.close()
            return 4

    with pytest.raises(ClosedError):
        memory.tensor(Shape(), "u1")


def test_error_in_a_with_block_is_not_hidden_by_live_views(importer, describe):
    kept = []

    def fail():
        with importer.import_memory(describe()) as memory:
            kept.append(memory.tensor(4, "u1").numpy())
            raise KeyError("the user's")

    with pytest.raises(KeyError, match="the user's"):
        fail()
    kept[0][:] = 1  # the view keeps the mapping
    kept.clear()


def test_shared_block_stays_while_exported(arena):
    failures = []
    for _ in range(100):
        buffer = arena.allocate(4096, shareable=True)

        def export(buffer=buffer):
            try:
                interop.export(buffer).close()
            except ClosedError:
                pass
            except BaseException as error:
                failures.append(error)

        with running(export):
            buffer.close()
            arena.shrink()
    assert failures == []


IN_A_FORKS_CHILD = """
import os
import gpumem
from gpumem.errors import ClosedError
from gpumem.interop import Importer, MemoryDescriptor, MemoryHandleType

fd = os.memfd_create("test")
os.truncate(fd, 4096)
importer = Importer.for_device("host")
pages = importer.import_memory(MemoryDescriptor(fd, MemoryHandleType.MEMFD, 4096))
drivers = importer.import_memory(MemoryDescriptor(fd, MemoryHandleType.OPAQUE_FD, 4096))
tensor = pages.tensor(4, "u1")
child = os.fork()
if child == 0:
    code = 1
    try:
        tensor.numpy()[:] = 5           # pages are shared with the parent
        pages.tensor(4, "u1", offset=8).numpy()[:] = 6
        try:
            drivers.tensor(4, "u1")
        except ClosedError:
            code = 0
        drivers.close()                 # leaves the parent's alone
        del tensor
        pages.close()
    finally:
        os._exit(code)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
assert tensor.numpy().tolist() == [5] * 4
assert pages.tensor(4, "u1", offset=8).numpy().tolist() == [6] * 4
drivers.tensor(4, "u1").numpy()[:] = 1  # the parent's is alive
"""


def test_forked_child_keeps_host_pages_and_loses_driver_objects():
    run_quietly(IN_A_FORKS_CHILD)


AT_THE_END = """
import os, sys
import gpumem
from gpumem.interop import Importer, MemoryDescriptor, MemoryHandleType

fd = os.memfd_create("test")
os.truncate(fd, 4096)
kept = []
for kind in (MemoryHandleType.MEMFD, MemoryHandleType.OPAQUE_FD):
    memory = Importer.for_device("host").import_memory(MemoryDescriptor(fd, kind, 4096))
    kept.append((memory, memory.tensor(4, "f4").numpy(), memory.resource()))
sys.kept = kept                         # outlives the modules
cycle = []
cycle.append((cycle, Importer.for_device("host").import_memory(
    MemoryDescriptor(fd, MemoryHandleType.MEMFD, 4096)).tensor(4, "f4")))
"""


def test_exit_with_live_imports_is_quiet():
    run_quietly(AT_THE_END)


def test_importing_interop_needs_no_framework():
    done = run("""
        import sys
        import gpumem.interop
        print(sorted({"vulkan", "numpy", "torch", "cuda.bindings.driver"} & set(sys.modules)))
    """)
    assert (done.stdout, done.stderr) == ("[]\n", "")
