"""Saved tensors of autograd on the host while nothing needs them.

The unit that moves is a storage, so that several saved views of one move once. A storage is known
by a weak reference, since its address is used again. Records live as long as autograd holds one of
their tensors: a graph that ends without a backward pass frees them.
"""

from __future__ import annotations

import atexit
import contextlib
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from importlib import import_module
from types import ModuleType
from typing import Any, Self

from gpumem._support.sizes import format_size
from gpumem.integrations.torch._offload.checkpoints import saved_keywords
from gpumem.integrations.torch._offload.host import Piece
from gpumem.integrations.torch._offload.plan import Planner, TrainingStep


@dataclass
class Moves:
    """Bytes of storages that a module's operations have saved.

    Attributes
    ----------
    moved : int
        Bytes moved to the host.
    brought : int
        Bytes of them brought back; the others were not needed, or the program still had them.
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
        return (
            f"{moved} moved, {brought} brought back, {hidden} of it hidden; "
            f"the GPU waited {self.wait_seconds:.3f} s"
        )


class _Record:
    """A storage that autograd has saved, while it holds a tensor of it."""

    def __init__(self, owner: Offload, ref: Any, nbytes: int, version: int, module: str) -> None:
        self.owner = owner
        self.original = ref
        self.nbytes = nbytes
        self.version = version
        self.module = module
        self.step: TrainingStep = owner.planner.step
        self.number = len(self.step.items) - 1  # the planner has just noted it
        self.host: list[Piece] | None = None
        self.first = self.last = 0  # bytes that the host has
        self.pending = 0  # saved tensors that no backward pass has needed
        self.is_out = False
        self.flat: Any = None  # on the GPU again, while tensors are pending
        self.back: Any = None  # a weak reference to its storage
        self.copy: tuple[Any, Any] | None = None  # the end of the copy, the stream of its memory
        self.is_awaited = True

    def __del__(self) -> None:
        self.set_out(False)
        if not self.is_awaited and self.copy is not None:
            self.owner.mover.drop(*self.copy)
        if self.host is not None:
            self.owner.mover.host.free(self.host)

    def set_out(self, is_out: bool) -> None:
        with self.owner.lock:
            self.owner.planner.out += self.nbytes * (is_out - self.is_out)
            self.is_out = is_out


class _Saved:
    """Autograd holds it in place of a tensor: it has the tensor, or its place in a record."""

    def __init__(self, tensor: Any, record: _Record | None) -> None:
        self.record = record
        self.is_used = False
        self.tensor = tensor.detach()
        self.counter = self.tensor
        self.version = None if tensor.is_inference() else tensor._version

    def leave(self) -> None:
        """Keep what rebuilds the tensor, and its counter of versions, but not its memory."""
        tensor = self.tensor
        self.dtype, self.size = tensor.dtype, tensor.size()
        self.offset, self.strides = tensor.storage_offset(), tensor.stride()
        tensor.data = tensor.new_empty(0)  # keeps the counter
        self.tensor = None

    def check(self) -> None:
        """Raise what PyTorch raises of a saved tensor; it leaves the check to hooks."""
        if self.version is not None and self.counter._version != self.version:
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an "
                f"inplace operation: a saved tensor is at version {self.counter._version}; "
                f"expected version {self.version} instead"
            )


class _Inside(threading.local):
    """The paths of the modules that a thread is in, and those of the outermost one's."""

    def __init__(self) -> None:
        self.paths: list[str] = []
        self.names: dict[int, str] = {}


