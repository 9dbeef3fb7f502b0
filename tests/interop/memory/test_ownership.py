"""Whose descriptor is whose, over every success and failure."""

from __future__ import annotations

import os
import socket

import pytest
from helpers.child import run_quietly
from helpers.descriptors import open_descriptors
from helpers.threads import in_threads

import gpumem
from gpumem import interop
from gpumem.errors import BadHandleError, InvalidDescriptorError
from gpumem.interop import Handle, MemoryDescriptor, MemoryHandleType

pytestmark = pytest.mark.usefixtures("nothing_left")

NBYTES = 1 << 16
FILES = ["MEMFD", "OPAQUE_FD"]


@pytest.fixture
def given(fd):
    """A descriptor of the caller's that a test may lose."""
    number = os.dup(fd)
    yield number
    if is_open(number):
        os.close(number)


def memory_of_the_driver(host):
    return {name: host.live()[name] for name in ("handles", "mappings", "reservations")}


def is_open(number: int) -> bool:
    return os.path.exists(f"/proc/self/fd/{number}")


@pytest.mark.parametrize("kind", FILES)
def test_borrowed_descriptor_stays_open(importer, describe, given, kind):
    memory = importer.import_memory(describe(handle=given, handle_type=MemoryHandleType[kind]))
    os.close(given)  # he may close it at once
    memory.tensor(4, "u1").numpy()[:] = 1
    memory.close()


@pytest.mark.parametrize("kind", FILES)
def test_consumed_descriptor_is_closed_on_success_only(importer, describe, given, kind):
    memory = importer.import_memory(
        describe(handle=given, handle_type=MemoryHandleType[kind]), consume=True
    )
    assert not is_open(given)
    memory.close()


def test_consumed_object_is_closed_through_its_own_close(importer, describe, given):
    handle = Handle(os.dup(given))
    importer.import_memory(describe(handle=handle), consume=True).close()
    assert handle.closed
    with open(given, "rb+", closefd=False) as file:
        importer.import_memory(describe(handle=file)).close()
        assert not file.closed


@pytest.mark.parametrize("consume", [False, True])
@pytest.mark.parametrize(
    ("kind", "call"),
    [
        ("MEMFD", "cuMemHostRegister"),
        ("MEMFD", "cuMemHostGetDevicePointer"),
        ("OPAQUE_FD", "cuImportExternalMemory"),
        ("OPAQUE_FD", "cuExternalMemoryGetMappedBuffer"),
    ],
)
def test_failed_import_leaks_no_descriptor(host, importer, describe, given, kind, call, consume):
    host.fail(call, 1, 304)
    with pytest.raises(gpumem.errors.DriverError) as caught:
        importer.import_memory(
            describe(handle=given, handle_type=MemoryHandleType[kind]), consume=consume
        )
    assert (caught.value.call, caught.value.code) == (call, 304)
    assert is_open(given)


@pytest.mark.parametrize(
    "call",
    ["cuMemImportFromShareableHandle", "cuMemGetAllocationPropertiesFromHandle",
     "cuMemAddressReserve", "cuMemMap", "cuMemSetAccess"],
)  # fmt: skip
def test_physical_memory_import_is_undone_when_any_step_fails(host, importer, call):
    with (
        gpumem.Arena("host", {"numa_node": 0}) as arena,
        arena.allocate(100, shareable=True) as buffer,
        interop.export(buffer) as handle,
    ):
        described = MemoryDescriptor(handle, handle.kind, handle.contents.size)
        before = memory_of_the_driver(host)
        host.fail(call, 1, 2)
        with pytest.raises(gpumem.errors.DriverError, match=call):
            importer.import_memory(described)
        assert memory_of_the_driver(host) == before
        assert is_open(handle.fileno())
        importer.import_memory(described).close()


REFUSED_CLOSE = """
import os, sys
import gpumem
from gpumem._testing import host_device
from gpumem.interop import Importer, MemoryDescriptor, MemoryHandleType

kind, call = sys.argv[1:]
fd = os.memfd_create("test")
os.truncate(fd, 4096)
importer = Importer.for_device("host")
before = host_device.live()
memory = importer.import_memory(MemoryDescriptor(fd, MemoryHandleType[kind], 4096))
host_device.fail(call, 1, 304)
try:
    memory.close()
except gpumem.errors.DriverError as error:
    assert (error.call, error.code) == (call, 304), error
else:
    raise AssertionError("nothing was raised")
assert memory.closed
memory.close()
gpumem.Device("host").free_bytes
assert host_device.live() == before
"""


