"""The layers of the package: which folder may import from which, read from the source.

`LAYERS` is what `test_layers.py` holds the source to and what `python -m source.layers`, run in
`tests/`, draws as docs/layers.svg.
"""

import ast
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple
from xml.sax.saxutils import escape

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "gpumem"
PICTURE = ROOT / "docs" / "layers.svg"

# From the bottom. A folder imports from the rows below its own, and from nothing else of gpumem.
# A module that lies in gpumem/ itself counts as a folder; "gpumem" is the package's __init__.
LAYERS = [
    ["errors"],
    ["_support"],
    ["stats", "_native/driver", "_native/bfc"],
    ["_native/backing", "_native/budget", "device"],
    ["_native/pages", "_node", "config"],
    ["_native/arena", "_budget", "debugging", "accounting"],
    ["_buffer"],
    ["_resource", "adaptors"],
    ["_arena", "_live"],
    ["_defaults", "_events"],
    ["_copy", "_snapshots"],
    ["_tensor", "traces"],
    ["replay", "session", "planning", "interop"],
    ["report"],
    ["observe"],
    ["gpumem", "integrations", "prediction"],
    ["cli", "_testing"],
]

# What a reader may want to know of a row; drawn beside it.
CAPTIONS = {
    "errors": "every exception",
    "_support": "locks, leases, process and fork state",
    "stats": "reports; driver functions; best fit",
    "_native/backing": "where regions come from; limits; devices",
    "_native/pages": "pages that move; nodes; settings",
    "_native/arena": "the allocator; budgets",
    "_buffer": "buffers, streams, DLPack",
    "_resource": "pools, external allocators, adaptors",
    "_arena": "gpumem.Arena; the page of gpumem top",
    "_defaults": "default resources; recorded events",
    "_copy": "copies; snapshots",
    "_tensor": "tensors; readers of traces",
    "replay": "a trace run again; parts of programs",
    "report": "the HTML report",
    "observe": "recordings and snapshots, as users see them",
    "gpumem": "the package; other libraries; predictions",
    "cli": "the command; instruments of the tests",
}

FOLDERS = {name for row in LAYERS for name in row}
CYTHON_IMPORT = re.compile(
    r"^([ \t]*)from[ \t]+([\w.]+)[ \t]+(c?import)[ \t]+(\([^)]*\)|[^\n(]+)"
    r"|^([ \t]*)(c?import)[ \t]+([\w.]+)",
    re.MULTILINE,
)


class Import(NamedTuple):
    """One name that a file imports."""

    path: Path
    module: str  # dotted, of the file
    imported: str  # dotted: a module of ours, or what stands after "from"
    compiled: bool  # a cimport
    top: bool  # at the top level of the file
    types_only: bool = False  # under `if TYPE_CHECKING`


def sources() -> list[Path]:
    suffixes = (".py", ".pyx", ".pxd")
    return sorted(p for p in PACKAGE.rglob("*") if p.suffix in suffixes and p.is_file())


def module_of(path: Path) -> str:
    parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
    return ".".join(part for part in parts if part != "__init__")


def folder_of(module: str) -> str:
    """Name the entry of `LAYERS` that a module of ours belongs to: the longest that fits."""
    parts = module.split(".")[1:]
    if parts == ["__main__"]:
        return "cli"
    for length in range(len(parts), 0, -1):
        name = "/".join(parts[:length])
        if name in FOLDERS:
            return name
    if not parts:
        return "gpumem"
    raise LookupError(f"{module} has no place in LAYERS: decide where it belongs")


MODULES = {module_of(path) for path in sources()}


def imports() -> list[Import]:
    return [found for path in sources() for found in imports_of(path, path.read_text())]


def imports_of(path: Path, text: str) -> Iterator[Import]:
    found = python_imports(text) if path.suffix == ".py" else cython_imports(text)
    for each in found:
        yield Import(path, module_of(path), *each)


def python_imports(text: str) -> Iterator[tuple[str, bool, bool, bool]]:
    tree = ast.parse(text)
    late = nodes_inside(tree, is_function)
    types_only = nodes_inside(tree, is_for_checkers)
    for node in ast.walk(tree):
        at = node not in late and node not in types_only, node in types_only
        if isinstance(node, ast.Import):
            yield from ((alias.name, False, *at) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            if node.level == 1 and node.module:
                continue  # of a sibling, in a folder that runs without the package around it
            assert node.level == 0, "imports are absolute"
            for alias in node.names:
                yield module_named(node.module, alias.name), False, *at


def nodes_inside(tree: ast.AST, holds: Callable[[ast.AST], bool]) -> set[ast.AST]:
    return {inner for node in ast.walk(tree) if holds(node) for inner in ast.walk(node)}


def is_function(node: ast.AST) -> bool:
    return isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)


