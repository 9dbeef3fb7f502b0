"""CuPy's integration over a made-up CuPy; tests/gpu/test_cupy_on_gpu.py has the real one."""

import gc
import pickle
import sys

import pytest
from helpers import child
from helpers.driver import HostDriver
from helpers.single_block import BLOCK, next_address, single_block_arena
from integrations import fake_cupy

import gpumem
import gpumem.integrations.cupy as integration
from gpumem.errors import ConfigError, IntegrationError, MissingFrameworkError

MIB = 1 << 20


@pytest.fixture
def cuda(monkeypatch):
    """CuPy's ``cupy.cuda`` with the host as device 0."""
    modules = fake_cupy.make()
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr(integration, "_device_type", "host")
    integration._parts.cache_clear()
    yield modules["cupy.cuda"]
    integration._parts.cache_clear()
    assert integration._switch.current() is None, "a test left it enabled"


@pytest.fixture
def arena():
    arena = gpumem.Arena("host", {"max_mem": 64 * MIB})
    yield arena
    gc.collect()
    arena.check_invariants()
    arena.close()


def test_enabled_resource_serves_cupy_arrays(cuda, arena):
    integration.enable(arena, pinned=False)
    pointer = cuda.alloc(1000)
    assert pointer.mem._owner.resource is arena
    assert (pointer.ptr, pointer.mem.size, pointer.device_id) == (pointer.mem._owner.ptr, 1000, 0)
    integration.disable()
    assert cuda.current is fake_cupy.own_allocator
    assert arena.stats().requested_in_use == 1000
    del pointer
    assert arena.stats().in_use == 0


def test_empty_cupy_array_has_a_null_pointer(cuda, arena):
    with integration.using(arena, pinned=False):
        pointer = cuda.alloc(0)
    assert (pointer.ptr, pointer.mem.size) == (0, 0)


@pytest.mark.parametrize(("size", "error"), [(1.5, TypeError), (-1, ValueError)])
def test_size_that_is_none_is_refused_for_cupy(cuda, arena, size, error):
    with integration.using(arena, pinned=False), pytest.raises(error, match="nbytes"):
        cuda.alloc(size)


def test_enable_without_arguments_uses_the_default_resource(cuda):
    with gpumem.using_resource(gpumem.Arena("host")) as default, integration.using(pinned=False):
        pointer = cuda.alloc(1)
        assert pointer.mem._owner.resource is default
        del pointer


def test_recorded_stream_delays_reuse_of_an_arrays_block(cuda, make_arena, host):
    arena, pin = single_block_arena(make_arena)
    cuda.stream, side = gpumem.Stream("host"), gpumem.Stream("host")
    with integration.using(arena, pinned=False):
        pointer = cuda.alloc(BLOCK)
        address = pointer.ptr
        pointer.mem._owner.record_stream(side)
        with HostDriver().block(side):
            del pointer
            assert next_address(arena, cuda.stream) is None
        side.synchronize()
        assert next_address(arena, cuda.stream) == address
    pin.close()


def test_block_is_freed_on_the_current_stream_of_its_allocation(cuda):
    arena = gpumem.Arena("host", {"stream_reuse": "never"})
    first, second = gpumem.Stream("host"), gpumem.Stream("host")
    with integration.using(arena, pinned=False):
        cuda.stream = first
        pointer = cuda.alloc(MIB)
        assert pointer.mem._owner.stream.ptr == first.ptr
        address = pointer.ptr
        cuda.stream = second
        del pointer
        other = cuda.alloc(MIB)
        cuda.stream = first
        again = cuda.alloc(MIB)
    assert other.mem._owner.stream.ptr == second.ptr
    assert again.ptr == address


def test_cupy_stream_object_lives_as_long_as_its_memory(cuda, arena):
    import weakref

    class Named:
        def __init__(self, stream):
            self.ptr, self.stream = stream.ptr, stream

    with integration.using(arena, pinned=False):
        cuda.stream = Named(gpumem.Stream("host"))
        seen = weakref.ref(cuda.stream)
        pointer = cuda.alloc(100)
        cuda.stream = fake_cupy.NullStream()
        cuda.alloc(100)
        gc.collect()
        assert seen() is not None
        del pointer


def test_any_resource_can_serve_cupy(cuda, arena):
    with integration.using(gpumem.adaptors.limit(arena, MIB), pinned=False):
        cuda.stream = gpumem.Stream("host")
        pointer = cuda.alloc(100)
        assert pointer.mem._owner.stream.ptr == cuda.stream.ptr
        with pytest.raises(fake_cupy.OutOfMemoryError):
            cuda.alloc(2 * MIB)
        del pointer


