"""Streams that end while a pool, an external allocator or a class of users lives on.

A stream object is kept while a block may name it, and not longer.
"""

from __future__ import annotations

import ctypes

import pytest
from helpers.driver import HostDriver
from helpers.threads import in_a_thread

import gpumem
from gpumem._testing.arenas import stream_slots

KIB = 1 << 10
RAW = 0x7000_0000_0000  # handles that no driver gave out: whoever calls it with one is caught
libc = ctypes.CDLL(None)
MALLOC, FREE = (ctypes.cast(f, ctypes.c_void_p).value for f in (libc.malloc, libc.free))


class Plain(gpumem.MemoryResource):
    """A resource of users; notes the streams that blocks go back on."""

    def __init__(self):
        super().__init__(gpumem.MemoryInfo("host", alignment=1))
        self.blocks = {}
        self.freed_on = []

    def allocate_raw(self, nbytes, stream):
        block = ctypes.create_string_buffer(nbytes)
        self.blocks[ctypes.addressof(block)] = block
        return ctypes.addressof(block)

    def deallocate_raw(self, ptr, nbytes, stream):
        self.freed_on.append(stream.ptr)
        del self.blocks[ptr]


class Heap:
    """Callbacks in Python."""

    def __init__(self):
        self.blocks = {}

    def alloc(self, nbytes):
        block = ctypes.create_string_buffer(nbytes)
        self.blocks[ctypes.addressof(block)] = block
        return ctypes.addressof(block)

    def free(self, address):
        del self.blocks[address]


def callbacks():
    heap = Heap()
    return gpumem.ExternalAllocator(heap.alloc, heap.free, memory="host")


RESOURCES = {
    "pool": lambda: gpumem.DriverPool("host"),
    "callbacks": callbacks,
    "C functions": lambda: gpumem.ExternalAllocator(MALLOC, FREE, memory="host"),
    "user": Plain,
    "adaptor": lambda: gpumem.adaptors.limit(gpumem.DriverPool("host"), 1 << 30),
    "two adaptors": lambda: gpumem.adaptors.limit(
        gpumem.adaptors.limit(callbacks(), 1 << 30), 1 << 30
    ),
    "adaptor of an arena": lambda: gpumem.adaptors.limit(gpumem.Arena("host"), 1 << 30),
}
WITH_LEDGER = [name for name in RESOURCES if "adaptor" not in name]


@pytest.fixture(params=RESOURCES)
def resource(request):
    return RESOURCES[request.param]()


@pytest.fixture(params=WITH_LEDGER)
def ledger_resource(request):
    return RESOURCES[request.param]()


def name_streams(resource, count: int) -> None:
    """Let so many other streams be named, and end."""
    for _ in range(count):
        resource.allocate(KIB, gpumem.Stream("host")).close()


def name_others(resource, host) -> list[gpumem.Stream]:
    """Allocate on 200 new streams: while they live, no stream of before is destroyed."""
    destroyed = host.call_count("cuStreamDestroy")
    streams = [gpumem.Stream("host") for _ in range(200)]
    for stream in streams:
        resource.allocate(KIB, stream).close()
    assert host.call_count("cuStreamDestroy") == destroyed
    return streams


def test_dropped_streams_are_destroyed_though_a_block_lives_on(resource, host):
    held = resource.allocate(KIB, stream := gpumem.Stream("host"))
    destroyed = host.call_count("cuStreamDestroy")
    name_streams(resource, 500)
    assert host.call_count("cuStreamDestroy") - destroyed >= 400
    assert held.stream == stream


def test_events_of_dropped_streams_go_with_them(resource, host):
    name_streams(resource, 100)
    events = host.live()["events"]
    name_streams(resource, 500)
    assert host.live()["events"] <= events + 64


def test_streams_of_live_blocks_keep_their_slots(resource, host):
    streams = [gpumem.Stream("host") for _ in range(100)]
    handles = [stream.ptr for stream in streams]
    live = [resource.allocate(KIB, stream) for stream in streams]
    del streams
    name_others(resource, host)
    assert [buffer.stream.ptr for buffer in live] == handles


