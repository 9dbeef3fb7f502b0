"""What JAX can be told: its environment, before it starts; and arrays both ways."""

import os
import sys
import types

import numpy as np
import pytest

import gpumem
import gpumem.integrations.jax as integration
from gpumem.errors import ConfigError, IntegrationError, MissingFrameworkError

GIB = 1 << 30


@pytest.fixture
def bridge(monkeypatch):
    """JAX's record of whether it has started."""
    jax, source = types.ModuleType("jax"), types.ModuleType("jax._src")
    bridge = types.SimpleNamespace(started=False)
    bridge.backends_are_initialized = lambda: bridge.started
    jax.__version__, source.xla_bridge = "0.11.2", bridge
    monkeypatch.setitem(sys.modules, "jax", jax)
    monkeypatch.setattr(integration, "require_gpu", lambda name: None)
    monkeypatch.setitem(sys.modules, "jax._src", source)
    for name in list(os.environ):
        if name.startswith("XLA_"):
            monkeypatch.delenv(name)
    yield bridge
    assert integration._switch.current() is None
    assert not any(name.startswith("XLA_") for name in os.environ)


def variables():
    return {name: value for name, value in os.environ.items() if name.startswith("XLA_")}


def test_env_fraction_never_exceeds_the_budget():
    assert integration.env(0.5)["XLA_CLIENT_MEM_FRACTION"] == "0.5"
    assert integration.env(1.0)["XLA_CLIENT_MEM_FRACTION"] == "1"
    for budget in (GIB, 3 * GIB + 1, 10 * GIB - 7):
        part = float(integration.env(budget, total_bytes=10 * GIB)["XLA_CLIENT_MEM_FRACTION"])
        assert budget - 11_000 < part * 10 * GIB <= budget
    assert integration.env("2.5GiB", total_bytes=10 * GIB)["XLA_CLIENT_MEM_FRACTION"] == "0.25"
    assert integration.env() == {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}


@pytest.mark.parametrize(
    "budget", [0, -1, 11 * GIB, 0.0, 1.1, -0.5, True, "11GiB", "lots", float("nan")]
)
def test_budget_out_of_range_is_named(budget):
    with pytest.raises(ConfigError, match="budget = "):
        integration.env(budget, total_bytes=10 * GIB)


def test_enable_selects_the_drivers_pool_and_disable_restores(bridge):
    integration.enable()
    assert variables() == {
        "XLA_PYTHON_CLIENT_ALLOCATOR": "cuda_async",
        "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
    }
    integration.enable(budget=0.25)
    assert variables() == {
        "XLA_CLIENT_MEM_FRACTION": "0.25",
        "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
    }
    integration.disable()
    assert variables() == {}


def test_disable_restores_earlier_environment_variables(bridge, monkeypatch):
    monkeypatch.setenv("XLA_PYTHON_CLIENT_MEM_FRACTION", ".9")
    with integration.using(budget=0.5):
        assert variables() == {
            "XLA_CLIENT_MEM_FRACTION": "0.5",
            "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
        }
    assert variables() == {"XLA_PYTHON_CLIENT_MEM_FRACTION": ".9"}
    monkeypatch.delenv("XLA_PYTHON_CLIENT_MEM_FRACTION")


def test_enable_after_jax_started_is_refused(bridge):
    integration.enable()
    bridge.started = True
    for call in (integration.disable, lambda: integration.enable(budget=0.5)):
        with pytest.raises(IntegrationError, match="has started its devices"):
            call()
    bridge.started = False
    integration.disable()
    bridge.started = True
    with pytest.raises(IntegrationError, match=r"cannot be switched.*has started"):
        integration.enable()


def test_enable_with_an_arena_is_refused(bridge):
    with gpumem.Arena("host") as arena, pytest.raises(IntegrationError, match="no hook"):
        integration.enable(arena)
    with pytest.raises(IntegrationError, match="no hook"):
        integration.using(gpumem.DriverPool("host"))


def test_default_driver_pool_is_accepted_without_a_limit(bridge):
    own = gpumem.DriverPool.default("host")
    with integration.using(own):
        assert variables()["XLA_PYTHON_CLIENT_ALLOCATOR"] == "cuda_async"
    with pytest.raises(ConfigError, match="no bound"):
        integration.using(own, budget=0.5)


def test_missing_jax_names_the_package(bridge, monkeypatch):
    monkeypatch.setitem(sys.modules, "jax", None)
    with pytest.raises(MissingFrameworkError, match="jax"):
        integration.enable()


def test_jax_arrays_are_exchanged_without_a_copy():
    jax = pytest.importorskip("jax", reason="jax is not installed")
    tensor = gpumem.full((4, 8), 3, "float32", memory="host")
    array = jax.dlpack.from_dlpack(tensor)
    assert array.unsafe_buffer_pointer() == tensor.ptr
    assert float(array.sum()) == 96
    back = gpumem.from_dlpack(array)
    assert (back.ptr, back.shape) == (tensor.ptr, (4, 8))
    assert np.array_equal(back.numpy(), np.full((4, 8), 3, np.float32))
