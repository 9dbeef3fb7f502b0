"""Environment: allocators shared by memory, with references, settings and replacement."""

from __future__ import annotations

import contextlib
import ctypes
import warnings
import weakref

import pytest
from helpers import child
from helpers.resources import Plain
from helpers.threads import in_threads

import gpumem
from gpumem.interop import HostTimeline

MIB = 1 << 20


@pytest.fixture
def environment():
    with gpumem.Environment() as environment:
        yield environment


def test_each_kind_of_memory_has_its_own_allocator(environment):
    host = environment.register("host")
    pinned = environment.register("host/host_accessible")
    managed = environment.register("host/managed")
    assert len({id(each) for each in (host, pinned, managed)}) == 3
    for name, arena in [("host:0", host), ("host/host_accessible", pinned)]:
        assert environment.shared_allocator(name) is arena
        assert environment.shared_allocator(gpumem.MemoryInfo.parse(name)) is arena
    assert [str(memory) for memory in environment.memories()] == [
        "host:0",
        "host:0/host_accessible",
        "host:0/managed",
    ]


def test_allocator_is_found_regardless_of_alignment_and_name(environment):
    arena = environment.register(gpumem.MemoryInfo(gpumem.Device("host"), name="mine"))
    assert arena.name == "mine"
    other = gpumem.MemoryInfo(gpumem.Device("host"), alignment=4096, name="yours")
    assert environment.shared_allocator(other) is arena


def test_unregistered_memory_has_no_allocator(environment):
    assert environment.shared_allocator("host") is None
    with pytest.raises(gpumem.errors.NoAllocatorError, match="register one"):
        environment.acquire("host")
    with pytest.raises(LookupError):
        gpumem.empty(3, "f4", memory="host", environment=environment)


def test_tensors_are_allocated_from_the_environment(environment):
    arena = environment.register("host")
    tensor = gpumem.empty(3, "f4", memory="host", environment=environment)
    assert tensor.buffer.resource is arena


def test_registered_resource_is_not_closed():
    resource = Plain()
    with gpumem.Environment() as environment:
        assert environment.register("host", resource) is resource
        assert environment.shared_allocator("host") is resource
    assert not resource.closed
    resource.close()


def test_resource_of_another_memory_is_refused(environment):
    before = environment.register("host")
    with pytest.raises(gpumem.ConfigError, match="host_accessible"):
        environment.register("host", Plain("host/host_accessible"))
    assert environment.shared_allocator("host") is before


def test_references_are_counted_and_the_last_one_closes(environment):
    arena = environment.register("host")
    assert environment.acquire("host") is arena
    assert environment.references(arena) == environment.references("host") == 2
    environment.release("host")
    assert environment.shared_allocator("host") is arena
    assert not arena.closed
    environment.release(arena)
    assert environment.shared_allocator("host") is None
    assert arena.closed
    for again in (arena, "host"):
        with pytest.raises(gpumem.errors.NoAllocatorError, match="not registered"):
            environment.release(again)


def test_allocator_with_live_buffers_ends_with_the_last_of_them(environment):
    arena = environment.register("host")
    buffer = arena.allocate(8)
    environment.release("host")
    memoryview(buffer)[:] = b"12345678"
    buffer.close()
    arena.close()


def test_registering_the_registered_resource_again_changes_no_references(environment):
    mine = gpumem.Arena("host")
    environment.register("host", mine)
    with gpumem.Session("host", environment=environment):
        assert environment.register("host", mine) is mine
        assert environment.references(mine) == 2
        with pytest.raises(gpumem.errors.InUseError):
            environment.close()
    assert environment.shared_allocator("host") is mine
    assert environment.references(mine) == 1


def test_allocator_of_the_environment_that_is_registered_again_stays_open(environment):
    made = environment.register("host")
    assert environment.register("host", made) is made
    assert not made.closed
    environment.release(made)
    assert made.closed


def test_replaced_allocator_that_is_registered_again_has_its_references_together(environment):
    mine = gpumem.Arena("host")
    environment.register("host", mine)
    with gpumem.Session("host", environment=environment):
        environment.register("host")
        environment.register("host", mine)
        assert environment.references(mine) == 2
    assert environment.shared_allocator("host") is mine


