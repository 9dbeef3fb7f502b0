"""Names of the Python objects that hold blocks: reference cycles, and ways from modules and frames."""

from __future__ import annotations

import gc
import sys
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator
from types import FrameType, FunctionType, ModuleType
from typing import Any, TypeAlias

from gpumem._support.sizes import format_size

BLOCKS: dict[type, Callable[[Any], tuple[int, int]]] = {}
"""Types of objects that hold a block -> a function to its address and bytes; address 0: none."""

MAX_GARBAGE = 500_000  # objects; in more than these, cycles are not searched

Referrers: TypeAlias = dict[int, list[object]]
"""Objects by the id of an object that they refer to."""


def named_cycles(garbage: list[object]) -> tuple[tuple[str, int], ...]:
    """Return the cycles that alone hold blocks, with the bytes of these, the largest first.

    Parameters
    ----------
    garbage : list of object
        All objects that the next collection will find unreachable.
    """
    if len(garbage) > MAX_GARBAGE:
        return ()
    referrers, holders = _graph(garbage)
    tracked = {id(each) for each in garbage}
    names: dict[int, str] = {}
    blocks: dict[int, tuple[str, int]] = {}
    for holder in holders:
        # The collector does not track buffers: their references tell whether others hold them.
        # Three are of `holders`, of the loop and of the call.
        if id(holder) in tracked or sys.getrefcount(holder) == len(referrers[id(holder)]) + 3:
            address, nbytes = _block_of(holder)
            if address and address not in blocks:
                blocks[address] = _cycle_above(holder, referrers, names), nbytes
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
    referrers, holders = _graph(gc.get_objects())
    for frame in _frames():
        for value in frame.f_locals.values():
            referrers[id(value)].append(frame)
            if _is(value, *BLOCKS) and all(value is not holder for holder in holders):
                holders.append(value)
    found = []
    for holder in holders:
        where, nbytes = _block_of(holder)
        if where == address and where:
            text = f"{type(holder).__name__} ({format_size(nbytes)})"
            found += [_way_to(each, holder, text, referrers) for each in _above(holder, referrers)]
    return tuple(dict.fromkeys(found))


# ---- the graph -----------------------------------------------------------------------------------


def _graph(objects: list[object]) -> tuple[Referrers, list[object]]:
    """Return the references between objects, and the holders of blocks among those referred to."""
    referrers: Referrers = defaultdict(list)
    holders: list[object] = []
    untracked: list[object] = []
    for group in (objects, untracked):  # the second grows
        for each in group:
            for other in gc.get_referents(each):
                known = referrers[id(other)]
                if not known and _is(other, *BLOCKS):
                    holders.append(other)
                elif not known and type(other) in (dict, tuple) and not gc.is_tracked(other):
                    untracked.append(other)  # it may hold buffers
                known.append(each)
    return referrers, holders


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
    steps = [_step(one, other) for one, other in zip(way, way[1:], strict=False)]
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
    """Return the shortest way from an object that is an end down to `start`; None: there is none."""
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
