"""Real training and inference steps under PyTorch's allocator and under gpumem.

Each configuration runs in a process of its own; they take turns at each step: time of the steps,
peaks of memory, and whether the results are the same bit for bit. With --limit also the
largest batch that fits.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path
from typing import Any

from bench import torch_tables as tables
from bench.children import Answer, Child, ask_all, ask_in_turn
from bench.workloads import CONFIGURATIONS, GRAPHS, WORKLOADS

GRAPH_CONFIGURATIONS = ("native", "full")  # a pool of ours cannot be beneath a graph's own
# Where the search begins: by doubling, or by halves where this is too much.
FIRST_SCALE = {
    "gpt2_train": 2048,
    "gpt2_generate": 32,
    "resnet50_train": 96,
    "mixtral_train": 2048,
    "llama_train": 2048,
    "llama_serve": 16,
}
FIRST_SCALE_TINY = 4


@dataclass(frozen=True)
class Plan:
    """What is measured; `warmup` steps begin each run and do not count, nor does a first round."""

    size: str = "full"
    device: str = "cuda"
    rounds: int = 5
    steps: int = 12
    warmup: int = 4
    seed: int = 7
    limit: int = 0
    limit_steps: int = 5
    jobs: int = 6


class Clock:
    """Tells on standard error what is done, and when the time for starting anything more is up."""

    def __init__(self, seconds: float) -> None:
        self._begin = time.monotonic()
        self._seconds = seconds

    @property
    def elapsed(self) -> float:
        return time.monotonic() - self._begin

    @property
    def left(self) -> float:
        return self._seconds - self.elapsed

    def tell(self, what: str) -> None:
        print(f"[{self.elapsed:6.1f} s] {what}", file=sys.stderr, flush=True)


def measured(
    plan: Plan, names: Sequence[str], configurations: Sequence[str], clock: Clock
) -> list[Any]:
    """Run the workloads; a record for each run, failures included.

    All processes are started at once: importing PyTorch takes as long for all as for one. They do
    nothing and hold nothing on the device until they are asked.
    """
    records: list[Any] = []
    with ExitStack() as stack:
        children = {
            name: [
                stack.enter_context(Child(c, plan.device))
                for c in configurations_of(name, configurations)
            ]
            for name in names
        }
        for name in names:
            records += rounds(plan, name, children[name], clock)
            for child in children[name]:
                child.close()
    return records


def configurations_of(name: str, configurations: Sequence[str]) -> list[str]:
    return [c for c in configurations if name not in GRAPHS or c in GRAPH_CONFIGURATIONS]


def rounds(plan: Plan, name: str, children: list[Child], clock: Clock) -> Iterator[dict[str, Any]]:
    """Run one workload in every configuration, after a first run of all at once.

    That one loads the libraries and plans the kernels of every shape that will come.
    """
    for number in range(tables.WARMUP, plan.rounds):
        if clock.left < 0:
            clock.tell(f"{name}: round {number} and later ones left out, the time is up")
            return
        answers = one_round(
            plan, name, children, ask_all if number == tables.WARMUP else ask_in_turn
        )
        for configuration, answer in answers.items():
            yield {"workload": name, "configuration": configuration, "round": number} | answer
        said = ", ".join(
            f"{configuration} {brief(answers[configuration])}" for configuration in answers
        )
        clock.tell(f"{name}, {'warm-up' if number == tables.WARMUP else f'round {number}'}: {said}")


def one_round(
    plan: Plan,
    name: str,
    children: list[Child],
    ask: Callable[[list[Child], Mapping[str, Any]], dict[str, Answer]],
) -> dict[str, Answer]:
    """Run one workload; the configurations take turns at each step.

    So other work of the machine, for whole seconds at times, falls on all of them alike.
    """
    begin = {"do": "begin", "workload": name, "size": plan.size, "seed": plan.seed}
    begun = ask(children, begin)
    steps: list[dict[str, Answer]] = []
    for _ in range(plan.warmup + plan.steps):
        steps.append(ask(children, {"do": "step"}))
        children = children[1:] + children[:1]  # the order changes from round to round
    ended = ask(children, {"do": "end"})
    return {
        configuration: summed(
            plan,
            begun[configuration],
            [step[configuration] for step in steps],
            ended[configuration],
        )
        for configuration in begun
    }


def summed(plan: Plan, begun: Answer, steps: list[Answer], ended: Answer) -> Answer:
    """Return a run's record: the first error, or its steps' times and values, and its peaks."""
    for answer in (begun, *steps, ended):
        if "error" in answer:
            return answer
    return ended | {
        "seconds": [step["seconds"] for step in steps[plan.warmup :]],
        "values": [step["value"] for step in steps],
    }


def brief(answer: Answer) -> str:
    if "error" in answer:
        return str(answer["error"])
    return f"{1e3 * statistics.median(answer['seconds']):.2f} ms {answer['reserved'] / 1e9:.2f} GB"


def limits(
    plan: Plan, names: Sequence[str], configurations: Sequence[str], clock: Clock
) -> list[Any]:
    """Search the largest scale of each workload under the limit; several at once, untimed."""

    def search(name: str, configuration: str) -> dict[str, Any]:
        first = FIRST_SCALE[name] if plan.size == "full" else FIRST_SCALE_TINY
        request = {"do": "limit", "workload": name, "size": plan.size, "seed": plan.seed}
        request |= {"steps": plan.limit_steps, "first": first}
        if clock.left < 0:
            answer: dict[str, Any] = {"error": "not searched, the time was up"}
        else:
            with Child(configuration, plan.device, plan.limit) as child:
                answer = child.ask(request, clock.left)
        clock.tell(f"{name}, {configuration}: {answer}")
        return {"workload": name, "configuration": configuration} | answer

    asked = list(product([name for name in names if name in FIRST_SCALE], configurations))
    with ThreadPoolExecutor(plan.jobs) as threads:
        return list(threads.map(lambda pair: search(*pair), asked))


def report(plan: Plan, records: list[Any], limited: list[Any]) -> tuple[dict[str, Any], str]:
    """Make the JSON object and the Markdown of the measurements."""
    parts = []
    made = tables.rows(records)
    if records:
        parts.append(tables.steps_table(made))
    if limited:
        parts.append(f"Limit: {plan.limit / 2**30:g} GiB.\n\n{tables.limits_table(limited)}")
    if records:  # last, since it is the short one
        parts.append(tables.overall_table(tables.overall(made)))
    values = {"plan": asdict(plan), "rows": made, "overall": tables.overall(made)}
    return values | {"limits": limited, "records": records}, "\n\n".join(parts)


def arguments() -> argparse.ArgumentParser:
    known = [*WORKLOADS, *GRAPHS]
    plan = Plan()
    parser = argparse.ArgumentParser(prog="python -m bench.torch_steps", description=__doc__)
    parser.add_argument("--workloads", nargs="+", choices=known, default=list(WORKLOADS))
    parser.add_argument(
        "--configurations", nargs="+", choices=CONFIGURATIONS, default=list(CONFIGURATIONS)
    )
    parser.add_argument("--graphs", action="store_true", help="also captured and replayed steps")
    parser.add_argument("--size", choices=["tiny", "full"], default=plan.size)
    parser.add_argument("--device", default=plan.device)
    parser.add_argument("--rounds", type=int, default=plan.rounds)
    parser.add_argument("--steps", type=int, default=plan.steps, help="of each run, timed")
    parser.add_argument("--warmup", type=int, default=plan.warmup, help="steps before those")
    parser.add_argument("--seed", type=int, default=plan.seed)
    parser.add_argument("--limit", type=float, default=0, metavar="GIB", help="search the largest")
    parser.add_argument("--limit-steps", type=int, default=plan.limit_steps)
    parser.add_argument("--jobs", type=int, default=plan.jobs, help="searches at once")
    parser.add_argument("--only-limit", action="store_true", help="search, and time nothing")
    parser.add_argument("--seconds", type=float, default=540, help="start nothing after so long")
    parser.add_argument("--out", type=Path, help="folder for torch_steps.json and torch_steps.md")
    return parser


def main() -> int:
    """Measure, write, print; 1 if a configuration failed or computed something else."""
    parser = arguments()
    chosen = vars(parser.parse_args())
    if chosen["limit"] and chosen["device"] == "cpu":
        parser.error("--limit needs a CUDA device: the CPU's allocator knows no limit")
    plan = Plan(
        **{name: chosen[name] for name in asdict(Plan()) if name != "limit"},
        limit=int(chosen["limit"] * 2**30),
    )
    clock = Clock(chosen["seconds"])
    names = chosen["workloads"] + list(GRAPHS) * chosen["graphs"]
    configurations = chosen["configurations"]
    records = [] if chosen["only_limit"] else measured(plan, names, configurations, clock)
    limited = limits(plan, names, configurations, clock) if plan.limit else []
    values, text = report(plan, records, limited)
    if chosen["out"]:
        chosen["out"].mkdir(parents=True, exist_ok=True)
        (chosen["out"] / "torch_steps.json").write_text(json.dumps(values, indent=1) + "\n")
        (chosen["out"] / "torch_steps.md").write_text(text + "\n")
    print(text)
    failed = any("error" in record for record in [*records, *limited])
    return int(failed or any(row["same"] is False for row in values["rows"]))


if __name__ == "__main__":
    sys.exit(main())
