"""Sealed sets: a killed maker, attaching processes, the keeper's memory; kernels over a set.

    python -m bench.sealed [--device cuda:0] [--gib 60] [--json]

The maker fills a set of `--gib` (without it, all that is free but 16 GiB on a GPU, 1 GiB on the
host) and is killed by SIGKILL. Two processes that imported their libraries and made their CUDA
contexts before then open the set, one after the other: milliseconds of the first open and of
another one, the change of the device's used memory, and whether every element is right. The last
of them compares kernels that read a tensor of the set with the same over an arena's memory, in
turn; those over a second arena's memory show how far two places of the same kind differ. A keeper
of its own, in a temporary folder, holds the set until it is dropped.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

import gpumem
from bench import markdown
from bench.harness import interleave
from gpumem import interop
from gpumem.interop import keeper

MIB, GIB = 1 << 20, 1 << 30
NAME = "bench"
ELEMENTS = 32 * MIB  # of a tensor, of 8 bytes each
KEPT_FREE = 16 * GIB  # of a GPU
SIDE = 8192  # of a matrix
SETTLE_SECONDS = 30.0
SLACK = 64 * MIB  # of the free memory, which other processes of a host change
ROUNDS = 15


# ---- processes -----------------------------------------------------------------------------------


def view(tensor: gpumem.Tensor) -> Any:
    """Return an array of NumPy in the host's memory, of PyTorch in a GPU's."""
    if tensor.device.type == "host":
        return tensor.numpy()
    import torch

    return torch.from_dlpack(tensor)


def numbers(like: Any, first: int) -> Any:
    """Return consecutive numbers, as many as an array has elements, in the same memory."""
    if isinstance(like, np.ndarray):
        return np.arange(first, first + len(like))
    import torch

    return torch.arange(first, first + len(like), device=like.device)


def make(device: str, count: int) -> dict[str, Any]:
    """Seal a set of as many tensors."""
    forms = {str(each): ((ELEMENTS,), "int64") for each in range(count)}
    begin = time.perf_counter()
    with interop.seal(NAME, forms, memory=device) as empty:
        allocated = time.perf_counter()
        for place, tensor in enumerate(empty.values()):
            view(tensor)[:] = numbers(view(tensor), place * ELEMENTS)
        gpumem.Device(device).synchronize()
        filled = time.perf_counter()
    ended = time.perf_counter()
    return {"allocate": allocated - begin, "publish": ended - filled}


def attach(device: str) -> dict[str, Any]:
    """Open the set twice, and check every element."""
    used = -gpumem.Device(device).free_bytes
    begin = time.perf_counter()
    kept = interop.open(NAME)
    first = time.perf_counter() - begin
    used += gpumem.Device(device).free_bytes
    begin = time.perf_counter()
    interop.open(NAME).close()
    again = time.perf_counter() - begin
    is_right = all(
        bool((view(tensor) == numbers(view(tensor), place * ELEMENTS)).all())
        for place, tensor in enumerate(kept.values())
    )
    return {"first": first, "again": again, "new_bytes": -used, "right": is_right}


def kernels(device: str) -> dict[str, dict[str, float]]:
    """Return the time of kernels over a tensor of the set, over that of an arena's memory."""
    with interop.open(NAME) as kept:
        tensors = {"sealed": kept["0"]}
        for name in ("arena", "second arena"):
            memory = gpumem.Arena(device).allocate(kept["0"].nbytes)
            tensors[name] = memory.tensor(kept["0"].shape, kept["0"].dtype)
            gpumem.copy(tensors[name], kept["0"])
        candidates = kernels_over({name: view(each) for name, each in tensors.items()})
        gpumem.Device(device).synchronize()
        return {
            kernel: interleave(calls, "arena", rounds=ROUNDS, batch_seconds=0.02).ratios
            for kernel, calls in candidates.items()
        }


def kernels_over(arrays: dict[str, Any]) -> dict[str, dict[str, Callable[[], Any]]]:
    """Return kernels that read each array, with the same other operands, and wait for their end."""
    like = arrays["arena"]
    calls: dict[str, Callable[[Any], Any]]
    if isinstance(like, np.ndarray):
        target = np.empty_like(like)
        calls = {"sum": np.sum, "copy": lambda array: np.copyto(target, array)}
        return {
            name: {key: partial(call, arrays[key]) for key in arrays}
            for name, call in calls.items()
        }
    import torch

    column = torch.ones((SIDE, 1), dtype=torch.float16, device=like.device)
    square = torch.ones((SIDE, SIDE), dtype=torch.float16, device=like.device)
    target = torch.empty_like(like)
    places = torch.randint(0, len(like), (len(like) // 8,), device=like.device)

    def matrix(array: Any) -> Any:
        return array.view(torch.float16)[: SIDE * SIDE].view(SIDE, SIDE)

    calls = {
        "sum": lambda array: array.sum(),
        "copy": lambda array: target.copy_(array),
        "gather": lambda array: array[places],
        "matrix by vector": lambda array: matrix(array) @ column,
        "matrix by matrix": lambda array: matrix(array) @ square,
    }

    def waiting(call: Callable[[Any], Any], array: Any) -> None:
        call(array)
        torch.cuda.synchronize(array.device)

    return {
        name: {key: partial(waiting, call, arrays[key]) for key in arrays}
        for name, call in calls.items()
    }


def serve(device: str) -> None:
    """Answer calls of this module by their names and arguments, one a line, until stdin ends."""
    view(gpumem.zeros((MIB,), "uint8", memory=device))  # opens the device, and imports the library
    gpumem.Device(device).synchronize()
    print("ready", flush=True)
    calls: dict[str, Callable[..., Any]] = {"make": make, "attach": attach, "kernels": kernels}
    for line in sys.stdin:
        call, *arguments = json.loads(line)
        print(json.dumps(calls[call](device, *arguments)), flush=True)


class Process:
    """A process that answers calls; it is ready when it has been made."""

    def __init__(self, device: str) -> None:
        command = [sys.executable, "-c", f"from bench.sealed import serve; serve({device!r})"]
        pipe = subprocess.PIPE
        self.process = subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True)

    def line(self) -> str:
        assert self.process.stdout is not None
        if not (line := self.process.stdout.readline()):
            raise ChildProcessError(f"a process ended with {self.process.wait()}")
        return line

    def ask(self, *call: Any) -> Any:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(call) + "\n")
        self.process.stdin.flush()
        return json.loads(self.line())

    def end(self, number: int = signal.SIGTERM) -> None:
        self.process.send_signal(number)
        self.process.communicate()


