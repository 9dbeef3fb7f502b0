"""Memory registered with NCCL; a stand-in for its library records the calls."""

import sys

import pytest

import gpumem
from gpumem.errors import (
    ClosedError,
    ConfigError,
    DeviceMismatchError,
    IntegrationError,
    InUseError,
    MissingFrameworkError,
    SourceError,
)
from gpumem.integrations import nccl

MIB = 1 << 20
COMMUNICATOR, OTHER, FOREIGN = 0x1000, 0x2000, 0x3000


class Library:
    """NCCL as the integration calls it: who has what registered."""

    def __init__(self):
        self.live = {}
        self.handles = 0
        self.refused = set()

    def register(self, communicator, address, nbytes):
        if communicator in self.refused:
            raise IntegrationError("ncclCommRegister failed: invalid usage")
        self.handles += 1
        self.live[communicator, self.handles] = (address, nbytes)
        return self.handles

    def deregister(self, communicator, handle):
        if communicator in self.refused:
            raise IntegrationError("ncclCommDeregister failed: invalid usage")
        del self.live[communicator, handle]

    def device(self, communicator):
        return 3 if communicator == FOREIGN else 0

    def of(self, communicator):
        return sorted(where for (owner, _), where in self.live.items() if owner == communicator)


class Group:
    """A process group of torch.distributed with the NCCL backend."""

    def __init__(self):
        self.ptr = COMMUNICATOR

    def _comm_ptr(self):
        if self.ptr is None:
            raise RuntimeError("NCCL communicator was aborted")
        return self.ptr


@pytest.fixture
def library(monkeypatch):
    found = Library()
    monkeypatch.setattr(nccl, "_loaded", found)
    monkeypatch.setattr(nccl, "_require_registrable", lambda buffer: None)  # refuses host memory
    yield found
    assert not nccl._registrations


@pytest.fixture
def group(monkeypatch):
    backend = Group()
    monkeypatch.setattr(nccl, "_backend_of", lambda given: backend)
    backend._get_backend = lambda device: backend
    return backend


def block(nbytes=MIB, transport="ipc"):
    return gpumem.Arena("host").allocate(nbytes, transport=transport)


def test_block_is_registered_until_it_is_released(library):
    buffer = block()
    with nccl.register(buffer, COMMUNICATOR) as registration:
        assert library.of(COMMUNICATOR) == [(buffer.ptr, MIB)]
        assert not registration.released
    assert library.live == {}
    assert registration.released


def test_tensor_is_registered_by_its_block(library):
    tensor = gpumem.from_dlpack(block())
    registration = nccl.register(tensor, COMMUNICATOR)
    assert registration.address == tensor.buffer.ptr
    registration.release()


def test_registered_block_stays_after_its_buffer_was_closed(library, arena):
    buffer = arena.allocate(MIB, transport="ipc")
    registration = nccl.register(buffer, COMMUNICATOR)
    buffer.close()
    assert arena.stats().in_use == MIB
    registration.release()
    assert arena.stats().in_use == 0


def test_registration_that_is_dropped_keeps_its_block(library, arena):
    nccl.register(arena.allocate(MIB, transport="ipc"), COMMUNICATOR)
    assert arena.stats().in_use == MIB
    for registration in list(nccl._registrations):
        registration.release()
    assert arena.stats().in_use == 0


def test_block_is_registered_with_every_communicator_that_is_named(library):
    with nccl.register(block(), [COMMUNICATOR, OTHER]):
        assert library.of(COMMUNICATOR) == library.of(OTHER) != []


def test_refusal_by_the_second_communicator_undoes_the_first(library):
    buffer = block()
    library.refused = {OTHER}
    with pytest.raises(IntegrationError, match="invalid usage"):
        nccl.register(buffer, [COMMUNICATOR, OTHER])
    assert library.live == {}


def test_refused_release_keeps_the_block_and_can_be_repeated(library):
    buffer = block()
    registration = nccl.register(buffer, COMMUNICATOR)
    library.refused = {COMMUNICATOR}
    with pytest.raises(IntegrationError):
        registration.release()
    assert not registration.released
    library.refused = set()
    registration.release()
    assert library.live == {}


@pytest.mark.parametrize("now", [None, OTHER], ids=["shut down", "another communicator"])
def test_group_is_not_called_for_a_communicator_that_it_has_no_more(library, group, now):
    registration = nccl.register(block(), group)
    group.ptr = now
    library.refused = {COMMUNICATOR, OTHER}  # a call would be one to memory that is gone
    registration.release()
    assert registration.released


def test_group_without_a_communicator_is_refused(library, group):
    group.ptr = 0
    with pytest.raises(IntegrationError, match="device_id"):
        nccl.register(block(), group)


