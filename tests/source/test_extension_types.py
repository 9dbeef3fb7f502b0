"""Objects of compiled types that their constructor did not make: an error, never a crash."""

from __future__ import annotations

import importlib
import pkgutil

import pytest
from helpers import child

import gpumem

HEAP_TYPE = 1 << 9  # Py_TPFLAGS_HEAPTYPE: made by a class statement


def compiled_types():
    """Return (module, name) of every extension type of the package, once each."""
    found = {}
    for entry in pkgutil.walk_packages(gpumem.__path__, "gpumem."):
        module = importlib.import_module(entry.name)
        if str(module.__file__).endswith(".py"):
            continue
        for name, value in vars(module).items():
            if isinstance(value, type) and not value.__flags__ & HEAP_TYPE:
                found.setdefault(value, (module.__name__, name))
    return sorted(where for kind, where in found.items() if kind.__module__.startswith("gpumem"))


USE = """
import importlib, sys
kind = getattr(importlib.import_module({module!r}), {name!r})
kinds = [kind]
try:
    kinds.append(type("Derived", (kind,), {{"__init__": lambda self, *given: None}}))
except TypeError:
    pass
for each in kinds:
    try:
        made = each.__new__(each)
    except TypeError:
        continue
    for attribute in dir(made):
        try:
            value = getattr(made, attribute)
        except Exception:
            continue
        if attribute == "__class__" or not callable(value):
            continue
        for given in (), (None,), (1,), ("a",), (made,), (1, 2), (None, None, None):
            try:
                value(*given)
            except Exception:
                pass
    del made
"""


@pytest.mark.parametrize(("module", "name"), compiled_types())
def test_object_made_without_its_constructor_never_crashes(module, name):
    done = child.run(USE.format(module=module, name=name))
    assert done.returncode == 0, done.stderr
