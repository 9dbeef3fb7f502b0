"""MurmurHash3 for 32-bit machines with 128 bits of result: Austin Appleby's public-domain hash."""

from __future__ import annotations

import struct

WORD = 0xFFFFFFFF
C = (0x239B961B, 0xAB0E9789, 0x38B34AE5, 0xA1E38B93)
# For each of the four lanes: the rotation of a word of input; that of its state, and an addend.
TURN = (15, 16, 17, 18)
STEP = ((19, 0x561CCD1B), (17, 0x0BCAA747), (15, 0x96CD1C35), (13, 0x32AC3B17))


def murmur3_x86_128(data: bytes, seed: int = 0) -> bytes:
    """Hash bytes; the four 32-bit words of the result are in little-endian order.

    Examples
    --------
    >>> murmur3_x86_128(b"").hex(), murmur3_x86_128(b"", 1)[:4].hex()
    ('00000000000000000000000000000000', 'ecadc488')
    """
    h = [seed] * 4
    whole = len(data) // 16 * 16
    for words in struct.iter_unpack("<4I", data[:whole]):
        for lane, word in enumerate(words):
            h[lane] ^= _mixed(word, lane)
            turn, add = STEP[lane]
            h[lane] = ((_rotated(h[lane], turn) + h[(lane + 1) % 4]) * 5 + add) & WORD
    rest = data[whole:]
    for lane, word in enumerate(struct.unpack("<4I", rest.ljust(16, b"\0"))):
        h[lane] ^= _mixed(word, lane)  # of a word of zeros that is zero
    h = _spread([_finished(word) for word in _spread([word ^ len(data) for word in h])])
    return struct.pack("<4I", *h)


def _mixed(word: int, lane: int) -> int:
    return _rotated(word * C[lane] & WORD, TURN[lane]) * C[(lane + 1) % 4] & WORD


def _rotated(word: int, by: int) -> int:
    return (word << by | word >> (32 - by)) & WORD


def _spread(h: list[int]) -> list[int]:
    total = sum(h) & WORD
    return [total, *((total + word) & WORD for word in h[1:])]


def _finished(word: int) -> int:
    word = (word ^ word >> 16) * 0x85EBCA6B & WORD
    word = (word ^ word >> 13) * 0xC2B2AE35 & WORD
    return word ^ word >> 16
