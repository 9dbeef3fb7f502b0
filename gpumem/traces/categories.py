"""Purposes of blocks: as the program recorded them, else by their lives and its phases.

A block that is allocated before a backward pass and freed by it was saved for it, also if a refused
request interrupts the pass. One that a backward pass allocates and leaves is a gradient, one that
an optimizer leaves is its state, one that a forward pass leaves is its output, or an activation if
a request is refused in the pass. A temporary one ends where it began.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from gpumem.traces.trace import Frames, Phase

CATEGORIES = (
    "inputs",
    "gradients",
    "optimizer state",
    "parameters",
    "activations",
    "outputs",
    "temporaries",
    "workspaces",
    "communication",
    "other",
)
RANKS = {name: rank for rank, name in enumerate(CATEGORIES[:4])}
"""Those that a recording tells; of several about one block the last of these counts."""
INPUTS, GRADIENTS, STATE, PARAMETERS, ACTIVATIONS = range(5)
OUTPUTS, TEMPORARIES, WORKSPACES, SENT, OTHER = range(5, 10)

KINDS = tuple(
    re.compile(pattern, re.IGNORECASE)
    for pattern in (r"\bforward\b", r"\bbackward\b", r"\boptimizer\b(?!.*zero.grad)")
)
# PyTorch allocates one for each handle of cuBLAS, and keeps it. In PyTorch 2.11 linear layers that
# add a bias have another one, of cuBLASLt.
_CUBLAS_NBYTES = (8_519_680, 33_554_432)
_CUBLASLT_NBYTES = 1 << 20
# Lines of PyTorch and of Transformers that allocate for one purpose.
_SENDERS = re.compile(r"/torch/(distributed|nn/parallel)/")
_MODULES = re.compile(
    r"/torch/nn/modules/.*:(__init__|_apply)$|/(transformers|accelerate)/.*:.*load"
)
_WORKSPACES = re.compile("^at::(cuda|native)::.*Workspace")
_STATES = re.compile(r"/torch/optim/.*:_init_group$")

MODULE_JOIN = " / "
_Rows = NDArray[np.int64]
_NEVER = 1 << 62


def has_passes(phases: Sequence[Phase]) -> bool:
    """Return whether phases are passes or steps of a training, which tell purposes of blocks."""
    return any(kind.search(name) for kind in KINDS for name in {each.name for each in phases})


class _Spans:
    """The phases of one kind that lie in no other one of it, and more spans of it."""

    def __init__(
        self, phases: Sequence[Phase], kind: re.Pattern[str], more: Iterable[tuple[int, int]] = ()
    ) -> None:
        found = [(each.begin, each.end) for each in phases if kind.search(each.name)]
        spans: list[tuple[int, int]] = []
        for begin, end in sorted([*found, *more], key=lambda span: (span[0], -span[1])):
            if begin < end and (not spans or end > spans[-1][1]):
                spans.append((begin, end))
        self.begin, self.end = np.array([*spans, (_NEVER, _NEVER)], np.int64).T

    def following(self, event: _Rows) -> _Rows:
        """Return the number of the first span that begins after each event."""
        return np.searchsorted(self.begin, event, side="right")

    def around(self, event: _Rows) -> _Rows:
        """Return the number of the span that each event lies in; -1: none."""
        number = self.following(event) - 1
        return np.where((number >= 0) & (event < self.end[number]), number, -1)


def _interrupted(phases: Sequence[Phase], refused: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Yield backward passes that refused requests ended, until the next forward pass.

    The error frees what was saved for them after their end. A refused request between a forward
    pass and its backward one prevents the latter, if the program has others.
    """
    forward = _Spans(phases, KINDS[0])
    backward = [each for each in phases if KINDS[1].search(each.name)]
    for at in refused:
        begun = int(forward.following(np.array([at]))[0])
        stop = int(forward.begin[begun])
        inside = [each.begin for each in backward if each.begin <= at <= each.end]
        last = int(forward.begin[begun - 1]) if begun else _NEVER
        if inside:
            yield inside[0], stop
        elif backward and last <= at and not any(last <= each.begin < at for each in backward):
            yield at, stop


def steps_of(phases: Sequence[Phase]) -> list[int]:
    """Return the numbers of events before each step of a training.

    The first begins with the first forward pass, the others where an optimizer's step has ended, if
    a forward pass follows.
    """
    forward, optimizer = (_Spans(phases, kind) for kind in (KINDS[0], KINDS[2]))
    ends = optimizer.end[:-1]
    follows = forward.begin[np.searchsorted(forward.begin, ends)] < _NEVER
    return [int(forward.begin[0]), *ends[follows].tolist()] if follows.any() else []


