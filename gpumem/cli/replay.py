"""``gpumem replay``: run a recorded trace on a real arena and report its memory and time."""

from __future__ import annotations

from collections.abc import Sequence

import click

from gpumem import replay as replaying
from gpumem._support.arguments import is_integer
from gpumem._support.sizes import format_size, is_size_with_unit, parse_size
from gpumem.cli.arguments import complete_trace, device_option, memory_option, size, within
from gpumem.cli.output import json_option, notice, pairs, print_json, progress, stdout, table
from gpumem.device import Device
from gpumem.errors import ConfigError
from gpumem.replay import ReplayResult
from gpumem.replay.engine import MAX_LAG_US
from gpumem.report.data import notice_of
from gpumem.traces import Trace, load_trace, load_traces, samples
from gpumem.traces.formats import busiest, memory_of
from gpumem.traces.trace import MAX_LIVE


@click.command(short_help="Run a trace again under other settings.")
@click.argument("trace", required=False, shell_complete=complete_trace)
@click.option("--list", "list_samples", is_flag=True, help="List the bundled traces.")
@device_option("The device to replay on, such as cuda:0 or host; the best device if omitted.")
@click.option(
    "--max-mem", callback=size, metavar="SIZE", help="Limit of the arena, such as 8GiB; 0 for none."
)
@click.option(
    "--config", "settings", multiple=True, metavar="KEY=VALUE", help="A setting; may be repeated."
)
@click.option(
    "--lag-us",
    type=within("integer", click.IntRange(0, MAX_LAG_US)),
    metavar="N",
    default=0,
    help="Delay of every stream's work, in microseconds (host devices only).",
)
@memory_option(
    "--memory", "Index of the memory of TRACE to replay, if it has several; by default the busiest."
)
@json_option
def replay(
    trace: str | None,
    list_samples: bool,
    device: Device | None,
    max_mem: int | None,
    settings: tuple[str, ...],
    lag_us: int,
    memory: int | None,
    as_json: bool,
) -> None:
    """Replay TRACE: a file (.npz, PyTorch memory snapshot, RMM log) or a bundled trace's name.

    Of a file with several memories, such as the devices of a snapshot, one is replayed.

    The exit code is 1 if an allocation failed.
    """
    if list_samples:
        if trace is not None:
            raise click.UsageError("--list cannot be combined with TRACE")
        _list(as_json)
        return
    if trace is None:
        raise click.UsageError("missing TRACE: a file, or a name from gpumem replay --list")
    config = _config(settings, max_mem)
    with progress(f"replaying {trace}"):
        found = load_traces(trace, device=memory)
        loaded = busiest(found)
        result = replaying.replay(loaded, device, config=config, lag_us=lag_us)
    told = notice_of(loaded)
    if len(found) > 1:
        names = ", ".join(map(memory_of, found))
        told = f"{trace} has {names}; {memory_of(loaded)} is replayed (--memory). {told}".strip()
    notice(told)
    if as_json:
        print_json({**result.as_dict(), "memory": memory_of(loaded), "notice": told})
    else:
        stdout().print(pairs(_rows(loaded, result)))
    if result.failed_allocs:
        # No peak has the failed allocations, so the figures are not those of the run.
        raise click.ClickException(
            f"{result.failed_allocs:,} of {loaded.allocs:,} allocations failed: the peaks in use "
            "and reserved, and fragmentation, are those of the others"
        )


def _config(settings: Sequence[str], max_mem: int | None) -> dict[str, object]:
    """Read KEY=VALUE settings; sizes are compared as bytes, however they are written."""
    given = [_setting(text) for text in settings]
    if max_mem is not None:
        given.append(("arena.max_mem", str(max_mem)))
    config: dict[str, object] = {}
    for key, value in given:
        # The arena's own check cannot find a key that is given twice.
        if config.setdefault(key, value) != value:
            raise ConfigError(
                f"{key} is given twice with different values: {config[key]!r} and {value!r}"
            )
    return config


def _setting(text: str) -> tuple[str, str]:
    key, equals, value = text.partition("=")
    if not equals or not key.strip():
        raise ConfigError(f"invalid setting {text!r:.60}: expected KEY=VALUE")
    value = value.strip()
    return key.strip(), str(parse_size(value)) if is_size_with_unit(value) else value


def _rows(trace: Trace, result: ReplayResult) -> dict[str, str]:
    requested = result.peak_requested_bytes
    rows = {
        "trace": f"{trace.name}, {trace.streams} stream{'s' * (trace.streams != 1)}",
        "device": result.device,
        "events": f"{result.events:,}",
        "peak requested": format_size(requested),
        "peak in use": format_size(result.peak_in_use_bytes),
        "peak reserved": format_size(result.peak_reserved_bytes),
        "fragmentation": f"{result.fragmentation:.3f}"
        + (" of the allocations that did not fail" if result.failed_allocs else ""),
        **_unfinished(result),
        "time per event": f"{result.ns_per_event:.0f} ns",
        "failed allocations": f"{result.failed_allocs:,}",
        "driver calls": f"{result.driver_calls:,}",
        "pages moved": f"{result.pages_moved:,}",
    }
    recorded = trace.meta.get("peak_reserved")
    if is_integer(recorded, 0, MAX_LIVE) and requested:
        rows["when recorded"] = f"{format_size(recorded)} reserved, {recorded / requested:.3f}"
    return rows


def _unfinished(result: ReplayResult) -> dict[str, str]:
    """With lag: return a row with the bytes that unfinished work keeps from other streams."""
    needed = result.peak_live_or_unfinished_bytes
    if needed == result.peak_requested_bytes:
        return {}
    ratio = result.peak_reserved_bytes / needed
    return {"peak live or unfinished": f"{format_size(needed)}, reserved / it {ratio:.3f}"}


def _list(as_json: bool) -> None:
    traces = [(path, load_trace(path)) for path in samples().values()]
    if as_json:
        keys = ("name", "path", "events", "streams", "peak_requested_bytes")
        values = [(t.name, str(p), t.events, t.streams, t.peak_requested) for p, t in traces]
        print_json({"samples": [dict(zip(keys, row, strict=True)) for row in values]})
        return
    rows = table("trace", "events", "streams", "peak requested", numbers=3)
    for _, trace in traces:
        rows.add_row(
            trace.name, f"{trace.events:,}", str(trace.streams), format_size(trace.peak_requested)
        )
    stdout().print(rows)
