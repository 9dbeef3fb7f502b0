"""Refusals for limits of the process: the error names the limit, and nothing is imported for it."""

import errno
import os

import pytest
from helpers import child

import gpumem

MIB = 1 << 20

OPEN_FILES = """
import resource
import sys
import gpumem
from gpumem.errors import OutOfMemoryError
hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
resource.setrlimit(resource.RLIMIT_NOFILE, (48, hard))
arena, blocks = gpumem.Arena("host"), []
before = set(sys.modules)
try:
    while len(blocks) < 100:
        blocks.append(arena.allocate(10, shareable=True))
except OutOfMemoryError as error:
    assert "host:0 is out of file descriptors" in str(error), error
    assert "too many open files: RLIMIT_NOFILE allows 48" in error.advice, error.advice
    assert error.report.lacks == "file descriptors"
assert len(blocks) < 48 and set(sys.modules) == before
try:
    gpumem.Arena("host", {"numa_node": 0})
except OutOfMemoryError as error:
    assert error.report.lacks == "file descriptors", error
else:
    raise AssertionError
blocks.clear()
arena.allocate(10, shareable=True).close()
"""

ADDRESSES = """
import gpumem
from gpumem.errors import OutOfMemoryError
arena, blocks = gpumem.Arena("host"), []
try:
    while len(blocks) < 100:
        blocks.append(arena.allocate(10 << 20))
except OutOfMemoryError as error:
    assert "out of address space" in str(error) and "RLIMIT_AS allows" in error.advice, error
assert len(blocks) < 100
blocks.clear()
arena.allocate(10 << 20).close()
"""


def limited(kibibytes, script):
    return f"""
import resource
resource.setrlimit(resource.RLIMIT_AS, ({kibibytes} << 10, {kibibytes} << 10))
{script}"""


def test_a_refusal_names_the_limit_on_open_files_and_imports_nothing():
    child.run_quietly(OPEN_FILES)


def test_a_refusal_names_the_limit_on_addresses():
    child.run_quietly(limited(200_000, ADDRESSES))


@pytest.mark.parametrize("kibibytes", [2_000_000, 3_000_000, 4_000_000, 5_000_000])
def test_an_arena_serves_small_and_large_blocks_under_a_limit_on_addresses(kibibytes):
    child.run_quietly(
        limited(
            kibibytes,
            """
import gpumem
arena = gpumem.Arena("host")
blocks = arena.allocate(1000), arena.allocate(10 << 20), gpumem.Arena("host").allocate(5)
""",
        )
    )


# ---- mappings, addresses, locked and private memory ----------------------------------------------

LIBC = """
import ctypes
libc = ctypes.CDLL(None)
libc.mmap.restype = ctypes.c_void_p
libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t] + [ctypes.c_int] * 3 + [ctypes.c_long]
libc.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
libc.munmap.argtypes = libc.mlock.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
FAILED, PAGE, RESERVED = ctypes.c_void_p(-1).value, 4096, 0x4022

def reserve(nbytes):
    return libc.mmap(None, nbytes, 0, RESERVED, -1, 0)
"""

MAPPINGS = """
import sys
import gpumem
from gpumem.errors import OutOfMemoryError
arena = gpumem.Arena("host", {"backing": "regions", "extend_strategy": "same_as_requested"})
arena.allocate(1 << 20).close()
pool, few = gpumem.DriverPool("host"), gpumem.DriverPool("host", budget=gpumem.Budget(4096))
pool.allocate(1 << 20).close()
with open("/proc/sys/vm/max_map_count") as limit, open("/proc/self/maps") as maps:
    pages = int(limit.read()) - len(maps.readlines()) - int(sys.argv[1])
base = reserve(pages * PAGE)
for page in range(0, pages, 2):
    libc.mprotect(base + page * PAGE, PAGE, 1)
held, fill = [], []
for make in (lambda: arena.allocate(1 << 20), lambda: gpumem.Arena("host")):
    made = []
    try:    # Python's heap cannot grow, once the mappings are used up
        while held:
            fill.append(bytes(2048))
    except MemoryError:
        pass
    try:
        while True:
            made.append(make())
    except OutOfMemoryError as error:
        assert error.report.lacks == "memory mappings", error
        assert "mappings that vm.max_map_count allows" in str(error), error
    assert len(made) < 2000
    held.append(made)
try:
    few.allocate(4097)
except OutOfMemoryError as error:
    assert "budget" in str(error), error
try:
    while True:
        made.append(pool.allocate(1 << 20))
except OutOfMemoryError as error:
    assert error.report.lacks == "memory mappings", error
held.clear()
made.clear()
libc.munmap(base, pages * PAGE)
arena.allocate(1 << 20).close()
"""

