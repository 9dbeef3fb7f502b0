"""How others can register or open a memory: legacy IPC, descriptors, peers, network cards."""

from dataclasses import dataclass

cimport cython
from libc.stdint cimport uint64_t

from gpumem._buffer.buffer cimport (
    Buffer, buffer_share, drop_share, PLACE_EXPORTABLE, PLACE_SLEEPS, require_open,
)
from gpumem._native.driver cimport (
    CU_MEM_HANDLE_TYPE_FABRIC, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR,
    CU_POINTER_ATTRIBUTE_ACCESS_FLAGS, CU_POINTER_ATTRIBUTE_ALLOWED_HANDLE_TYPES,
    CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL, CU_POINTER_ATTRIBUTE_HOST_POINTER,
    CU_POINTER_ATTRIBUTE_IS_GPU_DIRECT_RDMA_CAPABLE,
    CU_POINTER_ATTRIBUTE_IS_LEGACY_CUDA_IPC_CAPABLE, CU_POINTER_ATTRIBUTE_MEMORY_TYPE, CUDA_SUCCESS,
    DriverDevice, pointer_attribute, pointer_value,
)

from gpumem._support.arguments import is_integer
from gpumem._support.sizes import format_size
from gpumem._support.texts import shown
from gpumem.device import _open_any, devices, driver_status
from gpumem.errors import ClosedError


@dataclass(frozen=True)
class Transports:
    """The ways by which others reach the memory at an address; see `gpumem.interop.transports`.

    Attributes
    ----------
    legacy_ipc : bool
        ``cuIpcGetMemHandle`` takes it, and so does UCX's ``cuda_ipc``: it came from ``cuMemAlloc``.
    posix_fd : bool
        It was made to be exported as a POSIX descriptor.
    fabric : bool
        It was made to be exported as a fabric handle, which other nodes can open.
    gpu_direct_rdma : bool
        A network card can read and write it without a copy through the host, if its driver can.
    peers : tuple of Device
        The other devices that can access it now, of those that this process uses.
    host : bool
        The CPU reads and writes it by the same address.

    Examples
    --------
    >>> import gpumem
    >>> gpumem.Arena("host").allocate(4096).transports().host
    True
    """

    legacy_ipc: bool
    posix_fd: bool
    fabric: bool
    gpu_direct_rdma: bool
    peers: tuple
    host: bool


def transports(what):
    """Return how others can reach the memory of a buffer, a tensor or an address.

    Parameters
    ----------
    what : Buffer, Tensor or int
        An int is an address in this process, of memory that the CUDA driver knows, whichever
        library allocated it; on a machine without CUDA, that the host device knows.

    Returns
    -------
    Transports
        As the driver answers now: peers may get access later.

    Raises
    ------
    TypeError
        `what` is none of these.
    ValueError
        The driver does not know the address, or the buffer is empty.
    ClosedError
        The buffer is closed.

    Examples
    --------
    >>> import gpumem
    >>> from gpumem.interop import transports
    >>> arena = gpumem.Arena("host")
    >>> one, other = arena.allocate(4096), arena.allocate(4096, shareable=True)
    >>> transports(one).posix_fd, transports(one.ptr) == one.transports()
    (False, True)
    """
    cdef DriverDevice driver_device
    cdef Buffer buffer
    if isinstance(what, Buffer):
        buffer = what
        require_block(buffer)
        # The driver does not know the files that are a host's shareable memory.
        exportable = buffer.home.place_of(buffer) == PLACE_EXPORTABLE
        return ways_of(buffer.address, buffer.home.driver_device, exportable)
    if not is_integer(what, 0, 2**64 - 1):
        owner = getattr(what, "buffer", None)
        if isinstance(owner, Buffer):
            return transports(owner)
        raise TypeError(f"invalid what = {shown(what, 80)}: expected a Buffer, a Tensor or an "
                        "address")
    driver_device = _open_any("cuda" if driver_status() else "host")
    return ways_of(what, driver_device, False)


cdef int require_block(Buffer buffer) except -1:
    require_open(buffer)
    if buffer.block_bytes == 0:
        raise ValueError("an empty buffer has no memory")
    return 0


