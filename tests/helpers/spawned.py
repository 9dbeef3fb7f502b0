"""Functions that the other process of a test runs: a spawned process imports them from here."""

from __future__ import annotations

from multiprocessing.connection import Connection

import gpumem
from gpumem import interop


def add_one(connection: Connection) -> None:
    """Attach what arrives, add one to every element, and answer with what was there."""
    handle = connection.recv()
    tensor = interop.attach(handle)
    handle.close()
    array = tensor.numpy()
    connection.send(array.copy())
    if not tensor.read_only:
        array += 1
    connection.send(tensor.read_only)
    connection.recv()


def answer(timeline: interop.HostTimeline) -> None:
    """Signal 2 after 1."""
    timeline.wait(1, timeout=60)
    timeline.signal(2)
    timeline.close()


def answer_through(connection: Connection) -> None:
    """Do so with the timeline that arrives."""
    answer(connection.recv())


def open_pool_and_buffer(connection: Connection) -> None:
    """Open the pool and the buffer that arrive, and send the buffer's bytes back."""
    handle, note = connection.recv()
    there = gpumem.DriverPool.import_handle("host", handle)
    handle.close()
    with there.import_buffer(note) as buffer:
        connection.send(bytes(memoryview(buffer)))


def read_and_answer_memory(connection: Connection) -> None:
    """Import the memory that arrives, send its first word back and write the next one."""
    descriptor = connection.recv()
    memory = interop.Importer.for_device("host").import_memory(descriptor, consume=True)
    words = memory.tensor(memory.nbytes // 4, "uint32").numpy()
    connection.send((int(words.min()), int(words.max())))
    words[...] = words[0] + 1
    connection.send("written")


def produce_vulkan_buffer(connection: Connection) -> None:
    """Fill a Vulkan buffer, send it, and end while the other process still has it."""
    from vulkan_device import VulkanDevice

    with VulkanDevice("host") as device, device.allocate(1 << 16) as buffer:
        device.fill(buffer, 0xC0FFEE)
        device.synchronize()
        connection.send(buffer.descriptor())
        connection.recv()


def echo_on_gpu_streams(inbox: Connection, rounds: int) -> None:
    """Check what each turn brings and write an answer, on a stream; wait once, at the end."""
    import torch

    handle, theirs, mine = inbox.recv()
    attached = interop.attach(handle)
    tensor = torch.from_dlpack(attached.__dlpack__(dl_device=(2, 0), max_version=(1, 0)))
    handle.close()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        wrong = torch.zeros((), dtype=torch.int64, device="cuda")
        for turn in range(1, rounds + 1):
            theirs.enqueue_wait(stream, turn)
            wrong += (tensor != 2 * turn - 1).sum()
            tensor.fill_(2 * turn)
            mine.enqueue_signal(stream, turn)
    stream.synchronize()
    inbox.send(int(wrong))
    inbox.recv()
