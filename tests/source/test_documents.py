"""What the documents name is there: files, folders, functions and links."""

import importlib.util
import re
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
TOP = [ROOT / f"{name}.md" for name in ("README", "ARCHITECTURE", "CONTRIBUTING")]
TOP += [ROOT / folder / "README.md" for folder in ("bench", "tests")]
DOCUMENTS = [*TOP, *sorted((ROOT / "docs").glob("*.md"))]
SOURCES = {".py", ".pyx", ".pxd", ".c", ".h", ".cpp", ".pyi"}
QUOTED = re.compile(r"`([^`\n]+)`")
FILE = re.compile(r"[\w./-]+\.(?:pyx|pxd|py|cpp|c|h|md|json|svg)")
NAME = re.compile(r"(?:\w+\.)*\w*_\w*")
TEST = re.compile(r"^def (test_\w+)", re.MULTILINE)
# A file of ours as comments name it: with its suffix, or by its folder.
SOURCE_FILE = re.compile(
    r"(?<![\w./<-])("
    r"[\w/]*\w\.(?:pyx|pxd|cpp|c|h)|(?:arena|bfc|pages|backing|driver|include|hostdev)/\w+"
    r")(?![\w./(*])"
)
OTHERS = re.compile(
    r"Python\.h|cuda\w*\.h|host_defines\.h|dlpack\.h|Exception\.h|CUDA\w+Allocator\.h"
)
OF_OTHERS = {"cuda.h"}
FUNCTIONS_OF_OTHERS = {
    "copy_from",
    "copy_tensor_to_devices",
    "malloc_managed",
    "set_current_device_resource",
}
ROW = re.compile(r"^\| `([\w/]+\.(?:pyx|pxd))` \| (.*) \|$", re.MULTILINE)

each_document = pytest.mark.parametrize(
    "document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT))
)


def tracked() -> list[Path]:
    """Return the sources and documents in the tree, without what a build makes."""
    folders = ("gpumem", "tests", "bench", "examples", "docs")
    found = [path for name in folders for path in (ROOT / name).rglob("*") if path.is_file()]
    return [*found, *ROOT.glob("*.md")]


@cache
def names() -> frozenset[str]:
    """Return every word of the sources."""
    texts = [path.read_text() for path in tracked() if path.suffix in SOURCES]
    return frozenset(word for text in texts for word in re.findall(r"\w+", text))


@cache
def paths() -> str:
    return "\n".join(f"/{path.relative_to(ROOT)}" for path in tracked())


@each_document
def test_document_links_to_what_exists(document):
    links = re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", document.read_text())
    missing = [link for link in links if not (document.parent / link).exists()]
    assert not missing


@each_document
def test_document_names_files_that_exist(document):
    found = [name for name in QUOTED.findall(document.read_text()) if FILE.fullmatch(name)]
    missing = [name for name in found if not re.search(f"/{re.escape(name)}$", paths(), re.M)]
    assert not set(missing) - OF_OTHERS


@each_document
def test_document_names_functions_that_exist(document):
    found = [name for name in QUOTED.findall(document.read_text()) if NAME.fullmatch(name)]
    parts = {part for name in found for part in name.split(".") if "_" in part.strip("_")}
    assert not sorted(part for part in parts - FUNCTIONS_OF_OTHERS if part not in names())


def test_traces_of_the_architecture_name_functions_of_their_files():
    rows = ROW.findall((ROOT / "ARCHITECTURE.md").read_text())
    assert len(rows) >= 15
    wrong = []
    for file, text in rows:
        path = ROOT / "gpumem" / file
        twins = [path.with_suffix(suffix) for suffix in (".pyx", ".pxd")]
        code = "".join(twin.read_text() for twin in twins if twin.exists())
        called = [name.split(".")[-1] for name in QUOTED.findall(text) if NAME.fullmatch(name)]
        wrong += [(file, name) for name in called if not re.search(rf"\b{name}\b", code)]
    assert not wrong


