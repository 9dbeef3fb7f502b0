"""Connections to processes of this user that end at a time of `time.monotonic`."""

from __future__ import annotations

import errno
import os
import socket
import time

from gpumem._resource.handle import Handle
from gpumem.interop.keeper import peer_of

MIN_SECONDS = 0.001  # of a call after its deadline


def limit_until(peer: socket.socket, until: float) -> None:
    """Let the next call end at a time of `time.monotonic`: each call has what the others left."""
    peer.settimeout(max(until - time.monotonic(), MIN_SECONDS))


def connect_until(peer: socket.socket, address: str, until: float) -> None:
    """Connect to a Unix socket of this user.

    Raises
    ------
    BlockingIOError
        Its queue of connections stays full.
    PermissionError
        The process that listens is another user's.
    """
    while True:
        limit_until(peer, until)
        try:
            peer.connect(address)
            break
        except BlockingIOError:
            if time.monotonic() > until:
                raise
            time.sleep(MIN_SECONDS)
    _, user = peer_of(peer)
    # Root can read this process's memory anyway. A process that began as root still counts as its.
    if user not in (os.getuid(), 0):
        raise PermissionError(
            errno.EPERM,
            f"it is a process of user {user}, and this one is of user {os.getuid()}: descriptors "
            "are taken from processes of the same user",
        )


def receive(peer: socket.socket, nbytes: int, count: int) -> tuple[bytes, list[Handle]]:
    """Receive a message of at most `nbytes`, and at most `count` descriptors beside it.

    Raises
    ------
    OSError
        This process cannot open so many files.
    """
    data, numbers, flags, _ = socket.recv_fds(peer, nbytes, count)
    handles = handles_of(numbers)
    if flags & socket.MSG_CTRUNC:
        for each in handles:
            each.close()
        raise OSError(
            errno.EMFILE, f"more than {len(handles)} descriptors at once cannot be opened"
        )
    return data, handles


def handles_of(numbers: list[int]) -> list[Handle]:
    """Make handles of descriptors, which leave the list; all are closed if that fails."""
    try:
        handles = []
        while numbers:
            handles.append(Handle._owning(numbers.pop(0)))
    except MemoryError:
        while numbers:
            os.close(numbers.pop())
        raise
    return handles
