"""What `import gpumem` does not do: no framework, no driver, no thread."""

import shutil
import subprocess
import sys
from pathlib import Path

from helpers import child

SOURCE = Path(__file__).resolve().parents[2] / "gpumem"


def test_importing_gpumem_imports_no_framework_and_nothing_of_the_command_line():
    child.run_quietly("""
import sys
import gpumem
unwanted = {"torch", "cupy", "numba", "jax", "rmm", "cuda", "onnx", "onnxruntime", "ml_dtypes",
            "click", "rich", "asyncio", "multiprocessing", "subprocess", "hypothesis", "pytest"}
assert not unwanted & set(sys.modules), unwanted & set(sys.modules)
""")


def test_importing_gpumem_opens_no_driver_and_starts_no_thread():
    script = """
import os
import gpumem
assert len(os.listdir("/proc/self/task")) == 1
with open("/proc/self/maps") as maps:
    assert "libcuda" not in maps.read()
from gpumem._testing import host_device
assert host_device.call_count() == 0
"""
    # With two, libraries that were imported with it would start threads.
    child.run_quietly(script, env={"OMP_NUM_THREADS": "2"})


def test_naming_devices_and_settings_opens_no_driver():
    child.run_quietly("""
import sys
import gpumem
gpumem.Device("cuda:3"), gpumem.MemoryInfo("cuda:0"), gpumem.ArenaConfig(max_mem=1)
gpumem.Device("cuda:0").shares_memory_with("host"), gpumem.can_access("host", "cuda:0")
assert "cuda.bindings" not in sys.modules
assert "gpumem._native.driver.host" not in sys.modules
""")


def test_public_names_exist_and_are_documented():
    child.run_quietly("""
import gpumem
assert sorted(gpumem.__all__) == gpumem.__all__
missing = [name for name in gpumem.__all__ if not hasattr(gpumem, name)]
assert not missing, missing
undocumented = [name for name in gpumem.__all__ if not getattr(gpumem, name).__doc__]
assert not undocumented, undocumented
""")


def test_packages_are_imported_when_they_are_first_named():
    child.run_quietly("""
import sys
import gpumem
packages = {f"gpumem.{name}" for name in
            ("accounting", "adaptors", "integrations", "interop", "observe", "planning",
             "prediction", "replay", "report", "session", "traces")}
assert not packages & set(sys.modules)
gpumem.observe.record, gpumem.planning.partition, gpumem.accounting.ResourceCount
gpumem.interop.attach, gpumem.traces.load_trace, gpumem.replay.replay
gpumem.report.Report, gpumem.session.Session, gpumem.predict
libraries = [getattr(gpumem.integrations, name).enable
             for name in ("cuda_core", "cupy", "jax", "numba", "rmm", "torch")]
assert packages <= set(sys.modules)
assert not {"torch", "cupy", "jax", "rmm"} & set(sys.modules)
""")


def test_missing_name_is_an_attribute_error():
    child.run_quietly("""
import gpumem
import gpumem.integrations
for module in (gpumem, gpumem.integrations):
    try:
        module.nothing
    except AttributeError as error:
        assert "has no attribute 'nothing'" in str(error)
    else:
        raise AssertionError
""")


def test_source_that_was_not_compiled_says_what_to_do(tmp_path):
    shutil.copytree(SOURCE, tmp_path / "gpumem", ignore=shutil.ignore_patterns("*.so", "*.pyc"))
    script = "import sys; sys.path.insert(0, sys.argv[1]); import gpumem"
    # -S: the finder of an editable install would supply the compiled modules.
    command = [sys.executable, "-S", "-c", script, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    last = done.stderr.splitlines()[-1]
    assert last.startswith(f"ImportError: {tmp_path}/gpumem is source that was not compiled")
    assert "pip install -e ." in last


def test_names_that_are_imported_late_are_listed_and_then_stay():
    child.run_quietly("""
import sys
import gpumem
assert "gpumem.session" not in sys.modules
assert {"Session", "session", "Arena"} <= set(dir(gpumem))
assert gpumem.Session is gpumem.session.Session
assert vars(gpumem)["Session"] is gpumem.session.Session
""")
