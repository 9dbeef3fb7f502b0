"""Refusals for limits of the process: the error names the limit, and nothing is imported for it."""

import pytest
from helpers import child

OPEN_FILES = """
import resource
import sys
import gpumem
from gpumem.errors import OutOfMemoryError
hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
resource.setrlimit(resource.RLIMIT_NOFILE, (48, hard))
arena, blocks = gpumem.Arena("host"), []
before = set(sys.modules)
try:
    while len(blocks) < 100:
        blocks.append(arena.allocate(10, shareable=True))
except OutOfMemoryError as error:
    assert "host:0 is out of file descriptors" in str(error), error
    assert "too many open files: RLIMIT_NOFILE allows 48" in error.advice, error.advice
    assert error.report.lacks == "file descriptors"
assert len(blocks) < 48 and set(sys.modules) == before
blocks.clear()
arena.allocate(10, shareable=True).close()
"""

ADDRESSES = """
import gpumem
from gpumem.errors import OutOfMemoryError
arena, blocks = gpumem.Arena("host"), []
try:
    while len(blocks) < 100:
        blocks.append(arena.allocate(10 << 20))
except OutOfMemoryError as error:
    assert "out of address space" in str(error) and "RLIMIT_AS allows" in error.advice, error
assert len(blocks) < 100
blocks.clear()
arena.allocate(10 << 20).close()
"""


def limited(kibibytes, script):
    return f"""
import resource
resource.setrlimit(resource.RLIMIT_AS, ({kibibytes} << 10, {kibibytes} << 10))
{script}"""


def test_a_refusal_names_the_limit_on_open_files_and_imports_nothing():
    child.run_quietly(OPEN_FILES)


def test_a_refusal_names_the_limit_on_addresses():
    child.run_quietly(limited(200_000, ADDRESSES))


@pytest.mark.parametrize("kibibytes", [2_000_000, 3_000_000, 4_000_000, 5_000_000])
def test_an_arena_serves_small_and_large_blocks_under_a_limit_on_addresses(kibibytes):
    child.run_quietly(
        limited(
            kibibytes,
            """
import gpumem
arena = gpumem.Arena("host")
blocks = arena.allocate(1000), arena.allocate(10 << 20), gpumem.Arena("host").allocate(5)
""",
        )
    )
