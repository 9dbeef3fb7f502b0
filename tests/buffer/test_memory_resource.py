"""MemoryResource: what a class written in Python gets from its base."""

from __future__ import annotations

import gc
import sys
import threading
import weakref

import numpy as np
import pytest
from helpers import child
from helpers.dlpack import consume
from helpers.driver import HostDriver
from helpers.resources import Answers, Plain
from helpers.threads import in_a_thread, in_threads
from helpers.waiting import wait_until

import gpumem

UNKNOWN = 999  # CUDA_ERROR_UNKNOWN


def test_allocate_and_free_call_the_two_methods():
    resource = Plain()
    with resource.allocate(1000) as buffer:
        assert buffer.resource is resource
        assert (buffer.nbytes, buffer.allocated_nbytes) == (1000, 1000)
        assert buffer.ptr == resource.taken[0][0]
        assert list(resource.blocks) == [buffer.ptr]
    assert not resource.blocks
    assert resource.returned == resource.taken


def test_dropping_the_last_reference_calls_deallocate_raw():
    resource = Plain()
    buffer = resource.allocate(8)
    alias = buffer
    del buffer
    assert resource.blocks
    del alias
    assert not resource.blocks


def test_empty_buffer_calls_no_method():
    resource = Plain()
    buffer = resource.allocate(0)
    assert (buffer.ptr, buffer.nbytes) == (0, 0)
    buffer.close()
    assert resource.taken == resource.returned == []


def test_methods_receive_stream_objects(host):
    resource = Plain()
    mine, other = gpumem.Stream("host"), gpumem.Stream("host")
    resource.allocate(8).close()
    resource.allocate(8, mine).close(other)
    resource.allocate(8, other.ptr).close()
    assert [stream.ptr for *_, stream in resource.taken] == [0, mine.ptr, other.ptr]
    assert [stream.ptr for *_, stream in resource.returned] == [0, other.ptr, other.ptr]
    assert all(isinstance(stream, gpumem.Stream) for *_, stream in resource.taken)
    assert resource.taken[1][2] is mine


def test_stream_object_lives_as_long_as_its_blocks():
    resource = Plain()
    stream = gpumem.Stream("host")
    buffer = resource.allocate(8, stream)
    seen = weakref.ref(stream)
    del stream
    resource.taken.clear()
    gc.collect()
    assert seen() is not None
    buffer.close()
    resource.reset_stream(seen())
    resource.returned.clear()
    gc.collect()
    assert seen() is None


def test_after_reset_stream_blocks_go_back_on_the_default_stream(stream):
    resource = Plain()
    buffer = resource.allocate(8, stream)
    resource.reset_stream(stream)
    buffer.close()
    assert resource.returned[0][2].ptr == 0


def test_another_threads_default_stream_is_replaced_by_the_legacy_one():
    resource = Plain()
    kept = []
    in_a_thread(lambda: kept.append(resource.allocate(8, 2)))
    kept.append(resource.allocate(8, 2))
    for buffer in kept:
        buffer.close()
    assert [stream.ptr for *_, stream in resource.taken] == [2, 2]
    assert [stream.ptr for *_, stream in resource.returned] == [0, 2]


def test_larger_alignment_requests_more_bytes():
    resource = Plain(alignment=16)
    buffer = resource.allocate(100, alignment=4096)
    assert buffer.ptr % 4096 == 0
    assert (buffer.nbytes, buffer.allocated_nbytes) == (100, 100 + 4096 - 16)
    buffer.close()
    assert resource.returned[0][:2] == resource.taken[0][:2]


@pytest.mark.parametrize(
    ("error", "told", "nbytes", "alignment"),
    [
        *((ValueError, "alignment", 8, bad) for bad in (0, -1, 3, 1 << 22, 1.0, True, "8")),
        *((TypeError, "nbytes", bad, None) for bad in (1.5, "8", True, None)),
        (ValueError, "nbytes", -1, None),
        (gpumem.OutOfMemoryError, "exceeds the address space", 1 << 60, None),
    ],
)
def test_invalid_size_or_alignment_is_refused_without_a_call(error, told, nbytes, alignment):
    resource = Plain()
    with pytest.raises(error, match=told):
        resource.allocate(nbytes, **({} if alignment is None else {"alignment": alignment}))
    assert resource.taken == []


@pytest.mark.parametrize(
    ("answer", "error", "told"),
    [
        (None, TypeError, "returned None"),
        ("0x1000", TypeError, "'0x1000'"),
        (4096.0, TypeError, "4096.0"),
        (True, TypeError, "True"),
        (0, ValueError, "returned 0"),
        (-4096, ValueError, "-4096"),
        (1 << 64, ValueError, "2\\*\\*64"),
        (4097, ValueError, "not a multiple of 256"),
    ],
)
def test_invalid_address_from_allocate_raw_is_refused_without_a_change(answer, error, told):
    resource = Answers(answer)
    before = resource.stats()
    with pytest.raises(error, match=told):
        resource.allocate(100)
    assert resource.stats() == before
    resource.close()


