"""Each fault, planted by a real write or call, is found, with the places that it belongs to."""

import ctypes
import gc

import numpy as np
import pytest
from helpers.heap import found_by, let_rest, line_of

import gpumem


@pytest.mark.parametrize("nbytes", [1, 100, 255, 256, 257, 70_000, 3 << 20])
def test_one_byte_overrun_is_found_at_the_free(debugged, write, nbytes):
    buffer = debugged.allocate(nbytes)  # overrun
    assert buffer.ptr % 256 == 0
    write(buffer.ptr + nbytes)
    buffer.close()  # freed after an overrun
    (report,) = found_by(debugged.check_heap)
    assert (report.kind, report.offset, report.wrong_bytes) == ("overrun", nbytes, 1)
    assert (report.expected, report.found[0]) == (0xFD, 7)
    assert (report.nbytes, report.number, report.arena) == (nbytes, 1, "debugged")
    assert report.allocated.where == line_of("overrun")
    assert report.freed.where == line_of("freed after an overrun")
    assert "overrun" in str(report)
    assert report.allocated.where in str(report)


@pytest.mark.parametrize("distance", [1, 200, 256])
def test_one_byte_underrun_is_found_by_check(debugged, write, distance):
    buffer = debugged.allocate(100)  # underrun
    write(buffer.ptr - distance)
    (report,) = found_by(debugged.check_heap)
    assert (report.kind, report.offset) == ("underrun", -distance)
    assert report.allocated.where == line_of("underrun")
    assert report.freed is None
    assert debugged.check_heap() == ()  # told once
    write(buffer.ptr - distance)
    assert found_by(debugged.check_heap)[0].kind == "underrun"
    buffer.close()


def test_queued_overrun_is_found_once_it_ran(debugged, write, streams, driver):
    buffer = debugged.allocate(1000, streams[0])
    with driver.block(streams[0]):
        write(buffer.ptr + 1000, stream=streams[0])
        assert debugged.check_heap(wait=False) == ()
    assert found_by(debugged.check_heap)[0].kind == "overrun"
    buffer.close()


def test_write_after_free_is_found(debugged, write):
    buffer = debugged.allocate(5000)  # used after free
    address = buffer.ptr
    buffer.close()  # freed and used
    write(address + 4321, nbytes=3)  # the very next thing that happens
    (report,) = found_by(debugged.check_heap)
    assert (report.kind, report.offset, report.wrong_bytes) == ("use_after_free", 4321, 3)
    assert report.allocated.where == line_of("used after free")
    assert report.freed.where == line_of("freed and used")


def test_late_write_of_an_unrecorded_stream_is_found(debugged, write, streams, driver):
    """The block's own stream came to the free; another one still writes."""
    own, other = streams[:2]
    buffer = debugged.allocate(5000, own)
    with driver.block(other):
        write(buffer.ptr + 17, stream=other)
        buffer.close()
        let_rest(debugged)
    (report,) = found_by(debugged.check_heap)
    assert (report.kind, report.offset) == ("use_after_free", 17)


def test_recorded_streams_may_write_until_they_reach_the_free(debugged, write, streams, driver):
    own, other = streams[:2]
    buffer = debugged.allocate(5000, own)
    buffer.record_stream(other)
    with driver.block(other):
        write(buffer.ptr, nbytes=5000, stream=other)
        buffer.close()
        assert debugged.check_heap(wait=False) == ()
    assert debugged.check_heap() == ()


def test_free_on_an_unordered_stream_is_found(debugged, write, streams, driver):
    own, other = streams[:2]
    buffer = debugged.allocate(5000, own)  # of one stream
    with driver.block(own):
        write(buffer.ptr + 40, nbytes=2, stream=own)
        buffer.close(other)  # on another
        let_rest(debugged)
    (report,) = found_by(debugged.check_heap)
    assert (report.kind, report.offset, report.wrong_bytes) == ("wrong_stream", 40, 2)
    assert (report.allocated.stream, report.freed.stream) == (own.ptr, other.ptr)
    assert report.allocated.where == line_of("of one stream")
    assert report.freed.where == line_of("on another")


def test_unordered_free_of_a_written_block_is_found_at_once(debugged, write, streams, driver):
    own, other = streams[:2]
    buffer = debugged.allocate(5000, own)
    with driver.block(own):
        write(buffer.ptr + 40, nbytes=2, stream=own)
        buffer.close(other)
    own.synchronize()
    assert found_by(debugged.check_heap)[0].kind == "wrong_stream"


