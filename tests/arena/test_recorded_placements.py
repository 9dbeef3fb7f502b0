"""Where blocks go: fixed programs, and the places and counts that were recorded for them.

Nothing else says which of many allowed places a block gets, how much memory an arena asks for and
how many driver calls it makes. A change of policy shows here first. If it is meant:

    GPUMEM_RECORD=1 pytest tests/arena/test_recorded_placements.py
"""

import gc
import hashlib
import json
import mmap
import os
import random
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from helpers.driver import HostDriver

import gpumem
from gpumem import observe
from gpumem._events.events import ASLEEP, RELEASE, RESERVE
from gpumem._testing.arenas import release_retired

RECORDED = Path(__file__).with_name("recorded_placements.json")
KIB, MIB = 1 << 10, 1 << 20
LAG = 1_000_000  # ns on the virtual clock
TOLD = ["kind", "address", "nbytes", "allocated_nbytes", "stream"]
MOST_EVENTS = 1 << 14  # between two looks
STEPS = 400
LOOK_EVERY = 20

REGIONS = {"backing": "regions", "max_mem": 90 * MIB}
PAGES = {"backing": "virtual", "page_move_budget": 1}
CONFIGS = {
    "regions, tight": REGIONS | {"split_rule": "tight"},
    "regions, ort": REGIONS | {"split_rule": "ort", "max_dead_bytes_per_chunk": 200 * KIB},
    "regions, wait": REGIONS | {"stream_reuse": "wait"},
    "regions, never": REGIONS | {"stream_reuse": "never"},
    "regions, as requested": REGIONS | {"extend_strategy": "same_as_requested"},
    "pages": PAGES,
    "pages, all move": PAGES | {"page_move_threshold": 0},
    "pages, none moves": PAGES | {"page_move_threshold": 1000},
    "pages, no time to move": PAGES | {"page_move_threshold": 0, "page_move_budget": 0},
    "pages, wait": PAGES | {"stream_reuse": "wait", "page_move_threshold": 0.05},
    "pages, never": PAGES | {"stream_reuse": "never", "page_move_threshold": 0},
    "pages, limited": PAGES | {"page_move_threshold": 0, "max_mem": 40 * MIB},
    "pages, limited, wait": PAGES | {"stream_reuse": "wait", "max_mem": 40 * MIB},
}
CONFIGS |= {f"{name}, calls fail": CONFIGS[name] for name in [*CONFIGS] if "pages" in name}
CONFIGS |= {f"{name}, budget": CONFIGS[name] for name in ("regions, ort", "pages, all move")}
CONFIGS |= {f"{name}, budget in use": CONFIGS[name] for name in ("regions, ort", "pages")}
# Blocks of gigabytes: pages of 32 MiB, and one range of addresses after another. A limit binds.
ROOMY = {name: config for name, config in CONFIGS.items() if "pages" in name}
ROOMY |= {name: ROOMY[name] | {"max_mem": 20 << 30} for name in ROOMY if "limited" in name}
PROGRAMS = [(name, size) for name in CONFIGS for size in (18, 23, 27)]
PROGRAMS += [(name, 33) for name in ROOMY]
CALLS = ("cuMemAlloc", "cuMemFree", "cuMemAddressReserve", "cuMemCreate", "cuMemRelease")
CALLS += ("cuMemMap", "cuMemUnmap", "cuMemSetAccess")
CALLS += ("cuEventCreate", "cuEventRecord", "cuStreamWaitEvent")


