"""What processes print at their end, with imports, timelines, waiting threads, lost devices."""

from __future__ import annotations

import signal

import pytest
from helpers import child

SETUP = """
import atexit, gc, os, signal, sys, threading
import numpy as np
import gpumem
from gpumem import interop
from gpumem._testing import host_device
from gpumem.errors import GpumemError
from gpumem.interop import HostTimeline, Importer, MemoryDescriptor, MemoryHandleType

arena, stream, other = gpumem.Arena("host"), gpumem.Stream("host"), gpumem.Stream("host")
timeline = HostTimeline.create()
fd = os.memfd_create("memory")
os.truncate(fd, 1 << 16)
memory = Importer.for_device("host").import_memory(
    MemoryDescriptor(fd, MemoryHandleType.MEMFD, 1 << 16))
buffer = arena.allocate(1 << 16, stream)
tensor, imported = gpumem.from_dlpack(buffer), memory.tensor(1 << 10, "u1")
"""
STATES = {
    "idle": "",
    "blocked": """
timeline.enqueue_wait(stream, 1)
timeline.enqueue_signal(stream, 2)
timeline.enqueue_wait(other, 2)
""",
}
STATES["lost"] = STATES["blocked"] + "host_device.lose_device(0, 700)\n"

OBJECTS = "arena, stream, other, timeline, memory, buffer, tensor, imported"


def daemon(body: str) -> str:
    """Start a thread that does it for ever, and wait until it has begun."""
    lines = "\n        ".join(body.splitlines())
    return f"""
begun = threading.Event()
def work():
    begun.set()
    while True:
        {lines}
threading.Thread(target=work, daemon=True).start()
begun.wait()
"""


@pytest.mark.parametrize("state", STATES)
@pytest.mark.parametrize(
    "body",
    [
        "",
        f"del {OBJECTS}",
        f"sys.kept = [{OBJECTS}]; del {OBJECTS}",
        f"kept = [{OBJECTS}]; kept.append(kept); gc.disable(); del kept, {OBJECTS}",
        "sys.stderr.close(); sys.stderr = None",
        "thread = threading.Thread(target=lambda: None); thread.start(); thread.join()",
        daemon("timeline.wait(99)"),
    ],
    ids=["alive", "dropped", "kept by sys", "cycle", "no stderr", "thread", "daemon waits"],
)
def test_end_of_a_process_with_imports_and_timelines_is_quiet(body, state):
    child.run_quietly(SETUP + STATES[state] + body)


@pytest.mark.parametrize("state", ["idle", "blocked"])
@pytest.mark.parametrize(
    "work",
    [
        "stream.synchronize()",
        "gpumem.Device('host').synchronize()",
        "gpumem.Stream('host').record().synchronize()",
        "arena.allocate(5000, stream).close()",
        "memoryview(arena.allocate(10))",
        "gpumem.copy(np.empty(1 << 16, 'u1'), gpumem.zeros(1 << 16, 'u1', memory='host'))",
        "gpumem.Arena('host').allocate(1 << 20)",
        "with HostTimeline.create() as own: own.enqueue_signal(gpumem.Stream('host'), 1)",
    ],
)
def test_daemon_thread_that_the_end_cuts_short_reports_nothing(work, state):
    """Its call raises ClosedError, which a daemon thread has no reason to catch."""
    child.run_quietly(SETUP + STATES[state] + daemon(work))


def test_error_of_a_daemon_threads_own_is_reported_at_the_end():
    done = child.run(
        SETUP
        + """
def last():
    thread = threading.Thread(target=lambda: [][1])
    thread.start()
    thread.join()
atexit.register(last)
"""
    )
    assert done.returncode == 0
    assert "IndexError" in done.stderr


ENDS = {
    "error": ("raise KeyError('mine')", 1, "KeyError: 'mine'"),
    "exit status": ("sys.exit(3)", 3, ""),
    "Ctrl-C in a wait": (
        """
signal.signal(signal.SIGINT, signal.default_int_handler)
threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGINT)).start()
HostTimeline.create().wait(1)
""",
        -signal.SIGINT,
        "KeyboardInterrupt",
    ),
    "error beside a daemon thread": (daemon("timeline.wait(99)") + "[][1]", 1, "IndexError: list"),
}


@pytest.mark.parametrize("state", STATES)
@pytest.mark.parametrize("end", ENDS)
def test_end_by_an_error_leaves_that_error_alone(end, state):
    body, code, last = ENDS[end]
    done = child.run(SETUP + STATES[state] + body)
    lines = done.stderr.splitlines()
    assert (done.returncode, done.stdout) == (code, "")
    assert (lines[-1] if lines else "").startswith(last)
    assert done.stderr.count("Traceback") == (1 if last else 0), done.stderr
    assert "excepthook" not in done.stderr
    assert "ignored" not in done.stderr


def test_driver_error_of_a_lost_device_is_all_that_its_process_prints():
    done = child.run(SETUP + STATES["lost"] + "stream.synchronize()")
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].startswith(
        "gpumem.errors.DriverError: cuStreamSynchronize failed with CUDA_ERROR_ILLEGAL_ADDRESS"
    )
    assert done.stderr.count("Traceback") == 1
