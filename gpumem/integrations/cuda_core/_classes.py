"""Resources of cuda.core over gpumem, and of gpumem over cuda.core. It imports cuda.core."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from cuda import core

from gpumem._buffer.buffer import Buffer
from gpumem._buffer.resource import MemoryResource
from gpumem._buffer.stream import Stream
from gpumem.device import Device, MemoryInfo, MemoryKind
from gpumem.errors import ConfigError, IntegrationError
from gpumem.integrations._common.callers import Blocks
from gpumem.integrations._common.leases import lease_on

_LEGACY_STREAM = 1  # cuda.core refuses 0


class Gpumem(core.MemoryResource):  # type: ignore[misc]
    """The properties of a memory, under cuda.core's names."""

    def __init__(self, memory: MemoryInfo) -> None:
        self._memory = memory

    @property
    def device_id(self) -> int:
        return self._memory.device.index if self.is_device_accessible else -1

    @property
    def is_device_accessible(self) -> bool:
        return self._memory.device.type == "cuda"

    @property
    def is_host_accessible(self) -> bool:
        return self._memory.host_accessible

    @property
    def is_managed(self) -> bool:
        return self._memory.kind is MemoryKind.MANAGED


class GpumemResource(Gpumem):
    """Blocks of a gpumem resource as cuda.core's buffers."""

    def __init__(self, memory: MemoryInfo, find: Callable[[], MemoryResource]) -> None:
        super().__init__(memory)
        self._blocks = Blocks(find)

    @property
    def resource(self) -> MemoryResource:
        return self._blocks.resource

    def allocate(self, size: int, *, stream: Any) -> Any:
        named, order = (stream, stream) if self.is_device_accessible else (None, _NoStream())
        address = self._blocks.allocate(size, order)
        try:
            return core.Buffer.from_handle(address, size, mr=self, stream=named)
        except BaseException:
            self.deallocate(address, size, stream=stream)
            raise

    def deallocate(self, ptr: Any, size: int, *, stream: Any) -> None:
        self._blocks.free(int(ptr), stream if self.is_device_accessible else _NoStream())


class GpumemBuffer(Gpumem):
    """Keeps one gpumem buffer for the cuda.core buffer over its bytes."""

    def __init__(self, block: Buffer) -> None:
        super().__init__(block.memory)
        self._lease: object = lease_on(block)
        self._block: Buffer | None = block

    def show(self) -> Any:
        block = self._block
        assert block is not None, "shown once, before its end"
        stream = None
        if self.is_device_accessible:
            stream = core.Stream.from_handle(block.stream.ptr or _LEGACY_STREAM)
        return core.Buffer.from_handle(block.ptr, block.nbytes, mr=self, stream=stream)

    def allocate(self, size: int, *, stream: Any) -> Any:
        raise IntegrationError("this memory resource cannot allocate: it holds one Buffer")

    def deallocate(self, ptr: Any, size: int, *, stream: Any) -> None:
        self._lease = self._block = None


class _NoStream:
    """Stands for the stream of host memory, which needs no order."""

    def __cuda_stream__(self) -> tuple[int, int]:
        return 0, 0


def memory_of(source: Any) -> MemoryInfo:
    """Return the memory of a cuda.core resource's blocks."""
    number = source.device_id
    if source.is_device_accessible and number >= 0:
        kind = MemoryKind.DEVICE
        if getattr(source, "is_managed", False):
            kind = MemoryKind.MANAGED
        elif source.is_host_accessible:
            kind = MemoryKind.HOST_ACCESSIBLE
        return MemoryInfo(Device(f"cuda:{number}"), kind)
    if source.is_host_accessible:
        return MemoryInfo(Device("host"), alignment=1)
    raise ConfigError(f"{source!r} is accessible from neither a device nor the host: pass memory=")


class ResourceOverCore(MemoryResource):
    """A gpumem resource over cuda.core's."""

    def __init__(self, source: Any, memory: MemoryInfo | Device | str, name: str | None) -> None:
        super().__init__(memory, name=name)
        self._source = source
        self._live: dict[int, Any] = {}

    def allocate_raw(self, nbytes: int, stream: Stream) -> int:
        block = self._source.allocate(nbytes, stream=self._stream(stream))
        address = int(block.handle)
        self._live[address] = block
        return address

    def deallocate_raw(self, ptr: int, nbytes: int, stream: Stream) -> None:
        self._live.pop(ptr).close(self._stream(stream))

    def _stream(self, stream: Stream) -> Any:
        if self.memory.device.type != "cuda":
            return None
        return core.Stream.from_handle(stream.ptr or _LEGACY_STREAM)
