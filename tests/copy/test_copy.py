"""copy(): what it takes, what it refuses, and how many driver calls that is."""

import array as arrays
import itertools

import numpy as np
import pytest
from helpers import child
from helpers.arrays import MEMORIES, elements, put

import gpumem

PAIRS = list(itertools.product(MEMORIES, MEMORIES))


@pytest.fixture
def counted(host):
    """Run a copy and tell which driver functions moved bytes, and how often."""
    names = ["cuMemcpyAsync", "cuMemcpy2DAsync", "cuMemcpy3DAsync", "cuMemcpyPeerAsync"]

    def run(*arguments):
        host.reset_counts()
        gpumem.copy(*arguments)
        return {name: host.call_count(name) for name in names if host.call_count(name)}

    return run


# ---- every memory --------------------------------------------------------------------------------


@pytest.mark.parametrize(("to", "origin"), PAIRS)
@pytest.mark.parametrize("given", [False, True], ids=["own-stream", "stream"])
def test_copy_between_any_pair_of_memories(to, origin, given, stream):
    data = np.arange(60, dtype=np.int16).reshape(3, 4, 5)
    dst, src = put(np.zeros_like(data), to), put(data, origin)
    gpumem.copy(dst, src, *([stream] if given else []))
    stream.synchronize()
    assert (elements(dst) == data).all()


@pytest.mark.parametrize("shape", [(), (1,), (0,), (3, 0, 2), (1, 1, 1)])
@pytest.mark.parametrize(("to", "origin"), [("host", "numpy"), ("numpy", "host"), ("host",) * 2])
def test_copy_of_extreme_ranks_and_lengths(shape, to, origin, stream):
    data = np.full(shape, 7, np.float64)
    dst = put(np.zeros(shape), to)
    gpumem.copy(dst, put(data, origin))
    gpumem.copy(dst, put(data, origin), stream)
    assert (elements(dst) == data).all()


def test_empty_copy_makes_no_driver_call(counted, stream):
    empty = gpumem.empty((0, 3), "int8", memory="host")
    assert counted(empty, np.empty((0, 3), np.int8), stream) == {}


def test_copy_accepts_buffers_and_the_buffer_protocol(arena):
    with arena.allocate(8) as buffer:
        gpumem.copy(buffer, np.arange(8, dtype=np.uint8))
        target = bytearray(8)
        gpumem.copy(target, buffer)
        assert target == bytes(range(8))
        gpumem.copy(buffer, bytes(8))
        assert bytes(buffer) == bytes(8)
    numbers = arrays.array("d", [0.0] * 3)
    gpumem.copy(numbers, np.array([1.0, 2.0, 3.0]))
    assert numbers.tolist() == [1.0, 2.0, 3.0]


def test_copy_accepts_bare_dlpack_producers():
    class Producer:
        def __init__(self, array):
            self.array = array

        def __dlpack__(self, **arguments):
            return self.array.__dlpack__(**arguments)

        def __dlpack_device__(self):
            return self.array.__dlpack_device__()

    target = np.zeros(4, np.int32)
    gpumem.copy(Producer(target), Producer(np.arange(4, dtype=np.int32)))
    assert target.tolist() == [0, 1, 2, 3]


def test_copy_of_structured_and_complex_elements():
    record = np.dtype([("a", "i1"), ("b", "f8")])
    data = np.array([(1, 2.5), (3, 4.5)], record)
    target = np.zeros(2, record)
    gpumem.copy(target, data)
    assert target.tolist() == data.tolist()


def test_copy_from_a_broadcast_source():
    target = np.zeros((3, 4), np.int16)
    gpumem.copy(target, np.broadcast_to(np.arange(4, dtype=np.int16), (3, 4)))
    assert (target == np.arange(4)).all()


# ---- between devices -----------------------------------------------------------------------------


