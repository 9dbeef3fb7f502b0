"""The page in a real browser: it draws, zooms and filters, and nothing complains."""

import json
import os
import re
import time
from pathlib import Path

import pytest
from helpers.runs import MIB, million_events, small_run
from helpers.torch_snapshots import block_of, entry, segment, snapshot_file

from gpumem import observe
from gpumem.report import write_report
from gpumem.traces import Trace, load_trace, samples

SHARED = Path(__file__).resolve().parents[3] / "shared" / "traces"
TRACES = {path.stem: path for path in sorted(SHARED.glob("*.npz"))} or samples()


@pytest.fixture(scope="session")
def pages(tmp_path_factory):
    """Write a report once for all tests that look at it."""
    made = {}
    folder = tmp_path_factory.mktemp("pages")

    def write(name, source):
        if name not in made:
            made[name] = folder / f"{name}.html"
            write_report(source() if callable(source) else source, made[name])
        return made[name]

    return write


@pytest.fixture
def small(open_page, pages):
    return open_page(pages("small", small_run))


def drawn(page, chart):
    """Count a chart's pixels that are not of its commonest colour."""
    colors = page.colors(chart)
    return sum(colors.values()) - max(colors.values(), default=0)


@pytest.mark.parametrize("name", sorted(TRACES))
def test_page_draws_each_recorded_run(open_page, pages, tmp_path, name):
    page = open_page(pages(name, TRACES[name]))
    trace = load_trace(TRACES[name])
    moves = trace.moving().size
    assert f"{trace.allocs:,}\n{moves:,} events" in page.text("#figures")
    assert f" of {moves:,}, " in page.text("#moment-text")  # the same count everywhere
    assert write_report(trace, tmp_path / "again.html").events == moves
    for chart in ("timeline", "map", "lanes", "sizes"):
        assert drawn(page, chart) > 500, chart
        assert len(page.colors(chart)) > 3, chart
    is_recording = trace.details is not None  # it has the bytes that were reserved
    assert len(page.rows("#policies")) == 4 + is_recording
    assert page.rows("#groups")
    if keep := os.environ.get("GPUMEM_SCREENSHOTS"):
        for theme in ("light", "dark"):
            page.press(f"input[name=theme][value={theme}]")
            (Path(keep) / f"{name}-{theme}.png").write_bytes(page.browser.screenshot())


def test_page_figures_are_those_of_the_run(small):
    assert "Peak live\n7 MiB" in small.text("#figures")
    assert "Live at the end\n2 MiB\n1 block" in small.text("#figures")
    [(size, stream, _, allocated)] = small.rows("#leaks")
    assert (size, stream, allocated) == ("2 MiB", "stream 0", "1.0000 s")
    assert "3 blocks" in small.text("#shown")
    assert "live at most 7 MiB" in small.text("#shown")


def test_drag_over_the_timeline_zooms_all_charts_and_double_click_resets(small):
    before = {chart: small.colors(chart) for chart in ("timeline", "map", "lanes")}
    small.drag("timeline", (0.1, 0.5), (0.4, 0.5))  # 0.4 to 1.6 s
    assert "2 blocks" in small.text("#shown")
    assert "live at most 3 MiB" in small.text("#shown")
    for chart, colors in before.items():
        assert small.colors(chart) != colors, chart
    box = small.box("#timeline .u-over")
    small.browser.click(box["left"] + 50, box["top"] + 50, times=2)
    assert "live at most 7 MiB" in small.text("#shown")


def test_drag_over_the_map_zooms_addresses_and_reset_restores(small):
    everything = small.colors("map")
    small.drag("map", (0.3, 0.2), (0.7, 0.6))
    assert small.colors("map") != everything
    small.press("#reset")
    assert small.colors("map") == everything


def test_keys_zoom_pan_and_reset(small):
    small.browser.evaluate("document.querySelector('#timeline').focus()")
    whole = small.text("#shown")
    small.browser.press("+", "+")
    zoomed = small.text("#shown")
    assert "1.000 s to 3.000 s" in zoomed
    small.browser.press("ArrowRight")
    assert "1.400 s to 3.400 s" in small.text("#shown")
    small.browser.press("0", "0")
    assert small.text("#shown") == whole


def test_blocks_without_owners_are_grouped_and_named_by_size(small):
    assert small.text("#stacked") == "Live bytes, stacked by size."
    assert small.text("#groups-title") == "Blocks by size"
    assert small.text("#moment-text").endswith(": allocated 4 MiB")


def test_filters_select_blocks_by_stream_size_and_owner(small):
    small.choose("#stream", "1")
    assert small.text("#shown").startswith("1 of 3 blocks")
    assert "live at most 4 MiB" in small.text("#shown")
    assert small.rows("#leaks") == [["No block was left."]]
    small.choose("#stream", "-1")
    small.choose("#least", str(2 * MIB))
    assert small.text("#shown").startswith("2 of 3 blocks")
    small.choose("#most", str(4 * MIB))
    assert small.text("#shown").startswith("1 of 3 blocks")
    small.press("#reset")
    assert small.text("#shown").startswith("3 blocks")
    small.press("#groups tbody tr:first-child button")  # the 4 MiB hold most at the peak
    assert small.text("#shown").startswith("1 of 3 blocks")
    assert "live at most 4 MiB" in small.text("#shown")


