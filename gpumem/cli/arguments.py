"""Arguments of several commands: devices, traces, files and sizes, with their completion."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click
from click.shell_completion import CompletionItem

import gpumem
from gpumem._support.files import require_writable
from gpumem._support.sizes import is_share, parse_size, share_of
from gpumem.device import Device
from gpumem.errors import ConfigError
from gpumem.traces import samples
from gpumem.traces.groups import expressions_of

Command = Callable[..., Any]
Range = TypeVar("Range", click.IntRange, click.FloatRange)


class FiniteRange(click.FloatRange):
    """A range of numbers; unlike click's own, without NaN, which no bound excludes."""

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> float:
        """Read a number."""
        number: float = super().convert(value, param, ctx)
        if math.isnan(number):
            self.fail(f"{value!r} is not a valid {self.name}.", param, ctx)
        return number


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


def rule_option(meaning: str) -> Callable[[Command], Command]:
    """Add ``--rule NAME=REGEX``, which may be repeated; the command receives `rules`."""
    return click.option(
        "--rule", "rules", multiple=True, metavar="NAME=REGEX", callback=_rules, help=meaning
    )


def _rules(_: click.Context, __: click.Parameter, texts: tuple[str, ...]) -> list[tuple[str, str]]:
    rules = []
    for text in texts:
        name, equals, expression = text.partition("=")
        if not (name and equals and expression):
            raise click.BadParameter(f"{text!r}: expected NAME=REGEX")
        rules.append((name, expression))
    try:
        expressions_of(rules)
    except ConfigError as error:
        raise click.BadParameter(str(error)) from None
    return rules


def memory_option(name: str, meaning: str) -> Callable[[Command], Command]:
    """Make an option that numbers a memory of a file."""
    kind = within("integer", click.IntRange(0))
    return click.option(name, type=kind, metavar="N", help=meaning)


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


def size_or_share(
    context: click.Context, option: click.Parameter, text: str | None
) -> int | str | None:
    """Read a number of bytes, or keep the text of a share of a GPU's memory."""
    if not is_share(text):
        return size(context, option, text)
    try:
        share_of(option.opts[0], str(text), 0)
    except ConfigError as error:
        raise click.BadParameter(str(error)) from None
    return text


def writable(_: click.Context, __: click.Parameter, path: Path | None) -> Path | None:
    """Check that a file can be written, before a program runs."""
    if path is None:
        return None
    try:
        require_writable(path)
    except OSError as error:
        raise click.BadParameter(f"{path} cannot be written: {error.strerror}") from None
    return path
