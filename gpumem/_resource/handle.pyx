"""Descriptors that stand for memory or timelines of other processes, owned by an object.

The number lives in one C field and is closed by the C library, so that a finalizer at the
interpreter's end closes it as well, when modules are gone already.
"""

from enum import Enum
from errno import EBADF
from operator import index
from os import fstat

cimport cython
from posix.fcntl cimport F_SETFD, fcntl, FD_CLOEXEC
from posix.unistd cimport close

from gpumem._support.signatures import ClassSignature
from gpumem.errors import BadHandleError, ClosedError


@cython.final
cdef class Handle:
    """Owns a file descriptor and closes it; programs that this process starts do not inherit it.

    Whatever it stands for stays alive as long as the descriptor is open in some process. Sent
    through `multiprocessing` (a pipe, a queue, a process's arguments), it arrives as a descriptor
    of the receiving process, with what it says of itself. Over a socket of your own, send
    ``fileno()`` with `socket.send_fds` and make a Handle of what arrives.

    Parameters
    ----------
    fd : int
        An open descriptor; from here on this object's.
    kind : MemoryHandleType or SemaphoreType, optional
        How importers have to open it.
    contents : object, optional
        Describes what it refers to, for its receiver; picklable.

    Raises
    ------
    TypeError, ValueError
        `fd` is not an integer, or negative.
    OSError
        `fd` is not open.

    Examples
    --------
    >>> import gpumem
    >>> with gpumem.DriverPool("host", {"shareable": True}) as pool:
    ...     with pool.export_handle() as handle:
    ...         handle.fileno() > 0
    True
    """

    __signature__ = ClassSignature()

    def __cinit__(self):
        self.fd = -1

    def __init__(self, fd, *, kind=None, contents=None):
        """Take the arguments that the class describes."""
        descriptor_of(fd)
        # A second call would lose the first descriptor.
        if self.fd >= 0:
            raise TypeError("Handle.__init__ called twice")
        fstat(fd)       # or it closed, one day, what another owner opened under the number
        self.kind = kind
        self.contents = contents
        own(self, fd)

    def __dealloc__(self):
        if self.fd >= 0:
            close(self.fd)

    def fileno(self):
        """Return the descriptor, which stays this object's.

        Raises
        ------
        ClosedError
            It was closed or detached.
        """
        if self.fd < 0:
            raise ClosedError("this handle is closed")
        return self.fd

    def detach(self):
        """Return the descriptor, which the caller closes; this object is closed."""
        fd = self.fileno()
        self.fd = -1
        return fd

    @property
    def closed(self):
        """Whether it was closed or detached."""
        return self.fd < 0

    def close(self):
        """Close the descriptor. Idempotent."""
        cdef int fd = self.fd
        # Marked as closed first: closing twice would close another thread's new descriptor.
        self.fd = -1
        if fd >= 0:
            close(fd)

    def __enter__(self):
        return self

    def __exit__(self, *exception):
        self.close()

    def __reduce__(self):
        from multiprocessing.reduction import DupFd

        # DupFd duplicates the descriptor into the receiving process, also under "spawn".
        return received_handle, (DupFd(self.fileno()), self.kind, self.contents)

    def __repr__(self):
        # A kind that came out of a pickle may be anything, and its text an error.
        what = ""
        if self.kind is not None:
            what = f" {self.kind.name if isinstance(self.kind, Enum) else 'of an unknown kind'}"
        return f"<gpumem.Handle{what} {'closed' if self.fd < 0 else self.fd}>"


cdef int descriptor_of(object fd) except -1:
    if isinstance(fd, bool) or not isinstance(fd, int):
        raise TypeError(f"a descriptor must be an integer, not {type(fd).__name__}")
    if not 0 <= fd < 1 << 31:
        raise ValueError(f"descriptor {fd} is out of range: expected 0 to 2**31 - 1")
    return fd


def received_handle(sent, kind, contents):
    """Make a Handle of what arrived in a pickle: a DupFd, as long as nobody tampered with it.

    Raises
    ------
    BadHandleError
        No descriptor came: its sender is gone, or the pickle is damaged.
    """
    cdef int fd
    try:
        fd = index(sent.detach())
        fstat(fd)
    except Exception as error:
        raise BadHandleError(EBADF, f"no descriptor arrived: {error!r}") from error
    return handle_of(fd, kind, contents)


cdef Handle handle_of(int fd, object kind, object contents):
    cdef Handle handle = Handle.__new__(Handle)
    handle.kind = kind
    handle.contents = contents
    own(handle, fd)
    return handle


cdef void own(Handle handle, int fd) noexcept:
    # Sockets and drivers return descriptors that a child program would inherit, and keep open.
    fcntl(fd, F_SETFD, FD_CLOEXEC)
    handle.fd = fd
