"""A context in which tensors that autograd saves move to the host while nothing needs them."""

from __future__ import annotations

import atexit
import contextlib
import threading
import time
import weakref
from collections.abc import Callable
from importlib import import_module
from types import ModuleType
from typing import Any, Self

from gpumem.integrations.torch import _hooks
from gpumem.integrations.torch._offload.checkpoints import saved_keywords
from gpumem.integrations.torch._offload.storages import Storages


class Offload(Storages):
    """A context in which tensors that autograd saves move to the host.

    It can be entered again, for each step; what a step did is the plan of the next.
    """

    def __init__(self, torch: ModuleType, mover: Any, limit: int, min_bytes: int) -> None:
        self._torch = torch
        self._names: weakref.WeakKeyDictionary[Any, dict[int, str]] = weakref.WeakKeyDictionary()
        self._entered: list[Any] = []

    def __enter__(self) -> Self:
        graph: Any = import_module("torch.autograd.graph")
        hooks = graph.saved_tensors_hooks(self._pack, self._unpack)
        hooks.__enter__()
        _follow_modules(self._torch)
        keywords = saved_keywords(self._torch)
        keywords.__enter__()
        self._entered.append((hooks, keywords))
        _here.contexts.append(self)
        return self

    def __exit__(self, *exception: object) -> None:
        hooks, keywords = self._entered.pop()
        keywords.__exit__(None, None, None)
        self._inside.paths.clear()
        hooks.__exit__(*exception)
        _here.contexts.remove(self)

    def _enter_module(self, module: Any) -> None:
        inside = self._inside
        if not inside.paths:
            self._begin_call()
            inside.outermost = weakref.ref(module)
            inside.names = self._names.get(module, {})
            if id(module) not in inside.names:
                names = {id(each): path for path, each in module.named_modules()}
                inside.names = self._names[module] = names
        inside.paths.append(inside.names.get(id(module)) or type(module).__name__)
        self._fix(module)

    def _leave_module(self) -> None:
        if self._inside.paths:
            self._inside.paths.pop()


class Here(threading.local):
    """The contexts that a thread is in."""

    def __init__(self) -> None:
        self.contexts: list[Offload] = []


_here = Here()
_handles: list[Any] = []  # of the hooks of modules, once they are set


def _follow_modules(torch: ModuleType) -> None:
    """Tell contexts from now on which modules their threads call.

    The hooks stay, as torch.compile compiles anew where there are others, and are Python's, since
    it reads them.
    """
    if _handles:
        return
    modules: Any = import_module("torch.nn.modules.module")

    def enter(module: Any, args: object) -> None:
        if not torch.compiler.is_compiling():
            for each in _here.contexts:
                each._enter_module(module)

    def leave(module: Any, args: object, output: object) -> None:
        if not torch.compiler.is_compiling():
            for each in _here.contexts:
                each._leave_module()

    _handles.append(modules.register_module_forward_pre_hook(enter))
    _handles.append(modules.register_module_forward_hook(leave, always_call=True))


def begin_at_first_call(torch: ModuleType, begin: Callable[[], Offload | None]) -> None:
    """Enter a context at the first call of a module with gradients on a GPU, for good.

    It applies to the thread of that call. Each replica of a `DataParallel`, which runs in a thread
    of its own, enters one of its GPU.
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
            _enter_in_replicas(torch, begin)

    handle = modules.register_module_forward_pre_hook(enter)
    _follow_modules(torch)  # after it, so that the context is told of the call that begins it


def _enter_in_replicas(torch: ModuleType, begin: Callable[[], Offload | None]) -> None:
    parallel: Any = import_module("torch.nn.parallel.data_parallel")
    apply = parallel.parallel_apply

    def within(replica: Any) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            context = begin() if torch.is_grad_enabled() else None
            with context or contextlib.nullcontext():
                return replica(*args, **kwargs)

        return call

    def parallel_apply(replicas: list[Any], *args: Any, **kwargs: Any) -> Any:
        return apply([within(each) for each in replicas], *args, **kwargs)

    parallel.parallel_apply = parallel_apply


_MAX_SECONDS = 1.0  # for which the end of the process waits
_MAX_WAIT = 0.05  # seconds that a refused request waits for the locks of other threads
_MAX_LIMITS = 4  # of one device, for which contexts that nobody has entered are kept
_lock = threading.Lock()
_offloads: dict[tuple[int, int, int | None, int], Offload] = {}
"""By device, size, limit and depth: what one context learns of a step, the next one knows."""


def _end_backward() -> None:
    """Wait until the thread of backward passes has released the objects of the last one.

    Before Python 3.14 a thread that needs Python's lock during its finalization ends the process by
    `abort`. A pass holds the hooks that were set as it began, until it has released all.
    """
    held = []
    for each in list(_offloads.values()):
        while each._entered:
            held.append(weakref.ref(each._entered[-1][0].pack_hook))
            with contextlib.suppress(Exception):  # of hooks that another thread has set
                each.__exit__()
    end = time.monotonic() + _MAX_SECONDS
    while any(each() is not None for each in held) and time.monotonic() < end:
        time.sleep(0.001)
    time.sleep(0.02)  # for passes that began without hooks
    _offloads.clear()  # its weak references to storages need PyTorch's modules as they end


def _relieve(device: int, nbytes: int) -> int:
    """Free memory of a device before a request of so many bytes is refused."""
    released, end = 0, time.monotonic() + _MAX_WAIT
    for each in [each for each in list(_offloads.values()) if each._mover.device.index == device]:
        # The lock may be that of the thread that asks, which waits for this one.
        wait = max(0, end - time.monotonic())
        if released < nbytes and each._lock.acquire(timeout=wait):
            try:
                released += each._relieve(nbytes - released)
            finally:
                each._lock.release()
    return released


def context(torch: ModuleType, mover: Any, limit: int | None, free: int, min_bytes: int) -> Offload:
    """Return the context of a device, with its limit, or the bytes that are free for it now."""
    of = mover.device.index, min_bytes
    depth = 0
    with _lock:
        while (found := _offloads.get((*of, limit, depth))) is not None and found._entered:
            depth += 1
        if found is None:
            if not _offloads:
                atexit.register(_end_backward)
                _hooks.set_reliever(_relieve)
            idle = [key for key, each in _offloads.items() if key[:2] == of and not each._entered]
            for key in idle[: 1 - _MAX_LIMITS]:
                del _offloads[key]
            found = Offload(torch, mover, limit or free, min_bytes)
            _offloads[*of, limit, depth] = found
        found._planner.limit = limit or free
        return found
