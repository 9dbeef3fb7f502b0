"""Each kind of handle: bytes written on one side are there on the other."""

from __future__ import annotations

import mmap
import os
import struct
from multiprocessing import shared_memory

import numpy as np
import pytest

import gpumem
from gpumem import interop
from gpumem.errors import (
    AlignmentError,
    BadHandleError,
    ClosedError,
    DeviceMismatchError,
    InvalidDescriptorError,
    UnsupportedHandleTypeError,
)
from gpumem.interop import Importer, MemoryDescriptor, MemoryHandleType

pytestmark = pytest.mark.usefixtures("nothing_left")

NBYTES = 1 << 16
WINDOWS = ["D3D12_RESOURCE", "D3D12_HEAP", "OPAQUE_WIN32"]
LAVAPIPE_MARK = bytes.fromhex("6cb9ee074a0bad7b012e1be9697e530f")


def check_both_directions(memory, peek, poke):
    """`peek(offset, n)` and `poke(offset, data)` are the other side's."""
    with memory:
        seen = memory.tensor(100, "u1", offset=32).numpy()
        poke(32, b"abc")
        assert bytes(seen[:3]) == b"abc"
        seen[97:] = (7, 8, 9)
        assert peek(32 + 97, 3) == bytes((7, 8, 9))
        del seen


def check_against_view(memory, mine):
    def poke(at, data):
        mine[at : at + len(data)] = list(data)

    check_both_directions(memory, lambda at, n: bytes(mine[at : at + n]), poke)


@pytest.mark.parametrize("kind", ["MEMFD", "OPAQUE_FD"])
def test_import_of_a_memfd(importer, describe, fd, kind):
    memory = importer.import_memory(describe(handle_type=MemoryHandleType[kind]))
    check_both_directions(
        memory, lambda at, n: os.pread(fd, n, at), lambda at, data: os.pwrite(fd, data, at)
    )


def test_import_of_a_named_shared_memory_object(importer):
    shared = shared_memory.SharedMemory(create=True, size=NBYTES)
    try:
        memory = importer.import_memory(
            MemoryDescriptor(shared.name, MemoryHandleType.SHM_NAME, NBYTES)
        )

        def poke(at, data):
            shared.buf[at : at + len(data)] = data

        check_both_directions(memory, lambda at, n: bytes(shared.buf[at : at + n]), poke)
    finally:
        shared.close()
        shared.unlink()
    with pytest.raises(BadHandleError) as caught:
        importer.import_memory(MemoryDescriptor(shared.name, MemoryHandleType.SHM_NAME, NBYTES))
    assert caught.value.errno == 2


@pytest.mark.parametrize("name", ["../etc/passwd", "/a/b", "..", "/."])
def test_name_with_a_path_is_refused(importer, name):
    with pytest.raises(InvalidDescriptorError, match="not a name of a shared memory object"):
        importer.import_memory(MemoryDescriptor(name, MemoryHandleType.SHM_NAME, 4096))


def test_name_of_a_pipe_is_refused_without_a_wait(importer):
    name = f"gpumem-pipe-{os.getpid()}"
    os.mkfifo(f"/dev/shm/{name}")
    try:
        with pytest.raises(BadHandleError):
            importer.import_memory(
                MemoryDescriptor(name, MemoryHandleType.SHM_NAME, NBYTES, read_only=True)
            )
    finally:
        os.unlink(f"/dev/shm/{name}")


@pytest.mark.parametrize("by", ["buffer", "address"])
def test_import_of_host_pages(importer, by):
    pages = mmap.mmap(-1, NBYTES)
    array = np.frombuffer(pages, np.uint8)
    given = (
        MemoryDescriptor(pages, MemoryHandleType.HOST_ALLOCATION, NBYTES)
        if by == "buffer"
        else MemoryDescriptor(
            array.ctypes.data, MemoryHandleType.HOST_ALLOCATION, NBYTES, owner=array
        )
    )

    def poke(at, data):
        pages[at : at + len(data)] = data

    check_both_directions(
        importer.import_memory(given), lambda at, n: pages[at : at + n], poke
    )  # fmt: skip
    del array, given
    pages.close()  # nobody holds them any more


