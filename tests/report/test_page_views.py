"""The page's views of one run: groups, the state at a moment, stacks, segments, search, links."""

import pytest
from helpers.runs import MIB, told_run

from gpumem import observe
from gpumem.report import write_report

# Of the light theme, in the order of the groups' bytes at the peak.
WEIGHTS, ACTIVATIONS, WORKSPACE = "47,111,208", "224,123,22", "31,158,119"
IDLE, BORDER = "233,228,220", "185,174,157"


@pytest.fixture(scope="session")
def told_page(tmp_path_factory):
    path = tmp_path_factory.mktemp("told") / "page.html"
    write_report(told_run(), path)
    return path


@pytest.fixture
def told(open_page, told_page):
    page = open_page(told_page)
    page.press("input[name=theme][value=light]")
    return page


def test_timeline_stacks_live_bytes_by_owner(told):
    colors = told.colors("timeline")
    # Each has the area of its bytes and time: 4 MiB for 4 s, 2 MiB for 2 s, 1 MiB for 2 s.
    assert colors[WEIGHTS] == pytest.approx(4 * colors[ACTIVATIONS], rel=0.15)
    assert colors[ACTIVATIONS] == pytest.approx(2 * colors[WORKSPACE], rel=0.15)
    told.choose("#owner", "1")
    colors = told.colors("timeline")
    assert WEIGHTS not in colors
    assert WORKSPACE not in colors
    assert colors[ACTIVATIONS] > 1000


def test_page_opens_with_the_state_at_the_highest_point(told):
    assert told.text("#moment-text") == (
        "The highest point: event 3 of 5, at 2.0000 s: allocated 1 MiB of workspace"
    )
    assert told.text("#key").split("\n") == [
        *("weights", "4 MiB"),
        *("activations", "2 MiB"),
        *("workspace", "1 MiB"),
    ]
    sums = told.text("#moment-legend").replace("\n", " ")
    assert sums == "Live 7 MiB Blocks 3 Reserved 12 MiB Reserved, idle 5 MiB"


def test_state_is_stepped_through_events(told):
    told.press("#moment-after")
    assert told.text("#moment-text").startswith("Event 4 of 5, at 3.0000 s: freed 2 MiB")
    assert "activations\n\N{EN DASH}" in told.text("#key")
    told.press("#moment-before")
    told.press("#moment-before")
    assert told.text("#moment-text").startswith("Event 2 of 5")
    told.press("#moment-first")
    assert told.text("#moment-text").startswith("Event 1 of 5")
    assert told.browser.evaluate("document.querySelector('#moment-before').disabled")
    told.press("#moment-last")
    assert told.text("#moment-text").startswith("Event 5 of 5")
    assert "Blocks\n1" in told.text("#moment-legend")
    told.press("#moment-peak")
    assert told.text("#moment-text").startswith("The highest point: event 3")


def test_moment_and_block_are_marked_at_their_places(told):
    told.press("#leaks tbody button")
    places = told.browser.evaluate("""['#timeline .marker', '#map .frame'].map(name => {
             const found = document.querySelector(name);
             const at = found.getBoundingClientRect();
             const over = found.parentElement.getBoundingClientRect();
             return [at.left - over.left, over.bottom - at.bottom, at.width, at.height].map(
               (size, i) => size / (i % 2 ? over.height : over.width));
           })""")
    assert places[0] == pytest.approx([0.5, 0, 0, 1], abs=0.01)  # at 2 of 4 s
    assert places[1] == pytest.approx([0, 0, 1, 4 / 14], abs=0.01)  # 4 of 14 MiB


def test_keys_slider_and_click_choose_the_moment(told):
    told.browser.evaluate("document.querySelector('#timeline').focus()")
    told.browser.press(".", ".")
    assert told.text("#moment-text").startswith("Event 4 of 5")
    told.browser.press(",", ",")
    assert told.text("#moment-text").startswith("Event 3 of 5")
    told.browser.evaluate(
        "(s => { s.value = 1; s.dispatchEvent(new Event('input')); })"
        "(document.querySelector('#moment-slider'))"
    )
    told.browser.settle()
    assert told.text("#moment-text").startswith("Event 2 of 5")
    told.click("#timeline .u-over", 0.9, 0.5)
    assert told.text("#moment-text").startswith("Event 4 of 5")


