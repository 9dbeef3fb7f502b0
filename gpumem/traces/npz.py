"""Traces as ``.npz`` archives: a NumPy array per column, and `meta` as a JSON text."""

from __future__ import annotations

import io
import zipfile
from typing import IO, Any

import numpy as np
from numpy.lib import format as npy
from numpy.typing import NDArray

from gpumem._support.brackets import parse_json
from gpumem._support.texts import reason, shown
from gpumem.errors import TraceError
from gpumem.traces.trace import Trace

MAGIC = b"PK"
MAX_EVENTS = 1 << 26
"""An archive has at most 67 million events, about 1.5 GiB of arrays."""
MAX_META_BYTES = 1 << 24

_REQUIRED = ("action", "block", "size", "stream", "time_us")
_HEADER_ROOM = 1 << 16  # bytes of an .npy header: its magic, type and shape
# NumPy writes with these. Decoders of other methods allocate as much as a damaged archive requests.
_METHODS = (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED)


def read_npz(file: IO[bytes], name: str) -> Trace:
    """Read a trace from an open ``.npz`` archive.

    Sizes are checked against the archive's own directory before anything is unpacked, so that
    a small file cannot cause larger allocations than `MAX_EVENTS` events need.

    Parameters
    ----------
    file : binary file
        The archive, seekable.
    name : str
        Name of the trace.

    Raises
    ------
    TraceError
        Not an archive of the documented arrays, or one that contradicts itself.
    """
    try:
        with zipfile.ZipFile(file) as archive:
            members = {info.filename.removesuffix(".npy"): info for info in archive.infolist()}
            missing = [column for column in _REQUIRED if column not in members]
            if missing:
                raise TraceError(f"the archive has no array {', '.join(missing)}")
            columns: dict[str, Any] = {
                column: _read_column(archive, members[column]) for column in _REQUIRED
            }
            if "step_start" in members:
                columns["step_start"] = _read_column(archive, members["step_start"])
            meta = _read_meta(archive, members["meta"]) if "meta" in members else {}
    except TraceError:
        raise
    except Exception as error:  # zipfile and NumPy raise many exceptions for a damaged archive
        raise TraceError(f"damaged .npz archive: {reason(error)}") from None
    return Trace(**columns, meta=meta, name=name)


def _read_column(archive: zipfile.ZipFile, info: zipfile.ZipInfo) -> NDArray[Any]:
    array = _read_array(archive, info, MAX_EVENTS * 8)
    if array.dtype.kind not in "iu":
        raise TraceError(f"array {shown(info.filename)} has type {array.dtype}, expected integers")
    return array


def _read_meta(archive: zipfile.ZipFile, info: zipfile.ZipInfo) -> dict[str, Any]:
    array = _read_array(archive, info, MAX_META_BYTES)
    if array.dtype.kind != "U" or array.ndim:
        raise TraceError(f"array meta has type {array.dtype}, expected one str holding JSON")
    try:
        meta = parse_json(str(array))
    except ValueError as error:
        raise TraceError(f"meta is not JSON: {error}") from None
    if not isinstance(meta, dict):
        raise TraceError(f"meta is a JSON {type(meta).__name__}, expected an object")
    return meta


def _read_array(archive: zipfile.ZipFile, info: zipfile.ZipInfo, limit: int) -> NDArray[Any]:
    """Read one array of at most `limit` bytes, of plain data only."""
    if info.compress_type not in _METHODS:
        raise TraceError(
            f"array {shown(info.filename)} has compression {info.compress_type}, expected 0 or 8"
        )
    if info.file_size > limit + _HEADER_ROOM:
        raise TraceError(
            f"array {shown(info.filename)} unpacks to {info.file_size} bytes, expected 0..{limit}"
        )
    with archive.open(info) as member:
        # Read no more than the size checked above, even if the compressed data is longer.
        raw = member.read(info.file_size)
    _check_header(raw, info.filename)
    array: NDArray[Any] = npy.read_array(io.BytesIO(raw), allow_pickle=False)
    return array


def _check_header(raw: bytes, filename: str) -> None:
    """Refuse a header with a larger array than the member holds, before NumPy allocates it."""
    start = io.BytesIO(raw)
    version = npy.read_magic(start)
    if version == (1, 0):
        shape, _, dtype = npy.read_array_header_1_0(start)
    elif version == (2, 0):
        shape, _, dtype = npy.read_array_header_2_0(start)
    else:
        raise TraceError(f"array {shown(filename)} has .npy version {version}, expected 1.0 or 2.0")
    if dtype.hasobject:
        raise TraceError(f"array {shown(filename)} holds Python objects, expected integers")
    # Python integers: a product of absurd dimensions must not wrap.
    needed = dtype.itemsize * int(np.prod(np.array(shape, dtype=object)))
    held = len(raw) - start.tell()
    if needed != held or any(length < 0 for length in shape):
        raise TraceError(
            f"array {shown(filename)} has shape {shown(shape)}, {needed} bytes, but "
            f"holds {held} bytes"
        )
