"""Groups of many owners, rules, the stacks of a moment, and the owners under the pointer."""

from dataclasses import replace

import numpy as np
import pytest
from helpers.runs import MIB, many_owners, small_run, told_run, with_details

from gpumem.cli import main
from gpumem.errors import ConfigError
from gpumem.report import write_report
from gpumem.traces import Phase

CALLED_BY = "forward (model.py:20)", "forward (model.py:30)"


@pytest.fixture(scope="session")
def many_page(tmp_path_factory):
    path = tmp_path_factory.mktemp("many") / "page.html"
    write_report([many_owners()], path)
    return path


@pytest.fixture
def many(open_page, many_page):
    return open_page(many_page)


@pytest.fixture
def told(page_of):
    return page_of(told_run())


def key(page):
    """Return the names of the colours and their bytes."""
    texts = page.text("#key").split("\n")
    return dict(zip(texts[::2], texts[1::2], strict=True))


def bars(page):
    """Return the texts of the flame graph's bars, with the part of the width that each has."""
    return page.browser.evaluate(
        "Array.from(document.querySelectorAll('#flame button'), bar => [bar.innerText,"
        " Number((bar.offsetWidth / bar.parentElement.offsetWidth).toFixed(2))])"
    )


def test_page_of_223_owners_opens_with_groups_that_explain_the_peak(many):
    assert many.browser.evaluate("document.querySelector('#by').value") == "outer"
    assert key(many) == {
        CALLED_BY[1]: "148 MiB",
        CALLED_BY[0]: "74 MiB",
        "probe (probe.py:1)": "4 KiB",
    }
    assert "the largest 10 of 223 owners have only 5 % of the peak" in many.text("#stacked")
    many.choose("#by", "owner")
    assert key(many)["others"] == "212 MiB"
    assert many.link() == "#by=owner"


def test_page_of_one_owner_opens_with_modules(open_page, tmp_path):
    run = told_run()
    details = replace(
        run.details,
        owner=np.zeros(3, np.int32),
        owners=("main (train.py:3)",),
        module=np.array([0, 1, 1], np.int32),
        modules=("Net / Linear", "Net / Norm"),
    )
    write_report(replace(run, details=details), tmp_path / "page.html")
    assert set(key(open_page(tmp_path / "page.html"))) == {"Net / Linear", "Net / Norm"}


def test_page_of_few_owners_opens_with_them(told):
    assert told.text("#stacked") == "Live bytes, stacked by owner."
    assert set(key(told)) == {"weights", "activations", "workspace"}


def test_groups_of_owners_without_stacks_are_beginnings_of_their_names(page_of):
    run = many_owners(61)
    names = [f"model.{'encoder layer ' if n % 2 else 'decoder.'}{n}" for n in range(61)]
    page = page_of(with_details(run, owners=tuple(names), stack=None, stacks=()))
    assert key(page) == {
        "model.encoder layer \N{HORIZONTAL ELLIPSIS}": "30 MiB",
        "model.decoder.\N{HORIZONTAL ELLIPSIS}": "30 MiB",
    }


@pytest.mark.parametrize(
    ("by", "names"),
    [("function", ["project", "attend", "probe"]), ("file", ["/job/nn/block.py", "/job/probe.py"])],
)
def test_functions_and_files_are_groups_that_can_be_shown_alone(
    open_page, many, many_page, by, names
):
    many.choose("#by", by)
    assert [row[0] for row in many.rows("#groups")] == names
    many.press("#groups tbody tr:last-child button")
    assert many.text("#shown").startswith("1 of 223 blocks")
    assert many.text("#one-group") == f"One {by} \N{MULTIPLICATION SIGN}"
    again = open_page(many_page, many.link())
    assert again.text("#shown") == many.text("#shown")
    again.press("#one-group")
    assert again.text("#shown").startswith("223 blocks")


def test_compared_run_is_divided_into_the_same_outer_frames(page_of):
    page = page_of([many_owners(), many_owners(100)])
    page.press("#runs tbody tr:nth-child(2) input[type=checkbox]")
    assert [[row[0], *row[2:4]] for row in page.rows("#groups")][:2] == [
        [CALLED_BY[1], "148 MiB", "66 MiB"],
        [CALLED_BY[0], "74 MiB", "33 MiB"],
    ]


