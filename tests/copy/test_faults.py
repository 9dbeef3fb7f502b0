"""A driver that refuses at any call: a typed error, nothing leaked, no thread left behind."""

import numpy as np
import pytest
from helpers import child
from helpers.arrays import elements, put

import gpumem

REFUSED = 999  # CUDA_ERROR_UNKNOWN
N = 600_000


def scattered(memory):
    return put(np.zeros((300, 400), np.int32), memory)


# Named by what they go through; each makes its ends anew.
WAYS = {
    "queued": lambda: (put(np.zeros(N, np.uint8), "host"), put(np.ones(N, np.uint8), "host")),
    "two streams": lambda: (
        put(np.zeros(N, np.uint8), "host/managed"),
        put(np.ones(N, np.uint8), "host/host_accessible"),
    ),
    "others' memory": lambda: (
        put(np.zeros(N, np.uint8), "host"),
        put(np.ones(N, np.uint8), "host").numpy(),
    ),
    "staged up": lambda: (put(np.zeros(N, np.uint8), "host"), np.ones(N, np.uint8)),
    "staged down": lambda: (np.zeros(N, np.uint8), put(np.ones(N, np.uint8), "host")),
    "pitched": lambda: (scattered("host")[:, 5:90], scattered("host")[:, 15:100]),
    "overlapping": lambda: (lambda t: (t[1:], t[:-1]))(put(np.zeros(N, np.uint8), "host")),
}


@pytest.mark.parametrize("way", WAYS)
def test_copy_survives_a_failure_of_any_driver_call(way, host, stream, staged):
    def refusals_of_each_call():
        return [refused(way, host, stream, call) for call in range(1, calls_of(way, host, stream))]

    # Afterwards unused events are kept for later copies: as many as one search needs at once.
    refusals_of_each_call()
    before = host.live()
    refusals = refusals_of_each_call()
    assert len(refusals) > 3
    assert set(refusals) <= {REFUSED, None}, "a refusal came as another error"
    assert REFUSED in refusals
    live = host.live()
    assert live["streams"] == before["streams"]
    # A refusal that raised nothing may be of an event's end: then the driver keeps that event.
    assert live["events"] <= before["events"] + refusals.count(None)


def refused(way, host, stream, call):
    """Copy with the driver refusing one call; returns the code that was raised, if any."""
    dst, src = WAYS[way]()
    stream.synchronize()
    host.fail(None, call, REFUSED)
    code = None
    try:
        gpumem.copy(dst, src, stream)
    except gpumem.errors.DriverError as error:
        code = error.code
    finally:
        host.clear_faults()
    gpumem.copy(dst, src, stream)  # nothing is in a state that stops the next one
    stream.synchronize()
    assert (elements(dst) == elements(src)).all()
    return code


def calls_of(way, host, stream):
    dst, src = WAYS[way]()
    stream.synchronize()
    host.reset_counts()
    gpumem.copy(dst, src, stream)
    return host.call_count()


@pytest.mark.parametrize(("to", "origin"), [("host", "numpy"), ("numpy", "host")])
def test_lost_device_ends_a_staged_copy_with_its_error(to, origin):
    child.run_quietly(f"""
        import numpy as np, gpumem
        from gpumem._testing import host_device
        from gpumem._testing.copies import set_staged_from
        set_staged_from(0)
        make = lambda where: (np.ones(1 << 22, np.uint8) if where == "numpy"
                              else gpumem.full(1 << 22, 2, "uint8", memory=where))
        dst, src = make("{to}"), make("{origin}")
        stream = gpumem.Stream("host")
        host_device.lose_device(0, 700)
        try:
            gpumem.copy(dst, src, stream)
        except gpumem.errors.DriverError as error:
            assert error.code == 700
        else:
            raise AssertionError("the copy went well on a lost device")
    """)


def test_staged_copy_falls_back_to_pageable_memory(host, stream, staged):
    gpumem.Arena.staging("host").shrink()
    host.fail("cuMemHostAlloc", 1, 2, times=0)
    host.fail("cuMemHostRegister", 1, 2, times=0)
    data = np.arange(N, dtype=np.uint8)
    tensor = gpumem.empty(N, "uint8", memory="host")
    gpumem.copy(tensor, data, stream)
    back = np.zeros_like(data)
    gpumem.copy(back, tensor, stream)
    assert (back == data).all()