def test_owner_of_host_pages_lives_as_long_as_the_last_view(importer):
    class Owner:
        alive = 0

        def __init__(self):
            Owner.alive += 1

        def __del__(self):
            Owner.alive -= 1

    pages = mmap.mmap(-1, NBYTES)
    address = np.frombuffer(pages, np.uint8).ctypes.data
    memory = importer.import_memory(
        MemoryDescriptor(address, MemoryHandleType.HOST_ALLOCATION, NBYTES, owner=Owner())
    )
    view = memory.tensor(4, "f4").numpy()
    del memory
    assert Owner.alive == 1
    del view
    gpumem.Device("host").free_bytes  # noqa: B018  # gives back what nobody refers to
    assert Owner.alive == 0


def test_unaligned_host_pages_are_refused(importer):
    pages = mmap.mmap(-1, NBYTES)
    inside = np.frombuffer(pages, np.uint8)[8:]
    with pytest.raises(AlignmentError, match="4096"):
        importer.import_memory(
            MemoryDescriptor(inside.ctypes.data, MemoryHandleType.HOST_ALLOCATION, 4096)
        )
    with pytest.raises(InvalidDescriptorError, match=r"size = 64\.0 KiB \(65537 bytes\)"):
        importer.import_memory(
            MemoryDescriptor(pages, MemoryHandleType.HOST_ALLOCATION, NBYTES + 1)
        )
    with pytest.raises(InvalidDescriptorError, match="read_only = True"):
        importer.import_memory(
            MemoryDescriptor(bytes(4096), MemoryHandleType.HOST_ALLOCATION, 4096)
        )


def test_import_of_a_physical_memory_handle(importer):
    with (
        gpumem.Arena("host", {"numa_node": 0}) as arena,
        arena.allocate(NBYTES, shareable=True) as buffer,
    ):
        mine = np.from_dlpack(buffer)
        with interop.export(buffer) as handle:
            assert handle.kind is MemoryHandleType.CUDA_VMM_FD
            memory = importer.import_memory(
                MemoryDescriptor(handle, handle.kind, handle.contents.size)
            )
        check_against_view(memory, mine)
        del mine


def test_import_of_a_pool_block(importer):
    with gpumem.DriverPool("host", {"shareable": True}) as pool, pool.allocate(NBYTES) as buffer:
        mine = np.from_dlpack(buffer)
        with pool.export_handle() as handle:
            memory = importer.import_memory(
                MemoryDescriptor(
                    handle, MemoryHandleType.CUDA_POOL_FD, NBYTES,
                    pool_pointer=pool.export_buffer(buffer),
                )
            )  # fmt: skip
            with pytest.raises(InvalidDescriptorError, match="pool_pointer"):
                importer.import_memory(
                    MemoryDescriptor(
                        handle, MemoryHandleType.CUDA_POOL_FD, NBYTES, pool_pointer=b"no"
                    )
                )
            with pytest.raises(BadHandleError, match=r"has 64\.0 KiB: fewer than"):
                importer.import_memory(
                    MemoryDescriptor(
                        handle, MemoryHandleType.CUDA_POOL_FD, NBYTES + 1,
                        pool_pointer=pool.export_buffer(buffer),
                    )
                )  # fmt: skip

        check_against_view(memory, mine)
        del mine


@pytest.mark.parametrize("kind", ["LAVAPIPE_OPAQUE_FD", "OPAQUE_FD"])
def test_import_of_lavapipe_memory_skips_its_header(importer, fd, kind):
    start = 4096
    os.pwrite(fd, struct.pack("<QQ16s", NBYTES, start, LAVAPIPE_MARK), 0)
    memory = importer.import_memory(
        MemoryDescriptor(fd, MemoryHandleType[kind], NBYTES - start)
    )  # fmt: skip
    check_both_directions(
        memory,
        lambda at, n: os.pread(fd, n, start + at),
        lambda at, data: os.pwrite(fd, data, start + at),
    )


