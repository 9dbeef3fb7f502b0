"""Every exception that gpumem raises, in one place.

``GpumemError`` is the root. Each class has a second base that callers can catch without
importing gpumem (``MemoryError``, ``ValueError``, ...), and has its numbers as attributes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Self

if TYPE_CHECKING:
    from gpumem.stats import BudgetLevel, OutOfMemoryReport

__all__ = [
    "AlignmentError",
    "AsleepError",
    "BadHandleError",
    "BudgetExceededError",
    "ClosedError",
    "ConcurrentRunError",
    "ConfigError",
    "ConfigWarning",
    "CopyOutError",
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
    "KeeperError",
    "MissingFrameworkError",
    "ModelGraphError",
    "ModelSizeError",
    "NoAllocatorError",
    "NodeError",
    "NonMonotonicError",
    "NotPublishedError",
    "NotSealedError",
    "OutOfBoundsError",
    "OutOfMemoryError",
    "PeerAccessError",
    "PoolFallbackWarning",
    "ReservationError",
    "SleepFileError",
    "SnapshotError",
    "SourceError",
    "TimelineLostError",
    "TimelineTimeout",
    "TraceError",
    "UnsupportedHandleTypeError",
]
__dir__ = __all__.copy


class GpumemError(Exception):
    """Root of every exception that gpumem raises."""

    @classmethod
    def _of_args(cls, *args: object) -> Self:
        """Make an error without `__init__`, which has other parameters: for unpickling."""
        return cls.__new__(cls, *args)


# MemoryError first: `__new__` is then its own, which Dask's unpickling of exceptions calls.
_refusal_listeners: list[Callable[[OutOfMemoryError], None]] = []


def on_refusal(function: Callable[[OutOfMemoryError], None]) -> None:
    """Register a function that is called with each OutOfMemoryError before it is raised."""
    _refusal_listeners.append(function)


def tell_refused(error: OutOfMemoryError) -> None:
    """Call the functions that `on_refusal` registered."""
    for function in _refusal_listeners:
        function(error)


class OutOfMemoryError(MemoryError, GpumemError):
    """An allocation failed; the allocator's state is unchanged.

    Attributes
    ----------
    report : OutOfMemoryReport or None
        All numbers of that moment: bytes by user, cached, pending and movable bytes, bytes of
        other programs on the device. Its `as_dict` can be written as JSON. An error without a
        report has None, and 0 for each number.
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
        if report is not None and not hasattr(report, "requested_nbytes"):
            raise TypeError(f"invalid report = {report!r}: expected an OutOfMemoryReport or None")
        super().__init__(message)
        self.report = report
        self.requested_nbytes = report.requested_nbytes if report else 0
        self.allocated_nbytes = report.allocated_nbytes if report else 0
        self.in_use = report.in_use if report else 0
        self.reserved = report.reserved if report else 0
        self.limit = report.limit if report else 0
        self.stream = report.stream if report else 0
        self.device = report.memory if report else ""
        self.largest_free = (report.largest_free or 0) if report else 0
        self.advice = "; or ".join(report.remedies) if report else ""
        if type(self) is OutOfMemoryError:  # others have more attributes to set first
            tell_refused(self)

    @classmethod
    def of(cls, report: OutOfMemoryReport) -> Self:
        """Make the error that a report describes, with its text as the message."""
        if not hasattr(report, "requested_nbytes"):
            raise TypeError(f"invalid report = {report!r}: expected an OutOfMemoryReport")
        return cls(report.text(), report)


class BudgetExceededError(OutOfMemoryError):
    """A request exceeds a hard limit; nothing is charged for it.

    Attributes
    ----------
    budget : str
        Name of the budget that refused.
    limit : int
        Its limit in bytes.
    missing : int
        Bytes that must be freed in it before the request fits.
    path : tuple of BudgetLevel
        Every limit that applies, from the charged budget up to the root.
    holders : tuple of (str, int)
        Names and bytes of the users of the budget that refused, the largest first: resources,
        budgets under it, and its own reservations.
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
        tell_refused(self)


class ReservationError(GpumemError, ValueError):
    """An invalid step of a reservation: too late, or too early."""


class NodeError(GpumemError, RuntimeError):
    """The shared budget of a node cannot be used: its page is another user's, damaged, or full."""


class SourceError(GpumemError, RuntimeError):
    """A memory source of an arena, or an external allocator, failed or returned invalid memory.

    An exception of the source is its ``__cause__``.
    """


class ConfigError(GpumemError, ValueError):
    """A setting is unknown, malformed, out of range or contradicts another one."""


class ConfigWarning(UserWarning):
    """Valid settings have no effect on this object."""


class ModelGraphError(GpumemError, ValueError):
    """A model, graph or placement is malformed or contradicts itself."""


class ModelSizeError(ModelGraphError, OverflowError):
    """The values of a graph have more bytes than 64 bits hold; the message names the largest."""


class ConcurrentRunError(GpumemError, RuntimeError):
    """A run began while another one was active, and both would use one stream or memory."""


