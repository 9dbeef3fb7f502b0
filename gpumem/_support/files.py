"""Output files: checks that one can be written, before the work for it."""

from __future__ import annotations

import errno
import os
from pathlib import Path


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
