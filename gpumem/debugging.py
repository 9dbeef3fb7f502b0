"""The debug heap's settings and its reports.

``Arena(memory, debug_heap=True)`` puts guards before and after every block, fills fresh and freed
memory with patterns, and keeps freed blocks in a quarantine. A write outside of a live block
is found when a block is freed, when its memory is used again, at `Arena.check_heap` and at
the end. Set ``GPUMEM_DEBUG_HEAP=1``, or to settings such as ``"guard_bytes=512,on_error=warn"``,
for every arena without its own setting.
"""

from __future__ import annotations

import os
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, TypeAlias

from gpumem._support.environment import read_switch
from gpumem._support.sizes import MAX_BYTES
from gpumem._support.texts import shown
from gpumem.config import (
    _bad,
    _boolean,
    _choice,
    _integer,
    _optional,
    _setting,
    _Settings,
    _size,
)
from gpumem.errors import ConfigError

__all__ = ["DebugHeapOptions", "HeapReport", "OutstandingBlock", "Site"]
__dir__ = __all__.copy

VARIABLE = "GPUMEM_DEBUG_HEAP"
GRAIN = 256  # bytes: blocks, and the bytes after a guard, begin at multiples of it
MAX_GUARD = 1 << 20

_pattern = _optional(_integer(0, 255), "none", "a byte from 0 to 255")


def _guard(key: str, value: object) -> int:
    accepted = f'a multiple of {GRAIN} from 0 to {MAX_GUARD}, or a size such as "1KiB"'
    try:
        nbytes: int = _size(0, MAX_GUARD)(key, value)
    except ConfigError:
        raise _bad(key, value, accepted) from None
    if nbytes % GRAIN:
        raise _bad(key, value, accepted)
    return nbytes


def _on_error(key: str, value: Any) -> Any:
    if callable(value):
        return value
    try:
        return _choice(**{"raise": "", "warn": ""})(key, value)
    except ConfigError:
        raise _bad(key, value, 'one of "raise", "warn", or a function of one report') from None


@dataclass(frozen=True)
class DebugHeapOptions(_Settings):
    """Settings of a debug heap; see `gpumem.Arena`.

    Attributes
    ----------
    guard_bytes : int
        Guard bytes before and after each block: a multiple of 256, up to 1 MiB.
    guard_byte : int
        Value of the guard bytes, and of the padding after a block.
    fresh_byte : int, optional
        Fill value of a new block, which makes unwritten memory visible: with the default every
        floating point number there is NaN. None (as text "none"): new blocks are not filled.
    freed_byte : int, optional
        Fill value of a block in quarantine. None: such blocks are not filled, and late writes are
        only found in their guards.
    quarantine_bytes : int
        Bytes of freed memory in quarantine, guards and padding included; the oldest block leaves
        first, and all of them before memory is out. More bytes find later writes. A larger block,
        with 0 any block, is checked until its streams are done and the arena is called again; it is
        filled if another stream freed it before its own was done.
    stack_depth : int
        Recorded calls of the Python stack of each allocation and free; 0: no stack, and no native
        one for threads without Python.
    stack_every : int
        Record the stack of every n-th allocation and free; 1: of each.
    on_error : {"raise", "warn"} or callable
        "raise": the next call that may raise, an allocation, `Arena.check_heap`, `Arena.shrink` or
        `Arena.close`, raises `HeapCorruptionError`, or `InvalidFreeError` for a bad free; a free
        never does. "warn": a `HeapWarning` for each report. A function is called with each
        `HeapReport`, without a lock, on a thread that runs Python.
    leaks : bool
        Whether blocks that are in use when the process ends are reported, on stderr or, where
        `on_error` is a function, by that.

    Examples
    --------
    >>> from gpumem.debugging import DebugHeapOptions
    >>> DebugHeapOptions.from_mapping({"guard_bytes": "512", "on_error": "warn"}).guard_bytes
    512
    """

    guard_bytes: int = _setting(256, _guard)
    guard_byte: int = _setting(0xFD, _integer(0, 255))
    fresh_byte: int | None = _setting(0xFF, _pattern)
    freed_byte: int | None = _setting(0xDD, _pattern)
    quarantine_bytes: int = _setting(64 << 20, _size(0, MAX_BYTES))
    stack_depth: int = _setting(16, _integer(0, 1000))
    stack_every: int = _setting(1, _integer(1, 1 << 31))
    on_error: str | Callable[[HeapReport], object] = _setting("raise", _on_error)  # noqa: RUF009
    leaks: bool = _setting(True, _boolean)

    _OF: ClassVar[str] = "a debug heap"
    _NONE: ClassVar[str] = "none"

    def _text_of(self, name: str) -> str:
        if name == "on_error" and callable(self.on_error):
            raise ConfigError(
                f"on_error = {shown(self.on_error, 80)} has no text that can be read back: "
                'expected "raise" or "warn"'
            )
        return super()._text_of(name)

    def _without_effect(self) -> dict[str, str]:
        """Return the settings other than the defaults that a debug heap does not use, and why."""
        if self.stack_depth == 0 and self.stack_every != DebugHeapOptions.stack_every:
            return {"stack_every": "stack_depth = 0 records no stack"}
        return {}


