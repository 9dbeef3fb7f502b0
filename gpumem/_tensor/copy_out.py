"""Copies of live memory to a safetensors file or to the CPU, beside the work of the program."""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import secrets
import threading
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import CancelledError
from operator import itemgetter
from pathlib import Path
from typing import Any

import numpy as np

from gpumem._arena.arena import Arena
from gpumem._buffer.buffer import Accesses
from gpumem._buffer.stream import Event, Stream, record_all_work
from gpumem._support.closing import Uncopied
from gpumem._support.files import require_writable
from gpumem._support.sizes import whole_bytes
from gpumem._tensor.create import copy
from gpumem._tensor.imports import buffer_on_stream, tensor_on_stream
from gpumem._tensor.stored import stored_tensor
from gpumem._tensor.tensor import Tensor
from gpumem.device import Device
from gpumem.errors import ConfigError, CopyOutError

# NumPy's name of a dtype, which ml_dtypes extends, and that of the file format.
_CODES = {
    "bool": "BOOL",
    "bfloat16": "BF16",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
    "float8_e8m0fnu": "F8_E8M0",
    "complex64": "C64",
    **{f"float{bits}": f"F{bits}" for bits in (16, 32, 64)},
    **{f"int{bits}": f"I{bits}" for bits in (8, 16, 32, 64)},
    **{f"uint{bits}": f"U{bits}" for bits in (8, 16, 32, 64)},
}
MIN_LIMIT = 1 << 20  # bytes
PIECE = 512 << 20  # bytes between two looks at `cancel`
MAX_STAGING = 64 << 20  # bytes through which `copy` stages a piece of any size


class CopyOut(Uncopied):
    """A copy that `Arena.copy_out` has begun; a thread makes it.

    Attributes
    ----------
    total_bytes, done_bytes : int
        Bytes of all tensors, and those that are copied. A tensor that is copied may be written
        again; the order is that of `names`.
    names : tuple of str
        The tensors in the order in which they are copied.

    Examples
    --------
    >>> import gpumem
    >>> arena = gpumem.Arena("host")
    >>> buffer = arena.allocate(1000)
    >>> copying = arena.copy_out()
    >>> arrays = copying.wait()
    >>> copying.done, copying.done_bytes, copying.total_bytes, copying.names
    (True, 1000, 1000, ('default.0',))
    """

    def __init__(
        self,
        tensors: dict[str, Tensor],
        place: _TensorFile | _TensorArrays,
        accesses: Accesses,
    ) -> None:
        if not isinstance(accesses, Accesses):
            raise TypeError("a CopyOut is made by Arena.copy_out")
        self.names = tuple(tensors)
        self.total_bytes = sum(tensor.nbytes for tensor in tensors.values())
        self.done_bytes = 0
        self._place = place
        self._cancelled = False
        # A forked child does not have the thread.
        self._error: BaseException | None = CancelledError("the copy is another process's")
        # Not the thread's end: before Python 3.13 Ctrl-C in Thread.join declares it ended.
        self._ended = threading.Event()
        self._process = os.getpid()
        threading.Thread(
            target=self._run, args=(tensors, accesses), name="gpumem copy_out", daemon=True
        ).start()

    @property
    def done(self) -> bool:
        """Whether it has ended: complete, cancelled or with an error."""
        return self._ended.is_set() or self._process != os.getpid()

    def wait(self) -> Any:
        """Wait for the end. Return the path of the file, or arrays of NumPy by name.

        Ctrl-C cancels the copy.

        Raises
        ------
        CopyOutError
            The file cannot be written. A file that was there before is as it was.
        CancelledError
            `cancel` was called, or the program is at its end.
        DriverError
            The driver refused.
        """
        try:
            self._join()
        except BaseException:
            self.cancel()
            raise
        if self._error is not None:
            raise self._error
        return self._place.result

    def cancel(self) -> None:
        """End the copy after the part in hand, and remove its unfinished file; waits for that."""
        self._cancelled = True
        self._join()

    def _join(self) -> None:
        if not self.done:
            self._ended.wait()

    def _run(self, tensors: dict[str, Tensor], accesses: Accesses) -> None:
        _running.add(self)
        try:
            with accesses, _file_errors(self._place.result):
                for name, tensor in tensors.items():
                    for piece in _pieces(tensor, self._place.piece_bytes):
                        self._go_on()
                        self._place.add(name, piece)
                        self.done_bytes += piece.nbytes
                self._go_on()
                self._place.finish()
            self._error = None
        except BaseException as error:
            self._error = error.with_traceback(None)  # its frames hold the tensors
        finally:
            self._place.close()
            tensors.clear()
            _running.discard(self)
            self._ended.set()

    def _go_on(self) -> None:
        if self._cancelled:
            raise CancelledError("the copy was cancelled")


