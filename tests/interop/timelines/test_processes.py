"""Several processes on one timeline: order, death, fork, pickling, the end."""

import multiprocessing
import shutil
import signal
import subprocess
import sys
import time

import pytest
from helpers import child
from helpers.pingpong import compile_players, play
from helpers.spawned import answer, answer_through
from helpers.waiting import wait_for_waiters, wait_until

from gpumem.errors import TimelineLostError, TimelineTimeout
from gpumem.interop import HostTimeline

OTHER = """
import sys, time
from gpumem.interop import HostTimeline
timeline = HostTimeline.from_fd(int(sys.argv[1]))
"""


@pytest.fixture(scope="module")
def players(tmp_path_factory):
    if shutil.which("gcc") is None:
        pytest.skip("no C compiler: gcc not found")
    return compile_players(tmp_path_factory.mktemp("players"))


@pytest.fixture
def start(timeline):
    """Start another process that has the timeline; it is gone at the end."""
    started = []

    def start(code: str, *before: str) -> subprocess.Popen:
        with timeline.export() as handle:
            fd = handle.fileno()
            other = subprocess.Popen(
                [*before, sys.executable, "-W", "error", "-c", OTHER + code, str(fd)],
                pass_fds=[fd],
                stdin=subprocess.PIPE,
            )
        started.append(other)
        return other

    yield start
    for other in started:
        other.kill()
        other.communicate()


@pytest.fixture
def namespace():
    """What starts a process with PIDs of its own; it ends with the process that is killed."""
    command = ("unshare", "--pid", "--fork", "--kill-child")
    try:
        tried = subprocess.run([*command, "true"], capture_output=True, text=True, check=False)
    except FileNotFoundError:
        pytest.skip("no PID namespaces: unshare not found")
    if tried.returncode != 0:
        pytest.skip(f"no PID namespaces: {tried.stderr.strip()}")
    return command


# ---- no wake-up is lost or early ----


@pytest.mark.parametrize(
    ("mode", "rounds"), [("brief", 300_000), ("mixed", 100_000), ("park", 60_000)]
)
def test_wake_ups_between_processes_are_neither_lost_nor_early(players, mode, rounds):
    play(players, mode, rounds)


@pytest.mark.parametrize("mode", ["park", "mixed"])
def test_no_wake_up_is_lost_under_jitter_between_the_steps(tmp_path, players, mode):
    """With delays between the steps: one step out of order hangs within some thousand turns."""
    play(compile_players(tmp_path, "-DJITTER"), mode, 20_000)


def test_two_interpreters_take_turns(timeline, start):
    other = start("""
for turn in range(2000):
    timeline.wait(2 * turn + 1, timeout=60)
    timeline.signal(2 * turn + 2)
""")
    for turn in range(2000):
        timeline.signal(2 * turn + 1)
        timeline.wait(2 * turn + 2, timeout=60)
    assert other.wait(60) == 0


def test_sleeping_process_is_woken(timeline, start):
    other = start("""
timeline.signal(1)
timeline.wait(2, timeout=60)
timeline.signal(3)
""")
    timeline.wait(1, timeout=60)
    wait_for_waiters(timeline)
    timeline.signal(2)
    timeline.wait(3, timeout=60)
    assert other.wait(60) == 0


# ---- a peer that dies ----


def test_wait_for_a_killed_process_raises(timeline, start):
    other = start("timeline.signal(1)\ntime.sleep(600)\n")
    timeline.wait(1, timeout=60)
    other.send_signal(signal.SIGKILL)
    with pytest.raises(TimelineLostError, match=f"process {other.pid} died"):
        timeline.wait(2, timeout=60)
    timeline.wait(1)  # what was reached stays so
    other.wait()
    with pytest.raises(TimelineLostError, match="died"):
        timeline.wait(2, timeout=0)
    again = start("timeline.signal(2)\n")  # somebody else goes on in its place
    while True:
        try:
            timeline.wait(2, timeout=60)
            break
        except TimelineLostError:
            assert again.poll() in (None, 0)
            time.sleep(0.01)