def test_unaligned_block_is_freed_and_refused():
    resource = Answers(4097)
    with pytest.raises(ValueError, match="multiple"):
        resource.allocate(100)
    assert [(ptr, nbytes) for ptr, nbytes, _ in resource.returned] == [(4097, 100)]


@pytest.mark.parametrize("error", [MemoryError("full"), KeyError("mine"), KeyboardInterrupt()])
def test_exception_of_allocate_raw_reaches_the_caller(error):
    resource = Answers(error)
    before = resource.stats()
    with pytest.raises(type(error)) as raised:
        resource.allocate(100)
    assert raised.value is error
    assert resource.stats() == before
    resource.close()


def test_exception_of_deallocate_raw_is_reported_and_the_block_counts_as_freed(monkeypatch):
    reported = []
    monkeypatch.setattr(sys, "unraisablehook", lambda told: reported.append(told.exc_value))
    resource = Answers(Plain, refusal=KeyError("mine"))
    resource.allocate(100).close()
    assert [type(error) for error in reported] == [KeyError]
    assert resource.stats().in_use == 0
    resource.close()


def test_stats_count_allocations_and_frees():
    resource = Plain(alignment=16)
    one, two = resource.allocate(100), resource.allocate(50, alignment=64)
    weights = resource.allocate_persistent(1000)
    one.close()
    stats = resource.stats()
    assert (stats.in_use, stats.requested_in_use) == (50 + 48 + 1000, 1050)
    assert (stats.max_in_use, stats.max_alloc_size) == (100 + 98 + 1000, 1000)
    assert (stats.num_allocs, stats.num_frees, stats.num_reserves) == (3, 1, 1)
    assert resource.shrink().released_bytes == 0
    two.close()
    weights.close()


def test_close_with_live_buffers_is_refused_without_a_change():
    resource = Plain()
    buffer = resource.allocate(8)
    with pytest.raises(gpumem.errors.InUseError, match="in use: 8 B in 1 block; close"):
        resource.close()
    assert not resource.closed
    view = memoryview(buffer)
    buffer.close()
    with pytest.raises(gpumem.errors.InUseError):
        resource.close()
    view.release()
    resource.close()
    resource.close()
    assert resource.closed
    assert "closed" in repr(resource)
    for use in (lambda: resource.allocate(8), resource.shrink, lambda: resource.reset_stream(0)):
        with pytest.raises(gpumem.errors.ClosedError):
            use()


def test_views_keep_block_and_resource_alive():
    resource = Plain()
    blocks, seen = resource.blocks, weakref.ref(resource)
    view = np.from_dlpack(resource.allocate(64))
    view[:] = 7
    del resource
    gc.collect()
    assert seen() is not None
    assert len(blocks) == 1
    assert (view == 7).all()
    del view
    assert not blocks
    assert seen() is None


def test_view_dropped_without_the_gil_frees_the_block_later(stream):
    resource = Plain()
    blocks = resource.blocks
    taken = consume(resource.allocate(64).__dlpack__(max_version=(1, 0)))
    taken.delete_on(HostDriver(), stream)
    stream.synchronize()
    assert resource.stats().in_use == 0
    assert not blocks


@pytest.mark.parametrize("share", [False, True])
def test_stream_that_takes_a_block_back_waits_for_recorded_ones(host, share):
    resource = Plain()
    own, side, unused = (gpumem.Stream("host") for _ in range(3))
    buffer = resource.allocate(64, own)
    for stream in (side, unused, own):
        buffer.record_stream(stream)
    resource.reset_stream(unused)
    taken = consume(buffer.__dlpack__(max_version=(1, 0))) if share else None
    with HostDriver().block(side):
        buffer.close()
        if share:
            taken.delete_on(HostDriver(), gpumem.Stream("host"))
            wait_until(lambda: resource.stats().in_use == 0)
        assert resource.returned[0][2] is own
        assert not own.query()
    own.synchronize()
    assert side.query()


def test_block_is_released_after_a_wait_if_its_streams_cannot_be_ordered(host):
    resource, driver, side = Plain(), HostDriver(), gpumem.Stream("host")
    for function in ("cuEventCreate", "cuEventRecord", "cuStreamWaitEvent"):
        buffer = resource.allocate(64)
        buffer.record_stream(side)
        gate = driver.block(side)
        opener = threading.Timer(0.01, gate.open)
        host.fail(function, 1, UNKNOWN)  # the gate of before has ended
        opener.start()
        buffer.close()
        assert side.query(), function
        opener.join()
    assert not resource.blocks


