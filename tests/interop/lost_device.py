"""Every public call after the device is lost: none hangs, each works or raises a GpumemError."""

from __future__ import annotations

import faulthandler
import os
import threading
from collections.abc import Callable
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any

import numpy as np

import gpumem
from gpumem import interop
from gpumem._testing import host_device, timelines
from gpumem.errors import GpumemError
from gpumem.interop import (
    DriverTimeline,
    ExternalMemory,
    HostTimeline,
    Importer,
    MemoryDescriptor,
    MemoryHandleType,
    SemaphoreDescriptor,
    SemaphoreType,
)

ILLEGAL_ADDRESS = 700
PATIENCE = 60  # seconds until a call counts as hung: the process ends then, with its traceback
FOR_DERIVED_CLASSES = {"allocate_raw", "deallocate_raw"}
NEVER = 1 << 40  # a timeline's value that nothing signals
MIB = 1 << 20

# For each class: its public methods, each with a call of it, in this order. What is not here and
# is no property is reported.
_TIMELINE = {
    "wait": lambda it, world: it.wait(NEVER),
    "point": lambda it, world: it.point(NEVER).wait(),
    "value": lambda it, world: it.value(),
    "enqueue_wait": lambda it, world: it.enqueue_wait(world.stream, NEVER),
    "enqueue_signal": lambda it, world: it.enqueue_signal(world.stream, NEVER),
    "signal": lambda it, world: it.signal(NEVER + 1),
    "export": lambda it, world: it.export(),
    "close": lambda it, world: it.close(),
}
_RESOURCE = {
    "allocate": lambda it, world: it.allocate(4 * MIB, world.stream),
    "allocate_persistent": lambda it, world: it.allocate_persistent(4096),
    "from_config": lambda it, world: type(it).from_config("host").allocate(MIB),
    "reset_stream": lambda it, world: it.reset_stream(world.other),
    "shrink": lambda it, world: it.shrink(),
    "snapshot": lambda it, world: it.snapshot(),
    "stats": lambda it, world: it.stats(),
    "close": lambda it, world: it.close(),
}
CALLS: dict[type, dict[str, Callable[[Any, Any], object]]] = {
    HostTimeline: {
        "create": lambda it, world: HostTimeline.create(device="host").enqueue_wait(None, 1),
        "from_fd": lambda it, world: HostTimeline.from_fd(world.timeline_handle).close(),
        **_TIMELINE,
        "poison": lambda it, world: it.poison(),
    },
    DriverTimeline: _TIMELINE,
    ExternalMemory: {
        "tensor": lambda it, world: it.tensor(4, "u1").numpy().tobytes(),
        "set_ready": lambda it, world: it.set_ready(world.timeline, NEVER),
        "resource": lambda it, world: it.resource().allocate(100),
        "close": lambda it, world: it.close(),
    },
    Importer: {
        "for_device": lambda it, world: Importer.for_device("host"),
        "unavailable_reason": lambda it, world: Importer.unavailable_reason("host"),
        "register": lambda it, world: Importer.register("host", None),
        "can_import_memory": lambda it, world: it.can_import_memory(MemoryHandleType.MEMFD),
        "can_import_semaphore": lambda it, world: it.can_import_semaphore(
            SemaphoreType.HOST_TIMELINE
        ),
        "import_memory": lambda it, world: it.import_memory(world.describe("OPAQUE_FD")),
        "import_semaphore": lambda it, world: it.import_semaphore(
            SemaphoreDescriptor(world.timeline_handle, SemaphoreType.TIMELINE_OPAQUE_FD)
        ),
        "close": lambda it, world: it.close(),
    },
    gpumem.Stream: {
        "from_handle": lambda it, world: type(it).from_handle("host", it.ptr).synchronize(),
        "query": lambda it, world: it.query(),
        "record": lambda it, world: it.record(),
        "wait": lambda it, world: it.wait(world.event),
        "synchronize": lambda it, world: it.synchronize(),
    },
    gpumem.Event: {
        "query": lambda it, world: it.query(),
        "synchronize": lambda it, world: it.synchronize(),
    },
    gpumem.Device: {
        "shares_memory_with": lambda it, world: it.shares_memory_with("host"),
        "synchronize": lambda it, world: it.synchronize(),
    },
    gpumem.Buffer: {
        "advise": lambda it, world: world.managed.advise("read_mostly"),
        "prefetch": lambda it, world: world.managed.prefetch("host"),
        "record_stream": lambda it, world: it.record_stream(world.other),
        "register": lambda it, world: it.register().release(),
        "tensor": lambda it, world: it.tensor(4, "u1"),
        "transports": lambda it, world: it.transports(),
        "close": lambda it, world: it.close(),
    },
    gpumem.Tensor: {
        "as_read_only": lambda it, world: it.as_read_only(),
        "contiguous": lambda it, world: it[::2].contiguous(),
        "copy": lambda it, world: it.copy(),
        "export_as": lambda it, world: it.export_as("cpu"),
        "fill": lambda it, world: it.fill(0),
        "item": lambda it, world: it[:1].item(),
        "numpy": lambda it, world: it.numpy(),
        "reshape": lambda it, world: it.reshape((2, -1)),
        "to": lambda it, world: it.to("host", world.other, copy=True).numpy(),
        "tolist": lambda it, world: it[:1].tolist(),
        "transports": lambda it, world: it.transports(),
        "view": lambda it, world: it.view("u1"),
    },
    gpumem.VirtualTensor: {
        "commit": lambda it, world: it.commit(40),
        "release": lambda it, world: it.release(1, 2),
        "resize": lambda it, world: it.resize(8),
        "tensor": lambda it, world: it.tensor(0, 1).numpy(),
        "numpy": lambda it, world: it.numpy(),
        "record_stream": lambda it, world: it.record_stream(world.other),
        "close": lambda it, world: it.close(),
    },
    gpumem.Arena: {
        "blocks": lambda it, world: it.blocks(),
        "capture": lambda it, world: it.capture(world.other).__enter__(),
        "check_heap": lambda it, world: it.check_heap(),
        "check_invariants": lambda it, world: it.check_invariants(),
        "copy_out": lambda it, world: it.copy_out().wait(),
        "enable_peer": lambda it, world: it.enable_peer("host"),
        "outstanding": lambda it, world: it.outstanding(),
        "prepare": lambda it, world: it.prepare(64 * MIB),
        "report": lambda it, world: it.report(os.path.join(world.folder, "report.html")),
        "reset_peaks": lambda it, world: it.reset_peaks(),
        "set_limit": lambda it, world: it.set_limit(1 << 30),
        "staging": lambda it, world: gpumem.Arena.staging("host"),
        "tag": lambda it, world: it.tag("name"),
        "sleep": lambda it, world: it.sleep(),
        "wake": lambda it, world: it.wake(),
        "virtual": lambda it, world: it.virtual((64, MIB), "u1", committed=2),
        **_RESOURCE,
    },
    gpumem.DriverPool: {
        "current": lambda it, world: type(it).current("host").allocate(100),
        "default": lambda it, world: type(it).default("host").allocate(100),
        "enable_peer": lambda it, world: it.enable_peer("host"),
        "export_buffer": lambda it, world: it.export_buffer(world.pooled),
        "export_handle": lambda it, world: it.export_handle(),
        "import_buffer": lambda it, world: it.import_buffer(bytes(64)),
        "import_handle": lambda it, world: type(it).import_handle("host", world.pool_handle),
        **_RESOURCE,
    },
    gpumem.Session: {
        "run": lambda it, world: it.run(lambda context: context.inputs["x"].numpy()),
        "allocator": lambda it, world: it.allocator().allocate(100),
        "bind_input": lambda it, world: it.bind_input("x", np.zeros(4)),
        "bind_output": lambda it, world: it.bind_output("y"),
        "copy_plan": lambda it, world: it.copy_plan(),
        "device_for_outputs": lambda it, world: it.device_for_outputs(),
        "outputs": lambda it, world: it.outputs(),
        "close": lambda it, world: it.close(),
    },
}
FUNCTIONS = {
    "run without waiting": lambda world: world.second_session.run(
        lambda context: context.inputs["x"], synchronize=False
    ),
    "numpy of imported memory that is not ready": lambda world: world.awaited.numpy(),
    "from_dlpack of the same": lambda world: np.from_dlpack(world.awaited),
    "copy of the same": lambda world: gpumem.copy(world.filled, world.awaited, world.stream),
    "copy": lambda world: gpumem.copy(world.filled, world.tensor.view("u1"), world.other),
    "copy to NumPy": lambda world: gpumem.copy(np.empty(1 << 14, "f4"), world.tensor),
    "memoryview": lambda world: memoryview(world.tensor)[0],
    "full": lambda world: gpumem.full(9, 1, "f4", memory="host", stream=world.stream),
    "Stream": lambda world: gpumem.Stream("host"),
    "Arena": lambda world: gpumem.Arena("host").allocate(MIB, world.stream),
    "DriverPool": lambda world: gpumem.DriverPool("host"),
    "export": lambda world: interop.export(world.shareable),
    "attach": lambda world: interop.attach(world.handle),
    "Stream.wait of a point": lambda world: world.stream.wait(world.timeline.point(NEVER)),
    "with a timeline": lambda world: world.other_timeline.__exit__(None, None, None),
    "with imported memory": lambda world: world.other_memory.__exit__(None, None, None),
}


