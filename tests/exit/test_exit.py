"""The end of a process with everything still alive: it says nothing and returns 0."""

import itertools
import textwrap
from pathlib import Path

import pytest
from helpers import child

TESTS = Path(__file__).resolve().parent.parent
SETUP = f"""
import sys
sys.path.insert(0, {str(TESTS)!r})
import gc, threading
import numpy as np
import gpumem
from helpers.driver import HostDriver

arena = gpumem.Arena("host")
stream = gpumem.Stream("host")
event = stream.record()
buffer = arena.allocate(1 << 20, stream)
view = np.frombuffer(buffer, np.uint8)
tensor = np.from_dlpack(arena.allocate(1000))
capsule = arena.allocate(1000).__dlpack__(max_version=(1, 0))
weights = arena.allocate_persistent(1 << 20)
driver = HostDriver()
"""
# From Python 3.12 a fork beside other threads warns, whatever the threads are.
MAY_FORK = """
import os, warnings
warnings.simplefilter("ignore", DeprecationWarning)
"""


def ends_quietly(body: str = "") -> None:
    child.run_quietly(SETUP + body)


def test_exit_with_everything_alive():
    ends_quietly()


@pytest.mark.parametrize("names", list(itertools.permutations(["arena", "buffer", "stream"])))
def test_exit_after_drops_in_any_order(names):
    ends_quietly("\n".join(f"del {name}" for name in names))


def test_exit_with_objects_in_a_cycle():
    ends_quietly("""
class Holder: pass
holder = Holder()
holder.all = [arena, buffer, stream, event, view, tensor, capsule, weights, holder]
gc.disable()
del arena, buffer, stream, event, view, tensor, capsule, weights, holder
""")


def test_exit_with_objects_kept_by_late_modules():
    ends_quietly("""
sys.kept = [arena, buffer, stream, event, view, tensor, capsule, weights]
import builtins
builtins.kept = [gpumem.Arena("host").allocate(10), gpumem.Stream("host")]
""")


def test_exit_with_a_recording_in_a_cycle():
    """It ends after NumPy's modules are gone."""
    ends_quietly("""
from gpumem import observe
class Holder: pass
holder = Holder()
holder.all = [holder, observe.record(arena, capacity=64)]
sys.modules["holder"] = holder
arena.allocate(100)
""")


def test_exit_with_queued_work():
    ends_quietly("""
for _ in range(100):
    driver.fill(buffer, 1, stream)
""")


def test_exit_with_a_stream_blocked_forever():
    ends_quietly("""
gate = driver.block(stream)
driver.fill(buffer, 1, stream)
""")


def test_exit_with_a_lagging_stream():
    ends_quietly("""
from gpumem._testing import host_device
host_device.set_lag(10**15)
driver.fill(buffer, 1, stream)
other = gpumem.Stream("host")
other.wait(stream.record())
arena.allocate(1 << 22, other)
""")


def test_calls_in_an_exit_handler_work():
    ends_quietly("""
import atexit
def last():
    again = arena.allocate(1000)
    stream.synchronize()
    view[:] = 1
    again.close()
atexit.register(last)
""")


def test_exit_handler_that_runs_after_gpumems_is_refused():
    """It runs after gpumem's own: calls are refused, frees and closes are harmless."""
    child.run_quietly(
        """
import atexit
def last():
    try:
        arena.allocate(1000)
    except gpumem.errors.ClosedError:
        pass
    else:
        print("allocated after the end")
    view[:] = 1
    buffer.close()
    arena.close()
atexit.register(last)
"""
        + SETUP
    )


def test_exit_while_threads_allocate():
    ends_quietly("""
def work():
    own = gpumem.Stream("host")
    while True:
        try:
            arena.allocate(5000, own).close()
            gpumem.Arena("host").allocate(100)
        except (gpumem.GpumemError, RuntimeError):
            return
threads = [threading.Thread(target=work, daemon=True) for _ in range(4)]
for thread in threads:
    thread.start()
""")


