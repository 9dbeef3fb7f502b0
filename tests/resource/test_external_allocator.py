"""ExternalAllocator: callbacks of somebody else behind the same Buffer."""

from __future__ import annotations

import ctypes
import gc
import mmap
import sys
import threading
from dataclasses import replace

import numpy as np
import pytest
from helpers.dlpack import consume
from helpers.driver import HostDriver
from helpers.graph import Graph
from helpers.interrupting import interrupted, more_calls
from helpers.threads import in_threads, run_threads, running
from helpers.waiting import wait_until

import gpumem
from gpumem._testing.arenas import release_retired

MIB = 1 << 20
UNKNOWN = 999
libc = ctypes.CDLL(None)
MALLOC, FREE = (ctypes.cast(f, ctypes.c_void_p).value for f in (libc.malloc, libc.free))


class Heap:
    """Python callbacks over ctypes buffers, which note every call."""

    def __init__(self, limit: int = 1 << 60) -> None:
        self.blocks: dict[int, ctypes.Array] = {}
        self.calls: list[tuple] = []
        self.limit = limit

    def alloc(self, nbytes):
        self.calls.append(("alloc", nbytes))
        if sum(map(len, self.blocks.values())) + nbytes > self.limit:
            return None
        block = ctypes.create_string_buffer(nbytes)
        self.blocks[ctypes.addressof(block)] = block
        return ctypes.addressof(block)

    def free(self, address):
        self.calls.append(("free", address))
        del self.blocks[address]

    def empty_cache(self):
        self.calls.append(("empty_cache",))

    def names(self) -> list[str]:
        return [call[0] for call in self.calls]


@pytest.fixture
def heap():
    return Heap()


@pytest.fixture
def allocator(heap):
    with gpumem.ExternalAllocator(heap.alloc, heap.free, heap.empty_cache, memory="host") as made:
        yield made
    assert not heap.blocks


# ---- blocks --------------------------------------------------------------------------------------


def test_each_block_is_one_alloc_and_one_free_call(allocator, heap):
    with allocator.allocate(1000) as buffer:
        assert heap.calls == [("alloc", 1000)]
        assert (buffer.nbytes, buffer.allocated_nbytes) == (1000, 1000)
        np.frombuffer(buffer, np.uint8)[:] = 7
        assert (np.from_dlpack(buffer) == 7).all()
        address = buffer.ptr
        assert address in heap.blocks
    assert heap.calls[1:] == [("free", address)]


def test_callbacks_may_be_addresses_of_c_functions():
    with gpumem.ExternalAllocator(MALLOC, FREE, memory="host") as allocator:
        with allocator.allocate(MIB) as buffer:
            np.frombuffer(buffer, np.uint8)[:] = 7
            assert allocator.stats().in_use == MIB
        assert allocator.stats().in_use == 0


def test_callables_and_addresses_may_be_mixed(heap):
    freed = []

    def free(address):
        freed.append(address)
        libc.free(ctypes.c_void_p(address))

    with (
        gpumem.ExternalAllocator(MALLOC, free, memory="host") as allocator,
        allocator.allocate(10) as buffer,
    ):
        address = buffer.ptr
    assert freed == [address]


def test_external_allocator_is_no_arena(allocator):
    assert not allocator.is_arena
    assert isinstance(allocator, gpumem.MemoryResource)
    assert "ExternalAllocator 'host:0' on host:0" in repr(allocator)


def test_empty_block_calls_no_callback(allocator, heap):
    with allocator.allocate(0) as buffer, allocator.allocate_persistent(0) as other:
        assert (buffer.ptr, buffer.nbytes, other.ptr) == (0, 0, 0)
    assert heap.calls == []


@pytest.mark.parametrize("alignment", [1, 64, 256, 4096, 1 << 21])
def test_block_is_aligned_as_asked(allocator, heap, alignment):
    with allocator.allocate(100, alignment=alignment) as buffer:
        assert buffer.ptr % alignment == 0
        np.frombuffer(buffer, np.uint8)[:] = 1
        assert heap.calls == [("alloc", buffer.allocated_nbytes)]
        assert 100 <= buffer.allocated_nbytes < 100 + max(alignment, 256)
    assert heap.names() == ["alloc", "free"]