def test_moment_outside_the_window_moves_the_window(told):
    told.drag("timeline", (0.05, 0.5), (0.2, 0.5))
    told.press("#moment-last")
    told.press("#moment-after")
    told.press("#moment-after")
    assert told.text("#moment-text").startswith("Event 3 of 5, at 2.0000 s")
    assert "3 blocks" in told.text("#shown")


def test_click_on_a_block_shows_its_stack_and_escape_closes(told):
    assert told.hidden("#block")
    told.click("#map .u-over", 0.35, 0.65)  # the activations, above the weights
    assert told.text("#block-title") == "2 MiB (2,097,152 bytes)"
    stack = told.text("#block-stack").split("\n")
    assert stack == ["call /lib/torch/nn.py:9", "forward /job/model.py:7", "main /job/train.py:40"]
    assert "activations" in told.text("#block-facts")
    assert "0x10400000" in told.text("#block-facts")
    told.press("#block-moment")
    assert told.text("#moment-text").startswith("Event 2 of 5")
    told.browser.press("Escape")
    assert told.hidden("#block")


def test_block_without_a_stack_says_so(told):
    told.click("#map .u-over", 0.6, 0.25)
    assert "workspace" in told.text("#block-facts")
    assert told.text("#block-without") == "Not recorded."
    assert told.hidden("#block-of-stack")


def test_strip_shows_blocks_of_the_moment_to_pointer_and_keys(told):
    told.click("#strip canvas", 0.3, 0.03)
    assert "weights" in told.text("#block-facts")
    told.browser.evaluate("document.querySelector('#strip').focus()")
    told.browser.press("ArrowRight")
    assert "activations" in told.text("#block-facts")
    told.browser.press("ArrowRight")
    assert "workspace" in told.text("#block-facts")
    told.browser.press("ArrowLeft")
    assert "activations" in told.text("#block-facts")


def test_row_of_a_live_block_opens_its_stack(told):
    told.press("#leaks tbody button")
    assert told.text("#block-stack").startswith("load /job/train.py:3")


HIDDEN = "205,211,218"


def test_blocks_that_a_filter_leaves_out_are_drawn_as_such_and_not_as_idle(told):
    assert HIDDEN not in told.colors("map")
    assert told.text("#moment-legend").split("\n")[:4] == ["Live", "7 MiB", "Blocks", "3"]
    told.find("forward")  # the activations; weights and workspace are left out
    assert told.colors("map")[HIDDEN] > 10_000
    assert told.text("#moment-legend").split("\n")[:8] == [
        *("Live, as filtered", "2 MiB", "Blocks", "1"),
        *("Live, left out by the filters", "4 MiB", "Reserved", "8 MiB"),
    ]
    assert told.text("#leaks-hint").startswith("No block that the filters show is live at the end")


def test_search_finds_functions_files_owners_and_addresses(told):
    for text, blocks in {
        "forward": 1,
        "TRAIN.PY": 2,
        "work": 1,
        "copies": 1,
        "0x10000000": 1,
        "0x105fffff": 1,
        "0x10600000": 0,
        "nowhere": 0,
        "  ": 3,
    }.items():
        told.find(text)
        of = " of 3" if text.strip() else ""
        assert told.text("#shown").startswith(f"{blocks}{of} block"), text
    told.find("forward")
    assert [row[0] for row in told.rows("#groups")] == ["activations"]
    told.press("#reset")
    assert told.text("#shown").startswith("3 blocks")


def test_groups_by_stack_are_named_by_the_programs_own_lines(told):
    told.choose("#by", "stack")
    assert told.text("#groups-title") == "Stacks"
    assert [row[0] for row in told.rows("#groups")] == [
        "load (train.py:3) ← main",
        "forward (model.py:7) ← main",
        "no stack",
    ]
    told.press("#groups tbody tr:nth-child(2) button")
    assert told.text("#shown").startswith("1 of 3 blocks")
    assert not told.hidden("#one-group")
    told.press("#one-group")
    assert told.text("#shown").startswith("3 blocks")


def test_groups_by_stream_and_size_filter_by_it(told):
    told.choose("#by", "stream")
    assert [row[:1] + row[2:3] for row in told.rows("#groups")] == [
        ["default", "6 MiB"],
        ["copies", "1 MiB"],
    ]
    told.choose("#by", "size")
    assert [row[0] for row in told.rows("#groups")] == ["1 to 8 MiB"]
    told.press("#groups tbody button")
    assert told.browser.evaluate("[least.value, most.value]") == [str(MIB), str(8 * MIB)]
    assert told.text("#shown").startswith("3 of 3 blocks")


