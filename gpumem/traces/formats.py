"""Read a trace from a file. The format is found from the content, not from the name."""

from __future__ import annotations

import io
import os
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import IO

from gpumem._snapshots.snapshot import Snapshot
from gpumem._support.arguments import is_integer
from gpumem._support.brackets import parse_json
from gpumem._support.files import open_regular
from gpumem._support.sizes import exact_size
from gpumem.errors import SnapshotError, TraceError
from gpumem.traces import gpumem_recording, gpumem_snapshot, npz, rmm_log, torch_snapshot
from gpumem.traces.torch_entries import Entries
from gpumem.traces.trace import Trace

MAX_FILE_BYTES = 1 << 32
"""Largest file that is read: 4 GiB."""
MAX_UNPACKED_BYTES = 1 << 28
"""Largest content of a file that gzip compressed: 256 MiB."""

_GZIP = b"\x1f\x8b"


def load_trace(source: str | os.PathLike[str], *, device: int | None = None) -> Trace:
    """Load a trace from a file or from the samples that come with the package.

    Reads five formats: files of `gpumem.observe.record`, ``.npz`` archives (see
    ``gpumem/traces/samples/README.md``), PyTorch memory snapshots
    (``torch.cuda.memory._dump_snapshot``; no code of the pickle runs), the CSV logs of RMM's
    ``LoggingResourceAdaptor``, and gpumem's own snapshots in JSON, of which the trace allocates the
    blocks in use. Each may be compressed by gzip.

    Parameters
    ----------
    source : str or path
        A file, or the name of a sample (``gpumem.traces.samples()`` lists them). A file of
        that name is preferred.
    device : int, optional
        Which device of a PyTorch snapshot, or which memory of a recording or of gpumem's snapshot,
        to take; without it, the busiest one. The other formats hold one device and accept only 0.

    Returns
    -------
    Trace
        A checked trace, named after the file.

    Raises
    ------
    TraceError
        No such file, not a trace, damaged, absurdly large, or contradicting itself. One line.

    Examples
    --------
    >>> from gpumem.traces import load_trace
    >>> load_trace("multistream_train").streams
    3
    """
    return busiest(load_traces(source, device=device))


def load_traces(source: str | os.PathLike[str], *, device: int | None = None) -> list[Trace]:
    """Load a trace of each memory in a file, in the order of the memories.

    Parameters
    ----------
    source, device
        As of `load_trace`; without `device`, every memory that has blocks.

    Returns
    -------
    list of Trace
        At least one. ``meta["memory"]`` or ``meta["device"]`` names the memory of each.

    Raises
    ------
    TraceError
        As `load_trace` does.

    Examples
    --------
    >>> from gpumem.traces import load_traces
    >>> [trace.streams for trace in load_traces("multistream_train")]
    [3]
    """
    path = _resolve(source)
    try:
        with open_regular(path) as file:
            size = os.fstat(file.fileno()).st_size
            if size > MAX_FILE_BYTES:
                limit = exact_size(MAX_FILE_BYTES)
                raise TraceError(f"the file has {exact_size(size)}, expected at most {limit}")
            if file.read(len(_GZIP)) == _GZIP:
                file.seek(0)
                return _read(_unpacked(file), Path(path.stem).stem, device)
            return _read(file, path.stem, device)
    except TraceError as error:
        raise TraceError(f"{source}: {error}") from None
    except OSError as error:
        raise TraceError(f"{source}: cannot be read: {error.strerror}") from None


def busiest(traces: Sequence[Trace]) -> Trace:
    """Return the trace with the most events, or, of traces of one moment, with the most bytes."""
    return max(traces, key=_weight)


def memory_of(trace: Trace) -> str:
    """Name the memory of a trace, such as "device 0"; "" if the file does not name it."""
    device = trace.meta.get("device")
    return str(trace.meta.get("memory") or ("" if device is None else f"device {device}"))


