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
from gpumem.integrations.torch import _hooks
from gpumem.integrations.torch._offload.checkpoints import saved_keywords
from gpumem.integrations.torch._offload.host import Piece
from gpumem.integrations.torch._offload.plan import Item, Planner, TrainingStep


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

    def __init__(
        self, owner: Offload, ref: Any, nbytes: int, version: int, module: str, stream: Any
    ) -> None:
        self.owner = owner
        self.original = ref
        self.nbytes = nbytes
        self.version = version
        self.module = module
        self.step: TrainingStep = owner.planner.step
        self.number = len(self.step.items) - 1  # the planner has just noted it
        self.item: Item = self.step.items[-1]
        self.host: list[Piece] | None = None
        self.first = self.last = 0  # bytes that the host has
        self.stream = stream  # that its first tensor was saved on
        self.saved: list[weakref.ref[_Saved]] = []
        self.pending = 0  # saved tensors that no backward pass has needed
        self.leaving: tuple[Any, ...] | None = None  # its bytes on the GPU, copy's end, stream
        self.is_out = False
        self.flat: Any = None  # on the GPU again, while tensors are pending
        self.back: Any = None  # a weak reference to its storage
        self.copy: tuple[Any, Any] | None = None  # the end of the copy, the stream of its memory
        self.is_awaited = True

    def __del__(self) -> None:
        if self.host is None:
            return
        self.leave()
        self.set_out(False)
        if not self.is_awaited and self.copy is not None:
            self.owner.mover.drop(*self.copy)
        self.owner.mover.host.free(self.host)

    def leave(self) -> bool:
        """Free the GPU's block in the order of its stream, which waits for the copy."""
        with self.owner.lock:
            leaving, self.leaving = self.leaving, None
            if leaving is None:
                return False
            self.owner.mover.release(*leaving)
            self.owner.planner.leaving -= self.nbytes
            self.set_out(True)
            return True

    @property
    def is_early(self) -> bool:
        """Whether it is on the GPU again, and nothing has needed it yet."""
        return self.flat is not None and not self.is_awaited

    def leave_again(self) -> int:
        """Free the GPU's block if it is back and not needed yet; returns its bytes."""
        if not self.is_early or self.copy is None:
            return 0
        self.owner.mover.drop(*self.copy)
        self.flat, self.is_awaited = None, True
        self.owner._coming = None
        self.set_out(True)
        return self.nbytes

    def set_out(self, is_out: bool) -> None:
        with self.owner.lock:
            self.owner.planner.out += self.nbytes * (is_out - self.is_out)
            self.is_out = is_out


_Kept = tuple[Any, int | None]
"""A saved tensor that stays, and its version; None: an inference tensor, which has none."""


class _Saved:
    """The place of a saved tensor in a record; the tensor itself if it stays."""

    def __init__(self, tensor: Any, record: _Record) -> None:
        self.record = record
        self.is_used = False
        self.tensor = self.counter = tensor.detach()
        self.version = tensor._version

    def leave(self) -> None:
        """Keep what rebuilds the tensor, and its counter of versions, but not its memory."""
        tensor = self.tensor
        self.dtype, self.size = tensor.dtype, tensor.size()
        self.offset, self.strides = tensor.storage_offset(), tensor.stride()
        tensor.data = tensor.new_empty(0)  # keeps the counter
        self.tensor = None


