"""``gpumem info``: the devices, their capabilities, and the reasons of missing ones."""

from __future__ import annotations

import platform
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import click
from rich.console import Console
from rich.table import Table

import gpumem
from gpumem._support.sizes import format_size
from gpumem.cli.output import json_option, pairs, present, table
from gpumem.device import Device, devices
from gpumem.errors import GpumemError


@click.command(short_help="Show devices, and what each of them can do.")
@json_option
def info(as_json: bool) -> None:
    """Show devices, their capabilities or why they are missing, and versions."""
    present(_facts(), as_json, _show)


def _facts() -> dict[str, Any]:
    status = gpumem.driver_status()
    return {
        "versions": {
            "gpumem": gpumem.__version__,
            "python": platform.python_version(),
            "cuda_bindings": _installed("cuda-bindings"),
            "driver": _cuda_version(status.version),
        },
        "cuda": {
            "available": status.available,
            "reason": " ".join(status.reason.split()),
            "missing_functions": list(status.missing),
        },
        "devices": [describe_device(device) for device in gpumem.devices()],
        "warnings": _other_distribution(),
    }


def _installed(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _other_distribution() -> list[str]:
    """Warn of the other distribution `gpumem`, which has a command of the same name."""
    other = _installed("gpumem")
    if other is None:
        return []
    return [
        f"the distribution gpumem {other} is installed, too: it is another project (a monitor of "
        "GPU memory), and its command gpumem and this one overwrite each other; uninstall it, "
        "then install gpumem-core again"
    ]


def _cuda_version(number: int) -> str | None:
    """Write the driver's number of its CUDA version, such as 13000, as "13.0"."""
    return f"{number // 1000}.{number % 1000 // 10}" if number else None


def describe_device(device: Device) -> dict[str, Any]:
    """Collect the properties of a device as values for JSON.

    Parameters
    ----------
    device : Device
        The device to query.

    Returns
    -------
    dict
        ``device``, ``type``, ``index``, ``name``, ``uuid``, ``total_bytes``, ``free_bytes``,
        ``peers`` (the devices that can access its memory), ``capabilities`` and ``error``. If the
        driver cannot query the device, ``error`` has the reason, and properties that are not known
        are None.
    """
    facts: dict[str, Any] = {"device": str(device), "type": device.type, "index": device.index}
    facts |= dict.fromkeys(("name", "uuid", "total_bytes", "free_bytes"))
    error = ""
    try:
        for question in ("name", "uuid", "total_bytes", "free_bytes"):
            facts[question] = getattr(device, question)
    except (GpumemError, ValueError) as refusal:
        error = str(refusal)
    facts["peers"] = [] if error else _peers(device)
    facts["capabilities"] = {
        name: {"supported": bool(answer.supported), "reason": answer.reason}
        for name, answer in device.capabilities.items()
    }
    facts["error"] = error
    return facts


def _peers(device: Device) -> list[str]:
    """Return the other devices that can access a device's memory."""
    opened = device._open()
    others = [each for each in devices() if each.type == device.type and each != device]
    return [str(each) for each in others if opened.is_reached_by(each.index)]


def _show(console: Console, facts: Mapping[str, Any]) -> None:
    versions, cuda = facts["versions"], facts["cuda"]
    console.print(
        pairs(
            {
                "gpumem": versions["gpumem"],
                "Python": versions["python"],
                "cuda-bindings": versions["cuda_bindings"] or "not installed",
                "CUDA": versions["driver"] or f"not available: {cuda['reason']}",
            }
        )
    )
    for warning in facts["warnings"]:
        console.print(f"warning: {warning}", markup=False)
    if cuda["missing_functions"]:
        console.print(f"not in this driver: {', '.join(cuda['missing_functions'])}")
    console.print(device_table(facts["devices"]))
    for device in facts["devices"]:
        if device["peers"]:
            console.print(f"{device['device']} can be accessed by {', '.join(device['peers'])}")
        # A UUID would make the table of the devices wider than a terminal.
        uuid = f", {device['uuid']}" if device["uuid"] else ""
        rows = table("capability", "", title=device["device"] + uuid)
        for name, answer in device["capabilities"].items():
            rows.add_row(name, "yes" if answer["supported"] else f"no: {answer['reason']}")
        console.print(rows)


def driver_calls_of(device: Device) -> str:
    """Return a name for the calls by which an arena with ``enable=False`` serves each block."""
    return "calls of the CUDA driver" if device.type == "cuda" else "calls of the host device"


def device_table(described: list[dict[str, Any]]) -> Table:
    """Make a table of the properties that `describe_device` returns."""
    rows = table("device", "name", "total", "free", numbers=2)
    for device in described:
        if device["error"]:
            rows.add_row(device["device"], f"not usable: {device['error']}", "", "")
        else:
            rows.add_row(
                device["device"],
                device["name"],
                format_size(device["total_bytes"]),
                format_size(device["free_bytes"]),
            )
    return rows