def _weight(trace: Trace) -> int:
    return trace.peak_requested if trace.meta.get("moment") else trace.events


def _resolve(source: str | os.PathLike[str]) -> Path:
    """Return the file that `source` means, or raise TraceError."""
    try:
        path = Path(source)
        if path.is_file():
            return path
        if isinstance(source, str) and source in (known := samples()):
            return known[source]
        if path.exists():
            raise TraceError(f"{source} is not a regular file")
    except (ValueError, OSError) as error:  # a NUL character, a name too long
        if isinstance(error, TraceError):
            raise
        raise TraceError(f"{str(source)!r:.200} is not a usable path: {error}") from None
    names = ", ".join(sorted(samples()))
    raise TraceError(f"{source}: no such file, and no sample of that name (samples: {names})")


def _read_json(file: IO[bytes], name: str, device: int | None) -> list[Trace]:
    """Read a snapshot of gpumem's, or one of PyTorch's that was saved as JSON."""
    data = file.read()
    try:
        plain = parse_json(data)
    except ValueError as error:
        raise TraceError(f"not a snapshot: {error}") from None
    if isinstance(plain, dict) and "format" not in plain and "segments" in plain:
        return torch_snapshot.traces_of_torch(plain, Entries(), len(data), name, device)
    try:
        snapshot = Snapshot.from_dict(plain)
    except SnapshotError as error:
        raise TraceError(str(error)) from None
    return gpumem_snapshot.traces_of_snapshot(snapshot, name, device)


# Readers of the formats with several memories, by the first bytes of a file.
_READERS = {
    torch_snapshot.MAGIC: torch_snapshot.read_torch_snapshot,
    gpumem_recording.MAGIC: gpumem_recording.read_recording,
    gpumem_snapshot.MAGIC: _read_json,
}


def _read(file: IO[bytes], name: str, device: int | None) -> list[Trace]:
    """Read the file with the reader of the format that its first bytes show."""
    file.seek(0)
    start = file.read(4096)
    file.seek(0)
    if not start:
        raise TraceError("the file is empty")
    for magic, read in _READERS.items():
        if start.startswith(magic):
            return read(file, name, device)
    if device is not None and not is_integer(device, 0, 0):
        raise TraceError(
            f"device is {device!r}, expected 0 (only snapshots and recordings hold more)"
        )
    if start.startswith(npz.MAGIC):
        return [npz.read_npz(file, name)]
    first_line = start.splitlines()[0].decode("utf-8", "replace")
    if first_line.strip().lower() == rmm_log.HEADER.lower():
        return [rmm_log.read_rmm_log(file, name)]
    raise TraceError(
        f"not a trace: neither a recording, nor an .npz archive, nor a snapshot of PyTorch's or "
        f"gpumem's, nor an RMM log (header {rmm_log.HEADER})"
    )


def _unpacked(file: IO[bytes]) -> IO[bytes]:
    """Return the content of a file that gzip compressed, or raise TraceError."""
    reader = zlib.decompressobj(wbits=31)
    try:
        data = reader.decompress(file.read(), MAX_UNPACKED_BYTES)
    except zlib.error as error:
        raise TraceError(f"damaged gzip file: {error}") from None
    if not reader.eof:
        limit = exact_size(MAX_UNPACKED_BYTES)
        raise TraceError(f"the gzip file ends too early, or has more than {limit}")
    return io.BytesIO(data)


def samples() -> dict[str, Path]:
    """List the bundled traces.

    Returns
    -------
    dict of str to Path
        Each sample's name and its file, sorted by name.

    Examples
    --------
    >>> from gpumem.traces import samples
    >>> sorted(samples())
    ['gpt2_out_of_memory', 'gpt2_train', 'gpt2_varlen_train', 'multistream_train']
    """
    folder = Path(__file__).with_name("samples")
    files = sorted([*folder.glob("*.npz"), *folder.glob("*.gz")])
    return {path.name.partition(".")[0]: path for path in files}
