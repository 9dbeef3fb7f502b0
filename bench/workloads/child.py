"""A process with one allocator beneath PyTorch, which runs one measurement.

Reads one JSON object a line, answers each with one: the answer, or {"error": ...}.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import traceback
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict
from functools import partial
from typing import Any

import torch

from bench.harness import net_nanoseconds
from bench.workloads import CONFIGURATIONS, allocators
from bench.workloads.limits import largest_scale
from bench.workloads.workload import Run, be_deterministic

EMPTY_BYTES = 1 << 20


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.workloads.child", description=__doc__)
    parser.add_argument("configuration", choices=CONFIGURATIONS)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--limit", type=int, default=0, help="bytes that may be held; 0: all")
    chosen = parser.parse_args()
    answers = own_output()
    device = torch.device(chosen.device)
    be_deterministic()
    commands: dict[str, Callable[..., Any]] | None = None
    for line in sys.stdin:
        try:
            if commands is None:  # here, so that a failure is an answer, too
                commands = commands_over(chosen.configuration, device, chosen.limit)
            request = json.loads(line)
            answer = commands[request.pop("do")](**request)
        except Exception as error:
            traceback.print_exc()
            answer = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps(answer), file=answers, flush=True)
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


def own_output() -> Any:
    """Keep standard output for answers; other output goes to standard error."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    return answers


def commands_over(
    configuration: str, device: torch.device, limited: int
) -> dict[str, Callable[..., Any]]:
    allocator = allocators.install(configuration, device, limited)
    run = Run(at_rest=allocator.reset_peaks)

    def begin(workload: str, size: str, seed: int) -> dict[str, Any]:
        run.begin(workload, size, device, seed)
        return {}

    def step() -> dict[str, Any]:
        seconds, value = run.step()
        return {"seconds": seconds, "value": value}

    def end() -> dict[str, Any]:
        shapes = run.workload.shapes if run.workload is not None else []
        run.end()
        return {"shapes": shapes} | asdict(allocator.peaks())

    def limit(workload: str, size: str, **options: int) -> dict[str, Any]:
        return {"scale": largest_scale(workload, size, device, **options)}

    empty = partial(torch.empty, EMPTY_BYTES, dtype=torch.uint8, device=device)

    def empties(count: int, stub: bool = False) -> dict[str, Any]:
        with single_block_arena(empty()) if stub else nullcontext():
            return {"nanoseconds": net_nanoseconds(empty, count)}

    return {"begin": begin, "step": step, "end": end, "limit": limit, "empty": empties}


def single_block_arena(tensor: torch.Tensor) -> AbstractContextManager[None]:
    """Let gpumem's allocator return a tensor's block, and nothing else."""
    from bench.native import load
    from gpumem.integrations.torch import _hooks

    stub: AbstractContextManager[None] = load("_stub").Stub(_hooks.table(), tensor.data_ptr())
    return stub


if __name__ == "__main__":
    main()