def test_run_without_stacks_does_not_offer_them(page_of):
    page = page_of("multistream_train")
    assert page.browser.evaluate("document.querySelector('#by option[value=stack]').disabled")


def test_map_shades_reserved_memory_and_draws_segment_borders(told):
    colors = told.colors("map")
    assert colors[IDLE] > 5000
    assert colors[BORDER] > 500
    told.choose("input[name=axis][value=event]", "")
    told.press("#reset")
    # Of 12 MiB by 5 events, 2 MiB are never used, 2 MiB half of the time, 3 of 4 MiB for 3 events.
    assert told.colors("map")[IDLE] > 5000


def test_link_shows_the_same_window_filter_moment_and_block(open_page, told, told_page):
    assert told.link() == ""
    told.choose("#by", "stack")
    told.choose("#least", str(2 * MIB))
    told.find("main")
    told.drag("timeline", (0.2, 0.5), (0.7, 0.5))
    told.press("#moment-last")
    told.press("#leaks tbody button")
    link, shown, text = told.link(), told.text("#shown"), told.text("#moment-text")
    for part in ("from=", "to=", "find=main", "by=stack", "at=", "block=0", "least="):
        assert part in link
    again = open_page(told_page, link)
    assert (again.text("#shown"), again.text("#moment-text")) == (shown, text)
    assert again.text("#block-title") == "4 MiB (4,194,304 bytes)"
    assert again.browser.evaluate("document.querySelector('#by').value") == "stack"
    again.press("#block-close")
    again.press("#reset")
    assert again.link() == "#by=stack"


def test_link_with_addresses_keeps_them(open_page, told, told_page):
    told.drag("map", (0.1, 0.5), (0.9, 0.9))
    link, colors = told.link(), told.colors("map")
    assert "low=" in link
    assert "high=" in link
    again = open_page(told_page, link)
    again.press("input[name=theme][value=light]")
    assert again.colors("map") == colors


@pytest.mark.parametrize(
    "link", ["#run=9&policy=8&block=77&at=999", "#by=colour&axis=depth&from=x", "#at=-5&owner=1e9"]
)
def test_link_to_what_is_not_there_is_harmless(open_page, told_page, link):
    page = open_page(told_page, link)
    assert "block" in page.text("#shown")


def test_recorded_stacks_reach_the_page(open_page, tmp_path, arena):
    def innermost_function_of_the_program():
        return arena.allocate(3 * MIB)

    with observe.record(arena, tmp_path / "run.events", stacks=1.0) as recording:
        kept = innermost_function_of_the_program()
    recording.report(tmp_path / "page.html")
    kept.close()
    page = open_page(tmp_path / "page.html")
    page.press("#leaks tbody button")
    assert "innermost_function_of_the_program" in page.text("#block-stack li:first-child")
    assert "test_page_views.py:" in page.text("#block-stack li:first-child")


def test_snapshot_shows_stacks_and_memory_of_all_tags(open_page, tmp_path, arena):
    with observe.record(arena, stacks=1.0):
        plain = arena.allocate(MIB)
        with arena.tag("cache"):
            tagged = arena.allocate(2 * MIB)
        arena.report(tmp_path / "page.html")
    page = open_page(tmp_path / "page.html")
    assert [row[0] for row in page.rows("#leaks")] == ["2 MiB", "1 MiB"]
    page.press("#leaks tbody button")
    assert "test_snapshot_shows_stacks" in page.text("#block-stack")
    del plain, tagged


def test_owner_without_bytes_at_the_highest_point_has_no_bar(open_page, tmp_path, arena):
    with observe.record(arena) as recording:
        with observe.tag("early"):
            arena.allocate(MIB).close()
        with observe.tag("late"):
            arena.allocate(4 * MIB).close()
    page = open_page(recording.report(tmp_path / "page.html").path)
    assert [row[2] for row in page.rows("#groups")] == ["4 MiB", "0 B"]
    drawn = page.browser.evaluate(
        "Array.from(document.querySelectorAll('#groups td.bar'), cell =>"
        " cell.querySelectorAll(':scope > div > div').length)"
    )
    assert drawn == [1, 0]
