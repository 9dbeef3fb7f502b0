"""``gpumem predict``: the memory of a script on a GPU, without a GPU."""

from __future__ import annotations

import re
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import click
from rich.console import Console

from gpumem._support.sizes import format_size
from gpumem._support.texts import counted, visible
from gpumem.cli.arguments import size, within, writable
from gpumem.cli.output import TOO_MUCH, json_option, pairs, present, progress, table
from gpumem.cli.peak import rows_of
from gpumem.prediction import (
    ALLOCATORS,
    STEPS,
    PredictedRun,
    Prediction,
    Search,
    gpus,
    largest,
    predict_script,
)
from gpumem.prediction.texts import answer, notices, verdict

FAILED = 1
_TITLES = {"default": "PyTorch", "expandable": "expandable segments", "gpumem": "gpumem"}
_LINES_OF_OUTPUT = 15


def _varied(_: click.Context, __: click.Parameter, text: str | None) -> tuple[str, range] | None:
    """Read a name and a range."""
    if text is None:
        return None
    match = re.fullmatch(r"([A-Za-z_]\w*)=(\d+)\.\.(\d+)(?::([1-9]\d*))?", text)
    values = range(int(match[2]), int(match[3]) + 1, int(match[4] or 1)) if match else None
    if match is None or not values:
        raise click.BadParameter(
            f"{text!r} is not a name, the first and the last number, such as batch=1..256, or "
            "batch=8..256:8 for multiples of 8"
        )
    return match[1], values


@click.command(
    context_settings={"allow_interspersed_args": False},
    short_help="Predict the memory of a PyTorch script, without a GPU.",
)
@click.option(
    "--gpu",
    type=click.Choice(gpus.names(), case_sensitive=False),
    default="h100",
    show_default=True,
    help="The GPU to predict for.",
)
@click.option(
    "--memory",
    metavar="SIZE",
    callback=size,
    help="Memory of the GPU instead of its own, such as 24GiB.",
)
@click.option(
    "--steps",
    type=within("number", click.IntRange(1)),
    metavar="N",
    help=f"Optimizer steps after which the script is stopped; by default {STEPS}, or none with "
    "--until.",
)
@click.option(
    "--until",
    metavar="FILE:LINE|FUNCTION",
    default="",
    help="Stop the script before this line, such as train.py:120, or where a function begins, such "
    "as evaluate or Trainer.evaluate.",
)
@click.option(
    "--vary",
    "varied",
    metavar="NAME=FIRST..LAST[:STEP]",
    callback=_varied,
    help="Search the largest number with which the script fits. Each run has one as "
    'gpumem.vary("NAME", default), as {NAME} in the arguments of the script, and in the '
    "environment variable NAME.",
)
@click.option(
    "--allocator",
    "allocators",
    type=click.Choice(ALLOCATORS),
    multiple=True,
    default=ALLOCATORS,
    help="The allocator beneath PyTorch; repeatable. The first one decides the exit status. "
    "[default: all three]",
)
@click.option(
    "--time-limit",
    type=within("number", click.FloatRange(1)),
    default=600,
    show_default=True,
    metavar="SECONDS",
    help="Time after which a run of the script, or a search, is ended.",
)
@click.option(
    "--ranks",
    type=within("number", click.IntRange(1)),
    default=1,
    show_default=True,
    metavar="N",
    help="Processes of a distributed script. Rank 0 alone runs, as torchrun would start it.",
)
@click.option(
    "-o",
    "--output",
    type=click.Path(dir_okay=False, path_type=Path),
    metavar="FILE",
    callback=writable,
    help="Write the recording of a run there, for gpumem report, peak and replay.",
)
@json_option
@click.argument("script", type=click.Path(exists=True, dir_okay=False))
@click.argument("arguments", nargs=-1, type=click.Path())
def predict(
    gpu: str,
    memory: int | None,
    steps: int | None,
    until: str,
    varied: tuple[str, range] | None,
    allocators: tuple[str, ...],
    time_limit: float,
    ranks: int,
    output: Path | None,
    as_json: bool,
    script: str,
    arguments: tuple[str, ...],
) -> int:
    """Predict the memory that SCRIPT would need on a GPU; needs none, and no driver.

    The script runs unmodified, once with each allocator, over a CUDA that computes nothing, until
    its optimizer has stepped N times, or up to a line, or to its end. It needs Linux and PyTorch's
    CUDA build. Exit status: 0 it fits, 3 it does not, 1 it cannot be predicted.
    """
    options: dict[str, Any] = {
        "gpu": gpu,
        "memory": memory,
        "steps": steps,
        "until": until,
        "allocators": allocators,
        "seconds": time_limit,
        "ranks": ranks,
    }
    command = [script, *arguments]
    if varied and output:
        raise click.UsageError("-o writes the recording of one run, and --vary needs many")
    with progress(f"running {script}"):
        if varied:
            search = largest(command, *varied, **options)
            prediction = search.prediction
        else:
            prediction = predict_script(command, output=output, **options)
    if varied:
        present(_facts_of(search), as_json, lambda console, _: _show_search(console, search))
    else:
        present(_facts(prediction), as_json, lambda console, _: _show(console, prediction))
    fits = prediction.fits(allocators[0])
    return FAILED if fits is None else 0 if fits else TOO_MUCH


