"""Labels of allocations, in events and snapshots, set by `gpumem.observe.tag`.

A tag of an arena (`Arena.tag`) decides which pages sleep together; it labels its allocations too.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
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


def label_of(name: str) -> int:
    """Return the number of a label's text."""
    if not isinstance(name, str):
        raise TypeError(f"a tag is a str, not {type(name).__name__}")
    if not name:
        raise ValueError("a tag has at least one character")
    return recorder.number_of_label(name)
