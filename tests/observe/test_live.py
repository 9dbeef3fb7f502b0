"""Pages of counters: what a process publishes of itself, and what others read of it."""

import contextlib
import fcntl
import gc
import itertools
import os
import re
import signal
import subprocess
import sys
import textwrap
import threading
import time
import zlib

import pytest
from helpers.child import python
from helpers.threads import in_a_thread
from helpers.waiting import wait_until

import gpumem
from gpumem import _live, errors, observe
from gpumem.observe import live

MIB = 1 << 20
PROMPTLY = 60  # seconds; how long a loaded machine may take to come to something


@pytest.fixture(autouse=True)
def folder(monkeypatch, tmp_path):
    """A folder of the test's own for pages: other tests run at the same time, and clear up."""
    monkeypatch.setattr(_live, "FOLDER", str(tmp_path))
    monkeypatch.setattr(live, "FOLDER", tmp_path)
    gc.collect()  # what earlier tests left in cycles, of the same names perhaps
    yield tmp_path
    if live._publication is not None:
        live._publication.close()


@contextlib.contextmanager
def child(script, **environment):
    """Run a script that says "ready" and waits for a line; gives the process."""
    begin = f"import gpumem, gpumem.observe\ngpumem._live.FOLDER = {_live.FOLDER!r}\n"
    with subprocess.Popen(
        [sys.executable, "-c", begin + textwrap.dedent(script)],
        env=os.environ | environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            assert process.stdout.readline() == "ready\n"
            yield process
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.kill(process.pid, signal.SIGCONT)
            process.kill()


PUBLISHES = """
arena = gpumem.Arena("host", name="weights")
buffers = [arena.allocate(4096) for _ in range(10)]
print("ready", flush=True)
"""
ON = {"GPUMEM_TOP": "1"}


def page_when(process, condition):
    """Read a process's page until it is as it should be."""
    end = time.monotonic() + PROMPTLY
    while True:
        page = observe.LivePage.of_process(process)
        if condition(page) or time.monotonic() > end:
            assert condition(page), page
            return page
        time.sleep(0.02)


def own_page():
    """Read this process's page once it is newer than the call."""
    now = time.monotonic()
    return page_when(os.getpid(), lambda page: page.clock > now)


def named(page, name):
    (found,) = (one for one in page.resources if one.name == name)
    return found


def shows(name, **counters):
    """Make a condition: a resource is there and its counters are these."""

    def holds(page):
        found = [one.counters for one in page.resources if one.name == name]
        return len(found) == 1 and counters.items() <= found[0].items()

    return holds


def pages_in_memory(process):
    return [path.name for path in live.FOLDER.glob(f"gpumem-*-{process}*")]


# ---------------------------------------------------------------------------------- what is told


def assert_tells_its_statistics(resource, *, reserved=True):
    observe.publish(period=0.01)
    counters = named(own_page(), resource.name).counters
    stats = resource.stats()
    names = set(_live.COUNTERS) - (set() if reserved else {"reserved", "max_reserved"})
    assert {name: counters[name] for name in names} == {
        name: getattr(stats, name) or 0 for name in names
    }


@pytest.mark.parametrize("backing", ["virtual", "regions"])
def test_published_counters_include_cached_blocks(backing):
    arena = gpumem.Arena("host", {"backing": backing, "max_mem": 1 << 30}, name="told")
    held = [arena.allocate(size) for size in (100, 4096, 70_000, 3 * MIB)]
    for size in (100, 5000, 4096, MIB):
        arena.allocate(size).close()  # some rest in the thread's cache
    held.append(arena.allocate_persistent(100_000))
    held.pop(2).close()
    assert_tells_its_statistics(arena)


def test_published_counters_include_every_threads_cache():
    arena = gpumem.Arena("host", name="told")
    held = []

    def work():
        held.extend(arena.allocate(1000) for _ in range(20))
        del held[:10]

    for _ in range(3):
        in_a_thread(work)
    observe.publish(period=0.01)
    counters = named(own_page(), "told").counters
    assert counters["num_allocs"] == 60
    assert counters["num_frees"] == 30
    arena.shrink()  # what others freed is collected
    assert_tells_its_statistics(arena)


def test_sleeping_arena_publishes_no_reserved_bytes():
    arena = gpumem.Arena("host", {"backing": "virtual"}, name="told")
    buffer = arena.allocate(MIB)
    arena.sleep()
    assert_tells_its_statistics(arena)
    arena.wake()
    buffer.close()


def test_pools_external_allocators_and_user_resources_are_published(host_callbacks):
    pool = gpumem.DriverPool("host", {"max_size": 64 * MIB}, name="a pool")
    external = gpumem.ExternalAllocator(*host_callbacks, memory="host", name="external")
    held = [each.allocate(5000) for each in (pool, external) for _ in range(3)]
    held.pop().close()
    # What a driver keeps for a pool is its own to say: the page has what blocks take.
    assert_tells_its_statistics(pool, reserved=False)
    assert_tells_its_statistics(external)
    kinds = {one.name: one.kind for one in own_page().resources}
    assert kinds["a pool"] == "DriverPool"
    assert kinds["external"] == "ExternalAllocator"


@pytest.fixture
def host_callbacks():
    arena, blocks = gpumem.Arena("host"), {}

    def alloc(nbytes):
        buffer = arena.allocate(nbytes)
        blocks[buffer.ptr] = buffer
        return buffer.ptr

    return alloc, lambda address: blocks.pop(address).close()


def test_closed_and_dropped_resources_are_not_published():
    arena = gpumem.Arena("host", name="closed")
    gone = gpumem.Arena("host", name="gone")
    observe.publish(period=0.01)
    assert {"closed", "gone"} <= {one.name for one in own_page().resources}
    arena.close()
    del gone
    assert gpumem.Device("host").free_bytes > 0  # a call in which arenas that went are taken down
    assert not {"closed", "gone"} & {one.name for one in own_page().resources}


def test_budgets_are_published_with_parents_and_users():
    process = gpumem.Budget(None, name="process")
    tenant = gpumem.Budget(64 * MIB, soft=32 * MIB, parent=process, name="tenant é")
    arena = gpumem.Arena("host", name="charged", budget=tenant)
    buffer = arena.allocate(MIB)
    observe.publish(period=0.01)
    page = own_page()
    levels = {one.name: one for one in page.budgets}
    told, above = levels["tenant é"], levels["process"]
    assert (told.limit, told.soft, told.used) == (64 * MIB, 32 * MIB, tenant.used)
    assert told.peak >= told.used > 0
    assert (above.limit, above.soft, above.parent) == (None, None, None)
    assert told.parent == above.id
    assert named(page, "charged").budget == told.id
    buffer.close()


def test_resources_beyond_the_pages_room_are_counted():
    arenas = [gpumem.Arena("host", {"backing": "regions"}) for _ in range(260)]
    observe.publish(period=0.05)
    page = own_page()
    assert len(page.resources) == 256
    assert page.left_out >= 4
    del arenas


def test_long_name_is_cut_at_a_character():
    arena = gpumem.Arena("host", name="é" * 50)
    observe.publish(period=0.01)
    assert named(own_page(), "é" * 31).memory == str(arena.memory)


def test_published_counts_never_fall_while_caches_are_flushed():
    """Prometheus takes a count that fell for a process that began anew, and a rate for huge."""
    arena = gpumem.Arena("host", {"backing": "regions"}, name="busy")
    done = threading.Event()

    def work():
        while not done.is_set():
            arena.allocate(1000).close()
            arena.shrink()  # its cache's counts move to the arena's

    def idle():
        arena.allocate(1000).close()  # a cache more, so that a look takes longer than that
        done.wait()

    threads = [threading.Thread(target=work), *(threading.Thread(target=idle) for _ in range(20))]
    for thread in threads:
        thread.start()
    try:
        seen = [(0, 0)]
        while len(seen) < 2000:
            counters = named(live.decode_copy(_live.copy_now(), 0, True, 0.0), "busy").counters
            seen.append((counters["num_allocs"], counters["num_frees"]))
    finally:
        done.set()
        for thread in threads:
            thread.join()
    for before, after in itertools.pairwise(seen):
        assert before[0] <= after[0]
        assert before[1] <= after[1]
    assert_tells_its_statistics(arena)  # and nothing was counted twice


# ------------------------------------------------------------------------------------- the file


def test_page_file_is_private_and_removed_at_exit():
    before = os.umask(0)
    try:
        publication = observe.publish()
    finally:
        os.umask(before)
    path = publication.path
    assert path.name == f"gpumem-{os.getuid()}-{os.getpid()}"
    assert path.stat().st_mode & 0o777 == 0o600
    assert pages_in_memory(os.getpid()) == [path.name]
    publication.close()
    publication.close()
    assert publication.closed
    assert pages_in_memory(os.getpid()) == []
    with pytest.raises(errors.NotPublishedError, match="publishes nothing"):
        observe.LivePage.of_process(os.getpid())


def test_publishing_twice_changes_the_period():
    first = observe.publish(period=0.5)
    assert observe.publish(period=0.02) is first
    assert own_page().period == 0.02


def test_with_block_ends_its_own_publication_only():
    with observe.publish() as first:
        assert pages_in_memory(os.getpid()) == [first.path.name]
    assert pages_in_memory(os.getpid()) == []
    later = observe.publish()
    first.close()
    assert later is not first
    assert pages_in_memory(os.getpid()) == [later.path.name]


@pytest.mark.parametrize("period", [0, -1, 3601, float("nan"), float("inf")])
def test_period_out_of_range_is_refused(period):
    with pytest.raises(ValueError, match=re.escape("expected 0.001 to 3600.0 seconds")):
        observe.publish(period=period)
    assert pages_in_memory(os.getpid()) == []


@pytest.mark.parametrize("period", ["1", None, True])
def test_period_that_is_no_number_is_refused(period):
    with pytest.raises(TypeError, match="a number of seconds"):
        observe.publish(period=period)


def test_full_shared_memory_publishes_nothing(monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(OSError, match="No space left"):
        observe.publish()
    assert pages_in_memory(os.getpid()) == []
    monkeypatch.undo()
    observe.publish()  # and it can be tried again


def test_page_of_a_dead_process_with_this_pid_is_replaced():
    left = live.FOLDER / f"gpumem-{os.getuid()}-{os.getpid()}"
    left.write_bytes(b"old")
    assert observe.publish().path == left
    assert own_page().alive


def test_partial_update_is_not_read():
    """A process that was killed within an update leaves the copy before, which is whole."""
    arena = gpumem.Arena("host", name="told")
    observe.publish(period=3600)
    path = live.FOLDER / f"gpumem-{os.getuid()}-{os.getpid()}"
    data = bytearray(path.read_bytes())
    start, stride = int.from_bytes(data[12:16], "little"), int.from_bytes(data[16:20], "little")
    newest = start + stride  # update 1
    older = data[newest : newest + stride]
    for place, number in ((start, 2), (newest, 3)):
        length = int.from_bytes(older[4:8], "little")
        older[8:16] = number.to_bytes(8, "little")
        older[:4] = zlib.crc32(older[4:length]).to_bytes(4, "little")
        data[place : place + stride] = older
    data[newest + 40] ^= 1  # the newer one was not finished
    target = live.FOLDER / f"gpumem-{os.getuid()}-{2**31 - 7}"
    target.write_bytes(data)
    try:
        page = observe.LivePage.of_process(2**31 - 7)
        assert named(page, "told").memory == str(arena.memory)
        assert not page.alive
        data[start + 40] ^= 1
        target.write_bytes(data)
        with pytest.raises(gpumem.GpumemError, match="damaged"):
            observe.LivePage.of_process(2**31 - 7)
    finally:
        target.unlink(missing_ok=True)


@pytest.mark.parametrize("left", [0, 20, 5000])
def test_page_that_another_process_shortens_is_whole_after_two_updates(left):
    arena = gpumem.Arena("host", name="told")
    publication = observe.publish(period=0.005)
    for _ in range(20):
        os.truncate(publication.path, left)
        with contextlib.suppress(gpumem.GpumemError):
            observe.LivePage.of_process(os.getpid())
    written = [_copy_number(publication.path) for _ in range(2)]
    wait_until(lambda: _copy_number(publication.path) > written[-1] + 2)
    assert named(own_page(), "told").memory == str(arena.memory)


def _copy_number(path):
    """Read the number of the newest update as far as the file has one."""
    data = path.read_bytes()
    start, stride = int.from_bytes(data[12:16], "little"), int.from_bytes(data[16:20], "little")
    places = (start + 8, start + stride + 8)
    return max(int.from_bytes(data[place : place + 8], "little") for place in places)


@pytest.mark.parametrize("replaced", [False, True])
def test_page_that_was_removed_or_replaced_is_published_again(replaced):
    path = observe.publish(period=0.005).path
    path.unlink()
    if replaced:
        path.write_bytes(b"of another program")
        with pytest.raises(gpumem.GpumemError, match="not a page"):
            observe.LivePage.of_process(os.getpid())
    assert observe.publish(period=0.005).path == path
    assert own_page().alive


@pytest.fixture
def stray():
    """The path of a page of nobody's."""
    path = live.FOLDER / f"gpumem-{os.getuid()}-{2**31 - 8}"
    yield path
    path.unlink(missing_ok=True)


@pytest.mark.parametrize("content", [b"", b"gpumemTP", b"x" * 9999, None])
def test_foreign_file_or_pipe_in_a_pages_place_is_reported_and_left_alone(stray, content):
    """A pipe does not block its readers."""
    if content is None:
        os.mkfifo(stray, 0o600)
    else:
        stray.write_bytes(content)
    with pytest.raises(gpumem.GpumemError, match="not a page"):
        observe.LivePage.of_process(2**31 - 8)
    assert stray.exists()


def test_link_in_a_pages_place_is_not_followed(stray):
    stray.symlink_to(observe.publish().path)
    with pytest.raises(errors.NotPublishedError):
        observe.LivePage.of_process(2**31 - 8)


@pytest.mark.parametrize("alive", [True, False])
def test_page_of_another_version_is_reported_and_removed_with_its_process(stray, alive):
    stray.write_bytes(b"gpumemTP\5" + bytes(9999))
    with stray.open("rb") as file:
        if alive:
            fcntl.flock(file, fcntl.LOCK_EX)
        with pytest.raises(gpumem.GpumemError, match="has version 5: this gpumem reads version 4"):
            observe.LivePage.of_process(2**31 - 8)
        assert stray.exists() == alive


def page_of(copy, *, stride=4096, resources=0, budgets=0):
    """A page with one copy, of a right CRC, that says it has so many records."""
    sizes = live._RESOURCE.size, live._BUDGET.size
    header = live._HEADER.pack(b"gpumemTP", live._VERSION, 64, stride, *sizes, 100, 1)
    counted = live._COPY.pack(0, live._COPY.size + len(copy), 1, 0, 0, resources, budgets, 0, 0)
    body = counted[4:] + copy
    page = header.ljust(64, b"\0") + zlib.crc32(body).to_bytes(4, "little") + body
    return page.ljust(5000, b"\0")


@pytest.mark.parametrize("counts", [(2, 0), (0, 9), (1, 1), (2**32 - 1, 2**32 - 1), (0, 0)])
def test_page_with_counts_that_contradict_its_bytes_is_damaged(stray, counts):
    stray.write_bytes(page_of(bytes(live._RESOURCE.size), resources=counts[0], budgets=counts[1]))
    with pytest.raises(gpumem.GpumemError, match="is damaged: neither copy is whole"):
        observe.LivePage.of_process(2**31 - 8)


def test_page_with_records_of_another_size_is_of_another_gpumem(stray):
    header = live._HEADER.pack(b"gpumemTP", live._VERSION, 64, 4096, 8, 9, 100, 1)
    stray.write_bytes(header.ljust(5000, b"\0"))
    with pytest.raises(gpumem.GpumemError, match="another gpumem: its records have 8 and 9 bytes"):
        observe.LivePage.of_process(2**31 - 8)


def test_another_layout_has_another_version():
    layout = live._RESOURCE.format, _live.COUNTERS, live._BUDGET.format, live._COPY.format
    assert (live._VERSION, zlib.crc32(repr(layout).encode())) == (4, 4165281998)


def test_page_with_copies_larger_than_its_file_is_damaged(stray):
    stray.write_bytes(page_of(b"", stride=2**32 - 1))
    with pytest.raises(gpumem.GpumemError, match="copies of 4294967295 bytes in a file of 5000"):
        observe.LivePage.of_process(2**31 - 8)


def test_unreadable_page_hides_no_other(stray):
    stray.write_bytes(b"x" * 9999)
    observe.publish()
    with pytest.warns(RuntimeWarning, match="a process is left out: .* is not a page of gpumem"):
        pages = observe.LivePage.of_all()
    assert os.getpid() in [page.process for page in pages]


def test_without_shared_memory_nothing_is_published(monkeypatch, tmp_path):
    monkeypatch.setattr(_live, "FOLDER", str(tmp_path / "absent"))
    monkeypatch.setattr(live, "FOLDER", tmp_path / "absent")
    with pytest.raises(FileNotFoundError, match="absent"):
        observe.publish()
    assert observe.LivePage.of_all() == ()
    with pytest.raises(errors.NotPublishedError, match="publishes nothing"):
        observe.LivePage.of_process(os.getpid())


def test_page_of_a_living_process_is_not_replaced(folder):
    """One of the same id, which lives in another PID namespace and shares /dev/shm."""
    other = folder / f"gpumem-{os.getuid()}-{os.getpid()}"
    other.write_bytes(b"theirs")
    with other.open("rb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        with pytest.raises(FileExistsError, match="in another PID namespace"):
            observe.publish()
    assert list(folder.iterdir()) == [other]
    assert other.read_bytes() == b"theirs"


def test_exit_removes_only_the_own_page():
    publication = observe.publish()
    path = publication.path
    path.unlink()
    path.write_bytes(b"theirs")
    publication.close()
    assert path.read_bytes() == b"theirs"


def test_page_of_another_user_is_refused(monkeypatch):
    path = observe.publish().path
    monkeypatch.setattr(os, "getuid", lambda: 54321)
    with pytest.raises(errors.NotPublishedError, match="another user's"):
        observe.LivePage.of_process(os.getpid())
    assert observe.LivePage.of_all() == ()
    assert path.exists()


# ------------------------------------------------------------------------------ other processes


def test_page_follows_a_process_while_it_allocates():
    script = """
    import sys
    arena = gpumem.Arena("host", name="growing")
    held = [arena.allocate(1 << 20)]
    print("ready", flush=True)
    for line in sys.stdin:
        held.append(arena.allocate(1 << 20))
    """
    with child(script, **ON) as process:
        for blocks in (1, 2, 3):
            assert page_when(process.pid, shows("growing", in_use=blocks * MIB)).alive
            process.stdin.write("more\n")
            process.stdin.flush()
        assert process.pid in [page.process for page in observe.LivePage.of_all()]
        process.stdin.close()
        assert process.wait(PROMPTLY) == 0
        assert pages_in_memory(process.pid) == []


def test_page_is_current_while_a_thread_holds_the_gil():
    script = """
    import ctypes
    arena = gpumem.Arena("host", name="before")
    gpumem.observe.publish()
    print("ready", flush=True)
    held = arena.allocate(3 << 20)
    ctypes.PyDLL(None).sleep(1000)      # keeps the interpreter lock
    """
    with child(script) as process:
        page_when(process.pid, shows("before", in_use=3 * MIB))
        now = time.monotonic()
        page_when(process.pid, lambda page: page.clock > now)


def test_page_of_a_stopped_process_is_readable():
    with child(PUBLISHES + "input()", **ON) as process:
        page_when(process.pid, shows("weights", num_allocs=10))
        os.kill(process.pid, signal.SIGSTOP)
        os.waitid(os.P_PID, process.pid, os.WSTOPPED | os.WNOWAIT)
        before = observe.LivePage.of_process(process.pid)
        page = page_when(process.pid, lambda page: page.age > 3 * page.period)
        assert page.alive
        assert page.clock == before.clock
        assert named(page, "weights").counters["in_use"] == 10 * 4096


@pytest.mark.parametrize("how", ["of_process", "of_all"])
def test_page_of_a_killed_process_is_read_once(how):
    with child(PUBLISHES + "input()", **ON) as process:
        page_when(process.pid, shows("weights", num_allocs=10))
        process.kill()
        process.wait(PROMPTLY)
        if how == "of_process":
            page = observe.LivePage.of_process(process.pid)
        else:
            (page,) = (one for one in observe.LivePage.of_all() if one.process == process.pid)
        assert not page.alive
        assert named(page, "weights").counters["in_use"] == 10 * 4096
        assert pages_in_memory(process.pid) == []
        with pytest.raises(errors.NotPublishedError, match="does not exist"):
            observe.LivePage.of_process(process.pid)


def test_process_that_called_exec_counts_as_ended():
    script = PUBLISHES + "import os; os.execvp('sleep', ['sleep', '1000'])"
    with child(script, **ON) as process:
        page_when(process.pid, lambda page: not page.alive)
        assert process.poll() is None


def test_forked_child_publishes_its_own_page():
    script = """
    import os, sys, warnings
    warnings.simplefilter("ignore", DeprecationWarning)     # a fork beside a thread
    parents = gpumem.Arena("host", name="parent's")
    down, up = os.pipe(), os.pipe()
    child = os.fork()
    if child == 0:
        os.read(down[0], 1)
        own = gpumem.Arena("host", name="child's")
        held = own.allocate(2 << 20)
        os.write(up[1], b"x")
        os.read(down[0], 1)
        del held, own
        sys.exit()
    print("ready", flush=True)
    print(child, flush=True)
    for _ in range(2):
        sys.stdin.readline()
        os.write(down[1], b"x")
        if _ == 0:
            os.read(up[0], 1)
            print("made", flush=True)
    print(os.waitpid(child, 0)[1], flush=True)
    sys.stdin.readline()
    """
    with child(script, **ON) as process:
        forked = int(process.stdout.readline())

        def go_on():
            process.stdin.write("on\n")
            process.stdin.flush()
            return process.stdout.readline()

        assert pages_in_memory(forked) == []  # it has no resource yet
        assert go_on() == "made\n"
        page = page_when(forked, shows("child's", in_use=2 * MIB))
        assert [one.name for one in page.resources] == ["child's"]
        page = page_when(process.pid, shows("parent's", in_use=0))
        assert [one.name for one in page.resources] == ["parent's"]
        assert go_on() == "0\n"
        assert pages_in_memory(forked) == []
        assert observe.LivePage.of_process(process.pid).alive


def test_surviving_forked_child_does_not_keep_its_parents_page():
    script = (
        PUBLISHES.replace('print("ready", flush=True)', "")
        + """
import os, time, warnings
warnings.simplefilter("ignore", DeprecationWarning)
child = os.fork()
if child == 0:
    time.sleep(1000)
print("ready", flush=True)
print(child, flush=True)
time.sleep(1000)
"""
    )
    with child(script, **ON) as process:
        forked = int(process.stdout.readline())
        try:
            assert observe.LivePage.of_process(process.pid).alive
            process.kill()
            process.wait(PROMPTLY)
            page_when(process.pid, lambda page: not page.alive)
        finally:
            os.kill(forked, signal.SIGKILL)


@pytest.mark.parametrize(("value", "count"), [("1", 1), ("Yes", 1), ("0", 0), ("off", 0), ("", 0)])
def test_environment_variable_enables_publishing(value, count):
    with child(PUBLISHES + "input()", GPUMEM_TOP=value) as process:
        assert len(pages_in_memory(process.pid)) == count


def test_process_without_resources_publishes_nothing():
    """So that ``gpumem top`` in the same environment does not list itself."""
    with child("print('ready', flush=True); input()", **ON) as process:
        assert pages_in_memory(process.pid) == []


def test_unknown_value_of_the_environment_variable_is_reported():
    done = python("-W", "default", "-c", "import gpumem", env={"GPUMEM_TOP": "maybe"})
    # At the program's own line, not in what Python's import runs.
    assert done.stderr.startswith("<string>:1: ConfigWarning: invalid GPUMEM_TOP='maybe'")


def test_failed_publishing_fails_no_allocation():
    script = """
    import os, warnings
    def full(*_):
        raise OSError(28, "No space left on device")
    os.posix_fallocate = full
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        arenas = [gpumem.Arena("host") for _ in range(3)]
    assert [str(one.message) for one in told] == [
        "gpumem top will not see this process: [Errno 28] No space left on device"]
    print("ready", flush=True)
    """
    with child(script, **ON) as process:
        assert pages_in_memory(process.pid) == []


def test_reader_does_not_block_writers():
    """The lock that tells a dead process is asked for, never waited for."""
    path = observe.publish(period=0.01).path
    with open(path, "rb") as file, pytest.raises(BlockingIOError):
        fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    assert own_page().alive