def test_copy_between_two_devices():
    child.run_quietly("""
        import gpumem, numpy as np
        from gpumem._testing import host_device
        gpumem.device.set_host_device_count(2)
        data = np.arange(40, dtype="i4").reshape(5, 8)
        expected = data.copy()
        expected[1:4, 2:5] = data[1:4, ::-1][:, 2:5]
        here, there = gpumem.Stream("host:0"), gpumem.Stream("host:1")
        host_device.set_lag(2_000_000)
        # A device that may access the other's memory copies boxes in one call, any other only rows.
        calls = {"on_use": ["cuMemcpyAsync", "cuMemcpy2DAsync"], "none": ["cuMemcpyPeerAsync"]}
        for peers, (line, *box) in calls.items():
            for stream in (here, there):
                # The one that copies is given access to the other's arena.
                near = gpumem.empty((5, 8), "i4", resource=gpumem.Arena("host:0", {"peers": peers}))
                far = gpumem.empty((5, 8), "i4", resource=gpumem.Arena("host:1", {"peers": peers}))
                gpumem.copy(near, data)
                host_device.reset_counts()
                gpumem.copy(far, near, stream)
                assert host_device.call_count(line) == 1
                assert (far.numpy() == data).all()
                gpumem.copy(far[1:4, 2:5], near[1:4, 2:5], stream)
                assert [host_device.call_count(name) for name in box] == [1] * len(box)
                assert (far.numpy() == data).all()
                gpumem.copy(far[1:4, 2:5], near[1:4, ::-1][:, 2:5], stream)
                assert (far.numpy() == expected).all()
                assert (host_device.call_count("cuMemcpyPeerAsync") == 0) == (peers == "on_use")
                gpumem.copy(far, near)
        gpumem.copy(near[::-1], data, there)
        there.synchronize()
        assert (near.numpy()[::-1] == data).all()
    """)


def test_copy_between_a_device_and_anothers_pinned_memory_on_any_stream():
    child.run_quietly("""
        import itertools
        import gpumem, numpy as np
        from gpumem._testing import host_device
        from helpers.driver import HostDriver
        gpumem.device.set_host_device_count(2)
        drivers = {each: HostDriver(each) for each in ("host:0", "host:1")}
        streams = [None, *(gpumem.Stream(each) for each in drivers)]
        kinds = ["host:0", "host:1", "host:0/host_accessible", "host:1/managed"]
        cuts = [np.s_[:], np.s_[::2, 1:], np.s_[::-1, ::3]]
        host_device.set_lag(2_000_000)
        host_device.find_misuse(True)
        for to, origin, stream, cut in itertools.product(kinds, kinds, streams, cuts):
            if to[:6] == origin[:6]:
                continue
            src = gpumem.full((300, 30), 7, "u1", memory=origin)
            dst = gpumem.zeros((300, 30), "u1", memory=to)
            for tensor in (src, dst):
                tensor.numpy()      # waits
            if stream is not None:
                if str(stream.device) != origin[:6]:
                    src.buffer.resource.enable_peer(stream.device)
                drivers[str(stream.device)].fill(src.buffer, 9, stream)
            gpumem.copy(dst[cut], src[cut], stream)
            if stream is not None:
                stream.synchronize()
                assert (dst.numpy(sync=False)[cut] == 9).all(), (to, origin, stream)
            else:
                assert (dst.numpy()[cut] == 7).all(), (to, origin)
        assert not host_device.misuse_count("unordered access"), host_device.misuse_report()
        assert not host_device.misuse_count("wrong context"), host_device.misuse_report()
        host_device.find_misuse(False)
    """)


# ---- the fewest calls ----------------------------------------------------------------------------


def test_contiguous_copy_is_one_driver_call_at_any_rank(counted, stream):
    shape = (2, 3, 4, 5, 6)
    dst = gpumem.empty(shape, "int32", memory="host")
    src = gpumem.zeros(shape, "int32", memory="host")
    assert counted(dst, src, stream) == {"cuMemcpyAsync": 1}
    assert counted(dst[1], src[0], stream) == {"cuMemcpyAsync": 1}


