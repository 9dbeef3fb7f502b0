"""Settings of a partition, with the names and rules of ONNX Runtime: layers, and a check.

A setting is ``device(pattern, ...); device(pattern, ...)``. Patterns are compared with the
``layer_ann`` metadata of nodes or with their names.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from gpumem._support.arguments import require, require_settings
from gpumem.accounting.settings import ALIASES
from gpumem.device import Device
from gpumem.errors import ConfigError, ConfigWarning
from gpumem.planning.graph import Node

BY_ANNOTATION = "session.layer_assignment_settings"
BY_NAME = "session.name_based_layer_assignment"
STRICT = "session.strict_workspace_verification"
KEYS = (BY_ANNOTATION, BY_NAME, STRICT)
_ENTRY = re.compile(r"\s*([^()]*[^()\s])\s*\(([^()]*)\)\s*")


@dataclass(frozen=True)
class _Rule:
    pattern: str
    is_exact: bool
    device_name: str
    device: Device | None  # None: there is no such device


class LayerRules:
    """Rules of one setting, or none. They refuse other keys and texts with a ConfigError."""

    def __init__(self, settings: Mapping[str, str], devices: Sequence[Device]) -> None:
        require_settings(settings, KEYS, "a partition")
        for key, text in settings.items():
            require(key, text, str, "a str")
        self.is_strict = is_on(settings, STRICT)
        given = [key for key in (BY_ANNOTATION, BY_NAME) if settings.get(key)]
        if len(given) > 1:
            raise ConfigError(f"{BY_ANNOTATION} and {BY_NAME} are both given: expected one of them")
        self._key = given[0] if given else ""
        self._rules = _parsed(self._key, settings[self._key], devices) if given else []
        # Of names, the longest pattern decides; of annotations, the first prefix, then exact ones.
        self._rules.sort(
            key=lambda one: -len(one.pattern) if self._key == BY_NAME else one.is_exact
        )
        self._matched: set[_Rule] = set()

    def device_of(self, node: Node) -> Device | None:
        """Return the device that the rules assign a node to; None if none does."""
        for rule in self._rules:
            if self._matches(rule, node):
                self._matched.add(rule)
                return rule.device
        return None

    def _matches(self, rule: _Rule, node: Node) -> bool:
        if self._key == BY_NAME:
            return rule.pattern in node.name
        if rule.is_exact:
            return node.layer_ann == rule.pattern
        return node.layer_ann.startswith(rule.pattern)

    def warn(self) -> None:
        """Warn of rules without a device or a node, once each node was asked for."""
        for rule in self._rules:
            where = f"{self._key}: {rule.device_name}({'=' * rule.is_exact}{rule.pattern})"
            if rule.device is None:
                text = f"{where} has no effect: it names none of the devices"
                warnings.warn(text, ConfigWarning, stacklevel=3)
            if rule not in self._matched:
                text = f"{where} decides for no node of the graph"
                warnings.warn(text, ConfigWarning, stacklevel=3)


def is_on(settings: Mapping[str, str], key: str, default: str = "0") -> bool:
    """Return whether a setting is on; ConfigError unless it is "0" or "1"."""
    text = settings.get(key, default)
    if text not in ("0", "1"):
        raise ConfigError(f"invalid {key} = {text!r:.80}: expected '0' or '1'")
    return text == "1"


def _parsed(key: str, text: str, devices: Sequence[Device]) -> list[_Rule]:
    rules: list[_Rule] = []
    for entry in filter(str.strip, text.split(";")):
        found = _ENTRY.fullmatch(entry)
        if not found:
            raise ConfigError(
                f"invalid {key}: {entry.strip()!r:.80}: expected device(pattern, ...), "
                "with ; between two of them"
            )
        name, patterns = found.groups()
        device = _device_of(name, devices)
        for given in map(str.strip, patterns.split(",")):
            pattern, is_exact = given.removeprefix("=").strip(), given.startswith("=")
            if is_exact and key == BY_NAME:
                raise ConfigError(f"invalid {key}: {given!r:.80}: expected a pattern without '='")
            if any((one.pattern, one.is_exact) == (pattern, is_exact) for one in rules):
                raise ConfigError(f"invalid {key}: {given!r:.80} is given twice: expected it once")
            if pattern:
                rules.append(_Rule(pattern, is_exact, name, device))
    return rules


def _device_of(name: str, devices: Sequence[Device]) -> Device | None:
    """Return the first of the devices that a name of ONNX Runtime stands for."""
    kind, _, index = name.lower().partition(":")
    index = "" if index == "nvidia" else index
    for device in devices:
        if kind == "accelerator":
            if device.type != "host":
                return device
        elif device.type == ALIASES.get(kind, kind) and index in ("", str(device.index)):
            return device
    return None