def options_of(debug_heap: object) -> DebugHeapOptions | None:
    """Return the options of an arena's ``debug_heap``; None: those of the environment variable."""
    if debug_heap is None:
        return _options_of_environment()
    if isinstance(debug_heap, bool):
        return DebugHeapOptions() if debug_heap else None
    if isinstance(debug_heap, DebugHeapOptions):
        return debug_heap
    if isinstance(debug_heap, Mapping):
        return DebugHeapOptions.from_mapping(debug_heap)
    raise TypeError(
        "debug_heap must be True, False, None, DebugHeapOptions or a mapping, "
        f"not {type(debug_heap).__name__}"
    )


def _options_of_environment() -> DebugHeapOptions | None:
    text = os.environ.get(VARIABLE, "")
    on = read_switch(text)
    if on is not None:
        return DebugHeapOptions() if on else None
    try:
        return DebugHeapOptions.from_text(text)
    except ConfigError as error:
        raise ConfigError(
            f"{VARIABLE} = {text!r}: {error}; or 1 to switch the debug heap on, 0 for off"
        ) from None


Stack: TypeAlias = traceback.StackSummary


@dataclass(frozen=True)
class Site:
    """Thread, stream and stack of an allocation or a free.

    Attributes
    ----------
    thread : int
        The value of ``threading.get_ident``.
    stream : int
        Native handle of the stream of the allocation or free; 0 for a call without one.
    stack : traceback.StackSummary or None
        Python's calls, the innermost last; None if the thread did not hold the interpreter lock,
        or stacks are not recorded.
    native : tuple of str
        Without a Python stack: the calling functions, the innermost first, as library and symbol.
    """

    thread: int
    stream: int
    stack: Stack | None
    native: tuple[str, ...] = ()

    @property
    def where(self) -> str:
        """The innermost place outside gpumem, as ``file:line``, or as library and symbol."""
        if self.stack:
            inside = os.path.dirname(__file__) + os.sep
            outside = [frame for frame in self.stack if not frame.filename.startswith(inside)]
            frame = outside[-1] if outside else self.stack[-1]
            return f"{frame.filename}:{frame.lineno}"
        return next((name for name in self.native if "gpumem/_" not in name), "an unknown place")

    def __str__(self) -> str:
        head = f"on thread {self.thread:#x}"
        if self.stream:
            head += f", stream {self.stream:#x}"
        if self.stack:
            return f"{head}:\n{''.join(self.stack.format())}"
        return "\n".join([f"{head}:", *(f"  {name}" for name in self.native)]) + "\n"


