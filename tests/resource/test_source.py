"""Arenas over somebody else's memory: callables, C functions, another resource."""

import contextlib
import ctypes
import gc
import mmap
import sys
import threading
import weakref

import numpy as np
import pytest
from helpers import child
from helpers.driver import HostDriver
from helpers.resources import Answers
from helpers.single_block import BLOCK, next_address, single_block_arena
from helpers.threads import running, with_a_context_stack_of_its_own
from helpers.waiting import opened_soon

import gpumem
from gpumem import interop

KIB, MIB = 1 << 10, 1 << 20
EXACT = {"extend_strategy": "same_as_requested"}
OUT_OF_MEMORY, UNKNOWN = 2, 999


class Pages:
    """A source of mapped pages that counts; `limit` bytes at most."""

    def __init__(self, limit=1 << 40):
        self.limit = limit
        self.asked = []
        self.held = {}
        self.freed = []

    def allocate(self, nbytes):
        self.asked.append(nbytes)
        if sum(pages.nbytes for pages in self.held.values()) + nbytes > self.limit:
            return None
        pages = np.frombuffer(mmap.mmap(-1, -(-nbytes // 4096) * 4096), np.uint8)[:nbytes]
        self.held[pages.ctypes.data] = pages
        return pages.ctypes.data

    def free(self, address, nbytes):
        assert self.held.pop(address).nbytes == nbytes
        self.freed.append((address, nbytes))


class Gives:
    """A source that always gives the same answer, or raises it."""

    def __init__(self, answer):
        self.answer = answer
        self.freed = []

    def allocate(self, nbytes):
        if isinstance(self.answer, BaseException):
            raise self.answer
        return self.answer

    def free(self, address, nbytes):
        self.freed.append((address, nbytes))


# ---- callables -----------------------------------------------------------------------------------


def test_blocks_lie_in_the_sources_memory(make_arena, host):
    source = Pages()
    arena = make_arena(source=source)
    calls = host.call_count("cuMemAlloc")
    buffers = [arena.allocate(100 * KIB) for _ in range(30)]
    assert host.call_count("cuMemAlloc") == calls
    for buffer in buffers:
        assert any(
            address <= buffer.ptr and buffer.ptr + buffer.allocated_nbytes <= address + pages.nbytes
            for address, pages in source.held.items()
        )
        np.frombuffer(buffer, np.uint8)[:] = 7
    assert source.asked == [MIB, 2 * MIB]
    assert arena.stats().reserved == 3 * MIB
    buffers.clear()


def test_shrink_and_close_return_regions_as_they_were_taken():
    source = Pages()
    arena = gpumem.Arena("host", EXACT, source=source)
    one, two = arena.allocate(MIB), arena.allocate(2 * MIB)
    addresses = one.ptr, two.ptr
    one.close()
    arena.shrink()
    assert source.freed == [(addresses[0], MIB)]
    weights = arena.allocate_persistent(5000)
    two.close()
    weights.close()
    arena.close()
    assert source.freed[1:] == [(addresses[1], 2 * MIB), (source.freed[2][0], 5120)]
    assert not source.held


def test_refused_region_is_retried_smaller_before_giving_up(make_arena):
    source = Pages(limit=3 * MIB)
    arena = make_arena({"initial_chunk_size_bytes": 4 * MIB}, source=source)
    buffer = arena.allocate(2 * MIB)
    assert source.asked[0] == 4 * MIB
    assert 2 * MIB <= source.asked[-1] <= 3 * MIB
    before = arena.stats(), arena.blocks()
    with pytest.raises(gpumem.OutOfMemoryError, match=r"asked for 2\.0 MiB"):
        arena.allocate(2 * MIB)
    assert (arena.stats(), arena.blocks()) == before
    buffer.close()


def test_idle_regions_are_returned_before_a_request_fails(make_arena):
    source = Pages(limit=4 * MIB)
    arena = make_arena(EXACT, source=source)
    del [arena.allocate(2 * MIB), arena.allocate(2 * MIB)][:]
    assert arena.allocate(4 * MIB).nbytes == 4 * MIB


@pytest.mark.parametrize("answer", [None, 0])
def test_none_and_zero_mean_out_of_memory(make_arena, answer):
    source = Gives(answer)
    with pytest.raises(gpumem.OutOfMemoryError) as caught:
        make_arena(source=source).allocate(10)
    assert caught.value.__cause__ is None
    assert not source.freed


def test_memory_error_means_out_of_memory_and_is_the_cause(make_arena):
    problem = MemoryError("no more")
    with pytest.raises(gpumem.OutOfMemoryError) as caught:
        make_arena(source=Gives(problem)).allocate(10)
    assert caught.value.__cause__ is problem


@pytest.mark.parametrize("persistent", [False, True])
def test_other_exceptions_become_the_cause_of_a_source_error(make_arena, persistent):
    problem = KeyError("lost")
    arena = make_arena(source=Gives(problem), name="theirs")
    with pytest.raises(
        gpumem.errors.SourceError, match="source of arena 'theirs' raised KeyError"
    ) as got:
        (arena.allocate_persistent if persistent else arena.allocate)(10)
    assert got.value.__cause__ is problem
    assert arena.stats().reserved == 0


def test_interrupt_in_a_source_passes(make_arena):
    with pytest.raises(KeyboardInterrupt):
        make_arena(source=Gives(KeyboardInterrupt())).allocate(10)


def test_source_is_called_again_after_a_failure(make_arena):
    source = Pages()
    arena = make_arena(source=source)
    source.held = None
    with pytest.raises(gpumem.errors.SourceError):
        arena.allocate(10)
    source.held = {}
    assert arena.allocate(10).nbytes == 10


@pytest.mark.parametrize("answer", ["0x1000", 1.5, True, b"1234"])
def test_invalid_address_is_an_error(make_arena, answer):
    with pytest.raises(gpumem.errors.SourceError, match="expected an address, or None"):
        make_arena(source=Gives(answer)).allocate(10)


@pytest.mark.parametrize(
    ("answer", "why"),
    [
        (lambda base: base + 128, "not a multiple of 256"),
        (lambda base: -256, "is not an address"),
        (lambda base: (1 << 64) - 256, "is not an address"),
        (lambda base: 1 << 200, "is not an address"),
        (lambda base: 4096, "is not all mapped"),
    ],
)
def test_unusable_address_is_an_error_and_returned(make_arena, answer, why):
    pages = mmap.mmap(-1, 2 * MIB)
    given = answer(np.frombuffer(pages, np.uint8).ctypes.data)
    source = Gives(given)
    arena = make_arena(source=source)
    with pytest.raises(gpumem.errors.SourceError, match=why):
        arena.allocate(10)
    assert source.freed == ([(given, MIB)] if 0 < given < 1 << 64 else [])
    assert arena.stats().reserved == 0


def test_overlapping_memory_is_refused(make_arena):
    pages = np.frombuffer(mmap.mmap(-1, 4 * MIB), np.uint8)
    arena = make_arena(EXACT, source=Gives(pages.ctypes.data))
    held = arena.allocate(MIB)
    with pytest.raises(gpumem.errors.SourceError, match=r"overlaps 1\.0 MiB"):
        arena.allocate(2 * MIB)
    arena.check_invariants()
    held.close()


@pytest.mark.parametrize("functions", [False, True])
def test_address_that_is_given_twice_is_refused_and_stays_mapped(functions):
    child.run_quietly(
        """
import ctypes, mmap, sys
import numpy as np
import gpumem

libc = ctypes.CDLL(None)
pages = np.frombuffer(mmap.mmap(-1, 1 << 24), np.uint8)
libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)

class Same:
    allocate = staticmethod(lambda nbytes: pages.ctypes.data)
    free = staticmethod(lambda address, nbytes: libc.munmap(address, nbytes))

if sys.argv[1] == "True":
    take = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_size_t)(Same.allocate)
    give = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_size_t)(Same.free)
    source = tuple(ctypes.cast(each, ctypes.c_void_p).value for each in (take, give))
else:
    source = Same()
arena = gpumem.Arena("host", {"extend_strategy": "same_as_requested"}, source=source)
held = arena.allocate(1 << 20)
before = arena.stats(), arena.blocks()
for _ in range(2):
    try:
        arena.allocate(1 << 20)
    except gpumem.errors.SourceError:
        pass
    else:
        print("an address was accepted twice")
    np.frombuffer(held, np.uint8)[:] = 7
arena.check_invariants()
assert (arena.stats(), arena.blocks()) == before
""",
        str(functions),
    )


def test_address_that_a_resource_gives_twice_is_refused_and_stays_its_own(make_arena):
    pages = np.frombuffer(mmap.mmap(-1, 4 * MIB), np.uint8)
    resource = Answers(pages.ctypes.data)
    arena = make_arena(EXACT, source=resource)
    held = arena.allocate(MIB)
    with pytest.raises(gpumem.errors.SourceError, match=r"overlaps 1\.0 MiB"):
        arena.allocate(MIB)
    assert not resource.returned
    held.close()
    arena.close()
    assert {(address, nbytes) for address, nbytes, _ in resource.returned} == {
        (pages.ctypes.data, MIB)
    }


@pytest.mark.parametrize("memory", ["host/host_accessible", "host/managed"])
def test_memory_of_another_kind_is_refused(make_arena, memory):
    with pytest.raises(gpumem.errors.SourceError, match="memory of host:0"):
        make_arena(memory=memory, source=Pages()).allocate(10)


@pytest.mark.parametrize("source", [object(), 5, "malloc", (1,), (1, 2, 3), (0, 5), (1.0, 2)])
def test_invalid_source_is_a_type_error(source):
    with pytest.raises(TypeError, match="source = "):
        gpumem.Arena("host", source=source)


def test_virtual_backing_over_a_source_is_refused():
    with pytest.raises(gpumem.ConfigError, match="virtual"):
        gpumem.Arena("host", {"backing": "virtual"}, source=Pages())


# ---- when and where it is called -----------------------------------------------------------------


def test_memory_is_returned_only_after_queued_work(host, stream):
    order = []

    class Notes(Pages):
        def free(self, address, nbytes):
            super().free(address, nbytes)
            order.append("freed")

    work = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(lambda _: order.append("used"))
    with gpumem.Arena("host", source=Notes()) as arena:
        buffer = arena.allocate(MIB, stream)
        host.set_lag(30_000_000)
        HostDriver().call("cuLaunchHostFunc", stream.ptr, work, None)
        buffer.close()
    assert order == ["used", "freed"]


def test_source_runs_while_other_threads_allocate_and_free(make_arena):
    inside, leave = threading.Event(), threading.Event()

    class Slow(Pages):
        def allocate(self, nbytes):
            if self.asked:
                inside.set()
                assert leave.wait(60)
            return super().allocate(nbytes)

    arena = make_arena(source=Slow())
    kept = arena.allocate(MIB // 2)
    arena.allocate(KIB).close()
    with running(lambda: arena.allocate(4 * MIB).close()):
        assert inside.wait(60)
        kept.close()
        for _ in range(100):
            arena.allocate(KIB).close()
        leave.set()


def test_block_freed_while_the_source_runs_is_returned_by_the_next_call(make_arena):
    arena = None

    class Frees(Pages):
        def allocate(self, nbytes):
            held.clear()
            return super().allocate(nbytes)

    held, source = [], Frees()
    arena = make_arena({"enable": False}, source=source)
    held.append(arena.allocate(KIB))
    two = arena.allocate(2 * KIB)
    assert not source.freed
    arena.allocate(3 * KIB).close()
    assert sorted(nbytes for _, nbytes in source.freed) == [KIB, 3 * KIB]
    two.close()


@pytest.mark.parametrize("call", ["allocate", "allocate_persistent", "shrink", "close"])
def test_source_that_calls_its_own_arena_is_an_error(make_arena, call):
    arena = None

    class Selfish(Pages):
        def allocate(self, nbytes):
            if call in ("shrink", "close"):
                getattr(arena, call)()
            else:
                getattr(arena, call)(2 * MIB)
            return super().allocate(nbytes)

    arena = make_arena(source=Selfish())
    with pytest.raises(gpumem.errors.SourceError) as caught:
        arena.allocate(10)
    assert "is waiting for it" in str(caught.value.__cause__)


@pytest.mark.parametrize("call", ["enable_peer", "transports", "register", "export"])
def test_source_that_looks_at_its_arena_does_not_wait_for_itself(make_arena, call):
    ended = []

    class Curious(Pages):
        def allocate(self, nbytes):
            if self.regions == 1:
                with contextlib.suppress(gpumem.errors.GpumemError, ValueError):
                    if call == "enable_peer":
                        arena.enable_peer("host:0")
                    elif call == "export":
                        interop.export(held)
                    elif call == "register":
                        held.register().release()
                    else:
                        held.transports()
                ended.append(call)
            self.regions += 1
            return super().allocate(nbytes)

    source = Curious()
    source.regions = 0
    arena = make_arena({"backing": "regions"}, source=source)
    held = arena.allocate(10)
    arena.allocate(40 * MIB).close()
    assert ended == [call]
    held.close()


def test_exception_of_free_is_reported_and_stops_nothing(monkeypatch):
    class Stuck(Pages):
        def free(self, address, nbytes):
            super().free(address, nbytes)
            raise OSError("stuck")

    told = []
    monkeypatch.setattr(sys, "unraisablehook", lambda unraisable: told.append(unraisable.exc_value))
    source = Stuck()
    arena = gpumem.Arena("host", EXACT, source=source)
    del [arena.allocate(MIB), arena.allocate(2 * MIB)][:]
    assert arena.shrink().released_bytes == 3 * MIB
    assert [str(error) for error in told] == ["stuck", "stuck"]
    arena.close()


def test_views_keep_memory_and_source_alive():
    source = Pages()
    there = weakref.ref(source)
    arena = gpumem.Arena("host", source=source)
    view = np.from_dlpack(arena.allocate(1000))
    del arena, source
    gc.collect()
    view[:] = 5
    assert there().held
    del view
    assert gpumem.Device("host").free_bytes  # what nobody refers to goes back here
    gc.collect()
    assert there() is None


def test_closed_arena_releases_its_source():
    source = Pages()
    source.arena = gpumem.Arena("host", source=source)
    source.arena.allocate(10).close()
    there = weakref.ref(source)
    source.arena.close()
    assert not source.held
    del source
    gc.collect()
    assert there() is None


@pytest.mark.parametrize("error", [OUT_OF_MEMORY, UNKNOWN])
@with_a_context_stack_of_its_own
def test_failure_of_any_driver_call_leaves_nothing_behind(host, error):
    for call in range(1, 60):
        source, stream = Pages(), gpumem.Stream("host")
        arena = gpumem.Arena("host", EXACT, source=source)
        host.fail(None, call, error)
        calls = host.call_count()
        try:
            with arena.allocate(MIB, stream), arena.allocate(2 * MIB):
                pass
            arena.shrink()
        except (gpumem.OutOfMemoryError, gpumem.errors.DriverError):
            pass
        reached = host.call_count() - calls >= call
        host.clear_faults()
        arena.check_invariants()
        assert arena.stats().in_use == 0
        arena.close()
        if not reached:
            break
    assert call > 3


@pytest.mark.parametrize("refused", range(1, 6))
def test_failure_of_any_source_call_leaves_nothing_behind(refused):
    class Refuses(Pages):
        def allocate(self, nbytes):
            address = super().allocate(nbytes)
            if len(self.asked) == refused:
                self.held.pop(address)
                raise MemoryError
            return address

    source = Refuses()
    arena = gpumem.Arena("host", EXACT, source=source)
    held = []
    for size in (1, 2, 3, 4):
        try:
            held.append(arena.allocate(size * MIB))
        except gpumem.OutOfMemoryError:
            arena.check_invariants()
    assert len(source.held) == len(held)
    held.clear()
    arena.close()
    assert not source.held


# ---- C functions ---------------------------------------------------------------------------------


def test_source_may_be_addresses_of_c_functions(make_arena):
    held = {}

    @ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_size_t)
    def allocate(nbytes):
        pages = np.frombuffer(mmap.mmap(-1, nbytes), np.uint8)
        held[pages.ctypes.data] = pages
        return pages.ctypes.data if nbytes <= 2 * MIB else None

    @ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_size_t)
    def free(address, nbytes):
        assert held.pop(address).nbytes == nbytes

    pair = tuple(ctypes.cast(one, ctypes.c_void_p).value for one in (allocate, free))
    arena = make_arena(EXACT, source=pair)
    with arena.allocate(MIB) as buffer:
        assert buffer.ptr in held
    arena.shrink()
    assert not held
    with pytest.raises(gpumem.OutOfMemoryError):
        arena.allocate(3 * MIB)


def test_memory_with_malloc_alignment_is_refused(make_arena):
    memory = gpumem.DriverPool("host").allocate(2 * MIB + 256)
    freed = []

    @ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_size_t)
    def allocate(nbytes):
        return memory.ptr + 16

    @ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_size_t)
    def free(address, nbytes):
        freed.append(address)

    pair = tuple(ctypes.cast(one, ctypes.c_void_p).value for one in (allocate, free))
    with pytest.raises(gpumem.errors.SourceError, match="not a multiple of 256"):
        make_arena(source=pair).allocate(10)
    assert freed == [memory.ptr + 16]


