"""What arrives from other processes: handles of memory with their contents, pages of timelines."""

from __future__ import annotations

import contextlib
import fcntl
import io
import os
import pickle
import random
from typing import Any

import numpy as np

import gpumem
from gpumem import interop
from gpumem.errors import GpumemError, TimelineTimeout
from gpumem.interop import Contents, HostTimeline
from gpumem.interop.descriptors import MemoryHandleType, SemaphoreType
from gpumem.traces._pickle_pieces import Pieces

from .. import changes
from ..changes import interesting, mutate
from . import Target
from .files import alive

PAGE_BYTES = 4096
_POLLED = slice(141, 145)  # of an input: the word of the page that says that devices write values


class _Received(pickle.Unpickler):
    """Builds contents, memories and dtypes. What other classes a pickle names is its sender's."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("numpy", "dtype"):
            return _DtypeName  # a damaged state of NumPy's own ends the process
        if (module, name) not in _CLASSES:
            raise pickle.UnpicklingError(f"{module}.{name}")
        return super().find_class(module, name)


_CLASSES = {
    ("builtins", "object"),
    ("copyreg", "_reconstructor"),
    ("gpumem.interop.sharing", "Contents"),
    ("gpumem.device", "MemoryInfo"),
    ("gpumem.device", "MemoryKind"),
    ("gpumem.device", "Device"),
    ("gpumem.interop.descriptors", "MemoryHandleType"),
    ("gpumem.interop.descriptors", "SemaphoreType"),
}


class _DtypeName:
    """Stands for a dtype while a pickle is loaded."""

    def __init__(self, name: Any = None, *rest: Any) -> None:
        self.name = name

    def __setstate__(self, state: Any) -> None:
        """Ignore NumPy's state: the name suffices."""


def _received(data: bytes) -> tuple[Any, Any]:
    """Load kind and contents. What a pickle makes Python allocate is not gpumem's to refuse."""
    file = io.BytesIO(data[1:])
    Pieces(file, len(data) - 1).read(2 * len(data))
    file.seek(0)
    kind, contents = _Received(file).load()
    named = getattr(contents, "dtype", None)
    if isinstance(contents, Contents) and isinstance(named, _DtypeName):
        object.__setattr__(contents, "dtype", np.dtype(named.name))
    return kind, contents


