"""Run scenarios over every policy and backing until the time is over; prints its seed."""

from __future__ import annotations

import argparse
import itertools
import random
import sys
from collections.abc import Iterator
from typing import Any

import gpumem
from gpumem._testing import host_device
from gpumem.device import set_host_device_count

from .nodes import run_nodes
from .pairs import PAIRS, run_pairs
from .scenario import MIB, Outcome, Scenario, run
from .sealed import run_sealed

POLICIES = ("completed", "wait", "never")
BACKINGS = ("regions", "virtual")


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.stress", description=__doc__)
    parser.add_argument("--seconds", type=float, default=60, help="about how long, in all")
    parser.add_argument("--seed", type=int, help="repeats the decisions, not the threads' timing")
    parser.add_argument("--policy", choices=POLICIES, help="only this one")
    parser.add_argument("--backing", choices=BACKINGS, help="only this one")
    parser.add_argument(
        "--device", nargs="+", default=["host"], help="as an Arena takes them: cuda:0, ..., in turn"
    )
    parser.add_argument("--host-devices", type=int, default=2, help="how many there are")
    parser.add_argument("--threads", type=int, default=3)
    parser.add_argument("--max-mem", type=int, default=96 * MIB, help="bytes of each arena")
    parser.add_argument("--each", type=float, default=5, help="seconds of one scenario")
    parser.add_argument(
        "--without", nargs="+", default=[], metavar="ACTION", help="to narrow down what was found"
    )
    parser.add_argument("--lie", action="store_true", help="reset busy streams: must be found")
    parser.add_argument(
        "--pairs",
        nargs="*",
        metavar="PAIR",
        help="instead: pairs of calls, all or such as sleep/fill",
    )
    parser.add_argument(
        "--nodes",
        nargs="?",
        type=int,
        const=16,
        metavar="PROCESSES",
        help="instead: so many under one node's limits, which are killed, stopped and forked",
    )
    parser.add_argument(
        "--sealed", action="store_true", help="instead: makers of sealed sets that are killed"
    )
    parser.add_argument(
        "--rounds", type=int, help="of each user of a pair instead of seconds; of killed makers"
    )
    parser.add_argument("--find-misuse", action="store_true", help="host: look for missing waits")
    chosen = parser.parse_args()
    if chosen.device[0].startswith("host"):
        set_host_device_count(chosen.host_devices)  # copies go through the others; they are peers
    if chosen.find_misuse:
        gpumem.Device("host")._open()
        host_device.find_misuse(True)
    seed = random.SystemRandom().randrange(1 << 32) if chosen.seed is None else chosen.seed
    print(f"seed {seed}, gpumem {gpumem.__version__}", flush=True)
    if chosen.nodes:
        return run_nodes(seed, chosen.seconds, chosen.nodes)
    if chosen.sealed:
        return run_sealed(chosen.device[0], seed, chosen.rounds or 200)
    if chosen.pairs is not None:
        return run_pairs(
            chosen.pairs or PAIRS, chosen.device[0], seed, chosen.seconds, chosen.rounds
        )
    total = Outcome()
    for number, scenario in enumerate(_scenarios(chosen, seed), 1):
        outcome = run(scenario)
        total.done += outcome.done
        print(f"{number}: {'WRONG' if outcome.problems else 'ok'} {_told(scenario)}", flush=True)
        if outcome.problems:
            print("\n".join(outcome.problems))
            print(f"--seed {seed}, scenario {number}: {len(outcome.problems)} problems")
            return 2 if outcome.wrong_bytes else 1
    for kind in host_device.MISUSE if chosen.find_misuse else ():
        if host_device.misuse_count(kind):
            found = host_device.misuse_count(kind)
            print(f"{found} of {kind}, the latest: {host_device.misuse_report()}")
            return 2
    print(", ".join(f"{count:,} {what}" for what, count in sorted(total.done.items())))
    print("0 wrong bytes, 0 leaks")
    return 0


def _scenarios(chosen: argparse.Namespace, seed: int) -> Iterator[Scenario]:
    """Go through every policy and backing, again and again, with other settings each time."""
    rng = random.Random(seed)
    kinds = itertools.product(
        POLICIES if chosen.policy is None else (chosen.policy,),
        BACKINGS if chosen.backing is None else (chosen.backing,),
    )
    each = list(kinds)
    seconds = min(chosen.each, chosen.seconds / len(each))
    for number in range(max(1, round(chosen.seconds / seconds))):
        policy, backing = each[number % len(each)]
        device = chosen.device[number // len(each) % len(chosen.device)]
        yield Scenario(
            memory=device,
            config=_config(rng, policy, backing, chosen.max_mem),
            seed=rng.randrange(1 << 32),
            seconds=seconds,
            threads=chosen.threads,
            beside=_beside(device, chosen.device),
            without=tuple(chosen.without),
            lag_us=rng.choice([0, 0, 50, 1000]) if device.startswith("host") else 0,
            lie=chosen.lie,
            node_limit=rng.choice([None, chosen.max_mem, 2 * chosen.max_mem]),
        )


def _beside(device: str, chosen: list[str]) -> tuple[str, ...]:
    """Pinned memory of the device, and the others that were chosen; else all of its type."""
    own = gpumem.MemoryInfo.parse(device).device
    others = [gpumem.MemoryInfo.parse(each).device for each in chosen]
    if others == [own]:
        others = [each for each in gpumem.devices() if each.type == own.type]
    return (f"{own}/host_accessible", *(str(each) for each in others if each != own))


def _config(rng: random.Random, policy: str, backing: str, max_mem: int) -> dict[str, Any]:
    config = {"stream_reuse": policy, "backing": backing, "max_mem": max_mem}
    if backing == "virtual":
        return config | {"page_move_threshold": rng.choice([0.0, 0.0075, 0.1])}
    return config | {
        "split_rule": rng.choice(["tight", "ort"]),
        "extend_strategy": rng.choice(["next_power_of_two", "same_as_requested"]),
    }


def _told(scenario: Scenario) -> str:
    settings = " ".join(f"{key}={value}" for key, value in scenario.config.items())
    return f"{scenario.memory} {settings} lag={scenario.lag_us}us node={scenario.node_limit}"


if __name__ == "__main__":
    sys.exit(main())
