"""Fixtures of predictions: PyTorch's build for CUDA, and the prediction of a script."""

import textwrap

import pytest

from gpumem.errors import GpumemError
from gpumem.prediction import predict_script
from gpumem.prediction.pytorch import require


@pytest.fixture
def needs_pytorch():
    try:
        require()
    except GpumemError as error:
        pytest.skip(str(error))


@pytest.fixture
def predicted(tmp_path, needs_pytorch):
    """Predict a script, by default with PyTorch's allocator alone."""

    def predict(script, *arguments, allocators=("default",), **options):
        path = tmp_path / "train.py"
        path.write_text("import torch\n" + textwrap.dedent(script).lstrip())
        command = [str(path), *arguments]
        found = predict_script(command, allocators=allocators, **options)
        return found.runs["default"] if allocators == ("default",) else found

    return predict
