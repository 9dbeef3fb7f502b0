"""make_resource: an arena or the driver's pool, as the settings say."""

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


def test_without_the_setting_it_is_an_arena():
    with gpumem.make_resource("host", {"max_mem": 4 * MIB}, name="mine") as resource:
        assert isinstance(resource, gpumem.Arena)
        assert (resource.config.max_mem, resource.name) == (4 * MIB, "mine")
    with gpumem.make_resource("host") as resource:
        assert resource.config == gpumem.ArenaConfig()


@pytest.mark.parametrize("spelling", ["{}", "arena.{}", "ep.cuda.arena.{}", "ep_factory.CUDA.{}"])
def test_with_the_setting_it_is_the_drivers_pool(spelling):
    settings = {
        "use_cuda_mempool": "1",
        "cuda_mempool_release_threshold": "4096",
        "cuda_mempool_bytes_to_keep_on_shrink": "8",
        "max_mem": str(64 * MIB),
        "stream_reuse": "wait",
    }
    stream = gpumem.Stream("host")
    with gpumem.make_resource(
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


def test_where_there_are_no_pools_an_arena_takes_their_place_with_a_warning(no_pools):
    settings = gpumem.ArenaConfig(
        use_cuda_mempool=True,
        cuda_mempool_release_threshold=4096,
        max_mem=4 * MIB,
        initial_chunk_size_bytes=4096,
        stream_reuse="never",
    )
    with pytest.warns(
        gpumem.errors.PoolFallbackWarning, match=r"host:0 has no driver's pools .*115"
    ):
        resource = gpumem.make_resource("host", settings)
    with resource:
        assert isinstance(resource, gpumem.Arena)
        assert resource.config.max_mem == 4 * MIB
        assert (resource.config.initial_chunk_size_bytes, resource.config.stream_reuse) == (
            4096, "never",
        )  # fmt: skip
        resource.allocate(1000).close()


def test_a_pool_made_by_name_where_there_are_none_is_an_error(no_pools):
    with pytest.raises(gpumem.ConfigError, match="has no driver's pools"):
        gpumem.DriverPool("host")


def test_a_driver_that_refuses_a_pool_as_not_supported_gets_an_arena(host):
    host.fail("cuMemPoolCreate", 1, NOT_SUPPORTED)
    with (
        pytest.warns(gpumem.errors.PoolFallbackWarning, match="cuMemPoolCreate"),
        gpumem.make_resource("host", POOL) as resource,
    ):
        assert isinstance(resource, gpumem.Arena)


def test_other_failures_are_failures(host):
    host.fail("cuMemPoolCreate", 1, UNKNOWN)
    with pytest.raises(gpumem.errors.DriverError, match="cuMemPoolCreate"):
        gpumem.make_resource("host", POOL)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        gpumem.make_resource("host", POOL).close()


def test_the_warning_as_an_error_makes_nothing(no_pools):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(gpumem.errors.PoolFallbackWarning):
            gpumem.make_resource("host", POOL)


@pytest.mark.parametrize("memory", ["host/host_accessible", "host/managed"])
def test_memory_that_is_not_a_devices_own_has_no_pool(memory):
    with pytest.raises(gpumem.ConfigError, match="use_cuda_mempool = True is not accepted"):
        gpumem.make_resource(memory, POOL)


def test_settings_without_effect_are_refused():
    with pytest.raises(gpumem.ConfigError, match="has no effect without use_cuda_mempool"):
        gpumem.make_resource("host", {"cuda_mempool_release_threshold": "1"})
    with pytest.raises(gpumem.ConfigError, match="enable = False"):
        gpumem.make_resource("host", POOL | {"enable": "0"})


def test_an_unknown_device_is_an_error_not_a_device_without_pools():
    with pytest.raises(ValueError, match="unknown device"):
        gpumem.make_resource("host:63", POOL)


@pytest.mark.parametrize("config", [5, "max_mem=1", gpumem.PoolConfig()])
def test_what_are_no_settings_is_a_type_error(config):
    with pytest.raises(TypeError, match="takes ArenaConfig or a mapping"):
        gpumem.make_resource("host", config)
