"""Imports, compared with the calls that they make; hand-overs between Vulkan and a CUDA stream."""

from __future__ import annotations

import argparse
import mmap
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

import gpumem
from bench.harness import Candidate, Timing, interleave
from gpumem.interop import Importer, MemoryDescriptor, MemoryHandleType

sys.path.append(str(Path(__file__).resolve().parents[1] / "examples" / "vulkan"))

NBYTES = 1 << 20
WORDS = NBYTES // 4
HAND_OVERS = 100
ROUNDS = 9


def timings() -> dict[str, Timing]:
    """Measure all that this machine can."""
    found = {"import, tensor, close: a file in memory": of_file()}
    if vulkan_is_on("host"):
        found["import, tensor, close: software Vulkan"] = of_vulkan("host")
    if vulkan_is_on("cuda:0"):
        found["import, tensor, close: Vulkan on the GPU"] = of_vulkan("cuda:0")
        found[f"{HAND_OVERS} hand-overs"] = hand_overs()
    return found


def vulkan_is_on(device: str) -> bool:
    """Return whether Vulkan shares memory with a device."""
    try:
        vulkan_device(device).close()
    except Exception:  # the package, the loader or a driver is missing
        return False
    return True


def vulkan_device(device: str) -> Any:
    """Return the Vulkan device of examples/vulkan, which imports the package `vulkan`."""
    from vulkan_device import VulkanDevice

    return VulkanDevice(device)


# ---- imports -------------------------------------------------------------------------------------


def of_file() -> Timing:
    """Import a memfd of 1 MiB, take a tensor, close; against mmap and a NumPy array over it."""
    number = os.memfd_create("bench")
    os.truncate(number, NBYTES)
    descriptor = MemoryDescriptor(number, MemoryHandleType.MEMFD, NBYTES)
    candidates = {"gpumem": imported("host", descriptor), "mmap, numpy": by_mmap(number, 0)}
    timing = interleave(candidates, "mmap, numpy")
    os.close(number)
    return timing


def of_vulkan(device: str) -> Timing:
    """Import a Vulkan buffer of 1 MiB, take a tensor, close; against the calls it is made of."""
    with vulkan_device(device) as engine, engine.allocate(NBYTES) as buffer:
        descriptor = buffer.descriptor()
        candidates: dict[str, Candidate] = {"gpumem": imported(device, descriptor)}
        if device == "host":
            reference = "mmap, numpy"
            candidates[reference] = by_mmap(descriptor.handle.fileno(), mmap.PAGESIZE)
        else:
            reference = "the driver's calls"
            candidates[reference] = by_driver(descriptor)
        return interleave(candidates, reference)


def by_mmap(number: int, start: int) -> Candidate:
    """Map a file and make an array of the bytes after its first ones."""

    def run() -> None:
        mapped = mmap.mmap(number, NBYTES, offset=start)
        array = np.frombuffer(mapped, np.float32)
        del array
        mapped.close()

    return run


def imported(device: str, descriptor: MemoryDescriptor) -> Candidate:
    importer = Importer.for_device(device)

    def run() -> None:
        memory = importer.import_memory(descriptor)
        memory.tensor(WORDS, "float32")
        memory.close()

    return run


def by_driver(descriptor: MemoryDescriptor) -> Candidate:
    """Return the same as five calls through cuda.bindings, with a duplicate of the descriptor."""
    cu = driver()
    handle = cu.CUDA_EXTERNAL_MEMORY_HANDLE_DESC()
    handle.type = cu.CUexternalMemoryHandleType.CU_EXTERNAL_MEMORY_HANDLE_TYPE_OPAQUE_FD
    handle.size = descriptor.size
    handle.flags = int(bool(descriptor.dedicated))
    part = cu.CUDA_EXTERNAL_MEMORY_BUFFER_DESC()
    part.size = descriptor.size

    def run() -> None:
        handle.handle.fd = os.dup(descriptor.handle.fileno())
        _, memory = cu.cuImportExternalMemory(handle)
        _, pointer = cu.cuExternalMemoryGetMappedBuffer(memory, part)
        cu.cuMemFree(pointer)
        cu.cuDestroyExternalMemory(memory)

    return run


def driver() -> Any:
    from cuda.bindings import driver as cu

    cu.cuInit(0)
    cu.cuCtxSetCurrent(cu.cuDevicePrimaryCtxRetain(0)[1])
    return cu


