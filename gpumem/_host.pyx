"""Fill the driver table from the host device, and control what no driver has a function for.

The host device itself is plain C (hostdev/): worker threads and ordinary memory, no Python.
"""

import atexit

from libc.stdint cimport uint32_t, uint64_t

from gpumem._driver cimport CUresult, DriverDevice, DriverTable, check, open_place

cdef extern from "hostdev.h" nogil:
    enum:
        HOSTDEV_MAX_DEVICES
    const DriverTable* hostdev_table()
    int hostdev_set_device_count(int n)
    int hostdev_device_count()
    int hostdev_set_capacity(int ordinal, size_t bytes)
    size_t hostdev_capacity(int ordinal)
    void hostdev_set_lag(uint64_t nanoseconds)
    int hostdev_use_virtual_clock(int on)
    uint64_t hostdev_now()
    void hostdev_advance_clock(uint64_t nanoseconds)
    uint64_t hostdev_total_calls()
    uint64_t hostdev_call_count(const char* name)
    void hostdev_reset_counts()
    size_t hostdev_used(int ordinal)
    ctypedef struct HostdevLive:
        uint64_t streams
        uint64_t events
        uint64_t workers
        uint64_t allocations
        uint64_t handles
        uint64_t mappings
        uint64_t reservations
        uint64_t pools
        uint64_t imports
        uint64_t graphs
    void hostdev_live(HostdevLive* live)
    int hostdev_fail(const char* function, uint64_t call, uint64_t times, int error)
    int hostdev_fail_here(const char* function, uint64_t call, uint64_t times, int error)
    int hostdev_delay_record(uint64_t record, uint64_t nanoseconds)
    int hostdev_lose_device(int ordinal, int error)
    void hostdev_clear_faults()
    void hostdev_use_h200_costs(int on)
    enum:
        HOSTDEV_USE_AFTER_FREE
        HOSTDEV_WRONG_CONTEXT
        HOSTDEV_UNORDERED_ACCESS
        HOSTDEV_LEAK
    void hostdev_find_misuse(int on)
    uint64_t hostdev_misuse_count(int kind)
    const char* hostdev_misuse_report()
    void hostdev_rehearse_windows(int on)
    bint hostdev_windows_rehearsed()
    enum:
        HOSTDEV_MEMORY
    ctypedef struct HostdevImport:
        uint64_t number
        uint32_t kind
        uint32_t type
        uint32_t flags
        uint32_t reserved
        uint64_t handle
        uint64_t size
        char[256] name
    void hostdev_last_import(HostdevImport* latest)
    void hostdev_shutdown()

MAX_DEVICES = HOSTDEV_MAX_DEVICES
MISUSE = {
    "use after free": HOSTDEV_USE_AFTER_FREE,
    "wrong context": HOSTDEV_WRONG_CONTEXT,
    "unordered access": HOSTDEV_UNORDERED_ACCESS,
    "leak": HOSTDEV_LEAK,
}

cdef bint loaded = False


@atexit.register
def _shutdown():
    """Stop the worker threads while the memory that they copy from is still there."""
    if loaded:
        with nogil:
            hostdev_shutdown()


def load():
    """Start the host device; always answers None, since the host is always there."""
    global loaded
    if not loaded:
        check(hostdev_table(), hostdev_table().cuInit(0), "cuInit")
        loaded = True


def device_count():
    """Return the number of host devices."""
    return hostdev_device_count()


def set_device_count(int n):
    """Set the number of host devices; False if one was used already."""
    return hostdev_set_device_count(n) == 0


def open_device(int ordinal):
    """Open a host device; the caller has seen that `ordinal` is below device_count()."""
    cdef DriverDevice opened
    load()
    opened = open_place(hostdev_table(), "host", ordinal)
    opened.place.now = hostdev_now
    return opened


def set_capacity(int ordinal, size_t nbytes):
    """Set the bytes of memory that a host device has."""
    check(hostdev_table(), <CUresult>hostdev_set_capacity(ordinal, nbytes), "set_capacity")


def capacity(int ordinal):
    """Return the bytes of memory that a host device has."""
    return hostdev_capacity(ordinal)


def set_lag(uint64_t nanoseconds):
    """Let every stream finish its work that much later than it was enqueued."""
    hostdev_set_lag(nanoseconds)


