"""``gpumem top``: a running process's counters, for people and as JSON."""

import functools
import importlib
import io
import json
import os
import pty
import re
import subprocess
import sys
import termios
import time

import numpy as np
import pytest
import rich.console
from helpers.waiting import wait_until

import gpumem
from gpumem import interop, observe
from gpumem.cli import top_view
from gpumem.observe import live

# By its full name: in its package, "top" is the command.
top_module = importlib.import_module("gpumem.cli.top")

MIB = 1 << 20
PROMPTLY = 60  # seconds


@pytest.fixture(autouse=True)
def folder(monkeypatch, tmp_path):
    """A folder of the test's own for pages: other tests run at the same time, and clear up."""
    monkeypatch.setattr(gpumem._live, "FOLDER", str(tmp_path))
    monkeypatch.setattr(live, "FOLDER", tmp_path)


@pytest.fixture
def arena():
    """An arena of this process, which publishes it."""
    process = gpumem.Budget(1 << 30, name="process")
    tenant = gpumem.Budget(64 * MIB, parent=process, name="tenant")
    with gpumem.Arena("host", name="weights", budget=tenant) as made:
        with made.allocate(3 * MIB):
            publication = observe.publish(period=0.01)
            wait_for_an_update()
            yield made
        publication.close()


def wait_for_an_update():
    now = time.monotonic()
    wait_until(lambda: observe.LivePage.of_process(os.getpid()).clock > now)


@pytest.fixture
def top(gpumem_command):
    return functools.partial(gpumem_command, "top")


def told(result):
    code, out, err = result
    assert (code, err) == (0, "")
    return json.loads(out)


def test_top_json_has_every_counter(arena, top):
    facts = told(top(os.getpid(), "--json"))
    assert facts["process"] == os.getpid()
    assert facts["state"] in ("running", "sleeping")
    assert 0 <= facts["age_seconds"] < PROMPTLY
    (one,) = (one for one in facts["resources"] if one["name"] == "weights")
    stats = arena.stats()
    assert (one["in_use"], one["reserved"], one["num_allocs"]) == (3 * MIB, stats.reserved, 1)
    assert (one["memory"], one["kind"], one["limit"]) == ("host:0", "arena", 0)
    levels = {level["name"]: level for level in facts["budgets"]}
    assert one["budget"] == levels["tenant"]["id"]
    assert levels["tenant"]["parent"] == levels["process"]["id"]
    assert levels["tenant"]["used"] == stats.reserved


def test_top_lists_publishing_processes(arena, top):
    listed = {each["process"]: each for each in told(top("--json"))["processes"]}
    assert "weights" in [one["name"] for one in listed[os.getpid()]["resources"]]
    code, out, err = top()
    assert (code, err) == (0, "")
    assert f" {os.getpid()} " in out


def test_top_prints_tables_of_resources_and_budgets(arena, top):
    code, out, err = top(os.getpid(), "--once")
    assert (code, err) == (0, "")
    lines = [line.split() for line in out.splitlines()]
    (row,) = (line for line in lines if line[:1] == ["weights"])
    assert row[1] == "host:0"
    assert "3.0 MiB" in " ".join(row)  # other columns are shown where they differ by row
    assert out.index("process ") < out.index("\n   tenant ")  # below its parent, and further in


def test_top_tells_what_is_asleep(top):
    with gpumem.Arena("host", name="sleeper") as arena, arena.allocate(5 * MIB):
        publication = observe.publish(period=0.01)
        wait_for_an_update()
        assert "asleep" not in top(os.getpid(), "--once")[1]
        arena.sleep()
        wait_for_an_update()
        out = top(os.getpid(), "--once")[1]
        arena.wake()
        publication.close()
    assert "asleep" in out
    assert "5.0 MiB" in next(line for line in out.splitlines() if "sleeper" in line)


def test_top_escapes_control_characters_in_names(top):
    rogue = "\x1b[2J[red]x\r\n\u202e"
    budget = gpumem.Budget(1 << 30, name=rogue)
    with gpumem.Arena("host", name=rogue, budget=budget), observe.publish(period=0.01):
        wait_for_an_update()
        code, out, err = top(os.getpid(), "--once")
    assert (code, err) == (0, "")
    shown = "".join(out.split())  # long names are folded
    assert shown.count("[2J[red]x") == 2  # of the arena and of the budget, markup and all
    assert all(c.isprintable() for c in out.replace("\n", ""))


def test_top_escapes_control_characters_in_command_lines(arena, top, monkeypatch):
    monkeypatch.setattr(top_view, "command_of", lambda process: "a\x1b]0;b\x07")
    monkeypatch.setattr(top_module, "command_of", lambda process: "a\x1b]0;b\x07")
    for arguments in ((), (os.getpid(), "--once")):
        assert r"a\x1b]0;b\x07" in top(*arguments)[1]


