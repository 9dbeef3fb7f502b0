"""Streams as the model sees them: what is queued, what it waits for, how far it must be and can be.

Most waits are known. Some are up to gpumem: under ``stream_reuse="wait"`` a stream may wait for
more than the model can tell. So everything that can be waited for has two states: `sure`, it must
be so by now, and `possible`, it may be. What is not possible has certainly not happened.
"""

from __future__ import annotations

import ctypes
import time
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from ..helpers.driver import HostDriver
from ..helpers.waiting import wait_until

PATIENCE = 20  # seconds for what must not take any


class Condition(Protocol):
    """Something that streams wait for."""

    sure: bool
    possible: bool


class Hold:
    """A gate that holds a stream back until it is opened."""

    def __init__(self, word: ctypes.c_uint64) -> None:
        self._word = word
        self.sure = self.possible = False

    def open(self) -> None:
        self.sure = self.possible = True
        self._word.value = 1


class Counter:
    """The value of a timeline."""

    def __init__(self, initial: int) -> None:
        self.sure = self.possible = self.pending = initial

    def reached(self, value: int) -> Reached:
        return Reached(self, value)


@dataclass(frozen=True)
class Reached:
    """A value of a timeline."""

    counter: Counter
    value: int

    @property
    def sure(self) -> bool:
        return self.counter.sure >= self.value

    @property
    def possible(self) -> bool:
        return self.counter.possible >= self.value


@dataclass(eq=False)
class Op:
    """What was queued on a stream by one step, and the event behind it."""

    queue: Queue
    event: Any
    after: tuple[Condition, ...] = ()
    perhaps: tuple[Condition, ...] = ()  # waits that gpumem may have added
    signals: Reached | None = None
    sure: bool = False
    possible: bool = False


@dataclass(eq=False)
class Queue:
    """A stream and everything that was queued on it, in order."""

    name: str
    stream: Any
    ops: list[Op] = field(default_factory=list)
    _sure: int = 0
    _possible: int = 0

    def __str__(self) -> str:
        return self.name

    @property
    def device(self) -> Any:
        return self.stream.device

    @property
    def last(self) -> tuple[Op, ...]:
        """What later work of others waits for if it waits for all of this stream."""
        return tuple(self.ops[-1:])

    @property
    def done(self) -> bool:
        """Whether all of it must be done."""
        return self._sure == len(self.ops)

    def add(self, after=(), perhaps=(), signals: Reached | None = None) -> Op:
        """Note what has just been queued; an event behind it shows when it is done."""
        op = Op(self, self.stream.record(), tuple(after), tuple(perhaps), signals)
        self.ops.append(op)
        return op

    def advance(self) -> bool:
        """Go on as far as conditions allow; returns whether anything has changed."""
        before = self._possible, self._sure
        while self._possible < len(self.ops):
            op = self.ops[self._possible]
            if not all(each.possible for each in op.after):
                break
            op.possible = True
            if op.signals:
                counter = op.signals.counter
                counter.possible = max(counter.possible, op.signals.value)
            self._possible += 1
        while self._sure < self._possible:
            op = self.ops[self._sure]
            if not all(each.sure for each in (*op.after, *op.perhaps)):
                break
            op.sure = True
            if op.signals:
                counter = op.signals.counter
                counter.sure = max(counter.sure, op.signals.value)
            self._sure += 1
        return before != (self._possible, self._sure)

    def settle(self) -> None:
        """Wait for what must be done, and look that no more is done than can be."""
        if self._sure:
            wait_for(self.ops[self._sure - 1].event)
        if self._possible < len(self.ops):
            early = self.ops[self._possible]
            assert not early.event.query(), f"{self.name} did not wait"


def wait_for(event: Any) -> None:
    """Wait for what must happen by itself, and fail if it does not."""
    for _ in range(100):
        if event.query():
            return
        time.sleep(0)
    wait_until(event.query, PATIENCE)


def advance_all(queues: list[Queue]) -> None:
    """Let every stream go on until nothing changes."""
    while any([queue.advance() for queue in queues]):
        pass


# ---- what streams do -----------------------------------------------------------------------------

Span = tuple[int, int]  # address, bytes
_FUNCTION = ctypes.CFUNCTYPE(None, ctypes.c_void_p)


class Kernels:
    """Functions that a stream of the host device calls in its turn.

    They stay until the end of the program: a captured graph may call one again. So do the words of
    gates, which come from the driver, as gpumem might hold a word back that it had to free.
    """

    def __init__(self) -> None:
        self.problems: list[str] = []
        self._functions: list[Any] = []
        self._words: list[tuple[HostDriver, int]] = []
        self._entry = _FUNCTION(self._call)
        self._address = ctypes.cast(self._entry, ctypes.c_void_p)
        self._drivers: dict[str, HostDriver] = {}

    def driver(self, device: Any) -> HostDriver:
        return self._drivers.setdefault(str(device), HostDriver(str(device)))

    def hold(self, stream: Any) -> Hold:
        """Hold a stream back from here on."""
        driver, address = self.driver(stream.device), ctypes.c_uint64()
        driver.call("cuMemHostAlloc", ctypes.byref(address), 8, 0)
        self._words.append((driver, address.value))
        word = ctypes.c_uint64.from_address(address.value)
        word.value = 0
        driver.call("cuStreamWaitValue64", stream.ptr, address.value, 1, 0)
        return Hold(word)

    def close(self) -> None:
        """Only when all streams are done."""
        while self._words:
            driver, address = self._words.pop()
            driver.call("cuMemFreeHost", address)

    def launch(self, stream: Any, function: Any) -> None:
        self._functions.append(function)
        number = len(self._functions)  # 0 would arrive as None
        self.driver(stream.device).call("cuLaunchHostFunc", stream.ptr, self._address, number)

    def _call(self, number: int) -> None:
        try:
            self._functions[number - 1]()
        except BaseException as error:
            self.problems.append(f"{type(error).__name__}: {error}")

    def fill(self, stream: Any, address: int, nbytes: int, byte: int) -> None:
        self.launch(stream, lambda: ctypes.memset(address, byte, nbytes))

    def check(self, stream: Any, address: int, nbytes: int, byte: int, what: str) -> None:
        self.launch(stream, lambda: require_bytes(address, nbytes, byte, what))

    def add(self, stream: Any, to: Span, origin: Span, summand: int) -> None:
        """Write the byte of one range plus a number into another."""

        def work() -> None:
            byte = int(bytes_at(*origin)[0])
            require_bytes(*origin, byte, "what a run reads")
            bytes_at(*to)[:] = (byte + summand) % 256

        self.launch(stream, work)


def bytes_at(address: int, nbytes: int) -> np.ndarray:
    """Return memory as an array, without gpumem and without a wait."""
    return np.frombuffer((ctypes.c_ubyte * nbytes).from_address(address), np.uint8)


def require_bytes(address: int, nbytes: int, byte: int, what: str) -> None:
    found = bytes_at(address, nbytes)
    wrong = found != byte
    if wrong.any():
        at = int(wrong.argmax())
        raise AssertionError(f"{what}: byte {at} is {found[at]}, and {byte} was written")
