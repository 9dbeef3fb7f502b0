"""Tags: blocks that sleep by themselves, in any order, to the host, another device or a file."""

from __future__ import annotations

import ctypes
import gc
import os
import random
import threading
import weakref

import numpy as np
import pytest
from helpers.arrays import fill, holds
from helpers.child import run_quietly
from helpers.threads import in_a_thread

import gpumem
from gpumem.errors import (
    AsleepError,
    ClosedError,
    ConfigError,
    GpumemError,
    HeapCorruptionError,
    InUseError,
    OutOfMemoryError,
)

KIB, MIB = 1 << 10, 1 << 20


def in_tag(arena, name, nbytes, value, asleep="keep"):
    with arena.tag(name, asleep=asleep):
        buffer = arena.allocate(nbytes)
    fill(buffer, value)
    return buffer


def test_tag_marks_blocks_of_every_allocation_of_its_thread(arena):
    with arena.tag("weights"):
        made = [
            arena.allocate(100),
            arena.allocate(5 * MIB, gpumem.Stream("host")),
            arena.allocate_persistent(1000),
            arena.allocate(3),
        ]
        with arena.tag("inner"):
            inner = arena.allocate(100)
        made.append(arena.allocate(4096, alignment=4096))
        with arena.tag("default"):
            untagged = arena.allocate(100)
    outside = arena.allocate(100)
    assert arena.sleep("weights") > 0
    assert arena.asleep == ("weights",)
    for buffer in (inner, untagged, outside):
        fill(buffer, 7)
    for buffer in made[:3]:
        with pytest.raises(AsleepError):
            memoryview(buffer)
    arena.wake("weights")
    assert arena.asleep == ()
    del made


def test_tag_belongs_to_its_thread(arena):
    other = []
    with arena.tag("weights"):
        in_a_thread(lambda: other.append(arena.allocate(MIB)))
        mine = arena.allocate(MIB)
    arena.sleep("weights")
    fill(other[0], 3)
    with pytest.raises(AsleepError):
        memoryview(mine)
    arena.wake()
    other.clear()


def test_modes_keep_drop_and_stay(arena, host):
    keep = in_tag(arena, "weights", 4 * MIB, 1)
    drop = in_tag(arena, "cache", 6 * MIB, 2, asleep="drop")
    stay = in_tag(arena, "frozen", 8 * MIB, 3, asleep="stay")
    untagged = arena.allocate(2 * MIB)
    fill(untagged, 4)
    addresses = [buffer.ptr for buffer in (keep, drop, stay, untagged)]
    used, copies = host.used(0), host.call_count("cuMemcpyDtoHAsync")
    released = arena.sleep()
    assert used - host.used(0) == released == 12 * MIB
    assert host.call_count("cuMemcpyDtoHAsync") - copies == 2
    assert arena.asleep == ("default", "weights", "cache")
    assert holds(stay, 3)
    assert arena.stats().asleep_bytes == 6 * MIB
    assert arena.stats().reserved == 8 * MIB
    arena.wake()
    assert [buffer.ptr for buffer in (keep, drop, stay, untagged)] == addresses
    assert holds(keep, 1)
    assert holds(untagged, 4)
    assert holds(stay, 3)
    fill(drop, 5)
    assert holds(drop, 5)
    arena.check_invariants()


def test_tags_sleep_and_wake_in_any_order(arena, rng):
    buffers = {
        name: in_tag(arena, name, rng.randrange(1, 9 * MIB), i) for i, name in enumerate("abcd", 1)
    }
    buffers["default"] = arena.allocate(3 * MIB)
    fill(buffers["default"], 9)
    bytes_of = {name: memoryview(each)[0] for name, each in buffers.items()}
    for _ in range(30):
        names = rng.sample(sorted(buffers), rng.randrange(1, 5))
        if rng.random() < 0.5:
            arena.sleep(names)
        else:
            arena.wake(names)
            assert not set(names) & set(arena.asleep)
        for name, each in buffers.items():
            if name in arena.asleep:
                with pytest.raises(AsleepError):
                    memoryview(each)
            else:
                assert holds(each, bytes_of[name])
    arena.wake()
    assert arena.asleep == ()
    buffers.clear()


