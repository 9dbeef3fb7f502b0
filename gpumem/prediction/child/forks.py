"""The runs of a script: one process, which imports what they have in common, and their forks."""

from __future__ import annotations

import ast
import contextlib
import importlib
import itertools
import json
import os
import sys
import threading
import warnings
from typing import Any

from .null import load
from .run import ScriptRun, answer_to
from .skipped import skip_host_work


def import_ahead(script: str) -> bool:
    """Run the imports that a script begins with; return whether the process can fork after them.

    They take most of the time of many scripts, and are the first that each run does. An error is
    ignored: the runs raise it again.
    """
    with contextlib.suppress(BaseException), open(script, "rb") as file:
        tree = ast.parse(file.read())
        imports = itertools.takewhile(is_import, tree.body)
        code = compile(ast.Module(list(imports), []), script, "exec")
        exec(code, {"__name__": "__main__", "__file__": script})
    return threading.active_count() == 1 and not sys.modules["torch"].cuda.is_initialized()


def is_import(node: ast.stmt) -> bool:
    """Whether a statement is an import, or a docstring."""
    if isinstance(node, ast.Import | ast.ImportFrom):
        return True
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)


def main(order: dict[str, Any]) -> None:
    """Run the script over each allocator, at once, and wait for the runs."""
    library = load(order["library"], order["device"])
    skip_host_work(importlib.import_module("torch"), order["folder"])
    script = os.path.abspath(order["command"][0])
    program = sys.argv[0]
    sys.argv = list(order["command"])
    sys.path[0] = os.path.dirname(script)
    if order["ahead"] and not import_ahead(script):
        again = json.dumps({**order, "ahead": False})
        os.execv(sys.executable, [sys.executable, program, again])
    allocators = {}
    for allocator in order["allocators"]:
        with warnings.catch_warnings(action="ignore"):  # other threads: they only wait for work
            child = os.fork()
        if not child:
            output = os.open(os.path.join(order["folder"], f"{allocator}.out"), os.O_WRONLY)
            os.dup2(output, 1)
            os.dup2(output, 2)
            ScriptRun(order, library, allocator).run()
        allocators[child] = allocator
    while allocators:
        child, status = os.wait()
        code = os.waitstatus_to_exitcode(status)
        path = os.path.join(order["folder"], f"{allocators[child]}.json")
        if not os.path.exists(path):
            reason = f"its process ended with status {code}, without an answer"
            answer_to(order, allocators[child], {"end": "failed", "reason": reason})
        del allocators[child]
