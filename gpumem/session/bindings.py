"""Bindings of a session's inputs and outputs, and the context that a run's function gets."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, SupportsIndex

from gpumem._buffer.buffer import Buffer
from gpumem._buffer.resource import MemoryResource
from gpumem._buffer.stream import Stream
from gpumem._copy.copy import order_behind
from gpumem._tensor import Tensor, empty
from gpumem._tensor.create import is_like
from gpumem.device import CopyDecision, MemoryInfo
from gpumem.stats import ShrinkReport, Stats

if TYPE_CHECKING:
    import numpy.typing as npt

    from gpumem._budget import Budget


@dataclass
class BoundInput:
    """An input, and the decision whether it is copied."""

    tensor: Tensor
    decision: CopyDecision
    staged: Tensor | None = None  # on the device; kept where addresses must stay


@dataclass
class BoundOutput:
    """An output, its memory, and the decision whether it is copied."""

    memory: MemoryInfo
    decision: CopyDecision
    resource: MemoryResource | None  # makes the tensor; None: `given` is it
    given: Tensor | None = None
    made: Tensor | None = None  # the last run's, kept where addresses must stay
    staged: Tensor | None = None

    def order_behind(self, stream: Stream) -> None:
        """Order a run after the queued work on memory that it writes to without a copy."""
        if self.decision.action == "alias":
            for tensor in (self.given, self.made):
                if tensor is not None and not tensor.buffer.closed:
                    order_behind(tensor.buffer, stream)


class RunContext:
    """Inputs, outputs, stream and allocator of a run, passed to its function.

    Attributes
    ----------
    inputs : Mapping[str, Tensor]
        The bound inputs, in memory that the device can use.
    stream : Stream
        The stream of the work; inputs are ready for work on it.
    allocator : MemoryResource
        Allocator of the device's memory, for scratch space. A block allocated without a stream
        belongs to the run's stream, so it may be freed while work there still uses it.

    Examples
    --------
    >>> import gpumem, numpy as np
    >>> def half(ctx):
    ...     x = ctx.inputs["x"]
    ...     with ctx.allocator.allocate(x.nbytes):       # scratch, of ctx.stream
    ...         np.divide(x.numpy(), 2, out=ctx.output("y", x.shape, x.dtype).numpy())
    >>> with gpumem.Session("host") as session:
    ...     session.bind_input("x", np.array([2.0, 4.0]))
    ...     session.bind_output("y")
    ...     session.run(half)
    ...     session.outputs()["y"].numpy()
    array([1., 2.])
    """

    def __init__(
        self,
        inputs: Mapping[str, Tensor],
        outputs: Mapping[str, BoundOutput],
        stream: Stream,
        allocator: MemoryResource,
        *,
        keep: bool,
    ) -> None:
        self.inputs = inputs
        self.stream = stream
        self._resource = allocator
        self._allocator: MemoryResource | None = None
        self._keep = keep  # a captured graph needs the addresses of the run before
        self._bound = outputs
        self._work: dict[str, Tensor] = {}  # tensors that the function writes
        self._results: dict[str, Tensor] = {}

    @property
    def allocator(self) -> MemoryResource:
        """Allocator of the device's memory; its blocks belong to the run's stream."""
        if self._allocator is None:
            self._allocator = _OfStream(self._resource, self.stream)
        return self._allocator

    def output(self, name: str, shape: int | tuple[int, ...], dtype: npt.DTypeLike) -> Tensor:
        """Return the tensor that the work writes an output to, in the memory of its binding.

        Parameters
        ----------
        name : str
            A bound output.
        shape, dtype
            Those of the output in this run, as for `gpumem.empty`. A bound array must have both.

        Returns
        -------
        Tensor
            The same one in every call of a run.

        Raises
        ------
        KeyError
            No such output is bound.
        ValueError, TypeError
            The bound array, or the tensor of an earlier call, has another shape or dtype; or one of
            these is invalid.

        Examples
        --------
        >>> import gpumem, numpy as np
        >>> given = np.zeros(3)
        >>> with gpumem.Session("host") as session:
        ...     session.bind_output("y", given)
        ...     session.run(lambda ctx: ctx.output("y", 3, "float64").numpy().fill(7))
        >>> given                            # the work wrote to the bound array itself
        array([7., 7., 7.])
        """
        bound = self._bound.get(name)
        if bound is None:
            raise KeyError(f"no output {name!r} is bound; bound are {sorted(self._bound)}")
        work = self._work.get(name)
        if work is not None:
            require_like(work, name, shape, dtype)
            return work
        result = self._result(bound, name, shape, dtype)
        work = result
        if bound.decision.action == "copy":
            work = self._reuse(bound.staged, shape, dtype, self._resource)
            bound.staged = work if self._keep else None
        self._work[name], self._results[name] = work, result
        return work

    def _result(self, bound: BoundOutput, name: str, shape: Any, dtype: Any) -> Tensor:
        if bound.given is not None:
            require_like(bound.given, name, shape, dtype)
            return bound.given
        assert bound.resource is not None
        made = self._reuse(bound.made, shape, dtype, bound.resource, bound.memory)
        bound.made = made if self._keep else None
        return made

    def _reuse(
        self,
        before: Tensor | None,
        shape: Any,
        dtype: Any,
        of: MemoryResource,
        memory: MemoryInfo | None = None,
    ) -> Tensor:
        """Make a tensor, or return the last run's if a graph requires the same address."""
        if (
            self._keep
            and before is not None
            and not before.buffer.closed
            and is_like(before, shape, dtype)
        ):
            return before
        stream = self.stream if of.memory.device == self.stream.device else None
        made = empty(shape, dtype, memory=memory, resource=of, stream=stream)
        order_behind(made.buffer, self.stream)  # one of another device has another stream
        return made


