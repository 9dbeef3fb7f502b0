"""A step in which one allocation of Python fails leaves nothing open, held, recorded or leaked."""

from __future__ import annotations

import _testcapi
import gc
import mmap
import os
import traceback
from unittest import mock

import pytest
from integrations.test_switch import OWN, A, B, Variable

import gpumem
from gpumem import interop, observe
from gpumem._testing.integrations import Switch, Using
from gpumem.integrations import memory_saver

MIB = 1 << 20
NONE_LEFT = 25  # steps without an error in a row: no allocation is left to refuse


class Case:
    """A step, and the state that it must leave; each case has objects of its own."""

    def __init__(self, folder):
        self.path = os.path.join(folder, "file")
        self.arena, self.stream = gpumem.Arena("host"), gpumem.Stream("host")
        self.block = gpumem.full((MIB,), 9, "uint8", resource=self.arena)
        self.prepare()

    def prepare(self):
        pass

    def refused(self, number):
        return refused(self, number)

    def state(self):
        self.arena.shrink()
        return self.arena.asleep, self.arena.stats().in_use


class Captured(Case):
    def step(self):
        with self.arena.capture(self.stream) as pool:
            self.arena.allocate(4096, self.stream).close()
        pool.close()

    def state(self):
        with self.arena.capture(self.stream):  # InUseError if an earlier pool still serves it
            pass
        return super().state()


class Asleep(Case):
    to = property(lambda self: "host")

    def prepare(self):
        with self.arena.tag("other"):
            self.other = gpumem.full((MIB,), 7, "uint8", resource=self.arena)

    def step(self):
        self.arena.sleep(["default", "other"], to=self.to)
        self.arena.wake()

    def state(self):
        self.arena.wake()
        whole = self.block.numpy()[5] == 9 and self.other.numpy()[5] == 7
        return super().state(), bool(whole), os.path.exists(self.path)


class AsleepInAFile(Asleep):
    to = property(lambda self: self.path)


class Reserved(Case):
    def prepare(self):
        self.budget = gpumem.Budget(MIB)

    def step(self):
        with self.budget.reserve(1000):
            pass

    def state(self):
        return self.budget.used, self.budget.holders()


class Published(Case):
    def step(self):
        with observe.publish():
            pass

    def state(self):
        with observe.publish() as publication:
            return publication.path.exists()


class Exported(Case):
    def prepare(self):
        self.shared = self.arena.allocate(MIB, shareable=True)

    def step(self):
        with interop.export(self.shared) as handle:
            interop.attach(handle)


class Timelines(Case):
    def step(self):
        with interop.HostTimeline.create() as timeline:
            timeline.signal(1)


class Pools(Case):
    def prepare(self):
        self.pool = gpumem.DriverPool("host", gpumem.PoolConfig(shareable=True))

    def step(self):
        with self.pool.export_handle():
            pass


class External(Case):
    def prepare(self):
        self.held = []
        self.external = gpumem.ExternalAllocator(self.give, self.held.remove, memory="host")

    def give(self, nbytes):
        address = 1 << 20
        self.held.append(address)
        return address

    def step(self):
        with self.external.allocate(100):
            pass

    def state(self):
        return len(self.held)


class Adapted(Case):
    def step(self):
        with gpumem.adaptors.limit(self.arena, MIB) as limited, limited.allocate(100):
            pass


class Rows(Case):
    def step(self):
        with self.arena.virtual((64, 64 << 10), "u1") as rows:
            rows.commit(0, 10)


class Producer:
    """Another library's object over a tensor."""

    def __init__(self, tensor):
        self.__dlpack__, self.__dlpack_device__ = tensor.__dlpack__, tensor.__dlpack_device__


class Blocks(Case):
    """Blocks beyond the Buffer objects that Python keeps for later ones."""

    def prepare(self):
        self.rows = self.arena.virtual((64, 64 << 10), "u1")
        self.rows.commit(0, 10)
        self.memory = interop.Importer("host").import_memory(
            interop.MemoryDescriptor(
                mmap.mmap(-1, MIB), interop.MemoryHandleType.HOST_ALLOCATION, MIB
            )
        )

    def step(self):
        self.arena.allocate(100)
        self.arena.allocate(100, self.stream)
        gpumem.empty(100, "u1", resource=self.arena)
        self.rows.tensor(0, 4)
        gpumem.from_dlpack(Producer(self.block))
        self.memory.tensor(9, "u1")

    def refused(self, number):
        held = [self.arena.allocate(100) for _ in range(300)]
        return refused(self, number) and bool(held)

    def state(self):
        return super().state(), self.memory.exports


