"""Programs whose calls may be refused for want of host memory, and then work: see `PROGRAMS`.

A program is called with `once_more(call, *arenas)`, which makes a call, and once more where it was
refused. It checks what it has at its end, whatever was refused.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

from gpumem import Arena, Budget, Stream

KIB, MIB = 1 << 10, 1 << 20


def blocks(once_more: Callable[..., Any], backing: str, reuse: str) -> None:
    """Split, merge and free blocks of all sizes on several streams, in regions or pages."""
    budget = once_more(lambda: Budget(1 << 30, name="job"))
    arena = once_more(
        lambda: Arena("host", {"backing": backing, "stream_reuse": reuse}, budget=budget)
    )
    streams = [once_more(lambda: Stream("host")) for _ in range(3)]
    live = {}

    def take(nbytes, stream=None):
        block = once_more(lambda: arena.allocate(nbytes, stream), arena)
        for at in (block.ptr, block.ptr + nbytes - 1):  # a view would take host memory, too
            ctypes.c_uint8.from_address(at).value = block.ptr // 256 % 251
        live[block.ptr] = block
        return block

    def give(block):
        for at in (block.ptr, block.ptr + block.nbytes - 1):
            assert ctypes.c_uint8.from_address(at).value == block.ptr // 256 % 251
        del live[block.ptr]
        block.close()

    first = [take(256 * (1 + 7 * i % 23)) for i in range(24)]
    own = [take(3 * KIB, stream) for stream in streams]
    for i, block in enumerate(first[::3]):
        once_more(lambda block=block, i=i: block.record_stream(streams[i % 3]), arena)
    for block in first[::2] + own:
        give(block)
    large = [take(3 * MIB), take(5 * MIB, streams[0])]
    kept = once_more(lambda: arena.allocate_persistent(MIB), arena)
    give(large[0])
    for stream in streams:
        stream.synchronize()
    second = [take(256 * (1 + 5 * i % 17), streams[i % 3]) for i in range(12)]
    once_more(arena.shrink, arena)
    once_more(lambda: arena.prepare(2 * MIB), arena)
    assert len(once_more(arena.blocks)) >= len(live)
    stats = arena.stats()
    assert stats.num_allocs - stats.num_frees == len(live) + 1
    assert stats.requested_in_use == sum(block.nbytes for block in live.values()) + kept.nbytes
    assert stats.in_use == sum(b.allocated_nbytes for b in live.values()) + MIB
    assert budget.used == stats.reserved
    arena.check_invariants()
    for block in [*first[1::2], large[1], *second]:
        give(block)
    kept.close()
    for stream in streams:
        stream.synchronize()
    for _ in range(2):  # what there was no host memory to give back goes the next time
        once_more(arena.shrink, arena)
    assert (arena.stats().in_use, arena.stats().reserved, budget.used) == (0, 0, 0)
    arena.check_invariants()
    arena.close()


def tags_and_tensors(once_more: Callable[..., Any]) -> None:
    """Tag blocks, and let a virtual tensor commit rows and give them back."""
    arena = once_more(lambda: Arena("host", {"backing": "virtual"}))
    plain = once_more(lambda: arena.allocate(5000), arena)

    def tagged():
        with arena.tag("cache"):
            return arena.allocate(3 * MIB)

    block = once_more(tagged, arena)
    tensor = once_more(lambda: arena.virtual((64, 64 * KIB), "u1"), arena)
    once_more(lambda: tensor.commit(0, 40), arena)
    once_more(lambda: tensor.release(8, 16), arena)
    once_more(lambda: tensor.commit(8, 48), arena)
    assert arena.stats().virtual == tensor.held_nbytes == 4 * MIB
    arena.check_invariants()
    once_more(tensor.close, arena)
    block.close()
    plain.close()
    for _ in range(2):
        once_more(arena.shrink, arena)
    assert (arena.stats().in_use, arena.stats().reserved) == (0, 0)
    arena.close()


PROGRAMS: dict[str, Callable[[Callable[..., Any]], None]] = {
    "regions": lambda once_more: blocks(once_more, "regions", "completed"),
    "pages": lambda once_more: blocks(once_more, "virtual", "completed"),
    "waiting": lambda once_more: blocks(once_more, "virtual", "wait"),
    "tensors": tags_and_tensors,
}
