"""What holds for every tracked file."""

import re
from pathlib import Path

import pytest
from helpers.child import program
from source import layers

ROOT = Path(__file__).resolve().parents[2]
# Written apart, so that this file does not name what it forbids.
MACHINE_PATH = re.compile(r"(?<![\w.])/(?:wo" r"rk|ro" r"ot|ho" r"me|Us" r"ers)/\w")
TEXT = {".py", ".pyx", ".pxd", ".pyi", ".c", ".h", ".md", ".toml", ".txt", ".in", ".cfg", ".sh", ""}


def tracked() -> list[Path]:
    if not (ROOT / ".git").exists():
        pytest.skip("not a git checkout")
    listed = program("git", "ls-files", "-z", cwd=ROOT).stdout
    return [ROOT / name for name in listed.split("\0") if name and (ROOT / name).is_file()]


def test_no_tracked_file_names_a_path_of_one_machine():
    found = [
        f"{path.relative_to(ROOT)}:{number}: {line.strip()}"
        for path in tracked()
        if path.suffix in TEXT
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if MACHINE_PATH.search(line)
    ]
    assert not found, "\n".join(found)


def test_no_tracked_file_has_merge_conflict_markers():
    marks = ("<" * 7 + " ", "=" * 7 + "\n", ">" * 7 + " ")
    found = [
        f"{path.relative_to(ROOT)}:{number}"
        for path in tracked()
        if path.suffix in TEXT
        for number, line in enumerate(path.read_text().splitlines(keepends=True), 1)
        if line.startswith(marks)
    ]
    assert not found, "\n".join(found)


def test_no_source_file_has_more_than_a_thousand_lines():
    source = {".py", ".pyx", ".pxd", ".pyi", ".c", ".h", ".cpp", ".js", ".css"}
    lines = {
        path.relative_to(ROOT): len(path.read_text().splitlines())
        for path in tracked()
        if path.suffix in source and "uplot" not in path.parts
    }
    longer = {str(path): count for path, count in lines.items() if count > 1000}
    # One class, which Cython cannot divide; most lines are the texts of its methods.
    assert longer.keys() <= {"gpumem/_arena/arena.pyx"}, longer


def test_no_generated_file_is_tracked():
    made = {".so", ".pyc", ".o", ".whl", ".log"}
    assert not [path for path in tracked() if path.suffix in made or "__pycache__" in path.parts]


def test_compiled_module_that_python_imports_has_a_stub_and_no_other_has():
    compiled = {
        ".".join(path.relative_to(ROOT).with_suffix("").parts): path
        for path in tracked()
        if path.suffix == ".pyx" and ROOT / "gpumem" in path.parents
    }
    imported = {each.imported for each in layers.imports() if each.path.suffix == ".py"}
    stubs = {name for name, path in compiled.items() if path.with_suffix(".pyi").exists()}
    assert stubs == imported & set(compiled)


def test_no_source_includes_another_as_text():
    """Cython's include and C's of a .c file hide where a name comes from."""
    for path in tracked():
        if path.suffix in (".pyx", ".pxd"):
            assert not re.search(r"^include\b", path.read_text(), re.MULTILINE), path
        elif path.suffix in (".c", ".h"):
            assert not re.search(r'#include "[^"]+\.c"', path.read_text()), path


CLASS = re.compile(r"^(?:cdef\s+)?class\s+([A-Za-z]\w*)", re.MULTILINE)


def test_no_two_modules_define_a_class_of_the_same_name():
    modules: dict[str, list[str]] = {}
    for path in tracked():
        if path.suffix in (".py", ".pyx") and ROOT / "gpumem" in path.parents:
            for name in CLASS.findall(path.read_text()):
                modules.setdefault(name, []).append(str(path.relative_to(ROOT)))
    assert not {name: found for name, found in modules.items() if len(found) > 1}