def test_click_on_a_size_bar_selects_its_blocks(small):
    box = small.box("#sizes .u-over")
    # Bars of 1, 2 and 4 MiB, side by side.
    small.browser.click(box["left"] + 0.5 * box["width"], box["top"] + 0.9 * box["height"])
    assert small.text("#shown").startswith("1 of 3 blocks")
    assert "live at most 2 MiB" in small.text("#shown")


def test_tooltip_describes_the_block_under_the_pointer(small):
    box = small.box("#map .u-over")
    # At 2.5 s the first block lies lowest; 1 MiB of 7 or more.
    small.browser.mouse("Moved", box["left"] + 0.62 * box["width"], box["top"] + 3)
    small.browser.mouse(
        "Moved", box["left"] + 0.625 * box["width"], box["top"] + 0.98 * box["height"]
    )
    small.browser.settle()
    told = small.text("#tip")
    assert "bytes)" in told
    assert "stream" in told
    assert "0x" in told


def test_selected_policy_is_drawn(open_page, pages):
    page = open_page(pages("multistream_train", samples()["multistream_train"]))
    assert "by gpumem, pages that move" in page.browser.evaluate(
        "document.querySelector('#timeline').ariaLabel"
    )
    before = page.colors("timeline")
    page.press("#policies tbody tr:nth-child(3) input")
    assert "by PyTorch-like caching" in page.browser.evaluate(
        "document.querySelector('#timeline').ariaLabel"
    )
    assert page.colors("timeline") != before


def test_axis_switches_to_events_and_keeps_the_window(small):
    small.drag("timeline", (0.1, 0.5), (0.4, 0.5))
    small.choose("input[name=axis][value=event]", "")
    assert small.text("#shown") == "2 blocks · events 2 to 2 · live at most 3 MiB"


def test_theme_follows_the_system_until_chosen(small):
    call, evaluate = small.browser.call, small.browser.evaluate
    ground = "getComputedStyle(document.body).backgroundColor"
    light = evaluate(ground)
    try:
        dark_system = [{"name": "prefers-color-scheme", "value": "dark"}]
        call("Emulation.setEmulatedMedia", features=dark_system)
        small.browser.settle()
        dark = evaluate(ground)
        assert dark != light
        assert drawn(small, "map") > 500
        small.press("input[name=theme][value=light]")
        assert evaluate(ground) == light
        small.press("input[name=theme][value=auto]")
        assert evaluate(ground) == dark
    finally:
        call("Emulation.setEmulatedMedia", features=[])


def test_controls_and_charts_have_accessible_names(small):
    nameless = small.browser.evaluate(
        """Array.from(document.querySelectorAll('select, button, input, .chart'), found =>
             found.ariaLabel || found.title || found.labels?.[0]?.innerText || found.innerText
               ? null : found.outerHTML).filter(Boolean)"""
    )
    assert nameless == []
    assert "live at most 7 MiB" in small.browser.evaluate(
        "document.querySelector('#timeline').ariaLabel"
    )


def test_million_events_are_drawn_and_zoomed(open_page, pages):
    page = open_page(pages("million", million_events))
    assert "500,000\n1,000,000 events" in page.text("#figures")
    assert drawn(page, "map") > 5000
    begun = time.perf_counter()
    page.drag("timeline", (0.4, 0.5), (0.5, 0.5))
    print(f"a zoom among a million events: {time.perf_counter() - begun:.2f} s")
    assert "of" not in page.text("#shown").split(" · ")[0]
    assert drawn(page, "map") > 5000
    page.choose("#stream", "2")
    assert "of 500,000 blocks" in page.text("#shown")


def test_names_from_a_file_are_escaped(open_page, tmp_path, arena):
    hostile = "</script><img src=x onerror=\"console.error('run')\"><!--{{facts}}"
    with observe.record(arena, tmp_path / "events") as recording, observe.tag(hostile):
        kept = arena.allocate(5000)
    recording.report(tmp_path / "page.html", title=hostile)
    kept.close()
    page = open_page(tmp_path / "page.html")
    assert page.text("h1") == hostile
    assert page.rows("#leaks")[0][1] == hostile
    assert page.browser.evaluate("document.images.length") == 0


def test_empty_run_makes_a_page_that_says_so(page_of):
    empty = Trace(action=[0], block=[0], size=[0], stream=[0], time_us=[0])
    page = page_of(empty)
    assert page.rows("#groups") == [["No block is live here."]]
    assert "0 blocks" in page.text("#shown")


