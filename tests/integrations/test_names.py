"""The names that all integrations share, and the behaviour of each."""

import inspect
from pathlib import Path

import pytest

import gpumem.integrations
from gpumem.integrations import Status

FOLDER = Path(gpumem.integrations.__file__).parent
MODULES = sorted(
    path.stem for path in FOLDER.iterdir() if path.suffix in ("", ".py") and path.stem[0] != "_"
)
SWITCH = ("enable", "disable", "using")
# The functions for the two directions: no module has another name for either.
DIRECTIONS = {"allocator": "resource", "resource": "source"}
every_module = pytest.mark.parametrize("name", MODULES)


def functions(name):
    module = getattr(gpumem.integrations, name)
    return {
        each: getattr(module, each)
        for each in module.__all__
        if inspect.isfunction(getattr(module, each))
    }


def test_integrations_are_those_that_the_package_imports():
    assert sorted(gpumem.integrations._LIBRARIES) == MODULES


@every_module
def test_status_of_each_integration_needs_no_argument_and_not_the_library(name):
    status = functions(name)["status"]
    assert not inspect.signature(status).parameters
    now = status()
    assert isinstance(now, Status)
    assert now.enabled or not now.resources


@every_module
def test_integration_switches_by_all_three_names_or_by_none(name):
    found = functions(name)
    assert [each in found for each in SWITCH] in ([True] * 3, [False] * 3)
    if "enable" in found:
        assert next(iter(inspect.signature(found["enable"]).parameters)) == "resource"
        assert inspect.signature(found["using"]).parameters == (
            inspect.signature(found["enable"]).parameters
        )
        assert not inspect.signature(found["disable"]).parameters


@every_module
def test_each_direction_has_one_name_in_all_integrations(name):
    found = functions(name)
    for direction, argument in DIRECTIONS.items():
        if direction in found:
            assert next(iter(inspect.signature(found[direction]).parameters)) == argument
    others = {"c_allocator", "from_gpumem", "to_gpumem", "adapt", "wrap", "pool"}
    assert not others & set(found)
