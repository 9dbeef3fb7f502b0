"""A worker's memory: its arena, budget, results and descriptors; made once in a process."""

from __future__ import annotations

import asyncio
import gc
import logging
import os
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, fields
from importlib import import_module
from typing import Any

from gpumem._arena.arena import Arena
from gpumem._budget import Budget
from gpumem._buffer.buffer import Buffer
from gpumem._buffer.resource import MemoryResource
from gpumem._defaults import set_default_resource
from gpumem._support.arguments import is_number
from gpumem._support.forks import ForkLock
from gpumem._support.releases import release_retired
from gpumem._support.sizes import whole_bytes
from gpumem.adaptors._adaptor import Adaptor, serve_from
from gpumem.device import MemoryInfo, default_device
from gpumem.errors import ConfigError, IntegrationError
from gpumem.integrations._common.descriptors import Answer, node, serve
from gpumem.integrations.dask._offers import Offers
from gpumem.integrations.dask._store import Store

ANNOUNCED = "gpumem"  # the key in a worker's handshake, and in its metrics
OFFER = "offer"  # of a descriptor, in requests to `descriptors.ask`
MAX_SECONDS = 10**6  # that an offer waits
MAX_BYTES = (1 << 63) - 1
LIBRARIES = ("cuda_core", "cupy", "numba", "rmm", "torch")  # their `enable` accepts an arena
INTERVAL = 1000  # ms between two scans for expired offers and idle memory
LAST_SCAN = 64  # of an idle worker: by then every transfer has ended


@dataclass(frozen=True)
class Settings:
    """The arguments of `plugin`, checked."""

    memory: str | None = None
    budget: str | float = 0.9
    share_from: int | str = "1MiB"
    expires: float = 30.0
    enable: tuple[str, ...] = ()
    node: str | None = None

    def __post_init__(self) -> None:
        if self.memory is not None:
            try:
                MemoryInfo.parse(self.memory)  # the worker may have it where this process does not
            except (TypeError, ValueError) as error:
                raise ConfigError(f"invalid memory = {self.memory!r}: {error}") from None
        if isinstance(self.budget, float):
            if not 0 < self.budget <= 1:
                raise ConfigError(
                    f"invalid budget = {self.budget}: expected bytes, or a fraction above 0 up to "
                    "1.0"
                )
        else:
            _require_bytes("budget", self.budget, 0)
        _require_bytes("share_from", self.share_from, 1)
        if not isinstance(self.node, str | None):
            raise ConfigError(f"invalid node = {self.node!r}: expected a text, or None")
        if not is_number(self.expires, 0, MAX_SECONDS) or self.expires == 0:
            raise ConfigError(
                f"invalid expires = {self.expires!r}: expected seconds above 0, up to {MAX_SECONDS}"
            )

    @classmethod
    def of(cls, given: Mapping[str, Any] | None) -> Settings:
        """Read them from Dask's configuration, where ``-`` and ``_`` are the same."""
        if not isinstance(given, Mapping | None):
            raise ConfigError(f"invalid gpumem = {given!r}: expected settings by name, or nothing")
        known = [each.name for each in fields(cls)]
        found: dict[str, Any] = {}
        for key, value in (given or {}).items():
            name = str(key).replace("-", "_")
            if name not in known:
                raise ConfigError(f"unknown setting gpumem.{key}: expected {', '.join(known)}")
            if name in found:
                raise ConfigError(f"gpumem.{name} is set twice, with - and with _ in its name")
            found[name] = value
        found["enable"] = libraries(found.get("enable", ()))
        return cls(**found)


def _require_bytes(name: str, value: Any, least: int) -> None:
    try:
        nbytes = whole_bytes(name, value)
    except TypeError as error:
        raise ConfigError(str(error)) from None
    if not least <= nbytes <= MAX_BYTES:
        raise ConfigError(f"invalid {name} = {value}: expected {least} to 2**63 - 1 bytes")


def libraries(given: Any) -> tuple[str, ...]:
    """Read names of LIBRARIES: several, or a text with commas between them."""
    names = given
    if isinstance(given, str):
        names = [name for each in given.split(",") if (name := each.strip())]
    if isinstance(names, Iterable):
        names = tuple(names)
        if all(name in LIBRARIES for name in names):
            return names
    raise ConfigError(f"invalid enable = {given!r}: expected some of {', '.join(LIBRARIES)}")


