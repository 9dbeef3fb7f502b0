"""Completion and help show what users import, and errors end near the line that raised."""

import importlib
import pkgutil
import pydoc
import re
import traceback

import pytest

import gpumem

MODULES = [
    *(name for name in dir(gpumem) if isinstance(getattr(gpumem, name), type(gpumem))),
    *(f"integrations.{each.name}" for each in pkgutil.iter_modules(gpumem.integrations.__path__)),
]
PUBLIC = [name for name in MODULES if "._" not in name]


def import_or_skip(name):
    try:
        return importlib.import_module(f"gpumem.{name}")
    except ModuleNotFoundError as error:
        pytest.skip(f"gpumem.{name} needs {error.name}")


@pytest.mark.parametrize("name", PUBLIC)
def test_completion_of_a_public_module_offers_its_public_names_alone(name):
    module = import_or_skip(name)
    libraries = set(PUBLIC) if name == "integrations" else set()
    offered = {each for each in dir(module) if f"integrations.{each}" not in libraries}
    assert offered == set(module.__all__)


@pytest.mark.parametrize("name", ["", *PUBLIC])
def test_help_of_the_public_names_does_not_show_private_modules(name):
    module = import_or_skip(name) if name else gpumem
    names = {each: pydoc.plain(pydoc.render_doc(getattr(module, each))) for each in module.__all__}
    shown = {each: re.findall(r"gpumem(?:\.\w+)*\._\w+\.\w+", text) for each, text in names.items()}
    assert not {each: found for each, found in shown.items() if found}


def test_wrong_argument_of_a_compiled_class_is_told_by_the_public_name_of_its_type():
    with pytest.raises(TypeError, match=r"for .gpumem\.Buffer. objects"):
        gpumem.Buffer.record_stream(1, None)


def test_error_of_nested_compiled_calls_adds_one_frame_to_the_users():
    with gpumem.Arena("host", max_mem="1MiB") as arena:
        try:
            arena.allocate("2MiB")
        except gpumem.OutOfMemoryError as error:
            files = [frame.filename for frame in traceback.extract_tb(error.__traceback__)]
    assert files[0] == __file__
    assert len(files) == 2