cdef object ways_of(uint64_t address, DriverDevice driver_device, bint exportable):
    cdef uint64_t value = 0
    cdef uint64_t handles, legacy, rdma, ordinal
    if pointer_attribute(&driver_device.context, CU_POINTER_ATTRIBUTE_MEMORY_TYPE, address,
                         &value) != CUDA_SUCCESS:
        raise ValueError(f"the driver does not know the address {address:#x}")
    handles = pointer_value(driver_device, CU_POINTER_ATTRIBUTE_ALLOWED_HANDLE_TYPES, address)
    legacy = pointer_value(driver_device, CU_POINTER_ATTRIBUTE_IS_LEGACY_CUDA_IPC_CAPABLE, address)
    rdma = pointer_value(driver_device, CU_POINTER_ATTRIBUTE_IS_GPU_DIRECT_RDMA_CAPABLE, address)
    ordinal = pointer_value(driver_device, CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL, address)
    return Transports(
        legacy_ipc=legacy != 0,
        posix_fd=exportable or handles & CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR != 0,
        fabric=handles & CU_MEM_HANDLE_TYPE_FABRIC != 0,
        gpu_direct_rdma=rdma != 0,
        peers=tuple(peer for peer in others(driver_device.type, ordinal)
                    if pointer_value(peer._open(), CU_POINTER_ATTRIBUTE_ACCESS_FLAGS,
                                     address) != 0),
        host=(driver_device.type == "host"
              or pointer_value(driver_device, CU_POINTER_ATTRIBUTE_HOST_POINTER,
                               address) == address),
    )


cdef list others(str type, uint64_t ordinal):
    # A device without a context has no access, and a query must not make one.
    return [device for device in devices()
            if device.type == type and device.index != ordinal and device._is_open()]


@cython.final
cdef class Registration:
    """Keeps a block in place while a transport has it registered; made by `Buffer.register`.

    UCX, NCCL and network cards remember addresses: if the memory was released to the driver, they
    read stale data without an error. While this is held, the block is not reused and its memory is
    not released, also when its buffer has ended, and `Arena.sleep` refuses unless the block lies in
    memory that a sleep leaves. Usable in a ``with`` statement.

    Attributes
    ----------
    nbytes : int
        The registered bytes.

    Examples
    --------
    >>> import gpumem
    >>> arena = gpumem.Arena("host")
    >>> buffer = arena.allocate(1 << 20, transport="ipc")
    >>> registration = buffer.register()        # then give it to the transport
    >>> buffer.close()
    >>> arena.stats().in_use
    1048576
    >>> registration.release()
    >>> arena.stats().in_use
    0
    """

    def __init__(self):
        raise TypeError("a Registration is made by a buffer's register()")

    @property
    def address(self):
        """Address of the first registered byte. ClosedError once it is released."""
        if self.home is None:
            raise ClosedError("this registration is released")
        return self.start

    @property
    def released(self):
        """Whether `release` was called."""
        return self.home is None

    def release(self):
        """Release the block: the transport has deregistered it. Idempotent."""
        end(self)

    def __dealloc__(self):
        end(self)

    def __enter__(self):
        return self

    def __exit__(self, *exception):
        self.release()

    def __repr__(self):
        where = f"of {format_size(self.nbytes)} at {self.start:#x}"
        state = "released" if self.released else where
        return f"<gpumem.interop.Registration {state}>"


def register(Buffer buffer not None):
    """Make the registration of a buffer that is open and not empty; see `Buffer.register`."""
    require_block(buffer)
    buffer.home.before_registration(buffer)
    return hold(buffer)


def hold(Buffer buffer not None):
    """Keep the memory of an open buffer that is not empty: a registration with no transport.

    An object that makes other blocks in that memory holds it, so that it cannot sleep under them.
    """
    cdef Registration registration = Registration.__new__(Registration)
    registration.share = buffer_share(buffer)
    registration.home = buffer.home.registrar()
    registration.start = buffer.address
    registration.nbytes = buffer.requested_bytes
    registration.holds_pages = buffer.home.place_of(buffer) == PLACE_SLEEPS
    count(registration.home, registration.holds_pages, 1)
    return registration


cdef void end(Registration registration) noexcept:
    cdef ResourceBase home = registration.home
    if home is not None:
        registration.home = None
        count(home, registration.holds_pages, -1)
        drop_share(registration.share)


cdef void count(ResourceBase home, bint holds_pages, int change) noexcept:
    if holds_pages:
        home.registered += change
    else:
        home.registered_fixed += change
