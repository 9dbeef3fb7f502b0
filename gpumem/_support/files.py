"""Checks of files before the work: an input is a regular file, an output can be written."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO, TypeAlias

FilePath: TypeAlias = str | os.PathLike[str]


@contextmanager
def open_regular(path: FilePath) -> Iterator[BinaryIO]:
    """Open a file to read; raise OSError if it is not a regular one.

    A device has no end, and a pipe waits for a writer.
    """
    with open(path, "rb", opener=_open_without_wait) as file:
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            raise _irregular(path)
        yield file


def _open_without_wait(path: str, flags: int) -> int:
    try:
        return os.open(path, flags | os.O_NONBLOCK)
    except OSError as error:
        raise (_irregular(path) if error.errno == errno.ENXIO else error) from None  # of a socket


def _irregular(path: FilePath) -> OSError:
    return OSError(errno.EINVAL, "it is not a regular file", os.fspath(path))


def is_at(descriptor: int, path: str | os.PathLike[str]) -> bool:
    """Return whether an open file has this name: others may have removed or replaced it."""
    try:
        return os.path.samestat(os.fstat(descriptor), os.lstat(path))
    except FileNotFoundError:
        return False


def require_writable(path: Path, *, in_place: bool = False) -> None:
    """Raise OSError, which says why, unless a file can be written at a path.

    Parameters
    ----------
    path : Path
        The file; an empty path is the current folder.
    in_place : bool
        An existing file is written in place. Otherwise a new file is written next to it, and then
        renamed.
    """
    folder = path.absolute().parent
    if path.is_dir():
        raise IsADirectoryError(errno.EISDIR, "it is a folder", str(path))
    if in_place and path.exists():  # also a device or a pipe, in a read-only folder
        if not os.access(path, os.W_OK):
            raise PermissionError(errno.EACCES, "it is read-only", str(path))
    elif path.exists() and not path.is_file():  # a rename would replace a device
        raise _irregular(path)
    elif not folder.is_dir():
        raise FileNotFoundError(errno.ENOENT, f"there is no folder {folder}", str(path))
    elif not os.access(folder, os.W_OK | os.X_OK):
        raise PermissionError(errno.EACCES, f"{folder} is read-only", str(path))
