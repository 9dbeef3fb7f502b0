"""Legacy handles of a GPU's memory, and a process that opens them."""

from __future__ import annotations

from typing import Any

import gpumem

from .child import python

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
base = int(done(cu.cuIpcOpenMemHandle(handle, 1)))
found = (ctypes.c_uint8 * 256)()
done(cu.cuMemcpyDtoH(ctypes.addressof(found), base, 256))
for i in range(256):
    found[i] = found[i] * 2 % 256
done(cu.cuMemcpyHtoD(base, ctypes.addressof(found), 256))
done(cu.cuCtxSynchronize())
done(cu.cuIpcCloseMemHandle(base))
print("done", flush=True)
"""


def legacy_handle(address: int) -> Any:
    """Return the handle, as hexadecimal digits, or the error of cuIpcGetMemHandle."""
    from cuda.bindings import driver as cu

    gpumem.Device("cuda:0").synchronize()
    context = cu.cuDevicePrimaryCtxRetain(cu.cuDeviceGet(0)[1])[1]
    cu.cuCtxPushCurrent(context)
    status, handle = cu.cuIpcGetMemHandle(address)
    cu.cuCtxPopCurrent()
    cu.cuDevicePrimaryCtxRelease(cu.cuDeviceGet(0)[1])
    return bytes(handle.reserved).hex() if int(status) == 0 else status


def double_in_a_child(handle: str) -> None:
    """Let another process open the memory, double its first 256 bytes and close it."""
    assert python("-c", READER, input=f"{handle}\n").stdout == "done\n"
