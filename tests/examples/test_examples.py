"""The examples run as a reader runs them, and print what they say they do."""

import re
import shutil
import sysconfig
from pathlib import Path

import pytest
from helpers.child import path_with, python
from helpers.vulkan_producer import reason_without

import gpumem

ROOT = Path(__file__).resolve().parents[2]
REASON = reason_without("host")
needs_vulkan = pytest.mark.skipif(bool(REASON), reason=REASON)


def run(*command, folder=ROOT):
    """Run Python with this tree's package; returns the lines it printed."""
    done = python("-W", "error", *command, cwd=folder, env={"PYTHONPATH": path_with(ROOT)})
    assert done.stderr == ""
    return done.stdout.splitlines()


def test_example_numpy_sees_pinned_memory_written_by_a_device():
    assert run("examples/numpy_sees_pinned.py", "--device", "host") == [
        f"step {step}: {2**step}" for step in range(4)
    ]


def test_example_dask_shuffle_passes_tensors_on_without_a_copy():
    pytest.importorskip("distributed", reason="Dask's distributed is not installed")
    lines = run("examples/dask_shuffle.py")
    assert lines[0].startswith("48 MiB made in 32 MiB: ")
    assert lines[1] == "sums over 8388608: [0, 1, 2, 3, 4, 5]"
    assert lines[2].startswith("passed on: 6 tensors by descriptor, 0 bytes copied; ")


def test_example_onnx_model_is_run_on_tensors_in_place():
    for name in ("onnx", "onnxruntime"):
        pytest.importorskip(name, reason=f"{name} is not installed")
    assert run("examples/onnx_model.py", "--device", "host") == [
        "run 1: as NumPy computes it: True",
        "run 2: as NumPy computes it: True",
        "written in place: True",
        "a plan needs 128 KiB beside 1024 KiB of weights",
    ]


def test_example_paged_server_grows_shrinks_and_attends_rightly():
    lines = run("examples/paged_server/server.py", "--steps", "44")
    waves = [line for line in lines if line.startswith("step ")]
    assert [line.split()[1] for line in waves] == ["15:", "30:"]
    assert all(int(line.split()[6]) > 0 for line in waves)
    assert lines[-3].startswith("8192 MiB of addresses, ")
    assert lines[-2:] == [
        "attention differs from contiguous memory's by less than 1e-4: True",
        "at the end 0 bytes held",
    ]


def test_example_one_limit_trains_serves_and_trains_on():
    lines = run("examples/one_limit.py", "--device", "host", "--mib", "8")
    assert [line.split()[0] for line in lines[:4]] == ["phase", "train", "serve", "train"]
    held = [int(re.search(r" (\d+) ", line)[1]) for line in lines[1:4]]
    assert all(16 < each <= 32 for each in held)
    assert "optimizer" in lines[2]
    assert lines[4:] == [
        "as with memory for everything at once: True",
        "the limit is 32 MiB; neither phase fits in half of it",
    ]


@needs_vulkan
def test_example_numpy_reads_vulkan_output():
    assert run("examples/vulkan/frames.py", "--device", "host", "--frames", "6") == [
        f"frame {number}: {0.25 * 2**number:g}" for number in range(1, 7)
    ]


@needs_vulkan
def test_example_torch_reads_vulkan_output():
    pytest.importorskip("torch")
    assert run("examples/vulkan/frames.py", "--device", "host", "--reader", "torch") == [
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


STATUS = gpumem.driver_status()
needs_gpu = pytest.mark.skipif(not STATUS.available, reason=f"needs a CUDA device: {STATUS.reason}")


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
