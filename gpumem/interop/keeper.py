"""The keeper: holds descriptors of sealed sets by name, so that their memory outlives its maker.

It runs as a program of its own, from this file and with Python's standard library alone: it opens
no driver and maps no memory. A message is one packet of JSON with the descriptors beside it. The
first descriptor of a set is a file in memory with its manifest, of which the keeper reads the first
line. A process that opened a set keeps its connection, by which the keeper knows who uses a set.
Nothing here waits for a client: one that is slow or sends something else is disconnected.
"""

from __future__ import annotations

import argparse
import contextlib
import errno
import fcntl
import json
import os
import re
import resource
import selectors
import socket
import stat
import struct
import sys
import time
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

VERSION = 1  # of the messages
MAX_REQUEST = 4096  # bytes
MAX_ANSWER = 1 << 17
MAX_HEAD = 512  # bytes of a manifest's first line
MAX_PARTS = 64  # descriptors of a set beside its manifest
MAX_SETS = 128
MAX_PEERS = 256  # connections; further ones wait
BACKLOG = 64  # connections in the queue
MAX_PATH = 107  # bytes of a socket's path
PAUSE_SECONDS = 0.05  # while no connection can be accepted
CHECK_SECONDS = 60.0  # between two looks at the socket's file
RUNS_ALREADY = 3  # exit status
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._/@+-]{0,99}", re.ASCII)
SEALS = fcntl.F_SEAL_WRITE | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW
DAMAGES = (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError)
_PEER = struct.Struct("3i")  # of a socket: process, user, group


def folder() -> str:
    """Return the path of the folder with the keeper's socket and lock, of this user alone.

    ``GPUMEM_KEEPER`` names another one.
    """
    user = os.getuid()
    runtime = os.environ.get("XDG_RUNTIME_DIR") or f"/run/user/{user}"
    usual = f"{runtime}/gpumem" if os.path.isdir(runtime) else f"/tmp/gpumem-{user}"
    return os.environ.get("GPUMEM_KEEPER") or usual


def require_private(path: str) -> None:
    """Raise PermissionError unless a folder is this user's alone."""
    found = os.lstat(path)
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o077:
        text = f"{path} is not a folder of mode 0700 of user {os.getuid()}"
        raise PermissionError(errno.EPERM, text)


def peer_of(peer: socket.socket) -> tuple[int, int]:
    """Return the process and the user at the other end, as it began to listen or connected."""
    raw = peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER.size)
    process, user, _ = _PEER.unpack(raw)
    return int(process), int(user)


class Refused(Exception):
    """A request is refused: a word for programs, and a text for people."""


@dataclass(eq=False)
class KeptSet:
    """The first line of a set's manifest, and the set's descriptors."""

    head: dict[str, Any]
    descriptors: list[int]


@dataclass(eq=False)
class Peer:
    """A connection, which ends when its process ends, or no longer uses its set."""

    socket: socket.socket
    process: int
    using: KeptSet | None = None


def kept_set(name: str, descriptors: list[int]) -> KeptSet:
    """Check the descriptors of a set.

    Raises
    ------
    Refused
        The first is not a sealed file in memory, or its first line does not describe the set.
    """
    try:
        # Files with these seals lie in memory: a read of one does not wait.
        if fcntl.fcntl(descriptors[0], fcntl.F_GET_SEALS) & SEALS != SEALS:
            raise ValueError("the manifest can still be written")
        head = json.loads(os.pread(descriptors[0], MAX_HEAD, 0).partition(b"\n")[0])
        numbers = [head[key] for key in ("bytes", "tensors", "parts", "process")]
        if not all(type(each) is int and 0 <= each < 1 << 63 for each in numbers):
            raise ValueError(f"a number of the manifest is out of range: {numbers}")
        if head["name"] != name or head["parts"] != len(descriptors) - 1:
            raise ValueError(f"the manifest describes {head['parts']} parts of {head['name']!r}")
    except DAMAGES as error:
        raise Refused("request", f"the set {name!r} is damaged: {error!r}") from error
    keys = ("name", "bytes", "tensors", "parts", "process")
    return KeptSet({key: head[key] for key in keys}, descriptors)


