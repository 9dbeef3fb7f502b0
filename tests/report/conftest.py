"""A browser for the pages, one for all tests, in which drawn pages are read."""

import os
from pathlib import Path

import pytest
from report.browser import Browser, executable

from gpumem.report import write_report


@pytest.fixture(scope="session")
def chromium(tmp_path_factory):
    """A headless Chromium."""
    program = executable()
    if program is None:
        assert os.environ.get("GPUMEM_REQUIRE_BROWSER") != "1", "there is no Chromium"
        pytest.skip("no browser: install Debian's chromium, or name one in GPUMEM_CHROMIUM")
    browser = Browser(program, tmp_path_factory.mktemp("profile"))
    yield browser
    browser.close()


class Page:
    """A report in the browser."""

    def __init__(self, browser: Browser, path: Path, fragment: str = ""):
        self.browser = browser
        self.path = path
        browser.errors.clear()
        browser.requests.clear()
        browser.open(path, fragment)
        assert browser.evaluate("document.documentElement.dataset.state") == "ready", browser.errors

    def text(self, selector: str) -> str:
        """Return the text of an element."""
        return self.browser.evaluate(f"document.querySelector({selector!r}).innerText")

    def rows(self, selector: str) -> list[list[str]]:
        """Return the cells of a table's body."""
        return self.browser.evaluate(
            f"Array.from(document.querySelectorAll({selector + ' tbody tr'!r}),"
            " row => Array.from(row.children, cell => cell.innerText.trim()))"
        )

    def colors(self, chart: str) -> dict[str, int]:
        """Count the colours of the pixels of a chart's plot, empty ones left out."""
        return self.browser.evaluate(
            """((chart) => {
              const canvas = chart.querySelector('canvas');
              const over = chart.querySelector('.u-over');
              const at = over.getBoundingClientRect(), from = canvas.getBoundingClientRect();
              const copy = Object.assign(document.createElement('canvas'), at.toJSON());
              const context = copy.getContext('2d', {willReadFrequently: true});
              context.drawImage(canvas, from.left - at.left, from.top - at.top);
              const picture = context.getImageData(0, 0, copy.width, copy.height).data;
              const found = {};
              for (let i = 0; i < picture.length; i += 4) if (picture[i + 3]) {
                const color = picture.slice(i, i + 3).join();
                found[color] = (found[color] ?? 0) + 1;
              }
              return found;
            })"""
            f"(document.getElementById({chart!r}))"
        )

    def written(self, chart: str, press: str = "#reset") -> list[tuple[str, float, float]]:
        """Draw a chart again; return the texts on its canvas, each with its left and right end."""
        self.browser.evaluate(
            """(() => {
                 const draw = CanvasRenderingContext2D.prototype.fillText;
                 window.written = [];
                 CanvasRenderingContext2D.prototype.fillText = function (text, x, y) {
                   const {width} = this.measureText(text), share = {right: 1, center: 0.5};
                   const begin = x - width * (share[this.textAlign] ?? 0);
                   const place = this.canvas.closest('.chart')?.id;
                   if (place) window.written.push([place, text, begin, begin + width]);
                   return draw.call(this, text, x, y);
                 };
               })()"""
        )
        self.press(press)
        return [tuple(row) for place, *row in self.browser.evaluate("written") if place == chart]

    def box(self, selector: str) -> dict[str, float]:
        """Scroll to an element; return its place."""
        return self.browser.evaluate(f"""(() => {{
              const found = document.querySelector({selector!r});
              found.scrollIntoView({{block: 'center'}});
              const {{left, top, width, height}} = found.getBoundingClientRect();
              return {{left, top, width, height}};
            }})()""")

    def link(self) -> str:
        """Return the part of the address after the #."""
        return self.browser.evaluate("location.hash")

    def hidden(self, selector: str) -> bool:
        """Return whether an element takes no room."""
        return self.browser.evaluate(f"!document.querySelector({selector!r}).offsetHeight")

    def find(self, text: str) -> None:
        """Write into the search field."""
        self.browser.evaluate(f"""(() => {{
              const field = document.getElementById('find');
              field.value = {text!r};
              field.dispatchEvent(new Event('input'));
            }})()""")
        self.browser.settle()

    def click(self, selector: str, x: float, y: float) -> None:
        """Click on an element; places are parts of its width and height, from its top left."""
        box = self.box(selector)
        at = box["left"] + x * box["width"], box["top"] + y * box["height"]
        self.browser.click(*at)

    def choose(self, selector: str, value: str) -> None:
        """Choose of a select, or press a radio button, as a click does."""
        self.browser.evaluate(f"""(() => {{
              const found = document.querySelector({selector!r});
              if (found.type === 'radio') found.click();
              else {{ found.value = {value!r}; found.dispatchEvent(new Event('change')); }}
            }})()""")
        self.browser.settle()

    def press(self, selector: str) -> None:
        """Press a button."""
        self.browser.evaluate(f"document.querySelector({selector!r}).click()")
        self.browser.settle()

    def drag(self, chart: str, start: tuple[float, float], end: tuple[float, float]) -> None:
        """Drag over a chart's plot; places are parts of its width and height, from its top left."""
        box = self.box(f"#{chart} .u-over")
        left, top, width, height = (box[side] for side in ("left", "top", "width", "height"))
        places = [(left + x * width, top + y * height) for x, y in (start, end)]
        self.browser.drag(*places)


@pytest.fixture
def page_of(open_page, tmp_path):
    """Write the page of a source, and open it."""

    def write_and_open(source, fragment="", **options):
        path = tmp_path / "page.html"
        write_report(source, path, **options)
        return open_page(path, fragment)

    return write_and_open


@pytest.fixture
def open_page(chromium):
    """Open a report; it must log no error and request nothing from a network."""
    opened = []

    def open_it(path, fragment="") -> Page:
        opened.append(Page(chromium, Path(path), fragment))
        return opened[-1]

    yield open_it
    if opened:
        assert chromium.errors == []
        assert all(url.startswith(("file:", "data:", "about:")) for url in chromium.requests)