def test_exit_while_a_thread_waits_for_a_blocked_stream():
    ends_quietly("""
gate = driver.block(stream)
waiting = threading.Event()
def wait():
    waiting.set()
    try:
        stream.synchronize()
    except gpumem.GpumemError:
        pass
threading.Thread(target=wait, daemon=True).start()
waiting.wait()
""")


def test_uncaught_error_leaves_only_its_own_message_and_exit_code():
    done = child.run(SETUP + "raise SystemExit(3)")
    assert (done.returncode, done.stdout, done.stderr) == (3, "", "")
    done = child.run(SETUP + "raise KeyError('mine')")
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.rstrip().endswith("KeyError: 'mine'")
    assert done.stderr.count("Traceback") == 1


@pytest.mark.parametrize(
    "make_view",
    [
        "memoryview(buffer).release()",
        "np.frombuffer(buffer, np.uint8)",
        "np.from_dlpack(arena.allocate(100))",
        "gpumem.zeros(100, 'int8', resource=arena).numpy()",
    ],
)
def test_exit_while_daemon_threads_make_views(make_view):
    ends_quietly(f"""
made = threading.Barrier(4)
def work():
    error = gpumem.errors.ClosedError
    waits = True
    while True:
        try:
            {make_view}
        except error:
            pass        # gpumem has ended
        if waits:
            made.wait()
            waits = False
for _ in range(3):
    threading.Thread(target=work, daemon=True).start()
made.wait()
""")


# ---- fork ----------------------------------------------------------------------------------------


def fork(child_body: str, parent_body: str = "") -> None:
    """Run one body in a fork's child and another in the parent after it; both must end well."""
    ends_quietly(
        f"{MAY_FORK}"
        "pid = os.fork()\n"
        "if pid == 0:\n"
        f"{textwrap.indent(textwrap.dedent(child_body), '    ')}\n"
        "    sys.exit(0)\n"
        "assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0\n"
        "driver.fill(buffer, 7, stream)\n"
        "stream.synchronize()\n"
        "assert (view == 7).all()\n"
        "arena.check_invariants()\n"
        "arena.allocate(5000, stream).close()\n"
        f"{textwrap.dedent(parent_body)}\n"
    )


def test_idle_forked_child_leaves_its_parent_alone():
    fork("pass")


def test_forked_child_cannot_use_its_parents_arena():
    fork("""
def refused(call):
    try:
        call()
    except gpumem.errors.ClosedError as error:
        assert "parent" in str(error), error
    else:
        raise AssertionError("allowed")
refused(lambda: arena.allocate(100))
refused(lambda: arena.allocate(0))
refused(lambda: arena.allocate(100, stream))
refused(lambda: arena.allocate(1 << 24))
refused(lambda: arena.allocate_persistent(100))
refused(lambda: arena.shrink())
refused(lambda: arena.stats())
refused(lambda: arena.blocks())
refused(lambda: arena.check_invariants())
refused(lambda: arena.reset_stream(stream))
refused(lambda: stream.synchronize())
refused(lambda: stream.query())
refused(lambda: stream.record())
refused(lambda: event.query())
""")


def test_forked_child_may_close_its_parents_arena_and_graph_pools():
    ends_quietly(f"""{MAY_FORK}
with arena.capture(stream) as pool:
    captured = arena.allocate(100, stream)
pid = os.fork()
if pid == 0:
    pool.close()
    arena.close()
    assert arena.closed and pool.closed
    sys.exit(0)
assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
assert not arena.closed
""")


def test_forked_child_gets_no_view_of_its_parents_pinned_memory():
    """The pages are not inherited: an access would end the child."""
    ends_quietly(f"""{MAY_FORK}
pinned = gpumem.Arena("host/host_accessible").allocate(4096)
memoryview(pinned)[0] = 1
pid = os.fork()
if pid == 0:
    for call in (memoryview, np.from_dlpack, bytes):
        try:
            call(pinned)
        except gpumem.errors.ClosedError as error:
            assert "parent" in str(error), error
        else:
            raise AssertionError("allowed")
    sys.exit(0)
assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
assert memoryview(pinned)[0] == 1
""")


