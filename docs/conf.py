"""Configuration of the documentation site: `sphinx-build -W -c docs . site`, from the root.

The root is the source folder, so that pages link to each other, to measured results and to the
documents of the root by the same paths as in the tree.
"""

import importlib
import re
import subprocess
import sys
from pathlib import Path

from docutils import nodes
from docutils.parsers.rst import Directive
from sphinx.util import logging

import gpumem

project = "gpumem"
author = copyright = "The gpumem developers"
version = release = gpumem.__version__
extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.autosummary",
    "sphinx.ext.napoleon",
]
root_doc = "docs/index"
include_patterns = [
    "README.md",
    "ARCHITECTURE.md",
    "CHANGELOG.md",
    "CONTRIBUTING.md",
    "SECURITY.md",
    "docs/**.md",
    "bench/README.md",
    "bench/results/*.md",
    "gpumem/traces/samples/README.md",
    "tests/README.md",
]
myst_heading_anchors = 3
default_role = "py:obj"  # in docstrings; a name that is not public stays plain text
autodoc_member_order = "bysource"
autodoc_typehints = "signature"
# Classes describe what they inherit from gpumem's own classes, but not from Python's.
autodoc_default_options = {"inherited-members": "BaseException, tuple, dict, int, Enum, Mapping"}
napoleon_google_docstring = False
napoleon_use_rtype = False
html_theme = "furo"
html_title = f"gpumem {release}"
html_extra_path = ["site"]  # index.html, which leads from the top to the first page
html_static_path = ["static"]
html_css_files = ["site.css"]
html_js_files = ["site.js"]
napoleon_use_ivar = (
    True  # a class's attributes are a list in its description, not entries of their own
)
# "stream" and "path" in types are attributes of several classes, too: then they are no links.
# Tables of members stand below the description of their class.
suppress_warnings = ["ref.python", "autosummary.import_cycle"]


MAX_METHODS_WITHOUT_TABLE = 8
TABLES_BY_SUBJECT = ["gpumem", "gpumem.Arena"]


def add_table(app, what, name, object_, options, lines):
    """Add a table with a line for each public name of a module, or method of a long class."""
    if what not in ("module", "class") or name in TABLES_BY_SUBJECT:
        return
    names = getattr(object_, "__all__", None) or [
        each for each in public_members(object_) if callable(getattr(object_, each, None))
    ]
    if what == "module" or len(names) > MAX_METHODS_WITHOUT_TABLE:
        rows = [
            f"   ~{'gpumem' if what == 'module' and each in gpumem.__all__ else name}.{each}"
            for each in names
        ]
        lines += ["", ".. autosummary::", "   :nosignatures:", "", *rows, ""]


def skip_what_the_top_documents(app, what, name, member, skip, options):
    """Describe a name of `gpumem` on its page alone, also where another module exports it."""
    here = app.env.current_document.docname
    if here != "docs/reference/gpumem" and name in gpumem.__all__:
        return True if getattr(gpumem, name) is member else None
    return None


def require_every_public_name(app, env):
    """Warn of public names, and of members of public classes, without a description."""
    described = env.domains.python_domain.objects
    for module in [name for name, each in described.items() if each.objtype == "module"]:
        for name in importlib.import_module(module).__all__:
            member = getattr(importlib.import_module(module), name)
            names = {
                f"{module}.{name}",
                f"gpumem.{name}",
                f"{getattr(member, '__module__', '')}.{name}",
            }
            if not names & described.keys():
                logging.getLogger(__name__).warning("%s.%s is not described", module, name)
            if isinstance(member, type):
                for lacking in undescribed_members(member, described):
                    logging.getLogger(__name__).warning("%s of %s is not described", lacking, name)


def own_classes(kind):
    """Return a class and those that it inherits from, without Python's."""
    return [each for each in kind.__mro__ if each.__module__.partition(".")[0] == "gpumem"]


def public_members(kind):
    """Return the public names of a class's members, without those of Python's classes."""
    return sorted(
        {name for each in own_classes(kind) for name in vars(each) if not name.startswith("_")}
    )


def undescribed_members(kind, described):
    """Return the public members of a class that have no entry and are not in its attributes."""
    entries = [name for name in described if name.rpartition(".")[2] == kind.__name__]
    texts = "\n".join(each.__doc__ or "" for each in own_classes(kind))
    return [
        member
        for member in public_members(kind)
        if not any(f"{entry}.{member}" in described for entry in entries)
        and not re.search(rf"^ *(\w+, )*{member}(, \w+)*( :|$)", texts, re.M)
    ]


