"""The native part of the benches, which is compiled at its first use, against gpumem's headers."""

from helpers.marks import NEEDS_CXX

from bench import native


@NEEDS_CXX
def test_native_part_of_the_benches_compiles(monkeypatch, tmp_path):
    monkeypatch.setattr(native, "BUILD", tmp_path)
    assert native.load().__name__ == "_native"