def make_world(folder: str, busy: bool) -> SimpleNamespace:
    """Make one of everything; `busy`: streams wait for values, and work is queued behind that."""
    importer = Importer.for_device("host")
    file = os.memfd_create("memory")
    os.truncate(file, MIB)

    def describe(kind: str) -> MemoryDescriptor:
        return MemoryDescriptor(file, MemoryHandleType[kind], MIB)

    world = SimpleNamespace(folder=folder, describe=describe, importer=importer)
    world.stream, world.other = gpumem.Stream("host"), gpumem.Stream("host")
    world.arena, world.device = gpumem.Arena("host"), gpumem.Device("host")
    world.pool = gpumem.DriverPool("host", {"shareable": True})
    world.pooled, world.pool_handle = world.pool.allocate(4096), world.pool.export_handle()
    world.timeline, world.other_timeline = HostTimeline.create(), HostTimeline.create()
    world.bound_timeline = HostTimeline.create(device="host")
    world.timeline_handle = world.timeline.export()
    world.imported_timeline = importer.import_semaphore(
        SemaphoreDescriptor(world.timeline_handle, SemaphoreType.TIMELINE_OPAQUE_FD)
    )
    world.pages, world.opaque, world.other_memory = (
        importer.import_memory(describe(kind)) for kind in ("MEMFD", "OPAQUE_FD", "OPAQUE_FD")
    )
    world.buffer = world.arena.allocate(1 << 16, world.stream)
    world.managed = gpumem.Arena("host/managed").allocate(4096)
    world.tensor = gpumem.from_dlpack(world.arena.allocate(1 << 16, world.stream)).view("f4")
    world.filled = gpumem.full(1 << 16, 1, "u1", memory="host", stream=world.stream)
    world.shareable = world.arena.allocate(4096, shareable=True)
    world.handle = interop.export(world.shareable)
    world.grown = world.arena.virtual((64, MIB), "u1", committed=4, stream=world.stream)
    world.session, world.second_session = gpumem.Session("host"), gpumem.Session("host")
    for session in (world.session, world.second_session):
        session.bind_input("x", np.arange(4, dtype="f4"))
    first = 1
    for timeline in (world.timeline, world.other_timeline, world.bound_timeline):
        if busy:
            timeline.enqueue_wait(world.stream, first)
        timeline.enqueue_signal(world.stream, first + 1)
    world.imported_timeline.enqueue_wait(world.other, 2)
    if busy:
        gpumem.copy(world.opaque.tensor(1 << 16, "u1"), world.filled, world.other)
        behind = world.arena.allocate(MIB, world.stream)
        behind.record_stream(world.other)
    else:
        world.device.synchronize()
    world.event = world.stream.record()
    awaited = importer.import_memory(describe("MEMFD"))
    awaited.set_ready(world.timeline, NEVER)
    world.awaited = awaited.tensor(1 << 16, "u1")
    return world


