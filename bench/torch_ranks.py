"""Training over several GPUs under PyTorch's allocator and under gpumem: time and memory by rank.

Every configuration has its processes, one for each device; they take turns at each step. A row is
one rank of one workload.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from bench import torch_tables as tables
from bench.children import Answer, Ranks
from bench.torch_steps import Clock, Plan, brief, summed
from bench.workloads import CONFIGURATIONS, PARALLEL


def measured(
    plan: Plan,
    names: Sequence[str],
    configurations: Sequence[str],
    devices: Sequence[str],
    clock: Clock,
) -> list[dict[str, Any]]:
    """Run the workloads; a record for each run of each rank, failures included."""
    with ExitStack() as stack:
        groups = [stack.enter_context(Ranks(name, devices)) for name in configurations]
        return [
            record
            for name in names
            for number in range(tables.WARMUP, plan.rounds)
            if clock.left > 0
            for record in one_round(plan, name, number, groups, clock)
        ]


def one_round(
    plan: Plan, name: str, number: int, groups: Sequence[Ranks], clock: Clock
) -> Iterator[dict[str, Any]]:
    begun = in_turn(groups, {"do": "begin", "workload": name, "size": plan.size, "seed": plan.seed})
    steps = []
    for step in range(plan.warmup + plan.steps):
        first = step % len(groups)
        steps.append(in_turn([*groups[first:], *groups[:first]], {"do": "step"}))
    ended = in_turn(groups, {"do": "end"})
    for configuration in begun:
        for rank, answer in enumerate(begun[configuration]):
            record = summed(
                plan,
                answer,
                [step[configuration][rank] for step in steps],
                ended[configuration][rank],
            )
            clock.tell(f"{name}, round {number}, {configuration}, rank {rank}: {brief(record)}")
            yield {
                "workload": f"{name}, rank {rank}",
                "configuration": configuration,
                "round": number,
            } | record


def in_turn(groups: Sequence[Ranks], request: Mapping[str, Any]) -> dict[str, list[Answer]]:
    return {group.configuration: group.ask(request) for group in groups}


def main() -> int:
    """Measure, write, print; 1 if a configuration failed or computed something else."""
    plan = Plan()
    parser = argparse.ArgumentParser(prog="python -m bench.torch_ranks", description=__doc__)
    parser.add_argument("--workloads", nargs="+", choices=PARALLEL, default=list(PARALLEL))
    parser.add_argument(
        "--configurations",
        nargs="+",
        choices=CONFIGURATIONS,
        default=["native", "expandable", "full"],
    )
    parser.add_argument("--devices", nargs="+", default=["cuda:0", "cuda:1"])
    parser.add_argument("--size", choices=["tiny", "full"], default=plan.size)
    parser.add_argument("--rounds", type=int, default=plan.rounds)
    parser.add_argument("--steps", type=int, default=plan.steps, help="of each run, timed")
    parser.add_argument("--warmup", type=int, default=plan.warmup, help="steps before those")
    parser.add_argument("--seed", type=int, default=plan.seed)
    parser.add_argument("--seconds", type=float, default=540, help="start no round after so long")
    parser.add_argument("--out", type=Path, help="folder for torch_ranks.json and torch_ranks.md")
    chosen = parser.parse_args()
    plan = Plan(
        size=chosen.size,
        rounds=chosen.rounds,
        steps=chosen.steps,
        warmup=chosen.warmup,
        seed=chosen.seed,
    )
    records = measured(
        plan, chosen.workloads, chosen.configurations, chosen.devices, Clock(chosen.seconds)
    )
    rows = tables.rows(records)
    text = f"{tables.steps_table(rows)}\n\n{tables.overall_table(tables.overall(rows))}"
    if chosen.out:
        chosen.out.mkdir(parents=True, exist_ok=True)
        values = {"rows": rows, "records": records}
        (chosen.out / "torch_ranks.json").write_text(json.dumps(values, indent=1) + "\n")
        (chosen.out / "torch_ranks.md").write_text(text + "\n")
    print(text)
    failed = any("error" in record for record in records)
    return int(failed or any(row["same"] is False for row in rows))


if __name__ == "__main__":
    sys.exit(main())
