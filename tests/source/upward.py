"""Calls from a folder to an equal or higher one, in each form that they can have in the source.

A folder that knows a higher one imports it inside a function. A folder that does not know it calls
a function that the higher one has left with it: a C function pointer or a Python function.
"""

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from source.layers import (
    LAYERS,
    MODULES,
    folder_of,
    imports_of,
    module_named,
    module_of,
    ours,
    sources,
)

ROW_OF = {name: number for number, row in enumerate(LAYERS) for name in row}

# From which folder to which, and why the call is there and not turned round.
UPWARD = {
    # Methods that make an object of a higher folder.
    ("_buffer", "_defaults"): "MemoryResource.from_config makes an arena or a pool",
    ("_buffer", "_snapshots"): "MemoryResource.snapshot",
    ("_buffer", "_tensor"): "Buffer.tensor",
    ("_arena", "_tensor"): "Arena.virtual makes a virtual tensor, Arena.copy_out copies tensors",
    ("_arena", "_copy"): "Arena.staging is the arena of copies",
    ("_arena", "_events"): "Arena.tag labels the allocations of its tag",
    ("_arena", "_snapshots"): "GraphPool.snapshot",
    ("_arena", "report"): "Arena.report",
    ("gpumem", "integrations"): "the package imports its parts when they are named",
    ("gpumem", "prediction"): "the same",
    # Registries: what each folder has to do at a fork, when memory is released, on other threads.
    ("_support", "on_fork"): "a fork's child forgets the state of every folder",
    ("_support", "on_release"): "one order in which retired objects of all folders are released",
    ("_support", "call_soon"): "work that needs the interpreter, left by threads without it",
    ("_support", "Deferred"): "the same, for work that has an object of its own",
    ("_support", "BoundedCall"): "a call with the interpreter, waited for at most some time",
    ("_support", "lease_create"): "the end of a lease frees the block to its owner",
    ("_support", "close_after_body"): "calls the close of a with block's object",
    ("_support", "event_sources_visit"): "visits each event source under the lock of their lists",
    ("errors", "on_refusal"): "a recording writes the figures of an error before it is raised",
    ("_support", "recorder_set_stacks"): "the interpreter's stack of an event",
    # Allocators below Python call what stands above them.
    ("_native/arena", "HeapHooks"): "a debug heap stores Python stacks and schedules reports",
    ("_native/backing", "Backing"): "regions from a Python source, or from PyTorch's allocator",
    ("_native/budget", "budgets_visit"): "visits the budgets under the lock of their trees",
    (
        "_native/budget",
        "release_idle_below",
    ): "a budget that refuses releases idle memory of arenas",
    ("_native/budget", "lease_for"): "a budget that refuses leases memory from its node",
    ("_native/budget", "await_refund"): "an arena waits for memory of an ended process of its node",
    ("_native/budget", "tell_crossed"): "a threshold that was crossed is told to its callback",
    ("_native/pages", "Sleeper"): "memory that goes to sleep asks the arena which bytes are live",
    ("_buffer", "borrow"): "the owner of borrowed memory learns of its end",
    ("_buffer", "ledger_make"): "a ledger frees blocks to its resource",
    ("_buffer", "set_resource_hook"): "the page of gpumem top lists new resources",
    ("_events", "call_with_first_resource"): "gpumem run --report counts processes with memory",
    ("report", "write_report"): "tells the command what it is doing",
    ("prediction", "integrations"): "a script that is predicted with gpumem's allocator enables it",
}

POINTER = re.compile(r"\(\s*\*\s*(\w+)\s*\)\s*\(")
BLOCK = re.compile(r"(?:cdef (?:packed )?|ctypedef )struct (\w+):$")
VARIABLE = re.compile(r"cdef [\w ]+\*? ?\(\*\w+\)\(")
FUNCTION = re.compile(r" *cdef [\w ]+?\*? ?(\w+)\(")
STRINGS = re.compile(r'"""(?:.|\n)*?"""')


class Call(NamedTuple):
    """A call from a folder to one that is not below it."""

    caller: str
    callee: str
    where: str  # the file that imports the callee, or that leaves a function with the caller
    by: str = ""  # name of the pointer or of the function that takes a function; "": an import

    @property
    def key(self) -> tuple[str, str]:
        """Name its entry in `UPWARD`."""
        return self.caller, self.by or self.callee


class Pointer(NamedTuple):
    """A place for a function of others: a field of a struct, a variable or a parameter."""

    module: str
    kind: str  # "field", "variable" or "parameter"
    name: str  # of the field, the variable, or the function that has the parameter
    struct: str = ""


def upward_calls() -> set[Call]:
    """Read every call to an equal or higher row from the source of the package."""
    texts = {path: path.read_text() for path in sources()}
    pyi = {path: path.read_text() for path in stubs()}
    return calls_in(texts, pyi)


def calls_in(texts: dict[Path, str], pyi: dict[Path, str] | None = None) -> set[Call]:
    """Read the calls to an equal or higher row from texts of files."""
    found = {*by_late_imports(texts), *by_names_of_modules(texts)}
    found |= {*by_pointers(texts), *by_python_functions(texts, pyi or {})}
    return {
        call
        for call in found
        if call.caller != call.callee and ROW_OF[call.callee] >= ROW_OF[call.caller]
    }


def stubs() -> list[Path]:
    return [path.with_suffix(".pyi") for path in sources() if path.with_suffix(".pyi").exists()]


# ---- imports -------------------------------------------------------------------------------------


