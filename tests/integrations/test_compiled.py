"""Libraries that are compiled at their first use, in a folder of the user's."""

import os
import shutil

import pytest
from helpers.marks import NEEDS_CXX

from gpumem.integrations._common import compiled
from gpumem.integrations._common.compiled import Recipe

ANSWER = Recipe("answer-1", 'extern "C" int answer() { return 42; }\n')

pytestmark = NEEDS_CXX


@pytest.fixture(autouse=True)
def folder(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "gpumem"


def test_library_is_compiled_once_and_loaded(folder, monkeypatch):
    assert compiled.load(ANSWER).answer() == 42
    path = compiled.compiled(ANSWER)
    assert path.parent == folder
    monkeypatch.setattr(compiled, "_compile", None)  # a second compilation would call it
    assert compiled.compiled(ANSWER) == path


def test_compiler_may_be_several_words(monkeypatch):
    monkeypatch.setenv("CXX", f"env LC_ALL=C {shutil.which('c++') or shutil.which('g++')}")
    assert compiled.load(ANSWER).answer() == 42


def test_recipes_that_differ_make_different_libraries():
    other = ANSWER._replace(source=ANSWER.source.replace("42", "43"))
    with_option = ANSWER._replace(options=("-DNDEBUG",))
    paths = {compiled.compiled(each) for each in (ANSWER, other, with_option)}
    assert len(paths) == 3
    assert compiled.load(other).answer() == 43


def test_failed_compilation_tells_what_the_compiler_said_and_leaves_nothing(folder):
    with pytest.raises(RuntimeError, match="no_such_type"):
        compiled.load(Recipe("wrong-1", "no_such_type x;\n"))
    assert list(folder.iterdir()) == []


def test_error_shows_a_compilers_message_in_another_encoding(monkeypatch, tmp_path):
    compiler = tmp_path / "compiler"
    compiler.write_bytes(b"#!/bin/sh\necho 'f\xfcr nichts' >&2\nexit 1\n")
    compiler.chmod(0o700)
    monkeypatch.setenv("CXX", str(compiler))
    with pytest.raises(RuntimeError, match="exited with 1: f\ufffdr nichts"):
        compiled.load(compiled.Recipe("sample", "int a;"))


def test_options_that_name_a_path_of_another_encoding_are_taken(tmp_path):
    include = tmp_path / os.fsdecode(b"f\xfcr")
    include.mkdir()
    (include / "number").write_text("#define NUMBER 3\n")
    source = '#include <number>\nextern "C" int number() { return NUMBER; }\n'
    assert compiled.load(compiled.Recipe("sample", source, (f"-I{include}",))).number() == 3


def test_changed_library_is_not_loaded():
    path = compiled.compiled(ANSWER)
    held = bytearray(path.read_bytes())
    held[len(held) // 2] ^= 1
    path.write_bytes(held)
    with pytest.raises(RuntimeError, match="not those that the compiler wrote"):
        compiled.compiled(ANSWER)


@pytest.mark.parametrize("which", ["file", "folder"])
def test_library_that_others_can_write_is_not_loaded(folder, which):
    path = compiled.compiled(ANSWER)
    (path if which == "file" else folder).chmod(0o777)
    with pytest.raises(RuntimeError, match=r"others can write .* 777"):
        compiled.compiled(ANSWER)


def test_library_of_another_user_is_not_loaded(monkeypatch):
    compiled.compiled(ANSWER)
    other = os.geteuid() + 1
    monkeypatch.setattr(os, "geteuid", lambda: other)
    with pytest.raises(RuntimeError, match=f"and this process to user {other}"):
        compiled.compiled(ANSWER)


def test_link_in_place_of_a_library_is_not_loaded(tmp_path):
    path = compiled.compiled(ANSWER)
    path.rename(tmp_path / "elsewhere.so")
    path.symlink_to(tmp_path / "elsewhere.so")
    with pytest.raises(RuntimeError, match="not a plain file"):
        compiled.compiled(ANSWER)


def test_compiler_that_is_missing_is_named(monkeypatch):
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("PATH", "")
    with pytest.raises(RuntimeError, match=r"none of CXX, c\+\+"):
        compiled.compiled(ANSWER)
