"""Labels of allocations, in events and snapshots, set by `gpumem.observe.tag`.

A tag of an arena (`Arena.tag`) decides which pages sleep together; it labels its allocations too.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator

from gpumem._events import recorder
from gpumem.errors import GpumemError


class _OpenLabels(threading.local):
    """The numbers of the labels that a thread has entered, in order, each by its own context."""

    def __init__(self) -> None:
        self.numbers: dict[object, int] = {}


_open_labels = _OpenLabels()


@contextlib.contextmanager
def tag(name: str) -> Iterator[None]:
    """Label the allocations of the calling thread inside a block, in events and snapshots.

    Of nested labels the innermost applies: the last one that was entered and is not left yet.
    Blocks keep their labels only while something is recorded. A label does not decide what sleeps:
    `Arena.tag` does, and sets the label of its name, too.

    Parameters
    ----------
    name : str
        The label, as events and reports show it; a process has up to 65535 different ones.

    Raises
    ------
    TypeError, ValueError
        `name` is not a str, is empty, or there are too many names.
    GpumemError
        On leaving: another thread has entered, and keeps the label.

    Notes
    -----
    A label belongs to the thread, not to a task: if code awaits inside the block, the other tasks
    of the thread have the label until the block ends.

    Examples
    --------
    >>> import gpumem.observe
    >>> with gpumem.observe.tag("optimizer"):
    ...     pass
    """
    if not isinstance(name, str):
        raise TypeError(f"a tag is a str, not {type(name).__name__}")
    if not name:
        raise ValueError("a tag has at least one character")
    context = object()
    _open_labels.numbers[context] = number = recorder.number_of_label(name)
    recorder.set_label(number)
    try:
        yield
    finally:
        numbers = _open_labels.numbers
        if numbers.pop(context, None) is None:
            raise GpumemError(f"tag {name!r} was entered by another thread, which keeps it")
        # Generators may leave labels in another order than the reverse of that of entering.
        recorder.set_label(next(reversed(numbers.values()), 0))