@pytest.mark.parametrize("alignment", [0, -1, 3, 1 << 22, 2.0, "1", True])
def test_invalid_alignment_is_refused(allocator, heap, alignment):
    with pytest.raises(ValueError, match="power of two"):
        allocator.allocate(100, alignment=alignment)
    assert heap.calls == []


@pytest.mark.parametrize(
    ("nbytes", "error"),
    [(-1, ValueError), (1.0, TypeError), ("1", TypeError), (True, TypeError), (None, TypeError),
     (1 << 50, gpumem.OutOfMemoryError)],
)  # fmt: skip
def test_invalid_size_is_refused_before_any_callback(allocator, heap, nbytes, error):
    for call in (allocator.allocate, allocator.allocate_persistent):
        with pytest.raises(error):
            call(nbytes)
    assert heap.calls == []


def test_stats_after_a_known_history(allocator):
    held = [allocator.allocate(1000), allocator.allocate(3000), allocator.allocate_persistent(50)]
    held.pop(1).close()
    allocator.shrink()
    stats = allocator.stats()
    assert (stats.in_use, stats.requested_in_use, stats.reserved) == (1050, 1050, 1050)
    assert (stats.max_in_use, stats.max_reserved, stats.max_alloc_size) == (4050, 4050, 3000)
    assert (stats.num_allocs, stats.num_frees, stats.num_reserves) == (3, 1, 1)
    assert (stats.num_shrinkages, stats.num_regions, stats.limit) == (1, 0, None)
    assert stats.as_ort()["TotalAllocated"] == "1050"
    held.clear()


# ---- empty_cache ---------------------------------------------------------------------------------


def test_empty_cache_runs_only_after_a_persistent_free(allocator, heap):
    allocator.allocate(10).close()
    assert heap.names() == ["alloc", "free"]
    allocator.allocate_persistent(10).close()
    assert heap.names()[2:] == ["alloc", "free", "empty_cache"]
    allocator.allocate_persistent(10).close()
    assert heap.names()[5:] == ["alloc", "free", "empty_cache"]


def test_persistent_mark_belongs_to_the_block_not_its_address():
    """The mark belongs to the block, not to its address."""
    block, calls = ctypes.create_string_buffer(100), []
    allocator = gpumem.ExternalAllocator(
        lambda n: ctypes.addressof(block), lambda p: calls.append(allocator.allocate_persistent(9)),
        lambda: calls.append("empty_cache"), memory="host",
    )  # fmt: skip
    allocator.allocate_persistent(10).close()
    assert calls[1:] == ["empty_cache"]
    free_again = calls[0]
    free_again.close()
    assert calls[-1] == "empty_cache"
    assert len([c for c in calls if c == "empty_cache"]) == 2


def test_failed_alloc_calls_empty_cache_once_and_retries(heap):
    heap.limit = 1000
    held = []

    def empty_cache():
        heap.calls.append(("empty_cache",))
        heap.limit += 1000

    with gpumem.ExternalAllocator(heap.alloc, heap.free, empty_cache, memory="host") as allocator:
        held.append(allocator.allocate(1500))
        assert heap.names() == ["alloc", "empty_cache", "alloc"]
        with pytest.raises(gpumem.OutOfMemoryError) as caught:
            allocator.allocate(5000)
        assert heap.names()[3:] == ["alloc", "empty_cache", "alloc"]
        error = caught.value
        assert (error.requested_nbytes, error.allocated_nbytes, error.in_use, error.reserved) == (
            5000,
            5000,
            1500,
            1500,
        )
        assert (error.device, error.stream) == ("host:0", 0)
        assert "1.5 KiB in use" in str(error)
        assert allocator.stats().num_allocs == 1
        held.clear()


@pytest.mark.parametrize("answer", [None, 0])
def test_failed_alloc_without_empty_cache_is_not_retried(answer):
    calls = []
    with gpumem.ExternalAllocator(
        lambda n: calls.append(n) or answer, lambda p: None, memory="host"
    ) as allocator:
        with pytest.raises(gpumem.OutOfMemoryError):
            allocator.allocate(10)
        assert calls == [10]
        assert allocator.stats().in_use == 0


# ---- callbacks that fail -------------------------------------------------------------------------


class Mine(Exception):
    pass


