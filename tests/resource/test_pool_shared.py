"""A DriverPool of one process in another: its descriptor, and single buffers of it."""

from __future__ import annotations

import gc
import multiprocessing
import os
import socket
import struct
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from helpers.driver import HostDriver
from helpers.quiesce import quiesce
from helpers.spawned import open_pool_and_buffer

import gpumem
from gpumem.interop import Handle

MIB = 1 << 20
TESTS = Path(__file__).resolve().parents[1]

# The other process: takes a descriptor and a note from a socket, looks, writes, answers.
OTHER = """
import socket, sys
import numpy as np
import gpumem

channel = socket.socket(fileno=int(sys.argv[1]))
note, (fd,), _, _ = socket.recv_fds(channel, 4096, 1)
with gpumem.Handle(fd) as handle:
    pool = gpumem.DriverPool.import_handle("host", handle)
with pool.import_buffer(note) as buffer:
    bytes_seen = np.frombuffer(buffer, np.uint8)
    assert (buffer.nbytes, int(bytes_seen.min()), int(bytes_seen.max())) == (1000, 7, 7)
    assert buffer.ptr % 4096 == 0
    bytes_seen[:] = 9
    del bytes_seen
assert pool.stats().in_use == 0
pool.close()
channel.sendall(b"done")
channel.close()
"""


@pytest.fixture
def pool():
    with gpumem.DriverPool("host", {"shareable": True}) as pool:
        yield pool


@pytest.fixture
def there(pool):
    """The pool as an import of itself: drivers allow that, and count it like another process."""
    with pool.export_handle() as handle:
        there = gpumem.DriverPool.import_handle("host", handle)
    with there:
        yield there


def test_other_process_reads_and_writes_the_same_bytes(pool):
    mine, yours = socket.socketpair()
    with mine, pool.allocate(1000, alignment=4096) as buffer:
        view = np.frombuffer(buffer, np.uint8)
        view[:] = 7
        other = subprocess.Popen(
            [sys.executable, "-W", "error", "-c", OTHER, str(yours.fileno())],
            pass_fds=[yours.fileno()], stderr=subprocess.PIPE, text=True,
        )  # fmt: skip
        with yours, pool.export_handle() as handle:
            socket.send_fds(mine, [pool.export_buffer(buffer)], [handle.fileno()])
        mine.settimeout(60)
        answer = mine.recv(16)
        error = other.communicate(timeout=60)[1]
        assert (answer, error, other.returncode) == (b"done", "", 0)
        assert (view == 9).all()
        del view


def test_pool_handle_is_passed_through_multiprocessing(pool):
    context = multiprocessing.get_context("spawn")
    mine, yours = context.Pipe()
    with pool.allocate(10) as buffer, pool.export_handle() as handle:
        memoryview(buffer)[:] = b"0123456789"
        process = context.Process(target=open_pool_and_buffer, args=(yours,))
        process.start()
        yours.close()
        mine.send((handle, pool.export_buffer(buffer)))
        assert mine.poll(60), "the other process does not answer"
        assert mine.recv() == b"0123456789"
        process.join(60)
        assert process.exitcode == 0


def test_imported_buffer_is_the_same_memory(pool, there):
    with pool.allocate(MIB) as buffer, there.import_buffer(pool.export_buffer(buffer)) as import_:
        np.frombuffer(buffer, np.uint8)[:] = 3
        assert import_.ptr != buffer.ptr
        assert (np.from_dlpack(import_) == 3).all()
        assert there.stats().in_use == MIB
        assert there.stats().num_allocs == 1


def test_buffer_opened_twice_is_released_with_the_last(pool, there):
    with pool.allocate(MIB) as buffer:
        note = pool.export_buffer(buffer)
        first, second = there.import_buffer(note), there.import_buffer(note)
        assert first.ptr == second.ptr
        first.close()
        np.frombuffer(second, np.uint8)[:] = 1
        second.close()
        assert there.stats().num_frees == 2
        with there.import_buffer(note) as again:
            np.frombuffer(again, np.uint8)[:] = 2
            assert np.frombuffer(buffer, np.uint8)[0] == 2


