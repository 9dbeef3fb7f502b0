"""Sums over all processes, memory by memory, for ``gpumem top``."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from gpumem.observe import LivePage


@dataclass
class MemorySum:
    """One memory of the machine, and the bytes of it that the publishing processes hold."""

    memory: str
    processes: int = 0
    in_use: int = 0
    reserved: int = 0


def sums_of(pages: Iterable[LivePage]) -> list[MemorySum]:
    """Add up the resources of all processes that run, by memory, in the order of names.

    A process numbers its GPUs from 0 among those of its CUDA_VISIBLE_DEVICES; here they have the
    machine's numbers, or the names in that variable.
    """
    sums: dict[str, MemorySum] = {}
    for page in pages:
        if not page.alive:
            continue
        visible = _visible_devices(page.process)
        for named in {one.memory for one in page.resources}:
            memory = _of_the_machine(named, visible)
            found = sums.setdefault(memory, MemorySum(memory))
            found.in_use += page.total("in_use", named)
            found.reserved += page.total("reserved", named)
            found.processes += 1
    return sorted(sums.values(), key=lambda each: each.memory)


def _visible_devices(process: int) -> list[str]:
    """Return CUDA_VISIBLE_DEVICES as the process was started with; empty: all, or not known."""
    try:
        words = Path("/proc", str(process), "environ").read_bytes().split(b"\0")
    except OSError:
        return []
    for word in words:
        name, _, value = word.decode("utf-8", "replace").partition("=")
        if name == "CUDA_VISIBLE_DEVICES":
            return [each.strip() for each in value.split(",") if each.strip()]
    return []


def _of_the_machine(memory: str, visible: list[str]) -> str:
    """Name a memory such as "cuda:0/managed" by the machine's number of its GPU."""
    device, slash, kind = memory.partition("/")
    family, _, ordinal = device.partition(":")
    if family != "cuda" or not ordinal.isdigit() or int(ordinal) >= len(visible):
        return memory
    name = visible[int(ordinal)]
    return f"{f'cuda:{name}' if name.isdigit() else name}{slash}{kind}"
