"""Dask's workers over gpumem: what travels as a descriptor, who owns it, and what is spilled."""

import asyncio
import gc
import importlib
import logging
import os
import pkgutil
import signal
import subprocess
import sys
import textwrap
import weakref
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
from helpers.child import run_quietly
from helpers.waiting import wait_until

import gpumem
from gpumem import integrations, interop
from gpumem.errors import (
    BadHandleError,
    BudgetExceededError,
    ConfigError,
    IntegrationError,
    MissingFrameworkError,
)
from gpumem.integrations._common import descriptors

distributed = pytest.importorskip("distributed", reason="Dask's distributed is not installed")

import dask_kills  # noqa: E402
from helpers import dask_tasks  # noqa: E402

from gpumem.integrations import dask as gpumem_dask  # noqa: E402
from gpumem.integrations.dask import _serialize, _worker  # noqa: E402
from gpumem.integrations.dask._offers import Offers  # noqa: E402
from gpumem.integrations.dask._store import Away, Store  # noqa: E402

# Of Dask's own: sockets that its loops close late.
pytestmark = pytest.mark.filterwarnings("ignore::ResourceWarning", "default::DeprecationWarning")

MIB = 1 << 20
LIMIT = 32 * MIB


# ---- two workers ---------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    """Two workers that were set up by --preload, on the host device."""
    import dask

    # As in the environment of a worker: DASK_GPUMEM__BUDGET=32MiB.
    environment = {
        "DASK_GPUMEM__MEMORY": "host",
        "DASK_GPUMEM__BUDGET": str(LIMIT),
        "DASK_GPUMEM__EXPIRES": "600.0",
        "PYTHONWARNINGS": "ignore",
    }
    with (
        mock.patch.dict(os.environ),  # where Dask leaves what a worker's environment has
        dask.config.set({"distributed.nanny.pre-spawn-environ": environment}),
        distributed.LocalCluster(
            n_workers=2,
            threads_per_worker=1,
            dashboard_address=":0",
            preload="gpumem.integrations.dask",
            local_directory=str(tmp_path_factory.mktemp("dask")),
        ) as made,
        distributed.Client(made) as client,
    ):
        gpumem_dask.register()
        yield client


@pytest.fixture
def client(cluster):
    yield cluster
    wait_until(lambda: all(each.used == 0 for each in memory(cluster)))


def memory(client):
    return list(gpumem_dask.cluster_memory(client).values())


def addresses(client):
    # Not client.scheduler_info: the client's own refresh, which asks for no worker, may replace its
    # answer before it is returned.
    return sorted(gpumem_dask.cluster_memory(client))


def test_preload_gives_each_worker_an_arena_under_the_budget_of_dasks_configuration(client):
    assert [each.limit for each in memory(client)] == [LIMIT, LIMIT]
    assert len({each.pid for each in memory(client)} | {os.getpid()}) == 3
    tensor = client.submit(dask_tasks.filled, 1, 4 * MIB, pure=False)
    distributed.wait(tensor)
    assert sorted(each.in_use for each in memory(client)) == [0, 4 * MIB]
    too_large = client.submit(dask_tasks.filled, 1, 2 * LIMIT, pure=False)
    assert "BudgetExceededError" in repr(too_large.exception())


def test_plugin_with_the_settings_that_workers_have_changes_nothing_and_others_are_refused(client):
    before = [each.pid for each in memory(client)]
    client.register_plugin(gpumem_dask.plugin("host", budget=LIMIT, expires=600.0))
    with pytest.raises(IntegrationError, match="expected the same settings"):
        client.register_plugin(gpumem_dask.plugin("host", budget="1MiB"), name="another")
    assert [each.pid for each in memory(client)] == before


