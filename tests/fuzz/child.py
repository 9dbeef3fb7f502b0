"""Tries inputs on one target and judges what happens; `engine` starts it, ends it and reads it.

A finding is an exception that is not one of the target's, a message that is not one printable line,
memory far beyond the size of the input, or a leak: of descriptors, of the host device's memory, of
Python objects. Crashes and hangs are the parent's to see: before each input this process writes it
into a page that both share.
"""

from __future__ import annotations

import argparse
import faulthandler
import gc
import hashlib
import mmap
import os
import random
import re
import resource
import struct
import time
import traceback
import tracemalloc
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from . import targets
from .mutation import MOST_BYTES, mutate

RSS_PER_BYTE = 2000  # zlib unpacks a byte to 1032, NumPy's columns hold some copies
ADDRESS_SPACE_ALLOWED = 1 << 30
LEAK_SECONDS = 1  # that may look for leaks,
LEAK_SHARE = 0.3  # and this share of the time
LEAST_LEAK = 64  # bytes of each repetition
MOST_KEPT = 3000  # inputs of one search
_PACKAGES = Path(__file__).parents[2]


class Page:
    """What child and parent share: counts, and the input that is being tried."""

    HEADER = struct.Struct("<QQQ")  # inputs begun, whether the corpus was replayed, bytes
    BYTES = 1 << 20

    def __init__(self, path: Path) -> None:
        with path.open("r+b" if path.exists() else "w+b") as file:
            file.truncate(self.BYTES)
            self._map = mmap.mmap(file.fileno(), self.BYTES)

    def read(self) -> tuple[int, bool, bytes]:
        begun, replayed, length = self.HEADER.unpack_from(self._map)
        return begun, bool(replayed), bytes(self._map[self.HEADER.size : self.HEADER.size + length])

    def begin(self, data: bytes) -> None:
        begun, replayed, _ = self.HEADER.unpack_from(self._map)
        self._map[self.HEADER.size : self.HEADER.size + len(data)] = data
        self.HEADER.pack_into(self._map, 0, begun + 1, replayed, len(data))

    def mark_replayed(self) -> None:
        begun, _, length = self.HEADER.unpack_from(self._map)
        self.HEADER.pack_into(self._map, 0, begun, 1, length)


@dataclass(frozen=True)
class Finding:
    kind: str  # exception, message, memory, leak
    where: str  # two findings of one kind and place are the same
    text: str


