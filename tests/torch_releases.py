"""Compile gpumem's allocator against the headers of several releases of PyTorch, and test it.

    python -m tests.torch_releases                  of 2.11 and the newest
    python -m tests.torch_releases 2.12.0 2.14.1 --keep ~/torch-headers

Wheels come from the package index, 0.5 GB each; their headers and the two libraries that are linked
are kept, in a temporary folder or the one of `--keep`, where a later run finds them. The tests of
the allocators run with the release's libraries. Needs a C++ compiler and CUDA's headers. Exit code
1: a release's headers refuse the allocator, or a test fails.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from gpumem.integrations.torch import _build

from .helpers.torch_library import VARIABLE, linkable, module_of

RELEASES = ("2.11.0", "newest")
WHEEL = ["--only-binary=:all:", "--python-version", "3.12", "--platform", "manylinux_2_28_x86_64"]

TESTS = [
    Path(__file__).parent / "integrations" / name
    for name in ("test_torch_allocator.py", "test_torch_pinned.py")
]
NEEDED = ("torch/version.py", "torch/lib/libc10.so", "torch/lib/libc10_cuda.so")


def headers_of(release: str, folder: Path) -> Path:
    """Return the folder `torch` of a release, downloaded unless it is there."""
    unpacked = folder / release / "torch"
    if release != "newest" and (unpacked / "version.py").exists():
        return unpacked
    wanted = "torch" if release == "newest" else f"torch=={release}"
    with tempfile.TemporaryDirectory(dir=folder) as download:
        command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", *WHEEL]
        subprocess.run([*command, "-d", download, wanted], check=True)
        (wheel,) = Path(download).glob("*.whl")
        unpacked = folder / wheel.name.split("-")[1] / "torch"
        with zipfile.ZipFile(wheel) as archive:
            kept = [
                name
                for name in archive.namelist()
                if name.startswith("torch/include/") or name in NEEDED
            ]
            archive.extractall(unpacked.parent, kept)
    return unpacked


def tested(unpacked: Path) -> str:
    """Run the tests with a release's libraries; return the line in which pytest sums up."""
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *map(str, TESTS)],
        env=os.environ | {VARIABLE: str(unpacked)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    if done.returncode != 0:
        raise RuntimeError(f"tests fail:\n{done.stdout}")
    return done.stdout.splitlines()[-1]


def main() -> int:
    """Compile against each release, and test it; print a line for each."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.torch_releases",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("releases", nargs="*", default=RELEASES)
    parser.add_argument("--keep", type=Path, help="folder of what is kept")
    given = parser.parse_args()
    refused = 0
    with tempfile.TemporaryDirectory() as temporary:
        folder = given.keep or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        os.environ["XDG_CACHE_HOME"] = temporary
        for release in given.releases:
            unpacked = headers_of(release, folder)
            torch = module_of(linkable(unpacked, Path(temporary, unpacked.parent.name)))
            try:
                _build.build(torch)
                print(f"PyTorch {torch.__version__}: compiles; {tested(unpacked)}", flush=True)
            except RuntimeError as error:
                refused += 1
                print(f"PyTorch {torch.__version__}: {error}", flush=True)
    return int(refused != 0)


if __name__ == "__main__":
    sys.exit(main())