@dataclass(frozen=True)
class WorkerMemory:
    """A worker's memory at one moment; sizes in bytes.

    Attributes
    ----------
    pid : int
        The worker's process.
    memory : str
        Which memory the numbers are of.
    limit : int
        Of its budget.
    used, peak : int
        Charged to its budget now and at most.
    in_use : int
        Of the arena's live blocks.
    imported : int
        Of other workers' blocks that results here lie in, each whole and once; part of `used`.
    spilled : int
        Of tensors that are in host memory, or on disk, because the device was full.
    offered : int
        Of descriptors that wait for their receivers.
    offers, expired : int
        Descriptors that wait, and that were not collected in time.
    sent_descriptors : int
        Tensors that went to other workers without a copy.
    sent_bytes : int
        Of tensors that were sent or written to disk as bytes.
    """

    pid: int
    memory: str
    limit: int
    used: int
    peak: int
    in_use: int
    imported: int
    spilled: int
    offered: int
    offers: int
    expired: int
    sent_descriptors: int
    sent_bytes: int


class ShareableBlocks(Adaptor):
    """An arena with blocks that other processes can map, from a size on."""

    def __init__(self, arena: Arena, share_from: int) -> None:
        super().__init__((arena,))
        self._share_from = share_from

    def _serve(self, nbytes: int, stream: Any, options: dict[str, Any], persistent: bool) -> Buffer:
        if nbytes >= self._share_from and not persistent and "transport" not in options:
            options = {**options, "shareable": True}
        return serve_from(self.upstream, nbytes, stream, options, persistent)


class Worker:
    """gpumem's part of a Dask worker; at most one in a process at a time."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        memory = MemoryInfo.parse(default_device() if settings.memory is None else settings.memory)
        budget = settings.budget
        if isinstance(budget, float):
            budget = int(budget * memory.device.total_bytes)
        above = None if settings.node is None else Budget(None, node=settings.node)
        self.budget = Budget(budget, name="this Dask worker", parent=above)
        self.arena = Arena(memory, budget=self.budget, name=f"{memory} of a Dask worker")
        self.share_from = whole_bytes("share_from", settings.share_from)
        self.resource: MemoryResource = ShareableBlocks(self.arena, self.share_from)
        self.offers = Offers(settings.expires)
        self.announced = {"node": node(), "device": memory.device.uuid}
        self.sent_descriptors = 0
        self.sent_bytes = 0
        self.store: Store | None = None
        self.received = 0  # descriptors that were requested here
        self._outside: set[int] = set()  # ids of transfers' buffers since the last collection
        self._activity = (0, 0)  # allocations and `received` at the last scan
        self._idle_scans = 0  # since then
        self._log: Iterable[logging.LogRecord] = ()  # that Dask's worker keeps

    def memory_now(self) -> WorkerMemory:
        """Return the numbers of this moment."""
        return WorkerMemory(
            pid=os.getpid(),
            memory=str(self.arena.memory),
            limit=self.budget.limit or 0,
            used=self.budget.used,
            peak=self.budget.peak,
            in_use=self.arena.stats().in_use,
            imported=self.store.imported if self.store else 0,
            spilled=self.store.spilled if self.store else 0,
            offered=self.offers.nbytes,
            offers=len(self.offers),
            expired=self.offers.expired,
            sent_descriptors=self.sent_descriptors,
            sent_bytes=self.sent_bytes,
        )

    def answer(self, token: str) -> Answer:
        """Return a descriptor to the worker that requests it."""
        return {}, [self.offers.collect(token)]

    def spill(self, budget: Budget, nbytes: int) -> None:
        """Spill results; the budget's pressure callback."""
        if self.store is not None:
            self.store.spill(nbytes)

    async def scan(self) -> None:
        """Drop offers that have expired, and release idle memory; called periodically."""
        self.offers.expire()
        await asyncio.to_thread(self.release_idle)  # the driver waits for the device

    def release_idle(self) -> None:
        """Release memory that an idle worker does not need.

        It is idle if nothing was allocated and nothing arrived since the last time. Another worker
        on the same device may need the memory.
        """
        stats = self.arena.stats()
        activity = (stats.num_allocs, self.received)
        is_idle = activity == self._activity
        self._activity, self._idle_scans = activity, self._idle_scans + 1 if is_idle else 0
        if is_idle:
            self._collect_garbage()
        release_retired()
        if is_idle and stats.reserved > stats.in_use:
            self.arena.shrink()

    def follow(self, buffer: Buffer) -> None:
        """Note memory outside the arena that a transfer has made or mapped."""
        self._outside.add(id(buffer))

    def _collect_garbage(self) -> None:
        # A transfer that failed leaves tensors in the frames of its exception, when it ends, which
        # may be long after the worker's last allocation. To collect them stops the event loop for
        # tens of milliseconds: only if there is memory without a result, and at the scans 1, 2, 4,
        # 8, ... of an idle worker, which may be running a long task.
        if self._idle_scans & (self._idle_scans - 1):
            return
        places = (self.arena, self.resource)
        own, results = self.store.blocks(places) if self.store is not None else (0, set())
        stats = self.arena.stats()
        if stats.num_allocs - stats.num_frees > own or not self._outside <= results:
            drop_frames(self._log)
            gc.collect()
        if self._idle_scans >= LAST_SCAN:
            self._outside &= results

    # ---- of Dask's worker ------------------------------------------------------------------------

    def attach(self, worker: Any) -> None:
        """Take over a worker's results, and add to its handshakes and metrics."""
        from tornado.ioloop import PeriodicCallback

        self.store = Store(worker.data, self.resource, self.budget)
        self._log = worker.logs
        # Both read it: tasks through the one, the state machine through the other.
        worker.memory_manager.data = worker.state.data = self.store
        self.budget.on_pressure = self.spill
        args = worker.rpc.connection_args
        args["handshake_overrides"] = {
            **(args.get("handshake_overrides") or {}),
            ANNOUNCED: self.announced,
        }
        worker.metrics[ANNOUNCED] = lambda _: asdict(self.memory_now())
        scan = PeriodicCallback(self.scan, INTERVAL)
        worker.periodic_callbacks[ANNOUNCED] = scan
        scan.start()

    def detach(self, worker: Any) -> None:
        """Undo `attach`, except for results: they stay where they are, and none is spilled."""
        self.budget.on_pressure = None
        worker.rpc.connection_args.get("handshake_overrides", {}).pop(ANNOUNCED, None)
        worker.metrics.pop(ANNOUNCED, None)
        scan = worker.periodic_callbacks.pop(ANNOUNCED, None)
        if scan is not None:
            scan.stop()
        self.offers.close()


