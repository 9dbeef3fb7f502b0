"""Tensors and other libraries on one GPU: the same bytes, in the order of everybody's streams."""

import gc
import itertools

import numpy as np
import pytest
from helpers.libraries import EVERY_WAY, LIBRARIES, ORDERED, OnlyCudaArray, Unordered, stream_handle

import gpumem

# What libraries say of each other's protocols is not what is tested here.
pytestmark = pytest.mark.filterwarnings("default")

N = 1 << 20
SHAPES = [(), (0, 3), (5,), (3, 4, 5)]
HOST_ACCESSIBLE = ["cuda:0/host_accessible", "cuda:0/managed"]


@pytest.fixture
def library(request):
    return LIBRARIES[request.param]()


def values_of(dtype, shape=(3, 4, 5), start=1):
    return (np.arange(start, start + int(np.prod(shape))) % 100).astype(dtype).reshape(shape)


def on_gpu(values, **where):
    tensor = gpumem.empty(values.shape, values.dtype, **(where or {"memory": "cuda:0"}))
    gpumem.copy(tensor, values)
    gpumem.Device("cuda:0").synchronize()
    return tensor


def fetch(tensor):
    return tensor.to("host").numpy()


# ---- the same bytes ------------------------------------------------------------------------------


@pytest.mark.parametrize(("library", "protocol"), EVERY_WAY, indirect=["library"])
def test_consumer_shares_bytes_in_both_directions(library, protocol):
    for dtype, shape in itertools.product(library.dtypes, SHAPES):
        values = values_of(dtype, shape)
        tensor = on_gpu(values)
        seen = library.take(tensor, protocol)
        assert tuple(seen.shape) == shape
        assert (library.fetch(seen) == values).all(), (dtype, shape)
        if values.size:
            assert library.address(seen) == tensor.ptr
        if library.writes and values.size:
            library.assign(seen, library.array(values_of(dtype, shape, 7)))
            library.fetch(seen)  # waits
            assert (fetch(tensor) == values_of(dtype, shape, 7)).all(), (dtype, shape)


@pytest.mark.parametrize(("library", "protocol"), EVERY_WAY, indirect=["library"])
def test_producer_shares_bytes_in_both_directions(library, protocol):
    for dtype, shape in itertools.product(library.dtypes, SHAPES):
        values = values_of(dtype, shape)
        array = library.array(values)
        tensor = library.give(array, protocol)
        assert tensor.dtype == np.dtype(dtype)
        assert tensor.shape == shape
        assert str(tensor.memory) == "cuda:0"
        assert (fetch(tensor) == values).all(), (dtype, shape)
        if values.size:
            assert tensor.ptr == library.address(array)
        if library.writes:
            gpumem.copy(tensor, values_of(dtype, shape, 7))
            assert (library.fetch(array) == values_of(dtype, shape, 7)).all(), (dtype, shape)
        elif values.size and tensor.read_only:
            with pytest.raises(BufferError, match="read-only"):
                gpumem.copy(tensor, values)


@pytest.mark.parametrize(
    ("library", "protocol"),
    [(name, way) for name, way in EVERY_WAY if LIBRARIES[name].strides],
    indirect=["library"],
)
def test_strides_are_exchanged_in_both_directions(library, protocol):
    values = values_of("i4", (6, 8, 10))
    tensor = on_gpu(values)
    cut = np.s_[1:, ::2, 3:7]
    seen = library.take(tensor[cut], protocol)
    assert (library.fetch(seen) == values[cut]).all()
    back = library.give(seen, protocol)
    assert back.strides == tensor[cut].strides
    assert (fetch(back) == values[cut]).all()


def test_all_libraries_share_one_tensor():
    values = values_of("f4", (100,))
    tensor = on_gpu(values)
    seen = [LIBRARIES[name]().take(tensor, way) for name, way in EVERY_WAY]
    for (name, way), array in zip(EVERY_WAY, seen, strict=True):
        assert LIBRARIES[name]().address(array) == tensor.ptr, (name, way)
    LIBRARIES["torch"]().assign(seen[0], LIBRARIES["torch"]().array(values + 1))
    for (name, way), array in zip(EVERY_WAY, seen, strict=True):
        assert (LIBRARIES[name]().fetch(array) == values + 1).all(), (name, way)


