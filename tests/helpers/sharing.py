"""What the other process of a test runs; spawned processes find it under this name."""

from __future__ import annotations

from multiprocessing.connection import Connection

import gpumem


def receive(connection: Connection) -> None:
    """Open the pool and the buffer that arrive, and send the buffer's bytes back."""
    handle, note = connection.recv()
    there = gpumem.DriverPool.import_handle("host", handle)
    handle.close()
    with there.import_buffer(note) as buffer:
        connection.send(bytes(memoryview(buffer)))