def test_tensor_goes_to_another_worker_as_the_same_memory(client):
    one, other = addresses(client)
    before = {pid: each.sent_bytes for pid, each in by_pid(client).items()}
    tensor = client.submit(dask_tasks.filled, 7, 8 * MIB, workers=[one], pure=False)
    passed = client.submit(dask_tasks.same, tensor, workers=[other], pure=False)
    here = client.submit(dask_tasks.file_of, tensor, workers=[one], pure=False).result()
    there = client.submit(dask_tasks.file_of, passed, workers=[other], pure=False).result()
    assert here[0] != there[0]
    assert here[1] == there[1]
    assert {pid: each.sent_bytes for pid, each in by_pid(client).items()} == before
    assert by_pid(client)[here[0]].sent_descriptors >= 1
    # The receiver's budget counts it as well, and alone once the sender has dropped it.
    assert by_pid(client)[there[0]].imported >= 8 * MIB
    del tensor
    wait_until(lambda: by_pid(client)[here[0]].used == 0)
    assert client.submit(dask_tasks.total, passed, workers=[other]).result() == 7 * 8 * MIB
    assert by_pid(client)[there[0]].used >= 8 * MIB


def by_pid(client):
    return {each.pid: each for each in memory(client)}


def test_view_goes_as_a_descriptor_and_a_small_tensor_as_bytes(client):
    one, other = addresses(client)
    tensor = client.submit(dask_tasks.filled, 3, 4 * MIB, workers=[one], pure=False)
    view = client.submit(dask_tasks.every_second, tensor, workers=[one], pure=False)
    small = client.submit(dask_tasks.filled, 5, 1000, workers=[one], pure=False)
    pid = client.submit(dask_tasks.file_of, tensor, workers=[one], pure=False).result()[0]
    before = by_pid(client)[pid]
    add = client.submit(dask_tasks.total, view, small, workers=[other], pure=False)
    assert add.result() == 3 * 2 * MIB + 5 * 1000
    after = by_pid(client)[pid]
    assert after.sent_descriptors == before.sent_descriptors + 1
    assert after.sent_bytes == before.sent_bytes + 1000


def test_client_sends_and_gets_bytes(client):
    mine = gpumem.empty((300, 7), "float32", memory="host")
    mine.numpy()[:] = np.arange(2100).reshape(300, 7)
    sent = client.scatter(mine)
    again = client.submit(dask_tasks.same, sent, pure=False).result()
    assert (again.dtype, again.shape) == (np.float32, (300, 7))
    assert (again.numpy() == mine.numpy()).all()
    assert str(again.memory) == "host:0"


def test_results_above_the_budget_are_spilled_to_the_host_and_restored(client):
    one, _ = addresses(client)
    tensors = [
        client.submit(dask_tasks.filled, value, 8 * MIB, workers=[one], pure=False)
        for value in range(10)
    ]
    distributed.wait(tensors)
    busy = max(memory(client), key=lambda each: each.spilled)
    assert busy.spilled >= 10 * 8 * MIB - LIMIT
    assert busy.peak <= LIMIT
    totals = [client.submit(dask_tasks.total, each, workers=[one]) for each in tensors]
    assert client.gather(totals) == [value * 8 * MIB for value in range(10)]
    assert by_pid(client)[busy.pid].peak <= LIMIT
    del tensors, totals
    wait_until(lambda: by_pid(client)[busy.pid].spilled == 0)


def test_uncollected_descriptor_expires_and_its_memory_is_freed(client):
    one, _ = addresses(client)
    pid = client.submit(os.getpid, workers=[one], pure=False).result()
    before = by_pid(client)[pid].expired
    name, token = client.submit(
        dask_tasks.offer_to_nobody, 4 * MIB, workers=[one], pure=False
    ).result()
    wait_until(lambda: by_pid(client)[pid].expired == before + 1)
    assert by_pid(client)[pid].offered == 0
    with pytest.raises(BadHandleError, match="was collected, or expired after"):
        _serialize.collected(name, token, CONTENTS)
    wait_until(lambda: not dask_tasks.memory_files(pid))


def test_scheduler_sees_each_workers_memory_in_its_heartbeat(client):
    tensor = client.submit(dask_tasks.filled, 1, 4 * MIB, pure=False)
    distributed.wait(tensor)

    def seen():
        workers = client.scheduler_info(n_workers=-1)["workers"].values()
        return sorted(each["metrics"].get("gpumem", {}).get("in_use", 0) for each in workers)

    wait_until(lambda: seen() == [0, 4 * MIB])


