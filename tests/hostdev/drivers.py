"""The driver under test: cuda-python over the host device's shared library, or over a GPU.

``GPUMEM_TEST_DRIVER`` says which: the path of a libcuda.so.1 built from
``libcuda/``, or ``cuda`` for the machine's own driver.
"""

from __future__ import annotations

import ctypes
import os
import threading

BLOCK = 2 << 20
NON_BLOCKING = 1
DISABLE_TIMING = 2
LEGACY_STREAM = 1
GEQ, EQ, AND, NOR = 0, 1, 2, 3


class DriverFailure(Exception):
    """A driver call answered something other than success."""


class Gate:
    """Holds a stream until `open`: a wait on pinned memory that the host writes."""

    def __init__(self, driver: Driver, stream) -> None:
        self.address = driver.gate_word()
        self.word = ctypes.c_uint64.from_address(self.address)
        self.word.value = 0
        driver.cuStreamWaitValue64(stream, self.address, 1, GEQ)

    def open(self) -> None:
        self.word.value = 1


class Driver:
    """Calls that raise on failure, `error` for those that must fail, and undo at the end."""

    def __init__(self, kind: str, library: ctypes.CDLL | None) -> None:
        from cuda.bindings import driver

        self.kind = kind  # "host" or "cuda"
        self.api = driver
        self.library = library
        self._undo: list = []
        self._gates: list[Gate] = []
        self._words: list[int] = []

    def __getattr__(self, name: str):
        function = getattr(self.api, name)

        def call(*arguments):
            code, *values = function(*arguments)
            if int(code) != 0:
                raise DriverFailure(f"{name}: {code.name}")
            return None if not values else values[0] if len(values) == 1 else tuple(values)

        return call

    def error(self, name: str, *arguments) -> str:
        """The result's name without its prefix: "INVALID_VALUE", or "SUCCESS"."""
        code = getattr(self.api, name)(*arguments)[0].name
        return code.removeprefix("CUDA_").removeprefix("ERROR_")

    # ---- a context to work in, and things that are undone after the test ----

    def start(self) -> None:
        self.cuInit(0)
        self.device = self.cuDeviceGet(0)
        self.context = self.cuDevicePrimaryCtxRetain(self.device)
        self.cuCtxSetCurrent(self.context)
        self._words.clear()

    def gate_word(self) -> int:
        """Pinned memory that is there before a stream is held: allocating might wait for it."""
        if not self._words:
            page = int(self.cuMemHostAlloc(65536, 0))
            self._words = list(range(page, page + 65536, 8))
        return self._words.pop()

    def later(self, name: str, *arguments) -> None:
        self._undo.append((name, arguments))

    def finish(self) -> None:
        for gate in self._gates:
            gate.open()
        self._gates.clear()
        self.error("cuCtxSynchronize")
        while self._undo:
            name, arguments = self._undo.pop()
            self.error(name, *arguments)

    def stream(self, flags: int = NON_BLOCKING):
        stream = self.cuStreamCreate(flags)
        self.later("cuStreamDestroy", stream)
        return stream

    def event(self, flags: int = DISABLE_TIMING):
        event = self.cuEventCreate(flags)
        self.later("cuEventDestroy", event)
        return event

    def memory(self, size: int) -> int:
        pointer = self.cuMemAlloc(size)
        self.later("cuMemFree", pointer)
        return int(pointer)

    def pinned(self, size: int, flags: int = 0) -> int:
        pointer = int(self.cuMemHostAlloc(size, flags))
        self.later("cuMemFreeHost", pointer)
        return pointer

    def gate(self, stream) -> Gate:
        self._gates.append(Gate(self, stream))
        return self._gates[-1]

    # ---- bytes ----

    def write(self, pointer: int, data: bytes) -> None:
        # A GPU's copy of so little returns when the data is read, perhaps before it has arrived.
        self.cuMemcpyHtoD(pointer, data, len(data))
        self.cuStreamSynchronize(LEGACY_STREAM)

    def read(self, pointer: int, size: int) -> bytes:
        buffer = bytearray(size)
        self.cuMemcpyDtoH(buffer, pointer, size)
        return bytes(buffer)

    # ---- virtual memory ----

    def prop(self, exportable: bool = False, device: int = 0):
        prop = self.api.CUmemAllocationProp()
        prop.type = self.api.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
        prop.location.type = self.api.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        prop.location.id = device
        if exportable:
            kinds = self.api.CUmemAllocationHandleType
            prop.requestedHandleTypes = kinds.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
        return prop

    def access(self, flags: str = "READWRITE", device: int = 0):
        access = self.api.CUmemAccessDesc()
        access.location.type = self.api.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        access.location.id = device
        access.flags = getattr(self.api.CUmemAccess_flags, f"CU_MEM_ACCESS_FLAGS_PROT_{flags}")
        return access

    def reserve(self, size: int) -> int:
        pointer = int(self.cuMemAddressReserve(size, 0, 0, 0))
        self.later("cuMemAddressFree", pointer, size)
        return pointer

    def physical(self, size: int = BLOCK, exportable: bool = False):
        handle = self.cuMemCreate(size, self.prop(exportable), 0)
        self.later("cuMemRelease", handle)
        return handle

    def map(self, pointer: int, handle, size: int = BLOCK, access: bool = True) -> None:
        self.cuMemMap(pointer, size, 0, handle, 0)
        self.later("cuMemUnmap", pointer, size)
        if access:
            self.cuMemSetAccess(pointer, size, [self.access()], 1)


def in_thread(function):
    """What `function` returns, or its exception, from a thread of its own."""
    result: list = []

    def run() -> None:
        try:
            result.append((function(), None))
        except BaseException as error:
            result.append((None, error))

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    value, error = result[0]
    if error is not None:
        raise error
    return value


def waits_for(driver: Driver, gate: Gate, call) -> bool:
    """Whether `call` came back only after the gate was opened, which happens a moment later.

    A call that does not wait can be too slow to show it; one that waits always shows it.
    """
    seen: list = []

    def run() -> None:
        driver.cuCtxSetCurrent(driver.context)
        call()
        seen.append(gate.word.value)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join(0.05)
    gate.open()
    thread.join()
    return seen == [1]


def load() -> Driver:
    """The driver that the environment names; call it before anything imports CUDA."""
    which = os.environ["GPUMEM_TEST_DRIVER"]
    if which == "cuda":
        return Driver("cuda", None)
    return Driver("host", ctypes.CDLL(which, mode=ctypes.RTLD_GLOBAL))
