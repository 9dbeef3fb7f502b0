"""Worker processes that try mutants, each in its own copy of the built tree."""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import multiprocessing
import random
import shutil
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, NamedTuple

from .mutants import Mutant
from .tree import Run, Tree

# What has to notice a mutant, and in which order for a source without a history of its own.
TESTS = (
    "tests/arena",
    "tests/pages",
    "tests/budget",
    "tests/backing",
    "tests/replay",
    "tests/model",
    "tests/planning",
    "tests/observe",
    "tests/debugging",
    "tests/stress",
    "tests/integrations/test_torch_hooks.py",
    "tests/integrations/test_torch_sharing.py",
)

# Seconds: up to QUICK a test runs beside its file's others; above SLOWEST it is left out.
# LIMIT is for one test, besides ten times what it takes.
QUICK = 0.3
SLOWEST = 2.5
LIMIT = 10.0
MOST_UNRELIABLE = 3
ORDERS = 3  # in which a test has to pass without a mutant

# Built once more without a mutant, as a check of the building itself.
A_MODULE = "gpumem/_native/bfc/table.pyx"

KILLED = ("failed", "crashed", "timeout", "memory")


class Outcome(NamedTuple):
    """What became of a mutant."""

    verdict: str  # of KILLED; "survived"; "uncompilable", "no effect", "unfinished"
    test: str
    seconds: float


class BaselineError(Exception):
    """The tree without a mutant does not pass its tests."""


def killing_files(root: Path) -> list[str]:
    """List the files of the tests that have to notice a mutant."""
    found: list[Path] = []
    for place in (root / name for name in TESTS):
        found += [place] if place.is_file() else sorted(place.glob("test_*.py"))
    return [str(path.relative_to(root)) for path in found]


def in_turn(mutants: Iterable[Mutant], seed: int) -> list[Mutant]:
    """Shuffle mutants so that each beginning of the list has every file's share."""
    files: dict[str, list[Mutant]] = {}
    for mutant in mutants:
        files.setdefault(mutant.file, []).append(mutant)
    rng = random.Random(seed)
    placed = []
    for file in sorted(files):
        ones = rng.sample(files[file], len(files[file]))
        placed += [((i + rng.random()) / len(ones), file, i, one) for i, one in enumerate(ones)]
    return [one for *_, one in sorted(placed, key=lambda place: place[:3])]


class Campaign:
    """A built copy of the checkout, the time that each test takes, and workers."""

    def __init__(self, root: Path, folder: Path, workers: int, until: float) -> None:
        self.root = root
        self.folder = folder
        self.until = until
        self.files = killing_files(root)
        self.killers: dict[str, Counter[str]] = {}
        self.base = self._prepared(workers)
        self.workers = [Worker(self.base, folder / f"tree{i}") for i in range(workers)]
        self.seconds: dict[str, float] = {}
        self.slow: list[str] = []
        self.unreliable: list[str] = []

    def _prepared(self, jobs: int) -> Tree:
        # A folder that is kept has a built tree from before: of the same sources it serves again.
        base = self.folder / "base"
        digest = _digest(path for path in sorted((self.root / "gpumem").rglob("*")))
        stamp = self.folder / "sources"
        if stamp.exists() and stamp.read_text() == digest:
            shutil.rmtree(base / "tests")
            shutil.copytree(self.root / "tests", base / "tests")
            return Tree(base)
        shutil.rmtree(self.folder)
        self.folder.mkdir()
        tree = Tree.copied(self.root, base, built=False)
        if not tree.build(jobs=jobs):
            raise BaselineError(f"the tree does not build:\n{tree.log()}")
        stamp.write_text(digest)
        return tree

    # ---- without a mutant ------------------------------------------------------------------------

    def measure(self) -> list[str]:
        """Run the tests of each file by themselves, then in other orders, each `ORDERS` times.

        What a kept folder knows from before is not run again. Returns the tests that are left out:
        slow ones, and those that fail now and then.
        """
        for _, same in self._all([Task(_builds_the_same, Path(A_MODULE), self.base)]):
            if not same:
                raise BaselineError("a module without a mutant does not build as before")
        known = self.folder / "seconds.json"
        kept = json.loads(known.read_text()) if known.exists() else {}
        digests = {file: _digest([self.root / file]) for file in self.files}
        times = {file: kept[file][1] for file in digests if kept.get(file, [0])[0] == digests[file]}
        tasks = [Task(_time, file, self._plan("")) for file in digests if file not in times]
        for task, run in self._all(tasks):
            if not self._passed(run):
                self._leave_out([task.subject])
                continue
            times[task.subject] = run.times
            known.write_text(json.dumps({file: [digests[file], times[file]] for file in times}))
        self.files = [file for file in self.files if file in times]
        for file in self.files:
            self.seconds.update(times[file])
        self.slow = [test for test, took in self.seconds.items() if took > SLOWEST]
        passed = self.folder / "passed"
        everything = _digest(self.root / file for file in self.files)
        if passed.exists() and passed.read_text() == everything:
            return self.slow
        while fails := {run.test for _, run in self._all(self._rotated()) if not self._passed(run)}:
            self._leave_out(sorted(fails))
        passed.write_text(everything)
        return self.slow + self.unreliable

    def seconds_of_all(self) -> float:
        """Return how long the tests take, one after another, that a mutant has to survive."""
        left_out = {*self.slow, *self.unreliable}
        return sum(took for test, took in self.seconds.items() if test not in left_out)

    def _leave_out(self, failing: list[str]) -> None:
        self.unreliable += failing
        if len(self.unreliable) > MOST_UNRELIABLE:
            raise BaselineError(f"these fail without a mutant: {self.unreliable}")

    @staticmethod
    def _passed(run: Run) -> bool:
        if run.verdict == "unfinished":
            raise BaselineError(f"the time was over in {run.test}, without a mutant")
        if run.verdict != "survived":
            print(f"without a mutant, {run.verdict}: {run.test}", flush=True)
        return run.verdict == "survived"

    def _rotated(self) -> Iterator[Task]:
        # Each worker begins elsewhere, and goes on for its share.
        workers, count = len(self.workers), len(self.files)
        share = math.ceil(count * min(1.0, ORDERS / workers))
        for i in range(workers):
            j = i * count // workers
            files = (self.files[j:] + self.files[:j])[:share]
            yield Task(_run, files, {**self._plan(""), "first": files})

    # ---- mutants ---------------------------------------------------------------------------------

    def run(self, mutants: Iterable[Mutant]) -> Iterator[tuple[Mutant, Outcome]]:
        """Try mutants until the time is over; in the order in which they end."""
        tasks = (
            Task(_try, mutant, self.files, self._plan(mutant.file), self.base) for mutant in mutants
        )
        for task, outcome in self._all(tasks):
            if outcome.verdict in KILLED:
                killers = self.killers.setdefault(task.subject.file, Counter())
                killers[outcome.test.split("::")[0]] += 1
            yield task.subject, outcome

    def _plan(self, source: str) -> dict[str, Any]:
        # What has noticed most of a source's mutants comes first, then the folder of its name.
        killers = self.killers.get(source, Counter())
        folder = f"tests/{Path(source).parent.name or 'budget'}/"
        first = sorted(self.files, key=lambda file: (-killers[file], folder not in file))
        return {
            "first": first,
            "seconds": self.seconds,
            "quick": QUICK,
            "left_out": self.slow + self.unreliable,
            "limit": LIMIT,
        }

    def _all(self, tasks: Iterable[Task]) -> Iterator[tuple[Task, Any]]:
        waiting = iter(tasks)
        busy: dict[Any, tuple[Worker, Task]] = {}
        for worker in self.workers:
            self._give(worker, waiting, busy)
        while busy:
            for pipe in wait(list(busy)):
                worker, task = busy.pop(pipe)
                answer = worker.pipe.recv()
                # The next one first: whoever reads the answers may take its time.
                self._give(worker, waiting, busy)
                yield task, answer

    def _give(self, worker: Worker, tasks: Iterator[Task], busy: dict[Any, Any]) -> None:
        if time.monotonic() < self.until and (task := next(tasks, None)) is not None:
            worker.pipe.send((task, self.until))
            busy[worker.pipe] = (worker, task)

    def close(self) -> None:
        """End the workers."""
        for worker in self.workers:
            worker.close()


