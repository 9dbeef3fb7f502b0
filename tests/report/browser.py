"""A headless Chromium, driven over its own protocol through two pipes; no package is needed."""

from __future__ import annotations

import base64
import contextlib
import json
import os
import select
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")


def executable() -> str | None:
    """Find a Chromium; the environment's GPUMEM_CHROMIUM names another."""
    named = os.environ.get("GPUMEM_CHROMIUM")
    return named or next(filter(None, map(shutil.which, NAMES)), None)


# Chromium looks for its two ends of the pipes at descriptors 3 and 4.
_AT_3_AND_4 = """
import fcntl, os, sys
ends = [fcntl.fcntl(int(end), fcntl.F_DUPFD, 10) for end in sys.argv[1:3]]
for end, place in zip(ends, (3, 4)):
    os.dup2(end, place)
    os.close(end)
os.execv(sys.argv[3], sys.argv[3:])
"""
_SWITCHES = (
    "--headless --hide-scrollbars --no-sandbox --disable-gpu --disable-dev-shm-usage "
    "--no-first-run --disable-background-networking --remote-debugging-pipe"
)


class Browser:
    """One process and one page in it.

    `errors` collects what the page complains of: exceptions and messages of console.error, and
    what the browser itself logs, such as requests that were refused. `requests` lists every
    address that was asked for.
    """

    PATIENCE_S = 90

    def __init__(self, program: str, profile: Path, *, width: int = 1280, height: int = 1000):
        self.errors: list[str] = []
        self.requests: list[str] = []
        read_by_it, self._writes = os.pipe()
        self._reads, written_by_it = os.pipe()
        start = [sys.executable, "-c", _AT_3_AND_4, str(read_by_it), str(written_by_it)]
        where = [f"--user-data-dir={profile}", f"--window-size={width},{height}", "about:blank"]
        self._process = subprocess.Popen(
            [*start, program, *_SWITCHES.split(), *where],
            pass_fds=(read_by_it, written_by_it),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        os.close(read_by_it)
        os.close(written_by_it)
        self._unread = b""
        self._number = 0
        target = self._send("Target.createTarget", url="about:blank")["targetId"]
        attached = self._send("Target.attachToTarget", targetId=target, flatten=True)
        self._session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")
        self.resize(width, height)

    _session = ""

    def call(self, method: str, **parameters):
        """Call a method of the protocol."""
        return self._send(method, **parameters)

    def open(self, page: Path, fragment: str = "") -> None:
        """Open a report and wait until it is drawn."""
        self.call("Page.navigate", url="about:blank")  # else a new fragment only scrolls
        self.call("Page.navigate", url=page.as_uri() + fragment)
        self.wait("document.documentElement?.dataset.state")
        self.settle()

    def evaluate(self, expression: str):
        """Return the value of an expression in the page; await promises."""
        answer = self.call(
            "Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True
        )
        if "exceptionDetails" in answer:
            raise AssertionError(f"{expression}: {answer['exceptionDetails']}")
        return answer["result"].get("value")

    def wait(self, expression: str):
        """Wait until an expression is true; return its value."""
        end = time.monotonic() + self.PATIENCE_S
        while not (value := self.evaluate(expression)):
            if time.monotonic() > end:
                raise AssertionError(f"the page never came to: {expression}; {self.errors}")
            time.sleep(0.02)
        return value

    def settle(self) -> None:
        """Wait until changes are drawn: two frames later."""
        self.evaluate("new Promise(r => requestAnimationFrame(() => requestAnimationFrame(r)))")

    def mouse(self, kind: str, x: float, y: float, **more) -> None:
        """Move the mouse, or press or release its button."""
        self.call("Input.dispatchMouseEvent", type=f"mouse{kind}", x=x, y=y, **more)

    def drag(self, start: tuple[float, float], end: tuple[float, float]) -> None:
        """Drag from one place of the page to another."""
        held = {"button": "left", "buttons": 1, "clickCount": 1}
        self.mouse("Moved", *start)
        self.mouse("Pressed", *start, **held)
        for part in (0.3, 0.7, 1.0):
            at = [a + part * (b - a) for a, b in zip(start, end, strict=True)]
            self.mouse("Moved", *at, button="left", buttons=1)
        self.mouse("Released", *end, **{**held, "buttons": 0})
        self.settle()

    def click(self, x: float, y: float, *, times: int = 1) -> None:
        """Click once, or twice."""
        for number in range(1, times + 1):
            held = {"button": "left", "clickCount": number}
            self.mouse("Moved", x, y)
            self.mouse("Pressed", x, y, buttons=1, **held)
            self.mouse("Released", x, y, **held)
        self.settle()

    def press(self, key: str, text: str = "") -> None:
        """Press a key."""
        self.call("Input.dispatchKeyEvent", type="keyDown", key=key, text=text)
        self.call("Input.dispatchKeyEvent", type="keyUp", key=key)
        self.settle()

    def resize(self, width: int, height: int = 1000) -> None:
        """Change the size of the page."""
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        self.call("Emulation.setDeviceMetricsOverride", **size)
        self.settle()

    def screenshot(self) -> bytes:
        """Draw the whole page as a PNG."""
        size = self.call("Page.getLayoutMetrics")["cssContentSize"]
        shot = self.call(
            "Page.captureScreenshot", captureBeyondViewport=True, clip={**size, "scale": 1}
        )
        return base64.b64decode(shot["data"])

    def close(self) -> None:
        """End the process and those that it started."""
        try:
            # The answer is not awaited: it may be missing.
            os.write(self._writes, b'{"id": 0, "method": "Browser.close"}\0')
            self._process.wait(timeout=10)
        except (OSError, subprocess.TimeoutExpired):
            pass
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        os.close(self._writes)
        os.close(self._reads)

    def _send(self, method: str, **parameters):
        self._number += 1
        message = {"id": self._number, "method": method, "params": parameters}
        if self._session:
            message["sessionId"] = self._session
        data = json.dumps(message).encode() + b"\0"
        while data:
            data = data[os.write(self._writes, data) :]
        end = time.monotonic() + self.PATIENCE_S
        while True:
            answer = self._receive(end)
            if answer.get("id") == message["id"]:
                assert "error" not in answer, f"{method}: {answer['error']}"
                return answer["result"]
            self._note(answer)

    def _receive(self, end: float) -> dict:
        while b"\0" not in self._unread:
            ready, _, _ = select.select([self._reads], [], [], max(0.0, end - time.monotonic()))
            assert ready, "the browser does not answer"
            more = os.read(self._reads, 1 << 20)
            assert more, "the browser has ended"
            self._unread += more
        message, _, self._unread = self._unread.partition(b"\0")
        return json.loads(message)

    def _note(self, event: dict) -> None:
        method, facts = event.get("method"), event.get("params", {})
        if method == "Runtime.exceptionThrown":
            details = facts["exceptionDetails"]
            self.errors.append(details.get("exception", {}).get("description", details["text"]))
        elif method == "Runtime.consoleAPICalled" and facts["type"] in ("error", "warning"):
            self.errors.append(" ".join(str(a.get("value", a)) for a in facts["args"]))
        elif method == "Log.entryAdded" and facts["entry"]["level"] in ("error", "warning"):
            self.errors.append(facts["entry"]["text"])
        elif method == "Network.requestWillBeSent":
            self.requests.append(facts["request"]["url"])
