"""Numba's plugin as far as it goes without a GPU: Numba's own classes over host memory."""

import gc
import sys
import types

import pytest
from helpers import child

import gpumem
import gpumem.integrations.numba as integration
from gpumem._testing.integrations import Resources
from gpumem.errors import ConfigError, IntegrationError, MissingFrameworkError

pytest.importorskip("numba_cuda", reason="numba-cuda is not installed")
from numba import cuda
from numba.cuda.cudadrv import driver

from gpumem.integrations.numba._manager import manager_class

MIB = 1 << 20


class Context:
    """The attribute of Numba's context that a manager reads."""

    device = types.SimpleNamespace(id=0)


@pytest.fixture
def context():
    return Context()


@pytest.fixture
def arena():
    with gpumem.Arena("host", {"max_mem": 16 * MIB}) as arena:
        yield arena
        gc.collect()


@pytest.fixture
def manager(arena, context):
    resources = Resources("It", arena, kinds=(gpumem.MemoryKind.HOST,), device_type="host")
    return manager_class(resources, resources, "host")(context=context)


@pytest.fixture
def restored():
    before = driver._memory_manager
    yield
    assert driver._memory_manager is before


def test_memory_pointer_owns_its_block(manager, arena):
    pointer = manager.memalloc(1000)
    assert isinstance(pointer, cuda.MemoryPointer)
    assert (pointer.size, arena.stats().requested_in_use) == (1000, 1000)
    del pointer
    assert arena.stats().in_use == 0


def test_numba_pinned_memory_comes_from_gpumem(manager, arena):
    memory = manager.memhostalloc(1000)
    assert arena.stats().requested_in_use == 1000
    assert memoryview(memory).nbytes == 1000
    del memory
    assert arena.stats().in_use == 0


def test_pinned_memory_alone_leaves_device_arrays_to_numba(arena, context):
    resources = Resources("It", arena, kinds=(gpumem.MemoryKind.HOST,), device_type="host")
    manager = manager_class(None, resources, "host")(context=context)
    assert isinstance(manager, driver.NumbaCUDAMemoryManager)
    assert type(manager).memalloc is driver.NumbaCUDAMemoryManager.memalloc
    manager.get_memory_info = lambda: driver.MemoryInfo(free=0, total=0)
    memory = manager.memhostalloc(1000)
    assert arena.stats().requested_in_use == 1000
    del memory
    assert arena.stats().in_use == 0


def test_memory_info_counts_what_the_arena_has_free(manager, arena):
    pointer = manager.memalloc(MIB)
    info = manager.get_memory_info()
    assert (info.total, info.free) == (16 * MIB, 15 * MIB)
    del pointer
    assert manager.get_memory_info().free == 16 * MIB


def test_out_of_memory_is_numbas_and_gpumems_error(manager):
    with pytest.raises(gpumem.OutOfMemoryError) as caught:
        manager.memalloc(17 * MIB)
    assert isinstance(caught.value, driver.CudaAPIError)
    assert caught.value.code == driver.binding.CUresult.CUDA_ERROR_OUT_OF_MEMORY
    assert caught.value.requested_nbytes == 17 * MIB
    assert "out of memory" in str(caught.value)


def test_garbage_is_collected_before_out_of_memory(manager):
    gc.disable()
    try:
        holder = types.SimpleNamespace(memory=manager.memalloc(12 * MIB))
        holder.own = holder
        del holder
        assert manager.memalloc(12 * MIB).size == 12 * MIB
    finally:
        gc.enable()


def test_reset_frees_everything_before_finalizers_run(manager, arena, context):
    type(manager)(context=context).reset()  # before initialize
    pointer = manager.memalloc(MIB)
    manager.reset()
    assert arena.stats().in_use == 0
    other = arena.allocate(MIB)
    del pointer
    assert not other.closed
    assert arena.stats().requested_in_use == MIB
    del other


def test_numba_accepts_the_memory_manager(manager, restored):
    assert type(manager)(context=None).interface_version == 1
    integration.enable()
    assert driver._memory_manager.__name__ == "GpumemManager"
    with integration.using(pinned=False):
        pass
    integration.disable()


def test_enable_after_a_context_exists_is_refused(monkeypatch, restored):
    made = types.SimpleNamespace(primary_context=object())
    integration.enable()
    monkeypatch.setitem(driver.driver.devices, 0, made)
    for call in (integration.disable, lambda: integration.enable(pinned=False)):
        with pytest.raises(IntegrationError, match="has made a context on device 0"):
            call()
    integration.enable()  # what is enabled
    monkeypatch.delitem(driver.driver.devices, 0)
    integration.disable()
    monkeypatch.setitem(driver.driver.devices, 0, made)
    with pytest.raises(IntegrationError, match=r"cannot be switched.*context"):
        integration.enable()
    monkeypatch.delitem(driver.driver.devices, 0)


def test_module_named_by_the_environment_variable_has_the_class():
    assert integration._numba_memory_manager(context=None).interface_version == 1
    with pytest.raises(AttributeError, match="nothing"):
        integration.nothing  # noqa: B018


def test_invalid_arguments_are_named(arena):
    with pytest.raises(ConfigError, match="host:0"):
        integration.enable(arena)
    with pytest.raises(ConfigError, match="pinned memory"):
        integration.using(pinned=arena)


def test_missing_numba_names_the_package(monkeypatch):
    monkeypatch.setitem(sys.modules, "numba_cuda", None)
    with pytest.raises(MissingFrameworkError, match="pip install numba-cuda"):
        integration.enable()


def test_numba_simulator_is_refused():
    done = child.run(
        """
        import gpumem.integrations.numba as integration
        try:
            integration.enable()
        except gpumem.errors.IntegrationError as error:
            print("simulat" in str(error))
        """.replace("import", "import gpumem, gpumem.errors; import", 1),
        env={"NUMBA_ENABLE_CUDASIM": "1"},
    )
    assert done.stdout == "True\n", done.stderr


@pytest.mark.parametrize("end", ["", "del arena", "del pointer", "manager.reset()"])
def test_exit_is_quiet(end):
    done = child.run(f"""
        import types
        import gpumem
        from gpumem._testing.integrations import Resources
        from gpumem.integrations.numba._manager import manager_class
        arena = gpumem.Arena("host")
        resources = Resources("It", arena, kinds=(gpumem.MemoryKind.HOST,), device_type="host")
        class Context:
            device = types.SimpleNamespace(id=0)
        context = Context()
        manager = manager_class(resources, resources, "host")(context=context)
        pointer, memory = manager.memalloc(1000), manager.memhostalloc(1000)
        {end}
    """)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
