"""Some programs behave as the model says."""

from pathlib import Path

from helpers.child import python

ROOT = Path(__file__).resolve().parents[2]


def run_model(*arguments: str, module=("-m", "tests.model"), status=0):
    return python(*module, *arguments, cwd=ROOT, status=status)


def test_programs_behave_as_the_model_says():
    done = run_model("--first", "--minutes", "0", "--seed", "1", "--steps", "40")
    assert done.stdout.endswith("no difference\n")


FAILS_ONCE = """
import sys
from tests.model import __main__ as command, world
failed, settle = [], world.World.settle
def settle_or_fail(self):
    settle(self)
    if self.steps == 5 and not failed:
        failed.append(self)
        raise AssertionError("seen in one run")
world.World.settle = settle_or_fail
sys.exit(command.main())
"""


def test_failure_that_a_second_run_does_not_show_is_told_with_its_program():
    steps = ("--minutes", "0", "--seed", "1", "--steps", "20")
    done = run_model(*steps, module=("-c", FAILS_ONCE), status=1)
    last = done.stdout.splitlines()[-1]
    assert "Flaky" in last, last
    assert "AssertionError: seen in one run" in done.stdout
