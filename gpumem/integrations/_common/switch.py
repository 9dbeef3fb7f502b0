"""The behaviour of enable, disable, using and status, which is the same for every framework.

A `Framework` implements how one library is switched. A `Switch` decides when: it holds the settings
in force, the order in which they end, and the thread that began each.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, Self

from gpumem._buffer.resource import MemoryResource
from gpumem._support.closing import Uncopied
from gpumem._support.forks import ForkLock
from gpumem.errors import IntegrationError


class Setting(NamedTuple):
    """A requested setting. Two equal ones need no switch between them."""

    resources: Any
    """Which resource serves which device; a `gpumem.integrations._common.resources.Resources`."""
    options: tuple[tuple[str, Any], ...] = ()
    """All other options, by name."""

    def option(self, name: str) -> Any:
        """Return the value of an option."""
        return dict(self.options)[name]


@dataclass(frozen=True)
class Status:
    """Which memory a framework uses now.

    Attributes
    ----------
    enabled : bool
        Whether it uses gpumem's, by `enable` or inside a `using`.
    resources : Mapping of int to MemoryResource
        The resources that were given, by number of the device. Other devices use their default
        resource.

    Examples
    --------
    >>> from gpumem.integrations import cupy
    >>> cupy.status()       # CuPy uses its own memory
    Status(enabled=False, resources={})
    """

    enabled: bool
    resources: Mapping[int, MemoryResource]


class Framework(ABC):
    """How one library is switched to gpumem's memory and back.

    Its methods are called by one thread at a time, under the lock of the framework's `Switch`.
    """

    name: str
    """Name used in messages, such as "CuPy"."""

    @abstractmethod
    def attach(self, setting: Setting) -> Any:
        """Make the library use a setting; if that is impossible, raise and change nothing.

        Returns the argument with which `restore` restores the present state.
        """

    @abstractmethod
    def restore(self, before: Any) -> None:
        """Restore the library's state; if that is impossible, raise and change nothing."""

    def replace(self, before: Any, setting: Setting) -> Any:
        """Replace the setting of the `attach` that returned `before` by another one.

        Returns the argument with which `restore` restores the state before both. If that is
        impossible, raises and changes nothing.
        """
        self.attach(setting)
        return before

    def resources_of(self, setting: Setting) -> Mapping[int, MemoryResource]:
        """Return the resources of a setting, by number of the device."""
        return dict(setting.resources.given)

    def why_not_restorable(self) -> str | None:
        """Return why `restore` is impossible now; None if it is possible."""
        return None


class _Frame:
    """A setting that is in force or hidden by later ones, and the state before it.

    It is made before the framework is switched: an allocation that fails afterwards would leave the
    framework with a setting of which nothing is known.
    """

    def __init__(self, setting: Setting) -> None:
        self.setting = setting
        self.before: Any = None
        self.switched = False  # False: the setting was in force already


