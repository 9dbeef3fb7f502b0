"""``gpumem bench``: the time of an allocation here, next to that of other allocators."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from typing import Any

import click
import numpy as np
from rich.console import Console

import gpumem
from gpumem._support.sizes import format_size
from gpumem.cli.arguments import device_option
from gpumem.cli.info import driver_calls_of
from gpumem.cli.output import json_option, present, progress, table
from gpumem.device import Device
from gpumem.errors import GpumemError

SIZES = (4 << 10, 1 << 20, 64 << 20)  # bytes of a block
ROUNDS = 7
RUN_SECONDS = 0.01  # of one contender in one round
MAX_PAIRS = 20_000  # of one run

Pair = Callable[[], object]  # allocates a block and frees it


@click.command(short_help="Time allocations of gpumem, the driver and frameworks.")
@device_option("The device to measure, such as cuda:0 or host; every device if omitted.")
@json_option
def bench(device: Device | None, as_json: bool) -> None:
    """Time allocations and frees of gpumem, the driver, and of NumPy, PyTorch and CuPy."""
    started = time.perf_counter()
    measured = []
    for each in gpumem.devices() if device is None else [device]:
        with progress(f"measuring {each}"):
            costs = [cost for nbytes in SIZES for cost in _costs(each, nbytes)]
        measured.append({"device": str(each), "costs": costs})
    facts = {"rounds": ROUNDS, "devices": measured, "seconds": time.perf_counter() - started}
    present(facts, as_json, _show)


# ------------------------------------------------------------------------------------- measuring


def _costs(device: Device, nbytes: int) -> list[dict[str, Any]]:
    """Time one allocation and free of each contender, from Python, on one stream, warm.

    Rounds are interleaved, so that noise of the machine affects all. ``ns`` is the median of the
    rounds; ``ratio`` the median of the ratios to the arena within each round, None for the bare
    calls of the driver. Both are None if nothing was measured; then ``error`` has the reason.
    """
    times: dict[str, list[float]] = {}
    refused: dict[str, str] = {}
    ready: dict[str, tuple[Pair, int]] = {}
    for name, make in _contenders(device, nbytes):
        try:
            pair = make()
            ready[name] = pair, _pairs_in_a_run(pair)
        except Exception as error:  # a framework may raise anything; the table shows it
            refused[name] = f"{type(error).__name__}: {error}"
    for _ in range(ROUNDS):
        for name, (pair, count) in ready.items():
            times.setdefault(name, []).append(_run(pair, count))
    # No program calls the driver for each block: a ratio to that would say nothing.
    arena = times.get("gpumem.Arena")
    costs = [
        {
            "name": name,
            "nbytes": nbytes,
            "ns": statistics.median(rounds),
            "ratio": None if name == driver_calls_of(device) else _ratio(rounds, arena),
            "error": "",
        }
        for name, rounds in times.items()
    ]
    unknown = {"nbytes": nbytes, "ns": None, "ratio": None}
    return costs + [{"name": name, **unknown, "error": why} for name, why in refused.items()]


def _ratio(rounds: list[float], reference: list[float] | None) -> float | None:
    if reference is None:
        return None
    return statistics.median(ns / base for ns, base in zip(rounds, reference, strict=True))


def _pairs_in_a_run(pair: Pair) -> int:
    pair()  # warm up: the first call also makes regions and caches
    once = max(_run(pair, 3), 1.0)
    return max(3, min(MAX_PAIRS, int(RUN_SECONDS * 1e9 / once)))


def _run(pair: Pair, count: int) -> float:
    """Return nanoseconds per pair."""
    started = time.perf_counter_ns()
    for _ in range(count):
        pair()
    return (time.perf_counter_ns() - started) / count


# ------------------------------------------------------------------------------------ contenders


def _contenders(device: Device, nbytes: int) -> Iterator[tuple[str, Callable[[], Pair]]]:
    """Yield names, and functions that prepare a pair of calls; they may raise."""
    yield "gpumem.Arena", lambda: _pairs_of(gpumem.Arena(device), nbytes)
    if device.capabilities["memory_pools"].supported:
        yield "gpumem.DriverPool", lambda: _pairs_of(gpumem.DriverPool(device), nbytes)
    passing = {"enable": False}
    yield driver_calls_of(device), lambda: _pairs_of(gpumem.Arena(device, passing), nbytes)
    if device.type == "host":
        yield "numpy.empty", lambda: lambda: np.empty(nbytes, np.uint8)
    if find_spec("torch") is not None:
        yield "torch.empty", lambda: _torch_pairs(device, nbytes)
    if find_spec("cupy") is not None and device.type == "cuda":
        yield "cupy.empty", lambda: _cupy_pairs(device, nbytes)


def _pairs_of(resource: gpumem.MemoryResource, nbytes: int) -> Pair:
    allocate = resource.allocate
    return lambda: allocate(nbytes)


def _torch_pairs(device: Device, nbytes: int) -> Pair:
    import torch

    where = torch.device("cpu") if device.type == "host" else torch.device("cuda", device.index)
    if where.type == "cuda" and not torch.cuda.is_available():
        raise GpumemError("this build of PyTorch does not reach the device")
    return lambda: torch.empty(nbytes, dtype=torch.uint8, device=where)


def _cupy_pairs(device: Device, nbytes: int) -> Pair:
    import cupy

    cupy.cuda.Device(device.index).use()
    return lambda: cupy.empty(nbytes, dtype=cupy.uint8)


# ---------------------------------------------------------------------------------------- output


def _show(console: Console, facts: dict[str, Any]) -> None:
    for measured in facts["devices"]:
        rows = table("", "block", "allocate, free", "/ arena", numbers=3, title=measured["device"])
        for cost in measured["costs"]:
            rows.add_row(
                cost["name"],
                format_size(cost["nbytes"]),
                cost["error"] if cost["ns"] is None else f"{cost['ns']:,.0f} ns",
                "" if cost["ratio"] is None else f"{cost['ratio']:.2f}",
            )
        console.print(rows)
    console.print(
        f"Medians of {facts['rounds']} interleaved rounds; / arena: of the ratios within a round. "
        f"Blocks are not written; NumPy, PyTorch and CuPy make arrays. {facts['seconds']:.1f} s"
    )