# ---- workers that are killed ---------------------------------------------------------------------


@pytest.mark.skipif(
    "GPUMEM_DASK_KILLS" not in os.environ,
    reason="takes a minute of waiting for restarted workers: set GPUMEM_DASK_KILLS",
)
def test_shuffle_is_right_and_leaves_nothing_after_its_workers_are_killed():
    print(dask_kills.run(kills=2, seed=3))


# ---- descriptors ---------------------------------------------------------------------------------

with interop.export(gpumem.Arena("host").allocate(4096, shareable=True)) as _handle:
    import pickle

    CONTENTS = pickle.dumps((_handle.kind, _handle.contents))


def test_offer_is_collected_once():
    offers = Offers(30)
    handle = some_file()
    token = offers.add(handle, 5)
    assert (len(offers), offers.nbytes) == (1, 5)
    with offers.collect(token) as collected:
        assert collected is handle
    assert (len(offers), offers.nbytes) == (0, 0)
    with pytest.raises(BadHandleError, match="was collected"):
        offers.collect(token)


def some_file():
    return gpumem.Handle(os.memfd_create("offered"))


def test_offer_that_expired_is_closed(monkeypatch):
    clock = [100.0]
    monkeypatch.setattr("gpumem.integrations.dask._offers.monotonic", lambda: clock[0])
    offers = Offers(30)
    handle = some_file()
    token = offers.add(handle, 5)
    clock[0] = 129.0
    offers.expire()
    assert not handle.closed
    clock[0] = 130.0
    offers.expire()
    assert handle.closed
    assert (len(offers), offers.expired) == (0, 1)
    with pytest.raises(BadHandleError, match="expired after 30 s"):
        offers.collect(token)


SENDER = """
import sys, time
import gpumem
from gpumem.integrations._common import descriptors
descriptors.serve("offer", lambda token: ({}, []))
print(descriptors.server_name(), flush=True)
sys.stdin.read()
"""


@pytest.fixture
def sender():
    process = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(SENDER)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    yield process, process.stdout.readline().strip()
    process.kill()
    process.communicate()


def test_descriptor_of_a_dead_sender_is_an_error(sender):
    process, name = sender
    process.kill()
    process.wait()
    with pytest.raises(BadHandleError, match="did not send the offer") as raised:
        _serialize.collected(name, "00", CONTENTS)
    assert isinstance(raised.value, OSError)  # Dask asks another worker


def test_descriptor_of_a_sender_that_does_not_answer_is_an_error_and_not_a_hang(sender):
    process, name = sender
    process.send_signal(signal.SIGSTOP)
    os.waitpid(process.pid, os.WUNTRACED)  # it has stopped
    with (
        pytest.raises(BadHandleError, match="did not send the offer"),
        descriptors.ask(name, "offer", "00", timeout=0.2),
    ):
        pass


def test_sender_without_a_descriptor_is_an_error(sender):
    _, name = sender
    with pytest.raises(BadHandleError, match="sent no descriptor"):
        _serialize.collected(name, "00", CONTENTS)
    with (
        pytest.raises(BadHandleError, match="has no 'page' to send"),
        descriptors.ask(name, "page", "00"),
    ):
        pass


# ---- bytes ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(), (0,), (3,), (5, 6, 7)])
def test_bytes_make_the_same_tensor_again(shape):
    tensor = gpumem.empty(shape, "int32", memory="host/pinned")
    tensor.numpy()[...] = np.arange(tensor.size).reshape(shape)
    header, frames = _serialize.send(tensor)
    half = [part for frame in frames for part in (bytes(frame)[:3], bytes(frame)[3:])]
    for each in (frames, half):
        made = _serialize.receive(header, each)
        assert (made.shape, made.dtype, made.memory) == (shape, np.int32, tensor.memory)
        assert (made.numpy() == tensor.numpy()).all()


