"""Memory that NCCL has registered, so that collectives read and write it directly.

Without a registration NCCL moves data through buffers of its own. With one, all-reduce, all-gather
and send/receive between the GPUs of a node read and write the user's memory directly, with fewer
streaming multiprocessors. NCCL requires that either all ranks pass registered memory to a call, or
none does.

NCCL remembers addresses. Pages that gpumem moves, and memory that is released to the driver, would
leave it with stale ones; therefore only blocks that stay in place can be registered, and they stay
until they are deregistered:

- `register` takes one block, allocated with ``transport="ipc"`` or from regions;
- `RegisteredSource` is a source of memory for a whole arena: each region is registered when it is
  made and deregistered before it is released.

Examples
--------
>>> import gpumem
>>> from gpumem.integrations import nccl
>>> import torch.distributed  # doctest: +SKIP
>>> group = torch.distributed.group.WORLD  # doctest: +SKIP
>>> shared = nccl.RegisteredSource(gpumem.Arena("cuda:0"), group)  # doctest: +SKIP
>>> arena = gpumem.Arena("cuda:0", source=shared)  # doctest: +SKIP
>>> gradients = torch.from_dlpack(
...     gpumem.empty((1 << 20,), "float32", resource=arena)
... )  # doctest: +SKIP
>>> torch.distributed.all_reduce(gradients)  # doctest: +SKIP
"""

from __future__ import annotations

from collections.abc import Iterable
from ctypes import CDLL, POINTER, byref, c_char_p, c_int, c_size_t, c_void_p
from typing import Any, NamedTuple, Protocol, Self

from gpumem._arena.arena import Arena
from gpumem._buffer.buffer import Buffer
from gpumem._buffer.stream import Stream
from gpumem._support.closing import Uncopied, close_after_body
from gpumem._support.sizes import format_size
from gpumem.errors import ConfigError, DeviceMismatchError, IntegrationError, MissingFrameworkError
from gpumem.integrations._common.switch import Status

__all__ = ["NcclRegistration", "RegisteredSource", "register", "status"]
__dir__ = __all__.copy

_SUCCESS = 0
_END_OF_ADDRESSES = 2**64


class _OverBuffer(Protocol):
    @property
    def buffer(self) -> Buffer | None: ...


# ---- public functions ----------------------------------------------------------------------------


def register(memory: Buffer | _OverBuffer, communicators: Any) -> NcclRegistration:
    """Register a block with NCCL, and keep it in place until it is deregistered.

    NCCL's call is local: no other rank takes part, and nothing is queued on a stream.

    Parameters
    ----------
    memory : Buffer or Tensor
        Its whole block is registered. Allocated with ``transport="ipc"``, from an arena with
        ``backing="regions"``, or imported and made by ``cudaMalloc``.
    communicators
        One, or several of the block's device, each a ``torch.distributed`` process group with the
        NCCL backend, an object with the address of an ``ncclComm_t`` as ``ptr`` (nccl4py) or
        ``comm`` (CuPy), or that address. A communicator given by its address must outlive the
        registration; the others are checked for existence.

    Returns
    -------
    NcclRegistration
        Call its `release`, or leave its ``with`` block, once the collectives that use the block are
        done.

    Raises
    ------
    TypeError
        `memory` or a communicator is none of these.
    ConfigError
        The block could move, or NCCL cannot register its kind of memory.
    DeviceMismatchError
        A communicator is another device's.
    ClosedError
        The block is closed.
    MissingFrameworkError, IntegrationError
        NCCL is not installed; a process group has no communicator yet; NCCL refuses. Nothing is
        registered then.

    Notes
    -----
    ``ncclCommRegister`` and ``ncclCommDeregister``; NCCL's user guide, "User Buffer Registration".
    """
    buffer = _buffer_of(memory)
    found = _communicators(communicators)
    _require_registrable(buffer)
    return NcclRegistration(buffer, found)


def status() -> Status:
    """Return which resources have blocks that NCCL has registered now, one for each device."""
    held = {each._resource.memory.device.index: each._resource for each in list(_registrations)}
    return Status(bool(held), held)


