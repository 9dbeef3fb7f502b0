"""PyTorch's settings of its allocator, read for arenas."""

import sys
import warnings

import pytest
from helpers import torch_build

from gpumem import Arena
from gpumem.errors import ConfigError, ConfigWarning, IntegrationError
from gpumem.integrations import torch as gpumem_torch
from gpumem.integrations._common.resources import Resources
from gpumem.integrations.torch import _allocator, _hooks
from gpumem.integrations.torch._settings import AllocatorSettings

TOTAL = Arena("host").memory.device.total_bytes


def test_settings_of_an_environment_without_a_variable_ask_for_nothing():
    assert AllocatorSettings.of_environment({}) == AllocatorSettings(1.0, ())


@pytest.mark.parametrize(
    "text",
    [
        "",
        "backend:native",
        "expandable_segments:True",
        "expandable_segments:False",
        "release_lock_on_cudamalloc:True",
        "graph_capture_record_stream_reuse:False",
        "pinned_use_background_threads:True, pinned_num_register_threads:8",
        "per_process_memory_fraction:0.25",
    ],
)
def test_settings_that_hold_over_an_arena_are_not_named(text):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        AllocatorSettings.of_environment({"PYTORCH_ALLOC_CONF": text})


@pytest.mark.parametrize(
    ("text", "unused"),
    [
        ("pinned_num_register_threads:8,pinned_use_cuda_host_register:True", ()),
        ("pinned_use_background_threads:True", ()),
        ("pinned_reserve_segment_size_mb:1024", ("pinned_reserve_segment_size_mb",)),
    ],
)
def test_settings_of_pinned_memory_are_pytorchs_unless_an_arena_serves_it(text, unused):
    assert AllocatorSettings.of_text(text).unused == ()
    assert AllocatorSettings.of_text(text, pinned=True).unused == unused


def test_settings_without_effect_are_named_in_one_warning():
    text = (
        "max_split_size_mb:64, roundup_power2_divisions:[256:1,512:2,>:4],"
        "backend:cudaMallocAsync,expandable_segments:True,garbage_collection_threshold:0.8"
    )
    with pytest.warns(ConfigWarning) as said:
        AllocatorSettings.of_environment({"PYTORCH_CUDA_ALLOC_CONF": text})
    (one,) = said
    assert str(one.message).startswith(
        "PYTORCH_CUDA_ALLOC_CONF: max_split_size_mb, roundup_power2_divisions, backend, "
        "garbage_collection_threshold has no effect"
    )


def test_settings_come_from_the_variable_that_pytorch_reads_first():
    both = {
        "PYTORCH_ALLOC_CONF": "per_process_memory_fraction:0.5",
        "PYTORCH_CUDA_ALLOC_CONF": "per_process_memory_fraction:0.25",
    }
    assert AllocatorSettings.of_environment(both).fraction == 0.25
    assert AllocatorSettings.of_environment({k: both[k] for k in list(both)[:1]}).fraction == 0.5


@pytest.mark.parametrize("text", ["2", "-0.5", "half", "nan", ""])
def test_memory_fraction_that_is_none_is_refused_with_the_range(text):
    with pytest.raises(ConfigError, match="expected a number from 0 to 1"):
        AllocatorSettings.of_text(f"per_process_memory_fraction:{text},backend:native")


@pytest.mark.parametrize(
    ("config", "fraction", "limit"),
    [
        ({}, 1.0, 0),
        ({}, 0.5, int(0.5 * TOTAL)),
        ({"max_mem": 1 << 20}, 0.5, 1 << 20),
        ({"max_mem": 1 << 60}, 0.5, int(0.5 * TOTAL)),
        ({}, 0.0, 1),
    ],
)
def test_memory_fraction_limits_an_arena_but_never_raises_its_own_limit(config, fraction, limit):
    arena = Arena("host", config)
    AllocatorSettings(fraction).limit(arena)
    assert arena.limit == (limit or None)


def served_by(arena):
    return Resources("PyTorch", arena, kinds=(arena.memory.kind,), device_type="host")


@pytest.fixture
def fake_torch(monkeypatch, tmp_path):
    """A stand-in for PyTorch without a compiler, and without a build of the allocator."""
    module = torch_build.fake_torch()
    monkeypatch.setitem(sys.modules, "torch", module)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("CXX", "/nonexistent/c++")
    yield module
    _hooks.set_finder(None)
    _hooks.serve(0, Arena("host"))


@pytest.fixture
def built(fake_torch, monkeypatch):
    """The same with a build of the allocator."""
    # Pages would be exportable to the end of the process, each with a descriptor.
    monkeypatch.setattr(_allocator._sharing, "prepare", lambda device: None)
    with monkeypatch.context() as patch:
        patch.delenv("CXX")
        torch_build.carry(fake_torch)
    return fake_torch


def test_arena_in_place_of_pytorchs_allocator_holds_the_memory_fraction(built, monkeypatch, arena):
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "per_process_memory_fraction:0.5")
    _allocator.replace(built, served_by(arena), True)
    assert arena.stats().limit == int(0.5 * TOTAL)


def test_invalid_memory_fraction_is_refused_before_anything_is_compiled(fake_torch, monkeypatch):
    compiled = []
    monkeypatch.setattr(_allocator._build, "load", compiled.append)
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "per_process_memory_fraction:2")
    with pytest.raises(ConfigError, match="per_process_memory_fraction = '2'"):
        _allocator.replace(fake_torch, served_by(Arena("host")), True)
    assert compiled == []


def test_without_a_compiler_full_mode_is_refused_with_both_ways_out(fake_torch, arena):
    with pytest.raises(IntegrationError) as refused:
        _allocator.replace(fake_torch, served_by(arena), True)
    for words in ("/nonexistent/c++", "integrations.torch build", 'mode="pool"'):
        assert words in str(refused.value)
    assert arena not in _hooks.arenas().values()


def test_without_a_compiler_auto_mode_is_pool_and_a_warning_says_why(fake_torch):
    with pytest.warns(ConfigWarning, match='mode="pool".*/nonexistent/c') as said:
        assert gpumem_torch._torch.mode("auto") == "pool"
    assert len(said) == 1


def test_build_from_elsewhere_needs_no_compiler(built):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert gpumem_torch._torch.mode("auto") == "full"
