"""How Dask sends a tensor, by a descriptor or by its bytes, and how the receiver makes it."""

from __future__ import annotations

import pickle
from collections.abc import Iterable
from dataclasses import dataclass
from errno import EBADF
from functools import cache
from typing import Any

import numpy as np

from gpumem._buffer.resource import MemoryResource
from gpumem._copy.copy import synchronize
from gpumem._defaults import get_default_resource
from gpumem._tensor import Tensor, asarray, copy, empty
from gpumem.device import MemoryInfo, MemoryKind
from gpumem.errors import (
    BadHandleError,
    GpumemError,
    InvalidDescriptorError,
    UnsupportedHandleTypeError,
)
from gpumem.integrations._common.descriptors import ask, server_name
from gpumem.integrations.dask._store import Away, pinned_copy
from gpumem.integrations.dask._worker import ANNOUNCED, OFFER, Worker, current
from gpumem.interop.sharing import attach, export

# A receiver waits on its event loop, which a sender that is stopped must not stop for long.
TIMEOUT = 10.0


@dataclass(frozen=True)
class Described:
    """A tensor's properties besides its bytes."""

    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    memory: MemoryInfo


@cache
def register_families() -> None:
    """Register tensors with Dask's families of serialisation, and their size."""
    from dask.sizeof import sizeof
    from distributed.protocol.cuda import cuda_deserialize, cuda_serialize
    from distributed.protocol.serialize import dask_deserialize, dask_serialize

    registered: list[tuple[Any, type, Any]] = [
        (dask_serialize, Tensor, send),
        (dask_deserialize, Tensor, receive),
        (dask_serialize, Away, send_away),
        (dask_deserialize, Away, receive_away),
        (cuda_serialize, Tensor, send_on_device),
        (cuda_deserialize, Tensor, receive_on_device),
        (sizeof, Tensor, lambda tensor: tensor.nbytes),
        (sizeof, Away, lambda away: away.tensor.nbytes),
    ]
    for family, kind, function in registered:
        family.register(kind, function)


# ---- either way ----------------------------------------------------------------------------------


def send(tensor: Tensor, context: dict[str, Any] | None = None) -> tuple[Any, list[Any]]:
    """Return a header and frames: none with a descriptor, else those of the bytes."""
    member = current()
    if member is not None:
        offered = offer(member, tensor, context or {})
        if offered is not None:
            return offered, []
        member.sent_bytes += tensor.nbytes
    return pickle.dumps(described(tensor)), frames_of(tensor)


def receive(header: Any, frames: list[Any]) -> Tensor | Away:
    """Return the tensor: attached, or made of the bytes."""
    if isinstance(header, bytes):
        return from_frames(pickle.loads(header), frames)
    return collected(**header)


# ---- by a descriptor -----------------------------------------------------------------------------


def offer(member: Worker, tensor: Tensor, context: dict[str, Any]) -> dict[str, Any] | None:
    """Hold a descriptor for the receiver, and return its header; None if bytes are sent."""
    receiver = (context.get("recipient") or {}).get(ANNOUNCED)
    if receiver is None or receiver["node"] != member.announced["node"]:
        return None
    if tensor.nbytes < member.share_from:
        return None
    if tensor.memory.kind is MemoryKind.DEVICE and receiver["device"] != tensor.device.uuid:
        return None
    try:
        handle = export(tensor)
    except (UnsupportedHandleTypeError, InvalidDescriptorError):
        return None  # among other blocks, imported itself, or of negative strides
    contents = pickle.dumps((handle.kind, handle.contents))
    member.sent_descriptors += 1
    return {
        "name": server_name(),
        "token": member.offers.add(handle, handle.contents.size),
        "contents": contents,
    }


