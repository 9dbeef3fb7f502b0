"""What a trace is, what reads as one, and what is refused with which words."""

import gzip
import io
import json
import os
import pickle
import re
import zipfile
from collections import OrderedDict
from pathlib import Path

import numpy as np
import pytest
from helpers import child
from helpers.torch_snapshots import block_of, entry, segment, snapshot_file
from hypothesis import given
from hypothesis import strategies as st

from gpumem.errors import GpumemError, TraceError
from gpumem.report.data import notice_of
from gpumem.traces import Trace, load_trace, npz, samples, torch_snapshot
from gpumem.traces.trace import MAX_SIZE, MAX_STREAMS

# Two blocks on two streams, the second dropped before its work is done.
GOOD = {
    "action": [0, 0, 1, 2, 2],
    "block": [0, 1, 1, 0, 1],
    "size": [100, 50, 50, 100, 50],
    "stream": [0, 1, 1, 0, 1],
    "time_us": [0, 1, 2, 3, 3],
}


def changed(**columns):
    return {**GOOD, **columns}


# ---------------------------------------------------------------------------- the trace itself


def test_trace_has_events_streams_peak_and_duration():
    trace = Trace(**GOOD, step_start=[0, 3], meta={"peak_reserved": 7}, name="two")
    assert (trace.events, trace.allocs, trace.streams) == (5, 2, 2)
    assert (trace.peak_requested, trace.duration_us) == (150, 3)
    assert trace.live_bytes().tolist() == [100, 150, 150, 50, 0]
    assert trace.meta["peak_reserved"] == 7
    assert "two" in repr(trace)


def test_block_stays_live_until_its_free_completes():
    requested_early = Trace(
        action=[0, 1, 0, 2], block=[0, 0, 1, 0], size=[8, 8, 4, 8], stream=[0] * 4, time_us=[0] * 4
    )
    assert requested_early.peak_requested == 12


def test_trace_columns_have_documented_types_and_are_read_only():
    trace = Trace(**GOOD)
    types = [trace.action, trace.block, trace.size, trace.stream, trace.time_us, trace.step_start]
    assert [a.dtype.name for a in types] == ["int8", "int32", "int64", "int16", "int64", "int64"]
    with pytest.raises(ValueError, match="read-only"):
        trace.size[0] = 1
    with pytest.raises(AttributeError):
        trace.name = "other"


def test_trace_copies_its_arrays():
    columns = {name: np.array(values) for name, values in GOOD.items()}
    trace = Trace(**columns)
    columns["size"][0] = 999
    assert trace.size[0] == 100


def test_trace_without_events_is_valid():
    trace = Trace(action=[], block=[], size=[], stream=[], time_us=[])
    assert (trace.events, trace.allocs, trace.streams) == (0, 0, 0)
    assert (trace.peak_requested, trace.duration_us) == (0, 0)


def test_frees_of_blocks_from_before_recording_are_ignored():
    trace = Trace(
        action=[2, 1, 2, 0],
        block=[-1, -1, -1, 0],
        size=[1 << 40, 5, 0, 64],
        stream=[0] * 4,
        time_us=[0] * 4,
    )
    assert trace.peak_requested == 64