def test_exception_of_alloc_reaches_the_caller_without_a_change(heap):
    def alloc(nbytes):
        raise Mine(nbytes)

    with gpumem.ExternalAllocator(alloc, heap.free, heap.empty_cache, memory="host") as allocator:
        with pytest.raises(Mine, match="10"):
            allocator.allocate(10)
        stats = allocator.stats()
        assert (stats.in_use, stats.num_allocs, stats.reserved) == (0, 0, 0)
        assert heap.calls == []


@pytest.mark.parametrize(
    ("answer", "error"),
    [(-1, ValueError), (1 << 64, ValueError), (1.5, TypeError), ("5", TypeError),
     (True, TypeError), (b"", TypeError)],
)  # fmt: skip
def test_invalid_address_from_alloc_is_refused(answer, error):
    with gpumem.ExternalAllocator(lambda n: answer, lambda p: None, memory="host") as allocator:
        with pytest.raises(error, match="alloc returned"):
            allocator.allocate(10)
        assert allocator.stats().num_allocs == 0


@pytest.mark.parametrize("waits", [False, True])
def test_address_that_was_not_freed_is_refused(heap, waits):
    """It is not freed either: another block lies there, or work that waits for its stream."""
    stream, driver = gpumem.Stream("host"), HostDriver()
    same = heap.alloc(100)
    with gpumem.ExternalAllocator(lambda n: same, heap.free, memory="host") as allocator:
        held = allocator.allocate(100, stream)
        before = allocator.stats()
        with driver.block(stream):
            if waits:
                held.close()
                before = allocator.stats()
            for call in (allocator.allocate, allocator.allocate_persistent):
                with pytest.raises(gpumem.errors.SourceError, match="returned before and that is"):
                    call(50)
            assert replace(allocator.stats(), driver_calls=0) == replace(before, driver_calls=0)
            assert heap.blocks
        held.close()
        stream.synchronize()
        allocator.shrink()
        assert not heap.blocks


@pytest.mark.parametrize("waits", [False, True])
@pytest.mark.parametrize(
    ("offset", "nbytes"), [(-64, 65), (-64, 4096), (16, 16), (16, 4096), (112, 16)]
)
def test_block_that_overlaps_a_live_block_is_refused_and_freed(waits, offset, nbytes):
    page = np.zeros(1 << 16, np.uint8).ctypes.data + 4096 & ~4095
    given, freed = [page, page + offset], []
    stream, driver = gpumem.Stream("host"), HostDriver()
    with gpumem.ExternalAllocator(lambda n: given.pop(0), freed.append, memory="host") as allocator:
        held = allocator.allocate(128, stream)
        before = allocator.stats()
        with driver.block(stream):
            if waits:
                held.close()
                before = allocator.stats()
            with pytest.raises(gpumem.errors.SourceError) as raised:
                allocator.allocate(nbytes)
            assert f"overlaps 128 B at {page:#x} that it returned before" in str(raised.value)
            assert freed == [page + offset]
            assert replace(allocator.stats(), driver_calls=0) == replace(before, driver_calls=0)
        held.close()
        stream.synchronize()
        allocator.shrink()
        assert freed == [page + offset, page]
        # Beside each other they are all right, and where one was.
        given[:] = [page, page + 128, page - 64, page + 16]
        beside = [allocator.allocate(nbytes) for nbytes in (128, 16, 64)]
        beside[0].close()
        allocator.allocate(112).close()
        del beside


def test_address_of_a_live_block_is_not_freed_although_the_block_overlaps_another(heap):
    page = np.zeros(1 << 12, np.uint8).ctypes.data
    page += -page % 16
    given, freed = [page + 256, page, page], []
    with gpumem.ExternalAllocator(lambda n: given.pop(0), freed.append, memory="host") as allocator:
        held = [allocator.allocate(128) for _ in range(2)]
        with pytest.raises(gpumem.errors.SourceError, match="returned before and that is"):
            allocator.allocate(512)
        assert not freed
        del held


