"""The runs of a program: one process, which imports what they have in common, and their forks."""

from __future__ import annotations

import ctypes
import importlib
import json
import os
import shutil
import signal
import sys
import threading
import warnings
from collections.abc import Generator
from typing import Any

from .null import load
from .program import Program
from .ranks import be_alone
from .run import ScriptRun, answer_to, path_of_answer
from .skipped import skip_host_work

COMPUTED = "integers are computed on the CPU, without torch.compile: reserved may be 4 % off"
PR_SET_PDEATHSIG = 1


def end_with_parent() -> None:
    """Let the kernel end this process with its parent, which may be killed before it has waited."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def main(order: dict[str, Any]) -> None:
    """Run the program over each allocator, at once, and wait for the runs."""
    end_with_parent()
    library = load(order["library"], order["device"])
    torch = importlib.import_module("torch")
    skip_host_work(torch, order["folder"])
    be_alone(library)
    program = Program(order)
    if order["ahead"]:
        program.import_ahead()
        if threading.active_count() > 1 or torch.cuda.is_initialized():  # a fork has neither
            again = json.dumps({**order, "ahead": False})
            os.execv(sys.executable, [sys.executable, os.path.dirname(__file__), again])

    beside = {**order, "folder": os.path.join(order["folder"], "beside"), "beside": True}
    os.mkdir(beside["folder"])
    beside["recording"] = os.path.join(beside["folder"], "recording")

    def start(way: dict[str, Any], allocator: str, value: int | None) -> int:
        with warnings.catch_warnings(action="ignore"):  # other threads: they only wait for work
            child = os.fork()
        if not child:
            end_with_parent()
            ScriptRun(way, library, program, allocator, value).run()
        return child

    searches = {allocator: values_to_try(order["values"]) for allocator in order["allocators"]}
    running = {}
    for allocator, search in searches.items():
        value = next(search)
        running[start(order, allocator, value)] = order, allocator, value
    while running:
        child, status = os.wait()
        if child not in running:
            continue  # of a process that the imports have started
        way, allocator, value = running.pop(child)
        path = path_of_answer(way, allocator, value)
        if not os.path.exists(path):
            code = os.waitstatus_to_exitcode(status)
            reason = f"its process ended with status {code}, without an answer"
            answer_to(path, {"end": "failed", "reason": reason, "integers": [False, False]})
        answer = read(path)
        if answer["integers"][0] and way is order:
            running[start(beside, allocator, value)] = beside, allocator, value
            continue
        if way is beside:
            answer = choose(order, beside, allocator, value)
        end = answer["end"]
        try:
            value = searches[allocator].send(end)
        except StopIteration:
            continue
        running[start(order, allocator, value)] = order, allocator, value


def choose(
    order: dict[str, Any], beside: dict[str, Any], allocator: str, value: int | None
) -> dict[str, Any]:
    """Keep one of two answers: of a run, and of the same with integers computed beside.

    Computing moves PyTorch's reserved peak a little. So the first one is kept if it came to its end
    and all integers are zero, as the stand-ins are, or both have the same live peak.
    """
    paths = [path_of_answer(each, allocator, value) for each in (order, beside)]
    before, after = map(read, paths)
    differs = after["integers"][1] and after["end"] != "failed"
    differs = differs and any(before.get(key) != after[key] for key in ("end", "steps", "live"))
    if differs or before["end"] not in ("script", "steps", "until", "memory"):
        os.replace(f"{paths[1]}.out", f"{paths[0]}.out")
        if allocator == order["recorded"] and os.path.exists(beside["recording"]):
            shutil.move(beside["recording"], order["recording"])
        answer = {**after, "assumed": [*after.get("assumed", []), COMPUTED]}
    elif after["end"] == before["end"]:  # its reads are those of values that nobody has computed
        answer = {**before, "reads": after["reads"], "assumed": after["assumed"]}
    else:
        answer = before
    answer_to(paths[0], answer)
    return answer


def read(path: str) -> dict[str, Any]:
    """Return the answer of a run."""
    with open(path) as file:
        answer: dict[str, Any] = json.load(file)
    return answer


def values_to_try(values: list[int] | None) -> Generator[int | None, str, None]:
    """Yield the values that a search runs the program with; it is sent how each run ended.

    It tries the first value and the last one, and halves what is between. A run that ended for
    another reason than memory ends the search. Without `values` there is one run.
    """
    if values is None:
        yield None
        return
    tried = range(*values)
    fits, lacks = -1, len(tried)  # indices
    while lacks - fits > 1:
        middle = (fits + lacks) // 2
        index = 0 if fits < 0 else len(tried) - 1 if lacks == len(tried) else middle
        end = yield tried[index]
        if end == "memory":
            lacks = index
        elif end in ("script", "steps", "until"):
            fits = index
        else:
            return
