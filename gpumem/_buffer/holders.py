"""Python objects that hold blocks: names of cycles, and of ways from modules and frames."""

from __future__ import annotations

import gc
import itertools
import sys
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator
from types import FrameType, FunctionType, ModuleType
from typing import Any, TypeAlias

from gpumem._support.sizes import format_size

BLOCKS: dict[type, Callable[[Any], tuple[int, int]]] = {}
"""Types of objects that hold a block -> a function to its address and bytes; address 0: none."""

_HAS_REFERENCES = 1 << 14  # Py_TPFLAGS_HAVE_GC
MAX_GARBAGE = 500_000  # objects; in more than these, cycles are not searched

Referrers: TypeAlias = dict[int, list[object]]
"""Objects by the id of an object that they refer to."""


def collect_and_name_cycles() -> tuple[tuple[str, int], ...]:
    """Collect garbage; return the cycles that alone held blocks, with the bytes of these.

    The largest is the first. The collector sets the objects of all cycles aside, as for a program
    that looks for leaks; once these are named, a second collection frees them.
    """
    if gc.get_debug() & gc.DEBUG_SAVEALL:  # of the program, or of another thread that is here
        gc.collect()
        return ()
    first = len(gc.garbage)
    try:
        gc.set_debug(gc.get_debug() | gc.DEBUG_SAVEALL)
        try:
            gc.collect()
        finally:
            gc.set_debug(gc.get_debug() & ~gc.DEBUG_SAVEALL)
        return _named_cycles(gc.garbage[first:])
    finally:
        del gc.garbage[first:]
        gc.collect()


def _named_cycles(garbage: list[object]) -> tuple[tuple[str, int], ...]:
    if len(garbage) > MAX_GARBAGE:
        return ()
    referrers = _graph(garbage, lambda each: not gc.is_tracked(each))
    names: dict[int, str] = {}
    blocks: dict[int, tuple[str, int]] = {}
    for each in garbage:
        address, nbytes = _block_of(each)
        # The collector does not track buffers: their references tell whether others hold them.
        # Three are of `garbage`, of the loop and of the call.
        alone = gc.is_tracked(each) or sys.getrefcount(each) == len(referrers[id(each)]) + 3
        if address and alone and address not in blocks:
            blocks[address] = _cycle_above(each, referrers, names), nbytes
    sums: Counter[str] = Counter()
    for name, nbytes in blocks.values():
        sums[name] += nbytes
    return tuple(sums.most_common())


def held_by(block: object) -> tuple[str, ...]:
    """Return how Python objects hold a block: a way to it for each object that refers to it.

    A way begins at a module, at the frame of a running function, or at an object that only C code
    refers to. A cycle on the way is shown after it. Python's objects are all read for it, about a
    second for a million of them.

    Parameters
    ----------
    block : Buffer, Tensor, torch.Tensor or int
        An object over the block, or the address of its first byte, such as
        `gpumem.debugging.OutstandingBlock.ptr` and `gpumem.stats.BlockInfo.address`.

    Raises
    ------
    TypeError
        `block` is neither.

    Examples
    --------
    >>> import gpumem
    >>> from gpumem.observe import held_by
    >>> class Trainer:
    ...     pass
    >>> trainer = Trainer()
    >>> trainer.this, trainer.weights = trainer, gpumem.Arena("host").allocate(4096)
    >>> (way,) = held_by(trainer.weights.ptr)       # from the module's variable
    >>> way.partition(" -> ")[2]
    'Trainer.weights -> Buffer (4.0 KiB); in the cycle Trainer.this -> Trainer'
    """
    address = block if isinstance(block, int) else _block_of(block)[0]
    if not isinstance(block, (int, *BLOCKS)):
        names = ", ".join(kind.__name__ for kind in BLOCKS)
        raise TypeError(f"invalid block = {block!r}: expected one of {names}, or an address")
    # Made first, so that no list of this function is among them, which would be a cycle.
    objects = gc.get_objects()
    # The collector does not list frozen objects: modules lead to them.
    objects += sys.modules.values()
    values = [(frame, value) for frame in _frames() for value in frame.f_locals.values()]
    objects += [value for _, value in values]
    objects = list({id(each): each for each in objects}.values())
    referrers = _graph(objects, lambda each: True)
    for frame, value in values:
        referrers[id(value)].append(frame)
    found = []
    for holder in objects:
        where, nbytes = _block_of(holder)
        if where == address and where:
            text = f"{type(holder).__name__} ({format_size(nbytes)})"
            # No comprehension: its cells would be among `objects`, and make a cycle with them.
            for each in _above(holder, referrers):
                found.append(_way_to(each, holder, text, referrers))
    return tuple(dict.fromkeys(found))


# ---- the graph -----------------------------------------------------------------------------------