# ---- hand-overs ----------------------------------------------------------------------------------


def hand_overs() -> Timing:
    """Let Vulkan and a CUDA stream write 1 MiB in turn, a hundred times each.

    By a timeline: everything is queued at once. By the host: it waits for Vulkan, then for the
    stream. Vulkan's commands are recorded once and submitted without Python's structs, so that
    both are as cheap as from C.
    """
    with (
        vulkan_device("cuda:0") as engine,
        engine.allocate(NBYTES) as buffer,
        engine.timeline() as clock,
        Importer.for_device("cuda:0") as importer,
        importer.import_memory(buffer.descriptor(), consume=True) as memory,
        importer.import_semaphore(clock.descriptor(), consume=True) as timeline,
        recorded_fill(engine, buffer, clock) as submit,
    ):
        cu = driver()
        stream = gpumem.Stream("cuda:0")
        pointer, value = memory.ptr, 0

        def by_timeline() -> None:
            nonlocal value
            for _ in range(HAND_OVERS):
                submit(value, value + 1)
                timeline.enqueue_wait(stream, value + 1)
                cu.cuMemsetD32Async(pointer, 1, WORDS, stream.ptr)
                timeline.enqueue_signal(stream, value + 2)
                value += 2
            stream.synchronize()

        def by_host() -> None:
            nonlocal value
            for _ in range(HAND_OVERS):
                submit(0, value + 1)
                clock.wait(value + 1)
                cu.cuMemsetD32Async(pointer, 1, WORDS, stream.ptr)
                stream.synchronize()
                value += 1

        def vulkan_alone() -> None:
            nonlocal value
            for _ in range(HAND_OVERS):
                submit(0, value + 1)
                value += 1
            clock.wait(value)

        candidates = {
            "by the host": by_host,
            "by a timeline": by_timeline,
            "Vulkan's part alone": vulkan_alone,
        }
        return interleave(candidates, "by a timeline", rounds=ROUNDS, batch_seconds=0.05)


@contextmanager
def recorded_fill(engine: Any, buffer: Any, clock: Any) -> Iterator[Callable[[int, int], None]]:
    """Record a fill; yields a function that submits it: submit(value to wait for, to signal)."""
    import vulkan as vk

    info = vk.VkCommandPoolCreateInfo(queueFamilyIndex=engine.queue_family)
    pool = vk.vkCreateCommandPool(engine.logical, info, None)
    asked = vk.VkCommandBufferAllocateInfo(commandPool=pool, commandBufferCount=1)
    commands = vk.vkAllocateCommandBuffers(engine.logical, asked)[0]
    again = vk.VK_COMMAND_BUFFER_USAGE_SIMULTANEOUS_USE_BIT
    vk.vkBeginCommandBuffer(commands, vk.VkCommandBufferBeginInfo(flags=again))
    vk.vkCmdFillBuffer(commands, buffer.handle, 0, NBYTES, 2)
    vk.vkEndCommandBuffer(commands)

    waits, signals = vk.ffi.new("uint64_t[1]"), vk.ffi.new("uint64_t[1]")
    values = vk.VkTimelineSemaphoreSubmitInfo(
        waitSemaphoreValueCount=1,
        pWaitSemaphoreValues=waits,
        signalSemaphoreValueCount=1,
        pSignalSemaphoreValues=signals,
    )
    work = vk.VkSubmitInfo(
        pNext=values,
        pWaitSemaphores=[clock.handle],
        pWaitDstStageMask=[vk.VK_PIPELINE_STAGE_ALL_COMMANDS_BIT],
        pCommandBuffers=[commands],
        pSignalSemaphores=[clock.handle],
    )
    works = vk.ffi.new("VkSubmitInfo[]", [work])

    def submit(wait: int, signal: int) -> None:
        waits[0], signals[0] = wait, signal
        code = vk.lib.vkQueueSubmit(engine.queue, 1, works, vk.ffi.NULL)
        assert code == 0, code

    yield submit
    vk.vkDeviceWaitIdle(engine.logical)
    vk.vkDestroyCommandPool(engine.logical, pool, None)


if __name__ == "__main__":
    argparse.ArgumentParser(prog="python -m bench.interop", description=__doc__).parse_args()
    for name, timing in timings().items():
        print(name)
        for call, nanoseconds in timing.nanoseconds.items():
            print(f"  {call:32} {nanoseconds / 1e3:10.2f} us {timing.ratios[call]:7.3f}")
