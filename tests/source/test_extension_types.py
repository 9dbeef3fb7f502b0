"""Compiled types used as they should not be: an error, never a crash; and their signatures.

Objects that their constructor did not make, and members that are called with another self.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import pkgutil
import re
from pathlib import Path

import pytest
from helpers import child

import gpumem

PACKAGE = Path(gpumem.__path__[0])
PUBLIC_PACKAGES = (
    "accounting",
    "adaptors",
    "errors",
    "interop",
    "observe",
    "planning",
    "replay",
    "report",
    "session",
    "traces",
)
CLASS = re.compile(r"^cdef class (\w+)", re.MULTILINE)
FUNCTION = re.compile(r"^ *def (\w+)\(([^)]*)\)", re.MULTILINE)
TYPED = re.compile(r"[A-Z]\w+ \w+")  # with a default, "not None" or "or None" it is more
HEAP_TYPE = 1 << 9  # Py_TPFLAGS_HEAPTYPE: made by a class statement


def compiled_modules():
    """Return the names of the package's compiled modules."""
    names = (entry.name for entry in pkgutil.walk_packages(gpumem.__path__, "gpumem."))
    return [
        name for name in names if not str(importlib.util.find_spec(name).origin).endswith(".py")
    ]


def compiled_types():
    """Return (module, name) of every extension type of the package, once each."""
    found = {}
    for module in map(importlib.import_module, compiled_modules()):
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


WRONG_SELF = """
import importlib, sys
accepted = []

def attempt(what, member, *given):
    print(what, len(given), type(given[0]).__name__, flush=True)
    try:
        member(*given)
    except TypeError:
        return
    except BaseException as error:
        accepted.append(f"{{what}}: {{error!r}}")
    else:
        accepted.append(what)

for module, name in {types!r}:
    kind = getattr(importlib.import_module(module), name)
    for key, member in vars(kind).items():
        what = f"{{module}}.{{name}}.{{key}}"
        if hasattr(type(member), "__set__"):
            attempt(what, member.__get__, 1)
            attempt(what, member.__set__, 1, None)
        elif callable(member) and type(member) is not staticmethod and key != "__new__":
            for wrong in (1, None, "a", object(), int, sys):
                for more in range(8):
                    attempt(what, member, wrong, *(None,) * more)
assert not accepted, accepted
"""


def test_member_called_with_a_wrong_self_raises_a_type_error():
    done = child.run(WRONG_SELF.format(types=compiled_types()))
    last = done.stdout.splitlines()[-1:]
    assert done.returncode == 0, f"{last}: {done.stderr}"


ANY_ARGUMENTS = """
import importlib, sys
module = importlib.import_module({module!r})
for name, function in sorted(vars(module).items()):
    if type(function) is not type(len) or not function.__module__.startswith("gpumem"):
        continue
    for given in (None, 1, "a", b"a", -1, 1 << 70, object(), [1], (None, 1), {{1: 1}}, sys):
        for count in range(7):
            print(name, count, repr(given)[:60], flush=True)
            try:
                function(*(given,) * count)
            except Exception:
                pass
"""


@pytest.mark.parametrize("module", compiled_modules())
def test_compiled_function_called_with_anything_never_crashes(module):
    done = child.run(ANY_ARGUMENTS.format(module=module))
    assert done.returncode == 0, f"{done.stdout.splitlines()[-1:]}: {done.stderr}"


def test_argument_of_an_extension_type_says_whether_it_may_be_none():
    sources = {path: path.read_text() for path in PACKAGE.rglob("*.pyx")}
    kinds = {name for text in sources.values() for name in CLASS.findall(text)}
    found = [
        f"{path.relative_to(PACKAGE)}: {name}: {argument.strip()}"
        for path, text in sources.items()
        for name, arguments in FUNCTION.findall(text)
        for argument in arguments.split(",")
        if TYPED.fullmatch(argument.strip()) and argument.split()[0] in kinds
    ]
    assert len(kinds) > 40
    assert not found, found


# ---- signatures ----------------------------------------------------------------------------------


def public_callables():
    """Yield (name, callable) of each public function, and of each public class's own methods."""
    for name in ["gpumem", *(f"gpumem.{part}" for part in PUBLIC_PACKAGES)]:
        module = importlib.import_module(name)
        for key in module.__all__:
            shown = getattr(module, key)
            if not isinstance(shown, type):
                if callable(shown):
                    yield f"{name}.{key}", shown
                continue
            for kind in shown.__mro__:
                if kind.__module__.startswith("gpumem"):
                    for attribute in vars(kind):
                        found = getattr(shown, attribute)
                        if not attribute.startswith("_") and callable(found):
                            yield f"{name}.{key}.{attribute}", found


def what_is_wrong(name, shown):
    """Return what a reader of a callable's signature or docstring would stumble over, or ""."""
    doc = inspect.getdoc(shown)
    try:
        inspect.signature(shown)
    except ValueError as error:
        return str(error)
    if not doc:
        return "no docstring"
    lines = doc.splitlines()
    is_signature = lines[0].startswith(f"{name.rpartition('.')[2]}(") or "--" in lines[:3]
    return f"a docstring that begins with {lines[0]!r}" if is_signature else ""


def test_public_callables_have_signatures_and_clean_docstrings():
    found = dict(public_callables())
    assert {"gpumem.copy", "gpumem.Arena.allocate", "gpumem.DriverPool.import_handle"} <= set(found)
    wrong = {name: what_is_wrong(name, shown) for name, shown in found.items()}
    assert not {name: why for name, why in wrong.items() if why}
