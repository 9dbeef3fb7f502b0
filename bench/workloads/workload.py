"""The parts of every workload: a model, generators for its shapes and data, and a step."""

from __future__ import annotations

import gc
import random
from abc import ABC, abstractmethod
from collections.abc import Callable
from time import perf_counter
from typing import Any, ClassVar, TypeVar

import torch
from torch import nn

from bench import workloads

Model = TypeVar("Model", bound=nn.Module)


class Workload(ABC):
    """One model at work.

    Attributes
    ----------
    scale : int
        How much a step does at most: tokens, images or sequences. Memory grows with it smoothly,
        so that the largest scale that fits says how well memory is used.
    shapes : list of tuple of int
        The shapes of the steps so far.
    """

    SIZES: ClassVar[dict[str, Any]]

    def __init__(self, size: str, device: torch.device, seed: int, scale: int | None) -> None:
        self.size = self.SIZES[size]
        self.scale: int = self.size.scale if scale is None else scale
        self.device = device
        self.shapes: list[tuple[int, ...]] = []
        self.random = random.Random(seed)
        self.generator = torch.Generator(device).manual_seed(seed)
        torch.manual_seed(seed)
        self.start()

    @abstractmethod
    def start(self) -> None:
        """Make the model and its optimizer and data."""

    @abstractmethod
    def step(self) -> torch.Tensor:
        """Draw shapes, do the work, return one number that depends on all of it."""

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of models that train in one precision."""
        return torch.bfloat16 if self.device.type == "cuda" else torch.float32

    def draw(self, *shape: int) -> tuple[int, ...]:
        """Note the shape of a step."""
        self.shapes.append(shape)
        return shape

    def tokens(self, vocabulary: int, *shape: int) -> torch.Tensor:
        return torch.randint(vocabulary, shape, generator=self.generator, device=self.device)

    def built(self, make: Callable[[], Model], dtype: torch.dtype | None = None) -> Model:
        """Build a model where it will be: drawing weights takes the CPU longer than many steps."""
        with self.device:
            return make().to(dtype=dtype)

    def autocast(self) -> torch.autocast:
        on_gpu = self.device.type == "cuda"
        return torch.autocast(self.device.type, torch.bfloat16, enabled=on_gpu)


class Run:
    """One workload from its making until nothing of it is left.

    Parameters
    ----------
    at_rest : callable, optional
        Called in `begin`, when the device is at rest and nothing of the workload is made yet.

    Attributes
    ----------
    workload : Workload or None
        None before `begin` and after `end`.
    """

    def __init__(self, at_rest: Callable[[], None] | None = None) -> None:
        self.workload: Workload | None = None
        self._at_rest = at_rest

    def begin(
        self, name: str, size: str, device: torch.device, seed: int, scale: int | None = None
    ) -> None:
        """Make it on a device at rest."""
        rest(device)
        if self._at_rest is not None:
            self._at_rest()
        gc.disable()  # a collection in one step of one allocator would be taken for its cost
        self.device = device
        self.workload = workloads.make(name, size, device, seed, scale)

    def step(self) -> tuple[float, str]:
        """Return a step's wall time in seconds, from a device at rest to a device at rest.

        And what it returned, in hex, so that equal means bit for bit.
        """
        assert self.workload is not None
        synchronize(self.device)
        begin = perf_counter()
        value = self.workload.step()
        synchronize(self.device)
        return perf_counter() - begin, float(value).hex()

    def end(self) -> None:
        self.workload = None
        gc.enable()
        rest(self.device)


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def rest(device: torch.device) -> None:
    """Let go of everything that is not in use, so that runs do not depend on those before."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch._C._cuda_clearCublasWorkspaces()
        torch.cuda.empty_cache()


def be_deterministic() -> None:
    """Tell PyTorch to return the same bits for the same work.

    cuBLAS reads CUBLAS_WORKSPACE_CONFIG, which has to be in the environment before it starts. Flash
    attention is the one fused kernel here whose backward pass can be told.
    """
    torch.use_deterministic_algorithms(True)
    # It would fill every new tensor with NaNs, which takes longer than the allocation.
    torch.utils.deterministic.fill_uninitialized_memory = False
    torch.backends.cudnn.deterministic = True
    torch.backends.cudnn.benchmark = False
    torch.backends.cuda.enable_cudnn_sdp(False)
    torch.backends.cuda.enable_mem_efficient_sdp(False)
