"""Checks of files before the work: an input is a regular file, an output can be written."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path


def require_regular(path: str | os.PathLike[str]) -> None:
    """Raise OSError unless a path names a regular file.

    A device has no end, and a pipe waits for a writer.
    """
    mode = os.stat(os.fspath(path)).st_mode
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), os.fspath(path))
    if not stat.S_ISREG(mode):
        raise OSError(errno.EINVAL, "it is not a regular file", os.fspath(path))


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
    elif not folder.is_dir():
        raise FileNotFoundError(errno.ENOENT, f"there is no folder {folder}", str(path))
    elif not os.access(folder, os.W_OK | os.X_OK):
        raise PermissionError(errno.EACCES, f"{folder} is read-only", str(path))