class InARow:
    """A source of regions in a row: of equal chunks an arena chooses the lowest."""

    def __init__(self):
        self.nbytes = 8 << 30
        self.addresses = mmap.mmap(-1, self.nbytes, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self.begin = self.end = np.frombuffer(self.addresses, np.uint8).ctypes.data

    def allocate(self, nbytes):
        self.end += nbytes
        return self.end - nbytes

    def free(self, address, nbytes):
        pass  # none comes twice


class Program:
    """Allocations and frees on three streams, decided by a seed, while work is queued or done."""

    def __init__(self, arena, host, largest, fails, source):
        self.arena = arena
        self.paged = arena.backing == "virtual"
        self.fails = fails
        self.host = host
        self.rng = random.Random(7)
        self.largest = largest
        self.driver = HostDriver()
        self.streams = [gpumem.Stream("host") for _ in range(3)]
        self.scratch = gpumem.Arena("host").allocate(256)
        # Persistent blocks are freed on the default stream too.
        self.working = [*self.streams, gpumem.Stream.from_handle("host", 0)]
        for stream in self.working:
            self.scratch.record_stream(stream)
        self.live = []
        self.places = {}
        self.ranges = {} if source is None else {source.begin: source.nbytes}
        self.persistent = 0
        self.uncounted = Counter()  # of driver calls
        self.recording = observe.record(arena, capacity=MOST_EVENTS)

    def run(self):
        """Return what each step did, and a digest of the arena every now and then."""
        before = self.calls()
        said = []
        self.work()
        for step in range(STEPS):
            said.append(self.step())
            if step % LOOK_EVERY == LOOK_EVERY - 1:
                said.append(self.look(before))
        self.host.clear_faults()
        while self.live:
            self.live.pop().close()
        self.drain()
        said += [self.look(before), str(self.arena.shrink().released_bytes)]
        for stream in self.working:  # so that nothing of this run goes back during the next
            stream.synchronize()
        return said

    def step(self):
        if self.fails and self.rng.random() < 0.1:
            # One of the next calls of a kind; none may be left when its time is over.
            call = self.rng.choice(CALLS[2:])
            self.host.clear_faults()
            self.host.fail(call, self.rng.randrange(1, 4), self.rng.choice([1, 2]))
        chance = self.rng.random()
        if chance < 0.03:
            self.drain()
            return "drain"
        if chance < 0.05:
            return f"shrink:{self.arena.shrink().released_bytes}"
        if chance < 0.07:
            return self.take(self.arena.allocate_persistent, min(self.size(), 64 * MIB))
        if chance < 0.08:
            return self.take(self.arena.prepare, self.size())
        if chance < 0.10 and self.paged and self.arena.stats().in_use < 16 * MIB:
            return self.suspend()
        if self.live and chance < 0.5:
            self.free()
            return "-"
        return self.take(self.arena.allocate, self.size(), self.rng.choice(self.streams))

    def size(self):
        # Half of them of few sizes, which come again.
        if self.rng.random() < 0.5:
            return self.rng.choice([256, 1000, 5000, 64 * KIB, 300 * KIB, 2 * MIB, 5 * MIB])
        return int(2 ** self.rng.uniform(8, self.largest))

    def take(self, allocate, *arguments):
        try:
            block = allocate(*arguments)
        except gpumem.OutOfMemoryError:
            return "out"
        except gpumem.errors.DriverError as error:
            return f"{error.call}:{error.code}"
        if block is None:
            return "prepared"
        self.live.append(block)
        # Addresses differ from run to run; which of them come again does not.
        return str(self.places.setdefault(block.ptr, len(self.places)))

    def free(self):
        block = self.live.pop(self.rng.randrange(len(self.live)))
        stream = block.stream
        if self.rng.random() < 0.4:
            stream = self.rng.choice(self.streams)
        if self.rng.random() < 0.2:
            block.record_stream(self.rng.choice(self.streams))
        block.close(stream)

    def suspend(self):
        """Give memory and bytes to the host and take them again, until no call fails."""
        self.drain()
        said = []
        before = self.calls()
        for call in (self.arena.sleep, self.arena.wake, self.arena.wake):
            try:
                call()
                said.append("ok")
            except (gpumem.OutOfMemoryError, gpumem.errors.DriverError) as error:
                said.append(type(error).__name__)
                self.host.clear_faults()
            if not self.arena.asleep:
                break
        if set(said) != {"ok"}:
            # How far a wake came depends on which range of addresses the kernel placed lower.
            self.uncounted += self.calls() - before
        return ":".join(said)

    def calls(self):
        """Return the driver calls until now, by name, and those that the arena counts."""
        calls = Counter({name: self.host.call_count(name) for name in CALLS})
        return calls + Counter({"driver_calls": self.arena.stats().driver_calls})

    def drain(self):
        self.host.advance_clock(LAG)
        for stream in self.working:
            stream.synchronize()
        self.work()

    def work(self):
        """Queue work that is under way until the next drain, so that no event completes before."""
        for stream in self.working:
            self.driver.fill(self.scratch, 1, stream)

    def look(self, before):
        self.arena.check_invariants()
        budget = self.arena.budget
        figures = dict(vars(self.arena.stats()))
        assert figures.pop("virtual") == 0  # no program makes a virtual tensor
        figures["driver_calls"] -= self.uncounted["driver_calls"]
        stats = figures, budget and (budget.used, budget.peak)
        calls = self.calls() - before - self.uncounted
        calls = [calls[name] for name in CALLS]
        (found,) = self.arena.snapshot().resources
        self.ranges |= {one.address: one.nbytes for one in found.regions if one.kind == "range"}
        chunks = [
            (
                block.region,
                self.offset(block.address),
                block.allocated_nbytes,
                block.state,
                self.number(block.stream),
            )
            for block in sorted(found.blocks, key=lambda b: (b.region, b.address))
        ]
        pages = sorted((self.offset(int(place)), int(size)) for place, size in found.pages)
        self.recording.stop()
        assert not self.recording.lost
        told = [
            (kind, self.offset(address), *sizes, self.number(stream))
            for kind, address, *sizes, stream in self.recording.events().records[TOLD].tolist()
            # Memory that sleeps or wakes, in the order of addresses, which the kernel chooses.
            if kind not in (RESERVE, RELEASE) or stream != ASLEEP
        ]
        self.recording = observe.record(self.arena, capacity=MOST_EVENTS)
        told = repr((stats, calls, chunks, pages, told))
        return hashlib.sha1(told.encode()).hexdigest()[:8]

    def offset(self, address):
        """Return which range an address lies in, and how far from its beginning."""
        if not address:
            return None
        for number, (base, nbytes) in enumerate(self.ranges.items()):
            if base <= address < base + nbytes:
                return number, address - base
        # Persistent blocks have a range of their own, which no snapshot shows.
        self.persistent = self.persistent or address
        return -1, address - self.persistent

    def number(self, stream):
        return next((i for i, one in enumerate(self.streams) if one.ptr == stream), None)


def memory_alive(host):
    release_retired()
    return {name: host.live()[name] for name in ("handles", "mappings", "reservations")}


@pytest.fixture(scope="module")
def recorded():
    record = bool(os.environ.get("GPUMEM_RECORD"))
    known = {} if record else json.loads(RECORDED.read_text())
    yield known
    if record:
        RECORDED.write_text(json.dumps(known, indent=1) + "\n")


@pytest.mark.parametrize(("name", "largest"), PROGRAMS)
def test_fixed_program_gets_the_recorded_places(name, largest, recorded, virtual_clock):
    virtual_clock.set_capacity(0, 1 << 40)  # the same on every machine
    virtual_clock.set_lag(LAG)
    gc.collect()
    before = memory_alive(virtual_clock)
    source = InARow() if "regions" in name else None
    more = {}
    if "budget" in name:
        more = {"budget": gpumem.Budget(50 * MIB if largest < 33 else 25 << 30)}
        more |= {"count": "in_use"} if "in use" in name else {}
    config = CONFIGS[name] if largest < 33 else ROOMY[name]
    arena = gpumem.Arena("host", config | {"oom_wait_ms": 0}, source=source, **more)
    said = Program(arena, virtual_clock, largest, "calls fail" in name, source).run()
    arena.close()
    del arena
    assert memory_alive(virtual_clock) == before
    key = f"{name}, {largest}"
    assert said == recorded.setdefault(key, " ".join(said)).split()