class Keeper:
    """Answers requests on a listening socket until it has held no set for `idle` seconds.

    It also ends when the socket's file is gone, as the runtime folder of a user who logs out: the
    sets could no longer be opened or dropped.
    """

    def __init__(self, listener: socket.socket, idle: float | None) -> None:
        self.listener = listener
        self.path = listener.getsockname()
        self.file = os.stat(self.path)
        self.idle = idle
        self.sets: dict[str, KeptSet] = {}
        self.peers: set[Peer] = set()
        # The sets leave room for connections and for one more message.
        self.room = resource.getrlimit(resource.RLIMIT_NOFILE)[0] - MAX_PEERS - MAX_PARTS - 32
        self.selector = selectors.DefaultSelector()
        listener.setblocking(False)
        self.selector.register(listener, selectors.EVENT_READ)

    def serve(self) -> None:
        """Answer until the keeper ends."""
        empty_since = time.monotonic()
        while self.is_reachable() and (
            self.idle is None or self.sets or time.monotonic() - empty_since < self.idle
        ):
            is_ending = self.idle is not None and not self.sets
            for key, _ in self.selector.select(PAUSE_SECONDS if is_ending else CHECK_SECONDS):
                if key.data is None:
                    self._accept()
                else:
                    self._serve(key.data)
            if self.sets:
                empty_since = time.monotonic()

    def is_reachable(self) -> bool:
        """Return whether the socket's file is still this keeper's."""
        with contextlib.suppress(OSError):
            return os.path.samestat(os.stat(self.path), self.file)
        return False

    def _accept(self) -> None:
        try:
            if len(self.peers) >= MAX_PEERS:
                raise BlockingIOError
            connection, _ = self.listener.accept()
        except OSError:  # also of too many open files: the connection waits in the queue
            time.sleep(PAUSE_SECONDS)
            return
        connection.setblocking(False)
        peer = Peer(connection, peer_of(connection)[0])
        self.peers.add(peer)
        self.selector.register(connection, selectors.EVENT_READ, peer)

    def _leave(self, peer: Peer) -> None:
        self.selector.unregister(peer.socket)
        peer.socket.close()
        self.peers.discard(peer)

    def _serve(self, peer: Peer) -> None:
        numbers: list[int] = []
        try:
            data, numbers, flags, _ = socket.recv_fds(peer.socket, MAX_REQUEST + 1, MAX_PARTS + 1)
            if not data:
                self._leave(peer)
                return
            if flags & socket.MSG_CTRUNC or len(data) > MAX_REQUEST:
                raise Refused("full", "the message has more bytes or descriptors than can be taken")
            answer, sent = self._answer(peer, json.loads(data), numbers)
        except BlockingIOError:
            return
        except Refused as error:
            answer, sent = {"refused": error.args[0], "text": error.args[1]}, []
        except DAMAGES as error:
            answer, sent = {"refused": "request", "text": f"it is damaged: {error!r}"}, []
        finally:
            for number in numbers:
                os.close(number)
        try:
            message = json.dumps(answer | {"version": VERSION}).encode()
            socket.send_fds(peer.socket, [message], sent)
        except OSError:  # a client that does not read its answers fills its queue
            self._leave(peer)

    def _answer(
        self, peer: Peer, request: dict[str, Any], numbers: list[int]
    ) -> tuple[dict[str, Any], list[int]]:
        _, user = peer_of(peer.socket)
        if user != os.getuid():
            raise Refused("user", f"this keeper is of user {os.getuid()}, not of user {user}")
        if request["version"] != VERSION:
            raise Refused("version", f"this keeper speaks version {VERSION} of the messages")
        call, name = request["call"], request.get("name")
        if call == "list":
            sets = self.sets.values()
            return {"sets": [each.head | {"users": self._users(each)} for each in sets]}, []
        if not isinstance(name, str) or not NAME.fullmatch(name):
            raise Refused("request", f"invalid name: expected {NAME.pattern}")
        if call in ("put", "open") and peer.using is not None:
            raise Refused("request", "this connection has a set already")
        if call == "put":
            peer.using = self._put(name, numbers)
            return {}, []
        if name not in self.sets:
            raise Refused("name", f"no set {name!r} is kept: there are {sorted(self.sets)}")
        if call == "drop":
            self._drop(name, force=request.get("force") is True)
            return {}, []
        if call != "open":
            raise Refused("request", "unknown call: expected put, open, drop or list")
        peer.using = self.sets[name]
        return {}, peer.using.descriptors

    def _users(self, kept: KeptSet) -> list[int]:
        return sorted({peer.process for peer in self.peers if peer.using is kept})

    def _put(self, name: str, numbers: list[int]) -> KeptSet:
        if name in self.sets:
            raise Refused("taken", f"a set {name!r} is kept already: drop it first")
        if len(self.sets) >= MAX_SETS:
            raise Refused("full", f"{MAX_SETS} sets are kept: drop one of them first")
        held = sum(len(each.descriptors) for each in self.sets.values())
        if held + len(numbers) > self.room:
            raise Refused("full", f"{held} of {self.room} descriptors are held: drop a set first")
        kept = self.sets[name] = kept_set(name, list(numbers))
        numbers.clear()
        for index, number in enumerate(kept.descriptors):
            notify(f"FDSTORE=1\nFDPOLL=0\nFDNAME={index},{name}", [number])
        return kept

    def _drop(self, name: str, *, force: bool) -> None:
        users = self._users(self.sets[name])
        if users and not force:
            processes = ", ".join(map(str, users))
            raise Refused("used", f"the set {name!r} is in use by process {processes}")
        release(name, dict(enumerate(self.sets.pop(name).descriptors)))


