"""An arena that sub-allocates in imported memory, and asks the exporter for more."""

from __future__ import annotations

import os

import numpy as np
import pytest
from helpers.driver import HostDriver
from helpers.waiting import opened_soon

import gpumem
from gpumem.errors import ConfigError, InUseError, OutOfMemoryError, SourceError
from gpumem.interop import MemoryDescriptor, MemoryHandleType

pytestmark = pytest.mark.usefixtures("nothing_left")

NBYTES = 1 << 16


def test_arena_blocks_lie_inside_the_imported_memory(memory, rng):
    arena = memory.resource()
    live = []
    for _ in range(400):
        if len(live) > 1 and rng.random() < 0.5:
            live.pop(rng.randrange(len(live)))
            continue
        try:
            live.append(arena.allocate(rng.randrange(1, 4000)))
        except OutOfMemoryError:
            live.pop(rng.randrange(len(live)))
    for number, buffer in enumerate(live):
        assert memory.ptr <= buffer.ptr
        assert buffer.ptr + buffer.nbytes <= memory.ptr + memory.nbytes
        np.from_dlpack(buffer)[:] = number % 251
    for number, buffer in enumerate(live):
        assert (np.from_dlpack(buffer) == number % 251).all()
    arena.check_invariants()
    assert arena.stats().reserved == NBYTES
    live.clear()
    del buffer
    arena.close()


def test_whole_memory_can_be_one_block_again(memory):
    with memory.resource() as arena:
        for _ in range(3):
            pieces = [arena.allocate(NBYTES // 8) for _ in range(8)]
            with pytest.raises(OutOfMemoryError) as caught:
                arena.allocate(1)
            assert (caught.value.limit, caught.value.in_use) == (NBYTES, NBYTES)
            del pieces, caught
            arena.allocate(NBYTES).close()
            arena.shrink()


def test_unaligned_memory_gives_aligned_blocks(importer, describe):
    with importer.import_memory(describe(offset=100)) as memory, memory.resource() as arena:
        room = (NBYTES - 256) // 256 * 256
        with arena.allocate(room) as buffer:
            assert buffer.ptr % 256 == 0
            with pytest.raises(OutOfMemoryError):
                arena.allocate(1)


def test_grow_is_called_when_the_memory_is_full(memory, importer):
    asked = []

    def grow(nbytes):
        asked.append(nbytes)
        if len(asked) > 1:
            return None
        number = os.memfd_create("more")
        os.truncate(number, nbytes)
        more = importer.import_memory(
            MemoryDescriptor(number, MemoryHandleType.MEMFD, nbytes), consume=True
        )
        return more

    with memory.resource(grow=grow) as arena:
        first = arena.allocate(NBYTES)
        second = arena.allocate(3 * NBYTES)
        assert asked == [4 * NBYTES]  # an arena's regions double
        assert not memory.ptr <= second.ptr < memory.ptr + NBYTES
        np.from_dlpack(second)[:] = 1
        third = arena.allocate(NBYTES)
        with pytest.raises(OutOfMemoryError):
            arena.allocate(256)
        assert asked[-1] == 256  # less and less, down to what is needed
        first.close()
        arena.allocate(NBYTES).close()
        for buffer in (second, third):
            buffer.close()


def test_grow_must_return_compatible_memory(memory, importer, describe):
    too_small = importer.import_memory(describe(size=4096))
    read_only = importer.import_memory(describe(read_only=True))
    for given in (too_small, read_only, "memory"):
        with memory.resource(grow=lambda nbytes, given=given: given) as arena:
            whole = arena.allocate(NBYTES)
            with pytest.raises(SourceError):
                arena.allocate(NBYTES)
            whole.close()
    too_small.close()
    read_only.close()


def test_grow_may_not_return_the_same_memory_twice(memory, importer):
    number = os.memfd_create("more")
    os.truncate(number, 8 * NBYTES)
    more = importer.import_memory(
        MemoryDescriptor(number, MemoryHandleType.MEMFD, 8 * NBYTES), consume=True
    )
    with memory.resource(grow=lambda nbytes: more) as arena:
        kept = [arena.allocate(NBYTES), arena.allocate(NBYTES)]
        exports = more.exports
        with pytest.raises(SourceError, match="already has"):
            arena.allocate(3 * NBYTES)
        assert more.exports == exports
        kept.clear()
    more.close()


def test_memory_cannot_close_while_its_arena_is_open(memory):
    arena = memory.resource()
    buffer = arena.allocate(100)
    with pytest.raises(InUseError):
        memory.close()
    buffer.close()
    with pytest.raises(InUseError):  # the arena keeps what it has taken
        memory.close()
    arena.close()
    memory.close()


def test_arena_keeps_the_memory_alive(importer, describe, fd):
    arena = importer.import_memory(describe()).resource()
    view = np.from_dlpack(arena.allocate(NBYTES))
    del arena
    view[:] = 3
    assert os.pread(fd, NBYTES, 0) == bytes([3]) * NBYTES


def test_arena_settings_are_accepted(memory):
    with memory.resource({"arena.max_mem": 4096}) as arena:
        assert arena.config.max_mem == 4096
        arena.allocate(4096).close()
        with pytest.raises(OutOfMemoryError):
            arena.allocate(4097)
    with pytest.raises(ConfigError, match="backing"):
        memory.resource({"backing": "virtual"})
    with pytest.raises(TypeError, match="callable"):
        memory.resource(grow=5)
    with pytest.raises(ConfigError, match="shareable"), memory.resource() as arena:
        arena.allocate(10, shareable=True)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"offset": NBYTES - 200}, "too small: expected at least 256 bytes"),
        ({"read_only": True}, "read-only"),
    ],
)
def test_too_small_or_read_only_memory_is_refused(importer, describe, changes, says):
    memory = importer.import_memory(describe(**changes))
    with pytest.raises(ConfigError, match=says):
        memory.resource()
    memory.close()


def test_tensors_are_allocated_from_the_arena(memory):
    with memory.resource() as arena:
        tensor = gpumem.zeros((10, 10), "f4", resource=arena)
        tensor.numpy()[:] = 2
        assert tensor.numpy().sum() == 200
        del tensor


def test_memory_of_an_arena_is_released_after_every_streams_work(importer, describe, host):
    side = gpumem.Stream("host")
    memory = importer.import_memory(describe())
    arena = memory.resource()
    buffer = arena.allocate(4096)
    buffer.record_stream(side)
    gate = HostDriver().block(side)
    buffer.close()
    with opened_soon(gate):
        arena.close()
        memory.close()
        assert side.query(), "released while a stream used it"