ALL_ADDRESSES = """
import gpumem
arena = gpumem.Arena("host")
held, size = [], 1 << 46
while size >= 1 << 30:
    if (base := reserve(size)) == FAILED:
        size //= 2
    else:
        held.append((base, size))
try:
    arena.allocate(1 << 30)
except gpumem.OutOfMemoryError as error:
    assert error.report.lacks == "address space", error
    assert "nearly all that a process can have" in error.advice, error
for base, size in held:
    libc.munmap(base, size)
arena.allocate(1 << 30).close()
"""

LOCKED = """
import resource
import gpumem
from gpumem._testing import host_device as host
arena = gpumem.Arena("host/host_accessible")
resource.setrlimit(resource.RLIMIT_MEMLOCK, (1 << 20, 1 << 20))
libc.mlock(libc.mmap(None, 1 << 20, 3, 0x22, -1, 0), 1 << 20)
host.fail(None, 1, 2, 0)     # as a driver that may not lock more
try:
    arena.allocate(1 << 20)
except gpumem.OutOfMemoryError as error:
    assert error.report.lacks == "locked memory" and "ulimit -l" in error.advice, error
else:
    raise AssertionError
"""

PRIVATE = """
import resource
import gpumem
arena, blocks = gpumem.Arena("host/host_accessible"), []
resource.setrlimit(resource.RLIMIT_DATA, (300 << 20, 300 << 20))
try:
    while len(blocks) < 1000:
        blocks.append(arena.allocate(4 << 20))
except gpumem.OutOfMemoryError as error:
    assert error.report.lacks == "private writable memory" and "ulimit -d" in error.advice, error
assert len(blocks) < 100
blocks.clear()
arena.allocate(4 << 20).close()
"""


FILES = """
import resource
import gpumem
resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, resource.RLIM_INFINITY))
for nbytes, shareable in ((10, False), (8 << 20, False), (8 << 20, True)):
    try:
        gpumem.Arena("host").allocate(nbytes, shareable=shareable)
    except gpumem.OutOfMemoryError as error:
        assert error.report.lacks == "room in files" and "ulimit -f" in error.advice, error
    else:
        raise AssertionError
"""


@pytest.mark.parametrize("left", [60, 300])
def test_a_refusal_names_the_limit_on_mappings(left):
    child.run_quietly(LIBC + MAPPINGS, str(left))


@pytest.mark.parametrize(
    "script", [ALL_ADDRESSES, LOCKED, PRIVATE, FILES], ids=["all", "lock", "data", "files"]
)
def test_a_refusal_names_addresses_files_locked_or_private_memory(script):
    child.run_quietly(LIBC + script)


@pytest.mark.parametrize("kibibytes", [400_000, 2_000_000, 5_000_000])
def test_many_arenas_under_a_limit_on_addresses_end_in_an_error_that_names_it(kibibytes):
    child.run_quietly(
        limited(
            kibibytes,
            """
import gpumem
arenas = []
try:
    while len(arenas) < 100:
        arena = gpumem.Arena("host")
        arenas.append((arena, arena.allocate(1000)))
except gpumem.OutOfMemoryError as error:
    assert error.report.lacks == "address space" and "ulimit -v" in error.advice, error
assert 4 < len(arenas) < 100
""",
        )
    )


def test_a_refusal_names_the_limit_on_files_of_the_system(make_arena, host, monkeypatch):
    def refuse(name):
        raise OSError(errno.ENFILE, os.strerror(errno.ENFILE))

    arena = make_arena()
    monkeypatch.setattr(os, "memfd_create", refuse)
    host.fail("cuMemCreate", 1, 2)
    with pytest.raises(gpumem.OutOfMemoryError, match=r"out of file descriptors.*fs\.file-max"):
        arena.allocate(MIB)


# ---- other reasons -------------------------------------------------------------------------------


