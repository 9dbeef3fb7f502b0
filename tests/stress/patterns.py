"""Patterns that name their writer: filled and read back by work on a stream."""

from __future__ import annotations

import ctypes
from collections import deque
from dataclasses import dataclass

import numpy as np

# Each piece of a block has a word of its own, so that two pages of one block that lie on the same
# memory are seen too. A physical page is at least four pieces long.
PIECE = 512 << 10
PIECE_BITS = 5
LARGEST = PIECE << PIECE_BITS  # bytes of the largest block
STAGING = 64 << 20  # bytes of one thread's copies that wait to be compared
# A host function gets one pointer, this one takes its number for the time.
_USLEEP = ctypes.cast(ctypes.CDLL(None).usleep, ctypes.c_void_p)


class WrongBytes(AssertionError):
    """A block did not hold what its owner wrote."""


@dataclass
class _Check:
    at: int  # in the staging area, a multiple of 4
    nbytes: int
    tag: int
    event: object
    what: str


class Patterns:
    """Fills and checks of one thread; make and use it on that thread.

    Parameters
    ----------
    driver : HostDriver
        The device's functions.
    writer : int
        Number of the thread, below 128.
    """

    def __init__(self, driver, writer: int) -> None:
        self.checks = self.bytes_checked = 0
        self._driver = driver
        self._writer = writer
        self._serial = 0
        self._queued: deque[_Check] = deque()
        staging = ctypes.c_uint64()
        driver.call("cuMemHostAlloc", ctypes.byref(staging), STAGING, 0)
        self._staging = staging.value
        words = (ctypes.c_uint32 * (STAGING // 4)).from_address(self._staging)
        self._words = np.frombuffer(words, np.uint32)

    def close(self) -> None:
        """Give the memory back; nothing may be queued on it any more."""
        del self._words
        self._driver.call("cuMemFreeHost", self._staging)

    def fill(self, address: int, nbytes: int, stream) -> int:
        """Queue the fill of a block; returns the tag that it then holds."""
        self._serial += 1
        serial = self._serial & ((1 << (25 - PIECE_BITS)) - 1)
        tag = self._writer << 25 | serial << PIECE_BITS
        for piece, begin in enumerate(range(0, nbytes, PIECE)):
            length = min(PIECE, nbytes - begin)
            at, words = address + begin, length // 4
            if words:
                self._driver.call("cuMemsetD32Async", at, tag + piece, words, stream.ptr)
            if length % 4:
                rest = at + 4 * words, tag >> PIECE_BITS & 0xFF, length % 4
                self._driver.call("cuMemsetD8Async", *rest, stream.ptr)
        return tag

    def drag(self, microseconds: int, stream) -> None:
        """Queue work that keeps a stream busy for so long."""
        self._driver.call("cuLaunchHostFunc", stream.ptr, _USLEEP, microseconds)

    def check(self, address: int, nbytes: int, tag: int, stream, what: str) -> None:
        """Queue a copy of the block; it is compared once the copy has happened."""
        self.settle()
        at = self._room_for((nbytes + 3) // 4 * 4)
        self._driver.call("cuMemcpyAsync", self._staging + at, address, nbytes, stream.ptr)
        self._queued.append(_Check(at, nbytes, tag, stream.record(), what))

    def _room_for(self, nbytes: int) -> int:
        """Find a place behind the newest copy, or at the front, that no older copy needs."""
        while self._queued:
            oldest, newest = self._queued[0], self._queued[-1]
            end = (newest.at + newest.nbytes + 3) // 4 * 4
            if oldest.at <= newest.at:
                if end + nbytes <= STAGING:
                    return end
                end = 0
            if end + nbytes <= oldest.at:
                return end
            self._compare_oldest()
        return 0

    def settle(self, everything: bool = False) -> None:
        """Compare the copies that have happened, or wait for all of them."""
        while self._queued and (everything or self._queued[0].event.query()):
            self._compare_oldest()

    def _compare_oldest(self) -> None:
        check = self._queued.popleft()
        check.event.synchronize()
        first = check.at // 4
        words = self._words[first : first + (check.nbytes + 3) // 4]
        for piece, begin in enumerate(range(0, check.nbytes // 4, PIECE // 4)):
            of_piece = words[begin : min(begin + PIECE // 4, check.nbytes // 4)]
            wrong = of_piece != check.tag + piece
            if wrong.any():
                at = int(wrong.argmax())
                found, written = _named(int(of_piece[at])), _named(check.tag + piece)
                raise WrongBytes(
                    f"{int(wrong.sum()) * 4} wrong bytes in piece {piece} of {check.what}: at "
                    f"{4 * (begin + at)} {found}, not {written}"
                )
        rest = words.view(np.uint8)[check.nbytes // 4 * 4 : check.nbytes]
        if (rest != check.tag >> PIECE_BITS & 0xFF).any():
            raise WrongBytes(f"wrong bytes at the end of {check.what}: {rest}")
        self.checks += 1
        self.bytes_checked += check.nbytes


def _named(word: int) -> str:
    serial = word >> PIECE_BITS & ((1 << (25 - PIECE_BITS)) - 1)
    return f"{word:#010x} (thread {word >> 25}, fill {serial}, piece {word & 31})"
