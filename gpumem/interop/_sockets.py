"""Connections within this machine that end at a time of `time.monotonic`."""

from __future__ import annotations

import socket
import time

MIN_SECONDS = 0.001  # of a call whose deadline has passed


def limit_until(peer: socket.socket, until: float) -> None:
    """Let the next call end at a time of `time.monotonic`: each call has what the others left."""
    peer.settimeout(max(until - time.monotonic(), MIN_SECONDS))


def connect_until(peer: socket.socket, address: str, until: float) -> None:
    """Connect to a Unix socket; BlockingIOError if its queue of connections stays full."""
    while True:
        limit_until(peer, until)
        try:
            return peer.connect(address)
        except BlockingIOError:
            if time.monotonic() > until:
                raise
            time.sleep(MIN_SECONDS)
