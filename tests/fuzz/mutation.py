"""Changes of bytes: bits, spans, numbers, words, and parts of another input."""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Sequence

MOST_BYTES = 1 << 16
_EDGES = (0, 1, 2, 3, 7, 8, 16, 63, 64, 127, 128, 255, 256, 1023, 4096, 65535, 65536, 1 << 20)
_NUMBER = re.compile(rb"\d+")

Change = Callable[[random.Random, bytearray, bytes], None]


def interesting(rng: random.Random) -> int:
    """Return a number at which readers go wrong: a power of two and its neighbours, or negative."""
    if rng.random() < 0.3:
        return rng.choice(_EDGES)
    number = (1 << rng.choice((7, 8, 15, 16, 31, 32, 47, 48, 53, 62, 63, 64))) + rng.randint(-2, 1)
    return -number if rng.random() < 0.2 else number


def mutate(rng: random.Random, data: bytes, other: bytes, tokens: Sequence[bytes] = ()) -> bytes:
    """Return the bytes after one to eight changes; `other` lends parts."""
    changed = bytearray(data)
    for _ in range(1 << rng.randrange(4)):
        if tokens and rng.random() < 0.2:
            _put(rng, changed, rng.choice(tokens))
        else:
            rng.choice(_CHANGES)(rng, changed, other)
    return bytes(changed[:MOST_BYTES])


def _span(rng: random.Random, data: bytes | bytearray) -> slice:
    if not data:
        return slice(0, 0)
    begin = rng.randrange(len(data))
    return slice(begin, begin + min(1 << rng.randrange(9), len(data) - begin))


def _put(rng: random.Random, data: bytearray, what: bytes) -> None:
    """Insert bytes, or write them over others."""
    at = rng.randint(0, len(data))
    data[at : at + len(what) * rng.randrange(2)] = what


def _flip(rng: random.Random, data: bytearray, other: bytes) -> None:
    if data:
        data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)


def _replace_byte(rng: random.Random, data: bytearray, other: bytes) -> None:
    if data:
        data[rng.randrange(len(data))] = rng.choice((0, 1, 0x7F, 0x80, 0xFF, rng.randrange(256)))


def _truncate(rng: random.Random, data: bytearray, other: bytes) -> None:
    del data[rng.randint(0, len(data)) :]


def _drop(rng: random.Random, data: bytearray, other: bytes) -> None:
    del data[_span(rng, data)]


def _repeat(rng: random.Random, data: bytearray, other: bytes) -> None:
    span = _span(rng, data)
    data[span] = data[span] * rng.choice((2, 2, 3, 17))


def _move(rng: random.Random, data: bytearray, other: bytes) -> None:
    span = _span(rng, data)
    taken = bytes(data[span])
    del data[span]
    _put(rng, data, taken)


def _insert_random(rng: random.Random, data: bytearray, other: bytes) -> None:
    _put(rng, data, rng.randbytes(1 << rng.randrange(5)))


def _borrow(rng: random.Random, data: bytearray, other: bytes) -> None:
    _put(rng, data, other[_span(rng, other)])


def _splice(rng: random.Random, data: bytearray, other: bytes) -> None:
    data[rng.randint(0, len(data)) :] = other[rng.randint(0, len(other)) :]


def _integer(rng: random.Random, data: bytearray, other: bytes) -> None:
    """Write a number of 1 to 8 bytes over others, in either order."""
    width = rng.choice((1, 2, 4, 8))
    number = interesting(rng) & ((1 << 8 * width) - 1)
    at = rng.randint(0, max(0, len(data) - width))
    data[at : at + width] = number.to_bytes(width, rng.choice(("little", "big")))


def _decimal(rng: random.Random, data: bytearray, other: bytes) -> None:
    """Write a number in decimal in place of another one."""
    found = list(_NUMBER.finditer(data))
    if found:
        number = rng.choice(found)
        text = "9" * rng.choice((20, 400, 5000)) if rng.random() < 0.1 else str(interesting(rng))
        data[number.start() : number.end()] = text.encode()


_CHANGES: tuple[Change, ...] = (
    _flip,
    _replace_byte,
    _truncate,
    _drop,
    _repeat,
    _move,
    _insert_random,
    _borrow,
    _splice,
    _integer,
    _integer,
    _decimal,
)
