"""Work of the host that a run skips: checkpoints, weight files, initial values of parameters.

None of it changes the memory of the GPU, and a model of several GB would take seconds and as much
memory of the host. Each kind is said once, in `said`.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import json
import os
import warnings
import zipfile
from typing import Any

LARGE = 1 << 20
"""Bytes of a tensor or a file from which its values are skipped."""

MAX_DRAWN = 1 << 28
"""Random numbers that are drawn for values that are skipped: a second for each 2**28."""

said: dict[str, None] = {}
"""The notices."""

_NOT_FILLED = "large parameters on the CPU are not filled"
_OTHERS = "random numbers after those of large parameters are others"

_saved: dict[str, str] = {}  # files in place of those that the script wrote, by their paths
_unknown: dict[int, Any] = {}  # weak references to storages with unknown values, by address
_kept: list[Any] = []


def skip_host_work(torch: Any, folder: str) -> None:
    """Skip such work from now on; checkpoints are written into a folder, without their data."""
    _follow_saves(torch, folder)
    _follow_loads(torch)
    if importlib.util.find_spec("safetensors"):
        _follow_safetensors(importlib.import_module("safetensors"), folder)
    _follow_parameters(torch)


def _place(file: Any, folder: str) -> Any:
    """Return the file to write in place of one of the script, which is left as it is."""
    said["checkpoints are not written"] = None
    if not isinstance(file, str | os.PathLike):
        return file
    place = os.path.join(folder, f"saved-{os.getpid()}-{len(_saved)}")
    return _saved.setdefault(os.path.abspath(file), place)


def _find(file: Any) -> Any:
    """Return the file to read in place of one that this run has saved."""
    is_path = isinstance(file, str | os.PathLike)
    return _saved.get(os.path.abspath(file), file) if is_path else file


# ---- PyTorch's files -----------------------------------------------------------------------------


class _Writer:
    """A zip file of PyTorch that leaves room for large tensors, and does not write them."""

    def __init__(self, file: Any) -> None:
        self._file = file

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)

    def write_record(self, name: str, data: Any, nbytes: int) -> None:
        if nbytes < LARGE:
            self._file.write_record(name, data, nbytes)
        else:
            self._file.write_record_metadata(name, nbytes)


def _follow_saves(torch: Any, folder: str) -> None:
    module = torch.serialization
    open_zip, open_file, save = module._open_zipfile_writer, module._open_file_like, module._save
    copy = torch.UntypedStorage.cpu

    def save_without_data(obj: Any, file: Any, *args: Any, **kwargs: Any) -> None:
        save(obj, _Writer(file), *args, **kwargs)

    def cpu(self: Any) -> Any:
        if self.device.type != "cuda":
            return copy(self)
        return torch.zeros(self.nbytes(), dtype=torch.uint8).untyped_storage()

    module._open_zipfile_writer = lambda file: open_zip(_place(file, folder))
    module._open_file_like = lambda file, mode: open_file(
        _place(file, folder) if "w" in mode else _find(file), mode
    )
    module._save = save_without_data
    torch.UntypedStorage.cpu = cpu


def _follow_loads(torch: Any) -> None:
    load = torch.load

    @functools.wraps(load)
    def load_mapped(f: Any, *args: Any, mmap: bool | None = None, **kwargs: Any) -> Any:
        f = _find(f)
        is_path = isinstance(f, str | os.PathLike) and os.path.isfile(f)
        if mmap is None and is_path and os.path.getsize(f) >= LARGE and zipfile.is_zipfile(f):
            said["files of weights are mapped, and not read"] = None
            mmap = True
        return load(f, *args, mmap=mmap, **kwargs)

    torch.load = torch.serialization.load = load_mapped


# ---- files of safetensors ------------------------------------------------------------------------


def _follow_safetensors(safetensors: Any, folder: str) -> None:
    module: Any = importlib.import_module("safetensors.torch")
    names = {dtype: name for name, dtype in module._TYPES.items()}
    safe_open = safetensors.safe_open

    @functools.wraps(module.save_file)
    def save_header(tensors: Any, filename: Any, metadata: Any = None) -> None:
        header = {"__metadata__": metadata} if metadata else {}
        end = 0
        for name, tensor in tensors.items():
            begin, end = end, end + tensor.nbytes
            facts = {"shape": list(tensor.shape), "data_offsets": [begin, end]}
            header[name] = {"dtype": names[tensor.dtype], **facts}
        text = json.dumps(header).encode()
        with open(_place(filename, folder), "wb") as file:
            file.write(len(text).to_bytes(8, "little") + text)
            file.truncate(8 + len(text) + end)

    def open_mapped(filename: Any, *args: Any, **kwargs: Any) -> Any:
        said["files of weights are mapped, and not read"] = None
        return safe_open(_find(filename), *args, **kwargs)

    module.save_file = save_header
    safetensors.safe_open = module.safe_open = open_mapped


# ---- parameters on the CPU -----------------------------------------------------------------------


def _follow_parameters(torch: Any) -> None:
    reference = importlib.import_module("torch.multiprocessing.reductions").StorageWeakRef
    register = torch.nn.Module.register_parameter
    truncate = torch.nn.init._no_grad_trunc_normal_

    def is_unknown(tensor: Any) -> bool:
        return tensor.nbytes >= LARGE and tensor.untyped_storage()._cdata in _unknown

    def forget(tensor: Any) -> None:
        storage = tensor.untyped_storage()
        # The reference keeps the address from another storage.
        _unknown[storage._cdata] = reference(storage)

    @functools.wraps(register)
    def register_parameter(self: Any, name: str, param: Any) -> None:
        register(self, name, param)
        if param is not None and param.device.type == "cpu" and param.nbytes >= LARGE:
            forget(param)

    drawn = 0

    def draw(tensor: Any, block: int, generator: Any) -> None:
        """Draw as many random numbers as filling takes: the script's next ones depend on them."""
        nonlocal drawn
        count = tensor.numel() + (block if tensor.numel() % block else 0)
        drawn += count
        if drawn > MAX_DRAWN:
            said[_OTHERS] = None
            return
        values = torch.empty(min(count, 1 << 16), dtype=tensor.dtype)
        for begin in range(0, count, len(values)):
            values[: count - begin].uniform_(generator=generator)

    def fill(block: int, kernel: Any, keys: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
        if not is_unknown(self):
            return kernel.call_boxed(keys, self, *args, **kwargs)
        said[_NOT_FILLED] = None
        if block:
            draw(self, block, kwargs.get("generator"))
        return self

    def copy(kernel: Any, keys: Any, self: Any, src: Any, non_blocking: bool = False) -> Any:
        if not isinstance(src, torch.Tensor):
            return self.fill_(src)  # a number, which PyTorch had wrapped
        if not (is_unknown(self) or is_unknown(src)):
            return kernel.call_boxed(keys, self, src, non_blocking)
        forget(self)
        return self

    def fill_truncated(tensor: Any, *args: Any, **kwargs: Any) -> Any:
        if is_unknown(tensor):
            said[_NOT_FILLED] = said[_OTHERS] = None  # it draws until all values are within bounds
            return tensor
        return truncate(tensor, *args, **kwargs)

    torch.nn.Module.register_parameter = register_parameter
    torch.nn.init._no_grad_trunc_normal_ = fill_truncated
    library = torch.library.Library("aten", "IMPL")
    _kept.append(library)  # its end would undo it
    # With the numbers that are drawn at once: the last of normal ones are drawn again.
    fills = {"normal_": 16, "uniform_": 1, "zero_": 0, "fill_.Scalar": 0}
    replaced: dict[str, Any] = {
        name: functools.partial(fill, block) for name, block in fills.items()
    }
    with warnings.catch_warnings(action="ignore"):  # that they replace others
        for name, function in {**replaced, "copy_": copy}.items():
            kernel = torch.library.get_kernel(f"aten::{name}", "CPU")
            library.impl(name, functools.partial(function, kernel), "CPU", with_keyset=True)