def test_overlaps_are_found_among_thousands_of_blocks():
    rng = np.random.default_rng(seed := 3)
    print("seed", seed)
    base = 1 << 40
    taken, freed, given = {}, [], []
    with gpumem.ExternalAllocator(lambda n: given.pop(), freed.append, memory="host") as allocator:
        for _ in range(20_000):
            if taken and rng.random() < 0.4:
                address = list(taken)[rng.integers(len(taken))]
                taken.pop(address).close()
                assert freed.pop() == address
                continue
            address, nbytes = base + 16 * int(rng.integers(4000)), 16 * int(rng.integers(1, 20))
            given.append(address)
            overlaps = any(
                at < address + nbytes and address < at + each.nbytes for at, each in taken.items()
            )
            if overlaps:
                with pytest.raises(gpumem.errors.SourceError):
                    allocator.allocate(nbytes)
                assert freed == ([] if address in taken else [address])
                freed.clear()
            else:
                taken[address] = allocator.allocate(nbytes)
        taken.clear()


def test_address_may_be_given_again_once_it_was_freed(heap):
    same = heap.alloc(100)
    with gpumem.ExternalAllocator(lambda n: same, lambda p: None, memory="host") as allocator:
        for _ in range(3):
            assert allocator.allocate(100).ptr == same


def test_thousands_of_addresses_are_told_apart(heap):
    rng = np.random.default_rng(1)
    page = np.zeros(1 << 20, np.uint8).ctypes.data
    given, freed = [], []
    with gpumem.ExternalAllocator(
        lambda n: given.append(page + 16 * len(given)) or given[-1], freed.append, memory="host"
    ) as allocator:
        buffers = [allocator.allocate(16) for _ in range(5000)]
        rng.shuffle(buffers)
        del buffers[2500:]
        again = given[:]
        given.clear()
        held = {buffer.ptr for buffer in buffers}
        for address in again:
            given[:] = [None] * ((address - page) // 16)
            if address in held:
                with pytest.raises(gpumem.errors.SourceError):
                    allocator.allocate(16)
            else:
                allocator.allocate(16).close()
        buffers.clear()
        assert len(freed) == 5000 + 2500


@pytest.mark.parametrize("functions", [False, True])
@pytest.mark.parametrize(
    ("memory", "off", "alignment"),
    [
        ("host", 8, 16),
        ("host/host_accessible", 1, 16),
        (gpumem.MemoryInfo("host", alignment=64), 16, 64),
        (gpumem.MemoryInfo("host", alignment=4), 2, 4),
    ],
)
def test_misaligned_address_is_refused_and_freed(functions, memory, off, alignment):
    page = mmap.mmap(-1, 4096)
    given = np.frombuffer(page, np.uint8).ctypes.data + off
    freed = []
    callbacks = [lambda nbytes: given, freed.append]
    if functions:
        kept = [
            ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_size_t)(callbacks[0]),
            ctypes.CFUNCTYPE(None, ctypes.c_void_p)(callbacks[1]),
        ]
        callbacks = [ctypes.cast(each, ctypes.c_void_p).value for each in kept]
    with gpumem.ExternalAllocator(*callbacks, memory=memory) as allocator:
        with pytest.raises(gpumem.errors.SourceError, match=f"is not a multiple of {alignment}$"):
            allocator.allocate(100)
        assert freed == [given]
        assert (allocator.stats().in_use, allocator.stats().num_allocs) == (0, 0)


def test_exception_of_free_is_unraisable_and_the_block_counts_as_freed(monkeypatch, heap):
    told = []
    monkeypatch.setattr(sys, "unraisablehook", lambda args: told.append(args.exc_value))

    def free(address):
        raise Mine(address)

    with gpumem.ExternalAllocator(heap.alloc, free, memory="host") as allocator:
        buffer = allocator.allocate(10)
        address = buffer.ptr
        buffer.close()
        assert [error.args for error in told] == [(address,)]
        assert allocator.stats().num_frees == 1
        view = memoryview(allocator.allocate(10))
        view.release()
        assert len(told) == 2
    assert len(told) == 2


def test_exception_of_empty_cache_is_raised_or_unraisable(monkeypatch, heap):
    told = []
    monkeypatch.setattr(sys, "unraisablehook", lambda args: told.append(args.exc_type))

    def empty_cache():
        raise Mine

    heap.limit = 100
    with gpumem.ExternalAllocator(heap.alloc, heap.free, empty_cache, memory="host") as allocator:
        with pytest.raises(Mine):
            allocator.shrink()
        with pytest.raises(Mine):
            allocator.allocate(1000)
        assert allocator.stats().num_shrinkages == 0
        allocator.allocate_persistent(10).close()
        assert told == [Mine]
        assert allocator.stats().in_use == 0


