"""Snapshots: what they show of every kind of resource, as JSON, as PyTorch's, and their diffs."""

from __future__ import annotations

import json
import os
import pickle
import random
import subprocess
import sys
import textwrap
import threading
from itertools import groupby, pairwise
from pathlib import Path

import jsonschema
import numpy as np
import pytest
from helpers import child
from helpers.child import program
from helpers.every_kind import RESOURCES

import gpumem
from gpumem import errors, observe
from gpumem._snapshots.snapshot import SCHEMA
from gpumem.traces import load_trace

BACKINGS = ["regions", "virtual"]
REGIONS = {"backing": "regions"}


def one(resource):
    return resource.snapshot().resources[0]


def random_program(arena, rng, steps=400):
    streams = [None, gpumem.Stream("host"), gpumem.Stream("host")]
    live = []
    for _ in range(steps):
        choice = rng.random()
        if live and choice < 0.45:
            live.pop(rng.randrange(len(live))).close()
        elif choice < 0.5:
            live.append(arena.allocate_persistent(rng.randrange(1, 1 << 20)))
        else:
            live.append(arena.allocate(int(2 ** rng.uniform(0, 22)), rng.choice(streams)))
        if live and choice > 0.95:
            live[-1].record_stream(rng.choice(streams[1:]))
    return live


# ---- arenas --------------------------------------------------------------------------------------


@pytest.mark.parametrize("backing", BACKINGS)
def test_snapshot_blocks_cover_their_regions_and_match_stats(make_arena, backing, rng):
    arena = make_arena({"backing": backing})
    live = random_program(arena, rng)
    found = one(arena)
    for number, inside in groupby(found.blocks, key=lambda block: block.region):
        inside = list(inside)
        region = found.regions[number]
        assert inside[0].address == region.address
        assert sum(block.allocated_nbytes for block in inside) == region.nbytes
        for before, after in pairwise(inside):
            assert before.address + before.allocated_nbytes == after.address
    stats = arena.stats()
    for key in ("in_use", "requested_in_use", "reserved", "num_allocs", "num_frees"):
        assert found.counts[key] == getattr(stats, key), key
    assert {(b.address, b.nbytes) for b in found.live} == {(b.ptr, b.nbytes) for b in live}
    assert found.limit == (stats.limit or 0)
    for buffer in live:
        buffer.close()


def test_repr_of_a_snapshot_counts_resources_and_blocks(make_arena):
    arena = make_arena(backing="regions")
    block = arena.allocate(1 << 20)
    assert repr(arena.snapshot()) == "<gpumem.observe.Snapshot: 1 resource, 1 used block>"
    del block


def test_snapshot_pages_add_up_to_reserved(make_arena):
    arena = make_arena({"backing": "virtual"})
    buffers = [arena.allocate(5 << 20) for _ in range(5)]
    found = one(arena)
    assert found.backing == "virtual"
    assert found.pages["nbytes"].sum() == found.counts["reserved"] == arena.stats().reserved
    begin, size = found.pages["address"], found.pages["nbytes"]
    for block in found.live:
        inside = (begin < block.address + block.allocated_nbytes) & (begin + size > block.address)
        assert inside.any()
    del buffers


def test_snapshot_distinguishes_block_states(host, arena):
    stream, side = gpumem.Stream("host"), gpumem.Stream("host")
    host.use_virtual_clock(True)
    host.set_lag(1_000_000)
    used, cached, pending = (arena.allocate(size, stream) for size in (1000, 2000, 3000))
    addresses = {"used": used.ptr, "cached": cached.ptr, "pending_free": pending.ptr}
    pending.record_stream(side)
    gpumem.zeros(10, "uint8", memory="host", stream=side)
    cached.close()
    pending.close()
    found = one(arena)
    for state, address in addresses.items():
        block = next(block for block in found.blocks if block.address == address)
        assert (block.state, block.stream) == (state, stream.ptr)
    assert found.counts["cached"] == 2048
    assert found.counts["pending_free"] == 3072
    assert found.counts["in_use"] == 1024
    assert {"free", "hole"} <= {block.state for block in found.blocks}
    host.set_lag(0)
    host.use_virtual_clock(False)
    side.synchronize()


def test_snapshot_leaves_thread_caches_unchanged(arena):
    arena.allocate(1000).close()
    first = arena.snapshot().as_dict()["resources"]
    second = arena.snapshot().as_dict()["resources"]
    for found in (*first, *second):
        del found["held_ns"]
    assert first == second
    calls = arena.stats().driver_calls
    arena.snapshot()
    assert arena.stats().driver_calls == calls


