"""Memory that legacy IPC, descriptors and peers reach, as the driver of a GPU tells and does."""

import numpy as np
import pytest
from helpers.legacy_ipc import double_in_a_child, legacy_handle

import gpumem
from gpumem.interop import transports

MIB = 1 << 20
CONFIGS = {"pages": {"backing": "virtual"}, "regions": {"backing": "regions"}}


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_another_process_opens_a_block_for_ipc(config):
    arena = gpumem.Arena("cuda:0", config)
    keeps = arena.allocate(MIB)
    buffer = arena.allocate(3 * MIB, transport="ipc")
    tensor = gpumem.from_dlpack(buffer)
    gpumem.copy(tensor, np.arange(3 * MIB, dtype=np.uint8))
    handle = legacy_handle(buffer.ptr)
    assert isinstance(handle, str), handle
    with buffer.register():
        # Its handle stands for the whole driver allocation, which begins at the block.
        double_in_a_child(handle)
    seen = np.empty(3 * MIB, np.uint8)
    gpumem.copy(seen, tensor)
    expected = np.arange(3 * MIB, dtype=np.uint8)
    expected[:256] *= 2
    assert (seen == expected).all()
    keeps.close()


def test_legacy_ipc_is_told_as_the_driver_does():
    arena = gpumem.Arena("cuda:0", {"backing": "virtual"})
    regions = gpumem.Arena("cuda:0", {"backing": "regions"})
    pool = gpumem.DriverPool("cuda:0")
    for block, legacy in (
        (arena.allocate(MIB), False),
        (arena.allocate(MIB, transport="ipc"), True),
        (arena.allocate(MIB, shareable=True), False),
        (regions.allocate(MIB), True),
        (pool.allocate(MIB), False),
    ):
        assert block.transports().legacy_ipc is legacy
        assert isinstance(legacy_handle(block.ptr), str) is legacy
        assert transports(block.ptr).legacy_ipc is legacy
        block.close()
    pool.close()


def test_ways_of_each_kind_of_memory():
    arena = gpumem.Arena("cuda:0", {"backing": "virtual"})
    own, shared = arena.allocate(MIB), arena.allocate(MIB, shareable=True)
    pinned = gpumem.Arena("cuda:0/host_accessible").allocate(MIB)
    assert not own.transports().host
    assert not own.transports().posix_fd
    assert shared.transports().posix_fd
    assert not shared.transports().fabric
    assert pinned.transports().host
    with pytest.raises(ValueError, match="does not know"):
        transports(np.zeros(1000).ctypes.data)


def test_gpu_tells_its_transports():
    capabilities = gpumem.Device("cuda:0").capabilities
    assert capabilities["legacy_ipc"]
    for name in ("fabric_handles", "gpu_direct_rdma", "gpu_direct_rdma_of_pages"):
        assert capabilities[name].supported or capabilities[name].reason
