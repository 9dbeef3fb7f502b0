"""Every exception that gpumem raises, in one place.

``GpumemError`` is the root. Each class has a second base that callers can catch without
knowing gpumem (``MemoryError``, ``ValueError``, ...), and carries its numbers as attributes,
so that a program can act on them and a person can read them.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Self

if TYPE_CHECKING:
    from gpumem.stats import BudgetLevel, OutOfMemoryReport

__all__ = [
    "AlignmentError",
    "BadHandleError",
    "BudgetExceededError",
    "ClosedError",
    "ConcurrentRunError",
    "ConfigError",
    "ConfigWarning",
    "DeviceMismatchError",
    "DriverError",
    "EventFileError",
    "GpumemError",
    "HeapCorruptionError",
    "HeapWarning",
    "InUseError",
    "IntegrationError",
    "InvalidDescriptorError",
    "InvalidFreeError",
    "MissingFrameworkError",
    "ModelGraphError",
    "NoAllocatorError",
    "NonMonotonicError",
    "NotPublishedError",
    "OutOfBoundsError",
    "OutOfMemoryError",
    "PoolFallbackWarning",
    "ReservationError",
    "SnapshotError",
    "SourceError",
    "SuspendedError",
    "TimelineLostError",
    "TimelineTimeout",
    "TraceError",
    "UnsupportedHandleTypeError",
]


class GpumemError(Exception):
    """Root of every exception that gpumem raises."""


class OutOfMemoryError(GpumemError, MemoryError):
    """An allocation that could not be served; the allocator is as it was before the call.

    Attributes
    ----------
    report : OutOfMemoryReport
        All numbers of that moment, for programs: who holds what, what is cached, pending or
        movable, what others hold on the device. Its `as_dict` can be written as JSON.
    """

    def __init__(self, message: str = "", report: OutOfMemoryReport | None = None) -> None:
        super().__init__(message)
        if report is None:
            from gpumem.stats import OutOfMemoryReport

            report = OutOfMemoryReport("", 0, 0)
        self.report = report

    @classmethod
    def of(cls, report: OutOfMemoryReport) -> Self:
        """Make the error that a report describes, with its text as the message."""
        return cls(report.text(), report)

    @property
    def requested_nbytes(self) -> int:
        """Bytes that the caller asked for."""
        return self.report.requested_nbytes

    @property
    def allocated_nbytes(self) -> int:
        """Bytes of a block for it, padding included."""
        return self.report.allocated_nbytes

    @property
    def in_use(self) -> int:
        """Bytes handed out at that moment, padding included."""
        return self.report.in_use

    @property
    def reserved(self) -> int:
        """Bytes held from the device at that moment."""
        return self.report.reserved

    @property
    def limit(self) -> int:
        """The tightest limit in bytes; 0 where there is none."""
        return self.report.limit

    @property
    def stream(self) -> int:
        """Handle of the stream the block was asked for."""
        return self.report.stream

    @property
    def device(self) -> str:
        """The memory asked, such as ``"cuda:0"``."""
        return self.report.memory

    @property
    def largest_free(self) -> int:
        """Bytes of the largest free block; 0 where only the driver knows."""
        return self.report.largest_free or 0

    @property
    def advice(self) -> str:
        """The remedies that fit the numbers, the better first."""
        return "; or ".join(self.report.remedies)

    def __reduce__(self) -> tuple[object, ...]:
        return (type(self), self.args, self.__dict__)


class BudgetExceededError(OutOfMemoryError):
    """A request that a hard limit has no room for; nothing is charged for it.

    Attributes
    ----------
    budget : str
        Name of the budget that refused.
    limit : int
        Its limit in bytes.
    missing : int
        Bytes that have to go back to it before the request fits.
    path : tuple of BudgetLevel
        Every limit that counts, from the budget that was asked up to the root.
    holders : tuple of (str, int)
        Who holds how many bytes of the budget that refused, the most first: resources, budgets
        under it, and what its own reservations hold.
    """

    def __init__(
        self,
        message: str = "",
        report: OutOfMemoryReport | None = None,
        *,
        budget: str = "",
        limit: int = 0,
        missing: int = 0,
        path: tuple[BudgetLevel, ...] = (),
        holders: tuple[tuple[str, int], ...] = (),
    ) -> None:
        super().__init__(message, report)
        self.budget = budget
        self._limit = limit
        self.missing = missing
        self.path = path
        self.holders = holders

    @property
    def limit(self) -> int:
        """The limit of the budget that refused; the tightest of the report may be another's."""
        return self._limit


class ReservationError(GpumemError, ValueError):
    """A step that a reservation cannot take any more, or not yet."""


class SourceError(GpumemError, RuntimeError):
    """A memory source of an arena that failed, or gave what cannot be used.

    What the source raised, if it did, is its ``__cause__``.
    """


class ConfigError(GpumemError, ValueError):
    """A setting that is unknown, malformed, out of range or contradicted by another."""


class ConfigWarning(UserWarning):
    """Settings that are well-formed and have no effect on what is made here."""


