"""Who may import whom: one direction between folders, frameworks inside functions only."""

import graphlib
import re

import pytest
from source import layers
from source.layers import FOLDERS, LAYERS, MODULES, PACKAGE, folder_of, imports, ours, sources
from source.upward import UPWARD, calls_in, upward_calls

FRAMEWORKS = {"torch", "cupy", "numba", "jax", "rmm", "cuda", "onnx", "onnxruntime", "ml_dtypes"}
FRAMEWORKS |= {"pynvml", "dask", "distributed", "tornado"}
COMMAND_LINE = {"click", "rich"}
IMPORTS = imports()
# cimported by name: a folder's own pxd would make every user of the folder import them.
LOADED_ON_DEMAND = {"gpumem._native.driver.host"}
ROW_OF = {name: number for number, row in enumerate(LAYERS) for name in row}


def test_reader_of_imports_sees_each_form():
    seen = {(each.module, each.imported, each.compiled, each.top) for each in IMPORTS}
    assert ("gpumem._arena.arena", "gpumem._native.arena.api", True, True) in seen
    assert ("gpumem._arena.open", "gpumem.config", False, True) in seen
    assert ("gpumem.device", "gpumem._native.driver.host", False, False) in seen


def test_layers_are_few_and_name_each_folder_once():
    assert len(LAYERS) <= 17
    assert sum(len(row) for row in LAYERS) == len(FOLDERS)
    assert {folder_of(module) for module in MODULES if module != "gpumem._native"} == FOLDERS


def test_folder_imports_only_from_lower_rows():
    wrong = [
        f"{each.module} ({folder_of(each.module)}) imports {each.imported}"
        for each in ours(IMPORTS)
        if each.top
        and folder_of(each.module) != folder_of(each.imported)
        and ROW_OF[folder_of(each.imported)] >= ROW_OF[folder_of(each.module)]
    ]
    assert not wrong, "\n".join(wrong)


def test_upward_calls_are_those_that_have_a_reason():
    found = upward_calls()
    missing = sorted({(*call.key, call.where) for call in found if call.key not in UPWARD})
    assert not missing, "a call to an equal or higher row:\n" + "\n".join(map(str, missing))
    unused = UPWARD.keys() - {call.key for call in found}
    assert not unused, f"no such call is left: {unused}"


FORMS = {
    "late import": {"_support/forks.py": "def f():\n    from gpumem._snapshots import snapshot\n"},
    "late import in Cython": {
        "_support/process.pyx": "cdef f():\n    from gpumem._snapshots import snapshot\n"
    },
    "module by name": {"_support/forks.py": 'import_module("gpumem._snapshots")\n'},
    "module by a name that is made": {
        "_support/forks.py": 'PARTS = ("_snapshots",)\nimport_module(f"gpumem.{PARTS[0]}")\n'
    },
    "module that is loaded": {"_support/forks.py": 'sys.modules.get("gpumem._snapshots")\n'},
    "pointer in a variable": {
        "_support/process.pxd": "cdef void (*told)(int) noexcept nogil\n",
        "_snapshots/columns.pyx": "from gpumem._support.process cimport told\ntold = tell\n",
    },
    "pointer in a struct": {
        "_support/process.pxd": "cdef struct Hooks:\n    # Why.\n    int (*told)(int) noexcept\n",
        "_snapshots/columns.pyx": "cdef int tell(int n): ...\nhooks = Hooks()\nhooks.told = tell\n",
    },
    "pointer of a named type": {
        "_support/process.pxd": (
            "ctypedef int (*Told)(int)\ncdef int on_told(Told told,\n                 int n)\n"
        ),
        "_snapshots/columns.pyx": "on_told(tell, 1)\n",
    },
    "pointer as an argument": {
        "_support/process.pxd": "cdef int on_told(void (*told)(int) noexcept nogil) except -1\n",
        "_snapshots/columns.pyx": "on_told(tell)\n",
    },
    "Python function": {
        "_support/forks.py": "def on_told(phase: str, told: Callable[[int], None]) -> None: ...\n",
        "_snapshots/snapshot.py": 'from gpumem._support.forks import on_told\non_told("", tell)\n',
    },
}


@pytest.mark.parametrize("form", FORMS)
def test_each_form_of_an_upward_call_is_seen(form):
    texts = {PACKAGE / name: text for name, text in FORMS[form].items()}
    assert {(call.caller, call.callee) for call in calls_in(texts)} == {("_support", "_snapshots")}


def test_downward_calls_and_imports_for_type_checkers_are_not_upward():
    text = "if TYPE_CHECKING:\n    from gpumem.cli import main\n"
    late = "def f():\n    from gpumem.errors import ConfigError\n"
    assert not calls_in({PACKAGE / "_snapshots/snapshot.py": text + late})


