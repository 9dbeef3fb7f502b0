"""What the host devices have given out and not yet taken back."""

from __future__ import annotations

from gpumem._testing import host_device


def given_out() -> dict[str, int]:
    """Count it by kind, without the workers of streams: they are kept, and end when idle."""
    return {name: count for name, count in host_device.live().items() if name != "workers"}
