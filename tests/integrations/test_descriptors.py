"""The server of descriptors: what it is asked, who asks, and its process's forks."""

import _testcapi
import contextlib
import os
import socket
import textwrap
import threading

import pytest
from helpers import child
from helpers.descriptors import open_descriptors

from gpumem.errors import BadHandleError
from gpumem.integrations._common import descriptors
from gpumem.interop import _sockets


@pytest.fixture
def name():
    """Serve what the tests ask for; returns the server's name."""
    descriptors.serve("echo", lambda what: ({"what": what}, []))
    descriptors.serve("number", lambda what: {}[what])
    return descriptors.server_name()


def connected(name):
    peer = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    peer.connect(f"\0{name}")
    return peer


def echo(name, timeout=20.0):
    with descriptors.ask(name, "echo", "x", timeout=timeout) as (said, handles):
        return said, list(handles)


def test_server_refuses_with_an_error_of_any_kind_and_answers_the_next(name):
    with (
        pytest.raises(BadHandleError, match="the other process refused: 'y'"),
        descriptors.ask(name, "number", "y"),
    ):
        pass
    assert echo(name) == ({"what": "x"}, [])


def test_server_refuses_an_address_beyond_all_memory_and_answers_the_next(name):
    pytest.importorskip("gpumem.integrations.torch._sharing")
    for address in ("f" * 20, "-1"):
        with (
            pytest.raises(BadHandleError, match="the other process refused"),
            descriptors.ask(name, "block", address),
        ):
            pass
    assert echo(name) == ({"what": "x"}, [])


# Those that change what the whole process may do, or fork, do it in a process of their own.
SERVES = """
    import os, resource, socket, threading
    from gpumem.integrations._common import descriptors
    from helpers.descriptors import open_descriptors

    descriptors.serve("echo", lambda what: ({"what": what}, []))
    name = descriptors.server_name()

    def echo():
        with descriptors.ask(name, "echo", "x", timeout=20.0) as (said, handles):
            return said["what"]

    def connected():
        peer = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        peer.connect(f"\\0{name}")
        return peer
"""


def run(script):
    done = child.run(textwrap.dedent(SERVES) + textwrap.dedent(script))
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout.split()


def test_server_without_a_free_descriptor_answers_once_there_is_one():
    said = run("""
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        refused = threading.Event()
        descriptors.time.sleep = lambda _: refused.set()
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as peer:
            resource.setrlimit(resource.RLIMIT_NOFILE, (3, hard))
            peer.connect(f"\\0{name}")
            print(refused.wait(20))
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        print(echo())
    """)
    assert said == ["True", "x"]


def test_server_soon_leaves_a_connection_without_a_request(name):
    with connected(name):
        assert echo(name, descriptors.TIMEOUT / 2) == ({"what": "x"}, [])


def test_connections_without_a_request_delay_no_other(name, monkeypatch):
    monkeypatch.setattr(descriptors, "REQUEST_SECONDS", 2 * descriptors.TIMEOUT)
    with contextlib.ExitStack() as silent:
        for _ in range(100):
            silent.enter_context(connected(name))
        assert echo(name) == ({"what": "x"}, [])


def test_answer_that_is_not_ready_or_not_read_delays_no_other(name):
    asked, may_end = threading.Event(), threading.Event()

    def late(what):
        asked.set()
        may_end.wait(60)
        return {}, []

    descriptors.serve("late", late)
    descriptors.serve("long", lambda what: ({"text": "x" * 50_000}, iter(int, 1)))
    with connected(name) as first, connected(name) as second:
        first.sendall(b"late x")
        second.sendall(b"long x")
        assert asked.wait(60)
        assert echo(name) == ({"what": "x"}, [])
        may_end.set()


