"""Fill the driver table from the installed CUDA driver, lazily, through cuda-python.

cuda-python is the loader: it finds libcuda (WSL included) and answers cuGetProcAddress, so the
library instance and the handle types are the same that the rest of the process uses. Entries
are requested by name and by the CUDA version of the signature that the table declares, and only
from a driver of at least that version, since an older one would return another signature. Entries
that the driver does not have stay NULL.
"""

import functools
import os
import threading

from libc.stdint cimport uintptr_t
from libc.string cimport memset

from gpumem._native.driver.table cimport (
    check, CUDA_ERROR_NO_DEVICE, CUresult, driver_entries, DRIVER_ENTRY_COUNT, DriverTable,
    older_entries, OLDER_ENTRY_COUNT, open_driver_device,
)


cdef DriverTable table
cdef str reason = "not queried yet"
cdef int count = -1             # devices; -1: not asked yet
cdef list missing = []
cdef int spoken = 0             # the CUDA version that the driver speaks
# The first call fills the table; calls of other threads wait for it.
cdef object filling = threading.RLock()


def load():
    """Fill the table once; return None if CUDA answers, else the reason why it does not."""
    global reason, count
    with filling:
        if count >= 0:
            return reason
        count = 0
        try:
            reason = _fill()
        except Exception as error:
            # Whatever the loader trips over (no libcuda, a stub library, a broken install), the
            # reason is the error's own text: CUDA is not available.
            reason = f"{type(error).__name__}: {error}".strip().replace("\n", " ")
            if type(error).__name__ == "DynamicLibNotFoundError":       # cuda-pathfinder's
                reason = "no NVIDIA driver is installed (libcuda.so.1 was not found)"
        return reason


def _fill():
    global count, spoken
    cdef int found = 0
    cdef int i
    cdef CUresult code
    try:
        from cuda.bindings import driver
    except ImportError as error:
        return f"cuda-python is not installed ({error})"
    memset(&table, 0, sizeof(table))
    # 1: the legacy default stream is stream 0; 2: each thread's own is.
    flags = 2 if os.environ.get("CUDA_PYTHON_CUDA_PER_THREAD_DEFAULT_STREAM", "0") == "1" else 1
    ask = functools.partial(_address_of, driver.cuGetProcAddress, flags)
    version = spoken = driver_version(ask(b"cuDriverGetVersion", 2020))
    for i in range(DRIVER_ENTRY_COUNT):
        address = 0
        if driver_entries[i].version <= version:
            address = ask(driver_entries[i].name, driver_entries[i].version)
        (<uintptr_t*>(<char*>&table + driver_entries[i].offset))[0] = address
        if not address:
            missing.append(driver_entries[i].name.decode())
    for i in range(OLDER_ENTRY_COUNT):
        if version < older_entries[i].until:
            address = ask(older_entries[i].name, older_entries[i].version)
            (<uintptr_t*>(<char*>&table + older_entries[i].offset))[0] = address
    if table.cuInit == NULL or table.cuDeviceGetCount == NULL:
        return "the CUDA driver has no cuInit"
    with nogil:
        code = table.cuInit(0)
    if code == CUDA_ERROR_NO_DEVICE:
        return "the CUDA driver finds no GPU (CUDA_ERROR_NO_DEVICE)"
    check(&table, code, "cuInit")
    check(&table, table.cuDeviceGetCount(&found), "cuDeviceGetCount")
    if found == 0:
        return "the CUDA driver finds no GPU"
    count = found
    return None


def _address_of(get, flags, name, version):
    """Return the address of a function by its name and signature; 0: not there."""
    status, address, *_ = get(name, version, flags)
    return address if int(status) == 0 and address else 0


cdef int driver_version(uintptr_t address) except -1:
    # 0 where it cannot be asked.
    cdef int version = 0
    if address:
        (<CUresult (*)(int*) noexcept nogil><void*>address)(&version)
    return version


def device_count():
    """Return the number of CUDA devices; 0 where CUDA does not answer."""
    load()
    return count


def version():
    """Return the CUDA version that the driver speaks, such as 13000; opens no device."""
    load()
    return spoken


def missing_functions():
    """Return the names of the table's functions that the driver does not have."""
    load()
    return tuple(missing)


def open_device(int ordinal):
    """Open a CUDA device; raise ValueError if there is none of that number."""
    if not 0 <= ordinal < device_count():
        raise ValueError(f"unknown device 'cuda:{ordinal}'")
    return open_driver_device(&table, "cuda", ordinal)
