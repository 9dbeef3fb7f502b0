"""Labels of allocations, set by `gpumem.observe.tag`, and phases of the program.

A tag of an arena (`Arena.tag`) decides which pages sleep together; it labels its allocations too.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial

from gpumem._events import recorder
from gpumem._support.contexts import ContextBlock, Opened, tags


def tag(name: str) -> AbstractContextManager[None]:
    """Label the allocations of this context inside a block, in events and snapshots.

    Of nested labels the innermost applies: the last one that was entered and is not left yet.
    Blocks keep their labels only while something is recorded. A label does not decide what sleeps:
    `Arena.tag` does, and sets the label of its name, too.

    Parameters
    ----------
    name : str
        The label, as events and reports show it. A process tells 65,534 names apart; all later
        ones share the label ``"further tags"``.

    Returns
    -------
    context manager
        Also a decorator of functions. Each use needs another one.

    Raises
    ------
    TypeError, ValueError
        `name` is not a str, or is empty.
    GpumemError
        On entering: this one was entered before. On leaving: another thread or another context has
        entered, and keeps the label.

    Notes
    -----
    As every context variable, a label belongs to the context: an asynchronous task has its own, and
    begins with those that were open where it was made; a thread begins without. The block of a
    generator stays open in its caller after a ``yield``. Allocations of a thread that Python does
    not know have no label.

    Examples
    --------
    >>> import gpumem.observe
    >>> with gpumem.observe.tag("optimizer"):
    ...     pass
    """
    opened = Opened(label=label_of(name))
    return ContextBlock(tags, opened, f"tag {name!r}", partial(tag, name))


def phase(name: str) -> AbstractContextManager[None]:
    """Record that the program is in a phase inside a block, such as "forward" or "load".

    Recordings hold when a phase began and ended, and reports show the peak and the growth of each.
    Phases may lie in each other. Without a recording a phase costs about a microsecond.

    Parameters
    ----------
    name : str
        One of the labels that `tag` counts. "forward", "backward" and "optimizer" decide which
        blocks are activations, gradients and states of optimizers.

    Returns
    -------
    context manager
        Also a decorator of functions. Each use needs another one.

    Raises
    ------
    TypeError, ValueError
        `name` is not a str, or is empty.

    Notes
    -----
    A phase belongs to the program, not to the thread or context that enters it: blocks that other
    threads allocate meanwhile, such as autograd's, are allocated in it.

    Examples
    --------
    >>> import gpumem, gpumem.observe
    >>> arena = gpumem.Arena("host")
    >>> with gpumem.observe.record(arena) as recording:
    ...     with gpumem.observe.phase("load"):
    ...         buffer = arena.allocate(1000)
    >>> recording.trace().details.phases
    (Phase(name='load', begin=0, end=1, depth=0),)
    """
    return _phase(label_of(name, "phase"))


@contextmanager
def _phase(label: int) -> Iterator[None]:
    number = recorder.begin_phase(label)
    try:
        yield
    finally:
        recorder.end_phase(label, number)


def range_name(name: str) -> str:
    """Name a range of ``record_function`` without the part behind "#", which varies."""
    return name.partition("#")[0] or name


def label_of(name: str, what: str = "tag") -> int:
    """Return the number of a label's text."""
    if not isinstance(name, str):
        raise TypeError(f"a {what} is a str, not {type(name).__name__}")
    if not name:
        raise ValueError(f"a {what} has at least one character")
    return recorder.number_of_label(name)