class Streams(Case):
    """Streams that follow each other in one slot."""

    def prepare(self):
        self.resource = self.arena

    def step(self):
        self.stream = gpumem.Stream("host")
        self.resource.allocate(100, self.stream).close()
        self.resource.reset_stream(self.stream)

    def state(self):
        self.step()
        return super().state(), self.resource.stats().in_use


class StreamsOfAPool(Streams):
    def prepare(self):
        self.resource = gpumem.DriverPool("host")


class Imported(Case):
    def prepare(self):
        self.pages = mmap.mmap(-1, MIB)

    def step(self):
        kind = interop.MemoryHandleType.HOST_ALLOCATION
        with interop.Importer("host") as importer:
            described = interop.MemoryDescriptor(self.pages, kind, MIB)
            with importer.import_memory(described) as memory:
                memory.tensor(100, "u1").fill(3)


class TimelinesImported(Case):
    def prepare(self):
        self.timeline = interop.HostTimeline.create()

    def step(self):
        kind = interop.SemaphoreType.HOST_TIMELINE
        with interop.Importer("host") as importer, self.timeline.export() as handle:
            described = interop.SemaphoreDescriptor(handle, kind)
            with importer.import_semaphore(described) as other:
                other.signal(other.value() + 1)


class Environments(Case):
    def step(self):
        with gpumem.session.Environment() as environment:
            arena = environment.register("host")
            with gpumem.session.Session("host", environment=environment):
                arena.allocate(100).close()


class Regions(Case):
    """Regions of PyTorch's memory that pause."""

    def prepare(self):
        self.saver = memory_saver.TorchMemorySaver()

    def step(self):
        with (
            mock.patch.object(memory_saver, "_arenas", return_value=[self.arena]),
            self.saver.region("weights"),
            self.saver.disable(),
        ):
            self.saver.pause("weights")
        self.saver.resume("weights")

    def state(self):
        self.arena.wake()
        with self.arena.allocate(100) as block:
            return super().state(), block.ptr > 0


class Used(Case):
    """A framework that uses gpumem inside a block, and from `enable` to `disable`."""

    def prepare(self):
        self.framework = Variable()
        self.switch = Switch(self.framework)

    def step(self):
        with Using(self.switch, A), Using(self.switch, B):
            pass

    def state(self):
        return self.framework.memory == OWN, self.switch.current()


class Enabled(Used):
    def step(self):
        self.switch.enable(A)
        self.switch.enable(B)
        self.switch.disable()

    def state(self):
        self.switch.disable()
        return super().state()


def refused(case, number):
    """Refuse one allocation of a step; whether an error came of it."""
    found = None
    _testcapi.set_nomemory(number, number + 1)
    try:
        case.step()
    except BaseException as error:
        found = error
    finally:
        _testcapi.remove_mem_hooks()
    if found is None:
        return False
    traceback.clear_frames(found.__traceback__)
    # Python itself loses the error where it has no frame, or no lock, for a call.
    assert isinstance(found, (MemoryError, SystemError, RuntimeError)), found
    return True


def now(case):
    gc.collect()
    assert gpumem.Device("host").free_bytes  # releases retired memory
    return case.state(), len(os.listdir("/proc/self/fd"))


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("kind", [*Case.__subclasses__(), AsleepInAFile, Enabled, StreamsOfAPool])
def test_refused_allocation_of_python_leaves_nothing_open_or_held(kind, tmp_path):
    case = kind(tmp_path)
    case.step()
    case.step()
    before, number, quiet = (now(case), now(case))[1], 0, 0
    while quiet < NONE_LEFT:
        quiet = 0 if case.refused(number) else quiet + 1
        assert now(case) == before, number
        number += 1
    assert number > NONE_LEFT