def test_out_of_memory_is_cupys_and_gpumems_error(cuda, arena):
    with integration.using(arena, pinned=False), pytest.raises(gpumem.OutOfMemoryError) as caught:
        cuda.alloc(65 * MIB)
    error = caught.value
    assert isinstance(error, fake_cupy.OutOfMemoryError)
    assert isinstance(error, fake_cupy.CUDARuntimeError)
    assert (error.status, error.requested_nbytes, error._size) == (2, 65 * MIB, 65 * MIB)
    assert "out of memory" in str(error)
    again = pickle.loads(pickle.dumps(error))
    assert (str(again), again.status, again.requested_nbytes) == (str(error), 2, 65 * MIB)


def test_cyclic_garbage_is_collected_before_out_of_memory(cuda, arena):
    class Holder:
        pass

    with integration.using(arena, pinned=False):
        gc.disable()
        try:
            holder = Holder()
            holder.own, holder.memory = holder, cuda.alloc(60 * MIB)
            del holder
            assert cuda.alloc(60 * MIB).mem.size == 60 * MIB
        finally:
            gc.enable()


def test_cupys_using_allocator_takes_precedence_and_blocks_a_switch(cuda, arena):
    integration.enable(arena, pinned=False)
    cuda.local.allocator = fake_cupy.own_allocator
    assert cuda.alloc(1) == ("CuPy's own", 1)
    for call in (integration.disable, integration.using(pinned=False).__enter__):
        with pytest.raises(IntegrationError, match=r"inside cupy\.cuda\.using_allocator"):
            call()
    cuda.local.allocator = integration.allocator(arena)
    assert cuda.alloc(1).mem._owner.resource is arena
    cuda.local.allocator = None
    integration.disable()


def test_enable_and_disable_switch_pinned_memory_too(cuda, arena, monkeypatch):
    pinned = gpumem.Arena("host/host_accessible")
    integration.enable(arena, pinned=pinned)
    pointer = cuda.pinned(100)
    assert pointer.mem.buffer.resource is pinned
    assert (pointer.ptr, pointer.mem.size) == (pointer.mem.buffer.ptr, 100)
    with integration.using(arena, pinned=False):
        assert cuda.pinned is fake_cupy.own_pinned
    assert cuda.pinned(1).mem.buffer.resource is pinned
    integration.disable()
    assert cuda.pinned is fake_cupy.own_pinned
    del pointer
    pinned.close()


def test_pinned_memory_alone_leaves_the_allocator_of_arrays(cuda):
    pinned = gpumem.Arena("host/host_accessible")
    before = cuda.get_allocator()
    integration.enable_pinned(pinned)
    assert cuda.get_allocator() is before
    pointer = cuda.pinned(100)
    assert pointer.mem.buffer.resource is pinned
    integration.disable()
    assert cuda.get_allocator() is before
    assert cuda.pinned is fake_cupy.own_pinned
    del pointer
    pinned.close()


def test_users_pinned_allocator_stays_unless_requested(cuda, arena):
    cuda.pinned = mine = object()
    with integration.using(arena, pinned=False):
        assert cuda.pinned is mine
    assert cuda.pinned is mine


def test_invalid_arguments_change_nothing(cuda, arena, monkeypatch):
    with pytest.raises(ConfigError, match="pinned memory"):
        integration.enable(arena, pinned=arena)
    with pytest.raises(TypeError, match="'arena'"):
        integration.enable("arena")
    monkeypatch.setattr(integration, "_device_type", "cuda")
    with pytest.raises(ConfigError, match="host:0"):
        integration.using(arena)
    assert cuda.current is fake_cupy.own_allocator


def test_unsupported_cupy_is_named_with_the_reason(cuda, monkeypatch):
    sys.modules["cupy"].__version__ = "12.9"
    with pytest.raises(IntegrationError, match=r"CuPy 12\.9 was found.*13\.0"):
        integration.enable()
    sys.modules["cupy"].__version__ = "14.0"
    cuda.runtime.is_hip = True
    with pytest.raises(IntegrationError, match="ROCm"):
        integration.enable()
    monkeypatch.setitem(sys.modules, "cupy", None)
    with pytest.raises(MissingFrameworkError, match="cupy-cuda13x"):
        integration.enable()


FAKE = """
import sys
from integrations import fake_cupy
sys.modules.update(fake_cupy.make())
import gpumem, gpumem.integrations.cupy as integration
integration._device_type = "host"
cuda = sys.modules["cupy.cuda"]
arena = gpumem.Arena("host")
integration.enable(arena, pinned=gpumem.Arena("host/host_accessible"))
cuda.stream = gpumem.Stream("host")
held = [cuda.alloc(1000), cuda.pinned(1000)]
"""


@pytest.mark.parametrize(
    "end",
    [
        "",
        "del held, arena",
        "integration.disable()",
        "del held; integration.disable(); arena.close()",
        "sys.keep = held; del integration",
        "import atexit; atexit.register(lambda: cuda.alloc(10))",
        "import atexit; atexit.register(integration.disable)",
        "use = integration.using(arena); use.__enter__()",
        "del sys.modules['cupy'], cuda",
    ],
)
def test_exit_is_quiet(end):
    child.run_quietly(FAKE + end)
