"""Collectives over memory that gpumem registered with NCCL, on every GPU there is."""

import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

import gpumem
from bench.children import launch
from gpumem.errors import ConfigError
from gpumem.integrations import nccl

COUNT = sum(device.type == "cuda" for device in gpumem.devices())
pytestmark = [
    pytest.mark.skipif(COUNT < 2, reason=f"needs two CUDA devices: {COUNT} found"),
    pytest.mark.skipif(find_spec("torch") is None, reason="torch is not installed"),
]
MIB = 1 << 20
SCRIPT = Path(__file__).with_name("nccl_ranks.py")


@pytest.mark.parametrize("what", ["blocks", "arena", "shut_down"])
def test_collectives_over_registered_memory_are_right(what):
    printed = launch([sys.executable, str(SCRIPT), what], COUNT)
    assert printed.splitlines()[-1] == "done"


def test_pages_that_can_move_are_refused():
    with pytest.raises(ConfigError, match="transport"):
        nccl._require_registrable(gpumem.Arena("cuda:0").allocate(MIB))
