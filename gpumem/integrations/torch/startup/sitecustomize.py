"""Runs as Python starts, in processes that `gpumem run` starts and in their children.

Their PYTHONPATH begins with this folder. PyTorch's import is followed by
`gpumem.integrations.torch._startup.begin`; a process that does not import PyTorch imports nothing
of gpumem's. A module of the same name that the program brings is run afterwards, as it would have
been.
"""

from __future__ import annotations

import importlib.abc
import importlib.util
import os
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType


class _AfterTorch(importlib.abc.MetaPathFinder):
    """Finds PyTorch as the other finders do, once, and enables gpumem behind its import."""

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return the spec that the other finders have for PyTorch."""
        if name != "torch":
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.loader is not None:
            spec.loader = _Loader(spec.loader)
        return spec


class _Loader(importlib.abc.Loader):
    """Loads PyTorch as its own loader does; the module then names that one."""

    def __init__(self, loader: importlib.abc.Loader) -> None:
        self.loader = loader

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        """Leave it to PyTorch's own loader."""
        return self.loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        """Load PyTorch, then enable gpumem."""
        if module.__spec__ is not None:
            module.__spec__.loader = self.loader
        module.__loader__ = self.loader
        self.loader.exec_module(module)
        try:
            from gpumem.integrations.torch._startup import begin
        except ImportError as error:  # another Python than the one gpumem is installed for
            print(f"gpumem: not enabled for PyTorch: {error}", file=sys.stderr)
        else:
            begin()


def _run_the_programs_own() -> None:
    here = os.path.dirname(os.path.abspath(__file__))
    sys.path[:] = [place for place in sys.path if os.path.abspath(place) != here]
    ours = sys.modules.pop("sitecustomize")
    try:
        importlib.import_module("sitecustomize")
    except ModuleNotFoundError as error:
        if error.name != "sitecustomize":
            raise
        sys.modules["sitecustomize"] = ours  # for the import that is under way


sys.meta_path.insert(0, _AfterTorch())
_run_the_programs_own()
