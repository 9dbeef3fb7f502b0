"""The host device: its settings; instruments that count, fail, delay and check its calls."""

from libc.stdint cimport uint64_t

from gpumem._arena cimport Arena
from gpumem._buffer cimport Buffer, MemoryResource
from gpumem._native.arena.api cimport (
    arena_clock, arena_free, arena_move_budget, ARENA_OK, arena_stream_count,
)
from gpumem._native.driver.host cimport host_controls
from gpumem._native.pages cimport budget_fill, budget_spend

from gpumem._native.driver.host import (    # for the callers of this module
    advance_clock, capacity, device_count, load,                            # no-cython-lint
    MAX_DEVICES, open_device, set_capacity, set_device_count, set_lag,      # no-cython-lint
    use_virtual_clock,                                                      # no-cython-lint
)


cdef extern from "hostdev/instruments/controls.h" nogil:
    enum:
        HOSTDEV_USE_AFTER_FREE
        HOSTDEV_WRONG_CONTEXT
        HOSTDEV_UNORDERED_ACCESS
        HOSTDEV_LEAK
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
    ctypedef struct HostdevControls:
        uint64_t (*call_count)(const char* name) nogil
        uint64_t (*total_calls)() nogil
        void (*reset_counts)() nogil
        size_t (*used)(int ordinal) nogil
        void (*live)(HostdevLive* live) nogil
        int (*fail)(const char* function, uint64_t call, uint64_t times, int error) nogil
        int (*fail_here)(const char* function, uint64_t call, uint64_t times, int error) nogil
        int (*delay_record)(uint64_t record, uint64_t nanoseconds) nogil
        int (*lose_device)(int ordinal, int error) nogil
        int (*separate)(int one, int other, int on) nogil
        void (*clear_faults)() nogil
        const char* (*last_fault)() nogil
        void (*use_h200_costs)(int on) nogil
        void (*find_misuse)(int on) nogil
        uint64_t (*misuse_count)(int kind) nogil
        const char* (*misuse_report)() nogil
        int (*use_control_groups)(const char* folder) nogil

cdef const HostdevControls* controls = <const HostdevControls*>host_controls()

MISUSE = {
    "use after free": HOSTDEV_USE_AFTER_FREE,
    "wrong context": HOSTDEV_WRONG_CONTEXT,
    "unordered access": HOSTDEV_UNORDERED_ACCESS,
    "leak": HOSTDEV_LEAK,
}


# ---- counts ----

def call_count(str name=None):
    """Return how often a driver function was called on the host devices; None: all of them."""
    if name is None:
        return controls.total_calls()
    return controls.call_count(name.encode())


def reset_counts():
    """Start counting calls again from zero."""
    controls.reset_counts()


def used(int ordinal):
    """Return the bytes that a host device is charged for now."""
    return controls.used(ordinal)


def live():
    """Return how many objects of each kind are alive on all host devices, for leak checks."""
    cdef HostdevLive now
    with nogil:
        controls.live(&now)
    return now


# ---- faults and costs ----

def fail(str function, uint64_t call, int error, uint64_t times=1, *, bint this_thread=False):
    """Make call number `call` from now (1: the next) of a driver function return `error`.

    `function` is a name like "cuMemAlloc", or None for any; `times` calls in a row fail, 0:
    all from there on. A call that fails does nothing else. `this_thread`: only calls of the calling
    thread count.
    """
    name = function.encode() if function is not None else None
    cdef const char* chars = NULL
    if name is not None:
        chars = name
    if (controls.fail_here if this_thread else controls.fail)(chars, call, times, error):
        raise ValueError(f"invalid fault: {function!r}, call {call}, error {error}")


def delay_record(uint64_t record, uint64_t nanoseconds):
    """Delay the completion of the `record`-th event record from now (1: the next)."""
    if controls.delay_record(record, nanoseconds):
        raise ValueError(f"records are counted from 1, not {record}")


def lose_device(int ordinal, int error):
    """Lose a device: its calls return `error` until its context is released."""
    if controls.lose_device(ordinal, error):
        raise ValueError(f"no device {ordinal}, or no error {error}")


def use_control_groups(str folder not None):
    """Read control groups below a folder instead of where they are mounted."""
    if controls.use_control_groups(folder.encode()):
        raise ValueError(f"the name of {folder!r} is too long")


def separate(int one, int other, bint on):
    """Prevent two host devices from reaching each other's memory, or allow it again."""
    if controls.separate(one, other, on):
        raise ValueError(f"no two devices {one} and {other}")


def clear_faults():
    """Cancel every fault and delay that has not happened yet, and forget the last fault."""
    controls.clear_faults()


def last_fault():
    """Return the driver function that failed last by `fail`, None since the faults were cleared."""
    return controls.last_fault().decode() or None


def use_h200_costs(bint on):
    """Make calls take as long as on an H200, or no longer than they need."""
    controls.use_h200_costs(on)


# ---- misuse ----

def find_misuse(bint on):
    """Search for use after free, wrong contexts, unordered access and leaks from now on.

    Every allocation gets pages of its own, with addresses that are never used again.
    """
    with nogil:
        controls.find_misuse(on)


def misuse_count(str kind):
    """Return how often a kind of misuse, one of the keys of `MISUSE`, was found."""
    return controls.misuse_count(MISUSE[kind])


def misuse_report():
    """Return the latest finding in words, or ""."""
    return controls.misuse_report().decode()


# ---- arenas ----

def stream_slots(MemoryResource resource not None):
    """Return the number of stream slots it has made, including those of ended streams."""
    if isinstance(resource, Arena):
        return arena_stream_count((<Arena>resource).core) - 1
    return resource.ledger.stream_count - 1


def block_handle(Buffer buffer not None):
    """Return the handle by which a buffer's arena knows its block."""
    return buffer.handle


def free_block(Arena arena not None, uint64_t handle):
    """Free a block on the arena's first stream as a C caller does; False: the handle is stale."""
    return arena_free(arena.core, handle, 1) == ARENA_OK


def spend_move_time(Arena arena not None, uint64_t nanoseconds):
    """Charge time to the moves of an arena's pages; no other thread uses the arena."""
    # Time that was saved up until now counts first.
    budget_fill(arena_move_budget(arena.core), arena_clock(arena.core))
    budget_spend(arena_move_budget(arena.core), nanoseconds)


def saved_move_time(Arena arena not None):
    """Return the nanoseconds of moves that were saved up at the last update; below 0: overdrawn."""
    return arena_move_budget(arena.core).saved