def test_wait_continues_while_another_process_lives(timeline, start):
    dead = start("timeline.signal(1)\ntime.sleep(600)\n")
    timeline.wait(1, timeout=60)
    living = start("timeline.signal(2)\ntime.sleep(600)\n")
    timeline.wait(2, timeout=60)
    dead.kill()
    dead.wait()
    with pytest.raises(TimelineTimeout):
        timeline.wait(3, timeout=0.3)
    living.kill()
    living.wait()
    with pytest.raises(TimelineLostError):
        timeline.wait(3, timeout=60)


WAITS_FOR_A_DEATH = """
from gpumem.errors import TimelineLostError
timeline.signal(1)
try:
    timeline.wait(9, timeout=120)
except TimelineLostError:
    sys.exit(7)
"""


def test_death_in_another_pid_namespace_is_noticed(timeline, start, namespace):
    other = start("timeline.signal(1)\ntime.sleep(600)\n", *namespace)
    timeline.wait(1, timeout=60)
    with pytest.raises(TimelineTimeout):  # it lives
        timeline.wait(2, timeout=0.3)
    other.kill()
    with pytest.raises(TimelineLostError, match="process 1 died"):
        timeline.wait(2, timeout=60)


@pytest.mark.parametrize("is_apart", [False, True], ids=["outside", "in another one"])
def test_death_outside_of_the_pid_namespace_is_noticed(timeline, start, namespace, is_apart):
    waiting = start(WAITS_FOR_A_DEATH, *namespace)
    timeline.wait(1, timeout=60)
    # In a namespace of its own it has the id that the waiting process has.
    dying = start("timeline.signal(2)\ntime.sleep(600)\n", *(namespace if is_apart else ()))
    timeline.wait(2, timeout=60)
    timeline.close()
    dying.kill()
    assert waiting.wait(120) == 7


def test_death_is_noticed_while_a_child_of_the_dead_lives(timeline, start):
    """Neither a forked child nor an exported handle of the dead process stands for it."""
    other = start("""
import os, subprocess, warnings
warnings.simplefilter("ignore", DeprecationWarning)     # of forks beside threads
if os.fork() == 0:
    sys.stdin.read()            # until the test ends it
    os._exit(0)
handle = timeline.export()
subprocess.Popen([sys.executable, "-c", "import sys; sys.stdin.read()"],
                 pass_fds=[handle.fileno()])
timeline.signal(1)
time.sleep(600)
""")
    timeline.wait(1, timeout=60)
    other.send_signal(signal.SIGKILL)
    with pytest.raises(TimelineLostError, match=f"process {other.pid} died"):
        timeline.wait(2, timeout=60)


def test_signal_behind_a_store_of_a_killed_process_raises_once(timeline, start):
    other = start("""
import gpumem
from gpumem.interop.timelines._timeline import _rehearse_memory_operations
_rehearse_memory_operations(True)
gate, stream = HostTimeline.create(), gpumem.Stream("host")
gate.enqueue_wait(stream, 1)
timeline.enqueue_signal(stream, 4)
time.sleep(600)
""")
    wait_until(lambda: timeline.pending == 4)
    other.kill()
    other.wait()
    with pytest.raises(TimelineLostError, match=f"process {other.pid} died"):
        timeline.signal(5)
    assert timeline.poisoned
    timeline.signal(5)
    timeline.wait(5, timeout=0)


def test_process_that_closed_the_timeline_is_no_peer(timeline, start):
    other = start("timeline.signal(1)\ntimeline.close()\n")
    timeline.wait(1, timeout=60)
    assert other.wait(60) == 0
    with pytest.raises(TimelineTimeout):
        timeline.wait(2, timeout=0.3)


def test_processes_beyond_the_peer_table_raise_no_false_alarm(timeline):
    others = [HostTimeline.from_fd(timeline.export()) for _ in range(130)]
    with pytest.raises(TimelineTimeout):
        timeline.wait(1, timeout=0.15)
    for other in others:
        other.close()


