"""Places where no script can be predicted, and wrong arguments: each with what to do."""

import sys
import types

import pytest

from gpumem.errors import ConfigError, IntegrationError, MissingFrameworkError
from gpumem.prediction import gpus, predict_script
from gpumem.prediction import pytorch as installed


@pytest.fixture
def pytorch(tmp_path, monkeypatch):
    """Let a PyTorch of a version be found, with or without CUDA."""

    def pretend(version, cuda):
        tmp_path.joinpath("version.py").write_text(
            f"__version__ = '{version}'\ncuda: Optional[str] = {cuda!r}\nhip = None\n"
        )
        spec = types.SimpleNamespace(submodule_search_locations=[str(tmp_path)])
        monkeypatch.setattr(installed.importlib.util, "find_spec", lambda name: spec)

    return pretend


def test_pytorch_for_cuda_is_accepted(pytorch):
    pytorch("2.14.1+cu130", "13.0")
    assert installed.require()[:2] == ("2.14.1+cu130", "13.0")


def test_pytorch_without_cuda_is_refused_with_a_command(pytorch):
    pytorch("2.14.1+cpu", None)
    with pytest.raises(IntegrationError, match=r"2\.14\.1.cpu was built without CUDA.*pip install"):
        predict_script([__file__])


def test_old_pytorch_is_refused(pytorch):
    pytorch("2.9.1", "12.8")
    with pytest.raises(IntegrationError, match=r"needs 2\.10 or later"):
        predict_script([__file__])


def test_missing_pytorch_is_refused_with_a_command(monkeypatch):
    monkeypatch.setattr(installed.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(MissingFrameworkError, match="pip install torch"):
        predict_script([__file__])


def test_other_systems_are_refused_with_what_to_do(monkeypatch):
    monkeypatch.setattr(sys, "platform", "darwin")
    with pytest.raises(IntegrationError, match=r"needs Linux.*container"):
        predict_script([__file__])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"command": []}, "expected a file"),
        ({"command": ["no such file.py"]}, "expected a file"),
        ({"steps": 0}, "expected 1 or more"),
        ({"until": "train.py:"}, "expected a FILE:LINE or a function"),
        ({"output": __file__}, "expected a file of its own"),
        ({"allocators": []}, "expected some of"),
        ({"allocators": ["malloc"]}, "malloc.*expected some of"),
        ({"gpu": "h1000"}, "unknown GPU 'h1000': expected one of h100, h200"),
        ({"memory": 1 << 20}, "expected more than the 629145600 bytes"),
    ],
)
def test_invalid_arguments_are_refused(pytorch, arguments, message):
    pytorch("2.14.1", "13.0")
    command = arguments.pop("command", [__file__])
    with pytest.raises(ConfigError, match=message):
        predict_script(command, **arguments)


def test_each_gpu_has_properties_that_fit_together():
    for name in gpus.names():
        gpu = gpus.gpu(name.upper())
        attributes = gpu.attributes()
        assert gpu.memory > gpu.context
        assert attributes[97] + attributes[111] == attributes[81]
        assert attributes[39] // attributes[1] >= 1
        assert all(0 < number < 160 for number in attributes)
