"""A tensor passed from one Dask worker to another on the same host: as a descriptor, as bytes.

Two workers as processes. Each pass is a task on one worker that wants a result of the other; what
is timed is the receiver's request until it has the tensor, as its own log of transfers says, and a
whole task, from `submit` to its result. Without gpumem's plugin in the receiver the same tensors
travel as bytes.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from typing import Any

from rich.console import Console
from rich.table import Table

import gpumem

MIB = 1 << 20


def made(nbytes: int) -> gpumem.Tensor:
    """Make a tensor that has its memory already."""
    from gpumem.integrations import dask as gpumem_dask

    (arena,) = gpumem_dask.status().resources.values()
    tensor = gpumem.empty((nbytes,), "uint8", memory=arena.memory)
    tensor.fill(1)
    tensor.buffer.stream.synchronize()
    return tensor


def view(tensor: gpumem.Tensor, number: int) -> gpumem.Tensor:
    """Return another result in the same memory, so that each pass is of a new one."""
    return tensor[:]


def last(tensor: gpumem.Tensor) -> int:
    return int(tensor[-1].item())


def transfers(dask_worker: Any = None) -> list[float]:
    return [each["duration"] for each in dask_worker.transfer_incoming_log]


def announce(value: Any, sender: str, dask_worker: Any = None) -> Any:
    """Set the worker's announcement to the sender; return the earlier one."""
    overrides = dask_worker.rpc.connection_args["handshake_overrides"]
    before = overrides.pop("gpumem", None)
    if value is not None:
        overrides["gpumem"] = value
    # Open connections know the announcement of the time when they were made.
    dask_worker.rpc.remove(sender)
    return before


def passes(memory: str, nbytes: int, rounds: int, *, bytes_too: bool = True) -> dict[str, Any]:
    """Measure it here and now; milliseconds, and bytes that were copied, by the way of passing."""
    from distributed import Client, LocalCluster, wait

    from gpumem.integrations import dask as gpumem_dask

    with (
        LocalCluster(
            n_workers=2, threads_per_worker=1, dashboard_address=":0", memory_limit=0
        ) as cluster,
        Client(cluster) as client,
    ):
        client.register_plugin(gpumem_dask.plugin(memory, budget=6 * nbytes))
        one, other = sorted(gpumem_dask.cluster_memory(client))
        whole = client.submit(made, nbytes, workers=[one], pure=False)
        wait(whole)
        said = client.run(announce, None, one, workers=[other])[other]
        samples: dict[str, dict[str, list[float]]] = {}
        ways = {"descriptor": said, "bytes": None} if bytes_too else {"descriptor": said}
        for way, value in ways.items():
            client.run(announce, value, one, workers=[other])
            for number in range(-1, rounds):
                each = client.submit(view, whole, number, workers=[one], pure=False)
                wait(each)
                before = gpumem_dask.cluster_memory(client)[one].sent_bytes
                begin = time.perf_counter()
                byte = client.submit(last, each, workers=[other], pure=False).result()
                task = 1e3 * (time.perf_counter() - begin)
                if byte != 1:
                    raise RuntimeError(f"the tensor arrived as {byte}")
                copied = gpumem_dask.cluster_memory(client)[one].sent_bytes - before
                seconds = client.run(transfers, workers=[other])[other][-1]
                if number >= 0:  # the first one connects
                    row = samples.setdefault(way, {"transfer": [], "task": [], "copied": []})
                    row["transfer"].append(1e3 * seconds)
                    row["task"].append(task)
                    row["copied"].append(copied)
                del each
    return {
        way: {name: statistics.median(values) for name, values in row.items()}
        | {"fastest transfer": min(row["transfer"])}
        for way, row in samples.items()
    }


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.dask_passes", description=__doc__)
    parser.add_argument("--memory", default="host")
    parser.add_argument("--mib", type=int, default=1024, help="of the tensor")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--descriptors-only", action="store_true")
    parser.add_argument("--json", action="store_true")
    chosen = parser.parse_args()
    found = passes(
        chosen.memory, chosen.mib * MIB, chosen.rounds, bytes_too=not chosen.descriptors_only
    )
    if chosen.json:
        print(json.dumps(found))
        return 0
    table = Table("way", "transfer, ms", "fastest", "task, ms", "bytes copied")
    for way, row in found.items():
        table.add_row(
            way,
            f"{row['transfer']:.2f}",
            f"{row['fastest transfer']:.2f}",
            f"{row['task']:.1f}",
            f"{row['copied']:.0f}",
        )
    Console().print(table)
    return 0


if __name__ == "__main__":
    sys.exit(main())
