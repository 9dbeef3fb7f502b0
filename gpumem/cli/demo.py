"""``gpumem demo``: the main features in half a minute, on a GPU or without one."""

from __future__ import annotations

import time
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import click
from rich.console import Console

import gpumem
from gpumem import replay as replaying
from gpumem._support.sizes import format_size
from gpumem.cli.info import describe_device, device_table, driver_calls_of
from gpumem.cli.output import json_option, pairs, present, progress, table
from gpumem.device import Device, MemoryInfo, MemoryKind
from gpumem.replay.caching_model import caching_allocator_reserved, plain_driver_reserved
from gpumem.traces import Trace, load_trace

VIEW_BYTES = 1 << 20
# The larger first; the second is for GPUs that cannot hold it.
TRACES = ("gpt2_varlen_train", "multistream_train")


@click.command(short_help="Show the main features in half a minute.")
@json_option
def demo(as_json: bool) -> None:
    """Replay a recorded training run, compare allocators, and share memory without a copy."""
    started = time.perf_counter()
    trace, device = _trace_that_fits(gpumem.default_device())
    with progress(f"replaying {trace.name} on {device}"):
        policies = _policies(trace, device)
    with progress("sharing memory"):
        views = _views(gpumem.default_device())
    facts = {
        "devices": [describe_device(each) for each in gpumem.devices()],
        "device": str(device),
        "trace": trace.name,
        "events": trace.events,
        "peak_requested_bytes": trace.peak_requested,
        "policies": policies,
        "views": views,
        "seconds": time.perf_counter() - started,
        "next": _next_steps(),
    }
    present(facts, as_json, _show)
    _raise_failures(policies, views)


def _trace_that_fits(device: Device) -> tuple[Trace, Device]:
    """Pick the largest bundled trace that the device can hold twice; the host holds any."""
    for name in TRACES:
        trace = load_trace(name)
        if device.type == "host" or device.free_bytes > 2 * trace.peak_requested:
            return trace, device
    return trace, Device("host")


def _policies(trace: Trace, device: Device) -> list[dict[str, Any]]:
    """Return the memory that each way to serve the trace reserves, and the time of its calls.

    Bytes of bare driver calls and of the caching policy are modelled. Times and driver calls are
    measured; they are None for a model.
    """
    arena = replaying.replay(trace, device)
    plain = replaying.replay(trace, device, config={"enable": False})

    def result(name: str, reserved: int, run: replaying.ReplayResult | None) -> dict[str, Any]:
        return {
            "name": name,
            "peak_reserved_bytes": reserved,
            "fragmentation": reserved / trace.peak_requested,
            "ns_per_event": run.ns_per_event if run else None,
            "driver_calls": run.driver_calls if run else None,
            "failed_allocs": run.failed_allocs if run else 0,
        }

    return [
        result("gpumem", arena.peak_reserved_bytes, arena),
        result("PyTorch-like caching", caching_allocator_reserved(trace), None),
        result(driver_calls_of(device), plain_driver_reserved(trace), plain),
    ]


def _next_steps() -> dict[str, str]:
    """Return commands to try next, and what each does."""
    steps = {"gpumem run --report out.html SCRIPT.py": "see where a script's GPU memory goes"}
    if gpumem.default_device().type == "host":
        steps = {
            "gpumem report multistream_train -o out.html": "see where a training run's memory went"
        }
    return steps | {
        "gpumem info": "what the devices here can do",
        # -P: also in the source tree, where gpumem is not compiled.
        "python -P -c 'import gpumem; help(gpumem.Arena)'": "the allocator, with examples",
    }


# ------------------------------------------------------------------------------- zero-copy views


def _views(device: Device) -> list[dict[str, Any]]:
    """Pass memory to every installed library, and check that it uses the same bytes."""
    views = [_view("NumPy", _host_accessible(device), _check_numpy)]
    if find_spec("torch") is not None:
        views.append(_view("PyTorch", MemoryInfo(_torch_device(device)), _check_torch))
    if find_spec("jax") is not None:
        views.append(_view("JAX", MemoryInfo(_jax_device(device)), _check_jax))
    if find_spec("cupy") is not None and device.type == "cuda":
        views.append(_view("CuPy", MemoryInfo(device), _check_cupy))
    if find_spec("pyarrow") is not None:
        views.append(_view("pyarrow", _host_accessible(device), _check_pyarrow))
    return views