# ---- the whole -----------------------------------------------------------------------------------


def memory_of_keeper(folder: str) -> dict[str, Any]:
    """Return MiB of the keeper's own memory, and the GPU libraries and devices it has mapped."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as peer:
        peer.connect(f"{folder}/keeper")
        process, _ = keeper.peer_of(peer)
    sizes = dict(
        re.findall(r"^(\w+): +(\d+) kB", Path(f"/proc/{process}/smaps_rollup").read_text(), re.M)
    )
    maps = Path(f"/proc/{process}/maps").read_text()
    found = {name: int(sizes[name]) / 1024 for name in ("Rss", "Pss")}
    return found | {"mapped": sorted(set(re.findall(r"\S*(?:cuda|nvidia)\S*", maps)))}


def measure(device: str, nbytes: int) -> dict[str, Any]:
    """Measure all in a folder of its own."""
    count = nbytes // (ELEMENTS * 8)
    report: dict[str, Any] = {"GiB": count * ELEMENTS * 8 / GIB}
    with tempfile.TemporaryDirectory(prefix="gpumem-bench-") as folder:
        os.environ["GPUMEM_KEEPER"] = folder
        processes = [Process(device) for _ in range(3)]
        try:
            for each in processes:
                each.line()
            maker, *others = processes
            free = gpumem.Device(device).free_bytes
            report["made"] = maker.ask("make", count)
            maker.end(signal.SIGKILL)
            report["attached"] = [each.ask("attach") for each in others]
            report["keeper"] = memory_of_keeper(folder)
            report["parts"] = interop.sealed_sets()[0]["parts"]
            report["kernels"] = others[-1].ask("kernels")
        finally:
            for each in processes:
                each.end()
            if interop.sealed_sets():
                interop.drop(NAME, force=True)
        until = time.monotonic() + SETTLE_SECONDS
        # The ended processes had contexts, so that on a GPU more is free than before. The host's
        # free memory changes by itself.
        while gpumem.Device(device).free_bytes < free - SLACK and time.monotonic() < until:
            time.sleep(0.1)
        report["not_released"] = max(free - gpumem.Device(device).free_bytes, 0)
        while os.path.exists(f"{folder}/keeper"):
            time.sleep(0.1)  # it holds nothing any more, and ends
    return report


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.sealed", description=__doc__)
    parser.add_argument("--device", default=None, help="cuda:0 if there is one, else host")
    parser.add_argument("--gib", type=float, default=None)
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    device = given.device or ("cuda:0" if gpumem.driver_status().available else "host")
    os.environ.setdefault("GPUMEM_KEEPER_IDLE", "1")
    if given.gib is not None:
        nbytes = int(given.gib * GIB)
    else:
        nbytes = GIB if device == "host" else gpumem.Device(device).free_bytes - KEPT_FREE
    report = measure(device, nbytes)
    if given.json:
        print(json.dumps(report))
        return
    made = ", ".join(f"{what} {1e3 * spent:.0f} ms" for what, spent in report["made"].items())
    print(f"{report['GiB']:g} GiB in {report['parts']} parts: {made}\n")
    rows = [
        [
            name,
            f"{1e3 * each['first']:.1f}",
            f"{1e3 * each['again']:.1f}",
            f"{each['new_bytes'] / MIB:.1f}",
            "yes" if each["right"] else "NO",
        ]
        for name, each in zip(("second process", "third process"), report["attached"], strict=True)
    ]
    heads = ("after the maker's death", "open, ms", "again, ms", "new memory, MiB", "bytes right")
    print(markdown.table(heads, rows), end="\n\n")
    kept = report["keeper"]
    print(f"keeper: {kept['Rss']:.1f} MiB resident, {kept['Pss']:.1f} proportional; ", end="")
    print(f"of a GPU it has mapped {kept['mapped'] or 'nothing'}")
    print(f"after the drop: {report['not_released'] / MIB:.1f} MiB are not released\n")
    body = [
        [kernel, f"{each['sealed']:.3f}", f"{each['second arena']:.3f}"]
        for kernel, each in report["kernels"].items()
    ]
    print(markdown.table(("kernel", "sealed set / arena", "second arena / arena"), body))


if __name__ == "__main__":
    main()
