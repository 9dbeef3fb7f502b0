"""Headless Vulkan and CUDA hand one buffer back and forth, ordered by one timeline semaphore."""

import ctypes
import gc
import os
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import pytest
from helpers.vulkan_producer import reason_without

import gpumem
from gpumem._testing.driver import driver_entry_names, table_and_context_of
from gpumem.interop import Importer, MemoryHandleType, SemaphoreType

DEVICE = "cuda:0"
REASON = reason_without(DEVICE)
pytestmark = pytest.mark.skipif(bool(REASON), reason=REASON)
if not REASON:
    from shared_buffer import pointer_alignment
    from vulkan_device import VulkanDevice
WORDS = 1 << 18
ROUNDS = 1000
_ARGUMENTS = {
    "cuCtxSynchronize": 0,
    "cuStreamSynchronize": 1,
    "cuEventSynchronize": 1,
    "cuWaitExternalSemaphoresAsync": 4,
    "cuSignalExternalSemaphoresAsync": 4,
}
SYNCHRONISATIONS = ("cuCtxSynchronize", "cuStreamSynchronize", "cuEventSynchronize")


@contextmanager
def counted(device: str) -> Iterator[Counter]:
    """Count gpumem's synchronisations and its calls for external semaphores within a block.

    Only where the table can be written: a GPU's is filled when the driver is first asked.
    """
    calls: Counter = Counter()
    names = [name for name, _ in driver_entry_names()]
    address, _ = table_and_context_of(gpumem.Device(device)._open())
    table = (ctypes.c_void_p * len(names)).from_address(address)
    before = {names.index(name): table[names.index(name)] for name in _ARGUMENTS}
    wrappers = []
    for index, address in before.items():
        wrappers.append(_wrapper(names[index], address, calls))
        table[index] = ctypes.cast(wrappers[-1], ctypes.c_void_p).value
    try:
        yield calls
    finally:
        for index, address in before.items():
            table[index] = address


def _wrapper(name: str, address: int, calls: Counter):
    signature = ctypes.CFUNCTYPE(ctypes.c_int, *[ctypes.c_uint64] * _ARGUMENTS[name])
    inner = signature(address)

    def call(*arguments: int) -> int:
        calls[name] += 1
        return inner(*arguments)

    return signature(call)


@pytest.fixture
def engine():
    with VulkanDevice(DEVICE) as engine:
        yield engine


@pytest.fixture
def importer():
    with Importer.for_device(DEVICE) as importer:
        yield importer


class Torch:
    """A reader that is PyTorch: compares on the device, and writes."""

    def __init__(self, stream):
        self.torch = pytest.importorskip("torch")
        self.stream = self.torch.cuda.ExternalStream(stream.ptr)

    def take(self, tensor):
        with self.torch.cuda.stream(self.stream):
            self.words = self.torch.from_dlpack(tensor)
            self.wrong = self.torch.zeros((), dtype=self.torch.int64, device="cuda")
            self.differs = self.torch.empty(WORDS, dtype=self.torch.bool, device="cuda")
            self.step(1)  # kernels are loaded at their first use, which waits for the device
            self.wrong.zero_()

    def step(self, value):
        torch = self.torch
        with torch.cuda.stream(self.stream):
            torch.ne(self.words, value, out=self.differs)
            self.wrong += self.differs.sum()
            self.words.fill_(-value)

    def mistakes(self):
        return int(self.wrong.item())


class CuPy:
    """The same by CuPy."""

    def __init__(self, stream):
        self.cupy = pytest.importorskip("cupy")
        self.stream = self.cupy.cuda.Stream.from_external(stream)

    def take(self, tensor):
        with self.stream:
            self.words = self.cupy.from_dlpack(tensor)
            self.wrong = self.cupy.zeros((), self.cupy.int64)
            self.step(1)
            self.wrong.fill(0)

    def step(self, value):
        with self.stream:
            self.wrong += (self.words != value).sum()
            self.words.fill(-value)

    def mistakes(self):
        return int(self.wrong.get())


@pytest.mark.parametrize("reader", [Torch, CuPy])
def test_thousand_hand_overs_ordered_by_a_timeline_alone(engine, importer, reader):
    """Each batch is queued while a gate holds its first command back: whoever waited on the host
    would wait for ever. Both sides check what the other wrote, on the device.
    """
    batch = 50
    stream = gpumem.Stream(DEVICE)
    with (
        engine.allocate(4 * WORDS) as frame,
        engine.allocate(4 * (ROUNDS + 1)) as answers,
        engine.timeline() as clock,
        engine.timeline() as gate,
        importer.import_memory(frame.descriptor(), consume=True) as memory,
        importer.import_memory(answers.descriptor(), consume=True) as kept,
        importer.import_semaphore(clock.descriptor(), consume=True) as timeline,
    ):
        consumer = reader(stream)
        consumer.take(memory.tensor(WORDS, "int32"))
        gpumem.Device(DEVICE).synchronize()
        with counted(DEVICE) as calls:
            for number in range(1, ROUNDS + 1):
                written, read = 2 * number - 1, 2 * number
                before = [(clock, written - 1)] if number > 1 else []
                if number % batch == 1:
                    before.append((gate, number))
                if number > 1:
                    engine.copy(
                        answers, frame, nbytes=4, destination_offset=4 * (number - 1), wait=before
                    )
                    before = []
                engine.fill(frame, number, wait=before, signal=[(clock, written)])
                timeline.enqueue_wait(stream, written)
                consumer.step(number)
                timeline.enqueue_signal(stream, read)
                if number % batch == 0:
                    assert clock.value() <= 2 * (number - batch)
                    gate.signal(number - batch + 1)
            engine.copy(
                answers, frame, nbytes=4, destination_offset=4 * ROUNDS, wait=[(clock, 2 * ROUNDS)]
            )
        assert [calls[name] for name in SYNCHRONISATIONS] == [0, 0, 0]
        assert calls["cuWaitExternalSemaphoresAsync"] == ROUNDS
        assert calls["cuSignalExternalSemaphoresAsync"] == ROUNDS
        engine.synchronize()
        assert consumer.mistakes() == 0
        said = np.empty(ROUNDS + 1, np.int32)
        gpumem.copy(said, kept.tensor(ROUNDS + 1, "int32"))
        assert (said[1:] == -np.arange(1, ROUNDS + 1)).all()
        del consumer
        gc.collect()


