"""Many threads, several resources, one tree: no limit is passed, nothing is left behind."""

from __future__ import annotations

import random
import threading

from helpers import child
from helpers.threads import in_threads

import gpumem
from gpumem import Budget

MIB = 1 << 20
THREADS = 16


def run_all(work):
    """Run work(number) on THREADS threads; what one raises is raised here."""
    errors = []

    def run(number):
        try:
            work(number)
        except BaseException as error:  # told below
            errors.append(error)

    in_threads(run, range(THREADS))
    if errors:
        raise errors[0]


def test_concurrent_reservations_never_exceed_a_limit(rng):
    # A mark of our own: bytes are counted after they are granted, and before they are given back.
    root = Budget(1000, name="root")
    tenants = [Budget(400, parent=root) for _ in range(4)]
    lock = threading.Lock()
    now = {budget: 0 for budget in (root, *tenants)}
    highest = dict(now)
    refused = [0]
    seeds = [rng.randrange(1 << 32) for _ in range(THREADS)]

    def count(tenant, change):
        with lock:
            for budget in (root, tenant):
                now[budget] += change
                highest[budget] = max(highest[budget], now[budget])

    def work(number):
        random_ = random.Random(seeds[number])
        held = []
        for _ in range(3000):
            if held and random_.random() < 0.5:
                tenant, reservation = held.pop(random_.randrange(len(held)))
                count(tenant, -reservation.nbytes)
                reservation.release()
                continue
            tenant = random_.choice(tenants)
            try:
                reservation = tenant.reserve(random_.randrange(1, 150))
            except gpumem.errors.BudgetExceededError:
                refused[0] += 1
                continue
            count(tenant, reservation.nbytes)
            reservation.commit()
            held.append((tenant, reservation))
        for tenant, reservation in held:
            count(tenant, -reservation.nbytes)
            reservation.release()

    run_all(work)
    assert refused[0] > 100
    assert highest[root] <= 1000
    assert all(highest[tenant] <= 400 for tenant in tenants)
    assert all(budget.used == budget.pending == 0 for budget in now)
    assert highest[root] <= root.peak <= 1000


def test_concurrent_arenas_never_exceed_any_budget(rng):
    root = Budget(96 * MIB, name="root")
    tenants = [Budget(64 * MIB, parent=root, name=f"tenant {i}") for i in range(2)]
    arenas = [
        gpumem.Arena("host", {"backing": backing, "oom_wait_ms": 0}, budget=tenant, count=count)
        for tenant in tenants
        for backing in ("virtual", "regions")
        for count in ("reserved", "in_use")
    ]
    held = arenas[::2]  # those that charge what they hold
    refused = [0]
    seeds = [rng.randrange(1 << 32) for _ in range(THREADS)]
    # Until all have ended: they are more than the limits even if each runs after the other.
    kept = [[] for _ in range(THREADS)]

    def work(number):
        random_ = random.Random(seeds[number])
        live = kept[number]
        for step in range(150):
            if live and random_.random() < 0.45:
                live.pop(random_.randrange(len(live))).close()
            elif step % 40 == 39:
                random_.choice(arenas).shrink()
            else:
                arena = random_.choice(held if number % 2 else arenas)
                try:
                    live.append(arena.allocate(random_.choice((100, 5000, MIB, 3 * MIB, 7 * MIB))))
                except gpumem.errors.BudgetExceededError:
                    refused[0] += 1
                    if live:
                        live.pop().close()

    run_all(work)
    kept.clear()
    assert refused[0] > 10
    assert root.peak <= 96 * MIB
    assert all(tenant.peak <= 64 * MIB for tenant in tenants)
    for arena in arenas:
        arena.check_invariants()
        stats = arena.stats()
        assert stats.in_use == 0
    assert root.used == sum(arena.stats().reserved for arena in held)
    for arena in arenas:
        arena.close()
    assert root.used == 0


