"""A copy of the checkout, in which modules are built and tests run."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Iterable, Sequence
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

from .cython_source import statements

# What a build makes, and what no test of the core reads.
LEFT_BEHIND = (".git", "build", "dist", "*.so", "*.egg-info", ".venv", ".*_cache", ".hypothesis")
PLUGIN = "mutation.in_order"
MOST_MEMORY = 6 << 30  # resident bytes of a test run: a broken allocator may ask without end

# -O1 takes little longer than -O0, and a mutant that changes no machine code has no effect. That a
# lock is released which nobody holds is no race: it shows each time.
COMPILE = ["-O1", "-g0", "-fvisibility=hidden", "-DGPUMEM_CHECK_LOCKS"]

ENVIRONMENT = {
    "PYTHONHASHSEED": "0",
    "GPUMEM_TEST_SEED": "20",
    "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
    "OPENBLAS_NUM_THREADS": "1",
    # The tests of the core run on the host device: no GPU is looked at.
    "CUDA_VISIBLE_DEVICES": "",
    "NCCL_NVLS_ENABLE": "0",
    "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1",
    "NVSHMEM_DISABLE_NVLS": "1",
}


class Run(NamedTuple):
    """How a run of tests ended."""

    verdict: str  # "survived", "failed", "crashed", "timeout", "memory", "unfinished"
    test: str  # which one ended it
    times: dict[str, float]  # seconds of each test that passed


class Tree:
    """A copy of a checkout."""

    def __init__(self, root: Path) -> None:
        self.root = root

    @classmethod
    def copied(cls, source: Path, to: Path, *, built: bool) -> Tree:
        """Copy a checkout; of a built tree with its modules."""
        left = LEFT_BEHIND if not built else ("build",)
        shutil.copytree(source, to, ignore=shutil.ignore_patterns(*left), dirs_exist_ok=True)
        return cls(to)

    # ---- building --------------------------------------------------------------------------------

    def build(self, modules: Sequence[Path] = (), jobs: int = 1) -> bool:
        """Build modules, by their .pyx; all of them: (). Returns whether that worked.

        In a child, because Cython remembers the files that it has seen.
        """
        child = os.fork()
        if child == 0:
            quiet = os.open(self.root / "build.log", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
            os.dup2(quiet, 1)
            os.dup2(quiet, 2)
            status = 1
            try:
                self._build_here([str(path) for path in modules], jobs)
                status = 0
            except BaseException:
                os.write(2, traceback.format_exc().encode())
            os._exit(status)
        return os.waitpid(child, 0)[1] == 0

    def _build_here(self, modules: list[str], jobs: int) -> None:
        from setuptools.dist import Distribution

        os.chdir(self.root)
        sys.argv = ["setup.py"]
        spec = importlib.util.spec_from_file_location("gpumem_setup", "setup.py")
        assert spec is not None
        assert spec.loader is not None
        setup = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(setup)
        setup.COMPILE[:] = COMPILE + [flag for flag in setup.COMPILE if flag.startswith("-m")]
        made = [setup.extension(Path(path)) for path in modules] if modules else setup.extensions()
        command = setup.BuildModules(Distribution({"ext_modules": made}))
        command.inplace = True
        command.force = True
        command.parallel = jobs
        command.ensure_finalized()
        command.run()

    def log(self) -> str:
        """Return what the last build printed."""
        return (self.root / "build.log").read_text(errors="replace")

    def binary(self, module: Path) -> Path:
        """Return the path of a built module."""
        (found,) = (self.root / module.parent).glob(f"{module.stem}.*.so")
        return found

    # ---- which modules a change concerns ---------------------------------------------------------

    def users(self, file: str, function: str) -> list[Path]:
        """Return the modules, by their .pyx, that hold a function's code."""
        if file.endswith(".pyx"):
            return [Path(file)]
        # An inline function of a .pxd is compiled into each module that names it, or names one that
        # calls it.
        names = {function}
        while more := self._callers(names) - names:
            names |= more
        word = re.compile(rf"\b({'|'.join(sorted(names))})\b")
        return [path for path, text in self._modules.items() if word.search(text)]

    def _callers(self, names: set[str]) -> set[str]:
        word = re.compile(rf"\b({'|'.join(sorted(names))})\b")
        return {name for name, body in self._inline_functions if word.search(body)}

    @cached_property
    def _modules(self) -> dict[Path, str]:
        package = self.root / "gpumem"
        return {path.relative_to(self.root): path.read_text() for path in package.rglob("*.pyx")}

    @cached_property
    def _inline_functions(self) -> list[tuple[str, str]]:
        found = []
        for path in (self.root / "gpumem").rglob("*.pxd"):
            for statement in statements(path.read_text()):
                for header in statement.blocks:
                    words = [token.text for token in header]
                    if "inline" in words:
                        name = words[words.index("(") - 1]
                        found.append((name, " ".join(statement.words)))
        return found

    # ---- testing ---------------------------------------------------------------------------------

    def test(self, files: Iterable[str], plan: dict[str, object], until: float) -> Run:
        """Run tests until one fails; `plan` as `in_order` reads it, `until` by time.monotonic."""
        notes = self.root / "notes.jsonl"
        notes.write_text("")
        (self.root / "plan.json").write_text(json.dumps({**plan, "notes": str(notes)}))
        command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", PLUGIN]
        for plugin in ("cacheprovider", "faulthandler"):
            command += ["-p", f"no:{plugin}"]
        paths = [str(self.root), str(self.root / "tests"), os.environ.get("PYTHONPATH", "")]
        run = subprocess.Popen(
            [*command, *files],
            cwd=self.root,
            env={**os.environ, **ENVIRONMENT, "PYTHONPATH": os.pathsep.join(filter(None, paths))},
            stdin=subprocess.DEVNULL,
            stdout=(self.root / "pytest.log").open("wb"),
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        ended = ""
        parent = os.getppid()
        try:
            while run.poll() is None and not ended:
                time.sleep(0.02)
                if time.monotonic() > until or os.getppid() != parent:
                    ended = "unfinished"
                elif _resident(run.pid) > MOST_MEMORY:
                    ended = "memory"
        finally:
            # With the children that tests have started.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(run.pid, signal.SIGKILL)
            run.wait()
        return _read(notes, run.returncode, ended)

    def test_log(self) -> str:
        """Return what the last run of tests printed."""
        return (self.root / "pytest.log").read_text(errors="replace")


def _resident(pid: int) -> int:
    with contextlib.suppress(OSError, IndexError):
        pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE")
    return 0


def _read(notes: Path, status: int, ended: str) -> Run:
    times: dict[str, float] = {}
    test = "collection"
    failed = timed_out = False
    for line in notes.read_text(errors="replace").splitlines():
        if line.startswith("Timeout"):
            timed_out = True
        if not line.startswith("{"):
            continue  # faulthandler's stacks
        note = json.loads(line)
        test = note.get("begins", test)
        if "passed" in note:
            times[note["passed"]] = note["seconds"]
        if "failed" in note:
            test, failed = note["failed"], True
    if ended or status == 0:
        return Run(ended or "survived", test if ended else "", times)
    if timed_out:
        return Run("timeout", test, times)
    return Run("failed" if failed or status > 0 else "crashed", test, times)