class Forwarding(MemoryResource):
    """A resource that allocates another one's blocks: the same resource, seen from a run."""

    def __init__(self, resource: MemoryResource) -> None:
        super().__init__(resource.memory, name=resource.name)
        self._resource = resource

    def __getattr__(self, name: str) -> Any:
        return getattr(self._resource, name)

    def __eq__(self, other: object) -> bool:
        return _behind(self) is _behind(other)

    def __hash__(self) -> int:
        return hash(_behind(self))

    def allocate(
        self,
        nbytes: SupportsIndex | str,
        stream: Any = None,
        *,
        alignment: int | None = None,
        shareable: bool = False,
        transport: Literal["ipc"] | None = None,
    ) -> Buffer:
        """Allocate a block of the resource."""
        # Users' resources may lack these two parameters.
        more: dict[str, Any] = {"shareable": True} if shareable else {}
        if transport is not None:
            more["transport"] = transport
        return self._resource.allocate(nbytes, stream, alignment=alignment, **more)

    def allocate_persistent(self, nbytes: SupportsIndex | str) -> Buffer:
        """Allocate a long-lived block of the resource, which belongs to its default stream."""
        return self._resource.allocate_persistent(nbytes)

    # The base class defines these, so calls of them would not reach __getattr__.
    def stats(self) -> Stats:
        """Return the resource's statistics."""
        return self._resource.stats()

    def shrink(self) -> ShrinkReport:
        """Shrink the resource."""
        return self._resource.shrink()

    def snapshot(self) -> Any:
        """Return the resource's blocks."""
        return self._resource.snapshot()

    def reset_stream(self, stream: Any) -> None:
        """Make blocks of a stream reusable by others, as the resource does."""
        self._resource.reset_stream(stream)

    @property
    def budget(self) -> Budget | None:
        """The resource's budget."""
        return self._resource.budget

    @property
    def is_arena(self) -> bool:
        """Whether the resource is an arena."""
        return self._resource.is_arena

    @property
    def closed(self) -> bool:
        """Whether the resource is closed."""
        return self._resource.closed


def _behind(resource: object) -> object:
    while isinstance(resource, Forwarding):
        resource = resource._resource
    return resource


class _OfStream(Forwarding):
    """Allocates another resource's blocks, on one stream where the caller names none."""

    def __init__(self, resource: MemoryResource, stream: Stream) -> None:
        super().__init__(resource)
        self._stream = stream

    def allocate(self, nbytes: SupportsIndex | str, stream: Any = None, **options: Any) -> Buffer:
        """Allocate a block of the resource, of the run's stream unless another is named."""
        return super().allocate(nbytes, self._stream if stream is None else stream, **options)


def require_like(tensor: Tensor, name: str, shape: Any, dtype: npt.DTypeLike) -> None:
    """Raise ValueError unless an output has the shape and dtype of its array."""
    if not is_like(tensor, shape, dtype):
        raise ValueError(
            f"output {name!r} of shape {shape} and dtype {dtype} does not fit the array of shape "
            f"{tensor.shape} and dtype {tensor.dtype}"
        )
