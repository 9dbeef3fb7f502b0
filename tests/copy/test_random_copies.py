"""Random shapes, strides, dtypes and memories: what arrives is what NumPy would have written."""

import numpy as np
import pytest
from helpers.arrays import MEMORIES, elements, put

import gpumem
from gpumem._testing.copies import set_staged_from

DTYPES = ["u1", "i2", "f4", "f8", "c16", "V3", "V24", "?"]


@pytest.mark.parametrize("run", range(200))
def test_random_copy_equals_numpys(run, rng, stream, staged):
    data = drawn(rng)
    axes = drawn_axes(rng, data)
    whole = np.zeros(grown(rng, data.shape, axes), data.dtype)
    cut = (*(slice(None, None, rng.choice([1, 1, 1, 2, 3, -1, -2])) for _ in data.shape), ...)
    want = data[cut]
    room = whole.transpose(axes).shape
    begins = [rng.randrange(r - n + 1) for n, r in zip(want.shape, room, strict=True)]
    into = (*(slice(b, b + n) for n, b in zip(want.shape, begins, strict=True)), ...)
    origin, to = rng.choice(MEMORIES), rng.choice(MEMORIES)
    set_staged_from(rng.choice([0, 1 << 40]))
    print(data.shape, data.dtype, cut, axes, into, origin, "->", to)
    dst, src = put(whole, to), put(data, origin)
    gpumem.copy(seen(dst, axes)[into], src[cut], rng.choice([None, stream]))
    stream.synchronize()
    whole.transpose(axes)[into] = want
    assert elements(dst).tobytes() == whole.tobytes()


def drawn(rng):
    shape = tuple(rng.choice([1, 2, 3, 5, 8, 17]) for _ in range(rng.randrange(5)))
    size = rng.choice([1, 1, 1, 30]) if len(shape) < 3 else 1
    shape = (*shape[:-1], shape[-1] * size) if shape else shape
    dtype = np.dtype(rng.choice(DTYPES))
    nbytes = int(np.prod(shape)) * dtype.itemsize
    raw = np.frombuffer(rng.randbytes(nbytes), np.uint8)
    return (raw & 1 if dtype.kind == "b" else raw).view(dtype).reshape(shape)


def drawn_axes(rng, data):
    axes = list(range(data.ndim))
    if rng.random() < 0.4:
        rng.shuffle(axes)
    return axes


def grown(rng, shape, axes):
    base = [0] * len(shape)
    for axis, length in zip(axes, shape, strict=True):
        base[axis] = length + rng.randrange(3)
    return tuple(base)


def seen(array, axes):
    return np.transpose(elements(array), axes) if axes != sorted(axes) else array
