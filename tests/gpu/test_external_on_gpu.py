"""Memory from outside and for others on a GPU: files, pages, physical handles, two processes."""

from __future__ import annotations

import gc
import mmap
import multiprocessing
import os

import numpy as np
import pytest
from helpers.descriptors import open_descriptors
from helpers.spawned import echo_on_gpu_streams

import gpumem
from gpumem import interop
from gpumem.errors import (
    ConfigError,
    DeviceMismatchError,
    OutOfBoundsError,
    UnsupportedHandleTypeError,
)
from gpumem.interop import Importer, MemoryDescriptor, MemoryHandleType

torch = pytest.importorskip("torch", reason="needs torch as the other side")

MIB = 1 << 20
ROUNDS = 1000


@pytest.fixture
def importer():
    return Importer.for_device("cuda:0")


@pytest.fixture
def fd():
    number = os.memfd_create("test", os.MFD_CLOEXEC)
    os.truncate(number, MIB)
    yield number
    os.close(number)


def free_bytes() -> int:
    gc.collect()
    torch.cuda.empty_cache()
    return gpumem.Device("cuda:0").free_bytes


def test_capabilities_answer_for_every_kind(importer):
    for kind in MemoryHandleType:
        answer = importer.can_import_memory(kind)
        assert bool(answer) is (answer.reason == "")
    able = {kind.name for kind in MemoryHandleType if importer.can_import_memory(kind)}
    assert {"OPAQUE_FD", "CUDA_VMM_FD", "CUDA_POOL_FD", "MEMFD", "HOST_ALLOCATION"} <= able
    assert "DMABUF_FD" not in able
    assert "Tegra" in importer.can_import_memory(MemoryHandleType.DMABUF_FD).reason


@pytest.mark.parametrize("kind", ["MEMFD", "HOST_ALLOCATION"])
def test_host_pages_are_shared_by_gpu_and_numpy(importer, fd, kind):
    pages = mmap.mmap(fd, MIB)
    handle = fd if kind == "MEMFD" else pages
    memory = importer.import_memory(MemoryDescriptor(handle, MemoryHandleType[kind], MIB))
    assert memory.memory.kind is gpumem.MemoryKind.HOST_ACCESSIBLE
    tensor = memory.tensor((256, 256), "f4", offset=4096)
    gpu = torch.from_dlpack(tensor.__dlpack__(dl_device=(2, 0), max_version=(1, 0)))
    gpu.fill_(3)
    torch.cuda.synchronize()
    assert np.frombuffer(pages[4096 : 4096 + 4 * 65536], "f4").tolist() == [3.0] * 65536
    pages[4096:4100] = np.float32(8).tobytes()
    assert float(gpu[0, 0]) == 8
    del gpu, tensor
    memory.close()


def test_read_only_pages_are_registered_read_only(importer, fd):
    os.pwrite(fd, bytes(range(256)), 0)
    memory = importer.import_memory(
        MemoryDescriptor(fd, MemoryHandleType.MEMFD, MIB, read_only=True)
    )
    tensor = memory.tensor(256, "u1")
    assert tensor.read_only
    copied = gpumem.empty(256, "u1", memory="cuda:0")
    gpumem.copy(copied, tensor)
    assert copied.to("host").numpy().tolist() == list(range(256))
    del tensor
    memory.close()


def test_shareable_memory_is_zeroed_separate_and_counted(importer):
    # The first time PyTorch loads kernels, whose memory on the device stays.
    share_and_import(importer)
    before = free_bytes()
    share_and_import(importer)
    assert free_bytes() == before


def share_and_import(importer):
    with gpumem.Arena("cuda:0") as arena:
        buffer = arena.allocate(3 * MIB, shareable=True)
        assert (buffer.allocated_nbytes, arena.stats().reserved) == (4 * MIB, 4 * MIB)
        tensor = torch.from_dlpack(buffer)
        assert int(tensor.sum()) == 0
        tensor.fill_(7)
        with interop.export(buffer) as handle:
            assert handle.kind is MemoryHandleType.CUDA_VMM_FD
            memory = importer.import_memory(
                MemoryDescriptor(
                    handle, handle.kind, handle.contents.size,
                    device_uuid=handle.contents.device_uuid,
                )
            )  # fmt: skip
        whole = torch.from_dlpack(memory.tensor(4 * MIB, "u1"))
        torch.cuda.synchronize()
        assert int(whole[: 3 * MIB].to(torch.int64).sum()) == 7 * 3 * MIB
        assert int(whole[3 * MIB :].to(torch.int64).sum()) == 0
        with pytest.raises(OutOfBoundsError):
            memory.tensor(4 * MIB + 1, "u1")
        del tensor
        buffer.close()
        arena.shrink()
        assert int(whole[0]) == 7  # the import keeps it
        del whole
        memory.close()
        with pytest.raises(UnsupportedHandleTypeError, match="read only"):
            interop.export(arena.allocate(MIB, shareable=True), read_only=True)
        with pytest.raises(DeviceMismatchError):
            importer.import_memory(
                MemoryDescriptor(0, MemoryHandleType.CUDA_VMM_FD, 4 * MIB, device_uuid=bytes(16))
            )