@pytest.mark.parametrize("held", [False, True])
@pytest.mark.parametrize("number", [0, 1])
def test_allocator_of_the_environment_beneath_a_registered_adaptor_stays_open(
    environment, held, number
):
    made = environment.register("host")
    if held:
        environment.acquire("host")
    around = [made, gpumem.Arena("host")]
    adaptor = gpumem.adaptors.fallback(around[number], around[1 - number])
    environment.register("host", gpumem.adaptors.limit(adaptor, MIB))
    if held:
        environment.release(made)
    assert not made.closed
    environment.shared_allocator("host").allocate(1000).close()


@pytest.mark.parametrize("prefix", ["EP", "nonsense", None, 3])
def test_settings_under_an_unknown_prefix_are_refused(prefix):
    with (
        gpumem.Environment({"ep.host.arena.max_mem": 2000}) as environment,
        pytest.raises(gpumem.ConfigError, match="prefix"),
    ):
        environment.settings_for("host", prefix)


def test_closed_resource_is_not_registered(environment):
    before = environment.register("host")
    closed = gpumem.Arena("host")
    closed.close()
    with pytest.raises(gpumem.errors.ClosedError, match="open resource"):
        environment.register("host", closed)
    assert environment.shared_allocator("host") is before


def test_replaced_allocator_stays_with_its_holders(environment):
    first = environment.register("host")
    environment.acquire("host")
    second = environment.register("host", {"max_mem": 1 << 20})
    assert environment.shared_allocator("host") is second
    assert second.config.max_mem == 1 << 20
    assert not first.closed
    assert environment.references(first) == 1
    environment.release(first)
    assert first.closed
    assert environment.references("host") == 1


def test_replaced_allocator_without_holders_is_closed(environment):
    first = environment.register("host")
    environment.register("host")
    assert first.closed


ENDS = {
    "register": lambda environment, arena: environment.register(arena.memory),
    "release": lambda environment, arena: environment.release(arena),
    "close": lambda environment, arena: environment.close(),
}


@pytest.mark.parametrize("memory", ["host", "host/host_accessible", "host/managed"])
@pytest.mark.parametrize("end", ENDS)
@pytest.mark.parametrize("debug", ["0", "1"])
def test_no_call_waits_for_what_this_thread_has_yet_to_signal(
    host, monkeypatch, end, memory, debug
):
    monkeypatch.setenv("GPUMEM_DEBUG_HEAP", debug)
    stream, value = gpumem.Stream("host"), HostTimeline.create()
    environment = gpumem.Environment()
    arena = environment.register(memory)
    buffer = arena.allocate(MIB, stream)
    host.reset_counts()
    value.enqueue_wait(stream, 1)
    buffer.close()
    ENDS[end](environment, arena)
    assert environment.closed == (end == "close")
    assert environment.shared_allocator(memory) is not arena
    # It ends as a dropped one does.
    ended = weakref.ref(arena)
    del arena, buffer
    assert ended() is None
    assert frees(host) == 0
    value.signal(1)
    stream.synchronize()
    assert gpumem.Device("host").free_bytes  # releases what is retired
    assert frees(host) > 0
    environment.close()


def frees(host):
    names = ("cuMemRelease", "cuMemFree", "cuMemFreeAsync", "cuMemFreeHost", "cuMemHostUnregister")
    return sum(host.call_count(name) for name in names)


def test_environment_closes_an_arena_with_finished_work_at_its_end(environment, host, stream):
    for memory in ("host", "host/host_accessible", "host/managed"):
        arena = environment.register(memory)
        with arena.tag("more") if memory == "host" else contextlib.nullcontext():
            buffer = arena.allocate(MIB, stream)
        gpumem.full(MIB, 1, "u1", resource=arena, stream=stream)
        buffer.close()
        stream.synchronize()
        environment.release(arena)
        assert arena.closed
        assert arena.stats().reserved == 0


