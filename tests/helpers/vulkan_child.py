"""Functions that the other process of a Vulkan test runs; spawned processes find them here."""

from __future__ import annotations

from multiprocessing.connection import Connection

from gpumem.interop import Importer


def read_and_answer(connection: Connection) -> None:
    """Import the memory that arrives, send its first word back and write the next one."""
    descriptor = connection.recv()
    memory = Importer.for_device("host").import_memory(descriptor, consume=True)
    words = memory.tensor(memory.nbytes // 4, "uint32").numpy()
    connection.send((int(words.min()), int(words.max())))
    words[...] = words[0] + 1
    connection.send("written")


def produce(connection: Connection) -> None:
    """Fill a Vulkan buffer, send it, and end while the other process still has it."""
    from vulkan_device import VulkanDevice

    with VulkanDevice("host") as device, device.allocate(1 << 16) as buffer:
        device.fill(buffer, 0xC0FFEE)
        device.synchronize()
        connection.send(buffer.descriptor())
        connection.recv()
