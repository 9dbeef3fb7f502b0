"""A sleep and a wake, in each of which the driver refuses one call."""

from __future__ import annotations

import gpumem
from gpumem.errors import AsleepError, GpumemError


def sleep_and_wake_refused_once(arena: gpumem.Arena, host, number: int, *beside) -> None:
    """Put an arena to sleep and wake it, call `number` of either refused; it ends awake.

    A refusal leaves the state of before, or says that the arena is asleep. `beside`: what has
    invariants of its own.
    """
    for call in (arena.sleep, arena.wake):
        host.fail(None, number, 1)
        try:
            call()
        except AsleepError:
            assert arena.asleep
        except GpumemError:
            assert bool(arena.asleep) == (call == arena.wake)
        finally:
            host.clear_faults()
        for each in (arena, *beside):
            each.check_invariants()
        if call == arena.sleep and not arena.asleep:
            arena.sleep()
    arena.wake()
    assert arena.asleep == ()
