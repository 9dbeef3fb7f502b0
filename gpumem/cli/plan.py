"""``gpumem plan``: which device runs each node of a model, its copies, and its memory."""

from __future__ import annotations

import itertools
import json
import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import click
from rich.console import Console

import gpumem
from gpumem._support.arguments import is_same_file, require_settings
from gpumem._support.closing import collector_off
from gpumem._support.files import require_writable
from gpumem._support.sizes import format_size, parse_size
from gpumem._support.texts import visible
from gpumem.accounting import Accountant, Accountants, AdHocAccountant, StatsAccountant
from gpumem.cli.arguments import complete_device, within
from gpumem.cli.output import json_option, pairs, print_json, progress, stdout, table
from gpumem.device import MemoryInfo, MemoryKind
from gpumem.errors import ConfigError, ModelGraphError, ModelSizeError
from gpumem.planning import (
    Assignment,
    MemoryPlan,
    ModelGraph,
    Placement,
    Target,
    Value,
    partition,
    plan_memory,
)
from gpumem.planning.assignment.layers import KEYS
from gpumem.planning.assignment.passes import STRATEGIES
from gpumem.planning.graph.expansion import DEFAULTS
from gpumem.planning.memory.memory_plan import PREALLOCATION

DEVICES = ("cuda:0", "host")
_MEANINGS = (
    "committed: weights and outputs of the nodes on a device, and half as much again for their "
    "work (--percent; or the workspaces that nodes declare; or measured costs, --stats)",
    "budget: the maximum that may be committed on a device; empty: no limit",
    "peak: the bytes of a memory that a run needs at once, with every value at its planned offset; "
    "without weights, unless --weights is given",
    "lower bound: the peak of the bytes of live values; no plan needs less",
)
# Settings of ONNX Runtime that the command has an option for.
_INSTEAD = dict.fromkeys(("gpu_mem_limit", "resource_cuda_partitioning_settings"), "--budget")
MAX_ROWS = 40  # of one table; --json and -o have everything
MAX_TENSORS = 5  # shown of each memory, and named without a size


@click.command(
    short_help="Place an ONNX model on devices, and plan its memory.",
    epilog="\n\n".join(_MEANINGS),
)
@click.argument("model", type=click.Path(path_type=Path))
@click.option(
    "--budget",
    "budgets",
    multiple=True,
    metavar="[DEVICE=]SIZE",
    help="Limit of a device, such as 2GiB or cuda:1=512MiB; without a device, of the first one.",
)
@click.option(
    "--device",
    "devices",
    multiple=True,
    default=DEVICES,
    shell_complete=complete_device,
    metavar="DEVICE",
    help="A device, in order of preference; may be absent here. [default: cuda:0, host]",
)
@click.option(
    "--dim", "dims", multiple=True, metavar="NAME=N", help="Length of a named input dimension."
)
@click.option("--stats", type=click.Path(path_type=Path), help="A file of measured costs.")
@click.option(
    "--percent",
    type=within("integer", click.IntRange(100, 10_000)),
    metavar="N",
    help="Percentage by which known bytes count, without --stats. [default: 150]",
)
@click.option(
    "--strategy",
    type=click.Choice(sorted(STRATEGIES)),
    default="greedy",
    show_default=True,
    help="How nodes are chosen under a budget; best keeps greedy's where it alternates for few.",
)
@click.option(
    "--setting",
    "settings",
    multiple=True,
    metavar="KEY=VALUE",
    help="A setting of ONNX Runtime, such as session.layer_assignment_settings=cpu(head).",
)
@click.option("--weights", is_flag=True, help="Include weights in the memory plan.")
@click.option(
    "-o", "--output", type=click.Path(path_type=Path), help="Write the plan as JSON to a file."
)
@json_option
def plan(
    model: Path,
    budgets: tuple[str, ...],
    devices: tuple[str, ...],
    dims: tuple[str, ...],
    stats: Path | None,
    percent: int | None,
    strategy: str,
    settings: tuple[str, ...],
    weights: bool,
    output: Path | None,
    as_json: bool,
) -> None:
    """Place MODEL, an ONNX file, on devices under budgets, and plan its memory."""
    if output is not None and is_same_file(output, (model, stats)):
        raise ConfigError(f"invalid --output {output}: expected another file than the input")
    if output is not None:
        with _writing(output):
            require_writable(output, in_place=True)
    targets = _targets(devices)
    limits = _limits(budgets, targets)
    session = _session(settings)

    def placed(strategy: str) -> tuple[Placement, Accountants]:
        accountants = Accountants(
            {target.device: _accountant(limits, target, stats, percent) for target in targets}
        )
        rules = _those(session, KEYS)
        return partition(graph, targets, accountants, strategy, rules), accountants

    with progress(f"planning {model}"), collector_off(), _warnings_shown():
        graph = _read(model, dims, _those(session, DEFAULTS))
        try:
            placement, accountants = placed(strategy)
            if placement.gains and _changes(placement) >= len(targets):
                greedy = placed("greedy")
                nodes = _nodes_under(limits, placement) - _nodes_under(limits, greedy[0])
                changes = _changes(placement) - _changes(greedy[0])
                if changes > nodes:
                    placement, accountants = greedy
                    placement.gains[targets[0].device] = (
                        f"the search would place {nodes} nodes more than the greedy order, and "
                        f"change the device {changes} times more in a run: greedy is kept"
                    )
            made = plan_memory(
                placement,
                weights=weights,
                in_place="onnxruntime",
                settings=_those(session, [PREALLOCATION]),
            )
        except ModelSizeError as error:
            raise ConfigError(f"{model}: {error}") from error
        made.verify()
    facts = {"open_dims": _open_dims(graph)} | _facts(model, placement, accountants, made)
    if output is not None:
        text = json.dumps(facts, indent=2, allow_nan=False) + "\n"
        with _writing(output):
            output.write_text(text, encoding="utf-8")
    if as_json:
        print_json(facts)
    else:
        _show(stdout(), facts, placement, made)