@pytest.mark.parametrize(
    ("shape", "cut", "function"),
    [
        ((6, 30), np.s_[:, 2:5], "cuMemcpy2DAsync"),
        ((6, 30), np.s_[::2], "cuMemcpy2DAsync"),
        ((6, 30), np.s_[::-2, ::3], "cuMemcpy3DAsync"),
        ((6, 8, 10), np.s_[:, 1:4, 2:9], "cuMemcpy3DAsync"),
        ((6, 8, 10), np.s_[:, :, 2:9], "cuMemcpy2DAsync"),
        ((6, 8, 10), np.s_[::-1, :6:2, 1:4], "cuMemcpy3DAsync"),
    ],
)
def test_pitched_copy_is_one_driver_call(shape, cut, function, counted, stream):
    src = np.arange(np.prod(shape), dtype=np.int32).reshape(shape)
    dst = gpumem.zeros(shape, "int32", memory="host")
    calls = counted(dst[cut], put(src, "host")[cut], stream)
    expected = np.zeros_like(src)
    expected[cut] = src[cut]
    assert (dst.numpy() == expected).all()
    assert calls == {function: 1}


def test_fourth_dimension_costs_one_call_per_index_of_the_shortest(counted, stream):
    dst = gpumem.zeros((3, 9, 8, 10), "int32", memory="host")
    src = gpumem.zeros((3, 9, 8, 10), "int32", memory="host")
    cut = np.s_[:, ::2, 1:7, 2:9]
    assert counted(dst[cut], src[cut], stream) == {"cuMemcpy3DAsync": 3}


def test_layout_of_thousands_of_calls_is_packed_instead(counted, stream):
    data = np.arange(90_000, dtype=np.int32).reshape(300, 300)
    src = put(data, "host")
    dst = gpumem.empty((300, 300), "int32", memory="host")
    calls = counted(dst, np.transpose(src.numpy()), stream)
    stream.synchronize()
    assert (dst.numpy() == data.T).all()
    assert sum(calls.values()) < 20


# ---- what is refused, with nothing changed -------------------------------------------------------


@pytest.mark.parametrize(
    ("dst", "src", "error", "said"),
    [
        (np.zeros(3), np.zeros(3, "f4"), TypeError, "float64.*float32"),
        (np.zeros(3), np.zeros(3, ">f8"), TypeError, ">f8"),
        (np.zeros(3), np.zeros(4), ValueError, r"\(3,\).*\(4,\)"),
        (np.zeros((2, 3)), np.zeros(3), ValueError, "broadcast"),
        (np.zeros((1, 3)), np.zeros(3), ValueError, r"\(1, 3\)"),
        ([0.0, 0.0], np.zeros(2), TypeError, "dst of type list"),
        (np.zeros(2), [1.0, 2.0], TypeError, "src of type list"),
        (np.zeros(()), 1.0, TypeError, "src of type float"),
        (np.broadcast_to(np.zeros(1), (3,)), np.ones(3), BufferError, "read-only"),
        (bytes(3), bytearray(3), BufferError, "read-only"),
    ],
)
def test_refused_copy_names_the_reason(dst, src, error, said):
    before = np.array(dst)
    with pytest.raises(error, match=said):
        gpumem.copy(dst, src)
    assert (np.array(dst) == before).all()


def test_copy_to_a_read_only_tensor_is_refused():
    tensor = gpumem.zeros(3, "int8", memory="host")
    with pytest.raises(BufferError, match="read-only"):
        gpumem.copy(tensor.as_read_only(), np.ones(3, np.int8))
    assert tensor.numpy().tolist() == [0, 0, 0]


@pytest.mark.parametrize(
    ("shape", "strides"),
    [((3, 4), (0, 8)), ((4, 2), (8, 8)), ((3,), (4,)), ((2, 3), (-8, 4)), ((3, 3), (24, 28))],
)
def test_copy_to_elements_that_share_bytes_is_refused(shape, strides):
    numbers = np.zeros(40)
    shared = np.ndarray(shape, numbers.dtype, numbers, 80, strides)
    with pytest.raises(ValueError, match="share bytes"):
        gpumem.copy(shared, np.ones(shape))
    assert not numbers.any()


