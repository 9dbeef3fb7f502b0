"""Other processes that evaluate expressions, and the page of a node that they share."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

from helpers.child import PYTHON_CHECKS

# Python 3.12 and later warn of a fork beside threads; gpumem has one for each name of a node.
FORKS = ("-W", "ignore::DeprecationWarning")
# Evaluates each line of its input and answers with the repr of the value.
PROGRAM = """
import os, sys, time
import gpumem

def reserved(budget, nbytes):
    room = budget.reserve(nbytes)
    room.commit()
    kept.append(room)

kept = []
for line in sys.stdin:
    try:
        answer = eval(f'({line})')
    except gpumem.errors.GpumemError as error:
        answer = error
    print(repr(answer), flush=True)
"""


class Program:
    """Another process, which evaluates expressions."""

    def __init__(self):
        command = [sys.executable, *PYTHON_CHECKS, *FORKS, "-c", PROGRAM]
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def __call__(self, expression: str) -> str:
        self.process.stdin.write(expression + "\n")
        self.process.stdin.flush()
        return self.process.stdout.readline().rstrip()

    def send(self, number: signal.Signals) -> None:
        self.process.send_signal(number)
        if number == signal.SIGKILL:
            self.process.wait()
        elif number == signal.SIGSTOP:
            os.waitpid(self.process.pid, os.WUNTRACED)

    def end(self) -> None:
        self.process.kill()
        self.process.communicate()


def page_of(node: str) -> Path:
    """Return the file of a node of this user."""
    return Path(f"/dev/shm/gpumem-node-{os.geteuid()}-{node}")
