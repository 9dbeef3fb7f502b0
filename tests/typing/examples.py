"""Uses of the public names, as a type checker sees them. Checked, never run."""

from typing import assert_type

import numpy as np

import gpumem

arena = gpumem.Arena("host", {"arena.max_mem": "1048576"}, name="example")
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
for kept in report.kept:
    assert_type(kept.blocks, tuple[gpumem.BlockInfo, ...])

stats = arena.stats()
assert_type(stats.as_ort(), dict[str, str])

try:
    arena.allocate(1 << 40)
except gpumem.OutOfMemoryError as error:
    assert_type(error.asked, int)
    assert_type(error.advice, str)

for device in gpumem.devices():
    assert_type(device, gpumem.Device)
    assert_type(device.free_bytes, int)
    if not device.capabilities["virtual_memory"]:
        print(device.capabilities["virtual_memory"].reason)

memory = gpumem.MemoryInfo(gpumem.Device("cuda:0"), gpumem.MemoryKind.MANAGED)
assert_type(gpumem.devices_are_memory_compatible(memory, "host"), bool)
assert_type(gpumem.can_access("host", memory), bool)

with gpumem.DriverPool("host", gpumem.PoolConfig(shareable=True), default_stream=0) as pool:
    assert_type(pool, gpumem.DriverPool)
    assert_type(pool.stats(), gpumem.PoolStats)
    assert_type(pool.export_handle(), gpumem.Handle)
    with pool.allocate(np.int64(10), alignment=512) as block:
        assert_type(pool.export_buffer(block), bytes)
assert_type(gpumem.make_resource("host"), gpumem.Arena | gpumem.DriverPool)


def allocate_somewhere(nbytes: int) -> int | None:
    return None


with gpumem.ExternalAllocator(allocate_somewhere, print, memory="host") as external:
    assert_type(external.stats(), gpumem.Stats)
    assert_type(external.shrink(), gpumem.ShrinkReport)

# What a checker must refuse: each line is an error, and an unneeded "ignore" is one too.
arena.allocate("4096")  # type: ignore[arg-type]
gpumem.Arena()  # type: ignore[call-arg]
gpumem.ExternalAllocator(1, 2)  # type: ignore[call-arg]
gpumem.ExternalAllocator("malloc", 2, memory="host")  # type: ignore[arg-type]
buffer.ptr = 0  # type: ignore[misc]
gpumem.ArenaConfig(max_memory=1)  # type: ignore[call-arg]
