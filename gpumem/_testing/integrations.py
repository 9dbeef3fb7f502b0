"""The parts of the integrations; none needs its framework to be imported."""

from gpumem.integrations._common.callers import Blocks
from gpumem.integrations._common.places import PerDevice
from gpumem.integrations._common.resources import Resources
from gpumem.integrations._common.switch import Framework, Setting, Switch, Using
from gpumem.integrations._common.versions import import_framework, numbers_of, require_gpu
from gpumem.integrations.numba._fence import Fence
from gpumem.integrations.torch._allocator import require_gpu as require_gpu_for_torch

__all__ = [
    "Blocks",
    "Fence",
    "Framework",
    "PerDevice",
    "Resources",
    "Setting",
    "Switch",
    "Using",
    "import_framework",
    "numbers_of",
    "require_gpu",
    "require_gpu_for_torch",
]
