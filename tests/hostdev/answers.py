"""What a driver answers where documentation is silent: the same questions to any driver.

    GPUMEM_TEST_DRIVER=cuda python3 tests/hostdev/answers.py > answers.json

asks the machine's own driver. ``answers_h200.json`` holds what an H200 said; a test asks
the host device and compares. Each question runs in a process of its own, because some
answers leave the context unusable.
"""

from __future__ import annotations

import concurrent.futures
import json
import os
import subprocess
import sys

import drivers
import questions.capture
import questions.contexts
import questions.memory
import questions.order
import questions.pools  # noqa: F401
from questions.common import QUESTIONS


def ask_here(name: str) -> None:
    driver = drivers.load()
    driver.start()
    print(json.dumps(QUESTIONS[name](driver)), flush=True)
    for gate in driver._gates:
        gate.open()
    os._exit(0)  # some questions leave a context that no exit handler gets through


def ask(name: str):
    command = [sys.executable, os.path.abspath(__file__), name]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    except subprocess.TimeoutExpired:
        return "no answer"
    if done.returncode == 0:
        return json.loads(done.stdout)
    lines = done.stderr.strip().splitlines() or [f"exit {done.returncode}"]
    return f"failed: {lines[-1]}"


def ask_all(workers: int) -> dict:
    with concurrent.futures.ThreadPoolExecutor(workers) as pool:
        return dict(zip(QUESTIONS, pool.map(ask, QUESTIONS), strict=True))


if __name__ == "__main__":
    if len(sys.argv) > 1:
        ask_here(sys.argv[1])
    else:
        print(json.dumps(ask_all(os.cpu_count() or 1), indent=1))
