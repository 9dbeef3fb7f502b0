"""`with` statements over resources: what their end raises."""

from __future__ import annotations

import mmap

import numpy as np
import pytest
from helpers.resources import Plain

import gpumem
from gpumem.errors import ClosedError
from gpumem.interop import HostTimeline, Importer, MemoryDescriptor, MemoryHandleType


def fail_in_the_body(kind, used):
    with kind("host") as resource:
        used[:] = resource, resource.allocate(100)
        raise KeyError("body")


@pytest.mark.parametrize("kind", [gpumem.Arena, Plain, gpumem.DriverPool])
def test_exception_of_the_body_comes_before_a_failure_to_close(kind):
    used = []
    with pytest.raises(KeyError, match="body") as raised:
        fail_in_the_body(kind, used)
    assert any("cannot be closed" in note for note in raised.value.__notes__)
    resource, held = used
    assert not resource.closed
    held.close()
    resource.close()


def test_failure_to_close_is_raised_after_a_body_that_succeeded():
    with pytest.raises(gpumem.errors.InUseError), gpumem.Arena("host") as resource:
        held = resource.allocate(100)
    held.close()
    resource.close()


def test_exception_of_a_body_that_keeps_nothing_has_no_note():
    with pytest.raises(ZeroDivisionError) as raised, gpumem.Arena("host") as resource:
        resource.allocate(1).nbytes // 0
    assert not hasattr(raised.value, "__notes__")
    assert resource.closed


class Body:
    """Opens something, and what keeps it from being closed; `let_go` ends that."""

    def __init__(self, kind):
        if kind == "virtual tensor":
            self.opened = gpumem.Arena("host").virtual(1000, "i4", committed=10)
            self.held = self.opened.tensor()
            return
        # Memory that its user may free next, while a stream waits for a timeline.
        self.pages = mmap.mmap(-1, mmap.PAGESIZE)
        self.timeline, self.stream = HostTimeline.create(), gpumem.Stream("host")
        self.timeline.enqueue_wait(self.stream, 1)
        address = np.frombuffer(self.pages, "u1").ctypes.data
        described = MemoryDescriptor(address, MemoryHandleType.HOST_ALLOCATION, mmap.PAGESIZE)
        self.opened = Importer.for_device("host").import_memory(described)

    def let_go(self):
        self.held = None
        if hasattr(self, "timeline"):
            self.timeline.signal(1)
            self.stream.synchronize()


@pytest.mark.parametrize("kind", ["virtual tensor", "imported memory"])
def test_exception_of_the_body_comes_before_a_use_that_goes_on(kind):
    body = Body(kind)
    with pytest.raises(KeyError, match="body") as raised, body.opened:
        raise KeyError("body")
    assert "in use" in raised.value.__notes__[0] or "alive" in raised.value.__notes__[0]
    body.let_go()
    body.opened.close()


@pytest.mark.parametrize("kind", ["virtual tensor", "imported memory"])
def test_use_that_goes_on_is_an_error_after_a_body_that_succeeded(kind):
    body = Body(kind)
    with pytest.raises(gpumem.errors.InUseError), body.opened:
        pass
    body.let_go()
    body.opened.close()


def test_address_of_a_closed_owner_is_refused(arena):
    buffer = arena.allocate(64)
    tensor = buffer.tensor(16, "f4")
    cache = arena.virtual(8, "f4")
    array = tensor.numpy()  # keeps the memory, not the name for it
    registration, pool = buffer.register(), gpumem.DriverPool("host")
    opened = Body("imported memory")
    opened.let_go()
    for owner in (buffer, buffer, cache, opened.opened, pool):
        owner.close()
    registration.release()
    full = cache.full
    owners = (buffer, tensor, tensor[2:], cache, full, full[1:], full.buffer, opened.opened)
    for owner in (*owners, pool, registration):
        name = {pool: "handle", registration: "address"}.get(owner, "ptr")
        with pytest.raises(ClosedError, match=r"closed|released"):
            getattr(owner, name)
        assert "gpumem." in repr(owner)
    assert (buffer.nbytes, tensor.shape, len(array)) == (64, (16,), 16)
