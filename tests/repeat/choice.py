"""Which tests depend on threads, child processes, signals, time, or work queued on streams."""

from __future__ import annotations

import ast
import functools
from pathlib import Path

TESTS = Path(__file__).resolve().parents[1]
LIBRARIES = {"concurrent", "multiprocessing", "signal", "subprocess", "threading", "time"}
# Processes, signals, a lag of the host device's streams, and work for streams with its gates.
NAMES = {"fork", "kill", "set_lag", "HostDriver"}
# Searches with a command each, and what needs a GPU.
LEFT_OUT = {"faults", "fuzz", "gpu", "mutation", "repeat", "stress"}


def quarter() -> dict[Path, int]:
    """Return the quarter of the test files with the most dependent tests, and how many these are.

    A test is dependent if it uses one of `LIBRARIES` or `NAMES`: itself, by a function, fixture or
    class of its file, or by one that its file imports from the helpers.
    """
    counts = {path: len(_dependent_tests(path)) for path in candidates()}
    ranked = sorted(counts, key=lambda path: (-counts[path], path))
    return {path: counts[path] for path in sorted(ranked[: len(ranked) // 4])}


def candidates() -> list[Path]:
    """Return the test files, without those of searches and for GPUs."""
    files = sorted(TESTS.rglob("test_*.py"))
    return [path for path in files if path.relative_to(TESTS).parts[0] not in LEFT_OUT]


def _dependent_tests(path: Path) -> list[str]:
    return [name for name in dependent_names(path) if name.startswith("test_")]


@functools.cache
def dependent_names(path: Path) -> frozenset[str]:
    """Return the names of a module's functions and classes that depend on one of these things."""
    tree = ast.parse(path.read_text("utf-8"))
    used = {part.name: _names_in(part) for part in tree.body if hasattr(part, "name")}
    imported = {
        (name.asname or name.name).partition(".")[0]
        for node in ast.walk(tree)
        if isinstance(node, ast.Import | ast.ImportFrom)
        for name in node.names
        if _is_dependent(node, name.name)
    }
    found: set[str] = set()
    while more := {name for name in used if used[name] & (imported | found | NAMES)} - found:
        found |= more
    return frozenset(found)


def _names_in(part: ast.AST) -> set[str]:
    """Return what a function or class names: variables, fixtures and, of `NAMES`, attributes."""
    nodes = list(ast.walk(part))
    return (
        {node.id for node in nodes if isinstance(node, ast.Name)}
        | {node.arg for node in nodes if isinstance(node, ast.arg)}
        | {node.attr for node in nodes if isinstance(node, ast.Attribute)} & NAMES
    )


def _is_dependent(node: ast.Import | ast.ImportFrom, name: str) -> bool:
    """Tell whether an import brings in a library, or a name of a helper, that counts."""
    module = name if isinstance(node, ast.Import) else node.module or ""
    if module.partition(".")[0] in LIBRARIES or name in NAMES:
        return True
    in_helpers = module.partition(".")[0] == "helpers" or getattr(node, "level", 0)
    of_module = TESTS / "helpers" / f"{module.rpartition('.')[2]}.py"
    if in_helpers and of_module.exists():
        return name in dependent_names(of_module)
    whole = TESTS / "helpers" / f"{name}.py"
    return bool(in_helpers and whole.exists() and dependent_names(whole))
