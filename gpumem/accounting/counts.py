"""Amounts of a resource, added and compared without overflow."""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

from gpumem._support.sizes import whole_bytes
from gpumem._support.texts import shown

MAX_BYTES = (1 << 64) - 1


@final
@dataclass(frozen=True, slots=True, init=False, eq=False, repr=False)
class ResourceCount:
    """An amount of a device's memory, or none: nothing is counted.

    Immutable and hashable. Equal to another of the same kind and bytes, and to the plain number of
    its bytes. Made by `none` and `from_bytes`.

    Examples
    --------
    >>> from gpumem.accounting import ResourceCount
    >>> a = ResourceCount.from_bytes(600)
    >>> str(a + ResourceCount.from_bytes(400)), a.exceeds(a), a + ResourceCount.none() == a
    ('1000', False, True)
    """

    _bytes: int | None

    def __init__(self) -> None:
        raise TypeError("ResourceCount is made by ResourceCount.none() or .from_bytes(n)")

    @classmethod
    def _of(cls, amount: int | None) -> ResourceCount:
        made = object.__new__(cls)
        object.__setattr__(made, "_bytes", amount)
        return made

    @classmethod
    def none(cls) -> ResourceCount:
        """Return the count of an uncounted resource: it adds as zero, and nothing exceeds it."""
        return cls._of(None)

    @classmethod
    def from_bytes(cls, nbytes: int | str) -> ResourceCount:
        """Make a count of bytes.

        Parameters
        ----------
        nbytes : int or str
            0 to 2**64 - 1, or a size such as ``"512MiB"``.

        Raises
        ------
        TypeError
            Neither an integer nor a size.
        ValueError
            Negative.
        OverflowError
            Above 2**64 - 1.
        """
        amount = nbytes if type(nbytes) is int else whole_bytes("nbytes", nbytes)
        if amount < 0:
            raise ValueError(f"invalid nbytes = {amount}: expected 0 to 2**64 - 1")
        return cls._of(fitting(amount))

    @property
    def is_none(self) -> bool:
        """Whether nothing is counted."""
        return self._bytes is None

    @property
    def total_bytes(self) -> int:
        """Bytes; 0 where nothing is counted."""
        return self._bytes or 0

    def exceeds(self, other: ResourceCount | int) -> bool:
        """Return whether this is more than `other`; equal amounts do not exceed each other."""
        limit = as_count(other)
        if self._bytes is None or limit._bytes is None:
            return False
        return self._bytes > limit._bytes

    def __add__(self, other: ResourceCount) -> ResourceCount:
        if not isinstance(other, ResourceCount):
            return NotImplemented
        if self._bytes is None:
            return other
        if other._bytes is None:
            return self
        return ResourceCount._of(fitting(self._bytes + other._bytes))

    def __int__(self) -> int:
        return self.total_bytes

    def __eq__(self, other: object) -> bool:
        if isinstance(other, ResourceCount):
            return self._bytes == other._bytes
        if isinstance(other, int) and not isinstance(other, bool):
            return self._bytes == other
        return NotImplemented

    def __hash__(self) -> int:
        return hash(self._bytes)

    def __str__(self) -> str:
        return str(self.total_bytes)

    def __repr__(self) -> str:
        return f"ResourceCount.{'none()' if self.is_none else f'from_bytes({self._bytes})'}"


def fitting(amount: int) -> int:
    """Return `amount` if 64 bits hold it; OverflowError otherwise."""
    if amount > MAX_BYTES:
        raise OverflowError(f"{shown(amount)} bytes are more than 2**64 - 1")
    return amount


def as_count(amount: ResourceCount | int | str) -> ResourceCount:
    """Return a count as it is, and a number of bytes as a count."""
    return amount if isinstance(amount, ResourceCount) else ResourceCount.from_bytes(amount)
