"""Cycles of a resource or a stream with its own buffers: the collector leaves them to `close`."""

from __future__ import annotations

import ctypes
import gc
import weakref
from pathlib import Path

import numpy as np
import pytest
from helpers import child
from helpers.resources import Plain

import gpumem
from gpumem.adaptors import log

TESTS = Path(__file__).resolve().parent.parent


class Foreign:
    """A stream object of another library, which ends its stream with itself."""

    def __init__(self):
        self.inner = gpumem.Stream("host")

    def __cuda_stream__(self):
        return 0, self.inner.ptr


class Heap:
    """The memory of a user's allocator; its blocks are freed by calls."""

    def __init__(self):
        self.blocks = {}

    def alloc(self, nbytes):
        block = ctypes.create_string_buffer(nbytes + 256)
        address = -(-ctypes.addressof(block) // 256) * 256
        self.blocks[address] = block
        return address

    def free(self, address):
        del self.blocks[address]


def cycle_of(kind):
    """Return a resource or a stream, and its buffer, which it keeps."""
    if kind == "user's resource":
        keeper = Plain()
        buffer = keeper.allocate(1000)
    elif kind == "adaptor":
        keeper = log(gpumem.Arena("host"), lambda record: None)
        buffer = keeper.allocate(1000)
    elif kind == "callbacks":
        keeper = Heap()
        allocator = gpumem.ExternalAllocator(keeper.alloc, keeper.free, memory="host")
        buffer = allocator.allocate(1000)
    else:
        keeper = Foreign()
        buffer = gpumem.Arena("host").allocate(1000, keeper)
    keeper.kept = buffer
    return keeper, buffer


KINDS = ["user's resource", "adaptor", "callbacks", "stream"]


@pytest.mark.parametrize("kind", KINDS)
def test_cycle_ends_once_its_buffer_is_closed(kind):
    keeper, buffer = cycle_of(kind)
    gone = weakref.ref(keeper)
    resource = weakref.ref(buffer.resource)
    del keeper
    gc.collect()
    assert gone() is not None
    assert not buffer.closed
    buffer.close()
    del buffer
    gone().kept = None
    gc.collect()
    assert gone() is None
    assert resource() is None


def test_buffers_and_tensors_are_not_seen_by_the_collector():
    for resource in (gpumem.Arena("host"), Plain(), gpumem.DriverPool("host")):
        buffer = resource.allocate(10)
        assert not gc.is_tracked(buffer)
        assert not gc.is_tracked(gpumem.from_dlpack(buffer))
    assert not gc.is_tracked(gpumem.asarray(np.zeros(3)))


def test_buffers_and_tensors_end_by_reference_counts_alone():
    resource = Plain()
    gc.disable()
    try:
        for rank in range(1, 9):
            tensor = gpumem.zeros((1,) * rank, "int32", resource=resource)
            gone = weakref.ref(tensor)
            del tensor
            assert gone() is None
            assert resource.stats().in_use == 0
    finally:
        gc.enable()


@pytest.mark.parametrize("kind", ["user", "callables", "C functions"])
def test_an_error_on_its_way_survives_a_free_that_runs_python(kind):
    heap = Heap()
    calls = heap.alloc, heap.free
    if kind == "C functions":
        calls = (
            ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_size_t)(heap.alloc),
            ctypes.CFUNCTYPE(None, ctypes.c_void_p)(heap.free),
        )
        addresses = [ctypes.cast(call, ctypes.c_void_p).value for call in calls]
        resource = gpumem.ExternalAllocator(*addresses, memory="host")
    elif kind == "callables":
        resource = gpumem.ExternalAllocator(*calls, memory="host")
    else:
        resource = Plain()
    with pytest.raises(ValueError, match="not in list"):
        [].index(resource.allocate(10))  # the last reference goes while the error is set
    assert resource.stats().in_use == 0


SETUP = f"""
import gc, os, sys
sys.path.insert(0, {str(TESTS)!r})
sys.path.insert(0, {str(TESTS / "buffer")!r})
import gpumem
from test_cycles import KINDS, cycle_of
"""


@pytest.mark.parametrize("kept", ["", "kept = "])
def test_exit_with_cycles_alive(kept):
    child.run_quietly(SETUP + f"{kept}[cycle_of(kind) for kind in KINDS]")


def test_forked_child_leaves_cycles_of_its_parent_alone():
    child.run_quietly(
        SETUP
        + """
import warnings
warnings.simplefilter("ignore", DeprecationWarning)
[cycle_of(kind) for kind in KINDS]
process = os.fork()
if process == 0:
    gc.collect()
    sys.exit(0)
assert os.waitpid(process, 0)[1] == 0
"""
    )
