"""Histories of PyTorch's snapshots that lack entries: late ones, rings, and `skip_actions`."""

import io
import json
import pickle

import pytest
from helpers.torch_snapshots import block_of, entry, segment, snapshot_file

from gpumem.report import write_report
from gpumem.report.data import notice_of
from gpumem.traces import load_trace, load_traces
from gpumem.traces._pickle_pieces import Pieces

MIB = 1 << 20
BASE = 1 << 40
FRAMES = [{"filename": "model.py", "name": "load", "line": 9}]


@pytest.fixture
def load(tmp_path):
    """Load the only trace of a snapshot of these entries and segments."""

    def load(entries, *segments):
        return load_trace(snapshot_file(tmp_path / "snapshot", entries, segments=segments))

    return load


def life(address, size, *actions):
    return [entry(action, address, size) for action in actions or ("alloc", *FREES)]


FREES = ("free_requested", "free_completed")


def owners_of(trace):
    return [trace.details.owners[number] for number in trace.details.owner.tolist()]


def test_blocks_from_before_the_history_are_live_from_the_beginning(load):
    weights = segment(
        BASE, block_of(8 * MIB, frames=[]), block_of(2 * MIB, "active_pending_free"), device=0
    )
    entries = [
        *life(4096, 512),
        *life(8192, 3 * MIB, *FREES),  # allocated before, freed now
        entry("alloc", BASE + 8 * MIB, 5),  # not among the blocks of the beginning
    ]
    trace = load(entries, weights)
    assert trace.size[:2].tolist() == [8 * MIB, 3 * MIB]
    assert trace.peak_requested == 11 * MIB + 512
    assert trace.live_bytes()[-1] == 8 * MIB + 5
    assert trace.time_us[:2].tolist() == [0, 0]
    assert owners_of(trace)[:2] == ["before the recording"] * 2
    assert notice_of(trace) == (
        "2 blocks were live before the first entry of the file, with 11.0 MiB: the peak until then "
        "is not known."
    )


def test_block_that_waits_for_other_streams_is_in_use(load):
    waiting = segment(BASE, block_of(MIB, "active_pending_free"))
    assert load(life(4096, 512), waiting).live_bytes()[-1] == MIB


def test_history_of_blocks_that_are_all_recorded_has_no_notice(load):
    trace = load(life(BASE, 512, "alloc"), segment(BASE, block_of(512, frames=FRAMES)))
    assert (trace.events, notice_of(trace)) == (1, "")


def test_ring_that_overflowed_says_so_and_keeps_the_frames_of_segments(load):
    kept = segment(BASE, block_of(MIB, frames=FRAMES), block_of(512, frames=FRAMES))
    trace = load(life(BASE + MIB, 512, "alloc"), kept)
    assert owners_of(trace) == ["load (model.py:9)", "step (train.py:3)"]
    assert "The ring of 1 entries overflowed" in notice_of(trace)
    assert "may have overflowed" not in notice_of(trace)


def test_round_number_of_entries_may_be_a_full_ring(load):
    weights = segment(BASE, block_of(MIB, frames=[]))
    entries = [one for at in range(500) for one in life(4096 + at, 1, "alloc", "free_completed")]
    assert "The ring of 1,000 entries may have overflowed" in notice_of(load(entries, weights))
    assert "ring" not in notice_of(load(entries[:-2], weights))


def test_recorded_segment_without_an_entry_may_come_from_a_full_ring(load):
    weights = segment(BASE, block_of(MIB, frames=[]), frames=FRAMES)
    assert "may have overflowed" in notice_of(load(life(4096, 512), weights))
    begun = [entry("segment_alloc", BASE, MIB), *life(4096, 512)]
    assert "ring" not in notice_of(load(begun, weights))
    assert "ring" not in notice_of(load(life(4096, 512), weights | {"is_expandable": True}))


def test_segments_from_before_the_history_are_reserved_from_the_beginning(load):
    entries = [
        entry("segment_free", 1 << 30, 4 * MIB),
        entry("segment_map", BASE + 2 * MIB, MIB),
        *life(BASE, 512),
    ]
    trace = load(entries, segment(BASE, block_of(3 * MIB, "inactive")))
    held = trace.details.held
    assert held.nbytes.tolist() == [4 * MIB, 6 * MIB, 2 * MIB, 3 * MIB]
    columns = trace.details.segments
    assert set(zip(columns.address.tolist(), columns.nbytes.tolist(), strict=True)) >= {
        (BASE, 2 * MIB),
        (1 << 30, 4 * MIB),
    }


def test_skipped_completions_are_replaced_by_requests(load):
    entries = life(BASE, 512, "alloc", "free_requested", "alloc", "free_requested")
    trace = load(entries, segment(BASE, block_of(MIB, "inactive")))
    assert trace.action.tolist() == [0, 2, 0, 2]
    assert "no completions of frees" in notice_of(trace)


