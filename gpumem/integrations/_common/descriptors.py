"""Descriptors for other processes: a thread of this one answers requests on its socket.

The socket is Linux's abstract one: no file is left behind, and it is reached within a network
namespace, as of one container, whatever the processes' other namespaces and permissions are. Only
processes of the same user are answered, each on a thread of its own: a connection that sends no
request, or does not read its answer, delays no other one. A process that has ended refuses at once,
since the kernel closes its socket; the children that it forked have closed their copies. Its name
is then free for any process, so the requesting one checks the user of the answering one.
"""

from __future__ import annotations

import json
import os
import secrets
import socket
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from errno import EBADF
from itertools import islice
from pathlib import Path
from typing import Any, TypeAlias

from gpumem._resource.handle import Handle
from gpumem._support.forks import ForkLock
from gpumem.errors import BadHandleError, GpumemError
from gpumem.interop._sockets import connect_until, limit_until, receive
from gpumem.interop.keeper import peer_of

TIMEOUT = 30.0  # seconds for an answer, from its first message to its last
REQUEST_SECONDS = 1.0  # from a connection to its request
PAUSE_SECONDS = 0.05  # before another attempt if this process has too many open files
AT_ONCE = 64  # descriptors in a message; the kernel takes up to 253
REQUEST_BYTES = 128
HEADER_BYTES = 1 << 17  # room for the sizes of 10,000 pages

# A description of the descriptors, and the descriptors, which the server closes once they are sent.
Answer: TypeAlias = tuple[dict[str, Any], Iterable[Handle]]

_lock = ForkLock()
_server: Server | None = None
_answers: dict[str, Callable[[str], Answer]] = {}


def serve(kind: str, answer: Callable[[str], Answer]) -> None:
    """Answer requests of a kind by a function, which is called on the server's thread.

    It raises to refuse; the requesting process receives the text.
    """
    _answers[kind] = answer


def server_name() -> str:
    """Return the name by which other processes `ask` this one; the first call starts its server."""
    global _server
    with _lock:
        if _server is None:
            _server = Server()
        return _server.name


def node() -> str:
    """Return a text that is equal in processes that reach each other: host, network, user."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot}/{os.stat('/proc/self/ns/net').st_ino}/{os.getuid()}"


@contextmanager
def ask(
    name: str, kind: str, what: str, *, timeout: float = TIMEOUT
) -> Iterator[tuple[dict[str, Any], Iterator[Handle]]]:
    """Ask the process with a `server_name`; within the block its descriptors arrive.

    Yields a description of the descriptors, and an iterator over them. The caller owns each.

    Raises
    ------
    BadHandleError
        The process has ended or is another user's, refused, sent something else, or did not send
        all of it within `timeout` seconds.
    """
    until = time.monotonic() + timeout
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as peer:
            connect_until(peer, f"\0{name}", until)
            with suppress(ConnectionError):  # a refusal may arrive before the request is sent
                peer.sendall(f"{kind} {what}".encode())
            limit_until(peer, until)
            said = json.loads(peer.recv(HEADER_BYTES) or b'{"refused": "the connection ended"}')
            _require_answer(said)
            yield said, _received(peer, until)
    except GpumemError:
        raise
    except (OSError, ValueError, LookupError, TypeError, RecursionError) as error:
        raise BadHandleError(EBADF, f"{name} did not send the {kind}: {error!r}") from error


def _received(peer: socket.socket, until: float) -> Iterator[Handle]:
    while True:
        limit_until(peer, until)
        data, handles = receive(peer, HEADER_BYTES, AT_ONCE)
        if not handles:
            if data:
                _require_answer(json.loads(data))
            return
        yield from handles


def _require_answer(said: Any) -> None:
    if not isinstance(said, dict):
        raise TypeError(f"expected a description, received {type(said).__name__}")
    if "refused" in said:
        raise BadHandleError(EBADF, f"the other process refused: {said['refused']}")


class Server:
    """Answers requests to this process, each on a thread of its own, until the process ends."""

    def __init__(self) -> None:
        self.name = f"gpumem-{os.getpid()}-{secrets.token_hex(8)}"
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._socket.bind(f"\0{self.name}")
        self._socket.listen(64)
        self._peers: set[socket.socket] = set()  # the processes that are answered now
        threading.Thread(target=self._serve, name="gpumem descriptors", daemon=True).start()

    def _serve(self) -> None:
        while True:
            try:
                peer, _ = self._socket.accept()
                self._peers.add(peer)
                threading.Thread(
                    target=self._answer, args=(peer,), name="gpumem descriptor", daemon=True
                ).start()
            except OSError:  # the connection waits in the queue
                time.sleep(PAUSE_SECONDS)
            except RuntimeError:  # no more threads can be started
                self._answer(peer)

    def _answer(self, peer: socket.socket) -> None:
        try:
            with peer, suppress(OSError):  # it has gone, or does not read or write
                answer(peer)
        finally:
            self._peers.discard(peer)

    def close_in_child(self) -> None:
        """Close a fork child's copies, which would keep connections open."""
        self._socket.close()
        for peer in self._peers:
            peer.close()


def answer(peer: socket.socket) -> None:
    """Send a description and the descriptors that were requested, or the reason of a refusal."""
    peer.settimeout(REQUEST_SECONDS)
    if peer_of(peer)[1] != os.getuid():
        _send(peer, {"refused": "descriptors are for processes of the same user"})
        # No later request can arrive, and one that has arrived is read: a socket that is closed
        # with an unread request is reset, and the other process would lose the refusal.
        peer.shutdown(socket.SHUT_RD)
        peer.recv(REQUEST_BYTES)
        return
    request = peer.recv(REQUEST_BYTES).decode(errors="replace")
    until = time.monotonic() + TIMEOUT
    try:
        kind, _, what = request.partition(" ")
        if kind not in _answers:
            raise ValueError(f"this process has no {kind!r} to send")
        said, handles = _answers[kind](what)
        limit_until(peer, until)
        _send(peer, said)
        several = iter(handles)
        while some := list(islice(several, AT_ONCE)):
            limit_until(peer, until)
            socket.send_fds(peer, [b"\0"], [each.fileno() for each in some])
            for each in some:
                each.close()
    except Exception as error:  # any exception: the other process receives its text
        peer.settimeout(REQUEST_SECONDS)
        _send(peer, {"refused": str(error)})


def _send(peer: socket.socket, said: dict[str, Any]) -> None:
    peer.sendall(json.dumps(said).encode())


def _forget_server() -> None:
    global _server
    if _server is not None:
        _server.close_in_child()
    _server = None  # its thread is the parent's


os.register_at_fork(after_in_child=_forget_server)