def test_block_number_can_be_given_out_again_after_its_free():
    trace = Trace(
        action=[0, 2, 0, 0],
        block=[0, 0, 0, 1],
        size=[10, 10, 20, 5],
        stream=[0] * 4,
        time_us=[0] * 4,
    )
    assert trace.peak_requested == 25


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        (changed(action=[0, 0, 1, 3, 2]), "event 3: action is 3, expected 0..2"),
        (changed(action=[0, -1, 1, 2, 2]), "event 1: action is -1, expected 0..2"),
        (changed(size=[100, -50, 50, 100, 50]), "event 1: size is -50, expected 0.."),
        (changed(size=[MAX_SIZE + 1, 50, 50, 100, 50]), f"event 0: size is {MAX_SIZE + 1}"),
        (changed(size=np.full(5, 2**63, np.uint64)), f"event 0: size is {2**63}, expected -"),
        (changed(stream=[0, 1, -1, 0, 1]), "event 2: stream is -1, expected 0..1023"),
        (changed(stream=[MAX_STREAMS, 1, 1, 0, 1]), "event 0: stream is 1024, expected 0.."),
        (changed(stream=[40000, 1, 1, 0, 1]), "event 0: stream is 40000, expected -32768..3276"),
        (changed(block=[0, 2, 1, 0, 1]), "event 1: block is 2, expected 0..1"),
        (changed(block=[-1, 1, 1, 0, 1]), "event 0: block is -1, expected 0..1"),
        (changed(block=[0, 1, -2, 0, 1]), "event 2: block is -2, expected 0..1"),
        (changed(block=[0, 0, 0, 0, 1]), "event 1: block 0 has action 0 but was already allocated"),
        (
            changed(action=[0, 1, 0, 2, 2], size=[100, 50, 50, 100, 50]),
            "event 1: block 1 has action 1 but was never allocated, expected action 0",
        ),
        (
            changed(action=[0, 0, 2, 2, 1]),
            "event 4: block 1 has action 1 but was already freed, expected action 0",
        ),
        (
            changed(action=[0, 0, 2, 2, 2]),
            "event 4: block 1 has action 2 but was already freed, expected action 0",
        ),
        (
            changed(action=[0, 0, 1, 2, 1]),
            "event 4: block 1 has action 1 but was already asked to be freed, expected action 2",
        ),
        (
            changed(size=[100, 50, 50, 99, 50]),
            "event 3: block 0 is freed with size 99, expected 100",
        ),
        (changed(time_us=[0, 1, 5, 3, 3]), "event 3: time_us is 3, expected 5 or later"),
        (changed(time_us=[-1, 1, 2, 3, 3]), "event 0: time_us is -1, expected 0 or later"),
        (changed(step_start=[0, 6]), "step 1: step_start is 6, expected 0..5"),
        (changed(step_start=[3, 1]), "step 1: step_start is 1, expected 3 or later"),
        (changed(size=[1, 2]), "arrays differ in length: action 5, block 5, size 2"),
        (changed(size=[1.0, 2.0, 2.0, 1.0, 2.0]), "size has type float64, expected integers"),
        (changed(size=[[1, 2], [2, 1]]), "size has 2 dimensions, expected 1"),
        (changed(size=[[1], [2, 3]]), "size is not an array of integers"),
    ],
)
def test_inconsistent_trace_is_refused_with_index_value_and_range(columns, message):
    with pytest.raises(TraceError, match=re.escape(message)) as caught:
        Trace(**columns)
    assert isinstance(caught.value, GpumemError)
    assert isinstance(caught.value, ValueError)


def test_earliest_invalid_event_is_reported():
    # Block 1 fails first in time, block 0 first by number.
    with pytest.raises(TraceError, match="event 2: block 1"):
        Trace(
            action=[0, 0, 0, 0], block=[0, 1, 1, 0], size=[1] * 4, stream=[0] * 4, time_us=[0] * 4
        )


def test_sums_beyond_64_bits_are_refused():
    count = (1 << 14) + 2
    columns = {
        "action": [0] * count,
        "block": range(count),
        "size": [MAX_SIZE] * count,
        "stream": [0] * count,
        "time_us": [0] * count,
    }
    with pytest.raises(TraceError, match=f"event {1 << 14}: .* bytes are live"):
        Trace(**columns)


def test_huge_blocks_that_never_live_together_are_accepted():
    pairs = 1 << 15  # together twice what a signed 64-bit integer holds
    trace = Trace(
        action=[0, 2] * pairs,
        block=np.repeat(np.arange(pairs), 2),
        size=np.full(2 * pairs, MAX_SIZE),
        stream=np.zeros(2 * pairs, np.int16),
        time_us=np.zeros(2 * pairs, np.int64),
    )
    assert trace.peak_requested == MAX_SIZE


@st.composite
def consistent_columns(draw):
    """Columns of a run that really could have happened, and its peak, kept the slow way."""
    live, columns, peak, clock = {}, {name: [] for name in GOOD}, 0, 0
    for number in range(draw(st.integers(0, 12))):
        size = draw(st.integers(0, 1 << 20))
        events = [(0, number, size)]
        live[number] = size
        peak = max(peak, sum(live.values()))
        for victim in draw(st.lists(st.sampled_from(sorted(live)), unique=True)):
            if draw(st.booleans()):
                events.append((1, victim, live[victim]))
            events.append((2, victim, live.pop(victim)))
        for action, block, size in events:
            clock += draw(st.integers(0, 9))
            stream = draw(st.integers(0, 3))
            for name, value in zip(GOOD, (action, block, size, stream, clock), strict=True):
                columns[name].append(value)
    return columns, peak


@given(consistent_columns())
def test_random_valid_trace_is_accepted_with_its_exact_peak(run):
    columns, peak = run
    assert Trace(**columns).peak_requested == peak


@given(consistent_columns(), st.data())
def test_allocating_a_live_block_again_is_always_refused(run, data):
    columns, _ = run
    allocs = [i for i, action in enumerate(columns["action"]) if action == 0]
    if not allocs:
        return
    index = data.draw(st.sampled_from(allocs))
    for name in columns:
        columns[name].insert(index, columns[name][index])
    with pytest.raises(TraceError, match=f"event {index + 1}: "):
        Trace(**columns)


# -------------------------------------------------------------------------------------- samples