@pytest.mark.parametrize(
    ("kind", "call"),
    [
        ("MEMFD", "cuMemHostUnregister"),
        ("OPAQUE_FD", "cuMemFree"),
        ("OPAQUE_FD", "cuDestroyExternalMemory"),
    ],
)
def test_failed_driver_close_is_reported_and_tried_again_by_the_next_release(kind, call):
    run_quietly(REFUSED_CLOSE, kind, call)


def test_closed_descriptor_is_a_bad_handle(importer, describe, given):
    os.close(given)
    with pytest.raises(BadHandleError) as caught:
        importer.import_memory(describe(handle=given), consume=True)
    assert caught.value.errno == 9  # EBADF
    assert isinstance(caught.value, OSError)


def test_descriptor_of_another_kind_is_a_bad_handle(importer, describe):
    one, other = socket.socketpair()
    with one, other, pytest.raises(BadHandleError):
        importer.import_memory(describe(handle=one))


def test_too_small_file_is_a_bad_handle(importer, describe, fd):
    with pytest.raises(
        BadHandleError, match=r"has 64.0 KiB: fewer than described, 64.0 KiB \(65537 bytes\)"
    ):
        importer.import_memory(describe(size=NBYTES + 1))


def test_read_only_file_is_imported_read_only(importer, describe, fd):
    reader = os.open(f"/proc/self/fd/{fd}", os.O_RDONLY)
    try:
        with pytest.raises(BadHandleError, match="to write") as caught:
            importer.import_memory(describe(handle=reader))
        assert caught.value.errno == 13  # EACCES
        importer.import_memory(describe(handle=reader, read_only=True)).close()
    finally:
        os.close(reader)


@pytest.mark.parametrize("consume", [1, None, "yes"])
def test_consume_must_be_a_bool(importer, describe, consume):
    with pytest.raises(TypeError, match="consume"):
        importer.import_memory(describe(), consume=consume)


def test_names_and_addresses_cannot_be_consumed(importer):
    for handle, kind in (("/a", "SHM_NAME"), (4096, "HOST_ALLOCATION"), (b"a", "HOST_ALLOCATION")):
        with pytest.raises(InvalidDescriptorError, match="consume = True"):
            importer.import_memory(
                MemoryDescriptor(handle, MemoryHandleType[kind], 1, read_only=True), consume=True
            )


def test_reused_descriptor_number_is_not_closed(importer, describe, given, tmp_path):
    memory = importer.import_memory(
        describe(handle=given, handle_type=MemoryHandleType.OPAQUE_FD), consume=True
    )
    # The next files get the numbers that are free now.
    files = [open(tmp_path / str(i), "w+") for i in range(8)]  # noqa: SIM115
    memory.close()
    for file in files:
        file.write("there")
        file.seek(0)
        assert file.read() == "there"
        file.close()


def test_thousand_import_cycles_leak_nothing(importer, describe, host):
    for kind in FILES:
        for _ in range(500):
            with importer.import_memory(describe(handle_type=MemoryHandleType[kind])) as memory:
                memory.tensor(16, "f4")


def test_concurrent_imports_and_closes(importer, describe):
    failures = []

    def work():
        try:
            for _ in range(30):
                with importer.import_memory(describe()) as memory:
                    tensor = memory.tensor(16, "f4")
                    view = tensor.numpy()
                    del tensor
                    view[:] = 1
                    del view
        except BaseException as error:
            failures.append(error)

    in_threads(work, 4)
    assert failures == []


def test_descriptors_are_closed_on_exec(importer, describe):
    memory = importer.import_memory(describe(handle_type=MemoryHandleType.OPAQUE_FD))
    ours = [number for number, link in open_descriptors().items() if "memfd:test" in link]
    assert len(ours) == 2  # the test's own, and the one that the driver has
    assert not any(os.get_inheritable(number) for number in ours)
    memory.close()
