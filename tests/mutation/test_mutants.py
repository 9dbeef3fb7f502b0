"""Mutants are small errors in what computes, and nowhere else; the list of equivalents is exact."""

from collections import Counter
from pathlib import Path

import pytest

from . import equivalent
from .__main__ import CORE, _of_the_sample
from .campaign import Outcome, in_turn, killing_files
from .mutants import mutants_of

ROOT = Path(__file__).resolve().parents[2]

SOURCE = '''
"""A docstring with 1 + 1 < 2 and not True."""
from gpumem cimport a
cdef enum:
    LIMIT = 7
cdef uint64_t count = 3

cdef inline bint fits(const Bfc* table, uint64_t size) noexcept nogil:
    """In words: size < 3."""
    cdef uint32_t* place = <uint32_t*>&table.slots[0]       # a comment: 1 < 2
    cdef uint32_t i
    if size > 4 and not place[0]:
        return size <= 0x10
    bytes_free(table, <uint64_t>sizeof(Chunk*) * size)
    table.used -= 1
    while True:
        break
    return min(size, 2) == 2

cdef int table_check(const Bfc* table) noexcept nogil:
    return 1 + 1

def shown(value, size=3):
    if GM_DEBUG:
        check(value)
    text = f"{1 + 1}" if value is None else "b"
    return text
'''


@pytest.fixture
def made(tmp_path):
    (tmp_path / "made_up").write_text(SOURCE)
    return mutants_of(tmp_path, "made_up")


def test_mutants_change_what_computes_and_nothing_else(made):
    assert Counter(one.before for one in made) == {
        "cdef uint64_t count = 3": 2,
        "if size > 4 and not place[0]:": 7,
        "return size <= 0x10": 4,
        "bytes_free(table, <uint64_t>sizeof(Chunk*) * size)": 2,
        "table.used -= 1": 3,
        "while True:": 1,
        "break": 1,
        "return min(size, 2) == 2": 7,
        'text = f"{1 + 1}" if value is None else "b"': 3,
        "return text": 1,
    }


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("if size > 4 and not place[0]:", "if size >= 4 and not place[0]:"),
        ("if size > 4 and not place[0]:", "if size > 4 or not place[0]:"),
        ("if size > 4 and not place[0]:", "if size > 4 and place[0]:"),
        ("if size > 4 and not place[0]:", "if True:"),
        ("return size <= 0x10", "return not (size <= 0x10)"),
        ("return size <= 0x10", "return size <= 0xf"),
        ("bytes_free(table, <uint64_t>sizeof(Chunk*) * size)", "pass"),
        ("table.used -= 1", "pass"),
        ("break", "continue"),
        ("return min(size, 2) == 2", "return max(size, 2) == 2"),
        ('text = f"{1 + 1}" if value is None else "b"', 'text = f"{1 + 1}" if False else "b"'),
        ("return text", "return None"),
    ],
)
def test_mutants_of_each_kind_are_made(made, before, after):
    assert (before, after) in [(one.before, one.after) for one in made]


def test_mutant_changes_the_file_where_it_says(made):
    for one in made:
        changed = one.apply(SOURCE)
        lines = changed.splitlines()
        assert one.after.startswith(lines[one.line - 1].split("  #")[0].strip()[:8])
        assert changed != SOURCE


def test_every_beginning_of_the_list_has_every_files_share():
    many = [one for file in CORE[:4] for one in mutants_of(ROOT, file)]
    whole = Counter(one.file for one in many)
    part = Counter(one.file for one in in_turn(many, seed=1)[: len(many) // 2])
    assert in_turn(many, seed=1) == in_turn(many, seed=1) != in_turn(many, seed=2)
    assert all(abs(2 * part[file] - count) <= 2 for file, count in whole.items())


def test_files_of_the_core_and_their_tests_exist():
    assert all(mutants_of(ROOT, file) for file in CORE)
    assert len(killing_files(ROOT)) > 20


def test_every_equivalent_mutant_is_one_of_the_core_and_has_a_reason():
    made = {equivalent.key_of(one) for file in CORE for one in mutants_of(ROOT, file)}
    listed = equivalent.listed()
    assert [key for key in listed if key not in made] == []
    assert all(len(reason.split()) >= 4 for reason in listed.values())


def test_list_of_equivalents_is_read_with_reasons_of_several_lines():
    text = "# note\n\nmade_up fits\n- a < b\n+ a <= b\n= they\n= never meet\n"
    assert equivalent.listed(text) == {("made_up fits", "a < b", "a <= b"): "they never meet"}


def test_sample_ends_before_the_first_mutant_that_was_not_judged(made):
    verdicts = ("failed", "survived", "timeout", "unfinished", "failed")
    results = [(one, Outcome(ended, "", 1.0)) for one, ended in zip(made, verdicts, strict=False)]
    expected = Counter(failed=1, survived=1, timeout=1)
    assert _of_the_sample(made, results) == expected
    assert _of_the_sample(made, [*results[:3], results[4]]) == expected
