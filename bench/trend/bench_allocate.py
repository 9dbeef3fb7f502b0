"""Trend over commits of single calls, by pytest-benchmark: ``pytest bench/trend``.

pytest-benchmark adds some 30 ns to a call, so these figures show change, not cost: ratios come
from bench/harness.py.
"""

import numpy as np
import pytest

import gpumem


@pytest.fixture
def arena():
    with gpumem.Arena("host") as arena:
        yield arena


@pytest.mark.parametrize("nbytes", [256, 4096, 1 << 20])
def bench_allocate_and_drop(benchmark, arena, nbytes):
    arena.allocate(nbytes).close()
    benchmark.pedantic(arena.allocate, args=(nbytes,), iterations=10_000, rounds=20)


def bench_numpy_view(benchmark, arena):
    buffer = arena.allocate(4096)
    benchmark.pedantic(np.from_dlpack, args=(buffer,), iterations=10_000, rounds=20)
    buffer.close()