@pytest.mark.parametrize("name", ["gpt2_varlen_train", "multistream_train"])
def test_samples_load_by_name_and_agree_with_what_pytorch_reported(name):
    trace = load_trace(name)
    assert trace.name == name
    assert trace.allocs == trace.meta["allocs"]
    assert trace.streams == trace.meta["streams"]
    assert trace.peak_requested == trace.meta["peak_requested"]
    assert trace.step_start.size == (25 if name == "gpt2_varlen_train" else 0)


def test_samples_are_listed_with_files_that_exist():
    listed = samples()
    assert list(listed) == [
        "gpt2_out_of_memory",
        "gpt2_train",
        "gpt2_varlen_train",
        "multistream_train",
    ]
    assert all(path.is_file() for path in listed.values())


def test_sample_of_a_recording_has_stacks_phases_and_categories():
    trace = load_trace("gpt2_train")
    assert trace.name == "gpt2_train"
    assert {phase.name for phase in trace.details.phases} == {"forward", "backward", "optimizer"}
    assert {"activations", "optimizer state"} <= set(trace.details.categories)
    assert any(stack[-1][2] == "<module>" for stack in trace.details.stacks)
    refused = load_trace("gpt2_out_of_memory").details.refusals
    assert [(each.limit_name, each.limit) for _, each in refused] == [("max_mem", 8 << 30)]


@pytest.mark.parametrize("name", ["multistream_train", "gpt2_train"])
def test_files_that_gzip_compressed_are_read(tmp_path, name):
    packed = tmp_path / "some.run.gz"
    data = samples()[name].read_bytes()
    packed.write_bytes(data if name == "gpt2_train" else gzip.compress(data))
    trace = load_trace(packed)
    assert trace.name == "some"
    assert trace.events == load_trace(name).events


def test_damaged_and_huge_gzip_files_are_refused(tmp_path, monkeypatch):
    path = tmp_path / "some.gz"
    data = gzip.compress(samples()["multistream_train"].read_bytes())
    path.write_bytes(data[:-100])
    with pytest.raises(TraceError, match="ends too early"):
        load_trace(path)
    path.write_bytes(data[:2] + bytes(40))
    with pytest.raises(TraceError, match="damaged gzip file"):
        load_trace(path)
    path.write_bytes(data)
    monkeypatch.setattr("gpumem.traces.formats.MAX_UNPACKED_BYTES", 1000)
    with pytest.raises(TraceError, match="more than 1000 B"):
        load_trace(path)


def test_file_takes_precedence_over_a_sample_of_its_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    np.savez("own.npz", **GOOD)
    os.rename("own.npz", "multistream_train")
    assert load_trace("multistream_train").events == 5


# ------------------------------------------------------------------------------------------ npz


def npz_file(path, **columns):
    with path.open("wb") as file:  # an open file, so that NumPy does not add a suffix
        np.savez_compressed(file, **columns)
    return path


def test_npz_is_recognised_by_content(tmp_path):
    trace = load_trace(npz_file(tmp_path / "run.csv", **GOOD, meta=json.dumps({"a": 1})))
    assert trace.events == 5
    assert trace.meta == {"a": 1}
    assert trace.name == "run"


def test_path_object_is_taken(tmp_path):
    assert load_trace(Path(npz_file(tmp_path / "a", **GOOD))).events == 5


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({"action": [0]}, "the archive has no array block, size, stream, time_us"),
        (changed(size=[1.5] * 5), "array 'size.npy' has type float64, expected integers"),
        (changed(meta="{"), "meta is not JSON"),
        (changed(meta="[" * 100_000), "meta is not JSON"),
        (changed(meta="[1]"), "meta is a JSON list, expected an object"),
        (changed(meta=np.array(5)), "array meta has type int64, expected one str"),
        (changed(action=[0, 0, 1, 9, 2]), "event 3: action is 9, expected 0..2"),
        (changed(size=np.array([object()])), "array 'size.npy' holds Python objects"),
    ],
)
def test_foreign_archive_is_refused(tmp_path, columns, message):
    with pytest.raises(TraceError, match=re.escape(message)):
        load_trace(npz_file(tmp_path / "bad.npz", **columns))


def archive_with(path, size_member):
    """Write an archive whose array `size` is these very bytes."""
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, values in GOOD.items():
            raw = io.BytesIO()
            np.save(raw, np.array(values))
            archive.writestr(f"{name}.npy", size_member if name == "size" else raw.getvalue())
    return path


def npy_header(shape):
    header = io.BytesIO()
    np.lib.format.write_array_header_1_0(
        header, {"descr": "<i8", "fortran_order": False, "shape": shape}
    )
    return header.getvalue()