def test_architecture_is_short_enough_to_read():
    text = (ROOT / "ARCHITECTURE.md").read_text()
    assert len(text.splitlines()) <= 250
    glossary = text.split("## Glossary")[1].split("\n## ")[0]
    assert glossary.count("\n| ") - 2 <= 25


def test_page_of_a_task_names_no_source_file():
    """Pages on how gpumem works do; an example is no source."""
    tasks = re.search(
        r":caption: Tasks\n.*?\n\n(.*?)```", (ROOT / "docs/index.md").read_text(), re.S
    )
    assert tasks
    pages = tasks[1].split()
    assert len(pages) > 10
    named = {
        (page, name)
        for page in pages
        for name in QUOTED.findall((ROOT / "docs" / f"{page}.md").read_text())
        if re.search(r"\.(?:pyx|pxd|c|h|cpp)$|(?:^|/)_(?:native|support|arena|buffer)\b", name)
    }
    assert not named


def test_each_result_is_quoted_by_a_document_or_a_source():
    quoted = "".join(
        path.read_text()
        for path in [*DOCUMENTS, *tracked()]
        if path.suffix in {".md", ".pyx", ".py"}
    )
    results = [path.name for path in (ROOT / "bench/results").iterdir()]
    assert results
    assert not [name for name in results if f"results/{name}" not in quoted]


def test_script_for_gpus_leaves_out_tests_that_exist():
    folder = ROOT / "tests" / "gpu"
    spec = importlib.util.spec_from_file_location("gpu_run", folder / "run.py")
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    tests = [name for path in folder.glob("test_*.py") for name in TEST.findall(path.read_text())]
    unknown = [
        part for part in script.NOT_UNDER_THE_TOOL if not any(part in name for name in tests)
    ]
    assert not unknown


def is_there(name: str) -> bool:
    """Tell whether a dotted name is a module, or something in one."""
    parts = name.split(".")
    for length in range(len(parts), 0, -1):
        module = ".".join(parts[:length])
        try:
            spec = importlib.util.find_spec(module)
        except ImportError:
            continue
        # A folder of data is none: imported, it would take the name of a function of its package.
        if spec is None or spec.origin is None:
            continue
        found = importlib.import_module(module)
        for part in parts[length:]:
            if part in getattr(found, "__dataclass_fields__", {}):
                return True
            if f"\n    {part} : " in (found.__doc__ or ""):  # set in __init__
                return True
            if not hasattr(found, part):
                return False
            found = getattr(found, part)
        return True
    return False


def test_changelog_is_a_list_of_what_exists():
    text = (ROOT / "CHANGELOG.md").read_text()
    assert len(text.splitlines()) <= 120
    assert not re.findall(r"^\|", text, re.MULTILINE)
    found = {name for name in QUOTED.findall(text) if re.fullmatch(r"[A-Za-z_.]+\.[a-z_]+", name)}
    found = {name for name in found if is_there(f"gpumem.{name.split('.')[0]}")}
    assert len(found) > 20
    assert not sorted(name for name in found if not is_there(f"gpumem.{name}"))


@pytest.mark.parametrize("folder", ["gpumem", "bench", "examples", "tests"])
def test_sources_name_files_that_exist(folder):
    """In comments and docstrings: by a name with its suffix, or as folder/module."""
    wrong = []
    for path in (ROOT / folder).rglob("*"):
        if path.suffix not in SOURCES or not path.is_file():
            continue
        for number, line in enumerate(path.read_text().splitlines(), 1):
            if "<" in line or "../" in line:  # a header of the system, or one found by the compiler
                continue
            for name in SOURCE_FILE.findall(line):
                stem = name if "." in name else rf"{name}(?:\.\w+)?"
                if not re.search(rf"/{stem}$", paths(), re.M) and not OTHERS.search(name):
                    wrong.append(f"{path.relative_to(ROOT)}:{number}: {name}")
    assert not wrong, "\n".join(wrong)
