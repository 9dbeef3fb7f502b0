"""Imports a framework, checks its version, and that there is a GPU for it."""

from __future__ import annotations

import ctypes
import re
from importlib import import_module
from types import ModuleType

from gpumem.errors import IntegrationError, MissingFrameworkError


def import_framework(name: str, module: str, oldest: str, *, install: str) -> ModuleType:
    """Import a framework's module.

    Parameters
    ----------
    name : str
        Name used in error messages and reports.
    module : str
        The module to import, which has the ``__version__``.
    oldest : str
        The oldest supported version.
    install : str
        The command that installs it.

    Raises
    ------
    MissingFrameworkError
        It cannot be imported.
    IntegrationError
        It is older than `oldest`.
    """
    try:
        found = import_module(module)
    except ImportError as error:
        raise MissingFrameworkError(
            f"{name} cannot be imported ({error}); `{install}` installs it", name=module
        ) from error
    version = getattr(found, "__version__", None)
    if not isinstance(version, str) or numbers_of(version) < numbers_of(oldest):
        raise IntegrationError(
            f"{name} {version or 'without a version'} was found, but gpumem needs {name} "
            f"{oldest} or later; `{install}` installs it"
        )
    return found


def require_gpu(name: str) -> None:
    """Raise `IntegrationError` without an NVIDIA driver.

    The driver is not initialised: a process that did so could no longer fork children that use it.
    """
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        raise IntegrationError(
            f"{name} has no GPU: no NVIDIA driver is installed (libcuda.so.1 was not found). "
            "Without a GPU, make tensors by gpumem.zeros(..., resource=arena); libraries with "
            "DLPack see the same bytes"
        ) from None


def numbers_of(version: str) -> tuple[int, ...]:
    """Return a version's leading numbers: (14, 2) of "14.2.0rc1" with trailing zeros dropped."""
    match = re.match(r"\d+(\.\d+)*", version)
    numbers = [int(part) for part in match[0].split(".")] if match else []
    while numbers and numbers[-1] == 0:
        numbers.pop()
    return tuple(numbers)