@pytest.mark.parametrize("shape", [(10**15,), (2**40, 2**40), (-5,), (4,), (6,)])
def test_npz_header_that_contradicts_its_data_is_refused(tmp_path, shape):
    path = archive_with(tmp_path / "lie.npz", npy_header(shape) + bytes(40))
    with pytest.raises(TraceError, match=r"has shape .* but holds 40 bytes"):
        load_trace(path)


@pytest.mark.parametrize("header", ["{'descr': '\0", "{'shape': ((((", "{'descr': 1}", "\x0c"])
def test_npz_header_that_is_not_python_is_refused_in_one_line(tmp_path, header):
    member = b"\x93NUMPY\x01\x00" + len(header).to_bytes(2, "little") + header.encode()
    with pytest.raises(TraceError, match=r"damaged \.npz archive") as caught:
        load_trace(archive_with(tmp_path / "odd.npz", member))
    assert len(str(caught.value).splitlines()) == 1


@pytest.mark.parametrize("compression", [zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA])
def test_npz_of_a_compression_that_numpy_does_not_write_is_refused(tmp_path, compression):
    path = tmp_path / "odd.npz"
    with zipfile.ZipFile(path, "w", compression) as archive:
        for name in GOOD:
            archive.writestr(f"{name}.npy", bytes(100))
    with pytest.raises(TraceError, match=f"'action.npy' has compression {compression}, expected"):
        load_trace(path)


def test_npz_name_with_control_characters_is_shown_escaped(tmp_path):
    path = tmp_path / "odd.npz"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("\x1b[2J.npy", npy_header((9,)))
        for name in GOOD:
            archive.writestr(f"{name}.npy", npy_header((9,)))
        # The directory names one member, its place another.
        archive.getinfo("action.npy").filename = "action"
    with pytest.raises(TraceError) as caught:
        load_trace(path)
    assert str(caught.value).isprintable()


def test_npz_bomb_is_refused_before_unpacking(tmp_path, monkeypatch):
    monkeypatch.setattr(npz, "MAX_EVENTS", 1 << 10)
    bomb = archive_with(tmp_path / "bomb.npz", npy_header((1 << 20,)) + bytes(8 << 20))
    assert bomb.stat().st_size < 20_000
    with pytest.raises(TraceError, match=r"'size\.npy' unpacks to \d+ bytes, expected 0\.\.8192"):
        load_trace(bomb)


def test_oversized_file_is_refused_unread(tmp_path):
    path = tmp_path / "huge.npz"
    with path.open("wb") as file:
        file.truncate((1 << 32) + 1)  # sparse: takes no disk
    with pytest.raises(
        TraceError, match=r"the file has 4.0 GiB \(4294967297 bytes\), expected at most 4.0 GiB$"
    ):
        load_trace(path)


# ------------------------------------------------------------------------------ torch snapshots


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_torch_snapshot_becomes_blocks_and_numbered_streams(tmp_path, protocol):
    now = 1_700_000_000_000_000
    entries = [
        entry("segment_alloc", 0x1000, 2 << 20, time_us=now),
        entry("free_requested", 0xDEAD, 64, stream=0x7F00, time_us=now),
        entry("alloc", 0x1000, 100, stream=0x7F00, time_us=now + 5),
        entry("free_requested", 0x1000, 100, stream=0x7F00, time_us=now + 6),
        entry("free_completed", 0x1000, 100, stream=0x7F00, time_us=now + 6),
        entry("alloc", 0x1000, 80, stream=0, time_us=now + 9),
        entry("snapshot", 0, 0, time_us=now + 10),
    ]
    unused = {"allocator_settings": {"expandable_segments": False}, "external_annotations": None}
    unused["segments"] = [segment(1 << 40, block_of(512, "inactive"), segment_type="small")]
    path = snapshot_file(tmp_path / "snap.bin", entries, protocol=protocol, **unused)
    trace = load_trace(path)
    assert trace.action.tolist() == [0, 1, 0, 1, 2, 0]
    assert trace.block.tolist() == [0, 0, 1, 1, 1, 2]
    assert trace.size.tolist() == [64, 64, 100, 100, 100, 80]
    assert trace.stream.tolist() == [0, 0, 0, 0, 0, 1]
    assert trace.time_us.tolist() == [0, 0, 5, 6, 6, 9]


def test_torch_snapshot_device_defaults_to_the_busiest(tmp_path):
    busy = [entry("alloc", 512 * i, 1) for i in range(4)]
    idle = [entry("segment_alloc", 0, 1)] * 9
    path = snapshot_file(tmp_path / "s", idle, [entry("alloc", 0, 7)], busy)
    assert load_trace(path).allocs == 4
    assert load_trace(path, device=1).size.tolist() == [7]
    with pytest.raises(TraceError, match=r"no block in use of device 0: call .*_memory_history"):
        load_trace(path, device=0)
    for device in (3, -1):
        with pytest.raises(TraceError, match=rf"device is {device}, expected 0\.\.2"):
            load_trace(path, device=device)


