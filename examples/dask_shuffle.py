"""Two Dask workers on one host pass tensors to each other without a copy, under a budget each.

One worker makes tensors, the other one sums them up. What a worker has no room for is spilled to
host memory, and comes back when a task wants it. Runs anywhere; with a GPU its memory is used:

    python examples/dask_shuffle.py
    python examples/dask_shuffle.py cuda:0
"""

from __future__ import annotations

import logging
import sys

import numpy as np

import gpumem
from gpumem.integrations import dask as gpumem_dask

try:
    from distributed import Client, LocalCluster, wait
except ImportError as error:
    print(f"this example needs Dask's distributed: {error}")
    sys.exit()

MIB = 1 << 20
TENSORS = 6


def make(value: int) -> gpumem.Tensor:
    """Return 8 MiB, out of the arena of the worker that this runs on."""
    return gpumem.full((8 * MIB,), value, "uint8", memory=memory_here())


def total(*tensors: gpumem.Tensor) -> int:
    """Sum up every byte."""
    return sum(int(each.to("host").numpy().sum(dtype=np.int64)) for each in tensors)


def memory_here() -> gpumem.MemoryInfo:
    """Return the memory that the worker was set up with."""
    (arena,) = gpumem_dask.status().resources.values()
    return arena.memory


def main(memory: str) -> int:
    """Make the tensors on one worker, sum them up on the other, and say how they travelled."""
    with (
        LocalCluster(
            n_workers=2,
            threads_per_worker=1,
            dashboard_address=":0",
            # Dask logs an error if the cluster closes while a worker sends its heartbeat.
            silence_logs=logging.CRITICAL,
        ) as cluster,
        Client(cluster) as client,
    ):
        client.register_plugin(gpumem_dask.plugin(memory, budget="32MiB"))
        first, second = sorted(gpumem_dask.cluster_memory(client))
        tensors = [client.submit(make, value, workers=[first]) for value in range(TENSORS)]
        wait(tensors)
        spilled = gpumem_dask.cluster_memory(client)[first].spilled
        print(f"{TENSORS * 8} MiB made in 32 MiB: {spilled // MIB} MiB are on the host for now")
        sums = [client.submit(total, each, workers=[second]).result() for each in tensors]
        seen = gpumem_dask.cluster_memory(client)
        print(f"sums over {8 * MIB}: {[each // (8 * MIB) for each in sums]}")
        print(
            f"passed on: {seen[first].sent_descriptors} tensors by descriptor, "
            f"{seen[first].sent_bytes} bytes copied; "
            f"at most {max(each.peak for each in seen.values()) // MIB} MiB in a worker"
        )
        return int(sums != [value * 8 * MIB for value in range(TENSORS)])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1] if len(sys.argv) > 1 else "host"))