# ---- arguments -----------------------------------------------------------------------------------


def _targets(devices: tuple[str, ...], option: str = "--device") -> list[Target]:
    try:
        return [Target.of(name) for name in devices]
    except ValueError as error:
        raise click.BadParameter(str(error), param_hint=option) from None


def _limits(budgets: tuple[str, ...], targets: list[Target]) -> dict[Any, int]:
    """Return the limits by device."""
    limits: dict[Any, int] = {}
    for text in budgets:
        name, equals, size = text.rpartition("=")
        (target,) = _targets((name,), "--budget") if equals else targets[:1]
        if target.device not in [one.device for one in targets]:
            raise ConfigError(f"--budget {text}: {target.device} is not among the devices")
        if limits.setdefault(target.device, parse_size(size)) != parse_size(size):
            raise ConfigError(f"--budget is given twice for {target.device}")
    return limits


def _session(texts: tuple[str, ...]) -> dict[str, str]:
    """Return the settings by key."""
    settings: dict[str, str] = {}
    for text in texts:
        key, equals, value = text.partition("=")
        if not equals or settings.setdefault(key, value) != value:
            raise ConfigError(f"invalid --setting {text!r:.80}: expected KEY=VALUE, each key once")
    require_settings(settings, (*KEYS, *DEFAULTS, PREALLOCATION), "a plan", _INSTEAD)
    return settings


def _those(session: dict[str, str], keys: Iterable[str]) -> dict[str, str]:
    return {key: session[key] for key in keys if key in session}


