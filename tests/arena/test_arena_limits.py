"""What may be changed while an arena lives: its limit, and the peaks it looks for."""

import pytest
from helpers import child

from gpumem import Arena
from gpumem.errors import ClosedError, OutOfMemoryError

MiB = 1 << 20


@pytest.fixture(params=["regions", "virtual"])
def arena(request):
    with Arena("host", {"backing": request.param, "oom_wait_ms": 0}) as arena:
        yield arena
        arena.check_invariants()


def test_set_limit_takes_effect_at_once_in_both_directions(arena):
    first = arena.allocate(8 * MiB)
    arena.set_limit(arena.stats().reserved)
    assert arena.stats().limit == arena.stats().reserved
    with pytest.raises(OutOfMemoryError):
        arena.allocate(64 * MiB)
    arena.set_limit(0)
    second = arena.allocate(64 * MiB)
    first.close()
    second.close()


def test_memory_above_a_lowered_limit_stays_until_it_is_idle(arena):
    buffer = arena.allocate(32 * MiB)
    arena.set_limit(4 * MiB)
    memoryview(buffer)[-1] = 7
    assert arena.stats().reserved >= 32 * MiB
    buffer.close()
    arena.shrink()
    assert arena.stats().reserved == 0
    arena.allocate(2 * MiB).close()
    assert arena.stats().reserved <= 4 * MiB


@pytest.mark.parametrize("limit", [-1, 1.5, "1GiBs", None, 1 << 63, 10**30])
def test_invalid_limit_is_refused_without_a_change(arena, limit):
    arena.set_limit(8 * MiB)
    with pytest.raises((TypeError, ValueError)):
        arena.set_limit(limit)
    assert arena.stats().limit == 8 * MiB


def test_set_limit_on_a_closed_arena_is_refused(arena):
    arena.close()
    with pytest.raises(ClosedError):
        arena.set_limit(MiB)


def test_reset_peaks_starts_from_current_use(arena):
    kept = arena.allocate(MiB)
    arena.allocate(16 * MiB).close()
    assert arena.stats().max_in_use >= 17 * MiB
    arena.shrink()
    arena.reset_peaks()
    stats = arena.stats()
    assert (stats.max_in_use, stats.max_reserved) == (stats.in_use, stats.reserved)
    arena.allocate(2 * MiB).close()
    assert arena.stats().max_in_use == stats.in_use + 2 * MiB
    kept.close()


@pytest.mark.parametrize("of_what", ["streams", "chunks"])
def test_arena_refuses_a_block_and_works_on_when_its_tables_cannot_grow(of_what):
    """As past the last stream or chunk, which would take minutes: both end in the same function."""
    child.run_quietly(f"""
import resource
import gpumem

arena = gpumem.Arena("host")
streams = [gpumem.Stream("host") for _ in range(600 if {of_what!r} == "streams" else 1)]
blocks = [None] * 50_000
blocks[0] = arena.allocate(256, streams[0])
waste = [bytes(100) for _ in range(200_000)]
del waste[::2]                      # Python's own memory for what follows
with open("/proc/self/status") as status:
    used = next(int(line.split()[1]) << 10 for line in status if line.startswith("VmData"))
before = resource.getrlimit(resource.RLIMIT_DATA)
resource.setrlimit(resource.RLIMIT_DATA, (used, before[1]))
try:
    for number in range(1, len(blocks)):
        blocks[number] = arena.allocate(256, streams[number % len(streams)])
except MemoryError as error:
    assert isinstance(error, gpumem.OutOfMemoryError), repr(error)
    assert "out of private writable memory" in str(error), error
    assert "RLIMIT_DATA allows" in error.advice, error.advice
else:
    raise SystemExit("the tables were large enough")
resource.setrlimit(resource.RLIMIT_DATA, before)
arena.check_invariants()
assert arena.stats().in_use == 256 * number
blocks[number] = arena.allocate(256, streams[-1])
blocks.clear()
assert arena.stats().in_use == 0
arena.check_invariants()
""")
