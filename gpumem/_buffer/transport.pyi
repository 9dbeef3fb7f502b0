from dataclasses import dataclass
from typing import Any, Self, final

from gpumem._buffer.buffer import Buffer
from gpumem.device import Device

@dataclass(frozen=True)
class Transports:
    legacy_ipc: bool
    posix_fd: bool
    fabric: bool
    gpu_direct_rdma: bool
    peers: tuple[Device, ...]
    host: bool

def transports(what: Any) -> Transports: ...

@final
class Registration:
    address: int
    nbytes: int
    def __init__(self, *args: object, **kwargs: object) -> None: ...
    @property
    def released(self) -> bool: ...
    def release(self) -> None: ...
    def __enter__(self) -> Self: ...
    def __exit__(self, *exception: object) -> None: ...

def register(buffer: Buffer) -> Registration: ...
def hold(buffer: Buffer) -> Registration: ...
