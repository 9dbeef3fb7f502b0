"""Frees of what is free, or was never a block: by address, as other libraries' hooks free."""

import pytest
from helpers.heap import found_by, line_of
from helpers.torch_caller import Caller

import gpumem
from gpumem._testing import torch_hooks
from gpumem._testing.integrations import Blocks
from gpumem.errors import InvalidFreeError


@pytest.fixture(scope="module")
def caller():
    return Caller()


@pytest.fixture
def arena():
    """An arena with a debug heap that serves device 0; a plain one takes over after the test."""
    arena = gpumem.Arena("host", debug_heap=True)
    torch_hooks.serve(0, arena)
    yield arena
    torch_hooks.serve(0, gpumem.Arena("host"))
    arena.check_invariants()


def test_hook_block_lies_between_guards(caller, arena, write):
    address = caller.alloc(1000)
    write(address + 1000)
    write(address - 1)
    caller.free(address)
    found = found_by(arena.check_heap)
    assert {report.kind for report in found} == {"overrun", "underrun"}
    assert arena.stats().in_use == 0


def test_freed_hook_block_is_quarantined(caller, arena, write):
    address = caller.alloc(1000)
    caller.free(address)
    arena.check_heap()
    write(address + 5)
    assert found_by(arena.check_heap)[0].kind == "use_after_free"


def test_double_free_names_allocation_free_and_second_free(caller, arena):
    address = caller.alloc(1000)
    caller.free(address)
    assert caller.free(address) != 0  # refused, as without a debug heap
    (report,) = found_by(arena.check_heap, InvalidFreeError)
    assert (report.kind, report.ptr, report.address) == ("double_free", address, address)
    # A call through ctypes holds no interpreter lock, so the stacks are the machine's.
    for site in (report.allocated, report.freed, report.again):
        assert site.stack is None
        assert any("_ctypes" in name for name in site.native)


def test_interior_free_names_the_block(caller, arena):
    address = caller.alloc(1000)
    caller.free(address + 256)
    (report,) = found_by(arena.check_heap, InvalidFreeError)
    assert (report.kind, report.ptr, report.address) == ("invalid_free", address, address + 256)
    assert report.freed is None
    caller.free(address)
    assert arena.check_heap() == ()


def test_hook_free_of_a_buffers_block_is_refused(caller, arena):
    buffer = arena.allocate(100)
    caller.free(buffer.ptr)
    assert found_by(arena.check_heap, InvalidFreeError)[0].kind == "invalid_free"
    buffer.close()


def test_hook_reports_reach_callbacks_without_an_arena_call(caller):
    told = []
    arena = gpumem.Arena("host", debug_heap={"on_error": told.append})
    torch_hooks.serve(0, arena)
    address = caller.alloc(100)
    caller.free(address)
    caller.free(address)
    for _ in range(1000):  # between two of its steps the interpreter does what was left for it
        if told:
            break
    assert [report.kind for report in told] == ["double_free"]
    torch_hooks.serve(0, gpumem.Arena("host"))


def test_invalid_free_by_address_reports_both_stacks(make_arena):
    arena = make_arena(debug_heap=True)
    blocks, stream = Blocks(lambda: arena), gpumem.Stream("host")
    address = blocks.allocate(100, stream)  # allocated by address
    blocks.free(address, stream)  # freed once
    (report,) = found_by(lambda: blocks.free(address, stream), InvalidFreeError)  # freed twice
    assert report.allocated.where == line_of("allocated by address")
    assert report.freed.where == line_of("freed once")
    assert report.again.where == line_of("freed twice")


def test_unknown_address_is_refused_without_a_report(make_arena):
    arena = make_arena(debug_heap=True)
    with pytest.raises(InvalidFreeError) as caught:
        Blocks(lambda: arena).free(4096, gpumem.Stream("host"))
    assert caught.value.reports == ()


def test_closing_a_buffer_twice_is_not_a_double_free(make_arena):
    arena = make_arena(debug_heap=True)
    buffer = arena.allocate(100)
    buffer.close()
    buffer.close()
    assert arena.check_heap() == ()