def test_pending_exception_survives_a_python_free(allocator, heap):
    def work():
        buffer = allocator.allocate(10)
        view = memoryview(buffer)
        del buffer
        raise Mine(len(view))

    with pytest.raises(Mine, match="10"):
        work()
    gc.collect()
    assert heap.names() == ["alloc", "free"]


def test_callbacks_may_use_the_allocator_themselves(heap):
    inner, to_take = [], [8]

    def free(address):
        if to_take:
            inner.append(allocator.allocate(to_take.pop()))
        heap.free(address)

    with gpumem.ExternalAllocator(heap.alloc, free, memory="host") as allocator:
        allocator.allocate(10).close()
        assert heap.names() == ["alloc", "alloc", "free"]
        assert allocator.stats().in_use == 8
        inner.clear()
    assert not heap.blocks


# ---- arguments -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("alloc", "free", "missing"),
    [(None, FREE, "alloc"), (MALLOC, None, "free"), (None, None, "")],
    ids=["free", "alloc", "neither"],
)
def test_incomplete_callbacks_are_refused(alloc, free, missing):
    with pytest.raises(gpumem.ConfigError, match=f"{missing}.* = None.* are given together"):
        gpumem.ExternalAllocator(alloc, free, memory="host")


@pytest.mark.parametrize("address", [0, -1, 1 << 64, -(1 << 70)])
@pytest.mark.parametrize("which", ["alloc", "free", "empty_cache"])
def test_invalid_callback_address_is_refused(which, address):
    given = {"alloc": MALLOC, "free": FREE, which: address}
    with pytest.raises(ValueError, match=rf"{which} = {address} is not an address from 1 to"):
        gpumem.ExternalAllocator(**given, memory="host")


@pytest.mark.parametrize("callback", ["malloc", 1.5, True, b"x", object()])
def test_callback_of_a_wrong_type_is_refused(callback):
    with pytest.raises(TypeError, match="a callable or the address of a C function"):
        gpumem.ExternalAllocator(callback, FREE, memory="host")


def test_memory_is_required_and_must_exist():
    with pytest.raises(TypeError, match="memory"):
        gpumem.ExternalAllocator(MALLOC, FREE)
    with pytest.raises(ValueError, match="unknown device"):
        gpumem.ExternalAllocator(MALLOC, FREE, memory="host:63")
    gc.collect()


def test_allocator_is_initialised_once_and_before_use(allocator):
    with pytest.raises(TypeError, match="__init__ called twice"):
        allocator.__init__(MALLOC, FREE, memory="host")
    raw = gpumem.ExternalAllocator.__new__(gpumem.ExternalAllocator)
    for call in (lambda: raw.allocate(1), raw.stats, raw.shrink):
        with pytest.raises(gpumem.errors.ClosedError):
            call()


def test_numpy_integers_are_addresses():
    with (
        gpumem.ExternalAllocator(np.uint64(MALLOC), np.uint64(FREE), memory="host") as allocator,
        allocator.allocate(np.int32(10)) as buffer,
    ):
        assert len(buffer) == 10


@pytest.mark.parametrize("memory", ["host", "host/host_accessible", "host/managed"])
def test_views_work_for_cpu_accessible_memory(heap, memory):
    with gpumem.ExternalAllocator(heap.alloc, heap.free, memory=memory) as allocator:
        buffer = allocator.allocate(8)
        np.frombuffer(buffer, np.uint8)[:] = 3
        assert bytes(memoryview(buffer)) == b"\3" * 8
        del buffer


# ---- life and death ------------------------------------------------------------------------------


def test_close_is_refused_while_a_buffer_or_a_view_lives(heap):
    allocator = gpumem.ExternalAllocator(heap.alloc, heap.free, memory="host")
    buffer = allocator.allocate(100)
    with pytest.raises(gpumem.errors.InUseError, match="in use: 100 B in 1 block; close"):
        allocator.close()
    view = memoryview(buffer)
    buffer.close()
    with pytest.raises(gpumem.errors.InUseError):
        allocator.close()
    allocator.allocate(1).close()
    view.release()
    allocator.close()
    allocator.close()
    assert allocator.closed
    for call in (lambda: allocator.allocate(1), lambda: allocator.allocate(0), allocator.shrink,
                 lambda: allocator.reset_stream(None)):  # fmt: skip
        with pytest.raises(gpumem.errors.ClosedError):
            call()
    assert allocator.stats().num_frees == 2


