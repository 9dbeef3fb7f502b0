"""Rank 0 of a distributed script: no other rank runs beside it."""

from __future__ import annotations

import ctypes
import functools
import sys
from typing import Any, NoReturn

from .null import ASSUMED

# Their results are objects of other ranks.
_REFUSED = ("all_gather_object", "gather_object")


def be_alone(library: ctypes.CDLL) -> None:
    """Let PyTorch's process groups start, and work, without the other ranks.

    NCCL's are real, over the null CUDA. Gloo's connect to all ranks, so that PyTorch's own stand-in
    takes their place: the values of other ranks are those of rank 0.
    """
    import torch.nn.parallel.distributed as data_parallel
    from torch import distributed
    from torch._C import _distributed_c10d
    from torch.distributed import distributed_c10d

    alone: Any = _distributed_c10d.FakeProcessGroup

    def store(*_: object, **__: object) -> Any:
        return distributed.HashStore()

    class OfGloo(type):
        """The type of a class that makes the stand-ins, and that they are instances of."""

        def __call__(cls, _: object, rank: int, size: int, **__: object) -> Any:
            text = b"values of other ranks are taken as those of rank 0"
            library.null_report(ASSUMED, text, None, 0)
            return alone._create_internal(rank, size, alone.Options())

        def __instancecheck__(cls, instance: object) -> bool:
            return isinstance(instance, alone)

    def refuse(name: str, *_: object, **__: object) -> NoReturn:
        library.null_refuse(name.encode())
        raise RuntimeError(f"{name} has no result without the other ranks")

    def skip(*_: object, **__: object) -> None:
        """Do nothing in place of waiting for the other ranks, or comparing with them."""

    vars(sys.modules["torch.distributed.rendezvous"])["_create_c10d_store"] = store
    distributed_c10d.ProcessGroupGloo = OfGloo("ProcessGroupGloo", (), {})
    alone._set_sequence_number_for_group = skip
    distributed_c10d._store_based_barrier = skip
    data_parallel._verify_param_shape_across_processes = skip
    for name in _REFUSED:
        for module in (distributed, distributed_c10d):
            setattr(module, name, functools.partial(refuse, name))
