"""Several runs on one page: devices, processes, before and after a change."""

import time

import pytest
from helpers.runs import MIB, small_run, told_run
from helpers.torch_snapshots import entry, snapshot_file

import gpumem
from gpumem.observe import record
from gpumem.report import write_report
from gpumem.report.joined import add_runs

OTHER = "179,36,122"  # the line of the compared run, in the light theme


@pytest.fixture
def two(page_of):
    page = page_of([told_run("before"), told_run("after", more=MIB)])
    page.press("input[name=theme][value=light]")
    return page


def test_page_of_one_run_lists_no_runs(page_of):
    assert page_of(small_run()).hidden("#runs-panel")


def test_runs_are_listed_and_shown_one_at_a_time(two):
    assert [row[0] for row in two.rows("#runs")] == ["before", "after"]
    assert [row[3:] for row in two.rows("#runs")] == [
        ["7 MiB", "12 MiB", "4 MiB"],
        ["8 MiB", "12 MiB", "4 MiB"],
    ]
    assert "Peak live\n7 MiB" in two.text("#figures")
    two.press("#runs tbody tr:nth-child(2) input[type=radio]")
    assert "Peak live\n8 MiB" in two.text("#figures")
    assert two.text("#subtitle").startswith("after")


def test_compared_run_is_a_line_and_columns_of_the_table(two):
    assert OTHER not in two.colors("timeline")
    two.press("#runs tbody tr:nth-child(2) input[type=checkbox]")
    assert two.colors("timeline")[OTHER] > 100
    assert "Live, after" in two.text("#timeline-legend").replace("\n", " ")
    assert "compared: 8 MiB" in two.text("#figures")
    assert [[row[0], *row[2:]] for row in two.rows("#groups")] == [
        ["weights", "4 MiB", "4 MiB", "same"],
        ["activations", "2 MiB", "3 MiB", "\N{MINUS SIGN}1 MiB"],
        ["workspace", "1 MiB", "1 MiB", "same"],
    ]
    assert two.text("#shown").startswith("3 blocks")  # a comparison is no filter
    two.press("#runs tbody tr:nth-child(2) input[type=checkbox]")
    assert OTHER not in two.colors("timeline")
    assert "compared" not in two.text("#figures")


def test_link_keeps_the_run_and_what_it_is_compared_with(open_page, two):
    two.press("#runs tbody tr:nth-child(2) input[type=radio]")
    two.press("#runs tbody tr:nth-child(1) input[type=checkbox]")
    again = open_page(two.path, two.link())
    assert again.text("#subtitle").startswith("after")
    assert "compared: 7 MiB" in again.text("#figures")


def test_compared_run_of_one_day_is_drawn_at_its_time(open_page, page_of):
    # Each lasts 4 s; the second one begins 6 s after the first.
    clock = 1_700_000_000
    stopped = {"stopped_us": (clock + 20) * 1_000_000}
    first = told_run(first_us=clock * 1_000_000, **stopped)
    page = page_of([first, told_run(first_us=(clock + 6) * 1_000_000, **stopped)])
    page.press("#runs tbody tr:nth-child(2) input[type=checkbox]")
    assert "0.00 s to 10.00 s" in page.text("#shown")
    for link, has_line in (
        ("run=0&with=1&from=0&to=5", False),
        ("run=0&with=1&from=5&to=10", True),
        ("run=1&with=0&from=-6&to=-1", True),
        ("run=1&with=0&from=0&to=4", False),
        ("run=1&with=0&from=0&to=4&axis=event", True),
    ):
        page = open_page(page.path, f"#{link}")
        assert (page.colors("timeline").get(OTHER, 0) > 100) == has_line, link