@pytest.mark.parametrize("library", ["torch", "cupy", "jax"], indirect=True)
@pytest.mark.parametrize("dtype", ["bfloat16", "float8_e4m3fn", "float8_e5m2"])
def test_small_floats_round_trip(library, dtype):
    ml_dtypes = pytest.importorskip("ml_dtypes", reason="ml_dtypes is not installed")
    values = np.array([0.5, -2, 1.5, 448], getattr(ml_dtypes, dtype))
    tensor = on_gpu(values)
    try:
        seen = library.take(tensor)
    except (BufferError, RuntimeError, TypeError, ValueError, KeyError) as error:
        pytest.skip(f"{type(library).__name__} takes no {dtype} through DLPack: {error}")
    assert dtype in str(seen.dtype)
    assert library.address(seen) == tensor.ptr
    back = gpumem.from_dlpack(seen)
    assert back.dtype == values.dtype
    assert (fetch(back).view(np.uint8) == values.view(np.uint8)).all()


def test_cuda_core_buffers_are_exchanged():
    core = pytest.importorskip("cuda.core", reason="cuda.core is not installed")
    utils = pytest.importorskip("cuda.core.utils", reason="cuda.core has no utils")
    values = values_of("f4", (4, 6))
    tensor = on_gpu(values)
    for see in ("from_dlpack", "from_cuda_array_interface"):
        stream = gpumem.Stream("cuda:0")
        view = getattr(utils.StridedMemoryView, see)(tensor, stream_ptr=stream.ptr)
        assert (view.ptr, tuple(view.shape)) == (tensor.ptr, (4, 6)), see
        assert np.dtype(view.dtype) == values.dtype, see
        assert view.is_device_accessible, see
    device = core.Device(0)
    device.set_current()
    buffer = device.allocate(1000, stream=device.default_stream)
    device.sync()
    given = gpumem.from_dlpack(buffer)
    assert (given.ptr, given.nbytes) == (int(buffer.handle), 1000)
    gpumem.copy(given.view("u1"), np.full(1000, 9, np.uint8))
    assert (fetch(given.view("u1")) == 9).all()


# ---- order ---------------------------------------------------------------------------------------


def held_write(gate, stream):
    """Return zeros in device memory, to be written with sevens once the gate is open."""
    tensor = gpumem.zeros(N, "i4", memory="cuda:0", stream=stream)
    sevens = gpumem.full(N, 7, "i4", memory="cuda:0", stream=stream)
    stream.synchronize()
    gate.hold(stream)
    gpumem.copy(tensor, sevens, stream)
    return tensor


def warm(library, side):
    """Load the code that the test will need: that may wait for the device."""
    zeros = library.array(np.zeros(N, np.int32))
    with library.on(side):
        library.assign(library.array(np.zeros(N, np.int32)), zeros)
        library.assign(zeros, library.take(on_gpu(np.zeros(N, np.int32)), library.ordered[0]))
    library.fetch(zeros)
    return zeros


@pytest.mark.parametrize("library", ["torch", "cupy"], indirect=True)
def test_dlpack_consumer_stream_waits_for_the_buffers(library, gate):
    side, own = library.stream(), gpumem.Stream("cuda:0")
    out = warm(library, side)
    tensor = held_write(gate, own)
    with library.on(side):
        library.assign(out, library.take(tensor))
    assert not library.done(side)
    assert not gate.is_open
    gate.open()
    assert (library.fetch(out) == 7).all()


@pytest.mark.parametrize("library", ["torch", "cupy"], indirect=True)
def test_consumer_that_requests_no_order_does_not_wait(library, gate):
    """Shows that the test above can fail."""
    side, own = library.stream(), gpumem.Stream("cuda:0")
    out = warm(library, side)
    tensor = held_write(gate, own)
    with library.on(side):
        library.assign(out, library.take(Unordered(tensor)))
    gpumem.Stream.from_handle("cuda:0", stream_handle(side)).synchronize()
    assert not gate.is_open
    gate.open()
    assert (library.fetch(out) == 0).all()


def test_jax_waits_for_the_buffers_stream(gate):
    library, own = LIBRARIES["jax"](), gpumem.Stream("cuda:0")
    library.increased(library.take(on_gpu(np.zeros(N, np.int32)))).block_until_ready()
    tensor = held_write(gate, own)
    gate.open_after(0.3)
    result = library.increased(library.take(tensor))
    assert (np.asarray(result) == 8).all()
    assert gate.is_open


