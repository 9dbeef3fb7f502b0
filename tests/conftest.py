"""Fixtures for all tests: the host device is handed on as it was found."""

from __future__ import annotations

import gc
import importlib.util
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest
from hypothesis import settings

# A capacity that is set, as large as the machine: what other processes use does not count, so that
# free bytes are exact.
PHYSICAL = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
os.environ.setdefault("GPUMEM_HOST_CAPACITY", str(PHYSICAL))
# Several processes share the cores: the threads of PyTorch and of NumPy would wait for one another
# for longer than they compute.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# A thread of ONNX Runtime's opens files in the middle of other tests, which count descriptors.
os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")
# Sealed sets of each process of the tests have a keeper of their own, not the user's.
os.environ["GPUMEM_KEEPER"] = f"{tempfile.gettempdir()}/gpumem-tests-{os.getpid()}"
os.environ["GPUMEM_KEEPER_IDLE"] = "0.5"

ROOT = Path(__file__).resolve().parent.parent
SOURCES = {".pyx", ".pxd", ".c", ".h"}


def build_what_changed() -> None:
    """Build the modules of a source tree that was built in place, where a source is newer.

    An installed package is tested as it is.
    """
    stamp = ROOT / "build/cython/in_place"  # setup.py writes it
    spec = importlib.util.find_spec("gpumem")
    if "PYTEST_XDIST_WORKER" in os.environ or spec is None or not stamp.exists():
        return
    if not Path(str(spec.origin)).resolve().is_relative_to(ROOT):
        return
    files = [path for path in (ROOT / "gpumem").rglob("*") if path.suffix in SOURCES]
    newest = max(path.stat().st_mtime for path in [*files, ROOT / "setup.py"])
    if newest < stamp.stat().st_mtime:
        return
    command = [sys.executable, "setup.py", "-q", "build_ext", "--inplace"]
    if subprocess.run(command, cwd=ROOT, check=False).returncode:
        pytest.exit("the build failed; see above", returncode=1)


build_what_changed()

from helpers.driver import HostDriver, pop_contexts  # noqa: E402
from helpers.programs import Program, page_of  # noqa: E402
from helpers.quiesce import quiesce  # noqa: E402

import gpumem  # noqa: E402
from gpumem._testing import host_device  # noqa: E402

settings.register_profile("untimed", deadline=None)  # no test asserts a time
settings.load_profile("untimed")


def pytest_configure():
    """Let programs that tests start hear Ctrl-C, which a shell's background jobs do not."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_unconfigure():
    """Remove the folder of the keeper, which ends by itself."""
    shutil.rmtree(os.environ["GPUMEM_KEEPER"], ignore_errors=True)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    """Keep a file's tests in one process, in order: what their module builds is built once."""
    from xdist.scheduler import LoadFileScheduling

    config.option.loadscopereorder = False
    return LoadFileScheduling(config, log)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers():
    """Use more processes than cores: they wait for programs and gates for a quarter of the time."""
    cores = len(os.sched_getaffinity(0))
    return cores + (cores + 1) // 2


@pytest.fixture(scope="module", autouse=True)
def at_rest():
    """A file's tests count what exists: what earlier files left ends before, not in between.

    What is still there, the tests and the libraries imported by now, is left out of later
    collections, which many tests ask for.
    """
    quiesce()
    gc.freeze()


@pytest.fixture
def host():
    """The host device's controls; capacity, lag and clock go back to what they were.

    What they count is at rest: what earlier tests left does not end in the middle of this one.
    """
    gpumem.Device("host")._open()
    quiesce()
    capacity = host_device.capacity(0)
    yield host_device
    host_device.clear_faults()
    pop_contexts()
    host_device.set_lag(0)
    host_device.use_virtual_clock(False)
    host_device.set_capacity(0, capacity)


@pytest.fixture
def driver(host):
    """Calls of the host device's driver, which act behind gpumem's back."""
    return HostDriver()


@pytest.fixture
def stream():
    return gpumem.Stream("host")


@pytest.fixture
def streams():
    return [gpumem.Stream("host") for _ in range(3)]


@pytest.fixture
def virtual_clock(host):
    """Lag counts on a clock that only moves when told."""
    host.use_virtual_clock(True)
    return host


@pytest.fixture
def leave_room(host):
    """Let the host device have so many bytes left."""

    def leave(nbytes: int) -> None:
        device = gpumem.Device("host")
        used = host.capacity(0) - device.free_bytes
        host.set_capacity(0, used + nbytes)

    return leave


@pytest.fixture
def make_arena(request):
    """Make arenas on the host; each is validated and closes at the end, so none leaks a block.

    `ARENA_CONFIG` of a test's module holds the settings that its arenas have beside their own.
    """
    made = []
    defaults = getattr(request.module, "ARENA_CONFIG", None)

    def make(config=None, memory="host", **more) -> gpumem.Arena:
        if defaults:
            config = defaults | (config or {})
        made.append(gpumem.Arena(memory, config, **more))
        return made[-1]

    yield make
    for arena in made:
        arena.check_invariants()
        arena.close()


@pytest.fixture
def arena(make_arena):
    return make_arena()


@pytest.fixture
def node():
    """The name of a node that ends with the test."""
    name = f"test-{os.getpid()}-{time.monotonic_ns()}"
    yield name
    page_of(name).unlink(missing_ok=True)


@pytest.fixture
def other():
    """Another process, which evaluates expressions."""
    program = Program()
    yield program
    program.end()


@pytest.fixture
def rng():
    """Random numbers; a failure shows the seed, GPUMEM_TEST_SEED repeats it."""
    seed = int(os.environ.get("GPUMEM_TEST_SEED") or random.SystemRandom().randrange(1 << 32))
    print(f"GPUMEM_TEST_SEED={seed}")
    return random.Random(seed)
