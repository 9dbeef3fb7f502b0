"""A reader with a fault of each kind, by which the fuzzer itself is tested."""

from __future__ import annotations

import ctypes
import os

from . import Target

_kept: list[object] = []


def _planted(data: bytes) -> object:
    match data:
        case b"crash":
            ctypes.string_at(0)
        case b"hang":
            while True:
                pass
        case b"exception":
            raise KeyError(data)
        case b"message":
            raise ValueError("two\nlines")
        case b"memory":
            _kept.append(len(b"x" * (200 << 20)))
        case b"objects":
            _kept.append(bytes(1000))
        case b"descriptors":
            os.open(os.devnull, os.O_RDONLY)
        case b"handled":
            raise ValueError("one line")
    return len(data)


TARGETS = (Target("planted", _planted, (ValueError,)),)
