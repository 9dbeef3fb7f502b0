"""Arguments that several commands take: devices and sizes, read and completed."""

from __future__ import annotations

from typing import TypeVar

import click
from click.shell_completion import CompletionItem

import gpumem
from gpumem.cli.sizes import parse_size
from gpumem.device import Device
from gpumem.errors import ConfigError
from gpumem.traces.formats import samples

__all__ = ["complete_device", "complete_trace", "present_device", "size", "within"]

Range = TypeVar("Range", click.IntRange, click.FloatRange)


def within(what: str, bounds: Range) -> Range:
    """Name the bounds of a range also for values that are not numbers, which click does not."""
    low, high = bounds.min, bounds.max
    bounds.name = f"{what} of {low} or more" if high is None else f"{what} from {low} to {high}"
    return bounds


def present_device(_: click.Context, __: click.Parameter, name: str | None) -> Device | None:
    """Read a device that is there."""
    if name is None:
        return None
    try:
        device = Device(name)
    except ValueError as error:
        raise click.BadParameter(str(error)) from None
    present = gpumem.devices()
    if device not in present:
        listing = ", ".join(map(str, present))
        reason = gpumem.driver_status().reason if device.type == "cuda" else ""
        raise click.BadParameter(
            f"unknown device {name!r}: present are {listing}" + (reason and f" ({reason})")
        )
    return device


def complete_device(_: click.Context, __: click.Parameter, begun: str) -> list[CompletionItem]:
    """Offer the devices that are there."""
    names = map(str, gpumem.devices())
    return [CompletionItem(name) for name in names if name.startswith(begun)]


def complete_trace(_: click.Context, __: click.Parameter, begun: str) -> list[CompletionItem]:
    """Offer files and the bundled traces; bash offers files where no trace fits."""
    names = [CompletionItem(name) for name in samples() if name.startswith(begun)]
    return [CompletionItem(begun, type="file"), *names]


def size(_: click.Context, __: click.Parameter, text: str | None) -> int | None:
    """Read a number of bytes."""
    try:
        return None if text is None else parse_size(text)
    except ConfigError as error:
        raise click.BadParameter(str(error)) from None