class Switch:
    """The settings of one framework: at most one enabled, and any number of `using` above it."""

    def __init__(self, framework: Framework) -> None:
        self.framework = framework
        self._lock = ForkLock()
        self._enabled: _Frame | None = None
        self._used: list[tuple[Using, _Frame]] = []

    def enable(self, setting: Setting) -> None:
        """Put a setting in force until `disable`; replace one that is enabled."""
        with self._lock:
            if self._enabled is not None and self._enabled.setting == setting and not self._used:
                return
            self._require_unused("enabled")
            frame = _Frame(setting)
            if self._enabled is None:
                frame.before = self.framework.attach(setting)
            else:
                self._require_restorable("replaced")
                frame.before = self.framework.replace(self._enabled.before, setting)
            frame.switched = True
            self._enabled = frame

    def disable(self) -> None:
        """Restore the framework's state before the first `enable`."""
        with self._lock:
            self._require_unused("disabled")
            if self._enabled is None:
                return
            self._require_restorable("disabled")
            self.framework.restore(self._enabled.before)
            self._enabled = None

    def current(self) -> Setting | None:
        """Return the setting in force; None if the framework uses its own memory."""
        with self._lock:
            frame = self._used[-1][1] if self._used else self._enabled
            return None if frame is None else frame.setting

    def status(self) -> Status:
        """Return which memory the framework uses now."""
        setting = self.current()
        if setting is None:
            return Status(False, {})
        return Status(True, self.framework.resources_of(setting))

    # ---- for `Using` -------------------------------------------------------------------------

    def enter(self, use: Using, setting: Setting) -> None:
        """Put a setting in force until `leave` of the same `Using`."""
        with self._lock:
            frame = _Frame(setting)
            entry = (use, frame)
            if (current := self.current()) != setting:
                if current is not None:
                    self._require_restorable("replaced")
                frame.before = self.framework.attach(setting)
                frame.switched = True
            try:
                self._used.append(entry)
            except MemoryError:
                if frame.switched:
                    self.framework.restore(frame.before)
                raise

    def leave(self, use: Using, thread: threading.Thread) -> None:
        """Restore the setting before `enter`."""
        with self._lock:
            self._require_innermost(use)
            self._require_thread(thread)
            frame = self._used[-1][1]
            if frame.switched:
                self._keep_if_not_restorable(frame)
            entry = self._used.pop()
            try:
                if frame.switched:
                    self.framework.restore(frame.before)
            except BaseException:
                self._used.append(entry)
                raise

    def _keep_if_not_restorable(self, frame: _Frame) -> None:
        # From then on it counts as enabled, and cannot be left a second time.
        reason = self.framework.why_not_restorable()
        if reason is None:
            return
        self._used.pop()
        self._enabled = frame
        raise IntegrationError(
            f"{self.framework.name} keeps gpumem's memory after this `using`: {reason}"
        )

    # ---- checks --------------------------------------------------------------------------------

    def _require_unused(self, verb: str) -> None:
        if self._used:
            raise IntegrationError(
                f"gpumem cannot be {verb} for {self.framework.name} inside a `using`: "
                f"{len(self._used)} of them must be left first"
            )

    def _require_restorable(self, verb: str) -> None:
        reason = self.framework.why_not_restorable()
        if reason is not None:
            raise IntegrationError(f"gpumem cannot be {verb} for {self.framework.name}: {reason}")

    def _require_innermost(self, use: Using) -> None:
        if self._used and self._used[-1][0] is use:
            return
        if all(each is not use for each, _ in self._used):
            raise IntegrationError(
                f"this `using` of {self.framework.name} is not open, so it cannot be left"
            )
        raise IntegrationError(
            f"this `using` of {self.framework.name} cannot be left before those that were "
            "entered after it; leave them, then call its leave()"
        )

    def _require_thread(self, thread: threading.Thread) -> None:
        # A thread that has ended cannot leave it; any other thread may then.
        if thread is not threading.current_thread() and thread.is_alive():
            raise IntegrationError(
                f"this `using` of {self.framework.name} was entered by thread {thread.name!r}, "
                "which alone can leave it while it runs"
            )


class Using(Uncopied):
    """A framework on gpumem's memory inside a ``with`` block; made by a module's ``using``.

    It applies to the whole process. Blocks must end on the thread that began them, the innermost
    first; otherwise the end of a block raises `gpumem.errors.IntegrationError` and changes nothing,
    and `leave` can end it later.
    """

    def __init__(self, switch: Switch, setting: Setting) -> None:
        self._switch = switch
        self._setting = setting
        self._thread: threading.Thread | None = None

    def __enter__(self) -> Self:
        if self._thread is not None:
            raise IntegrationError(
                f"a `using` of {self._switch.framework.name} is entered once; make another"
            )
        thread = threading.current_thread()
        self._switch.enter(self, self._setting)
        self._thread = thread
        return self

    def leave(self) -> None:
        """Restore the state before the ``with`` block, as its end does.

        Raises
        ------
        IntegrationError
            A block that was entered later is still open, another thread entered this one, this one
            is not open, or the framework cannot switch back and stays enabled.
        """
        if self._thread is None:
            raise IntegrationError(f"this `using` of {self._switch.framework.name} was not entered")
        self._switch.leave(self, self._thread)

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        try:
            try:
                self.leave()
            except MemoryError:  # the next request for a few bytes may succeed
                self.leave()
        except IntegrationError as refusal:
            # The exception from inside the block goes on; this one becomes a note of it.
            if error is None:
                raise
            error.add_note(str(refusal))