@pytest.mark.parametrize("backing", ["virtual", "regions"])
def test_forked_child_writes_inherited_views_without_changing_the_parents(backing):
    child.run_quietly(f"""{MAY_FORK}
import sys
import numpy as np
import gpumem
gpumem.device.set_host_device_count(3)
arenas = [gpumem.Arena(f"host:{{i}}", dict(backing={backing!r})) for i in range(3)]
buffers = [each.allocate(3 << 20) for each in arenas for _ in range(3)]
arrays = [np.frombuffer(each, np.uint8) for each in buffers]
for number, array in enumerate(arrays):
    array[:] = number
pid = os.fork()
if pid == 0:
    for number, (buffer, array) in enumerate(zip(buffers, arrays)):
        assert (array == number).all()
        array[1:] = 100 + number
        memoryview(buffer)[0] = 50
        assert np.from_dlpack(buffer)[:2].tolist() == [50, 100 + number]
    own = gpumem.Arena("host:1").allocate(1 << 20)
    memoryview(own)[:] = bytes(1 << 20)
    del buffers, arrays, array, buffer, arenas
    sys.exit(0)
assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
assert all((array == number).all() for number, array in enumerate(arrays))
""")


def test_forked_child_shares_memory_that_can_be_exported():
    ends_quietly(f"""{MAY_FORK}
shared = np.frombuffer(arena.allocate(4096, shareable=True), np.uint8)
pid = os.fork()
if pid == 0:
    shared[:] = 5
    sys.exit(0)
assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
assert (shared == 5).all()
""")


def test_forked_worker_reads_and_writes_an_inherited_array():
    ends_quietly(f"""{MAY_FORK}
import multiprocessing
view[:] = 3
def double(start):
    view[start:start + 10] *= 2
    return int(view[start:start + 10].sum())
with multiprocessing.get_context("fork").Pool(2) as pool:
    assert pool.map(double, range(0, 1000, 100)) == [60] * 10
assert (view == 3).all()
""")


def test_fork_makes_a_run_of_pages_private_at_once():
    """The child has no more mappings than its parent, however many pages there are."""
    ends_quietly(f"""{MAY_FORK}
def mappings():
    with open("/proc/self/maps") as file:
        return sum(1 for _ in file)
many = gpumem.Arena("host")
before = mappings()
array = np.frombuffer(many.allocate(1 << 30), np.uint8)
parents = mappings() - before
array[::2 << 20] = 1
pid = os.fork()
if pid == 0:
    assert mappings() - before <= parents + 8, (mappings() - before, parents)
    array[::2 << 20] = 2
    assert mappings() - before <= parents + 8, (mappings() - before, parents)
    sys.exit(0)
assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
assert set(array[::2 << 20].tolist()) == {{1}}
""")


def test_forked_child_makes_its_own_arena():
    fork("""
own = gpumem.Arena("host")
own_stream = gpumem.Stream("host")
block = own.allocate(5000, own_stream)
HostDriver().fill(block, 3, own_stream)
own_stream.synchronize()
assert set(memoryview(block)) == {3}
block.close()
own.check_invariants()
own.close()
""")


def test_drops_in_a_forked_child_do_not_reach_its_parent():
    fork("""
del view, tensor, capsule
weights.close()
buffer.close()
own = gpumem.Arena("host")
del arena, buffer, weights, stream, event
gc.collect()
own.allocate(1 << 22).close()
own.shrink()
""")


def test_forked_child_may_close_inherited_objects():
    fork("""
arena.close()
assert arena.closed
gpumem.Device("host").free_bytes
""")


