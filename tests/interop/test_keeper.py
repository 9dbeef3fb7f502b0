"""The keeper against clients that send anything, send nothing, or do not read."""

import contextlib
import fcntl
import json
import os
import socket
import threading
from itertools import count

import pytest
from helpers.waiting import wait_until

from gpumem import errors, interop
from gpumem.interop import _sockets, keeper, sealed


@pytest.fixture
def kept(tmp_path, monkeypatch):
    """A keeper in a thread of this process, and the folder that it listens in."""
    os.chmod(tmp_path, 0o700)
    monkeypatch.chdir(tmp_path)  # a path of a socket has at most 107 bytes
    monkeypatch.setenv("GPUMEM_KEEPER", ".")
    listener = keeper.listen("keeper")
    # It ends once its idle time is 0 and it holds no set.
    made = keeper.Keeper(listener, 1e9)
    thread = threading.Thread(target=made.serve)
    thread.start()
    yield made
    made.idle = 0.0
    for name in list(made.sets):
        interop.drop(name, force=True)
    wake = connected()
    thread.join(60)
    assert not thread.is_alive()
    for peer in list(made.peers):
        peer.socket.close()
    wake.close()
    listener.close()


def connected():
    peer = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    peer.settimeout(60)
    peer.connect("keeper")
    return peer


def asked(peer, message, files=()):
    """Return the answer to a message."""
    data = message if isinstance(message, bytes) else json.dumps(message).encode()
    numbers = [each if isinstance(each, int) else each.fileno() for each in files]
    socket.send_fds(peer, [data], numbers)
    return json.loads(peer.recv(keeper.MAX_ANSWER))


def request(call, name="set", **more):
    return {"version": keeper.VERSION, "call": call, "name": name, **more}


def manifest(body="{}", **changes):
    """Return a file in memory, sealed, with the manifest of a set without parts."""
    head = {"name": "set", "bytes": 0, "tensors": 0, "parts": 0, "process": 1} | changes
    return sealed._sealed_file(f"{json.dumps(head)}\n{body}".encode())


def is_unharmed(made):
    """Return whether the keeper answers, and holds no set."""
    with connected() as peer:
        return asked(peer, request("list")) == {"version": keeper.VERSION, "sets": []}


@pytest.mark.parametrize(
    ("message", "word"),
    [
        (b"garbage", "request"),
        (b"\xff\xfe", "request"),
        (b"[" * 4000, "request"),
        (b"9" * 4000, "request"),
        (b"x" * (keeper.MAX_REQUEST + 1), "full"),
        ([], "request"),
        ({}, "request"),
        ({"version": 1}, "request"),
        ({"version": 99, "call": "list"}, "version"),
        (request("none"), "name"),
        (request("open"), "name"),
        (request("open", "../etc"), "request"),
        (request("open", 7), "request"),
        (request("put"), "request"),
        (request("drop", force=[]), "name"),
    ],
)
def test_request_of_something_else_is_refused(kept, message, word):
    with connected() as peer:
        answer = asked(peer, message)
        assert (answer["refused"], answer["version"]) == (word, keeper.VERSION), answer
        assert is_unharmed(kept)


def test_descriptors_of_something_else_are_refused_and_closed(kept):
    end, begin = os.pipe()
    plain = os.memfd_create("not sealed", os.MFD_ALLOW_SEALING)
    os.write(plain, b"{}\n")
    wrong = [{"parts": 2}, {"name": "other"}, {"bytes": -1}, {"tensors": "x"}]
    manifests = [manifest(**each) for each in wrong]
    with manifest() as good, connected() as peer:
        asked(peer, request("list"))  # from here on the keeper has the connection
        before = len(os.listdir("/proc/self/fd"))
        for file in (end, plain, peer, *manifests):
            assert asked(peer, request("put"), [file])["refused"] == "request"
        assert asked(peer, request("list"), [end, begin])["sets"] == []
        assert asked(peer, request("put"), [good, end])["refused"] == "request"
        many = [end] * (keeper.MAX_PARTS + 2)
        assert asked(peer, request("put"), many)["refused"] == "full"
        assert len(os.listdir("/proc/self/fd")) == before
    for file in (end, begin, plain):
        os.close(file)
    assert is_unharmed(kept)


def test_number_of_sets_is_limited(kept, monkeypatch):
    monkeypatch.setattr(keeper, "MAX_SETS", 2)
    for name in "abc":
        with manifest(name=name) as file, connected() as peer:
            answer = asked(peer, request("put", name), [file])
            assert answer.get("refused") == ("full" if name == "c" else None)
    assert sorted(kept.sets) == ["a", "b"]


def test_number_of_descriptors_is_limited(kept):
    kept.room = 1
    with manifest(parts=1) as file, connected() as peer:
        assert asked(peer, request("put"), [file, file])["refused"] == "full"
    with manifest() as file, connected() as peer:
        assert "refused" not in asked(peer, request("put"), [file])


def test_number_of_connections_is_limited(kept, monkeypatch):
    monkeypatch.setattr(keeper, "MAX_PEERS", 3)
    with contextlib.ExitStack() as stack:
        for _ in range(3):
            asked(stack.enter_context(connected()), request("list"))
        with pytest.raises(errors.KeeperError, match=r"did not answer within 0\.2 s"):
            interop.open("set", timeout=0.2)
    wait_until(lambda: not kept.peers)
    assert is_unharmed(kept)