def test_recording_is_drawn_with_addresses_owners_and_reserved_bytes(open_page, tmp_path, arena):
    with observe.record(arena, tmp_path / "events") as recording:
        with observe.tag("weights"):
            kept = arena.allocate(3 * MIB)
        with observe.tag("scratch"):
            arena.allocate(MIB).close()
    report = recording.report(tmp_path / "page.html")
    address = kept.ptr
    kept.close()
    assert json.loads(json.dumps(report.as_dict()))["policies"][0]["name"] == "as recorded"
    page = open_page(tmp_path / "page.html")
    assert {row[0] for row in page.rows("#groups")} == {"weights", "scratch"}
    assert page.rows("#leaks")[0][:2] == ["3 MiB", "weights"]
    assert page.rows("#leaks")[0][3] == f"{address:#x}"
    assert page.rows("#policies")[0][0] == "as recorded"


def test_log_without_times_is_drawn_by_events(page_of):
    run = small_run()
    columns = (run.action, run.block, run.size, run.stream)
    page = page_of(Trace(*columns, time_us=[0] * 6))
    assert "events 1 to 5 " in page.text("#shown")
    assert drawn(page, "timeline") > 500


def test_snapshot_is_drawn_as_live_blocks(open_page, tmp_path, arena):
    with observe.record(arena), observe.tag("weights"):
        kept = [arena.allocate((n + 1) * MIB) for n in range(3)]
    arena.report(tmp_path / "page.html")
    page = open_page(tmp_path / "page.html")
    assert page.text("#leaks-title") == "Live blocks"
    assert [row[0] for row in page.rows("#leaks")] == ["3 MiB", "2 MiB", "1 MiB"]
    assert page.rows("#leaks")[0][3] == f"{kept[2].ptr:#x}"
    assert sum(page.colors("map").values()) > 10_000
    assert page.text("#leaks-hint").startswith("3 blocks, 6 MiB in all, that were allocated")
    over = page.box("#timeline .u-over")
    for share in (0.1, 0.5, 0.9):  # no steps: when the other blocks were freed is not known
        page.browser.mouse("Moved", over["left"] + share * over["width"], over["top"] + 50)
        page.browser.settle()
        assert re.search(r"Live\s+6 MiB", page.text("#timeline-legend")), share
    assert page.colors("lanes")["47,111,208"] > 0.9 * over["width"] * 42  # no steps, either
    assert page.text("#figures").split("\n")[::3] == [
        *("Live", "Reserved", "Reserved / live", "Live blocks")
    ]
    for steps in ("#moment-steps", "#moment-slider", "#timeline .marker"):
        assert page.hidden(steps), steps
    assert [row[2:] for row in page.rows("#groups")] == [["6 MiB", "3"]]
    for buffer in kept:
        buffer.close()


def test_page_of_one_block_from_before_a_history_says_so(page_of, tmp_path):
    segments = [segment(4096, block_of(MIB))]
    path = snapshot_file(tmp_path / "snapshot", [entry("snapshot", 0, 0)], segments=segments)
    page = page_of(path)
    assert "1 event, frees included" in page.text("#figures")
    assert page.text("#subtitle").startswith("PyTorch's snapshot")
    assert page.text("#notice").startswith("1 block was live before the first entry of the file")
    assert "or more" not in page.text("#figures")
    assert drawn(page, "sizes") > 100
    assert [row[1] for row in page.rows("#leaks")] == ["before the recording"]


def test_page_says_that_events_were_lost(open_page, tmp_path, small):
    assert not small.text("#notice")
    assert "or more" not in small.text("#figures")
    trace = small_run()
    torn = Trace(
        *(trace.action, trace.block, trace.size, trace.stream, trace.time_us), meta={"torn": 2}
    )
    write_report(torn, tmp_path / "torn.html")
    page = open_page(tmp_path / "torn.html")
    assert "2 events were not whole" in page.text("#notice")
    assert "or more: events were lost" in page.text("#figures")


def test_axis_of_few_events_has_whole_numbers_and_lines_only_there(open_page, tmp_path, arena):
    with observe.record(arena) as recording:
        kept = arena.allocate(MIB)
    page = open_page(recording.report(tmp_path / "page.html").path)
    assert page.text("#subtitle").endswith(":0 \N{MIDDLE DOT} 1 stream")  # no time that passes
    axis = [text for text, *_ in page.written("timeline") if text.isdigit()]
    assert axis == ["1", "2"]
    kept.close()


def test_axis_of_times_tells_neighbours_apart(page_of):
    times = [0, 10, 28]
    trace = Trace(action=[0] * 3, block=[0, 1, 2], size=[MIB] * 3, stream=[0] * 3, time_us=times)
    page = page_of(trace)
    axis = [text for text, *_ in page.written("timeline") if text.endswith(" \N{MICRO SIGN}s")]
    assert axis[:3] == [f"{step} \N{MICRO SIGN}s" for step in ("0.0", "2.5", "5.0")]