def test_device_argument_is_for_snapshots_only(tmp_path):
    path = npz_file(tmp_path / "a.npz", **GOOD)
    assert load_trace(path, device=0).events == 5
    for device in (1, "0", 0.0, False):
        with pytest.raises(TraceError, match=f"device is {device!r}, expected 0"):
            load_trace(path, device=device)


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_malicious_pickle_is_refused_by_name_and_nothing_runs(tmp_path, protocol):
    marker = tmp_path / "ran"

    class Malicious:
        def __reduce__(self):
            return os.system, (f"touch {marker}",)

    path = snapshot_file(tmp_path / "evil.pickle", [Malicious()], protocol=protocol)
    named = "the opcode 'c'" if protocol < 4 else r"'(posix|nt)\.system'"
    with pytest.raises(TraceError, match=f"{named}, expected plain data only"):
        load_trace(path)
    assert not marker.exists()


@pytest.mark.parametrize("value", [print, OrderedDict(), np.float64(1), 1j])
def test_pickle_with_harmless_globals_is_refused(tmp_path, value):
    path = snapshot_file(tmp_path / "global.pickle", [value])
    with pytest.raises(TraceError, match="expected plain data only"):
        load_trace(path)


def nested_lists(depth):
    lists = []
    for _ in range(depth):
        lists = [lists]
    return lists


@pytest.mark.parametrize(
    "entry",
    [
        {"action": nested_lists(400)},
        {"action": "alloc", "addr": 10**5000},
        {"action": "alloc", "addr": [10**5000]},
    ],
    ids=["nested", "digits", "digits in a list"],
)
def test_unprintable_value_is_refused_in_one_line(tmp_path, entry):
    path = snapshot_file(tmp_path / "snapshot.pickle", [entry])
    with pytest.raises(TraceError, match=r"entry 0: (action|addr) is") as caught:
        load_trace(path)
    assert len(str(caught.value).splitlines()) == 1


@pytest.mark.parametrize(
    "data",
    [
        b"\x80\x04\x8e" + (1 << 40).to_bytes(8, "little") + b"x.",  # BINBYTES8
        b"\x80\x05\x96" + (1 << 40).to_bytes(8, "little") + b"x.",  # BYTEARRAY8
        b"\x80\x02T" + (1 << 30).to_bytes(4, "little") + b"x.",  # BINSTRING
    ],
    ids=["bytes", "bytearray", "string"],
)
def test_pickle_that_names_more_bytes_than_it_has_is_refused_unread(tmp_path, data):
    path = tmp_path / "snapshot.pickle"
    path.write_bytes(data)
    with pytest.raises(TraceError, match=rf"damaged pickle: {len(data)} bytes of at least \d+"):
        load_trace(path)


def test_value_that_holds_one_list_a_billion_times_is_shown_in_short(tmp_path):
    value = []
    for _ in range(30):
        value = [value, value]
    path = snapshot_file(tmp_path / "snapshot.pickle", segments=[value])
    with pytest.raises(TraceError, match=r"segment 0 is \[\[\[") as caught:
        load_trace(path)
    assert len(str(caught.value)) < 300


def test_long_name_in_a_pickle_is_shown_in_short(tmp_path):
    path = tmp_path / "snapshot.pickle"
    path.write_bytes(b"\x80\x04X\x88\x13\x00\x00" + b"m" * 5000 + b"\x8c\x01n\x93.")
    with pytest.raises(TraceError, match="expected plain data only") as caught:
        load_trace(path)
    assert len(str(caught.value)) < 300


@pytest.mark.parametrize("key", ["device_traces", "segments"])
def test_pickle_of_one_list_many_times_is_refused(tmp_path, key):
    many = {"device_traces": [entry("alloc", 512, 1)], "segments": segment(0, block_of(512))}
    many["device_traces"] *= 1000
    many["segments"]["blocks"] *= 1000
    (path := tmp_path / "snapshot.pickle").write_bytes(pickle.dumps({key: [many[key]] * 1000}))
    with pytest.raises(
        TraceError, match=r"damaged pickle: 1000000 (entries|blocks) in \d{4} bytes"
    ):
        load_trace(path)


@pytest.mark.parametrize("key", ["version", "time"])
def test_deeply_nested_value_of_a_snapshot_is_refused_in_one_line(tmp_path, key):
    path = tmp_path / "snapshot.json"
    plain = {"format": "gpumem.snapshot", "version": 1, "stacks": [], "resources": [], key: "HERE"}
    path.write_text(json.dumps(plain).replace('"HERE"', "[" * 900 + "]" * 900))
    with pytest.raises(TraceError) as caught:
        load_trace(path)
    assert str(caught.value).isprintable()


