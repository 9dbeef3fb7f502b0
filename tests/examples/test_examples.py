"""The examples run as a reader runs them, and print what they say they do."""

import os
import re
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

import gpumem
from gpumem.interop import vulkan

ROOT = Path(__file__).resolve().parents[2]
AVAILABLE = vulkan.availability("host")
needs_vulkan = pytest.mark.skipif(
    not AVAILABLE and os.environ.get("GPUMEM_REQUIRE_VULKAN") != "1",
    reason=f"needs software Vulkan: {AVAILABLE.reason}",
)


def run(*command, folder=ROOT):
    """Run Python with this tree's package; returns the lines it printed."""
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    done = subprocess.run(
        [sys.executable, "-W", "error", *command],
        cwd=folder,
        env=os.environ | {"PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout.splitlines()


def test_example_numpy_sees_pinned_memory_written_by_a_device():
    assert run("examples/numpy_sees_pinned.py", "--device", "host") == [
        f"step {step}: {2**step}" for step in range(4)
    ]


def test_example_paged_server_grows_shrinks_and_attends_rightly():
    lines = run("examples/paged_server.py", "--steps", "44")
    waves = [line for line in lines if line.startswith("step ")]
    assert [line.split()[1] for line in waves] == ["15:", "30:"]
    assert all(int(line.split()[6]) > 0 for line in waves)
    assert lines[-3].startswith("8192 MiB of addresses, ")
    assert lines[-2:] == [
        "attention differs from contiguous memory's by less than 1e-4: True",
        "at the end 0 bytes held",
    ]


@needs_vulkan
def test_example_numpy_reads_vulkan_output():
    assert run("examples/vulkan_producer.py", "--device", "host", "--frames", "6") == [
        f"frame {number}: {0.25 * 2**number:g}" for number in range(1, 7)
    ]


@needs_vulkan
def test_example_torch_reads_vulkan_output():
    pytest.importorskip("torch")
    assert run("examples/vulkan_producer.py", "--device", "host", "--reader", "torch") == [
        f"frame {number}: {0.25 * 2**number:g}" for number in range(1, 5)
    ]


def test_example_finds_fragmentation_from_an_out_of_memory_error():
    lines = run("examples/find_fragmentation.py")
    assert [line.split()[0] for line in lines] == ["1.", "free:", "backing=\"virtual\",", "2.",
                                                   "3.", "3.", "with"]  # fmt: skip
    asked, free, largest = (
        float(re.search(rf"{words} ([\d.]+) MiB", "\n".join(lines))[1])
        for words in ("asked for", "free:", "the largest piece")
    )
    assert largest < asked < free
    assert re.fullmatch(r"2\. \d+ free pieces, between them \d+ blocks of 'caches'", lines[3])
    assert lines[-1].startswith("with virtual the server runs to its end in ")


BLOCKS = re.findall(r"^```python\n(.*?)^```", (ROOT / "README.md").read_text(), re.S | re.M)


OTHERS = {
    re.search(r"integrations(?:\.| import )(\w+)", block)[1]: block
    for block in BLOCKS
    if "integrations" in block
}
STATUS = gpumem.driver_status()
needs_gpu = pytest.mark.skipif(not STATUS.available, reason=f"needs a CUDA device: {STATUS.reason}")


def test_readme_code_blocks_run(tmp_path):
    """One block after the other, as a reader would type them; Vulkan's where it is there."""
    assert len(BLOCKS) >= 3
    shown = [block for block in BLOCKS if block not in OTHERS.values()]
    shown = [block for block in shown if AVAILABLE or "vulkan" not in block]
    printed = run("-c", "\n".join(shown), folder=tmp_path)
    assert (tmp_path / "run.html").exists()
    for value in re.findall(r"print\(.*\)  # ([\d.]+)$", "\n".join(shown), re.M):
        assert value in printed


def test_document_about_sleep_runs(tmp_path):
    blocks = re.findall(r"^```python\n(.*?)^```", (ROOT / "docs/sleep.md").read_text(), re.S | re.M)
    assert blocks
    code = "\n".join(blocks).replace("/tmp/", f"{tmp_path}/")
    assert run("-c", code, folder=tmp_path) == []
    assert not list(tmp_path.iterdir())


def test_readme_has_a_snippet_for_each_library():
    folder = ROOT / "gpumem" / "integrations"
    modules = {path.stem for path in folder.iterdir() if path.suffix in ("", ".py")}
    assert set(OTHERS) == {name for name in modules if not name.startswith("_")}


@needs_gpu
@pytest.mark.parametrize("library", sorted(OTHERS))
def test_readme_snippets_run(library):
    name = {"c": "gpumem", "memory_saver": "torch"}.get(library, library.replace("_", "."))
    pytest.importorskip(name, reason=f"{library} is not installed")
    # Others' warnings are not ours.
    run("-W", "ignore", "-c", OTHERS[library])


@needs_gpu
def test_example_three_libraries_share_one_limit():
    lines = run("-W", "ignore", "examples/one_arena.py")
    assert [line.split()[0].rstrip(":") for line in lines] == ["torch", "cupy", "numba"]
    for line in lines:
        assert "left out" in line or int(re.search(r"reserved +(\d+)", line)[1]) <= 1024


@pytest.mark.skipif(shutil.which("gcc") is None, reason="no C compiler here: gcc is not found")
@pytest.mark.skipif(
    not Path(sysconfig.get_path("include"), "Python.h").exists(), reason="no Python.h here"
)
def test_example_c_program_allocates_from_an_arena_made_in_python(monkeypatch):
    monkeypatch.setenv("CC", "gcc")
    assert run("examples/c_program.py", "--device", "host") == [
        "8 frames passed, 0 bytes in use",
        "gpumem: out of memory: of the device, or under the arena's limit or budget",
    ]
