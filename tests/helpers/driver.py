"""Work for a device's streams: the functions of its driver table, called through ctypes."""

from __future__ import annotations

import contextlib
import ctypes

import gpumem
from gpumem._testing.driver import driver_entry_names, table_and_context_of

_TYPES = {
    "cuDriverGetVersion": (ctypes.c_void_p,),
    "cuGetErrorName": (ctypes.c_int, ctypes.c_void_p),
    "cuCtxPushCurrent": (ctypes.c_uint64,),
    "cuCtxPopCurrent": (ctypes.c_void_p,),
    "cuCtxGetCurrent": (ctypes.c_void_p,),
    "cuMemHostAlloc": (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_uint),
    "cuMemFreeHost": (ctypes.c_uint64,),
    "cuMemcpyAsync": (ctypes.c_uint64, ctypes.c_uint64, ctypes.c_size_t, ctypes.c_uint64),
    "cuMemsetD32Async": (ctypes.c_uint64, ctypes.c_uint32, ctypes.c_size_t, ctypes.c_uint64),
    "cuMemsetD8Async": (ctypes.c_uint64, ctypes.c_ubyte, ctypes.c_size_t, ctypes.c_uint64),
    "cuMemcpyDtoDAsync": (ctypes.c_uint64, ctypes.c_uint64, ctypes.c_size_t, ctypes.c_uint64),
    "cuStreamBeginCapture": (ctypes.c_uint64, ctypes.c_int),
    "cuStreamEndCapture": (ctypes.c_uint64, ctypes.c_void_p),
    "cuGraphInstantiateWithFlags": (ctypes.c_void_p, ctypes.c_uint64, ctypes.c_uint64),
    "cuGraphLaunch": (ctypes.c_uint64, ctypes.c_uint64),
    "cuGraphExecDestroy": (ctypes.c_uint64,),
    "cuGraphDestroy": (ctypes.c_uint64,),
    "cuLaunchHostFunc": (ctypes.c_uint64, ctypes.c_void_p, ctypes.c_void_p),
    "cuMemGetAddressRange": (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint64),
    "cuThreadExchangeStreamCaptureMode": (ctypes.c_void_p,),
    "cuStreamWaitValue64": (ctypes.c_uint64, ctypes.c_uint64, ctypes.c_uint64, ctypes.c_uint),
}


def pop_contexts() -> None:
    """Take off this thread's stack of contexts what refused pops left there: it has a bound."""
    driver, context = HostDriver(), ctypes.c_uint64()
    while driver._function("cuCtxPopCurrent")(ctypes.byref(context)) == 0:
        pass


class HostDriver:
    """The functions behind one device, as C callers have them; a GPU's work alike."""

    def __init__(self, device: str = "host") -> None:
        self.opened = gpumem.Device(device)._open()
        self._table, self._context = table_and_context_of(self.opened)
        self._functions: dict = {}
        version = ctypes.c_int()
        self._function("cuDriverGetVersion")(ctypes.byref(version))
        assert version.value == self.opened.version(), "the layout of DriverDevice has changed"

    def _function(self, name: str):
        if name not in self._functions:
            index = [entry for entry, _ in driver_entry_names()].index(name)
            size = ctypes.sizeof(ctypes.c_void_p)
            address = ctypes.c_void_p.from_address(self._table + index * size).value
            self._functions[name] = ctypes.CFUNCTYPE(ctypes.c_int, *_TYPES[name])(address)
        return self._functions[name]

    def call(self, name: str, *arguments) -> None:
        """Call with the device's context current; a refusal is a DriverError."""
        with self.current():
            self.call_as_it_is(name, *arguments)

    def refusal(self, name: str, *arguments) -> int:
        """Call with the device's context current, and return the driver's code; 0: success."""
        with self.current():
            return self._function(name)(*arguments)

    def call_as_it_is(self, name: str, *arguments) -> None:
        """Call with whichever context is current; a refusal is a DriverError."""
        if code := self._function(name)(*arguments):
            told = ctypes.c_char_p()
            self._function("cuGetErrorName")(code, ctypes.byref(told))
            raise gpumem.errors.DriverError(name, code, (told.value or b"an unknown code").decode())

    @contextlib.contextmanager
    def current(self):
        """Make the device's context current on this thread."""
        context = ctypes.c_uint64()
        assert self._function("cuCtxPushCurrent")(self._context) == 0
        try:
            yield
        finally:
            self._function("cuCtxPopCurrent")(ctypes.byref(context))

    def fill(self, memory, value: int, stream) -> None:
        """Queue a fill of what has `ptr` and `nbytes` with one byte value."""
        self.call("cuMemsetD8Async", memory.ptr, value, memory.nbytes, stream.ptr)

    def block(self, stream) -> Gate:
        """Hold a stream back until the gate is opened."""
        return Gate(self, stream)


class Gate:
    """A wait on a value in memory that only `open` writes.

    The memory is of a driver's pool, so that no arena has anything to do with the stream.
    """

    def __init__(self, driver: HostDriver, stream) -> None:
        # Freed on the stream, so that it has read the word before that.
        self._word = gpumem.DriverPool(stream.device).allocate(8, stream)
        memoryview(self._word)[:] = bytes(8)
        driver.call("cuStreamWaitValue64", stream.ptr, self._word.ptr, 1, 0)

    def open(self) -> None:
        ctypes.c_uint64.from_address(self._word.ptr).value = 1

    def __enter__(self):
        return self

    def __exit__(self, *exception) -> None:
        self.open()
