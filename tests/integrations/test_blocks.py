"""Blocks by address, for libraries that name a stream and give an address back."""

import os

import pytest
from helpers import child
from helpers.driver import HostDriver
from helpers.single_block import BLOCK, next_address, single_block_arena

import gpumem
from gpumem._testing.integrations import Blocks
from gpumem.errors import InvalidFreeError, OutOfMemoryError

LEGACY = gpumem.Stream.from_handle("host", 0)


@pytest.fixture
def arena():
    with gpumem.Arena("host", {"stream_reuse": "never", "max_mem": 1 << 24}) as arena:
        yield arena
        arena.check_invariants()


def test_resource_is_looked_up_at_the_first_block(arena):
    asked = []
    blocks = Blocks(lambda: asked.append(1) or arena)
    assert not asked
    for _ in range(3):
        blocks.free(blocks.allocate(100, LEGACY), LEGACY)
    assert len(asked) == 1


@pytest.mark.parametrize("wrap", [lambda r: r, lambda r: gpumem.adaptors.limit(r, 1 << 20)])
def test_block_is_freed_on_the_stream_of_the_free(arena, wrap):
    blocks, stream = Blocks(lambda: wrap(arena)), gpumem.Stream("host")
    address = blocks.allocate(4096, LEGACY)
    assert len(blocks) == 1
    blocks.free(address, stream)
    assert len(blocks) == 0
    other = blocks.allocate(4096, LEGACY)
    assert other != address
    assert blocks.allocate(4096, stream) == address
    blocks.free(address, stream)
    blocks.free(other, LEGACY)


def test_zero_bytes_give_the_null_address(arena):
    blocks = Blocks(lambda: arena)
    assert blocks.allocate(0, LEGACY) == 0
    blocks.free(0, LEGACY)


@pytest.mark.parametrize(
    ("nbytes", "error"),
    [(1.5, TypeError), (None, TypeError), (-1, ValueError), (1 << 70, OutOfMemoryError)],
)
def test_size_that_is_none_is_refused_as_the_resource_refuses_it(arena, nbytes, error):
    blocks = Blocks(lambda: arena)
    with pytest.raises(error, match=str(nbytes) if isinstance(nbytes, int) else "nbytes must be"):
        blocks.allocate(nbytes, LEGACY)
    assert len(blocks) == 0


def test_free_of_an_unknown_address_is_refused(arena):
    blocks = Blocks(lambda: arena)
    address = blocks.allocate(100, LEGACY)
    blocks.free(address, LEGACY)
    with pytest.raises(InvalidFreeError, match=f"{address:#x}"):
        blocks.free(address, LEGACY)


@pytest.mark.parametrize("wrap", [lambda r: r, gpumem.adaptors.track])
def test_block_freed_on_a_wrong_stream_stays_its_owners(make_arena, wrap):
    arena, pin = single_block_arena(make_arena)
    blocks, stream = Blocks(lambda: wrap(arena)), gpumem.Stream("host")
    address = blocks.allocate(BLOCK, stream)
    with pytest.raises(AttributeError, match="__cuda_stream__"):
        blocks.free(address, object())
    assert len(blocks) == 1
    assert next_address(arena) is None
    blocks.free(address, stream)
    assert next_address(arena, stream) == address
    pin.close()


@pytest.mark.parametrize("wrap", [lambda r: r, gpumem.adaptors.track])
def test_block_freed_on_another_stream_is_reused_there_at_once_and_elsewhere_later(
    make_arena, wrap, host
):
    arena, pin = single_block_arena(make_arena)
    own, freeing = gpumem.Stream("host"), gpumem.Stream("host")
    blocks = Blocks(lambda: wrap(arena))
    address = blocks.allocate(BLOCK, own)
    with HostDriver().block(freeing):
        blocks.free(address, freeing)
        assert next_address(arena, own) is None
        assert next_address(arena, freeing) == address
    freeing.synchronize()
    assert next_address(arena, own) == address
    pin.close()


def test_callback_reports_errors_and_raises_nothing(arena, monkeypatch):
    seen = []
    monkeypatch.setattr("sys.unraisablehook", lambda report: seen.append(report.exc_value))
    Blocks(lambda: arena).deallocate(4096, 100, LEGACY)
    assert isinstance(seen[0], InvalidFreeError)


def test_capture_is_served_from_a_graph_pool(arena):
    blocks, stream = Blocks(lambda: arena), gpumem.Stream("host")
    warm = blocks.allocate(4096, stream)
    blocks.free(warm, stream)
    with arena.capture(stream) as pool:
        address = blocks.allocate(4096, stream)
        assert address != warm
        assert pool.stats().in_use == 4096
    blocks.free(address, stream)
    pool.close()


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_frees_in_a_forked_child_are_silent(arena):
    blocks = Blocks(lambda: arena)
    address = blocks.allocate(100, LEGACY)
    child = os.fork()
    if child == 0:
        try:
            blocks.free(address, LEGACY)
            os._exit(0)
        except BaseException:
            os._exit(1)
    assert os.waitpid(child, 0)[1] == 0
    blocks.free(address, LEGACY)


@pytest.mark.parametrize("when", ["", "import atexit; atexit.register(globals().pop, 'held')"])
@pytest.mark.parametrize("end", ["", "del arena", "del blocks", "del stream"])
def test_frees_during_exit_are_silent(when, end):
    child.run_quietly(f"""
        import gpumem
        from gpumem._testing.integrations import Blocks

        class Held:
            def __init__(self, give, address, stream):
                self.give, self.address, self.stream = give, address, stream
            def __del__(self):
                self.give(self.address, 100, self.stream)

        arena, stream = gpumem.Arena("host"), gpumem.Stream("host")
        blocks = Blocks(lambda: arena)
        blocks.allocate(1, stream)
        held = Held(blocks.deallocate, blocks.allocate(100, stream), stream)
        {when}
        {end}
    """)