def test_poison_reaches_another_process(timeline, start):
    other = start("""
from gpumem.errors import TimelineLostError
timeline.signal(1)
try:
    timeline.wait(2, timeout=60)
except TimelineLostError:
    sys.exit(7)
""")
    timeline.wait(1, timeout=60)
    timeline.poison()
    assert other.wait(60) == 7


# ---- pickling ----


@pytest.mark.parametrize("method", ["spawn", "fork"])
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of forks beside threads
def test_timeline_is_passed_as_a_process_argument(timeline, method):
    context = multiprocessing.get_context(method)
    other = context.Process(target=answer, args=(timeline,))
    other.start()
    timeline.signal(1)
    timeline.wait(2, timeout=60)
    other.join()
    assert other.exitcode == 0


def test_timeline_is_passed_through_a_pipe(timeline):
    context = multiprocessing.get_context("spawn")
    mine, yours = context.Pipe()
    other = context.Process(target=answer_through, args=(yours,))
    other.start()
    mine.send(timeline)
    timeline.signal(1)
    timeline.wait(2, timeout=60)
    other.join()
    assert other.exitcode == 0
    mine.close()
    yours.close()


# ---- fork and the end ----

FORK = """
import os, sys, warnings
warnings.simplefilter("ignore", DeprecationWarning)
import gpumem
from gpumem.errors import ClosedError, TimelineLostError
from gpumem.interop import HostTimeline, SemaphoreDescriptor, SemaphoreType
from gpumem.interop.timelines.semaphores import import_semaphore
from gpumem._testing import timelines
timelines.rehearse_memory_operations(len(sys.argv) > 1)
timeline = HostTimeline.create(device="host")
stream = gpumem.Stream("host")
timeline.enqueue_signal(stream, 1)
timeline.wait(1)
imported = import_semaphore(
    "host", SemaphoreDescriptor(timeline.export(), SemaphoreType.TIMELINE_OPAQUE_FD), consume=True)
"""


@pytest.mark.parametrize("way", [(), ("memory operations",)])
def test_forked_child_keeps_host_timelines_and_loses_imports(way):
    child.run_quietly(
        FORK
        + """
timeline.enqueue_wait(stream, 5)        # the parent's, also when the child closes
pid = os.fork()
if pid == 0:
    for call in (imported.value, lambda: imported.enqueue_wait(stream, 9), imported.export):
        try:
            call()
        except ClosedError:
            pass
        else:
            os._exit(3)
    imported.close()
    timeline.wait(2, timeout=60)
    try:
        timeline.enqueue_wait(stream, 9)
    except ClosedError:
        pass
    else:
        os._exit(4)
    timeline.signal(3)
    own = gpumem.Stream("host")
    timeline.enqueue_signal(own, 4)
    timeline.wait(4, timeout=60)
    timeline.close(timeout=60)
    os._exit(0)
timeline.signal(2)
assert os.waitpid(pid, 0)[1] == 0
assert timeline.value() == 4 and imported.value() == 4
timeline.signal(5)
stream.synchronize()
""",
        *way,
    )


def test_death_of_a_forked_child_is_noticed():
    child.run_quietly(
        FORK
        + """
pid = os.fork()
if pid == 0:
    timeline.signal(2)
    os._exit(1)
try:
    timeline.wait(9, timeout=60)
except TimelineLostError:
    pass
else:
    sys.exit(1)
os.waitpid(pid, 0)
imported.close(timeout=60)
"""
    )


@pytest.mark.parametrize("way", [(), ("memory operations",)])
@pytest.mark.parametrize(
    "body",
    [
        "",
        "timeline.enqueue_wait(stream, 9)",
        "timeline.enqueue_wait(stream, 9); del timeline",
        "del stream, timeline, imported",
        "sys.kept = [timeline, stream, imported]; del timeline, stream, imported",
        "import threading; threading.Thread(target=timeline.wait, args=(9,), daemon=True).start()",
        "holder = [timeline, stream, imported]; holder.append(holder); "
        "del timeline, stream, imported, holder",
    ],
)
def test_exit_is_quiet_whatever_is_left(body, way):
    child.run_quietly(FORK + body, *way)