def test_unknown_receiver_gets_the_bytes_of_the_tensor_without_a_copy():
    tensor = gpumem.zeros((2 * MIB,), "uint8", resource=gpumem.Arena("host"), shareable=True)
    _, (frame,) = _serialize.send(tensor, {"recipient": {}})
    tensor.numpy()[5] = 9
    assert frame[5] == 9


def test_transport_of_device_memory_gets_it_only_of_devices():
    with pytest.raises(NotImplementedError):
        _serialize.send_on_device(gpumem.zeros((8,), "uint8", memory="host"))
    said = pickle.dumps(_serialize.Described((2, 2), np.dtype("int16"), gpumem.MemoryInfo("host")))
    received = np.arange(8, dtype=np.uint8)
    made = _serialize.receive_on_device(said, [received])
    assert made.ptr == received.ctypes.data
    assert made.tolist() == received.view("int16").reshape(2, 2).tolist()


# ---- a worker's results --------------------------------------------------------------------------


@pytest.fixture
def store():
    budget = gpumem.Budget(4 * MIB)
    arena = gpumem.Arena("host", budget=budget)
    made = Store({}, _worker.ShareableBlocks(arena, MIB), budget)
    budget.on_pressure = lambda _, nbytes: made.spill(nbytes)
    return made


def tensor_of(store, value, nbytes=MIB):
    tensor = gpumem.empty((nbytes,), "uint8", resource=store._resource)
    tensor.numpy()[:] = value
    return tensor


def test_store_spills_the_least_recently_used_result_and_brings_it_back(store):
    for key in range(4):
        store[key] = tensor_of(store, key)
    assert store[0].numpy()[0] == 0  # now 1 is the one that was not used for longest
    store[4] = tensor_of(store, 4)
    assert isinstance(store.base[1], Away)
    assert str(store.base[1].tensor.memory) == "host:0/host_accessible"
    assert store.spilled == MIB
    assert str(store[1].memory) == "host:0"
    assert (store[1].numpy() == 1).all()
    assert (len(store), sorted(store)) == (5, [0, 1, 2, 3, 4])


def test_store_spills_the_next_result_where_one_keeps_its_memory(store):
    kept = tensor_of(store, 0)
    store["kept"] = kept
    for key in range(3):
        store[key] = tensor_of(store, key)
    store[3] = tensor_of(store, 3)
    assert list(store.base) == ["kept", 0]
    assert store.spill(2 * MIB) == 2 * MIB
    assert list(store.base) == ["kept", 0, 1, 2]


def test_store_spills_tensors_within_lists_tuples_and_dicts(store):
    other = object()
    store["a"] = {"x": [tensor_of(store, 1), other], "y": (tensor_of(store, 2), 5)}
    assert store.spill(1) == 2 * MIB
    assert store.spilled == 2 * MIB
    value = store["a"]
    assert value["x"][1] is other
    assert [value["x"][0].numpy()[0], value["y"][0].numpy()[0], value["y"][1]] == [1, 2, 5]
    assert store.spilled == 0


def test_store_leaves_everything_else_to_the_mapping_beneath(store):
    store["plain"] = pinned = gpumem.zeros((4,), "uint8", memory="host/pinned")
    assert store.base["plain"] is pinned
    assert store.spill(MIB) == 0
    del store["plain"]
    assert not store.base
    with pytest.raises(KeyError):
        store["plain"]
    with pytest.raises(KeyError):
        del store["plain"]


def imported(nbytes, value):
    tensor = gpumem.empty((nbytes,), "uint8", resource=gpumem.Arena("host"), shareable=True)
    tensor.numpy()[:] = value
    with interop.export(tensor) as handle:
        return interop.attach(handle)


def test_store_charges_the_budget_for_other_workers_memory(store):
    store["a"] = imported(3 * MIB, 1)
    assert (store.imported, store._budget.used) == (3 * MIB, 3 * MIB)
    store["b"] = imported(3 * MIB, 2)
    assert (store.imported, store.spilled, store._budget.used) == (3 * MIB, 3 * MIB, 3 * MIB)
    del store["b"]
    assert store._budget.used == 0
    assert (store["a"].numpy() == 1).all()