def test_view_outlives_buffer_allocator_and_callbacks_owner(heap):
    blocks = heap.blocks
    allocator = gpumem.ExternalAllocator(heap.alloc, heap.free, memory="host")
    view = np.from_dlpack(allocator.allocate(100))
    view[:] = 5
    del allocator, heap
    gc.collect()
    assert (view == 5).all()
    assert len(blocks) == 1
    del view
    gc.collect()
    assert not blocks


def test_cycle_through_the_callbacks_is_collected_and_a_view_still_frees():
    freed = []

    class Owner:
        def __init__(self):
            self.block = ctypes.create_string_buffer(100)
            self.allocator = gpumem.ExternalAllocator(self.alloc, self.free, memory="host")

        def alloc(self, nbytes):
            return ctypes.addressof(self.block)

        def free(self, address):
            freed.append(address)

    consumed = consume(Owner().allocator.allocate(10).__dlpack__())
    gc.collect()
    assert freed == []
    consumed.delete()
    wait_until(lambda: freed)
    gpumem.Device("host").synchronize()


@pytest.mark.parametrize("python", [True, False])
def test_last_view_may_be_dropped_without_the_gil(heap, python):
    """By a thread without the interpreter lock, and by a stream's own."""
    callbacks = (heap.alloc, heap.free) if python else (MALLOC, FREE)
    driver, stream = HostDriver(), gpumem.Stream("host")
    with gpumem.ExternalAllocator(*callbacks, memory="host") as allocator:
        consume(allocator.allocate(10).__dlpack__()).delete()
        consume(allocator.allocate(10).__dlpack__()).delete_on(driver, stream)
        threads = [
            threading.Thread(target=consume(allocator.allocate(10).__dlpack__()).delete)
            for _ in range(8)
        ]
        run_threads(threads)
        stream.synchronize()
        assert allocator.stats().in_use == 0
        wait_until(lambda: allocator.stats().reserved == 0)
        assert allocator.stats().num_frees == 10
    assert not heap.blocks


def test_python_free_runs_soon_after_a_drop_without_the_gil(allocator, heap):
    consume(allocator.allocate(10).__dlpack__()).delete()
    wait_until(lambda: "free" in heap.names())


def test_stats_are_exact_under_threads(allocator, heap):
    def work(number):
        stream = gpumem.Stream("host")
        for i in range(100):
            with allocator.allocate(100 * number + i, stream), allocator.allocate(5):
                pass

    in_threads(work, range(1, 5))
    stats = allocator.stats()
    assert (stats.in_use, stats.num_allocs, stats.num_frees) == (0, 800, 800)
    assert stats.reserved == 0
    assert len(heap.calls) == 1600


# ---- streams -------------------------------------------------------------------------------------


def test_block_freed_on_a_busy_stream_is_freed_when_the_stream_is_done(allocator, heap, host):
    driver, stream = HostDriver(), gpumem.Stream("host")
    buffer = allocator.allocate(1000, stream)
    with driver.block(stream):
        buffer.close()
        stats = allocator.stats()
        assert heap.names() == ["alloc"], "freed while its stream was blocked"
        assert (stats.in_use, stats.reserved, stats.num_frees) == (0, 1000, 1)
    stream.synchronize()
    assert allocator.stats().reserved == 0
    assert heap.names() == ["alloc", "free"]


def test_block_freed_on_the_default_stream_is_freed_at_once(heap, host, driver, stream):
    with (
        gpumem.ExternalAllocator(
            heap.alloc, heap.free, memory="host", default_stream=stream
        ) as allocator,
        driver.block(stream),
    ):
        allocator.allocate(10).close()
        allocator.allocate(10, stream).close()
        allocator.allocate(10, gpumem.Stream("host")).close(stream)
        assert heap.names() == ["alloc", "free"] * 3


def test_free_is_ordered_on_the_stream_of_the_close(allocator, heap, host):
    driver, busy, idle = HostDriver(), gpumem.Stream("host"), gpumem.Stream("host")
    first, second = allocator.allocate(10, busy), allocator.allocate(10, idle)
    with driver.block(busy):
        first.close(idle)
        assert heap.names().count("free") == 1
        second.close(busy)
        assert heap.names().count("free") == 1
    busy.synchronize()
    allocator.shrink()
    assert heap.names().count("free") == 2