def test_client_that_does_not_read_is_disconnected(kept):
    message = json.dumps(request("list")).encode()

    def send_without_end(peer):
        for _ in count():
            peer.send(message)

    with connected() as peer, pytest.raises(ConnectionError):
        send_without_end(peer)
    assert is_unharmed(kept)


def test_connection_has_one_set(kept):
    with manifest() as file, connected() as peer:
        asked(peer, request("put"), [file])
        assert asked(peer, request("open"))["refused"] == "request"
        assert asked(peer, request("put", "other"), [file])["refused"] == "request"
    assert list(kept.sets) == ["set"]


def test_another_user_is_refused(kept, monkeypatch):
    for module in (keeper, _sockets):
        monkeypatch.setattr(module, "peer_of", lambda peer: (1, os.getuid() + 1))
    with connected() as peer:
        assert asked(peer, request("list"))["refused"] == "user"
    with pytest.raises(errors.KeeperError, match=f"is a process of user {os.getuid() + 1}"):
        interop.open("set")


@pytest.mark.parametrize(
    "body",
    [
        "",
        "[]",
        "{}",
        '{"parts": [], "tensors": 7}',
        '{"parts": [], "tensors": [["a", [1], "int8", 0, 0, null]]}',
        '{"parts": [{}], "tensors": []}',
        "[" * 10000,
    ],
)
def test_set_with_a_damaged_manifest_is_an_error(kept, body):
    with manifest(body) as file, connected() as peer:
        asked(peer, request("put"), [file])
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(errors.BadHandleError, match="the manifest of set 'set' is damaged"):
        interop.open("set")
    wait_until(lambda: len(os.listdir("/proc/self/fd")) <= before)


@pytest.mark.parametrize(
    ("part", "row"),
    [
        ({"kind": "NONE"}, {}),
        ({"memory": "none:0"}, {}),
        ({"size": 1 << 40}, {}),
        ({"size": -1}, {}),
        ({"offset": 4096}, {}),
        ({"shape": [4097]}, {}),
        ({"strides": 7}, {}),
        ({"dtype": "object"}, {}),
        ({"more": 7}, {}),
        ({"read_only": 7}, {}),
        ({"device_uuid": "0" * 32}, {}),
        ({}, {"shape": [4097]}),
        ({}, {"shape": [-1]}),
        ({}, {"shape": "x"}),
        ({}, {"dtype": "none"}),
        ({}, {"part": 1}),
        ({}, {"offset": 1 << 62}),
    ],
)
def test_damaged_value_of_a_manifest_is_an_error(kept, part, row):
    whole = {"memory": "host:0", "device_uuid": None, "size": 4096, "offset": 0, "dtype": "|u1"}
    whole |= {"shape": [4096], "strides": [1], "read_only": True} | part
    kind = whole.pop("kind", "MEMFD")
    entry = {"key": "a", "shape": [3], "dtype": "int8", "part": 0, "offset": 0, "digest": None}
    rows = [list((entry | row).values())]
    memory = os.memfd_create("memory")
    os.truncate(memory, 4096)
    body = json.dumps({"parts": [{"kind": kind, "contents": whole}], "tensors": rows})
    with manifest(body, parts=1) as file, connected() as peer:
        asked(peer, request("put"), [file, memory])
    os.close(memory)
    expected = errors.DeviceMismatchError if "device_uuid" in part else errors.BadHandleError
    with pytest.raises(expected):
        interop.open("set")


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (b"garbage", "something else"),
        (b"[]", "something else"),
        (b'{"version": 99}', "speaks version 99 of the messages, and this gpumem version 1"),
        (b'{"version": 1, "refused": "new word", "text": "no"}', "no"),
        (b"", "no keeper of sealed sets runs"),
    ],
)
def test_answer_of_something_else_is_an_error(tmp_path, monkeypatch, answer, message):
    os.chmod(tmp_path, 0o700)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("GPUMEM_KEEPER", ".")

    def answer_once():
        peer, _ = listener.accept()
        with peer:
            peer.recv(1000)
            peer.send(answer)

    with keeper.listen("keeper") as listener:
        thread = threading.Thread(target=answer_once)
        thread.start()
        with pytest.raises(errors.KeeperError, match=message):
            interop.open("set")
        thread.join()


@pytest.mark.parametrize("is_replaced", [False, True])
def test_keeper_ends_without_its_socket(tmp_path, monkeypatch, is_replaced):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(keeper, "CHECK_SECONDS", 0.01)
    with contextlib.ExitStack() as stack:
        made = keeper.Keeper(stack.enter_context(keeper.listen("keeper")), None)
        thread = threading.Thread(target=made.serve, daemon=True)
        thread.start()
        if is_replaced:
            stack.enter_context(keeper.listen("keeper"))
        else:
            os.unlink("keeper")
        thread.join(60)
        assert not thread.is_alive()


def test_folder_has_one_lock(tmp_path):
    first = keeper.lock(str(tmp_path))
    assert keeper.lock(str(tmp_path)) is None
    fcntl.flock(first, fcntl.LOCK_UN)
    os.close(first)
