"""Tensors of a process over gpumem, in a process with PyTorch's own allocator.

PyTorch pickles the name of the function by which the receiver makes a tensor. A process over gpumem
names `rebuild_cuda_tensor` below instead of PyTorch's, so the receiver imports this module. If its
allocator is gpumem's, or the memory is not, it calls PyTorch's function. Otherwise it maps the
block by `_sharing`, which PyTorch's own allocator cannot, and PyTorch's function makes the tensor
of that storage.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

from gpumem.errors import DeviceMismatchError
from gpumem.integrations.torch import _sharing
from gpumem.integrations.torch._mappings import MappedBlock

_pytorchs: Callable[..., Any] | None = None  # its function, if this process names another one


def send_to_any_process() -> None:
    """Name `rebuild_cuda_tensor` of this module in tensors that this process sends."""
    global _pytorchs
    reductions: Any = sys.modules.get("torch.multiprocessing.reductions")  # PyTorch imports it
    if reductions is not None and _pytorchs is None:
        _pytorchs = reductions.rebuild_cuda_tensor
        reductions.rebuild_cuda_tensor = rebuild_cuda_tensor


def rebuild_cuda_tensor(*sent: Any) -> Any:
    """Return the tensor that PyTorch's function of that name makes, over a block of any process."""
    import torch
    from torch.multiprocessing import reductions

    _, _, _, _, storage_class, _, _, handle, *_ = sent
    is_block = isinstance(handle, bytes) and handle.startswith(_sharing.MARK.encode() + b" ")
    if is_block and torch.cuda.get_allocator_backend() != "gpumem":
        sent = (*sent[:4], _Opener(torch, storage_class), *sent[5:])
    return (_pytorchs or reductions.rebuild_cuda_tensor)(*sent)


class _Opener:
    """Stands for a class of storages in PyTorch's function, and makes a storage over a block."""

    def __init__(self, torch: ModuleType, storage_class: Any) -> None:
        self._torch = torch
        self._release_ipc_counter = storage_class._release_ipc_counter

    def _new_shared_cuda(
        self,
        device: int,
        handle: bytes,
        nbytes: int,
        offset: int,
        counter: bytes,
        counter_offset: int,
        event: bytes,
        has_event: bool,
    ) -> Any:
        torch = self._torch
        if has_event:  # the sender's work on the block
            torch.cuda.Event.from_ipc_handle(torch.device("cuda", device), event).wait(
                torch.cuda.current_stream(device)
            )

        def release() -> None:
            # The sender may use the block again afterwards. It may also have ended.
            torch.cuda.current_stream(device).synchronize()
            self._release_ipc_counter(counter, counter_offset, device=device)

        memory = _Memory(_sharing.open_block(handle.decode()), offset, nbytes, release)
        storage = torch.as_tensor(memory, device=torch.device("cuda", device)).untyped_storage()
        if storage.data_ptr() != memory.address:
            raise DeviceMismatchError(
                f"the sender's cuda:{device} is another device here: start this process with the "
                "sender's CUDA_VISIBLE_DEVICES"
            )
        return storage


class _Memory:
    """Bytes of an opened block; PyTorch keeps it as long as the storage."""

    def __init__(
        self, block: MappedBlock, offset: int, nbytes: int, release: Callable[[], None]
    ) -> None:
        self.address = block.address + offset
        self._block = block
        self._release = release
        self.__cuda_array_interface__ = {
            "shape": (nbytes,),
            "typestr": "|u1",
            "data": (self.address, False),
            "strides": None,
            "version": 3,
        }

    def __del__(self) -> None:
        if sys.is_finalizing():
            return
        try:
            self._release()
        finally:
            self._block.close()