def test_sleeping_tag_refuses_allocation_and_others_go_on(arena):
    weights = in_tag(arena, "weights", MIB, 1)
    arena.sleep("weights")
    with arena.tag("weights"), pytest.raises(AsleepError, match="wake"):
        arena.allocate(100)
    arena.allocate(100).close()
    arena.wake()
    arena.sleep("default")
    for nbytes in (0, 100):
        with pytest.raises(AsleepError):
            arena.allocate(nbytes)
        with arena.tag("weights"):
            arena.allocate(nbytes).close()
            arena.allocate_persistent(nbytes).close()
    arena.wake()
    assert holds(weights, 1)


def test_limit_and_counters_include_tags(make_arena):
    arena = make_arena({"max_mem": 16 * MIB})
    tagged = in_tag(arena, "a", 6 * MIB, 1)
    other = arena.allocate(6 * MIB)
    assert arena.stats().in_use == 12 * MIB
    assert arena.stats().reserved == 12 * MIB
    assert arena.stats().limit == 16 * MIB
    with arena.tag("a"), pytest.raises(OutOfMemoryError):
        arena.allocate(6 * MIB)
    with pytest.raises(OutOfMemoryError):
        arena.allocate(6 * MIB)
    assert sum(block.used for block in arena.blocks()) == 2
    del tagged, other


def test_sleeping_memory_leaves_room_under_the_limit(make_arena):
    arena = make_arena({"max_mem": 16 * MIB})
    tagged = in_tag(arena, "a", 10 * MIB, 1)
    arena.sleep("a")
    block = arena.allocate(12 * MIB)
    with pytest.raises(OutOfMemoryError, match="limit") as refusal:
        arena.wake()
    assert refusal.value.requested_nbytes == 10 * MIB
    assert "alone" not in str(refusal.value)  # it fits once the block is freed
    assert arena.asleep == ("a",)
    block.close()
    arena.wake()
    assert holds(tagged, 1)
    with pytest.raises(OutOfMemoryError, match="max_mem"):
        arena.allocate(12 * MIB)
    arena.sleep("default")
    with arena.tag("b"):
        arena.allocate(6 * MIB).close()
    arena.wake()
    tagged.close()


def test_idle_memory_of_one_tag_serves_another(make_arena, host):
    arena = make_arena({"max_mem": 16 * MIB})
    arena.allocate(12 * MIB).close()
    tagged = in_tag(arena, "a", 12 * MIB, 1)
    tagged.close()
    with arena.tag("b"):
        arena.allocate(14 * MIB).close()
    arena.allocate(14 * MIB).close()
    assert arena.stats().reserved <= 16 * MIB


def test_arena_releases_idle_memory_above_the_share_before_a_tag_grows(arena, host):
    base = host.used(0)
    arena.allocate(64 * MIB).close()
    first = in_tag(arena, "a", 2 * MIB, 1)  # records what must have completed
    gpumem.Device("host").synchronize()
    second = in_tag(arena, "a", 60 * MIB, 1)
    assert host.used(0) - base <= 66 * MIB
    del first, second