@contextlib.contextmanager
def impostor(send):
    """A process's socket that answers one request by `send`; yields its name."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listening:
        listening.bind("")  # the kernel chooses an abstract name
        listening.listen()

        def answer():
            peer, _ = listening.accept()
            with peer, contextlib.suppress(OSError):
                peer.recv(100)
                send(peer)

        thread = threading.Thread(target=answer)
        thread.start()
        yield listening.getsockname()[1:].decode()
        thread.join()


@pytest.mark.parametrize("sent", [b"5", b"[]", b'"refused"', b"{", b"\xff", b"[" * 50_000])
def test_answer_that_is_no_description_is_refused(sent):
    with (
        impostor(lambda peer: peer.sendall(sent)) as name,
        pytest.raises(BadHandleError, match="did not send the echo"),
    ):
        echo(name)


def test_message_with_too_many_descriptors_is_refused_and_leaves_none():
    def send(peer):
        peer.sendall(b"{}")
        socket.send_fds(peer, [b"x"], [peer.fileno()] * (descriptors.AT_ONCE + 1))

    before = len(open_descriptors(()))
    with impostor(send) as name, pytest.raises(BadHandleError, match="more than 64 descriptors"):
        echo(name)
    assert len(open_descriptors(())) == before


def test_deadline_of_a_request_covers_every_message_of_its_answer():
    ended = threading.Event()

    def send(peer):
        peer.sendall(b"{}")
        while not ended.wait(0.02):
            socket.send_fds(peer, [b"x"], [peer.fileno()])

    with impostor(send) as name:
        with pytest.raises(BadHandleError, match="did not send the echo: TimeoutError"):
            echo(name, timeout=0.3)
        ended.set()


@pytest.mark.skipif(os.getuid() != 0, reason="only root becomes another user")
def test_server_neither_answers_nor_awaits_another_users_process():
    said = run("""
        descriptors.REQUEST_SECONDS = 2 * descriptors.TIMEOUT  # longer than `echo` waits
        reads, writes = os.pipe()
        heard, hears = os.pipe()
        if (pid := os.fork()) == 0:
            try:
                os.close(writes)  # so that it ends with its parent
                os.setuid(65534)
                silent = [connected() for _ in range(9)]
                refused = 0
                for _ in range(300):
                    try:
                        echo()
                    except descriptors.BadHandleError as error:
                        if "refused: descriptors are for processes of the" not in str(error):
                            break
                        refused += 1
                os.write(hears, b"%d" % refused)
                os.read(reads, 1)
            finally:
                os._exit(0)
        print(os.read(heard, 100).decode(), echo())
        os.write(writes, b"x")
        os.waitpid(pid, 0)
    """)
    assert said == ["300", "x"]  # before or after it was sent, each request reads the refusal


@pytest.mark.skipif(os.getuid() != 0, reason="only root becomes another user")
def test_another_users_process_with_the_name_is_not_asked():
    said = run("""
        bound, binds = os.pipe()
        if (pid := os.fork()) == 0:
            try:
                os.setuid(65534)
                with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as thief:
                    thief.bind("\\0taken")
                    thief.listen()
                    os.write(binds, b"x")
                    peer, _ = thief.accept()
                    print(len(peer.recv(100)), flush=True)
            finally:
                os._exit(0)
        os.read(bound, 1)
        try:
            with descriptors.ask("taken", "echo", "x"):
                pass
        except descriptors.BadHandleError as error:
            text = str(error)
        os.waitpid(pid, 0)
        print(text)
    """)
    assert said[0] == "0"  # nothing was sent to it
    assert " ".join(said[1:]) == (
        "[Errno 9] taken did not send the echo: PermissionError(1, 'it is a process of user 65534, "
        "and this one is of user 0: descriptors are taken from processes of the same user')"
    )


def test_child_keeps_neither_its_parents_server_nor_what_is_answered():
    said = run("""
        asked, forked = threading.Event(), threading.Event()

        def answer(what):
            asked.set()
            forked.wait()
            return {}, []

        descriptors.serve("late", answer)
        thread = threading.Thread(target=descriptors.ask(name, "late", "x").__enter__)
        thread.start()
        asked.wait()
        reads, writes = os.pipe()
        if (pid := os.fork()) == 0:
            try:
                links = open_descriptors(()).values()
                os.write(writes, b"%d" % sum(link.startswith("socket:") for link in links))
            finally:
                os._exit(0)
        os.close(writes)
        print(os.read(reads, 9).decode())
        os.waitpid(pid, 0)
        forked.set()
        thread.join()
    """)
    assert said == ["1"]  # the asker's own


def test_descriptors_are_closed_if_one_cannot_have_its_handle():
    before, refused = open_descriptors(), 0
    for number in range(30):
        received = [os.dup(1) for _ in range(9)]
        _testcapi.set_nomemory(number, number + 1)
        try:
            _sockets.handles_of(received)
        except MemoryError:
            refused += 1
        finally:
            _testcapi.remove_mem_hooks()
        assert open_descriptors() == before, number
    assert 9 < refused < 30