def test_block_that_is_whole_and_waits_for_a_stream_is_not_called_in_pieces(
    make_arena, virtual_clock, driver
):
    arena = make_arena(
        {"max_mem": 4 * MIB, "backing": "regions", "initial_chunk_size_bytes": 4 * MIB}
        | {"oom_wait_ms": 0}
    )
    one, other = gpumem.Stream("host"), gpumem.Stream("host")
    block = arena.allocate(4 * MIB, one)
    virtual_clock.set_lag(30_000_000)
    driver.fill(block, 1, one)
    block.close()
    with pytest.raises(gpumem.OutOfMemoryError) as caught:
        arena.allocate(4 * MIB, other)
    assert caught.value.report.largest_free == 4 * MIB
    assert caught.value.report.remedies[0].startswith("wait for streams")
    assert "in pieces" not in str(caught.value)
    virtual_clock.advance_clock(30_000_000)


@pytest.mark.parametrize("nothing", [0, None])
def test_a_source_that_returns_nothing_is_named_as_the_reason(make_arena, nothing):
    class Source:
        allocate = staticmethod(lambda nbytes: nothing)
        free = staticmethod(lambda address, nbytes: None)

    with pytest.raises(gpumem.OutOfMemoryError) as caught:
        make_arena(source=Source()).allocate(MIB)
    assert caught.value.advice.startswith("the source returned nothing")


# Each refusal is the first of its kind in the process, and runs with imports refused.
NO_IMPORTS = """
import builtins, ctypes, os, sys, tempfile
import gpumem
from gpumem import adaptors, interop, observe, planning, session, traces
from gpumem._testing import host_device as host

MIB = 1 << 20
junk = os.path.join(tempfile.mkdtemp(), "junk.json")
open(junk, "wb").close()
arena = gpumem.Arena("host", {"max_mem": 8 * MIB})
debug, closed, asleep, fresh = (gpumem.Arena("host", debug_heap=n == 0) for n in range(4))
held, tensor = asleep.allocate(100), gpumem.zeros((4, 4), "float32", resource=arena)
under = gpumem.Arena("host", budget=gpumem.Budget(MIB))
pool = gpumem.DriverPool("host", gpumem.PoolConfig(max_size=MIB))
nothing = gpumem.ExternalAllocator(lambda nbytes: 0, lambda address: None, memory="host")
rows = arena.virtual((64, 64 << 10), "u1")
closed.close()
asleep.sleep()

def overrun():
    with debug.allocate(100) as block:
        ctypes.memset(block.ptr + 100, 7, 4)
    debug.check_heap()

def without_memory():
    host.fail("cuMemCreate", 1, 2, 0)
    try:
        fresh.allocate(MIB)
    finally:
        host.clear_faults()

refusals = [
    without_memory,
    lambda: arena.allocate(1 << 60), lambda: arena.allocate(-1), lambda: arena.allocate(16 * MIB),
    lambda: under.allocate(2 * MIB), lambda: pool.allocate(2 * MIB), lambda: nothing.allocate(5),
    lambda: gpumem.Arena("host", source=nothing).allocate(5), lambda: asleep.allocate(5),
    lambda: adaptors.limit(arena, MIB).allocate(2 * MIB), lambda: closed.allocate(5), arena.close,
    lambda: gpumem.Arena("host", {"max_men": 5}), lambda: gpumem.zeros((3,), "floot"), overrun,
    lambda: gpumem.Arena("hosst"), lambda: gpumem.zeros((-3,), "uint8"), lambda: tensor[9],
    lambda: gpumem.from_dlpack(3), lambda: tensor == 2.0, lambda: rows.commit(0, 100),
    lambda: traces.load_trace(junk), lambda: arena.sleep(to="/nowhere/asleep"),
    lambda: observe.record(arena, "/nowhere/events"), lambda: observe.tag(5),
    lambda: planning.partition(5), lambda: session.Session(5), lambda: arena.allocate(5, "x"),
    lambda: interop.Importer("host").import_memory(5),
]
imports, armed = builtins.__import__, False

def refuse(name, *more):
    assert not armed or name.startswith("numpy"), name      # the text of a dtype is NumPy's
    return imports(name, *more)

def note(event, arguments):
    if armed and event == "import":
        os._exit(3)     # a module that is new to the process

builtins.__import__ = refuse
sys.addaudithook(note)
for number, call in enumerate(refusals):
    armed = True
    try:
        call()
    except (gpumem.GpumemError, MemoryError, TypeError, ValueError, IndexError, OSError) as error:
        armed = False
        assert str(error), number
    else:
        raise AssertionError(number)
del held
"""


def test_nothing_is_imported_while_errors_of_many_kinds_are_made():
    child.run_quietly(NO_IMPORTS)
