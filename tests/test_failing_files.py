"""Files on a disk that fails: EIO, ENOSPC and short writes in sleep, recordings, pages, traces."""

import pytest
from helpers import child, shared_object

# Calls of the C library fail with `error` while it is set; a write writes at most `most` bytes.
CALLS = """
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <unistd.h>
int write_error, read_error, refused;
long most = 1L << 40;
#define NEXT(name) ((typeof(&name))dlsym(RTLD_NEXT, #name))
#define FAIL_WITH(error) if (error) { errno = error; refused++; return -1; }
ssize_t pwrite(int file, const void *bytes, size_t size, off_t offset) {
    FAIL_WITH(write_error)
    return NEXT(pwrite)(file, bytes, size < (size_t)most ? size : (size_t)most, offset);
}
ssize_t pread(int file, void *bytes, size_t size, off_t offset) {
    FAIL_WITH(read_error)
    return NEXT(pread)(file, bytes, size, offset);
}
ssize_t read(int file, void *bytes, size_t size) {
    FAIL_WITH(read_error)
    return NEXT(read)(file, bytes, size);
}
ssize_t pwrite64(int, const void *, size_t, off_t) __attribute__((alias("pwrite")));
ssize_t pread64(int, void *, size_t, off_t) __attribute__((alias("pread")));
"""

HEAD = """
import ctypes, errno, os, sys, warnings
import numpy as np
import gpumem
from gpumem import observe
from gpumem.errors import TraceError
from gpumem.traces import load_trace
library, path, fault = ctypes.CDLL(None), sys.argv[1], int(sys.argv[2])
def fails(name, number):
    ctypes.c_int.in_dll(library, name).value = number
def refusal(call, kind=OSError):
    try:
        call()
    except kind as error:
        return error
    raise AssertionError("not refused")
if not fault:
    ctypes.c_long.in_dll(library, "most").value = 1000
arena = gpumem.Arena("host")
"""

SLEEP = """
tensor = gpumem.full((3 << 20,), 9, "uint8", resource=arena)
if fault:
    fails("write_error", fault)
    error = refusal(lambda: arena.sleep(to=path))
    assert (error.errno, error.filename) == (fault, path), error
    assert arena.asleep == () and not os.path.exists(path) and (tensor.numpy() == 9).all()
    fails("write_error", 0)
arena.sleep(to=path)
if fault:
    fails("read_error", fault)
    error = refusal(arena.wake)
    assert (error.errno, error.filename, arena.asleep) == (fault, path, ("default",)), error
    fails("read_error", 0)
arena.wake()
assert (tensor.numpy() == 9).all() and not os.path.exists(path)
"""

RECORDING = """
recording = observe.record(arena, path)
for number in range(3000):
    if number == 2000:
        fails("write_error", fault)
    arena.allocate(100).close()
fails("write_error", 0)
with warnings.catch_warnings(record=True) as told:
    warnings.simplefilter("always")
    recording.stop()
assert len(told) == bool(fault)
if fault:
    assert recording.failed.errno == fault
    assert os.strerror(fault) in str(told[0].message) and 1000 < recording.lost < 2100
events = observe.read(path)
assert len(events) + recording.lost >= 6000 and (len(events) < 6000) == bool(fault)
assert events.lost == recording.lost
fails("read_error", fault)
if fault:
    assert refusal(lambda: observe.read(path)).errno == fault
    assert os.strerror(fault) in str(refusal(lambda: load_trace(path), TraceError))
fails("read_error", 0)
assert load_trace(path).events >= 4000
"""

PAGE = """
import time
def in_use():
    page = observe.LivePage.of_process(os.getpid())
    return sum(each.counters["in_use"] for each in page.resources)
def wait_until(state):
    until = time.monotonic() + 60
    while not state():
        assert time.monotonic() < until
with observe.publish(period=0.001):
    wait_until(lambda: in_use() == 0)
    fails("write_error", fault)
    block = arena.allocate(4096)
    if fault:
        wait_until(lambda: ctypes.c_int.in_dll(library, "refused").value > 9)
        assert in_use() == 0        # the copy before the failure
        fails("read_error", fault)
        assert refusal(in_use).errno == fault
        fails("read_error", 0)
    fails("write_error", 0)
    wait_until(lambda: in_use() == 4096)
"""


@pytest.mark.parametrize("fault", ["EIO", "ENOSPC", "short"])
@pytest.mark.parametrize("script", [SLEEP, RECORDING, PAGE], ids=["sleep", "recording", "page"])
def test_failing_disk_is_named_and_costs_only_what_was_not_written(script, fault, tmp_path):
    library = shared_object.build(tmp_path, CALLS, "-ldl")
    number = {"EIO": "5", "ENOSPC": "28", "short": "0"}[fault]
    env = {"LD_PRELOAD": str(library)}
    child.run_quietly(HEAD + script, str(tmp_path / "file"), number, env=env)