@pytest.mark.parametrize(("nbytes", "idle"), [(12 * MIB, 20 * MIB), (12 * MIB + 1, 0)])
def test_idle_memory_within_the_share_stays_when_another_tag_grows(make_arena, nbytes, idle):
    # One and a half of a live peak of 24 MiB, of which 24 MiB are held.
    arena = make_arena({"page_move_threshold": 0.5})
    pin = arena.allocate(4 * MIB)
    in_tag(arena, "a", 20 * MIB, 1).close()
    gpumem.Device("host").synchronize()
    block = in_tag(arena, "b", nbytes, 2)
    pages = -(-nbytes // (2 * MIB)) * 2 * MIB
    assert arena.stats().reserved == pin.nbytes + pages + idle
    block.close()
    pin.close()


def test_refused_request_does_not_let_tags_keep_more_idle_memory(make_arena, host):
    arena = make_arena({"max_mem": 256 * MIB})
    base = host.used(0)
    first = in_tag(arena, "a", 64 * MIB, 1)
    with arena.tag("b"), pytest.raises(OutOfMemoryError):
        arena.allocate(224 * MIB)
    first.close()
    gpumem.Device("host").synchronize()
    second = in_tag(arena, "b", 60 * MIB, 1)
    assert host.used(0) - base <= 66 * MIB
    del second


def test_budget_counts_tags(make_arena):
    budget = gpumem.Budget(16 * MIB)
    arena = make_arena(budget=budget)
    tagged = in_tag(arena, "a", 6 * MIB, 1)
    assert budget.used == 6 * MIB
    arena.sleep("a")
    assert budget.used == 0
    block = arena.allocate(12 * MIB)
    with pytest.raises(gpumem.errors.BudgetExceededError) as refused:
        arena.wake("a")
    assert refused.value.missing == 2 * MIB
    assert arena.asleep == ("a",)
    block.close()
    arena.shrink()
    arena.wake("a")
    assert holds(tagged, 1)
    tagged.close()


@pytest.mark.parametrize("count", ["reserved", "in_use"])
def test_budget_that_refuses_a_tags_block_names_the_missing_bytes(make_arena, count):
    told = []
    budget = gpumem.Budget(16 * MIB, on_pressure=lambda budget, nbytes: told.append(nbytes))
    arena = make_arena({"oom_wait_ms": 0}, budget=budget, count=count)
    tagged = in_tag(arena, "a", 6 * MIB, 1)
    with arena.tag("a"), pytest.raises(gpumem.errors.BudgetExceededError) as refused:
        arena.allocate(14 * MIB)
    assert (refused.value.missing, told) == (4 * MIB, [4 * MIB])
    tagged.close()


def test_bytes_wait_in_a_file_that_wake_removes(arena, tmp_path):
    a, b = in_tag(arena, "a", 5 * MIB + 3, 1), in_tag(arena, "b", 700, 2)
    path = tmp_path / "asleep"
    arena.sleep(to=path)
    assert path.stat().st_size >= 5 * MIB
    arena.wake("b")
    assert path.exists()
    arena.wake("a")
    assert not path.exists()
    arena.wake()
    assert holds(a, 1)
    assert holds(b, 2)
    path.write_bytes(b"other")
    with pytest.raises(FileExistsError):
        arena.sleep(to=path)
    assert arena.asleep == ()
    assert path.read_bytes() == b"other"


def test_file_without_room_leaves_the_arena_awake(arena, tmp_path, monkeypatch):
    a = in_tag(arena, "a", MIB, 1)

    def refuse(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", refuse)
    with pytest.raises(OSError, match="space"):
        arena.sleep(to=tmp_path / "asleep")
    assert arena.asleep == ()
    assert not (tmp_path / "asleep").exists()
    assert holds(a, 1)


def test_wake_removes_its_file_after_the_working_directory_changed(arena, tmp_path, monkeypatch):
    block = in_tag(arena, "a", MIB, 1)
    for folder in ("one", "two"):
        (tmp_path / folder).mkdir()
    (tmp_path / "two" / "asleep").write_bytes(b"other")
    monkeypatch.chdir(tmp_path / "one")
    arena.sleep(to="./asleep")
    monkeypatch.chdir(tmp_path / "two")
    arena.wake()
    assert not (tmp_path / "one" / "asleep").exists()
    assert (tmp_path / "two" / "asleep").read_bytes() == b"other"
    assert holds(block, 1)


def test_wake_leaves_another_file_that_has_the_path_by_then(arena, tmp_path):
    block = in_tag(arena, "a", MIB, 1)
    arena.sleep(to=tmp_path / "asleep")
    (tmp_path / "asleep").rename(tmp_path / "moved")
    (tmp_path / "asleep").write_bytes(b"other")
    arena.wake()
    assert (tmp_path / "asleep").read_bytes() == b"other"
    assert holds(block, 1)


@pytest.mark.parametrize("end", ["close", "drop"])
def test_file_is_removed_where_the_arena_ends_asleep(tmp_path, end):
    arena = gpumem.Arena("host")
    block = arena.allocate(MIB)
    arena.sleep(to=tmp_path / "asleep")
    assert (tmp_path / "asleep").exists()
    block.close()
    if end == "close":
        arena.close()
    del arena, block
    assert not (tmp_path / "asleep").exists()


def test_file_is_removed_by_the_end_of_its_own_process(tmp_path):
    script = """
    import gc, os, sys
    import gpumem
    arena = gpumem.Arena("host")
    block = arena.allocate(1 << 20)
    arena.sleep(to=sys.argv[1])
    child = os.fork()
    if child == 0:
        del arena, block
        gc.collect()
        sys.exit()
    assert os.waitpid(child, 0)[1] == 0
    assert os.path.exists(sys.argv[1])
    """
    run_quietly(script, str(tmp_path / "asleep"))
    assert not (tmp_path / "asleep").exists()


def test_memory_of_a_sleep_is_kept_and_copied_into_again(make_arena, host):
    arena = make_arena()
    block = arena.allocate(8 * MIB)
    fill(block, 1)
    arena.sleep()
    arena.wake()
    made = host.call_count("cuMemHostRegister")
    fill(block, 2)
    for _ in range(3):
        arena.sleep()
        arena.wake()
    assert host.call_count("cuMemHostRegister") == made
    assert holds(block, 2)
    block.close()


def test_repeated_sleep_leaves_nothing_behind(host, arena):
    blocks = [in_tag(arena, name, 3 * MIB, i) for i, name in enumerate("ab", 1)]
    arena.sleep()
    arena.wake()
    used = host.used(0)
    for _ in range(100):
        arena.sleep()
        arena.wake()
    assert host.used(0) == used
    assert [holds(block, i) for i, block in enumerate(blocks, 1)] == [True, True]
    blocks.clear()


def test_large_blocks_cross_groups_and_chunks(arena):
    """More than the 128 MiB of one group and the 256 MiB of one piece of the copy."""
    rng = random.Random(7)
    blocks = [arena.allocate(size) for size in (300 * MIB + 512, 900, 33 * MIB, 1000)]
    dead = arena.allocate(20 * MIB)
    marks = {}
    for block in blocks:
        view = np.frombuffer(block, "u1")
        places = [0, block.nbytes - 1, *(rng.randrange(block.nbytes) for _ in range(2000))]
        for place in places:
            view[place] = rng.randrange(256)
        marks[block.ptr] = {place: int(view[place]) for place in places}
        del view
    dead.close()
    arena.sleep()
    arena.wake()
    for block in blocks:
        view = np.frombuffer(block, "u1")
        assert all(view[place] == value for place, value in marks[block.ptr].items())
        del view
    blocks.clear()


def test_block_of_a_tag_freed_while_asleep(arena, host):
    first, second = in_tag(arena, "a", 4 * MIB, 1), in_tag(arena, "a", 4 * MIB, 2)
    arena.sleep("a")
    first.close()
    arena.wake("a")
    assert holds(second, 2)
    assert arena.stats().reserved <= 6 * MIB
    second.close()


def test_arena_closes_with_all_of_its_tags_or_none(arena):
    tagged = in_tag(arena, "a", MIB, 1)
    with pytest.raises(InUseError, match="'a'"):
        arena.close()
    assert not arena.closed
    arena.allocate(100).close()
    arena.sleep()
    tagged.close()
    arena.close()
    assert arena.closed
    with pytest.raises(ClosedError):
        arena.tag("a")


def test_tagged_block_outlives_its_arena(host):
    before = host.used(0)
    arena = gpumem.Arena("host")
    tagged = in_tag(arena, "a", MIB, 5)
    del arena
    assert holds(tagged, 5)
    del tagged
    gpumem.Device("host").synchronize()
    gpumem.Arena("host").shrink()
    assert host.used(0) <= before


def test_tag_refuses_what_it_cannot_be(make_arena):
    arena = make_arena()
    with pytest.raises(ConfigError, match="asleep = 'never'"):
        arena.tag("a", asleep="never")
    for name, error in ((7, TypeError), ("", ValueError)):
        with pytest.raises(error), arena.tag(name):
            pass
    with arena.tag("a", asleep="drop"), pytest.raises(ConfigError, match="it is 'drop'"):
        arena.tag("a")
    told = r"no tag 'b'; it has 'default', 'a'\. `with arena\.tag\('b'\)` .* gpumem\.observe\.tag"
    with pytest.raises(ValueError, match=told):
        arena.sleep(["a", "b"])
    with pytest.raises(ValueError, match="host:0"):
        arena.sleep(to="host:0")
    with pytest.raises(TypeError):
        arena.sleep(7)
    regions = make_arena({"backing": "regions"})
    with pytest.raises(ConfigError, match="virtual"):
        regions.tag("a")


def test_tag_left_on_another_thread_is_an_error(arena):
    tag = arena.tag("a")
    thread = threading.Thread(target=tag.__enter__)
    thread.start()
    thread.join()
    with pytest.raises(GpumemError, match="another thread"):
        tag.__exit__(None, None, None)


def test_tag_left_without_being_entered_is_an_error(arena):
    tag = arena.tag("a")
    with pytest.raises(GpumemError, match="'a' is not entered"):
        tag.__exit__(None, None, None)
    with tag:
        pass
    with pytest.raises(GpumemError, match="'a' is not entered"):
        tag.__exit__(None, None, None)
    with arena.allocate(100):
        assert [block.tag for block in arena.blocks() if block.used] == ["default"]


def test_tag_entered_a_second_time_is_an_error(arena):
    tag = arena.tag("a")
    with tag, pytest.raises(GpumemError, match=r"'a' was entered before: call tag\(\)"):
        tag.__enter__()
    with pytest.raises(GpumemError, match=r"'a' was entered before: call tag\(\)"):
        tag.__enter__()
    with arena.allocate(100):
        assert [block.tag for block in arena.blocks() if block.used] == ["default"]


def test_open_tag_keeps_its_arena_and_a_dropped_one_is_over():
    arena = gpumem.Arena("host")
    tag, alive = arena.tag("left open"), weakref.ref(arena)
    tag.__enter__()
    del arena
    gc.collect()
    assert alive() is not None
    del tag
    gc.collect()
    assert alive() is None


def test_blocks_tell_their_tag_and_whether_they_sleep(arena):
    plain, tagged = arena.allocate(100), in_tag(arena, "a", 3 * MIB, 1)
    with arena.tag("a"):
        shared = arena.allocate(200, shareable=True)
    arena.sleep("a")
    found = {block.address: (block.tag, block.asleep) for block in arena.blocks() if block.used}
    assert found == {
        plain.ptr: ("default", False),
        tagged.ptr: ("a", True),
        shared.ptr: ("a", False),
    }
    arena.sleep()
    assert all(block.asleep for block in arena.blocks() if block.tag == "default")
    arena.wake()
    assert not any(block.asleep for block in arena.blocks())
    del plain, tagged, shared


def test_debug_heap_looks_at_blocks_of_tags_and_lists_them(make_arena):
    arena = make_arena(debug_heap=True)
    plain, tagged = arena.allocate(100), in_tag(arena, "a", 100, 1)
    ctypes.memset(tagged.ptr + 100, 7, 1)
    with pytest.raises(HeapCorruptionError):
        arena.check_heap()
    arena.sleep("a")
    live = {block.ptr: (block.tag, block.asleep) for block in arena.outstanding()}
    assert live == {plain.ptr: ("default", False), tagged.ptr: ("a", True)}
    arena.check_heap()  # what sleeps is not looked at
    arena.wake()
    del plain, tagged


def test_out_of_memory_report_adds_up_tags_and_names_those_asleep(make_arena):
    arena = make_arena({"max_mem": 16 * MIB})
    plain, tagged = arena.allocate(4 * MIB), in_tag(arena, "a", 6 * MIB, 1)
    asleep = in_tag(arena, "b", 2 * MIB, 2)
    arena.sleep("b")
    for ask in (lambda: arena.allocate(8 * MIB), lambda: in_tag(arena, "a", 8 * MIB, 1)):
        with pytest.raises(OutOfMemoryError, match=r"asleep: b with 2\.0 MiB") as caught:
            ask()
        report = caught.value.report
        assert report.in_use == sum(report.by_owner.values()) == 10 * MIB
        assert report.reserved == 10 * MIB
        assert report.asleep == {"b": 2 * MIB}
    arena.wake()
    del plain, tagged, asleep


def test_memory_of_another_arena_refuses_a_sleep_or_keeps_its_tag_awake(arena):
    """The arena does not know of the blocks in it, nor of their views."""
    with arena.tag("a"):
        tagged = arena.allocate(MIB)
    other = gpumem.Arena("host", source=arena)
    block = other.allocate(MIB)
    fill(block, 7)
    with pytest.raises(InUseError, match="arenas over its blocks"):
        arena.sleep()
    assert arena.asleep == ()
    arena.sleep(registered="stay")
    assert arena.asleep == ("a",)
    assert holds(block, 7)
    block.close()
    other.close()
    arena.sleep()
    assert arena.asleep == ("default", "a")
    arena.wake()
    del tagged


def test_registered_block_refuses_a_sleep_or_keeps_its_tag_awake(arena):
    plain, tagged = arena.allocate(MIB), in_tag(arena, "a", MIB, 3)
    with tagged.register():
        with pytest.raises(InUseError, match="registration"):
            arena.sleep()
        assert arena.asleep == ()
        arena.sleep(registered="stay")
        assert arena.asleep == ("default",)
        assert holds(tagged, 3)
    arena.sleep(registered="stay")
    assert arena.asleep == ("default", "a")
    arena.wake()
    with pytest.raises(ConfigError, match="registered = 'no'"):
        arena.sleep(registered="no")
    del plain, tagged


def test_recordings_show_the_tag(arena):
    with gpumem.observe.record(arena) as recording, arena.tag("weights"):
        arena.allocate(1000).close()
    assert {event.tag for event in recording.events()} <= {"weights", None}


def test_refused_call_of_the_second_tag_wakes_the_first(arena, host):
    a, b = in_tag(arena, "a", 3 * MIB, 1), in_tag(arena, "b", 3 * MIB, 2)
    refused = 0
    for number in range(1, 60):
        host.fail(None, number, 1)
        try:
            arena.sleep()
        except AsleepError:
            refused += 1
        except GpumemError:
            refused += 1
            assert arena.asleep == ()
        finally:
            host.clear_faults()
        arena.wake()
        assert holds(a, 1)
        assert holds(b, 2)
        arena.check_invariants()
    assert refused > 10


def test_sleep_refused_before_a_drop_tag_leaves_that_tags_bytes(arena, tmp_path, monkeypatch):
    cache = in_tag(arena, "cache", 3 * MIB, 2, asleep="drop")
    weights = in_tag(arena, "weights", 3 * MIB, 1)

    def refuse(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", refuse)
    with pytest.raises(OSError, match="space"):
        arena.sleep(["cache", "weights"], to=tmp_path / "asleep")
    assert arena.asleep == ()
    assert holds(weights, 1)
    assert holds(cache, 2)


def test_wake_refused_at_any_call_can_be_tried_again(arena, host):
    a, b = in_tag(arena, "a", 3 * MIB, 1), in_tag(arena, "b", 300 * KIB, 2)
    refused = 0
    for number in range(1, 40):
        arena.sleep()
        host.fail(None, number, 2)
        try:
            arena.wake()
        except GpumemError:
            refused += 1
            assert arena.asleep
        finally:
            host.clear_faults()
        arena.wake()
        assert holds(a, 1)
        assert holds(b, 2)
    assert refused > 10


def test_tag_at_the_limit_gives_its_own_idle_memory_back_to_grow(make_arena):
    """For a persistent block, which may not lie in the pages that are idle."""
    arena = make_arena({"max_mem": 16 * MIB})
    with arena.tag("one"):
        arena.allocate(12 * MIB).close()
        block = arena.allocate_persistent(16 * MIB)
    assert arena.stats().reserved == 16 * MIB
    block.close()
