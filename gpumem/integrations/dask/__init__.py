"""gpumem in Dask's workers: an arena under a budget, tensors passed on without a copy, spilling.

``client.register_plugin(dask.plugin(...))``, or ``dask worker --preload gpumem.integrations.dask``
with settings below ``gpumem`` in Dask's configuration, sets each worker up with

- an `Arena`, which is the default resource of its memory there: ``gpumem.empty(...)`` in a task
  comes from it, and with ``enable=("cupy",)`` CuPy's arrays, too;
- a `Budget` that all of it counts in. When it is full, the least recently used results of the
  worker go to pinned host memory, from where Dask may write them to disk, and return when a task
  needs them;
- the ways on which a `Tensor` travels.

The owner of a tensor's bytes on the way:

1. Both workers are set up so, of one user, and reach each other's sockets (one host, one network
   namespace), and the block is of `share_from` bytes or more: a descriptor travels. The sender
   holds it until the receiver has requested it, or `expires` seconds have passed. The receiver maps
   the memory, which both own then: it is released to the device when neither has it any more, in
   any order, also if one is killed. The sender's budget counts it as long as the sender has it,
   the receiver's as long as its result is kept there.
2. Otherwise (the receiver is unknown, elsewhere, or a disk; the block is small, or of memory that
   cannot be exported) the bytes travel, a device's by way of pinned memory, and the receiver owns
   the tensor that it makes of them.

A descriptor that has expired, or that came from a process that has ended, is an error
(`BadHandleError`, an OSError):
Dask takes the tensor from another worker, or computes it again. As within one worker, a task must
not write to its arguments: other workers may have the same bytes. A view that travels by a
descriptor keeps the whole block.

Examples
--------
>>> from dask.distributed import Client, LocalCluster  # doctest: +SKIP
>>> from gpumem.integrations import dask as gpumem_dask  # doctest: +SKIP
>>> client = Client(LocalCluster(n_workers=2))  # doctest: +SKIP
>>> client.register_plugin(gpumem_dask.plugin("host", budget="2GiB"))  # doctest: +SKIP
>>> gpumem_dask.cluster_memory(client)  # by each worker's address  # doctest: +SKIP
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache
from typing import Any

from gpumem._support.signatures import published
from gpumem.integrations._common.switch import Status
from gpumem.integrations._common.versions import import_framework
from gpumem.integrations.dask._worker import (
    Settings,
    WorkerMemory,
    current,
    libraries,
    setup,
    teardown,
)

__all__ = [
    "WorkerMemory",
    "cluster_memory",
    "dask_setup",
    "dask_teardown",
    "plugin",
    "register",
    "status",
]
__dir__ = published(globals())

_OLDEST = "2025.1"
_INSTALL = "pip install distributed"


def plugin(
    memory: str | None = None,
    *,
    budget: str | float = 0.9,
    share_from: int | str = "1MiB",
    expires: float = 30.0,
    enable: str | Iterable[str] = (),
    node: str | None = None,
) -> Any:
    """Return a plugin that sets up each worker's memory, for ``client.register_plugin``.

    Parameters
    ----------
    memory : str, optional
        Which memory: ``"cuda:0"``, ``"host"``. None: the worker's `gpumem.default_device`.
    budget : int, str or float
        Of each worker: bytes, a text such as ``"20GiB"``, or a fraction of the device up to 1.0.
        Several workers on one device share it: the sum counts.
    share_from : int or str
        Blocks of at least this size are made to be shared: each has memory of its own, of whole
        pages, which is released to the driver when the block is freed. Smaller ones share the
        arena's pages, and their bytes travel.
    expires : float
        Seconds for which a descriptor waits for its receiver.
    enable : str or iterable of str
        Libraries that allocate from the arena, too: ``"cuda_core"``, ``"cupy"``, ``"numba"``,
        ``"rmm"`` and ``"torch"``, as ``("rmm", "cupy")`` or ``"rmm, cupy"``, after dask-cuda's own
        plugins if it is used.
    node : str, optional
        Name of a limit that programs of the worker's machine share, such as ``"gpu0"``, as `Budget`
        takes it: each worker's budget is below it.

    Returns
    -------
    distributed.WorkerPlugin

    Raises
    ------
    MissingFrameworkError, IntegrationError
        Dask is not installed or too old. In ``register_plugin``: a worker has other settings
        already, or shares its process with another one.
    ConfigError
        A setting is invalid.
    """
    register()
    return _plugin_of(Settings(memory, budget, share_from, expires, libraries(enable), node))


def register() -> None:
    """Let Dask send and receive tensors in this process, for example in a client.

    `plugin` and `cluster_memory` do so, too. In a process that is no worker bytes travel.

    Raises
    ------
    MissingFrameworkError, IntegrationError
        Dask is not installed or too old.
    """
    import_framework("Dask", "distributed", _OLDEST, install=_INSTALL)
    from gpumem.integrations.dask._serialize import register_families

    register_families()


def cluster_memory(client: Any) -> Any:
    """Ask every worker of a cluster for its memory, in one call through the scheduler.

    The same numbers travel with each worker's heartbeat: ``worker.metrics["gpumem"]`` of
    ``client.scheduler_info(n_workers=-1)["workers"]``.

    Parameters
    ----------
    client : distributed.Client

    Returns
    -------
    dict of str to WorkerMemory or None
        By address. None: the worker is not set up, or did not answer. Awaitable if the client is
        asynchronous.
    """
    register()
    return client.sync(_ask_all, client)


async def _ask_all(client: Any) -> dict[str, WorkerMemory | None]:
    answers = await client._run(_own_memory, on_error="return")
    return {
        address: answer if isinstance(answer, WorkerMemory) else None
        for address, answer in answers.items()
    }


def _own_memory() -> WorkerMemory | None:
    member = current()
    return None if member is None else member.memory_now()


def status() -> Status:
    """Return whether this process is a worker that was set up, and its arena."""
    member = current()
    if member is None:
        return Status(False, {})
    return Status(True, {member.arena.memory.device.index: member.arena})


def dask_setup(worker: Any) -> None:
    """Set a worker up; ``--preload gpumem.integrations.dask`` calls this.

    The settings are `plugin`'s, read from Dask's configuration: ``gpumem.budget`` and so on, which
    ``DASK_GPUMEM__BUDGET=20GiB`` sets.

    Raises
    ------
    IntegrationError, ConfigError
        As `plugin`.
    """
    import dask

    register()
    setup(worker, Settings.of(dask.config.get("gpumem", None)))


def dask_teardown(worker: Any) -> None:
    """Undo `dask_setup`; Dask calls it when the worker closes."""
    teardown(worker)


def _plugin_of(settings: Settings) -> Any:
    # Plugins travel as pickles: by this function, since the class is made at its first use.
    return _plugin_class()(settings)


@cache
def _plugin_class() -> Any:
    from distributed import WorkerPlugin

    class ArenaPlugin(WorkerPlugin):  # type: ignore[misc,unused-ignore]
        name = "gpumem"

        def __init__(self, settings: Settings) -> None:
            self.settings = settings

        def setup(self, worker: Any) -> None:
            register()
            setup(worker, self.settings)

        def teardown(self, worker: Any) -> None:
            teardown(worker)

        def __reduce__(self) -> tuple[Any, ...]:
            return _plugin_of, (self.settings,)

    return ArenaPlugin
