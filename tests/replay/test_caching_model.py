"""The models of what others would hold, against what they really held."""

import pytest

from gpumem.replay.caching_model import caching_allocator_reserved, plain_driver_reserved
from gpumem.traces import Trace, load_trace

KIB, MIB = 1 << 10, 1 << 20


def run(*events):
    """Make a trace of (size,) or (size, stream) for an allocation and a block number for a free."""
    columns = {"action": [], "block": [], "size": [], "stream": []}
    blocks = []
    for event in events:
        if isinstance(event, tuple):
            size, stream = (*event, 0)[:2]
            row = (0, len(blocks), size, stream)
            blocks.append((size, stream))
        else:
            row = (2, event, *blocks[event])
        for name, value in zip(columns, row, strict=True):
            columns[name].append(value)
    return Trace(**columns, time_us=range(len(columns["action"])))


# -------------------------------------------------------------------- PyTorch's caching allocator


@pytest.mark.parametrize("name", ["gpt2_varlen_train", "multistream_train"])
def test_caching_model_reproduces_pytorchs_reserved_on_the_samples(name):
    trace = load_trace(name)
    assert caching_allocator_reserved(trace) == pytest.approx(trace.meta["peak_reserved"], rel=0.01)


@pytest.mark.parametrize(
    ("size", "segment"),
    [
        (1, 2 * MIB),
        (1 * MIB, 2 * MIB),
        (1 * MIB + 1, 20 * MIB),
        (10 * MIB - 512, 20 * MIB),
        (10 * MIB - 511, 10 * MIB),  # rounds up to 10 MiB, which gets a segment of its own
        (11 * MIB, 12 * MIB),
        (12 * MIB, 12 * MIB),
    ],
)
def test_miss_allocates_a_segment_by_size_class(size, segment):
    assert caching_allocator_reserved(run((size,))) == segment


def test_small_blocks_fill_a_segment_in_steps_of_512_bytes():
    full = [(1,)] * (2 * MIB // 512)
    assert caching_allocator_reserved(run(*full)) == 2 * MIB
    assert caching_allocator_reserved(run(*full, (1,))) == 4 * MIB


def test_small_and_large_blocks_do_not_share_segments():
    assert caching_allocator_reserved(run((2 * MIB,), 0, (512,))) == 22 * MIB


def test_free_block_of_another_stream_is_not_reused():
    assert caching_allocator_reserved(run((512, 0), 0, (512, 1))) == 4 * MIB
    assert caching_allocator_reserved(run((512, 0), 0, (512, 0))) == 2 * MIB


def test_large_block_is_split_only_if_more_than_one_mib_remains():
    # One segment of 20 MiB: 6, 3 and 11. What the middle leaves over joins the 11, if split off.
    def needs(middle):
        trace = run((6 * MIB,), (3 * MIB,), (11 * MIB,), 1, (middle,), 2, (12 * MIB,))
        return caching_allocator_reserved(trace)

    assert needs(2 * MIB) == 32 * MIB
    assert needs(2 * MIB - 512) == 20 * MIB


def test_freed_neighbours_become_one_block_whatever_the_order():
    for order in ([0, 1, 2], [2, 1, 0], [0, 2, 1], [1, 0, 2]):
        trace = run((6 * MIB,), (6 * MIB,), (8 * MIB,), *order, (20 * MIB,))
        assert caching_allocator_reserved(trace) == 20 * MIB, order


def test_blocks_of_different_segments_never_become_one():
    trace = run((12 * MIB,), (12 * MIB,), 0, 1, (24 * MIB,))
    assert caching_allocator_reserved(trace) == 48 * MIB


def test_smallest_block_that_fits_is_taken():
    # Free: 30 MiB and 12 MiB. Best fit puts 12 into 12, so that 30 fits again.
    trace = run((30 * MIB,), (12 * MIB,), 0, 1, (12 * MIB,), (30 * MIB,))
    assert caching_allocator_reserved(trace) == 42 * MIB


def test_memory_is_reserved_until_the_free_completes():
    requested = Trace(
        action=[0, 1, 0], block=[0, 0, 1], size=[12 * MIB] * 3, stream=[0] * 3, time_us=[0] * 3
    )
    assert caching_allocator_reserved(requested) == 24 * MIB


@pytest.mark.parametrize("model", [caching_allocator_reserved, plain_driver_reserved])
def test_empty_blocks_and_unknown_frees_reserve_nothing(model):
    assert model(run((0,), 0, (0,))) == 0
    unknown = Trace(action=[2], block=[-1], size=[64], stream=[0], time_us=[0])
    assert model(unknown) == 0


def random_run(rng):
    events, live = [], []
    for number in range(400):
        size = rng.choice([rng.randint(1, 4 * KIB), rng.randint(1, MIB), rng.randint(1, 30 * MIB)])
        events.append((size, rng.randrange(3)))
        live.append(number)
        while live and rng.random() < 0.45:
            events.append(live.pop(rng.randrange(len(live))))
    return run(*events)


@pytest.mark.parametrize("model", [caching_allocator_reserved, plain_driver_reserved])
def test_models_reserve_between_the_request_and_the_sum_of_segments(model, rng):
    trace = random_run(rng)
    assert model(trace) >= trace.peak_requested
    segments = sum(-(-size // (20 * MIB)) * 20 * MIB for size in trace.size[trace.action == 0])
    assert model(trace) <= segments


# --------------------------------------------------------------------------------- plain driver


@pytest.mark.parametrize(
    ("size", "held"),
    [
        (1, 2 * MIB),
        (MIB, 2 * MIB),
        (MIB + 1, 2 * MIB),
        (2 * MIB, 2 * MIB),
        (2 * MIB + 1, 4 * MIB),
        (20 * MIB + 1, 22 * MIB),
    ],
)
def test_driver_model_reserves_whole_granules(size, held):
    assert plain_driver_reserved(run((size,))) == held


def test_driver_model_shares_granules_among_small_blocks_only():
    assert plain_driver_reserved(run((MIB,), (MIB,))) == 2 * MIB
    assert plain_driver_reserved(run((MIB + 1,), (MIB + 1,))) == 4 * MIB
    assert plain_driver_reserved(run(*[(5000,)] * 409)) == 2 * MIB  # 5000 takes 5120
    assert plain_driver_reserved(run(*[(5000,)] * 410)) == 4 * MIB


def test_driver_model_releases_freed_memory():
    assert plain_driver_reserved(run((4 * MIB,), 0, (4 * MIB,))) == 4 * MIB
    assert plain_driver_reserved(run((MIB,), (MIB,), 0, 1, (2 * MIB,))) == 2 * MIB
    one_left = run((MIB,), (MIB,), 0, (2 * MIB,))
    assert plain_driver_reserved(one_left) == 4 * MIB


def test_driver_model_shares_granules_between_streams():
    assert plain_driver_reserved(run((512, 0), (512, 1))) == 2 * MIB


def test_driver_model_granularity_is_configurable():
    assert plain_driver_reserved(run((100 * KIB,)), granularity=64 * KIB) == 128 * KIB
    for wrong in (0, -1024, 512, 1000):
        with pytest.raises(ValueError, match=f"granularity is {wrong}, expected"):
            plain_driver_reserved(run((1,)), granularity=wrong)