def test_recorded_stack_and_tag_belong_to_their_block(arena):
    before = arena.allocate(1)
    with observe.record(arena, stacks=1.0), observe.tag("optimizer"):
        first = arena.allocate(2)
        second = arena.allocate(3)
    after = arena.allocate(4)
    found = {block.nbytes: block for block in one(arena).live}
    for size in (1, 4):
        assert (found[size].tag, found[size].age, found[size].stack) == (None, None, ())
        assert found[size].owner == "untagged"
    assert found[2].tag == found[3].owner == "optimizer"
    assert (found[2].number, found[3].number) == (0, 1)
    assert 0 < found[3].age <= found[2].age < 60e9
    assert found[2].thread == threading.get_native_id()
    assert found[2].stack[0].filename == __file__
    first.close()
    again = arena.allocate(5)  # in its place
    assert again.ptr in {block.address for block in one(arena).live if block.tag is None}
    assert one(arena).by_owner() == {"untagged": 768, "optimizer": 256}
    del before, second, after


def test_snapshots_while_threads_allocate_are_consistent(arena):
    done = threading.Event()

    def work(number):
        rng = random.Random(number)
        live = []
        while not done.is_set():
            if live and rng.random() < 0.5:
                live.pop(rng.randrange(len(live))).close()
            elif len(live) < 200:
                live.append(arena.allocate(rng.choice((100, 5000, 300_000))))

    threads = [threading.Thread(target=work, args=(n,)) for n in range(3)]
    for thread in threads:
        thread.start()
    try:
        for _ in range(50):
            found = one(arena)
            of_regions = sum(region.nbytes for region in found.regions)
            assert int(found.records["allocated_nbytes"].sum()) == of_regions
            assert (
                found.counts["in_use"]
                + found.counts["cached"]
                + found.counts["pending_free"]
                + (found.counts["free"])
                == found.counts["reserved"]
            )
    finally:
        done.set()
        for thread in threads:
            thread.join()


# ---- other resources, all of them ----------------------------------------------------------------


@pytest.mark.parametrize("make", RESOURCES.values(), ids=RESOURCES)
def test_every_kind_of_resource_shows_its_live_blocks(make):
    resource = make()
    kept = [resource.allocate(500), resource.allocate(600)]
    resource.allocate(700).close()
    found = resource.snapshot()
    for shown in found.resources:
        assert {(b.address, b.nbytes) for b in shown.live} == {(b.ptr, b.nbytes) for b in kept}
        assert shown.memory == str(resource.memory)
        assert shown.counts["requested_in_use"] == 1100
    jsonschema.validate(found.as_dict(), json.loads(SCHEMA.read_text()))
    kept.clear()
    assert resource.snapshot().resources[0].live == []


def test_snapshot_of_an_adaptor_includes_its_upstream():
    arena = gpumem.Arena("host", name="below")
    adaptor = gpumem.adaptors.track(
        gpumem.adaptors.limit(arena, 1 << 20, name="limited"), name="tracked"
    )
    names = [found.name for found in adaptor.snapshot().resources]
    assert names == ["tracked", "limited", "below"]
    shown = adaptor.snapshot().resources
    assert shown[0].upstreams == (shown[1].key,)
    assert shown[1].upstreams == (shown[2].key,)


def test_graph_pool_names_its_arena():
    arena, stream = gpumem.Arena("host"), gpumem.Stream("host")
    with arena.capture(stream) as pool:
        kept = arena.allocate(100, stream)
        shown = one(pool)
        assert (shown.kind, shown.parent) == ("graph pool", one(arena).key)
        assert [block.nbytes for block in shown.live] == [100]
    del kept


def test_snapshot_covers_resources_kept_by_views_only():
    arena = gpumem.Arena("host", name="only a view is left")
    view = np.from_dlpack(arena.allocate(100))
    del arena
    user = RESOURCES["user"]()
    held = user.allocate(7)
    found = observe.snapshot()
    assert [b.nbytes for b in found.resource("only a view is left").live] == [100]
    assert [b.nbytes for b in found.resource("plain").live] == [7]
    del view, held, user
    gpumem.Arena("host").close()
    names = {shown.name for shown in observe.snapshot().resources}
    assert not names & {"only a view is left", "plain"}
    with pytest.raises(LookupError, match="no resource is named 'plain'"):
        observe.snapshot().resource("plain")


@pytest.mark.parametrize("bad", [3, "host", object(), gpumem.GraphPool.__new__(gpumem.GraphPool)])
def test_snapshot_rejects_what_is_no_resource(bad):
    with pytest.raises(TypeError):
        observe.snapshot(bad)