# ---- systemd -------------------------------------------------------------------------------------


def notify(text: str, descriptors: Iterable[int] = ()) -> None:
    """Tell systemd something, if it started this process."""
    address = os.environ.get("NOTIFY_SOCKET")
    if not address:
        return
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager, contextlib.suppress(OSError):
        manager.settimeout(1.0)
        manager.connect("\0" + address[1:] if address.startswith("@") else address)
        socket.send_fds(manager, [text.encode()], descriptors)


def inherited() -> dict[str, KeptSet]:
    """Return the sets that systemd passed to this process."""
    stored: dict[str, dict[int, int]] = {}
    is_mine = os.environ.get("LISTEN_PID") == str(os.getpid())
    count = int(os.environ.get("LISTEN_FDS", "0")) if is_mine else 0
    names = os.environ.get("LISTEN_FDNAMES", "").split(":")
    for number, text in zip(range(3, 3 + count), names, strict=False):
        os.set_inheritable(number, False)
        index, _, name = text.partition(",")
        if index.isdecimal() and NAME.fullmatch(name):
            stored.setdefault(name, {})[int(index)] = number
    sets = {}
    for name, parts in stored.items():
        try:
            sets[name] = kept_set(name, [parts[index] for index in sorted(parts)])
        except Refused as error:
            print(f"gpumem keep: {error.args[1]}", file=sys.stderr)
            release(name, parts)
    return sets


def release(name: str, parts: dict[int, int]) -> None:
    """Close descriptors of a set, and let systemd close its own."""
    for index, number in parts.items():
        notify(f"FDSTOREREMOVE=1\nFDNAME={index},{name}")
        os.close(number)


# ---- the program ---------------------------------------------------------------------------------


def lock(path: str) -> int | None:
    """Return the lock of a folder, which ends with this process; None if a keeper has it."""
    number = os.open(f"{path}/lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(number, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(number)
        return None
    return number


def listen(path: str) -> socket.socket:
    """Listen at a path; the caller has the lock, so a socket there is a dead keeper's."""
    with contextlib.suppress(FileNotFoundError):
        os.unlink(path)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    if len(os.fsencode(path)) > MAX_PATH:
        raise OSError(errno.ENAMETOOLONG, f"a socket's path has at most {MAX_PATH} bytes", path)
    listener.bind(path)
    listener.listen(BACKLOG)
    return listener


def main(arguments: list[str] | None = None) -> int:
    """Keep sets; return `RUNS_ALREADY` if another keeper has the folder."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--folder", required=True, type=os.path.abspath)
    parser.add_argument("--idle", type=float)
    parser.add_argument("--detach", action="store_true")
    options = parser.parse_args(arguments)
    with contextlib.suppress(FileExistsError):
        os.makedirs(options.folder, 0o700)
    require_private(options.folder)
    if lock(options.folder) is None:
        print(f"gpumem keep: a keeper runs in {options.folder} already", file=sys.stderr)
        return RUNS_ALREADY
    sets = inherited()
    listener = listen(f"{options.folder}/keeper")
    # The parent of this fork ends: connections wait in the queue until the child serves them.
    if options.detach and os.fork():
        os._exit(0)
    os.chdir("/")
    if options.detach:
        listener.listen(BACKLOG)  # from now on the socket names this process
        os.dup2(1, 2)  # the pipe to the starting process ends
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    keeper = Keeper(listener, options.idle)
    keeper.sets = sets
    notify("READY=1")
    with contextlib.suppress(KeyboardInterrupt):
        keeper.serve()
    if keeper.is_reachable():
        os.unlink(keeper.path)  # while this process has the lock
    return 0


if __name__ == "__main__":
    sys.exit(main())
