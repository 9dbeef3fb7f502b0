"""A tensor that another process reads: PyTorch's own way, over the allocator of both processes."""

from __future__ import annotations

import gc
from time import perf_counter
from typing import Any

import torch
import torch.multiprocessing as multiprocessing

from bench.workloads import allocators

TIMEOUT = 60.0  # seconds


class Reader:
    """A process with the same allocator, which reads one element of each tensor it is passed.

    It starts with the first pass and ends with this process.
    """

    def __init__(self, configuration: str, device: torch.device) -> None:
        self._configuration = configuration
        self._device = device
        self._given: Any = None

    def passes(self, nbytes: int, count: int) -> dict[str, list[float]]:
        """Pass tensors; seconds of each pass.

        "new": of a tensor each, which the other process has not seen. "again": the same ones.
        """
        if self._given is None:
            self._start()
        tensors = []
        new = []
        for number in range(count):
            tensors.append(torch.full((nbytes // 4,), float(number + 1), device=self._device))
            new.append(self._seconds(tensors[-1]))
        again = [self._seconds(tensor) for tensor in tensors]
        del tensors
        gc.collect()
        torch.cuda.ipc_collect()
        torch.cuda.empty_cache()
        return {"new": new, "again": again}

    def _start(self) -> None:
        context = multiprocessing.get_context("spawn")
        self._given, self._answers = context.Queue(), context.Queue()
        arguments = (self._configuration, str(self._device), self._given, self._answers)
        context.Process(target=answer, args=arguments, daemon=True).start()
        self._seconds(torch.ones(512, device=self._device))  # both have started

    def _seconds(self, tensor: torch.Tensor) -> float:
        """Pass a tensor; return the time until its last element is back."""
        expected = tensor[-1].item()  # waits for the device
        begin = perf_counter()
        self._given.put(tensor)
        found = self._answers.get(timeout=TIMEOUT)
        took = perf_counter() - begin
        if found != expected:
            raise RuntimeError(f"the other process read {found} in place of {expected}")
        assert self._answers.get(timeout=TIMEOUT) is None  # it holds the tensor no longer
        return took


def answer(configuration: str, device: str, given: Any, answers: Any) -> None:
    """Run the reader, in its process."""
    where = torch.device(device)
    allocators.install(configuration, where)
    torch.zeros(1, device=where)
    while True:
        tensor = given.get()
        answers.put(tensor[-1].item())
        del tensor
        gc.collect()
        torch.cuda.ipc_collect()
        answers.put(None)
