"""torch_memory_saver's names over gpumem: memory of PyTorch's tensors that pauses and resumes.

A program changes one import. A `region` is a tag of the arenas beneath PyTorch: with
``enable_cpu_backup`` its bytes are restored, else its addresses alone. The first use enables
gpumem.

Examples
--------
>>> from gpumem.integrations.memory_saver import torch_memory_saver
>>> with torch_memory_saver.region(tag="weights", enable_cpu_backup=True):  # doctest: +SKIP
...     weights = torch.zeros(1 << 20, device="cuda")
>>> torch_memory_saver.pause("weights")  # doctest: +SKIP
>>> torch_memory_saver.resume("weights")  # doctest: +SKIP
"""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Iterator
from typing import Any

from gpumem._arena.arena import Arena
from gpumem.errors import IntegrationError
from gpumem.integrations import torch as _torch
from gpumem.integrations.torch import TorchStatus, _hooks

__all__ = ["TorchMemorySaver", "status", "torch_memory_saver"]
__dir__ = __all__.copy


class TorchMemorySaver:
    """The object that ``torch_memory_saver`` has, with the same methods.

    Attributes
    ----------
    enabled : bool
        True.
    hook_mode : str
        Has no effect; for programs that set it.
    """

    enabled, hook_mode = True, "torch"

    def __init__(self) -> None:
        # By tag of the region: each arena with its own name of the tag.
        self._tags: dict[str, set[tuple[Arena, str]]] = {}

    @contextlib.contextmanager
    def region(self, tag: str = "default", enable_cpu_backup: bool = False) -> Iterator[None]:
        """Let memory that this context allocates in PyTorch pause and resume with a tag.

        Parameters
        ----------
        tag : str
            The tag; regions with the same one belong together.
        enable_cpu_backup : bool
            Whether `resume` restores bytes.

        Raises
        ------
        IntegrationError
            PyTorch does not use gpumem, and can no longer be switched to it.
        ConfigError
            The arena of a device has regions. Their addresses cannot be kept.
        """
        name = f"region {tag}" + ("" if enable_cpu_backup else ", without a backup")
        with contextlib.ExitStack() as stack:
            for arena in _arenas():
                stack.enter_context(arena.tag(name, asleep="keep" if enable_cpu_backup else "drop"))
                self._tags.setdefault(tag, set()).add((arena, name))
            yield

    @contextlib.contextmanager
    def cuda_graph(
        self,
        cuda_graph: Any,
        pool: Any = None,
        stream: Any = None,
        capture_error_mode: str = "global",
        tag: str = "default",
        enable_cpu_backup: bool = False,
    ) -> Iterator[None]:
        """Capture as ``torch.cuda.graph`` does, inside a region.

        Tensors that the graph reads or writes may pause, and so may memory that is allocated during
        the capture. The graph is valid again after `resume`.
        """
        torch = importlib.import_module("torch")
        with (
            torch.cuda.graph(
                cuda_graph, pool=pool, stream=stream, capture_error_mode=capture_error_mode
            ),
            self.region(tag, enable_cpu_backup),
        ):
            yield

    @contextlib.contextmanager
    def disable(self) -> Iterator[None]:
        """Leave the region in which this context is: its allocations do not pause."""
        with contextlib.ExitStack() as stack:
            for arena in _arenas():
                stack.enter_context(arena.tag("default"))
            yield

    def pause(self, tag: str | None = None) -> None:
        """Release the memory of a tag to the driver; None: of all regions.

        Waits for everything queued on the device. Idempotent. Raises as `gpumem.Arena.sleep`.
        """
        for arena, names in self._named(tag).items():
            arena.sleep(names)

    def resume(self, tag: str | None = None) -> None:
        """Restore the memory of a tag, at its addresses; None: of all regions.

        Raises as `gpumem.Arena.wake`.
        """
        for arena, names in self._named(tag).items():
            arena.wake(names)

    def _named(self, tag: str | None) -> dict[Arena, list[str]]:
        found: dict[Arena, list[str]] = {}
        for each in self._tags if tag is None else [tag]:
            for arena, name in self._tags.get(each, ()):
                if not arena.closed:
                    found.setdefault(arena, []).append(name)
        return found


def status() -> TorchStatus:
    """Return which memory PyTorch uses now: `gpumem.integrations.torch.status`."""
    return _torch.status()


def _arenas() -> list[Arena]:
    """Return the arenas beneath PyTorch, with that of its current device."""
    if _torch.status().mode is None:
        _torch.enable(mode="full")
    if _torch.status().mode != "full":
        raise IntegrationError(
            "PyTorch's own allocator is in use above gpumem's, and its segments cannot pause: "
            'call gpumem.integrations.torch.enable(mode="full") before the first tensor on a GPU'
        )
    torch = importlib.import_module("torch")
    if torch.cuda.current_device() not in _hooks.arenas():
        torch.empty(1, device="cuda")  # PyTorch requests the device's arena
    return list(_hooks.arenas().values())


torch_memory_saver = TorchMemorySaver()
"""The object that programs import."""