# ---- another resource ----------------------------------------------------------------------------


@pytest.mark.parametrize("below", ["arena", "pool"])
def test_arena_allocates_from_another_resources_buffers(host, below):
    resource = gpumem.Arena("host") if below == "arena" else gpumem.DriverPool("host")
    arena = gpumem.Arena("host", EXACT, source=resource)
    one, two = arena.allocate(100 * KIB), arena.allocate_persistent(3 * MIB)
    np.frombuffer(one, np.uint8)[:] = 1
    assert resource.stats().in_use == 100 * KIB + 3 * MIB
    with pytest.raises(gpumem.errors.InUseError):
        resource.close()
    one.close()
    two.close()
    arena.shrink()
    assert resource.stats().in_use == 0
    arena.close()
    resource.close()


def test_source_resources_error_is_the_cause(make_arena):
    below = make_arena({"max_mem": MIB})
    arena = make_arena(source=below)
    with pytest.raises(gpumem.OutOfMemoryError) as caught:
        arena.allocate(2 * MIB)
    assert isinstance(caught.value.__cause__, gpumem.OutOfMemoryError)
    assert caught.value.__cause__.limit == MIB


def test_region_of_a_resource_is_usable_on_every_stream(make_arena, virtual_clock):
    """What the resource's last user queued is done before the arena hands the memory out."""
    driver, theirs, ours = HostDriver(), gpumem.Stream("host"), gpumem.Stream("host")
    below = make_arena({"stream_reuse": "wait"})
    virtual_clock.use_virtual_clock(False)
    virtual_clock.set_lag(50_000_000)
    with below.allocate(MIB, theirs) as before:
        driver.fill(before, 1, theirs)
    arena = make_arena(EXACT, source=below)
    after = arena.allocate(MIB, ours)
    np.frombuffer(after, np.uint8)[:] = 2
    theirs.synchronize()
    assert (np.frombuffer(after, np.uint8) == 2).all()
    after.close()
    arena.close()