class Offload:
    """A context in which tensors that autograd saves move to the host.

    It can be entered again, for each step; what a step did is the plan of the next.
    """

    def __init__(self, torch: ModuleType, mover: Any, limit: int, min_bytes: int) -> None:
        self.planner = Planner(limit, moves_pages=mover.moves_pages)
        self.mover = mover
        self.lock = threading.RLock()
        self._torch = torch
        self._min_bytes = min_bytes
        reductions: Any = import_module("torch.multiprocessing.reductions")
        self._reference = reductions.StorageWeakRef
        self._records: weakref.WeakValueDictionary[Any, _Record] = weakref.WeakValueDictionary()
        self._moved: weakref.WeakValueDictionary[int, _Record] = weakref.WeakValueDictionary()
        self._coming: deque[int] | None = None  # numbers of moved storages that are not back yet
        self._fixed: set[Any] = set()  # storages of parameters and buffers
        self._inside = _Inside()
        self._entered: list[Any] = []
        self._waits: list[tuple[Moves, int, Any, Any]] = []
        self._report = OffloadReport()

    def __enter__(self) -> Self:
        graph: Any = import_module("torch.autograd.graph")
        modules: Any = import_module("torch.nn.modules.module")
        hooks = graph.saved_tensors_hooks(self._pack, self._unpack)
        hooks.__enter__()
        enter = modules.register_module_forward_pre_hook(self._enter_module)
        leave = modules.register_module_forward_hook(self._leave_module, always_call=True)
        keywords = saved_keywords(self._torch)
        keywords.__enter__()
        self._entered.append((hooks, enter, leave, keywords))
        return self

    def __exit__(self, *exception: object) -> None:
        hooks, enter, leave, keywords = self._entered.pop()
        keywords.__exit__(None, None, None)
        hooks.__exit__(*exception)
        enter.remove()
        leave.remove()
        self._inside.paths.clear()

    def report(self) -> OffloadReport:
        """Return the bytes that have moved, by module; waits for the copies under way."""
        with self.lock:
            waits, self._waits = self._waits, []
            for moves, nbytes, before, after in waits:
                after.synchronize()
                seconds = before.elapsed_time(after) / 1000
                # Two events next to each other are microseconds apart.
                waited = seconds > 20e-6
                self._report.wait_seconds += seconds if waited else 0
                moves.waited += nbytes if waited else 0
                moves.hidden += 0 if waited else nbytes
            for name in ("moved", "brought", "hidden", "waited", "refused"):
                total = sum(getattr(each, name) for each in self._report.modules.values())
                setattr(self._report, name, total)
            return self._report

    # ---- modules ---------------------------------------------------------------------------------

    def _enter_module(self, module: Any, args: object) -> None:
        if self._torch.compiler.is_compiling():
            return
        inside = self._inside
        if not inside.paths:
            inside.names = {id(each): path for path, each in module.named_modules()}
            parameters = [each for each in module.parameters() if each.requires_grad]
            self.planner.coming = sum(
                each.nbytes for each in parameters if each.grad is None and not self._why_not(each)
            )
        inside.paths.append(inside.names.get(id(module)) or type(module).__name__)
        for each in (*module._parameters.values(), *module._buffers.values()):
            if each is None or self._why_not(each):
                continue
            if each.nbytes >= self._min_bytes:
                self._fixed.add(self._reference(each.untyped_storage()))

    def _leave_module(self, module: Any, args: object, output: object) -> None:
        if not self._torch.compiler.is_compiling() and self._inside.paths:
            self._inside.paths.pop()

    # ---- saved tensors ---------------------------------------------------------------------------

    def _why_not(self, tensor: Any) -> str:
        """Return why a tensor cannot move, or nothing."""
        torch = self._torch
        if type(tensor) not in (torch.Tensor, torch.nn.Parameter) or tensor.is_quantized:
            return "subclass"
        if tensor.layout is not torch.strided:
            return "not strided"
        if tensor.device != self.mover.device:
            return f"on {tensor.device.type}"
        if tensor.is_conj() or tensor.is_neg():
            return "lazily conjugated or negated"
        return ""

    def _is_fixed(self, tensor: Any, ref: Any) -> bool:
        """Whether it lies in a parameter or a buffer, also in one that no module has."""
        owner = tensor if tensor._base is None else tensor._base
        return (
            isinstance(owner, self._torch.nn.Parameter)
            or (owner.is_leaf and owner.requires_grad)
            or ref in self._fixed
        )

    def _pack(self, tensor: Any) -> _Saved:
        reason = self._why_not(tensor)
        if reason:
            skipped = self._report.skipped
            skipped[reason] = skipped.get(reason, 0) + 1
            return _Saved(tensor, None)
        storage = tensor.untyped_storage()
        # A backward pass frees soon what it saves, such as by recomputation.
        is_backward = self._torch._C._current_graph_task_id() != -1
        if storage.nbytes() < self._min_bytes or is_backward or tensor.is_inference():
            return _Saved(tensor, None)
        ref = self._reference(storage)
        if self._is_fixed(tensor, ref):
            return _Saved(tensor, None)
        with self.lock, self._torch.no_grad():
            record = self._records.get(ref)
            if record is None or record.version != tensor._version:
                record = self._records[ref] = self._begin(ref, storage, tensor._version)
            saved = _Saved(tensor, record)
            record.pending += 1
            if record.host is not None and self._extend(record, tensor, storage):
                saved.leave()
            return saved

    def _begin(self, ref: Any, storage: Any, version: int) -> _Record:
        """Begin a record, with host memory if it moves."""
        module = self._inside.paths[-1] if self._inside.paths else ""
        planner, nbytes = self.planner, storage.nbytes()
        live, peak, waste = self.mover.live()
        moves = planner.save(module, nbytes, live, peak, waste)
        self.mover.wait_for_room(planner.room(live) + planner.margin / 2)
        record = _Record(self, ref, nbytes, version, module)
        if record.number == 0:
            self.mover.host.begin_step()
            self._moved = weakref.WeakValueDictionary()
            self._fixed = {each for each in self._fixed if not each.expired()}
        self._coming = None
        if moves:
            self.mover.require_no_capture()
            record.host = self.mover.host.allocate(nbytes)
            if record.host is None:
                self._moves(record).refused += nbytes
            else:
                self._moves(record).moved += nbytes
                self._moved[record.number] = record
                record.set_out(True)
        return record

    def _extend(self, record: _Record, tensor: Any, storage: Any) -> bool:
        """Copy a tensor's bytes to the host, but those that are there; return whether it has them.

        Others of the storage may be written later, by a kernel that counts no version.
        """
        size = tensor.element_size()
        first = tensor.storage_offset() * size
        spans = zip(tensor.size(), tensor.stride(), strict=True)
        length = sum((n - 1) * stride for n, stride in spans) + 1 if tensor.numel() else 0
        last = first + length * size
        if record.last == 0:
            record.first = record.last = first
        if last < record.first or first > record.last:
            record.set_out(False)
            return False
        torch = self._torch
        flat = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(storage)
        for begin, end in ((first, record.first), (record.last, last)):
            if begin < end:
                self.mover.copy_out(record.host, flat, begin, end)
        record.first, record.last = min(first, record.first), max(last, record.last)
        return True

    def _unpack(self, saved: _Saved) -> Any:
        saved.check()
        record = saved.record
        if record is None:
            return saved.tensor
        with self.lock, self._torch.no_grad():
            original = self._revive(record.original)
            if original is not None and original.nbytes() != record.nbytes:
                original = None  # it was resized
            live, peak, waste = self.mover.live()
            frees = saved.tensor is None and original is None
            self.planner.need(
                record.step,
                record.number,
                live,
                peak,
                waste,
                frees=frees or record.host is None,
            )
            live += self.mover.wait_for_room(self.planner.room(live) + self.planner.margin / 2)
            storage = original
            if saved.tensor is None and original is None:
                storage = self._wait(record)
            if record.step is self.planner.step:
                self._bring_next(live)
            if not saved.is_used:
                saved.is_used = True
                record.pending -= 1
            if record.pending == 0:
                record.flat = None
            if saved.tensor is not None:
                return saved.tensor
            empty = self._torch.empty(0, dtype=saved.dtype, device=self.mover.device)
            return empty.set_(storage, saved.offset, saved.size, saved.strides)

    def _revive(self, ref: Any) -> Any:
        return None if ref is None else self._torch.UntypedStorage._new_with_weak_ptr(ref.cdata)

    def _wait(self, record: _Record) -> Any:
        """Return a record's storage on the GPU; the current stream waits for its bytes."""
        storage = self._revive(record.back)
        if storage is None:
            self._bring(record)
            storage = record.flat.untyped_storage()
        flat = self._torch.empty(0, dtype=self._torch.uint8, device=self.mover.device).set_(storage)
        assert record.copy is not None
        before, after = self.mover.wait(flat, *record.copy)
        if not record.is_awaited:
            self._waits.append((self._moves(record), record.nbytes, before, after))
        record.is_awaited = True
        return storage

    def _bring(self, record: _Record) -> None:
        assert record.host is not None
        record.flat, end, stream = self.mover.bring(
            record.host, record.nbytes, record.first, record.last
        )
        record.back = self._reference(record.flat.untyped_storage())
        record.copy, record.is_awaited = (end, stream), False
        record.set_out(False)
        self._moves(record).brought += record.nbytes

    def _bring_next(self, live: int) -> None:
        """Start the copies of the storages that are needed after this one, while there is room."""
        planner = self.planner
        if self._coming is None:
            self._coming = deque(each for each in planner.order() if each in self._moved)
        while self._coming:
            record = self._moved.get(self._coming[0])
            is_out = record is not None and record.is_out
            if record is not None and is_out and self._revive(record.original) is None:
                if not planner.has_room(record.number, live):
                    break
                try:
                    self._bring(record)
                except self._torch.OutOfMemoryError:
                    break  # it is copied when it is needed
                live += record.nbytes
            self._coming.popleft()

    def _moves(self, record: _Record) -> Moves:
        return self._report.modules.setdefault(record.module, Moves())


