"""Calls that wait for the device let other Python threads run: one of those may end the wait.

The host device never waits in most of the driver's calls; a GPU's driver does, for instance for
room in a stream's queue. So one entry of the driver table is replaced by `getchar`, which has no
need of the interpreter and returns, with 0 for success, when another Python thread has written a
byte. That thread writes once it sees a thread of the process in the read.
"""

from pathlib import Path

import pytest
from helpers import child

TESTS = Path(__file__).resolve().parent.parent
SETUP = f"""
import sys
sys.path.insert(0, {str(TESTS)!r})
import contextlib, faulthandler, threading
import numpy as np
import gpumem
from gpumem import adaptors
from helpers.driver import HostDriver
from helpers.held_call import held_call

faulthandler.dump_traceback_later(100, exit=True)
stream, other = gpumem.Stream("host"), gpumem.Stream("host")
"""

# The lines before, the driver's call that waits, and the line that makes it.
CASES = {
    "a stream's end": ("box = [gpumem.Stream('host')]", "cuStreamDestroy", "box.clear()"),
    "an event's end": ("box = [gpumem.Event('host')]", "cuEventDestroy", "box.clear()"),
    "recording an event": ("", "cuEventRecord", "stream.record()"),
    "a stream's wait": ("event = other.record()", "cuStreamWaitEvent", "stream.wait(event)"),
    "a stream": ("", "cuStreamSynchronize", "stream.synchronize()"),
    "an event": ("event = stream.record()", "cuEventSynchronize", "event.synchronize()"),
    "a device": ("", "cuEventSynchronize", "gpumem.Device('host').synchronize()"),
}
VIEW = "view = memoryview(buffer); buffer.close()"
ARRAY = "array = np.from_dlpack(buffer); del buffer"
POOL = "pool = gpumem.DriverPool('host')"
POOLED = f"{POOL}; buffer = pool.allocate(1000, stream)"
RECORDED = f"{POOLED}; buffer.record_stream(other)"
CASES |= {
    "a pool's block": (POOLED, "cuMemFreeAsync", "buffer.close()"),
    "a view of a pool's block": (f"{POOLED}; {VIEW}", "cuMemFreeAsync", "view.release()"),
    "an array over a pool's block": (f"{POOLED}; {ARRAY}", "cuMemFreeAsync", "del array"),
    "a view of a recorded block": (f"{RECORDED}; {VIEW}", "cuStreamWaitEvent", "view.release()"),
    "a pool's end": (POOL, "cuMemPoolDestroy", "del pool"),
    "closing a pool": (POOL, "cuMemPoolDestroy", "pool.close()"),
    "shrinking a pool": (POOL, "cuMemPoolTrimTo", "pool.shrink()"),
}
ADAPTORS = {
    "log": "adaptors.log(pool, lambda event: None)",
    "track": "adaptors.track(pool)",
    "limit": "adaptors.limit(pool, 1 << 20)",
    "fallback": "adaptors.fallback(pool, gpumem.Arena('host'))",
}
for name, adaptor in ADAPTORS.items():
    adapted = f"{POOL}; buffer = {adaptor}.allocate(1000, stream)"
    CASES |= {
        f"a block through {name}": (adapted, "cuMemFreeAsync", "buffer.close()"),
        f"a view through {name}": (f"{adapted}; {VIEW}", "cuMemFreeAsync", "view.release()"),
    }