class ModelGraphError(GpumemError, ValueError):
    """A model or graph that contradicts itself, or a placement that its graph cannot have."""


class ConcurrentRunError(GpumemError, RuntimeError):
    """A run of a session while another is going on and both would use one stream."""


class TraceError(GpumemError, ValueError):
    """A trace that cannot be read, or that contradicts itself.

    The message is one line. For a bad event it names the event's index, the value found and
    what is accepted.
    """


class EventFileError(GpumemError, ValueError):
    """A file without events, or of a version that cannot be read; the message is one line."""


class SnapshotError(GpumemError, ValueError):
    """A file without a snapshot, or of a version that cannot be read; the message is one line."""


class NotPublishedError(GpumemError, LookupError):
    """A process whose counters cannot be read: it publishes none, or is another user's."""


class _ReportedError(GpumemError):
    """What a debug heap found; `reports` is () where none says more."""

    def __init__(self, message: str, reports: Iterable[object] = ()) -> None:
        super().__init__(message)
        self.reports = tuple(reports)

    def __reduce__(self) -> tuple[object, ...]:
        return (type(self), (self.args[0], self.reports))


class InvalidFreeError(_ReportedError, ValueError):
    """A free of something that this allocator did not hand out, or already took back.

    Attributes
    ----------
    reports : tuple of HeapReport
        What a debug heap knows of it; empty without one.
    """


class HeapCorruptionError(_ReportedError, RuntimeError):
    """Memory of a debugged arena that was written where nobody may write it.

    Attributes
    ----------
    reports : tuple of HeapReport
        All that was found since the last error, the first one first.
    """


class HeapWarning(UserWarning):
    """What a debug heap found, where its `on_error` is "warn", or where nobody can be raised at."""


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


# ---- other libraries -----------------------------------------------------------------------------


class IntegrationError(GpumemError, RuntimeError):
    """A framework that cannot be switched to gpumem's memory now, or not back; it says why."""


class MissingFrameworkError(IntegrationError, ImportError):
    """A framework that is not installed, or cannot be imported; its `name` is the module."""

    def __init__(self, message: str, *, name: str | None = None) -> None:
        ImportError.__init__(self, message, name=name)

    def __reduce__(self) -> tuple[object, ...]:
        return (_rebuild_missing_framework, (self.args[0], self.name))


def _rebuild_missing_framework(message: str, name: str | None) -> MissingFrameworkError:
    return MissingFrameworkError(message, name=name)


# ---- memory and timelines from outside -----------------------------------------------------------


class UnsupportedHandleTypeError(GpumemError, NotImplementedError):
    """A kind of handle that the device cannot import; the message is its capability's reason."""


class InvalidDescriptorError(GpumemError, ValueError):
    """A description of memory, of a tensor in it or of a timeline that cannot be."""


class OutOfBoundsError(InvalidDescriptorError):
    """A tensor that would reach beyond the memory it lies in.

    Attributes
    ----------
    size : int
        Bytes of the whole allocation.
    memory_offset : int
        Bytes before the memory begins in the allocation.
    tensor_offset : int
        Bytes before the tensor begins in the memory.
    extent : int
        Bytes from the tensor's first to behind its last, strides included.
    """

    def __init__(
        self, message: str, *, size: int, memory_offset: int, tensor_offset: int, extent: int
    ) -> None:
        super().__init__(message)
        self.size = size
        self.memory_offset = memory_offset
        self.tensor_offset = tensor_offset
        self.extent = extent

    def __reduce__(self) -> tuple[object, ...]:
        return (_rebuild_out_of_bounds, (self.args[0], self.__dict__))


def _rebuild_out_of_bounds(message: str, numbers: dict[str, int]) -> OutOfBoundsError:
    return OutOfBoundsError(message, **numbers)


class AlignmentError(InvalidDescriptorError):
    """An address, offset or stride that is no multiple of what it has to be."""


class BadHandleError(GpumemError, OSError):
    """A descriptor that is not open, is of another kind, or is smaller than what it is said to be.

    Its `errno` says which, where the system gave one.
    """


class DeviceMismatchError(GpumemError, ValueError):
    """Memory, a timeline or a stream of one device given to another."""


class NonMonotonicError(GpumemError, ValueError):
    """A timeline's value that is not above every value known to be signalled, or out of range.

    Attributes
    ----------
    value : int
        What was to be signalled.
    known : int
        The highest value signalled or enqueued before.
    """

    def __init__(self, message: str, *, value: int = 0, known: int = 0) -> None:
        super().__init__(message)
        self.value = value
        self.known = known

    def __reduce__(self) -> tuple[object, ...]:
        return (type(self), self.args, self.__dict__)


class TimelineTimeout(GpumemError, TimeoutError):
    """A wait of the CPU for a timeline's value that took longer than it was allowed to."""


class TimelineLostError(GpumemError, RuntimeError):
    """A timeline that will not go on: its device was removed, its page poisoned, a peer died."""


class PoolFallbackWarning(UserWarning):
    """A driver's pool was asked for where there is none, and an arena serves instead."""
