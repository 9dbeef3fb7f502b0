"""What setup.py makes each module of, read without building one."""

import os
import runpy
from pathlib import Path

import pytest
from helpers.child import python

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
    assert len(modules) == len(names) + 2  # Cython's own functions, and the null CUDA


def test_description_for_the_index_has_no_links_into_the_tree(script, monkeypatch):
    monkeypatch.chdir(ROOT)
    text = script["description"]()
    assert "](" in (ROOT / "README.md").read_text()
    assert "](" not in text.replace("](https:", "")
    assert text.startswith("# gpumem\n")


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
        headers = [path for path in module.depends if path.endswith(".h")]
        assert bool(headers) == bool(module.include_dirs), module.name


def refusal(tmp_path, before="", **environment):
    """Run a build that must end with one line before it began, and return the line."""
    script = f"""
import runpy, sys, sysconfig
sys.argv = ["setup.py", "-q", "build", "--build-base", {str(tmp_path)!r}]
{before}
runpy.run_path("setup.py", run_name="__main__")
"""
    done = python("-c", script, cwd=ROOT, env=environment, status=1)
    assert done.stdout == ""
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


def test_declarations_rebuild_what_cimports_them_and_no_more(modules):
    users = {name for name, module in modules.items() if has_file(module.depends, "plan.pxd")}
    assert {"gpumem._copy.plan", "gpumem._copy.copy", "gpumem._native.pages.plan"} <= users
    assert "gpumem._support.process" not in users


@pytest.mark.parametrize("newer", ["setup.py", "table.pyx", "atomics.pxd"])
def test_c_is_made_anew_once_something_it_is_made_of_is_newer(
    script, modules, tmp_path, monkeypatch, newer
):
    module = modules["gpumem._native.bfc.table"]
    monkeypatch.setitem(script["is_outdated"].__globals__, "GENERATED", tmp_path)
    monkeypatch.chdir(ROOT)
    assert script["is_outdated"](module)  # there is nothing yet
    made = script["generated"](module)
    made.parent.mkdir(parents=True)
    made.touch()
    monkeypatch.setattr(os.path, "getmtime", lambda path: 0)
    assert not script["is_outdated"](module)
    later = made.stat().st_mtime + 1
    monkeypatch.setattr(os.path, "getmtime", lambda path: later * str(path).endswith(newer))
    assert script["is_outdated"](module)
