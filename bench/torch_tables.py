"""Tables of what `bench.torch_steps` measured; plain values in, plain values and Markdown out.

Run as a program it makes one table of several runs, as if their rounds had been one run's.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from bench import markdown
from bench.harness import ratios_within_rounds

Record = Mapping[str, Any]
Row = dict[str, Any]

REFERENCE = "native"
GOAL_MEDIAN, GOAL_WORST, GOAL_RESERVED = 1.0, 1.02, 1.02
WARMUP = -1  # the round that does not count: all configurations at once


def rows(records: Sequence[Record]) -> list[Row]:
    """Sum up the rounds of each workload and configuration, in the order in which they came.

    Parameters
    ----------
    records : sequence of mapping
        Each of one run: ``workload``, ``configuration``, ``round`` (-1 for the warm-up), and either
        ``error`` or ``seconds`` of its steps, ``values``, ``reserved`` and ``requested`` bytes.

    Returns
    -------
    list of dict
        With ``step_ms`` (median over rounds of the median step), ``median_step`` (of the median
        step to the reference's in the same round, median over rounds), ``ratio`` (the same of all
        steps together: with single costs, as when memory is made), ``by_step`` (each step's time
        to that of the reference's same step, median over rounds, and of these the mean, each
        weighed by the step's time: costs in the same step of every round stay, hiccups vanish),
        ``reserved`` and ``requested`` (highest), ``waste`` (their ratio; requested bytes are
        the reference's count), ``same`` (every value of every round equals the reference's, bit
        for bit) and ``error``. Unknown figures are None.
    """
    made = []
    for workload in dict.fromkeys(record["workload"] for record in records):
        of = [record for record in records if record["workload"] == workload]
        for configuration in dict.fromkeys(record["configuration"] for record in of):
            made.append({"workload": workload, **_row(of, configuration)})
    return made


def _row(records: Sequence[Record], configuration: str) -> Row:
    mine = [record for record in records if record["configuration"] == configuration]
    good = [record for record in mine if "error" not in record]
    counted = [record for record in good if record["round"] != WARMUP]
    theirs = [record for record in records if record["configuration"] == REFERENCE]
    reference = [record for record in theirs if "error" not in record]
    error = next((record["error"] for record in mine if "error" in record), None)
    reserved = max((record["reserved"] for record in counted), default=None)
    requested = max((record["requested"] or 0 for record in reference), default=0) or None
    return {
        "configuration": configuration,
        "rounds": len(counted),
        "step_ms": _step_ms(good),
        "median_step": _ratio(good, reference, statistics.median),
        "ratio": _ratio(good, reference, sum),
        "by_step": _by_step(good, reference),
        "reserved": reserved,
        "requested": requested,
        "waste": reserved / requested if reserved and requested else None,
        "same": _same(good, reference) if good and reference else None,
        "error": error,
    }


def _step_ms(records: Sequence[Record]) -> float | None:
    middles = [1e3 * statistics.median(steps) for steps in _seconds(records).values()]
    return statistics.median(middles) if middles else None


def _ratio(
    mine: Sequence[Record],
    reference: Sequence[Record],
    of_steps: Callable[[Sequence[float]], float],
) -> float | None:
    ours, theirs = _seconds(mine), _seconds(reference)
    shared = sorted(ours.keys() & theirs.keys())
    if not shared:
        return None
    samples = {
        "mine": [of_steps(ours[number]) for number in shared],
        REFERENCE: [of_steps(theirs[number]) for number in shared],
    }
    return ratios_within_rounds(samples, REFERENCE)["mine"]


def _by_step(mine: Sequence[Record], reference: Sequence[Record]) -> float | None:
    ours, theirs = _seconds(mine), _seconds(reference)
    rounds = sorted(ours.keys() & theirs.keys())
    if not rounds:
        return None
    weighed = total = 0.0
    for step in range(len(theirs[rounds[0]])):
        usual = statistics.median(theirs[number][step] for number in rounds)
        ratio = statistics.median(ours[number][step] / theirs[number][step] for number in rounds)
        weighed, total = weighed + ratio * usual, total + usual
    return weighed / total


def _seconds(records: Sequence[Record]) -> dict[int, list[float]]:
    return {r["round"]: r["seconds"] for r in records if r["round"] != WARMUP}


def _same(mine: Sequence[Record], reference: Sequence[Record]) -> bool:
    expected = reference[0]["values"]
    return all(record["values"] == expected for record in [*mine, *reference])


def overall(made: Sequence[Row]) -> list[Row]:
    """Sum up each configuration over the workloads that it ran, and hold it against the goals."""
    summed = []
    for configuration in dict.fromkeys(row["configuration"] for row in made):
        mine = [row for row in made if row["configuration"] == configuration]
        middles, ratios, wastes = (
            [row[key] for row in mine if row[key] is not None]
            for key in ("median_step", "ratio", "waste")
        )
        summed.append(
            {
                "configuration": configuration,
                "workloads": len(mine),
                "median_step": statistics.median(middles) if middles else None,
                "worst_step": max(middles, default=None),
                "ratio": statistics.median(ratios) if ratios else None,
                "worst_ratio": max(ratios, default=None),
                "waste": max(wastes, default=None),
                "same": all(row["same"] for row in mine),
                "errors": sum(row["error"] is not None for row in mine),
            }
        )
    return summed


# ---- Markdown ------------------------------------------------------------------------------------


def steps_table(made: Sequence[Row]) -> str:
    """Show one line for each workload and configuration."""
    heads = [
        "workload",
        "beneath PyTorch",
        "median step, ms",
        "/ native",
        "all steps / native",
        "by step",
        "peak reserved",
        "reserved / requested",
        "same bits",
    ]
    body = [
        [
            row["workload"],
            row["configuration"],
            _number(row["step_ms"], "{:.2f}"),
            _number(row["median_step"], "{:.3f}"),
            _number(row["ratio"], "{:.3f}"),
            _number(row["by_step"], "{:.3f}"),
            _number(row["reserved"], "{:.2f} GB", 1e-9),
            _number(row["waste"], "{:.3f}"),
            row["error"] or _yes(row["same"]),
        ]
        for row in made
    ]
    return markdown.table(heads, body)


def overall_table(summed: Sequence[Row]) -> str:
    """Show one line for each configuration; goals in the heads."""
    heads = [
        "beneath PyTorch",
        f"median step / native, median (goal {GOAL_MEDIAN})",
        f"worst (goal {GOAL_WORST})",
        "all steps / native, median",
        "worst",
        f"worst reserved / requested (goal {GOAL_RESERVED})",
        "same bits",
        "errors",
    ]
    body = [
        [
            row["configuration"],
            _number(row["median_step"], "{:.3f}"),
            _number(row["worst_step"], "{:.3f}"),
            _number(row["ratio"], "{:.3f}"),
            _number(row["worst_ratio"], "{:.3f}"),
            _number(row["waste"], "{:.3f}"),
            _yes(row["same"]),
            str(row["errors"]),
        ]
        for row in summed
    ]
    return markdown.table(heads, body)


def limits_table(limits: Sequence[Record]) -> str:
    """Show the largest scale that fits, of each workload by configuration, and over native's."""
    configurations = list(dict.fromkeys(record["configuration"] for record in limits))
    body = []
    for workload in dict.fromkeys(record["workload"] for record in limits):
        of = {r["configuration"]: r for r in limits if r["workload"] == workload}
        native = of.get(REFERENCE, {}).get("scale")
        body.append([workload, *(_scale(of.get(name), native) for name in configurations)])
    return markdown.table(["largest that fits", *configurations], body)


def _scale(record: Record | None, native: int | None) -> str:
    if record is None:
        return ""
    if "error" in record:
        return str(record["error"])
    relative = f" ({record['scale'] / native:.3f})" if native else ""
    return f"{record['scale']}{relative}"


def _number(value: float | None, form: str, factor: float = 1) -> str:
    return "" if value is None else form.format(value * factor)


def _yes(value: bool | None) -> str:
    return {None: "", True: "yes", False: "NO"}[value]


# ---- several runs together -----------------------------------------------------------------------


def together(runs: Sequence[Sequence[Record]]) -> list[Record]:
    """Put the records of several runs into one, as further rounds."""
    records: list[Record] = []
    for run in runs:
        after = 1 + max((record["round"] for record in records), default=WARMUP)  # first free one
        records += [
            record if record["round"] == WARMUP else {**record, "round": record["round"] + after}
            for record in run
        ]
    return records


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.torch_tables", description=__doc__)
    parser.add_argument("results", type=Path, nargs="+", help="torch_steps.json of each run")
    files = parser.parse_args().results
    made = rows(together([json.loads(path.read_text())["records"] for path in files]))
    print(steps_table(made), overall_table(overall(made)), sep="\n\n")


if __name__ == "__main__":
    main()
