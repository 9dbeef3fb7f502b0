"""Tags, labels and default resources belong to Python's context, and never stay open."""

from __future__ import annotations

import asyncio
import contextvars
import ctypes
import gc
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager

import pytest
from helpers import shared_object
from helpers.interrupting import interrupt_again
from helpers.refused_memory import refused_allocations
from helpers.threads import in_a_thread
from helpers.torch_caller import Caller

import gpumem
from gpumem import observe
from gpumem._testing import torch_hooks
from gpumem.errors import GpumemError

NAMES = ("outer", "inner", "other")


class Tags:
    """`Arena.tag`: the tag of a new block."""

    def __init__(self):
        self.arena = gpumem.Arena("host")

    def block(self, name):
        return self.arena.tag(name)

    def now(self):
        with self.arena.allocate(100) as buffer:
            (found,) = (each.tag for each in self.arena.blocks() if each.address == buffer.ptr)
        return None if found == "default" else found


class Labels(Tags):
    """`observe.tag`: the label of a recorded event."""

    def block(self, name):
        return observe.tag(name)

    def now(self):
        with observe.record(self.arena, capacity=4) as recording:
            self.arena.allocate(100).close()
        return next(event.tag for event in recording.events() if event.action == "alloc")


class Resources:
    """`using_resource`: the name of the default resource."""

    def __init__(self):
        self.arenas = {name: gpumem.Arena("host", name=name) for name in NAMES}

    def block(self, name):
        return gpumem.using_resource(self.arenas[name])

    def now(self):
        name = gpumem.empty(1, "uint8", memory="host").buffer.resource.name
        return name if name in NAMES else None


@pytest.fixture(params=[Tags, Labels, Resources])
def kind(request):
    kind = request.param()
    yield kind
    assert kind.now() is None


def test_tasks_that_take_turns_have_their_own_blocks(kind):
    async def work(name):
        with kind.block(name):
            for _ in range(5):
                assert kind.now() == name
                await asyncio.sleep(0)
        return kind.now()

    async def both():
        with kind.block("outer"):
            return await asyncio.gather(work("inner"), work("other"))

    assert asyncio.run(both()) == ["outer", "outer"]


def test_task_keeps_the_block_that_was_open_where_it_was_made(kind):
    async def child():
        await asyncio.sleep(0)
        return kind.now()

    async def parent():
        with kind.block("outer"):
            task = asyncio.create_task(child())
            await asyncio.sleep(0)
        assert kind.now() is None
        return await task

    assert asyncio.run(parent()) == "outer"


def test_threads_begin_without_unless_the_context_is_copied(kind):
    async def in_thread():
        return await asyncio.to_thread(kind.now)

    with ThreadPoolExecutor(1) as pool, kind.block("outer"):
        assert in_a_thread(kind.now) is None
        assert pool.submit(kind.now).result() is None
        assert pool.submit(contextvars.copy_context().run, kind.now).result() == "outer"
        assert pool.submit(kind.now).result() is None
        assert asyncio.run(in_thread()) == "outer"


def test_generator_leaves_its_block_open_in_its_caller(kind):
    def generate():
        with kind.block("inner"):
            yield

    with kind.block("outer"):
        generator = generate()
        next(generator)
        assert kind.now() == "inner"
        generator.close()
        assert kind.now() == "outer"


def test_blocks_are_left_in_any_order(kind):
    blocks = [kind.block(name) for name in NAMES]
    for block in blocks:
        block.__enter__()
    for left, now in ((1, "other"), (2, "outer"), (0, None)):
        blocks[left].__exit__(None, None, None)
        assert kind.now() == now


def test_block_is_left_where_it_was_entered(kind):
    block, other = kind.block("outer"), contextvars.Context()
    with pytest.raises(GpumemError, match="not entered"):
        block.__exit__(None, None, None)
    other.run(block.__enter__)
    with pytest.raises(GpumemError, match="in another context, which keeps it"):
        block.__exit__(None, None, None)
    assert (kind.now(), other.run(kind.now)) == (None, "outer")
    other.run(block.__exit__, None, None, None)
    assert other.run(kind.now) is None
    with pytest.raises(GpumemError, match="was entered before"):
        block.__enter__()