def test_buffer_opened_through_two_pool_imports_is_released_with_the_last(pool, there):
    with pool.export_handle() as handle:
        twin = gpumem.DriverPool.import_handle("host", handle)
    with twin, pool.allocate(MIB) as buffer:
        note = pool.export_buffer(buffer)
        first, second = there.import_buffer(note), twin.import_buffer(note)
        first.close()
        np.frombuffer(second, np.uint8)[:] = 1
        second.close()


def test_last_release_waits_for_the_streams_of_all_openings(pool, there, host):
    host.find_misuse(True)
    try:
        before = [host.misuse_count(kind) for kind in host.MISUSE]
        driver, one, two = HostDriver(), gpumem.Stream("host"), gpumem.Stream("host")
        with pool.allocate(MIB) as buffer:
            note = pool.export_buffer(buffer)
            first, second = there.import_buffer(note, one), there.import_buffer(note, two)
            with driver.block(one):
                driver.fill(first, 5, one)
                first.close()
                second.close()
            one.synchronize()
            two.synchronize()
            assert (np.frombuffer(buffer, np.uint8) == 5).all()
        assert [host.misuse_count(kind) for kind in host.MISUSE] == before, host.misuse_report()
    finally:
        host.find_misuse(False)


def test_view_keeps_an_imported_buffer(pool, there):
    with pool.allocate(100) as buffer:
        view = np.from_dlpack(there.import_buffer(pool.export_buffer(buffer)))
        with pytest.raises(gpumem.errors.InUseError):
            there.close()
        np.frombuffer(buffer, np.uint8)[:] = 4
        assert (view == 4).all()
        del view
        assert there.stats().in_use == 0


def test_imported_pool_neither_allocates_nor_exports(pool, there):
    assert there.imported
    assert not pool.imported
    for call in (lambda: there.allocate(1), lambda: there.allocate_persistent(1)):
        with pytest.raises(gpumem.ConfigError, match="only the process that made it allocates"):
            call()
    with pytest.raises(gpumem.ConfigError, match="only the process that made it exports"):
        there.export_handle()
    assert there.stats().num_allocs == 0


def test_export_of_an_unshareable_pool_names_the_option():
    with gpumem.DriverPool("host") as pool, pool.allocate(1) as buffer:
        with pytest.raises(gpumem.ConfigError, match="created without shareable = True"):
            pool.export_handle()
        with pytest.raises(gpumem.ConfigError, match="created without shareable = True"):
            pool.export_buffer(buffer)
        with pytest.raises(gpumem.ConfigError, match="was not imported"):
            pool.import_buffer(bytes(96))


def test_only_live_buffers_of_the_pool_are_exported(pool, arena):
    with arena.allocate(10) as foreign, pytest.raises(ValueError, match="is not a buffer of"):
        pool.export_buffer(foreign)
    with pool.allocate(0) as empty, pytest.raises(ValueError, match="empty"):
        pool.export_buffer(empty)
    closed = pool.allocate(10)
    closed.close()
    with pytest.raises(gpumem.errors.ClosedError):
        pool.export_buffer(closed)
    with pytest.raises(TypeError):
        pool.export_buffer(None)


def test_invalid_buffer_descriptor_is_refused(pool, there):
    with pool.allocate(100) as buffer:
        good = pool.export_buffer(buffer)
    wrong = [b"", good[:-1], good + b"\0", b"x" * len(good),
             good[:8] + struct.pack("<QQQ", 0, 0, 100) + good[32:],
             good[:8] + struct.pack("<QQQ", 101, 0, 100) + good[32:],
             good[:8] + struct.pack("<QQQ", 100, 1, 100) + good[32:],
             good[:8] + struct.pack("<QQQ", 100, 1 << 63, 100) + good[32:]]  # fmt: skip
    for data in wrong:
        with pytest.raises(ValueError, match="export_buffer returns"):
            there.import_buffer(data)
    for data in (5, None, "text"):
        with pytest.raises(TypeError):
            there.import_buffer(data)
    foreign = good[:32] + bytes(64)
    with pytest.raises(gpumem.errors.DriverError, match="cuMemPoolImportPointer"):
        there.import_buffer(foreign)
    assert there.stats().in_use == 0


