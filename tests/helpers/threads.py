"""Threads that tests run in."""

from __future__ import annotations

import functools
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any


def run_threads(threads: Iterable[threading.Thread]) -> None:
    """Start threads, all before the first one is waited for, and wait for them."""
    threads = list(threads)
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def in_a_thread(work: Callable[[], Any]) -> Any:
    """Run work() in a thread of its own, until the system has forgotten it; as if called here."""
    outcome: list[Any] = []
    error: list[BaseException] = []

    def run() -> None:
        try:
            outcome.append(work())
        except BaseException as raised:  # handed to the caller below
            error.append(raised)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    while Path(f"/proc/self/task/{thread.native_id}").exists():
        time.sleep(0.001)
    if error:
        raise error[0]
    return outcome[0]


@contextmanager
def running(work: Callable[..., Any], *arguments: Any) -> Iterator[threading.Thread]:
    """Run work(*arguments) in a thread beside a block, at whose end it is waited for.

    An error of the thread is raised then. A block that fails leaves its thread running: it may
    wait for what the block did not come to.
    """
    errors: list[BaseException] = []

    def run() -> None:
        try:
            work(*arguments)
        except BaseException as raised:  # raised by the block below
            errors.append(raised)

    thread = threading.Thread(target=run)
    thread.start()
    yield thread
    thread.join()
    if errors:
        raise errors[0]


def in_threads(work: Callable[..., Any], several: int | Iterable[Any]) -> None:
    """Run work() in a number of threads at once, or work(each) in one for each of several values.

    Raises the first error of a thread, once all threads have ended.
    """
    errors: list[BaseException] = []

    def run(*arguments: Any) -> None:
        try:
            work(*arguments)
        except BaseException as raised:  # the caller's thread raises it below
            errors.append(raised)

    calls = [()] * several if isinstance(several, int) else [(each,) for each in several]
    run_threads(threading.Thread(target=run, args=arguments) for arguments in calls)
    if errors:
        raise errors[0]


def with_a_context_stack_of_its_own(test: Callable[..., None]) -> Callable[..., None]:
    """Let a test run in a thread: a pop that is made to fail leaves its context on the stack."""

    @functools.wraps(test)
    def run(*arguments: Any, **named: Any) -> None:
        in_a_thread(lambda: test(*arguments, **named))

    return run
