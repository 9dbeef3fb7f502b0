"""Fixtures of several integrations' tests."""

import random

import pytest
from helpers import torch_library

from gpumem import Stream


@pytest.fixture(scope="session")
def torch_driver(tmp_path_factory):
    """Drives the allocators in an unpacked PyTorch; they are put there once in a process."""
    driver = torch_library.load(torch_library.unpacked(), tmp_path_factory.mktemp("torch"))
    driver.start(1)
    return driver


@pytest.fixture
def torch_stream():
    """PyTorch takes only even handles for streams that it has not made: they are pointers."""
    made = [Stream("host")]
    while made[-1].ptr % 2:
        made.append(Stream("host"))
    return made[-1]


@pytest.fixture
def numbers():
    """Numbers of pools, a new one each time."""
    return iter(random.sample(range(1, 1 << 40), 100))
