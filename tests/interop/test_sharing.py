"""allocate(shareable=True), export and attach: one tensor in two processes."""

from __future__ import annotations

import gc
import multiprocessing
import os
import pickle
import socket

import numpy as np
import pytest
from helpers.quiesce import held_by_kind
from helpers.spawned import add_one

import gpumem
from gpumem import interop
from gpumem.errors import (
    AlignmentError,
    BadHandleError,
    ClosedError,
    ConfigError,
    DeviceMismatchError,
    InvalidDescriptorError,
    OutOfMemoryError,
    UnsupportedHandleTypeError,
)
from gpumem.interop import Handle, MemoryDescriptor, MemoryHandleType

pytestmark = pytest.mark.usefixtures("nothing_left")

MIB = 1 << 20
CONFIGS = [{"backing": "virtual"}, {"backing": "regions"}, {"numa_node": 0}, {"enable": False}]
MEMORIES = ["host", "host/host_accessible"]


@pytest.fixture(params=CONFIGS, ids=str)
def shared(request, make_arena):
    """An arena of each backing."""
    return make_arena(request.param)


def things_held(host):
    return held_by_kind(), len(os.listdir("/proc/self/fd"))


@pytest.mark.parametrize("method", ["spawn", "fork"])
def test_two_processes_share_a_tensor_by_export_and_attach(shared, method):
    context = multiprocessing.get_context(method)
    tensor = gpumem.from_dlpack(shared.allocate(4096, shareable=True)).view("f4").reshape((32, 32))
    part = tensor[4:8, 2:20]
    part.numpy()[...] = np.arange(4 * 18).reshape(4, 18)
    mine, yours = context.Pipe()
    with mine, interop.export(part) as handle:
        other = context.Process(target=add_one, args=(yours,))
        other.start()
        mine.send(handle)
        assert mine.poll(60)
        assert mine.recv().tolist() == np.arange(4 * 18).reshape(4, 18).tolist()
        assert mine.recv() is False
        assert (part.numpy() == np.arange(4 * 18).reshape(4, 18) + 1).all()
        assert tensor.numpy()[3].sum() == 0
        mine.send(None)
        other.join(60)
        assert other.exitcode == 0
    yours.close()
    other.close()


def test_handle_can_be_sent_over_a_socket(arena):
    buffer = arena.allocate(4096, shareable=True)
    one, other = socket.socketpair()
    with one, other, interop.export(buffer) as handle:
        socket.send_fds(one, [pickle.dumps((handle.kind, handle.contents))], [handle.fileno()])
        said, (number,), _, _ = socket.recv_fds(other, 4096, 1)
    kind, contents = pickle.loads(said)
    assert os.get_inheritable(number)  # what sockets give
    with Handle(number, kind=kind, contents=contents) as received:
        assert not os.get_inheritable(number)
        tensor = interop.attach(received)
    tensor.numpy()[:] = 3
    assert (np.from_dlpack(buffer) == 3).all()