@pytest.mark.parametrize("memory", ["cuda:0", "cuda:0/host_accessible"])
def test_two_processes_exchange_a_tensor_ordered_on_the_gpu(memory):
    """1000 rounds each way on two GPU streams, with a timeline for each way; nobody's CPU waits."""
    context = multiprocessing.get_context("spawn")
    outbox, inbox = context.Pipe()
    other = context.Process(target=echo_on_gpu_streams, args=(inbox, ROUNDS))
    other.start()
    mine, theirs = interop.HostTimeline.create(), interop.HostTimeline.create()
    with gpumem.Arena(memory) as arena, mine, theirs:
        shared = gpumem.from_dlpack(arena.allocate(MIB, shareable=True)).view("i4")
        with interop.export(shared) as handle:
            outbox.send((handle, mine, theirs))
            errors = play(shared, mine, theirs)
            assert outbox.poll(240), "the other process did not answer"
            assert (errors(), outbox.recv()) == (0, 0)
        outbox.send(None)
        other.join(60)
        assert other.exitcode == 0
        del shared, errors


def play(shared, mine, theirs):
    """Queue every round on a stream; returns what waits for it and counts the wrong elements."""
    tensor = torch.from_dlpack(shared.__dlpack__(dl_device=(2, 0), max_version=(1, 0)))
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        wrong = torch.zeros((), dtype=torch.int64, device="cuda")
        for turn in range(1, ROUNDS + 1):
            tensor.fill_(2 * turn - 1)
            mine.enqueue_signal(stream, turn)
            theirs.enqueue_wait(stream, turn)
            wrong += (tensor != 2 * turn).sum()

    def count() -> int:
        stream.synchronize()
        return int(wrong)

    return count


def cycle(importer, fd, buffer):
    with interop.export(buffer) as handle:
        tensor = interop.attach(handle)
    torch.from_dlpack(tensor)
    del tensor
    with importer.import_memory(MemoryDescriptor(fd, MemoryHandleType.MEMFD, MIB)) as memory:
        memory.tensor(4, "f4").numpy()[:] = 1


def test_repeated_imports_leak_nothing(importer, fd):
    with gpumem.Arena("cuda:0") as arena:
        buffer = arena.allocate(2 * MIB, shareable=True)

        for _ in range(5):
            cycle(importer, fd, buffer)
        before = free_bytes(), len(open_descriptors())
        for _ in range(1000):
            cycle(importer, fd, buffer)
        assert (free_bytes(), len(open_descriptors())) == before
        del buffer


def test_arena_allocates_in_imported_memory(importer, fd):
    memory = importer.import_memory(MemoryDescriptor(fd, MemoryHandleType.MEMFD, MIB))
    with memory.resource() as arena:
        buffers = [arena.allocate(10_000) for _ in range(50)]
        for number, buffer in enumerate(buffers):
            view = torch.from_dlpack(
                gpumem.from_dlpack(buffer).__dlpack__(dl_device=(2, 0), max_version=(1, 0))
            )
            view.fill_(number)
        torch.cuda.synchronize()
        for number, buffer in enumerate(buffers):
            assert (np.from_dlpack(buffer) == number).all()
        del view, buffers, buffer
        arena.check_invariants()
    memory.close()


def test_consumer_stream_waits_for_the_ready_point(importer, fd):
    memory = importer.import_memory(MemoryDescriptor(fd, MemoryHandleType.MEMFD, MIB))
    with interop.HostTimeline.create() as timeline:
        memory.set_ready(timeline, 1)
        tensor = memory.tensor(MIB, "u1")
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            seen = torch.from_dlpack(
                tensor.__dlpack__(dl_device=(2, 0), max_version=(1, 0), stream=stream.cuda_stream)
            ).clone()
        assert not stream.query()
        os.pwrite(fd, b"\x05" * MIB, 0)
        timeline.signal(1)
        stream.synchronize()
        assert int(seen.to(torch.int64).sum()) == 5 * MIB
        del tensor, seen
        memory.close()


def test_managed_memory_is_not_shareable():
    with gpumem.Arena("cuda:0/managed") as arena, pytest.raises(ConfigError, match="managed"):
        arena.allocate(4096, shareable=True)
