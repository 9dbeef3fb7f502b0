"""LimitAdaptor: a limit for any resource."""

from __future__ import annotations

from gpumem._budget import Budget
from gpumem._buffer.resource import MemoryResource
from gpumem._support.arguments import refuse
from gpumem.adaptors._adaptor import Adaptor


class LimitAdaptor(Adaptor):
    """A resource with its own limit of the bytes that are allocated at a time.

    Requested bytes are counted before the upstream is called: the limit holds for all threads
    together, and a request that the upstream refuses is not counted. Above the limit ``allocate``
    raises OutOfMemoryError, BudgetExceededError if the limit is a budget's.

    Parameters
    ----------
    resource : MemoryResource
        The upstream.
    nbytes : int or Budget
        The limit, 0 to 2**63 - 1; or a budget, which other resources may share. It is charged for
        requested bytes, from before the upstream's call until the block is freed there.
    name : str, optional
        Name used in error messages and reports; the upstream's by default.

    Raises
    ------
    TypeError, ValueError
        `resource` is not a MemoryResource, or `nbytes` not such a number.

    Examples
    --------
    >>> import gpumem
    >>> small = gpumem.adaptors.limit(gpumem.Arena("host"), 1000)
    >>> buffer = small.allocate(600)
    >>> small.used, small.free
    (600, 400)
    """

    def __init__(
        self, resource: MemoryResource, nbytes: int | Budget, *, name: str | None = None
    ) -> None:
        if nbytes is None:
            refuse("nbytes", nbytes, "an integer or a Budget")
        super().__init__((resource,), name=name, limit=nbytes)

    @property
    def limit(self) -> int | None:
        """Requested bytes that may be allocated at a time; its budget's, if any."""
        return self._limit()[0]

    @property
    def used(self) -> int:
        """Requested bytes that are allocated now."""
        return self._counts()[0]

    @property
    def free(self) -> int | None:
        """Bytes that may still be allocated; None: any."""
        return self._limit()[1]


limit = LimitAdaptor
