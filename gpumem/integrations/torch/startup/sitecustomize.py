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
import json
import os
import signal
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec, SourceFileLoader
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
                    self.follow(spec.loader)
                return spec
        return None

    def follow(self, loader: importlib.abc.Loader) -> None:
        """Let a loader run the step after it has loaded the module, unless an import has."""
        load = loader.exec_module

        def load_and_run(module: ModuleType) -> None:
            loader.exec_module = load  # type: ignore[method-assign]
            load(module)
            if self.leave():
                _run_step(module.__name__)

        loader.exec_module = load_and_run  # type: ignore[method-assign]

    def leave(self) -> bool:
        """Leave the finders; return whether it was one of them."""
        try:
            sys.meta_path.remove(self)
        except ValueError:
            return False
        return True


def _run_step(name: str) -> None:
    try:
        startup = importlib.import_module("gpumem.integrations.torch._startup")
    except ImportError as error:  # another Python than the one gpumem is installed for
        print(f"gpumem: not enabled for PyTorch: {error}", file=sys.stderr)
    else:
        getattr(startup, _STEPS[name])()


def _finish_page(process: int, page: str, began: int) -> None:
    """Complete the page at the end of `process`, which the user has started, or say why not."""
    if os.getpid() != process:
        return
    # By its path, because gpumem itself is not imported.
    path = os.path.join(os.path.dirname(__file__), "../../../report/processes.py")
    processes = ModuleType("_gpumem_processes")
    SourceFileLoader(processes.__name__, path).exec_module(processes)
    job = f"{process} {began}"
    if not _STEPS.keys().isdisjoint(sys.modules):
        processes.forget(job)
    elif processes.missing_of(job):
        sys.meta_path[:] = [each for each in sys.meta_path if not isinstance(each, _AfterImport)]
        importlib.import_module("gpumem.integrations.torch._startup").end_without_recording()
    else:
        processes.forget(job)
        with contextlib.suppress(OSError):
            if os.stat(page).st_mtime_ns >= began:
                return
        print(
            f"gpumem: {page}: not written: this process has imported neither PyTorch nor gpumem, "
            "nor has any that it started and that has ended",
            file=sys.stderr,
        )


def _end_by_signal(number: int, _: object) -> None:
    """Add this process to the page, then let the signal end it as it would have.

    While the process adds itself, it ends anyway, and the signal is ignored.
    """
    startup = sys.modules.get("gpumem.integrations.torch._startup")
    end = getattr(startup, "end", None)  # none during the import of the module
    if end is None or end():
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)


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
    _process, _, _page, _, _began, *_ = json.loads(os.environ["GPUMEM_RUN"])  # _startup.Options
    sys.meta_path.insert(0, _AfterImport("torch"))
    if _page:
        sys.meta_path.insert(0, _AfterImport("gpumem"))
        atexit.register(_finish_page, _process, _page, _began)
        for _number in (signal.SIGTERM, signal.SIGHUP):
            if signal.getsignal(_number) is signal.SIG_DFL:
                signal.signal(_number, _end_by_signal)
_run_the_programs_own()
