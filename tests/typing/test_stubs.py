"""The stubs say what the compiled modules have, and users' code passes a strict checker."""

from importlib.util import find_spec
from pathlib import Path

import pytest
from helpers.child import python

import gpumem

pytest.importorskip("mypy", reason="mypy is not installed")

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]

# Modules that import their library at once: without it, nothing can be compared with a stub.
OF_LIBRARIES = {
    "cupy": r"gpumem\.integrations\.cupy\._errors",
    "numba": r"gpumem\.integrations\.numba\._manager",
}


def run_mypy(cache: Path, *arguments: str) -> None:
    python("-m", *arguments, cwd=ROOT, env={"MYPY_CACHE_DIR": str(cache)})


def test_stubs_agree_with_the_runtime(tmp_path):
    # Without the sources of frameworks: PyTorch's alone are most of what would be read, and no
    # default value here, the one thing compared with its type, is an object of theirs.
    settings = (ROOT / "pyproject.toml").read_text()
    missing = "ignore_missing_imports = true\n"
    assert settings.count(missing) == 1
    config = tmp_path / "settings.toml"
    config.write_text(settings.replace(missing, f'{missing}follow_imports = "skip"\n'))
    absent = tmp_path / "absent.txt"
    absent.write_text(
        "\n".join(name for library, name in OF_LIBRARIES.items() if find_spec(library) is None)
    )
    run_mypy(
        tmp_path,
        "mypy.stubtest",
        "gpumem",
        "--ignore-unused-allowlist",
        "--ignore-missing-stub",  # modules and functions that only Cython uses have none
        f"--mypy-config-file={config}",
        f"--allowlist={HERE / 'stubtest_allowlist.txt'}",
        f"--allowlist={absent}",
    )


@pytest.fixture(scope="module")
def strict_cache(tmp_path_factory):
    """What a strict run has read of NumPy and the standard library, for the next one."""
    return tmp_path_factory.mktemp("strict")


def test_typed_examples_pass_strict_mypy(strict_cache):
    examples = str(HERE / "examples.py")
    run_mypy(strict_cache, "mypy", "--strict", "--warn-unused-ignores", examples)


REFUSED = (
    'gpumem.Arena("host", max_memory="1GiB")',
    'gpumem.Arena("host", max_mem=1.5)',
    'gpumem.Arena("host", backing="pages")',
    'gpumem.ArenaConfig(oom_wait_ms="long")',
    'gpumem.ArenaConfig(enable="no")',
    'gpumem.Arena("host").limit = 1.5',
    'gpumem.Budget("20GiB", nodes="gpu0")',
    'gpumem.DriverPool("cuda:0", max_mem="1GiB")',
    'gpumem.DriverPool("cuda:0", max_size=b"1GiB")',
    'gpumem.PoolConfig(shareable="yes")',
    'gpumem.Environment().register("host", max_memory="1GiB")',
    'gpumem.Environment().register("host", backing="pages")',
    'gpumem.Session("host", max_mem="1GiB")',
    'gpumem.Session("host", enable_cuda_graph="yes")',
)


def test_wrong_settings_are_refused_by_the_checker(tmp_path, strict_cache):
    settings = tmp_path / "settings.py"
    settings.write_text("\n".join(["import gpumem", *REFUSED, ""]))
    found = python(
        "-m",
        "mypy",
        "--strict",
        settings,
        cwd=ROOT,
        env={"MYPY_CACHE_DIR": str(strict_cache)},
        status=1,
    )
    lines = {int(each.split(":")[1]) for each in found.stdout.splitlines() if "error:" in each}
    assert lines == {*range(2, 2 + len(REFUSED))}, found.stdout


def test_every_name_of_the_package_is_known_to_the_checker(tmp_path, strict_cache):
    uses = tmp_path / "uses.py"
    names = [name for name in dir(gpumem) if not name.startswith("_")]
    assert {"planning", "traces", "Arena", "Session"} <= set(names)
    lines = ["import gpumem", *(f"print(gpumem.{name})" for name in names)]
    uses.write_text("\n".join([*lines, "print(gpumem.planning.plan_memory)", ""]))
    run_mypy(strict_cache, "mypy", "--strict", str(uses))