def test_top_without_publishing_processes(top, monkeypatch):
    monkeypatch.setattr(top_module.LivePage, "of_all", tuple)
    monkeypatch.setattr(top_module, "node_files", list)
    facts = told(top("--json"))
    assert [facts[key] for key in ("processes", "memories", "sealed_sets")] == [[], [], []]
    assert "GPUMEM_TOP=1" in top()[1]


def test_top_shows_sealed_sets_with_their_users(top):
    with interop.seal("weights", {"a": np.zeros(1 << 17)}):
        row = next(line for line in top()[1].splitlines() if "weights" in line)
        (kept,) = told(top("--json"))["sealed_sets"]
    interop.drop("weights")
    assert row.split() == ["weights", *[str(os.getpid())] * 2, "1", "1.0", "MiB"]
    assert kept["users"] == [os.getpid()]


def test_top_reports_a_keeper_that_cannot_be_asked(top, monkeypatch, tmp_path):
    os.chmod(tmp_path, 0o755)
    monkeypatch.setenv("GPUMEM_KEEPER", str(tmp_path))
    code, _, err = top()
    assert code == 0
    assert err.startswith(f"gpumem: [Errno 1] the keeper in {tmp_path}: {tmp_path} is not a")


def test_top_reports_unreadable_pages_beside_the_list(arena, top):
    path = live.FOLDER / f"gpumem-{os.getuid()}-{2**31 - 9}"
    path.write_bytes(b"x" * 100)
    try:
        code, out, err = top("--json")
    finally:
        path.unlink()
    assert code == 0
    assert os.getpid() in [each["process"] for each in json.loads(out)["processes"]]
    assert err == f"gpumem: a process is left out: {path} is not a page of gpumem\n"


def test_top_shows_a_dead_process_once(arena, top):
    dead = subprocess.run([sys.executable, "-c", "import os; print(os.getpid())"],
                          capture_output=True, text=True, check=True)  # fmt: skip
    process = int(dead.stdout)
    left = live.FOLDER / f"gpumem-{os.getuid()}-{process}"
    left.write_bytes((live.FOLDER / f"gpumem-{os.getuid()}-{os.getpid()}").read_bytes())
    facts = told(top(process, "--json"))
    assert (facts["state"], facts["command"]) == ("ended", "")
    assert not left.exists()
    code, out, err = top(process)
    assert (code, out) == (2, "")
    assert err == f"gpumem: Invalid value for PID: process {process} does not exist\n"


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["x"], "not a valid integer from 1 to 2147483647"),
        (["0"], "not in the range"),
        (["-1"], "No such option"),
        (["1", "2"], "unexpected extra argument"),
        ([2**31 - 1], "does not exist"),
        ([1], "process 1 "),
        ([1, "--interval", "0"], "not in the range"),
        ([1, "--interval", "x"], "not a valid number from 0.1 to 3600"),
        ([1, "--interval", "nan"], "'nan' is not a valid number from 0.1 to 3600"),
    ],
)
def test_top_bad_input_is_one_line_and_exit_code_2(top, arguments, complaint):
    for json_option in ([], ["--json"]):
        code, out, err = top(*arguments, *json_option)
        assert (code, out) == (2, "")
        assert complaint in err
        assert err.count("\n") == 1


def test_top_shows_each_budget_of_a_damaged_page_once():
    def level(number, parent):
        return observe.LiveBudget(number, f"level {number}", parent, 0, None, None, 0)

    twice = [level(number, number - 1 or None) for number in range(1, 60) for _ in range(2)]
    circle = [level(70, 71), level(71, 70), level(72, 72)]
    tree = top_view._tree((*twice, *circle))
    assert len(tree) == len(twice) + len(circle)


def test_top_fails_on_a_damaged_page(top):
    process = 2**31 - 9
    path = live.FOLDER / f"gpumem-{os.getuid()}-{process}"
    path.write_bytes(b"no page of counters")
    try:
        code, out, err = top(process, "--json")
    finally:
        path.unlink()
    assert (code, out) == (1, "")
    assert err.count("\n") == 1


def test_top_rates_cover_the_time_between_two_reads():
    def page(clock, count):
        counters = {name: 0 for name in gpumem._live.COUNTERS} | {"num_allocs": count}
        one = observe.LiveResource(7, "told", "host:0", "arena", None, counters)
        return observe.LivePage(1, True, 0.0, clock, 0.1, (one,), (), 0)

    before, now = page(10.0, 100), page(12.0, 5100)
    assert top_view._rate(now.resources[0], now, before) == "2,500"
    assert top_view._rate(now.resources[0], now, None) == ""
    assert top_view._rate(now.resources[0], now, now) == ""


