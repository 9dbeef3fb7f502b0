"""Ctrl-C ends a copy's wait before anything is queued: no device writes to memory that is gone."""

import numpy as np
import pytest
from helpers.driver import HostDriver
from helpers.interrupting import interrupted, more_calls

import gpumem

NBYTES = 1 << 18


@pytest.fixture(autouse=True)
def dropped():
    """Pinned memory that nothing refers to: its release would wait for the whole device."""
    gpumem.Device("host").free_bytes  # noqa: B018 - releases what earlier tests dropped
    gpumem.Arena.staging("host").shrink()
    gpumem.Arena("host/host_accessible").allocate(NBYTES).close()


@pytest.fixture
def source(stream):
    """Bytes that a held stream has yet to write."""
    buffer = gpumem.Arena("host").allocate(NBYTES, stream)
    memoryview(buffer)[:] = bytes(NBYTES)
    return buffer


@pytest.fixture
def gate(source, stream):
    with HostDriver().block(stream) as gate:
        HostDriver().fill(source, 7, stream)
        yield gate


def copy_out_is_interrupted(host, source, gate, **options):
    target = np.zeros(NBYTES, np.uint8)
    queued = host.call_count("cuMemcpyAsync") + host.call_count("cuMemcpy2DAsync")
    with interrupted(more_calls(host, "cuStreamQuery"), gate):
        gpumem.copy(target, source, **options)
    assert host.call_count("cuMemcpyAsync") + host.call_count("cuMemcpy2DAsync") == queued
    gate.open()
    gpumem.copy(target, source, **options)
    assert (target == 7).all()


def test_interrupt_ends_a_copy_by_the_cpu(host, source, gate):
    copy_out_is_interrupted(host, source, gate)


def test_interrupt_ends_a_copy_to_pageable_memory(host, source, stream, gate):
    copy_out_is_interrupted(host, source, gate, stream=stream)


def test_interrupt_ends_a_staged_copy(host, staged, source, stream, gate):
    copy_out_is_interrupted(host, source, gate, stream=stream)


def test_interrupt_ends_a_staged_copy_in(host, staged, stream):
    target = gpumem.Arena("host").allocate(NBYTES, stream)
    with HostDriver().block(stream) as gate:
        with interrupted(more_calls(host, "cuStreamQuery"), gate):
            gpumem.copy(target, np.full(NBYTES, 3, np.uint8), stream=stream)
        gate.open()
        gpumem.copy(target, np.full(NBYTES, 4, np.uint8), stream=stream)
    assert bytes(memoryview(target)) == bytes([4]) * NBYTES


@pytest.mark.parametrize("of", ["tensor", "buffer"])
@pytest.mark.parametrize(
    "read",
    [
        np.asarray,
        np.array,
        lambda x: np.array(x, np.float32),
        lambda x: np.add(x, 1),
        lambda x: np.zeros(NBYTES, np.uint8).__setitem__(slice(None), x),
        np.from_dlpack,
        memoryview,
    ],
)
def test_interrupt_ends_what_numpy_reads_of_what_is_to_come(host, stream, gate, read, of):
    filled = gpumem.full(NBYTES, 5, "u1", memory="host", stream=stream)
    given = filled if of == "tensor" else filled.buffer
    with interrupted(more_calls(host, "cuStreamQuery"), gate):
        read(given)
    gate.open()
    assert (np.asarray(given) == 5).all()


def test_interrupt_that_a_view_was_told_of_is_not_raised_again_by_an_array(host, stream, gate):
    filled = gpumem.full(NBYTES, 5, "u1", memory="host", stream=stream)
    for given in (filled, filled.buffer):
        with interrupted(more_calls(host, "cuStreamQuery"), None):
            memoryview(given)
    gate.open()
    assert (filled.__array__() == 5).all()
    assert (filled.buffer.__array__() == 5).all()


def test_interrupt_ends_an_array_of_what_is_to_come(host, source, gate):
    tensor = gpumem.asarray(source)
    with interrupted(more_calls(host, "cuStreamQuery"), gate):
        tensor.numpy()
    gate.open()
    assert (tensor.numpy() == 7).all()