def test_device_memory_never_exceeds_the_charges(host, rng):
    # All of it is charged here, so the device's own count, looked at by a thread of its own, never
    # passes the limit. It counts units of 2 MiB, as drivers do, so all sizes are multiples of that.
    gpumem.Device("host").free_bytes  # noqa: B018 - what others dropped goes back now
    before = host.used(0)
    budget = Budget(64 * MIB, name="root")
    configs = ({"backing": "virtual"}, {"extend_strategy": "same_as_requested"})
    arenas = [
        gpumem.Arena("host", {**config, "oom_wait_ms": 0}, budget=budget) for config in configs * 2
    ]
    ended = threading.Event()
    highest = [0]
    seeds = [rng.randrange(1 << 32) for _ in range(THREADS)]

    def watch():
        while True:
            last = ended.wait(0.0002)
            highest[0] = max(highest[0], host.used(0) - before)
            if last:  # what the arenas hold in the end is seen for certain
                return

    def work(number):
        random_ = random.Random(seeds[number])
        live = []
        for _ in range(120):
            if live and random_.random() < 0.4:
                live.pop(random_.randrange(len(live))).close()
                continue
            try:
                live.append(
                    random_.choice(arenas).allocate(random_.choice((2 * MIB, 4 * MIB, 10 * MIB)))
                )
            except gpumem.errors.BudgetExceededError:
                live.clear()

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        run_all(work)
    finally:
        ended.set()
        watcher.join()
    assert 32 * MIB < highest[0] <= 64 * MIB
    assert budget.peak <= 64 * MIB
    for arena in arenas:
        arena.close()
    assert budget.used == 0


def test_pressure_callbacks_under_threads_lose_no_charge(rng):
    budget = Budget(64 * MIB)
    arena = gpumem.Arena("host", {"backing": "regions", "oom_wait_ms": 0}, budget=budget)
    cache: list = []
    seeds = [rng.randrange(1 << 32) for _ in range(THREADS)]

    def on_pressure(budget, nbytes):
        if cache:
            cache.pop().close()
        if nbytes % 3 == 0:
            arena.shrink()

    budget.on_pressure = on_pressure

    def work(number):
        random_ = random.Random(seeds[number])
        for _ in range(60):
            try:
                buffer = arena.allocate(random_.choice((MIB, 2 * MIB, 5 * MIB)))
            except gpumem.errors.BudgetExceededError:
                continue
            if random_.random() < 0.7:
                cache.append(buffer)

    run_all(work)
    cache.clear()
    arena.check_invariants()
    arena.shrink()
    assert budget.used == arena.stats().reserved
    arena.close()
    assert budget.used == 0


def test_refusal_that_room_came_too_late_for_names_the_tightest_level():
    """One thread is held in a call of the driver, in a vain search for idle memory."""
    child.run_quietly("""
import gpumem
from gpumem._testing import host_device
from helpers.driver import HostDriver
from helpers.held_call import held_call

MIB, NOT_READY = 1 << 20, 600
process = gpumem.Budget(16 * MIB, name="process")
tenant = gpumem.Budget(None, parent=process, name="tenant")
arena, stream = gpumem.Arena("host", budget=process, name="arena"), gpumem.Stream("host")
taken = process.reserve(8 * MIB)
with HostDriver().block(stream):
    arena.allocate(4 * MIB, stream).close()
    host_device.fail("cuEventQuery", 1, NOT_READY, 1000)    # the held call records no event
    with held_call("cuEventRecord", meanwhile=taken.cancel):
        try:
            tenant.reserve(8 * MIB)
        except gpumem.errors.BudgetExceededError as error:
            told = error.budget, error.limit, error.missing, error.holders
assert told == ("process", 16 * MIB, 8 * MIB, (("arena", 4 * MIB),)), told
tenant.reserve(8 * MIB).cancel()
__import__("os")._exit(0)
""")
