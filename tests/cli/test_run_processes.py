"""Processes of a program on the page of ``gpumem run --report``: each end, and the lost ones."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap

import pytest

from gpumem.report import page, processes

METHODS = ("fork", "spawn", "forkserver")
PROGRAM = """
import concurrent.futures, multiprocessing, os, signal, subprocess, sys, time
context = multiprocessing.get_context(sys.argv[1])
def work(number):
    import gpumem
    work.kept = gpumem.Arena("host").allocate(1000 + number)
    return number
def waits(number, pipe):
    work(number)
    pipe.send(os.getpid())
    while True:
        time.sleep(0.01)
def started(number):
    here, there = context.Pipe()
    process = context.Process(target=waits, args=(number, there))
    process.start()
    here.recv()
    return process
def ended(process, number):
    os.kill(process.pid, number)
    process.join()
    return process.exitcode
def result_of(target, *arguments):
    process = context.Process(target=target, args=arguments)
    process.start()
    process.join()
    return process.exitcode
def raises():
    work(1)
    raise ValueError("of the worker")
def exits(how):
    work(1)
    how(7)
def leave(status):
    os._exit(status)
"""


@pytest.fixture
def run(tmp_path, monkeypatch):
    """Run a program that gets a start method; returns what it did and its page's facts."""
    monkeypatch.chdir(tmp_path)
    # Under nohup the signal is ignored, which the programs would inherit.
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)

    def run(body, method="fork", *, status=0):
        path = tmp_path / "program.py"
        path.write_text(PROGRAM + "if __name__ == '__main__':\n" + textwrap.indent(body, "    "))
        command = [sys.executable, "-m", "gpumem", "run", "--report", "out.html", path, method]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120)
        assert done.returncode == status, done.stderr
        assert {entry.name for entry in tmp_path.iterdir()} <= {"program.py", "out.html"}
        assert not list(processes.FOLDER.glob(f"gpumem-run-{os.getuid()}-*-{_job(tmp_path)}"))
        return done, page.facts_of(tmp_path / "out.html")

    yield run
    signal.signal(signal.SIGHUP, before)


def _job(folder):
    return page.facts_of(folder / "out.html").get("job", "no page").split()[1]


def peaks(facts):
    return sorted(run["figures"]["peak_live_bytes"] for run in facts["runs"])


ENDS = {
    "of a pool that is closed": """
pool = context.Pool(2)
pool.map(work, range(2), chunksize=1)
pool.close()
pool.join()
""",
    "of a pool that is terminated": """
with context.Pool(1) as pool:
    pool.map(work, [1])
""",
    "of a pool that is left to the end of the program": """
import gpumem
pool = context.Pool(1)
pool.map(work, [1])
""",
    "of an executor": """
with concurrent.futures.ProcessPoolExecutor(1, mp_context=context) as executor:
    list(executor.map(work, [1]))
""",
    "by a return": "assert result_of(work, 1) == 0",
    "by an exception": "assert result_of(raises) == 1",
    "by sys.exit": "assert result_of(exits, sys.exit) == 7",
    "by os._exit": "assert result_of(exits, leave) == 7",
    "by SIGTERM": "assert ended(started(1), signal.SIGTERM) == -signal.SIGTERM",
    "by SIGHUP": "assert ended(started(1), signal.SIGHUP) == -signal.SIGHUP",
}


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("end", ENDS)
def test_process_of_multiprocessing_is_on_the_page(run, end, method):
    done, facts = run(ENDS[end], method)
    found = peaks(facts)
    # One worker may do the work of both.
    assert set(found) <= {1000, 1001}
    assert 1001 in found
    assert facts["missing"] == {}
    assert "missing" not in done.stderr


def test_own_arena_of_the_parent_hides_no_child(run):
    _, facts = run(
        """
import gpumem
kept = gpumem.Arena("host").allocate(5000)
with context.Pool(1) as pool:
    pool.map(work, [7])
    for process in [started(8), started(9)]:
        ended(process, signal.SIGTERM)
"""
    )
    assert peaks(facts) == [1007, 1008, 1009, 5000]


def test_forked_child_that_leaves_without_pythons_exit_is_on_the_page(run):
    _, facts = run(
        """
import gpumem
for number in range(2):
    if (child := os.fork()) == 0:
        work(number)
        os._exit(number)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == number
"""
    )
    assert peaks(facts) == [1000, 1001]


@pytest.mark.parametrize("times", [1, 20])
def test_program_that_sigterm_ends_writes_its_page_and_has_the_signals_status(run, times):
    done, facts = run(
        f"""
work(0)
for _ in range({times}):
    os.kill(os.getpid(), signal.SIGTERM)
time.sleep(60)
""",
        status=-signal.SIGTERM,
    )
    assert peaks(facts) == [1000]
    assert done.stderr == f"gpumem: wrote {os.path.abspath('out.html')}\n"


def test_program_that_handles_or_ignores_sigterm_goes_on(run):
    done, facts = run(
        """
work(0)
signal.signal(signal.SIGTERM, lambda *_: print("handled", flush=True))
os.kill(os.getpid(), signal.SIGTERM)
signal.signal(signal.SIGTERM, signal.SIG_IGN)
os.kill(os.getpid(), signal.SIGTERM)
print("ended")
"""
    )
    assert done.stdout == "handled\nended\n"
    assert peaks(facts) == [1000]


@pytest.mark.parametrize("own", ["", "work(5)\n"])
@pytest.mark.parametrize("method", METHODS)
def test_killed_processes_are_counted_and_named(run, own, method):
    done, facts = run(
        own
        + """
processes = [started(number) for number in range(3)]
for process, number in zip(processes, (signal.SIGKILL, signal.SIGKILL, signal.SIGTERM)):
    ended(process, number)
print(*[process.pid for process in processes[:2]])
""",
        method,
    )
    killed = [f"process {number}" for number in done.stdout.split()]
    assert peaks(facts) == [1002, *([1005] if own else [])]
    assert facts["missing"] == dict.fromkeys(killed, processes.LOST)
    text = processes.text_of(facts["missing"])
    assert text.startswith("2 processes are missing: process ")
    assert f"out.html: {text}\n" in done.stderr
    with open("out.html", encoding="utf-8") as file:
        assert text in file.read()


def test_killed_process_of_a_program_without_a_page_is_counted(run):
    done, facts = run("ended(started(1), signal.SIGKILL)")
    assert facts == {}
    assert "not written: no block was allocated" in done.stderr
    assert "out.html: 1 process is missing: process " in done.stderr


def test_child_that_replaces_its_program_is_missing_only_if_it_had_memory(run):
    done, facts = run(
        """
import gpumem
for number in range(2):
    if (child := os.fork()) == 0:
        if number:
            work(number)
        os.execv("/bin/true", ["true"])
    os.waitpid(child, 0)
print(child)
subprocess.run(["true"], preexec_fn=lambda: None)
work(5)
"""
    )
    assert peaks(facts) == [1005]
    assert list(facts["missing"]) == [f"process {done.stdout.strip()}"]


def test_process_without_memory_for_its_recording_is_missing_with_the_reason(run):
    done, facts = run(
        """
import gpumem
from gpumem import observe
work(5)
recorder = observe.record
def refuse(**options):
    raise MemoryError("none for a ring")
observe.record = refuse
if (child := os.fork()) == 0:
    work(1)
    sys.exit()
os.waitpid(child, 0)
print(child)
"""
    )
    assert peaks(facts) == [1005]
    expected = {f"process {done.stdout.strip()}": "it was not recorded: none for a ring"}
    assert facts["missing"] == expected
