"""Build, test and measure on a machine with a CUDA device; each command ends with a short table.

    python3 tests/gpu/run.py test      install into this interpreter, run the tests
    python3 tests/gpu/run.py measure   run the benches (after an install)
    python3 tests/gpu/run.py check     compute-sanitizer over the tests of gpumem's own memory
    python3 tests/gpu/run.py stress    search for wrong bytes for minutes, in every kind of memory

Logs and results go to the folder named by the environment variable OUT, else to ./build/gpu.
The machine brings Cython, setuptools, cuda-bindings, NumPy and pytest; nothing is fetched.
"""

import argparse
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
OUT = Path(os.environ.get("OUT", ROOT / "build" / "gpu"))
PYTHON = sys.executable
STEPS_SECONDS = (
    330  # of real training and inference, so that all of `measure` is done in ten minutes
)
# Parts of names of tests.
NOT_UNDER_THE_TOOL = (
    "exit_with_everything_open",
    "forked_child",
    "out_of_memory_leaves_the_arena_unchanged",
    "all_libraries_share_one_tensor",
    "requests_no_order",
    "import_without_a_stream",
    "shareable_memory_is_zeroed",
    "lost_gpu",
    "attention_over",
    "ordered_on_both_devices",
)
VERDICT = re.compile("passed|failed|ERROR|wrong bytes")


def step(name, command, log, **environment):
    """Run one command with its output in a log; return (name, result, last lines)."""
    path = OUT / log
    with path.open("w") as sink:
        done = subprocess.run(
            command, cwd=ROOT, stdout=sink, stderr=subprocess.STDOUT, env=os.environ | environment
        )
    return name, done.returncode, path.read_text(errors="replace").splitlines()


def install():
    command = [PYTHON, "-m", "pip", "install", "--no-build-isolation", "--no-deps", "-e", "."]
    return [step("install", command, "install.log")]


def test():
    steps = install()
    if steps[0][1] == 0:
        tests = [PYTHON, "-m", "pytest", "-q", "-ra", "-p", "no:cacheprovider", "tests/gpu"]
        steps.append(step("gpumem info", [PYTHON, "-m", "gpumem", "info"], "info.log"))
        steps.append(step("tests/gpu", tests, "tests.log"))
        driver = [*tests[:-1], "tests/hostdev/behaviour"]
        steps.append(step("driver behaviour", driver, "driver.log", GPUMEM_TEST_DRIVER="cuda"))
        steps.append(searched("cuda:0", 20, "--max-mem", str(1 << 29)))
    return steps


def measure():
    folder = ["--out", str(OUT)]
    real = [*folder, "--graphs", "--limit", "6", "--seconds", str(STEPS_SECONDS)]
    return [
        step("demo", [PYTHON, "-m", "gpumem", "demo"], "demo.log"),
        step("bench", [PYTHON, "-m", "bench", *traces()], "bench.log"),
        step("bench --json", [PYTHON, "-m", "bench", "--json", *traces()], "bench.json"),
        step("bench.frameworks", [PYTHON, "-m", "bench.frameworks", *folder], "frameworks.log"),
        step("bench.torch_steps", [PYTHON, "-m", "bench.torch_steps", *real], "torch_steps.log"),
    ]


def traces():
    folder = os.environ.get("GPUMEM_TRACES")
    return ["--traces", folder] if folder else []


def check():
    tool = shutil.which("compute-sanitizer") or "/usr/local/cuda/bin/compute-sanitizer"
    tests = [PYTHON, "-m", "pytest", "-v", "-p", "no:cacheprovider", "tests/gpu"]
    # gpumem's own: for its backtraces the tool keeps frames of Python, and with them the arrays of
    # CuPy and Numba whose end their tests wait for; JAX compiles for minutes under it.
    frameworks = ("torch", "cupy", "numba", "jax", "rmm", "cuda_core")
    tests += [f"--ignore=tests/gpu/test_{name}_on_gpu.py" for name in frameworks]
    # The tool runs kernels one by one, so that a stream held back holds back all, and keeps 2 MiB
    # of its own now and then.
    leave_out = ["-k", " and ".join(f"not {name}" for name in NOT_UNDER_THE_TOOL)]
    # A call that the driver is meant to refuse, a question about unknown memory say, is no error.
    options = ["--tool", "memcheck", "--error-exitcode", "9", "--report-api-errors", "no"]
    command = [tool, *options, *tests, *leave_out]
    return [step("memcheck", command, "memcheck.log")]


def stress():
    return [
        searched("cuda:0", 120, "--max-mem", str(1 << 29)),
        searched("cuda:0", 120, "--pairs", log="pairs"),
        searched("cuda:0/host_accessible", 30, "--backing", "regions"),
        searched("cuda:0/managed", 30, "--backing", "regions"),
    ]


def searched(memory, seconds, *more, log="stress"):
    command = [PYTHON, "-m", "tests.stress", "--device", memory, "--seconds", str(seconds), *more]
    return step(f"{log} {memory}", command, f"{log}-{re.sub('[:/]', '-', memory)}.log")


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("command", choices=["test", "measure", "check", "stress"])
    chosen = parser.parse_args().command
    OUT.mkdir(parents=True, exist_ok=True)
    steps = {"test": test, "measure": measure, "check": check, "stress": stress}[chosen]()
    for name, code, lines in steps:
        print(f"---- {name}: tail of its log")
        print("\n".join(lines[-40:] if code else lines[-20:]))
    print(f"\n{'step':<20} {'result':<10} said")
    for name, code, lines in steps:
        said = next((s for s in reversed(lines) if VERDICT.search(s)), "")
        print(f"{name:<20} {'ok' if code == 0 else f'exit {code}':<10} {said.strip()}")
    return max(code != 0 for _, code, _ in steps)


if __name__ == "__main__":
    sys.exit(main())
