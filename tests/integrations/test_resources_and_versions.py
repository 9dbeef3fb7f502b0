"""Which resource serves which device, and which frameworks will do."""

import ctypes
import pickle
import sys
import types

import pytest

import gpumem
from gpumem._testing.integrations import (
    Resources,
    import_framework,
    numbers_of,
    require_gpu,
    require_gpu_for_torch,
)
from gpumem.errors import ConfigError, IntegrationError, MissingFrameworkError
from gpumem.integrations.torch import __main__ as torch_command


def host_resources(given=None):
    """Rehearse with host memory as if it were a device's."""
    return Resources("It", given, kinds=(gpumem.MemoryKind.HOST,), device_type="host")


@pytest.fixture
def arena():
    with gpumem.Arena("host") as arena:
        yield arena


def test_none_means_the_default_resource_at_first_use():
    resources = host_resources()
    with gpumem.using_resource(gpumem.Arena("host")) as first:
        assert resources.of(0) is first
    assert resources.of(0) is first


@pytest.mark.parametrize(
    "wrap", [lambda r: r, lambda r: [r], lambda r: {0: r}, lambda r: iter([r])]
)
def test_one_or_several_resources_serve_their_devices(arena, wrap):
    resources = host_resources(wrap(arena))
    assert resources.of(0) is arena
    assert resources.given == {0: arena}


class Empty(gpumem.MemoryResource):
    """Has a length, and is false."""

    def __init__(self):
        super().__init__("host")

    def __len__(self):
        return 0

    def allocate_raw(self, nbytes, stream):
        raise MemoryError

    def deallocate_raw(self, pointer, nbytes, stream):
        pass


def test_resource_that_is_false_serves_its_device():
    resource = Empty()
    assert host_resources(resource).of(0) is resource


@pytest.mark.parametrize("key", ["host", "host:0", gpumem.Device("host")])
def test_mapping_keys_may_be_devices(arena, key):
    assert host_resources({key: arena}).of(0) is arena


def test_equal_resource_choices_compare_equal(arena):
    with gpumem.Arena("host") as other:
        assert host_resources(arena) == host_resources([arena])
        assert host_resources(arena) != host_resources(other)
        assert host_resources(arena) != host_resources()
        assert host_resources() == host_resources()


def test_host_memory_is_refused_for_a_device(arena):
    with pytest.raises(ConfigError, match=r"CuPy needs device or .* such as cuda:0; without a GPU"):
        Resources("CuPy", arena)


@pytest.mark.parametrize(
    ("given", "error", "words"),
    [
        (7, TypeError, "expected a gpumem.MemoryResource"),
        ("host", TypeError, "expected a gpumem.MemoryResource"),
        (lambda a: [a, a], ConfigError, "was given for"),
        (lambda a: {1: a}, ConfigError, "for device 1"),
        (lambda a: {"cuda:0": a}, ConfigError, "for device 'cuda:0'"),
        (lambda a: {None.__class__: a}, TypeError, "expected a Device"),
        (lambda a: {True: a}, TypeError, "expected a Device"),
    ],
)
def test_invalid_resources_are_named(arena, given, error, words):
    with pytest.raises(error, match=words):
        host_resources(given(arena) if callable(given) else given)


# ---- frameworks ----------------------------------------------------------------------------------


def made_up(monkeypatch, version):
    module = types.ModuleType("made_up")
    if version is not None:
        module.__version__ = version
    monkeypatch.setitem(sys.modules, "made_up", module)
    return module


def test_supported_framework_is_imported(monkeypatch):
    module = made_up(monkeypatch, "13.2.1rc1")
    found = import_framework("Made Up", "made_up", "13.2", install="pip install made-up")
    assert found is module


@pytest.mark.parametrize("version", ["13.1.9", "9", None, "unknown"])
def test_too_old_framework_is_refused_with_both_versions(monkeypatch, version):
    made_up(monkeypatch, version)
    with pytest.raises(IntegrationError, match=r"needs Made Up 13\.2 or later") as caught:
        import_framework("Made Up", "made_up", "13.2", install="pip install made-up")
    assert not isinstance(caught.value, MissingFrameworkError)
    assert (version or "without a version") in str(caught.value)


def test_missing_framework_names_its_package(monkeypatch):
    monkeypatch.setitem(sys.modules, "made_up", None)
    with pytest.raises(MissingFrameworkError, match="pip install made-up") as caught:
        import_framework("Made Up", "made_up", "13.2", install="pip install made-up")
    assert caught.value.name == "made_up"
    assert isinstance(caught.value.__cause__, ImportError)
    again = pickle.loads(pickle.dumps(caught.value))
    assert (str(again), again.name) == (str(caught.value), "made_up")


def test_versions_compare_numerically():
    assert numbers_of("13.0") == numbers_of("13")
    assert numbers_of("9.9") < numbers_of("13")
    assert numbers_of("2.9.0+cu130") == (2, 9)
    assert numbers_of("dev") == ()


def test_framework_without_a_gpu_is_told_so():
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        with pytest.raises(
            IntegrationError, match=r"It has no GPU: .*libcuda\.so\.1 was not found"
        ):
            require_gpu("It")
    else:
        require_gpu("It")


@pytest.mark.parametrize(
    ("built_with_cuda", "why"), [(False, "this build of it has no CUDA"), (True, "it finds no GPU")]
)
def test_pytorch_without_a_gpu_is_told_so(built_with_cuda, why):
    extension = types.SimpleNamespace(
        **({"_cuda_customAllocator": None} if built_with_cuda else {})
    )
    torch = types.SimpleNamespace(_C=extension, cuda=types.SimpleNamespace(device_count=lambda: 0))
    with pytest.raises(IntegrationError, match=rf"{why}\. .* torch\.from_dlpack"):
        require_gpu_for_torch(torch)


def test_build_for_a_pytorch_without_cuda_says_so_before_it_compiles(monkeypatch, capsys):
    torch = types.SimpleNamespace(_C=types.SimpleNamespace())
    monkeypatch.setattr(torch_command, "import_torch", lambda: torch)
    monkeypatch.setattr(sys, "argv", ["torch", "build"])
    assert torch_command.main() == 1
    assert capsys.readouterr().err.startswith(
        "gpumem: PyTorch cannot allocate from gpumem: this build of it has no CUDA. "
    )