def _check(tensor: Any, version: int | None) -> None:
    """Raise what PyTorch raises of a saved tensor; it leaves the check to hooks."""
    if version is not None and tensor._version != version:
        raise RuntimeError(
            "one of the variables needed for gradient computation has been modified by an "
            f"inplace operation: a saved tensor is at version {tensor._version}; "
            f"expected version {version} instead"
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
        self.planner = Planner(limit, sees_peaks=mover.sees_peaks)
        self.mover = mover
        self.lock = threading.RLock()
        self._torch = torch
        self._kinds = {torch.Tensor, torch.nn.Parameter}
        self._strided = torch.strided
        self._task: Callable[[], int] = torch._C._current_graph_task_id
        self._min_bytes = min_bytes
        reductions: Any = import_module("torch.multiprocessing.reductions")
        self._reference = reductions.StorageWeakRef
        # By the address of a storage, which none has again while there is a reference to it.
        self._records: weakref.WeakValueDictionary[int, _Record] = weakref.WeakValueDictionary()
        self._fixed: dict[int, Any] = {}  # of parameters and buffers
        self._moved: weakref.WeakValueDictionary[int, _Record] = weakref.WeakValueDictionary()
        self._leaving: deque[weakref.ref[_Record]] = deque()  # in the order of their copies
        self._coming: deque[int] | None = None  # numbers of moved storages that are not back yet
        self._names: weakref.WeakKeyDictionary[Any, dict[int, str]] = weakref.WeakKeyDictionary()
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
            inside.names = self._names.get(module, {})
            if id(module) not in inside.names:
                names = {id(each): path for path, each in module.named_modules()}
                inside.names = self._names[module] = names
            self.planner.coming = sum(
                each.nbytes
                for each in module.parameters()
                if each.requires_grad and each.grad is None and each.device == self.mover.device
            )
        inside.paths.append(inside.names.get(id(module)) or type(module).__name__)
        for each in (*module._parameters.values(), *module._buffers.values()):
            if not self._is_known(each) and each is not None and not self._why_not(each):
                storage = each.untyped_storage()
                self._fixed[storage._cdata] = self._reference(storage)

    def _leave_module(self, module: Any, args: object, output: object) -> None:
        if not self._torch.compiler.is_compiling() and self._inside.paths:
            self._inside.paths.pop()

    # ---- saved tensors ---------------------------------------------------------------------------

    def _is_known(self, tensor: Any) -> bool:
        """Whether it lies in a parameter or a buffer of a module: most tensors do."""
        return (
            type(tensor) in self._kinds
            and tensor.layout is self._strided
            and tensor.untyped_storage()._cdata in self._fixed
        )

    def _why_not(self, tensor: Any) -> str:
        """Return why a tensor cannot move, or nothing."""
        if type(tensor) not in self._kinds or tensor.is_quantized:
            return "subclass"
        if tensor.layout is not self._strided:
            return "not strided"
        if tensor.device != self.mover.device:
            return f"on {tensor.device.type}"
        if tensor.is_conj() or tensor.is_neg():
            return "lazily conjugated or negated"
        return ""

    def _is_fixed(self, tensor: Any) -> bool:
        """Whether it lies in a parameter or a buffer that no module has."""
        owner = tensor if tensor._base is None else tensor._base
        return owner.is_leaf and (
            owner.requires_grad or isinstance(owner, self._torch.nn.Parameter)
        )

    def _pack(self, tensor: Any) -> _Saved | _Kept:
        # PyTorch calls it without gradients.
        if self._is_known(tensor):
            return self._keep(tensor)
        reason = self._why_not(tensor)
        if reason:
            skipped = self._report.skipped
            skipped[reason] = skipped.get(reason, 0) + 1
            return self._keep(tensor)
        storage = tensor.untyped_storage()
        key = storage._cdata
        # A backward pass frees soon what it saves, such as by recomputation.
        if storage.nbytes() < self._min_bytes or self._task() != -1 or tensor.is_inference():
            return self._keep(tensor)
        stream = self.mover.current_stream()
        with self.lock:
            record = self._records.get(key)
            if record is None or record.version != tensor._version:
                if self._is_fixed(tensor):
                    return self._keep(tensor)
                record = self._records[key] = self._begin(storage, tensor._version, stream)
            saved = _Saved(tensor, record)
            record.pending += 1
            record.saved.append(weakref.ref(saved))
            if stream != record.stream:
                self.mover.note_use(tensor, stream)
            if record.host is not None:
                self._extend(record, saved, storage, stream)
            return saved

    def _keep(self, tensor: Any) -> _Kept:
        # A tensor with a history is not held: it may be a result of the node that saves it.
        kept = tensor if tensor.is_leaf else tensor.detach()
        return kept, None if tensor.is_inference() else tensor._version

    def _begin(self, storage: Any, version: int, stream: Any) -> _Record:
        """Begin a record, with host memory if it moves."""
        module = self._inside.paths[-1] if self._inside.paths else ""
        planner, nbytes = self.planner, storage.nbytes()
        live, peak, waste = self.mover.live()
        moves = planner.save(module, nbytes, live, peak, waste)
        self._make_room(live)
        record = _Record(self, self._reference(storage), nbytes, version, module, stream)
        if record.number == 0:
            self.mover.host.begin_step()
            self._moved = weakref.WeakValueDictionary()
            self._leaving = deque(each for each in self._leaving if each() is not None)
            self._fixed = {key: each for key, each in self._fixed.items() if not each.expired()}
        self._coming = None
        if moves:
            self.mover.require_no_capture()
            self._allocate_host(record)
        return record

    def _allocate_host(self, record: _Record) -> None:
        record.host = self.mover.host.allocate(record.nbytes)
        if record.host is None:
            self._moves(record).refused += record.nbytes
        else:
            self._moves(record).moved += record.nbytes
            self._moved[record.number] = record

    def _make_room(self, live: int) -> int:
        """Free blocks that the time up to the next point needs; returns their bytes."""
        released = self._release(-self.planner.room(live)) if self._leaving else 0
        self.planner.out_before = self.planner.out
        if released and self.mover.sees_peaks:
            self.mover.live()  # the highest bytes are those from now on
        return released

    def _release(self, nbytes: float) -> int:
        """Free blocks of at least so many bytes that leave, the oldest copies first.

        Returns their bytes. Their streams wait for the copies, and no thread does.
        """
        released = 0
        while self._leaving and released < nbytes:
            record = self._leaving.popleft()()
            if record is not None and record.leave():
                released += record.nbytes
                self._coming = None
        return released

    def _relieve(self, nbytes: int) -> int:
        """Free memory before a request of so many bytes is refused; returns the bytes.

        Storages that stay move, and those that came back too early leave again.
        """
        released = self._release(nbytes)
        records = list(self._records.values())  # those that are needed last come first
        if released < nbytes and self.mover.sees_peaks:
            early = any(each.is_early for each in records)
            self.planner.refuse(nbytes, self.mover.allocated(), early=early)
        for record in records:
            if released >= nbytes:
                break
            moved = self._evict(record) if record.host is None else record.leave_again()
            released += moved
        return released

    def _evict(self, record: _Record) -> int:
        """Move a storage that stays; returns the bytes that are free then."""
        storage = self._revive(record.original)
        found = [each for ref in record.saved if (each := ref()) and each.tensor is not None]
        if storage is None or not found:
            return 0
        self._allocate_host(record)
        if record.host is not None:
            with self._torch.no_grad():
                for each in found:
                    self._extend(record, each, storage, record.stream)
        del storage
        return record.nbytes if record.leave() and self._revive(record.original) is None else 0

    def _extend(self, record: _Record, saved: _Saved, storage: Any, stream: Any) -> None:
        """Copy a tensor's bytes to the host, but those that are there, and let go of the tensor.

        Others of the storage may be written later, by a kernel that counts no version.
        """
        tensor = saved.tensor
        size = tensor.element_size()
        first = tensor.storage_offset() * size
        spans = zip(tensor.size(), tensor.stride(), strict=True)
        length = sum((n - 1) * stride for n, stride in spans) + 1 if tensor.numel() else 0
        last = first + length * size
        if record.last == 0:
            record.first = record.last = first
        if last < record.first or first > record.last:
            record.leave()
            record.set_out(False)
            return
        torch = self._torch
        flat = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(storage)
        for begin, end in ((first, record.first), (record.last, last)):
            if begin < end:
                copied = self.mover.copy_out(record.host, flat, begin, end, stream)
                if record.leaving is None:
                    self._leaving.append(weakref.ref(record))
                    self.planner.leaving += record.nbytes
                    record.set_out(False)
                record.leaving = (flat, copied, stream)
        record.first, record.last = min(first, record.first), max(last, record.last)
        saved.leave()

    def _unpack(self, saved: _Saved | _Kept) -> Any:
        if isinstance(saved, tuple):
            _check(*saved)
            return saved[0]
        _check(saved.counter, saved.version)
        record, planner = saved.record, self.planner
        with self.lock:
            storage = self._revive(record.original)
            if storage is not None and storage.nbytes() != record.nbytes:
                storage = None  # it was resized
            is_back = saved.tensor is not None or storage is not None
            if record.step is not planner.step or record.item.end is None:
                live, peak, waste = self.mover.live()
                frees = not is_back or record.leaving is not None or record.host is None
                planner.need(record.step, record.number, live, peak, waste, frees=frees)
                live -= self._make_room(live)
                if not is_back:
                    storage = self._wait(record)
                if record.step is planner.step:
                    self._bring_next(live)
            elif not is_back:
                storage = self._wait(record)
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
            try:
                self._bring(record)
            except self._torch.OutOfMemoryError:
                if not self._relieve(record.nbytes):
                    raise
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
        modules = self._report.modules
        if record.module not in modules:
            modules[record.module] = Moves()
        return modules[record.module]


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


def _relieve(device: int, nbytes: int) -> int:
    """Free memory of a device before a request of so many bytes is refused."""
    released = 0
    for each in list(_offloads.values()):
        # A thread that holds the lock asks for memory itself, or will leave it soon.
        if each.mover.device.index == device and each.lock.acquire(blocking=False):
            try:
                released += each._relieve(nbytes - released)
            finally:
                each.lock.release()
    return released


def context(torch: ModuleType, mover: Any, limit: int | None, free: int, min_bytes: int) -> Offload:
    """Return the context of a device, with its limit, or the bytes that are free for it now."""
    key = (mover.device.index, limit, min_bytes)
    with _lock:
        found = _offloads.get(key)
        if found is None or found._entered:
            if not _offloads:
                atexit.register(_end_backward)
                _hooks.set_reliever(_relieve)
            found = _offloads[key] = Offload(torch, mover, limit or free, min_bytes)
        found.planner.limit = limit or free
        return found