def test_forked_child_sees_its_own_resources_only():
    child.run_quietly("""
        import os
        import gpumem
        from gpumem import observe
        arena, pool = gpumem.Arena("host"), gpumem.DriverPool("host")
        kept = arena.allocate(1)
        pid = os.fork()
        if pid == 0:
            assert observe.snapshot().resources == ()
            own = gpumem.Arena("host", name="own")
            assert [found.name for found in observe.snapshot().resources] == ["own"]
            for resource in (arena, pool):
                try:
                    resource.snapshot()
                except gpumem.errors.ClosedError:
                    continue
                raise AssertionError
            os._exit(0)
        assert os.waitpid(pid, 0)[1] == 0
    """)


def test_closed_arena_shows_nothing():
    arena = gpumem.Arena("host", REGIONS)
    arena.allocate(1).close()
    arena.close()
    assert one(arena).counts["reserved"] == 0
    assert one(arena).live == []


# ---- diff ----------------------------------------------------------------------------------------


def test_diff_lists_new_and_freed_blocks_also_at_one_address(make_arena):
    arena = make_arena(name="mine")
    stays, goes = arena.allocate(1), arena.allocate(2)
    before = arena.snapshot()
    address = goes.ptr
    goes.close()
    comes = arena.allocate(3)
    assert comes.ptr == address
    diff = before.diff(arena.snapshot())
    assert [(name, b.nbytes) for name, b in diff.added] == [("mine", 3)]
    assert [(name, b.nbytes) for name, b in diff.removed] == [("mine", 2)]
    assert diff.counts == {"mine": {"requested_in_use": 1, "num_allocs": 1}}
    assert (diff.added_bytes, diff.removed_bytes) == (256, 256)
    assert "mine: requested_in_use +1" in str(diff)
    same = arena.snapshot()
    assert same.diff(arena.snapshot()) == observe.SnapshotDiff({}, (), ())
    del stays


def test_diff_of_saved_snapshots_equals_that_of_the_originals(tmp_path, arena):
    before = arena.snapshot()
    kept = arena.allocate(100)
    after = arena.snapshot()
    before.save(tmp_path / "before")
    after.save(tmp_path / "after")
    loaded = observe.Snapshot.load(tmp_path / "before").diff(
        observe.Snapshot.load(tmp_path / "after")
    )
    assert loaded == before.diff(after)
    assert len(loaded.added) == 1
    del kept


# ---- JSON ----------------------------------------------------------------------------------------


def full_snapshot(make_arena):
    arena = make_arena({"max_mem": 1 << 30, **REGIONS}, name="main")
    with observe.record(stacks=1.0), observe.tag("a tag"):
        kept = random_program(arena, random.Random(1), 100)
    kept.append(gpumem.DriverPool("host").allocate(100))
    return observe.snapshot(), kept


def test_snapshot_json_matches_its_schema_and_round_trips(make_arena, tmp_path):
    found, kept = full_snapshot(make_arena)
    schema = json.loads(SCHEMA.read_text())
    jsonschema.Draft202012Validator.check_schema(schema)
    jsonschema.validate(json.loads(found.to_json()), schema)
    found.save(tmp_path / "snapshot.json")
    loaded = observe.Snapshot.load(tmp_path / "snapshot.json")
    assert loaded.as_dict() == found.as_dict()
    for shown, original in zip(loaded.resources, found.resources, strict=True):
        assert shown.blocks == original.blocks
        assert shown.by_owner() == original.by_owner()
    for buffer in kept:
        buffer.close()


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "[]",
        "3",
        '{"format": "other"}',
        '{"format": "gpumem.snapshot", "version": 2}',
        '{"format": "gpumem.snapshot", "version": 1}',
        '{"format": "gpumem.snapshot", "version": 1, "time": 0, "process": 0, "stacks": [],'
        ' "resources": [{}]}',
        '{"format": "gpumem.snapshot", "version": 1, "time": 0, "process": 0, "stacks": 3,'
        ' "resources": []}',
        "[" * 100_000,
        "9" * 5000,
        '{"format": "gpumem.snapshot", "version": ' + "[" * 900 + "]" * 900 + "}",
    ],
)
def test_foreign_file_is_refused_in_one_line(tmp_path, text):
    path = tmp_path / "snapshot.json"
    path.write_text(text)
    with pytest.raises(errors.SnapshotError) as refused:
        observe.Snapshot.load(path)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("key", "value"), [("state", "lost"), ("stack", 9), ("address", -1), ("framework", "none")]
)
def test_inconsistent_block_is_refused(key, value, arena):
    kept = arena.allocate(1)
    plain = arena.snapshot().as_dict()
    plain["resources"][0]["blocks"][0][key] = value
    with pytest.raises(errors.SnapshotError):
        observe.Snapshot.from_dict(plain)
    del kept


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("counts", {"reserved": []}),
        ("counts", {"reserved": 1, "free": "1"}),
        ("counts", {}),
        ("upstreams", [[]]),
    ],
)
def test_count_that_is_not_a_number_is_refused(make_arena, key, value):
    plain = make_arena().snapshot().as_dict()
    plain["resources"][0][key] = value
    with pytest.raises(errors.SnapshotError, match="in counts"):
        observe.Snapshot.from_dict(plain)


