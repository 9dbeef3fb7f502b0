"""Traces from the CSV logs of RMM's ``LoggingResourceAdaptor``."""

from __future__ import annotations

import re
from typing import IO

from gpumem._events.refusals import RefusedRequest
from gpumem.errors import TraceError
from gpumem.traces.builder import TraceBuilder
from gpumem.traces.trace import Trace

HEADER = "Thread,Time,Action,Pointer,Size,Stream"

_HOUR_US = 3600 * 1_000_000
_DAY_US = 24 * _HOUR_US
# spdlog's time of day; the microseconds follow a colon in old logs, a point in new ones.
_TIME_OF_DAY = re.compile(r"(\d{1,2}):(\d{2}):(\d{2})(?:[:.](\d{1,6}))?", re.ASCII)
_NUMBER = re.compile(r"\d{1,12}(\.\d{1,9})|\d{1,18}", re.ASCII)
_POINTER = re.compile(r"(?:0x)?[0-9a-f]{1,16}", re.IGNORECASE | re.ASCII)
_SIZE = re.compile(r"\d{1,20}", re.ASCII)


def read_rmm_log(file: IO[bytes], name: str) -> Trace:
    """Read a trace from an open RMM log.

    Every ``allocate`` and ``free`` line is one event. A free completes at once, since RMM frees
    in stream order. Failed allocations and empty ones at the null pointer are left out. The log of
    a killed program ends within a line, which is left out and counted as ``meta["torn"]``. A time
    is a time of day (a drop of more than half a day is midnight, a rise of more than 23 hours a
    line from before midnight that was logged late), a decimal number of seconds, or a whole number
    of microseconds.

    Parameters
    ----------
    file : binary file
        The log, with its header line.
    name : str
        Name of the trace.

    Raises
    ------
    TraceError
        A line that is not as RMM writes it (it names the line), or a log without allocations.
    """
    try:
        text = file.read().rstrip(b"\0").decode("utf-8")  # a crash may leave zeros at the end
    except UnicodeDecodeError as error:
        raise TraceError(f"the log is not text: byte {error.start} is not UTF-8") from None
    builder = TraceBuilder()
    clock = _Clock()
    lines = text.splitlines()
    torn = 0
    for number, line in enumerate(lines[1:], start=2):
        if not line.strip():
            continue
        try:
            _record_line(builder, clock, f"line {number}", line)
        except TraceError:
            if number < len(lines) or text.endswith("\n"):
                raise
            torn = 1
    if not len(builder):
        raise TraceError("the log holds no allocations")
    return builder.trace(name, {"source": "rmm_log", "torn": torn})


def _record_line(builder: TraceBuilder, clock: _Clock, where: str, line: str) -> None:
    fields = [part.strip() for part in line.split(",")]
    if len(fields) != 6:
        raise TraceError(f"{where} has {len(fields)} fields, expected 6: {HEADER}")
    thread, time, action, pointer, size, stream = fields
    if action not in ("allocate", "free", "allocate failure"):
        raise TraceError(
            f"{where}: action is {action!r:.60}, expected allocate, free or allocate failure"
        )
    time_us = clock.microseconds(time, where)
    address = _pointer("pointer", pointer, where)
    nbytes = _size(size, where)
    handle = _pointer("stream", stream, where)
    if action == "allocate failure":
        builder.refuse(RefusedRequest(nbytes))
    elif address and action == "allocate":
        builder.alloc(where, address, nbytes, handle, time_us, f"thread {thread}")
    elif address:
        builder.free_completed(where, address, nbytes, handle, time_us)


class _Clock:
    """Reads the time column, counting the midnights it has seen."""

    def __init__(self) -> None:
        self._days_us = 0
        self._last_us: int | None = None

    def microseconds(self, text: str, where: str) -> int:
        """Return microseconds since the midnight before the log began, or since the log's epoch."""
        if match := _TIME_OF_DAY.fullmatch(text):
            return self._time_of_day(match)
        if match := _NUMBER.fullmatch(text):
            return round(float(text) * 1e6) if match[1] else int(text)
        raise TraceError(
            f"{where}: time is {text!r:.60}, expected HH:MM:SS.us, HH:MM:SS:us or a number"
        )

    def _time_of_day(self, match: re.Match[str]) -> int:
        hours, minutes, seconds = (int(match[part]) for part in (1, 2, 3))
        fraction = (match[4] or "").ljust(6, "0")
        now = (hours * 3600 + minutes * 60 + seconds) * 1_000_000 + int(fraction) + self._days_us
        # Threads log a little out of order; only a drop of half a day or more is a new day.
        if self._last_us is not None and now < self._last_us - _DAY_US // 2:
            self._days_us += _DAY_US
            now += _DAY_US
        elif self._last_us is not None and now > self._last_us + _DAY_US - _HOUR_US:
            now -= _DAY_US
        self._last_us = now
        return now


def _pointer(column: str, text: str, where: str) -> int:
    if text == "(nil)":  # how C prints a null pointer
        return 0
    if not _POINTER.fullmatch(text):
        raise TraceError(f"{where}: {column} is {text!r:.60}, expected a hexadecimal address")
    return int(text, 16)


def _size(text: str, where: str) -> int:
    if not _SIZE.fullmatch(text):
        raise TraceError(f"{where}: size is {text!r:.60}, expected a number of bytes")
    return int(text)