_running: set[CopyOut] = set()


@atexit.register
def _cancel_all() -> None:
    for copying in list(_running):
        copying.cancel()


def copy_out(
    arena: Arena,
    tensors: Mapping[Any, Any] | None,
    arenas: Iterable[tuple[str, Arena]],
    to: Any,
    limit: int | str,
) -> CopyOut:
    """Begin the copy of `Arena.copy_out`: of tensors, else of the used blocks of tags' arenas."""
    in_memory = isinstance(to, Mapping) or to == "host"
    if not in_memory and not isinstance(to, os.PathLike) and os.sep not in str(to):
        raise ValueError(
            f'invalid to = {to!r}: expected "host", the arrays of an earlier copy, or a path '
            f"with a {os.sep!r}"
        )
    nbytes = whole_bytes("limit", limit)
    if nbytes < MIN_LIMIT:
        raise ConfigError(f"invalid limit = {limit!r}: expected at least {MIN_LIMIT} bytes")
    accesses = Accesses()
    with contextlib.ExitStack() as undo:
        undo.enter_context(accesses)
        found = list(
            _tagged_blocks(arena, dict(arenas), accesses)
            if tensors is None
            else _named_tensors(tensors, arena, dict(arenas), accesses)
        )
        # The widest elements come first, so that all are aligned in the file.
        named = dict(sorted(found, key=lambda item: -item[1].itemsize))
        if len(named) < len(found):
            twice = Counter(name for name, _ in found).most_common(1)[0][0]
            raise ValueError(f"two tensors are named {twice!r}")
        if "__metadata__" in named:
            raise ValueError("a tensor is named __metadata__, which is the format's own")
        if in_memory:
            place: _TensorFile | _TensorArrays = _TensorArrays(named, to, nbytes)
        else:
            path = Path(os.path.abspath(to))
            with _file_errors(path):
                place = _TensorFile(named, path, nbytes)
        undo.callback(place.close)
        copying = CopyOut(named, place, accesses)
        undo.pop_all()
    return copying


def _stream_after_work(device: Device) -> Stream:
    stream = Stream(device)
    event = Event(device)
    if record_all_work(event):
        stream.wait(event)
    else:  # a driver before CUDA 12.5
        device.synchronize()
    return stream


def _tagged_blocks(
    arena: Arena, arenas: dict[str, Arena], accesses: Accesses
) -> Iterator[tuple[str, Tensor]]:
    stream = _stream_after_work(arena.memory.device)
    for each in arenas.values():
        accesses.add_home(each)
    numbers = dict.fromkeys(arenas, 0)
    for block in arena.blocks():
        if block.used and block.tag in arenas:
            buffer = buffer_on_stream(arena.memory, block.address, block.nbytes, arena, stream)
            yield f"{block.tag}.{numbers[block.tag]}", buffer.tensor(block.nbytes, "u1")
            numbers[block.tag] += 1


def _named_tensors(
    given: Mapping[Any, Any], arena: Arena, arenas: dict[str, Arena], accesses: Accesses
) -> Iterator[tuple[str, Tensor]]:
    streams: dict[Device, Stream] = {}
    # All of them first: PyTorch may copy one, and the streams come after that.
    found = [(name, stored_tensor(name, array)) for name, array in _flat(given, "")]
    for tag in _tags_of([tensor.ptr for _, tensor in found], arena):
        accesses.add_home(arenas[tag])
    for name, tensor in found:
        if tensor.dtype.name not in _CODES or not tensor.dtype.isnative:
            raise TypeError(f"{name} has dtype {tensor.dtype}, which safetensors does not have")
        accesses.add(tensor.buffer)
        if tensor.device not in streams:
            streams[tensor.device] = _stream_after_work(tensor.device)
        yield name, tensor_on_stream(tensor, streams[tensor.device])


def _tags_of(addresses: list[int], arena: Arena) -> set[str]:
    """Return the tags of the arena's blocks at addresses, also of tensors of other libraries."""
    used = sorted(
        (one.address, one.address + one.allocated_nbytes, one.tag)
        for one in arena.blocks()
        if one.used
    )
    tags = set()
    for address in addresses:
        at = bisect_right(used, address, key=itemgetter(0)) - 1
        if at >= 0 and address < used[at][1]:
            tags.add(used[at][2])
    return tags


def _flat(given: Mapping[Any, Any], before: str) -> Iterator[tuple[str, Any]]:
    for key, value in given.items():
        name = f"{before}{key}"
        if isinstance(value, Mapping):
            yield from _flat(value, f"{name}.")
        elif hasattr(value, "__dlpack__"):
            yield name, value
        elif value is not None:
            raise TypeError(f"invalid {name} of type {type(value).__name__}: expected a tensor")


