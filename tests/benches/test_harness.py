"""Timing candidates in turn."""

import contextlib

import pytest

from bench import harness


def test_each_candidate_runs_within_its_context():
    setting = []

    @contextlib.contextmanager
    def named(name):
        setting.append(name)
        yield
        setting.pop()

    seen = {"a": set(), "b": set(), "c": set()}
    timing = harness.interleave(
        {name: lambda name=name: seen[name].add(tuple(setting)) for name in seen},
        "a",
        rounds=5,
        batch_seconds=0.0001,
        around={"a": lambda: named("A"), "b": lambda: named("B")},
    )
    assert seen == {"a": {("A",)}, "b": {("B",)}, "c": {()}}
    assert (timing.rounds, timing.ratios["a"]) == (5, 1.0)


def test_ratio_is_the_median_of_ratios_within_rounds():
    samples = {"a": [1.0, 2.0, 10.0], "b": [2.0, 2.0, 100.0]}
    timing = harness.timing_of(samples, "a")
    assert timing.ratios == {"a": 1.0, "b": 2.0}
    assert timing.nanoseconds == {"a": 2.0, "b": 2.0}


def test_missing_rounds_are_an_error():
    with pytest.raises(ValueError, match="argument 2"):
        harness.ratios_within_rounds({"a": [1.0, 2.0], "b": [1.0]}, "a")
