"""The native part of the benches, which is compiled at its first use, against gpumem's headers."""

import shutil

import pytest

from bench import native


@pytest.mark.skipif(
    shutil.which("c++") is None and shutil.which("g++") is None, reason="no C++ compiler here"
)
def test_native_part_of_the_benches_compiles(monkeypatch, tmp_path):
    monkeypatch.setattr(native, "BUILD", tmp_path)
    assert native.load().__name__ == "_native"
