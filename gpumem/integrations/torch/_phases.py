"""Phases of a PyTorch program and purposes of its blocks, written while something records.

The outermost call of a module in a thread is a forward pass. Parameters, gradients, states of
optimizers and inputs are known by their storages, which begin where the allocator's blocks do.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import sys
import threading
import weakref
from collections.abc import Iterable, Iterator
from importlib import import_module
from types import ModuleType
from typing import Any

from gpumem._events.labels import label_of, range_name
from gpumem._events.recorder import begin_phase, current_recording, end_phase, set_category
from gpumem.traces.categories import MODULE_JOIN, module_named

_FORWARD, _BACKWARD, _OPTIMIZER = map(label_of, ("forward", "backward", "optimizer"))
_PARAMETERS, _GRADIENTS, _STATE, _INPUTS = map(
    label_of, ("parameters", "gradients", "optimizer state", "inputs")
)
_AGAIN = 10  # calls after which purposes are written again: a ring may have lost them
_MAX_DEPTH = 4  # of containers in containers


class _Outermost(threading.local):
    """The outermost calls of a thread that have begun."""

    in_forward = False
    step = 0  # the number of the phase


_outermost = _Outermost()
# By module or optimizer the recording in which it was last seen, and its calls.
_calls: weakref.WeakKeyDictionary[Any, tuple[int, int]] = weakref.WeakKeyDictionary()
_labels: dict[int, int] = {}  # of the modules of parameters, by their ids
_is_following = False
_modules: list[weakref.ref[Any]] = []  # all that there were at the first step of an optimizer


def follow(torch: ModuleType) -> None:
    """Write phases and purposes from now on, while something records. Idempotent."""
    global _is_following
    if _is_following:
        return
    _is_following = True
    _follow_modules(torch)
    _follow_backward(torch)
    optimizers = import_module("torch.optim.optimizer")  # which torch.optim has no name for
    optimizers.register_optimizer_step_pre_hook(_begin_step)
    optimizers.register_optimizer_step_post_hook(_end_step)
    _follow_ranges(torch.autograd.profiler.record_function)


def _follow_modules(torch: ModuleType) -> None:
    call, unimplemented = torch.nn.Module.__call__, torch.nn.Module.forward
    is_compiling = torch.compiler.is_compiling

    @functools.wraps(call)
    def call_in_phase(self: Any, *args: Any, **kwargs: Any) -> Any:
        # First, since the compiler of PyTorch follows this function, too.
        if is_compiling() or _outermost.in_forward or not current_recording():
            return call(self, *args, **kwargs)
        _outermost.in_forward = True
        number = begin_phase(_FORWARD)
        try:
            with contextlib.suppress(Exception):  # no program fails because it is observed
                if _is_due(self):
                    _write_parameters(self, unimplemented)
                set_category(_INPUTS, _addresses([args, kwargs]))
            return call(self, *args, **kwargs)
        finally:
            _outermost.in_forward = False
            end_phase(_FORWARD, number)

    torch.nn.Module.__call__ = call_in_phase


def _follow_backward(torch: ModuleType) -> None:
    run = torch.autograd.graph._engine_run_backward
    is_compiling = torch.compiler.is_compiling

    @functools.wraps(run)
    def run_in_phase(*args: Any, **kwargs: Any) -> Any:
        if is_compiling() or not current_recording():
            return run(*args, **kwargs)
        number = begin_phase(_BACKWARD)
        try:
            return run(*args, **kwargs)
        finally:
            end_phase(_BACKWARD, number)

    torch.autograd.graph._engine_run_backward = run_in_phase
    torch.autograd._engine_run_backward = run_in_phase


def _begin_step(optimizer: Any, args: object, kwargs: object) -> None:
    _leave_step()  # of an optimizer that raised
    if not current_recording():
        return
    with contextlib.suppress(Exception):
        _write_gradients(optimizer)
    _outermost.step = begin_phase(_OPTIMIZER)


def _end_step(optimizer: Any, args: object, kwargs: object) -> None:
    with contextlib.suppress(Exception):
        if _outermost.step and _calls[optimizer][1] == 0:  # states are made by the first step
            _write_state(optimizer)
    _leave_step()


def _leave_step() -> None:
    if _outermost.step:
        end_phase(_OPTIMIZER, _outermost.step)
        _outermost.step = 0


def _follow_ranges(ranges: Any) -> None:
    """Write the ranges of ``record_function``; TorchScript compiles the functions they wrap."""
    enter, leave = ranges.__enter__, ranges.__exit__

    @functools.wraps(enter)
    def enter_phase(self: Any) -> Any:
        name = range_name(str(self.name))
        open_phases = self.__dict__.setdefault("_gpumem_phases", [])
        # Steps of optimizers are hooked.
        if name and current_recording() and not name.startswith("Optimizer."):
            label = label_of(name)
            open_phases.append((label, begin_phase(label)))
        else:
            open_phases.append(None)
        return enter(self)

    @functools.wraps(leave)
    def leave_phase(self: Any, *exception: Any) -> Any:
        open_phases = self.__dict__.get("_gpumem_phases")
        if open_phases and (begun := open_phases.pop()):
            end_phase(*begun)
        return leave(self, *exception)

    ranges.__enter__, ranges.__exit__ = enter_phase, leave_phase


def _find_modules() -> None:
    """Find all modules, such as those of averaged weights, which no one calls. It takes 0.1 s."""
    module = sys.modules["torch.nn"].Module
    found = (each for each in gc.get_objects() if issubclass(type(each), module))
    _modules[:] = map(weakref.ref, found)


def _write_parameters(root: Any, unimplemented: object) -> None:
    """Write parameters and buffers, each with the classes of the modules around it."""
    names: dict[str, str] = {}
    for path, module in root.named_modules():
        forward = type(module).forward
        around = [names[path.rpartition(".")[0]]] if path else []
        # A list of modules is never called, so no stack has it either.
        name = getattr(forward, "__qualname__", type(module).__qualname__)
        own = [] if forward is unimplemented else [module_named(name)]
        names[path] = MODULE_JOIN.join(filter(None, [*around, *own]))
        values = [*module._parameters.values(), *module._buffers.values()]
        held = [each for each in values if each is not None]
        label = label_of(names[path] or type(module).__qualname__)
        _labels.update((id(each), label) for each in held)
        set_category(_PARAMETERS, _addresses(held), label)


def _write_gradients(optimizer: Any) -> None:
    """Write gradients, and at times what may be lost: parameters and states."""
    parameters = [each for group in optimizer.param_groups for each in group["params"]]
    if optimizer not in _calls:
        _find_modules()
    if _is_due(optimizer):
        own = [(each._parameters, each._buffers) for found in _modules if (each := found())]
        set_category(_PARAMETERS, _addresses([parameters, *own]))
        _write_state(optimizer)
    gradients: dict[int, list[Any]] = {}  # by the labels of their modules
    for each in parameters:
        if (gradient := each.grad) is not None:
            gradients.setdefault(_labels.get(id(each), 0), []).append(gradient)
    for label, held in gradients.items():
        set_category(_GRADIENTS, _addresses(held), label)


def _write_state(optimizer: Any) -> None:
    for parameter, state in optimizer.state.items():
        set_category(_STATE, _addresses([state]), _labels.get(id(parameter), 0))


# ---- storages ------------------------------------------------------------------------------------


def _is_due(owner: object) -> bool:
    """Count a call; return whether its parameters are to be written."""
    recording, calls = _calls.get(owner, (0, 0))
    now = current_recording()
    calls = (calls + 1) % _AGAIN if recording == now else 0
    _calls[owner] = now, calls
    return calls == 0


def _addresses(values: Iterable[Any], depth: int = 0) -> Iterator[int]:
    """Yield the addresses of the storages of GPU tensors, also of those in containers."""
    for each in values:
        if hasattr(each, "__tensor_flatten__"):  # of other tensors, such as DTensor
            inner = each.__tensor_flatten__()[0]
            yield from _addresses([getattr(each, name) for name in inner], depth)
        elif hasattr(each, "untyped_storage"):
            try:
                if each.is_cuda:
                    yield each.untyped_storage().data_ptr()
            except (RuntimeError, NotImplementedError):
                continue  # a tensor without memory, such as of a tracer
        elif depth < _MAX_DEPTH and isinstance(each, dict):
            yield from _addresses(each.values(), depth + 1)
        elif depth < _MAX_DEPTH and isinstance(each, list | tuple):
            yield from _addresses(each, depth + 1)
