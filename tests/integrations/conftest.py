"""Fixtures of several integrations' tests."""

import pytest
from helpers import torch_library


@pytest.fixture(scope="session")
def torch_driver(tmp_path_factory):
    """Drives the allocators in an unpacked PyTorch; they are put there once in a process."""
    driver = torch_library.load(torch_library.unpacked(), tmp_path_factory.mktemp("torch"))
    driver.start(1)
    return driver
