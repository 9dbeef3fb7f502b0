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
    """A process with the same allocator, which reads one element of each tensor it is passed."""

    def __init__(self, configuration: str, device: torch.device) -> None:
        context = multiprocessing.get_context("spawn")
        self._given, self._answers = context.Queue(), context.Queue()
        self._process = context.Process(
            target=answer, args=(configuration, str(device), self._given, self._answers)
        )
        self._process.start()

    def seconds(self, tensor: torch.Tensor) -> float:
        """Pass a tensor; return the time until its last element is back."""
        expected = tensor[-1].item()
        begin = perf_counter()
        self._given.put(tensor)
        found = self._answers.get(timeout=TIMEOUT)
        took = perf_counter() - begin
        if found != expected:
            raise RuntimeError(f"the other process read {found} in place of {expected}")
        assert self._answers.get(timeout=TIMEOUT) is None  # it holds the tensor no longer
        return took

    def close(self) -> None:
        self._given.put(None)
        self._process.join(TIMEOUT)


def answer(configuration: str, device: str, given: Any, answers: Any) -> None:
    """Run the reader, in its process."""
    where = torch.device(device)
    allocators.install(configuration, where)
    torch.zeros(1, device=where)
    while (tensor := given.get()) is not None:
        answers.put(tensor[-1].item())
        del tensor
        gc.collect()
        torch.cuda.ipc_collect()
        answers.put(None)


def passes(
    configuration: str, device: torch.device, nbytes: int, count: int
) -> dict[str, list[float]]:
    """Pass tensors; seconds of each pass.

    "new": of a tensor each in memory that no process has seen. "again": of one that was passed.
    """
    reader = Reader(configuration, device)
    try:
        reader.seconds(torch.ones(512, device=device))  # both have started
        new = []
        kept = []
        for number in range(count):
            kept.append(torch.full((nbytes // 4,), float(number + 1), device=device))
            torch.cuda.synchronize(device)
            new.append(reader.seconds(kept[-1]))
        again = [reader.seconds(tensor) for tensor in kept]
    finally:
        reader.close()
    del kept
    gc.collect()
    torch.cuda.ipc_collect()
    torch.cuda.empty_cache()
    return {"new": new, "again": again}
