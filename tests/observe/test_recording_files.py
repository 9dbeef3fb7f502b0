"""Files of recordings: full disks, and other processes that change a file."""

from __future__ import annotations

import contextlib
import os
import random
import threading

import pytest
from helpers import child

from gpumem import errors, observe
from gpumem.errors import TraceError
from gpumem.traces import load_trace


def blocks_of(events):
    return [event for event in events if event.action in ("alloc", "free")]


def test_full_disk_ends_only_the_recording(make_arena, tmp_path):
    # A limit on the size of files stands for the disk: the file system refuses further room.
    arena_script = """
        import errno, resource, signal, sys, warnings
        import gpumem
        from gpumem import observe
        from gpumem.traces import load_traces
        arena = gpumem.Arena("host")
        arena.allocate(64).close()      # the host device's memory is a file, too
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (3 << 20, 3 << 20))
        recording = observe.record(arena, sys.argv[1])
        for _ in range(60_000):
            arena.allocate(64).close()
        assert not recording.running and recording.lost > 50_000, recording.lost
        assert recording.failed.errno == errno.EFBIG, recording.failed
        # A recording that is killed now has the first of its lost events in the file.
        assert recording.lost // 2 < observe.read(sys.argv[1]).lost <= recording.lost
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            recording.stop()
        (warning,) = told
        said = str(warning.message)
        assert said == f"{sys.argv[1]} lacks {recording.lost:,} events: File too large", said
        events = observe.read(sys.argv[1])
        assert len(events) > 50_000 and not events.torn
        assert events.lost == recording.events().lost == recording.lost
        (trace,) = load_traces(sys.argv[1])
        assert trace.meta["lost"] == recording.trace().meta["lost"] == recording.lost
        page = sys.argv[1] + ".html"
        assert f"{recording.lost:,} events were lost" in recording.report(page).notice
    """
    child.run_quietly(arena_script, str(tmp_path / "events"))


@pytest.mark.parametrize("left", [0, 50, 1000, 8192])
@pytest.mark.parametrize("more", [0, 5000])
def test_file_that_another_process_shortens_lacks_events_and_says_so(
    make_arena, tmp_path, left, more
):
    arena = make_arena()
    path = tmp_path / "events"
    recording = observe.record(arena, path)
    for _ in range(1000):
        arena.allocate(64).close()
    os.truncate(path, left)
    for _ in range(more):
        arena.allocate(100).close()
    assert recording.running
    with pytest.warns(RuntimeWarning, match=f"{path} lacks events: another process has shortened"):
        recording.stop()
    events = observe.read(path)
    assert events.torn > 1000
    if not more and left < 1000:  # no event is left
        with pytest.raises(
            TraceError, match=r"holds no allocations: it lacks [\d,]+ events that it had"
        ):
            load_trace(path)
    assert [event.nbytes for event in events if event.action == "alloc"][-more:].count(100) == more
    with observe.record(arena, path):  # the next one is whole
        arena.allocate(64).close()
    assert (len(blocks_of(observe.read(path))), observe.read(path).torn) == (2, 0)


def test_file_that_shrinks_while_it_is_read_is_torn_or_refused(make_arena, tmp_path):
    path = tmp_path / "events"
    arena = make_arena()
    with observe.record(arena, path):
        for _ in range(100):
            arena.allocate(64).close()
    data = path.read_bytes()
    done = threading.Event()

    def change():
        while not done.is_set():
            os.truncate(path, random.randrange(len(data)))
            path.write_bytes(data)

    thread = threading.Thread(target=change)
    thread.start()
    try:
        for read in (observe.read, load_trace) * 200:
            with contextlib.suppress(errors.EventFileError, TraceError):
                read(path)
    finally:
        done.set()
        thread.join()
    assert len(blocks_of(observe.read(path))) == 200


def test_removed_file_of_a_recording_is_an_error_of_the_reader_alone(make_arena, tmp_path):
    path = tmp_path / "events"
    arena = make_arena()
    with observe.record(arena, path) as recording:
        path.unlink()
        path.write_text("of another program")
        arena.allocate(64).close()
    with pytest.raises(errors.EventFileError, match="events"):
        recording.events()
    assert path.read_text() == "of another program"
