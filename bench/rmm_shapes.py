"""Two of RMM's own benchmarks, run from Python over its resources and over an arena.

Of RMM's benchmarks `random_allocations` and `multi_stream_allocations` these have the shape: how
often they allocate, which sizes, what they free, which stream. They are called from Python, RMM's
resources as well: ``allocate`` and ``deallocate`` there, ``allocate`` and ``close`` here.

``python -m bench.rmm_shapes`` repeats random_allocations over one arena: pages move in the first
passes, and the arena then holds enough for all later ones.
"""

from __future__ import annotations

import argparse
import random
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from time import perf_counter_ns
from typing import Any

import gpumem
from bench.harness import Candidate, Timing, interleave, timing_of

MIB = 1 << 20
MAX_HELD = 16_000 * MIB  # RMM's max_usage
ALLOCATES = 73  # of 100 steps, while that is allowed
ROUNDS = 9
STREAMS = KERNELS = 4
CYCLES = 1_000_000  # of the GPU's clock, that a kernel of multi_stream lasts

Steps = Sequence[tuple[int, int]]
REFERENCE = "gpumem"


def program(allocations: int, largest_mib: int, seed: int = 1) -> list[tuple[int, int]]:
    """Draw the steps of random_allocations, in advance: drawing costs more than allocating.

    Returns
    -------
    list of tuple of int
        (size, 0) allocates; (0, index) frees the block at that place of the list of held blocks,
        to which the last one moves. Everything that is allocated is freed.
    """
    rng = random.Random(seed)
    steps: list[tuple[int, int]] = []
    held: list[int] = []
    count = total = 0
    for _ in range(2 * allocations):
        size = rng.randint(1, largest_mib * MIB)
        room = count < allocations and total + size < MAX_HELD
        if not held or (rng.randrange(100) < ALLOCATES and room):
            steps.append((size, 0))
            held.append(size)
            count, total = count + 1, total + size
        else:
            index = rng.randrange(len(held))
            steps.append((0, index))
            total -= held[index]
            held[index] = held[-1]
            held.pop()
    return steps


# The loops are written out for each kind: a call around each step would cost what is measured.


def over_rmm(resource: Any, steps: Steps) -> None:
    allocate, deallocate = resource.allocate, resource.deallocate
    held: list[tuple[int, int]] = []
    for size, index in steps:
        if size:
            held.append((allocate(size), size))
        else:
            pointer, nbytes = held[index]
            held[index] = held[-1]
            held.pop()
            deallocate(pointer, nbytes)


def over_gpumem(resource: gpumem.MemoryResource, steps: Steps) -> None:
    allocate = resource.allocate
    held: list[gpumem.Buffer] = []
    for size, index in steps:
        if size:
            held.append(allocate(size))
        else:
            buffer = held[index]
            held[index] = held[-1]
            held.pop()
            buffer.close()


def over_nothing(steps: Steps) -> None:
    """Run the loop alone."""
    held: list[int] = []
    for size, index in steps:
        if size:
            held.append(size)
        else:
            held[index] = held[-1]
            held.pop()


def random_allocations(allocations: int, largest_mib: int) -> Timing:
    """Run the program over every resource in turn; net nanoseconds for one of its steps."""
    steps = program(allocations, largest_mib)
    runs = {name: subject.program(steps) for name, subject in subjects(pool_bytes()).items()}
    samples: dict[str, list[float]] = {name: [] for name in runs}
    for run in runs.values():
        run()  # takes the memory from the driver
    for _ in range(ROUNDS):
        loop = spent(lambda: over_nothing(steps))
        for name, run in runs.items():
            samples[name].append((spent(run) - loop) / len(steps))
    return timing_of(samples, REFERENCE)


def spent(call: Callable[[], object]) -> int:
    begin = perf_counter_ns()
    call()
    return perf_counter_ns() - begin


