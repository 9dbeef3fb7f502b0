"""`VirtualTensor.full`: gpumem itself reads and writes only rows that have memory."""

from __future__ import annotations

import copy
from functools import partial

import numpy as np
import pytest
from helpers import dlpack

import gpumem
from gpumem.errors import ClosedError, InUseError

MIB = 1 << 20
USES = {
    "fill": lambda part: part.fill(1),
    "fill on a stream": lambda part: part.fill(1, gpumem.Stream("host")),
    "fill of a column": lambda part: part[:, ::2].fill(1),
    "item": lambda part: part[-1, 0].item(),
    "bool": lambda part: bool(part[-1, 0]),
    "tolist": lambda part: part[:, :4].tolist(),
    "bytes": lambda part: bytes(part),
    "array": lambda part: part.__array__(copy=True),
    "array of another dtype": lambda part: part.__array__("f4"),
    "scalar": lambda part: part.__setitem__(-1, 3),
    "assignment": lambda part: part.__setitem__(-1, np.ones(MIB, "u1")),
    "to": lambda part: part.to("host", copy=True),
    "contiguous": lambda part: part.T.contiguous(),
    "reshape": lambda part: part.T.reshape(-1),
    "copy from": lambda part: gpumem.copy(np.empty(part.shape, "u1"), part),
    "copy into": lambda part: gpumem.copy(part, np.ones(part.shape, "u1")),
    "copy on a stream": lambda part: gpumem.copy(
        part, gpumem.zeros(part.shape, "u1", memory="host"), gpumem.Stream("host")
    ),
    "copy beside": lambda part: gpumem.copy(part[:, 1:], part[:, :-1]),
    "deepcopy": lambda part: copy.deepcopy(part),
    "dlpack copy": lambda part: part.__dlpack__(max_version=(1, 0), copy=True),
    "from_dlpack copy": lambda part: gpumem.from_dlpack(part, copy=True),
    "transposed": lambda part: part.T.tolist(),
    "flipped": lambda part: part[::-1].tolist(),
    "other dtype": lambda part: part.view("u8")[:, :2].tolist(),
    "read-only": lambda part: part.as_read_only()[:, :2].tolist(),
    "bytes of the buffer": lambda part: gpumem.copy(
        np.empty(part.buffer.nbytes, "u1"), part.buffer
    ),
}


@pytest.fixture
def cache(arena):
    cache = arena.virtual((8, MIB), "uint8", step=2, name="cache")
    yield cache
    cache.close()


@pytest.mark.parametrize("use", USES.values(), ids=USES)
def test_use_of_rows_without_memory_is_refused_and_of_committed_ones_is_not(cache, use):
    part = cache.full[4:6]
    refused = pytest.raises(ValueError, match=r"rows \d to \d of cache are not all committed")
    with refused:
        use(part)
    cache.commit(4, 5)  # a part of them
    with refused:
        use(part)
    cache.commit(0, 8)
    use(part)
    cache.release(4, 6)  # released after the view was made
    with refused:
        use(part)
    assert cache.rows == ((0, 4), (6, 8))
    cache.release(0, 8)  # no use holds rows any more


def test_bytes_through_full_are_those_of_the_rows(cache):
    cache.commit(2, 4)
    cache.full[2] = 7
    cache.full[3, :] = np.arange(MIB).astype("u1")
    assert (cache.tensor(2, 3).numpy() == 7).all()
    assert cache.full[3, 5:8].tolist() == [5, 6, 7]
    assert cache.full[4:4].tolist() == []  # no rows need no memory


def test_views_and_exports_of_full_need_no_memory(cache):
    shape = (8, MIB)
    assert cache.full.numpy().shape == np.from_dlpack(cache.full).shape == shape
    assert gpumem.from_dlpack(cache.full).shape == gpumem.asarray(cache.full).shape == shape
    assert memoryview(cache.full).shape == copy.copy(cache.full).shape == shape
    dlpack.consume(cache.full.__dlpack__(max_version=(1, 0))).delete()
    assert "(8, 1048576)" in repr(cache.full)
    assert {cache.full: 1}[cache.full] == 1


def test_rows_are_held_while_a_copy_reads_them(cache, host, make_arena):
    cache.commit(0, 2)
    stream, seen = gpumem.Stream("host"), []

    class Source:
        """An exporter that is asked for its array in the middle of a copy."""

        def __init__(self, array):
            self.array = array

        def __dlpack_device__(self):
            return 1, 0

        def __dlpack__(self, **options):
            seen.append(cache.rows)
            return self.array.__dlpack__(**options)

    gpumem.copy(cache.full[:1], Source(np.ones((1, MIB), "u1")), stream)
    cache.release(0, 1)  # behind the copy, which is queued
    assert seen == [((0, 2),)]
    with pytest.raises(ValueError, match=r"rows 0 to 1"):
        cache.full[0, 0].item()
    rows = cache.tensor(1, 2)
    with pytest.raises(InUseError):
        cache.release(1, 2)
    del rows


def test_resource_of_a_closed_buffer_is_that_of_its_tensor_for_good(arena):
    cache = arena.virtual((8, MIB), "uint8", committed=1)
    buffer = cache.tensor().buffer
    buffer.close()
    cache.close()
    del cache
    others = []
    for _ in range(20):  # each forgets ended ones, and takes their place
        others.append(arena.virtual((8, MIB), "uint8", committed=1))
    assert buffer.resource.closed


def test_use_of_full_of_a_closed_or_ended_tensor(arena):
    cache = arena.virtual((8, MIB), "uint8", committed=1)
    full = cache.full
    cache.close()
    for use in (lambda: full[0, 0].item(), lambda: full.fill(1), partial(getattr, cache, "ptr")):
        with pytest.raises(ClosedError):
            use()
    cache = arena.virtual((8, MIB), "uint8", committed=1)
    full = cache.full
    del cache  # `full` keeps its memory
    full[0].fill(3)
    assert full[0, 7].item() == 3
    with pytest.raises(ValueError, match=r"not all committed"):
        full[1, 0].item()