def test_log_that_reserves_more_than_63_bits_is_refused(tmp_path):
    entries = [entry("segment_alloc", 0, MAX_SIZE)] * ((1 << 14) + 1)
    with pytest.raises(TraceError, match=r"entry 16384: \d+ bytes are held, expected 0\.\."):
        load_trace(snapshot_file(tmp_path / "s", entries))


def test_reading_a_snapshot_imports_no_framework(tmp_path):
    path = snapshot_file(tmp_path / "s", [entry("alloc", 0, 7)])
    script = """
        import sys
        from gpumem.traces import load_trace
        load_trace(sys.argv[1])
        assert "torch" not in sys.modules
    """
    child.run_quietly(script, str(path))


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ([1, 2], "the pickle is not a memory snapshot: it has no device_traces"),
        ({"segments": []}, "the pickle is not a memory snapshot"),
        ({"device_traces": 5}, "device_traces is not a list of lists"),
        ({"device_traces": [None]}, "device_traces is not a list of lists"),
        ({"device_traces": []}, "the snapshot names no device"),
        ({"device_traces": [[]]}, "no allocation and no block in use of device 0"),
        ({"device_traces": [["x"]]}, "device 0, entry 0 is a str, expected a dict"),
        ({"device_traces": [[{}]]}, "device 0, entry 0: action is None, expected a str"),
        ({"device_traces": [[{"action": []}]]}, "entry 0: action is [], expected a str"),
        (
            {"device_traces": [[entry("alloc", "x", 1)]]},
            "entry 0: addr is 'x', expected an integer",
        ),
        ({"device_traces": [[entry("alloc", 0, 1 << 70)]]}, "entry 0: size is 1180591620717411303"),
        ({"device_traces": [[entry("alloc", 0, -4)]]}, "entry 0: size is -4, expected 0.."),
        ({"device_traces": [[entry("alloc", 0, 1, time_us=1 << 63)]]}, "entry 0: time_us is 92233"),
        (
            {"device_traces": [[entry("alloc", i, 1, stream=i) for i in range(1025)]]},
            "entry 1024: more than 1024 streams",
        ),
    ],
)
def test_foreign_pickle_is_refused(tmp_path, value, message):
    path = tmp_path / "odd.pickle"
    path.write_bytes(pickle.dumps(value))
    with pytest.raises(TraceError, match=re.escape(message)):
        load_trace(path)


def test_torch_snapshot_without_times_is_read(tmp_path):
    old = {"action": "alloc", "addr": 1, "size": 2, "stream": 3, "frames": []}
    assert load_trace(snapshot_file(tmp_path / "s", [old])).time_us.tolist() == [0]


def test_torch_snapshot_without_history_gives_the_blocks_in_use(tmp_path):
    frames = [{"filename": "train.py", "name": "step", "line": 3}]
    segments = [
        segment(
            4096,
            block_of(512, address=4096, requested_size=500, frames=frames),
            block_of(512, "active_awaiting_free", address=4608, requested_size=512),
            block_of(512, "inactive", address=5120, requested_size=0),
        ),
        segment(1 << 20, block_of(100), device=1),
        segment(4096, block_of(2048, address=4096)),  # an arena inside of a block begins as it does
    ]
    path = tmp_path / "snapshot.pickle"
    for snapshot in (
        {"segments": segments, "device_traces": [[], []]},
        {"segments": segments, "device_traces": []},
        {"segments": segments},
    ):
        path.write_bytes(pickle.dumps(snapshot))
        trace = load_trace(path)
        assert trace.size.tolist() == [500, 2048]
        assert trace.details.address.tolist() == [4096, 4096]
        assert trace.details.owners[trace.details.owner[0]] == "step (train.py:3)"
        assert trace.details.held.peak == 3 * 512 + 2048
        assert trace.meta["moment"] is True
        assert load_trace(path, device=1).size.tolist() == [100]
        for device in (2, "0", 0.5):
            with pytest.raises(TraceError, match=rf"device is {device!r}, expected 0\.\.1"):
                load_trace(path, device=device)


def test_blocks_without_addresses_follow_each_other(tmp_path):
    blocks = block_of(512), block_of(1024, "inactive"), block_of(256)
    path = snapshot_file(tmp_path / "snapshot.pickle", segments=[segment(4096, *blocks)])
    assert load_trace(path).details.address.tolist() == [4096, 4096 + 1536]


