"""Sessions that are dropped: alone, in a cycle with what they were given, at the end."""

from __future__ import annotations

import ctypes
import gc
import weakref

import numpy as np
import pytest
from helpers import child
from helpers.driver import HostDriver
from helpers.threads import in_a_thread
from helpers.waiting import wait_until

import gpumem


def test_dropped_session_releases_its_environments_allocator():
    with gpumem.Environment() as environment:
        arena = environment.register("host")
        session = gpumem.Session("host", environment=environment)
        session.bind_output("y")
        session.run(lambda ctx: ctx.output("y", 2, "int8").numpy().fill(1))
        assert environment.references(arena) == 2
        del session
        gc.collect()
        assert environment.references(arena) == 1
    assert arena.closed


@pytest.mark.parametrize("by_another_thread", [False, True])
def test_session_dropped_inside_a_call_of_its_environment_releases_after_it(by_another_thread):
    environment = gpumem.Environment()
    arena = environment.register("host")
    sessions = [gpumem.Session("host", environment=environment)]
    with environment._alone():
        if by_another_thread:
            in_a_thread(sessions.clear)
        else:
            sessions.clear()
            gc.collect()
            assert environment._entry_of(arena).references == 2
    assert environment._entry_of(arena).references == 1
    environment.close()


def test_arena_of_a_dropped_session_ends_when_nothing_refers_to_it():
    environment = gpumem.Environment()
    environment.register("host")
    session = gpumem.Session("host", environment=environment)
    environment.release("host")
    gone = weakref.ref(session)
    del session
    gc.collect()
    assert gone() is None
    assert environment.memories() == []


def test_closed_and_dropped_session_releases_once():
    with gpumem.Environment() as environment:
        arena = environment.register("host")
        kept = gpumem.Session("host", environment=environment)
        gpumem.Session("host", environment=environment).close()
        gc.collect()
        assert environment.references(arena) == 2
        kept.close()


def test_dropped_session_lets_go_of_its_external_allocator():
    libc = ctypes.CDLL(None)
    functions = (ctypes.cast(each, ctypes.c_void_p).value for each in (libc.malloc, libc.free))
    with gpumem.ExternalAllocator(*functions, memory="host") as external:
        options = gpumem.SessionOptions(external_allocator=external)
        gpumem.Session("host", options)
        gc.collect()
        with gpumem.Session("host", options) as later:
            assert later.allocator() is external
            gc.collect()
            with pytest.raises(gpumem.ConfigError, match="another session uses it"):
                gpumem.Session("host", options)


class Engine:
    """Has a session that refers back to it, by what the session was given."""

    def __init__(self, how):
        self.blocks = {}
        self.freed = []
        environment = None
        options = {}
        if how == "callbacks":
            options["external_allocator"] = (self.alloc, self.free)
        elif how == "external allocator":
            made = gpumem.ExternalAllocator(self.alloc, self.free, memory="host")
            options["external_allocator"] = made
        else:
            environment = gpumem.Environment()
            if how == "sink of an adaptor":
                environment.register("host", gpumem.adaptors.log(gpumem.Arena("host"), self.note))
            else:
                environment.register("host")
                environment.engine = self
        self.session = gpumem.Session("host", options, environment)

    def note(self, event):
        pass

    def alloc(self, nbytes):
        block = ctypes.create_string_buffer(nbytes + 256)
        address = (ctypes.addressof(block) + 255) // 256 * 256
        self.blocks[address] = block
        return address

    def free(self, address):
        del self.blocks[address]
        self.freed.append(address)


CYCLES = ["callbacks", "external allocator", "sink of an adaptor", "attribute of an environment"]


def run_with_scratch(session, gate=False):
    """Run without a wait: memory that the run frees waits for what holds its stream back."""
    gates = []

    def work(ctx):
        with ctx.allocator.allocate(4096):
            if gate:
                gates.append(HostDriver().block(ctx.stream))
        ctx.output("y", 4096, "u1")

    session.bind_output("y", np.zeros(4096, "u1"))
    session.run(work, synchronize=False)
    return gates[0] if gate else None


def has_ended(*ended):
    gc.collect()
    assert gpumem.Device("host").free_bytes  # what waited for a stream goes back
    return not any(each() for each in ended)


@pytest.mark.parametrize("ran", [False, True])
@pytest.mark.parametrize("how", CYCLES)
def test_session_in_a_cycle_is_collected_with_what_it_holds(how, ran):
    engine = Engine(how)
    blocks, freed = engine.blocks, engine.freed
    held = [engine, engine.session, engine.session.allocator()]
    if engine.session.environment is not None:
        held.append(engine.session.environment)
    ended = [weakref.ref(each) for each in held]
    if ran:
        run_with_scratch(engine.session)
        engine.session.compute_stream.synchronize()
    del engine, held
    wait_until(lambda: has_ended(*ended))
    assert not blocks
    assert bool(freed) == (ran and how in CYCLES[:2])


@pytest.mark.parametrize("how", CYCLES)
def test_unfinished_run_of_a_session_that_is_collected_in_a_cycle_keeps_its_memory(arena, how):
    engine = Engine(how)
    blocks, freed = engine.blocks, engine.freed
    x = gpumem.zeros(4096, "u1", resource=arena)
    address = x.ptr
    engine.session.bind_input("x", x)
    ended = weakref.ref(engine.session)
    gate = run_with_scratch(engine.session, gate=True)
    del engine, x
    # Callables keep their objects until they have freed the block.
    assert has_ended(ended) == (how not in CYCLES[:2])
    assert not freed
    assert arena.allocate(4096).ptr != address
    gate.open()
    gpumem.Device("host").synchronize()
    wait_until(lambda: has_ended(ended))
    assert not blocks
    arena.shrink()
    assert arena.stats().reserved == 0


def test_environment_outlives_a_session_that_is_collected_in_a_cycle():
    environment = gpumem.Environment()
    arena = environment.register("host")
    session = gpumem.Session("host", environment=environment)
    session.me = session
    del session
    gc.collect()
    assert environment.references(arena) == 1
    environment.close()
    assert arena.closed


def test_sessions_that_are_alive_at_the_end_say_nothing():
    child.run_quietly("""
import sys
import gpumem
environment = gpumem.Environment()
environment.register("host")
sys.kept = gpumem.Session("host", environment=environment)
cycle = [gpumem.Session("host", environment=environment)]
cycle.append(cycle)
environment.session = cycle[0]
from session.test_dropped_sessions import CYCLES, Engine, run_with_scratch
kept = [Engine(how) for how in CYCLES]
for how in CYCLES:
    kept.append(run_with_scratch(Engine(how).session, gate=True))
    """)
