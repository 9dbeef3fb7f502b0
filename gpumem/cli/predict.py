"""``gpumem predict``: the memory of a script on a GPU, without a GPU."""

from __future__ import annotations

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
from gpumem.prediction import ALLOCATORS, STEPS, Prediction, gpus, predict_script
from gpumem.prediction.texts import notices, verdict

FAILED = 1
_TITLES = {"default": "PyTorch", "expandable": "expandable segments", "gpumem": "gpumem"}
_LINES_OF_OUTPUT = 15


@click.command(
    context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False},
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
    help="Time after which a run of the script is ended.",
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
    allocators: tuple[str, ...],
    time_limit: float,
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
    with progress(f"running {script}"):
        prediction = predict_script(
            [script, *arguments],
            gpu=gpu,
            memory=memory,
            steps=steps,
            until=until,
            allocators=allocators,
            seconds=time_limit,
            output=output,
        )
    present(_facts(prediction), as_json, lambda console, _: _show(console, prediction))
    fits = prediction.fits(allocators[0])
    return FAILED if fits is None else 0 if fits else TOO_MUCH


def _facts(prediction: Prediction) -> dict[str, Any]:
    runs = {
        name: asdict(run) | {"fits": prediction.fits(name), "room": prediction.room(name)}
        for name, run in prediction.runs.items()
    }
    peak = prediction.peak.as_dict() if prediction.peak else None
    return asdict(replace(prediction, peak=None)) | {"runs": runs, "peak": peak}


def _show(console: Console, prediction: Prediction) -> None:
    gpu = prediction.gpu
    first = next(iter(prediction.runs.values()))
    console.print(
        f"{gpu.name}, {format_size(gpu.memory)}; PyTorch {prediction.torch}; "
        f"{counted(first.steps, 'step')}"
    )
    rows = table("allocator", "live peak", "reserved peak", "")
    for name, run in prediction.runs.items():
        sizes = map(format_size, (run.live, run.reserved))
        title = _TITLES[name] + (", in its pools" if run.mode == "pool" else "")
        rows.add_row(title, *sizes, verdict(prediction, run))
    console.print(rows)
    if prediction.peak:
        console.print(pairs(rows_of(prediction.peak)))
    rows = table("constant", "", "")
    for each in prediction.constants():
        where = "in the peaks" if each.inside else "besides the peaks"
        size = "unknown" if each.nbytes is None else format_size(each.nbytes)
        rows.add_row(each.name, size, f"{where}; {each.source}")
    console.print(rows)
    for line in notices(prediction):
        console.print(visible(line))
    failed = next((run for run in prediction.runs.values() if run.end == "failed"), None)
    for line in failed.output.splitlines()[-_LINES_OF_OUTPUT:] if failed else ():
        console.print(f"  {visible(line)}")
