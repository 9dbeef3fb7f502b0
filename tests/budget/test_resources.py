"""Pools, external allocators, resources of users and adaptors that charge a budget."""

from __future__ import annotations

import ctypes
import functools
import gc

import numpy as np
import pytest
from helpers.driver import HostDriver
from helpers.resources import Plain

import gpumem
from gpumem import Budget

LIMIT = 10_000
COUNTS = ("reserved", "in_use")


def external(**more):
    libc = ctypes.CDLL(None)
    addresses = [ctypes.cast(f, ctypes.c_void_p).value for f in (libc.malloc, libc.free)]
    return gpumem.ExternalAllocator(*addresses, memory="host", **more)


def limited(budget, count="reserved"):
    return gpumem.adaptors.limit(gpumem.Arena("host"), budget)


RESOURCES = {
    "pool": lambda **more: gpumem.DriverPool("host", **more),
    "external": external,
    "user's": functools.partial(Plain, alignment=1),
    "limit": limited,
}


@pytest.fixture
def budget():
    root = Budget(1 << 40, name="root")
    made = Budget(LIMIT, parent=root, name="tenant")
    yield made
    gc.collect()
    assert (made.used, root.used) == (0, 0)


@pytest.fixture(params=RESOURCES)
def make(request):
    return RESOURCES[request.param]


@pytest.mark.parametrize("count", COUNTS)
def test_blocks_are_charged_until_they_are_freed(make, count, budget):
    resource = make(budget=budget, count=count)
    assert resource.budget is budget
    first, second = resource.allocate(1000), resource.allocate_persistent(500)
    assert budget.used == budget.parent.used == 1500
    assert budget.holders() == ((resource.name, 1500),)
    view = np.from_dlpack(first)
    first.close()
    assert budget.used == 1500
    del view
    second.close()
    resource.stats()
    assert budget.used == 0
    assert resource.allocate(0).nbytes == 0


@pytest.mark.parametrize("count", COUNTS)
def test_request_over_the_budget_is_refused_without_a_change(make, count, budget):
    resource = make(budget=budget, count=count)
    with resource.allocate(LIMIT - 1):
        before = resource.stats().num_allocs
        with pytest.raises(gpumem.errors.BudgetExceededError) as raised:
            resource.allocate(2)
        assert (raised.value.budget, raised.value.missing, raised.value.requested_nbytes) == (
            "tenant",
            1,
            2,
        )
        assert raised.value.device == "host:0"
        assert resource.stats().num_allocs == before
        assert budget.used == LIMIT - 1
        resource.allocate(1).close()


def test_callback_frees_memory_and_the_request_succeeds(make, budget):
    resource = make(budget=budget)
    cache = [resource.allocate(4000), resource.allocate(4000)]
    budget.on_pressure = lambda budget, nbytes: cache.pop().close()
    with resource.allocate(7000):
        assert len(cache) == 0
    assert budget.used == 0


def test_charge_is_released_when_the_allocation_fails(host, budget):
    resource = Plain(alignment=1, budget=budget)
    resource.max_nbytes = 0
    with pytest.raises(MemoryError):
        resource.allocate(100)
    nothing = gpumem.ExternalAllocator(lambda n: None, lambda p: None, memory="host", budget=budget)
    with pytest.raises(gpumem.OutOfMemoryError):
        nothing.allocate(100)
    pool = gpumem.DriverPool("host", budget=budget)
    host.fail("cuMemAllocFromPoolAsync", 1, 1)
    with pytest.raises(gpumem.errors.DriverError):
        pool.allocate(100)
    host.clear_faults()
    around = gpumem.adaptors.limit(resource, budget)
    with pytest.raises(MemoryError):
        around.allocate(100)
    assert budget.used == 0


def test_block_pending_free_is_reserved_and_not_in_use(budget, stream):
    for count in COUNTS:
        allocator = external(budget=budget, count=count)
        buffer = allocator.allocate(6000, stream)
        with HostDriver().block(stream):
            buffer.close()
            assert budget.used == (6000 if count == "reserved" else 0)
        with allocator.allocate(6000):  # waits for the stream rather than be refused
            assert budget.used == 6000
        allocator.close()
        assert budget.used == 0


def test_failed_free_stays_charged_until_it_succeeds(host, budget):
    pool = gpumem.DriverPool("host", budget=budget)
    buffer = pool.allocate(6000)
    host.fail("cuMemFreeAsync", 1, 1)
    buffer.close()
    host.clear_faults()
    assert budget.used == 6000
    with pool.allocate(6000):  # tries the free again
        assert budget.used == 6000
    pool.close()


def test_budget_around_a_resource_is_shared_with_another(budget):
    upstream = gpumem.Arena("host")
    left, right = (
        gpumem.adaptors.limit(upstream, budget),
        gpumem.adaptors.limit(upstream, budget, name="right"),
    )
    assert (left.limit, left.free) == (LIMIT, LIMIT)
    with left.allocate(6000), pytest.raises(gpumem.errors.BudgetExceededError) as raised:
        right.allocate(6000)
    assert raised.value.holders == (("host:0", 6000),)
    tracked = gpumem.adaptors.track(right)
    with tracked.allocate(LIMIT):
        assert (right.used, right.free, budget.free) == (LIMIT, 0, 0)


def test_from_config_passes_the_budget(budget):
    for config in (None, {"arena.use_cuda_mempool": "1"}):
        resource = gpumem.MemoryResource.from_config("host", config, budget=budget, count="in_use")
        with resource, resource.allocate(512):
            assert budget.used == 512


@pytest.mark.parametrize("name", ["pool", "external", "user's"])
def test_invalid_budget_arguments_are_refused(name):
    with pytest.raises(TypeError, match="budget"):
        RESOURCES[name](budget=5)
    with pytest.raises(gpumem.ConfigError, match="count"):
        RESOURCES[name](budget=Budget(5), count="all")
    with pytest.raises(gpumem.ConfigError, match="count"):
        RESOURCES[name](count="in_use")


def test_charge_of_a_dropped_resource_is_released_with_its_last_view(budget):
    for make in (gpumem.DriverPool, lambda where, **more: external(**more)):
        resource = make("host", budget=budget)
        view = np.from_dlpack(resource.allocate(1000))
        del resource
        gc.collect()
        assert budget.used == 1000
        del view
        assert budget.used == 0
        assert budget.holders() == ()