def test_rules_of_the_command_are_the_groups_that_a_page_opens_with(page_of, tmp_path):
    run = many_owners()
    with pytest.raises(ConfigError, match=r"invalid rule 'a': '\(' is not a regular expression"):
        write_report(run, tmp_path / "page.html", rules=[("a", "(")])
    with pytest.raises(TypeError, match="two str: a name and a regular expression"):
        write_report(run, tmp_path / "page.html", rules=[("a", "b", "c")])
    rules = [("attention", "attend$"), ("blocks", r"block\.py")]
    page = page_of(run, rules=rules)
    assert key(page) == {"blocks": "148 MiB", "attention": "74 MiB", "no rule": "4 KiB"}
    assert page.text("#groups-title") == "Rules"


def test_categories_that_leave_much_to_other_come_second(page_of):
    more = {"category": np.array([0, 1, 0], np.int32), "categories": ("other", "activations")}
    page = page_of(with_details(told_run(), **more))
    assert set(key(page)) == {"weights", "activations", "workspace"}


def test_categories_come_first_and_phases_are_a_choice(page_of):
    more = {
        "category": np.array([0, 1, 0], np.int32),
        "categories": ("parameters", "activations"),
        "phases": (Phase("step", 1, 3), Phase("forward", 1, 2, 1)),
    }
    page = page_of(with_details(told_run(), **more))
    assert key(page) == {"parameters": "5 MiB", "activations": "2 MiB"}
    assert page.text("#stacked") == "Live bytes, stacked by category."
    page.choose("#by", "phase")
    assert key(page) == {
        "outside of phases": "4 MiB",
        "step / forward": "2 MiB",
        "step": "1 MiB",
    }


@pytest.mark.parametrize(
    ("rule", "refusal"), [("a=(", "is not a regular expression"), ("a", "expected NAME=REGEX")]
)
def test_command_refuses_a_rule_that_is_none(capsys, rule, refusal):
    assert main(["report", "multistream_train", "--rule", rule]) == 2
    assert refusal in capsys.readouterr().err


def test_pointer_over_bytes_over_time_names_owners_with_their_bytes(told):
    over = told.box("#timeline .u-over")
    left, top, width, height = (over[side] for side in ("left", "top", "width", "height"))
    for x, y, here in [(0.6, 0.9, "weights"), (0.6, 0.6, "activations"), (0.4, 0.9, "weights")]:
        told.browser.mouse("Moved", left + x * width - 3, top + y * height)
        told.browser.mouse("Moved", left + x * width, top + y * height)
        told.browser.settle()
        assert told.text("#tip .here") == here
    assert told.text("#tip").split("\n") == [
        "6 MiB live at 1.600 s", *("activations", "2 MiB"), *("weights", "4 MiB")
    ]  # fmt: skip
    told.browser.mouse("Moved", left + width / 2, top - 60)
    told.browser.settle()
    assert told.hidden("#tip")


def test_pointer_over_the_others_names_the_largest_of_them(many):
    many.choose("#by", "owner")
    over = many.box("#timeline .u-over")
    left, top, width, height = (over[side] for side in ("left", "top", "width", "height"))
    for away in (3, 0):
        many.browser.mouse("Moved", left + 0.9 * width - away, top + 0.5 * height)
    many.browser.settle()
    assert many.text("#tip .here") == "others"
    others = many.text("#tip small + dl").split("\n")
    assert others[1::2] == ["1 MiB"] * 5
    assert all(name.startswith(("attend", "project")) for name in others[::2])


def test_stacks_of_the_moment_are_bars_as_wide_as_their_bytes(told):
    assert bars(told) == [
        ["all 7 MiB", 1],
        ["main (train.py:40) 6 MiB", 0.86],
        ["load (train.py:3) 4 MiB", 0.57],
        ["forward (model.py:7) 2 MiB", 0.29],
        ["workspace 1 MiB", 0.14],
    ]
    told.press("#moment-last")
    assert [text for text, _ in bars(told)] == [
        "all 4 MiB", "main (train.py:40) 4 MiB", "load (train.py:3) 4 MiB"
    ]  # fmt: skip