def test_close_ends_every_allocator_also_where_one_reports_an_error(monkeypatch):
    monkeypatch.setenv("GPUMEM_DEBUG_HEAP", "1")
    environment = gpumem.Environment()
    arenas = [environment.register(memory) for memory in ("host", "host/managed")]
    buffer = arenas[0].allocate(100)
    memoryview(buffer)  # the device's memory is the CPU's
    ctypes.memset(buffer.ptr + 100, 0, 1)
    buffer.close()
    with pytest.raises(gpumem.errors.HeapCorruptionError):
        environment.close()
    assert all(arena.closed for arena in arenas)


@pytest.mark.parametrize(
    ("config", "error"),
    [
        ({"max_mem": "-1"}, gpumem.ConfigError),
        ({"nonsense": 1}, gpumem.ConfigError),
        ({"backing": "virtual", "max_mem": "1x"}, gpumem.ConfigError),
        ({"cuda_mempool_release_threshold": 5}, gpumem.ConfigError),
        (3, TypeError),
    ],
)
def test_failed_replacement_changes_nothing(environment, config, error):
    before = environment.register("host")
    with pytest.raises(error):
        environment.register("host", config)
    assert environment.shared_allocator("host") is before
    assert not before.closed
    assert environment.references("host") == 1


def test_pool_option_registers_a_driver_pool():
    with gpumem.Environment({"arena.use_cuda_mempool": "1"}) as environment:
        assert isinstance(environment.register("host"), gpumem.DriverPool)


# ---- settings ------------------------------------------------------------------------------------


def test_named_options_override_bare_ones():
    keys = {
        "arena.max_mem": "1000000",
        "ep_factory.HOST.arena.max_mem": "2000000",
        "ep_factory.host:0/managed.arena.extend_strategy": "1",
    }
    with gpumem.Environment(keys) as environment:
        host = environment.register("host").config
        managed = environment.register("host/managed").config
        pinned = environment.register("host/host_accessible", {"max_mem": 3000000}).config
    assert (host.max_mem, managed.max_mem, pinned.max_mem) == (2000000, 1000000, 3000000)
    assert managed.extend_strategy == "same_as_requested"
    assert host.extend_strategy == "next_power_of_two"


@pytest.mark.parametrize("name", ["host:00", "HOST:0000", "host:0/host", "Host"])
def test_a_device_has_one_name_however_it_is_written(name):
    key = f"{name}.arena.max_mem"
    with gpumem.Environment({f"ep_factory.{key}": MIB, f"ep.{key}": 2 * MIB}) as environment:
        assert environment.register("host").config.max_mem == MIB
        with gpumem.Session("host", {"private_arena": True}, environment) as session:
            assert session.allocator().config.max_mem == 2 * MIB
    options = {f"ep.{key}": MIB, f"ep.{name}.enable_cuda_graph": True}
    with gpumem.Session("host", options) as session:
        assert session.allocator().config.max_mem == MIB
        assert session.options.enable_cuda_graph


def test_memory_name_selects_its_options():
    with gpumem.Environment({"ep_factory.Weights.arena.max_mem": "1048576"}) as environment:
        info = gpumem.MemoryInfo(gpumem.Device("host"), name="weights")
        assert environment.register(info).config.max_mem == 1048576


@pytest.mark.parametrize(
    "keys",
    [
        {"ep_factory.host.arena.max_mem": "1x"},
        {"ep_factory.host.arena.nonsense": "1"},
        {"ep_factory.host.arena.max_mem": "1", "ep_factory.HOST.max_mem": "2"},
        {"nonsense": "1"},
        {3: "1"},
    ],
)
def test_invalid_options_are_refused_at_once(keys):
    with pytest.raises(gpumem.ConfigError):
        gpumem.Environment(keys)


def test_aliases_of_one_option_must_agree():
    keys = {"ep_factory.host.arena.max_mem": "1000", "ep_factory.host:0.arena.max_mem": "2000"}
    environment = gpumem.Environment(keys)
    with pytest.raises(gpumem.ConfigError, match="twice"):
        environment.register("host")
    assert environment.shared_allocator("host") is None