def test_ready_point_makes_a_foreign_stream_wait(engine, importer):
    torch = pytest.importorskip("torch")
    seen = torch.zeros(WORDS, dtype=torch.int32, device="cuda")
    other = torch.cuda.Stream()
    with (
        engine.allocate(4 * WORDS) as frame,
        engine.timeline() as clock,
        importer.import_memory(frame.descriptor(), consume=True) as memory,
        importer.import_semaphore(clock.descriptor(), consume=True) as timeline,
    ):
        with torch.cuda.stream(other):
            seen.copy_(torch.from_dlpack(memory.tensor(WORDS, "int32")))  # loads the kernel
        torch.cuda.synchronize()
        memory.set_ready(timeline, 5)
        with counted(DEVICE) as calls, torch.cuda.stream(other):
            seen.copy_(torch.from_dlpack(memory.tensor(WORDS, "int32")))
        assert [calls[name] for name in SYNCHRONISATIONS] == [0, 0, 0]
        assert calls["cuWaitExternalSemaphoresAsync"] == 1
        assert not other.query()
        engine.fill(frame, 123, signal=[(clock, 5)])
        other.synchronize()
        assert (seen == 123).all().item()
        gc.collect()


def test_ready_point_makes_the_cpu_wait_for_a_copy(engine, importer):
    with (
        engine.allocate(4096) as frame,
        engine.timeline() as clock,
        importer.import_memory(frame.descriptor(), consume=True) as memory,
        importer.import_semaphore(clock.descriptor(), consume=True) as timeline,
    ):
        engine.fill(frame, 77, signal=[(clock, 1)])
        memory.set_ready(timeline, 1)
        host = np.zeros(1024, np.int32)
        gpumem.copy(host, memory.tensor(1024, "int32"))
        assert (host == 77).all()


def test_descriptors_name_device_and_kind(engine):
    with engine.allocate(100) as buffer, engine.timeline() as clock:
        memory, semaphore = buffer.descriptor(), clock.descriptor()
        assert memory.handle_type is MemoryHandleType.OPAQUE_FD
        assert semaphore.type is SemaphoreType.TIMELINE_OPAQUE_FD
        assert memory.device_uuid == semaphore.device_uuid == gpumem.Device(DEVICE).uuid
        assert memory.size == buffer.allocation_size >= 100
        assert memory.dedicated is buffer.dedicated


def test_vulkan_fills_pinned_memory(engine):
    page = pointer_alignment(engine)
    tensor = gpumem.zeros(4 * page, "uint8", memory=f"{DEVICE}/host_accessible")
    array = tensor.numpy()
    start = -array.ctypes.data % page
    with engine.import_host(array[start : start + 2 * page]) as buffer:
        engine.fill(buffer, 0x05050505)
        engine.synchronize()
    assert (array[start : start + 2 * page] == 5).all()
    assert not array[start + 2 * page :].any()


def test_foreign_file_is_refused_and_stays_open(importer):
    from gpumem.interop import MemoryDescriptor

    number = os.memfd_create("plain")
    os.truncate(number, 1 << 16)
    with pytest.raises(gpumem.errors.DriverError, match="cuImportExternalMemory"):
        importer.import_memory(
            MemoryDescriptor(number, MemoryHandleType.OPAQUE_FD, 1 << 16), consume=True
        )
    os.close(number)


def test_thousand_imports_leak_nothing(engine, importer):
    def cycle(buffer, clock):
        importer.import_memory(buffer.descriptor(), consume=True).close()
        importer.import_semaphore(clock.descriptor(), consume=True).close()

    def state():
        gc.collect()
        free = gpumem.Device(DEVICE).free_bytes
        return free, len(os.listdir("/proc/self/fd"))

    with engine.allocate(1 << 20) as buffer, engine.timeline() as clock:
        for _ in range(20):
            cycle(buffer, clock)
        before = state()
        for _ in range(1000):
            cycle(buffer, clock)
        assert state() == before


def test_memory_outlives_the_vulkan_buffer_and_device(importer):
    with VulkanDevice(DEVICE) as engine, engine.allocate(4096) as buffer:
        engine.fill(buffer, 9)
        engine.synchronize()
        memory = importer.import_memory(buffer.descriptor(), consume=True)
    host = np.zeros(1024, np.int32)
    gpumem.copy(host, memory.tensor(1024, "int32"))
    assert (host == 9).all()
    memory.close()
