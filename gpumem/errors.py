"""Every exception that gpumem raises, in one place.

``GpumemError`` is the root. Each class has a second base that callers can catch without
knowing gpumem (``MemoryError``, ``ValueError``, ...), and carries its numbers as attributes,
so that a program can act on them and a person can read them.
"""

from __future__ import annotations

__all__ = [
    "ClosedError",
    "ConcurrentRunError",
    "ConfigError",
    "ConfigWarning",
    "DriverError",
    "GpumemError",
    "InUseError",
    "InvalidFreeError",
    "NoAllocatorError",
    "OutOfMemoryError",
    "PoolFallbackWarning",
    "SourceError",
    "SuspendedError",
]


class GpumemError(Exception):
    """Root of every exception that gpumem raises."""


class OutOfMemoryError(GpumemError, MemoryError):
    """An allocation that could not be served; the allocator is as it was before the call.

    Attributes
    ----------
    asked : int
        Bytes that the caller asked for.
    rounded : int
        Bytes that a block for it would take.
    in_use : int
        Bytes handed out at that moment, padding included.
    reserved : int
        Bytes held from the device at that moment.
    limit : int
        The allocator's limit in bytes; 0 where it has none.
    largest_free : int
        Bytes of the largest free block.
    device : str
        The memory asked, such as ``"cuda:0"``.
    stream : int
        Handle of the stream the block was asked for.
    advice : str
        The remedy that fits these numbers.
    """

    def __init__(
        self,
        message: str,
        *,
        asked: int = 0,
        rounded: int = 0,
        in_use: int = 0,
        reserved: int = 0,
        limit: int = 0,
        largest_free: int = 0,
        device: str = "",
        stream: int = 0,
        advice: str = "",
    ) -> None:
        super().__init__(message)
        self.asked = asked
        self.rounded = rounded
        self.in_use = in_use
        self.reserved = reserved
        self.limit = limit
        self.largest_free = largest_free
        self.device = device
        self.stream = stream
        self.advice = advice

    def __reduce__(self) -> tuple[object, ...]:
        return (type(self), self.args, self.__dict__)


class SourceError(GpumemError, RuntimeError):
    """A memory source of an arena that failed, or gave what cannot be used.

    What the source raised, if it did, is its ``__cause__``.
    """


class ConfigError(GpumemError, ValueError):
    """A setting that is unknown, malformed, out of range or contradicted by another."""


class ConfigWarning(UserWarning):
    """Settings that are well-formed and have no effect on what is made here."""


class ConcurrentRunError(GpumemError, RuntimeError):
    """A run of a session while another is going on and both would use one stream."""


class InvalidFreeError(GpumemError, ValueError):
    """A free of something that this allocator did not hand out, or already took back."""


class InUseError(GpumemError, BufferError):
    """A close of something that others still use."""


class ClosedError(GpumemError, ValueError):
    """A use of something that was closed, or that belongs to the parent process."""


class SuspendedError(GpumemError, ValueError):
    """A use of an arena's memory between `Arena.suspend` and `Arena.resume`."""


class NoAllocatorError(GpumemError, LookupError):
    """A memory for which an environment has no allocator."""


class DriverError(GpumemError, RuntimeError):
    """A driver call that failed.

    Attributes
    ----------
    call : str
        The driver function, such as ``"cuMemAlloc"``.
    code : int
        The ``CUresult`` it returned.
    name : str
        The name of that code, such as ``"CUDA_ERROR_INVALID_VALUE"``.
    """

    def __init__(self, call: str, code: int, name: str, detail: str = "") -> None:
        super().__init__(f"{call} failed with {name} ({code})" + (f": {detail}" if detail else ""))
        self.call = call
        self.code = code
        self.name = name

    def __reduce__(self) -> tuple[object, ...]:
        return (_rebuild_driver_error, (self.call, self.code, self.name, self.args[0]))


def _rebuild_driver_error(call: str, code: int, name: str, message: str) -> DriverError:
    error = DriverError(call, code, name)
    error.args = (message,)
    return error


class PoolFallbackWarning(UserWarning):
    """A driver's pool was asked for where there is none, and an arena serves instead."""
