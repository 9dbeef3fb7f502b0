"""Calls of each scenario fail, with one error or another; planted faults are found."""

from pathlib import Path

import pytest
from helpers.child import python
from helpers.marks import NEEDS_OWN_MALLOC

ROOT = Path(__file__).resolve().parents[2]
SCENARIOS = (
    "pages",
    "streams",
    "pools",
    "memories",
    "copies",
    "sessions",
    "graphs",
    "sharing",
    "sleeping",
    "growing",
    "debugging",
    "budgets",
    "adapted",
    "external",
)

PLANTED = """
import gpumem
from tests.faults.search import search

kept = []

def leaks(stage):
    def make_two():
        kept.append(gpumem.Event("host"))
        gpumem.Event("host")

    stage.do("make two", make_two)
    kept.pop()

def lies(stage):
    def hide():
        try:
            gpumem.Event("host")
        except gpumem.errors.DriverError:
            raise ValueError("hidden") from None

    stage.do("hide", hide)

def forgets(stage):
    arena = stage.watch(gpumem.Arena("host", name="arena"))
    buffers = []

    def allocate_two():
        buffers.append(arena.allocate(1000))
        buffers.append(gpumem.Event("host"))

    stage.do("allocate", allocate_two)

def gives_up(stage):
    turns = iter([gpumem.Event])
    stage.do("make", lambda: next(turns)("host"))

for scenario, text in [
    (leaks, "left behind: {'events'"),
    (lies, "not this error: ValueError"),
    (forgets, "arena.in_use was 0 and is 1024 after an error"),
    (gives_up, "fails again without a fault: StopIteration"),
]:
    outcome = search(scenario, 0, lambda call: iter([999]))
    assert any(text in problem for problem in outcome.problems), outcome
"""


def run(*arguments):
    return python(*arguments, cwd=ROOT)


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_program_survives_a_failure_of_any_driver_call(rng, scenario):
    # In a process of its own, where a crash or a hang costs one scenario.
    seed = str(rng.randrange(1 << 32))
    short = ("--once", "--sample", "120")
    done = run("-m", "tests.faults", *short, "--scenario", scenario, "--seed", seed)
    assert done.stdout.endswith(" 0 problems\n")


@NEEDS_OWN_MALLOC
def test_programs_survive_a_failure_of_any_call_for_host_memory(rng):
    seed = str(rng.randrange(1 << 32))
    done = run("-m", "tests.faults", "--kind", "heap", "--sample", "6", "--seed", seed)
    assert done.stdout.endswith(" 0 problems\n")


def test_every_scenario_is_tested():
    done = run("-c", "from tests.faults.scenarios import SCENARIOS; print(*SCENARIOS)")
    assert tuple(done.stdout.split()) == SCENARIOS, done.stderr


def test_search_finds_planted_faults():
    run("-c", PLANTED)