def cases(world: SimpleNamespace) -> list[tuple[str, Callable[[], object]]]:
    """List every property and method of what the world has, and the functions."""
    found: list[tuple[str, Callable[[], object]]] = []
    missing = set(CALLS)
    for name, call in FUNCTIONS.items():
        found.append((name, lambda call=call: call(world)))
    for name, it in vars(world).items():
        calls = CALLS.get(type(it))
        if calls is None:
            continue
        missing.discard(type(it))
        public = {each for each in dir(type(it)) if not each.startswith("_")} - FOR_DERIVED_CLASSES
        methods = {each for each in public if callable(getattr(type(it), each))}
        assert methods == set(calls), f"{type(it).__name__}: {sorted(methods ^ set(calls))}"
        for each in sorted(public - methods):
            found.append((f"{name}.{each}", lambda it=it, each=each: getattr(it, each)))
        for each, call in calls.items():
            found.append((f"{name}.{each}()", lambda it=it, call=call: call(it, world)))
    assert not missing, missing
    # Closing last: what else a closed object refuses says nothing.
    return sorted(found, key=lambda case: case[0].endswith(".close()"))


def main(busy: bool, memory_operations: bool) -> None:
    """Lose the device, make every call, and print those that end as they must not."""
    timelines.rehearse_memory_operations(memory_operations)
    with TemporaryDirectory() as folder:
        world = make_world(folder, busy)
        host_device.lose_device(0, ILLEGAL_ADDRESS)
        for name, call in cases(world):
            faulthandler.dump_traceback_later(PATIENCE, exit=True)
            report(name, call)
    faulthandler.dump_traceback_later(PATIENCE, exit=True)  # the end of the process as well


