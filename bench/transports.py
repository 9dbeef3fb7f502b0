"""One GPU's memory read by a process with another GPU, through NIXL (UCX): which memory it likes.

A process holds a block of each kind of memory, registered with NIXL; another one reads them in
turn, into memory of the same kind of its own. Needs the package ``nixl``.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from contextlib import ExitStack
from typing import Any

import gpumem
from bench import markdown
from bench.children import ROOT, SHARED_HOST
from bench.harness import ratios_within_rounds
from bench.peers import Driver

MIB = 1 << 20
REFERENCE = "cudaMalloc's memory"
VALUE = 0x5A  # of every byte that is read


class Blocks:
    """A block of each kind of memory on one device, kept and registered."""

    def __init__(self, index: int, nbytes: int, value: int, stack: ExitStack) -> None:
        from nixl._api import nixl_agent, nixl_agent_config

        self.driver = Driver()
        self.driver.use(index)
        self.index, self.nbytes = index, nbytes
        arena = gpumem.Arena(f"cuda:{index}")
        registrable, page = arena.allocate(nbytes, transport="ipc"), arena.allocate(nbytes)
        stack.enter_context(registrable.register())
        self.kept = [registrable, page]
        self.addresses = {
            REFERENCE: int(self.driver.call("cuMemAlloc", nbytes)),
            'transport="ipc"': registrable.ptr,
            "default pages": page.ptr,
        }
        for address in self.addresses.values():
            self.driver.call("cuMemsetD8", address, value, nbytes)
        self.driver.call("cuCtxSynchronize")
        self.agent = nixl_agent(f"gpu{index}", nixl_agent_config(backends=["UCX"]))
        for address in self.addresses.values():
            self.agent.register_memory([(address, nbytes, index, "")], "VRAM")

    def last_byte(self, kind: str) -> int:
        import numpy as np

        found = np.zeros(1, np.uint8)
        last = self.addresses[kind] + self.nbytes - 1
        self.driver.call("cuMemcpyDtoH", found.ctypes.data, last, 1)
        return int(found[0])

    def descriptor(self, address: int, index: int) -> Any:
        return self.agent.get_xfer_descs([(address, self.nbytes, index)], "VRAM")


def hold(index: int, nbytes: int) -> None:
    """Tell where the blocks are, and keep them until standard input ends."""
    with ExitStack() as stack:
        blocks = Blocks(index, nbytes, VALUE, stack)
        described = {
            "agent": blocks.agent.get_agent_metadata().hex(),
            "addresses": blocks.addresses,
        }
        print(json.dumps(described), flush=True)
        sys.stdin.read()


def read_all(index: int, nbytes: int, rounds: int, other: dict[str, Any]) -> dict[str, list[float]]:
    """Read each kind of memory once a round; seconds."""
    samples: dict[str, list[float]] = {kind: [] for kind in other["addresses"]}
    with ExitStack() as stack:
        blocks = Blocks(index, nbytes, 0, stack)
        name = blocks.agent.add_remote_agent(bytes.fromhex(other["agent"]))
        reads = {
            kind: blocks.agent.initialize_xfer(
                "READ",
                blocks.descriptor(blocks.addresses[kind], index),
                blocks.descriptor(address, 1 - index),
                name.decode() if isinstance(name, bytes) else name,
            )
            for kind, address in other["addresses"].items()
        }
        # A read right after another is slower, so the first two take turns in being the first;
        # pages come last: their way through the host takes hundreds of times as long.
        for number in range(-1, rounds):
            first, second, last = reads
            for kind in (first, second, last) if number % 2 else (second, first, last):
                handle = reads[kind]
                begin = time.perf_counter()
                state = blocks.agent.transfer(handle)
                while state == "PROC":
                    state = blocks.agent.check_xfer_state(handle)
                seconds = time.perf_counter() - begin
                if state != "DONE":
                    raise RuntimeError(f"a read of {kind} ended with {state}")
                if number >= 0:
                    samples[kind].append(seconds)
        for kind in reads:
            if blocks.last_byte(kind) != VALUE:
                raise RuntimeError(f"a read of {kind} brought wrong bytes")
    return samples


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.transports", description=__doc__)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--mib", type=int, default=256, help="of each block")
    parser.add_argument("--hold", action="store_true", help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    if chosen.hold:
        hold(1, chosen.mib * MIB)
        return 0
    command = [sys.executable, "-m", "bench.transports", "--hold", "--mib", str(chosen.mib)]
    holder = subprocess.Popen(
        command,
        cwd=ROOT,
        env=os.environ | SHARED_HOST,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert holder.stdout is not None
    try:
        described = next(line for line in holder.stdout if line.startswith("{"))
        samples = read_all(0, chosen.mib * MIB, chosen.rounds, json.loads(described))
    finally:
        holder.communicate()
    ratios = ratios_within_rounds(samples, REFERENCE)
    body = [
        [
            kind,
            f"{chosen.mib * MIB / statistics.median(times) / 1e9:.2f}",
            f"{1 / ratios[kind]:.3f}",
        ]
        for kind, times in samples.items()
    ]
    print(markdown.table(["memory", "GB/s", f"/ {REFERENCE}"], body))
    return 0


if __name__ == "__main__":
    sys.exit(main())
