"""Peers on real GPUs: copies at the speed of the link, kernels, PyTorch's own copies."""

import itertools
import textwrap

import numpy as np
import pytest
from helpers.child import python
from helpers.driver import HostDriver

import gpumem
from gpumem.errors import PeerAccessError

GPUS = [str(device) for device in gpumem.devices() if device.type == "cuda"]
pytestmark = [
    pytest.mark.skipif(len(GPUS) < 2, reason=f"needs two CUDA devices: {len(GPUS)} found"),
    pytest.mark.filterwarnings("default"),
]
MIB = 1 << 20
PAIRS = list(itertools.permutations(GPUS, 2))


def fetch(tensor):
    whole = np.empty(tensor.shape, tensor.dtype)
    gpumem.copy(whole, tensor)
    return whole


def reaches(device, block, value=7):
    """Fill a block by a kernel of a device, and look at it from the owner's."""
    stream = gpumem.Stream(device)
    HostDriver(device).fill(block, value, stream)
    stream.synchronize()
    found = np.empty(block.nbytes, np.uint8)
    gpumem.copy(found, gpumem.from_dlpack(block).view("u1"))
    return bool((found == value).all())


@pytest.mark.parametrize(("origin", "to"), PAIRS)
@pytest.mark.parametrize("config", [{}, {"backing": "regions"}], ids=["pages", "regions"])
def test_copies_of_each_pair_are_right_and_make_the_device_that_copies_a_peer(origin, to, config):
    here, there = gpumem.Arena(origin, config), gpumem.Arena(to, config)
    data = np.random.default_rng(3).integers(0, 1 << 30, 5 * MIB, np.int32)
    src = gpumem.empty(data.shape, data.dtype, resource=here)
    gpumem.copy(src, data)
    for stream in (None, gpumem.Stream(to), gpumem.Stream(origin)):
        assert there.peers == ()  # without a stream the destination copies
        dst = gpumem.zeros(data.shape, data.dtype, resource=there)
        gpumem.copy(dst, src, stream)
        assert (fetch(dst) == data).all()
    assert list(map(str, here.peers)) == [to]
    assert list(map(str, there.peers)) == [origin]


@pytest.mark.parametrize(("owner", "peer"), PAIRS)
def test_kernels_of_a_peer_reach_what_there_is_and_what_comes_later(owner, peer):
    arena = gpumem.Arena(owner)

    def make():
        return [
            arena.allocate(80 * MIB),
            arena.allocate(1000),
            arena.allocate_persistent(MIB),
            arena.allocate(3 * MIB, shareable=True),
        ]

    blocks = make()
    arena.enable_peer(peer)
    blocks += make()
    assert all(reaches(peer, each) for each in blocks)
    arena.sleep()
    arena.wake()
    assert all(reaches(peer, each, 9) for each in blocks)


def test_every_gpu_is_a_peer_of_the_settings():
    arena = gpumem.Arena(GPUS[0], {"peers": GPUS})
    assert list(map(str, arena.peers)) == GPUS[1:]
    block = arena.allocate(40 * MIB)
    assert all(reaches(device, block, value) for value, device in enumerate(GPUS, 1))


def test_blocks_keep_their_peers_while_pages_move(rng):
    arena = gpumem.Arena(GPUS[0], {"page_move_threshold": 0, "page_move_budget": 1})
    blocks = []
    for step in range(300):
        if step == 60:
            for peer in GPUS[1:]:
                arena.enable_peer(peer)
        while blocks and rng.random() < 0.45:
            blocks.pop(rng.randrange(len(blocks))).close()
        blocks.append(arena.allocate(rng.choice([1000, 2 * MIB, 5 * MIB, 17 * MIB])))
        if step > 60:
            assert reaches(rng.choice(GPUS), rng.choice(blocks), step % 251)
    assert arena.stats().pages_moved > 5
    arena.check_invariants()


def test_streams_wait_for_events_of_other_gpus(gate):
    arena = gpumem.Arena(GPUS[0], {"peers": GPUS})
    block = arena.allocate(MIB)
    first, then = gpumem.Stream(GPUS[0]), gpumem.Stream(GPUS[1])
    HostDriver(GPUS[0]).fill(block, 1, first)
    first.synchronize()
    gate.hold(first)
    HostDriver(GPUS[0]).fill(block, 2, first)
    then.wait(first.record())
    HostDriver(GPUS[1]).fill(block, 3, then)
    assert not then.query()
    gate.open()
    then.synchronize()
    found = np.empty(MIB, np.uint8)
    gpumem.copy(found, gpumem.from_dlpack(block).view("u1"))
    assert (found == 3).all()


