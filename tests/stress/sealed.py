"""Sealed sets that are made, opened and dropped by processes which are killed at any moment."""

from __future__ import annotations

import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import numpy as np

import gpumem
from gpumem import interop
from gpumem.interop import keeper

COUNT = 1 << 19  # elements of a tensor
SET_BYTES = 2 * 8 * COUNT
MAX_SECONDS = 0.06  # from the maker's first set to its death
WORKERS = min(12, os.cpu_count() or 1)  # makers at once
SETTLE_SECONDS = 60.0
MAKER = """
import itertools, sys
import numpy as np
import gpumem
from gpumem import interop
name, device, count = sys.argv[1], sys.argv[2], int(sys.argv[3])
numbers = np.arange(count)
gpumem.empty((1,), "u1", memory=device)
print("begin", flush=True)
for turn in itertools.count():
    forms = {key: ((count,), "int64") for key in "ab"}
    with interop.seal(f"{name}/{turn}", forms, memory=device) as made:
        for tensor in made.values():
            gpumem.copy(tensor, numbers)
    interop.open(f"{name}/{turn}").close()
    if turn:
        interop.drop(f"{name}/{turn - 1}")
"""


def run_sealed(device: str, seed: int, rounds: int) -> int:
    """Run rounds of makers and their deaths; return the exit code."""
    rng = random.Random(seed)
    with tempfile.TemporaryDirectory(prefix="gpumem-stress-") as folder:
        os.environ |= {"GPUMEM_KEEPER": folder, "GPUMEM_KEEPER_IDLE": "1"}
        # It opens the device, and starts the keeper, which does not end before the set is dropped.
        interop.seal("first", {"a": np.arange(3)}, memory=device).close()
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as peer:
            peer.connect(f"{folder}/keeper")
            process, _ = keeper.peer_of(peer)
        sizes: dict[str, Callable[[], int]] = {
            "descriptors of the keeper": lambda: _descriptors_of(process),
            "descriptors": lambda: _descriptors_of(os.getpid()),
        }
        _round(device, "warm", MAX_SECONDS)  # the driver keeps some memory from its first work on
        _wait_until(lambda: not _users())
        free = gpumem.Device(device).free_bytes
        if not device.startswith("host"):  # other programs change the host's
            sizes["bytes"] = lambda: max(free - gpumem.Device(device).free_bytes - SET_BYTES + 1, 0)
        before = {what: size() for what, size in sizes.items()}
        moments = [rng.uniform(0, MAX_SECONDS) for _ in range(rounds)]
        names = [f"round{number}" for number in range(rounds)]
        begin = time.monotonic()
        with ThreadPoolExecutor(WORKERS) as threads:
            found = sum(threads.map(lambda *each: _round(device, *each), names, moments))
        print(f"{rounds} makers killed in {time.monotonic() - begin:.0f} s", flush=True)
        left = [
            f"{size() - before[what]} {what}"
            for what, size in sizes.items()
            if not _wait_until(lambda size=size, what=what: size() <= before[what])
        ]
        interop.drop("first", force=True)
        if not _wait_until(lambda: not os.path.exists(f"{folder}/keeper")):
            left.append("the keeper's process")
        left += sorted(set(os.listdir(folder)) - {"lock"})
    print(f"{found} sets were whole after it; left: {', '.join(left) or 'none'}")
    return int(bool(left))


def _round(device: str, name: str, moment: float) -> int:
    """Kill a maker, then check and drop the sets that are kept; return how many there were."""
    command = [sys.executable, "-c", MAKER, name, device, str(COUNT)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as maker:
        assert maker.stdout is not None
        assert maker.stdout.readline() == "begin\n", "the maker failed"
        time.sleep(moment)
        maker.kill()
    assert maker.returncode == -signal.SIGKILL, f"the maker ended with {maker.returncode}"
    kept = [each["name"] for each in interop.sealed_sets() if each["name"].startswith(f"{name}/")]
    for each in kept:
        with interop.open(each) as found:
            for key in "ab":
                np.testing.assert_array_equal(found[key].to("host").numpy(), np.arange(COUNT))
        interop.drop(each, force=True)
    return len(kept)


def _users() -> list[int]:
    return [user for each in interop.sealed_sets() for user in each["users"]]


def _descriptors_of(process: int) -> int:
    return len(os.listdir(f"/proc/{process}/fd"))


def _wait_until(is_true: Callable[[], bool]) -> bool:
    until = time.monotonic() + SETTLE_SECONDS
    while not is_true():
        if time.monotonic() > until:
            return False
        time.sleep(0.01)
    return True
