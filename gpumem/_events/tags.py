"""Labels of allocations: the tag that a thread's events and blocks have."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator

from gpumem._events import recorder
from gpumem.errors import GpumemError

__all__ = ["tag"]


class _OpenTags(threading.local):
    """The numbers of the tags that a thread has entered, in order, each by its own context."""

    def __init__(self) -> None:
        self.numbers: dict[object, int] = {}


_open_tags = _OpenTags()


@contextlib.contextmanager
def tag(name: str) -> Iterator[None]:
    """Tag the allocations of the calling thread inside a block, in events and snapshots.

    Tags can be nested; the innermost counts, which is the last one that was entered and is not left
    yet. Blocks keep their tags only while something is recorded.

    Parameters
    ----------
    name : str
        Name used in error messages and reports; a process has up to 65535 different ones.

    Raises
    ------
    TypeError, ValueError
        `name` is not a str, is empty, or there are too many names.
    GpumemError
        On leaving: another thread has entered, and keeps the tag.

    Notes
    -----
    A tag belongs to the thread, not to a task: if code awaits inside the block, the other tasks of
    the thread have the tag meanwhile.

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
    _open_tags.numbers[context] = number = recorder.number_of_tag(name)
    recorder.set_tag(number)
    try:
        yield
    finally:
        numbers = _open_tags.numbers
        if numbers.pop(context, None) is None:
            raise GpumemError(f"tag {name!r} was entered by another thread, which keeps it")
        # Generators may leave tags in another order than the reverse of that of entering.
        recorder.set_tag(next(reversed(numbers.values()), 0))