def test_gpumem_waits_for_jax(gate):
    library, own = LIBRARIES["jax"](), gpumem.Stream("cuda:0")
    library.increased(library.take(on_gpu(np.zeros(N, np.int32)))).block_until_ready()
    tensor = held_write(gate, own)
    gate.open_after(0.3)
    result = gpumem.from_dlpack(library.increased(library.take(tensor)))
    assert (fetch(result) == 8).all()


@pytest.mark.parametrize("library", ["cupy", "numba"], indirect=True)
def test_cuda_array_interface_consumer_waits_for_its_stream(library, gate):
    own = gpumem.Stream("cuda:0")
    warm(library, library.stream())
    tensor = held_write(gate, own)
    gate.open_after(0.3)
    seen = library.take(tensor, "cuda_array_interface")
    assert gate.is_open
    assert (library.fetch(seen) == 7).all()


def test_numba_with_sync_off_does_not_wait(gate):
    """Shows that the test above can fail."""
    library, own = LIBRARIES["numba"](), gpumem.Stream("cuda:0")
    tensor = held_write(gate, own)
    seen = library.cuda.as_cuda_array(OnlyCudaArray(tensor), sync=False)
    assert not gate.is_open
    gate.open()
    own.synchronize()
    assert (library.fetch(seen) == 7).all()


@pytest.mark.parametrize(("library", "protocol"), ORDERED, indirect=["library"])
def test_import_waits_for_the_producers_queued_work(library, protocol, gate):
    out, reader, side = gpumem.zeros(N, "i4", memory=HOST_ACCESSIBLE[0]), *streams(library)
    warm(library, side)
    array = library.array(np.zeros(N, np.int32), side)
    sevens = library.array(np.full(N, 7, np.int32), side)
    gate.hold(stream_handle(side))
    with library.on(side):
        library.assign(array, sevens)
        tensor = library.give(array, protocol)
    gpumem.copy(out, tensor, reader)
    assert not reader.query()
    assert not gate.is_open
    gate.open()
    assert (out.numpy() == 7).all()


@pytest.mark.parametrize("library", ["torch", "cupy"], indirect=True)
def test_import_without_a_stream_does_not_wait(library, gate):
    """Shows that the test above can fail."""
    out, reader, side = gpumem.zeros(N, "i4", memory=HOST_ACCESSIBLE[0]), *streams(library)
    warm(library, side)
    array = library.array(np.zeros(N, np.int32), side)
    sevens = library.array(np.full(N, 7, np.int32), side)
    gate.hold(stream_handle(side))
    with library.on(side):
        library.assign(array, sevens)
        tensor = gpumem.from_dlpack(Unordered(array))
    gpumem.copy(out, tensor, reader)
    reader.synchronize()
    assert not gate.is_open
    assert (out.numpy(sync=False) == 0).all()


def streams(library):
    return gpumem.Stream("cuda:0"), library.stream()


def test_two_libraries_are_ordered_on_streams_without_host_waits(gate):
    libraries = [LIBRARIES["torch"](), LIBRARIES["cupy"]()]
    sides = [library.stream() for library in libraries]
    tensor = on_gpu(np.zeros(N, np.int32))
    for library, side in zip(libraries, sides, strict=True):
        with library.on(side):
            library.increase(library.take(tensor))  # loads its code
        library.fetch(library.take(tensor))
    own = gpumem.Stream("cuda:0")
    link = held_write(gate, own)
    for step in range(40):
        library, side = libraries[step % 2], sides[step % 2]
        with library.on(side):
            array = library.take(link)
            library.increase(array)
            link = gpumem.from_dlpack(array)
    assert not any(library.done(side) for library, side in zip(libraries, sides, strict=True))
    assert not gate.is_open
    gate.open()
    assert (fetch(link) == 47).all()


# ---- lifetime ------------------------------------------------------------------------------------


@pytest.mark.parametrize("order", list(itertools.permutations(range(4))))
def test_memory_lives_until_the_last_view_goes_in_any_order(arena, order):
    values = values_of("f4", (1000,))
    tensor = on_gpu(values, resource=arena)
    torch, cupy, numba = (LIBRARIES[name]() for name in ("torch", "cupy", "numba"))
    views = [
        (tensor, fetch),
        (torch.take(tensor), torch.fetch),
        (cupy.take(tensor), cupy.fetch),
        (numba.take(tensor, "cuda_array_interface"), numba.fetch),
    ]
    del tensor
    for number in order:
        assert arena.stats().requested_in_use == 4000
        for view, read in filter(None, views):
            assert (read(view) == values).all()
        view = views[number] = None
        gc.collect()
    assert arena.stats().requested_in_use == 0


