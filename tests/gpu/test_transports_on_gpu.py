"""Memory that legacy IPC, descriptors and peers reach, as the driver of a GPU tells and does."""

import subprocess
import sys

import numpy as np
import pytest

import gpumem
from gpumem.interop import transports

MIB = 1 << 20
CONFIGS = {"pages": {"backing": "virtual"}, "regions": {"backing": "regions"}}

# Opens a legacy handle, reads the first bytes and writes them back doubled.
READER = """
import ctypes, sys
from cuda.bindings import driver as cu

def done(result):
    assert result[0] == 0, result[0]
    return result[1] if len(result) == 2 else None

done(cu.cuInit(0))
done(cu.cuCtxSetCurrent(done(cu.cuDevicePrimaryCtxRetain(done(cu.cuDeviceGet(0))))))
handle = cu.CUipcMemHandle()
handle.reserved = bytes.fromhex(sys.stdin.readline())
offset = int(sys.stdin.readline())
base = int(done(cu.cuIpcOpenMemHandle(handle, 1)))
found = (ctypes.c_uint8 * 256)()
done(cu.cuMemcpyDtoH(ctypes.addressof(found), base + offset, 256))
for i in range(256):
    found[i] = found[i] * 2 % 256
done(cu.cuMemcpyHtoD(base + offset, ctypes.addressof(found), 256))
done(cu.cuCtxSynchronize())
done(cu.cuIpcCloseMemHandle(base))
print("done", flush=True)
"""


def legacy_handle(address):
    """Return the handle, as hexadecimal digits, or the error of cuIpcGetMemHandle."""
    from cuda.bindings import driver as cu

    gpumem.Device("cuda:0").synchronize()
    context = cu.cuDevicePrimaryCtxRetain(cu.cuDeviceGet(0)[1])[1]
    cu.cuCtxPushCurrent(context)
    status, handle = cu.cuIpcGetMemHandle(address)
    cu.cuCtxPopCurrent()
    cu.cuDevicePrimaryCtxRelease(cu.cuDeviceGet(0)[1])
    return bytes(handle.reserved).hex() if int(status) == 0 else status


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
        child = subprocess.run(
            [sys.executable, "-c", READER],
            input=f"{handle}\n0\n",
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
    assert child.stdout == "done\n", child.stderr
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
