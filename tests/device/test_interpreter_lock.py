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

# What is done before, the driver's call that waits, and what makes it.
CASES = {
    "a stream's end": ("box = [gpumem.Stream('host')]", "cuStreamDestroy", "box.clear()"),
    "an event's end": ("box = [gpumem.Event('host')]", "cuEventDestroy", "box.clear()"),
    "recording an event": ("", "cuEventRecord", "stream.record()"),
    "a stream's wait": ("event = other.record()", "cuStreamWaitEvent", "stream.wait(event)"),
    "a stream": ("", "cuStreamSynchronize", "stream.synchronize()"),
    "an event": ("event = stream.record()", "cuEventSynchronize", "event.synchronize()"),
    "a device": ("", "cuEventSynchronize", "gpumem.Device('host').synchronize()"),
}
POOLED = "pool = gpumem.DriverPool('host'); buffer = pool.allocate(1000, stream)"
CASES |= {
    "a pool's block": (POOLED, "cuMemFreeAsync", "buffer.close()"),
    "a view of a pool's block": (
        f"{POOLED}; view = memoryview(buffer); buffer.close()",
        "cuMemFreeAsync",
        "view.release()",
    ),
    "an array over a pool's block": (
        f"{POOLED}; array = np.from_dlpack(buffer); del buffer",
        "cuMemFreeAsync",
        "del array",
    ),
    "a view of a pool's recorded block": (
        f"{POOLED}; buffer.record_stream(other); view = memoryview(buffer); buffer.close()",
        "cuStreamWaitEvent",
        "view.release()",
    ),
    "a pool's end": ("pool = gpumem.DriverPool('host')", "cuMemPoolDestroy", "del pool"),
    "closing a pool": ("pool = gpumem.DriverPool('host')", "cuMemPoolDestroy", "pool.close()"),
    "shrinking a pool": ("pool = gpumem.DriverPool('host')", "cuMemPoolTrimTo", "pool.shrink()"),
}
ADAPTORS = {
    "log": "adaptors.log(pool, lambda event: None)",
    "track": "adaptors.track(pool)",
    "limit": "adaptors.limit(pool, 1 << 20)",
    "fallback": "adaptors.fallback(pool, gpumem.Arena('host'))",
}
for name, adaptor in ADAPTORS.items():
    adapted = f"pool = gpumem.DriverPool('host'); buffer = {adaptor}.allocate(1000, stream)"
    CASES |= {
        f"a block through {name}": (adapted, "cuMemFreeAsync", "buffer.close()"),
        f"a view through {name}": (
            f"{adapted}; view = memoryview(buffer); buffer.close()",
            "cuMemFreeAsync",
            "view.release()",
        ),
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
REGIONS = "arena = gpumem.Arena('host', {'backing': 'regions'})"
CASES |= {
    "an external block": (
        f"{EXTERNAL}\nbuffer = external.allocate(1000, stream)",
        "cuEventRecord",
        "buffer.close(); gate.open()",
    ),
    "an external block through log": (
        f"{EXTERNAL}\nbuffer = adaptors.log(external, blocks.get).allocate(1000, stream)",
        "cuEventRecord",
        "buffer.close(); gate.open()",
    ),
    "waiting for an external block": (
        f"{EXTERNAL}\nexternal.allocate(1000, stream).close()",
        "cuEventQuery",
        "external.close(); gate.open()",
    ),
    "a region": (
        f"{REGIONS}; arena.allocate(1000).close()",
        "cuMemFreeAsync",
        "arena.shrink()",
    ),
    "closing an arena": (
        f"{REGIONS}; arena.allocate(1000).close()",
        "cuMemFreeAsync",
        "arena.close()",
    ),
    "closing an arena with unfinished work": (
        f"{REGIONS}; arena.allocate(1000, stream).close()",
        "cuEventRecord",
        "arena.close()",
    ),
    "dropping an arena": (
        f"{REGIONS}; arena.allocate(1000, stream).close()",
        "cuStreamQuery",
        "del arena",
    ),
    "a pinned region": (
        "arena = gpumem.Arena('host/host_accessible', {'backing': 'regions'}); "
        "arena.allocate(1000).close()",
        "cuMemFreeHost",
        "arena.shrink()",
    ),
    "an arena's end": (
        f"{REGIONS}; arena.allocate(1000).close(); del arena",
        "cuMemFreeAsync",
        "gpumem.Arena('host')",
    ),
    "a region of a logged arena": (
        f"{REGIONS}; logged = adaptors.log(arena, lambda event: None); logged.allocate(9).close()",
        "cuMemFreeAsync",
        "logged.shrink()",
    ),
    "a page": (
        "arena = gpumem.Arena('host'); arena.allocate(1000).close()",
        "cuMemUnmap",
        "arena.shrink()",
    ),
    "suspending": (
        "arena = gpumem.Arena('host'); buffer = arena.allocate(1000)",
        "cuMemUnmap",
        "arena.sleep()",
    ),
    "reading a tensor": (
        "tensor = gpumem.zeros(4, 'f4', memory='host', stream=stream)",
        "cuStreamSynchronize",
        "tensor.numpy()",
    ),
    "a fill": ("", "cuMemsetD8Async", "gpumem.zeros(4, 'f4', memory='host', stream=stream)"),
    "a copy": (
        "a, b = (gpumem.zeros(4, 'f4', memory='host/managed') for _ in 'ab')",
        "cuMemcpyAsync",
        "gpumem.copy(a, b, stream)",
    ),
    "a copy by the CPU in its turn": (
        "a, b = (gpumem.zeros(1 << 20, 'f4', memory='host/host_accessible') for _ in range(2))",
        "cuLaunchHostFunc",
        "gpumem.copy(a, b, stream)",
    ),
}
DISABLED = "arena = gpumem.Arena({!r}, {{'enable': False}}); buffer = arena.allocate(1000)"
DISABLED_HOST = DISABLED.format("host")
CASES |= {
    f"a block of {memory} without an arena": (DISABLED.format(memory), call, "buffer.close()")
    for memory, call in {
        "host": "cuMemFreeAsync",
        "host/host_accessible": "cuMemFreeHost",
        "host/managed": "cuMemFree",
    }.items()
}
LOGGED = "adaptors.log(arena, lambda event: None).allocate(1000)"
CASES |= {
    "a dropped block without an arena": (DISABLED_HOST, "cuMemFreeAsync", "del buffer"),
    "a view of a block without an arena": (
        f"{DISABLED_HOST}; view = memoryview(buffer); buffer.close()",
        "cuMemFreeAsync",
        "view.release()",
    ),
    "an array over a block without an arena": (
        f"{DISABLED_HOST}; array = np.from_dlpack(buffer); del buffer",
        "cuMemFreeAsync",
        "del array",
    ),
    "a block without an arena through log": (
        f"{DISABLED_HOST}; logged = {LOGGED}",
        "cuMemFreeAsync",
        "logged.close()",
    ),
    "a block of a NUMA node without an arena": (
        "arena = gpumem.Arena('host', {'enable': False, 'numa_node': 0}); "
        "buffer = arena.allocate(1000)",
        "cuMemRelease",
        "buffer.close()",
    ),
}
DEBUGGED = "arena = gpumem.Arena('host', debug_heap=True); buffer = arena.allocate(1000, stream)"
# Which the driver copies, where the CPU examines the host device's own memory.
EXAMINED = """
arena = gpumem.Arena('host/managed', debug_heap=True)
buffer = arena.allocate(1000, stream)
arena.allocate(1000, stream).close()
stream.synchronize()
"""
CASES |= {
    "a block of a debug heap": (EXAMINED, "cuStreamSynchronize", "buffer.close()"),
    "a view of a debug heap's block": (
        f"{DEBUGGED}; view = memoryview(buffer); buffer.close()",
        "cuEventRecord",
        "view.release()",
    ),
    "a recorded block of a debug heap": (
        f"{DEBUGGED}; buffer.record_stream(other)",
        "cuEventRecord",
        "buffer.close()",
    ),
    "one stream more than an arena expects": (
        "arena = gpumem.Arena('host'); streams = [gpumem.Stream('host') for _ in range(64)]\n"
        "for each in streams[:-1]: arena.allocate(1000, each).close()",
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
GRAPH = """
from gpumem._buffer.stream import Graph
graph = Graph(stream)
"""
CASES |= {
    "closing an import": (IMPORTED, "cuCtxSynchronize", "memory.close()"),
    "an import's end": (
        f"{IMPORTED}\ndel memory",
        "cuMemHostUnregister",
        "gpumem.Device('host').free_bytes",
    ),
    "a capture": (GRAPH, "cuStreamBeginCapture", "graph.begin()"),
    "a capture's end": (f"{GRAPH}\ngraph.begin()", "cuStreamEndCapture", "graph.end()"),
    "a graph's end": (f"{GRAPH}\ngraph.begin(); graph.end()", "cuGraphDestroy", "del graph"),
    "a launched graph's end": (
        f"{GRAPH}\ngraph.begin(); graph.end(); graph.instantiate(); graph.launch()",
        "cuGraphExecDestroy",
        "del graph",
    ),
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
