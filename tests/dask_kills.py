"""Kill Dask's workers at random moments of a shuffle, and see that nothing is wrong or left.

    python -m tests.dask_kills                        20 kills
    python -m tests.dask_kills --kills 100 --seed 7   more, with a seed that was printed

Each input is cut into a piece for each output, and each output put together of pieces of all
inputs, on three workers whose tensors travel as descriptors. Killed workers are started again.
Afterwards the outputs are compared with NumPy's, and the workers asked for what they hold. Exit
code 1: a wrong output, or something left.
"""

from __future__ import annotations

import argparse
import contextlib
import logging
import os
import random
import signal
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parent))  # as pytest does; workers get it, too

from helpers import dask_tasks
from helpers.waiting import wait_until

WORKERS = 3
INPUTS, OUTPUTS, PIECE = 6, 6, 1 << 18


def expected() -> list[int]:
    """Compute the outputs' digests with NumPy alone."""
    inputs = [
        np.random.default_rng(seed).integers(0, 256, OUTPUTS * PIECE, "uint8")
        for seed in range(INPUTS)
    ]
    weights = np.arange(1, INPUTS * PIECE + 1, dtype=np.uint64)
    outputs = [
        np.concatenate([each[number * PIECE : (number + 1) * PIECE] for each in inputs])
        for number in range(OUTPUTS)
    ]
    return [int((output.astype(np.uint64) * weights).sum()) for output in outputs]


def shuffle(client: Any) -> list[Any]:
    """Submit it; returns the futures of the digests."""
    pieces = []
    for seed in range(INPUTS):
        whole = client.submit(dask_tasks.part, seed, OUTPUTS * PIECE, pure=False)
        cut = client.submit(dask_tasks.split, whole, OUTPUTS, pure=False)
        pieces.append([client.submit(take, cut, at, pure=False) for at in range(OUTPUTS)])
    joined = [
        client.submit(dask_tasks.join, *[each[at] for each in pieces], pure=False)
        for at in range(OUTPUTS)
    ]
    return [client.submit(dask_tasks.digest, each, pure=False) for each in joined]


def take(pieces: tuple[Any, ...], at: int) -> Any:
    return pieces[at]


def pids(cluster: Any) -> list[int]:
    return [each.pid for each in cluster.workers.values() if each.pid]


def members(client: Any) -> list[Any]:
    """Return what each worker that is set up says of its memory."""
    from gpumem.integrations import dask as gpumem_dask

    return [each for each in gpumem_dask.cluster_memory(client).values() if each is not None]


def kill_some(client: Any, kills: int, chosen: random.Random) -> tuple[int, set[int]]:
    """Shuffle until so many workers were killed; returns the shuffles, and the killed processes."""
    right, killed, shuffles = expected(), set(), 0
    while len(killed) < kills:
        futures = shuffle(client)
        while len(killed) < kills and not all(each.done() for each in futures):
            time.sleep(chosen.uniform(0, 0.4))
            # Dask gives up on a process that ends before it is a worker.
            running = [each.pid for each in members(client) if each.pid not in killed]
            if running and not all(each.done() for each in futures):
                pid = chosen.choice(running)
                with contextlib.suppress(ProcessLookupError):  # its nanny was faster
                    os.kill(pid, signal.SIGKILL)
                    killed.add(pid)
        assert client.gather(futures) == right, "a shuffle's result is wrong"
        shuffles += 1
    return shuffles, killed


def left_over(cluster: Any, client: Any, killed: set[int]) -> list[str]:
    """Return what is left of the shuffles: wait until workers that live hold nothing."""
    wait_until(lambda: len(members(client)) == WORKERS)

    def held() -> list[Any]:
        return [each for each in members(client) if each.used or each.offers or each.spilled]

    with contextlib.suppress(AssertionError):  # then it is told what there is
        wait_until(lambda: not held())

    def shared_memory() -> list[str]:
        return [line for pid in pids(cluster) for line in dask_tasks.memory_files(pid)]

    with contextlib.suppress(AssertionError):  # then it is told what there is
        wait_until(lambda: not shared_memory(), patience_s=20)
    found = [str(each) for each in held()] + shared_memory()
    sockets = Path("/proc/net/unix").read_text()
    found += [f"the socket of {pid}" for pid in killed if f"@gpumem-{pid}-" in sockets]
    found += [f"process {pid}" for pid in killed if Path(f"/proc/{pid}").exists()]
    return found


def run(kills: int, seed: int) -> str:
    """Do it all; returns a line that says what was done."""
    import dask
    from distributed import Client, LocalCluster

    from gpumem.integrations import dask as gpumem_dask

    settings = {
        "distributed.scheduler.allowed-failures": 10 * kills + 10,
        # A cluster gives up on a worker that is killed again while it starts.
        "distributed.deploy.lost-worker-timeout": "1 hour",
    }
    shared = set(os.listdir("/dev/shm"))
    with (
        tempfile.TemporaryDirectory() as folder,
        dask.config.set(settings),
        LocalCluster(
            n_workers=WORKERS,
            threads_per_worker=1,
            dashboard_address=":0",
            local_directory=folder,
            silence_logs=logging.CRITICAL + 1,
        ) as cluster,
        Client(cluster) as client,
    ):
        plugin = gpumem_dask.plugin("host", budget="64MiB", share_from="64KiB", expires=5)
        client.register_plugin(plugin)
        assert client.gather(shuffle(client)) == expected(), "without any kill"
        assert sum(each.sent_descriptors for each in members(client)), "no tensor was shared"
        begin = time.monotonic()
        shuffles, killed = kill_some(client, kills, random.Random(seed))
        found = left_over(cluster, client, killed)
        seconds = time.monotonic() - begin
        named = [str(each) for each in Path(folder).rglob("*gpumem*")]
    found += named + [name for name in set(os.listdir("/dev/shm")) - shared if "gpumem" in name]
    assert not found, f"left: {found}"
    return (
        f"seed {seed}: {len(killed)} workers killed in {shuffles} shuffles, {seconds:.0f} s; every "
        f"result right; 0 bytes, descriptors, files left"
    )


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--seed", type=int, default=random.randrange(1 << 32))
    chosen = parser.parse_args()
    print(f"seed {chosen.seed}", flush=True)
    print(run(chosen.kills, chosen.seed))
    return 0


if __name__ == "__main__":
    sys.exit(main())