def begin_at_first_call(torch: ModuleType, begin: Callable[[], Offload | None]) -> None:
    """Enter a context at the first call of a module with gradients on a GPU, for good.

    It applies to the thread of that call.
    """
    modules: Any = import_module("torch.nn.modules.module")

    def enter(module: Any, args: object) -> None:
        if torch.compiler.is_compiling() or not torch.is_grad_enabled():
            return
        if not torch.cuda.is_initialized():
            return
        handle.remove()
        context = begin()
        if context is not None:
            context.__enter__()
            context._enter_module(module, args)  # the call under way

    handle = modules.register_module_forward_pre_hook(enter)


_MAX_SECONDS = 1.0  # for which the end of the process waits
_lock = threading.Lock()
_offloads: dict[tuple[int, int | None, int], Offload] = {}
"""By device, limit and size: what one context learns of a step, the next one knows."""


def _end_backward() -> None:
    """Wait until the thread of backward passes has released the objects of the last one.

    Before Python 3.14 a thread that needs Python's lock during its finalization ends the process by
    `abort`. A pass holds the hooks that were set as it began, until it has released all.
    """
    held = []
    with contextlib.suppress(Exception):  # of hooks that another thread has set
        for each in _offloads.values():
            while each._entered:
                held.append(weakref.ref(each._entered[-1][0].pack_hook))
                each.__exit__()
    end = time.monotonic() + _MAX_SECONDS
    while any(each() is not None for each in held) and time.monotonic() < end:
        time.sleep(0.001)
    time.sleep(0.02)  # for passes that began without hooks


def context(torch: ModuleType, mover: Any, limit: int | None, free: int, min_bytes: int) -> Offload:
    """Return the context of a device, with its limit, or the bytes that are free for it now."""
    key = (mover.device.index, limit, min_bytes)
    with _lock:
        found = _offloads.get(key)
        if found is None or found._entered:
            if not _offloads:
                atexit.register(_end_backward)
            found = _offloads[key] = Offload(torch, mover, limit or free, min_bytes)
        found.planner.limit = limit or free
        return found
