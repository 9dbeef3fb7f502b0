"""Phases on the page: bands, the table, and the phase of a moment."""

from dataclasses import replace

import numpy as np
import pytest
from helpers.runs import told_run, with_details

from gpumem.report.data import MAX_PHASES, run_data
from gpumem.traces import Phase

PHASES = (Phase("step", 0, 5), Phase("forward", 1, 2, 1), Phase("backward", 2, 4, 1))
NAMES = [phase.name for phase in PHASES]


def phased(*phases):
    return with_details(
        told_run(),
        phases=phases,
        category=np.array([0, 1, 2], np.int32),
        categories=("parameters", "activations", "workspaces"),
    )


@pytest.fixture
def page(page_of):
    return page_of(phased(*PHASES))


def test_peak_is_said_with_its_phase_and_by_category(page):
    said = "in step / backward: parameters 4 MiB, activations 2 MiB, workspaces 1 MiB"
    assert said in page.text("#figures").replace("\n", " ")
    assert page.browser.evaluate("document.querySelector('#by').value") == "category"
    assert page.text("#moment-text").endswith(", in step / backward")


def test_table_has_peak_growth_and_times_of_each_phase(page):
    assert page.rows("#phases") == [
        ["step", "", "7 MiB", "+4 MiB", "1"],
        ["step / forward", "", "6 MiB", "+2 MiB", "1"],
        ["step / backward", "", "7 MiB", "\N{MINUS SIGN}1 MiB", "1"],
    ]


def test_page_begins_with_the_first_phase(page_of):
    page = page_of(phased(Phase("step", 2, 5)))
    assert page.text("#widen") == "Show the 2.0 s before"


def test_window_that_a_page_begins_with_has_the_button_at_all_times(page_of):
    # Of these times, the end of the window less its width is not its begin: they are rounded.
    run = replace(phased(Phase("step", 2, 5)), time_us=np.arange(5) * 1_000_000 * 55 // 7)
    page = page_of(run)
    assert page.text("#widen") == "Show the 15.4 s before"
    assert page.link() == ""


def test_click_on_a_phase_shows_the_state_at_its_peak(page):
    page.press("#phases tbody tr:nth-child(2) button")
    assert page.text("#moment-text").startswith("Event 2 of 5")


def test_bands_have_the_names_of_phases_at_their_begins(page):
    begins = {text: begin for text, begin, _ in page.written("timeline") if text in NAMES}
    over = page.box("#timeline .u-over")
    seconds = {"step": 0, "forward": 1, "backward": 2}  # of four
    assert begins == {
        name: pytest.approx(100 + over["width"] * at / 4 + 4, abs=3) for name, at in seconds.items()
    }


def test_pointer_names_the_phase(page):
    over = page.box("#timeline .u-over")
    for more in (-3, 0):
        x = over["left"] + 0.6 * over["width"] + more
        page.browser.mouse("Moved", x, over["top"] + 0.9 * over["height"])
    page.browser.settle()
    assert "in step / backward" in page.text("#tip")


def test_page_without_phases_has_no_table_of_them(page_of):
    page = page_of(told_run())
    assert page.hidden("#phases-panel")


def test_of_too_many_phases_the_outer_ones_are_drawn():
    inner = (Phase("inner", 2, 2, 1) for _ in range(MAX_PHASES))
    phases = run_data(phased(Phase("outer", 0, 5), *inner, Phase("last", 4, 5)), [])["phases"]
    names = [name for name, *_ in phases["shown"]]
    assert len(names) == MAX_PHASES
    assert (names[0], names[-1]) == ("outer", "last")
    assert [row[:2] for row in phases["table"]] == [
        ("outer", 1),
        ("outer / inner", MAX_PHASES),
        ("outer / last", 1),
    ]
