"""The program of the runs: a script with its arguments, or a function that was sent."""

from __future__ import annotations

import ast
import contextlib
import itertools
import os
import pickle
import runpy
import sys
from typing import Any


class Program:
    """A script with its arguments, or a function.

    Attributes
    ----------
    file : str
        Of the script, or the function: the lines that a run names are those of this file and of
        others in its folder.
    """

    def __init__(self, order: dict[str, Any]) -> None:
        self.order = order
        self.call: str = order["call"]  # file of a pickle: a function, its arguments and keywords
        sys.argv = list(order["command"])
        if self.call:
            self.file: str = sys.argv[0]
            sys.path[:] = order["path"]
        else:
            self.file = os.path.abspath(sys.argv[0])
            sys.path[0] = os.path.dirname(self.file)

    def import_ahead(self) -> None:
        """Run the imports that the program begins with.

        They take most of the time of many programs, and are the first that each run does. An error
        is ignored: the runs raise it again.
        """
        with contextlib.suppress(BaseException):
            if self.call:
                self.received()
                return
            with open(self.file, "rb") as file:
                tree = ast.parse(file.read())
            imports = itertools.takewhile(is_import, tree.body)
            code = compile(ast.Module(list(imports), []), self.file, "exec")
            exec(code, {"__name__": "__main__", "__file__": self.file})

    def received(self) -> Any:
        """Return the function, its arguments and its keywords."""
        with open(self.call, "rb") as file:
            return pickle.load(file)

    def run(self, value: int | None) -> None:
        """Run it, with a value of the name that varies."""
        keywords = {}
        if value is not None:
            name = self.order["name"]
            keywords = {name: value}
            sys.argv = [each.replace(f"{{{name}}}", str(value)) for each in sys.argv]
            os.environ[name] = str(value)
            os.environ["GPUMEM_VARY"] = f"{name}={value}"
        if self.call:
            function, arguments, given = self.received()
            function(*arguments, **given, **keywords)
        else:
            runpy.run_path(self.file, run_name="__main__")


def is_import(node: ast.stmt) -> bool:
    """Whether a statement is an import, or a docstring."""
    if isinstance(node, ast.Import | ast.ImportFrom):
        return True
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