def _sealed(data: bytes, nbytes: int, seals: int) -> int:
    file = os.memfd_create("fuzz", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(file, nbytes)
    os.pwrite(file, data[:nbytes], 0)
    fcntl.fcntl(file, fcntl.F_ADD_SEALS, seals)
    return file


def _memory() -> int:
    """Return a descriptor of memory that is shared with this process."""
    buffer = _arena.allocate(PAGE_BYTES, shareable=True)
    return interop.export(buffer).detach()


_arena = gpumem.Arena("host")


def _handle(data: bytes) -> object:
    """Attach what a pickle of kind and contents says of a descriptor: the first byte chooses it."""
    try:
        kind, contents = _received(data)
    except Exception as error:  # whatever a damaged pickle raises
        raise GpumemError("damaged pickle") from error
    match data[0] % 4:
        case 0 | 1:
            file = _memory()
        case 2:
            file = _sealed(data, PAGE_BYTES, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
        case _:
            file = os.open(os.devnull, os.O_RDWR)
    with gpumem.interop.Handle(file, kind=kind, contents=contents) as handle:
        repr(handle)
        try:
            made = interop.attach(handle)
        except TypeError as error:
            if "attach takes a Handle of exported memory" not in str(error):
                raise
            return "neither"
        if isinstance(made, HostTimeline):
            return _timeline_used(made, signals=False)
        view = made.numpy()
        if view.size:  # reads both ends: what lies outside of the memory would end the process
            bytes(np.asarray(view[(0,) * view.ndim])), bytes(np.asarray(view[(-1,) * view.ndim]))
        return view.ndim, view.nbytes.bit_length(), str(view.dtype)


def _contents_changed(rng: random.Random, data: bytes, other: bytes) -> bytes:
    """Change an attribute of the contents in a pickle."""
    try:
        kind, contents = _received(data)
        for _ in range(rng.choice((1, 1, 2, 3))):
            name = rng.choice([*Contents.__dataclass_fields__, "kind"])
            if name == "kind":
                kind = rng.choice([*MemoryHandleType, *SemaphoreType, None, 3])
            elif rng.random() < 0.1:
                contents.__dict__.pop(name, None)
            else:
                object.__setattr__(contents, name, _value(rng, getattr(contents, name, None)))
        return data[:1] + pickle.dumps((kind, contents), rng.randrange(2, 6))
    except Exception:  # whatever a damaged pickle raises
        return mutate(rng, data, other)


def _value(rng: random.Random, value: Any) -> Any:
    if rng.random() < 0.1:
        return rng.choice((None, -1, "x", b"x", (), [1], 1.5, True, "²"))
    match value:
        case bool():
            return not value
        case int():
            return rng.choice(
                (interesting(rng), value + rng.randint(-9, 9), 1 << rng.randrange(200))
            )
        case tuple():
            made = [_value(rng, each) if rng.random() < 0.5 else each for each in value]
            return tuple(made + [_value(rng, 4)] * (rng.random() < 0.3))
        case np.dtype():
            return np.dtype(
                rng.choice(
                    ("u1", "i8", "f4", "c16", "O", "U9", "M8[s]", "V3", "u1,f8", ">f4", "2i4")
                )
            )
        case gpumem.MemoryInfo():
            return gpumem.MemoryInfo.parse(
                rng.choice(("host:1", "cuda:0", "host/managed", "host/host_accessible"))
            )
        case str() | bytes():
            return value[: rng.randrange(9)]
    return value


def _timeline(data: bytes) -> object:
    """Open a page of another process: the first byte chooses its size and seals."""
    choice = data[0] if data else 0
    nbytes = (PAGE_BYTES, PAGE_BYTES, PAGE_BYTES, 0, 100, 2 * PAGE_BYTES)[choice % 6]
    seals = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW if choice < 240 else 0
    file = _sealed(data[1:], nbytes, seals)
    try:
        made = HostTimeline.from_fd(file)
    finally:
        os.close(file)
    # A signal waits for the lower values that devices have yet to store, if the page says so.
    return _timeline_used(made, signals=not any(data[_POLLED]))


def _timeline_used(timeline: HostTimeline, *, signals: bool) -> object:
    """Use a timeline whose page may say anything, without an endless wait."""
    with contextlib.closing(timeline):
        seen = []
        for use in (
            timeline.value,
            lambda: timeline.pending,
            lambda: timeline.poisoned,
            lambda: timeline.wait(3, timeout=0),
            lambda: signals and timeline.signal(5),
            lambda: timeline.wait(5, timeout=0),
            lambda: timeline.export().close(),
            lambda: timeline.close(timeout=0),
            timeline.poison,
        ):
            try:
                seen.append(type(use()).__name__)
            except (GpumemError, TimelineTimeout) as error:
                seen.append(type(error).__name__)
        return tuple(seen)


_PAGE_FIELDS = tuple(
    (offset + 1, width)
    for offset, width in (
        (0, 8),
        (8, 8),
        (64, 4),
        (68, 4),
        (128, 4),
        (132, 4),
        (136, 4),
        (140, 4),
        (144, 4),
        (512, 8),
        (520, 8),
        (528, 8),
        (544, 8),
    )
)

TARGETS = (
    Target(
        "handle",
        _handle,
        (GpumemError,),
        structured=(_contents_changed,),
        limit_address_space=False,
        alive=alive,
    ),
    Target(
        "timeline",
        _timeline,
        (GpumemError,),
        structured=(changes.slots(0, PAGE_BYTES + 1, _PAGE_FIELDS),),
        tokens=(b"GMTL\x01\0\0\0", b"LTMG"),
        limit_address_space=False,
        alive=alive,
    ),
)