EXTERNAL = """
blocks = {}
def give(nbytes):
    block = np.zeros(nbytes, "u1")
    blocks[block.ctypes.data] = block
    return block.ctypes.data
external = gpumem.ExternalAllocator(give, blocks.pop, memory="host")
gate = HostDriver().block(stream)
"""
BLOCK = f"{EXTERNAL}\nbuffer = external.allocate(1000, stream)"
LOGGED_BLOCK = f"{EXTERNAL}\nbuffer = adaptors.log(external, blocks.get).allocate(1000, stream)"
FREED_BLOCK = f"{EXTERNAL}\nexternal.allocate(1000, stream).close()"
CASES |= {
    "an external block": (BLOCK, "cuEventRecord", "buffer.close(); gate.open()"),
    "an external block through log": (LOGGED_BLOCK, "cuEventRecord", "buffer.close(); gate.open()"),
    "waiting for external blocks": (FREED_BLOCK, "cuEventQuery", "external.close(); gate.open()"),
}
ARENA = "arena = gpumem.Arena('host')"
REGIONS = "arena = gpumem.Arena('host', {'backing': 'regions'})"
PINNED = "arena = gpumem.Arena('host/host_accessible', {'backing': 'regions'})"
LOG = "logged = adaptors.log(arena, lambda event: None)"
FREED, BUSY = "arena.allocate(1000).close()", "arena.allocate(1000, stream).close()"
BUFFER = "buffer = arena.allocate(1000)"
TENSOR = "gpumem.zeros(4, 'f4', memory='host', stream=stream)"
MANAGED = "a, b = (gpumem.zeros(4, 'f4', memory='host/managed') for _ in 'ab')"
LARGE = "a, b = (gpumem.zeros(1 << 20, 'f4', memory='host/host_accessible') for _ in 'ab')"
CASES |= {
    "a region": (f"{REGIONS}; {FREED}", "cuMemFreeAsync", "arena.shrink()"),
    "closing an arena": (f"{REGIONS}; {FREED}", "cuMemFreeAsync", "arena.close()"),
    "closing a busy arena": (f"{REGIONS}; {BUSY}", "cuEventRecord", "arena.close()"),
    "dropping an arena": (f"{REGIONS}; {BUSY}", "cuStreamQuery", "del arena"),
    "a pinned region": (f"{PINNED}; {FREED}", "cuMemFreeHost", "arena.shrink()"),
    "an arena's end": (f"{REGIONS}; {FREED}; del arena", "cuMemFreeAsync", "gpumem.Arena('host')"),
    "a region of a logged arena": (
        f"{REGIONS}; {LOG}; logged.allocate(9).close()",
        "cuMemFreeAsync",
        "logged.shrink()",
    ),
    "a page": (f"{ARENA}; {FREED}", "cuMemUnmap", "arena.shrink()"),
    "suspending": (f"{ARENA}; {BUFFER}", "cuMemUnmap", "arena.sleep()"),
    "reading a tensor": (f"tensor = {TENSOR}", "cuStreamSynchronize", "tensor.numpy()"),
    "a fill": ("", "cuMemsetD8Async", TENSOR),
    "a copy": (MANAGED, "cuMemcpyAsync", "gpumem.copy(a, b, stream)"),
    "a copy by the CPU in its turn": (LARGE, "cuLaunchHostFunc", "gpumem.copy(a, b, stream)"),
}
DISABLED = f"arena = gpumem.Arena({{!r}}, {{{{'enable': False}}}}); {BUFFER}"
DISABLED_HOST = DISABLED.format("host")
CASES |= {
    f"a block of {memory} without an arena": (DISABLED.format(memory), call, "buffer.close()")
    for memory, call in {
        "host": "cuMemFreeAsync",
        "host/host_accessible": "cuMemFreeHost",
        "host/managed": "cuMemFree",
    }.items()
}
LOGGED = f"{DISABLED_HOST}; {LOG}.allocate(1000)"
NODE = f"arena = gpumem.Arena('host', {{'enable': False, 'numa_node': 0}}); {BUFFER}"
CASES |= {
    "a dropped block without an arena": (DISABLED_HOST, "cuMemFreeAsync", "del buffer"),
    "a view without an arena": (f"{DISABLED_HOST}; {VIEW}", "cuMemFreeAsync", "view.release()"),
    "an array without an arena": (f"{DISABLED_HOST}; {ARRAY}", "cuMemFreeAsync", "del array"),
    "a block without an arena through log": (LOGGED, "cuMemFreeAsync", "logged.close()"),
    "a block of a NUMA node without an arena": (NODE, "cuMemRelease", "buffer.close()"),
}
DEBUGGED = "arena = gpumem.Arena('host', debug_heap=True); buffer = arena.allocate(1000, stream)"
RECORDED_DEBUGGED = f"{DEBUGGED}; buffer.record_stream(other)"
# The driver copies them; the CPU examines the host device's own memory.
EXAMINED = """
arena = gpumem.Arena('host/managed', debug_heap=True)
buffer = arena.allocate(1000, stream)
arena.allocate(1000, stream).close()
stream.synchronize()
"""
STREAMS = """
arena, streams = gpumem.Arena('host'), [gpumem.Stream('host') for _ in range(64)]
for each in streams[:-1]: arena.allocate(1000, each).close()
"""
CASES |= {
    "a block of a debug heap": (EXAMINED, "cuStreamSynchronize", "buffer.close()"),
    "a view of a debug heap's block": (f"{DEBUGGED}; {VIEW}", "cuEventRecord", "view.release()"),
    "a recorded block of a debug heap": (RECORDED_DEBUGGED, "cuEventRecord", "buffer.close()"),
    "one stream more than an arena expects": (
        STREAMS,
        "cuEventRecord",
        "arena.allocate(1000, streams[-1])",
    ),
}
IMPORTED = """
import os
from gpumem.interop import Importer, MemoryDescriptor, MemoryHandleType
fd = os.memfd_create("pages")
os.truncate(fd, 4096)
memory = Importer.for_device("host").import_memory(
    MemoryDescriptor(fd, MemoryHandleType.MEMFD, 4096), consume=True)
"""
DROPPED_IMPORT = f"{IMPORTED}\ndel memory"
GRAPH = "from gpumem._buffer.stream import Graph; graph = Graph(stream)"
CAPTURED = f"{GRAPH}; graph.begin(); graph.end()"
LAUNCHED = f"{CAPTURED}; graph.instantiate(); graph.launch()"
CASES |= {
    "closing an import": (IMPORTED, "cuCtxSynchronize", "memory.close()"),
    "an import's end": (DROPPED_IMPORT, "cuMemHostUnregister", "gpumem.Device('host').free_bytes"),
    "a capture": (GRAPH, "cuStreamBeginCapture", "graph.begin()"),
    "a capture's end": (f"{GRAPH}; graph.begin()", "cuStreamEndCapture", "graph.end()"),
    "a graph's end": (CAPTURED, "cuGraphDestroy", "del graph"),
    "a launched graph's end": (LAUNCHED, "cuGraphExecDestroy", "del graph"),
}


@pytest.mark.parametrize("case", CASES)
def test_call_that_waits_lets_another_thread_end_the_wait(case):
    before, call, makes = CASES[case]
    # `_exit`: what the replaced call did not do would be missed at the end.
    child.run_quietly(f"""{SETUP}
{before}
with held_call({call!r}), contextlib.suppress(gpumem.errors.DriverError):
    {makes}
__import__("os")._exit(0)
""")