def test_keys_with_the_other_prefix_give_a_warning():
    with gpumem.Environment({"ep.host.arena.max_mem": "1000000"}) as environment:
        with pytest.warns(gpumem.errors.ConfigWarning, match=r"ep\.host .* takes ep_factory\.host"):
            arena = environment.register("host")
        assert arena.config.max_mem == 0
        with pytest.warns(gpumem.errors.ConfigWarning):
            environment.register("host", {"ep.host.arena.max_mem": "7"})


@pytest.mark.filterwarnings("error")
def test_keys_with_both_prefixes_give_no_warning():
    keys = {
        "ep.host.arena.max_mem": "1000000",
        "ep_factory.host.arena.max_mem": "2000000",
        "ep.cuda.arena.max_mem": "3000000",
    }
    with gpumem.Environment(keys) as environment:
        assert environment.register("host").config.max_mem == 2000000


@pytest.mark.filterwarnings("error")
def test_keys_of_other_memory_and_of_named_memory_give_no_warning():
    keys = {
        "ep_factory.weights.arena.max_mem": "1000000",
        "ep_factory.cuda.arena.max_mem": "2000000",
        "ep_factory.HOST:7/managed.arena.max_mem": "3000000",
    }
    with gpumem.Environment(keys) as environment:
        environment.register(gpumem.MemoryInfo(gpumem.Device("host"), name="Weights"))
        environment.register("host")


@pytest.mark.parametrize("name", ["gpu", "CUDAExecutionProvider", "hosts", "cuda:x"])
def test_keys_under_a_name_that_no_memory_has_give_a_warning(name):
    environment = gpumem.Environment({f"ep_factory.{name}.arena.max_mem": "1048576"})
    told = rf"ep_factory\.{name.lower()} .*host:0 takes host, host:0"
    with pytest.warns(gpumem.errors.ConfigWarning, match=told) as given:
        environment.register("host")
    assert given[0].filename == __file__
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # once
        environment.register("host")
        environment.close()


def test_keys_under_an_unknown_name_beside_known_ones_give_a_warning_at_the_end():
    keys = {"ep_factory.host.arena.max_mem": "1048576", "ep_factory.gpu.arena.max_mem": "1048576"}
    environment = gpumem.Environment(keys)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        environment.register("host")  # memory of that name may follow
    with pytest.warns(gpumem.errors.ConfigWarning, match=r"ep_factory\.gpu ") as given:
        environment.close()
    assert given[0].filename == __file__
    assert environment.closed


def test_keys_under_an_unknown_name_of_a_dropped_environment_give_a_warning():
    keys = {"ep_factory.host.arena.max_mem": "1048576", "ep_factory.gpu.arena.max_mem": "1048576"}
    environment = gpumem.Environment(keys)
    with pytest.warns(gpumem.errors.ConfigWarning, match=r"ep_factory\.gpu "):
        del environment
    done = child.run(f"import gpumem; environment = gpumem.Environment({keys})")
    assert done.returncode == 0
    assert "ConfigWarning: keys under ep_factory.gpu " in done.stderr
    with pytest.raises(gpumem.ConfigError):
        gpumem.Environment({"nonsense": "1"})  # the one that was not made tells nothing


def test_keys_of_the_shared_arena_give_no_warning_for_a_private_one():
    keys = {"ep_factory.host.arena.max_mem": "1048576"}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with gpumem.Environment(keys) as environment:
            environment.register("host")
            gpumem.Session("host", {"private_arena": True}, environment).close()
        with gpumem.Environment(keys) as environment:
            options = {"private_arena": True, "arena.max_mem": "2097152"}
            gpumem.Session("host", options, environment).close()
    with (
        gpumem.Environment(keys) as environment,
        pytest.warns(gpumem.errors.ConfigWarning, match=r"takes ep\.host"),
    ):
        gpumem.Session("host", {"private_arena": True}, environment).close()