def use_virtual_clock(bint on):
    """Measure lag on a clock that only `advance_clock` moves, or on real time again."""
    hostdev_use_virtual_clock(on)


cdef void host_advance_clock(uint64_t nanoseconds) noexcept nogil:
    hostdev_advance_clock(nanoseconds)


def advance_clock(uint64_t nanoseconds):
    """Move the virtual clock."""
    with nogil:
        hostdev_advance_clock(nanoseconds)


def call_count(str name=None):
    """Return how often a driver function was called on the host devices; None: all of them."""
    if name is None:
        return hostdev_total_calls()
    return hostdev_call_count(name.encode())


def reset_counts():
    """Start counting calls again from zero."""
    hostdev_reset_counts()


def used(int ordinal):
    """Return the bytes that a host device is charged for now."""
    return hostdev_used(ordinal)


def live():
    """Return how many things of each kind are alive on all host devices, for leak checks."""
    cdef HostdevLive now
    with nogil:
        hostdev_live(&now)
    return {
        "streams": now.streams,
        "events": now.events,
        "workers": now.workers,
        "allocations": now.allocations,
        "handles": now.handles,
        "mappings": now.mappings,
        "reservations": now.reservations,
        "pools": now.pools,
        "imports": now.imports,
        "graphs": now.graphs,
    }


# ---- faults and costs ----

def fail(str function, uint64_t call, int error, uint64_t times=1, *, bint this_thread=False):
    """Let call number `call` from now (1: the next) of a driver function answer `error`.

    `function` is a name like "cuMemAlloc", or None for any; `times` calls in a row fail, 0:
    all from there on. A call that fails does nothing else. `this_thread`: only calls of the calling
    thread count.
    """
    name = None if function is None else function.encode()
    cdef const char* chars = NULL if name is None else <const char*>name
    if (hostdev_fail_here if this_thread else hostdev_fail)(chars, call, times, error):
        raise ValueError(f"no such fault: {function!r}, call {call}, error {error}")


def delay_record(uint64_t record, uint64_t nanoseconds):
    """Let the `record`-th event record from now (1: the next) complete that much later."""
    if hostdev_delay_record(record, nanoseconds):
        raise ValueError(f"records are counted from 1, not {record}")


def lose_device(int ordinal, int error):
    """Lose a device: its calls answer `error` until its context is released."""
    if hostdev_lose_device(ordinal, error):
        raise ValueError(f"no device {ordinal}, or no error {error}")


def clear_faults():
    """Take back every fault and delay that has not happened yet."""
    hostdev_clear_faults()


def use_h200_costs(bint on):
    """Let calls take the time that they take on an H200, or no more than they need."""
    hostdev_use_h200_costs(on)


# ---- misuse ----

def find_misuse(bint on):
    """Look for use after free, wrong contexts, unordered access and leaks from now on.

    Every allocation gets pages of its own, whose addresses are never used again.
    """
    with nogil:
        hostdev_find_misuse(on)


def misuse_count(str kind):
    """Return how often a kind of misuse, one of the keys of `MISUSE`, was found."""
    return hostdev_misuse_count(MISUSE[kind])


def misuse_report():
    """Return the latest finding in words, or ""."""
    return hostdev_misuse_report().decode()


# ---- imports ----

def rehearse_windows(bint on):
    """Let host devices import external memory and semaphores by Windows' handle types, or not.

    The number of a descriptor stands for an NT handle, the name of a POSIX shared memory object
    for a name; what is given stays the caller's.
    """
    hostdev_rehearse_windows(on)


def windows_rehearsed():
    """Tell whether host devices import by Windows' handle types now."""
    return hostdev_windows_rehearsed()


def last_import():
    """Return what the latest import of external memory or a semaphore was told, or None."""
    cdef HostdevImport latest
    hostdev_last_import(&latest)
    if latest.number == 0:
        return None
    return {
        "number": latest.number,
        "kind": "memory" if latest.kind == HOSTDEV_MEMORY else "semaphore",
        "type": latest.type,
        "flags": latest.flags,
        "reserved": latest.reserved,
        "handle": latest.handle,
        "size": latest.size,
        "name": (<bytes>latest.name).decode() or None,
    }