@dataclass(frozen=True)
class OutstandingBlock:
    """A block in use, from `Arena.outstanding` or `gpumem.adaptors.TrackAdaptor.outstanding`.

    Attributes
    ----------
    ptr, nbytes : int
        Its address, and the requested bytes.
    number : int
        Number of the allocation in its resource, from 1.
    allocated : Site or None
        Where it was allocated; None if the resource does not record that.
    tag : str
        The tag it was allocated under, see `Arena.tag`.
    asleep : bool
        Its memory is released until `Arena.wake`.

    Examples
    --------
    >>> import gpumem
    >>> arena = gpumem.Arena("host", debug_heap=True)
    >>> buffer = arena.allocate(100)
    >>> (block,) = arena.outstanding()
    >>> block.ptr == buffer.ptr, block.number, block.stack[-1].name
    (True, 1, '<module>')
    """

    ptr: int
    nbytes: int
    number: int
    allocated: Site | None = None
    tag: str = "default"
    asleep: bool = False

    @property
    def stack(self) -> Stack | None:
        """Python's calls that allocated it, the innermost last; None if they were not recorded."""
        return None if self.allocated is None else self.allocated.stack


@dataclass(frozen=True)
class HeapReport:
    """One error that a debug heap found.

    Attributes
    ----------
    kind : str
        "overrun", "underrun": a byte after or before a block was written. "use_after_free": a byte
        of a freed block. "wrong_stream": the same of a block that was freed on a stream that was
        neither its own nor recorded, so that nothing waited for the work of its own stream.
        "double_free", "invalid_free": a free of a free block, of an address that is not a block's.
        "stream_gone": a stream that a freed block waits for was destroyed. "leak": in use at the
        end of the process.
    arena, memory : str
        Names of the arena and its memory.
    ptr, nbytes : int
        The block's address, and the requested bytes.
    number : int
        Number of its allocation in the arena, from 1.
    allocated, freed : Site
        Where it was allocated and freed; `freed` is None for a live block.
    again : Site or None
        For an invalid free: where it happened.
    address : int
        For an invalid free: the freed address; for a destroyed stream: its handle; else the address
        of the first wrong byte.
    offset : int
        Offset of the first wrong byte from the block's first; may be negative.
    expected : int or None
        The value of a correct byte; None if no byte was compared.
    found : bytes
        The wrong bytes, at most 16 from the first one on.
    wrong_bytes : int
        Number of wrong bytes in the guard or block.

    Examples
    --------
    >>> import ctypes, gpumem
    >>> reports = []
    >>> arena = gpumem.Arena("host", debug_heap={"on_error": reports.append})
    >>> buffer = arena.allocate(100)
    >>> _ = ctypes.memset(buffer.ptr - 1, 7, 1)
    >>> _ = arena.check_heap()
    >>> [(report.kind, report.offset, report.found[:1].hex()) for report in reports]
    [('underrun', -1, '07')]
    """

    kind: str
    arena: str
    memory: str
    ptr: int
    nbytes: int
    number: int
    allocated: Site
    freed: Site | None = None
    again: Site | None = None
    address: int = 0
    offset: int = 0
    expected: int | None = None
    found: bytes = b""
    wrong_bytes: int = 0
    _texts: ClassVar[Mapping[str, str]] = {
        "overrun": "memory after it was written",
        "underrun": "memory before it was written",
        "use_after_free": "it was written after it was freed",
        "wrong_stream": "it was written after it was freed on a stream that was neither its own "
        "nor recorded, and that nothing ordered after the writer",
        "double_free": "it was freed again",
        "leak": "it is in use at the end",
    }

    @property
    def message(self) -> str:
        """The error in one line."""
        block = f"block {self.number} of arena {self.arena!r} on {self.memory} ({self.nbytes} "
        block += f"bytes at {self.ptr:#x}, allocated at {self.allocated.where}"
        block += f", freed at {self.freed.where})" if self.freed else ")"
        if self.kind == "invalid_free":
            what = f"{self.address:#x} was freed, where no block begins that this call may free"
        elif self.kind == "stream_gone":
            what = f"stream {self.address:#x}, which it has to wait for, was destroyed before"
        else:
            what = self._texts[self.kind]
        if self.expected is not None:
            what += f": {self.wrong_bytes} bytes are wrong, the first at offset {self.offset}"
            what += f", which holds {self.found.hex(' ')} instead of {self.expected:02x}"
        return f"{self.kind}: {block}: {what}"

    def __str__(self) -> str:
        text = f"{self.message}\nallocated {self.allocated}"
        if self.freed is not None:
            text += f"freed {self.freed}"
        if self.again is not None:
            text += f"{'freed again' if self.kind == 'double_free' else 'then'} {self.again}"
        return text
