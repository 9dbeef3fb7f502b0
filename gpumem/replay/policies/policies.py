"""What ways to serve a trace would each reserve over its course."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from gpumem.replay.policies.caching_model import caching_allocator_curve, plain_driver_curve
from gpumem.replay.policies.placement import BlockAddresses, place
from gpumem.traces.details import Curve
from gpumem.traces.trace import Trace

__all__ = ["PAGES", "Policy", "policies"]

PAGES = "gpumem, pages that move"
"""The name of the policy that is an arena's default on a device's own memory."""

_PLACED: dict[str, dict[str, object]] = {
    PAGES: {"backing": "virtual"},
    "gpumem, regions": {"backing": "regions", "split_rule": "tight"},
}
_MODELLED: dict[str, Callable[[Trace], Curve]] = {
    "PyTorch-like caching": caching_allocator_curve,
    "plain driver calls": plain_driver_curve,
}


@dataclass(frozen=True, eq=False)
class Policy:
    """One way to serve a trace, and what it holds from the device meanwhile.

    Attributes
    ----------
    name : str
        Name used in error messages and reports.
    how : {"recorded", "replayed", "modelled"}
        The log told it; a real arena of the host did it; numbers stand for addresses.
    held : Curve
        Bytes held.
    fragmentation : float
        The most that is held, by the most that is live; 1.0 of an empty trace.
    placement : BlockAddresses or None
        Where blocks lay, of a replay.
    """

    name: str
    how: str
    held: Curve
    fragmentation: float
    placement: BlockAddresses | None = None

    def as_dict(self) -> dict[str, Any]:
        """Return the figures as a plain dict."""
        return {
            "name": self.name,
            "how": self.how,
            "peak_reserved_bytes": self.held.peak,
            "fragmentation": self.fragmentation,
        }


def policies(trace: Trace) -> Iterator[Policy]:
    """Serve a trace in every way, one after the other: pages, regions, caching, plain calls.

    Raises
    ------
    InUseError
        Every resource of the process is being recorded already, so that no replay can be.

    Examples
    --------
    >>> trace = Trace(action=[0, 0], block=[0, 1], size=[100, 3 << 20], stream=[0, 0],
    ...               time_us=[0, 1])
    >>> [(policy.name, policy.held.peak >> 20) for policy in policies(trace)][2:]
    [('PyTorch-like caching', 22), ('plain driver calls', 6)]
    """
    for name, config in _PLACED.items():
        placement = place(trace, config)
        yield policy(trace, name, "replayed", placement.held, placement)
    for name, model in _MODELLED.items():
        yield policy(trace, name, "modelled", model(trace))


def policy(
    trace: Trace, name: str, how: str, held: Curve, placement: BlockAddresses | None = None
) -> Policy:
    """Make a policy of what it holds."""
    live = trace.peak_requested
    return Policy(name, how, held, held.peak / live if live else 1.0, placement)