def test_bar_of_a_frame_is_widened_and_narrowed_and_shows_libraries(told):
    told.press("#flame button:nth-child(4)")
    assert bars(told) == [
        ["all 7 MiB", 1],
        ["main (train.py:40) 6 MiB", 1],
        ["forward (model.py:7) 2 MiB", 1],
    ]
    told.browser.evaluate("document.querySelector('#flame button').focus()")
    for _ in range(2):
        told.browser.press("ArrowDown")
    assert told.text(":focus").startswith("forward")
    told.press("#flame-all")
    assert bars(told)[3:] == [["call (nn.py:9) 2 MiB", 1]]
    told.press("#flame button")
    assert len(bars(told)) == 6
    box = told.box("#flame button:nth-child(2)")
    told.browser.mouse("Moved", box["left"] + 20, box["top"] + 9)
    told.browser.settle()
    assert told.text("#tip").split("\n")[:3] == ["main (/job/train.py:40)", "Live", "6 MiB, 85.7 %"]


def test_flame_graph_of_one_line_of_the_program_has_frames_of_libraries(page_of):
    run = told_run()
    frames = run.details.stacks[1], run.details.stacks[1]
    page = page_of(replace(run, details=replace(run.details, stacks=frames)))
    assert page.browser.evaluate("document.querySelector('#flame-all').checked")
    assert ["call (nn.py:9) 6 MiB", 0.86] in bars(page)
    page.press("#flame-all")
    assert "call" not in page.text("#flame")


def test_long_paths_of_modules_have_their_last_names_in_a_key(page_of):
    run = told_run()
    modules = dict(module=np.array([0, 1, 1], np.int32), modules=("Net / Block / Linear", "Net"))
    details = replace(run.details, owner=np.zeros(3, np.int32), owners=("a",), **modules)
    assert set(key(page_of(replace(run, details=details)))) == {
        "\N{HORIZONTAL ELLIPSIS} / Block / Linear",
        "Net",
    }


def test_page_without_stacks_has_no_flame_graph(page_of):
    assert page_of(small_run()).hidden("#flame-panel")


def test_page_begins_where_memory_changes_and_can_be_widened(open_page, many, many_page):
    assert "223 blocks · 19.9976 s to 20.2210 s" in many.text("#shown")
    assert many.text("#widen") == "Show the 20.0 s before"
    assert many.link() == ""
    many.press("#widen")
    assert many.text("#shown").startswith("223 blocks · 0.00 s to")
    assert many.hidden("#widen")
    assert "from=0" in many.link()
    assert open_page(many_page, many.link()).text("#shown") == many.text("#shown")


@pytest.mark.parametrize(("later", "window"), [(2, "8.2"), (3, "0.000 s")])
def test_page_begins_after_a_pause_unless_the_peak_was_before_it(page_of, later, window):
    times = [0, 10_000, 20_000, 30_000, 40_000]
    times[later:] = [8_200_000 + time for time in times[later:]]
    page = page_of(replace(told_run(), time_us=np.array(times)))
    assert f"· {window}" in page.text("#shown"), page.text("#shown")


def test_page_of_a_run_that_begins_at_once_shows_all_of_it(told):
    assert "0.000 s to 4.000 s" in told.text("#shown")
    assert told.hidden("#widen")


def test_figures_are_those_of_the_policy_that_is_chosen(page_of):
    page = page_of([told_run("before"), told_run("after", more=MIB)])
    page.press("#runs tbody tr:nth-child(2) input[type=checkbox]")
    for number, row in enumerate(page.rows("#policies"), 1):
        page.press(f"#policies tbody tr:nth-child({number}) input")
        name, _, reserved, share, _ = row
        figures = page.text("#figures")
        assert f"Peak reserved\n{reserved}\n{name}" in figures
        assert f"Reserved / live\n{share}\n" in figures
        assert page.rows("#runs")[0][4] == reserved
