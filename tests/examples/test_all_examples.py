"""The script that runs every example: what it finds, leaves out and reports."""

import importlib.machinery
import importlib.util
import re
from pathlib import Path

import pytest
from helpers.child import path_with, python

from gpumem.report import write_report

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / ".ci" / "examples"
PARTS = {
    "distributed/ranks.py",
    "paged_server/block_pool.py",
    "vulkan/shared_buffer.py",
    "vulkan/shared_timeline.py",
    "vulkan/vulkan_device.py",
}  # which programs import

pytestmark = pytest.mark.skipif(not SCRIPT.exists(), reason="not in the source distribution")


@pytest.fixture(scope="module")
def script():
    """Return the script as a module."""
    loader = importlib.machinery.SourceFileLoader("ci_examples", str(SCRIPT))
    spec = importlib.util.spec_from_loader("ci_examples", loader)
    module = importlib.util.module_from_spec(spec)
    loader.exec_module(module)
    return module


def test_list_names_every_program_and_why_one_is_left_out(script):
    lines = python(SCRIPT, "--list").stdout.splitlines()
    named = {line.split()[1].rstrip(":") for line in lines}
    files = {str(path.relative_to(ROOT / "examples")) for path in ROOT.glob("examples/**/*.py")}
    assert named == files - PARTS
    assert all(line.startswith("run ") or line.partition(": ")[2] for line in lines)


def test_programs_with_settings_exist(script):
    named = {*script.WITHOUT_GPU, *script.COMMANDS, *script.NEED_GPU, *script.NEED_COMPILER}
    assert named <= {str(path.relative_to(script.FOLDER)) for path in script.programs()}


def test_imported_leaves_out_what_a_program_can_do_without(script, tmp_path):
    program = tmp_path / "program.py"
    (tmp_path / "beside.py").touch()
    program.write_text(
        '"""Text\nfrom one\n"""\nimport os.path\nfrom beside import it\n'
        "from torch import nn\ntry:\n    import numba\nexcept ImportError:\n    pass\n"
    )
    assert script.imported(program) == {"os", "torch"}


@pytest.mark.parametrize(
    ("text", "succeeds"),
    [("print('right: True')", True), ("print('right: False')", False), ("1 / 0", False)],
)
def test_run_fails_with_the_exit_code_or_a_check_that_is_false(script, tmp_path, text, succeeds):
    program = tmp_path / "program.py"
    program.write_text(text)
    assert script.run(program, [])[0] is succeeds


@pytest.mark.parametrize("name", ["fsdp2", "pipeline", "tensor_parallel"])
def test_program_over_several_ranks_succeeds(script, name):
    pytest.importorskip("torch")
    succeeded, printed = script.run(script.FOLDER / "distributed" / f"{name}.py", [])
    assert succeeded, printed


@pytest.mark.parametrize(
    ("program", "package"),
    [
        *((f"distributed/{name}", "torch") for name in ("checkpoint", "fsdp2", "pipeline")),
        ("distributed/tensor_parallel", "torch"),
        ("dask_shuffle", "distributed"),
        ("load_weights", "torch"),
        ("onnx_model", "onnx"),
        ("restart_without_loading", "torch"),
        ("vulkan/frames", "vulkan"),
    ],
)
def test_program_says_in_one_line_that_a_package_is_missing(tmp_path, program, package):
    (tmp_path / f"{package}.py").write_text("raise ImportError('it is hidden')\n")
    path = ROOT / "examples" / f"{program}.py"
    done = python(path, env={"PYTHONPATH": path_with(tmp_path, ROOT)})
    assert re.fullmatch(r"this example needs .+: it is hidden\n", done.stdout)
    assert done.stderr == ""


def test_checkpoint_succeeds_and_its_ranks_record_into_files_that_make_one_page(script, tmp_path):
    pytest.importorskip("torch")
    program = script.FOLDER / "distributed" / "checkpoint.py"
    succeeded, printed = script.run(program, ["--record", str(tmp_path)])
    assert succeeded, printed
    files = sorted(tmp_path.glob("rank*.rec"))
    assert [each.name for each in files] == ["rank0.rec", "rank1.rec"]
    report = write_report(files, tmp_path / "ranks.html")
    assert [run.name for run in report.runs] == ["rank0", "rank1"]
