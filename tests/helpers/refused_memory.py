"""Allocations of Python that are refused, one in each call of an action."""

from __future__ import annotations

import _testcapi
from collections.abc import Callable, Iterator


def refused_allocations(
    action: Callable[[], object], errors: tuple[type[Exception], ...] = (MemoryError,)
) -> Iterator[int]:
    """Call an action, with its first allocation refused, its second, ...; yield after each call."""
    for number in range(2000):
        _testcapi.set_nomemory(number, number + 1)
        try:
            action()
        except errors:
            pass
        else:
            return
        finally:
            _testcapi.remove_mem_hooks()
        yield number