def by_late_imports(texts: dict[Path, str]) -> Iterator[Call]:
    """Find imports inside functions. Imports for type checkers are not calls."""
    for each in ours([found for path, text in texts.items() for found in imports_of(path, text)]):
        if not each.top and not each.types_only:
            yield Call(folder_of(each.module), folder_of(each.imported), where(each.path))


def by_names_of_modules(texts: dict[Path, str]) -> Iterator[Call]:
    """Find modules that are imported by a text: `import_module`, `__import__`, `sys.modules`."""
    for path, text in texts.items():
        for module in modules_by_text(text, module_of(path)):
            yield Call(folder_of(module_of(path)), folder_of(module), where(path))


def modules_by_text(text: str, importer: str) -> Iterator[str]:
    """Name the modules that a file may import by a text.

    If the name is only known at run time, it is each text of the file that names a module.
    """
    for found in re.finditer(r"\b(?:import_module|__import__)\(\s*(f?)\"([^\"]*)\"", text):
        name = found[2].replace("{__name__}", importer)
        if name.startswith("gpumem") and "{" not in name:
            yield module_named(name, "")
        elif name.startswith("gpumem"):
            package = name.partition("{")[0]
            for word in set(re.findall(r'"([\w.]+)"', text)):
                if package + word in MODULES:
                    yield package + word
    for name in re.findall(r"sys\.modules(?:\.get\(|\[)\s*\"(gpumem[\w.]*)\"", text):
        yield module_named(name, "")


# ---- C function pointers -------------------------------------------------------------------------


def by_pointers(texts: dict[Path, str]) -> Iterator[Call]:
    """Find functions that a folder sets into a pointer that another folder declares."""
    declared = [
        pointer
        for path, text in texts.items()
        if path.suffix in (".pxd", ".pyx")
        for pointer in pointers_of(text, module_of(path))
    ]
    for path, text in texts.items():
        if path.suffix == ".pyx":
            filler = folder_of(module_of(path))
            for pointer in declared:
                if folder_of(pointer.module) != filler and is_filled(pointer, text):
                    yield Call(
                        folder_of(pointer.module),
                        filler,
                        where(path),
                        pointer.struct or pointer.name,
                    )


def pointers_of(text: str, module: str) -> Iterator[Pointer]:
    """Read the function pointers that a file declares, also by a name of their type.

    The interpreter's own types of functions are not among them: it calls what a slot has.
    """
    text = STRINGS.sub("", text)
    types = re.findall(r"^ctypedef\s[^\n(]*\(\s*\*\s*(\w+)\s*\)", text, re.MULTILINE)
    of_type = re.compile(rf"\b(?:{'|'.join(types)})\s+(\w+)") if types else None
    struct, depth = "", 0
    for line in statements_of(text):
        indent = len(line) - len(line.lstrip())
        if indent <= depth:
            struct = ""
        if head := BLOCK.match(line.strip()):
            struct, depth = head[1], indent
            continue
        names = POINTER.findall(line) + (of_type.findall(line) if of_type else [])
        if not names or line.startswith("ctypedef"):
            continue
        if struct:
            yield from (Pointer(module, "field", name, struct) for name in names)
        elif VARIABLE.match(line):
            yield Pointer(module, "variable", names[0])
            if len(names) > 1:
                yield Pointer(module, "parameter", names[0])
        elif function := FUNCTION.match(line):
            yield Pointer(module, "parameter", function[1])


def statements_of(text: str) -> Iterator[str]:
    """Join the lines of each declaration, and leave comments and empty lines out."""
    begun = ""
    for line in text.splitlines():
        line = line.partition("#")[0].rstrip()
        begun = f"{begun} {line.strip()}" if begun else line
        if begun.count("(") <= begun.count(")"):
            if begun:
                yield begun
            begun = ""


def is_filled(pointer: Pointer, text: str) -> bool:
    """Tell whether a file puts a function of its own into a pointer."""
    if not re.search(rf"\b{pointer.struct or pointer.name}\b", text):
        return False
    if pointer.kind == "field":
        return any(
            re.search(rf"^\s*cdef\b[^\n]*\b{function}\(", text, re.MULTILINE)
            for function in re.findall(rf"[.\]]{pointer.name} = (\w+)\s", text)
        )
    if pointer.kind == "variable":
        return re.search(rf"^(?:    )*{pointer.name} = \w+", text, re.MULTILINE) is not None
    return re.search(rf"(?<!\w ){pointer.name}\(", text) is not None


# ---- Python functions ----------------------------------------------------------------------------


def by_python_functions(texts: dict[Path, str], pyi: dict[Path, str]) -> Iterator[Call]:
    """Find functions that a folder passes to another one, which keeps them."""
    taking = {
        (module_of(path), name)
        for path, text in (texts | pyi).items()
        if path.suffix in (".py", ".pyi")
        for name in functions_taking_a_function(text)
    }
    for path, text in texts.items():
        for module, name in re.findall(r"^\s*from (gpumem[\w.]*) import \(?([^)\n]*)", text, re.M):
            for each in re.split(r"[,\s]+", name):
                if (module, each) in taking and re.search(rf"(?<!def ){each}\(", text):
                    yield Call(folder_of(module), folder_of(module_of(path)), where(path), each)


def functions_taking_a_function(text: str) -> Iterator[str]:
    """Name the functions of a module that have a parameter for a function."""
    for node in ast.parse(text).body:
        if isinstance(node, ast.FunctionDef):
            parameters = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
            if any("Callable" in ast.unparse(p.annotation) for p in parameters if p.annotation):
                yield node.name


def where(path: Path) -> str:
    return str(path.relative_to(path.parents[len(path.parts) - path.parts.index("gpumem") - 1]))
