"""Two GPUs: copies between them, in order; who reaches what; nothing of one in the other."""

import itertools

import numpy as np
import pytest
from helpers.child import python
from helpers.libraries import LIBRARIES

import gpumem

COUNT = sum(device.type == "cuda" for device in gpumem.devices())
pytestmark = [
    pytest.mark.skipif(COUNT < 2, reason=f"needs two CUDA devices: {COUNT} found"),
    pytest.mark.filterwarnings("default"),
]

MIB = 1 << 20
DEVICES = ["cuda:0", "cuda:1"]
KINDS = ["", "/host_accessible", "/managed"]
MEMORIES = [device + kind for device, kind in itertools.product(DEVICES, KINDS)]


def place(array, memory):
    tensor = gpumem.empty(array.shape, array.dtype, memory=memory)
    gpumem.copy(tensor, array)
    return tensor


def fetch(tensor):
    whole = np.empty(tensor.shape, tensor.dtype)
    gpumem.copy(whole, tensor)
    return whole


@pytest.mark.parametrize(
    ("to", "origin"),
    [pair for pair in itertools.product(MEMORIES, MEMORIES) if pair[0][:6] != pair[1][:6]],
)
@pytest.mark.parametrize("whose", [None, 0, 1], ids=["no stream", "stream of 0", "stream of 1"])
def test_copy_between_each_memory_of_two_gpus(to, origin, whose):
    stream = None if whose is None else gpumem.Stream(DEVICES[whose])
    rng = np.random.default_rng(3)
    for shape in [(), (7,), (30, 40), (5, 6, 7), (1 << 22,), (300, 70, 50)]:
        data = rng.integers(0, 1 << 30, shape, np.int32)
        dst, src = place(np.zeros(shape, np.int32), to), place(data, origin)
        gpumem.copy(dst, src, stream)
        assert (fetch(dst) == data).all(), shape
        if len(shape) == 3:
            cut = np.s_[1:, ::2, 1:-1]
            dst = place(np.zeros(shape, np.int32), to)
            gpumem.copy(dst[cut], src[cut], stream)
            expected = np.zeros(shape, np.int32)
            expected[cut] = data[cut]
            assert (fetch(dst) == expected).all(), shape


@pytest.mark.parametrize("whose", [0, 1])
def test_copy_between_gpus_is_ordered_on_both_devices(whose, gate):
    streams = [gpumem.Stream(device) for device in DEVICES]
    source = gpumem.zeros(MIB, "u1", memory="cuda:0", stream=streams[0])
    sevens = gpumem.full(MIB, 7, "u1", memory="cuda:0", stream=streams[0])
    target = gpumem.zeros(MIB, "u1", memory="cuda:1", stream=streams[1])
    last = gpumem.zeros(MIB, "u1", memory="cuda:0", stream=streams[0])
    for device in DEVICES:
        gpumem.Device(device).synchronize()
    gate.hold(streams[0])
    gpumem.copy(source, sevens, streams[0])
    gpumem.copy(target, source, gpumem.Stream(DEVICES[whose]))
    gpumem.copy(last, target, gpumem.Stream(DEVICES[1 - whose]))
    assert not streams[1].query()
    assert not gate.is_open
    gate.open()
    assert (fetch(last) == 7).all()
    assert (fetch(target) == 7).all()


def test_source_is_not_reused_before_the_copy_to_the_other_gpu_is_done(gate):
    arena = gpumem.Arena("cuda:0", {"initial_chunk_size_bytes": MIB})
    source = gpumem.full(MIB, 4, "u1", resource=arena)
    target = gpumem.zeros(MIB, "u1", memory="cuda:1")
    stream, other = gpumem.Stream("cuda:1"), gpumem.Stream("cuda:0")
    for device in DEVICES:
        gpumem.Device(device).synchronize()
    held = gpumem.Stream("cuda:0")
    gate.hold(held)
    stream.wait(event_for(stream, held))
    gpumem.copy(target, source, stream)
    del source
    spoiler = gpumem.full(MIB, 99, "u1", resource=arena, stream=other)
    gate.open()
    assert (fetch(target) == 4).all()
    assert (fetch(spoiler) == 99).all()


def event_for(stream, held):
    """Return an event of the stream's device that comes after what a stream of another holds."""
    there = gpumem.zeros(8, "u1", memory=str(held.device), stream=held)
    here = gpumem.zeros(8, "u1", memory=str(stream.device))
    follower = gpumem.Stream(stream.device)
    gpumem.copy(here, there, follower)
    return follower.record()


def test_accessibility_between_two_gpus():
    for reader, memory in itertools.product(DEVICES, MEMORIES):
        assert gpumem.can_access(reader, memory) == memory.startswith(reader), (reader, memory)
    for memory in MEMORIES:
        assert gpumem.can_access("host", memory) == ("/" in memory)
        assert gpumem.Device("host").shares_memory_with(memory) == ("/" in memory)
    for a, b in itertools.product(MEMORIES, MEMORIES):
        if a[:6] != b[:6]:
            assert not gpumem.MemoryInfo.parse(a).shares_memory_with(b), (a, b)