def _pieces(tensor: Tensor, most: int) -> Iterator[Tensor]:
    """Cut a tensor into pieces of at most `most` bytes, in C order of the elements."""
    if tensor.size == 0:
        return
    try:
        flat = tensor.reshape(-1, copy=False).view("u1")
    except (BufferError, ValueError):  # its elements are not adjacent
        if tensor.nbytes <= most:
            yield tensor
        elif len(tensor) == 1:
            yield from _pieces(tensor[0], most)
        else:
            middle = len(tensor) // 2
            yield from _pieces(tensor[:middle], most)
            yield from _pieces(tensor[middle:], most)
    else:
        for first in range(0, flat.nbytes, most):
            yield flat[first : first + most]


def _copy_to(memory: np.ndarray[Any, Any], first: int, piece: Tensor) -> int:
    """Copy a piece into bytes from `first` on; returns where it ends. Complete on return."""
    end = first + piece.nbytes
    stream = piece.buffer.stream
    copy(memory[first:end].view(piece.dtype).reshape(piece.shape), piece, stream)
    stream.synchronize()
    return end


class _TensorArrays:
    """Arrays of NumPy, new or of an earlier copy."""

    def __init__(self, tensors: dict[str, Tensor], to: Any, limit: int) -> None:
        if to == "host":
            to = {name: np.empty(like.shape, like.dtype) for name, like in tensors.items()}
        self.result = dict(to)
        if not all(
            isinstance(array, np.ndarray) and array.flags.c_contiguous and array.flags.writeable
            for array in self.result.values()
        ):
            raise ValueError("to must have arrays of NumPy, writable, with adjacent elements")
        wanted = {name: (like.shape, like.dtype) for name, like in tensors.items()}
        if wanted != {name: (array.shape, array.dtype) for name, array in to.items()}:
            raise ValueError(f"arrays in to differ in name, shape or dtype from {wanted}")
        self._ends = dict.fromkeys(tensors, 0)
        self.piece_bytes = limit if limit < MAX_STAGING else PIECE

    def add(self, name: str, piece: Tensor) -> None:
        bytes_of = self.result[name].reshape(-1).view("u1")
        self._ends[name] = _copy_to(bytes_of, self._ends[name], piece)

    def finish(self) -> None:
        pass  # every piece is complete

    def close(self) -> None:
        pass  # the arrays are the program's


class _TensorFile:
    """A safetensors file beside its path until it is complete; pieces are written together."""

    def __init__(self, tensors: dict[str, Tensor], to: Path, limit: int) -> None:
        require_writable(to)
        self.result = to
        header, end = _header(tensors)
        # A piece waits here, and is staged through as much memory again.
        self.piece_bytes = limit // 2
        self._parts = np.empty(self.piece_bytes, "u1")
        self._used = 0
        self._at = len(header)
        self._unfinished = to.with_name(f"{to.name}.{secrets.token_hex(4)}.part")
        access = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        self._descriptor = os.open(self._unfinished, access, 0o666)
        try:
            # A full disk refuses before a byte is copied.
            os.posix_fallocate(self._descriptor, 0, self._at + end)
            self._write(memoryview(header), 0)
        except BaseException:
            self.close()
            raise

    def add(self, name: str, piece: Tensor) -> None:
        if self._used + piece.nbytes > self._parts.nbytes:
            self._flush()
        self._used = _copy_to(self._parts, self._used, piece)

    def finish(self) -> None:
        self._flush()
        os.fsync(self._descriptor)
        os.replace(self._unfinished, self.result)
        folder = os.open(self.result.parent, os.O_RDONLY | os.O_CLOEXEC)
        os.fsync(folder)  # the new name
        os.close(folder)

    def close(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1
            self._unfinished.unlink(missing_ok=True)

    def _flush(self) -> None:
        self._write(self._parts[: self._used].data, self._at)
        self._at += self._used
        self._used = 0

    def _write(self, data: memoryview, at: int) -> None:
        while data:
            written = os.pwrite(self._descriptor, data, at)
            data, at = data[written:], at + written


@contextlib.contextmanager
def _file_errors(path: object) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        text = f"the copy cannot be written: {error.strerror}"
        raise CopyOutError(error.errno, text, str(path)) from None


def _header(tensors: dict[str, Tensor]) -> tuple[bytes, int]:
    """Return the beginning of the file, and the bytes of all tensors, which follow."""
    end = 0
    described: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    for name, tensor in tensors.items():
        offsets = [end, end + tensor.nbytes]
        code = _CODES[tensor.dtype.name]
        described[name] = {"dtype": code, "shape": list(tensor.shape), "data_offsets": offsets}
        end = offsets[1]
    text = json.dumps(described, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)  # the data begins at a multiple of 8
    return len(text).to_bytes(8, "little") + text, end
