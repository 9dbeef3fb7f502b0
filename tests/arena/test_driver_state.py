"""What the driver keeps for each thread, its contexts and capture mode, is as before each call."""

import ctypes
from contextlib import suppress

import pytest
from helpers.driver import HostDriver

import gpumem
from gpumem import interop

MIB = 1 << 20
GLOBAL = 0  # CU_STREAM_CAPTURE_MODE_GLOBAL, a thread's mode at first
INVALID_VALUE = 1
REGIONS = {"backing": "regions"}
PAGES = {"backing": "virtual", "page_move_threshold": 0}


class Watched:
    """Calls functions; fails if one leaves a context current or another capture mode."""

    def __init__(self):
        self.driver = HostDriver()
        # A test before may have refused the very call that sets the mode back.
        mode = ctypes.c_int(GLOBAL)
        self.driver.call_as_it_is("cuThreadExchangeStreamCaptureMode", ctypes.byref(mode))
        self.require_as_before("HostDriver")

    def __call__(self, function, *arguments, **more):
        try:
            return function(*arguments, **more)
        finally:
            self.require_as_before(function)

    def require_as_before(self, called):
        context, mode = ctypes.c_uint64(), ctypes.c_int(GLOBAL)
        self.driver.call_as_it_is("cuCtxGetCurrent", ctypes.byref(context))
        assert not context.value, f"{called} left a context current"
        self.driver.call_as_it_is("cuThreadExchangeStreamCaptureMode", ctypes.byref(mode))
        assert mode.value == GLOBAL, f"{called} left capture mode {mode.value}"


@pytest.fixture
def call(host):
    return Watched()


@pytest.mark.parametrize("reuse", ["completed", "wait", "never"])
@pytest.mark.parametrize("settings", [REGIONS, PAGES], ids=["regions", "pages"])
def test_calls_of_an_arena_leave_the_threads_contexts_and_capture_mode(call, settings, reuse):
    first, second = (call(gpumem.Stream, "host") for _ in range(2))
    config = {**settings, "stream_reuse": reuse, "max_mem": 600 * MIB}
    arena = call(gpumem.Arena, "host", config)
    blocks = [call(arena.allocate, 4 * MIB, first) for _ in range(4)]
    call(blocks[0].record_stream, second)
    for block in blocks[::2]:
        call(block.close)
    call(arena.allocate, 8 * MIB, second).close()
    call(arena.allocate, 4 * MIB, second).close()
    kept = call(arena.allocate_persistent, MIB)
    call(kept.close)
    with pytest.raises(gpumem.OutOfMemoryError):
        call(arena.allocate, 601 * MIB, first)
    call(arena.allocate, 300 * MIB, first).close()
    call(arena.shrink)
    call(arena.reset_stream, second)
    if settings is PAGES:
        call(arena.sleep)
        call(arena.wake)
    call(blocks[1].close)
    call(blocks[3].close)
    call(arena.close)


@pytest.mark.parametrize(
    "function",
    [
        "cuMemCreate",
        "cuMemMap",
        "cuMemUnmap",
        "cuMemRelease",
        "cuMemAlloc",
        "cuMemFree",
        "cuEventRecord",
        "cuEventQuery",
        "cuStreamWaitEvent",
    ],
)
@pytest.mark.parametrize("settings", [REGIONS, PAGES], ids=["regions", "pages"])
def test_refused_calls_leave_the_threads_contexts_and_capture_mode(call, host, settings, function):
    first, second = (call(gpumem.Stream, "host") for _ in range(2))
    arena = call(gpumem.Arena, "host", {**settings, "stream_reuse": "wait"})
    host.fail(function, 1, INVALID_VALUE, 0)
    for stream in (first, second, first):
        for nbytes in (2 * MIB, 6 * MIB):
            with suppress(gpumem.errors.DriverError):
                call(arena.allocate, nbytes, stream).close()
    with suppress(gpumem.errors.DriverError):
        call(arena.shrink)
    host.clear_faults()
    call(arena.shrink)
    call(arena.close)


@pytest.mark.parametrize("refused", [False, True])
def test_export_leaves_the_threads_contexts_and_capture_mode(call, host, refused):
    arena = call(gpumem.Arena, "host", {"numa_node": 0})
    block = call(arena.allocate, MIB, shareable=True)
    if refused:
        host.fail("cuMemExportToShareableHandle", 1, INVALID_VALUE)
        with pytest.raises(gpumem.errors.DriverError):
            call(interop.export, block)
        host.clear_faults()
    with call(interop.export, block) as handle:
        call(interop.attach, handle)


@pytest.mark.parametrize("settings", [REGIONS, PAGES], ids=["regions", "pages"])
def test_end_of_a_dropped_arena_leaves_the_threads_contexts_and_capture_mode(call, settings):
    stream = gpumem.Stream("host")
    held = [gpumem.Arena("host", settings)]
    with call.driver.block(stream):
        held[0].allocate(MIB, stream).close()
        call(held.clear)
    call(stream.synchronize)
