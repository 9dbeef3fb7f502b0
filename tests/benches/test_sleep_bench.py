"""What the bench of sleeping computes, at a tiny size."""

import sys

from bench.sleep import measured, medians, ratios, run, tenants

MIB = 1 << 20
PRINTS_THEN_HANGS = """
echo '["first", 0.5]'
echo '["wake", 1]'
printf '["aga'
exec sleep 600
"""


def test_two_tenants_out_of_phase_share_a_limit_that_halves_divide():
    found = tenants("host", 64 * MIB)
    assert found == {"one limit": 128 * MIB, "two halves": 64 * MIB}


def test_run_ends_a_step_at_its_limit_and_keeps_what_it_measured():
    # The limit includes the start of the program, so it is a shell.
    found, ended = run(["sh", "-c", PRINTS_THEN_HANGS], 1)
    assert (found, ended) == ([("first", 0.5), ("wake", 1)], "ended after 1 s")


def test_run_says_how_a_step_failed():
    assert run([sys.executable, "-c", "raise SystemExit(3)"], 60) == ([], "failed with 3")


def test_measured_steps_have_each_sort_of_figure():
    for step in ("keep", "keep-dead", "drop", "bare"):
        figures = list(measured(step, "host", 64 * MIB, 0.3, 2))
        assert [sort for sort, _ in figures] == ["first", "wake", "again", "wake", "again", "wake"]
        assert all(spent > 0 for _, spent in figures)


def test_medians_leave_the_first_wake_out():
    figures = [("first", 9), ("wake", 9), ("again", 1), ("wake", 2), ("again", 3), ("wake", 4)]
    assert medians(figures) == {"first": 9, "again": 2, "wake": 3}
    assert medians(figures[:2]) == {"first": 9, "wake": 9}


def test_ratios_name_only_what_was_measured():
    rates = {"keep": {"first": 20, "again": 50}, "saver": {"first": 4}, "drop": {"wake": 8}}
    assert ratios(rates) == {"first sleep / torch_memory_saver": 5}