def test_memories_of_one_file_keep_their_times_beside_a_file_of_another_time(
    open_page, page_of, tmp_path
):
    paths = [tmp_path / "before", tmp_path / "after"]
    for path in paths:
        arena, pinned = gpumem.Arena("host"), gpumem.Arena("host/host_accessible")
        with record(path=path):
            for _ in range(3):
                arena.allocate(MIB).close()
            time.sleep(0.2)
            kept = pinned.allocate(MIB)
            time.sleep(0.1)
            arena.allocate(MIB).close()
        kept.close()
    page = page_of(paths)
    names = [row[0] for row in page.rows("#runs")]
    link = (
        f"#run={names.index('before, host:0')}&with={names.index('before, host:0/host_accessible')}"
    )
    for window, has_line in (("from=0&to=0.15", False), ("from=0.2&to=0.3", True)):
        page = open_page(page.path, f"{link}&{window}")
        assert (page.colors("timeline").get(OTHER, 0) > 100) == has_line, window


def test_table_has_the_groups_of_the_compared_run_alone(page_of):
    page = page_of([told_run("before"), small_run()])
    page.press("#runs tbody tr:nth-child(2) input[type=checkbox]")
    rows = {row[0].replace("\n", " "): row[2:] for row in page.rows("#groups")}
    assert rows["weights"] == ["4 MiB", "0 B", "+4 MiB"]
    assert rows["2,097,152 bytes"] == ["0 B", "2 MiB", "\N{MINUS SIGN}2 MiB"]


@pytest.mark.parametrize(
    ("seconds", "ended", "most"), [(1, 5, 13), (10, 5, 7), (1, None, 13), (10, None, None)]
)
def test_sum_of_runs_leaves_out_processes_that_had_ended(page_of, seconds, ended, most):
    # Each has 4, 6, 7, 5 and 4 MiB live, a second apart.
    clock = 1_700_000_000
    told = {} if ended is None else {"stopped_us": (clock + ended) * 1_000_000}
    first = told_run(first_us=clock * 1_000_000, **told)
    page = page_of([first, told_run(first_us=(clock + seconds) * 1_000_000)])
    sum_text = f"at most {most} MiB live at one time"
    assert (sum_text in page.text("#runs-sum")) == bool(most)  # no sum of runs in turn


def test_devices_of_a_torch_snapshot_are_runs_of_one_page(open_page, tmp_path):
    def alloc(size, address, line):
        frames = [{"filename": "/job/train.py", "line": line, "name": "step"}]
        time_us = 1_700_000_000_000_000 + line * 1000
        return entry("alloc", address, size, time_us=time_us, frames=frames)

    traces = [[alloc(MIB, 1 << 20, 5)], [alloc(2 * MIB, 1 << 20, 7), alloc(MIB, 1 << 30, 9)]]
    path = snapshot_file(tmp_path / "snapshot.pickle", *traces)
    report = write_report(path, tmp_path / "page.html")
    assert [run.peak_live_bytes for run in report.runs] == [MIB, 3 * MIB]
    assert report.peak_live_bytes == 3 * MIB  # the busiest is shown first
    page = open_page(tmp_path / "page.html")
    assert [row[0] for row in page.rows("#runs")] == ["device 0", "device 1"]
    assert page.text("#subtitle").startswith("device 1")
    # Both clocks count from 1970, so bytes live at one time can be added.
    assert "at most 4 MiB live at one time" in page.text("#runs-sum")
    page.press("#leaks tbody button")
    assert page.text("#block-stack") == "step /job/train.py:7"


def test_stacks_that_grew_are_listed(two):
    ((name, *figures),) = two.rows("#changes")
    assert name.split()[0] == "forward"
    assert figures == ["2 MiB", "3 MiB", "+1 MiB"]


def test_page_that_processes_write_together_shows_their_runs(open_page, tmp_path):
    path = tmp_path / "page.html"
    for rank in range(2):
        add_runs([told_run()], path, job="1 2", label=f"rank {rank}", problem="")
    page = open_page(path)
    assert [row[0] for row in page.rows("#runs")] == ["rank 0", "rank 1"]
    assert page.browser.errors == []
