"""gpumem's allocator inside the c10 libraries of a PyTorch that is unpacked, not installed.

CUDA's runtime is replaced by a library of functions that do nothing, but for a few: gpumem's arenas
are of the host device, and c10 asks the runtime for little.
"""

import contextlib
import ctypes
import functools
import json
import os
import re
import subprocess
from pathlib import Path
from types import SimpleNamespace

from gpumem.integrations.torch import _build, _hooks

VARIABLE = "GPUMEM_TORCH"
DRIVER = Path(__file__).with_name("torch_driver.cpp")
DEVICE_BYTES = 4 << 30  # of the stand-in below
FIRST_FRACTION = 0.875  # of each device's memory, as if PyTorch's settings said so

RUNTIME = """
#include <stddef.h>
#include <string.h>
int cudaGetDevice(int *device) { *device = 0; return 0; }
int cudaGetDeviceCount(int *count) { *count = 1; return 0; }
int cudaMemGetInfo(size_t *free, size_t *total) { *free = 1 << 30; *total = 4ul << 30; return 0; }
int cudaMemcpyAsync(void *to, const void *from, size_t nbytes, int kind, void *stream) {
    memcpy(to, from, nbytes);
    return 0;
}
int cudaDeviceGetStreamPriorityRange(int *least, int *most) { *least = *most = 0; return 0; }
int unfinished;    /* events are, until a test or a wait ends it */
int cudaEventCreateWithFlags(void **event, unsigned flags) { *event = &unfinished; return 0; }
int cudaEventRecord(void *event, void *stream) { return stream == (void *)-2 ? 400 : 0; }
int cudaEventQuery(void *event) { return unfinished ? 600 : 0; }
int cudaEventSynchronize(void *event) { unfinished = 0; return 0; }
int synchronized;
int cudaDeviceSynchronize(void) { synchronized++; return 0; }
typedef struct { char bytes[64]; } Handle;
int cudaIpcOpenMemHandle(void **address, Handle handle, unsigned flags) {
    *address = (void *)(size_t)handle.bytes[0];
    return 0;
}
const char *cudaGetErrorName(int error) { return "cudaErrorOfTheStandIn"; }
const char *cudaGetErrorString(int error) { return "an error of the stand-in"; }
"""


# What of libtorch_cpu the allocator links to: who has the pinned memory of a device.
HOST_ALLOCATORS = """
#include <ATen/core/CachingHostAllocator.h>
namespace {
at::HostAllocator *current;
uint8_t needed = 2;
}
void at::setHostAllocator(at::DeviceType, at::HostAllocator *allocator, uint8_t priority) {
    if (priority < needed) return;
    current = allocator;
    needed = priority;
}
at::HostAllocator *at::getHostAllocator(at::DeviceType) { return current; }
"""


class Refused(Exception):
    """A call threw; `out_of_memory` if what it threw was c10::OutOfMemoryError."""

    def __init__(self, text, out_of_memory):
        super().__init__(text)
        self.out_of_memory = out_of_memory


def unpacked():
    """The folder of the unpacked PyTorch; None if the variable names none."""
    return Path(os.environ[VARIABLE]) if os.environ.get(VARIABLE) else None


def module_of(folder):
    """What of the module `torch` decides how the allocator is compiled."""
    text = (folder / "version.py").read_text()
    version = re.search(r"__version__ = '([^']+)'", text).group(1)
    return SimpleNamespace(
        __file__=str(folder / "__init__.py"),
        __version__=version,
        version=SimpleNamespace(git_version=re.search(r"git_version = '(\w+)'", text).group(1)),
        _C=SimpleNamespace(_GLIBCXX_USE_CXX11_ABI=True),
    )


class Driver:
    """The driver's functions as methods; a text that is JSON is returned as what it says."""

    def __init__(self, library):
        self.library = library
        library.driver_said.restype = ctypes.c_char_p

    def __getattr__(self, name):
        function = getattr(self.library, f"driver_{name}")

        def call(*arguments):
            return self._guard(function, *map(argument, arguments))

        return call

    @contextlib.contextmanager
    def allocating_to(self, number, stream):
        """Allocate a stream's blocks in a pool."""
        self.begin(number, stream.ptr)
        try:
            yield
        finally:
            self.end(number)

    @contextlib.contextmanager
    def pinning_to(self, number, stream):
        """Allocate a stream's pinned memory in a pool."""
        self.pinned_begin(number, stream.ptr)
        try:
            yield
        finally:
            self.pinned_end(number)

    def alloc(self, nbytes, stream=0):
        address = ctypes.c_void_p()
        if stream:
            where = (argument(nbytes), argument(stream), ctypes.byref(address))
            self._guard(self.library.driver_alloc_on, *where)
        else:
            self._guard(self.library.driver_alloc, argument(nbytes), ctypes.byref(address))
        return address.value

    def pinned_alloc(self, nbytes, stream=0):
        """The address of a block of pinned memory, and PyTorch's context of it."""
        context = ctypes.c_void_p()
        where = argument(nbytes), argument(stream), ctypes.byref(context)
        return self._guard(self.library.driver_pinned_alloc, *where), context.value

    def empty_cache(self, number=0):
        return self._guard(self.library.driver_empty_cache, argument(number))

    def live(self, number, addresses):
        array = (ctypes.c_void_p * len(addresses))(*addresses)
        return bool(
            self._guard(self.library.driver_live, argument(number), array, argument(len(addresses)))
        )

    def _guard(self, function, *arguments):
        done = function(*arguments)
        text = self.library.driver_said().decode()
        if done:
            raise Refused(text, done == 2)
        try:
            return json.loads(text)
        except ValueError:
            return text


