"""The page that ``gpumem top`` reads, as another process left it."""

from __future__ import annotations

import fcntl
import os

from gpumem.errors import GpumemError
from gpumem.observe import LivePage, live

from .. import changes
from . import Target
from .cli import command
from .files import folder, written

live.FOLDER = folder()


def _page(data: bytes) -> object:
    """Read a page, and let the command draw it. Every other one belongs to a living process."""
    path = written(data, f"gpumem-{os.getuid()}-{os.getpid()}")
    with path.open("rb") as file:
        if len(data) % 2:
            fcntl.flock(file, fcntl.LOCK_EX)
        more = ([], [str(os.getpid())], [str(os.getpid()), "--json"])[len(data) // 2 % 3]
        command(["top", *more])
        written(data, path.name)  # that of a process that has ended is removed
        page = LivePage.of_process(os.getpid())
    repr(page), page.age, page.total("in_use")
    shape = len(page.resources), len(page.budgets), page.left_out.bit_length() // 8
    return page.alive, *shape


TARGETS = (
    Target(
        "page",
        _page,
        (GpumemError,),
        structured=(changes.checksummed,),
        tokens=(b"gpumemTP", b"\x01\0\0\0", b"\x1b[2J", b"\xff" * 8, b"\0" * 8, b"\xc2\xb2"),
    ),
)
