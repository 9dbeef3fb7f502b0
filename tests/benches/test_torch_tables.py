"""What the tables say of numbers that are made up."""

import pytest

from bench import torch_tables as tables


def record(workload, configuration, number, seconds, **more):
    return {
        "workload": workload,
        "configuration": configuration,
        "round": number,
        "seconds": seconds,
        "values": ["0x1p+0"],
        "reserved": 120,
        "requested": 100,
    } | more


def by_configuration(records):
    return {row["configuration"]: row for row in tables.rows(records)}


def test_ratio_is_the_median_of_ratios_within_rounds():
    records = [
        record("w", configuration, number, seconds)
        for configuration, rounds in {
            "native": [[1.0, 1.0], [2.0, 2.0], [4.0, 4.0]],
            "full": [[1.0, 2.0], [2.0, 2.0], [3.0, 5.0]],  # 1.5, 1, 1 of native's
        }.items()
        for number, seconds in enumerate(rounds)
    ]
    rows = by_configuration(records)
    assert rows["full"]["ratio"] == 1.0
    assert rows["native"]["ratio"] == 1.0
    assert rows["full"]["step_ms"] == 2000.0
    assert rows["full"]["rounds"] == 3


def records_of(rounds):
    """Return the records of runs, given the seconds of their steps."""
    return [
        record("w", configuration, number, seconds)
        for configuration, of in rounds.items()
        for number, seconds in enumerate(of)
    ]


def test_median_step_leaves_out_what_first_steps_cost():
    rounds = {
        "native": [[3.0, 1.0, 1.0, 1.0], [2.0, 2.0, 2.0, 2.0], [1.0, 1.0, 1.0, 1.0]],
        "full": [[9.0, 1.0, 1.1, 1.1], [8.0, 2.4, 2.4, 2.4], [9.0, 1.0, 1.0, 1.0]],
    }
    full = by_configuration(records_of(rounds))["full"]
    assert full["median_step"] == pytest.approx(1.1)  # of 1.1, 1.2 and 1
    assert full["ratio"] == pytest.approx(12.2 / 6)
    assert full["step_ms"] == pytest.approx(1100)


# The second: a machine that is slow for a round is slow for all of its runs.
@pytest.mark.parametrize(
    ("native", "full", "by_step"),
    [
        ([[1.0, 1.0], [1.0, 1.0], [1.0, 1.0]], [[1.0, 1.5], [9.0, 1.5], [1.0, 1.5]], 1.25),
        ([[1.0, 2.0], [3.0, 6.0], [9.0, 2.0]], [[1.1, 2.2], [3.3, 6.6], [9.9, 2.2]], 1.1),
    ],
    ids=["outliers are removed", "neighbouring runs are compared"],
)
def test_by_step_keeps_recurring_costs_alone(native, full, by_step):
    records = records_of({"native": native, "full": full})
    assert by_configuration(records)["full"]["by_step"] == pytest.approx(by_step)


def test_several_runs_merge_as_rounds():
    run = [
        record("w", name, number, [seconds * (number + 2)])
        for name, seconds in (("native", 1.0), ("full", 1.5))
        for number in (tables.WARMUP, 0, 1)
    ]
    merged = tables.together([run, run])
    assert sorted(r["round"] for r in merged if r["configuration"] == "full") == [
        -1,
        -1,
        0,
        1,
        2,
        3,
    ]
    row = by_configuration(merged)["full"]
    assert (row["rounds"], row["ratio"], row["by_step"]) == (4, 1.5, 1.5)


def test_warm_up_counts_for_values_only():
    records = [
        record("w", "native", tables.WARMUP, [100.0]),
        record("w", "native", 0, [1.0]),
        record("w", "full", tables.WARMUP, [1.0], reserved=150, requested=None),
        record("w", "full", 0, [1.1], reserved=105, requested=None),
    ]
    rows = by_configuration(records)
    assert rows["full"]["ratio"] == pytest.approx(1.1)
    assert rows["full"]["waste"] == 1.05
    assert rows["native"]["waste"] == 1.2
    records[2]["values"] = ["0x1.8p+0"]
    assert by_configuration(records)["full"]["same"] is False


@pytest.mark.parametrize(
    ("number", "value"), [(-1, "0x1.0000000000001p+0"), (1, "0x0p+0")], ids=["bit", "reference"]
)
def test_different_bit_in_one_round_of_either_configuration_is_reported(number, value):
    records = [record("w", name, number, [1.0]) for name in ("native", "full") for number in (0, 1)]
    assert by_configuration(records)["full"]["same"] is True
    records[number]["values"] = [value]
    assert by_configuration(records)["full"]["same"] is False


def test_failed_round_is_reported_and_leaves_the_others():
    records = [
        record("w", "native", 0, [1.0]),
        record("w", "native", 1, [1.0]),
        record("w", "full", 0, [1.2]),
        {"workload": "w", "configuration": "full", "round": 1, "error": "it | died\nthere"},
    ]
    row = by_configuration(records)["full"]
    assert (row["ratio"], row["error"]) == (1.2, "it | died\nthere")
    assert tables.overall(tables.rows(records))[1]["errors"] == 1
    assert all(
        line.count(" | ") == 8 for line in tables.steps_table(tables.rows(records)).splitlines()
    )


def test_configuration_that_never_ran_has_no_figures():
    records = [
        record("w", "native", 0, [1.0]),
        {"workload": "w", "configuration": "pool", "round": 0, "error": "not there"},
    ]
    row = by_configuration(records)["pool"]
    assert [row[key] for key in ("median_step", "ratio", "waste", "same", "step_ms")] == [None] * 5
    summed = {row["configuration"]: row for row in tables.overall(tables.rows(records))}
    assert summed["pool"]["median_step"] is None
    assert summed["pool"]["same"] is False


def test_overall_takes_the_median_and_the_worst_over_workloads():
    records = [
        record(workload, configuration, 0, [seconds], reserved=reserved)
        for workload, ratio, reserved in (("a", 0.9, 101), ("b", 1.0, 110), ("c", 1.5, 100))
        for configuration, seconds in (("native", 1.0), ("full", ratio))
    ]
    full = tables.overall(tables.rows(records))[1]
    assert (full["median_step"], full["worst_step"]) == (1.0, 1.5)
    assert (full["ratio"], full["worst_ratio"]) == (1.0, 1.5)
    assert (full["waste"], full["same"]) == (1.1, True)


def test_limits_are_shown_beside_the_native_ones():
    table = tables.limits_table(
        [
            {"workload": "w", "configuration": "native", "scale": 200},
            {"workload": "w", "configuration": "full", "scale": 250},
            {"workload": "v", "configuration": "full", "error": "died"},
        ]
    )
    assert table.splitlines()[2:] == ["| w | 200 (1.000) | 250 (1.250) |", "| v |  | died |"]