def argument(value):
    if isinstance(value, float):
        return ctypes.c_double(value)
    return value.encode() if isinstance(value, str) else ctypes.c_size_t(value or 0)


@functools.cache
def load(folder, cache):
    """Compile and load everything; the driver, with gpumem's allocators in place."""
    folder = linkable(folder, cache)
    runtime = _runtime(folder, cache)
    stand_in = ctypes.CDLL(str(runtime), mode=ctypes.RTLD_GLOBAL)
    for name in ("libc10.so", "libc10_cuda.so", "libtorch_cpu.so"):
        ctypes.CDLL(str(folder / "lib" / name), mode=ctypes.RTLD_GLOBAL)
    os.environ["XDG_CACHE_HOME"] = str(cache)
    torch = module_of(folder)
    table, fraction = ctypes.c_void_p(_hooks.table()), ctypes.c_double(FIRST_FRACTION)
    allocator = _build.load(torch)
    assert allocator.gpumem_torch_install(table, fraction)
    allocator.gpumem_torch_install_pinned(table, 0)
    library = cache / "torch_driver.so"
    compiler = os.environ.get("CXX", "c++").split()
    named = ["-std=c++20", "-shared", "-fPIC", "-o", str(library), str(DRIVER)]
    subprocess.run([*compiler, *named, *_build.recipe(torch).places], check=True)
    driver = Driver(ctypes.CDLL(str(library)))
    driver.unfinished = ctypes.c_int.in_dll(stand_in, "unfinished")
    driver.synchronized = ctypes.c_int.in_dll(stand_in, "synchronized")
    return driver


def linkable(folder, cache):
    """The unpacked PyTorch with a libtorch_cpu of our own; a real one is half a gigabyte."""
    whole = cache / "torch"
    (whole / "lib").mkdir(parents=True)
    (whole / "include").symlink_to(folder / "include")
    (whole / "version.py").symlink_to(folder / "version.py")
    for name in ("libc10.so", "libc10_cuda.so"):
        (whole / "lib" / name).symlink_to(folder / "lib" / name)
    library = whole / "lib" / "libtorch_cpu.so"
    compiler = os.environ.get("CXX", "c++").split()
    named = ["-Wl,-soname,libtorch_cpu.so", f"-I{folder / 'include'}", "-o", str(library)]
    subprocess.run(
        [*compiler, "-w", "-std=c++20", "-shared", "-fPIC", *named, "-xc++", "-"],
        input=HOST_ALLOCATORS,
        text=True,
        check=True,
    )
    return whole


def _runtime(folder, cache):
    """A library with every function of CUDA's runtime that c10 links to."""
    wanted = _symbols(folder / "lib" / "libc10_cuda.so")
    others = [name for name in sorted(wanted) if f"{name}(" not in RUNTIME]
    source = RUNTIME + "\n".join(f"int {name}() {{ return 0; }}" for name in others)
    soname = _soname(folder / "lib" / "libc10_cuda.so")
    version = cache / "runtime.map"
    version.write_text(f"{soname} {{ *; }};\n")
    built = cache / soname
    compiler = os.environ.get("CC", "cc").split()
    named = [f"-Wl,-soname,{soname}", f"-Wl,--version-script={version}", "-o", str(built)]
    subprocess.run(
        [*compiler, "-w", "-shared", "-fPIC", *named, "-xc", "-"],
        input=source,
        text=True,
        check=True,
    )
    return built


def _symbols(library):
    text = subprocess.run(
        ["nm", "-D", "--undefined-only", str(library)], capture_output=True, text=True, check=True
    ).stdout
    return set(re.findall(r"\bU (cuda\w+)", text)) | {"cudaDeviceEnablePeerAccess", "cudaMemcpy"}


def _soname(library):
    text = subprocess.run(
        ["readelf", "-d", str(library)], capture_output=True, text=True, check=True
    ).stdout
    return re.search(r"\[(libcudart\.so\.\d+)\]", text).group(1)