@pytest.fixture
def region_in_use(make_arena, host):
    """An arena over one with room for its region, which a stream behind a gate still uses."""
    own, side = gpumem.Stream("host"), gpumem.Stream("host")
    below, pin = single_block_arena(make_arena)
    arena = gpumem.Arena("host", EXACT, source=below)
    buffer = arena.allocate(BLOCK, own)
    buffer.record_stream(side)
    with HostDriver().block(side) as gate:
        address = buffer.ptr
        buffer.close()
        yield below, arena, side, gate, address
    arena.close()
    pin.close()


def test_shrink_leaves_a_region_that_a_recorded_stream_uses(region_in_use):
    below, arena, side, gate, address = region_in_use
    arena.shrink()
    assert next_address(below) is None
    gate.open()
    side.synchronize()
    arena.shrink()
    assert next_address(below) == address


def test_close_gives_a_region_back_after_every_streams_work(region_in_use):
    below, arena, side, gate, address = region_in_use
    with opened_soon(gate):
        arena.close()
        assert side.query(), "given back while a stream used it"
    assert next_address(below) == address


def test_resource_of_other_memory_is_refused_as_a_source(make_arena):
    with pytest.raises(gpumem.ConfigError, match="a resource of the same memory"):
        gpumem.Arena("host", source=make_arena(memory="host/managed"))


# ---- the end of a process ------------------------------------------------------------------------


def test_fork_and_exit_call_no_source():
    child.run_quietly("""
        import os, mmap, warnings, numpy as np, gpumem
        warnings.simplefilter("ignore", DeprecationWarning)
        here = os.getpid()

        class Source:
            def allocate(self, nbytes):
                self.pages = np.frombuffer(mmap.mmap(-1, nbytes), np.uint8)
                return self.pages.ctypes.data

            def free(self, address, nbytes):
                print("freed", os.getpid() == here)

        arena = gpumem.Arena("host", source=Source())
        below = gpumem.Arena("host")
        above = gpumem.Arena("host", source=below)
        held = arena.allocate(10), above.allocate(10), np.from_dlpack(above.allocate(10))
        if os.fork() == 0:
            try:
                arena.allocate(10)
            except gpumem.errors.ClosedError:
                del held, arena, above, below
        else:
            assert os.wait()[1] == 0
    """)
