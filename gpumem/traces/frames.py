"""Names of frames, of the program's lines in a stack, and of owners."""

from __future__ import annotations

import re

from gpumem.traces.trace import Frames

_PYTHON = re.compile(r"\.py$|^<(stdin|string|ipython)")
_LIBRARIES = re.compile(r"/(torch|(site|dist)-packages|gpumem|python3[.\d]*)/")
_DISPATCH = re.compile(
    r"/(gpumem/prediction/child/_values|torch/(_ops|_compile|_dynamo/eval_frame))\.py$"
)
# Native frames of PyTorch's operators and of autograd's nodes: a thread of autograd has no others.
_OPERATOR = re.compile(r"(?:at::_ops|torch::autograd::generated)::(\w+)::(?:call|apply)\b")


def own_frames(stack: Frames) -> Frames:
    """Return the lines of Python outside of libraries, else all lines, operators or frames."""
    lines = tuple(frame for frame in stack if frame[1] and _PYTHON.search(frame[0]))
    own = tuple(line for line in lines if not _LIBRARIES.search(line[0]))
    # A thread of autograd has no lines but those by which a prediction looks at each operator.
    if lines and all(_DISPATCH.search(line[0]) for line in lines):
        return (("", 0, "torch"),)
    names = (_OPERATOR.match(name) for _, line, name in stack if not line)
    return own or lines or tuple(("", 0, name[1]) for name in names if name) or stack


def line_of(frame: tuple[str, int, str]) -> str:
    """Name a frame."""
    file, line, name = frame
    return f"{name} ({file}:{line})" if line else f"{name} ({file})" if file else name


def owner_named(tag: object, stack: Frames, *others: object) -> str:
    """Name the owner of an allocation: its tag, else the innermost line or operator, else others.

    Of the others the first one counts that is not empty.
    """
    lines = [line_of(frame) for frame in own_frames(stack) if frame[1] or not frame[0]]
    return next((str(name) for name in (tag, *lines, *others) if name), "")