def _graph(objects: list[object], follows: Callable[[object], bool]) -> Referrers:
    """Return the references between objects, and append others that they lead to."""
    referrers: Referrers = defaultdict(list)
    known = {id(each) for each in objects}
    for each in objects:  # it grows
        for other in gc.get_referents(each):
            referrers[id(other)].append(each)
            # Strings and numbers, which hold nothing, are passed over.
            holds = type(other).__flags__ & _HAS_REFERENCES or _is(other, *BLOCKS)
            if holds and id(other) not in known and follows(other):
                known.add(id(other))
                objects.append(other)
    return referrers


def _is(each: object, *kinds: type) -> bool:
    # As `isinstance`, which reads `__class__`: that of a proxy runs its owner's code.
    return issubclass(type(each), kinds)


def _block_of(holder: object) -> tuple[int, int]:
    for kind, block in BLOCKS.items():
        if _is(holder, kind):
            return block(holder)
    return 0, 0


def _frames() -> Iterator[FrameType]:
    """Yield the frames of all threads, without those of this module."""
    for innermost in sys._current_frames().values():
        frame: FrameType | None = innermost
        while frame is not None:
            if frame.f_code.co_filename != __file__:
                yield frame
            frame = frame.f_back
    del innermost  # it may be this generator's own, which would be a cycle


# ---- ways ----------------------------------------------------------------------------------------


def _cycle_above(holder: object, referrers: Referrers, names: dict[int, str]) -> str:
    """Name the cycle that one comes to on the way up from a holder in garbage.

    Each object of garbage has a referrer there. `names` has those of objects that were passed.
    """
    passed = [holder]
    at = {id(holder)}
    while id(passed[-1]) not in names:
        above = next(_above(passed[-1], referrers), None)
        if above is None or id(above) in at:
            names[id(passed[-1])] = _cycle_of(passed[-1], referrers)
            break
        passed.append(above)
        at.add(id(above))
    name = names[id(passed[-1])]
    names.update((id(each), name) for each in passed)
    return name


def _cycle_of(member: object, referrers: Referrers) -> str:
    """Name the shortest cycle through an object; empty if there is none."""
    way = _way_up(member, referrers, lambda each: each is member)
    if way is None:
        return ""
    steps = [_step(one, other) for one, other in itertools.pairwise(way)]
    # One name for cycles of the same shape: it begins with the first of the user's own objects.
    starts = range(len(steps))
    start = min(starts, key=lambda n: (type(way[n]).__module__ == "builtins", steps[n:], n))
    return " -> ".join([*steps[start:], *steps[:start], type(way[start]).__name__])


def _way_to(referrer: object, holder: object, text: str, referrers: Referrers) -> str:
    """Name the shortest way to a holder through a referrer, and the cycle that this is in."""

    def is_root(each: object) -> bool:
        return _is(each, ModuleType, FrameType) or not referrers.get(id(each))

    way = [referrer] if is_root(referrer) else _way_up(referrer, referrers, is_root)
    cycle = _cycle_of(referrer, referrers)
    if way is None:
        return f"in the cycle {cycle}, which nothing else refers to: {text}"
    steps = [_step(one, other) for one, other in zip(way, [*way[1:], holder], strict=True)]
    return " -> ".join([*steps, text]) + (f"; in the cycle {cycle}" if cycle else "")


def _way_up(
    start: object, referrers: Referrers, is_end: Callable[[object], bool]
) -> list[object] | None:
    """Return the shortest way from an end down to `start`; None: there is none."""
    below: dict[int, object] = {}
    queue = [start]
    for each in queue:  # it grows
        for above in _above(each, referrers):
            if is_end(above):
                way = [above, each]
                while way[-1] is not start:
                    way.append(below[id(way[-1])])
                return way
            if id(above) not in below:
                below[id(above)] = each
                queue.append(above)
    return None


def _above(each: object, referrers: Referrers) -> Iterator[object]:
    """Yield the referrers of an object; for the dict of attributes its owner."""
    for above in referrers.get(id(each), ()):
        owners = referrers.get(id(above), ()) if type(above) is dict else ()
        yield next((owner for owner in owners if _attributes(owner) is above), above)


def _attributes(owner: object) -> dict[str, object] | None:
    try:
        return object.__getattribute__(owner, "__dict__")  # type: ignore[no-any-return]
    except AttributeError:
        return None


def _step(holder: object, held: object) -> str:
    """Name an object and the place in it that refers to another one, where that is known."""
    name = type(holder).__name__
    at: Any = holder
    if _is(holder, ModuleType, FunctionType):
        name += f" {at.__name__}"
    if _is(holder, FrameType):
        return f"{at.f_code.co_name}()" + _key(at.f_locals.items(), held, ": {}")
    if type(holder) in (list, tuple):
        return name + _key(enumerate(at), held, "[{}]")
    if type(holder) is dict:
        return name + _key(at.items(), held, "[{!r}]")
    return name + _key((_attributes(holder) or {}).items(), held, ".{}")


def _key(items: Iterable[tuple[object, object]], held: object, form: str) -> str:
    # Other keys than these may run code to be shown.
    keys = (key for key, value in list(items) if value is held and type(key) in (str, int))
    return next((form.format(key) for key in keys), "")
