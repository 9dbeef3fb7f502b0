"""The native part of the benches is compiled at its first use, and when gpumem's headers change."""

from helpers.marks import NEEDS_CXX

from bench import native


@NEEDS_CXX
def test_native_part_of_the_benches_compiles():
    assert native.load().__name__ == "_native"
