"""Who may import whom, read from the source: one direction, frameworks inside functions only."""

import ast
import graphlib
import re
from fnmatch import fnmatch
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "gpumem"

# From the bottom. A module imports from its own row and from rows above it in this list only.
LAYERS = [
    ["_support*"],
    ["_sizes"],
    ["out_of_memory", "_nvml"],
    ["stats"],
    ["errors", "_arguments", "_forks"],
    ["_bfc", "_bfc_*"],
    ["_driver"],
    ["_cuda", "_host"],
    ["_backing", "_backing_*", "_pages", "_page_*"],
    ["_recorder"],
    ["_lease", "_budget_core"],
    ["_arena", "_arena_*"],
    ["_outlets"],
    ["config", "debugging", "device", "_handle"],
    ["replay.trace", "replay.recorder", "replay.details"],
    ["_budget"],
    ["_stream", "_dlpack", "_element", "_layout", "_indexing"],
    ["_raw", "_ledger"],
    ["_buffer"],
    ["_adaptor"],
    ["_graph"],
    ["_core", "_core_*", "_device_memory", "_pool", "_pool_*", "_external"],
    ["_look", "_live"],
    ["adaptors*", "factory"],
    ["_defaults", "resources"],
    ["_order", "_foreign", "_hold", "_exports", "_fill", "_copy", "_copy_*"],
    ["_tensor"],
    ["_create", "_imports", "_exchange", "_transfer", "tensor"],
    ["environment", "session_options"],
    ["bindings"],
    ["session_graph"],
    ["session", "accounting*", "planning*"],
    ["observe._*", "observe.events", "observe.resources", "observe.snapshot*", "observe.torch*"],
    [""],  # the package itself
    ["replay*", "samples", "observe*", "interop*"],
    ["integrations*"],
    ["cli*", "__main__"],
    ["_testing*"],  # and nothing imports it, which a test below holds
]
FRAMEWORKS = {"torch", "cupy", "numba", "jax", "rmm", "cuda", "onnx", "onnxruntime", "ml_dtypes"}
FRAMEWORKS |= {"vulkan", "pynvml"}
COMMAND_LINE = {"click", "rich"}
CYTHON_IMPORT = re.compile(r"^(\s*)(?:from\s+([\w.]+)\s+c?import\s+(\(?[^#]*)|c?import\s+([\w.]+))")

SOURCES = sorted(
    path for path in PACKAGE.rglob("*") if path.suffix in (".py", ".pyx", ".pxd") and path.is_file()
)


def module_of(path: Path) -> str:
    """Name a file's module below the package; "" is the package itself."""
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    return ".".join(part for part in parts if part != "__init__")


def imports_of(path: Path):
    """Yield (name, at the top level) of everything that a file imports or cimports."""
    text = path.read_text()
    if path.suffix == ".py":
        yield from python_imports(ast.parse(text))
    else:
        yield from cython_imports(text)


def python_imports(tree: ast.Module):
    inside = {
        child
        for function in ast.walk(tree)
        if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef)
        for child in ast.walk(function)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((alias.name, node not in inside) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            for alias in node.names:
                yield full_name(node.module, alias.name), node not in inside


def cython_imports(text: str):
    for line in text.splitlines():
        match = CYTHON_IMPORT.match(line)
        if match is None:
            continue
        top = not match.group(1)
        if match.group(4):
            yield match.group(4), top
        else:
            for name in re.findall(r"\w+", match.group(3)) or [""]:
                yield full_name(match.group(2), name), top


def full_name(module: str, name: str) -> str:
    """Name what ``from module import name`` imports: a module of ours, or a name in one."""
    deeper = f"{module}.{name}".removeprefix("gpumem.")
    if module.split(".")[0] == "gpumem" and deeper in MODULES:
        return f"gpumem.{deeper}"
    return module


MODULES = {module_of(path) for path in SOURCES}
IMPORTS = [(module_of(path), *found) for path in SOURCES for found in imports_of(path)]


def layer_of(module: str) -> int:
    for number, patterns in enumerate(LAYERS):
        if any(fnmatch(module, pattern) for pattern in patterns):
            return number
    raise AssertionError(f"gpumem.{module} has no place in LAYERS: decide where it belongs")


def own_imports():
    """Return (module, imported module, at the top level) inside the package."""
    return [
        (module, name.removeprefix("gpumem").lstrip("."), top)
        for module, name, top in IMPORTS
        if name.split(".")[0] == "gpumem"
    ]


def test_import_reader_finds_known_imports():
    seen = {(module, name) for module, name, _ in own_imports()}
    assert {("_core", "_arena"), ("_core", "config"), ("_backing", "_driver")} <= seen
    assert ("device", "_host", False) in own_imports()
    assert ("device", "errors", True) in own_imports()


def test_modules_import_only_from_their_own_row_and_the_rows_before_it():
    wrong = {
        f"{importer} imports {imported}"
        for importer, imported, _ in own_imports()
        if imported != importer and layer_of(imported) > layer_of(importer)
    }
    assert not wrong


def test_nothing_in_the_package_imports_what_is_there_for_tests():
    assert any(module.startswith("_testing") for module, _, _ in own_imports())
    users = {module for module, imported, _ in own_imports() if imported.startswith("_testing")}
    assert all(module.startswith("_testing") for module in users), users


def test_no_modules_import_each_other_in_a_circle():
    graph: dict = {}
    for importer, imported, _ in own_imports():
        # A package imports its parts; that a part names its package is not a circle.
        if imported != importer and not f"{importer}.".startswith(f"{imported}."):
            graph.setdefault(importer, set()).add(imported)
    list(graphlib.TopologicalSorter(graph).static_order())


def test_chunk_table_knows_only_libc():
    for module, name, _ in IMPORTS:
        if fnmatch(module, "_bfc*"):
            assert name.startswith(("libc.", "gpumem._bfc", "gpumem._support")), (
                f"{module} imports {name}"
            )


def test_frameworks_are_imported_inside_functions_only():
    wrong = {
        f"{importer} imports {name} at its top level"
        for importer, name, top in IMPORTS
        if top and name.split(".")[0] in FRAMEWORKS
    }
    assert not wrong


def test_only_the_cli_imports_click_and_rich():
    for module, name, _ in IMPORTS:
        if name.split(".")[0] in COMMAND_LINE:
            assert fnmatch(module, "cli*"), f"{module} imports {name}"


def test_native_modules_touch_no_python_object():
    """The core runs without the interpreter lock: no def, no class, no except, no print."""
    for path in SOURCES:
        if path.suffix == ".pyx" and module_of(path).startswith(("_arena", "_bfc", "_backing")):
            code = re.sub(r'""".*?"""', "", path.read_text(), flags=re.DOTALL)
            assert not re.search(r"^\s*(def|class|cdef class|raise|try|with gil)\b", code, re.M), (
                path
            )