def categories_of(
    lives: tuple[_Rows, _Rows],
    size: _Rows,
    phases: Sequence[Phase],
    told: NDArray[np.int8],
    likely: NDArray[np.int8],
    events: int,
    first: int = 0,
    refused: Sequence[int] = (),
) -> NDArray[np.int32]:
    """Find the category of each allocation, as an index of `CATEGORIES`.

    Parameters
    ----------
    lives : (begin, end)
        As of `Trace.lives`.
    size : ndarray of int64
    phases : sequence of Phase
    told : ndarray of int8
        The category that the recording has; -1: none.
    likely : ndarray of int8
        The category that a block has by its stack if it stays: see `likely_category`.
    events : int
    first : int
        Number of the events that stand for blocks from before the log.
    refused : sequence of int
        Numbers of the events before each refused request.
    """
    begin, end = lives
    stays = end == events
    if not has_passes(phases):
        return np.where(told >= 0, told, OTHER).astype(np.int32)
    forward, optimizer = (_Spans(phases, kind) for kind in KINDS[::2])
    backward = _Spans(phases, KINDS[1], _interrupted(phases, refused))
    in_forward, in_backward, in_step = (
        each.around(begin) for each in (forward, backward, optimizer)
    )
    ends_in_forward = in_forward == forward.around(end)
    # Passes in which a request was refused, perhaps the first ones.
    failing = forward.around(np.array(refused, np.int64) - 1)
    # Of those that no pass or step allocates but a forward one.
    next_backward = backward.following(begin)
    starts, stops = backward.begin[next_backward], backward.end[next_backward]
    trains = starts < _NEVER
    next_forward = forward.begin[forward.following(begin)]
    prepares = (in_forward < 0) & (next_forward < starts)
    is_brief = end < backward.begin[np.minimum(next_backward + 1, backward.begin.size - 1)]
    steps = (in_step >= 0) & (in_forward < 0)  # an optimizer may compute the loss again
    rules = (
        (told > INPUTS, told),
        ((told == INPUTS) & (in_forward < 0) & (in_backward < 0), INPUTS),
        ((likely == SENT) | (likely == WORKSPACES), likely),
        ((likely == PARAMETERS) & (end > next_forward), PARAMETERS),
        ((likely == STATE) & (in_step != optimizer.around(end)), STATE),
        ((begin < first) & ((end < starts) | (end >= stops)), OTHER),
        (_is_workspace(stays, size, in_forward, in_backward), WORKSPACES),
        # Allocated in a backward pass; in a forward pass inside it, a part is computed again.
        ((in_backward >= 0) & (in_backward != backward.around(end)), GRADIENTS),
        ((in_backward >= 0) & (in_forward >= 0) & ~ends_in_forward, ACTIVATIONS),
        (in_backward >= 0, TEMPORARIES),
        (steps & (in_step != optimizer.around(end)), STATE),
        (steps, TEMPORARIES),
        # Before a backward pass.
        ((in_forward < 0) & ~stays & (end < np.minimum(starts, next_forward)), TEMPORARIES),
        ((in_forward >= 0) & ~stays & (end < starts) & (trains | ends_in_forward), TEMPORARIES),
        ((end >= starts) & (end < stops), ACTIVATIONS),
        (prepares & is_brief & (~stays | (next_backward > 0)), INPUTS),
        ((in_forward >= 0) & np.isin(in_forward, failing), ACTIVATIONS),
        ((in_forward >= 0) | (~prepares & trains), OUTPUTS),
    )
    found = np.full(begin.size, OTHER, np.int32)
    for applies, category in reversed(rules):
        found = np.where(applies, category, found).astype(np.int32)
    return found


def _is_workspace(
    stays: NDArray[np.bool_], size: _Rows, in_forward: _Rows, in_backward: _Rows
) -> NDArray[np.bool_]:
    """Mark the first block of cuBLAS' sizes that stays, of each pass."""
    found = np.zeros(stays.size, np.bool_)
    of_cublas = stays & np.isin(size, _CUBLAS_NBYTES)
    of_layers = stays & (size == _CUBLASLT_NBYTES) & (in_forward >= 0)
    again = in_backward >= 0
    passes = of_cublas & (in_forward >= 0), of_cublas & again, of_layers & ~again, of_layers & again
    for fits in passes:
        found[np.flatnonzero(fits)[:1]] = True
    return found


def likely_category(stack: Frames) -> int:
    """Return the category of blocks that stay which a stack allocates; -1: not known.

    PyTorch's lines for several processes allocate for communication where they are the innermost.
    """
    places = [f"{file}:{name}" for file, line, name in stack if line and file.endswith(".py")]
    if any(not line and _WORKSPACES.search(name) for _, line, name in stack):
        return WORKSPACES
    if places and _SENDERS.search(places[0]):
        return SENT
    if any(map(_STATES.search, places)):
        return STATE
    return PARAMETERS if any(map(_MODULES.search, places)) else -1


def modules_of(stack: Frames) -> str:
    """Name the modules in which a stack allocates, by their functions ``forward``; "": none.

    A function of that name inside another function wraps one of a module.
    """
    methods = (name for _, _, name in stack if name.endswith(".forward"))
    names = [module_named(name) for name in methods if not name.endswith("<locals>.forward")]
    return MODULE_JOIN.join(reversed(names))


def module_named(forward: str) -> str:
    """Name a module by the qualified name of its function ``forward``."""
    return forward.removesuffix(".forward").rpartition("<locals>.")[2]
