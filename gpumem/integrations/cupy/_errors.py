"""The error of refused memory for CuPy. This module imports CuPy."""

from __future__ import annotations

from typing import Any

from cupy.cuda import memory, runtime

from gpumem import errors

_MEMORY_ALLOCATION = 2  # cudaErrorMemoryAllocation


class CupyOutOfMemoryError(
    runtime.CUDARuntimeError,  # type: ignore[misc]
    memory.OutOfMemoryError,  # type: ignore[misc]
    errors.OutOfMemoryError,
):
    """Memory for CuPy is out in gpumem; callers and pools of CuPy, and of gpumem, catch it."""

    def __init__(self, error: errors.OutOfMemoryError) -> None:
        # Each of the bases would write a message of its own.
        Exception.__init__(self, str(error))
        self.__dict__.update(error.__dict__)
        self.status = _MEMORY_ALLOCATION
        self._size, self._total, self._limit = error.requested_nbytes, error.reserved, error.limit

    def __reduce__(self) -> tuple[Any, ...]:
        return _from_pickle, (str(self), self.__dict__)


def _from_pickle(message: str, numbers: dict[str, Any]) -> CupyOutOfMemoryError:
    plain = errors.OutOfMemoryError(message)
    plain.__dict__.update(numbers)
    return CupyOutOfMemoryError(plain)