def _facts(prediction: Prediction) -> dict[str, Any]:
    runs = {
        name: asdict(run) | {"fits": prediction.fits(name), "room": prediction.room(name)}
        for name, run in prediction.runs.items()
    }
    peak = prediction.peak.as_dict() if prediction.peak else None
    return asdict(replace(prediction, peak=None)) | {
        "runs": runs,
        "peak": peak,
        "constants": [each._asdict() for each in prediction.constants()],
    }


def _facts_of(search: Search) -> dict[str, Any]:
    return {
        "name": search.name,
        "values": [search.values[0], search.values[-1], search.values.step],
        "has_effect": search.has_effect(),
        "largest": {name: search.largest(name) for name in search.prediction.runs},
        "tried": [asdict(run) for run in search.tried],
        **_facts(search.prediction),
    }


def _show_search(console: Console, search: Search) -> None:
    prediction, name = search.prediction, search.name
    values = f"{search.values[0]} to {search.values[-1]}"
    console.print(
        f"{prediction.gpu.name}, {format_size(prediction.gpu.memory)}; PyTorch {prediction.torch}; "
        f"{name} from {values}, {counted(len(search.tried), 'run')}"
    )
    rows = table("allocator", f"largest {name}", "reserved peak", "")
    for allocator, run in prediction.runs.items():
        found = search.largest(allocator)
        size = "" if found is None else format_size(run.reserved)
        rows.add_row(
            _title(run), "none" if found is None else str(found), size, answer(search, allocator)
        )
    console.print(rows)
    if not search.has_effect():
        console.print(f"memory is the same with each {name}: the script does not read it")
    console.print(f"a larger {name} than one that does not fit is taken not to fit")
    _show_assumptions(console, prediction)


def _show(console: Console, prediction: Prediction) -> None:
    gpu = prediction.gpu
    first = next(iter(prediction.runs.values()))
    console.print(
        f"{gpu.name}, {format_size(gpu.memory)}; PyTorch {prediction.torch}; "
        f"{counted(first.steps, 'step')}"
    )
    rows = table("allocator", "live peak", "reserved peak", "")
    for run in prediction.runs.values():
        sizes = map(format_size, (run.live, run.reserved))
        rows.add_row(_title(run), *sizes, verdict(prediction, run))
    console.print(rows)
    if prediction.peak:
        console.print(pairs(rows_of(prediction.peak)))
    _show_assumptions(console, prediction)


def _title(run: PredictedRun) -> str:
    return _TITLES[run.allocator] + (", in its pools" if run.mode == "pool" else "")


def _show_assumptions(console: Console, prediction: Prediction) -> None:
    """Show what the figures rest on, and the output of a run that has failed."""
    facts = {}
    for each in prediction.constants():
        size = "unknown" if each.nbytes is None else format_size(each.nbytes)
        facts[each.name] = f"{size}, {'in' if each.inside else 'besides'} the peaks: {each.source}"
    console.print(pairs(facts))
    for line in notices(prediction):
        console.print(visible(line))
    failed = next((run for run in prediction.runs.values() if run.end == "failed"), None)
    for line in failed.output.splitlines()[-_LINES_OF_OUTPUT:] if failed else ():
        console.print(f"  {visible(line)}")