def test_view_dropped_on_a_foreign_thread_after_the_resource_is_gone():
    resource = Plain()
    blocks, seen = resource.blocks, weakref.ref(resource)
    taken = consume(resource.allocate(64).__dlpack__())
    del resource
    stream = gpumem.Stream("host")
    taken.delete_on(HostDriver(), stream)
    stream.synchronize()
    assert gpumem.Device("host").free_bytes
    assert not blocks
    assert seen() is None


def test_view_dropped_during_an_exception_keeps_the_exception():
    resource = Plain()

    def fail():
        view = np.from_dlpack(resource.allocate(8))
        raise KeyError(view.size)

    with pytest.raises(KeyError):
        fail()
    gc.collect()
    assert not resource.blocks


def test_stats_are_exact_under_threads():
    resource = Plain()

    def work():
        for i in range(300):
            with resource.allocate(1 + i):
                pass

    in_threads(work, 4)
    stats = resource.stats()
    assert (stats.num_allocs, stats.num_frees, stats.in_use) == (1200, 1200, 0)
    resource.close()


@pytest.mark.parametrize("memory", ["host", "host/host_accessible", "host/managed"])
def test_host_accessible_memory_gives_numpy_dlpack_and_memoryviews(memory):
    resource = Plain(memory)
    buffer = resource.allocate(16)
    memoryview(buffer)[:] = bytes(range(16))
    assert buffer.memory.kind.value == (memory.partition("/")[2] or "host")
    assert bytes(memoryview(buffer)) == bytes(range(16))


def test_incomplete_resource_class_cannot_be_constructed():
    class Half(gpumem.MemoryResource):
        def allocate_raw(self, nbytes, stream):
            return 4096

    with pytest.raises(TypeError, match="Half has no deallocate_raw"):
        Half("host")
    with pytest.raises(TypeError, match="has no allocate_raw"):
        gpumem.MemoryResource("host")
    with pytest.raises(ValueError, match="unknown device"):
        Plain("mars")
    resource = Plain()
    with pytest.raises(TypeError, match="__init__ called twice"):
        gpumem.MemoryResource.__init__(resource, "host")


def test_class_without_super_init_raises_by_name():
    class Forgets(Plain):
        def __init__(self):
            pass

    resource = Forgets()
    for use in (lambda: resource.allocate(8), resource.stats, resource.close, resource.shrink):
        with pytest.raises(TypeError, match="super"):
            use()


def test_subclass_may_return_another_resources_buffers():
    class Doubles(gpumem.MemoryResource):
        def __init__(self, upstream):
            super().__init__(upstream.memory)
            self.upstream = upstream

        def allocate(self, nbytes, stream=None, *, alignment=None):
            return self.upstream.allocate(2 * nbytes, stream, alignment=alignment)

    upstream = Plain()
    with Doubles(upstream).allocate(8) as buffer:
        assert (buffer.nbytes, buffer.resource) == (16, upstream)


def test_forked_child_leaves_the_parents_blocks_alone():
    child.run_quietly("""
        import os, gpumem
        from helpers.resources import Plain
        resource = Plain()
        buffer, view = resource.allocate(8), memoryview(resource.allocate(8))
        if os.fork() == 0:
            buffer.close()
            view.release()
            assert len(resource.blocks) == 2, resource.blocks
            for use in (lambda: resource.allocate(8), resource.stats):
                try:
                    use()
                except gpumem.errors.ClosedError:
                    pass
                else:
                    raise AssertionError
            with Plain().allocate(8):
                pass
            os._exit(0)
        assert os.waitstatus_to_exitcode(os.wait()[1]) == 0
        buffer.close()
        view.release()
        assert not resource.blocks
    """)


def test_interpreter_exit_calls_no_method():
    child.run_quietly("""
        import gpumem
        from helpers.resources import Plain

        class Tells(Plain):
            def deallocate_raw(self, ptr, nbytes, stream):
                print("called")

        resource = Tells()
        kept = resource.allocate(8), memoryview(resource.allocate(8))
    """)


def test_resource_closes_right_after_the_runs_that_used_it():
    """A worker thread ends what a run kept, at some moment after the device is done."""
    for _ in range(60):
        resource = Plain()
        with gpumem.Session("host") as session:
            session.bind_output("y", resource)
            session.run(lambda ctx: ctx.output("y", 1000, "int8"), synchronize=False)
        gpumem.Device("host").synchronize()
        resource.close()
        assert resource.closed