def test_import_leaves_the_callers_descriptor_as_it_was(tmp_path):
    with (tmp_path / "file").open("w") as file:
        os.set_inheritable(file.fileno(), True)
        with pytest.raises(gpumem.errors.DriverError):
            gpumem.DriverPool.import_handle("host", file)
        assert os.get_inheritable(file.fileno())


def test_handle_of_a_descriptor_that_is_not_open_is_refused():
    with pytest.raises(OSError, match="Bad file descriptor"):
        Handle(1 << 20)


def test_invalid_pool_descriptor_is_refused(host, tmp_path):
    pools = host.live()["pools"]
    with (tmp_path / "file").open("w") as file, pytest.raises(gpumem.errors.DriverError) as caught:
        gpumem.DriverPool.import_handle("host", file)
    assert caught.value.call == "cuMemPoolImportFromShareableHandle"
    with pytest.raises(OSError, match="Bad file descriptor"):
        gpumem.DriverPool.import_handle("host", 1 << 20)
    for fd, error in ((-1, ValueError), (True, TypeError), ("1", TypeError), (None, TypeError)):
        with pytest.raises(error):
            gpumem.DriverPool.import_handle("host", fd)
    assert host.live()["pools"] == pools


def test_borrowed_and_owned_descriptors_are_closed_by_their_owners(pool):
    def descriptors():
        return len(os.listdir("/proc/self/fd"))

    gc.collect()
    before = descriptors()
    with pool.export_handle() as handle:
        assert descriptors() == before + 1
        there = gpumem.DriverPool.import_handle("host", handle.fileno())
        assert not handle.closed
        os.fstat(handle.fileno())
        there.close()
    assert descriptors() == before
    with pool.export_handle() as handle:
        with pytest.raises(ValueError, match="unknown device"):
            gpumem.DriverPool.import_handle("host:63", handle)
        os.fstat(handle.fileno())
    pool.export_handle()
    gc.collect()
    assert descriptors() == before


def test_pool_handle_is_closed_once_and_may_be_detached(pool):
    handle = pool.export_handle()
    fd = handle.detach()
    assert handle.closed
    os.close(fd)
    handle.close()
    for call in (handle.fileno, handle.detach):
        with pytest.raises(gpumem.errors.ClosedError):
            call()
    assert "closed" in repr(handle)
    for fd, error in ((-1, ValueError), (True, TypeError), ("1", TypeError)):
        with pytest.raises(error):
            gpumem.Handle(fd)


@pytest.mark.parametrize(
    "function",
    ["cuMemPoolExportToShareableHandle", "cuMemPoolExportPointer",
     "cuMemPoolImportFromShareableHandle", "cuMemPoolImportPointer", "cuEventCreate"],
)  # fmt: skip
def test_failed_driver_call_leaves_both_sides_unchanged(pool, host, function):
    def everything():
        with pool.allocate(100) as buffer, pool.export_handle() as handle:
            note = pool.export_buffer(buffer)
            with gpumem.DriverPool.import_handle("host", handle) as there:
                with there.import_buffer(note), there.import_buffer(note):
                    pass
                assert there.stats().in_use == 0

    everything()
    quiesce()  # what earlier tests left must not go in between
    before = host.live()
    host.fail(function, 1, 999)
    with pytest.raises(gpumem.errors.DriverError):
        everything()
    host.clear_faults()
    gc.collect()
    everything()
    assert gpumem.Device("host").free_bytes
    assert {k: host.live()[k] for k in ("pools", "mappings", "events")} == {
        k: before[k] for k in ("pools", "mappings", "events")
    }


def test_device_without_pool_sharing_names_the_reason(host):
    asked = host.call_count("cuDeviceGetAttribute")
    gpumem.DriverPool("host", {"shareable": True}).close()
    asked = host.call_count("cuDeviceGetAttribute") - asked
    pools = host.live()["pools"]
    host.fail("cuDeviceGetAttribute", asked, 1)  # the last question, which handle types: unknown
    with pytest.raises(gpumem.ConfigError, match="pools of host:0 cannot be shared"):
        gpumem.DriverPool("host", {"shareable": True})
    host.clear_faults()
    assert host.live()["pools"] == pools
