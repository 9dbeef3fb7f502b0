"""Vulkan writes frames; NumPy or PyTorch reads them where they are, ordered by a timeline.

    python examples/vulkan/frames.py                      # the GPU, else software Vulkan
    python examples/vulkan/frames.py --device host --reader numpy

Nothing is copied. Two timelines order both sides: one that Vulkan signals when a frame is there,
which the reader's stream waits for (the CPU, where NumPy reads), and one that the reader signals
when it is done, which Vulkan waits for before it draws over the frame.

Needs ``pip install vulkan`` and a Vulkan driver; without a GPU Mesa's software Vulkan
(Debian: ``apt install mesa-vulkan-drivers libvulkan1``).
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import gpumem
from gpumem.interop import ExternalMemory, HostTimeline, Importer

try:
    from shared_timeline import Bridge, SharedTimeline
    from vulkan_device import VulkanDevice
except (ImportError, OSError) as error:  # OSError: the package is there, Vulkan's loader is not
    print(f"this example needs the package vulkan and Vulkan's loader: {error}")
    sys.exit()

HEIGHT, WIDTH = 480, 640
GREY = 0x3E800000  # 0.25 as a 32-bit float; one more in its exponent is twice as much


@contextmanager
def shared(clock: SharedTimeline, importer: Importer, *, signalled_by: str) -> Iterator[Any]:
    """Give gpumem's side of a timeline of Vulkan's that ``"vulkan"`` or the ``"reader"`` signals.

    A GPU's driver exports it. Software Vulkan does not: a HostTimeline takes part, and a bridge
    passes the values on.
    """
    if clock.exportable:
        with importer.import_semaphore(clock.descriptor(), consume=True) as timeline:
            yield timeline
        return
    with HostTimeline.create() as timeline:
        ends = (clock, timeline) if signalled_by == "vulkan" else (timeline, clock)
        with Bridge(*ends):
            yield timeline


def read_by_numpy(memory: ExternalMemory, read: Any, number: int) -> Callable[[], float]:
    """Take the mean of a frame on the CPU, which waits for it."""
    mean = float(memory.tensor((HEIGHT, WIDTH), "float32").numpy().mean())
    read.signal(number)
    return lambda: mean


def read_by_torch(memory: ExternalMemory, read: Any, number: int) -> Callable[[], float]:
    """Queue the mean of a frame on PyTorch's stream, which waits for it; the CPU does not."""
    import torch

    mean = torch.from_dlpack(memory.tensor((HEIGHT, WIDTH), "float32")).mean()
    if memory.device.type == "cuda":
        handle = torch.cuda.current_stream(memory.device.index).cuda_stream or 1  # legacy default
        read.enqueue_signal(gpumem.Stream.from_handle(memory.device, handle), number)
    else:
        read.signal(number)
    return mean.item


def main(arguments: list[str] | None = None) -> None:
    """Produce and read some frames; prints what was read of each."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default=str(gpumem.default_device()))
    parser.add_argument("--reader", choices=["numpy", "torch"])
    parser.add_argument("--frames", type=int, default=4)
    chosen = parser.parse_args(arguments)
    on_host = gpumem.Device(chosen.device).type == "host"
    read = {"numpy": read_by_numpy, "torch": read_by_torch}[
        chosen.reader or ("numpy" if on_host else "torch")
    ]
    with ExitStack() as stack:
        engine = stack.enter_context(VulkanDevice(chosen.device))
        importer = stack.enter_context(Importer.for_device(chosen.device))
        frame = stack.enter_context(engine.allocate(4 * HEIGHT * WIDTH))
        memory = stack.enter_context(importer.import_memory(frame.descriptor(), consume=True))
        drawn, seen = stack.enter_context(engine.timeline()), stack.enter_context(engine.timeline())
        written = stack.enter_context(shared(drawn, importer, signalled_by="vulkan"))
        done = stack.enter_context(shared(seen, importer, signalled_by="reader"))
        means = []
        for number in range(1, chosen.frames + 1):
            before = [(seen, number - 1)] if number > 1 else []
            engine.fill(frame, GREY + (number << 23), wait=before, signal=[(drawn, number)])
            memory.set_ready(written, number)
            means.append(read(memory, done, number))
        for number, mean in enumerate(means, 1):
            print(f"frame {number}: {mean():g}")


if __name__ == "__main__":
    main()
