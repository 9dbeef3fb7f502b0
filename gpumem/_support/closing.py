"""The end of a ``with`` statement, and the garbage collector in one."""

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NoReturn, Self

from gpumem.errors import ClosedError


class Uncopied:
    """Base of objects that own something, which the end of a copy would release."""

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        raise TypeError(
            f"a {type(self).__name__} cannot be copied or pickled: what it owns has one owner"
        )


class Closable(Uncopied):
    """Base of objects that `close` ends; the end of a ``with`` block closes them, too."""

    _closed = False

    @property
    def closed(self) -> bool:
        """Whether `close` was called."""
        return self._closed

    def close(self) -> None:
        """End the object. Idempotent."""
        raise NotImplementedError

    def _require_open(self) -> None:
        if self._closed:
            raise ClosedError(f"this {type(self).__name__} is closed")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        close_after_body(self.close, error)


def close_after_body(close: Callable[[], object], error: BaseException | None) -> None:
    """Close what a ``with`` statement opened; an exception of its body comes first.

    The frames of an exception often keep buffers, so that closing fails as a consequence. A close
    that lacks host memory is tried once more.
    """
    try:
        try:
            close()
        except MemoryError:
            close()
    except Exception as consequence:
        if error is None:
            raise
        error.add_note(f"Afterwards: {consequence}")


@contextmanager
def collector_off() -> Iterator[None]:
    """Let no collection walk over the objects that are made here, none of which is garbage yet."""
    collecting = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collecting:
            gc.enable()