def drop_frames(log: Iterable[logging.LogRecord]) -> None:
    """Turn exceptions of a log into their text.

    Dask's worker logs a transfer that failed, and keeps the record; the exception in it has the
    frames, and they have the tensors that were to be sent.
    """
    for record in list(log):
        if record.exc_info:
            record.exc_text = record.exc_text or logging.Formatter().formatException(
                record.exc_info
            )
            record.exc_info = None


_lock = ForkLock()
_current: tuple[Any, Worker] | None = None  # Dask's worker, and gpumem's part of it


def current() -> Worker | None:
    """Return gpumem's part of this process's worker; None if there is none, or it is not set up."""
    return None if _current is None else _current[1]


def setup(worker: Any, settings: Settings) -> None:
    """Set a worker up. With the settings that it has already, nothing happens.

    Raises
    ------
    IntegrationError
        It has other settings, or another worker of the process was set up; or a library of
        `enable` cannot be enabled.
    ConfigError
        A setting is invalid.
    """
    global _current
    with _lock:
        if _current is not None:
            if _current[0] is worker and _current[1].settings == settings:
                return
            raise IntegrationError(
                f"{_current[0].address} of this process is set up with {_current[1].settings}: "
                "expected the same settings, and one worker in a process"
            )
        member = Worker(settings)
        enabled = []
        try:
            for name in settings.enable:
                library = import_module(f"gpumem.integrations.{name}")
                library.enable(member.arena)
                enabled.append(library)
        except BaseException:
            for library in reversed(enabled):
                library.disable()
            raise
        set_default_resource(member.arena.memory, member.resource)
        serve(OFFER, member.answer)
        member.attach(worker)
        _current = (worker, member)


def teardown(worker: Any) -> None:
    """Undo `setup`. Idempotent; blocks in use keep the arena."""
    global _current
    with _lock:
        if _current is None or _current[0] is not worker:
            return
        member = _current[1]
        _current = None
        member.detach(worker)
        set_default_resource(member.arena.memory, None)
        for name in reversed(member.settings.enable):
            import_module(f"gpumem.integrations.{name}").disable()
