"""The server of descriptors: what it is asked, who asks, and its process's forks."""

import os
import resource
import socket
import threading

import pytest
from helpers import child

from gpumem.errors import BadHandleError
from gpumem.integrations import _descriptors


@pytest.fixture
def name():
    """Serve what the tests ask for; returns the server's name."""
    _descriptors.serve("echo", lambda what: ({"what": what}, []))
    _descriptors.serve("number", lambda what: {}[what])
    return _descriptors.server_name()


def connected(name):
    peer = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    peer.connect(f"\0{name}")
    return peer


def echo(name, timeout=20.0):
    with _descriptors.ask(name, "echo", "x", timeout=timeout) as (said, handles):
        return said, list(handles)


def test_server_refuses_with_an_error_of_any_kind_and_answers_the_next(name):
    with (
        pytest.raises(BadHandleError, match="the other process refused: 'y'"),
        _descriptors.ask(name, "number", "y"),
    ):
        pass
    assert echo(name) == ({"what": "x"}, [])


def test_server_refuses_an_address_beyond_all_memory_and_answers_the_next(name):
    pytest.importorskip("gpumem.integrations.torch._sharing")
    for address in ("f" * 20, "-1"):
        with (
            pytest.raises(BadHandleError, match="the other process refused"),
            _descriptors.ask(name, "block", address),
        ):
            pass
    assert echo(name) == ({"what": "x"}, [])


def test_server_without_a_free_descriptor_answers_once_there_is_one(name, monkeypatch):
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    refused = threading.Event()
    monkeypatch.setattr(_descriptors.time, "sleep", lambda _: refused.set())
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as peer:
        resource.setrlimit(resource.RLIMIT_NOFILE, (3, hard))
        try:
            peer.connect(f"\0{name}")
            assert refused.wait(20)
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert echo(name) == ({"what": "x"}, [])


def test_server_soon_leaves_a_connection_without_a_request(name):
    with connected(name):
        assert echo(name, _descriptors.TIMEOUT / 2) == ({"what": "x"}, [])


@pytest.mark.skipif(os.getuid() != 0, reason="only root becomes another user")
def test_server_neither_answers_nor_awaits_another_users_process(name, monkeypatch):
    monkeypatch.setattr(_descriptors, "REQUEST_SECONDS", _descriptors.TIMEOUT)
    reads, writes = os.pipe()
    heard, hears = os.pipe()
    if (pid := os.fork()) == 0:
        os.setuid(65534)
        silent = connected(name)
        with connected(name) as asks:
            asks.sendall(b"echo y")
            os.write(hears, asks.recv(100))
        os.read(reads, 1)
        silent.close()
        os._exit(0)
    try:
        assert b"processes of the same user" in os.read(heard, 100)
        assert echo(name) == ({"what": "x"}, [])
    finally:
        os.write(writes, b"x")
        os.waitpid(pid, 0)


def test_child_keeps_neither_its_parents_server_nor_what_is_answered():
    done = child.run(
        """
        import os, threading
        from gpumem.integrations import _descriptors
        from helpers.descriptors import open_descriptors

        asked, forked = threading.Event(), threading.Event()

        def answer(what):
            asked.set()
            forked.wait()
            return {}, []

        _descriptors.serve("late", answer)
        name = _descriptors.server_name()
        thread = threading.Thread(target=_descriptors.ask(name, "late", "x").__enter__)
        thread.start()
        asked.wait()
        reads, writes = os.pipe()
        if (pid := os.fork()) == 0:
            links = open_descriptors(()).values()
            os.write(writes, b"%d" % sum(link.startswith("socket:") for link in links))
            os._exit(0)
        print(os.read(reads, 9).decode())
        os.waitpid(pid, 0)
        forked.set()
        thread.join()
        """
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "1\n", "")  # the asker's own