class NcclRegistration(Uncopied):
    """A block that NCCL has registered; made by `register`.

    Dropping it releases nothing: NCCL would keep an address that is allocated again.

    Attributes
    ----------
    nbytes : int
        Bytes of the registered block.
    """

    def __init__(self, buffer: Buffer, communicators: list[_Communicator]) -> None:
        library = _nccl()
        for communicator in communicators:
            communicator.require_device(library, buffer)
        self._kept = buffer.register()
        self._resource = buffer.resource
        self.nbytes = self._kept.nbytes
        self._held: list[tuple[_Communicator, int]] = []
        _registrations.add(self)
        try:
            for communicator in communicators:
                handle = library.register(communicator.ptr, self.address, self.nbytes)
                self._held.append((communicator, handle))
        except BaseException:
            self.release()
            raise

    @property
    def address(self) -> int:
        """Address of the registered block. ClosedError once it is released."""
        return self._kept.address

    @property
    def released(self) -> bool:
        """Whether `release` was called."""
        return bool(self._kept.released)

    def release(self) -> None:
        """Deregister the block, and end its registration. Idempotent.

        Raises
        ------
        IntegrationError
            NCCL refuses; the block is kept, and another call can release it.
        """
        while self._held:
            communicator, handle = self._held[-1]
            # The end of a communicator ends its registrations.
            if communicator.exists():
                _nccl().deregister(communicator.ptr, handle)
            self._held.pop()
        self._kept.release()
        _registrations.discard(self)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        close_after_body(self.release, error)

    def __repr__(self) -> str:
        state = (
            "released" if self.released else f"of {format_size(self.nbytes)} at {self.address:#x}"
        )
        return f"<gpumem.integrations.nccl.NcclRegistration {state}>"


# All registrations that were not released: one that is dropped keeps its block.
_registrations: set[NcclRegistration] = set()


class RegisteredSource(Uncopied):
    """Regions that NCCL has registered, for an `Arena` that is given this as its ``source``.

    Every block of that arena can be passed to collectives of the communicators. Each region is a
    block of `upstream`, which is charged for it, and is freed after `close` or `shrink` of the
    arena.

    Parameters
    ----------
    upstream : Arena
        Of the same memory as the arena; its budgets bound both.
    communicators
        As for `register`. Close the arena before a communicator that is given by its address ends.

    Raises
    ------
    TypeError
        `upstream` is not an arena, or a communicator is none of those.
    MissingFrameworkError, IntegrationError
        NCCL is not installed; a process group has no communicator yet.
    DeviceMismatchError
        A communicator is another device's.

    Notes
    -----
    Regions grow by the arena's settings: ``initial_chunk_size_bytes`` and
    ``max_power_of_two_extend_bytes`` bound how many there are, and each costs NCCL an exchange of
    handles at the first collective that uses it. A region that NCCL refuses to deregister stays
    allocated and registered, and the error is reported as unraisable.
    """

    def __init__(self, upstream: Arena, communicators: Any) -> None:
        if not isinstance(upstream, Arena):
            raise TypeError(f"invalid upstream = {upstream!r}: expected a gpumem.Arena")
        self._upstream = upstream
        self._communicators = _communicators(communicators)
        for communicator in self._communicators:
            communicator.require_device(_nccl(), upstream)
        self._stream = Stream(upstream.memory.device)
        self._regions: dict[int, tuple[Buffer, NcclRegistration]] = {}

    def allocate(self, nbytes: int) -> int:
        """Return the address of a new region, registered."""
        region = self._upstream.allocate(nbytes, self._stream, transport="ipc")
        self._stream.synchronize()  # every stream of the arena may use it at once
        try:
            self._regions[region.ptr] = region, NcclRegistration(region, self._communicators)
        except BaseException:
            region.close()
            raise
        return region.ptr

    def free(self, address: int, nbytes: int) -> None:
        """Deregister a region, and free it in `upstream`."""
        region, registration = self._regions[address]
        registration.release()
        del self._regions[address]
        region.close()


# ---- registrable memory --------------------------------------------------------------------------


def _buffer_of(memory: Any) -> Buffer:
    buffer = memory if isinstance(memory, Buffer) else getattr(memory, "buffer", None)
    if not isinstance(buffer, Buffer):
        raise TypeError(f"invalid memory = {memory!r}: expected a gpumem Buffer or Tensor")
    return buffer


def _require_registrable(buffer: Buffer) -> None:
    if not buffer.transports().legacy_ipc:
        raise ConfigError(
            f"NCCL cannot register {buffer!r}: its pages can move, or are not memory of a GPU; "
            'allocate it with transport="ipc"'
        )


