"""What Dask's workers run in tests: they find it under this name."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np

import gpumem


def filled(value: int, nbytes: int) -> gpumem.Tensor:
    """Make a tensor whose every byte is the value; done when it is returned."""
    tensor = gpumem.empty((nbytes,), "uint8")
    tensor.numpy()[:] = value
    return tensor


def same(tensor: gpumem.Tensor) -> gpumem.Tensor:
    return tensor


def every_second(tensor: gpumem.Tensor) -> gpumem.Tensor:
    return tensor[::2]


def total(*tensors: gpumem.Tensor) -> int:
    return sum(int(tensor.numpy().sum(dtype=np.int64)) for tensor in tensors)


def file_of(tensor: gpumem.Tensor) -> tuple[int, str]:
    """Return the process, and the file in memory that the tensor lies in there."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        span, _, _, _, inode, *_ = line.split()
        begin, end = (int(each, 16) for each in span.split("-"))
        if begin <= tensor.ptr < end:
            return os.getpid(), inode
    raise AssertionError(f"{tensor!r} is mapped nowhere")


def memory_files(pid: int) -> list[str]:
    """Return the shared memory that a process maps or holds, but for what a device keeps."""
    maps = Path(f"/proc/{pid}/maps").read_text().splitlines()
    found = [line for line in maps if "/memfd:gpumem " in line]
    for name in os.listdir(f"/proc/{pid}/fd"):
        try:
            link = os.readlink(f"/proc/{pid}/fd/{name}")
        except OSError:
            continue  # it was closed meanwhile
        if link.startswith("/memfd:gpumem "):
            found.append(link)
    return found


def offer_to_nobody(nbytes: int) -> tuple[str, str]:
    """Offer a tensor that no one will collect and that expires at once, and return where."""
    import pickle

    from gpumem.integrations.dask import _serialize, _worker

    member = _worker.current()
    receiver = {"recipient": {_worker.ANNOUNCED: member.announced}}
    seconds, member.offers.seconds = member.offers.seconds, 0.0
    try:
        header, frames = _serialize.send(filled(1, nbytes), receiver)
    finally:
        member.offers.seconds = seconds
    assert frames == []
    assert pickle.loads(header["contents"])
    return header["name"], header["token"]


def part(seed: int, nbytes: int) -> gpumem.Tensor:
    """Make one input of a shuffle."""
    tensor = gpumem.empty((nbytes,), "uint8")
    tensor.numpy()[:] = np.random.default_rng(seed).integers(0, 256, nbytes, "uint8")
    return tensor


def split(tensor: gpumem.Tensor, pieces: int) -> tuple[gpumem.Tensor, ...]:
    """Copy each piece into memory of its own."""
    size = len(tensor) // pieces
    made = []
    for piece in range(pieces):
        made.append(gpumem.empty((size,), "uint8"))
        made[-1].numpy()[:] = tensor.numpy()[piece * size : (piece + 1) * size]
    return tuple(made)


def join(*pieces: gpumem.Tensor) -> gpumem.Tensor:
    """Put pieces of all inputs together to one output."""
    size = len(pieces[0])
    tensor = gpumem.empty((size * len(pieces),), "uint8")
    for number, piece in enumerate(pieces):
        tensor.numpy()[number * size : (number + 1) * size] = piece.numpy()
    return tensor


def digest(tensor: gpumem.Tensor) -> int:
    """Return a number that depends on each byte and its place."""
    values = tensor.numpy().astype(np.uint64)
    return int((values * np.arange(1, len(values) + 1, dtype=np.uint64)).sum())