def test_store_charges_another_workers_block_whole_and_once_for_all_results_in_it(store):
    block = gpumem.zeros((3 * MIB,), "uint8", resource=gpumem.Arena("host"), shareable=True)
    with interop.export(block[:1000]) as handle:
        view = interop.attach(handle)
    store["a"] = view
    store["b"] = [view[:10], view[10:], tensor_of(store, 1)]
    assert (store.imported, store._budget.used) == (3 * MIB, 4 * MIB)
    del store["a"]
    assert store.imported == 3 * MIB
    store["c"] = view[5:]
    del store["b"]
    assert store.spill(1) == 3 * MIB
    assert (store.imported, store.spilled) == (0, 995)
    closed = view[:]
    view.buffer.close()
    store["d"] = closed
    assert store.imported == 0


def test_store_puts_other_workers_memory_above_the_budget_on_the_host(store):
    store["a"] = imported(5 * MIB, 3)
    assert (store.imported, store.spilled, store._budget.used) == (0, 5 * MIB, 0)
    with pytest.raises(BudgetExceededError):
        store["a"]
    assert store.spilled == 5 * MIB  # and it is still there


def test_spilled_tensor_goes_to_disk_and_back_through_dasks_serialisation(store):
    from distributed.protocol import deserialize, serialize

    gpumem_dask.register()
    store["a"] = tensor_of(store, 6)
    store.spill(1)
    header, frames = serialize(store.base["a"], on_error="raise")
    store.base["a"] = deserialize(header, [bytes(frame) for frame in frames])
    assert (store["a"].numpy() == 6).all()
    assert str(store["a"].memory) == "host:0"


# ---- settings ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ({"budget": 1.5}, r"invalid budget = 1.5: expected bytes, or a fraction above 0 up to 1.0"),
        ({"budget": -1}, r"invalid budget = -1: expected 0 to 2\*\*63 - 1 bytes"),
        ({"budget": 1 << 63}, r"invalid budget = 9223372036854775808: expected 0 to"),
        ({"budget": "a lot"}, "budget must be"),
        ({"budget": None}, "budget must be"),
        ({"share_from": 0}, r"invalid share_from = 0: expected 1 to 2\*\*63 - 1 bytes"),
        ({"share_from": 1.5}, "share_from must be"),
        ({"expires": 0}, "invalid expires = 0: expected seconds above 0"),
        ({"expires": True}, "invalid expires = True: expected seconds above 0"),
        ({"memory": "xyz"}, "invalid memory = 'xyz': "),
        ({"memory": 5}, "invalid memory = 5: "),
        ({"enable": ("onnxruntime",)}, r"invalid enable = \('onnxruntime',\): expected some of"),
        ({"enable": "cupy, nope"}, "invalid enable = 'cupy, nope': expected some of"),
        ({"node": 5}, "invalid node = 5: expected a text, or None"),
        ({"enable": 5}, "invalid enable = 5: expected some of"),
        ({"enable": [[]]}, r"invalid enable = \[\[\]\]: expected some of"),
    ],
)
def test_invalid_setting_is_refused_before_a_worker_sees_it(setting, message):
    with pytest.raises(ConfigError, match=message):
        gpumem_dask.plugin(**setting)


@pytest.mark.parametrize("enable", ["cupy", "cupy,", ["cupy"]])
def test_one_library_may_be_named_by_a_text(enable):
    assert gpumem_dask.plugin(enable=enable).settings.enable == ("cupy",)


def test_libraries_that_a_worker_enables_are_those_that_take_an_arena():
    found = [name for _, name, _ in pkgutil.iter_modules(integrations.__path__)]
    modules = {name: importlib.import_module(f"gpumem.integrations.{name}") for name in found}
    enabled = {name for name, module in modules.items() if hasattr(module, "enable")}
    assert enabled - {"jax"} == set(_worker.LIBRARIES)  # JAX takes a pool of the driver's


def test_memory_of_a_setting_may_be_one_that_workers_alone_have():
    assert gpumem_dask.plugin("cuda:63").settings.memory == "cuda:63"