class TraceError(GpumemError, ValueError):
    """A trace cannot be read, or contradicts itself.

    The message is one line. For an invalid event it names the event's index, the value and the
    accepted values.
    """


class EventFileError(GpumemError, ValueError):
    """A file has no events, or an unsupported version; the message is one line."""


class SnapshotError(GpumemError, ValueError):
    """A file has no snapshot, or an unsupported version; the message is one line."""


class NotPublishedError(GpumemError, LookupError):
    """The counters of a process cannot be read: it publishes none, or is another user's."""


class _ReportedError(GpumemError):
    """An error with the reports of a debug heap; `reports` is () without one."""

    def __init__(self, message: str, reports: Iterable[object] = ()) -> None:
        super().__init__(message)
        self.reports = tuple(reports)


class InvalidFreeError(_ReportedError, ValueError):
    """A free of an address that is not a block of this allocator, or is already free.

    Attributes
    ----------
    reports : tuple of HeapReport
        Reports of a debug heap about it; empty without one.
    """


class HeapCorruptionError(_ReportedError, RuntimeError):
    """Memory of a debugged arena was written outside of its live blocks.

    Attributes
    ----------
    reports : tuple of HeapReport
        All reports since the last error, the oldest first.
    """


class HeapWarning(UserWarning):
    """A report of a debug heap with `on_error` "warn", or where no caller can get an error."""


class InUseError(GpumemError, BufferError):
    """An object cannot be closed, because it is still in use."""


class ClosedError(GpumemError, ValueError):
    """An object was used after it was closed, or it belongs to the parent process."""


class AsleepError(GpumemError, ValueError):
    """An arena's memory was used between `Arena.sleep` and `Arena.wake`."""


class SleepFileError(GpumemError, OSError):
    """The file of a sleep cannot be written or read, or another process has changed it.

    `filename` is its path, `errno` the system's number: ENODATA if the file was shortened, EBADMSG
    if it was changed. After a failed `wake` the memory stays asleep, and `wake` can be tried again.
    """


class CopyOutError(GpumemError, OSError):
    """The file of `Arena.copy_out` cannot be written; an earlier file of that path is as it was.

    `filename` is its path, `errno` the system's number: ENOSPC if the disk is full.
    """


class NoAllocatorError(GpumemError, LookupError):
    """An environment has no allocator for a memory."""


class DriverError(GpumemError, RuntimeError):
    """A driver call failed.

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


class PeerAccessError(GpumemError, RuntimeError):
    """A device cannot access another one's memory: the driver has no way between the two."""


# ---- other libraries -----------------------------------------------------------------------------


class IntegrationError(GpumemError, RuntimeError):
    """A framework cannot be switched to gpumem's memory or back now; the message has the reason."""


class MissingFrameworkError(IntegrationError, ImportError):
    """A framework is not installed, or cannot be imported; `name` is the module."""

    def __init__(self, message: str, *, name: str | None = None) -> None:
        ImportError.__init__(self, message, name=name)


# ---- memory and timelines from outside -----------------------------------------------------------


class UnsupportedHandleTypeError(GpumemError, NotImplementedError):
    """The device cannot import a kind of handle; the message is its capability's reason."""


class InvalidDescriptorError(GpumemError, ValueError):
    """A description of memory, of a tensor in it or of a timeline is invalid."""


class OutOfBoundsError(InvalidDescriptorError):
    """A tensor would extend past its memory.

    Attributes
    ----------
    size : int
        Bytes of the whole allocation.
    memory_offset : int
        Bytes before the memory begins in the allocation.
    tensor_offset : int
        Bytes before the tensor begins in the memory.
    extent : int
        Bytes from the tensor's first byte to its last, strides included.
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
    """An address, offset or stride is not a multiple of the required alignment."""


class BadHandleError(GpumemError, OSError):
    """A file descriptor is not open, is of another kind, or has less memory than described.

    Its `errno` is the system's, if there is one.
    """


class KeeperError(GpumemError, OSError):
    """No keeper of sealed sets runs, it does not answer in time, or it refuses a request."""


class NotSealedError(GpumemError, LookupError):
    """The keeper holds no sealed set of a name, or a set has no tensor of a name."""


class DeviceMismatchError(GpumemError, ValueError):
    """Memory, a timeline or a stream of one device was passed to another one."""


class NonMonotonicError(GpumemError, ValueError):
    """A timeline's value is not above every known signalled value, or out of range.

    Attributes
    ----------
    value : int
        The refused value.
    known : int
        The highest value signalled or enqueued before.
    """

    def __init__(self, message: str, *, value: int = 0, known: int = 0) -> None:
        super().__init__(message)
        self.value = value
        self.known = known


class TimelineTimeout(GpumemError, TimeoutError):
    """A wait of the CPU for a timeline's value took longer than its timeout."""


class TimelineLostError(GpumemError, RuntimeError):
    """A timeline will not be signalled: its device was lost, it was poisoned, or a process died."""


class PoolFallbackWarning(UserWarning):
    """The driver has no memory pools for the device; an arena is used instead."""
