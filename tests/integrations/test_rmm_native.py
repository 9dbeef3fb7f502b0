"""An arena as a C++ resource of the installed RMM's, over the host device: it needs no GPU."""

import ctypes
import gc
import shutil
import weakref

import pytest
from helpers import shared_object
from helpers.c_arena import Calls, Face
from helpers.threads import in_threads

import gpumem
from gpumem.errors import ClosedError
from gpumem.integrations.rmm import _native

rmm = pytest.importorskip("rmm", reason="RMM is not installed")
WHY_NOT = _native.why_not()
pytestmark = pytest.mark.skipif(WHY_NOT is not None, reason=f"RMM cannot call an arena: {WHY_NOT}")


@pytest.fixture
def arena():
    return gpumem.Arena("host", oom_wait_ms=0)


@pytest.fixture
def resource(arena):
    return _native.resource_over(arena)


def rmm_stream(stream):
    """RMM's view of a stream of the host device."""
    from rmm.pylibrmm.stream import Stream

    return Stream(stream)


@pytest.fixture
def stream():
    return rmm_stream(gpumem.Stream("host"))


def test_resource_is_rmms_and_its_blocks_are_the_arenas(resource, arena, stream):
    assert isinstance(resource, rmm.mr.DeviceMemoryResource)
    address = resource.allocate(1000, stream)
    assert address % 256 == 0
    assert arena.stats().requested_in_use == 1000
    resource.deallocate(address, 1000, stream)
    assert arena.stats().in_use == 0


def test_no_bytes_are_null(resource, arena, stream):
    assert resource.allocate(0, stream) == 0
    resource.deallocate(0, 0, stream)
    assert arena.stats().num_allocs == 0


def test_block_freed_on_another_stream_is_reused_there(resource, stream):
    other = rmm_stream(gpumem.Stream("host"))
    address = resource.allocate(4096, stream)
    resource.deallocate(address, 4096, other)
    assert resource.allocate(4096, other) == address


def test_out_of_memory_is_rmms_with_the_arenas_report(resource, arena, stream):
    arena.set_limit(4 << 20)
    with pytest.raises(MemoryError, match=r"out_of_memory: gpumem: .* asked for 8.0 MiB"):
        resource.allocate(8 << 20, stream)


def test_rmms_failure_callback_runs_when_memory_is_out(resource, arena, stream):
    arena.set_limit(4 << 20)
    held = [resource.allocate(3 << 20, stream)]

    def free_one(nbytes):
        if held:
            resource.deallocate(held.pop(), 3 << 20, stream)
            return True
        return False

    above = rmm.mr.FailureCallbackResourceAdaptor(resource, free_one)
    address = above.allocate(3 << 20, stream)
    assert not held
    above.deallocate(address, 3 << 20, stream)


def test_closed_arena_refuses_with_its_name(resource, arena, stream):
    arena.close()
    with pytest.raises(RuntimeError, match="is closed"):
        resource.allocate(100, stream)
    with pytest.raises(ClosedError):
        _native.resource_over(arena)


def test_resource_and_adaptors_over_it_keep_the_arena(stream):
    arena = gpumem.Arena("host")
    alive = weakref.ref(arena)
    above = rmm.mr.LimitingResourceAdaptor(_native.resource_over(arena), 1 << 20)
    del arena
    gc.collect()
    above.deallocate(above.allocate(1000, stream), 1000, stream)
    del above
    gc.collect()
    assert alive() is None


def test_devices_resource_keeps_the_arena_until_it_is_replaced():
    arena = gpumem.Arena("host")
    alive = weakref.ref(arena)
    before = rmm.mr.get_per_device_resource(0)
    rmm.mr.set_per_device_resource(0, _native.resource_over(arena))
    del arena
    gc.collect()
    assert alive() is not None
    rmm.mr.set_per_device_resource(0, before)
    gc.collect()
    assert alive() is None


def test_threads_allocate_at_once(resource, arena):
    def churn():
        stream = rmm_stream(gpumem.Stream("host"))
        for _ in range(2000):
            resource.deallocate(resource.allocate(4096, stream), 4096, stream)

    in_threads(churn, 4)
    assert arena.stats().in_use == 0
    arena.check_invariants()


# ---- gpumem_resource.hpp by itself ---------------------------------------------------------------

USER = """\
#include <gpumem_resource.hpp>

static_assert(cuda::mr::resource_with<gpumem::resource, cuda::mr::device_accessible>);

extern "C" {
/* A block of the default stream; 0: no arena was passed. */
void *user_take(gpumem_arena *arena) {
    try {
        gpumem::resource resource{arena}, copy{resource};
        if (!(resource == copy)) return nullptr;
        return copy.allocate(cuda::stream_ref{cudaStream_t{}}, 4096);
    } catch (std::invalid_argument const &) {
        return nullptr;
    }
}
void user_free(gpumem_arena *arena, void *block, void *stream) {
    gpumem::resource{arena}.deallocate(cuda::stream_ref{static_cast<cudaStream_t>(stream)}, block,
                                       4096);
}
}
"""


@pytest.fixture(params=["legacy", "per thread"])
def user(request, tmp_path):
    """A program in C++17 with that default stream, compiled without warnings."""
    if shutil.which("g++") is None:
        pytest.skip("g++ is not found")
    places = [
        # Only gpumem's own headers have to be without warnings.
        part if part == f"-I{gpumem.get_include()}" else part.replace("-I", "-isystem", 1)
        for part in _native._recipe().options
        if part.startswith("-I")
    ]
    default = ["-DCUDA_API_PER_THREAD_DEFAULT_STREAM"] if request.param == "per thread" else []
    options = ["-std=c++17", *default, *places]
    built = shared_object.build(tmp_path, USER, *options, language="c++")
    library = ctypes.CDLL(built)
    library.user_take.argtypes = [ctypes.c_void_p]
    library.user_take.restype = ctypes.c_void_p
    library.user_free.argtypes = [ctypes.c_void_p] * 3
    library.handle = {"legacy": None, "per thread": 2}[request.param]
    return library


def test_default_stream_is_the_one_that_the_program_was_compiled_for(user):
    streams = []

    def allocate(arena, nbytes, alignment, stream, address):
        streams.append(stream)
        address[0] = 4096
        return 0

    def deallocate_on(arena, address, stream):
        streams.append(stream)
        return 0

    calls = Calls()
    for function in (allocate, deallocate_on):
        setattr(calls, function.__name__, type(getattr(calls, function.__name__))(function))
    calls.retain = type(calls.retain)(lambda arena: None)
    calls.release = type(calls.release)(lambda arena: None)
    arena = Face(ctypes.pointer(calls), None, 0)
    block = user.user_take(ctypes.addressof(arena))
    user.user_free(ctypes.addressof(arena), block, None)
    assert streams == [user.handle, user.handle]


def test_resource_without_an_arena_is_an_exception(user):
    assert user.user_take(None) is None
