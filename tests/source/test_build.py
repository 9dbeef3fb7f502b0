"""What setup.py makes each module of, read without building one."""

import os
import runpy
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest
from setuptools import Distribution

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "gpumem"


@pytest.fixture(scope="module")
def script():
    """What setup.py defines."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(ROOT)
        return runpy.run_path(str(ROOT / "setup.py"), run_name="setup")


@pytest.fixture(scope="module")
def modules(script):
    """Every module's extension by its name."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(ROOT)
        return {module.name: module for module in script["extensions"]()}


def test_every_pyx_is_a_module(modules):
    names = {
        ".".join(path.relative_to(ROOT).with_suffix("").parts) for path in PACKAGE.rglob("*.pyx")
    }
    assert names <= set(modules)
    assert len(modules) == len(names) + 1  # Cython's own functions


# Against a PyTorch, where it is installed.
COMPILED_LATER = {"gpumem/integrations/torch/allocator.cpp"}


def test_each_c_file_belongs_to_one_module(modules):
    for path in [*PACKAGE.rglob("*.c"), *PACKAGE.rglob("*.cpp")]:
        source = str(path.relative_to(ROOT))
        users = [module.name for module in modules.values() if source in module.sources]
        assert len(users) == (source not in COMPILED_LATER), source


def test_headers_of_the_host_device_are_made_into_no_other_module(modules):
    users = {
        module.name.rpartition(".")[2].lstrip("_")
        for module in modules.values()
        if any("/hostdev/" in path for path in module.depends)
    }
    assert "host" in users
    assert users <= {"host", "host_device"}


def test_a_header_rebuilds_what_includes_it_and_no_more(modules):
    users = {name for name, module in modules.items() if has_file(module.depends, "atomics.h")}
    assert len(users) > 5
    assert users < set(modules)
    indirect = [module for module in modules.values() if has_file(module.depends, "recorder.h")]
    assert indirect
    assert all(has_file(module.depends, "owner_lock.h") for module in indirect)


def has_file(paths, name):
    return any(Path(path).name == name for path in paths)


def test_include_folders_are_those_of_the_headers(modules):
    for module in modules.values():
        assert all((ROOT / folder).is_dir() for folder in module.include_dirs), module.name
        assert bool(module.depends) == bool(module.include_dirs), module.name


def refusal(tmp_path, before="", **environment):
    """Run a build that must end with one line before it began, and return the line."""
    script = f"""
import runpy, sys, sysconfig
sys.argv = ["setup.py", "-q", "build", "--build-base", {str(tmp_path)!r}]
{before}
runpy.run_path("setup.py", run_name="__main__")
"""
    done = subprocess.run(
        [sys.executable, "-c", script],
        cwd=ROOT,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (done.returncode, done.stdout) == (1, "")
    assert not list(tmp_path.iterdir())
    (line,) = done.stderr.splitlines()
    return line


@pytest.mark.parametrize(("variable", "language"), [("CC", "C"), ("CXX", "C++")])
def test_a_missing_compiler_is_one_line_before_anything_is_built(tmp_path, variable, language):
    line = refusal(tmp_path, **{variable: "/nowhere/compiler"})
    assert f"needs a {language} compiler" in line
    assert "/nowhere/compiler" in line


def test_missing_headers_of_python_are_one_line_before_anything_is_built(tmp_path):
    line = refusal(tmp_path, before="sysconfig.get_path = lambda name: '/nowhere'")
    assert "needs Python's headers" in line
    assert "/nowhere" in line


def test_module_made_before_setup_py_changed_is_made_anew(script, modules, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    module = modules["gpumem._native.bfc.table"]
    assert not script["is_outdated"](module)  # there is nothing yet
    made = tmp_path.joinpath(script["CYTHON"]["build_dir"], *module.name.split(".")).with_suffix(
        ".c"
    )
    made.parent.mkdir(parents=True)
    made.touch()
    changed = os.path.getmtime(ROOT / "setup.py")
    os.utime(made, (changed - 1, changed - 1))
    assert script["is_outdated"](module)
    os.utime(made, (changed + 1, changed + 1))
    assert not script["is_outdated"](module)


@pytest.mark.parametrize(
    ("does", "platform"),
    [
        ("open(sys.argv[3] + '/a-manylinux_2_34_x86_64.whl', 'w')", "manylinux_2_34_x86_64"),
        ("sys.exit('too-recent versioned symbols')", "linux_x86_64"),
    ],
    ids=["renamed", "refused"],
)
def test_wheel_that_auditwheel_refuses_keeps_its_name(
    script, tmp_path, monkeypatch, does, platform
):
    stand_in = tmp_path / "modules" / "auditwheel" / "__main__.py"
    stand_in.parent.mkdir(parents=True)
    stand_in.write_text(f"import sys; {does}")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "modules"))
    made = tmp_path / "a-linux_x86_64.whl"
    made.touch()
    script["name_its_linux"](made)
    assert [path.name for path in tmp_path.glob("*.whl")] == [f"a-{platform}.whl"]
    assert len(list(tmp_path.iterdir())) == 2  # no folder is left


def test_source_archives_of_equal_files_are_equal(script, tmp_path, monkeypatch):
    monkeypatch.delenv("SOURCE_DATE_EPOCH", raising=False)
    found = []
    for number, names in enumerate((["b.py", "a.py"], ["a.py", "b.py"])):
        monkeypatch.chdir(tmp_path)
        folder = tmp_path / str(number) / "made-1.0"
        folder.mkdir(parents=True)
        monkeypatch.chdir(folder.parent)
        for name in names:
            (folder / name).write_text(name)
            os.utime(folder / name, (number + 1, number + 1))
            (folder / name).chmod(0o600 + 0o044 * number)
        command = script["SourceArchive"](Distribution())
        made = command.make_archive("dist/made-1.0", "gztar", base_dir="made-1.0")
        found.append(Path(made).read_bytes())
    assert found[0] == found[1]
    monkeypatch.setenv("SOURCE_DATE_EPOCH", "1000000000")
    assert (
        Path(command.make_archive("dist/made-1.0", "gztar", base_dir="made-1.0")).read_bytes()
        != found[0]
    )
    with tarfile.open(made) as archive:
        assert {member.mtime for member in archive} == {1000000000}
        assert archive.getnames() == ["made-1.0", "made-1.0/a.py", "made-1.0/b.py"]