class _Communicator(NamedTuple):
    """An ``ncclComm_t``, and its owner."""

    ptr: int
    owner: Any  # of torch.distributed, checked before each deregistration; None: the caller

    def exists(self) -> bool:
        return self.owner is None or _pointer_of_group(self.owner) == self.ptr

    def require_device(self, library: _Library, where: Buffer | Arena) -> None:
        device = where.memory.device
        index = library.device(self.ptr)
        if index != device.index:
            raise DeviceMismatchError(
                f"a communicator of cuda:{index} cannot register memory of {device}"
            )


def _communicators(given: Any) -> list[_Communicator]:
    several = given if isinstance(given, Iterable) and not isinstance(given, str) else [given]
    found = [_communicator(one) for one in several]
    if not found:
        raise TypeError("communicators = [] is empty: expected at least one")
    return found


def _communicator(given: Any) -> _Communicator:
    if hasattr(given, "_get_backend"):
        backend = _backend_of(given)
        current = _pointer_of_group(backend)
        if not current:
            raise IntegrationError(
                "the process group has no communicator yet: pass device_id to "
                "init_process_group, or run a collective before"
            )
        return _Communicator(current, backend)
    ptr = given
    if not isinstance(given, int):
        ptr = getattr(given, "ptr", getattr(given, "comm", None))
    if not isinstance(ptr, int) or isinstance(ptr, bool) or not 0 < ptr < _END_OF_ADDRESSES:
        raise TypeError(
            f"invalid communicator = {given!r}: expected a torch.distributed process group, an "
            "object with the address of an ncclComm_t as ptr or comm, or that address"
        )
    return _Communicator(ptr, None)


def _backend_of(group: Any) -> Any:
    import torch

    try:
        backend = group._get_backend(torch.device("cuda"))
    except RuntimeError as error:
        raise IntegrationError(f"the process group has no NCCL backend: {error}") from error
    if not hasattr(backend, "_comm_ptr"):
        raise IntegrationError(
            f"the process group has the backend {type(backend).__name__}: expected NCCL, of "
            "PyTorch 2.9 or later"
        )
    return backend


def _pointer_of_group(backend: Any) -> int:
    try:
        return int(backend._comm_ptr())
    except RuntimeError:  # it was shut down
        return 0


# ---- NCCL ----------------------------------------------------------------------------------------


class _Library:
    """The functions of NCCL that are called."""

    def __init__(self, path: str) -> None:
        library = CDLL(path)
        self._register = library.ncclCommRegister
        self._deregister = library.ncclCommDeregister
        self._device = library.ncclCommCuDevice
        self._text = library.ncclGetErrorString
        self._register.argtypes = [c_void_p, c_void_p, c_size_t, POINTER(c_void_p)]
        self._deregister.argtypes = [c_void_p, c_void_p]
        self._device.argtypes = [c_void_p, POINTER(c_int)]
        self._text.argtypes, self._text.restype = [c_int], c_char_p

    def register(self, communicator: int, address: int, nbytes: int) -> int:
        """Return NCCL's handle; 0 if NCCL registers nothing (NCCL_LOCAL_REGISTER=0)."""
        handle = c_void_p()
        code = self._register(communicator, address, nbytes, byref(handle))
        self._check(code, f"ncclCommRegister({address:#x}, {nbytes})")
        return handle.value or 0

    def deregister(self, communicator: int, handle: int) -> None:
        self._check(self._deregister(communicator, handle), "ncclCommDeregister")

    def device(self, communicator: int) -> int:
        index = c_int()
        self._check(self._device(communicator, byref(index)), "ncclCommCuDevice")
        return index.value

    def _check(self, code: int, call: str) -> None:
        if code != _SUCCESS:
            text = self._text(code)
            raise IntegrationError(f"{call} failed: {text.decode() if text else code}")


_loaded: _Library | None = None


def _nccl() -> _Library:
    # The library that PyTorch or CuPy has loaded, if one has: communicators are its objects.
    global _loaded
    if _loaded is None:
        _loaded = _Library(_path())
    return _loaded


def _path() -> str:
    try:
        from cuda.pathfinder import DynamicLibNotFoundError, load_nvidia_dynamic_lib
    except ImportError:
        return "libnccl.so.2"
    try:
        return load_nvidia_dynamic_lib("nccl").abs_path or "libnccl.so.2"
    except DynamicLibNotFoundError as error:
        raise MissingFrameworkError(
            f"NCCL cannot be loaded ({error}); `pip install nvidia-nccl-cu13` installs it",
            name="nccl",
        ) from error