# ---- PyTorch's form ------------------------------------------------------------------------------


def test_torch_form_has_every_block_and_segment_sums(make_arena, tmp_path):
    arena = make_arena(REGIONS)
    live = random_program(arena, random.Random(3), 100)
    arena.snapshot().save(tmp_path / "snapshot.pickle")
    found = pickle.loads((tmp_path / "snapshot.pickle").read_bytes())
    stats = arena.stats()
    assert sum(segment["total_size"] for segment in found["segments"]) == stats.reserved
    assert sum(segment["allocated_size"] for segment in found["segments"]) == stats.in_use
    active = {
        (block["address"], block["requested_size"])
        for segment in found["segments"]
        for block in segment["blocks"]
        if block["state"] == "active_allocated"
    }
    assert active == {(buffer.ptr, buffer.nbytes) for buffer in live}
    for buffer in live:
        buffer.close()


@pytest.mark.parametrize("memory", ["cuda:²", "cuda:99999999999", "cuda:-1", "other"])
def test_torch_form_counts_a_strange_memory_as_device_0(memory, arena):
    kept = arena.allocate(1)
    plain = arena.snapshot().as_dict()
    plain["resources"][0]["memory"] = memory
    form = observe.Snapshot.from_dict(plain).to_torch()
    assert {segment["device"] for segment in form["segments"]} == {0}
    assert len(form["device_traces"]) == 1
    del kept


def test_torch_form_shares_the_frames_of_one_stack(arena):
    with observe.record(arena, stacks=1.0) as recording:
        kept = [arena.allocate(1) for _ in range(2)]
        form = arena.snapshot().to_torch(recording.events())
    used = [b for s in form["segments"] for b in s["blocks"] if b["state"] == "active_allocated"]
    assert used[0]["frames"] is used[1]["frames"] != []
    first, second = (e for e in form["device_traces"][0] if e["action"] == "alloc")
    assert first["frames"] is second["frames"]
    del kept


def test_torch_form_has_recorded_events_as_history(make_arena, tmp_path):
    arena = make_arena(REGIONS)
    with observe.record(arena) as recording:
        arena.allocate(1000).close()
    plain = arena.snapshot().to_torch(recording.events())
    actions = [entry["action"] for entry in plain["device_traces"][0]]
    assert actions == ["segment_alloc", "alloc", "free_requested", "free_completed"]
    path = tmp_path / "snapshot.pickle"
    path.write_bytes(pickle.dumps(plain, protocol=4))
    assert load_trace(path).peak_requested == 1000


PYTHON_WITH_TORCH = [
    python
    for python in (sys.executable, os.environ.get("GPUMEM_TEST_TORCH_PYTHON", ""))
    if python
    and subprocess.run(
        [python, "-c", "import torch.cuda._memory_viz"], capture_output=True, check=False
    ).returncode
    == 0
]


@pytest.mark.skipif(
    not PYTHON_WITH_TORCH, reason="PyTorch is neither here nor in $GPUMEM_TEST_TORCH_PYTHON"
)
def test_pytorchs_own_tools_read_a_snapshot(make_arena, tmp_path):
    arena = make_arena(REGIONS)
    with observe.record(arena, stacks=1.0) as recording:
        live = random_program(arena, random.Random(4), 200)
    path = tmp_path / "snapshot.pickle"
    path.write_bytes(pickle.dumps(arena.snapshot().to_torch(recording.events()), protocol=4))
    script = """
        import pickle, sys
        from torch.cuda import _memory_viz as viz
        with open(sys.argv[1], "rb") as file:
            snapshot = pickle.load(file)
        assert "test_snapshots.py" in viz.memory(snapshot, format_flamegraph=lambda text: text)
        assert "segment" in viz.segsum(snapshot)
        assert viz.trace(snapshot).count("alloc(") > 10
        html = viz.segment_plot(snapshot)
        assert "MemoryViz" in html and len(html) > 1000
        assert "MemoryViz" in viz.trace_plot(snapshot)
    """
    program(PYTHON_WITH_TORCH[-1], "-c", textwrap.dedent(script), path)
    for buffer in live:
        buffer.close()


def test_schema_is_part_of_the_package():
    assert Path(gpumem.__file__).parent / "_snapshots" / "snapshot.schema.json" == SCHEMA
    assert SCHEMA.is_file()
