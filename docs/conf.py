"""Configuration of the documentation site: `sphinx-build -W -c docs . site`, from the root.

The root is the source folder, so that pages link to each other, to measured results and to the
documents of the root by the same paths as in the tree.
"""

import importlib

from sphinx.util import logging

import gpumem

project = "gpumem"
author = copyright = "The gpumem developers"
version = release = gpumem.__version__
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
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
napoleon_google_docstring = False
napoleon_use_rtype = False
html_theme = "furo"
html_title = "gpumem"
html_extra_path = ["site"]  # index.html, which leads from the top to the first page
napoleon_use_ivar = (
    True  # a class's attributes are a list in its description, not entries of their own
)
# "stream" and "path" in types are attributes of several classes, too: then they are no links.
suppress_warnings = ["ref.python"]


def skip_what_the_top_documents(app, what, name, member, skip, options):
    """Describe a name of `gpumem` on its page alone, also where another module exports it."""
    here = app.env.current_document.docname
    if here != "docs/reference/gpumem" and name in gpumem.__all__:
        return True if getattr(gpumem, name) is member else None
    return None


def require_every_public_name(app, env):
    """Warn of public names without a description."""
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


def setup(app):
    """Connect the functions above."""
    app.connect("autodoc-skip-member", skip_what_the_top_documents)
    app.connect("env-check-consistency", require_every_public_name)