def test_no_gpu_is_a_peer_where_the_settings_say_none():
    here, there = (gpumem.Arena(each, {"peers": "none"}) for each in GPUS[:2])
    src = gpumem.full(MIB, 7, "u1", resource=here)
    dst = gpumem.zeros(MIB, "u1", resource=there)
    gpumem.copy(dst, src)
    assert (fetch(dst) == 7).all()
    assert here.peers == there.peers == ()


def test_gpu_that_does_not_exist_is_refused():
    with pytest.raises((ValueError, PeerAccessError)):
        gpumem.Arena(GPUS[0]).enable_peer("cuda:63")


# ---- PyTorch, each in a process of its own: it switches once -------------------------------------

TORCH = """
import gpumem, torch
from gpumem.integrations import torch as gpumem_torch
gpumem_torch.enable({resource}mode={mode!r})
assert torch.cuda.device_count() >= 2
"""
CHECKS = """
first = torch.full((1 << 20,), 1.0, device="cuda:0").to("cuda:1")
assert first.device.index == 1 and bool((first == 1).all())
back = torch.full((1 << 20,), 2.0, device="cuda:1").to("cuda:0")
assert back.device.index == 0 and bool((back == 2).all())
for a, b in ((0, 1), (1, 0)):
    for rows, columns in ((7, 5), (1000, 3000)):
        src = torch.arange(rows * columns, device=f"cuda:{a}", dtype=torch.float32)
        src = src.view(rows, columns)
        dst = torch.zeros(rows, columns, device=f"cuda:{b}")
        dst.copy_(src)
        assert torch.equal(dst.cpu(), src.cpu())
        # Not contiguous, and of another type: kernels that read the other GPU's memory.
        there = torch.zeros(columns, rows, device=f"cuda:{b}")
        there.t().copy_(src)
        assert torch.equal(there.cpu().t(), src.cpu())
        assert torch.equal(src.t().to(f"cuda:{b}", torch.float64).cpu(), src.t().double().cpu())
        assert torch.equal(src[::2, 1:].to(f"cuda:{b}").cpu(), src[::2, 1:].cpu())
# Memory that is made, and moves, after the two are peers.
kept = []
for step in range(60):
    kept.append(torch.full((1 + step * 40_000,), float(step), device=f"cuda:{step % 2}"))
    if step % 3 == 2:
        del kept[0]
    other = kept[-1].to(f"cuda:{1 - step % 2}")
    assert bool((other == step).all())
model = torch.nn.Linear(256, 256).to("cuda:0")
x = torch.randn(64, 256, device="cuda:1")
y = torch.nn.Linear(256, 8).to("cuda:1")(model(x.to("cuda:0")).to("cuda:1"))
y.square().mean().backward()
torch.cuda.synchronize(0), torch.cuda.synchronize(1)
"""


def run_torch(script, resource="", mode="full"):
    pytest.importorskip("torch", reason="PyTorch is not installed")
    without_multicast = {
        "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1",
        "NVSHMEM_DISABLE_NVLS": "1",
        "NCCL_NVLS_ENABLE": "0",
    }
    script = TORCH.format(resource=resource, mode=mode) + textwrap.dedent(script)
    python("-c", script, env=without_multicast)


def test_torch_copies_between_gpus_without_a_setting():
    run_torch(CHECKS)


def test_torch_copies_between_gpus_with_an_arena_for_each():
    arenas = "[gpumem.Arena('cuda:0'), gpumem.Arena('cuda:1')], "
    run_torch(CHECKS, resource=arenas)


def test_torch_copies_between_gpus_over_regions():
    arenas = "[gpumem.Arena(f'cuda:{i}', {'backing': 'regions'}) for i in (0, 1)], "
    run_torch(CHECKS, resource=arenas)


def test_torch_copies_between_gpus_under_pool_mode():
    arenas = "[gpumem.Arena('cuda:0'), gpumem.Arena('cuda:1')], "
    run_torch(CHECKS, resource=arenas, mode="pool")


def test_torch_makes_only_those_gpus_peers_that_it_copies_between():
    script = """
    arenas = [gpumem.get_default_resource(f"cuda:{i}") for i in (0, 1)]
    held = [torch.zeros(1 << 20, device=f"cuda:{i}") for i in (0, 1)]
    assert [each.peers for each in arenas] == [(), ()]
    held[0].to("cuda:1")        # copied by cuda:0, into memory of cuda:1
    assert [list(map(str, each.peers)) for each in arenas] == [[], ["cuda:0"]]
    """
    run_torch(script)


def test_torch_is_told_that_an_arena_gives_no_access():
    script = """
    try:
        torch.ones(10, device="cuda:0").to("cuda:1")
    except RuntimeError as error:
        assert "peers = 'none'" in str(error), error
    else:
        raise AssertionError("no error")
    """
    arenas = "[gpumem.Arena(f'cuda:{i}', {'peers': 'none'}) for i in (0, 1)], "
    run_torch(script, resource=arenas)