def _view(
    library: str, memory: MemoryInfo, check: Callable[[gpumem.Buffer], bool]
) -> dict[str, Any]:
    try:
        in_place = check(gpumem.Arena(memory).allocate(VIEW_BYTES))
        detail = "" if in_place else "it uses other bytes"
    except Exception as error:  # a framework may raise anything; the table shows it
        in_place, detail = False, f"{type(error).__name__}: {error}"
    return {"library": library, "memory": str(memory), "zero_copy": in_place, "detail": detail}


def _host_accessible(device: Device) -> MemoryInfo:
    kind = MemoryKind.HOST if device.type == "host" else MemoryKind.HOST_ACCESSIBLE
    return MemoryInfo(device, kind)


def _torch_device(device: Device) -> Device:
    """Return `device` if this build of PyTorch can use it, else the host."""
    import torch

    return device if device.type == "cuda" and torch.cuda.is_available() else Device("host")


def _jax_device(device: Device) -> Device:
    """Return `device` if this installation of JAX can use it, else the host."""
    import jax

    return device if device.type == "cuda" and jax.default_backend() == "gpu" else Device("host")


def _check_numpy(buffer: gpumem.Buffer) -> bool:
    import numpy as np

    view = np.asarray(memoryview(buffer))
    memoryview(buffer)[:4] = b"demo"
    return bool(view.ctypes.data == buffer.ptr and view[:4].tobytes() == b"demo")


def _check_torch(buffer: gpumem.Buffer) -> bool:
    import torch

    tensor = torch.utils.dlpack.from_dlpack(buffer)
    tensor.fill_(3)
    return bool(tensor.data_ptr() == buffer.ptr and int(tensor.sum()) == 3 * VIEW_BYTES)


def _check_jax(buffer: gpumem.Buffer) -> bool:
    import jax

    memory = buffer.tensor((VIEW_BYTES,), "uint8")
    memory.fill(3)
    array = jax.dlpack.from_dlpack(memory)
    return bool(array.unsafe_buffer_pointer() == buffer.ptr and int(array.sum()) == 3 * VIEW_BYTES)


def _check_pyarrow(buffer: gpumem.Buffer) -> bool:
    import pyarrow

    view = pyarrow.py_buffer(buffer)
    memoryview(buffer)[:4] = b"demo"
    return bool(view.address == buffer.ptr and view.to_pybytes()[:4] == b"demo")


def _check_cupy(buffer: gpumem.Buffer) -> bool:
    import cupy

    array = cupy.from_dlpack(buffer)
    array.fill(3)
    return bool(array.data.ptr == buffer.ptr and int(array.sum()) == 3 * VIEW_BYTES)


# ---------------------------------------------------------------------------------------- output


def _show(console: Console, facts: dict[str, Any]) -> None:
    console.print(device_table(facts["devices"]))
    console.print(
        f"{facts['trace']} on {facts['device']}: {facts['events']:,} events of a real training "
        f"run, at most {format_size(facts['peak_requested_bytes'])} live at once"
    )
    rows = table("", "reserved", "/ live", "time per event", "driver calls", numbers=4)
    for policy in facts["policies"]:
        nanoseconds, calls = policy["ns_per_event"], policy["driver_calls"]
        rows.add_row(
            policy["name"],
            format_size(policy["peak_reserved_bytes"]),
            f"{policy['fragmentation']:.3f}",
            "" if nanoseconds is None else f"{nanoseconds:,.0f} ns",
            "" if calls is None else f"{calls:,}",
        )
    console.print(rows)
    console.print(
        "PyTorch-like caching, and the bytes of a call for each block (2 MiB granules), are "
        "modelled."
    )
    rows = table("library", "memory", "without a copy")
    for view in facts["views"]:
        answer = "yes" if view["zero_copy"] else f"no: {view['detail']}"
        rows.add_row(view["library"], view["memory"], answer)
    console.print(rows)
    console.print(f"{facts['seconds']:.1f} s. Next:\n")
    console.print(pairs(facts["next"]))


def _raise_failures(policies: list[dict[str, Any]], views: list[dict[str, Any]]) -> None:
    failures = [
        f"{each['name']}: {each['failed_allocs']} failed allocations"
        for each in policies
        if each["failed_allocs"]
    ]
    failures += [f"{each['library']}: {each['detail']}" for each in views if each["detail"]]
    if failures:
        raise click.ClickException("; ".join(failures))
