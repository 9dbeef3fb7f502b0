"""Blocks of libraries that allocate for a stream and free by address."""

cimport cython
from libc.stdint cimport uint64_t, uintptr_t

from gpumem._buffer cimport Buffer, MemoryResource, ResourceBase, size_of, Stream
from gpumem._core cimport Arena, arena_bad_free, arena_take_on, arena_take_on_legacy
from gpumem._support.deferred cimport report_unraisable
from gpumem._support.streams cimport LEGACY_STREAM

from gpumem.errors import ClosedError, InvalidFreeError


@cython.final
cdef class Blocks:
    """The live blocks of one resource, by address.

    Parameters
    ----------
    find : callable
        Returns the resource; called once, at the first block.
    """

    cdef object find
    cdef MemoryResource found
    cdef dict live              # address -> Buffer
    cdef Stream last_stream     # of the last call; its owner is the caller's stream object

    def __init__(self, find):
        self.find = find
        self.live = {}

    @property
    def resource(self):
        """The resource that allocates the blocks."""
        return self.source()

    def __len__(self):
        return len(self.live)

    def __contains__(self, address):
        return address in self.live

    def allocate(self, nbytes, stream):
        """Return the address of a block for work on a stream; 0 for no bytes.

        Parameters
        ----------
        nbytes : int
        stream : object with ``__cuda_stream__``
            Kept alive while memory is marked with it. While it captures, a graph pool serves it.

        Raises
        ------
        OutOfMemoryError, ClosedError, TypeError, ValueError
            As the resource's `allocate`.
        """
        cdef MemoryResource resource = self.source()
        cdef uint64_t size = size_of(nbytes, resource)
        cdef Buffer buffer
        if size == 0:
            return 0
        named = self.stream_of(resource, stream)
        if type(resource) is not Arena:
            buffer = resource.allocate(size, 0 if named is None else named)
        elif named is None:
            buffer = arena_take_on_legacy(<Arena>resource, size)
        else:
            buffer = arena_take_on(<Arena>resource, size, named)
        self.live[buffer.address] = buffer
        return buffer.address

    def free(self, address, stream):
        """Free the block that begins at an address, on a stream.

        Raises
        ------
        InvalidFreeError
            No block begins there.
        """
        cdef Buffer buffer
        if not address:
            return
        buffer = self.live.get(address)
        if buffer is None:
            if type(self.source()) is Arena:
                arena_bad_free(<Arena>self.found, address)
            raise InvalidFreeError(f"no block of {self.source()!r} begins at {address:#x}")
        try:
            named = self.stream_of(buffer.resource, stream)
            # Before the free, after which the address may be handed out again at once. Reading the
            # stream may have run other code, which has freed the block.
            if self.live.get(address) is buffer:
                del self.live[address]
            buffer.close(0 if named is None else named)
        except ClosedError:
            pass        # at exit, or in a fork's child, blocks are left to the driver

    def deallocate(self, address, nbytes, stream):
        """Do as `free`, but report an exception instead of raising it: RMM's callback."""
        try:
            self.free(address, stream)
        except BaseException as error:
            report_unraisable(error, self)

    cdef MemoryResource source(self):
        if self.found is None:
            self.found = self.find()
        return self.found

    cdef Stream stream_of(self, ResourceBase resource, object stream):
        """Return gpumem's view of a stream; None for the legacy default stream."""
        cdef uintptr_t handle = stream.__cuda_stream__()[1]
        cdef Stream last
        if handle <= LEGACY_STREAM:
            return None
        last = self.last_stream
        if (last is None or last.owner is not stream
                or last.driver_device is not resource.driver_device):
            last = Stream.from_handle(resource.memory.device, handle, stream)
            self.last_stream = last
        return last
