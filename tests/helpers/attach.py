"""What the other process of a test runs; spawned processes find it under this name."""

from __future__ import annotations

from multiprocessing.connection import Connection

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