@contextmanager
def _warnings_shown() -> Iterator[None]:
    """Show warnings as lines of the command, each once."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield
    for text in dict.fromkeys(str(one.message) for one in caught):
        click.echo(f"gpumem: warning: {visible(text)}", err=True)


def _accountant(
    limits: dict[Any, int], target: Target, stats: Path | None, percent: int | None
) -> Accountant:
    limit = limits.get(target.device)
    if stats is None:
        return (
            AdHocAccountant(limit) if percent is None else AdHocAccountant(limit, percent=percent)
        )
    if percent is not None:
        raise ConfigError(
            "--percent cannot be combined with --stats: measured costs count as they are"
        )
    return StatsAccountant(stats, limit)


def _read(model: Path, dims: tuple[str, ...], settings: dict[str, str]) -> ModelGraph:
    """Read the model; an error in it counts as bad input."""
    try:
        return ModelGraph.from_onnx(model, dims=dict(map(_dim, dims)), settings=settings)
    except ModelGraphError as error:
        name = "" if str(model) in str(error) else f"{model}: "
        raise ConfigError(f"{name}{error}") from error
    except OSError as error:
        raise ConfigError(f"{model}: {error.strerror or error}") from error
    except ImportError as error:
        raise click.ClickException(str(error)) from error


def _nodes_under(limits: dict[Any, int], placement: Placement) -> int:
    return sum(len(placement.nodes_on(device)) for device in limits)


def _changes(placement: Placement) -> int:
    """Return how many nodes run on another device than the node before them."""
    pairs_of_nodes = itertools.pairwise(one.device for one in placement.assignments)
    return sum(before != after for before, after in pairs_of_nodes)


def _open_dims(graph: ModelGraph) -> list[str]:
    """Return the named dimensions of inputs that have no length yet, each once."""
    lengths = (length for value in graph.inputs for length in value.shape or ())
    return list(dict.fromkeys(length for length in lengths if isinstance(length, str)))


def _dim(text: str) -> tuple[str, int]:
    name, _, length = text.rpartition("=")
    if not name or not length.isdecimal():
        raise ConfigError(
            f"invalid --dim {text!r:.60}: expected NAME=N with N from 0, such as batch=8"
        )
    return name, int(length)


# ---- output --------------------------------------------------------------------------------------


def _facts(
    model: Path, placement: Placement, accountants: Accountants, made: MemoryPlan
) -> dict[str, Any]:
    return {
        "model": str(model),
        "devices": [_device_facts(placement, accountants, t) for t in placement.targets],
        "absent": [str(t.device) for t in placement.targets if t.device not in gpumem.devices()],
        "nodes": [
            {
                "name": one.node.name,
                "op_type": one.node.op_type,
                "outputs": [value.name for value in one.node.makes],
                "device": str(one.device),
                "cost_bytes": one.cost.total_bytes,
                "group": one.group,
                "why": one.why,
            }
            for one in placement.assignments
        ],
        "copies": [
            {
                "value": copy.value.name,
                "source": str(copy.source),
                "destination": str(copy.destination),
                "step": copy.step,
                "nbytes": copy.nbytes,
                "why": copy.why,
            }
            for copy in made.copies.copies
        ],
        "copied_bytes": made.copies.copied_bytes,
        "memory": made.as_dict(),
        "at_peak": {str(memory): _at_peak(made, memory) for memory in made.blocks},
    }


def _at_peak(made: MemoryPlan, memory: MemoryInfo) -> list[dict[str, Any]]:
    """Return the values that are live at the step of most live bytes, the largest first.

    Of values that share bytes, the largest is there.
    """
    step = made.blocks[memory].busiest_step
    largest: dict[int, tuple[int, Value]] = {}
    for tenant, place in made.places.items():
        if tenant.memory == memory and place.first <= step <= place.last:
            known = largest.get(place.offset)
            if known is None or place.nbytes > known[0]:
                largest[place.offset] = place.nbytes, tenant.value
    makers = {value: node for node, value in made.scratch.items()}
    makers |= {value: node for node in made.placement.graph for value in node.makes}
    return [
        {
            "value": value.name,
            "node": "" if (node := makers.get(value)) is None else node.name or node.op_type,
            "nbytes": nbytes,
        }
        for nbytes, value in sorted(largest.values(), key=lambda each: -each[0])
    ]


def _device_facts(placement: Placement, accountants: Accountants, target: Target) -> dict[str, Any]:
    limit = accountants[target.device].threshold
    return {
        "device": str(target.device),
        "nodes": len(placement.nodes_on(target.device)),
        "committed_bytes": placement.consumed[target.device].total_bytes,
        "budget_bytes": None if limit is None else limit.total_bytes,
        "gain": placement.gains.get(target.device),
    }


@contextmanager
def _writing(output: Path) -> Iterator[None]:
    """Turn an OSError of writing `output` into the error that the command prints."""
    try:
        yield
    except OSError as error:
        text = f"{output}: cannot be written: {error.strerror or error}"
        raise click.ClickException(text) from error


def _show(console: Console, facts: dict[str, Any], placement: Placement, made: MemoryPlan) -> None:
    if facts["open_dims"]:
        options = " ".join(f"--dim {visible(name)}=..." for name in facts["open_dims"])
        console.print(
            f"some lengths are open, and what depends on them counts as 0 B: give {options}"
        )
    rows = table("device", "nodes", "committed", "budget", numbers=3)
    for device in facts["devices"]:
        committed, limit = format_size(device["committed_bytes"]), device["budget_bytes"]
        budget = "" if limit is None else format_size(limit)
        rows.add_row(device["device"], f"{device['nodes']:,}", committed, budget)
    console.print(rows)
    for name in facts["absent"]:
        reason = gpumem.driver_status().reason if name.startswith("cuda") else ""
        why = f" ({reason})" if reason else ""
        console.print(f"{name} is not present here{why}: the plan is for a machine that has it")
    for target, gain in placement.gains.items():
        console.print(f"{target}: {gain}")
    _show_runs(console, placement)
    _show_copies(console, made)
    rows = table("memory", "peak", "lower bound", "strategy", numbers=3)
    for memory, block in made.blocks.items():
        peak, bound = format_size(block.peak_bytes), format_size(block.lower_bound_bytes)
        rows.add_row(str(memory), peak, bound, block.strategy)
    console.print(rows)
    for memory in made.blocks:
        if memory.kind is MemoryKind.HOST_ACCESSIBLE:
            console.print(
                f"{memory} is pinned host memory: it has the values that both the host and "
                f"{memory.device} use, such as the inputs and outputs of the model"
            )
    _show_tensors(console, facts["at_peak"])
    facts_at_end = {"peak": format_size(made.peak_bytes)}
    unknown = [*made.unplanned, *made.uncounted]
    if unknown:
        more = len(unknown) - MAX_TENSORS
        facts_at_end["size only known in a run"] = ", ".join(unknown[:MAX_TENSORS]) + (
            f" and {more:,} more" if more > 0 else ""
        )
    console.print(pairs(facts_at_end))
    console.print("gpumem plan --help explains the words", style="dim")


def _show_tensors(console: Console, at_peak: dict[str, list[dict[str, Any]]]) -> None:
    rows = table("largest at the peak", "of node", "memory", "bytes", numbers=1)
    for memory, tensors in at_peak.items():
        for one in tensors[:MAX_TENSORS]:
            rows.add_row(one["value"], one["node"], memory, format_size(one["nbytes"]))
    if rows.row_count:
        console.print(rows)


def _show_runs(console: Console, placement: Placement) -> None:
    """Show nodes that follow each other on one device as one row."""
    rows = table("nodes", "on", "why")
    runs = [
        (str(device), list(run))
        for device, run in itertools.groupby(placement.assignments, key=lambda one: one.device)
    ]
    for device, run in runs[:MAX_ROWS]:
        ends = _title(run[0]) if len(run) == 1 else f"{_title(run[0])} to {_title(run[-1])}"
        why = "; ".join(f"{one.device}: {one.why}" for one in run[0].refusals)
        rows.add_row(f"{len(run)}: {ends}", device, why)
    console.print(rows)
    _show_left_out(console, len(runs))


def _title(one: Assignment) -> str:
    return one.node.name or one.node.op_type


def _show_copies(console: Console, made: MemoryPlan) -> None:
    copies = made.copies.copies
    if not copies:
        console.print("nothing is copied")
        return
    rows = table("copied", "from", "to", "before step", "bytes", numbers=2)
    for copy in copies[:MAX_ROWS]:
        step = "any run" if copy.step < 0 else str(copy.step)
        nbytes = "?" if copy.nbytes is None else format_size(copy.nbytes)
        rows.add_row(copy.value.name, str(copy.source), str(copy.destination), step, nbytes)
    console.print(rows)
    _show_left_out(console, len(copies))
    console.print(f"{format_size(made.copies.copied_bytes)} are copied in a run")


def _show_left_out(console: Console, count: int) -> None:
    if count > MAX_ROWS:
        console.print(f"and {count - MAX_ROWS:,} more: --json and -o have all of them")
