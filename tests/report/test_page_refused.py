"""Refused requests on the page."""

import pytest
from helpers.runs import LOAD, MIB, told_run, with_details

from gpumem._events.refusals import RefusedRequest

REFUSAL = RefusedRequest(
    9 * MIB,
    0,
    "cuda:0",
    "torch",
    "forward",
    "max_mem",
    8 * MIB,
    7 * MIB,
    8 * MIB,
    MIB,
    MIB,
    2 * MIB,
    "raise max_mem",
    LOAD,
)


@pytest.fixture
def refused(page_of):
    """Open the page of a run with a refusal before an event."""
    return lambda at: page_of(with_details(told_run(), refusals=((at, REFUSAL),)))


def first_panel(page):
    return page.browser.evaluate(
        "document.querySelector('main > :is(section, dl):not([hidden])').id"
    )


def test_run_that_ends_with_a_refusal_begins_with_it(refused):
    page = refused(3)
    assert first_panel(page) == "refused-panel"
    assert page.text("#refused-title") == "Refused at the end: 9 MiB"
    assert page.rows("#refused") == [
        [
            "9 MiB",
            "forward",
            "max_mem, 8 MiB",
            "7 MiB",
            "8 MiB",
            "1 MiB",
            "1 MiB",
            "2 MiB",
            "2.000 s",
        ]
    ]
    assert page.text("#refused-advice") == "Raise max_mem."
    assert "load" in page.text("#refused-stack")


def test_run_that_goes_on_after_a_refusal_begins_with_its_figures(refused):
    page = refused(2)
    assert first_panel(page) == "figures"
    assert page.text("#refused-title") == "Refused: 1 request"


def test_state_before_a_refusal_names_it(refused):
    page = refused(2)
    page.press("#refused tbody button")
    assert page.text("#moment-text").endswith(
        "Then 9 MiB of forward were refused by max_mem of 8 MiB."
    )


def test_pointer_finds_a_refusal_at_the_moment_before_it(refused):
    page = refused(3)
    over = page.box("#timeline .u-over")
    for x in (0.49, 0.5):  # of four seconds; the next event is at the third
        page.browser.mouse("Moved", over["left"] + x * over["width"], over["top"] + 150)
    page.browser.settle()
    assert "9 MiB of forward were refused" in page.text("#tip")


def test_refused_requests_of_a_narrow_page_are_lists(refused):
    page = refused(3)
    page.browser.resize(420)
    names = """Array.from(document.querySelectorAll('#refused td'),
        cell => getComputedStyle(cell, '::before').content)"""
    shown = page.browser.evaluate(names)
    box = page.browser.evaluate(
        "(({scrollWidth, clientWidth}) => scrollWidth - clientWidth)"
        "(document.querySelector('#refused').parentElement)"
    )
    page.browser.resize(1280)
    assert shown[:3] == ['"By"', '"Limit"', '"In use"']
    assert box == 0


def test_page_without_refusals_has_no_panel(page_of):
    assert page_of(told_run()).hidden("#refused-panel")