# Words that readers type into the search box, by page: index entries come first in its results. An
# entry is found by each part of it that is at least half as long.
SEARCHED = {
    "docs/where_memory_goes": [
        "cuda out of memory",
        "cuda_error_out_of_memory",
        "outofmemoryerror",
        "oom",
        "memory leaks",
        "leaks",
        "gpu memory usage",
        "memory usage",
        "profile memory",
        "memory profiler",
        "peak memory",
        "report",
    ],
    "docs/pytorch": ["memory fragmentation", "expandable segments", "pytorch", "torch"],
    "docs/tenants": ["how to limit gpu memory", "set memory limit", "max memory", "limits"],
    "docs/several_gpus": ["multiple gpus", "multi gpu", "multi-gpu", "nvlink", "ddp", "fsdp"],
    "docs/will_it_fit": ["estimate memory", "memory estimate", "predict memory", "does it fit"],
    "docs/host_memory": ["pinned memory", "pinned", "host memory killed", "oom killer"],
    "docs/tests_without_gpu": ["unit tests without gpu", "unit testing", "mock cuda", "cpu only"],
    "docs/offload": ["activations out of memory", "offload activations", "offload"],
    "docs/several_programs": ["how to share gpu between processes", "share a gpu"],
    "docs/beyond_one_process": ["multiprocessing", "ipc"],
    "docs/sleep": ["sleep offload weights rlhf", "offload weights", "sleep"],
    "docs/coming_from": ["migrate from rmm", "rmm pool", "cupy memory pool"],
    "docs/works_with": [
        *["docker", "kubernetes", "conda", "jupyter", "tensorflow", "vllm", "sglang", "tensorrt"],
        *["hugging face", "huggingface", "transformers", "deepspeed", "windows", "amd rocm", "mps"],
    ],
    "docs/settings": ["settings", "environment variables"],
    "docs/faq": ["threads", "thread safe", "asyncio", "fork", "turn off", "how to disable"],
    "docs/streams": ["streams", "cuda graphs"],
}


def add_index_entries(app, page, source):
    """Enter the words of `SEARCHED` below the title of their page."""
    if page in SEARCHED:
        title, rest = source[0].split("\n", 1)
        entries = ", ".join(f"! {words}" for words in SEARCHED[page])  # "!": before other results
        source[0] = f"{title}\n\n```{{index}} {entries}\n```\n{rest}"


def keep_for_contributors(app, env):
    """Leave the root's documents, measurements and contributors' pages out of the search."""
    for page in env.found_docs:
        if not page.startswith("docs/") or page == "docs/figures":
            env.metadata[page] |= {"nosearch": True, "orphan": True}


def link_to_a_class(app, env, node, content):
    """Link a name that a docstring has without its module; of an attribute, link its class.

    In the tables of a class's own page a name is a member's.
    """
    name, python = node["reftarget"], env.domains.python_domain
    if node["refdomain"] != "py":
        return None
    page = node["refdoc"].rpartition("/")[2]
    names = [f"{page}.{name}"] if page.rpartition(".")[2][0].isupper() else []
    if name[0].isupper() or name in gpumem.__all__:
        names += [name, name.rpartition(".")[0]]
    for each in names:
        found = python.find_obj(env, "gpumem", None, each, None, 1) if each else []
        if len(found) == 1:
            kind, target = node["reftype"], found[0][0]
            return python.resolve_xref(
                env, node["refdoc"], app.builder, kind, target, node, content
            )
    return None


class OutputOf(Directive):
    """The output of a program of the tree, run as the pages are made."""

    required_arguments = 1
    final_argument_whitespace = True

    def run(self):
        """Run the program; one that fails is an error of the pages."""
        done = subprocess.run(
            [sys.executable, *self.arguments[0].split()],
            cwd=Path(__file__).resolve().parents[1],
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        if done.returncode:
            raise self.error(f"{self.arguments[0]} failed: {done.stderr}")
        shown = f"$ python {self.arguments[0]}\n{done.stdout}"
        return [nodes.literal_block(shown, shown, language="console")]


def setup(app):
    """Connect the functions above."""
    app.add_directive("output-of", OutputOf)
    app.connect("missing-reference", link_to_a_class)
    app.connect("autodoc-process-docstring", add_table)
    app.connect("autodoc-skip-member", skip_what_the_top_documents)
    app.connect("source-read", add_index_entries)
    app.connect("env-updated", keep_for_contributors)
    app.connect("env-check-consistency", require_every_public_name)
