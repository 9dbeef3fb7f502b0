"""A build of gpumem's allocator for `fake_torch`, as if it were copied from another machine."""

import shutil
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

from gpumem.integrations._common import compiled
from gpumem.integrations.torch import _build

FAKE = Path(__file__).parent / "fake_torch" / "torch" / "__init__.py"
# It takes PyTorch's place by doing nothing, since `fake_torch` allocates nothing.
SOURCE = """
#define EXPORT extern "C" __attribute__((visibility("default")))
EXPORT int gpumem_torch_install(const void *, double) { return 1; }
EXPORT void gpumem_torch_install_pinned(const void *, int) {}
"""


def fake_torch():
    """Return the module of `fake_torch`, without an entry in sys.modules."""
    spec = spec_from_file_location("torch", FAKE)
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def carry(torch=None):
    """Put the build where a process with the same XDG_CACHE_HOME looks for it."""
    recipe = _build.recipe(torch or fake_torch())
    built = compiled.build(compiled.Recipe(recipe.name, SOURCE))
    shutil.copy2(built, compiled._path_of(recipe))
