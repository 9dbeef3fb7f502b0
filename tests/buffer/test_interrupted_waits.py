"""Ctrl-C ends the waits for streams, events and devices; the work goes on."""

import signal

import pytest
from helpers.driver import HostDriver
from helpers.interrupting import interrupted, more_calls
from helpers.threads import running

import gpumem


@pytest.fixture
def gate(stream):
    with HostDriver().block(stream) as gate:
        yield gate


WAITS = {
    "a stream": ("cuStreamQuery", lambda stream: stream.synchronize()),
    "an event": ("cuEventQuery", lambda stream: stream.record().synchronize()),
    "a device": ("cuEventQuery", lambda stream: gpumem.Device("host").synchronize()),
}


@pytest.mark.parametrize("what", WAITS)
def test_interrupt_ends_a_wait_for(host, stream, gate, what):
    asked, wait = WAITS[what]
    with interrupted(more_calls(host, asked), gate):
        wait(stream)
    assert not stream.query()
    gate.open()
    wait(stream)
    assert stream.query()


def test_wait_goes_on_after_a_handler_that_does_not_raise(host, stream, gate):
    handled = []

    def handle(number, frame):
        handled.append(number)
        gate.open()

    before = signal.signal(signal.SIGALRM, handle)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.05)
        stream.synchronize()
    finally:
        signal.signal(signal.SIGALRM, before)
    assert handled == [signal.SIGALRM]
    assert stream.query()


def test_wait_of_another_thread_is_the_drivers(host, stream, gate):
    asked = host.call_count("cuStreamQuery")
    with running(stream.synchronize):
        gate.open()
    assert host.call_count("cuStreamQuery") <= asked + 1
    assert host.call_count("cuStreamSynchronize")
