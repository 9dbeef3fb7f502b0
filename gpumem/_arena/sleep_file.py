"""Files with the bytes of sleeping arenas."""

from __future__ import annotations

import atexit
import contextlib
import errno
import os
import weakref

from gpumem._support.files import is_at
from gpumem.errors import SleepFileError


class SleepFile:
    """The file of one call of sleep, removed when no tag has its bytes there any more.

    It stays open, because its path may be renamed. `nbytes` is the size that it has to have.
    """

    descriptor = -1

    def __init__(self, to: str | bytes | os.PathLike[str]) -> None:
        # The program may change its working directory before the file is removed.
        self.path = os.path.abspath(os.fsdecode(to))
        self.nbytes = 0
        self._process = os.getpid()
        access = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        self.descriptor = os.open(self.path, access, 0o600)
        _open.add(self)

    def error(self, arena: str, code: int) -> SleepFileError:
        """Return the error of a failed read or write of an arena's bytes, by its errno."""
        if code == errno.ENODATA:
            there = os.fstat(self.descriptor).st_size
            why = f"it has {there:,} bytes, expected {self.nbytes:,}"
        elif code == errno.EBADMSG:
            why = "it has other bytes than were written"
        else:
            why = os.strerror(code)
        text = f"the file with the sleeping bytes of arena {arena!r} cannot be used: {why}"
        return SleepFileError(code, text, self.path)

    def remove(self) -> None:
        """Remove the file in the process that made it, if the path still names it."""
        with contextlib.suppress(OSError):
            if os.getpid() == self._process and is_at(self.descriptor, self.path):
                os.unlink(self.path)

    def __del__(self) -> None:
        if self.descriptor < 0:
            return
        try:
            self.remove()
        except MemoryError:  # the next request for a few bytes may succeed
            self.remove()
        finally:
            os.close(self.descriptor)


_open: weakref.WeakSet[SleepFile] = weakref.WeakSet()


@atexit.register
def _remove_all() -> None:
    for file in list(_open):
        file.remove()