def test_copy_is_refused_exactly_where_elements_of_its_destination_share_bytes(rng):
    refused = 0
    for _ in range(500):
        shape = [rng.randint(1, 4) for _ in range(rng.randint(1, 4))]
        strides = [rng.randint(-14, 14) for _ in shape]
        dtype = np.dtype(rng.choice(["u1", "u2", "u4"]))
        dst = np.ndarray(shape, dtype, np.zeros(400, "u1"), 200, strides)
        places = sorted(np.dot(index, strides) for index in np.ndindex(*shape))
        shares = any(later - first < dtype.itemsize for first, later in itertools.pairwise(places))
        values = np.arange(dst.size, dtype=dtype).reshape(shape)
        if shares:
            with pytest.raises(ValueError, match="share bytes"):
                gpumem.copy(dst, values)
        else:
            gpumem.copy(dst, values)
            assert (dst == values).all()
        refused += shares
    assert 0 < refused < 500


def test_copy_between_memories_of_the_cpu_takes_a_stream_of_any_device():
    child.run_quietly("""
        import gpumem, numpy as np
        gpumem.device.set_host_device_count(2)
        stream = gpumem.Stream("host:1")
        numbers = np.arange(5)
        tensor = gpumem.asarray(numbers).to("host:0", copy=True)
        for array in (numbers, tensor):
            gpumem.copy(array[1:], array[:-1], stream)     # they overlap
            stream.synchronize()
            assert array.tolist() == [0, 0, 1, 2, 3]
        for part in (tensor, tensor[::2]):
            try:
                part.fill(7, stream)
            except ValueError:
                continue
            raise AssertionError("a fill on a stream of another device")
        assert tensor.tolist() == [0, 0, 1, 2, 3]
    """)


@pytest.mark.parametrize("closed", ["dst", "src"])
def test_copy_of_a_closed_buffer_is_refused(closed):
    ends = {
        "dst": gpumem.zeros(3, "int8", memory="host"),
        "src": gpumem.zeros(3, "int8", memory="host"),
    }
    ends[closed].buffer.close()
    with pytest.raises(gpumem.errors.ClosedError):
        gpumem.copy(ends["dst"], ends["src"])


def test_copy_from_a_closed_buffer_into_its_block_is_refused():
    arena = gpumem.Arena("host")
    src = gpumem.full(1 << 20, 7, "uint8", resource=arena)
    address = src.buffer.ptr
    src.buffer.close()
    dst = gpumem.empty(1 << 20, "uint8", resource=arena)
    assert dst.buffer.ptr == address
    with pytest.raises(gpumem.errors.ClosedError):
        gpumem.copy(dst, src)


@pytest.mark.parametrize("stream", ["fast", -1, object(), 1.5, True])
def test_copy_rejects_an_invalid_stream(stream):
    for dst in (np.zeros(3), gpumem.zeros(3, "float64", memory="host")):
        with pytest.raises((TypeError, ValueError)):
            gpumem.copy(dst, np.ones(3), stream)
        assert (elements(dst) == 0).all()


# ---- overlap -------------------------------------------------------------------------------------


@pytest.mark.parametrize("memory", MEMORIES)
@pytest.mark.parametrize(
    ("dst", "src"),
    [
        (np.s_[1:], np.s_[:-1]),
        (np.s_[:-1], np.s_[1:]),
        (np.s_[::-1], np.s_[:]),
        (np.s_[::2], np.s_[:50]),
        (np.s_[:], np.s_[:]),
    ],
)
@pytest.mark.parametrize("given", [False, True], ids=["own-stream", "stream"])
def test_overlapping_copy_equals_a_copy_through_a_third_array(memory, dst, src, given, stream):
    data = np.arange(100, dtype=np.int64)
    array = put(data, memory)
    gpumem.copy(array[dst], array[src], *([stream] if given else []))
    stream.synchronize()
    expected = data.copy()
    expected[dst] = data[src].copy()
    assert (elements(array) == expected).all()


def test_copy_onto_itself_does_nothing(counted, stream):
    tensor = gpumem.zeros((4, 4), "int8", memory="host")
    assert counted(tensor, tensor, stream) == {}