def test_skipped_requests_need_no_notice(load):
    trace = load(life(BASE, 512, "alloc", "free_completed"))
    assert (trace.action.tolist(), notice_of(trace)) == ([0, 2], "")


def test_skipped_frees_end_blocks_when_their_memory_is_used_again(load):
    entries = [
        entry("alloc", BASE, MIB),
        entry("alloc", BASE + MIB, MIB),
        entry("alloc", BASE + MIB // 2, MIB),  # in the place of both
        entry("alloc", BASE + 4 * MIB, MIB),  # still in use
        entry("alloc", BASE + 6 * MIB, MIB),  # not in use at the end
        entry("alloc", 1 << 30, MIB),
        entry("segment_free", 1 << 30, 2 * MIB),
    ]
    blocks = block_of(4 * MIB, "inactive"), block_of(MIB), block_of(3 * MIB, "inactive")
    trace = load(entries, segment(BASE, *blocks))
    assert trace.peak_requested == 4 * MIB
    assert trace.live_bytes()[-1] == MIB
    assert notice_of(trace).startswith("5 frees are missing (skip_actions)")


def test_skipped_allocations_are_live_from_the_beginning(load):
    entries = [*life(BASE, 512, *FREES), *life(BASE, 256, *FREES)]
    trace = load(entries, segment(BASE, block_of(512, requested_size=100), block_of(MIB)))
    assert trace.peak_requested == 512 + MIB
    assert trace.live_bytes()[-1] == 100 + MIB  # allocated again after its last free
    assert "no allocations (skip_actions)" in notice_of(trace)


def test_each_device_has_the_blocks_of_its_own_segments(tmp_path):
    segments = [segment(BASE, block_of(MIB)), segment(BASE, block_of(2 * MIB), device=1)]
    path = snapshot_file(tmp_path / "snapshot", life(4096, 512), [], segments=segments)
    assert [trace.peak_requested for trace in load_traces(path)] == [MIB + 512, 2 * MIB]
    assert load_trace(path).meta["device"] == 0  # it has more events
    assert load_trace(path, device=1).peak_requested == 2 * MIB


def test_snapshot_in_json_and_list_of_segments_are_read(tmp_path):
    plain = {"segments": [segment(BASE, block_of(MIB))], "device_traces": [life(4096, 512)]}
    text, listed = tmp_path / "snapshot.json", tmp_path / "segments.pickle"
    text.write_text(json.dumps(plain))
    listed.write_bytes(pickle.dumps(plain["segments"]))
    assert load_trace(text).peak_requested == MIB + 512
    assert load_trace(listed).peak_requested == MIB


def test_report_of_several_devices_has_the_notice_of_each(tmp_path):
    segments = [segment(BASE, block_of(MIB)), segment(BASE, block_of(MIB), device=1)]
    traces = [life(4096, 512), life(BASE, 512, "alloc")]
    path = snapshot_file(tmp_path / "snapshot", *traces, segments=segments)
    report = write_report(path, tmp_path / "page.html")
    assert report.notice.startswith("device 0: 1 block was live before the first entry")
    assert "device 1" not in report.notice


# ------------------------------------------------------------------------- the stream of a pickle


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_pickle_of_many_pieces_has_the_entries_of_the_same_json(tmp_path, protocol):
    stacks = [[{"filename": f"{n}.py", "name": "f", "line": n}] * 9 for n in range(50)]
    entries = [
        entry("alloc", 512 * n, n + 1, n % 3, 1000 + n, frames=list(stacks[n % 50]))
        for n in range(9000)
    ]
    entries[4000]["user_metadata"] = "long" * (1 << 19)  # in no single piece
    entries[-3:] = [entries[0] | {"action": "free_completed"}] * 3  # one dict at three places
    plain = {"segments": [], "device_traces": [entries]}
    pickled, text = tmp_path / "s.pickle", tmp_path / "s.json"
    pickled.write_bytes(pickle.dumps(plain, protocol=protocol))
    text.write_text(json.dumps(plain))
    assert pickled.stat().st_size > 2 << 20
    trace, same = load_trace(pickled), load_trace(text)
    for column in ("action", "block", "size", "stream", "time_us"):
        assert (getattr(trace, column) == getattr(same, column)).all(), column
    assert len(trace.details.stacks) == 50
    assert trace.details.stacks == same.details.stacks
    assert trace.details.stack.tolist() == same.details.stack.tolist()
    assert trace.events == len(entries)


def test_pieces_hold_the_objects_of_the_pickle():
    value = [{"a": 1.5, "b": [None, True, -(1 << 80)]}, ("x" * 300, b"\0\n" * 70000), {}]
    for protocol in (3, 4, 5):
        data = pickle.dumps([value, value], protocol=protocol)
        unpickler = Plain(Pieces(io.BytesIO(data + b"rest"), len(data)))
        assert unpickler.load() == [value, value], protocol


class Plain(pickle.Unpickler):
    def persistent_load(self, filled):
        assert type(filled) in (dict, tuple)
        return filled