def multi_stream() -> Timing | None:
    """Allocate 8 bytes, run half a millisecond on them and free, on each of four streams.

    A resource that makes one stream wait for another takes a multiple of the time. None without
    PyTorch, which brings the kernel.
    """
    try:
        import torch
    except ImportError:
        return None
    streams = [torch.cuda.Stream() for _ in range(STREAMS)]

    def run(subject: Subject, handles: Sequence[Any]) -> Candidate:
        def all_kernels() -> None:
            for number in range(KERNELS):
                at = number % STREAMS
                block = subject.allocate(8, handles[at])
                with torch.cuda.stream(streams[at]):
                    torch.cuda._sleep(CYCLES)
                subject.free(block, 8, handles[at])
            torch.cuda.synchronize()

        return all_kernels

    candidates = {
        name: run(subject, [subject.stream(Handle(s.cuda_stream)) for s in streams])
        for name, subject in subjects(1 << 30).items()
    }
    return interleave(candidates, REFERENCE, rounds=ROUNDS, batch_seconds=0.02)


# ---- one arena, pass by pass ---------------------------------------------------------------------


def main(arguments: list[str] | None = None) -> int:
    """Print the result of each pass over an arena; return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m bench.rmm_shapes", description=__doc__)
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--passes", type=int, default=60)
    parser.add_argument("--allocations", type=int, default=1000)
    parser.add_argument("--largest-mib", type=int, default=4096)
    parser.add_argument(
        "--set", default="", metavar="KEY=VALUE,...", help="settings of the arena; default: none"
    )
    chosen = parser.parse_args(arguments)
    settings = gpumem.ArenaConfig.from_text(chosen.set)
    steps = program(chosen.allocations, chosen.largest_mib)
    arena = gpumem.Arena(chosen.device, settings)
    for number in range(chosen.passes):
        loop = spent(lambda: over_nothing(steps))
        nanoseconds = (spent(lambda: over_gpumem(arena, steps)) - loop) / len(steps)
        stats = arena.stats()
        print(
            f"pass {number}: {nanoseconds:8.0f} ns per step, "
            f"reserved {stats.max_reserved / stats.max_in_use:.4f} of the live peak, "
            f"{stats.pages_moved} pages moved so far"
        )
    arena.close()
    return 0


# ---- resources -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Handle:
    """A stream as both libraries take it."""

    handle: int

    def __cuda_stream__(self) -> tuple[int, int]:
        return 0, self.handle


@dataclass(frozen=True)
class Subject:
    """A resource: over which loop the program runs, and its calls for one block."""

    resource: Any
    loop: Callable[[Any, Steps], None]
    allocate: Callable[[int, Any], Any]
    free: Callable[[Any, int, Any], None]
    stream: Callable[[Handle], Any]

    def program(self, steps: Steps) -> Callable[[], None]:
        return lambda: self.loop(self.resource, steps)


def subjects(nbytes: int) -> dict[str, Subject]:
    """Make every resource there is; RMM's begin with `nbytes`."""
    made = {
        REFERENCE: ours(gpumem.Arena("cuda:0")),
        "gpumem, regions": ours(gpumem.Arena("cuda:0", {"backing": "regions"})),
    }
    return made | rmm_subjects(nbytes)


def ours(resource: gpumem.MemoryResource) -> Subject:
    return Subject(
        resource,
        over_gpumem,
        lambda nbytes, stream: resource.allocate(nbytes, stream),
        lambda buffer, nbytes, stream: buffer.close(stream),
        lambda handle: gpumem.Stream.from_handle("cuda:0", handle.handle, handle),
    )


def rmm_subjects(nbytes: int) -> dict[str, Subject]:
    try:
        from rmm import mr
        from rmm.pylibrmm.stream import Stream
    except (ImportError, OSError):  # OSError: one of its libraries is missing
        return {}
    device = mr.CudaMemoryResource()
    made = {
        "rmm.mr.PoolMemoryResource": mr.PoolMemoryResource(device, nbytes),
        "rmm.mr.ArenaMemoryResource": mr.ArenaMemoryResource(device, nbytes),
        "rmm.mr.CudaAsyncMemoryResource": mr.CudaAsyncMemoryResource(nbytes),
    }
    return {
        name: Subject(resource, over_rmm, resource.allocate, resource.deallocate, Stream)
        for name, resource in made.items()
    }


def pool_bytes() -> int:
    """Return twice the highest use of the program, or less, so that every resource has room."""
    # RMM accepts multiples of 256 bytes.
    return min(2 * MAX_HELD, gpumem.Device("cuda:0").free_bytes // 6) // 256 * 256


if __name__ == "__main__":
    sys.exit(main())
