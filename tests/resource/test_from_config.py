"""MemoryResource.from_config: an arena or the driver's pool, as the settings say."""

from __future__ import annotations

import warnings

import pytest

import gpumem

MIB = 1 << 20
NOT_SUPPORTED, UNKNOWN = 801, 999
POOL = {"arena.use_cuda_mempool": "1"}


@pytest.fixture
def no_pools(host):
    """The host device as a driver table without pools: it answers no to every attribute."""
    host.fail("cuDeviceGetAttribute", 1, NOT_SUPPORTED, times=0)
    yield
    host.clear_faults()


def test_from_config_makes_an_arena_by_default():
    with gpumem.MemoryResource.from_config("host", {"max_mem": 4 * MIB}, name="mine") as resource:
        assert isinstance(resource, gpumem.Arena)
        assert (resource.config.max_mem, resource.name) == (4 * MIB, "mine")
    with gpumem.MemoryResource.from_config("host") as resource:
        assert resource.config == gpumem.ArenaConfig()


@pytest.mark.parametrize("spelling", ["{}", "arena.{}", "ep.host.arena.{}", "ep_factory.HOST.{}"])
def test_from_config_makes_a_driver_pool_on_request(spelling, stream):
    settings = {
        "use_cuda_mempool": "1",
        "cuda_mempool_release_threshold": "4096",
        "cuda_mempool_bytes_to_keep_on_shrink": "8",
        "max_mem": str(64 * MIB),
        "stream_reuse": "wait",
    }
    with gpumem.MemoryResource.from_config(
        "host", {spelling.format(key): value for key, value in settings.items()},
        default_stream=stream, name="mine",
    ) as resource:  # fmt: skip
        assert isinstance(resource, gpumem.DriverPool)
        assert resource.config == gpumem.PoolConfig(4096, 8, 64 * MIB, False, True, True, True)
        assert resource.name == "mine"
        with resource.allocate(1000) as buffer:
            assert buffer.stream == stream
        with pytest.raises(gpumem.OutOfMemoryError):
            resource.allocate(65 * MIB)


def test_missing_pool_support_falls_back_to_an_arena_with_a_warning(no_pools):
    settings = gpumem.ArenaConfig(
        use_cuda_mempool=True,
        cuda_mempool_release_threshold=4096,
        max_mem=4 * MIB,
        initial_chunk_size_bytes=4096,
        stream_reuse="never",
    )
    with pytest.warns(
        gpumem.errors.PoolFallbackWarning,
        match=r"no memory pools for host:0 .*MEMORY_POOLS_SUPPORTED",
    ):
        resource = gpumem.MemoryResource.from_config("host", settings)
    with resource:
        assert isinstance(resource, gpumem.Arena)
        assert resource.config.max_mem == 4 * MIB
        assert (resource.config.initial_chunk_size_bytes, resource.config.stream_reuse) == (
            4096, "never",
        )  # fmt: skip
        resource.allocate(1000).close()


def test_driver_pool_without_pool_support_is_an_error(no_pools):
    with pytest.raises(gpumem.ConfigError, match="has no driver's pools"):
        gpumem.DriverPool("host")


def test_driver_pool_on_a_missing_device_says_only_that():
    with pytest.raises(gpumem.ConfigError, match=r"^unknown device 'host:63'"):
        gpumem.DriverPool("host:63")


def test_pool_refused_as_unsupported_falls_back_to_an_arena(host):
    host.fail("cuMemPoolCreate", 1, NOT_SUPPORTED)
    with (
        pytest.warns(gpumem.errors.PoolFallbackWarning, match="cuMemPoolCreate"),
        gpumem.MemoryResource.from_config("host", POOL) as resource,
    ):
        assert isinstance(resource, gpumem.Arena)


def test_other_pool_failures_are_raised(host):
    host.fail("cuMemPoolCreate", 1, UNKNOWN)
    with pytest.raises(gpumem.errors.DriverError, match="cuMemPoolCreate"):
        gpumem.MemoryResource.from_config("host", POOL)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        gpumem.MemoryResource.from_config("host", POOL).close()


def test_fallback_warning_as_an_error_makes_nothing(no_pools):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(gpumem.errors.PoolFallbackWarning):
            gpumem.MemoryResource.from_config("host", POOL)


@pytest.mark.parametrize("memory", ["host/host_accessible", "host/managed"])
def test_pool_for_other_than_device_memory_is_refused(memory):
    with pytest.raises(gpumem.ConfigError, match="invalid use_cuda_mempool = True"):
        gpumem.MemoryResource.from_config(memory, POOL)


def test_settings_without_effect_are_refused():
    with pytest.raises(gpumem.ConfigError, match="has no effect without use_cuda_mempool"):
        gpumem.MemoryResource.from_config("host", {"cuda_mempool_release_threshold": "1"})
    with pytest.raises(gpumem.ConfigError, match="enable = False"):
        gpumem.MemoryResource.from_config("host", POOL | {"enable": "0"})


def test_unknown_device_is_an_error_not_a_fallback():
    with pytest.raises(ValueError, match="unknown device"):
        gpumem.MemoryResource.from_config("host:63", POOL)


@pytest.mark.parametrize("config", [5, "max_mem=1", gpumem.PoolConfig()])
def test_config_of_a_wrong_type_is_a_type_error(config):
    with pytest.raises(TypeError, match="takes ArenaConfig or a mapping"):
        gpumem.MemoryResource.from_config("host", config)
