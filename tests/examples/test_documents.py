"""Snippets of README and docs/: each runs in its own process, and prints what stands below it."""

import doctest
import importlib.util
import re
import shlex
from pathlib import Path

import pytest
from helpers.child import path_with, python

import gpumem
from gpumem.cli import commands as command_line
from gpumem.errors import GpumemError
from gpumem.prediction import pytorch

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
SNIPPET = re.compile(r"^```python\n(.*?)^```\n(?:\n```text\n(.*?)^```)?", re.S | re.M)
COMMANDS = re.compile(r"^```console\n(.*?)^```", re.S | re.M)
NEEDS_GPU = "# needs a GPU\n"
OPTIONAL = ("cupy", "jax", "nccl", "numba", "onnx", "pyarrow", "rmm", "torch")


def snippets():
    """Yield each snippet with its page, the line it begins at, and the text below it."""
    for page in PAGES:
        text = page.read_text()
        for found in SNIPPET.finditer(text):
            line = text[: found.start()].count("\n") + 1
            name = f"{page.relative_to(ROOT)}:{line}"
            yield pytest.param(found[1], found[2], id=name)


def require_what_it_needs(code):
    if NEEDS_GPU in code:
        status = gpumem.driver_status()
        if not status.available:
            pytest.skip(f"needs a CUDA device: {status.reason}")
    if "gpumem.predict(" in code:
        try:
            pytorch.require()
        except GpumemError as error:
            pytest.skip(str(error))
    for name in OPTIONAL:
        imported = re.search(rf"^\s*(?:import|from) .*\b{name}\b", code, re.MULTILINE)
        if imported and importlib.util.find_spec(name) is None:
            pytest.skip(f"{name} is not installed")


@pytest.mark.parametrize(("code", "below"), list(snippets()))
def test_snippet_runs_and_prints_what_stands_below_it(code, below, tmp_path):
    require_what_it_needs(code)
    # A library on the GPU may warn.
    warnings = "default" if NEEDS_GPU in code else "error"
    code = code.replace("/tmp/", f"{tmp_path}/")
    done = python("-W", warnings, "-c", code, cwd=tmp_path, env={"PYTHONPATH": path_with(ROOT)})
    assert NEEDS_GPU in code or not done.stderr
    if below is not None:
        same = doctest.OutputChecker().check_output(below, done.stdout, doctest.ELLIPSIS)
        assert same, f"it prints\n{done.stdout}, and below it stands\n{below}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_commands_of_a_page_have_the_options_that_it_shows(page):
    text = page.read_text()
    shown = [line for block in COMMANDS.findall(text) for line in block.splitlines()]
    shown += [f"$ {quoted}" for quoted in re.findall(r"`(gpumem [^`\n]+)`", text)]
    for line in shown:
        words = shlex.split(line.partition("$ ")[2], comments=True)
        words = words[1:] if words and words[0].endswith("=1") else words
        if len(words) < 2 or words[0] != "gpumem":
            continue
        known = command_line.commands.get(words[1])
        assert known or words[1].startswith("-"), line
        if known and words[1] != "run":  # whose options may be the program's
            options = {name for each in known.params for name in each.opts}
            assert {word for word in words if word.startswith("-")} <= options, line


def test_frameworks_page_has_a_snippet_for_each_library():
    text = (ROOT / "docs" / "frameworks.md").read_text()
    shown = set(re.findall(r"integrations(?:\.| import )(\w+)", text))
    folder = ROOT / "gpumem" / "integrations"
    modules = {path.stem for path in folder.iterdir() if path.suffix in ("", ".py")}
    assert {name for name in modules if not name.startswith("_")} <= shown


def test_readme_is_short_enough_to_read():
    assert len((ROOT / "README.md").read_text().splitlines()) <= 200


def test_tables_of_settings_are_those_of_the_code():
    spec = importlib.util.spec_from_file_location("settings", ROOT / "docs" / "settings_table.py")
    settings = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(settings)
    page = settings.PAGE.read_text()
    assert settings.with_tables(page) == page, "run `python docs/settings_table.py`"


def test_table_of_variables_has_every_variable_of_the_code():
    sources = [
        path for path in (ROOT / "gpumem").rglob("*") if path.suffix in (".py", ".pyx", ".c")
    ]
    used = set()
    for path in sources:
        text = path.read_text()
        used.update(
            re.findall(r"""(?:getenv\(|environ\.get\(|VARIABLE = |CAPACITY = )"(\w+)\"""", text)
        )
    used = {name for name in used if "GPUMEM" in name}
    assert len(used) >= 5
    page = (ROOT / "docs" / "settings.md").read_text()
    assert {name for name in used if f"| `{name}` |" not in page} == set()


def test_reference_has_a_page_for_each_public_module_and_more_for_long_classes():
    pages = {path.stem for path in (ROOT / "docs" / "reference").glob("*.md")} - {"index"}
    index = (ROOT / "docs" / "reference" / "index.md").read_text()
    assert all(f"\n{page}\n" in index for page in pages)
    public = set(gpumem._PACKAGES) | set(gpumem._MODULES) | {"gpumem"}
    folder = ROOT / "gpumem" / "integrations"
    public |= {f"integrations.{path.stem}" for path in folder.iterdir() if path.stem[0] != "_"}
    public |= {page for page in pages if hasattr(gpumem, page.removeprefix("gpumem."))}
    assert pages == public