@pytest.mark.parametrize(
    ("size", "start", "mark", "asked", "says"),
    [
        (NBYTES, 4096, b"someone else's  ", NBYTES - 4096, "not one of lavapipe's"),
        (
            NBYTES,
            4096,
            LAVAPIPE_MARK,
            NBYTES - 4095,
            r"fewer bytes than described, 60\.0 KiB \(61441 bytes\)",
        ),
        (NBYTES, 100, LAVAPIPE_MARK, 4096, "with memory from offset 100 on,"),
        (
            NBYTES + 1,
            4096,
            LAVAPIPE_MARK,
            4096,
            r"has 64\.0 KiB: fewer than described, 64\.0 KiB \(65537 bytes\)",
        ),
        (NBYTES, 1 << 63, LAVAPIPE_MARK, 4096, r"fewer bytes than described, 4\.0 KiB"),
    ],
)
def test_invalid_lavapipe_header_is_refused(importer, fd, size, start, mark, asked, says):
    os.pwrite(fd, struct.pack("<QQ16s", size, start, mark), 0)
    with pytest.raises(BadHandleError, match=says):
        importer.import_memory(MemoryDescriptor(fd, MemoryHandleType.LAVAPIPE_OPAQUE_FD, asked))


def test_memfd_is_refused_as_a_dma_buf(importer, describe):
    with pytest.raises(BadHandleError, match="not a dma-buf") as caught:
        importer.import_memory(describe(handle_type=MemoryHandleType.DMABUF_FD))
    assert caught.value.errno == 25  # ENOTTY


# ---- asking ----


def test_capability_answers_for_every_kind_without_raising(importer):
    for kind in MemoryHandleType:
        answer = importer.can_import_memory(kind)
        assert bool(answer) is answer.supported is (answer.reason == "")
    with pytest.raises(TypeError, match="MemoryHandleType"):
        importer.can_import_memory("MEMFD")


@pytest.mark.parametrize("kind", [*WINDOWS, "CUDA_VMM_WIN32"])
def test_unsupported_kind_is_refused_with_the_capabilitys_reason(importer, fd, kind):
    handle_type = MemoryHandleType[kind]
    reason = importer.can_import_memory(handle_type).reason
    assert "Windows" in reason
    with pytest.raises(UnsupportedHandleTypeError) as caught:
        importer.import_memory(MemoryDescriptor(fd, handle_type, NBYTES))
    assert reason in str(caught.value)
    assert isinstance(caught.value, NotImplementedError)


def test_missing_device_has_no_importer_and_a_reason():
    assert Importer.for_device("host:63") is None
    assert "host:63" in interop.Importer.unavailable_reason("host:63")
    assert interop.Importer.unavailable_reason("host") == ""
    with pytest.raises(ValueError, match="unknown device"):
        Importer.for_device("vulkan:0")


def test_memory_of_another_device_is_refused(importer, describe):
    with pytest.raises(DeviceMismatchError, match="00112233445566778899aabbccddeeff"):
        importer.import_memory(describe(device_uuid="00112233445566778899aabbccddeeff"))
    with importer.import_memory(describe(device_uuid=gpumem.Device("host").uuid)) as memory:
        assert memory.device == gpumem.Device("host")


def test_registered_factory_makes_the_importers(importer):
    class Mine:
        pass

    interop.Importer.register("host", lambda device: Mine() if device.index == 0 else None)
    try:
        assert isinstance(Importer.for_device("host"), Mine)
        assert Importer.for_device("host:1") is None
        assert interop.Importer.unavailable_reason("host:1")
    finally:
        interop.Importer.register("host", None)
    assert isinstance(Importer.for_device("host"), interop.Importer)
    with pytest.raises(ValueError, match="vulkan"):
        interop.Importer.register("vulkan", Mine)
    with pytest.raises(TypeError, match="callable"):
        interop.Importer.register("host", 5)


def test_importer_may_be_closed_before_its_imports(describe):
    with Importer.for_device("host") as importer:
        memory = importer.import_memory(describe())
    with pytest.raises(ClosedError):
        importer.import_memory(describe())
    memory.tensor(4, "u1").numpy()[:] = 1
    memory.close()
