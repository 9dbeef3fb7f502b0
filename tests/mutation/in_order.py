"""A plugin of pytest: tests in a given order, each with a time limit, and notes of how they end.

It reads plan.json in the current folder:

    first      files of tests that come first, in this order
    seconds    what each test takes without a mutant; {}: not known yet
    quick      up to so many seconds a test runs in the order of the files, above it by its time
    left_out   tests that are not run
    limit      seconds that a test may take in any case, besides ten times what it takes
    notes      the file for notes, a line of JSON each
"""

import faulthandler
import json
import time
from pathlib import Path

import hypothesis
import pytest

COLLECTION = 120  # seconds for the imports of all tests, which take long where every core is busy
PLAN = json.loads(Path("plan.json").read_text())
NOTES = open(PLAN["notes"], "a", buffering=1)  # noqa: SIM115  # faulthandler writes into it


def note(**what):
    NOTES.write(json.dumps(what) + "\n")


def pytest_sessionstart(session):
    # Before the tests are imported. A mutant that fails need not be explained by a small example,
    # and what one mutant's run has found is not for the next.
    hypothesis.settings.register_profile(
        "mutation",
        deadline=None,
        derandomize=True,
        database=None,
        phases=[hypothesis.Phase.explicit, hypothesis.Phase.generate],
    )
    hypothesis.settings.load_profile("mutation")
    watch(COLLECTION)


def watch(limit):
    """End the process, whatever it hangs in, if it goes on like this for too long."""
    faulthandler.dump_traceback_later(limit, exit=True, file=NOTES)


def pytest_collection_modifyitems(config, items):
    seconds, first = PLAN["seconds"], {file: i for i, file in enumerate(PLAN["first"])}
    left_out = set(PLAN["left_out"])
    kept = [item for item in items if item.nodeid not in left_out and not is_marked(item)]
    config.hook.pytest_deselected(items=[item for item in items if item not in kept])

    def place(item):
        took = seconds.get(item.nodeid, 0)
        file = item.nodeid.split("::")[0]
        return (0, first.get(file, len(first))) if took <= PLAN["quick"] else (1, took)

    items[:] = sorted(kept, key=place)


def is_marked(item):
    return any(item.get_closest_marker(name) for name in ("slow", "flaky"))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item):
    note(begins=item.nodeid)
    watch(PLAN["limit"] + 10 * PLAN["seconds"].get(item.nodeid, 0))
    begun = time.monotonic()
    done = yield
    note(passed=item.nodeid, seconds=time.monotonic() - begun)
    watch(PLAN["limit"])
    return done


def pytest_runtest_logreport(report):
    if report.failed:
        note(failed=report.nodeid)
