"""Places of calls: whose stack is kept, of which thread, and how many reports wait to be told."""

import threading
import warnings

import pytest
from helpers.heap import found_by, line_of
from helpers.threads import in_a_thread

import gpumem


def test_equal_code_of_two_files_has_distinct_sites(make_arena):
    arena, held = make_arena(debug_heap=True), []
    source = "def take(arena):\n    return arena.allocate(1)"
    for path in ("one.py", "two.py"):
        names: dict = {}
        exec(compile(source, path, "exec"), names)
        held.append(names["take"](arena))
    places = [block.allocated.where for block in arena.outstanding()]
    assert places == ["one.py:2", "two.py:2"]
    held.clear()


def test_repeated_call_is_stored_as_one_stack(make_arena):
    arena = make_arena(debug_heap=True)
    held = [arena.allocate(1) for _ in range(100)]
    stacks = {str(block.allocated.stack) for block in arena.outstanding()}
    assert len(stacks) == 1
    held.clear()


def test_stack_depth_and_count_are_configurable(make_arena):
    def inner(arena):
        return arena.allocate(1)

    none = make_arena(debug_heap={"stack_depth": 0})
    short = make_arena(debug_heap={"stack_depth": 1})
    few = make_arena(debug_heap={"stack_every": 4})
    held = [inner(arena) for arena in (none, short, *[few] * 8)]
    assert none.outstanding()[0].allocated.stack is None
    assert [frame.name for frame in short.outstanding()[0].allocated.stack] == ["inner"]
    assert sum(block.allocated.stack is not None for block in few.outstanding()) == 2
    assert none.outstanding()[0].allocated.native == ()
    del held


def test_refused_allocation_leaves_no_site(make_arena, write, host):
    arena = make_arena({"max_mem": 1 << 20}, debug_heap=True)
    buffer = arena.allocate(100)
    with pytest.raises(gpumem.OutOfMemoryError):
        arena.allocate(2 << 20)
    with pytest.raises(gpumem.OutOfMemoryError):
        arena.allocate((1 << 48) - 512)  # before the heap makes a note of it
    buffer.close()  # the free
    arena.check_heap()
    write(buffer_address(arena))
    assert found_by(arena.check_heap)[0].freed.where == line_of("the free")


def buffer_address(arena):
    (rests,) = [block for block in arena.blocks() if block.pending_free]
    return rests.address + 256


def test_each_site_names_its_thread(make_arena, write):
    arena = make_arena(debug_heap=True)
    buffers, threads = [], []

    def take():
        threads.append(threading.get_ident())
        buffers.append(arena.allocate(100))

    in_a_thread(take)
    address = buffers[0].ptr
    buffers.pop().close()
    arena.check_heap()
    write(address)
    (report,) = found_by(arena.check_heap)
    assert (report.allocated.thread, report.freed.thread) == (threads[0], threading.get_ident())


def test_free_in_a_finalizer_during_an_exception_has_a_site(make_arena, write):
    arena = make_arena(debug_heap=True)

    def fail():
        buffer = arena.allocate(100)
        address = buffer.ptr
        try:
            raise KeyError(address)
        finally:
            del buffer  # while it is on its way

    with pytest.raises(KeyError) as caught:
        fail()
    arena.check_heap()
    write(caught.value.args[0])
    assert found_by(arena.check_heap)[0].freed.where == line_of("while it is on its way")


def overrun(arena, write):
    """Write past the end of 1,100 blocks, of which 1,000 reports are kept."""
    buffers = [arena.allocate(1) for _ in range(1100)]
    for buffer in buffers:
        write(buffer.ptr + 1)
    return buffers


def test_reports_beyond_the_maximum_are_counted(make_arena, write):
    arena = make_arena(debug_heap={"quarantine_bytes": 16 << 20})
    held = overrun(arena, write)
    told = "and 100 that were not kept"
    with pytest.raises(gpumem.errors.HeapCorruptionError, match=told) as caught:
        arena.check_heap()
    assert len(caught.value.reports) == 1000
    assert arena.check_heap() == ()
    del held


def test_reports_beyond_the_maximum_give_one_warning(make_arena, write):
    told = []
    arena = make_arena(debug_heap={"on_error": told.append})
    held = overrun(arena, write)
    with pytest.warns(gpumem.errors.HeapWarning, match="100 more reports"):
        arena.check_heap()
    assert len(told) == 1000
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert arena.check_heap() == ()
    del held
