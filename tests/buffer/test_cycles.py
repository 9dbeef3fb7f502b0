"""Cycles of a resource, a stream or an owner with its own buffers: the collector ends them."""

from __future__ import annotations

import ctypes
import gc
import sys
import threading
import weakref
from pathlib import Path

import numpy as np
import pytest
from helpers import child
from helpers.dlpack import consume
from helpers.driver import HostDriver
from helpers.quiesce import held_by_kind
from helpers.resources import Plain

import gpumem
from gpumem.adaptors import log

TESTS = Path(__file__).resolve().parent.parent
_libc = ctypes.CDLL(None)
LIBC = [ctypes.cast(call, ctypes.c_void_p).value for call in (_libc.malloc, _libc.free)]


class Foreign:
    """A stream object of another library, which ends its stream with itself."""

    def __init__(self):
        self.inner = gpumem.Stream("host")

    def __cuda_stream__(self):
        return 0, self.inner.ptr


class Destroying(Foreign):
    """One that destroys its stream in a finalizer, which the collector calls early."""

    def __del__(self):
        self.inner = None


class Derived(gpumem.Stream):
    """Users may give a stream of gpumem's own attributes."""


class Heap:
    """What a user's allocator is made of; counts what is not freed in a list of its maker."""

    def __init__(self, live):
        self.live = live
        self.blocks = {}

    def alloc(self, nbytes):
        block = ctypes.create_string_buffer(nbytes + 256)
        address = -(-ctypes.addressof(block) // 256) * 256
        self.blocks[address] = block
        self.live.append(address)
        return address

    def free(self, address):
        del self.blocks[address]
        self.live.remove(address)


class Mortal(Heap):
    """One that cannot free after its finalizer."""

    def __del__(self):
        self.blocks = None


class Owned(gpumem.MemoryResource):
    """A user's resource over such a heap."""

    def __init__(self, live):
        super().__init__("host")
        self.heap = Mortal(live)

    def allocate_raw(self, nbytes, stream):
        return self.heap.alloc(nbytes)

    def deallocate_raw(self, ptr, nbytes, stream):
        self.heap.free(ptr)
        stream.synchronize()


@pytest.fixture(autouse=True)
def unraisable(monkeypatch):
    """Nothing is reported while a cycle ends."""
    told = []
    monkeypatch.setattr(sys, "unraisablehook", told.append)
    yield
    assert told == []


def resource_of(kind, live):
    if kind == "user":
        return Owned(live)
    if kind == "external":
        return gpumem.ExternalAllocator(*LIBC, memory="host")
    if kind == "pool":
        return gpumem.DriverPool("host")
    return gpumem.Arena("host")


def wrapped(buffer, form):
    if form == "tensor":
        return gpumem.from_dlpack(buffer)
    if form == "view of a tensor":
        return gpumem.from_dlpack(buffer)[::2].reshape(-1)
    return [buffer]


FORMS = ("buffer", "tensor", "view of a tensor")


def release_what_was_dropped():
    gc.collect()
    gpumem.Device("host").synchronize()
    gpumem.Device("host").free_bytes  # noqa: B018 - a call that may wait


def collected(make):
    """Make objects in a cycle, drop them, and tell whether the collector ends them all."""
    gc.collect()
    gone = weakref.ref(make())
    gc.collect()
    return gone() is None


# ---- each kind of cycle --------------------------------------------------------------------------


@pytest.mark.parametrize("form", FORMS)
def test_cycle_of_a_users_resource_with_its_buffer_is_collected(form):
    live = []

    def make():
        resource = Owned(live)
        resource.kept = wrapped(resource.allocate(1000), form)
        assert live
        return resource

    assert collected(make)
    assert live == []


@pytest.mark.parametrize("stream", [Foreign, Destroying, Derived])
@pytest.mark.parametrize("kind", ["arena", "user", "external", "pool"])
@pytest.mark.parametrize("form", FORMS)
def test_cycle_of_a_stream_with_a_buffer_on_it_is_collected(form, kind, stream, host):
    live = []
    resource_of(kind, live).close()
    release_what_was_dropped()
    before = held_by_kind()

    def make():
        mine = stream("host") if stream is Derived else stream()
        resource = resource_of(kind, live)
        mine.kept = wrapped(resource.allocate(1000, mine), form)
        return mine

    assert collected(make)
    assert live == []
    release_what_was_dropped()
    assert held_by_kind() == before


def test_cycle_of_an_external_allocator_with_its_buffer_is_collected():
    live = []

    def make():
        heap = Mortal(live)
        allocator = gpumem.ExternalAllocator(heap.alloc, heap.free, memory="host")
        heap.kept = allocator.allocate(1000)
        return heap

    assert collected(make)
    assert live == []


def test_cycle_of_an_adaptor_with_its_buffer_is_collected():
    upstream = gpumem.Arena("host")

    def make():
        adaptor = log(upstream, lambda record: None)
        adaptor.kept = adaptor.allocate(1000)
        return adaptor

    assert collected(make)
    assert upstream.stats().in_use == 0


def test_cycle_through_an_adaptor_and_a_users_resource_is_collected():
    live = []

    def make():
        resource = Owned(live)
        resource.kept = log(resource, lambda record: None).allocate(1000)
        return resource

    assert collected(make)
    assert live == []


class Array(np.ndarray):
    """An array with attributes."""


def test_cycle_of_an_owner_with_the_tensor_over_it_is_collected():
    def make():
        array = np.zeros(100, np.uint8).view(Array)
        array.kept = gpumem.asarray(array)
        return array

    assert collected(make)


def test_cycle_of_a_stream_with_an_import_that_belongs_to_it_is_collected():
    array = np.zeros(100, np.uint8)

    def make():
        stream = Foreign()
        stream.kept = gpumem.from_dlpack(array, stream=stream)
        return stream

    assert collected(make)


def test_cycle_with_a_memoryview_of_an_arenas_buffer_is_collected():
    def make():
        stream = Foreign()
        stream.kept = memoryview(gpumem.Arena("host").allocate(1000, stream))
        return stream

    assert collected(make)


# ---- what is not collected -----------------------------------------------------------------------


def test_stream_that_a_living_arena_keeps_is_not_garbage():
    arena = gpumem.Arena("host")

    def make():
        stream = Foreign()
        stream.kept = arena.allocate(1000, stream)
        return stream

    assert not collected(make)
    assert arena.stats().in_use == 1024
    arena = None
    gc.collect()


def test_view_outside_of_a_cycle_keeps_its_memory():
    live = []

    def make():
        resource = Owned(live)
        buffer = resource.kept = resource.allocate(1000)
        views.append(consume(buffer.__dlpack__()))
        return resource

    views = []
    assert not collected(make)
    assert live
    views.pop().delete()
    gc.collect()
    assert live == []


def test_buffers_of_an_arena_with_a_debug_heap_are_not_tracked():
    arena = gpumem.Arena("host", debug_heap=True)
    assert not gc.is_tracked(arena.allocate(10, Foreign()))
    assert gc.is_tracked(gpumem.Arena("host").allocate(10, Foreign()))


def test_buffer_that_somebody_has_is_not_collected():
    live = []
    resource = Owned(live)
    buffer = resource.kept = resource.allocate(1000)
    gone = weakref.ref(resource)
    del resource
    gc.collect()
    memoryview(buffer)[0] = 7
    assert gone() is buffer.resource
    assert len(live) == 1


# ---- the order of ending -------------------------------------------------------------------------


def test_blocks_of_a_users_resource_go_back_before_finalizers_run():
    order = []

    class Ending(Owned):
        def deallocate_raw(self, ptr, nbytes, stream):
            super().deallocate_raw(ptr, nbytes, stream)
            order.append("free")

        def __del__(self):
            order.append("__del__")
            assert self.kept.closed

    def make():
        resource = Ending([])
        resource.kept = resource.allocate(1000)
        return resource

    assert collected(make)
    assert order == ["free", "__del__"]


def test_buffer_that_a_free_allocates_is_not_ended_with_the_others():
    made = []

    class Again(Owned):
        def deallocate_raw(self, ptr, nbytes, stream):
            super().deallocate_raw(ptr, nbytes, stream)
            if not made:
                made.append(self.allocate(7))

    def make():
        resource = Again([])
        resource.heap = Heap(resource.heap.live)
        resource.kept = resource.allocate(1000)

    make()
    gc.collect()
    assert not made[0].closed
    memoryview(made.pop())[6] = 1
    gc.collect()


def test_block_that_may_wait_for_a_stream_keeps_what_its_free_calls():
    live = []
    stream = gpumem.Stream("host")
    gate = HostDriver().block(stream)
    heap = Heap(live)
    heap.kept = gpumem.ExternalAllocator(heap.alloc, heap.free, memory="host").allocate(8, stream)
    gone = weakref.ref(heap)
    del heap
    gc.collect()
    gone().kept.close()
    gc.collect()
    assert len(live) == 1
    gate.open()
    stream.synchronize()
    gpumem.ExternalAllocator(*LIBC, memory="host").stats()  # any call frees what has waited
    assert live == []
    gc.collect()
    assert gone() is None


def test_buffer_of_an_arena_is_open_in_finalizers_of_its_cycle():
    seen = []

    class Holder:
        def __del__(self):
            seen.append((self.buffer.closed, bytes(memoryview(self.buffer))))

    def make():
        holder = Holder()
        stream = Foreign()
        holder.buffer = stream.kept = gpumem.Arena("host").allocate(3, stream)
        memoryview(holder.buffer)[:] = b"abc"
        stream.holder = holder
        return stream

    assert collected(make)
    assert seen == [(False, b"abc")]


def test_buffer_that_a_finalizer_brings_back_is_closed():
    live, back = [], []

    class Rescuer:
        def __del__(self):
            back.append(self.resource)

    def make():
        resource = Owned(live)
        resource.heap = Heap(live)
        resource.kept = resource.allocate(1000)
        resource.rescuer = Rescuer()
        resource.rescuer.resource = resource

    make()
    gc.collect()
    assert live == []
    (resource,) = back
    assert resource.kept.closed
    assert resource.stats().in_use == 0
    resource.kept = resource.allocate(10)
    assert len(live) == 1
    del resource
    back.clear()
    gc.collect()
    assert live == []


# ---- what the collector is shown -----------------------------------------------------------------


def test_plain_buffers_and_tensors_are_not_tracked():
    arena = gpumem.Arena("host")
    on_own = arena.allocate(10, gpumem.Stream("host"))
    for thing in (
        arena.allocate(10),
        on_own,
        gpumem.empty(3, "int8", resource=arena),
        gpumem.from_dlpack(np.zeros(3)),
        gpumem.asarray(np.zeros(3)),
        gpumem.DriverPool("host").allocate(10),
    ):
        assert not gc.is_tracked(thing)
        assert gc.get_referents(thing) == [] or not gc.is_tracked(thing)


def test_tracked_buffers_and_tensors_look_as_others_do():
    resource = Plain()
    buffer = resource.allocate(10)
    tensor = gpumem.from_dlpack(buffer)
    plain = gpumem.Arena("host").allocate(10)
    assert gc.is_tracked(buffer)
    assert gc.is_tracked(tensor)
    assert type(buffer) is type(plain) is gpumem.Buffer
    assert type(tensor) is gpumem.Tensor
    assert isinstance(buffer, gpumem.Buffer)
    assert repr(buffer).startswith("<gpumem.Buffer 10 B at 0x")
    assert gc.get_referents(buffer) == [resource, resource, resource]
    assert gc.get_referents(tensor)[0] is buffer
    assert weakref.ref(tensor)() is tensor
    buffer.close()
    assert gc.get_referents(buffer) == [resource, resource]


def test_collector_never_shows_half_made_objects():
    broken = []

    def look(phase, info):
        for thing in gc.get_objects():
            if type(thing) in (gpumem.Buffer, gpumem.Tensor):
                try:
                    repr(thing), thing.memory, thing.nbytes
                    if type(thing) is gpumem.Tensor:
                        assert thing.shape == (5, 1, 1, 1, 1, 1)
                        assert thing.buffer.nbytes == 20
                    else:
                        assert thing.ptr
                        assert thing.allocated_nbytes
                except BaseException as error:
                    broken.append(error)

    resource = log(Plain(), lambda record: None)
    threshold = gc.get_threshold()
    gc.callbacks.append(look)
    gc.set_threshold(1)
    try:
        made = [gpumem.zeros((5, 1, 1, 1, 1, 1), "int32", resource=resource) for _ in range(50)]
    finally:
        gc.set_threshold(*threshold)
        gc.callbacks.remove(look)
    assert len(made) == 50
    assert broken == []


def test_tracked_objects_end_by_reference_counts_alone():
    live = []
    resource = Owned(live)
    gc.disable()
    try:
        for rank in range(1, 9):
            tensor = gpumem.zeros((1,) * rank, "int32", resource=resource)
            gone = weakref.ref(tensor)
            del tensor
            assert gone() is None
            assert live == []
    finally:
        gc.enable()


@pytest.mark.parametrize("kind", ["user", "callables", "C functions"])
def test_an_error_on_its_way_survives_a_free_that_runs_python(kind):
    live = []
    heap = Heap(live)
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
        resource = Owned(live)
    with pytest.raises(ValueError, match="not in list"):
        [].index(resource.allocate(10))  # the last reference goes while the error is set
    assert live == []


# ---- threads, forks, exit ------------------------------------------------------------------------


def test_cycles_are_collected_while_threads_make_them():
    arena = gpumem.Arena("host")
    live = []

    def work():
        for _ in range(100):
            resource = Owned(live)
            resource.kept = gpumem.empty(10, "int8", resource=log(resource, lambda record: None))
            stream = Foreign()
            stream.kept = gpumem.Arena("host", {"backing": "regions"}).allocate(10, stream)
            arena.allocate(10).close()

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        gc.collect()
    for thread in threads:
        thread.join()
    gc.collect()
    assert live == []
    assert arena.stats().in_use == 0


SETUP = f"""
import gc, os, sys, threading
sys.path.insert(0, {str(TESTS)!r})
sys.path.insert(0, {str(TESTS / "buffer")!r})
import numpy as np
import gpumem
from test_cycles import Array, Derived, Destroying, Foreign, Heap, Owned, log, resource_of

def cycles():
    for kind in ("arena", "user", "external", "pool"):
        for stream in (Foreign(), Destroying(), Derived("host")):
            stream.kept = gpumem.from_dlpack(resource_of(kind, []).allocate(100, stream))
    resource = Owned([])
    resource.kept = resource.allocate(10), log(resource, lambda record: None).allocate(10)
    heap = Heap([])
    heap.kept = gpumem.ExternalAllocator(heap.alloc, heap.free, memory="host").allocate(10)
    array = np.zeros(10).view(Array)
    array.kept = gpumem.asarray(array)
    return resource, heap, array
"""


@pytest.mark.parametrize("body", ["gc.disable(); cycles()", "kept = cycles()", "cycles()"])
def test_exit_with_cycles_alive(body):
    child.run_quietly(SETUP + body)


def test_exit_while_daemon_threads_make_cycles():
    child.run_quietly(
        SETUP
        + """
begun = threading.Event()
def work():
    while True:
        cycles()
        begun.set()
for _ in range(3):
    threading.Thread(target=work, daemon=True).start()
begun.wait()
"""
    )


def test_forked_child_leaves_cycles_of_its_parent_alone():
    child.run_quietly(
        SETUP
        + """
import warnings
warnings.simplefilter("ignore", DeprecationWarning)
gc.disable()
cycles()
process = os.fork()
if process == 0:
    gc.collect()
    sys.exit(0)
assert os.waitpid(process, 0)[1] == 0
gc.collect()
"""
    )