def test_settings_of_dasks_configuration_are_named_as_the_arguments():
    read = _worker.Settings.of({"share-from": 5, "enable": "rmm, cupy"})
    assert (read.share_from, read.enable) == (5, ("rmm", "cupy"))
    assert _worker.Settings.of(None) == _worker.Settings()
    for given, message in (
        ({"limit": 5}, r"unknown setting gpumem.limit: expected memory, budget"),
        ({"share-from": 5, "share_from": 6}, "gpumem.share_from is set twice"),
        ({"enable": None}, "invalid enable = None"),
        ("cupy", "invalid gpumem = 'cupy': expected settings by name"),
    ):
        with pytest.raises(ConfigError, match=message):
            _worker.Settings.of(given)


def test_plugin_travels_as_a_pickle():
    made = pickle.loads(pickle.dumps(gpumem_dask.plugin("host", budget=0.5, enable=("rmm",))))
    assert isinstance(made, distributed.WorkerPlugin)
    assert made.settings == _worker.Settings("host", 0.5, enable=("rmm",))


def test_without_dask_the_error_names_the_command_that_installs_it():
    run_quietly("""
        import sys
        sys.modules["distributed"] = None
        from gpumem.errors import MissingFrameworkError
        from gpumem.integrations import dask
        assert not dask.status().enabled
        try:
            dask.plugin("host")
        except MissingFrameworkError as error:
            assert "pip install distributed" in str(error)
        else:
            raise AssertionError
    """)
    assert issubclass(MissingFrameworkError, IntegrationError)


# ---- a worker's life -----------------------------------------------------------------------------


class FakeWorker:
    """The attributes of Dask's worker that are used."""

    address = "tcp://127.0.0.1:1"

    def __init__(self):
        self.data, self.metrics, self.periodic_callbacks, self.logs = {}, {}, {}, []
        self.rpc = type("Pool", (), {"connection_args": {}})()
        self.state = type("State", (), {"data": self.data})()
        self.memory_manager = type("Manager", (), {"data": self.data})()


def test_worker_is_set_up_once_and_torn_down_to_what_it_was():
    async def live():
        worker, settings = FakeWorker(), _worker.Settings("host", MIB)
        _worker.setup(worker, settings)
        member = _worker.current()
        assert gpumem_dask.status().resources == {0: member.arena}
        assert gpumem.get_default_resource("host") is member.resource
        assert worker.state.data is worker.memory_manager.data is member.store
        _worker.setup(worker, settings)
        assert _worker.current() is member
        for other in ((FakeWorker(), settings), (worker, _worker.Settings("host", 2 * MIB))):
            with pytest.raises(IntegrationError, match="one worker in a process"):
                _worker.setup(*other)
        assert worker.metrics["gpumem"](worker)["limit"] == MIB
        _worker.teardown(worker)
        _worker.teardown(worker)
        assert not gpumem_dask.status().enabled
        assert (worker.metrics, worker.periodic_callbacks) == ({}, {})
        assert worker.rpc.connection_args == {"handshake_overrides": {}}
        assert gpumem.get_default_resource("host") is not member.resource

    asyncio.run(live())


def test_library_that_cannot_be_enabled_leaves_the_worker_as_it_was():
    worker = FakeWorker()
    with pytest.raises(ConfigError, match="RMM needs device"):
        _worker.setup(worker, _worker.Settings("host", MIB, enable=("rmm",)))
    assert _worker.current() is None
    assert worker.metrics == {}


def test_idle_arena_gives_its_memory_back_at_the_second_look():
    member = _worker.Worker(_worker.Settings("host", 8 * MIB))
    gpumem.empty((100,), "uint8", resource=member.resource)
    member.release_idle()
    assert member.budget.used > 0
    member.release_idle()
    assert member.budget.used == 0


