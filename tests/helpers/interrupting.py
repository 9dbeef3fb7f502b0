"""Ctrl-C for the main thread: once it waits, or at any instruction."""

from __future__ import annotations

import gc
import random
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

PATIENCE_S = 30


@contextmanager
def interrupted(waits: Callable[[], object], gate=None) -> Iterator[None]:
    """Send SIGINT when `waits` is true; the block must raise KeyboardInterrupt.

    Without that, `gate` is opened in the end, so that a wait that sees no signal is a failure
    and not a hang.
    """
    main = threading.main_thread().ident
    over = threading.Event()
    late: list[bool] = []

    def send() -> None:
        end = time.monotonic() + PATIENCE_S
        while not waits() and time.monotonic() < end and not over.is_set():
            time.sleep(0.001)
        if not over.is_set():
            signal.pthread_kill(main, signal.SIGINT)
        if not over.wait(PATIENCE_S):
            late.append(True)
            if gate is not None:
                gate.open()

    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    thread = threading.Thread(target=send)
    thread.start()
    try:
        with pytest.raises(KeyboardInterrupt):
            yield
    finally:
        over.set()
        thread.join()
        signal.signal(signal.SIGINT, before)
    assert not late, "the signal was seen when the wait was over"


def more_calls(host, name: str, count: int = 3) -> Callable[[], bool]:
    """Tell whether a driver function was called so often since: a wait queries again and again."""
    before = host.call_count(name)
    return lambda: host.call_count(name) >= before + count


def reaches_the_caller(call: Callable[[], object]) -> None:
    """Call what interrupts; KeyboardInterrupt must reach here, and nobody else is told of it."""

    def call_and_look() -> None:
        call()
        time.sleep(0)  # where Python looks for signals

    told: list[object] = []
    hook, sys.unraisablehook = sys.unraisablehook, lambda unraisable: told.append(unraisable)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            call_and_look()
    finally:
        signal.signal(signal.SIGINT, before)
        sys.unraisablehook = hook
    assert not told


def interrupt_again(action, count, longest, *, seed, after=lambda: None) -> None:
    """Call an action again and again, until a timer has interrupted it so many times.

    The timer runs for 10e-6 to `longest` seconds; `after` is called after each interrupt.
    """
    rng = random.Random(seed)
    before = signal.signal(signal.SIGALRM, signal.default_int_handler)
    # A library may have callbacks of the collector, where an interrupt cannot be raised.
    gc.disable()
    hits = 0
    try:
        while hits < count:
            try:
                # Every signal arrives in this block, since a timer is set again only after many
                # times its span.
                while True:
                    signal.setitimer(signal.ITIMER_REAL, rng.uniform(10e-6, longest))
                    for _ in range(10_000):
                        action()
            except KeyboardInterrupt:
                hits += 1
                after()
    finally:
        signal.signal(signal.SIGALRM, before)
        gc.enable()