def test_shareable_block_is_zeroed_and_has_its_own_memory(shared):
    buffers = [shared.allocate(5000, shareable=True) for _ in range(3)]
    granule = 2 * MIB if shared.config.numa_node == 0 else 4096
    for buffer in buffers:
        assert buffer.allocated_nbytes == -(-5000 // granule) * granule
        assert buffer.ptr % 4096 == 0
        assert not np.from_dlpack(buffer).any()
        np.from_dlpack(buffer)[:] = 255
    with interop.export(buffers[0]) as handle:
        whole = np.frombuffer(
            interop.Importer.for_device("host").import_memory(
                MemoryDescriptor(handle, handle.kind, handle.contents.size)
            ).tensor(handle.contents.size, "u1").numpy(), "u1",
        )  # fmt: skip
        assert whole[:5000].all()
        assert not whole[5000:].any()  # nobody else's bytes
    del whole
    buffers[0].close()
    assert not np.from_dlpack(shared.allocate(5000, shareable=True)).any()


def test_shareable_block_counts_in_stats_and_is_released(shared):
    before = shared.stats()
    buffer = shared.allocate(5000, shareable=True)
    assert shared.stats().reserved == before.reserved + buffer.allocated_nbytes
    assert shared.stats().in_use == before.in_use + buffer.allocated_nbytes
    assert shared.stats().num_reserves == before.num_reserves
    shared.check_invariants()
    shared.shrink()
    assert shared.stats().reserved >= buffer.allocated_nbytes
    buffer.close()
    shared.shrink()
    assert shared.stats().in_use == before.in_use
    assert shared.stats().reserved == before.reserved


def test_limit_applies_to_shareable_blocks(make_arena):
    arena = make_arena({"max_mem": 3 * 4096, "backing": "regions"})
    kept = arena.allocate(2 * 4096, shareable=True)
    with pytest.raises(OutOfMemoryError) as caught:
        arena.allocate(2 * 4096, shareable=True)
    assert (caught.value.limit, caught.value.reserved) == (3 * 4096, 2 * 4096)
    kept.close()
    arena.allocate(2 * 4096, shareable=True).close()


def test_sleep_leaves_shareable_blocks_in_place(arena):
    plain, shared = arena.allocate(1000), arena.allocate(4096, shareable=True)
    np.from_dlpack(plain)[:] = 1
    with interop.export(shared) as handle:
        there = interop.attach(handle)
    arena.sleep()
    assert arena.stats().reserved == 4096
    there.numpy()[:] = 7  # another process goes on
    arena.wake()
    assert (np.from_dlpack(shared) == 7).all()
    assert (np.from_dlpack(plain) == 1).all()
    arena.shrink()  # memory that is kept for the next sleep


@pytest.mark.parametrize(
    "call", ["cuMemHostRegister", "cuMemHostGetDevicePointer", "cuMemCreate", "cuMemMap",
             "cuMemSetAccess", "cuMemsetD8Async", "cuStreamCreate", "cuStreamSynchronize"],
)  # fmt: skip
def test_failed_shareable_allocation_leaves_nothing(make_arena, host, call):
    by_handle = call not in ("cuMemHostRegister", "cuMemHostGetDevicePointer")
    arena = make_arena({"numa_node": 0} if by_handle else None)
    before = arena.stats(), things_held(host)
    host.fail(call, 1, 801)
    with pytest.raises(gpumem.errors.DriverError, match=call):
        arena.allocate(5000, shareable=True)
    host.clear_faults()
    after = arena.stats()
    assert (after.in_use, after.reserved) == (before[0].in_use, before[0].reserved)
    assert things_held(host) == before[1]
    arena.allocate(5000, shareable=True).close()


@pytest.mark.parametrize("memory", MEMORIES)
def test_shared_memory_lives_until_its_last_user(memory):
    arena = gpumem.Arena(memory)
    with interop.export(arena.allocate(4096, shareable=True)) as handle:
        arena.close()
        first, second = interop.attach(handle), interop.attach(handle)
    first.numpy()[:] = 5
    assert (second.numpy() == 5).all()


def test_handle_keeps_shared_memory_alive(arena):
    buffer = arena.allocate(4096, shareable=True)
    np.from_dlpack(buffer)[:] = 9
    handle = interop.export(buffer)
    del buffer
    arena.shrink()
    gc.collect()
    assert (interop.attach(handle).numpy() == 9).all()
    handle.close()
    with pytest.raises(ClosedError):
        interop.attach(handle)


def test_read_only_export_cannot_be_written(arena):
    buffer = arena.allocate(4096, shareable=True)
    with interop.export(buffer, read_only=True) as handle:
        tensor = interop.attach(handle)
        np.from_dlpack(buffer)[:] = 6
        assert tensor.read_only
        assert (tensor.numpy() == 6).all()
        with pytest.raises(BadHandleError, match="to write"):
            interop.Importer.for_device("host").import_memory(
                MemoryDescriptor(handle, handle.kind, handle.contents.size)
            )
    with interop.export(gpumem.from_dlpack(buffer).as_read_only()) as handle:
        assert handle.contents.read_only
    del tensor


def test_shared_file_size_is_sealed(arena):
    with interop.export(arena.allocate(4096, shareable=True)) as handle:
        assert handle.kind is MemoryHandleType.MEMFD
        for size in (0, 8192):
            with pytest.raises(PermissionError):
                os.truncate(handle.fileno(), size)


@pytest.mark.parametrize("kind", [MemoryHandleType.MEMFD, MemoryHandleType.OPAQUE_FD])
def test_imported_file_is_sealed_against_shrinking_where_its_maker_allows_it(kind):
    for flags in (os.MFD_ALLOW_SEALING, 0):
        fd = os.memfd_create("pixels", flags)
        os.truncate(fd, 4096)
        with interop.Importer.for_device("host") as importer:
            memory = importer.import_memory(interop.MemoryDescriptor(fd, kind, 4096))
            if flags:
                with pytest.raises(PermissionError):
                    os.truncate(fd, 0)
                os.truncate(fd, 8192)  # growing harms nobody
            assert not memory.tensor((4096,), "u1").numpy().any()
            memory.close()
        os.close(fd)


def test_pool_that_was_exported_cannot_be_shortened():
    with gpumem.DriverPool("host", {"shareable": True}) as pool:
        kept = gpumem.zeros((4, 4), "f4", resource=pool)
        with interop.export(kept) as handle, pytest.raises(PermissionError):
            os.truncate(handle.fileno(), 0)
        del kept


def test_pools_block_is_exported_by_its_pool():
    with gpumem.DriverPool("host", {"shareable": True}) as pool:
        tensor = gpumem.zeros((4, 4), "f4", resource=pool)
        with interop.export(tensor[1:]) as handle:
            assert handle.kind is MemoryHandleType.CUDA_POOL_FD
            there = interop.attach(handle)
            there.numpy()[...] = 2
            assert tensor.numpy().sum() == 24
        del there, tensor


@pytest.mark.parametrize("alignment", [None, 1 << 16])
@pytest.mark.parametrize("viewed", [False, True])
def test_pools_block_behind_adaptors_is_exported_by_its_pool(viewed, alignment):
    with gpumem.DriverPool("host", {"shareable": True}) as pool:
        adaptor = gpumem.adaptors.track(gpumem.adaptors.limit(pool, 1 << 20))
        buffers = [adaptor.allocate(4096, alignment=alignment) for _ in range(3)]
        views = [np.asarray(buffer) for buffer in buffers] if viewed else []
        with interop.export(buffers[1]) as handle:
            assert handle.kind is MemoryHandleType.CUDA_POOL_FD
            interop.attach(handle).numpy()[...] = 2
        assert [int(np.asarray(buffer).sum()) for buffer in buffers][1] == 2 * 4096
        with pytest.raises(UnsupportedHandleTypeError, match="read only"):
            interop.export(buffers[0], read_only=True)
        del buffers, views


def test_export_waits_for_pending_writes(arena, host, stream):
    host.set_lag(30_000_000)
    buffer = arena.allocate(4096, stream, shareable=True)
    tensor = gpumem.from_dlpack(buffer)
    gpumem.copy(tensor, gpumem.full(4096, 8, "u1", memory="host", stream=stream), stream)
    with interop.export(tensor) as handle:
        assert (interop.attach(handle).numpy(sync=False) == 8).all()


def test_adaptors_pass_shareable_on(arena):
    limited = gpumem.adaptors.limit(arena, 1 << 20)
    with limited.allocate(4096, shareable=True) as buffer, interop.export(buffer) as handle:
        tensor = interop.attach(handle)
        tensor.numpy()[:] = 4
        assert np.from_dlpack(buffer)[0] == 4
        del tensor


def test_unsupported_shareable_allocation_names_the_reason(make_arena):
    for resource, why in (
        (make_arena(memory="host/managed"), "managed"),
        (gpumem.DriverPool("host"), "Arena"),
        (gpumem.ExternalAllocator(lambda n: None, lambda p: None, memory="host"), "Arena"),
    ):
        with pytest.raises(ConfigError, match=why):
            resource.allocate(100, shareable=True)
        assert resource.stats().in_use == 0
        resource.close()


def test_unsupported_export_names_the_reason(arena):
    plain = gpumem.empty(4, "f4", resource=arena)
    with pytest.raises(UnsupportedHandleTypeError, match="shareable=True"):
        interop.export(plain)
    with pytest.raises(UnsupportedHandleTypeError, match="empty"):
        interop.export(plain[:0])
    shareable = gpumem.from_dlpack(arena.allocate(4096, shareable=True))
    with pytest.raises(InvalidDescriptorError, match="negative"):
        interop.export(shareable[::-1])
    for given in (5, np.zeros(4), "x"):
        with pytest.raises(TypeError, match="export takes"):
            interop.export(given)
    shareable.buffer.close()
    with pytest.raises(ClosedError):
        interop.export(shareable)


@pytest.mark.parametrize(
    ("dtype", "key"),
    [
        ("S3", np.s_[1:]),
        ("V5", np.s_[1:]),
        ("c16", np.s_[::2]),
        (np.longdouble, np.s_[1:]),
        (">i4", np.s_[1:]),
        ("f4", np.s_[:, None]),
    ],
)
def test_tensor_that_is_exported_can_be_attached(arena, dtype, key):
    tensor = gpumem.zeros(8, dtype, resource=arena, shareable=True)[key]
    with interop.export(tensor) as handle:
        there = interop.attach(handle)
        assert (there.shape, there.strides, there.dtype) == (
            tensor.shape,
            tensor.strides,
            tensor.dtype,
        )
        del there


def test_complex_numbers_at_a_multiple_of_their_alignment_can_be_attached(arena):
    tensor = gpumem.zeros(64, "u1", resource=arena, shareable=True)[8:40].view("c16")
    with interop.export(tensor) as handle:
        interop.attach(handle).numpy()[:] = 1 + 2j
    assert tensor.tolist() == [1 + 2j] * 2


@pytest.mark.parametrize("rows", [False, True])
def test_export_of_unaligned_elements_is_refused(arena, rows):
    tensor = gpumem.zeros((4, 5), "u1", resource=arena, shareable=True)
    unaligned = tensor[:, :4].view("i4") if rows else tensor.reshape(20)[1:9].view("i4")
    with pytest.raises(AlignmentError, match="stride 5" if rows else "address"):
        interop.export(unaligned)


def test_export_of_a_dtype_with_fields_is_refused(arena):
    tensor = gpumem.zeros(4, [("a", "i4"), ("b", "f8")], resource=arena, shareable=True)
    with pytest.raises(InvalidDescriptorError, match="V12"):
        interop.export(tensor)
    with interop.export(tensor.view("V12")) as handle:
        assert interop.attach(handle).nbytes == tensor.nbytes


@pytest.mark.parametrize("given", [1, 0, np.True_, "no", None])
def test_export_takes_a_bool_for_read_only(arena, given):
    with (
        arena.allocate(4096, shareable=True) as buffer,
        pytest.raises(TypeError, match="read_only"),
    ):
        interop.export(buffer, read_only=given)


def test_attach_finds_the_device_of_a_memory_handle(arena):
    with interop.export(arena.allocate(4096, shareable=True)) as handle:
        assert interop.attach(handle, device="host").device == gpumem.Device("host")
        elsewhere = Handle(
            os.dup(handle.fileno()), kind=handle.kind,
            contents=type(handle.contents)(**{
                **handle.contents.__dict__, "device_uuid": "00112233445566778899aabbccddeeff",
            }),
        )  # fmt: skip
        with elsewhere, pytest.raises(DeviceMismatchError, match="0011223344"):
            interop.attach(elsewhere)
    with pytest.raises(TypeError, match="attach takes a Handle"):
        interop.attach(5)


def test_zero_shareable_bytes_give_an_empty_buffer(arena):
    buffer = arena.allocate(0, shareable=True)
    assert (buffer.ptr, buffer.nbytes) == (0, 0)


def test_shareable_block_has_the_requested_alignment(arena):
    with arena.allocate(5000, alignment=1 << 16, shareable=True) as buffer:
        assert buffer.ptr % (1 << 16) == 0
        with interop.export(buffer) as handle:
            tensor = interop.attach(handle)
            tensor.numpy()[:] = 1
            assert np.from_dlpack(buffer).sum() == 5000
            del tensor


def test_timeline_can_be_exported_and_attached():
    timeline = interop.HostTimeline.create()
    with timeline, interop.export(timeline) as handle, interop.attach(handle) as there:
        timeline.signal(5)
        assert there.value() == 5