WAITS = {
    "Timeline.wait": lambda world: world.timeline.wait(NEVER),
    "Timeline.wait for a stream's signal": lambda world: world.timeline.wait(2),
    "Timeline.signal": lambda world: world.timeline.signal(NEVER),
    "Timeline.wait of an import": lambda world: world.imported_timeline.wait(NEVER),
    "Timeline.close": lambda world: world.bound_timeline.close(timeout=PATIENCE),
    "Stream.synchronize": lambda world: world.stream.synchronize(),
    "Event.synchronize": lambda world: world.event.synchronize(),
    "Device.synchronize": lambda world: world.device.synchronize(),
    "numpy of memory that is not ready": lambda world: world.awaited.numpy(),
    "numpy": lambda world: world.tensor.numpy(),
    "copy to NumPy": lambda world: gpumem.copy(np.empty(1 << 14, "f4"), world.tensor),
    "export": lambda world: interop.export(world.shareable),
    "run": lambda world: world.session.run(lambda context: world.stream.synchronize()),
    "sleep": lambda world: world.arena.sleep(),
}


def lose_while_threads_wait(memory_operations: bool) -> None:
    """Lose the device while a thread is in each of the calls that wait for it."""
    timelines.rehearse_memory_operations(memory_operations)
    faulthandler.dump_traceback_later(PATIENCE, exit=True)
    with TemporaryDirectory() as folder:
        world = make_world(folder, busy=True)
        threads = [
            threading.Thread(target=report, args=(name, lambda call=call: call(world)))
            for name, call in WAITS.items()
        ]
        for thread in threads:
            thread.start()
        host_device.lose_device(0, ILLEGAL_ADDRESS)
        for thread in threads:
            thread.join()


def report(name: str, call: Callable[[], object]) -> None:
    """Call, and print what is neither a return nor a GpumemError."""
    try:
        call()
    except GpumemError:
        pass
    except Exception as error:
        print(f"{name}: {type(error).__name__}: {error}")