@pytest.mark.parametrize("name", ["ptr", "comm"])
def test_communicator_of_other_libraries_is_read_from_its_attribute(library, name):
    owner = type("Communicator", (), {name: COMMUNICATOR})()
    with nccl.register(block(), owner):
        assert library.of(COMMUNICATOR)


@pytest.mark.parametrize("given", [None, 0, -1, 2**64, True, "comm", 1.5, []])
def test_object_that_is_no_communicator_is_refused(library, given):
    with pytest.raises(TypeError, match="communicator"):
        nccl.register(block(), given)


@pytest.mark.parametrize("given", [None, 7, b"bytes"])
def test_object_that_is_no_block_is_refused(library, given):
    with pytest.raises(TypeError, match="invalid memory"):
        nccl.register(given, COMMUNICATOR)


def test_memory_of_the_host_is_refused():
    with pytest.raises(ConfigError, match='transport="ipc"'):
        nccl.register(block(), COMMUNICATOR)


def test_closed_block_is_refused(library):
    buffer = block()
    buffer.close()
    with pytest.raises(ClosedError):
        nccl.register(buffer, COMMUNICATOR)


def test_communicator_of_another_device_is_refused(library):
    with pytest.raises(DeviceMismatchError, match="cuda:3"):
        nccl.register(block(), FOREIGN)
    with pytest.raises(DeviceMismatchError, match="cuda:3"):
        nccl.RegisteredSource(gpumem.Arena("host"), FOREIGN)


def test_missing_library_is_an_error(monkeypatch):
    def missing():
        raise MissingFrameworkError("NCCL cannot be loaded", name="nccl")

    monkeypatch.setattr(nccl, "_require_registrable", lambda buffer: None)
    monkeypatch.setattr(nccl, "_path", missing)
    with pytest.raises(MissingFrameworkError):
        nccl.register(block(), COMMUNICATOR)


# ---- arenas over registered regions --------------------------------------------------------------


def arena_over(upstream):
    return gpumem.Arena("host", source=nccl.RegisteredSource(upstream, COMMUNICATOR))


def contains(regions, buffer):
    return any(at <= buffer.ptr and buffer.ptr + buffer.nbytes <= at + n for at, n in regions)


def test_every_block_of_an_arena_over_the_source_is_registered(library):
    with arena_over(gpumem.Arena("host")) as arena:
        blocks = [arena.allocate(nbytes) for nbytes in (256, 40 * MIB, 3 * MIB)]
        assert all(contains(library.of(COMMUNICATOR), one) for one in blocks)
        for one in blocks:
            one.close()


def test_region_that_nccl_does_not_let_go_is_not_given_back(library, monkeypatch):
    errors = []
    monkeypatch.setattr(sys, "unraisablehook", lambda one: errors.append(one.exc_value))
    upstream = gpumem.Arena("host")
    with arena_over(upstream) as arena:
        arena.allocate(4 * MIB).close()
        held = upstream.stats().in_use
        library.refused = {COMMUNICATOR}
        arena.shrink()
        assert [type(error) for error in errors] == [IntegrationError]
        assert upstream.stats().in_use == held != 0
    library.refused = set()
    for registration in list(nccl._registrations):
        registration.release()


def test_closed_arena_leaves_nothing_registered(library):
    upstream = gpumem.Arena("host")
    with arena_over(upstream) as arena:
        arena.allocate(4 * MIB).close()
        assert library.live
        with pytest.raises(InUseError):
            upstream.close()
    assert library.live == {}
    assert upstream.stats().in_use == 0


def test_region_that_nccl_refuses_is_not_kept(library):
    upstream = gpumem.Arena("host")
    library.refused = {COMMUNICATOR}
    with arena_over(upstream) as arena, pytest.raises(SourceError):
        arena.allocate(MIB)
    assert upstream.stats().in_use == 0


def test_limit_of_the_upstream_bounds_the_arena(library):
    with arena_over(gpumem.Arena("host", {"max_mem": 8 * MIB})) as arena:
        with pytest.raises(gpumem.OutOfMemoryError):
            arena.allocate(16 * MIB)
        arena.allocate(4 * MIB).close()


@pytest.mark.parametrize("upstream", [None, "host", 3])
def test_upstream_that_is_no_arena_is_refused(library, upstream):
    with pytest.raises(TypeError, match="invalid upstream"):
        nccl.RegisteredSource(upstream, COMMUNICATOR)


def test_status_names_the_resources_with_registered_blocks(library, arena):
    assert not nccl.status().enabled
    registration = nccl.register(arena.allocate(MIB, transport="ipc"), COMMUNICATOR)
    assert nccl.status().resources == {0: arena}
    registration.release()
    assert nccl.status() == gpumem.integrations.Status(False, {})
