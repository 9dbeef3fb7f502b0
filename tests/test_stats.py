"""The counters of an arena, and ONNX Runtime's names for them."""

import json

import gpumem

KIB, MIB = 1 << 10, 1 << 20
ARENA_CONFIG = {"backing": "regions", "split_rule": "tight"}

ORT_KEYS = [
    "Limit", "InUse", "RequestedInUse", "TotalAllocated", "MaxInUse", "NumAllocs", "NumReserves",
    "NumArenaExtensions", "NumArenaShrinkages", "MaxAllocSize",
]  # fmt: skip


def test_stats_and_shrink_reports_are_short_and_tables_in_notebooks(make_arena):
    arena = make_arena({"max_mem": 64 * MIB}, name="<cache>")
    buffer = arena.allocate(1000)
    stats, report = arena.stats(), arena.shrink()
    assert repr(stats) == (
        "<gpumem.Stats: 1.0 KiB in use (peak 1.0 KiB), 1.0 MiB reserved (peak 1.0 MiB), "
        "limit 64.0 MiB>"
    )
    assert repr(report) == "<gpumem.ShrinkReport: 0 B released, 1.0 MiB retained in 1 region>"
    assert repr(arena) == "<gpumem.Arena '<cache>' on host:0: 1.0 KiB in use, 1.0 MiB reserved>"
    assert "<td>1 live block of 1.0 KiB</td>" in report._repr_html_()
    for name, text in (("in_use", "1.0 KiB"), ("num_allocs", "1"), ("limit", "64.0 MiB")):
        assert f">{name}</th><td>{text}</td>" in stats._repr_html_()
    assert "&lt;cache&gt;" in arena._repr_html_()
    buffer.close()
    assert "0 B in use" in repr(arena), "without what the thread has cached"


def test_stats_are_a_dict_that_json_takes(arena):
    stats = arena.stats()
    values = json.loads(json.dumps(stats.as_dict()))
    assert values["reserved"] == stats.reserved
    assert type(stats)(**values) == stats


def test_stats_have_every_onnx_runtime_key_as_decimal_text(arena):
    values = arena.stats().as_ort()
    assert list(values) == ORT_KEYS
    assert all(value.isdecimal() for value in values.values())


def test_stats_after_a_known_history(make_arena):
    arena = make_arena({"max_mem": 64 * MIB, "split_rule": "tight"})
    held = [arena.allocate(1000), arena.allocate(300 * KIB), arena.allocate_persistent(5000)]
    arena.allocate(3 * MIB).close()
    held.pop(1).close()
    stats = arena.stats()
    assert stats == gpumem.Stats(
        limit=64 * MIB,
        in_use=1024 + 5120,
        requested_in_use=1000 + 5000,
        reserved=MIB + 4 * MIB + 5120,
        max_in_use=1024 + 300 * KIB + 5120 + 3 * MIB,
        max_reserved=MIB + 4 * MIB + 5120,
        num_allocs=4,
        num_frees=2,
        num_reserves=1,
        num_extensions=2,
        num_regions=3,
        num_shrinkages=0,
        max_alloc_size=3 * MIB,
        largest_free=4 * MIB,
        pages_moved=0,
        moves_refused=0,
        asleep_bytes=0,
        driver_calls=3,
    )
    assert stats.as_ort() == {
        "Limit": str(64 * MIB),
        "InUse": "6144",
        "RequestedInUse": "6000",
        "TotalAllocated": str(5 * MIB + 5120),
        "MaxInUse": str(stats.max_in_use),
        "NumAllocs": "4",
        "NumReserves": "1",
        "NumArenaExtensions": "2",
        "NumArenaShrinkages": "0",
        "MaxAllocSize": str(3 * MIB),
    }
    arena.shrink()
    after = arena.stats()
    assert (after.num_extensions, after.num_shrinkages, after.num_regions) == (2, 1, 2)
    assert after.as_ort()["NumArenaExtensions"] == "1", "there the number of regions held"
    assert after.as_ort()["NumArenaShrinkages"] == "1"
    assert after.max_reserved == stats.max_reserved
    held.clear()


def test_unlimited_is_the_largest_number_under_onnx_runtimes_keys(arena):
    assert arena.stats().limit is None
    assert arena.stats().as_ort()["Limit"] == str((1 << 63) - 1)


def test_total_allocated_equals_reserved(arena):
    arena.allocate(1).close()
    assert arena.stats().total_allocated == arena.stats().reserved == MIB


def test_blocks_show_address_size_state_and_stream(make_arena):
    arena, stream = make_arena({"split_rule": "tight"}), gpumem.Stream("host")
    buffer = arena.allocate(1000, stream)
    used, rest = arena.blocks()
    assert used == gpumem.BlockInfo(buffer.ptr, 1000, 1024, True, 0, stream.ptr)
    assert rest == gpumem.BlockInfo(buffer.ptr + 1024, 0, MIB - 1024, False, 0, 0)
    buffer.close()


def test_arena_repr_shows_name_memory_and_use(make_arena):
    arena = make_arena(name="weights")
    buffer = arena.allocate(1000)
    assert (arena.name, str(arena.memory)) == ("weights", "host:0")
    assert "'weights' on host:0" in repr(arena)
    assert "1000" in repr(buffer)
    assert hex(buffer.ptr) in repr(buffer)
    assert make_arena().name == "host:0"
    buffer.close()