def test_out_of_memory_waits_for_pending_frees(heap, host, driver, stream):
    heap.limit = 1000
    with gpumem.ExternalAllocator(heap.alloc, heap.free, memory="host") as allocator:
        buffer = allocator.allocate(1000, stream)
        gate = driver.block(stream)
        buffer.close()
        asked = host.call_count("cuEventQuery")

        def open_once_waited_for():
            wait_until(lambda: host.call_count("cuEventQuery") > asked + 2)
            gate.open()

        with running(open_once_waited_for), allocator.allocate(900):
            assert heap.names() == ["alloc", "alloc", "free", "alloc"]


@pytest.mark.parametrize("call", ["allocate", "allocate, with a budget", "shrink"])
def test_block_of_a_finished_stream_does_not_wait_for_an_older_block(heap, host, call):
    driver, busy, done = HostDriver(), gpumem.Stream("host"), gpumem.Stream("host")
    budget = gpumem.Budget(1000) if "budget" in call else None
    heap.limit = 1000 if budget is None else 1 << 60
    with (
        gpumem.ExternalAllocator(heap.alloc, heap.free, memory="host", budget=budget) as allocator,
        driver.block(busy),
    ):
        with driver.block(done):
            for stream in (busy, done):
                allocator.allocate(500, stream).close()
        done.synchronize()
        assert allocator.stats().reserved == 1000
        asked = host.call_count("cuEventQuery")
        if call == "shrink":
            allocator.shrink()
        else:
            allocator.allocate(500).close()
        assert allocator.stats().reserved == 500
        assert host.call_count("cuEventQuery") - asked < 10  # it did not wait


@pytest.mark.parametrize("budget", [None, 1000])
def test_out_of_memory_waits_for_pending_frees_no_longer_than_a_second_and_until_ctrl_c(
    heap, host, monkeypatch, budget
):
    heap.limit = 1000
    driver, stream = HostDriver(), gpumem.Stream("host")
    allocator = gpumem.ExternalAllocator(
        heap.alloc, heap.free, memory="host", budget=budget and gpumem.Budget(budget)
    )
    buffer, other = allocator.allocate(500, stream), allocator.allocate(400, gpumem.Stream("host"))
    with driver.block(stream):
        buffer.close()
        other.close()
        with pytest.raises(gpumem.OutOfMemoryError):
            allocator.allocate(900)
        assert allocator.stats().reserved == 500  # the other is not held back
        with interrupted(more_calls(host, "cuEventQuery", 3)):
            allocator.allocate(900)
        with interrupted(more_calls(host, "cuEventQuery", 3)):
            allocator.close()
        assert allocator.closed
        assert len(heap.blocks) == 1
    stream.synchronize()
    assert gpumem.Device("host").free_bytes
    assert not heap.blocks


@pytest.mark.parametrize("end", ["close", "record_stream"])
def test_block_of_a_stream_that_captures_waits_for_the_captures_end(heap, host, end):
    driver, stream = HostDriver(), gpumem.Stream("host")
    heap.limit = 1000
    allocator = gpumem.ExternalAllocator(heap.alloc, heap.free, memory="host")
    buffer = allocator.allocate(1000, stream if end == "close" else None)
    if end == "record_stream":
        buffer.record_stream(stream)
    other = gpumem.Arena("host").allocate(1000)
    with Graph(driver, stream) as graph:  # it is valid at its end
        driver.fill(other, 7, stream)
        buffer.close()
        allocator.shrink()
        with pytest.raises(gpumem.OutOfMemoryError):
            allocator.allocate(1000)
        allocator.close()
        assert len(heap.blocks) == 1
    assert gpumem.Device("host").free_bytes
    assert not heap.blocks
    graph.destroy()


def test_close_waits_for_pending_frees(heap, host, driver, stream):
    allocator = gpumem.ExternalAllocator(heap.alloc, heap.free, memory="host")
    buffer = allocator.allocate(1000, stream)
    gate = driver.block(stream)
    buffer.close()
    threading.Timer(0.05, gate.open).start()
    allocator.close()
    assert not heap.blocks