def test_jax_array_keeps_the_memory(arena):
    library = LIBRARIES["jax"]()
    values = values_of("f4", (1000,))
    tensor = on_gpu(values, resource=arena)
    seen = library.take(tensor)
    del tensor
    gc.collect()
    assert arena.stats().requested_in_use == 4000
    assert (library.fetch(seen) == values).all()
    del seen
    gc.collect()
    assert arena.stats().requested_in_use == 0


@pytest.mark.parametrize("library", ["torch", "cupy"], indirect=True)
@pytest.mark.parametrize("order", list(itertools.permutations(range(4))))
def test_producers_memory_lives_as_long_as_views_of_it(library, order):
    other = LIBRARIES["cupy" if type(library).__name__ == "Torch" else "torch"]()
    gc.collect()
    base = library.used_bytes()
    values = values_of("f4", (1000,))
    array = library.array(values)
    tensor = gpumem.from_dlpack(array)
    views = [
        (array, library.fetch),
        (tensor, fetch),
        (tensor[10:], fetch),
        (other.take(tensor), other.fetch),
    ]
    del array, tensor
    for number in order:
        assert library.used_bytes() > base
        for view, read in filter(None, views):
            assert (read(view)[-990:] == values[-990:]).all()
        view = views[number] = None
        gc.collect()
    assert library.used_bytes() == base


# ---- the CPU -------------------------------------------------------------------------------------


@pytest.mark.parametrize("memory", HOST_ACCESSIBLE)
@pytest.mark.parametrize(
    "look",
    [
        lambda tensor: tensor.numpy(),
        lambda tensor: np.asarray(tensor),
        lambda tensor: np.asarray(memoryview(tensor)),
        lambda tensor: np.from_dlpack(tensor.export_as("cpu")),
    ],
    ids=["numpy()", "asarray", "memoryview", "from_dlpack"],
)
def test_cpu_sees_gpu_writes_to_host_accessible_memory_in_place(memory, look, gate):
    stream = gpumem.Stream("cuda:0")
    sevens = gpumem.full(N, 7, "i4", memory="cuda:0", stream=stream)
    tensor = gpumem.zeros(N, "i4", memory=memory, stream=stream)
    stream.synchronize()
    gate.hold(stream)
    gpumem.copy(tensor, sevens, stream)
    assert not stream.query()
    gate.open_after(0.3)
    array = look(tensor)
    assert gate.is_open
    assert array.ctypes.data == tensor.ptr
    assert (array == 7).all()
    del tensor
    gc.collect()
    assert (array == 7).all()


def test_cpu_view_with_sync_false_does_not_wait(gate):
    """Shows that the test above can fail."""
    stream = gpumem.Stream("cuda:0")
    sevens = gpumem.full(N, 7, "i4", memory="cuda:0", stream=stream)
    tensor = gpumem.zeros(N, "i4", memory=HOST_ACCESSIBLE[0], stream=stream)
    stream.synchronize()
    gate.hold(stream)
    gpumem.copy(tensor, sevens, stream)
    assert (tensor.numpy(sync=False) == 0).all()
    assert not gate.is_open


@pytest.mark.parametrize(
    "ask",
    [
        lambda tensor: tensor.to("host").numpy(),
        lambda tensor: np.from_dlpack(tensor, device="cpu"),
        lambda tensor: np.from_dlpack(Asked(tensor, dl_device=(1, 0))),
    ],
    ids=["to", "numpy's device", "dl_device"],
)
def test_device_memory_is_copied_to_the_cpu_after_the_streams_work(ask, gate):
    stream = gpumem.Stream("cuda:0")
    tensor = held_write(gate, stream)
    gate.open_after(0.3)
    array = ask(tensor)
    assert gate.is_open
    assert (array == 7).all()
    assert not np.shares_memory(array, ask(tensor))


class Asked:
    """A producer that is asked with more than its consumer says."""

    def __init__(self, tensor, **more):
        self.tensor, self.more = tensor, more

    def __dlpack_device__(self):
        return self.more.get("dl_device", self.tensor.__dlpack_device__())

    def __dlpack__(self, **options):
        return self.tensor.__dlpack__(**(options | self.more))


