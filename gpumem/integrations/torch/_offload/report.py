"""What moved, by module."""

from __future__ import annotations

from dataclasses import dataclass, field, fields

from gpumem._support.sizes import format_size


@dataclass
class Moves:
    """Bytes of storages that a module's operations have saved.

    Attributes
    ----------
    moved : int
        Bytes copied to the host.
    brought : int
        Bytes of them brought back; the others had not left the GPU yet, or were not needed.
    hidden, waited : int
        Bytes of those that were back before the GPU needed them, and for which it waited.
    refused : int
        Bytes that stayed on the GPU because the host had no pinned memory left.
    """

    moved: int = 0
    brought: int = 0
    hidden: int = 0
    waited: int = 0
    refused: int = 0

    def _add(self, other: Moves) -> None:
        for each in fields(Moves):
            setattr(self, each.name, getattr(self, each.name) + getattr(other, each.name))


@dataclass
class OffloadReport(Moves):
    """Bytes that have moved since the context was made.

    Attributes
    ----------
    moved, brought, hidden, waited, refused : int
        As of `Moves`, of all modules.
    wait_seconds : float
        Time for which the GPU waited.
    skipped : dict of str to int
        By reason the saved tensors that cannot move: of a subclass, not strided, or on the CPU or
        another GPU.
    modules : dict of str to Moves
        By the path of the module.
    """

    wait_seconds: float = 0.0
    skipped: dict[str, int] = field(default_factory=dict)
    modules: dict[str, Moves] = field(default_factory=dict)

    def __str__(self) -> str:
        moved, brought, hidden = map(format_size, (self.moved, self.brought, self.hidden))
        stayed = ""
        if self.refused:
            stayed = f"; {format_size(self.refused)} stayed, as no more memory could be pinned"
        return (
            f"{moved} moved, {brought} brought back, {hidden} of it hidden; "
            f"the GPU waited {self.wait_seconds:.3f} s{stayed}"
        )
