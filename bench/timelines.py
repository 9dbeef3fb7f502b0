"""The cost of a hand-over between two processes through a HostTimeline.

    python -m bench.timelines [--repeats 7] [--json]

A round is one signal each way. From C: both look at the page without sleeping; both sleep at
once; and the same with two words and nothing but futex calls, which is the least that sleeping
costs. From Python: `signal` and `wait`, which look for 5 us before they sleep. Modes take turns;
figures are medians of the repeats, of each one's median round; the ratio is the median of ratios
within a repeat.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from gpumem.interop import HostTimeline

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

from helpers.pingpong import compile_players, play

ROUNDS = {"spin": 200_000, "park": 20_000, "futex": 20_000}
PYTHON_ROUNDS = 20_000
OTHER = """
import sys
from gpumem.interop import HostTimeline
timeline = HostTimeline.from_fd(int(sys.argv[1]))
for turn in range(int(sys.argv[2])):
    timeline.wait(2 * turn + 1)
    timeline.signal(2 * turn + 2)
"""


def python_round(rounds: int) -> float:
    """Return the median ns of a round between two interpreters."""
    with HostTimeline.create() as timeline, timeline.export() as handle:
        fd = handle.fileno()
        command = [sys.executable, "-c", OTHER, str(fd), str(rounds)]
        other = subprocess.Popen(command, pass_fds=[fd])
        times = []
        for turn in range(rounds):
            begin = time.perf_counter_ns()
            timeline.signal(2 * turn + 1)
            timeline.wait(2 * turn + 2)
            times.append(time.perf_counter_ns() - begin)
        assert other.wait() == 0
    return statistics.median(times)


def measure(repeats: int) -> dict[str, object]:
    """Let every mode have its turn, `repeats` times."""
    with tempfile.TemporaryDirectory() as folder:
        program = compile_players(Path(folder))
        modes: dict[str, Callable[[], float]] = {
            mode: lambda mode=mode, rounds=rounds: play(program, mode, rounds)[0]
            for mode, rounds in ROUNDS.items()
        }
        modes["python"] = lambda: python_round(PYTHON_ROUNDS)
        samples: dict[str, list[float]] = {name: [] for name in modes}
        for _ in range(repeats):
            for name, run in modes.items():
                samples[name].append(run())
    pairs = zip(samples["park"], samples["futex"], strict=True)
    return {
        "cpus": len(os.sched_getaffinity(0)),
        "repeats": repeats,
        "round_ns": {name: statistics.median(values) for name, values in samples.items()},
        "all_ns": samples,
        "parked_to_futex": statistics.median(park / futex for park, futex in pairs),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--json", action="store_true")
    asked = parser.parse_args()
    report = measure(asked.repeats)
    if asked.json:
        print(json.dumps(report, indent=1))
        return 0
    print(f"{report['cpus']} CPUs, medians of {report['repeats']} repeats, ns a round trip")
    for name, nanoseconds in report["round_ns"].items():  # type: ignore[attr-defined]
        print(f"{name:<8} {nanoseconds:10.0f}")
    print(f"parked, to a raw futex: {report['parked_to_futex']:.2f}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