def test_parent_continues_after_a_fork():
    fork("del arena, buffer, view", """
tensor[:] = 5
del tensor, capsule
weights.close()
assert arena.shrink().released_bytes > 0
assert arena.stats().num_frees > 0
""")  # fmt: skip


def test_fork_while_threads_allocate():
    ends_quietly(
        MAY_FORK
        + """
stop = threading.Event()
def work():
    own = gpumem.Stream("host")
    while not stop.is_set():
        arena.allocate(5000, own).close()
        gpumem.Arena("host").allocate(100)
threads = [threading.Thread(target=work) for _ in range(2)]
for thread in threads:
    thread.start()
for _ in range(20):
    pid = os.fork()
    if pid == 0:
        own = gpumem.Arena("host")
        own.allocate(1000).close()
        own.close()
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
stop.set()
for thread in threads:
    thread.join()
arena.check_invariants()
"""
    )


def test_grandchild_makes_its_own_arena():
    fork("""
own = gpumem.Arena("host")
kept = own.allocate(1000)
pid = os.fork()
if pid == 0:
    try:
        own.allocate(1)
    except gpumem.errors.ClosedError:
        pass
    else:
        os._exit(1)
    gpumem.Arena("host").allocate(1000).close()
    os._exit(0)
assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
kept.close()
own.close()
""")


def test_multiprocessing_by_fork_and_spawn():
    ends_quietly(
        MAY_FORK
        + """
import multiprocessing
import operator
for method in ("fork", "spawn"):
    with multiprocessing.get_context(method).Pool(2) as pool:
        assert pool.map(operator.neg, range(4)) == [0, -1, -2, -3]
"""
    )


# ---- start ---------------------------------------------------------------------------------------


def test_process_without_a_driver_uses_the_host():
    """The loader of the CUDA driver finds nothing: cuda-python cannot be imported at all."""
    child.run_quietly("""
import sys
sys.modules["cuda"] = None
sys.modules["cuda.bindings"] = None
import gpumem
status = gpumem.driver_status()
assert not status.available
assert "cuda-python is not installed" in status.reason, status.reason
assert gpumem.default_device() == gpumem.Device("host:0")
assert "cuda-python" in gpumem.Device("cuda").capabilities["allocate"].reason
with gpumem.Arena("host") as arena:
    arena.allocate(1000).close()
try:
    gpumem.Arena("cuda:0")
except ValueError as error:
    assert "cuda-python is not installed" in str(error)
""")


def test_failed_driver_load_is_quoted_as_the_reason():
    child.run_quietly("""
import sys, types
bindings = types.ModuleType("cuda.bindings")
driver = types.ModuleType("cuda.bindings.driver")
def cuGetProcAddress(*_):
    raise RuntimeError("libcuda.so.1:\\nnot a library")
driver.cuGetProcAddress = cuGetProcAddress
bindings.driver = driver
sys.modules.update({"cuda": types.ModuleType("cuda"), "cuda.bindings": bindings,
                    "cuda.bindings.driver": driver})
import gpumem
assert gpumem.driver_status().reason == "RuntimeError: libcuda.so.1: not a library"
assert [device.type for device in gpumem.devices()] == ["host"]
""")


def test_host_device_count_can_be_set_before_first_use():
    child.run_quietly("""
import gpumem
gpumem.device.set_host_device_count(4)
assert [str(d) for d in gpumem.devices() if d.type == "host"] == [f"host:{i}" for i in range(4)]
arenas = [gpumem.Arena(f"host:{i}") for i in range(4)]
buffers = [arena.allocate(1000) for arena in arenas]
assert len({buffer.ptr for buffer in buffers}) == 4
stream = gpumem.Stream("host:1")
arenas[1].allocate(10, stream)
try:
    arenas[2].allocate(10, stream)
except ValueError as error:
    assert "is not a stream of host:2" in str(error), error
else:
    raise AssertionError("a stream of another device was taken")
gpumem.Stream("host:2").wait(stream.record())      # an event of another device orders, too
""")