def is_for_checkers(node: ast.AST) -> bool:
    return (
        isinstance(node, ast.If)
        and isinstance(node.test, ast.Name)
        and node.test.id == "TYPE_CHECKING"
    )


def cython_imports(text: str) -> Iterator[tuple[str, bool, bool, bool]]:
    for match in CYTHON_IMPORT.finditer(text):
        indent, module, kind, names, plain_indent, plain_kind, plain = match.groups()
        if plain:
            yield plain, plain_kind == "cimport", not plain_indent, False
            continue
        for name in re.sub(r"#[^\n]*", "", names).strip("()").split(","):
            if name.strip():
                yield module_named(module, name.split()[0]), kind == "cimport", not indent, False


def module_named(module: str, name: str) -> str:
    """Name what ``from module import name`` imports: a module of ours, or the module."""
    deeper = f"{module}.{name}"
    return deeper if deeper in MODULES else module


def ours(found: list[Import]) -> list[Import]:
    return [each for each in found if each.imported.split(".")[0] == "gpumem"]


# ---- the picture ---------------------------------------------------------------------------------

ROW, BOX, LEFT, WIDTH = 40, 28, 16, 760
CODE = 'font-size="14" font-family="ui-monospace, Menlo, Consolas, monospace"'
TEXT = 'font-size="13" font-family="sans-serif" fill="#5f6368"'
# What a box is filled with, by what a name says of its folder.
KINDS = {"public": "#e6f4ea", "private": "#e8f0fe", "below the interpreter": "#fef0d9"}


def kind_of(name: str) -> str:
    if name.startswith("_native/"):
        return "below the interpreter"
    return "private" if name.startswith("_") else "public"


def draw() -> str:
    """Draw the rows as a picture: the lowest layer at the bottom, a legend under it."""
    height = ROW * (len(LAYERS) + 1) + LEFT
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" '
        f'width="{WIDTH}" height="{height}" role="img" aria-label="Layers of gpumem">',
        f'<rect width="{WIDTH}" height="{height}" fill="#ffffff"/>',
    ]
    for number, row in enumerate(reversed(LAYERS)):
        lines += draw_row(row, LEFT // 2 + number * ROW)
    return "\n".join([*lines, *draw_legend(LEFT // 2 + len(LAYERS) * ROW), "</svg>"]) + "\n"


def draw_row(row: list[str], top: int) -> Iterator[str]:
    caption = next((CAPTIONS[name] for name in row if name in CAPTIONS), "")
    below = top + ROW - (ROW - BOX) // 2
    yield f'<path d="M{LEFT} {below}H{WIDTH - LEFT}" stroke="#dadce0"/>'
    x = LEFT
    for name in row:
        width = 16 + round(8.5 * len(name))
        yield from draw_box(x, top, width, kind_of(name), name, CODE)
        x += width + 8
    yield (
        f'<text x="{WIDTH - LEFT}" y="{top + 19}" text-anchor="end" {TEXT}>{escape(caption)}</text>'
    )


def draw_legend(top: int) -> Iterator[str]:
    x = LEFT
    for kind in KINDS:
        width = 16 + round(7 * len(kind))
        yield from draw_box(x, top, width, kind, kind, TEXT)
        x += width + 8
    text = "a row imports from the rows below it"
    yield f'<text x="{WIDTH - LEFT}" y="{top + 19}" text-anchor="end" {TEXT}>{text}</text>'


def draw_box(x: int, top: int, width: int, kind: str, text: str, style: str) -> Iterator[str]:
    yield (
        f'<rect x="{x}" y="{top}" width="{width}" height="{BOX}" rx="4" '
        f'fill="{KINDS[kind]}" stroke="#5f6368"/>'
    )
    yield f'<text x="{x + 8}" y="{top + 19}" {style}>{escape(text)}</text>'


if __name__ == "__main__":
    PICTURE.write_text(draw())
    print(PICTURE.relative_to(ROOT), file=sys.stderr)
