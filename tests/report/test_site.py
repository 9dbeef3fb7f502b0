"""The site of the documentation, in a browser: its search, its tables and its links to copy."""

import os
from pathlib import Path
from urllib.parse import quote

import pytest

SITE = os.environ.get("GPUMEM_SITE")
pytestmark = pytest.mark.skipif(
    SITE is None, reason="GPUMEM_SITE names no site: sphinx-build -W -c docs . FOLDER makes one"
)

FIRST = {
    "out of memory": "Where did my memory go",
    "cuda out of memory": "Where did my memory go",
    "limit gpu memory": "Limits for tenants",
    "how to limit gpu memory": "Limits for tenants",
    "set memory limit": "Limits for tenants",
    "multiple gpus": "Several GPUs",
    "multi-gpu": "Several GPUs",
    "several gpus": "Several GPUs",
    "will it fit": "Will it fit?",
    "estimate memory": "Will it fit?",
    "memory leak": "Where did my memory go",
    "memory usage": "Where did my memory go",
    "unit tests without gpu": "Tests without a GPU",
    "mock cuda": "Tests without a GPU",
    "pinned memory": "Host memory",
    "host memory killed": "Host memory",
    "share gpu between processes": "Several programs on one GPU",
    "migrate from rmm": "Coming from RMM",
    "rmm pool": "Coming from RMM",
    "fragmentation": "PyTorch over an arena",
    "sleep offload weights rlhf": "Sleep and wake",
    "offload": "Activations that do not fit",
    "docker": "Does it work with …",
    "conda": "Does it work with …",
    "jupyter": "Does it work with …",
    "tensorflow": "Does it work with …",
    "vllm": "Does it work with …",
}


@pytest.fixture
def open_page(chromium):
    """Open a page of the site, by its path and its query."""

    def open_(page, query=""):
        chromium.call("Page.navigate", url="about:blank")
        chromium.call("Page.navigate", url=(Path(SITE).resolve() / page).as_uri() + query)
        chromium.wait("document.readyState === 'complete' && location.protocol === 'file:'")

    chromium.resize(1400)
    yield open_
    chromium.resize(1280)


@pytest.mark.parametrize(("words", "title"), FIRST.items(), ids=FIRST)
def test_search_finds_the_page_of_the_words_first(chromium, open_page, words, title):
    open_page("search.html", f"?q={quote(words)}")
    found = chromium.wait("document.querySelector('#search-results li a')?.innerText")
    assert found.startswith(title)


def test_tables_leave_room_for_the_contents_and_are_not_cut(chromium, open_page):
    cut = {}
    pages = sorted(Path(SITE, "docs").glob("*.html"))
    assert len(pages) > 30
    for page in pages:
        open_page(f"docs/{page.name}")
        cut[page.name] = chromium.evaluate(
            "Array.from(document.querySelectorAll('.table-wrapper'))"
            ".filter(each => each.scrollWidth > each.clientWidth + 1)"
            ".map(each => each.innerText.slice(0, 60))"
        )
        squeezed = "document.querySelector('.toc-drawer:not(.no-toc)')?.clientWidth < 200"
        if chromium.evaluate(squeezed):
            cut[page.name].append("contents")
    assert not {name: found for name, found in cut.items() if found}


def test_code_is_copied_by_a_button_without_its_prompts(chromium, open_page):
    open_page("docs/cheat_sheet.html")
    assert chromium.evaluate(
        "document.querySelectorAll('.highlight button').length"
        " === document.querySelectorAll('.highlight pre').length"
    )
    copied = chromium.evaluate("copied('$ gpumem info\\nsaid\\n$ gpumem demo', true)")
    assert copied == "gpumem info\ngpumem demo"
    assert chromium.evaluate("copied('x = 1\\n', false)") == "x = 1\n"