def test_workers_of_a_node_are_under_its_limit():
    name = f"test-dask-{os.getpid()}"
    settings = gpumem_dask.plugin("host", budget=8 * MIB, node=name).settings
    members = [_worker.Worker(settings) for _ in range(2)]
    node = members[0].budget.parent
    node.limit = 10 * MIB
    try:
        kept = gpumem.empty((7 * MIB,), "uint8", resource=members[0].resource)
        with pytest.raises(BudgetExceededError, match=name):
            gpumem.empty((7 * MIB,), "uint8", resource=members[1].resource)
        assert node.used >= kept.nbytes
    finally:
        Path(f"/dev/shm/gpumem-node-{os.geteuid()}-{name}").unlink()


def test_results_that_are_spilled_while_an_idle_worker_collects_garbage_free_their_memory():
    member = _worker.Worker(_worker.Settings("host", 8 * MIB))
    member.store = Store({}, member.resource, member.budget)
    for key in range(3):
        member.store[key] = gpumem.empty((2 * MIB,), "uint8", resource=member.resource)
    outside = gpumem.empty((256,), "uint8", resource=member.arena)  # may be garbage
    left = []

    def collect():
        member.spill(member.budget, 8 * MIB)  # as a task's allocation does on its thread
        left.append(member.arena.stats().in_use)

    member.release_idle()
    with mock.patch.object(_worker.gc, "collect", collect):
        member.release_idle()
    assert left == [outside.nbytes]


class Loop:
    """A reference cycle, which only the garbage collector frees."""

    def __init__(self, tensor=None):
        self.itself, self.tensor = self, tensor


@pytest.mark.parametrize("lost", ["nothing", "block", "view of a result", "mapping"])
def test_idle_worker_collects_garbage_where_memory_may_be_in_it(lost):
    member = _worker.Worker(_worker.Settings("host", 8 * MIB, share_from=MIB))
    member.store = Store({}, member.resource, member.budget)
    kept = gpumem.empty((2 * MIB,), "uint8", resource=member.resource)
    handle = interop.export(kept)
    others = interop.attach(handle)
    member.follow(others.buffer)
    member.store["a result", 0] = (kept, kept[MIB:])
    member.store["a result", 1] = others
    member.store["a result", 2] = gpumem.empty((0,), "uint8", resource=member.resource)
    if lost == "block":
        tensor = gpumem.empty((100,), "uint8", resource=member.resource)
    elif lost == "mapping":
        tensor = interop.attach(handle)[:]
        member.follow(tensor.buffer)
    else:
        tensor = kept[:] if lost == "view of a result" else None
    loop = Loop(tensor)
    seen = weakref.ref(loop)
    member.release_idle()
    del tensor, loop
    gc.disable()  # until the worker does
    try:
        member.release_idle()
        assert (seen() is None) == (lost in ("block", "mapping"))
    finally:
        gc.enable()
        gc.collect()
        handle.close()


def test_idle_worker_collects_garbage_of_a_transfer_that_ends_later():
    member = _worker.Worker(_worker.Settings("host", 8 * MIB))
    loop = Loop(gpumem.empty((100,), "uint8", resource=member.resource))
    seen = weakref.ref(loop)
    member.release_idle()
    gc.disable()  # until the worker does
    try:
        member.release_idle()
        assert seen() is loop
        del loop
        member.release_idle()
        assert seen() is None
    finally:
        gc.enable()


def test_idle_worker_keeps_no_tensor_in_its_log_and_the_text_of_the_exception():
    def send(tensor):
        raise OSError("the receiver is gone")

    async def live():
        worker = FakeWorker()
        log = [logging.LogRecord("x", logging.ERROR, "x", 1, "before", None, None)]
        worker.logs = log
        _worker.setup(worker, _worker.Settings("host", 8 * MIB))
        member = _worker.current()
        try:
            send(gpumem.empty((100,), "uint8", resource=member.resource))
        except OSError:
            log.append(
                logging.LogRecord("x", logging.ERROR, "x", 1, "failed", None, sys.exc_info())
            )
        member.release_idle()
        assert member.arena.stats().in_use
        member.release_idle()
        assert not member.arena.stats().in_use
        texts = [logging.Formatter().format(each) for each in log]
        assert texts[0] == "before"
        assert "OSError: the receiver is gone" in texts[1]
        _worker.teardown(worker)

    asyncio.run(live())
