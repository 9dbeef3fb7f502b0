"""using_resource: which resource serves what names none, by thread, task, block and exception."""

from __future__ import annotations

import asyncio
import contextvars
import threading

import pytest
from helpers.threads import in_a_thread, in_threads

import gpumem


def serving(memory="host"):
    return gpumem.empty(4, "u1", memory=memory).buffer.resource


@pytest.fixture
def arenas(make_arena):
    return [make_arena() for _ in range(3)]


def test_innermost_using_resource_serves_its_memory(arenas):
    first, second, _ = arenas
    pinned = gpumem.Arena("host/host_accessible")
    default = serving()
    with gpumem.using_resource(first) as given:
        assert given is first
        assert serving() is first
        with gpumem.using_resource(pinned):
            assert serving() is first
            assert serving("host/host_accessible") is pinned
            assert serving(None) is pinned
            with gpumem.using_resource(second):
                assert serving() is second
                assert serving("host/host_accessible") is pinned
            assert serving(None) is pinned
        assert serving() is first
    assert serving() is default
    pinned.close()


def test_using_resource_ends_with_an_exception(arenas):
    default = serving()
    with (
        pytest.raises(KeyError),
        gpumem.using_resource(arenas[0]),
        gpumem.using_resource(arenas[1]),
    ):
        raise KeyError
    assert serving() is default
    with pytest.raises(TypeError, match="MemoryResource"), gpumem.using_resource("host"):
        raise AssertionError("the block was entered")
    assert serving() is default


def test_using_resource_stays_in_force_after_out_of_memory(make_arena):
    small = make_arena({"max_mem": 1 << 20})
    with gpumem.using_resource(small):
        with pytest.raises(gpumem.OutOfMemoryError):
            gpumem.empty(2 << 20, "u1", memory="host")
        assert serving() is small


def test_default_set_inside_using_resource_serves_after_it(arenas):
    first, second, _ = arenas
    with gpumem.using_resource(first):
        gpumem.set_default_resource("host", second)
        try:
            assert serving() is first
        finally:
            inside = gpumem.get_default_resource("host")
    try:
        assert inside is first
        assert serving() is second
    finally:
        gpumem.set_default_resource("host", None)
    assert serving() is not second


def test_a_resource_alone_serves_its_memory(arenas):
    default = serving()
    gpumem.set_default_resource(arenas[0])
    try:
        assert serving() is arenas[0]
    finally:
        gpumem.set_default_resource("host", default)
    with pytest.raises(TypeError, match="expected a memory, or a resource alone"):
        gpumem.set_default_resource(arenas[0], arenas[1])
    with pytest.raises(TypeError, match=r"set_default_resource\('host'\): resource is missing"):
        gpumem.set_default_resource("host")
    assert serving() is default


def test_using_resource_is_per_thread(arenas):
    default = serving()
    seen: dict[int, list] = {}
    inside = threading.Barrier(3)

    def work(number):
        seen[number] = [serving()]
        with gpumem.using_resource(arenas[number]):
            inside.wait(60)  # all of them are in their blocks now
            seen[number] += [serving() for _ in range(200)]
            inside.wait(60)
        seen[number].append(serving())

    with gpumem.using_resource(arenas[0]):
        in_threads(work, range(3))
        assert serving() is arenas[0]
    for number in range(3):
        assert seen[number] == [default, *[arenas[number]] * 200, default]


def test_using_resource_follows_a_copied_context(arenas):
    seen = []
    with gpumem.using_resource(arenas[0]):
        context = contextvars.copy_context()
    in_a_thread(lambda: context.run(lambda: seen.append(serving())))
    assert seen == [arenas[0]]
    assert serving() is not arenas[0]


def test_using_resource_is_per_task_and_inherited(arenas):
    first, second, third = arenas

    async def work(own, turns):
        seen = [serving()]
        with gpumem.using_resource(own):
            for _ in range(turns):
                await asyncio.sleep(0)
                seen.append(serving())
        seen.append(serving())
        return seen

    async def main():
        with gpumem.using_resource(first):
            tasks = [asyncio.create_task(work(own, 20)) for own in (second, third)]
            await asyncio.sleep(0)
            assert serving() is first
        outside = asyncio.create_task(work(third, 1))
        return [await task for task in (*tasks, outside)]

    default = serving()
    inner, other, outside = asyncio.run(main())
    assert inner == [first, *[second] * 20, first]
    assert other == [first, *[third] * 20, first]
    assert outside == [default, third, default]


def test_using_resource_of_a_cancelled_task_is_undone(arenas):
    async def main():
        async def work():
            with gpumem.using_resource(arenas[0]):
                await asyncio.sleep(3600)

        task = asyncio.create_task(work())
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        return serving()

    assert asyncio.run(main()) is serving()
