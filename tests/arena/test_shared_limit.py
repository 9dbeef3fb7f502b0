"""Threads that make memory for several parts of one arena keep to its limit together.

One thread is held in the driver's call that makes the pages accessible; meanwhile another one asks
for memory of another part of the same arena. The limit has room for one of the two.
"""

from pathlib import Path

import pytest
from helpers import child

TESTS = Path(__file__).resolve().parent.parent
SETUP = f"""
import sys
sys.path.insert(0, {str(TESTS)!r})
import faulthandler
import gpumem
from helpers.held_call import held_call

faulthandler.dump_traceback_later(100, exit=True)
MIB = 1 << 20
arena = gpumem.Arena("host", {{"max_mem": 16 * MIB, "stream_reuse": "never"}})
held, seen = [], []


def keep(make):
    held.append(make())


def in_tag(name, nbytes):
    with arena.tag(name, asleep="drop"):
        keep(lambda: arena.allocate(nbytes))


def note(make):
    try:
        make()
        seen.append("made")
    except gpumem.OutOfMemoryError as error:
        seen.append("refused by max_mem" if "max_mem" in str(error) else str(error))
"""

# What makes memory: what comes before, and the call. Each makes 10 MiB.
MAKERS = {
    "a block": ("", "keep(lambda: arena.allocate(10 * MIB))"),
    "a tag's block": ("in_tag('a', 1)", "in_tag('a', 10 * MIB)"),
    "a persistent block": ("", "keep(lambda: arena.allocate_persistent(10 * MIB))"),
    "rows of a virtual tensor": (
        "with arena.tag('rows'): rows = arena.virtual((16, MIB), 'u1', step=2)",
        "rows.commit(10)",
    ),
    "a tag that wakes": ("in_tag('b', 10 * MIB); arena.sleep('b')", "arena.wake('b')"),
    "a shareable block": ("", "keep(lambda: arena.allocate(10 * MIB, shareable=True))"),
}


# Of different parts: the second growth of one part waits for the first.
PAIRS = [
    ("a block", "a tag's block"),
    ("a tag's block", "a block"),
    ("a persistent block", "a tag's block"),
    ("a tag's block", "a persistent block"),
    ("a tag's block", "a shareable block"),
    ("rows of a virtual tensor", "a block"),
    ("a block", "rows of a virtual tensor"),
    ("a tag that wakes", "a block"),
    ("a tag that wakes", "a tag's block"),
    ("a block", "a tag that wakes"),
]


@pytest.mark.parametrize(("first", "other"), PAIRS)
def test_second_thread_is_refused_what_the_first_one_is_making(first, other):
    before, make = MAKERS[first]
    before_other, make_other = MAKERS[other]
    # `_exit`: what the replaced call did not do would be missed at the end.
    child.run_quietly(f"""{SETUP}
{before}
{before_other}
with held_call("cuMemSetAccess", meanwhile=lambda: note(lambda: {make_other})):
    {make}
assert seen == ["refused by max_mem"], seen
assert 10 * MIB <= arena.stats().reserved <= 16 * MIB, arena.stats()
arena.check_invariants()
__import__("os")._exit(0)
""")


def test_growth_that_found_room_which_another_thread_took_is_refused():
    """The first thread reserves addresses for its tag's blocks when the other one is served."""
    child.run_quietly(f"""{SETUP}
other = "keep(lambda: arena.allocate(10 * MIB))"
keep(lambda: arena.allocate(1))     # has its addresses
with held_call("cuMemAddressReserve", meanwhile=lambda: note(lambda: exec(other))):
    try:
        in_tag("a", 10 * MIB)
    except gpumem.OutOfMemoryError as error:
        assert "max_mem" in str(error), error
        seen.append("refused")
assert seen == ["made", "refused"], seen
arena.check_invariants()
__import__("os")._exit(0)
""")
