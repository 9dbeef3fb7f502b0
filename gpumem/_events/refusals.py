"""Refused requests: what recordings write of an OutOfMemoryError, and read back."""

from __future__ import annotations

import itertools
import json
import os
import time
from typing import Any, NamedTuple

from gpumem._events import recorder
from gpumem.errors import BudgetExceededError, OutOfMemoryError, on_refusal

_MAX_NUMBER = 1 << 62
_PACKAGE = os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), "")


class RefusedRequest(NamedTuple):
    """A request that was refused for good, with the figures of that moment.

    Attributes
    ----------
    nbytes : int
        Requested bytes.
    time : int
        Nanoseconds since 1970; 0 if not known.
    memory, resource : str
        The memory, such as ``"cuda:0"``, and the name of the resource; "" if not known, as all
        fields that follow.
    owner : str
        As of an allocation: the tag, else the line of the program.
    limit_name, limit : str, int
        The limit that refused: "max_mem", a budget's name; 0 if none did.
    in_use, reserved, free, largest_free, device_free : int or None
        Bytes in use and reserved, of these the bytes not in use and the largest free block, and the
        free bytes of the device; None if not known.
    advice : str
    stack : tuple of (str, int, str)
        The frames of the call, the innermost first.
    """

    nbytes: int
    time: int = 0
    memory: str = ""
    resource: str = ""
    owner: str = ""
    limit_name: str = ""
    limit: int = 0
    in_use: int | None = None
    reserved: int | None = None
    free: int | None = None
    largest_free: int | None = None
    device_free: int | None = None
    advice: str = ""
    stack: tuple[tuple[str, int, str], ...] = ()


_TEXTS = ("memory", "resource", "owner", "limit_name", "advice")


def refusal_of(text: str) -> RefusedRequest | None:
    """Read a refusal as `_note` wrote it; None if the text has another form."""
    try:
        facts = json.loads(text)
        stack = tuple((str(file), int(line), str(name)) for file, line, name in facts["stack"])
        values: dict[str, Any] = {}
        for name in RefusedRequest._fields[:-1]:
            value = facts.get(name)
            if name in _TEXTS:
                values[name] = str(value or "")
            elif value is not None or name in ("nbytes", "time"):
                values[name] = min(max(int(value), 0), _MAX_NUMBER)
    except (ValueError, TypeError, KeyError, AttributeError, OverflowError, RecursionError):
        return None
    return RefusedRequest(**values, stack=stack)


def _note(error: OutOfMemoryError) -> None:
    report = error.report
    if report is None or not recorder.current_recording():
        return
    name, limit = (report.limits[0].what, report.limit) if report.limits else ("", 0)
    if isinstance(error, BudgetExceededError):
        name, limit = error.budget, error.limit
    of_report = ("memory", "resource", "in_use", "reserved", "free", "largest_free", "device_free")
    facts = {
        "nbytes": report.requested_nbytes,
        "time": time.time_ns(),
        "owner": recorder.label_here(),
        "limit_name": name,
        "limit": limit,
        "advice": error.advice,
        # The frames of the error itself are the innermost.
        "stack": list(itertools.dropwhile(_is_own, recorder.frames_here())),
        **{field: getattr(report, field) for field in of_report},
    }
    recorder.note_refusal(json.dumps(facts))


def _is_own(frame: tuple[str, int, str]) -> bool:
    return frame[0].startswith(_PACKAGE)


on_refusal(_note)
