"""Try the corpus and changed inputs on readers; prints its seed. Status 1: something failed.

Each target runs in a fork of this process, which has imported the libraries. A failed input is
written into the folder of findings, together with the error.
"""

from __future__ import annotations

import argparse
import faulthandler
import os
import random
import signal
import sys
import time
import traceback
import warnings
from pathlib import Path

import numpy  # noqa: F401  # each fork has it
import onnx  # noqa: F401

from . import targets
from .judge import ROUND, Judge

ROOT = Path(__file__).resolve().parents[2]


def try_target(name: str, chosen: argparse.Namespace, seed: int) -> int:
    """Try one target; return how many inputs failed."""
    folder = chosen.folder / name
    folder.mkdir(parents=True, exist_ok=True)
    paths = sorted((targets.CORPUS / name).iterdir())
    # A crash ends the fork: the next one goes on after the input that crashed.
    begun, failed, progress = time.monotonic(), 0, folder / "progress"
    progress.write_text("0 0")
    while True:
        skipped = int(progress.read_text().split()[0])
        if failed and skipped > len(paths):
            break
        child = os.fork()
        if not child:
            _run_child(name, paths, skipped, folder, chosen, seed)
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        if status == 0:
            break
        failed += 1
        _report(folder, status, failed)
    tried = progress.read_text().split()[1]
    seconds = time.monotonic() - begun
    print(f"{name}: {tried} inputs in {seconds:.1f} s, {failed} findings", flush=True)
    return failed


def _run_child(name, paths, skipped, folder, chosen, seed) -> None:
    """Try the corpus from a place on, then changed inputs; ends the process."""
    status, progress = 1, folder / "progress"
    with (folder / "stderr").open("w", encoding="utf-8", errors="backslashreplace") as told:
        try:
            faulthandler.enable(told)
            os.dup2(told.fileno(), 2)
            warnings.simplefilter("ignore")
            target = targets.load(name)
            judge = Judge(target, folder / "trial", chosen.hang_seconds)
            corpus = [path.read_bytes() for path in paths]
            read = skipped
            if name != targets.PLANTED:
                judge.prepare(corpus[0])
            for at in range(skipped, len(corpus)):
                progress.write_text(f"{at + 1} {judge.tried}")
                read += judge.check(corpus[at])
                judge.check_leaks(corpus[at])
            assert read, "the reader accepts no input of its corpus"
            progress.write_text(f"{len(corpus) + 1} {judge.tried}")
            if chosen.examples:
                judge.search(corpus, chosen.seconds, seed, chosen.examples)
            progress.write_text(f"{len(corpus) + 1} {judge.tried}")
            status = 0
        except BaseException:
            traceback.print_exc(file=told)
    os._exit(status)


def _report(folder: Path, status: int, number: int) -> None:
    """Keep the input that failed, and print why."""
    told = (folder / "stderr").read_text("utf-8", "replace")
    kind = f"signal {signal.Signals(-status).name}" if status < 0 else f"status {status}"
    path = folder / f"finding-{number}"
    (folder / "trial").replace(path)
    path.with_suffix(".txt").write_text(f"{kind}\n{told}", "utf-8")
    print(f"{path}: {kind}\n    {told[-6000:].strip()}".replace("\n", "\n    "), flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("targets", nargs="*", metavar="TARGET", help=", ".join(targets.NAMES))
    parser.add_argument("--seconds", type=float, default=60, help="for each target")
    parser.add_argument("--seed", type=int, help="repeats the changes")
    parser.add_argument(
        "--examples", type=int, default=ROUND, help="of one round; 0 tries the corpus alone"
    )
    parser.add_argument("--hang-seconds", type=float, default=60, help="for one input")
    parser.add_argument("--folder", type=Path, default=ROOT / "build" / "fuzz", help="of findings")
    chosen = parser.parse_args()
    if unknown := set(chosen.targets) - {*targets.NAMES, targets.PLANTED}:
        parser.error(f"unknown target {min(unknown)!r}: expected {', '.join(targets.NAMES)}")
    os.environ.update(targets.ENVIRONMENT)
    seed = random.SystemRandom().randrange(1 << 32) if chosen.seed is None else chosen.seed
    print(f"seed {seed}", flush=True)
    failed = sum(try_target(name, chosen, seed) for name in chosen.targets or targets.NAMES)
    print(f"{failed} findings")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