def test_arenas_of_two_gpus_are_separate():
    arenas = [gpumem.Arena(device) for device in DEVICES]
    free = [gpumem.Device(device).free_bytes for device in DEVICES]
    buffer = arenas[1].allocate(1 << 30)
    assert gpumem.Device("cuda:1").free_bytes <= free[1] - (1 << 30)
    assert gpumem.Device("cuda:0").free_bytes >= free[0] - 64 * MIB
    assert arenas[0].stats().reserved == 0
    assert str(buffer.memory) == "cuda:1"
    assert buffer.__dlpack_device__() == (2, 1)
    with pytest.raises(ValueError, match="cuda:1"):
        arenas[0].allocate(8, gpumem.Stream("cuda:1"))
    buffer.close()
    for arena in arenas:
        arena.check_invariants()
        arena.close()
    assert gpumem.Device("cuda:1").free_bytes >= free[1] - 64 * MIB


@pytest.mark.parametrize("memory", ["cuda:1", "cuda:1/host_accessible", "cuda:1/managed"])
def test_memory_of_the_second_gpu_names_its_device(memory):
    library = LIBRARIES["cupy"]()
    tensor = gpumem.full(1000, 3, "i4", memory=memory)
    with library.cupy.cuda.Device(1):
        seen = library.take(tensor.export_as("cuda"))
        assert (seen.device.id, library.address(seen)) == (1, tensor.ptr)
        assert (library.fetch(seen) == 3).all()
        back = gpumem.from_dlpack(seen)
        assert back.device == gpumem.Device("cuda:1")  # managed memory is known as such
        assert str(gpumem.asarray(CudaArray(tensor)).memory) == memory
    assert tensor.export_as("cuda").__dlpack_device__() == (2, 1)


class CudaArray:
    def __init__(self, tensor):
        self._tensor = tensor
        self.__cuda_array_interface__ = tensor.__cuda_array_interface__


def test_copy_accepts_torch_tensors_of_both_gpus():
    torch = pytest.importorskip("torch", reason="PyTorch is not installed")
    source = torch.arange(MIB, dtype=torch.int32, device="cuda:1")
    target = torch.zeros(MIB, dtype=torch.int32, device="cuda:0")
    assert torch.cuda.current_device() == 0
    assert str(gpumem.from_dlpack(source).memory) == "cuda:1"
    gpumem.copy(target, source)
    torch.cuda.synchronize(0)
    assert (target.cpu() == torch.arange(MIB, dtype=torch.int32)).all()
    seen = torch.from_dlpack(gpumem.full(100, 2, "i4", memory="cuda:1"))
    assert seen.device == torch.device("cuda:1")
    assert int(seen.sum()) == 200


def test_current_device_of_the_caller_is_unchanged(driver):
    before = driver.call(driver.cuCtxGetCurrent)
    tensor = gpumem.full(1000, 3, "i4", memory="cuda:1")
    tensor.to("cuda:0").to("cuda:1")
    gpumem.Stream("cuda:1").synchronize()
    assert int(driver.call(driver.cuCtxGetCurrent)) == int(before)


def test_to_copies_between_gpus_or_names_the_reason():
    tensor = gpumem.full((30, 40), 3, "i4", memory="cuda:0")
    moved = tensor.to("cuda:1")
    assert str(moved.memory) == "cuda:1"
    assert (fetch(moved) == 3).all()
    with pytest.raises(BufferError, match="cuda:1"):
        tensor.to("cuda:1", copy=False)
    with pytest.raises(BufferError, match=r"\(2, 1\)"):
        tensor.__dlpack__(dl_device=(2, 1), max_version=(1, 0))


def test_sessions_on_two_gpus_use_their_own_memory():
    values = np.arange(MIB, dtype="f4")
    with gpumem.Environment() as environment:
        arenas = [environment.register(device) for device in DEVICES]
        x = gpumem.asarray(values).to("cuda:0")
        for device, arena in zip(DEVICES, arenas, strict=True):
            with gpumem.Session(device, environment=environment) as session:
                session.bind_input("x", x)
                session.bind_output("y")
                action = "alias" if device == "cuda:0" else "copy"
                assert session.copy_plan()["x"].action == action
                session.run(
                    lambda ctx: gpumem.copy(ctx.output("y", MIB, "f4"), ctx.inputs["x"], ctx.stream)
                )
                y = session.outputs()["y"]
                assert str(y.memory) == device
                assert y.buffer.resource is arena
                assert session.device_for_outputs() == [gpumem.Device(device)]
                assert (fetch(y) == values).all()
                del y


DATA_PARALLEL = """
import torch
layers = [torch.nn.Sequential(torch.nn.Linear(1024, 1024), torch.nn.GELU()) for _ in range(16)]
torch.manual_seed(0)
net = torch.nn.DataParallel(torch.nn.Sequential(*layers).cuda())
x = torch.linspace(-1, 1, 16384 * 1024).view(16384, 1024).cuda()
for _ in range(3):
    net.zero_grad()
    net(x).square().mean().backward()
print([each.grad.double().abs().sum().item().hex() for each in net.parameters()])
"""


def test_run_of_a_script_moves_what_the_threads_of_data_parallel_save(tmp_path):
    pytest.importorskip("torch", reason="PyTorch is not installed")
    script = tmp_path / "train.py"
    script.write_text(DATA_PARALLEL)
    run = "-m", "gpumem", "run"
    expected = python(*run, script)
    found = python(*run, "--max-mem", "700MiB", "--offload", script)
    said = sorted(each for each in found.stderr.splitlines() if "moved" in each)
    begins = [f"gpumem: offload on cuda:{i}: " for i in range(2)]
    assert [each[: len(begins[0])] for each in said] == begins
    assert found.stdout == expected.stdout
    # Without `--offload` the limit is too low.
    assert python(*run, "--max-mem", "700MiB", script, status=1).stdout == ""