@pytest.mark.parametrize(
    ("segments", "message"),
    [
        (5, "the snapshot's segments are 5, expected a list"),
        ([5], "segment 0 is 5, expected a dict with a list of blocks"),
        ([segment("x", block_of(1))], "segment 0: address is 'x', expected an integer"),
        ([segment(1) | {"blocks": [[]]}], "segment 0: a block is [], expected a dict"),
        ([segment(1, block_of(-4))], "size is -4, expected 0.."),
        ([segment(1, block_of(4, "inactive"))], "no block in use of device 0"),
    ],
)
def test_damaged_segments_are_refused(tmp_path, segments, message):
    path = tmp_path / "odd.pickle"
    path.write_bytes(pickle.dumps({"segments": segments, "device_traces": [[]]}))
    with pytest.raises(TraceError, match=re.escape(message)):
        load_trace(path)


# ------------------------------------------------------------------------------------- RMM logs

HEADER = "Thread,Time,Action,Pointer,Size,Stream\n"


def log_file(path, *lines, header=HEADER):
    path.write_text(header + "\n".join(lines) + "\n")
    return path


@pytest.mark.parametrize(
    ("times", "expected_us"),
    [
        (["10:00:00.000001", "10:00:00.000251", "10:00:01.0"], [0, 250, 999_999]),
        (["10:00:00:000001", "10:00:00:000251", "10:01:00:000001"], [0, 250, 60_000_000]),
        (["23:59:59.999999", "00:00:00.000001", "12:00:00.000000"], [0, 2, 43_200_000_001]),
        (["23:59:59.9", "00:00:00.1", "23:59:59.95"], [0, 200_000, 200_000]),
        (["00:00:00.1", "23:59:59.95", "00:00:00.2"], [0, 0, 100_000]),
        (["00:10:00.0", "23:00:00.0", "23:00:00.0"], [0, 82_200_000_000, 82_200_000_000]),
        (["10:00:02.0", "10:00:01.0", "10:00:04.0"], [0, 0, 2_000_000]),
        (["10:00:00.5", "10:00:00.50", "10:00:01.25"], [0, 0, 750_000]),
        (["0.5", "0.500250", "2.5"], [0, 250, 2_000_000]),
        (["1700000000000000", "1700000000000250", "1700000000000251"], [0, 250, 251]),
    ],
)
def test_rmm_log_is_read_in_every_time_format(tmp_path, times, expected_us):
    path = log_file(
        tmp_path / "log",
        f"17,{times[0]},allocate,0x7f0000000200,1024,0x55aa",
        f"18,{times[1]},free,0x7f0000000200,1024,0x55aa",
        f"17,{times[2]},allocate,7f0000000200,2048,0x0",
    )
    trace = load_trace(path)
    assert trace.time_us.tolist() == expected_us
    assert trace.action.tolist() == [0, 2, 0]
    assert trace.block.tolist() == [0, 0, 1]
    assert trace.size.tolist() == [1024, 1024, 2048]
    assert trace.stream.tolist() == [0, 0, 1]


def test_rmm_log_skips_failed_and_empty_allocations(tmp_path):
    path = log_file(
        tmp_path / "log",
        "1,10:00:00.000000,allocate failure,(nil),99999999999,0x0",
        "1,10:00:00.000001,allocate,0x0,0,0x0",
        "1,10:00:00.000002,allocate,0x0,0,0x0",
        "1,10:00:00.000003,allocate,0x100,64,0x0",
        "",
        "1,10:00:00.000004,free,0x0,0,0x0",
        "1,10:00:00.000005,free,0x900,8,0x2",
    )
    trace = load_trace(path)
    assert trace.block.tolist() == [0, -1]
    assert trace.peak_requested == 64
    assert trace.meta["failed_allocs"] == 1


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("1,10:00:00.0,allocate,0x100", "line 3 has 4 fields, expected 6: Thread,Time"),
        ("1,yesterday,allocate,0x100,1,0x0", "line 3: time is 'yesterday', expected HH:MM"),
        ("1,10:00:00.0,grab,0x100,1,0x0", "line 3: action is 'grab', expected allocate"),
        ("1,10:00:00.0,allocate,zz,1,0x0", "line 3: pointer is 'zz', expected a hexa"),
        ("1,10:00:00.0,allocate,-0x1,1,0x0", "line 3: pointer is '-0x1', expected a hexa"),
        ("1,10:00:00.0,allocate,0x100,1.5,0x0", "line 3: size is '1.5', expected a number"),
        ("1,10:00:00.0,allocate,0x100,-1,0x0", "line 3: size is '-1', expected a number"),
        (f"1,10:00:00.0,allocate,0x9,{1 << 60},0x0", f"line 3: size is {1 << 60}, expected"),
        ("1,10:00:00.0,allocate,0x100,1,main", "line 3: stream is 'main', expected a hexa"),
        ("1,10:00:00.0,allocate,0x40,1,0x0", "line 3: 0x40 is allocated while block 0 lives"),
    ],
)
def test_rmm_log_reports_an_invalid_line_by_number(tmp_path, line, message):
    path = log_file(tmp_path / "log", "1,10:00:00.0,allocate,0x40,1,0x0", line)
    with pytest.raises(TraceError, match=re.escape(message)):
        load_trace(path)


