"""torch_memory_saver's own test programs over gpumem's module of the same names.

    python3 tests/gpu/memory_saver_tests.py SOURCES [NAME ...] [--own]

SOURCES is a folder with the package's sources, for their ``test/examples``. Each program runs in a
process of its own, in which ``torch_memory_saver`` is `gpumem.integrations.memory_saver`; its
helpers for tests are the package's. ``--own`` runs them over the installed package, to compare.
Needs a GPU and PyTorch. The exit status is 1 if one of them fails.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path

# The programs that ask for nothing but the names that both have.
APPLY = ("simple", "cpu_backup", "cuda_graph", "multi_device_torch_mode", "rl_example")
OTHERS = {
    "multi_device": "the hook that is preloaded, on several GPUs",
    "training_engine": "a library that is preloaded",
    "nested_region": "a library that is preloaded, and the package's C functions",
    "cuda_vmm_granularity": "a library that is preloaded",
    "chunked": "an option of regions that gpumem does not have",
    "disk_backup": "an option of regions that gpumem does not have: Arena.sleep writes files",
    "keep_resident": "an option of regions that gpumem does not have: a tag that stays is like it",
    "xpu_multi_device": "an Intel GPU",
    "xpu_scenarios": "an Intel GPU",
}

PROGRAM = """
import sys, types
sources, name, own = sys.argv[1], sys.argv[2], sys.argv[3] == "own"
if not own:
    from gpumem.integrations import memory_saver
    package = types.ModuleType("torch_memory_saver")
    package.__path__ = [sources + "/torch_memory_saver"]
    package.torch_memory_saver = memory_saver.torch_memory_saver
    package.TorchMemorySaver = memory_saver.TorchMemorySaver
    sys.modules["torch_memory_saver"] = package
    from gpumem.integrations import torch
    torch.enable(mode="full")
sys.path.insert(0, sources + "/test")
import importlib
importlib.import_module("examples." + name).run(hook_mode="torch")
"""


def run(sources: Path, name: str, *, own: bool) -> tuple[bool, str]:
    """Run one program; return whether it ended well, and what it printed."""
    command = [sys.executable, "-c", PROGRAM, str(sources), name, "own" if own else "gpumem"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    return done.returncode == 0, done.stdout + done.stderr


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("sources", type=Path)
    parser.add_argument("names", nargs="*", help="programs to run; all that apply if left out")
    parser.add_argument("--own", action="store_true")
    given = parser.parse_args()
    folder = given.sources.resolve() / "test" / "examples"
    there = sorted(path.stem for path in folder.glob("*.py") if path.stem != "__init__")
    if not there:
        parser.error(f"{folder} has no programs")
    failed = 0
    for name in given.names or there:
        if name not in APPLY and not given.names:
            print(f"{name}: left out: {OTHERS.get(name, 'not known here')}")
            continue
        passed, text = run(given.sources.resolve(), name, own=given.own)
        failed += not passed
        print(f"{name}: {'passed' if passed else 'failed'}", text if not passed else "", sep="\n")
    sys.exit(failed > 0)


if __name__ == "__main__":
    main()