def test_one_mapping_registers_the_memory_of_several_devices():
    child.run_quietly("""
import gpumem
gpumem.device.set_host_device_count(3)
keys = {
    "ep_factory.host:0.arena.max_mem": "1048576",
    "ep_factory.host:1.arena.max_mem": "2097152",
    "ep_factory.host:1/managed.arena.max_mem": "3145728",
    "ep_factory.cuda.arena.max_mem": "4194304",
    "arena.oom_wait_ms": "0",
}
with gpumem.Environment() as environment:
    for memory, limit in {"host:0": 1, "host:1": 2, "host:1/managed": 3, "host:2": 0}.items():
        arena = environment.register(memory, keys)
        assert (arena.config.max_mem, arena.config.oom_wait_ms) == (limit << 20, 0), memory
""")


def test_options_under_a_name_of_no_memory_are_refused_for_one_allocator(environment):
    for key in ("ep_factory.webgpu.arena.max_mem", "ep_factory.cuda:0/none.arena.max_mem"):
        with pytest.raises(gpumem.ConfigError, match="not for this memory"):
            environment.register("host", {key: "1"})


def test_options_of_another_memory_are_checked(environment):
    with pytest.raises(gpumem.ConfigError, match=r"ep_factory\.cuda\.arena\.max_mem"):
        environment.register("host", {"ep_factory.cuda.arena.max_mem": "much"})


# ---- life ----------------------------------------------------------------------------------------


def test_closed_environment_refuses_registration():
    environment = gpumem.Environment()
    arena = environment.register("host")
    environment.close()
    environment.close()
    assert environment.closed
    assert arena.closed
    with pytest.raises(gpumem.errors.ClosedError):
        environment.register("host")
    with pytest.raises(gpumem.errors.ClosedError):
        environment.register("host", Plain())


def test_close_with_allocators_held_by_others_is_refused(environment):
    environment.register("host")
    environment.acquire("host")
    with pytest.raises(gpumem.errors.InUseError):
        environment.close()
    assert not environment.closed
    environment.release("host")


def test_references_are_exact_under_threads(environment):
    arena = environment.register("host")

    def work():
        for _ in range(300):
            assert environment.acquire("host") is arena
            environment.release(arena)

    in_threads(work, 4)
    assert environment.references("host") == 1


def test_concurrent_replacements_leave_one_allocator(environment):
    made = []

    def work():
        for _ in range(10):
            made.append(environment.register("host"))

    in_threads(work, 4)
    assert sum(not arena.closed for arena in made) == 1


def test_devices_of_one_type_have_separate_allocators():
    child.run_quietly("""
        import gpumem
        gpumem.device.set_host_device_count(2)
        with gpumem.Environment({"ep_factory.host.arena.max_mem": "1048576"}) as environment:
            first, second = environment.register("host:0"), environment.register("host:1")
            assert first is not second
            assert first.config.max_mem == second.config.max_mem == 1048576
            assert environment.shared_allocator("host:1") is second
            with first.allocate(1000):
                assert (first.stats().num_allocs, second.stats().num_allocs) == (1, 0)
            environment.release("host:0")
            assert first.closed and not second.closed
            assert environment.shared_allocator("host:0") is None
    """)


def test_forked_child_finds_the_lock_free_and_arenas_closed():
    child.run_quietly("""
        import os, signal, threading, warnings
        import gpumem
        warnings.simplefilter("ignore", DeprecationWarning)     # a fork beside threads is the point
        environment = gpumem.Environment()
        environment.register("host")
        session = gpumem.Session("host", environment=environment)
        held, go_on = threading.Event(), threading.Event()

        def hold():
            with environment._lock, session._lock:
                held.set()
                go_on.wait(60)

        thread = threading.Thread(target=hold)
        thread.start()
        held.wait(60)
        if os.fork() == 0:
            signal.alarm(120)         # where it finds a lock taken
            for use in (
                lambda: environment.acquire("host").allocate(8),
                lambda: session.run(lambda ctx: None),
            ):
                try:
                    use()
                except gpumem.errors.ClosedError:
                    pass
                else:
                    raise AssertionError
            with environment.register("host").allocate(8):
                pass
            session.close()
            with gpumem.Environment() as own, own.register("host").allocate(8):
                pass
            os._exit(0)
        assert os.waitstatus_to_exitcode(os.wait()[1]) == 0
        go_on.set()
        thread.join()
        with environment.acquire("host").allocate(8):
            pass
        session.close()
    """)
