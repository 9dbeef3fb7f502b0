"""The end of a process, and a fork, with pools and external allocators still alive."""

import itertools
import textwrap
from pathlib import Path

import pytest
from helpers import child

TESTS = Path(__file__).resolve().parent.parent
SETUP = f"""
import sys
sys.path.insert(0, {str(TESTS)!r})
import ctypes, gc, os, threading, warnings
import numpy as np
import gpumem
from helpers.dlpack import consume
from helpers.driver import HostDriver

warnings.simplefilter("ignore", DeprecationWarning)     # of a fork beside other threads
blocks = dict()
def alloc(nbytes):
    block = ctypes.create_string_buffer(nbytes)
    blocks[ctypes.addressof(block)] = block
    return ctypes.addressof(block)
def free(address):
    if forked:
        print("called in the child")
    del blocks[address]
forked = False
libc = ctypes.CDLL(None)
addresses = [ctypes.cast(f, ctypes.c_void_p).value for f in (libc.malloc, libc.free)]
stream = gpumem.Stream("host")
driver = HostDriver()
pool = gpumem.DriverPool("host", {{"shareable": True}})
python = gpumem.ExternalAllocator(alloc, free, memory="host")
native = gpumem.ExternalAllocator(*addresses, memory="host")
resources = [pool, python, native]
buffers = [r.allocate(1000, s) for r in resources for s in (None, stream)]
buffers += [r.allocate_persistent(1000) for r in resources]
views = [np.from_dlpack(r.allocate(1000)) for r in resources]
capsules = [r.allocate(1000, stream).__dlpack__(max_version=(1, 0)) for r in resources]
dropped = [consume(r.allocate(1000).__dlpack__()) for r in resources]
"""


def ends_quietly(body: str = "") -> None:
    child.run_quietly(SETUP + body)


def test_exit_with_everything_alive():
    ends_quietly()


@pytest.mark.parametrize("names", list(itertools.permutations(["resources", "buffers", "stream"])))
def test_exit_after_drops_in_any_order(names):
    ends_quietly("del pool, python, native\n" + "\n".join(f"del {name}" for name in names))


def test_exit_with_objects_kept_by_late_modules():
    ends_quietly("sys.kept = [resources, buffers, views, capsules]")


def test_exit_with_blocks_pending_on_a_blocked_stream():
    ends_quietly("""
gate = driver.block(stream)
for buffer in buffers:
    buffer.close(stream)
""")


def test_exit_with_views_dropped_without_the_gil():
    """The last of them when nobody takes the interpreter lock any more."""
    ends_quietly("""
for one in dropped:
    one.delete()
import atexit
more = [consume(r.allocate(1000).__dlpack__()) for r in resources]
atexit.register(lambda: [one.delete() for one in more])
""")


def test_exit_with_views_dropped_by_a_surviving_thread():
    ends_quietly("""
held = [consume(r.allocate(1000).__dlpack__()) for r in resources for _ in range(50)]
def work():
    for one in held:
        one.delete()
threading.Thread(target=work, daemon=True).start()
""")


def test_earlier_exit_handlers_find_resources_closed():
    child.run_quietly(
        """
import atexit
def last():
    for resource in resources:
        try:
            resource.allocate(10)
        except gpumem.errors.ClosedError:
            pass
        else:
            print("allocated after the end")
    for buffer in buffers:
        buffer.close()
    for resource in resources:
        resource.close()
atexit.register(last)
"""
        + SETUP
    )


def test_forked_child_is_refused_and_leaves_its_parent_alone():
    ends_quietly(
        "pid = os.fork()\nif pid == 0:\n"
        + textwrap.indent(
            """
forked = True
for resource in resources:
    for call in (lambda: resource.allocate(1), lambda: resource.allocate(0), resource.shrink,
                 lambda: resource.allocate_persistent(1), resource.stats,
                 lambda: resource.reset_stream(1)):
        try:
            call()
        except gpumem.errors.ClosedError as error:
            assert "parent" in str(error), error
        else:
            print("allowed")
del views, capsules
for buffer in buffers:
    buffer.close()
for one in dropped:
    one.delete()
for resource in resources:
    resource.close()
own = gpumem.DriverPool("host")
own.allocate(1000).close()
own.close()
mine = gpumem.ExternalAllocator(*addresses, memory="host")
consume(mine.allocate(10).__dlpack__()).delete()
mine.close()
del resources, resource, pool, python, native
gc.collect()
gpumem.Device("host").free_bytes
sys.exit(0)
""",
            "    ",
        )
        + """
assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
driver.fill(buffers[0], 7, stream)
stream.synchronize()
assert set(memoryview(buffers[0])) == {7}
assert len(blocks) == 6, len(blocks)
for buffer in buffers:
    buffer.close()
del views, capsules
for one in dropped:
    one.delete()
for resource in resources:
    resource.stats()
    resource.close()
assert not blocks
"""
    )
