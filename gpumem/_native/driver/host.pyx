"""Fill the driver table from the host device, and set the options that no driver has.

The host device itself is plain C (hostdev/): worker threads and ordinary memory, no Python.
Functions for tests alone are in gpumem/_testing.
"""

import atexit
import os

from libc.stdint cimport uint64_t

from gpumem._native.driver.table cimport (
    check, CUresult, DriverDevice, DriverTable, open_driver_device, uuid_of_device,
)

from gpumem._native.driver.table import hush_threads


cdef extern from "hostdev/device/hostdev.h" nogil:
    enum:
        HOSTDEV_MAX_DEVICES
    const DriverTable* hostdev_table()
    int hostdev_set_device_count(int n)
    int hostdev_device_count()
    int hostdev_set_capacity(int ordinal, size_t bytes)
    size_t hostdev_capacity(int ordinal)
    void hostdev_set_lag(uint64_t nanoseconds)
    int hostdev_use_virtual_clock(int on)
    bint hostdev_clock_is_virtual()
    uint64_t hostdev_now()
    void hostdev_advance_clock(uint64_t nanoseconds)
    const void* hostdev_controls()
    void hostdev_shutdown()

from gpumem._support.environment import warn_of_variable
from gpumem._support.sizes import is_size_with_unit, nearly_a_size, parse_size
from gpumem._support.texts import shown
from gpumem.errors import ConfigError

MAX_DEVICES = HOSTDEV_MAX_DEVICES
cdef str CAPACITY = "GPUMEM_HOST_CAPACITY"   # bytes that each device has

cdef bint loaded = False
cdef bint was_read = False  # the capacity in the environment


@atexit.register
def _shutdown():
    """Stop the worker threads while the memory that they copy from is still there."""
    if loaded:
        hush_threads()
        with nogil:
            hostdev_shutdown()


def load():
    """Start the host device. It is always there, so there is no reason to return."""
    global loaded
    if not loaded:
        read_capacity()
        check(hostdev_table(), hostdev_table().cuInit(0), "cuInit")
        loaded = True


cdef int read_capacity() except -1:
    """Write the capacity in the environment as plain bytes. Runs before any call of the device."""
    global was_read
    if was_read:
        return 0
    was_read = True
    cdef str value = os.environ.get(CAPACITY, "")
    if is_size_with_unit(value):
        try:
            value = str(parse_size(value))
        except ConfigError:
            pass        # warned of below
        else:
            os.environ[CAPACITY] = value        # the C side reads plain bytes
    is_number = value.isascii() and value.isdigit() and len(value.lstrip("0")) <= 20
    if value and not (is_number and 0 < int(value) < 1 << 64):
        accepted = "expected bytes from 1 to 2**64 - 1, or a size in whole bytes such as 4GiB"
        warn_of_variable(f"invalid {CAPACITY} = {shown(value)} is ignored: "
                         f"{nearly_a_size(value) or accepted}")
    return 0


def device_count():
    """Return the number of host devices."""
    read_capacity()
    return hostdev_device_count()


def set_device_count(int n):
    """Set the number of host devices; False if one was used already."""
    read_capacity()
    return hostdev_set_device_count(n) == 0


def open_device(int ordinal):
    """Open a host device. `ordinal` is below device_count()."""
    cdef DriverDevice opened
    load()
    opened = open_driver_device(hostdev_table(), "host", ordinal)
    opened.context.now = hostdev_now
    opened.context.clock_is_virtual = hostdev_clock_is_virtual
    return opened


def device_uuid(int ordinal):
    """Return the 16 bytes that name a host device. `ordinal` is below device_count()."""
    load()
    return uuid_of_device(hostdev_table(), ordinal)


def set_capacity(int ordinal, size_t nbytes):
    """Set the bytes of memory that a host device has."""
    read_capacity()
    check(hostdev_table(), <CUresult>hostdev_set_capacity(ordinal, nbytes), "set_capacity")


def capacity(int ordinal):
    """Return the bytes of memory that a host device has."""
    read_capacity()
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
    """Move the virtual clock, by nanoseconds."""
    with nogil:
        hostdev_advance_clock(nanoseconds)


cdef const void* host_controls() noexcept nogil:
    return hostdev_controls()