def test_recorded_stream_is_kept_until_its_block_is_back(resource, host):
    block = resource.allocate(KIB)
    stream = gpumem.Stream("host")
    block.record_stream(stream)
    del stream
    destroyed = host.call_count("cuStreamDestroy")
    others = name_others(resource, host)
    block.close()
    name_streams(resource, 500)
    del others
    name_streams(resource, 500)
    assert host.call_count("cuStreamDestroy") - destroyed >= 201 + 800


def test_stream_that_a_shared_block_is_closed_on_is_kept_by_its_views(resource, host):
    block, stream = resource.allocate(KIB), gpumem.Stream("host")
    view = memoryview(block)
    block.close(stream)
    del stream
    name_others(resource, host)
    view[0] = 1
    view.release()


def test_user_gets_a_block_back_on_the_stream_that_its_views_kept():
    plain = Plain()
    block, stream = plain.allocate(KIB), gpumem.Stream("host")
    handle, view = stream.ptr, memoryview(block)
    block.close(stream)
    del stream
    name_streams(plain, 200)
    plain.freed_on.clear()
    view.release()
    plain.stats()
    assert plain.freed_on == [handle]


def test_block_that_waits_for_its_stream_keeps_it(host):
    external = callbacks()
    stream = gpumem.Stream("host")
    block = external.allocate(KIB, stream)
    gate = HostDriver().block(stream)
    block.close()
    assert external.stats().reserved == KIB
    del stream
    destroyed = host.call_count("cuStreamDestroy")
    others = [gpumem.Stream("host") for _ in range(200)]
    for other in others:
        external.allocate(KIB, other).close()
    assert host.call_count("cuStreamDestroy") == destroyed
    gate.open()
    external.close()
    assert external.stats().reserved == 0


def test_hundred_thousand_resets_use_few_slots(ledger_resource):
    for handle in range(RAW, RAW + 100_000):
        ledger_resource.reset_stream(handle)
    assert stream_slots(ledger_resource) <= 2


def test_reset_slot_of_a_live_block_is_used_again_after_its_end(ledger_resource):
    slots = stream_slots(ledger_resource)
    for _ in range(300):
        stream = gpumem.Stream("host")
        block = ledger_resource.allocate(KIB, int(stream.ptr))
        ledger_resource.reset_stream(int(stream.ptr))
        assert block.stream.ptr <= 1
        block.close()
    assert stream_slots(ledger_resource) <= slots + 32


def test_raw_handles_without_a_reset_use_few_slots(ledger_resource):
    streams = [gpumem.Stream("host") for _ in range(1000)]
    for stream in streams:
        ledger_resource.allocate(KIB, int(stream.ptr)).close()
    assert stream_slots(ledger_resource) <= 64


def test_ended_threads_leave_no_stream_slots(ledger_resource):
    for _ in range(200):
        in_a_thread(lambda: ledger_resource.allocate(KIB, 2).close())
    assert stream_slots(ledger_resource) <= 64


def test_reused_slot_is_another_stream(ledger_resource):
    first, second = gpumem.Stream("host"), gpumem.Stream("host")
    block = ledger_resource.allocate(KIB, first)
    block.close()
    ledger_resource.reset_stream(first)
    with ledger_resource.allocate(KIB, second) as block:
        assert block.stream == second
        with ledger_resource.allocate(KIB, first) as other:
            assert (other.stream, block.stream) == (first, second)


def test_stream_that_names_others_at_its_end_leaves_the_block_on_its_own(ledger_resource):
    """The object of an ended stream runs code of users when it is dropped."""

    class Ends:
        def __init__(self):
            self.stream = gpumem.Stream("host")

        def __cuda_stream__(self):
            return self.stream.__cuda_stream__()

        def __del__(self):
            for _ in range(40):
                ledger_resource.allocate(64, gpumem.Stream("host")).close()

    for _ in range(100):
        stream = Ends()
        with ledger_resource.allocate(KIB, stream) as block:
            assert block.stream.ptr == stream.stream.ptr
        del stream
