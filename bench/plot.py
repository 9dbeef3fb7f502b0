"""What tighter memory costs: fragmentation against page moves and against time, per trace.

Replays each trace over a range of `page_move_threshold`, and beside them the regions of ordinary
driver blocks and what PyTorch itself needed. Draws ``page_moving.svg``, and writes the figures
behind it, with what lag does under each stream policy, as ``page_moving.json`` and ``.md``.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from bench.replays import MOVE_US
from gpumem import ArenaConfig
from gpumem.replay import replay
from gpumem.traces import Trace, load_trace, samples

RESULTS = Path(__file__).resolve().parent / "results"
THRESHOLDS = (0.0, 0.0025, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.03, 0.05, 0.1, 0.2)
DEFAULT = ArenaConfig().page_move_threshold
LAGS_US = (0, 10_000)
POLICIES = ("completed", "wait", "never")
REPEATS = 5
# PyTorch with expandable segments on the same runs, reserved / requested; its default mode is in
# the traces themselves.
EXPANDABLE = {
    "gpt2_varlen_train": 1.074,
    "resnet50_var_train": 1.016,
    "mixtral_train": 1.075,
    "multistream_train": 1.288,
}


def measure(paths: Iterable[Path], device: str) -> dict[str, Any]:
    """Replay everything; a dict of plain values."""
    from bench.__main__ import machine

    traces = [load_trace(path) for path in paths]
    return {
        "machine": machine() | {"cpu": _cpu()},
        "device": device,
        "move_us": MOVE_US,
        "traces": [_traded(trace, device) for trace in traces],
        "lag": [row for trace in traces if trace.streams > 1 for row in _lagged(trace)],
    }


def _traded(trace: Trace, device: str) -> dict[str, Any]:
    configs: dict[str, dict[str, Any]] = {
        f"{threshold:g}": {"backing": "virtual", "page_move_threshold": threshold}
        for threshold in THRESHOLDS
    }
    configs["regions"] = {"backing": "regions", "split_rule": "tight"}
    rounds = [
        {name: replay(trace, device, config=config) for name, config in configs.items()}
        for _ in range(REPEATS)
    ]
    recorded = trace.meta.get("peak_reserved", 0) / trace.meta.get("peak_requested", 1)
    return {
        "trace": trace.name,
        "pytorch": recorded or None,
        "pytorch_expandable": EXPANDABLE.get(trace.name),
        "points": {
            name: {
                "fragmentation": result.fragmentation,
                "pages_moved": result.pages_moved,
                "moving_share": result.pages_moved * MOVE_US / max(1, trace.duration_us),
                "ns_per_event": statistics.median(one[name].ns_per_event for one in rounds),
                "failed_allocs": result.failed_allocs,
            }
            for name, result in rounds[0].items()
        },
    }


def _lagged(trace: Trace) -> list[dict[str, Any]]:
    """Let every stream finish its work late, which only the host device can."""
    rows = []
    for backing in ("regions", "virtual"):
        for policy in POLICIES:
            for lag_us in LAGS_US:
                config = {"backing": backing, "stream_reuse": policy, "split_rule": "tight"}
                result = replay(trace, "host", config=config, lag_us=lag_us)
                rows.append(
                    {
                        "trace": trace.name,
                        "backing": backing,
                        "stream_reuse": policy,
                        "lag_us": lag_us,
                        "fragmentation": result.fragmentation,
                        "pages_moved": result.pages_moved,
                        "moving_share": result.pages_moved * MOVE_US / max(1, trace.duration_us),
                        "driver_calls": result.driver_calls,
                        "failed_allocs": result.failed_allocs,
                    }
                )
    return rows


def _cpu() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()


# ---- the plot ------------------------------------------------------------------------------------


def draw(report: dict[str, Any], path: Path) -> None:
    """Draw what was measured; one column per trace."""
    import matplotlib as mpl

    mpl.use("svg")
    mpl.rcParams.update({"svg.hashsalt": "gpumem", "font.size": 8})
    from matplotlib import pyplot

    traces = report["traces"]
    figure, axes = pyplot.subplots(
        2, len(traces), figsize=(3.4 * len(traces), 5.6), sharex="col", squeeze=False
    )
    for column, trace in enumerate(traces):
        cost, time = axes[0][column], axes[1][column]
        cost.set_title(trace["trace"])
        _curve(cost, trace, "moving_share", 100)
        _curve(time, trace, "ns_per_event", 1)
        cost.axhline(1, color="0.6", linestyle=":", linewidth=0.8)
        time.set_yscale("log")
        time.set_xlabel("reserved above requested, %")
    axes[0][0].set_ylabel(f"moving, % of the run\n({report['move_us']} us per page mapped anew)")
    axes[1][0].set_ylabel("ns per event")
    handles, labels = axes[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="lower center", ncols=len(labels), frameon=False)
    figure.tight_layout(rect=(0, 0.05, 1, 1))
    figure.savefig(path, metadata={"Date": None})
    pyplot.close(figure)


def _curve(axis: Any, trace: dict[str, Any], key: str, scale: float) -> None:
    def at(point: dict[str, Any]) -> tuple[float, float]:
        return 100 * (point["fragmentation"] - 1), scale * point[key]

    points = dict(trace["points"])
    regions = at(points.pop("regions"))
    axis.plot(*zip(*map(at, points.values()), strict=True), ".-", label="pages that move")
    default = at(points[f"{DEFAULT:g}"])
    axis.plot(*default, "o", color="C0", markersize=7, label=f"its default, {DEFAULT:g}")
    axis.plot(*regions, "s", color="C2", label="regions")
    for name, label, style in (
        ("pytorch_expandable", "PyTorch, expandable segments", "--"),
        ("pytorch", "PyTorch", "-"),
    ):
        if trace[name]:
            axis.axvline(100 * (trace[name] - 1), color="C3", linestyle=style, label=label)
    axis.axvline(2, color="0.6", linestyle=":", linewidth=0.8, label="goal")
    axis.set_xscale("log")


# ---- the tables ----------------------------------------------------------------------------------


def told(report: dict[str, Any], command: str) -> str:
    """Write the report as Markdown."""
    machine, held = report["machine"], "reserved / requested"
    hardware = (
        machine.get("gpu", "no GPU") if report["device"].startswith("cuda") else "host device"
    )
    lines = [
        "# What tighter memory costs",
        "",
        f"{machine['date']}; {hardware}, {machine['cpu']}; Python {machine['python']}, gpumem "
        f"{machine['gpumem']}. Command: `{command}`.",
        "",
        f"Moving is {report['move_us']} us per page mapped anew, as a share of the recorded run's "
        f"time; time per event is the median of {REPEATS} replays in turn.",
        "",
        "![fragmentation against page moves and against time](page_moving.svg)",
        "",
        *_row(
            "trace", "page_move_threshold", "reserved / requested", "moved", "moving", "ns/event"
        ),
        *_row(*["---"] * 6),
    ]
    for trace in report["traces"]:
        for name, point in trace["points"].items():
            lines += _row(
                trace["trace"],
                name,
                f"{point['fragmentation']:.3f}",
                str(point["pages_moved"]),
                f"{100 * point['moving_share']:.2f} %",
                f"{point['ns_per_event']:.0f}",
            )
        for name in ("pytorch_expandable", "pytorch"):
            if trace[name]:
                shown = name.replace("_", ", ").replace("pytorch", "PyTorch")
                lines += _row(trace["trace"], shown, f"{trace[name]:.3f}", "", "", "")
    lines += ["", "## Work that is late", ""]
    lines += [
        "Every stream finishes its work so much later than it was enqueued (host device).",
        "",
    ]
    keys = ("trace", "backing", "stream_reuse", "lag_us")
    lines += _row(*keys, held, "moved", "moving", "failed") + _row(*["---"] * 8)
    for row in report["lag"]:
        lines += _row(
            *(str(row[key]) for key in keys),
            f"{row['fragmentation']:.3f}",
            str(row["pages_moved"]),
            f"{100 * row['moving_share']:.2f} %",
            str(row["failed_allocs"]),
        )
    return "\n".join(lines) + "\n"


def _row(*cells: str) -> list[str]:
    return ["| " + " | ".join(cells) + " |"]


def main() -> int:
    """Measure, or read what was measured, and draw."""
    parser = argparse.ArgumentParser(prog="python -m bench.plot", description=__doc__)
    parser.add_argument("--traces", type=Path, help="folder of .npz traces; else the bundled ones")
    parser.add_argument("--device", default="host", help="where to replay")
    parser.add_argument("--read", type=Path, help="a page_moving.json to draw anew")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of the results")
    chosen = parser.parse_args()
    if chosen.read:
        report = json.loads(chosen.read.read_text())
    else:
        paths = sorted(chosen.traces.glob("*.npz")) if chosen.traces else samples().values()
        report = measure(paths, chosen.device)
    chosen.out.mkdir(parents=True, exist_ok=True)
    draw(report, chosen.out / "page_moving.svg")
    (chosen.out / "page_moving.json").write_text(json.dumps(report, indent=1) + "\n")
    command = f"python -m bench.plot --traces TRACES --device {report['device']}"
    (chosen.out / "page_moving.md").write_text(told(report, command))
    return 0


if __name__ == "__main__":
    sys.exit(main())
