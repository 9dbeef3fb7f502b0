"""Values of the GPU that a script reads: true ones, computed beside on the CPU, and stand-ins."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import importlib
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

MAX_BYTES = 16 << 20
MAX_FLOAT_BYTES = 16 << 10
"""Storages up to these sizes have values beside; floats as far as lengths and times need them."""

# A value of a storage follows from the host's data; or from values that nobody has computed; or a
# CUDA graph writes it, at times that are not seen.
TRUE, UNKNOWN, REPLAYED = range(3)

_READERS = ("item", "__bool__", "__int__", "__float__", "__index__", "tolist", "cpu", "to")
_ARITHMETIC = (
    "add",
    "radd",
    "sub",
    "rsub",
    "mul",
    "rmul",
    "truediv",
    "rtruediv",
    "pow",
    "neg",
    "abs",
)
_COMPARISONS = ("lt", "le", "gt", "ge", "eq", "ne", "bool")
_NO_DISPATCH = torch.Tensor.__torch_dispatch__
_MASKS = torch.bool, torch.uint8
_MASKED = re.compile(r"_?(unsafe_)?index(_put.*)?")
_COVERING = re.compile(r"copy_|fill_|zero_")


class StandIn(float):
    """A float that stands in for a value of the GPU: comparisons of it are noted."""

    noted: Callable[[], None]
    __hash__ = float.__hash__


def _as_stand_in(name: str) -> Callable[..., Any]:
    """Return a method of float with a result that is a stand-in, too."""
    method = getattr(float, name)

    def calculate(self: float, *others: object) -> object:
        value = method(self, *others)
        return StandIn(value) if type(value) is float else value

    return calculate


def _as_noted(name: str) -> Callable[..., Any]:
    """Return a method of float that notes that it was called."""
    method = getattr(float, name)

    def compare(self: float, *others: object) -> object:
        StandIn.noted()
        return method(self, *others)

    return compare


for each in _ARITHMETIC:
    setattr(StandIn, f"__{each}__", _as_stand_in(f"__{each}__"))
for each in _COMPARISONS:
    setattr(StandIn, f"__{each}__", _as_noted(f"__{each}__"))


class Readers:
    """Knows the type of a tensor while a method of it reads its values."""

    def __init__(self, stood_in: Callable[[], int], noted: Callable[[], None]) -> None:
        self.dtype: torch.dtype | None = None
        self.stood_in = stood_in  # the number of reads that zeros stood in for
        StandIn.noted = staticmethod(noted)
        for name in _READERS:
            setattr(torch.Tensor, name, self.reader(getattr(torch.Tensor, name)))

    def reader(self, method: Callable[..., Any]) -> Callable[..., Any]:
        """Return a method that reads, with the type of the tensor kept while it runs."""

        @functools.wraps(method)
        def read(tensor: torch.Tensor, *args: Any, **options: Any) -> Any:
            before, outer = self.stood_in(), self.dtype
            self.dtype = tensor.dtype
            try:
                value = method(tensor, *args, **options)
            finally:
                self.dtype = outer
            is_stand_in = type(value) is float and self.stood_in() > before
            return StandIn(value) if is_stand_in and method.__name__ == "item" else value

        return read

    def may_read_integers(self, nbytes: int) -> bool:
        """Whether the read of so many bytes, which is under way, may be of integers."""
        if self.dtype is None:
            return nbytes <= MAX_BYTES
        return not self.dtype.is_floating_point and nbytes <= MAX_BYTES


class Traits(NamedTuple):
    """Traits of an operator."""

    name: str
    is_view: bool
    is_computed: bool  # the CPU has the same result
    written: tuple[tuple[int, str], ...]  # arguments that it writes


class Beside:
    """The bytes of a storage of the GPU, on the CPU."""

    def __init__(self, storage: torch.UntypedStorage, bytes_: torch.UntypedStorage, truth: int):
        self.storage = StorageWeakRef(storage)  # as long as it lives, its number is not used again
        self.bytes = bytes_
        self.truth = truth


class Values(TorchDispatchMode):  # type: ignore[misc]
    """Computes small tensors beside on the CPU, as far as they follow from the host's data.

    Zeros stand in for all others, and results of them are computed from the zeros. They are kept
    by storage, so that views share them, and an unknown value that is written into one is known to
    be there.
    """

    def __init__(self) -> None:
        super().__init__()
        self.besides: dict[int, Beside] = {}  # by the storage's number
        self.limit = 1000  # of them, before those of freed storages are dropped
        self.traits: dict[Any, Traits] = {}  # by operator
        self.truth: int | None = None  # of the operator that runs; None: it has no values beside
        self.answers: list[bytes | int] = []  # to the reads of the operator that runs
        self.is_replaced = False  # its results will be those of the CPU
        self.differs = False  # a read was not of zeros

    def begin(self) -> None:
        """Compute values from now on, in this thread and its backward passes."""
        torch._C._set_only_lift_cpu_tensors(True)  # so that the copy of torch.tensor(...) is seen
        with contextlib.suppress(ImportError):
            function: Any = importlib.import_module("triton.runtime.jit").JITFunction

            run = function.run

            def launch(kernel: Any, *args: Any, **options: Any) -> Any:
                self.taint(_tensors(args, options))  # PyTorch does not see what it writes
                return run(kernel, *args, **options)

            function.run = launch
        self.__enter__()

    def __torch_dispatch__(
        self, operator: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if any(each.__torch_dispatch__ is not _NO_DISPATCH for each in types):
            # The subclass of Tensor runs operators of its own, which come here.
            return NotImplemented
        tensors = list(_tensors(args, kwargs))
        device = kwargs.get("device")
        on_gpu = device is not None and torch.device(device).type == "cuda"
        traits = self.traits.get(operator) or self.learn(operator)
        if traits.is_view or not (on_gpu or any(each.is_cuda for each in tensors)):
            return operator(*args, **kwargs)
        deciding = _deciding(traits.name, args) or tensors
        is_small = traits.is_computed and all(map(_is_small, deciding))
        truth = max(map(self.truth_of, deciding), default=TRUE) if is_small else UNKNOWN
        is_known = is_small and (deciding is tensors or all(map(_is_small, tensors)))
        self.answers = self.answer_to(operator, traits.name, deciding, args) if is_small else []
        self.truth = truth if is_small else None
        self.is_replaced = is_known and traits.name in ("_to_copy", "copy_", "equal")
        try:
            result = operator(*args, **kwargs)
        finally:
            self.truth = None
        if torch.cuda.is_current_stream_capturing():
            truth = REPLAYED
        if is_known and all(map(_is_small, _tensors((result,), {}))):
            return self.compute(operator, traits, args, kwargs, result, tensors, truth)
        self.taint(_written(traits, args, kwargs), max(truth, UNKNOWN))
        return result

    def learn(self, operator: Any) -> Traits:
        """Return the traits of an operator, which are kept."""
        schema = operator._schema
        name = schema.name.partition("::")[2]
        infos = [each.alias_info for each in schema.arguments]
        written = [
            (i, schema.arguments[i].name) for i, info in enumerate(infos) if info and info.is_write
        ]
        is_view = not written and any(each.alias_info for each in schema.returns)
        is_random = torch.Tag.nondeterministic_seeded in operator.tags
        is_computed = operator.namespace == "aten" and not is_random and "empty" not in name
        if name == "record_stream":
            is_view = True
        self.traits[operator] = Traits(name, is_view, is_computed, tuple(written))
        return self.traits[operator]

    def truth_of(self, tensor: torch.Tensor) -> int:
        """Return whether the values of a tensor are true."""
        return self.beside(tensor).truth if tensor.is_cuda else TRUE

    def beside(self, tensor: torch.Tensor) -> Beside:
        """Return the bytes of a tensor's storage, by default unknown zeros."""
        storage = tensor.untyped_storage()
        found = self.besides.get(storage._cdata)
        if found is None or found.bytes.nbytes() != storage.nbytes():
            zeros = torch.zeros(storage.nbytes(), dtype=torch.uint8).untyped_storage()
            found = self.keep(storage, zeros, UNKNOWN)
        return found

    def keep(self, storage: Any, values: Any, truth: int) -> Beside:
        """Keep the bytes of a storage."""
        if len(self.besides) > self.limit:
            self.besides = {k: v for k, v in self.besides.items() if not v.storage.expired()}
            self.limit = 1000 + 2 * len(self.besides)
        self.besides[storage._cdata] = made = Beside(storage, values, truth)
        return made

    def view(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the values of a tensor: a tensor on the CPU that shares its storage's bytes."""
        if not tensor.is_cuda:
            return tensor
        place = tensor.storage_offset(), tensor.shape, tensor.stride()
        return torch.empty(0, dtype=tensor.dtype).set_(self.beside(tensor).bytes, *place)

    def on_cpu(self, values: Any) -> Any:
        """Return arguments with each tensor of the GPU replaced by its values."""
        return pytree.tree_map_only(torch.Tensor, self.view, values)

    def answer_to(
        self, operator: Any, name: str, deciding: list[torch.Tensor], args: Any
    ) -> list[bytes | int]:
        """Return the numbers that an operator will read, to know the size of its result."""
        views = list(map(self.view, deciding))
        if name == "_local_scalar_dense":
            return [views[0].reshape(1).view(torch.uint8).numpy().tobytes()]
        if name == "nonzero":
            return [int(views[0].count_nonzero())]
        if name == "masked_select":
            shape = torch.broadcast_shapes(args[0].shape, args[1].shape)
            return [int(views[0].broadcast_to(shape).count_nonzero())]
        if _MASKED.fullmatch(name):
            return [int(each.count_nonzero()) for each in views if each.dtype in _MASKS]
        if name == "repeat_interleave":
            return [int(views[0].sum())]
        if name == "bincount" and views[0].numel():
            return [int(views[0].max())]
        if "unique" in name:
            axis = args[1] if name == "unique_dim" else 0
            return [operator(views[0], *args[1:])[0].shape[axis]]
        return []

    def answer(self, to: int, nbytes: int) -> bool:
        """Write a value that is read to the host's memory; return whether it is true."""
        if self.truth is None:
            return False
        if self.answers:
            first = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
            value = first.to_bytes(nbytes, "little") if isinstance(first, int) else first
            ctypes.memmove(to, value, nbytes)
            self.differs |= any(value)
        return self.truth == TRUE and (self.is_replaced or bool(self.answers))

    def compute(
        self,
        operator: Any,
        traits: Traits,
        args: Any,
        kwargs: Mapping[str, Any],
        result: Any,
        tensors: list[torch.Tensor],
        truth: int,
    ) -> Any:
        """Run an operator on the CPU, keep its results, and return those that the host sees."""
        options = {k: v for k, v in self.on_cpu(dict(kwargs)).items() if k != "pin_memory"}
        if options.get("device") is not None:
            options["device"] = torch.device("cpu")
        try:
            computed = operator(*self.on_cpu(args), **options)
        except Exception:  # the CPU does not have it
            self.taint(_written(traits, args, kwargs))
            return result
        for tensor in _written(traits, args, kwargs):
            if tensor.is_cuda:
                found = self.beside(tensor)
                covers = _COVERING.fullmatch(traits.name) or self.scatters_all(traits.name, args)
                covered = covers and _is_whole(tensor)
                if covered and found.truth != REPLAYED and truth != REPLAYED:
                    others = (each for each in tensors if each is not tensor)
                    found.truth = max(map(self.truth_of, others), default=TRUE)
                else:
                    found.truth = max(found.truth, truth)
        known = {each.untyped_storage()._cdata for each in tensors}
        seen, structure = pytree.tree_flatten(result)
        values = pytree.tree_leaves(computed)
        for i, (mine, value) in enumerate(zip(seen, values, strict=False)):
            if not isinstance(value, torch.Tensor):
                seen[i] = value
                self.differs |= bool(value)
            elif not isinstance(mine, torch.Tensor) or mine.untyped_storage()._cdata in known:
                self.differs |= not mine.is_cuda and bool(value.any())
            elif mine.shape == value.shape and not mine.is_cuda:
                mine.copy_(value)
                self.differs |= bool(value.any())
            elif mine.shape == value.shape:
                storage = mine.untyped_storage()
                self.keep(storage, torch.UntypedStorage(storage.nbytes()), truth)
                self.view(mine).copy_(value)
        return pytree.tree_unflatten(seen, structure)

    def scatters_all(self, name: str, args: Any) -> bool:
        """Whether an operator scatters into every place, as the inverse of a permutation does."""
        if name != "scatter_" or len(args) != 4 or args[0].dim() != 1:
            return False
        return bool(self.view(args[2]).unique().numel() == args[0].numel())

    def taint(self, tensors: Iterable[torch.Tensor], truth: int = UNKNOWN) -> None:
        """Note that values that nobody has computed were written into tensors."""
        for tensor in tensors:
            if tensor.is_cuda and tensor.layout is torch.strided:
                found = self.besides.get(tensor.untyped_storage()._cdata)
                if found:
                    found.truth = max(found.truth, truth)


def _tensors(args: Any, kwargs: Mapping[str, Any]) -> Iterator[torch.Tensor]:
    for each in (*args, *kwargs.values()):
        if isinstance(each, torch.Tensor):
            yield each
        elif isinstance(each, list | tuple):
            yield from (one for one in each if isinstance(one, torch.Tensor))


def _written(traits: Traits, args: Any, kwargs: Mapping[str, Any]) -> Iterator[torch.Tensor]:
    """Return the tensors that an operator writes."""
    found = (args[i] if i < len(args) else kwargs.get(name) for i, name in traits.written)
    return _tensors(found, {})


def _deciding(name: str, args: Any) -> list[torch.Tensor]:
    """Return the tensors that decide the size of an operator's result, if not all do."""
    if _MASKED.fullmatch(name):
        return [each for each in args[1] if each is not None and each.dtype in _MASKS]
    if name == "masked_select":
        return [args[1]]
    return [args[0]] if name in ("bincount", "repeat_interleave") else []


def _is_small(tensor: torch.Tensor) -> bool:
    if tensor.layout is not torch.strided:
        return False
    nbytes: int = tensor.untyped_storage().nbytes() if tensor.is_cuda else tensor.nbytes
    is_integer = not (tensor.is_floating_point() or tensor.is_complex())
    return nbytes <= (MAX_BYTES if is_integer else MAX_FLOAT_BYTES)


def _is_whole(tensor: torch.Tensor) -> bool:
    return bool(tensor.nbytes == tensor.untyped_storage().nbytes())