def collected(name: str, token: str, contents: bytes) -> Tensor:
    """Ask the sender for its descriptor, and map the memory.

    Raises
    ------
    BadHandleError
        The sender has ended, the offer has expired, or the memory cannot be mapped. An OSError,
        after which Dask looks for the tensor elsewhere.
    """
    kind, said = pickle.loads(contents)
    member = current()
    if member is not None:
        member.received += 1
    with ask(name, OFFER, token, timeout=TIMEOUT) as (_, handles):
        for handle in handles:
            with handle:
                handle._describe(kind, said)
                try:
                    tensor: Tensor = attach(handle)
                except BadHandleError:
                    raise
                except GpumemError as error:
                    raise BadHandleError(EBADF, f"cannot be mapped here: {error}") from error
                if member is not None:
                    member.follow(tensor.buffer)
                return tensor
    raise BadHandleError(EBADF, f"{name} sent no descriptor")


# ---- by bytes ------------------------------------------------------------------------------------


def described(tensor: Tensor) -> Described:
    return Described(tensor.shape, tensor.dtype, tensor.memory)


def frames_of(tensor: Tensor) -> list[Any]:
    """Return the bytes, which keep the memory that they are in: pinned, for a device's tensor."""
    if tensor.nbytes == 0:
        return []
    whole = tensor.contiguous() if tensor.memory.host_accessible else pinned_copy(tensor)
    member = current()
    if member is not None and whole.memory != tensor.memory:
        member.follow(whole.buffer)
    return [memoryview(flat(whole))]


def from_frames(said: Described, frames: Iterable[Any]) -> Tensor | Away:
    """Return a tensor in the memory that the sender's was in, as far as this process has it.

    A worker's device without room: in host memory, from where the worker's results bring it back.
    """
    member = current()
    if member is not None and said.memory.kind is member.arena.memory.kind:
        try:
            return filled(empty(said.shape, said.dtype, resource=member.resource), frames)
        except MemoryError:
            pinned = MemoryInfo(member.arena.memory.device, MemoryKind.HOST_ACCESSIBLE)
            tensor = filled(empty(said.shape, said.dtype, memory=pinned), frames)
            member.follow(tensor.buffer)
            return Away(tensor)
    return filled(empty(said.shape, said.dtype, resource=resource_for(said.memory)), frames)


def resource_for(memory: MemoryInfo) -> MemoryResource:
    try:
        return get_default_resource(memory)
    except ValueError:  # a client without a GPU
        return get_default_resource("host")


def filled(tensor: Tensor, frames: Iterable[Any]) -> Tensor:
    at = 0
    for frame in frames:
        part = np.frombuffer(frame, np.uint8)
        copy(flat(tensor)[at : at + part.nbytes], part)
        at += part.nbytes
    synchronize(tensor.buffer)  # the frames go with this call
    return tensor


def flat(tensor: Tensor) -> Tensor:
    return tensor.reshape(-1).view(np.uint8)


def send_away(away: Away) -> tuple[Any, list[Any]]:
    """Return the header and frames of a tensor in host memory, for a disk."""
    return pickle.dumps(described(away.tensor)), frames_of(away.tensor)


def receive_away(header: bytes, frames: list[Any]) -> Away:
    said: Described = pickle.loads(header)
    return Away(filled(empty(said.shape, said.dtype, resource=resource_for(said.memory)), frames))


# ---- by a transport that reads device memory (UCX) -----------------------------------------------


def send_on_device(tensor: Tensor) -> tuple[Any, list[Any]]:
    """Return the bytes where they are, for the family "cuda"."""
    if tensor.memory.kind is not MemoryKind.DEVICE or tensor.nbytes == 0:
        raise NotImplementedError  # the next family takes it
    whole = tensor.contiguous()
    synchronize(whole.buffer)  # the transport knows no stream
    return pickle.dumps(described(tensor)), [flat(whole)]


def receive_on_device(header: bytes, frames: list[Any]) -> Tensor:
    """Return a tensor over the memory that the transport has received, and keep that memory."""
    said: Described = pickle.loads(header)
    return asarray(frames[0]).view(said.dtype).reshape(said.shape)
