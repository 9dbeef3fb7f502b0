"""The cost of an arena, a stream and a thread: host memory, addresses, mappings, time.

python -m bench.limits [--memory cuda:0] [--arenas 1000] [--streams 1000] [--threads 1000]
"""

from __future__ import annotations

import argparse
import threading
import time
from collections.abc import Callable
from pathlib import Path

import gpumem


def held() -> tuple[int, int, int]:
    """Return resident bytes, bytes of addresses and mappings of this process."""
    lines = Path("/proc/self/status").read_text().splitlines()
    fields = dict(line.split(":", 1) for line in lines)
    kib = [int(fields[name].split()[0]) for name in ("VmRSS", "VmSize")]
    return kib[0] << 10, kib[1] << 10, len(Path("/proc/self/maps").read_text().splitlines())


def cost(count: int, make: Callable[[], object]) -> None:
    """Make `count` objects and print the cost of each."""
    made = [make()]  # the first one opens the device
    before, begin = held(), time.perf_counter()
    made += [make() for _ in range(count)]
    seconds = time.perf_counter() - begin
    resident, addresses, mappings = (
        (now - then) / count for now, then in zip(held(), before, strict=True)
    )
    print(
        f"{make.__name__:8} x {count}: {seconds / count * 1e6:8.1f} us, "
        f"{resident / 1024:6.1f} KiB, {addresses / 1e9:6.2f} GB of addresses, "
        f"{mappings:4.1f} mappings"
    )


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.limits", description=__doc__)
    parser.add_argument("--memory", default="host")
    for name in ("arenas", "streams", "threads"):
        parser.add_argument(f"--{name}", type=int, default=1000)
    chosen = parser.parse_args()
    shared = gpumem.Arena(chosen.memory)
    end = threading.Event()
    ready = threading.Semaphore(0)

    def arena() -> object:
        return gpumem.Arena(chosen.memory).allocate(1000)

    def stream() -> object:
        made = gpumem.Stream(shared.memory.device)
        return made, shared.allocate(1000, made)

    def work() -> None:
        shared.allocate(1000).close()
        ready.release()
        end.wait()

    def thread() -> object:
        made = threading.Thread(target=work)
        made.start()
        ready.acquire()
        return made

    cost(chosen.streams, stream)
    cost(chosen.threads, thread)
    end.set()
    cost(chosen.arenas, arena)  # last: the memory that they free would hide the cost of others


if __name__ == "__main__":
    main()
