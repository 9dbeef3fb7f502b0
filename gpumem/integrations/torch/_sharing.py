"""PyTorch's tensors in other processes: blocks by a text that `torch.multiprocessing` carries.

The text names a socket of the process that has the block, and the block's address. A thread there
answers who connects with a descriptor of each page that the block lies in, and the other process
maps them in a row. PyTorch itself counts the references across processes, and keeps the block until
the last one is gone; so nothing is kept here, and each text is a mapping of its own. From the first
text until its free the block keeps its tag awake (`Arena.sleep`).

The socket is Linux's abstract one: no file is left behind, and it is reached within a network
namespace, as of one container, whatever the processes' other namespaces and permissions are. Only
processes of the same user are answered.
"""

from __future__ import annotations

import json
import os
import secrets
import socket
import struct
import threading
from errno import EBADF
from itertools import count
from typing import Any

from gpumem._resource.block_pages import (
    OpenedPages,
    export_page,
    keep_awake,
    make_exportable,
    pages_of,
)
from gpumem._resource.handle import Handle
from gpumem._support.forks import ForkLock
from gpumem.device import Device, devices
from gpumem.errors import BadHandleError, DeviceMismatchError, GpumemError

__all__ = ["open_block", "prepare", "share_block"]

MARK = "gpumem-block"
TIMEOUT = 30.0  # seconds for an answer
AT_ONCE = 64  # descriptors in a message; the kernel takes up to 253
REQUEST_BYTES = 64
HEADER_BYTES = 1 << 17  # room for the sizes of 10,000 pages
_PEER = struct.Struct("3i")  # of a socket: process, user, group


class Server:
    """Answers those who ask for blocks of this process, in a thread, until it ends."""

    def __init__(self) -> None:
        self.name = f"gpumem-{os.getpid()}-{secrets.token_hex(8)}"
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._socket.bind(f"\0{self.name}")
        self._socket.listen(64)
        threading.Thread(target=self._serve, name="gpumem blocks", daemon=True).start()

    def _serve(self) -> None:
        while True:
            peer, _ = self._socket.accept()
            with peer:
                try:
                    peer.settimeout(TIMEOUT)
                    answer(peer)
                except OSError:
                    pass  # it has gone, or does not read


def answer(peer: socket.socket) -> None:
    """Send what was asked for: a header, then the pages' descriptors; or why not."""
    request = peer.recv(REQUEST_BYTES)
    _, user, _ = _PEER.unpack(peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER.size))
    try:
        if user != os.getuid():
            raise ValueError("blocks are for processes of the same user")
        address = int(request, 16)
        ordinal, is_host, _, pages = pages_of(address)
        device = Device(f"{'host' if is_host else 'cuda'}:{ordinal}")
        sizes = [nbytes for _, nbytes in pages]
        send(peer, {"device": str(device), "uuid": device.uuid, "sizes": sizes})
        for first in range(0, len(pages), AT_ONCE):
            some = [export_page(address, begin) for begin, _ in pages[first : first + AT_ONCE]]
            socket.send_fds(peer, [b"\0"], [page.fileno() for page in some])
    except (GpumemError, ValueError) as error:
        send(peer, {"refused": str(error)})


def send(peer: socket.socket, said: dict[str, Any]) -> None:
    peer.sendall(json.dumps(said).encode())


_lock = ForkLock()
_server: Server | None = None
_numbers = count()


def _forget_server() -> None:
    global _server
    _server = None  # its thread is the parent's


os.register_at_fork(after_in_child=_forget_server)


def prepare(device: Device) -> None:
    """Let pages that are made from now on be shared, if the device can export them."""
    if device.capabilities["posix_fd_handles"]:
        make_exportable()


def share_block(address: int) -> tuple[str, int]:
    """Return the text that names a block for other processes, and its offset in what they open.

    Parameters
    ----------
    address : int
        Where a block begins that PyTorch has.

    Raises
    ------
    UnsupportedHandleTypeError
        No such block begins there, or its memory is not pages.
    """
    global _server
    _, _, before, _ = pages_of(address)
    keep_awake(address)
    with _lock:
        if _server is None:
            _server = Server()
    return f"{MARK} {_server.name} {address:x} {next(_numbers)}", before


def open_block(text: str) -> OpenedPages:
    """Map the pages of a block of the process that the text names.

    Raises
    ------
    BadHandleError
        The text is not of `share_block`, its process is gone, or it has no such block any more.
    DeviceMismatchError
        The device that it lies on is not here.
    DriverError
        The driver refused.
    """
    try:
        mark, name, address, _ = text.split(" ")
        if mark != MARK:
            raise ValueError(f"it begins with {mark!r}")
    except ValueError as error:
        raise BadHandleError(EBADF, f"this is no text of a shared block: {error}") from None
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as peer:
            peer.settimeout(TIMEOUT)
            peer.connect(f"\0{name}")
            peer.sendall(address.encode())
            return _receive(peer)
    except GpumemError:
        raise
    except (OSError, ValueError, KeyError) as error:
        raise BadHandleError(EBADF, f"{name} did not hand out the block: {error!r}") from error


def _receive(peer: socket.socket) -> OpenedPages:
    said = json.loads(peer.recv(HEADER_BYTES) or b'{"refused": "the connection ended"}')
    if "refused" in said:
        raise BadHandleError(EBADF, f"the other process refused: {said['refused']}")
    sizes = said["sizes"]
    opened = OpenedPages(_device_of(said["device"], said["uuid"]), sum(sizes))
    while sizes:
        data, numbers, _, _ = socket.recv_fds(peer, HEADER_BYTES, AT_ONCE)
        pages = [Handle(number) for number in numbers]
        if not pages:
            raise BadHandleError(EBADF, f"the other process stopped: {data.decode()}")
        for page in pages:
            opened.map(page.fileno(), sizes.pop(0))
            page.close()
    return opened


def _device_of(name: str, uuid: str) -> Device:
    # First the device of the same name: to ask the others opens them, and makes contexts there.
    for device in sorted(devices(), key=lambda each: str(each) != name):
        if device.uuid == uuid:
            return device
    raise DeviceMismatchError(f"the block is on device {uuid}, which is not here")
