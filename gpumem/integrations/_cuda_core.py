"""cuda.core's memory resources over gpumem's: classes derived from its own, made at first use."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from gpumem._buffer import Buffer, MemoryResource
from gpumem.device import MemoryInfo, MemoryKind
from gpumem.errors import IntegrationError
from gpumem.integrations._blocks import Blocks

__all__ = ["LEGACY", "make_classes"]

LEGACY = 1
"""The handle of the legacy default stream that cuda.core takes; it refuses 0."""


def make_classes(core: Any) -> tuple[Any, Any]:
    """Make the class over a resource, and the one over a buffer."""

    class Gpumem(core.MemoryResource):  # type: ignore[misc]
        """What gpumem says of a memory, in cuda.core's words."""

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
            device = self.is_device_accessible
            address = self._blocks.take(size, stream if device else _NoStream())
            try:
                return core.Buffer.from_handle(
                    address, size, mr=self, stream=stream if device else None
                )
            except BaseException:
                self._blocks.give(address, stream if device else _NoStream())
                raise

        def deallocate(self, ptr: Any, size: int, *, stream: Any) -> None:
            self._blocks.give(int(ptr), stream if self.is_device_accessible else _NoStream())

    class GpumemBuffer(Gpumem):
        """Keeps one gpumem buffer for the cuda.core buffer that shows it."""

        def __init__(self, block: Buffer) -> None:
            super().__init__(block.memory)
            # A lease, as every view of a buffer has one: an unconsumed capsule.
            self._lease = block.__dlpack__(max_version=(1, 0), stream=_unordered(block))
            self._block: Buffer | None = block

        def show(self) -> Any:
            block = self._block
            assert block is not None, "shown once, before its end"
            stream = None
            if self.is_device_accessible:
                stream = core.Stream.from_handle(block.stream.ptr or LEGACY)
            return core.Buffer.from_handle(block.ptr, block.nbytes, mr=self, stream=stream)

        def allocate(self, size: int, *, stream: Any) -> Any:
            raise IntegrationError("this memory resource stands for one gpumem.Buffer")

        def deallocate(self, ptr: Any, size: int, *, stream: Any) -> None:
            self._lease = self._block = None

    return GpumemResource, GpumemBuffer


class _NoStream:
    """What host memory is ordered by: nothing."""

    def __cuda_stream__(self) -> tuple[int, int]:
        return 0, 0


def _unordered(block: Buffer) -> int | None:
    # DLPack's word for "order nothing"; the CPU's capsules take no stream.
    return None if block.memory.host_accessible else -1
