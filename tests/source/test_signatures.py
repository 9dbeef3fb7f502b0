"""`inspect.signature` of every public class, compiled or not."""

import dataclasses
import importlib
import inspect
import pkgutil
from typing import is_typeddict

import pytest

import gpumem
from gpumem.config import ArenaSettings, PoolSettings


def public_classes():
    """Return the classes that the public modules name, and their full names."""
    found = {}
    for info in pkgutil.walk_packages(gpumem.__path__, "gpumem."):
        if not any(part.startswith("_") for part in info.name.split(".")):
            try:
                module = importlib.import_module(info.name)
            except ImportError:  # of a package that is not installed
                continue
            for name in getattr(module, "__all__", ()):
                if inspect.isclass(getattr(module, name)):
                    found[getattr(module, name)] = f"{info.name}.{name}"
    return found


def is_made_by_others(kind):
    """Tell whether a class refuses to be called, and says what makes its objects."""
    try:
        kind()
    except TypeError as error:
        return "made by" in str(error) or "cannot create" in str(error)
    return False


def test_every_public_class_has_a_signature_or_is_made_by_others():
    lacking = []
    for kind, name in public_classes().items():
        if issubclass(kind, BaseException) or is_typeddict(kind):
            continue  # as Python's own
        try:
            inspect.signature(kind)
        except ValueError:
            if not is_made_by_others(kind):
                lacking.append(name)
    assert not lacking, lacking


@pytest.mark.parametrize(
    ("kind", "signature"),
    [
        (
            gpumem.Budget,
            "(limit, *, soft=None, parent=None, name=None, on_pressure=None, node=None, "
            "priority=None, deadline=None)",
        ),
        (gpumem.MemoryResource, "(memory, *, name=None, budget=None, count='reserved')"),
        (gpumem.Stream, "(device)"),
        (gpumem.Event, "(device)"),
    ],
)
def test_signature_of_a_compiled_class_is_that_of_its_constructor(kind, signature):
    assert str(inspect.signature(kind)) == signature


@pytest.mark.parametrize(
    ("kind", "config", "settings", "own"),
    [
        (gpumem.Arena, gpumem.ArenaConfig, ArenaSettings, ["memory", "config", "source"]),
        (gpumem.DriverPool, gpumem.PoolConfig, PoolSettings, ["device", "config", "handle"]),
    ],
)
def test_editors_and_checkers_know_every_setting(kind, config, settings, own):
    fields = [each.name for each in dataclasses.fields(config)]
    assert [*settings.__annotations__] == fields
    named = inspect.signature(kind).parameters
    assert [*named][: len(own)] == own
    assert [*named][-len(fields) :] == fields
    assert all(named[each].kind is inspect.Parameter.KEYWORD_ONLY for each in fields)


WHERE = "memory=None, resource=None, environment=None, stream=None, shareable=False)"


@pytest.mark.parametrize(
    ("function", "signature"),
    [
        (gpumem.empty, f"(shape, dtype, *, {WHERE}"),
        (gpumem.zeros, f"(shape, dtype, *, {WHERE}"),
        (gpumem.full, f"(shape, fill_value, dtype=None, *, {WHERE}"),
        (
            gpumem.Arena("host").virtual,
            "(shape, dtype, *, committed=0, step=None, ahead=0, stream=None, on_pressure=None, "
            "name=None)",
        ),
    ],
)
def test_signature_lacks_what_a_function_only_refuses(function, signature):
    assert str(inspect.signature(function)) == signature
    assert function.__doc__.startswith(("Return", "Make"))


def test_signature_of_a_subclass_is_its_own():
    class Mine(gpumem.MemoryResource):
        def __init__(self, size, *, colour="red"):
            pass

    class Plain(gpumem.MemoryResource):
        pass

    assert str(inspect.signature(Mine)) == "(size, *, colour='red')"
    assert inspect.signature(Plain) == inspect.signature(gpumem.MemoryResource)


def test_objects_have_no_signature():
    with pytest.raises(AttributeError):
        _ = gpumem.Stream("host").__signature__
