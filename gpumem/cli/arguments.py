"""Arguments of several commands: devices, traces and sizes, with their completion."""

from __future__ import annotations

import re
from collections.abc import Callable
from fractions import Fraction
from typing import Any, TypeVar

import click
from click.shell_completion import CompletionItem

import gpumem
from gpumem.device import Device
from gpumem.errors import ConfigError
from gpumem.traces import samples

__all__ = [
    "complete_device",
    "complete_trace",
    "device_option",
    "is_size_with_unit",
    "parse_size",
    "size",
    "within",
]


Command = Callable[..., Any]
Range = TypeVar("Range", click.IntRange, click.FloatRange)


def within(what: str, bounds: Range) -> Range:
    """Let the error for a value that is not a number name the bounds, too, unlike click's own."""
    low, high = bounds.min, bounds.max
    bounds.name = f"{what} of {low} or more" if high is None else f"{what} from {low} to {high}"
    return bounds


def present_device(_: click.Context, __: click.Parameter, name: str | None) -> Device | None:
    """Read the name of a device that is present."""
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
            f"unknown device {name!r}: expected one of {listing}" + (reason and f" ({reason})")
        )
    return device


def device_option(meaning: str) -> Callable[[Command], Command]:
    """Make the option ``--device``, which names a device that is present."""
    reading: dict[str, Any] = {"callback": present_device, "shell_complete": complete_device}
    return click.option("--device", metavar="DEVICE", help=meaning, **reading)


def complete_device(_: click.Context, __: click.Parameter, begun: str) -> list[CompletionItem]:
    """Offer the devices that are present."""
    names = map(str, gpumem.devices())
    return [CompletionItem(name) for name in names if name.startswith(begun)]


def complete_trace(_: click.Context, __: click.Parameter, begun: str) -> list[CompletionItem]:
    """Offer files and the bundled traces; bash offers files if no trace fits."""
    names = [CompletionItem(name) for name in samples() if name.startswith(begun)]
    return [CompletionItem(begun, type="file"), *names]


def size(_: click.Context, __: click.Parameter, text: str | None) -> int | None:
    """Read a number of bytes."""
    try:
        return None if text is None else parse_size(text)
    except ConfigError as error:
        raise click.BadParameter(str(error)) from None


# ---- sizes ---------------------------------------------------------------------------------------


MOST = (1 << 63) - 1

_UNITS = {
    "": 1,
    "b": 1,
    "kb": 10**3,
    "mb": 10**6,
    "gb": 10**9,
    "tb": 10**12,
    "kib": 1 << 10,
    "mib": 1 << 20,
    "gib": 1 << 30,
    "tib": 1 << 40,
}
_SIZE = re.compile(r"(\d{1,30}(?:\.\d{1,30})?)\s*([a-z]*)", re.IGNORECASE | re.ASCII)


def parse_size(text: str) -> int:
    """Read a number of bytes.

    Parameters
    ----------
    text : str
        Plain bytes, or a number and a unit: B, KiB, MiB, GiB, TiB (powers of 1024) or kB, MB,
        GB, TB (powers of 1000), in any case. A fraction must give whole bytes.

    Returns
    -------
    int
        Bytes, 0 to 2**63 - 1.

    Raises
    ------
    ConfigError
        Anything else.

    Examples
    --------
    >>> parse_size("512MiB"), parse_size("2GB"), parse_size("1.5 KiB")
    (536870912, 2000000000, 1536)
    """
    match = _SIZE.fullmatch(text.strip())
    unit = _UNITS.get(match[2].lower()) if match else None
    size = Fraction(match[1]) * unit if match and unit else None
    if size is None or size.denominator != 1 or size > MOST:
        raise ConfigError(
            f"invalid size {text!r:.60}: expected whole bytes from 0 to 2**63 - 1, plain "
            "or with a unit such as 512MiB or 2GB"
        )
    return int(size)


def is_size_with_unit(text: str) -> bool:
    """Tell whether `text` is a number with a unit of size behind it."""
    match = _SIZE.fullmatch(text.strip())
    return match is not None and match[2].lower() in _UNITS and match[2] != ""
