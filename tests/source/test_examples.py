"""Every example in a docstring does what it says, on a machine without a GPU."""

import doctest
import importlib
import inspect
import pkgutil
from collections.abc import Iterator

import pytest
from helpers import child

import gpumem

# They must come before anything else that a process does with the host device.
FIRST_OF_ALL = {"gpumem.device.set_host_device_count"}
PARTS = ("accounting", "adaptors", "interop", "observe", "planning", "replay")


def modules() -> dict[str, list[str]]:
    """Name every module by the package that it lies in."""
    found = {"gpumem": ["gpumem"]}
    for module in pkgutil.walk_packages(gpumem.__path__, "gpumem."):
        package = module.name if module.ispkg else module.name.rpartition(".")[0]
        if module.name != "gpumem.__main__":  # which runs the command line
            found.setdefault(package, []).append(module.name)
    return found


def documented(name: str, owner: object) -> Iterator[tuple[str, str]]:
    """Give names and docstrings of a class or function and of what is in it, compiled or not."""
    for key, member in vars(owner).items() if isinstance(owner, type) else ():
        if isinstance(member, type) or hasattr(member, "__get__"):
            yield from documented(f"{name}.{key}", getattr(member, "__func__", member))
    if isinstance(doc := inspect.getdoc(owner), str):
        yield name, doc


def examples_of(module) -> Iterator[tuple[str, str]]:
    if module.__doc__:
        yield module.__name__, module.__doc__
    for key, member in vars(module).items():
        if getattr(member, "__module__", None) == module.__name__ and callable(member):
            yield from documented(f"{module.__name__}.{key}", member)


def run(module, name: str, doc: str) -> str:
    """Run the examples of a docstring; returns what did not come out as it says."""
    said: list[str] = []
    test = doctest.DocTestParser().get_doctest(doc, dict(vars(module)), name, module.__file__, 0)
    runner = doctest.DocTestRunner(verbose=False, optionflags=doctest.ELLIPSIS)
    runner.run(test, out=said.append)
    return "".join(said)


def import_or_none(name: str):
    """Import a module; None where it needs a framework that is not installed."""
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if (error.name or "").startswith("gpumem"):
            raise
        print(f"{name} needs {error.name}")
        return None


@pytest.mark.parametrize("names", modules().values(), ids=modules())
def test_examples_in_docstrings_come_out_as_they_say(names):
    found = [module for name in names if (module := import_or_none(name)) is not None]
    if not found:
        pytest.skip(f"none of {names} can be imported: see what they need")
    wrong = "".join(
        run(module, name, doc)
        for module in found
        for name, doc in dict(examples_of(module)).items()
        if name not in FIRST_OF_ALL
    )
    assert not wrong, wrong


@pytest.mark.parametrize("name", sorted(FIRST_OF_ALL))
def test_example_for_a_fresh_process_comes_out_as_it_says(name):
    module, _, function = name.rpartition(".")
    child.run_quietly(f"""
import doctest
import {module} as module
doctest.run_docstring_examples(module.{function}, vars(module))
""")


def explains_itself(shown: object) -> bool:
    """Tell whether it has an example, or is an error, or neither class nor function."""
    if isinstance(shown, type) and issubclass(shown, BaseException):
        return True
    return not callable(shown) or ">>>" in (shown.__doc__ or "")


@pytest.mark.parametrize("name", ["gpumem", *(f"gpumem.{part}" for part in PARTS)])
def test_every_public_class_and_function_has_an_example(name):
    module = importlib.import_module(name)
    assert not [name for name in module.__all__ if not explains_itself(getattr(module, name))]
