"""Allocations under other libraries: theirs, and theirs over gpumem, from Python."""

from __future__ import annotations

import argparse
import importlib.util
import json
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import gpumem
from bench import calls, markdown, rmm_shapes
from bench.children import Child, ask_all, ask_in_turn
from bench.harness import Timing, interleave, timing_of

NBYTES = 1 << 20
RMM_BYTES = 1 << 30  # that RMM's arena begins with
ROUNDS = 25
TORCH_BATCH = 4000
TORCH_CONFIGURATIONS = ("native", "expandable", "full", "pool")

# table -> candidate -> what its ratio to the reference has to reach
AT_MOST = {
    "cupy.empty": {"gpumem": 0.9},
    "torch.empty": {"full": 0.78},
    "rmm.DeviceBuffer": {"gpumem": 0.8},
}
_RMM = {"rmm.mr.PoolMemoryResource": 10.0, "rmm.mr.ArenaMemoryResource": 3.0}
AT_LEAST = {"random allocations 1000/4096": _RMM, "random allocations 10000/1": _RMM}


def cupy_empty() -> Timing:
    """Make 1 MiB arrays with CuPy, over its own pool and over an arena, in turn."""
    cupy = importlib.import_module("cupy")
    integration = importlib.import_module("gpumem.integrations.cupy")
    arena = gpumem.Arena("cuda:0")
    own = cupy.cuda.MemoryPool()

    def empty() -> Any:
        return cupy.empty(NBYTES, cupy.uint8)

    return interleave(
        {"CuPy's pool": empty, "gpumem": empty},
        "CuPy's pool",
        rounds=ROUNDS,
        around={
            "CuPy's pool": lambda: cupy.cuda.using_allocator(own.malloc),
            "gpumem": lambda: integration.using(arena),
        },
    )


def rmm_buffer(memory: str = "cuda:0") -> Timing:
    """Make 1 MiB buffers with RMM, over its own arena and over one of gpumem, in turn.

    Raises
    ------
    RuntimeError
        This RMM cannot call an arena without the interpreter; the message says why.
    """
    rmm = importlib.import_module("rmm")
    integration = importlib.import_module("gpumem.integrations.rmm")
    arena = gpumem.Arena(memory)
    with integration.using(arena):
        reason = integration.status().why_python
    if reason is not None:
        raise RuntimeError(f"RMM has to call Python: {reason}")
    own = rmm.mr.ArenaMemoryResource(rmm.mr.CudaMemoryResource(), RMM_BYTES)

    @contextmanager
    def over_own() -> Iterator[None]:
        before = rmm.mr.get_per_device_resource(0)
        rmm.mr.set_per_device_resource(0, own)
        try:
            yield
        finally:
            rmm.mr.set_per_device_resource(0, before)

    def buffer() -> Any:
        return rmm.DeviceBuffer(size=NBYTES)

    return interleave(
        {"RMM's arena": buffer, "gpumem": buffer},
        "RMM's arena",
        rounds=ROUNDS,
        around={"RMM's arena": over_own, "gpumem": lambda: integration.using(arena)},
    )


def torch_empty(device: str = "cuda") -> Timing:
    """Make 1 MiB tensors in processes with one allocator each, in turn.

    "full, one block" is gpumem's hook without an allocator: every tensor has one address.
    """
    if importlib.util.find_spec("torch") is None:
        raise ImportError("torch is not installed")
    request = {"do": "empty", "count": TORCH_BATCH}
    with ExitStack() as stack:
        started = [stack.enter_context(Child(name, device)) for name in TORCH_CONFIGURATIONS]
        warm = ask_all(started, request)
        for name, answer in warm.items():
            if "error" in answer:
                print(f"torch.empty, {name}: {answer['error']}", file=sys.stderr)
        children = [child for child in started if "error" not in warm[child.configuration]]
        rounds = []
        for _ in range(ROUNDS):
            rounds.append(ask_in_turn(children, request))
            for child in children:
                if child.configuration == "full":
                    rounds[-1]["full, one block"] = child.ask(request | {"stub": True})
    samples = {name: [answers[name]["nanoseconds"] for answers in rounds] for name in rounds[0]}
    return timing_of(samples, "native")


MEASUREMENTS: dict[str, Callable[[], Timing | None]] = {
    "torch.empty": torch_empty,  # first: the other processes find a device without our pools
    "cupy.empty": cupy_empty,
    "rmm.DeviceBuffer": rmm_buffer,
    "random allocations 1000/4096": lambda: rmm_shapes.random_allocations(1000, 4096),
    "random allocations 10000/1": lambda: rmm_shapes.random_allocations(10_000, 1),
    "allocations on four streams": rmm_shapes.multi_stream,
    "one allocation of 1 MiB": calls.gpu_calls,
}


def measured(names: list[str]) -> tuple[dict[str, Timing], dict[str, str]]:
    """Measure; returns the timings, and why there are no others."""
    timings: dict[str, Timing] = {}
    absent: dict[str, str] = {}
    for name in names:
        try:
            timing = MEASUREMENTS[name]()
        except Exception as error:  # one library that fails does not cost the others their tables
            if not isinstance(error, ImportError):
                traceback.print_exc()
            absent[name] = f"{type(error).__name__}: {error}"
            continue
        if timing is None:
            absent[name] = "not on this machine"
        else:
            timings[name] = timing
    return timings, absent


def text(timings: dict[str, Timing], absent: dict[str, str]) -> str:
    """Make the tables."""
    parts = []
    for name, timing in timings.items():
        body = [
            [call, f"{spent:.0f}", f"{timing.ratios[call]:.3f}", goal(name, call)]
            for call, spent in timing.nanoseconds.items()
        ]
        parts.append(markdown.table([name, "ns", f"/ {timing.reference}", "goal"], body))
    if absent:
        parts.append(markdown.table(["absent", "why"], [list(pair) for pair in absent.items()]))
    return "\n\n".join(parts)


def goal(name: str, call: str) -> str:
    most, least = AT_MOST.get(name, {}).get(call), AT_LEAST.get(name, {}).get(call)
    if most is not None:
        return f"<= {most:g}"
    return f">= {least:g}" if least is not None else ""


def main() -> int:
    """Measure, write, print."""
    parser = argparse.ArgumentParser(prog="python -m bench.frameworks", description=__doc__)
    parser.add_argument("--only", nargs="+", choices=MEASUREMENTS, default=list(MEASUREMENTS))
    parser.add_argument("--out", type=Path, help="folder for frameworks.json and frameworks.md")
    chosen = parser.parse_args()
    if not gpumem.driver_status().available:
        parser.error("no CUDA device: gpumem info says why")
    timings, absent = measured(chosen.only)
    if chosen.out:
        values = {"timings": {name: asdict(t) for name, t in timings.items()}, "absent": absent}
        chosen.out.mkdir(parents=True, exist_ok=True)
        (chosen.out / "frameworks.json").write_text(json.dumps(values, indent=1) + "\n")
        (chosen.out / "frameworks.md").write_text(text(timings, absent) + "\n")
    print(text(timings, absent))
    return 0


if __name__ == "__main__":
    sys.exit(main())