# ---- in a worker ---------------------------------------------------------------------------------


class Task:
    """A function, called by a worker with its tree, what it is about, and until when."""

    def __init__(self, function: Callable[..., Any], subject: Any, *more: Any) -> None:
        self.function = function
        self.subject = subject
        self.more = more


class Worker:
    """A process with a copy of the tree."""

    def __init__(self, base: Tree, root: Path) -> None:
        fork = multiprocessing.get_context("fork")
        self.pipe, there = fork.Pipe()
        self.process = fork.Process(target=self._serve, args=(there, base, root))
        self.process.start()
        there.close()

    def _serve(self, pipe: Connection, base: Tree, root: Path) -> None:
        self.pipe.close()
        shutil.rmtree(root, ignore_errors=True)
        tree = Tree.copied(base.root, root, built=True)
        with contextlib.suppress(EOFError, BrokenPipeError, KeyboardInterrupt):
            while (order := pipe.recv()) is not None:
                task, until = order
                pipe.send(task.function(tree, task.subject, *task.more, until))

    def close(self) -> None:
        """End the process, once it has done what it does."""
        with contextlib.suppress(BrokenPipeError):
            self.pipe.send(None)
        self.process.join()


def _time(tree: Tree, file: str, plan: dict[str, Any], until: float) -> Run:
    return tree.test([file], {**plan, "limit": 120}, until)


def _run(tree: Tree, files: Sequence[str], plan: dict[str, Any], until: float) -> Run:
    return tree.test(files, plan, until)


def _builds_the_same(tree: Tree, module: Path, base: Tree, until: float) -> bool:
    return tree.build([module]) and _bytes(tree, module) == _bytes(base, module)


def _try(
    tree: Tree, mutant: Mutant, files: Sequence[str], plan: dict[str, Any], base: Tree, until: float
) -> Outcome:
    begun = time.monotonic()
    modules = base.users(mutant.file, mutant.function)
    text = (base.root / mutant.file).read_text()
    try:
        (tree.root / mutant.file).write_text(mutant.apply(text))
        if not tree.build(modules):
            run = Run("uncompilable", "", {})
        elif all(_bytes(tree, module) == _bytes(base, module) for module in modules):
            run = Run("no effect", "", {})
        else:
            run = tree.test(files, plan, until)
    finally:
        (tree.root / mutant.file).write_text(text)
        for module in modules:
            binary = base.binary(module)
            there = tree.root / binary.relative_to(base.root)
            there.unlink(missing_ok=True)
            shutil.copy2(binary, there)
    return Outcome(run.verdict, run.test, time.monotonic() - begun)


def _bytes(tree: Tree, module: Path) -> bytes:
    return tree.binary(module).read_bytes()


def _digest(paths: Iterable[Path]) -> str:
    total = hashlib.sha256()
    for path in paths:
        if path.suffix in (".pyx", ".pxd", ".py", ".h", ".c", ".cpp") and path.is_file():
            total.update(f"{path}\0".encode() + path.read_bytes())
    return total.hexdigest()
