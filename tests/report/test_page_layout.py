"""The page's layout: no overflow, no overlap, readable text, at three widths in both themes."""

from dataclasses import replace

import pytest
from helpers.runs import MIB, told_run, with_details

from gpumem.report import write_report

LONG = (
    "transformer.blocks.attention.query_key_value_projection (/a/path/of/many/folders/model.py:1)"
)


@pytest.fixture(scope="session")
def long_page(tmp_path_factory):
    """Write a page of two runs with long names and large numbers."""
    path = tmp_path_factory.mktemp("layout") / "page.html"
    run = told_run(f"a-run-with-a-rather-long-name-{'x' * 40}")
    long = replace(with_details(run, owners=(LONG, "activations", "")), size=run.size * 1000)
    write_report([long, told_run("after", more=MIB)], path)
    return path


@pytest.fixture(params=[420, 1024, 1400])
def wide(request, open_page, long_page):
    page = open_page(long_page)
    page.browser.resize(request.param)
    page.press("#runs tbody tr:nth-child(2) input[type=checkbox]")
    page.press("#leaks tbody button")
    yield page
    page.browser.resize(1280)


@pytest.mark.parametrize("compared", [True, False])
def test_nothing_overflows_its_card(wide, compared):
    if not compared:
        wide.press("#runs tbody tr:nth-child(2) input[type=checkbox]")
    assert wide.browser.evaluate("document.documentElement.scrollWidth - innerWidth") == 0
    overflowing = wide.browser.evaluate(
        """Array.from(document.querySelectorAll('body *')).filter(found =>
             found.clientWidth && found.scrollWidth > found.clientWidth + 1
             && getComputedStyle(found).overflowX === 'visible' && !found.closest('.uplot, select')
           ).map(found => `${found.tagName} ${found.className} ${found.id}`)"""
    )
    assert overflowing == []
    cut = wide.browser.evaluate(
        """Array.from(document.querySelectorAll('.panel, .figures > div')).flatMap(card => {
             const {left, right} = card.getBoundingClientRect();
             return Array.from(card.querySelectorAll('*')).filter(found => {
               if (found.closest('.scroll, .uplot')) return false;
               const at = found.getBoundingClientRect();
               return at.width && (at.left < left - 1 || at.right > right + 1);
             }).map(found => `${found.tagName} ${found.id} in ${card.id}`);
           })"""
    )
    assert cut == []


@pytest.mark.parametrize("compared", [False, True])
def test_tables_of_a_narrow_page_need_no_sideways_scroll(page_of, compared):
    page = page_of([told_run("before"), told_run("after", more=MIB)])
    page.browser.resize(420)
    if compared:
        page.press("#runs tbody tr:nth-child(2) input[type=checkbox]")
    hidden = page.browser.evaluate(
        """Array.from(document.querySelectorAll('.scroll'))
             .filter(found => found.scrollWidth > found.clientWidth)
             .map(found => `${found.firstChild.id}: ${found.scrollWidth} / ${found.clientWidth}`)"""
    )
    uneven = page.browser.evaluate(
        """Array.from(document.querySelectorAll('.scroll table')).filter(table => {
             const [head, row] = Array.from(table.rows, row =>
               Array.from(row.cells).filter(cell => cell.offsetWidth).length);
             return head !== row;
           }).map(table => table.id)"""
    )
    page.browser.resize(1280)
    assert hidden == []
    assert uneven == []  # a column is left out with its name


def test_panel_of_a_block_is_as_wide_as_a_narrow_page(open_page, long_page):
    page = open_page(long_page)
    page.browser.resize(420)
    page.press("#leaks tbody button")
    box = page.browser.evaluate(
        "(({left, right, bottom}) => [left, innerWidth - right, innerHeight - bottom])"
        "(document.getElementById('block').getBoundingClientRect())"
    )
    page.browser.resize(1280)
    assert box == [0, 0, 0]


def test_no_text_lies_over_another(wide):
    wide.press("#block-close")
    over = wide.browser.evaluate(
        """(() => {
             const shown = Array.from(document.querySelectorAll(
               'h1, h2, .hint, .key, .figures > div, label, button, output, td, .chart'))
               .filter(found => found.offsetHeight && !found.closest('.uplot, .block, #filters'));
             const boxes = shown.map(found => found.getBoundingClientRect());
             return shown.flatMap((a, i) => shown.slice(i + 1).filter((b, j) => {
               const [p, q] = [boxes[i], boxes[i + 1 + j]];
               const apart = p.right <= q.left + 1 || q.right <= p.left + 1
                 || p.bottom <= q.top + 1 || q.bottom <= p.top + 1;
               return !apart && !a.contains(b) && !b.contains(a)
                 && !(a.closest('.scroll') && b.closest('.scroll'));
             }).map(b => `${a.tagName} ${a.id} ${a.innerText} / ${b.tagName} ${b.id}`));
           })()"""
    )
    assert over == []


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_texts_stand_out_from_their_background(wide, theme):
    wide.press(f"input[name=theme][value={theme}]")
    faint = wide.browser.evaluate(
        """(() => {
             const bytes = (color) => color.match(/[0-9.]+/g).map(Number);
             const light = ([r, g, b]) => [r, g, b].map(v => v / 255)
               .map(v => v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4)
               .reduce((sum, v, i) => sum + v * [0.2126, 0.7152, 0.0722][i], 0);
             const ground = (found) => {
               for (let at = found; at; at = at.parentElement) {
                 const color = bytes(getComputedStyle(at).backgroundColor);
                 if (color.length === 3 || color[3] === 1) return color;
               }
             };
             const texts = '.key li, .key b, .hint, td, th, dt, dd, small, button, h2, label';
             return Array.from(document.querySelectorAll(texts))
               .filter(found => found.innerText?.trim() && !found.disabled)
               .filter(found => {
                 const [a, b] = [bytes(getComputedStyle(found).color), ground(found)].map(light);
                 return (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05) < 4.5;
               }).map(found => `${found.tagName} ${found.id} ${found.innerText}`);
           })()"""
    )
    assert faint == []