def test_free_on_an_ordered_stream_is_accepted(debugged, write, streams, driver):
    own, other = streams[:2]
    buffer = debugged.allocate(5000, own)
    with driver.block(own):
        write(buffer.ptr, nbytes=5000, stream=own)
        other.wait(own.record())
        buffer.close(other)
    assert debugged.check_heap() == ()


def test_write_after_free_is_found_by_the_reusing_allocation(make_arena, memory, write, streams):
    arena = make_arena(memory=memory, debug_heap={"quarantine_bytes": 5000})  # one block
    first = arena.allocate(4000)
    address = first.ptr
    first.close()
    arena.check_heap()
    write(address + 1)
    second = arena.allocate(4000)
    second.close()
    streams[0].synchronize()
    (report,) = found_by(lambda: arena.allocate(4000))
    assert (report.kind, report.number, report.offset) == ("use_after_free", 1, 1)
    arena.allocate(4000).close()  # told once


def test_destroyed_recorded_stream_is_reported(make_arena, driver, memory):
    arena = make_arena(memory=memory, debug_heap=True)
    buffer = arena.allocate(100)
    stream = gpumem.Stream("host")
    buffer.record_stream(stream.ptr)  # a raw handle keeps nothing alive
    handle = stream.ptr
    del stream
    gc.collect()
    buffer.close()  # waits for nobody
    (report,) = found_by(arena.check_heap)
    assert (report.kind, report.address) == ("stream_gone", handle)
    assert report.freed.where == line_of("waits for nobody")
    assert arena.check_heap() == ()


def test_aligned_blocks_are_guarded_at_their_own_bytes(debugged, write):
    for nbytes in (1, 300, 5000):
        buffer = debugged.allocate(nbytes, alignment=4096)
        assert buffer.ptr % 4096 == 0
        write(buffer.ptr - 1)
        write(buffer.ptr + nbytes)
        kinds = {report.kind for report in found_by(debugged.check_heap)}
        assert kinds == {"underrun", "overrun"}
        buffer.close()


def test_persistent_blocks_have_guards(debugged, write):
    buffer = debugged.allocate_persistent(3000)
    write(buffer.ptr + 3000)
    assert found_by(debugged.check_heap)[0].kind == "overrun"
    address = buffer.ptr
    buffer.close()
    debugged.check_heap()
    write(address)
    assert found_by(debugged.check_heap)[0].kind == "use_after_free"


def test_write_through_a_view_is_a_fault_only_after_the_view_ended(make_arena, write):
    arena = make_arena(debug_heap=True)
    buffer = arena.allocate(1000)
    view = np.from_dlpack(buffer)
    buffer.close()
    view[:] = 3
    assert arena.check_heap() == ()
    address = view.ctypes.data
    del view
    gc.collect()
    arena.check_heap()
    write(address)
    assert found_by(arena.check_heap)[0].kind == "use_after_free"


def test_fresh_and_freed_memory_have_their_patterns(make_arena):
    arena = make_arena(debug_heap=True)
    buffer = arena.allocate(8000)
    values = np.from_dlpack(buffer).view(np.float32)
    assert np.isnan(values).all()
    address = buffer.ptr
    del values
    buffer.close()
    arena.check_heap()
    assert ctypes.string_at(address, 8000) == b"\xdd" * 8000


def test_patterns_are_configurable(make_arena, write):
    arena = make_arena(debug_heap={"fresh_byte": 0x11, "freed_byte": "none", "guard_byte": 0x22})
    buffer = arena.allocate(100)
    assert bytes(buffer) == b"\x11" * 100
    address = buffer.ptr
    buffer.close()
    arena.check_heap()
    write(address)
    assert arena.check_heap() == ()  # nothing to compare with
    write(address + 100)
    assert found_by(arena.check_heap)[0].expected == 0x22


def test_without_guards_the_padding_is_checked(make_arena, write):
    arena = make_arena(debug_heap={"guard_bytes": 0})
    buffer = arena.allocate(100)
    write(buffer.ptr + 255)
    assert found_by(arena.check_heap)[0].offset == 255
    buffer.close()
    assert arena.check_heap() == ()