@pytest.mark.parametrize(
    "cut", ["1,10:00:01.0", "1", "1,10:00:01.0,allocate,0x400,40", "1,10:00:01.0,fr,", "\0\0\0"]
)
def test_rmm_log_of_a_killed_program_has_its_whole_lines(tmp_path, cut):
    path = tmp_path / "log"
    whole = HEADER + "1,10:00:00.0,allocate,0x200,4096,0x0\n"
    path.write_text(whole + cut)
    trace = load_trace(path)
    assert (trace.events, trace.meta["torn"]) == (1, int("\0" not in cut))
    assert notice_of(trace).startswith("The file is torn, 1 event") == ("\0" not in cut)
    if "\0" not in cut:
        path.write_text(whole + cut + "\n")  # not at the end of the file
        with pytest.raises(TraceError, match="line 3"):
            load_trace(path)


def test_rmm_log_without_allocations_is_refused(tmp_path):
    with pytest.raises(TraceError, match="the log holds no allocations"):
        load_trace(log_file(tmp_path / "log"))


def test_rmm_log_that_is_no_text_is_refused(tmp_path):
    path = tmp_path / "log"
    path.write_bytes(HEADER.encode() + b"\xff\xfe")
    with pytest.raises(TraceError, match="the log is not text: byte 39"):
        load_trace(path)


# -------------------------------------------------------------------------------------- garbage


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda p: None, "no such file, and no sample of that name (samples: gpt2_out_of_memory, "),
        (lambda p: p.mkdir(), "is not a regular file"),
        (lambda p: p.touch(), "the file is empty"),
        (lambda p: p.write_text("hello"), "not a trace: neither a recording, nor an .npz archive"),
        (lambda p: p.write_text("\n"), "not a trace"),
        (lambda p: p.write_bytes(bytes(range(256))), "not a trace"),
        (lambda p: p.write_bytes(b"PK\x03\x04"), "damaged .npz archive"),
        (lambda p: p.write_bytes(b"\x80\x04"), "damaged pickle"),
        (lambda p: os.mkfifo(p), "is not a regular file"),
    ],
)
def test_foreign_file_is_refused_in_one_line_naming_it(tmp_path, make, message):
    path = tmp_path / "thing"
    make(path)
    with pytest.raises(TraceError, match=re.escape(message)) as caught:
        load_trace(path)
    assert str(caught.value).startswith(str(path))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ["a\0b", "x" * 5000, ""])
def test_invalid_file_name_is_refused(name):
    with pytest.raises(TraceError):
        load_trace(name)


def good_files(folder):
    run = [entry("alloc", 64 * i, i + 1, stream=i % 2) for i in range(40)]
    run += [entry("free_completed", 64 * i, i + 1) for i in range(40)]
    lines = [f"1,10:00:00.{i:06},allocate,{64 * i + 64:#x},{i},0x0" for i in range(40)]
    return [
        npz_file(folder / "npz", **GOOD, meta="{}"),
        snapshot_file(folder / "snapshot", run),
        log_file(folder / "log", *lines),
    ]


@pytest.mark.parametrize("kind", range(3), ids=["npz", "snapshot", "rmm"])
def test_damaged_files_load_or_raise_trace_error_only(tmp_path, kind, rng):
    good = good_files(tmp_path)[kind].read_bytes()
    path = tmp_path / "damaged"
    messages = []
    for _ in range(300):
        data = bytearray(good)
        if rng.random() < 0.5:
            del data[rng.randrange(len(data)) :]
        else:
            for _ in range(rng.randint(1, 4)):
                data[rng.randrange(len(data))] = rng.randrange(256)
        path.write_bytes(data)
        try:
            load_trace(path)
        except TraceError as error:
            messages.append(str(error))
    assert len(messages) > 50
    assert not any("\n" in message for message in messages)


def test_every_truncation_of_a_snapshot_is_refused(tmp_path):
    good = good_files(tmp_path)[1].read_bytes()
    path = tmp_path / "cut"
    for length in range(1, len(good), 7):
        path.write_bytes(good[:length])
        with pytest.raises(TraceError):
            load_trace(path)


def test_pickle_with_persistent_ids_is_refused():
    persistent = b"\x80\x04K\x05Q."  # a reference to outside object 5
    with pytest.raises(TraceError, match="opcode 'Q', expected plain data only"):
        torch_snapshot.read_torch_snapshot(io.BytesIO(persistent), "p")


def test_pickle_that_claims_more_than_its_size_is_refused(tmp_path):
    path = tmp_path / "huge.pickle"
    path.write_bytes(b"\x80\x02]r\x00\x00\x00\x30.")
    with pytest.raises(TraceError, match="object number"):
        load_trace(path)