def columns_at(width):
    """Titles of what is shown of two resources, one with a long name."""
    counters = dict.fromkeys(gpumem._live.COUNTERS, 3 << 30) | {"num_frees": 0, "asleep_bytes": 0}
    names = ("short", "a name that is much too long for the terminals of this world")
    told = tuple(
        observe.LiveResource(number, name, "host:0", "arena", None, counters)
        for number, name in enumerate(names)
    )
    before, page = (observe.LivePage(1, True, 0.0, at, 0.1, told, (), 0) for at in (1.0, 2.0))
    shown = top_view._resource_table(page, before, width)
    console = rich.console.Console(width=width, file=io.StringIO())
    console.print(shown)
    lines = console.file.getvalue().splitlines()
    assert max(map(len, lines)) <= width
    assert re.search(r"short .*3\.0 GiB", "\n".join(lines))  # no number is folded
    return [each.header for each in shown.columns]


def test_top_drops_columns_on_a_narrow_terminal():
    everything = columns_at(150)
    assert everything == [
        "resource", "memory", "kind", "in use", "peak", "reserved", "peak", "limit", "blocks",
        "blocks/s",
    ]  # fmt: skip
    assert columns_at(80) == [
        "resource", "memory", "in use", "peak", "reserved", "limit", "blocks/s"
    ]  # fmt: skip
    assert columns_at(36) == ["resource", "in use", "reserved"]
    for width in range(36, 150):
        assert set(columns_at(width)) <= set(columns_at(width + 1))


def test_top_leaves_out_empty_columns():
    counters = {name: 0 for name in gpumem._live.COUNTERS}
    one = observe.LiveResource(7, "told", "host:0", "arena", None, counters)
    page = observe.LivePage(1, True, 0.0, 1.0, 0.1, (one,), (), 0)
    titles = [each.header for each in top_view._resource_table(page, None, 150).columns]
    assert "limit" not in titles  # there is none
    assert "blocks/s" not in titles  # it is the first look


def test_top_shows_budgets_without_parents_as_roots():
    def level(number, parent):
        return observe.LiveBudget(number, f"level {number}", parent, 0, None, None, 0)

    tree = top_view._tree((level(3, 2), level(2, 1), level(5, 99), level(1, None)))
    assert [(depth, one.id) for depth, one in tree] == [(0, 5), (0, 1), (1, 2), (2, 3)]


def test_top_refreshes_a_terminal_until_the_process_ends():
    script = """
import gpumem, sys
arena = gpumem.Arena("host", name="watched")
held = [arena.allocate(1 << 20)]
print("ready", flush=True)
for line in sys.stdin:
    held.append(arena.allocate(1 << 20))
"""
    watched = subprocess.Popen(
        [sys.executable, "-c", script],
        env=os.environ | {"GPUMEM_TOP": "1"},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    controller, terminal = pty.openpty()
    with watched:
        watched.stdout.readline()
        command = [sys.executable, "-m", "gpumem", "top", str(watched.pid), "--interval", "0.1"]
        environment = os.environ | {"COLUMNS": "150", "TERM": "xterm"}
        watcher = subprocess.Popen(
            command, stdout=terminal, stderr=subprocess.PIPE, env=environment
        )
        with watcher:
            os.close(terminal)
            read_until(controller, b"1.0 MiB")
            watched.stdin.write(b"more\n")
            watched.stdin.flush()
            read_until(controller, b"2.0 MiB")
            watched.stdin.close()  # it ends by itself
            said = watcher.stderr.read()
            assert watcher.wait(PROMPTLY) == 0
        assert said == f"gpumem: process {watched.pid} no longer publishes\n".encode()
    os.close(controller)


def read_until(terminal, text):
    seen = b""
    while text not in seen:
        seen += os.read(terminal, 65536)


def test_top_ends_when_q_is_pressed_and_restores_the_terminal():
    watched = subprocess.Popen(
        [sys.executable, "-c", "import gpumem; a = gpumem.Arena('host'); print(); input()"],
        env=os.environ | {"GPUMEM_TOP": "1"},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    keyboard, terminal = pty.openpty()
    before = termios.tcgetattr(terminal)
    with watched:
        watched.stdout.readline()
        command = [sys.executable, "-m", "gpumem", "top", str(watched.pid), "--interval", "3600"]
        environment = os.environ | {"COLUMNS": "150", "TERM": "xterm"}
        with subprocess.Popen(command, stdin=terminal, stdout=terminal, env=environment) as watcher:
            read_until(keyboard, b"q to leave")
            os.write(keyboard, b"xq")
            assert watcher.wait(PROMPTLY) == 0
        watched.communicate(b"\n")
    assert termios.tcgetattr(terminal) == before
    os.close(keyboard)
    os.close(terminal)