def test_files_do_not_import_each_other_in_a_circle():
    """A cimport reads a .pxd; so a class's .pyx may call modules that cimport the class."""
    graph: dict[str, set[str]] = {}
    for each in ours(IMPORTS):
        # A package imports its parts; that a part names its package is not a circle.
        if each.top and not f"{each.module}.".startswith(f"{each.imported}."):
            importer = f"{each.module} (pxd)" if each.path.suffix == ".pxd" else each.module
            imported = f"{each.imported} (pxd)" if each.compiled else each.imported
            graph.setdefault(importer, set()).add(imported)
    list(graphlib.TopologicalSorter(graph).static_order())


def test_private_folder_is_cimported_through_its_own_pxd():
    """A folder whose __init__.pxd lists names shows others these alone."""
    faces = {
        ".".join(path.parent.relative_to(PACKAGE.parent).parts)
        for path in PACKAGE.rglob("__init__.pxd")
        if "cimport" in path.read_text()
    }
    assert "gpumem._native.pages" in faces
    wrong = [
        f"{each.path.relative_to(PACKAGE.parent)} cimports {each.imported}"
        for each in ours(IMPORTS)
        for face in faces
        if each.compiled
        and each.imported.startswith(f"{face}.")
        and each.imported not in faces | LOADED_ON_DEMAND
        and not f"{each.module}.".startswith(f"{face}.")
    ]
    assert not wrong, "\n".join(wrong)


def test_arena_is_cimported_through_its_face_alone():
    arena = "gpumem._native.arena"
    wrong = [
        f"{each.path.relative_to(PACKAGE.parent)} cimports {each.imported}"
        for each in ours(IMPORTS)
        if each.compiled
        and f"{each.imported}.".startswith(f"{arena}.")
        and each.imported != f"{arena}.api"
        and not f"{each.module}.".startswith(f"{arena}.")
    ]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize(
    "struct", ["AllocatorHook", "ArenaCore", "ArenaSpan", "DebugHeap", "SpanView"]
)
def test_face_of_the_arena_shows_no_field_of(struct):
    names = [path for path in sources() if f"struct {struct}:\n        pass\n" in path.read_text()]
    assert names == [PACKAGE / "_native/arena/values.pxd"]
    for face in ("api.pxd", "values.pxd"):
        text = (PACKAGE / "_native/arena" / face).read_text()
        assert "_native.arena.types" not in text
        assert f"cdef struct {struct}" not in text


def test_chunk_table_needs_only_libc():
    for each in IMPORTS:
        if folder_of(each.module) == "_native/bfc":
            allowed = ("libc.", "gpumem._native.bfc", "gpumem._support.")
            assert each.imported.startswith(allowed), f"{each.module} imports {each.imported}"


def test_frameworks_are_imported_where_they_are_used():
    """A module may import one at its top if functions alone import that module."""
    needs = {
        each.module: each.imported
        for each in IMPORTS
        if each.top and each.imported.split(".")[0] in FRAMEWORKS
    }
    wrong = [
        f"{each.module} imports {each.imported}, which imports {needs[each.imported]}"
        for each in IMPORTS
        if each.top and each.imported in needs
    ]
    wrong += [module for module in needs if not module.split(".")[-1].startswith("_")]
    assert not wrong, "\n".join(wrong)


def test_only_the_command_line_imports_click_and_rich():
    wrong = [
        f"{each.module} imports {each.imported}"
        for each in IMPORTS
        if each.imported.split(".")[0] in COMMAND_LINE and folder_of(each.module) != "cli"
    ]
    assert not wrong, "\n".join(wrong)


def test_only_tests_import_the_instruments():
    wrong = [
        each.module
        for each in ours(IMPORTS)
        if each.imported.startswith("gpumem._testing") and folder_of(each.module) != "_testing"
    ]
    assert not wrong, wrong


def test_allocator_below_python_touches_no_object():
    """It runs without the interpreter lock: no def, no class, no except, no print."""
    for path in sources():
        if path.suffix == ".pyx" and folder_of(layers.module_of(path)) in (
            "_native/bfc",
            "_native/pages",
            "_native/backing",
            "_native/arena",
        ):
            code = re.sub(r'""".*?"""', "", path.read_text(), flags=re.DOTALL)
            assert not re.search(r"^\s*(def|class|cdef class|raise|try|with gil)\b", code, re.M), (
                path
            )


def test_folders_stay_small_enough_to_look_through():
    def entries(folder):
        made = {"__pycache__"}
        return [
            each.name
            for each in folder.iterdir()
            if each.name not in made and not each.name.endswith((".so", ".c.dep"))
        ]

    assert len(entries(PACKAGE)) <= 44
    for folder in PACKAGE.rglob("*"):
        if folder.is_dir() and folder.name != "__pycache__":
            # A module's .pyx, .pxd and .pyi are one entry to a reader.
            names = {name.split(".")[0] for name in entries(folder)}
            assert len(names) <= 30, f"{folder.relative_to(PACKAGE)} holds {len(names)} modules"


def test_compiled_modules_are_at_most_ninety():
    assert len([path for path in sources() if path.suffix == ".pyx"]) <= 90


def test_picture_of_the_layers_shows_what_the_test_holds():
    assert layers.PICTURE.read_text() == layers.draw(), "python -m source.layers, run in tests/"
