"""A server runs out of memory while a lot of it is free: why, and what helps, in three steps.

    python examples/find_fragmentation.py [--device cuda:0]

Sixteen conversations keep a cache each, which grows by being copied into a larger one; a finished
one begins anew. The arena has ``backing="regions"``, so that bytes stay where they are, and no
cache fits into the hole that another left.

1. The error says who holds what, and that enough is free, but in pieces.
2. A snapshot says how many pieces there are, and what stands between them.
3. A replay of the recorded run says what each backing needs for it.
"""

from __future__ import annotations

import argparse
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory

import gpumem
from gpumem.observe import Snapshot, record, tag
from gpumem.replay import replay
from gpumem.stats import OutOfMemoryReport
from gpumem.traces import load_trace

MIB = 1 << 20
CONVERSATIONS = 16
TURNS = 40
LIMIT = 640 * MIB


def mib(nbytes: int) -> str:
    """Write bytes for people."""
    return f"{nbytes / 2**20:.4g} MiB"


def serve(arena: gpumem.Arena) -> None:
    """Hold the conversations, turn by turn."""
    with tag("caches"):
        caches = [arena.allocate((1 + n % 4) * 4 * MIB) for n in range(CONVERSATIONS)]
    for _ in range(TURNS):
        for n in range(CONVERSATIONS):
            nbytes = caches[n].nbytes + 12 * (64 + n) * 1024
            with tag("caches"):
                grown = arena.allocate(nbytes if nbytes <= 40 * MIB else 4 * MIB)
            caches[n].close()  # a real server copies before
            caches[n] = grown


def pieces(moment: Snapshot) -> tuple[int, dict[str, int]]:
    """Count free pieces, and by owner the blocks that lie between two of them."""
    found: dict[str, int] = {}
    count = 0
    for resource in moment.resources:
        blocks = sorted(resource.iter_blocks(), key=lambda block: block.address)
        free = [n for n, block in enumerate(blocks) if block.state != "used"]
        count += len(free)
        for first, last in pairwise(free):
            for block in blocks[first + 1 : last]:
                found[str(block.tag)] = found.get(str(block.tag), 0) + 1
    return count, found


def explain(report: OutOfMemoryReport, moment: Snapshot) -> None:
    """Print what the error knows, and what stands between the pieces."""
    owners = ", ".join(f"{owner} {mib(held)}" for owner, held in report.by_owner.items())
    print(f"1. asked for {mib(report.requested_nbytes)}; in use: {owners}")
    print(f"   free: {mib(report.free)}, the largest piece {mib(report.largest_free or 0)}")
    print(f"   {report.remedies[0]}")
    count, between = pieces(moment)
    blocks = ", ".join(f"{number} blocks of {owner!r}" for owner, number in between.items())
    print(f"2. {count} free pieces, between them {blocks}")


def main() -> None:
    """Run the server until it fails, ask why, and run it again with what helps."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="host", help="where the server's memory is")
    device = parser.parse_args().device
    settings = {"max_mem": LIMIT, "backing": "regions"}
    with TemporaryDirectory() as folder:
        events = Path(folder) / "events"
        arena = gpumem.Arena(device, settings)
        with record(arena, events):
            try:
                serve(arena)
            except gpumem.OutOfMemoryError as error:
                # Now: the blocks go with the frames of the server's functions.
                explain(error.report, arena.snapshot())
        recorded = load_trace(events)
    for backing in ("regions", "virtual"):
        needed = replay(recorded, device, config={"backing": backing}).peak_reserved_bytes
        print(f"3. what ran so far needs {mib(needed)} with {backing}")
    with gpumem.Arena(device, settings | {"backing": "virtual"}) as better:
        serve(better)
        held = better.stats().max_reserved
        print(f"with virtual the server runs to its end in {mib(held)}")


if __name__ == "__main__":
    main()
