"""Uses of the public names, as a type checker sees them. Checked, never run."""

from typing import assert_type

import numpy as np

import gpumem

arena = gpumem.Arena("host", {"arena.max_mem": "1048576"}, name="example")
gpumem.Arena("host", max_mem="1GiB", backing="regions", numa_node=None, peers=["cuda:1"])
gpumem.DriverPool("cuda:0", gpumem.PoolConfig(max_size=1 << 30), release_threshold="64MiB")
assert_type(arena, gpumem.Arena)
assert_type(arena.memory, gpumem.MemoryInfo)
assert_type(arena.config, gpumem.ArenaConfig)
assert_type(arena.closed, bool)

stream = gpumem.Stream(gpumem.Device("host"))
event = stream.record()
assert_type(event, gpumem.Event)
stream.wait(event)
assert_type(stream.query(), bool)


class ForeignStream:
    """A stream of another library."""

    def __cuda_stream__(self) -> tuple[int, int]:
        return 0, 1


with arena.allocate(4096, stream, alignment=512) as buffer:
    assert_type(buffer, gpumem.Buffer)
    assert_type(buffer.ptr, int)
    assert_type(buffer.nbytes, int)
    assert_type(buffer.stream, gpumem.Stream)
    view = memoryview(buffer)
    array = np.asarray(view)
    assert_type(buffer.__dlpack_device__(), tuple[int, int])
    buffer.close(ForeignStream())

arena.allocate(np.int64(10), 0)
arena.allocate_persistent(10).close(None)

report = arena.shrink()
assert_type(report, gpumem.ShrinkReport)
assert_type(report.released_bytes, int)
for kept in report.retained:
    assert_type(kept.blocks, tuple[gpumem.BlockInfo, ...])

stats = arena.stats()
assert_type(stats.as_ort(), dict[str, str])

try:
    arena.allocate(1 << 40)
except gpumem.OutOfMemoryError as error:
    assert_type(error.requested_nbytes, int)
    assert_type(error.advice, str)

assert_type(gpumem.vary("batch", 8), int)
predicted = gpumem.predict(len, [1], gpu="h100", memory=8 << 30, allocators=["default"])
assert_type(predicted.fits("default"), bool | None)
assert_type(predicted.runs["default"].reserved, int)

for device in gpumem.devices():
    assert_type(device, gpumem.Device)
    assert_type(device.free_bytes, int)
    if not device.capabilities["virtual_memory"]:
        print(device.capabilities["virtual_memory"].reason)

memory = gpumem.MemoryInfo(gpumem.Device("cuda:0"), gpumem.MemoryKind.MANAGED)
assert_type(gpumem.MemoryInfo.parse(memory).shares_memory_with("host"), bool)
assert_type(gpumem.can_access("host", memory), bool)

with gpumem.DriverPool("host", gpumem.PoolConfig(shareable=True), default_stream=0) as pool:
    assert_type(pool, gpumem.DriverPool)
    assert_type(pool.stats(), gpumem.PoolStats)
    assert_type(pool.export_handle(), gpumem.Handle)
    with pool.allocate(np.int64(10), alignment=512) as block:
        assert_type(pool.export_buffer(block), bytes)
gpumem.Environment().register("host", max_mem="1GiB", peers="none")
gpumem.Session("host", private_arena=True, arena={"max_mem": "1GiB"})
assert_type(gpumem.MemoryResource.from_config("host"), gpumem.Arena | gpumem.DriverPool)


def allocate_somewhere(nbytes: int) -> int | None:
    return None


with gpumem.ExternalAllocator(allocate_somewhere, print, memory="host") as external:
    assert_type(external.stats(), gpumem.Stats)
    assert_type(external.shrink(), gpumem.ShrinkReport)

# What a checker must refuse: each line is an error, and an unneeded "ignore" is one too.
arena.allocate(4096.0)  # type: ignore[arg-type]
gpumem.Arena()  # type: ignore[call-arg]
gpumem.ExternalAllocator(1, 2)  # type: ignore[call-arg]
gpumem.ExternalAllocator("malloc", 2, memory="host")  # type: ignore[arg-type]
buffer.ptr = 0  # type: ignore[misc]
gpumem.ArenaConfig(max_memory=1)  # type: ignore[call-arg]

tensor = gpumem.zeros((2, 3), "float32", memory="host")
assert_type(tensor, gpumem.Tensor)
assert_type(gpumem.empty(4, np.int8, resource=arena, stream=stream), gpumem.Tensor)
assert_type(gpumem.full((), 1.5, environment=None), gpumem.Tensor)
assert_type(gpumem.zeros_like(gpumem.ones(3, "f4", memory="host"), stream=None), gpumem.Tensor)
assert_type(gpumem.from_dlpack(np.arange(3), device="host", copy=None), gpumem.Tensor)
assert_type(gpumem.asarray([1, 2], memory="host/managed"), gpumem.Tensor)
assert_type(tensor.shape, tuple[int, ...])
assert_type(tensor.strides, tuple[int, ...])
assert_type(tensor.read_only, bool)
assert_type(tensor.buffer, gpumem.Buffer)
assert_type(tensor[1:, ..., None], gpumem.Tensor)
assert_type(tensor.reshape(3, -1), gpumem.Tensor)
assert_type(tensor.reshape((6,), copy=False), gpumem.Tensor)
assert_type(tensor.view("int32").as_read_only().export_as("cpu"), gpumem.Tensor)
assert_type(tensor.to("host", stream, copy=True), gpumem.Tensor)
assert_type(tensor.contiguous(), gpumem.Tensor)
assert_type(tensor.__dlpack_device__(), tuple[int, int])
tensor.__dlpack__(max_version=(1, 0), dl_device=(1, 0), copy=False)
memoryview(tensor)
np.asarray(tensor.numpy(writable=False))
gpumem.copy(tensor, np.zeros((2, 3), "float32"), stream)
