"""What every question needs: where it is kept, and how to see whether a call waits."""

from __future__ import annotations

import threading

QUESTIONS: dict = {}
LEGACY, PER_THREAD = 1, 2
GLOBAL, THREAD_LOCAL, RELAXED = 0, 1, 2


def question(function):
    QUESTIONS[function.__name__] = function
    return function


def asking(driver):
    """Return the answers of a question, and a function that asks for one by a name and a call."""
    answers: dict = {}

    def ask(name, *call) -> None:
        answers[name] = driver.error(*call)

    return answers, ask


def waits(driver, gate, call) -> str:
    """Whether `call` comes back while the gate is closed. Opens it. A second is for ever."""
    result: list = []

    def run() -> None:
        driver.error("cuCtxSetCurrent", driver.context)
        result.append(call())

    thread = threading.Thread(target=run)
    thread.start()
    thread.join(1.0)
    waited = thread.is_alive()
    gate.open()
    thread.join()
    answer = result[0] if isinstance(result[0], str) else "SUCCESS"
    return ("waits" if waited else "returns") + ("" if answer == "SUCCESS" else f", {answer}")
