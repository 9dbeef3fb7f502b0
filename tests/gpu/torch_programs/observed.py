"""What PyTorch tells of its memory: history, snapshots, profiles, statistics."""

import gc
import json
import os
import pickle
import tempfile
from pathlib import Path

import torch
from gpu.torch_programs.allocator import MIB, filled
from torch.cuda import _memory_viz
from torch.profiler import ProfilerActivity, profile, record_function

HERE = os.path.basename(__file__)


def trace_of(snapshot, addresses):
    """Return what happened to blocks at these addresses."""
    return [
        (entry["action"], entry["size"])
        for entry in snapshot["device_traces"][0]
        if entry.get("addr") in addresses
        and entry["action"] in ("alloc", "free_requested", "free_completed")
    ]


def named(frames):
    return [frame["name"] for frame in frames if os.path.basename(frame["filename"]) == HERE]


def make_some():
    kept, dropped = filled(3, 1), filled(5, 2)
    addresses = {kept.data_ptr(), dropped.data_ptr()}
    del dropped
    return kept, addresses


def memory_history():
    """Every allocation and free with its stack, until recording ends."""
    before = filled(2)
    torch.cuda.memory._record_memory_history(max_entries=1000)
    kept, addresses = make_some()
    said = torch.cuda.memory._snapshot()
    torch.cuda.memory._record_memory_history(None)
    after = filled(7)
    later = torch.cuda.memory._snapshot()
    live = {
        block["address"]: block
        for segment in said["segments"]
        for block in segment["blocks"]
        if block["state"] == "active_allocated"
    }
    assert live[kept.data_ptr()]["requested_size"] == 3 * MIB
    assert "make_some" in named(live[kept.data_ptr()]["frames"])
    assert before.data_ptr() in live
    assert after.data_ptr() not in live
    allocs = [entry for entry in said["device_traces"][0] if entry["action"] == "alloc"]
    assert all("make_some" in named(entry["frames"]) for entry in allocs)
    return [trace_of(said, addresses), trace_of(later, {after.data_ptr()})]


def history_of_blocks_only():
    """Under "state" live blocks have stacks, and no event is kept."""
    torch.cuda.memory._record_memory_history("state", context="state")
    kept, _ = make_some()
    said = torch.cuda.memory._snapshot()
    stacks = [
        named(block["frames"])
        for segment in said["segments"]
        for block in segment["blocks"]
        if block["address"] == kept.data_ptr()
    ]
    return [stacks, sum(map(len, said["device_traces"]))]


def oldest_events_are_dropped():
    torch.cuda.memory._record_memory_history(max_entries=10, context=None)
    for _ in range(50):
        filled(1)
    return len(torch.cuda.memory._snapshot()["device_traces"][0])


def annotated_history():
    torch.cuda.memory._record_memory_history(global_record_annotations=True)
    with record_function("a phase"):
        filled(1)
    said = torch.cuda.memory._snapshot()["external_annotations"]
    return [[each["stage"], each["name"]] for each in said if each["name"] == "a phase"]


def snapshot_for_the_readers():
    """A written snapshot opens in PyTorch's tools and in gpumem's report."""
    from gpumem.report import write_report

    torch.cuda.memory._record_memory_history(max_entries=1000)
    kept, _ = make_some()
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "snapshot.pickle"
        torch.cuda.memory._dump_snapshot(str(file))
        snapshot = pickle.loads(file.read_bytes())
        page = write_report(str(file), Path(folder) / "report.html")
        assert page.allocations >= 2
        assert page.nbytes > 0
    assert "total_allocated: 3.0MiB" in _memory_viz.segsum(snapshot)
    assert "3.0MiB" in _memory_viz.trace(snapshot)
    assert "<html" in _memory_viz.trace_plot(snapshot)
    assert "<html" in _memory_viz.segment_plot(snapshot)
    return kept.numel()


def form_of_a_snapshot():
    """The keys of each part of a snapshot."""
    torch.cuda.memory._record_memory_history(max_entries=1000)
    kept, addresses = make_some()
    said = torch.cuda.memory._snapshot()
    segment = next(
        each
        for each in said["segments"]
        if each["address"] <= kept.data_ptr() < each["address"] + each["total_size"]
    )
    block = next(each for each in segment["blocks"] if each["address"] == kept.data_ptr())
    entry = next(each for each in said["device_traces"][0] if each.get("addr") in addresses)
    assert sum(each["size"] for each in segment["blocks"]) == segment["total_size"]
    return [sorted(said), sorted(segment), sorted(block), sorted(entry)]


def profiled_memory():
    """The profiler's own count of device memory, by operator, and its events of memory."""
    filled(1)
    with profile(
        activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA], profile_memory=True
    ) as found:
        kept = torch.empty(2 * MIB, device="cuda", dtype=torch.uint8)
        made = torch.zeros(3 * MIB, device="cuda", dtype=torch.uint8)
        del made
        torch.cuda.synchronize()
    by_operator = {
        each.key: each.self_device_memory_usage
        for each in found.key_averages()
        if each.self_device_memory_usage
    }
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "trace.json"
        found.export_chrome_trace(str(file))
        events = json.loads(file.read_text())["traceEvents"]
    memory = [each["args"] for each in events if each.get("name") == "[memory]"]
    on_device = [each for each in memory if each["Device Type"] == 1]
    return [by_operator, [each["Bytes"] for each in on_device], kept.numel()]


def statistics():
    """Figures of blocks and their bytes, without what depends on where they are placed.

    The parts "small_pool" and "large_pool" do: an arena's ranges are not PyTorch's.
    """
    kept = [filled(size) for size in (3, 5, 0.5)]
    dropped = [filled(size) for size in (4, 0.25)]
    del dropped
    first = torch.cuda.memory_stats()
    torch.cuda.reset_peak_memory_stats()
    torch.cuda.reset_accumulated_memory_stats()
    more = filled(2)
    second = torch.cuda.memory_stats()
    del kept, more
    third = torch.cuda.memory_stats()
    parts = ("allocation.", "allocated_bytes.", "active.", "active_bytes.", "requested_bytes.")
    wanted = {key for key in first if key.startswith(parts) and ".all." in key}
    wanted |= {"num_ooms", "num_alloc_retries"}
    return [{key: each[key] for key in sorted(wanted)} for each in (first, second, third)]


def keys_of_the_statistics():
    filled(1)
    assert "GPU reserved memory" in torch.cuda.memory_summary()
    assert torch.cuda.memory_reserved() >= torch.cuda.memory_allocated()
    assert torch.cuda.max_memory_reserved() >= torch.cuda.max_memory_allocated()
    return sorted(torch.cuda.memory_stats())


def memory_in_use_by_a_stream():
    """A freed block that another stream still uses is active, and no longer allocated."""
    side = torch.cuda.Stream()
    kept = filled(4)
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        torch.cuda._sleep(200_000_000)
        kept.record_stream(side)
    del kept
    during = torch.cuda.memory_stats()
    said = [during["allocated_bytes.all.current"], during["active_bytes.all.current"]]
    states = {
        block["state"]
        for segment in torch.cuda.memory_snapshot()
        for block in segment["blocks"]
        if block["size"] >= 4 * MIB and block["state"] != "inactive"
    }
    torch.cuda.synchronize()
    gc.collect()
    filled(1)
    after = torch.cuda.memory_stats()
    return [said, sorted(states), after["active_bytes.all.current"]]
