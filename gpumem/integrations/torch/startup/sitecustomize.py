"""Runs as Python starts, in processes that `gpumem run` starts and in their children.

Their PYTHONPATH begins with this folder. PyTorch's import is followed by
`gpumem.integrations.torch._startup.begin`. If a page is to be written, the program's own import of
gpumem is followed by `record`, so that the page shows arenas of a program without PyTorch, too. A
process that imports neither imports nothing of gpumem's. A module of the same name that the program
brings is run afterwards, as it would have been.
"""

from __future__ import annotations

import atexit
import contextlib
import importlib
import importlib.abc
import importlib.util
import json
import os
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType

_STEPS = {"torch": "begin", "gpumem": "record"}
"""The function of `_startup` that runs after an import."""


class _AfterImport(importlib.abc.MetaPathFinder):
    """Finds a module as the other finders do, and runs a step after its first import.

    A lookup alone, as by `importlib.util.find_spec`, leaves it in place.
    """

    def __init__(self, name: str) -> None:
        self.name = name

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return the spec that the other finders have for the module."""
        if name != self.name:
            return None
        for finder in list(sys.meta_path):
            find = None if finder is self else getattr(finder, "find_spec", None)
            spec: ModuleSpec | None = find(name, path, target) if find else None
            if spec is not None:
                if spec.loader is not None:
                    spec.loader = _Loader(spec.loader, self)
                return spec
        return None

    def leave(self) -> bool:
        """Leave the finders; return whether it was one of them."""
        try:
            sys.meta_path.remove(self)
        except ValueError:
            return False
        return True


class _Loader(importlib.abc.Loader):
    """Loads a module as its own loader does; the module then names that one."""

    def __init__(self, loader: importlib.abc.Loader, finder: _AfterImport) -> None:
        self.loader = loader
        self.finder = finder

    def __getattr__(self, name: str) -> object:  # get_filename, get_code, ... of a spec looked up
        if name == "loader":  # of a copy that is being made
            raise AttributeError(name)
        return getattr(self.loader, name)

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        """Leave it to the module's own loader."""
        return self.loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        """Load the module, then run its step unless an import has."""
        if module.__spec__ is not None:
            module.__spec__.loader = self.loader
        module.__loader__ = self.loader
        self.loader.exec_module(module)
        if not self.finder.leave():
            return
        try:
            startup = importlib.import_module("gpumem.integrations.torch._startup")
        except ImportError as error:  # another Python than the one gpumem is installed for
            print(f"gpumem: not enabled for PyTorch: {error}", file=sys.stderr)
        else:
            getattr(startup, _STEPS[module.__name__])()


def _report_missing_page(process: int, page: str, began: int) -> None:
    """Report why `process`, which the user has started, and its children have written no page."""
    if _STEPS.keys().isdisjoint(sys.modules) and os.getpid() == process:
        with contextlib.suppress(OSError):
            if os.stat(page).st_mtime_ns >= began:
                return
        print(
            f"gpumem: {page}: not written: this process has imported neither PyTorch nor gpumem, "
            "nor has any that it started and that has ended",
            file=sys.stderr,
        )


def _run_the_programs_own() -> None:
    here = os.path.dirname(os.path.abspath(__file__))
    sys.path[:] = [place for place in sys.path if os.path.abspath(place) != here]
    own = sys.modules.pop("sitecustomize")
    try:
        importlib.import_module("sitecustomize")
    except ModuleNotFoundError as error:
        if error.name != "sitecustomize":
            raise
        sys.modules["sitecustomize"] = own  # for the import that is under way


if "GPUMEM_RUN" in os.environ:  # not where a parent has cleared it for a child
    _process, _, _page, _, _began = json.loads(os.environ["GPUMEM_RUN"])  # _startup.Options
    sys.meta_path.insert(0, _AfterImport("torch"))
    if _page:
        sys.meta_path.insert(0, _AfterImport("gpumem"))
        atexit.register(_report_missing_page, _process, _page, _began)
_run_the_programs_own()
