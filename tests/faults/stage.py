"""Performs a scenario's operations, lets one call fail, and compares before and after."""

from __future__ import annotations

import ctypes
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeVar

import gpumem
from gpumem._testing import host_device

from .kinds import DriverCalls, Fault, Kind

EDGE = 64  # bytes at either end of a block that are written and compared

Made = TypeVar("Made")


@dataclass
class Happened:
    """What a fault led to."""

    step: str
    function: str  # that failed
    raised: str | None  # class of the error; None: the operation succeeded all the same


class Wrong(AssertionError):
    """An operation broke a rule after a fault."""


@dataclass
class Held:
    """A live block, and the byte that its edges have."""

    buffer: gpumem.Buffer
    byte: int

    def edges(self) -> tuple[tuple[int, int], ...]:
        size = min(EDGE, self.buffer.nbytes)
        return (self.buffer.ptr, size), (self.buffer.ptr + self.buffer.nbytes - size, size)

    def readable(self) -> bool:
        return not getattr(self.buffer.resource, "asleep", ())


@dataclass
class Stage:
    """Where one run of a scenario happens."""

    fault: Fault | None
    rng: random.Random
    kind: Kind = field(default_factory=DriverCalls)
    calls: int = 0  # that could fail, by operations so far
    happened: Happened | None = None
    resources: list[Any] = field(default_factory=list)
    budgets: list[gpumem.Budget] = field(default_factory=list)
    held: list[Held] = field(default_factory=list)
    # Of statistics that may change though an operation fails, as what it allocated first is kept.
    loose: tuple[str, ...] = ()

    # ---- operations ----

    def do(self, step: str, operation: Callable[..., Made], *arguments: Any, **named: Any) -> Made:
        """Perform an operation; if it fails by the fault, compare, and perform it once more."""
        before = self._state()
        try:
            made = self._under_fault(step, operation, *arguments, **named)
        except Exception as error:
            self._judge(step, error)
        else:
            self.check(step)
            return made
        self._compare(step, before)
        try:
            made = operation(*arguments, **named)
        except Exception as error:
            raise Wrong(f"{step}: fails again without a fault: {error!r}") from error
        self.check(step)
        return made

    def refuse(
        self, step: str, kind: type[Exception], operation: Callable[..., object], *arguments: Any
    ) -> None:
        """Perform an operation that raises such an error without any fault."""

        def refused() -> None:
            try:
                operation(*arguments)
            except kind:
                return
            raise Wrong(f"{step}: expected {kind.__name__}")

        self.do(step, refused)

    def _under_fault(
        self, step: str, operation: Callable[..., Made], *arguments: Any, **named: Any
    ) -> Made:
        count = self.kind.count()
        due = self.fault.call - self.calls if self.fault and not self.happened else 0
        if due > 0:
            assert self.fault
            self.kind.arm(due, self.fault.error)
        try:
            return operation(*arguments, **named)
        finally:
            if due > 0 and (function := self.kind.failed()):
                self.happened = Happened(step, function, None)
            self.kind.disarm()
            self.calls += self.kind.count() - count

    # ---- blocks ----

    def hold(self, buffer: gpumem.Buffer) -> gpumem.Buffer:
        """Write the edges of a block, and see to it that they stay."""
        held = Held(buffer, len(self.held) % 250 + 1)
        buffer.stream.synchronize()  # under "wait" earlier work may still write the block
        for address, size in held.edges():
            ctypes.memset(address, held.byte, size)
        self.held.append(held)
        return buffer

    def take(self, resource: Any, nbytes: int, stream: Any = None, **named: Any) -> gpumem.Buffer:
        """Allocate a block as an operation, and hold it."""
        step = f"allocate {nbytes} of {resource.name}"
        return self.hold(self.do(step, resource.allocate, nbytes, stream, **named))

    def drop(self, *buffers: gpumem.Buffer, stream: Any = None) -> None:
        """Close blocks as operations."""
        for buffer in buffers:
            self.held = [held for held in self.held if held.buffer is not buffer]
            self.do(f"close a block of {buffer.resource.name}", buffer.close, stream)

    # ---- what must hold ----

    def watch(self, resource: Any) -> Any:
        """Compare a resource's statistics from now on."""
        self.resources.append(resource)
        return resource

    def unwatch(self, resource: Any) -> None:
        self.resources.remove(resource)

    def close(self, *resources: Any) -> None:
        """Close resources as operations."""
        for resource in resources:
            if resource in self.resources:
                self.unwatch(resource)
            self.do(f"close {resource!r}", resource.close)

    def check(self, step: str) -> None:
        """Check what holds at any time: invariants, and the bytes of live blocks."""
        for resource in self.resources:
            if hasattr(resource, "check_invariants"):
                resource.check_invariants()
        for held in self.held:
            for address, size in held.edges() if held.readable() else ():
                if ctypes.string_at(address, size) != bytes([held.byte]) * size:
                    raise Wrong(f"{step}: a live block has other bytes")

    def _state(self) -> dict[str, Any]:
        state: dict[str, Any] = {}
        for resource in self.resources:
            stats = resource.stats()
            for name in ("in_use", "requested_in_use", "reserved"):
                state[f"{resource.name}.{name}"] = getattr(stats, name)
            state[f"{resource.name}.blocks"] = stats.num_allocs - stats.num_frees
        for budget in self.budgets:
            state[f"{budget.name}.used"] = budget.used
            state[f"{budget.name}.pending"] = budget.pending
        state["device.used"] = host_device.used(0)
        return state

    def _compare(self, step: str, before: dict[str, Any]) -> None:
        self.check(step)
        for name, value in self._state().items():
            was = before[name]
            if name.endswith(self.loose):
                continue
            # An operation may give idle memory back before it fails.
            if value != was and not (name.endswith(("reserved", ".used")) and value < was):
                raise Wrong(f"{step}: {name} was {was} and is {value} after an error")

    def _judge(self, step: str, error: Exception) -> None:
        """Accept an error that the fault explains."""
        if not self.happened or self.happened.step != step or self.happened.raised:
            raise error
        assert self.fault
        self.happened.raised = type(error).__name__
        if not self.kind.explains(error, self.happened.function, self.fault.error):
            raise Wrong(f"{step}: {self.happened.function}: not this error: {error!r}") from error
