"""Who owns a descriptor: duplicates for the driver, and the caller's own closed last.

A driver takes a descriptor over when an import succeeds, so it is never given the caller's; which
drivers take it over on failure, too, need not be known.
"""

from __future__ import annotations

import errno
import fcntl
import os
from typing import Any

from gpumem._handle import Handle
from gpumem.errors import BadHandleError, InvalidDescriptorError

__all__ = ["consume", "duplicate", "require_consumable"]


def duplicate(handle: Any) -> Handle:
    """Return a descriptor of our own for what `handle` is one of; close-on-exec.

    Raises
    ------
    BadHandleError
        It is not open, or no more can be.
    """
    number = handle if isinstance(handle, int) else handle.fileno()
    if not 0 <= number < 1 << 31:
        raise BadHandleError(errno.EBADF, f"descriptor {number} is not from 0 to 2**31 - 1")
    try:
        return Handle(fcntl.fcntl(number, fcntl.F_DUPFD_CLOEXEC, 0))
    except OSError as error:
        raise BadHandleError(error.errno, f"descriptor {number}: {error.strerror}") from None


def require_consumable(handle: Any, consume: bool, *, is_address: bool = False) -> None:
    """Raise InvalidDescriptorError for a handle that cannot be taken over: a name, an address."""
    if not isinstance(consume, bool):
        raise TypeError(f"consume {consume!r} is not True or False")
    if consume and (is_address or not _is_descriptor(handle)):
        raise InvalidDescriptorError(
            f"consume = True is not accepted with {handle!r}: only descriptors are taken over"
        )


def consume(handle: Any) -> None:
    """Close what the caller gave, after everything succeeded."""
    if isinstance(handle, int):
        os.close(handle)
    else:
        handle.close()


def _is_descriptor(handle: Any) -> bool:
    return isinstance(handle, int) or (hasattr(handle, "fileno") and hasattr(handle, "close"))


def bad_file(what: str, code: int = errno.EINVAL) -> BadHandleError:
    """Make the error for a descriptor that is open and will not do."""
    return BadHandleError(code, what)