def test_cpu_views_of_device_memory_are_refused():
    tensor = on_gpu(values_of("f4"))
    for look in (tensor.numpy, lambda: np.asarray(tensor), lambda: memoryview(tensor)):
        with pytest.raises(BufferError, match=r"\.to\('host'\)"):
            look()
    with pytest.raises(BufferError):
        tensor.__dlpack__(dl_device=(1, 0), copy=False, max_version=(1, 0))
    with pytest.raises(BufferError):
        tensor.export_as("cpu")


# ---- other devices of one memory -----------------------------------------------------------------


@pytest.mark.parametrize("memory", HOST_ACCESSIBLE)
@pytest.mark.parametrize("library", ["torch", "cupy"], indirect=True)
def test_export_as_presents_cpu_memory_to_the_gpu(memory, library):
    tensor = gpumem.zeros(N, "i4", memory=memory)
    seen = library.take(tensor.export_as("cuda"))
    assert library.address(seen) == tensor.ptr
    library.assign(seen, library.array(np.full(N, 5, np.int32)))
    library.fetch(seen)
    assert (tensor.numpy() == 5).all()
    tensor.numpy()[:] = 6
    assert (library.fetch(seen) == 6).all()


@pytest.mark.parametrize("memory", HOST_ACCESSIBLE)
def test_torch_imports_memory_exported_as_cpu(memory):
    torch = pytest.importorskip("torch", reason="PyTorch is not installed")
    tensor = gpumem.full(N, 3, "i4", memory=memory)
    seen = torch.from_dlpack(tensor.export_as("cpu"))
    assert (seen.device.type, seen.data_ptr()) == ("cpu", tensor.ptr)
    seen.add_(1)
    assert (tensor.numpy() == 4).all()


def test_each_memory_kind_has_its_dlpack_device():
    told = {
        memory: gpumem.empty(4, "f4", memory=memory).__dlpack_device__()
        for memory in ("cuda:0", *HOST_ACCESSIBLE)
    }
    assert told == {"cuda:0": (2, 0), HOST_ACCESSIBLE[0]: (1, 0), HOST_ACCESSIBLE[1]: (13, 0)}
    pinned = gpumem.empty(4, "f4", memory=HOST_ACCESSIBLE[0])
    assert pinned.export_as("cuda_host").__dlpack_device__() == (3, 0)


@pytest.mark.parametrize("memory", HOST_ACCESSIBLE)
def test_cuda_array_interface_covers_host_accessible_memory(memory):
    library = LIBRARIES["cupy"]()
    tensor = gpumem.full(N, 3, "i4", memory=memory)
    seen = library.take(tensor, "cuda_array_interface")
    assert library.address(seen) == tensor.ptr
    assert (library.fetch(seen) == 3).all()
    assert str(gpumem.asarray(OnlyCudaArray(tensor)).memory) == memory


# ---- read-only -----------------------------------------------------------------------------------


def test_read_only_is_kept_by_every_protocol():
    tensor = on_gpu(values_of("f4")).as_read_only()
    assert tensor.__cuda_array_interface__["data"] == (tensor.ptr, True)
    for seen in (gpumem.asarray(OnlyCudaArray(tensor)), gpumem.from_dlpack(Asked(tensor))):
        assert seen.read_only
        with pytest.raises(BufferError, match="read-only"):
            gpumem.copy(seen, values_of("f4"))
    with pytest.raises(BufferError, match="max_version"):
        tensor.__dlpack__()
    pinned = gpumem.zeros(4, "f4", memory=HOST_ACCESSIBLE[0]).as_read_only()
    for array in (pinned.numpy(), np.from_dlpack(pinned)):
        assert not array.flags.writeable


def test_copy_of_an_import_leaves_the_default_stream_alone_where_another_is_named():
    import cupy

    given = cupy.arange(4096, dtype=cupy.uint8)
    own, side = gpumem.Stream("cuda:0"), gpumem.Stream("cuda:0")
    target = gpumem.empty(4096, "u1", memory="cuda:0", stream=side)
    gpumem.Device("cuda:0").synchronize()
    timeline = gpumem.interop.HostTimeline.create()
    side.wait(timeline.point(1))
    tensor = gpumem.from_dlpack(given, stream=own)
    assert tensor.buffer.stream == own
    gpumem.copy(target, tensor, side)
    assert not own.query()
    gpumem.Stream.from_handle("cuda:0", 1).synchronize()  # returns, because it has nothing to do
    timeline.signal(1)
    side.synchronize()
    assert (fetch(target) == cupy.asnumpy(given)).all()
