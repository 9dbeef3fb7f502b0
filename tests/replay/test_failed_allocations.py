"""Blocks that no arena can hold, in a replayed trace and in a report of it."""

import numpy as np
import pytest

from gpumem.errors import TraceError
from gpumem.replay import replay
from gpumem.report import write_report
from gpumem.traces import Trace
from gpumem.traces.trace import MAX_SIZE


def trace_with(size):
    """Small blocks, of which every other one is freed before a block of the size is asked for."""
    kept = 8
    action = [0] * kept + [2] * (kept // 2) + [0]
    block = [*range(kept), *range(0, kept, 2), kept]
    sizes = [200_001 * number + 1 for number in range(kept)] + [size]
    count = len(action)
    return Trace(
        np.array(action, np.int8),
        np.array(block, np.int32),
        np.array([sizes[each] for each in block], np.int64),
        np.zeros(count, np.int16),
        np.arange(count, dtype=np.int64),
    )


@pytest.mark.parametrize("size", [MAX_SIZE - 256, MAX_SIZE - 1, MAX_SIZE])
def test_block_of_all_addresses_fails_in_a_replay_and_is_refused_by_a_report(size, tmp_path):
    trace = trace_with(size)
    result = replay(trace, "host", max_mem=1 << 30)
    assert result.failed_allocs == 1
    assert result.peak_in_use_bytes < 1 << 30
    with pytest.raises(TraceError, match="could not allocate 1 of 9 blocks"):
        write_report(trace, tmp_path / "page.html")
