"""Process exit with a debug heap: leaks and faults are reported, and nothing else."""

from pathlib import Path

import pytest
from helpers import child

TESTS = Path(__file__).resolve().parent.parent

LEAK = """
import gpumem

arena = gpumem.Arena("host", debug_heap={options}, name="leaky")

def make():
    return arena.allocate(1000)

held = [make() for _ in range(3)]
"""


def told(script, **more):
    done = child.run(script, **more)
    assert (done.returncode, done.stdout) == (0, ""), done.stderr
    return done.stderr


def test_leaks_at_exit_are_reported_by_allocation_site():
    text = told(LEAK.format(options=True))
    assert "3 blocks, 2.9 KiB of arena 'leaky' on host:0 in use at the end" in text
    assert text.count("leak:") == 1  # three of one place
    assert 'File "<string>", line 7, in make' in text


def test_blocks_kept_by_a_cycle_are_no_leaks():
    script = LEAK.format(options=True)
    assert told(script + "held.append(held)\nimport gc\ngc.disable()\ndel held\n") == ""


def test_leak_reports_can_be_disabled():
    assert told(LEAK.format(options={"leaks": False})) == ""


def test_callback_receives_leaks():
    script = """
    import gpumem

    def tell(report):
        print(report.kind, report.nbytes)

    arena = gpumem.Arena("host", debug_heap={"on_error": tell})
    held = arena.allocate(1000)
    """
    done = child.run(script)
    assert (done.returncode, done.stdout, done.stderr) == (0, "leak 1000\n", "")


def test_environment_variable_enables_the_debug_heap():
    script = """
    import gpumem
    tensor = gpumem.zeros(10, "float32", memory="host")
    """
    assert "40 B" in told(script, env={"GPUMEM_DEBUG_HEAP": "1"})
    assert told(script, env={"GPUMEM_DEBUG_HEAP": "0"}) == ""


def test_pending_fault_is_reported_at_exit():
    script = """
    import ctypes, gpumem
    arena = gpumem.Arena("host", debug_heap=True)
    buffer = arena.allocate(100)
    ctypes.memset(buffer.ptr + 100, 7, 1)
    buffer.close()
    """
    text = told(script)
    assert "overrun" in text
    assert "offset 100" in text


def test_exit_with_unfinished_work_does_not_wait():
    script = """
    import gpumem, gpumem.interop
    arena = gpumem.Arena("host", debug_heap={"leaks": False})
    stream, timeline = gpumem.Stream("host"), gpumem.interop.HostTimeline.create()
    stream.wait(timeline.point(1))
    buffer = arena.allocate(100, stream)
    buffer.close()
    other = arena.allocate(100, stream)
    """
    assert told(script) == ""


def test_forked_child_reports_its_own_blocks_only():
    script = """
    import os, warnings
    import gpumem
    warnings.simplefilter("ignore", DeprecationWarning)
    arena = gpumem.Arena("host", debug_heap=True, name="parents")
    held, freed = arena.allocate(1000), arena.allocate(2000)
    freed.close()
    pid = os.fork()
    if pid == 0:
        for call in (arena.check_heap, arena.outstanding, lambda: arena.allocate(1)):
            try:
                call()
            except gpumem.errors.ClosedError:
                continue
            os._exit(1)
        held.close()
        own = gpumem.Arena("host", debug_heap=True, name="childs")
        buffer = own.allocate(100)
        assert own.check_heap() == ()
        buffer.close()
        own.close()
        raise SystemExit(0)
    assert os.waitpid(pid, 0)[1] == 0
    assert arena.check_heap() == ()
    held.close()
    """
    assert told(script) == ""


EVERYTHING = f"""
import sys
sys.path.insert(0, {str(TESTS)!r})
import gc, os, threading, warnings
import numpy as np
import gpumem
from helpers.driver import HostDriver

driver = HostDriver()
stream = gpumem.Stream("host")
arena = gpumem.Arena("host")
pinned = gpumem.Arena("host/host_accessible")
buffer, freed = arena.allocate(1 << 20, stream), pinned.allocate(5000, stream)
view = np.from_dlpack(pinned.allocate(1000))
capsule = arena.allocate(1000).__dlpack__(max_version=(1, 0))
driver.fill(freed, 1, stream)
freed.close()
"""


@pytest.mark.parametrize(
    "body",
    [
        "",
        "del arena, pinned\ndel buffer, view",
        "del view, capsule\ndel stream\ndel pinned, arena",
        "sys.kept = [buffer, arena, view, capsule, stream, pinned]",
        "arena_of = {}\narena_of[0] = [buffer, arena, arena_of]\ngc.disable()\ndel buffer, arena",
        "gate = driver.block(stream)\ndriver.fill(buffer, 1, stream)\nbuffer.close()",
        "import atexit\natexit.register(buffer.close)\natexit.register(lambda: arena.allocate(10))",
        "threading.Thread(target=lambda: [arena.allocate(n + 1) for n in range(2000)]).start()",
    ],
)
def test_exit_in_any_order_is_quiet_without_faults(body):
    child.run_quietly(EVERYTHING + body, env={"GPUMEM_DEBUG_HEAP": "leaks=0"})


def test_exit_while_daemon_threads_allocate():
    child.run_quietly(
        EVERYTHING
        + """
def work():
    own = gpumem.Stream("host")
    while True:
        try:
            held = [arena.allocate(size, own) for size in (1, 1000, 100_000)]
            pinned.allocate(3000, own).close()
        except (gpumem.GpumemError, RuntimeError):
            return
for _ in range(3):
    threading.Thread(target=work, daemon=True).start()
for _ in range(20):
    arena.check_heap(wait=False)
""",
        env={"GPUMEM_DEBUG_HEAP": "leaks=0"},
    )


def test_forked_child_works_while_parent_threads_allocate():
    child.run_quietly(
        EVERYTHING
        + """
warnings.simplefilter("ignore", DeprecationWarning)
ends = threading.Event()
def work():
    own = gpumem.Stream("host")
    while not ends.is_set():
        held = [arena.allocate(size, own) for size in (1, 1000, 100_000)]
        del held
threads = [threading.Thread(target=work) for _ in range(2)]
for thread in threads:
    thread.start()
for _ in range(10):
    pid = os.fork()
    if pid == 0:
        buffer.close()  # the parent's: left alone
        own = gpumem.Arena("host")
        block = own.allocate(1000)
        block.close()
        assert own.check_heap() == ()
        own.close()
        os._exit(7)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 7
ends.set()
for thread in threads:
    thread.join()
assert arena.check_heap() == ()
""",
        env={"GPUMEM_DEBUG_HEAP": "leaks=0"},
    )
