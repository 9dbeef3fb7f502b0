"""The command ``gpumem``: whatever a file holds, one line on stderr and never a traceback."""

from __future__ import annotations

import contextlib
import io
import json
import os
import re

from rich import cells

from gpumem import cli

from .. import changes
from ..changes import mutate
from . import Target
from .files import alive, folder, written

_COMMANDS = ("report", "replay", "plan", "info", "completion")
# Suffixes choose a model's form; the last name is not UTF-8.
_NAMES = (
    *("input", "input.onnx", "input.json", "input.csv", "input.pickle", "input.textproto"),
    "\udcffinput",
)
_FORBIDDEN = re.compile(r"/|\.\.|lag|^\d{6,}$|=\d{7,}$")

_out, _err = io.StringIO(), io.StringIO()  # click keeps every stream that it has seen


class Wrong(AssertionError):
    """The command did what it must not."""


def command(arguments: list[str]) -> tuple[int, str]:
    """Run the command, and hold it to its promises; returns its status and its message."""
    with contextlib.redirect_stdout(_out), contextlib.redirect_stderr(_err):
        status = cli.main(arguments)
    message, told = _taken(_err), _taken(_out)
    cells.cached_cell_len.cache_clear()  # Rich's, of thousands of texts
    if status not in (0, 1, 2):
        raise Wrong(f"status {status}")
    said = message.splitlines()
    if not all(line.startswith(("gpumem: ", "notice: ")) and line.isprintable() for line in said):
        raise Wrong(f"stderr: {message!r}")
    lines = [line for line in said if not line.startswith("notice: ")]
    allowed = 2000 + 4 * sum(map(len, arguments))  # arguments are quoted, some escaped
    if len(message) > allowed or (status and len(lines) != 1):
        raise Wrong(
            f"{len(lines)} lines and {len(message)} characters on stderr: {message[:3000]!r}"
        )
    if not all(line.isprintable() for line in told.split("\n")):
        raise Wrong(f"stdout: {told!r}")
    if "--json" in arguments and told:
        json.loads(told, parse_constant=_refuse)
    return status, message


def _taken(stream: io.StringIO) -> str:
    text = stream.getvalue()
    stream.seek(0)
    stream.truncate()
    return text


def _refuse(name: str) -> None:
    raise Wrong(f"{name} is not JSON")


def _command(data: bytes) -> object:
    """Run a line of arguments, of which @ stands for the file that follows it."""
    line, _, content = data.partition(b"\n")
    words = line.decode("utf-8", "replace").split(" ")
    if words[0] not in _COMMANDS or any(map(_FORBIDDEN.search, words)):
        return "not tried"
    name = _NAMES[len(line) % len(_NAMES)]
    path = written(content, name)
    page = folder() / "page.html"
    before = os.getcwd()
    os.chdir(folder())
    try:
        arguments = [str(path) if word == "@" else word.replace("\0", "") for word in words]
        if words[0] == "report":
            arguments += ["-o", str(page)]
        status, message = command(arguments)
    finally:
        os.chdir(before)

    return words[0], status, re.sub(r"'[^']*'|[0-9]+", "#", message)[:24]


def _content_changed(rng, data: bytes, other: bytes) -> bytes:
    """Change the file as its format asks, and sometimes the arguments."""
    line, _, content = data.partition(b"\n")
    other_line, _, lent = other.partition(b"\n")
    if rng.random() < 0.1:
        line = rng.choice((other_line, mutate(rng, line, other_line, _WORDS)))
    if content.startswith(b"PK"):
        content = changes.in_zip(rng, content, lent)
    elif content.startswith(b"{"):
        content = changes.in_json(rng, content, lent)
    elif content.startswith(b"\x80"):
        content = changes.in_pickle(rng, content, lent)
    elif b"onnx" in line or line.startswith(b"plan"):
        content = changes.in_onnx(rng, content, lent)
    else:
        content = mutate(rng, content, lent)
    return line + b"\n" + content


_WORDS = (
    b" --json",
    b" --device",
    b" 1",
    b" --max-mem",
    b" 4MiB",
    b" --config",
    b" backing=regions",
    b" --title",
    b" --budget",
    b" cuda:0=1MiB",
    b" --dim",
    b" n=3",
    b" --weights",
    b" --strategy",
    b" gain",
    b" --stats @",
    b" --percent",
    b" --list",
)

TARGETS = (
    Target(
        "command",
        _command,
        (),
        structured=(_content_changed,) * 3,
        tokens=_WORDS,
        # A replay has a word for each page of 2 MiB, of blocks of up to 256 TiB.
        max_rss=1 << 30,
        limit_address_space=False,
        alive=alive,
    ),
)
