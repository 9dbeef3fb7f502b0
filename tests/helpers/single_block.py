"""Arenas with room for one block: its address tells which stream may have it next."""

from __future__ import annotations

from typing import Any

import gpumem

MIB = 1 << 20
BLOCK = MIB - 256  # bytes


def single_block_arena(
    make_arena: Any, policy: str = "completed", stream: Any = None, **more: Any
) -> Any:
    """Make an arena with room for one block of BLOCK bytes, beside a small one that pins it."""
    arena = make_arena(
        {"stream_reuse": policy, "max_mem": MIB, "split_rule": "tight", "oom_wait_ms": 0} | more
    )
    return arena, arena.allocate(256, stream)


def next_address(resource: gpumem.MemoryResource, stream: Any = None) -> int | None:
    """Return the address of the next such block on a stream, which is freed there; None: none."""
    try:
        block = resource.allocate(BLOCK, stream)
    except gpumem.OutOfMemoryError:
        return None
    address = block.ptr
    block.close(stream)
    return address


def can_have_it(arena: gpumem.Arena, stream: Any) -> bool:
    """Tell whether an allocation on the stream finds room for the block."""
    return next_address(arena, stream) is not None
