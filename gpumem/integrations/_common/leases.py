"""Leases on buffers that another library knows by address."""

from __future__ import annotations

from gpumem._buffer.buffer import Buffer


def lease_on(block: Buffer) -> object:
    """Return a lease, as every view of a buffer has one; it ends with the last reference to it.

    Raises
    ------
    ClosedError, AsleepError
        The buffer is closed, or its memory sleeps.
    """
    # The lease is an unconsumed capsule. DLPack's stream -1 means that nothing is ordered; for CPU
    # memory the stream has to be None.
    stream = None if block.memory.host_accessible else -1
    return block.__dlpack__(max_version=(1, 0), stream=stream)