def test_legends_have_the_colours_of_the_theme_that_is_chosen(wide):
    def colors():
        return wide.browser.evaluate(
            "Array.from(document.querySelectorAll('.key .swatch'),"
            " found => getComputedStyle(found).background)"
        )

    wide.press("input[name=theme][value=light]")
    light = colors()
    wide.press("input[name=theme][value=dark]")
    assert all(a != b for a, b in zip(light, colors(), strict=True))


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_lines_of_live_and_reserved_bytes_have_different_hues(wide, theme):
    wide.press(f"input[name=theme][value={theme}]")
    reserved, live = (
        wide.browser.evaluate(
            "getComputedStyle(document.querySelector("
            f"'#timeline-legend .swatch.{name}')).backgroundColor.match(/[0-9]+/g).map(Number)"
        )
        for name in ("reserved", "live")
    )
    warmer = [red - blue for red, _, blue in (reserved, live)]
    assert warmer[0] > 50 > -50 > warmer[1]


def test_every_control_can_have_the_focus(wide):
    unreachable = wide.browser.evaluate(
        """Array.from(document.querySelectorAll('button, select, input, .chart, .strip'))
             .filter(found => found.offsetHeight && !found.disabled && found.id !== 'sizes')
             .filter(found => { found.focus(); return document.activeElement !== found; })
             .map(found => found.outerHTML)"""
    )
    assert unreachable == []


NARROW, WIDE = 420, 1400


@pytest.fixture
def sized(page_of):
    """Open a page with a stream and owners of usual names, at a width."""
    owners = (
        "__init__ (/job/model/attention.py:120)",
        "scaled_dot_product (/job/model/attention.py:77)",
    )
    streams = ("legacy default", "a stream with a long name")
    page = page_of(with_details(told_run(), owners=(*owners, "layer.11.bias"), streams=streams))

    def resize(width):
        page.browser.resize(width)
        return page

    yield resize
    page.browser.resize(1280)


def test_filters_are_one_row_of_a_wide_page(sized):
    page = sized(WIDE - 15)  # with a scrollbar
    middles = """Array.from(document.querySelectorAll('#filters > *')).map(found => {
        const {top, bottom} = found.getBoundingClientRect(); return Math.round((top + bottom) / 2);
    })"""
    page.choose("#by", "function")
    page.press("#groups tbody button")
    assert not page.hidden("#one-group")
    assert len(set(page.browser.evaluate(middles))) == 1


def test_owners_of_a_narrow_page_break_between_words_only(sized):
    page = sized(NARROW)
    broken = """Array.from(document.querySelectorAll('#groups .word, #leaks .word'))
        .filter(word => word.getClientRects().length > 1 || word.offsetHeight > 25)
        .map(word => word.innerText)"""
    assert page.browser.evaluate("document.querySelectorAll('#groups .word').length") == 5
    assert page.browser.evaluate(broken) == []


def test_words_that_are_too_long_break_after_punctuation(wide):
    # Each letter of a word has a box of its own; a line begins where the next box is lower.
    lines = wide.browser.evaluate(
        """Array.from(document.querySelectorAll('#groups .word')).flatMap(word => {
             const found = [], walk = document.createTreeWalker(word, NodeFilter.SHOW_TEXT);
             let text = '', below = null;
             for (let node = walk.nextNode(); node; node = walk.nextNode())
               for (let i = 0; i < node.length; i++) {
                 const range = document.createRange();
                 range.setStart(node, i); range.setEnd(node, i + 1);
                 const {top} = range.getBoundingClientRect();
                 if (below !== null && top > below + 4) { found.push(text); text = ''; }
                 below = top; text += node.data[i];
               }
             return found;
           })"""
    )
    assert lines
    assert all(line[-1] in "/._:(" for line in lines), lines


def test_texts_of_the_axis_are_whole_or_left_out(page_of):
    page = page_of(told_run(), "#from=0.01&to=3.0001")
    texts = page.written("timeline", "input[name=theme][value=dark]")
    width = page.browser.evaluate("document.querySelector('#timeline canvas').width")
    assert "2.50 s" in [text for text, *_ in texts]
    assert [text for text, _, end in texts if end > width] == []


@pytest.mark.parametrize("width", [NARROW, WIDE])
def test_streams_and_their_peaks_are_named_beside_their_lanes(sized, width):
    page = sized(width)
    # The canvas is cut at its left edge: a name that does not fit has ink there.
    drawn = page.written("lanes")
    left = page.browser.evaluate(
        "document.querySelector('#lanes .u-over').offsetLeft * devicePixelRatio"
    )
    names = {text: (begin, end) for text, begin, end in drawn}
    for text in (
        "legacy default",
        "\N{LESS-THAN OR EQUAL TO} 6 MiB",
        "\N{LESS-THAN OR EQUAL TO} 1 MiB",
    ):
        begin, end = names[text]
        assert begin >= 0, text
        assert end < left, text  # where no moment's line is
    assert any(text.startswith("a stream") and text.endswith("…") for text in names)
    assert all(begin >= 0 for begin, _ in names.values())