def test_reset_stream_counts_as_done(allocator, heap, host, driver, stream):
    held, waiting = allocator.allocate(10, stream.ptr), allocator.allocate(10, stream.ptr)
    with driver.block(stream):
        waiting.close()
        allocator.reset_stream(stream.ptr)
        assert allocator.stats().reserved == 10
        held.close()
        assert heap.names().count("free") == 2
    stream.synchronize()


def test_pending_frees_outlive_the_allocator_object(heap, host):
    driver, stream = HostDriver(), gpumem.Stream("host")
    allocator = gpumem.ExternalAllocator(heap.alloc, heap.free, memory="host")
    buffer = allocator.allocate(1000, stream)
    with driver.block(stream):
        buffer.close()
        del allocator, buffer
        gc.collect()
        assert len(heap.blocks) == 1
    stream.synchronize()
    assert gpumem.Device("host").free_bytes
    assert not heap.blocks


# ---- the device ----------------------------------------------------------------------------------


def test_callbacks_run_with_the_device_context_current(driver):
    get = driver._function  # the context that is current, asked through the driver itself
    seen = []

    def current():
        value = ctypes.c_uint64()
        assert get("cuCtxGetCurrent")(ctypes.byref(value)) == 0
        return value.value

    block = ctypes.create_string_buffer(10)
    before = current()
    with gpumem.ExternalAllocator(
        lambda n: seen.append(current()) or ctypes.addressof(block),
        lambda p: seen.append(current()),
        lambda: seen.append(current()),
        memory="host",
    ) as allocator:
        allocator.allocate_persistent(10).close()
        allocator.shrink()
    assert seen == [driver._context] * 4
    assert current() == before


def test_failing_callback_leaves_no_context_current(heap, driver):

    def current():
        value = ctypes.c_uint64()
        assert driver._function("cuCtxGetCurrent")(ctypes.byref(value)) == 0
        return value.value

    def alloc(nbytes):
        raise Mine

    before = current()
    with gpumem.ExternalAllocator(alloc, heap.free, memory="host") as allocator:
        with pytest.raises(Mine):
            allocator.allocate(1)
        assert current() == before


def scenario(allocator, stream):
    """A life with every call in it, on a busy stream; what fails raises, and the rest goes on."""
    refused = []

    def attempt(call):
        try:
            return call()
        except gpumem.errors.DriverError as error:
            refused.append(error)

    held = [
        attempt(lambda: allocator.allocate(100, stream)),
        attempt(lambda: allocator.allocate(9)),
    ]
    held.append(attempt(lambda: allocator.allocate_persistent(10)))
    for buffer in held:
        if buffer:
            buffer.close()
    attempt(allocator.shrink)
    return refused


@pytest.mark.parametrize("call", range(1, 9))
@pytest.mark.parametrize(
    "function",
    ["cuCtxPushCurrent", "cuStreamQuery", "cuEventCreate", "cuEventRecord", "cuEventQuery",
     "cuStreamIsCapturing"],
)  # fmt: skip
def test_allocator_survives_a_failure_of_any_driver_call(host, heap, function, call):
    driver, stream = HostDriver(), gpumem.Stream("host")
    gate = driver.block(stream)
    events = host.live()["events"]
    with gpumem.ExternalAllocator(
        heap.alloc, heap.free, heap.empty_cache, memory="host"
    ) as allocator:
        host.fail(function, call, UNKNOWN)
        refused = scenario(allocator, stream)
        host.clear_faults()
        assert len(refused) <= 1
        gate.open()
        stream.synchronize()
    assert not heap.blocks
    assert allocator.stats().in_use == allocator.stats().reserved == 0
    assert host.live()["events"] == events


def test_block_is_freed_when_recorded_streams_are_done(allocator, heap, host):
    driver, side, more = HostDriver(), gpumem.Stream("host"), gpumem.Stream("host")
    events = host.live()["events"]
    buffer = allocator.allocate(10)
    buffer.record_stream(side)
    buffer.record_stream(more)
    other = allocator.allocate(20)
    view = memoryview(other)
    other.record_stream(side)
    other.close()
    with driver.block(side):
        buffer.close()
        view.release()
        del other
        assert allocator.stats().reserved == 30
        assert "free" not in heap.names()
    side.synchronize()
    release_retired()  # the gate's arena
    assert allocator.stats().reserved == 0
    assert host.live()["events"] == events
    assert heap.names().count("free") == 2