class Child:
    """One target, its inputs, and what was found."""

    def __init__(self, target: targets.Target, seed: int, folder: Path) -> None:
        self.target = target
        self._rng = random.Random(seed)
        self._folder = folder
        self._page = Page(folder / "page")
        self._signatures: set[object] = set()
        self._found = {path.name for path in (folder / "findings").iterdir()}
        self._inputs: list[bytes] = []
        self._begun = time.monotonic()
        self._leak_seconds = 0.0

    def replay(self, paths: list[Path], skipped: set[str]) -> None:
        """Try each input of the corpus, and those that this search has kept."""
        inputs = [path.read_bytes() for path in paths]
        self._inputs = [data for data in inputs if name_of(data) not in skipped] or [b""]
        self._outcome(self._inputs[0])  # imports what is imported late
        gc.collect()
        gc.freeze()
        if self.target.limit_address_space:
            _limit_address_space()
        for data in self._inputs:
            self._try(data)
        self._page.mark_replayed()

    def search(self) -> None:
        """Try mutations until the parent ends it."""
        while True:
            data = self._mutated()
            if self._try(data) and len(self._inputs) < MOST_KEPT:
                self._inputs.append(data)
                (self._folder / "kept" / name_of(data)).write_bytes(data)

    def _mutated(self) -> bytes:
        rng, target = self._rng, self.target
        recent = self._inputs[-50:] if rng.random() < 0.5 else self._inputs
        one, other = rng.choice(recent), rng.choice(self._inputs)
        if target.structured and rng.random() < 0.6:
            return rng.choice(target.structured)(rng, one, other)[:MOST_BYTES]
        return mutate(rng, one, other, target.tokens)

    def _try(self, data: bytes) -> bool:
        """Try an input; True: it did what none did before."""
        signature, finding = self._judge(data)
        if finding is None and signature not in self._signatures:
            finding = self._leak(data, signature)
        if finding is not None:
            self._write(data, finding)
        is_new = signature not in self._signatures
        self._signatures.add(signature)
        return is_new and finding is None

    def _judge(self, data: bytes) -> tuple[object, Finding | None]:
        descriptors, rss = _descriptors(), _peak_rss()
        signature, finding = self._outcome(data)
        grown = _peak_rss() - rss
        if grown > self.target.most_rss + RSS_PER_BYTE * len(data):
            finding = Finding("memory", str(signature)[:80], f"{grown >> 20} MiB")
        if _descriptors() > descriptors:
            # What is opened once for all is no leak.
            counts = [self._descriptors_after(data) for _ in range(3)]
            if counts[0] < counts[1] < counts[2]:
                finding = Finding("leak", "descriptors", f"open after each: {counts}")
        return signature, finding

    def _descriptors_after(self, data: bytes) -> int:
        self._outcome(data)
        gc.collect()
        return _descriptors()

    def _outcome(self, data: bytes) -> tuple[object, Finding | None]:
        self._page.begin(data)
        try:
            return ("ok", self.target.run(data)), None
        except self.target.accepts as error:
            signature = _shape(error)
            if _memory_was_out(error):
                return signature, Finding("memory", str(signature[1][-1:]), _told(error))
            message = str(error)
            if self.target.one_line and not (
                message.isprintable() and len(message) <= self.target.most_characters
            ):
                return signature, Finding("message", str(signature[1][-1:]), repr(message))
            return signature, None
        except Exception as error:
            signature = _shape(error)
            kind = "memory" if isinstance(error, MemoryError) else "exception"
            return signature, Finding(kind, str((signature[0], signature[1][-1:])), _told(error))

    def _leak(self, data: bytes, signature: object) -> Finding | None:
        """Try an input again and again, if there is time; each time must leave what it found."""
        begun = time.monotonic()
        allowed = LEAK_SECONDS + LEAK_SHARE * (begun - self._begun) - self._leak_seconds
        alive = self.target.alive()
        tracemalloc.start()
        try:
            growth = self._growth(data, begun + allowed)
        finally:
            tracemalloc.stop()
            self._leak_seconds += time.monotonic() - begun
        if self.target.alive() != alive:
            return Finding("leak", "device", f"{alive} before, {self.target.alive()} after")
        if growth:
            return Finding("leak", str(signature)[:80], f"bytes of each repetition: {growth}")
        return None

    def _growth(self, data: bytes, end: float) -> list[int]:
        """Return the bytes that each round leaves per repetition; empty if one leaves none.

        Free lists of the interpreter grow for a while, so the later rounds are longer; and its
        table of names doubles now and then, but not in two rounds. Empty too if time is short.
        """
        found: list[int] = []
        repeats, count = self.target.repeats, 1
        begun = time.monotonic()
        before = self._traced(data, count)
        for following in (repeats, repeats, 10 * repeats, 100 * repeats, 100 * repeats):
            now = time.monotonic()
            if now + (now - begun) * following / count > end:
                return []
            begun, count = now, following
            after = self._traced(data, count)
            found.append((after - before) // count)
            before = after
            if found[-1] < LEAST_LEAK:
                return []
        return found

    def _traced(self, data: bytes, repeats: int) -> int:
        self._repeat(data, repeats)
        gc.collect()
        return tracemalloc.get_traced_memory()[0]

    def _repeat(self, data: bytes, repeats: int) -> None:
        for _ in range(repeats):
            self._outcome(data)

    def _write(self, data: bytes, finding: Finding) -> None:
        name = f"{finding.kind}-{name_of(f'{finding.kind} {finding.where}'.encode())}"
        if name not in self._found:
            self._found.add(name)
            shorter = self._shortened(data, finding)
            (self._folder / "findings" / name).write_bytes(shorter)
            (self._folder / "findings" / f"{name}.txt").write_text(
                f"{finding.kind} at {finding.where}\n{finding.text}\n", "utf-8", "backslashreplace"
            )

    def _shortened(self, data: bytes, finding: Finding) -> bytes:
        """Leave out spans while the finding stays the same, for a second or two."""
        end = time.monotonic() + 2
        span = len(data) // 2
        while span and finding.kind in ("exception", "message"):
            at = 0
            while at < len(data) and time.monotonic() < end:
                less = data[:at] + data[at + span :]
                other = self._outcome(less)[1]
                if other is not None and (other.kind, other.where) == (finding.kind, finding.where):
                    data = less
                else:
                    at += span
            span //= 2
        return data


def name_of(data: bytes) -> str:
    """Name an input after its content."""
    return hashlib.sha256(data).hexdigest()[:12]


def _shape(error: BaseException) -> tuple[str, tuple[str, ...], str]:
    """Return what tells two errors apart: type, lines of the stack, message without values."""
    frames = traceback.extract_tb(error.__traceback__)
    lines = tuple(f"{_short(frame.filename)}:{frame.lineno}" for frame in frames[2:])
    text = re.sub(r"'[^']*'|\"[^\"]*\"|[0-9]+", "#", str(error)[:200])
    return type(error).__name__, lines, text[:40]


def _short(filename: str) -> str:
    path = Path(filename)
    return str(path.relative_to(_PACKAGES)) if path.is_relative_to(_PACKAGES) else path.name


def _told(error: BaseException) -> str:
    return "".join(traceback.format_exception(error, limit=-12))[-4000:]


def _memory_was_out(error: BaseException) -> bool:
    """Whether Python had no memory left, which a reader may have turned into another error."""
    return any(type(each) is MemoryError for each in _chain(error))


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__context__


def _descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def _peak_rss() -> int:
    # Not getrusage: it counts what the process had before exec, which is its parent's memory.
    status = Path("/proc/self/status").read_text()
    return int(status.split("VmHWM:")[1].split()[0]) << 10


def _limit_address_space() -> None:
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limit = pages * mmap.PAGESIZE + ADDRESS_SPACE_ALLOWED
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz.child")
    parser.add_argument("target", choices=[*targets.NAMES, targets.PLANTED])
    parser.add_argument("folder", type=Path)
    parser.add_argument("seed", type=int)
    chosen = parser.parse_args()
    faulthandler.enable()
    warnings.simplefilter("ignore")
    folder: Path = chosen.folder
    target = targets.load(chosen.target)
    corpus = sorted((targets.CORPUS / target.name).iterdir()) + sorted((folder / "kept").iterdir())
    child = Child(target, chosen.seed, folder)
    child.replay(corpus, set((folder / "crashed").read_text().split()))
    child.search()


if __name__ == "__main__":
    main()
