"""Ranges for profilers: what of a resource is shown, under which names."""

import importlib.util
import inspect
import subprocess
import sys
import types

import pytest
from helpers.resources import Plain

import gpumem

MIB = 1 << 20


@pytest.fixture
def shown(monkeypatch):
    """What a profiler would be shown: ("begin" | "end" | "mark", message, domain, payload)."""
    told = []

    class Annotate:
        def __init__(self, message=None, color=None, domain=None, category=None, payload=None):
            self.facts = message, domain, payload

        def __enter__(self):
            told.append(("begin", *self.facts))

        def __exit__(self, *_):
            told.append(("end", *self.facts))

    def mark(message=None, color=None, domain=None, category=None, payload=None):
        told.append(("mark", message, domain, payload))

    nvtx = types.ModuleType("nvtx")
    nvtx.annotate, nvtx.mark = Annotate, mark
    monkeypatch.setitem(sys.modules, "nvtx", nvtx)
    return told


def test_allocations_are_ranges_and_frees_are_marks(shown):
    with gpumem.Arena("host") as arena:
        annotated = gpumem.adaptors.annotate(arena)
        annotated.allocate(1000).close()
        annotated.allocate_persistent(5000).close()
        annotated.shrink()
    assert shown == [
        ("begin", "allocate", "gpumem", 1000),
        ("end", "allocate", "gpumem", 1000),
        ("mark", "free", "gpumem", 1000),
        ("begin", "allocate_persistent", "gpumem", 5000),
        ("end", "allocate_persistent", "gpumem", 5000),
        ("mark", "free", "gpumem", 5000),
        ("begin", "shrink", "gpumem", None),
        ("end", "shrink", "gpumem", None),
    ]


def test_range_covers_the_wait_of_the_call(shown):
    def make_room(nbytes, attempt):
        shown.append("waiting")
        return False

    small = gpumem.adaptors.on_failure(gpumem.adaptors.limit(gpumem.Arena("host"), MIB), make_room)
    with pytest.raises(gpumem.OutOfMemoryError):
        gpumem.adaptors.annotate(small, domain="loader").allocate(2 * MIB)
    assert shown == [
        ("begin", "allocate", "loader", 2 * MIB),
        "waiting",
        ("end", "allocate", "loader", 2 * MIB),
    ]


def test_invalid_domain_or_resource_is_refused(shown):
    with pytest.raises(TypeError, match="domain must be a str, not int"):
        gpumem.adaptors.annotate(Plain(), domain=1)
    with pytest.raises(TypeError, match="MemoryResource"):
        gpumem.adaptors.annotate("host")


def test_missing_nvtx_is_named_in_the_error(monkeypatch):
    monkeypatch.setitem(sys.modules, "nvtx", None)
    with pytest.raises(gpumem.errors.MissingFrameworkError, match=r"pip install nvtx") as caught:
        gpumem.adaptors.annotate(gpumem.Arena("host"))
    assert caught.value.name == "nvtx"


def test_nvtx_is_called_with_valid_arguments():
    if importlib.util.find_spec("nvtx") is None:
        pytest.skip("nvtx is not installed")
    import nvtx

    inspect.signature(nvtx.annotate).bind("allocate", domain="gpumem", payload=1000)
    inspect.signature(nvtx.mark).bind("free", domain="gpumem", payload=1000)
    annotated = gpumem.adaptors.annotate(gpumem.Arena("host"))
    annotated.allocate(1000).close()
    assert annotated.shrink().released_bytes > 0


def test_nvtx_is_imported_only_when_used():
    script = "import gpumem, sys; gpumem.Arena('host').allocate(8); sys.exit('nvtx' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", script]).returncode == 0