def test_dropped_block_is_over_in_every_context(kind):
    block, other = kind.block("outer"), contextvars.Context()
    other.run(block.__enter__)
    copy = other.copy()
    assert copy.run(kind.now) == "outer"
    del block
    gc.collect()
    assert (other.run(kind.now), copy.run(kind.now)) == (None, None)


def test_decorator_opens_a_block_for_each_call(kind):
    @kind.block("outer")
    def call(depth):
        """A docstring."""
        return kind.now() if depth == 0 else call(depth - 1)

    assert (call(0), call(3), kind.now(), call.__name__) == ("outer", "outer", None, "call")


def test_context_that_lives_on_keeps_the_arena_of_its_tag():
    arena = gpumem.Arena("host")
    with arena.tag("weights", asleep="keep"):
        context = contextvars.copy_context()
    kept = context.run(arena.allocate, 1000)
    del arena
    gc.collect()
    assert kept.resource.name.endswith("tag weights")
    del context, kept


# ---- allocations without the interpreter lock ----------------------------------------------------


@pytest.fixture
def caller():
    arena = gpumem.Arena("host")
    torch_hooks.serve(0, arena)
    caller = Caller()
    caller.arena = arena
    yield caller
    torch_hooks.serve(0, gpumem.Arena("host"))


def tag_of(caller, address):
    (found,) = (each.tag for each in caller.arena.blocks() if each.address == address)
    caller.free(address)
    return found


@pytest.mark.parametrize("recorded", [False, True])
def test_library_allocates_under_the_tag_of_the_task_that_calls_it(caller, recorded):
    async def work(name):
        with caller.arena.tag(name):
            for _ in range(5):
                assert tag_of(caller, caller.alloc(1000)) == name
                await asyncio.sleep(0)
        assert tag_of(caller, caller.alloc(1000)) == "default"

    async def all_three():
        await asyncio.gather(*map(work, NAMES))

    with observe.record(caller.arena) if recorded else ExitStack() as recording:
        asyncio.run(all_three())
    if recorded:
        allocs = [event.tag for event in recording.events() if event.action == "alloc"]
        assert sorted(map(str, allocs)) == sorted([*NAMES * 5, *["None"] * 3])


ON_A_THREAD = """
#include <pthread.h>
#include <stddef.h>
typedef struct { int (*allocate)(void *, size_t, void *, void **); void *hook, *address; } Call;
static void *run(void *given) {
    Call *call = given;
    call->allocate(call->hook, 1000, NULL, &call->address);
    return NULL;
}
void *allocate_on_a_thread(void *allocate, void *hook) {
    Call call = {allocate, hook, NULL};
    pthread_t thread;
    if (pthread_create(&thread, NULL, run, &call) == 0) pthread_join(thread, NULL);
    return call.address;
}
"""


def test_thread_that_python_does_not_know_allocates_without_a_tag(caller, tmp_path):
    library = ctypes.CDLL(shared_object.build(tmp_path, ON_A_THREAD, "-pthread"))
    allocate = library.allocate_on_a_thread
    allocate.restype = ctypes.c_void_p
    with caller.arena.tag("outer"):
        address = allocate(*map(ctypes.c_void_p, (caller.address_of("allocate"), caller.hook(0))))
        assert tag_of(caller, address) == "default"
        assert tag_of(caller, caller.alloc(1000)) == "outer"


# ---- interrupts and failures ---------------------------------------------------------------------


@contextmanager
def own_manager(block):
    with block:
        yield


def plain(block):
    with block:
        sum(range(5))


def stacked(block):
    with ExitStack() as stack:
        stack.enter_context(block)
        sum(range(5))


def managed(block):
    with own_manager(block):
        sum(range(5))


@pytest.mark.parametrize("use", [plain, stacked, managed])
def test_interrupt_leaves_no_block_open(kind, use):
    interrupt_again(lambda: use(kind.block("outer")), 300, 130e-6, seed=3)
    gc.collect()
    assert kind.now() is None


def test_refused_host_memory_leaves_no_block_open(kind):
    # Not in an ExitStack: Python 3.11 leaks the arguments of a call that it has no frame for.
    def action():
        plain(kind.block("outer"))

    action()
    number = 0
    for number in refused_allocations(action):
        assert kind.now() is None, number
    assert number > 5
