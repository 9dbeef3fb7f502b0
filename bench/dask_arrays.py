"""dask-cuda's benchmark of CuPy arrays, over RMM's pool and over gpumem: time, and bytes held.

    python -m bench.dask_arrays [--devices 0,1] [--size 20000] [--rounds 5] [--operations OP ...]

Two clusters, each with a worker for every device. The operations are dask-cuda's own
(`dask_cuda.benchmarks.local_cupy`), and both clusters do them in turn, round after round. RMM's
pool begins with `--pool` bytes and grows; over gpumem each worker has gpumem's plugin, with RMM
and CuPy enabled. A time is the median over rounds, a ratio the median of the rounds' ratios. Bytes
are the highest that each worker's pool or arena had of its device until then, summed over workers.
`--host` tries it without a GPU: NumPy's arrays, which use neither pool.
"""

from __future__ import annotations

import argparse
import statistics
from contextlib import AbstractContextManager, ExitStack
from typing import Any

from bench import markdown
from bench.harness import ratios_within_rounds

OPERATIONS = ("transpose_sum", "dot", "fft", "sum", "slice", "col_sum", "col_mask", "col_gather")
FLAT = ("col_sum", "col_mask", "col_gather")  # of vectors
CONFIGURATIONS = ("RMM pool", "gpumem")


def held() -> int:
    """In a worker: the highest bytes that its arena or its pool had of the device."""
    from gpumem.integrations import dask as gpumem_dask

    status = gpumem_dask.status()
    if status.enabled:
        return sum(arena.stats().max_reserved for arena in status.resources.values())
    import rmm

    return int(rmm.mr.get_current_device_resource().pool_size())


def cluster_of(name: str, given: argparse.Namespace) -> AbstractContextManager[Any]:
    """Return a cluster of processes for a configuration."""
    if given.host:
        from distributed import LocalCluster

        return LocalCluster(
            n_workers=2, threads_per_worker=1, dashboard_address=":0", memory_limit=0
        )
    from dask_cuda import LocalCUDACluster

    pool = {"rmm_pool_size": given.pool, "rmm_allocator_external_lib_list": "cupy"}
    return LocalCUDACluster(
        CUDA_VISIBLE_DEVICES=given.devices,
        protocol="tcp",
        dashboard_address=":0",
        **(pool if name == "RMM pool" else {}),
    )


def measured(given: argparse.Namespace) -> list[list[str]]:
    """Run every operation over each configuration in turn; return the table's rows."""
    from dask_cuda.benchmarks.local_cupy import bench_once
    from distributed import Client

    from gpumem.integrations import dask as gpumem_dask

    rows = []
    with ExitStack() as stack:
        clients = {}
        for name in CONFIGURATIONS:
            cluster = stack.enter_context(cluster_of(name, given))
            clients[name] = stack.enter_context(Client(cluster, set_as_default=False))
        memory, enable = ("host", ()) if given.host else (None, ("rmm", "cupy"))
        clients["gpumem"].register_plugin(gpumem_dask.plugin(memory, enable=enable))
        for operation in given.operations:
            flat = operation in FLAT
            asked = argparse.Namespace(
                operation=operation,
                type="cpu" if given.host else "gpu",
                size=given.size**2 // 8 if flat else given.size,
                second_size=given.size**2 // 16 if flat else 1000,
                chunk_size=given.chunk**2 if flat else given.chunk,
                backend="dask",
            )
            samples: dict[str, list[float]] = {name: [] for name in CONFIGURATIONS}
            for number in range(-1, given.rounds):
                for name, client in clients.items():
                    with client.as_current():
                        took = bench_once(client, asked)["took"]
                    if number >= 0:  # the first one compiles
                        samples[name].append(took)
            ratios = ratios_within_rounds(samples, "RMM pool")
            most = {
                name: 0 if given.host else sum(client.run(held).values())
                for name, client in clients.items()
            }
            for name, seconds in samples.items():
                spent = f"{1e3 * statistics.median(seconds):.0f}"
                share = f"{most[name] / most['RMM pool']:.3f}" if most["RMM pool"] else "-"
                mib = f"{most[name] >> 20}"
                rows.append([operation, name, spent, f"{ratios[name]:.3f}", mib, share])
                print(*rows[-1], flush=True)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.dask_arrays", description=__doc__)
    parser.add_argument("--devices", default="0,1")
    parser.add_argument("--size", type=int, default=20000, help="rows and columns of an array")
    parser.add_argument("--chunk", type=int, default=2500, help="rows and columns of a part")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--pool", default="1GiB", help="with which RMM's pool begins")
    parser.add_argument("--operations", nargs="+", choices=OPERATIONS, default=OPERATIONS)
    parser.add_argument("--host", action="store_true", help="without a GPU")
    rows = measured(parser.parse_args())
    header = ["operation", "memory", "ms", "time / RMM's", "MiB held", "held / RMM's"]
    print(markdown.table(header, rows))


if __name__ == "__main__":
    main()
