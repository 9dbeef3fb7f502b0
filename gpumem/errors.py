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

    @classmethod
    def _of_args(cls, *args: object) -> Self:
        """Make an error without `__init__`: for unpickling, where it takes more than `args`."""
        return Exception.__new__(cls, *args)


class OutOfMemoryError(GpumemError, MemoryError):
    """An allocation that could not be served; the allocator is as it was before the call.

    Attributes
    ----------
    report : OutOfMemoryReport
        All numbers of that moment, for programs: who holds what, what is cached, pending or
        movable, what others hold on the device. Its `as_dict` can be written as JSON.
    requested_nbytes : int
        Requested bytes.
    allocated_nbytes : int
        Bytes of a block for them, padding included.
    in_use : int
        Bytes in use at that moment, padding included.
    reserved : int
        Bytes reserved from the device at that moment.
    limit : int
        The tightest limit in bytes; 0 if there is none.
    stream : int
        Handle of the stream of the request.
    device : str
        The memory of the request, such as ``"cuda:0"``.
    largest_free : int
        Bytes of the largest free block; 0 if only the driver has that number.
    advice : str
        The remedies that fit the numbers, the better first.
    """

    def __init__(self, message: str = "", report: OutOfMemoryReport | None = None) -> None:
        super().__init__(message)
        if report is None:
            from gpumem.stats import OutOfMemoryReport

            report = OutOfMemoryReport("", 0, 0)
        self.report = report
        self.requested_nbytes = report.requested_nbytes
        self.allocated_nbytes = report.allocated_nbytes
        self.in_use = report.in_use
        self.reserved = report.reserved
        self.limit = report.limit
        self.stream = report.stream
        self.device = report.memory
        self.largest_free = report.largest_free or 0
        self.advice = "; or ".join(report.remedies)

    @classmethod
    def of(cls, report: OutOfMemoryReport) -> Self:
        """Make the error that a report describes, with its text as the message."""
        return cls(report.text(), report)


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
        self.limit = limit  # the tightest limit of the report may be another's
        self.missing = missing
        self.path = path
        self.holders = holders


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
        return (self._of_args, self.args, self.__dict__)


# ---- other libraries -----------------------------------------------------------------------------


class IntegrationError(GpumemError, RuntimeError):
    """A framework that cannot be switched to gpumem's memory now, or not back; it says why."""


class MissingFrameworkError(IntegrationError, ImportError):
    """A framework that is not installed, or cannot be imported; its `name` is the module."""

    def __init__(self, message: str, *, name: str | None = None) -> None:
        ImportError.__init__(self, message, name=name)


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
        return (self._of_args, self.args, self.__dict__)


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


class TimelineTimeout(GpumemError, TimeoutError):
    """A wait of the CPU for a timeline's value that took longer than it was allowed to."""


class TimelineLostError(GpumemError, RuntimeError):
    """A timeline that will not go on: its device was removed, its page poisoned, a peer died."""


class PoolFallbackWarning(UserWarning):
    """A driver's pool was asked for where there is none, and an arena serves instead."""
