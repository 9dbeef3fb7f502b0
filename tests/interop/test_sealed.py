"""Sealed sets: tensors in memory that outlives the process that made them."""

import os
import signal
import socket
import subprocess
import sys
import tempfile
import textwrap
import threading
from pathlib import Path

import numpy as np
import pytest
from helpers import child
from helpers.child import program, python
from helpers.waiting import wait_until

import gpumem
from gpumem import errors, interop
from gpumem._node import NodeView
from gpumem.interop import keeper

MIB = 1 << 20
MAKER = """
import sys
import numpy
from gpumem import interop
made = interop.seal(sys.argv[1], {"a": numpy.arange(1000.0), "b": numpy.full((3, 5), 7, "int8")})
print("made", flush=True)
sys.stdin.read()
"""
READER = """
import sys
from gpumem import interop
with interop.open(sys.argv[1], verify="verify" in sys.argv) as found:
    print(sum(found["a"].tolist()), sum(map(sum, found["b"].tolist())))
"""


@pytest.fixture
def folder(monkeypatch):
    """A folder with no keeper; one that a test starts is ended after it."""
    with tempfile.TemporaryDirectory(prefix="gpumem-keeper-") as path:
        monkeypatch.setenv("GPUMEM_KEEPER", path)
        monkeypatch.setenv("GPUMEM_KEEPER_IDLE", "60")
        yield path
        if (number := process_of(path)) is not None:
            os.kill(number, signal.SIGKILL)
            wait_until(lambda: is_gone(number))


def process_of(path):
    """Return the process of the keeper of a folder; None if none listens."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as peer:
        try:
            peer.connect(f"{path}/keeper")
        except OSError:
            return None
        return keeper.peer_of(peer)[0]


def state_of(process):
    """Return the letter of a process's state, and Z for one that has ended."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return "Z"  # as one that its parent has not waited for


def is_gone(process):
    return state_of(process) == "Z"


def start_maker(name):
    """Start a process that seals a set, and does not end by itself."""
    return subprocess.Popen(
        [sys.executable, "-c", MAKER, name],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


def kill(process):
    process.kill()
    process.communicate()


def numbers():
    return {"a": np.arange(10.0), "b": np.ones((4, 6), "int16")[:, ::2], "empty": np.zeros((0, 3))}


def test_bytes_outlive_a_maker_that_was_killed(folder):
    maker = start_maker("set")
    assert maker.stdout.readline() == "made\n"
    kill(maker)
    for _ in range(2):
        assert python("-c", READER, "set").stdout == "499500.0 105\n"


def test_set_has_the_arrays_that_were_sealed_read_only(folder):
    arrays = numbers() | {"scalar": np.float32(4), "big_endian": np.arange(3, dtype=">i4")}
    with interop.seal("set", arrays, digest=True), interop.open("set", verify=True) as found:
        assert list(found) == list(arrays)
        assert len(found) == len(arrays)
        assert found.nbytes == sum(each.nbytes for each in arrays.values())
        for name, array in arrays.items():
            assert found[name].dtype == array.dtype
            assert found[name].read_only
            np.testing.assert_array_equal(found[name].numpy(), array)
        with pytest.raises(BufferError, match="read-only"):
            found["a"].fill(1)
        with pytest.raises(errors.NotSealedError, match="no tensor 'none'"):
            found["none"]


def test_empty_set_is_filled_in_its_block_and_kept_after_it(folder):
    forms = {"keys": ((2, 3), "bfloat16"), "values": (4, "float32")}
    with interop.seal("set", forms, memory="host") as empty:
        assert interop.sealed_sets() == []
        empty["keys"].fill(1.5)
        empty["values"].fill(2)
    with pytest.raises(errors.ClosedError):
        empty["keys"]
    found = interop.open("set")
    assert found["keys"].tolist() == [[1.5] * 3] * 2
    assert found["values"].tolist() == [2] * 4


def test_error_in_the_block_keeps_nothing(folder):
    budget = gpumem.Budget(MIB)
    with pytest.raises(RuntimeError), interop.seal("set", {"a": (3, "int8")}, budget=budget):
        raise RuntimeError
    assert interop.sealed_sets() == []
    assert budget.used == 0


def test_budget_is_charged_once_while_the_maker_has_the_set_open(folder):
    budget = gpumem.Budget(MIB, name="sets")
    arrays = {"a": np.zeros(600 << 10, "uint8")}
    with interop.seal("set", arrays, budget=budget):
        charged = budget.used
        assert 600 << 10 <= charged <= MIB
        with pytest.raises(errors.BudgetExceededError):
            interop.seal("other", arrays, budget=budget)
        with interop.open("set"):
            assert budget.used == charged
    assert budget.used == 0
    assert [each["name"] for each in interop.sealed_sets()] == ["set"]
    with pytest.raises(TypeError):
        interop.seal("other", arrays, budget=MIB)


def test_closed_sets_that_were_dropped_leave_no_memory_in_a_living_process(folder):
    child.run_quietly("""
    from pathlib import Path
    import numpy
    from gpumem import interop

    def mappings():
        return Path("/proc/self/maps").read_text().count("/memfd:gpumem")

    made = interop.seal("set", {"a": numpy.arange(3.0)})
    other = interop.open("set")
    assert mappings() == 3
    interop.drop("set", force=True)
    made.close()
    other.close()
    assert mappings() == 0
    """)


def test_node_is_charged_for_a_set_until_it_is_dropped(folder):
    name = f"sealed-{os.getpid()}"
    code = """
    import os, sys
    import numpy
    import gpumem
    from gpumem import interop
    budget = gpumem.Budget("1MiB", node=sys.argv[1])
    interop.seal("set", {"a": numpy.zeros(600 << 10, "uint8")}, budget=budget)
    print(budget.used)
    """
    view = None
    try:
        maker = python("-c", textwrap.dedent(code), name)
        assert maker.stdout == "0\n"  # its own part
        view = NodeView(name)
        assert view.read()[0][0].used == 600 << 10
        budget = gpumem.Budget(None, node=name)
        with pytest.raises(errors.BudgetExceededError, match=r"a sealed set \(sealed-"):
            budget.reserve(600 << 10)
        with pytest.raises(errors.NodeError, match="in use by a sealed set, process"):
            view.remove()
        with interop.open("set"):
            interop.drop("set", force=True)
            with pytest.raises(errors.BudgetExceededError):
                budget.reserve(600 << 10)
        wait_until(lambda: not [each for each in view.read()[1] if each.held])
        budget.reserve(600 << 10).cancel()
    finally:
        os.unlink(f"/dev/shm/gpumem-node-{os.geteuid()}-{name}")


def test_copies_are_written_without_a_change_of_the_set(folder):
    interop.seal("set", numbers()).close()
    with interop.open("set", copy=["a"]) as one, interop.open("set") as other:
        one["a"].fill(5)
        assert one["a"].tolist() == [5] * 10
        assert other["a"].tolist() == list(range(10))
    with pytest.raises(errors.NotSealedError, match=r"invalid copy = \['c'\]"):
        interop.open("set", copy=["c"])


def test_verify_names_a_tensor_that_was_changed(folder):
    with interop.seal("set", {"a": (3, "int8")}, digest=True) as empty:
        tensor = empty["a"]
    interop.open("set", verify=True).close()
    tensor.fill(1)  # its maker can still write
    with pytest.raises(errors.BadHandleError, match="'a' of set 'set' was changed"):
        interop.open("set", verify=True)
    interop.seal("plain", numbers()).close()
    with pytest.raises(errors.BadHandleError, match="has no digest"):
        interop.open("plain", verify=True)


def test_drop_names_the_processes_that_use_the_set(folder):
    maker = start_maker("set")
    maker.stdout.readline()
    with interop.open("set") as mine:
        users = sorted([maker.pid, os.getpid()])
        assert interop.sealed_sets()[0]["users"] == users
        with pytest.raises(errors.InUseError, match=f"process {users[0]}, {users[1]}"):
            interop.drop("set")
        kill(maker)
        wait_until(lambda: interop.sealed_sets()[0]["users"] == [os.getpid()])
        interop.drop("set", force=True)
        assert interop.sealed_sets() == []
        assert mine["a"].tolist() == list(range(1000))
    with pytest.raises(errors.NotSealedError, match="no set 'set' is kept"):
        interop.drop("set")


def test_name_that_is_kept_is_refused_before_a_copy(folder):
    interop.seal("set", numbers()).close()
    with pytest.raises(errors.KeeperError, match="'set' is kept already"):
        interop.seal("set", {"a": np.zeros(3)})
    assert interop.open("set")["a"].tolist() == list(range(10))


@pytest.mark.parametrize(
    ("tensors", "error"),
    [
        ([], TypeError),
        ({}, ValueError),
        ({"": np.zeros(1)}, ValueError),
        ({"a": np.array([object()])}, TypeError),
        ({"a": np.zeros(1, "i4,f4")}, errors.InvalidDescriptorError),
        ({"a": (3,)}, TypeError),
        ({"a": (-3, "int8")}, errors.InvalidDescriptorError),
        ({"a": (3, "none")}, TypeError),
    ],
)
def test_invalid_tensors_are_refused(folder, tensors, error):
    with pytest.raises(error):
        interop.seal("set", tensors)
    assert interop.sealed_sets() == []


@pytest.mark.parametrize("name", ["", "-a", "a b", "a" * 101, "é", "a\n"])
def test_invalid_names_are_refused(folder, name):
    for call in (interop.open, interop.drop, lambda name: interop.seal(name, numbers())):
        with pytest.raises(ValueError, match="invalid name"):
            call(name)


def test_open_sets_stay_valid_when_the_keeper_ends(folder):
    made = interop.seal("set", numbers())
    number = process_of(folder)
    os.kill(number, signal.SIGKILL)
    wait_until(lambda: process_of(folder) is None)
    assert made["a"].tolist() == list(range(10))
    with pytest.raises(errors.KeeperError, match="no keeper of sealed sets runs"):
        interop.open("set")
    with interop.seal("set", {"a": np.zeros(2)}) as again:  # it starts another one
        assert again["a"].tolist() == [0, 0]
        assert process_of(folder) != number


def test_stopped_keeper_is_an_error_after_the_timeout(folder):
    interop.seal("set", numbers()).close()
    number = process_of(folder)
    os.kill(number, signal.SIGSTOP)
    try:
        wait_until(lambda: state_of(number) == "T")
        for call in (interop.open, interop.drop, lambda name, **more: interop.sealed_sets(**more)):
            with pytest.raises(errors.KeeperError, match=r"did not answer within 0\.2 s"):
                call("set", timeout=0.2)
    finally:
        os.kill(number, signal.SIGCONT)
    wait_until(lambda: not interop.sealed_sets() or not interop.sealed_sets()[0]["users"])


def test_several_first_seals_start_one_keeper(folder):
    threads = [
        threading.Thread(target=lambda name=name: interop.seal(name, numbers()).close())
        for name in "abc"
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(each["name"] for each in interop.sealed_sets()) == ["a", "b", "c"]


def test_keeper_ends_when_it_holds_nothing(folder, monkeypatch):
    monkeypatch.setenv("GPUMEM_KEEPER_IDLE", "0.1")
    interop.seal("set", numbers()).close()
    number = process_of(folder)
    interop.drop("set")
    wait_until(lambda: is_gone(number))
    assert os.listdir(folder) == ["lock"]
    assert interop.sealed_sets() == []


def test_open_beyond_the_files_of_the_process_is_an_error_and_leaks_none(folder):
    child.run_quietly("""
    import os, resource
    import numpy
    from gpumem import errors, interop
    interop.seal("set", {"a": numpy.arange(3.0)}).close()
    files = [os.open("/dev/null", os.O_RDONLY)]
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (files[0] + 3, hard))
    try:
        interop.open("set")
    except errors.KeeperError as error:
        assert "1 descriptors at once cannot be opened" in str(error), error
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    assert os.dup(files[0]) == files[0] + 1
    interop.drop("set", force=True)
    """)


@pytest.mark.parametrize("seconds", ["soon", "0", "-1", "nan"])
def test_seconds_of_a_keeper_that_are_none_are_refused(folder, monkeypatch, seconds):
    monkeypatch.setenv("GPUMEM_KEEPER_IDLE", seconds)
    with pytest.raises(errors.ConfigError, match=f"GPUMEM_KEEPER_IDLE = '{seconds}'"):
        interop.seal("set", numbers())
    assert os.listdir(folder) == []


def test_folder_with_a_name_too_long_for_a_socket_is_refused_by_its_name(folder, monkeypatch):
    long = f"{folder}/{'n' * 120}"
    monkeypatch.setenv("GPUMEM_KEEPER", long)
    for _ in range(2):  # the first try makes the folder
        with pytest.raises(errors.KeeperError, match=long):
            interop.seal("set", numbers())


def test_keeper_has_neither_drivers_nor_libraries_in_memory(folder):
    interop.seal("set", {"a": np.zeros(1 << 24)}).close()
    number = process_of(folder)
    maps = Path(f"/proc/{number}/maps").read_text()
    assert not [each for each in ("gpumem", "cuda", "numpy", "torch") if f"{each}." in maps]
    status = Path(f"/proc/{number}/status").read_text()
    assert int(status.partition("VmRSS:")[2].split()[0]) <= 40 << 10


def test_child_of_a_fork_has_the_tensors_and_no_connection(folder):
    child.run_quietly("""
    import os
    import numpy
    from gpumem import interop
    from helpers.waiting import wait_until
    made = interop.seal("set", {"a": numpy.arange(3.0)})
    end, begin = os.pipe()
    process = os.fork()
    if process == 0:
        os.close(begin)
        correct = made["a"].tolist() == [0, 1, 2]
        made.close()
        os.read(end, 1)
        os._exit(not correct)
    assert interop.sealed_sets()[0]["users"] == [os.getpid()]
    made.close()
    wait_until(lambda: interop.sealed_sets()[0]["users"] == [])
    interop.drop("set")
    os.close(begin)
    assert os.waitpid(process, 0)[1] == 0
    """)


def test_command_lists_and_drops_sets(folder):
    interop.seal("set", numbers()).close()
    listed = python("-m", "gpumem", "keep", "--list").stdout
    assert "set" in listed
    assert str(os.getpid()) in listed
    assert '"tensors": 3' in python("-m", "gpumem", "keep", "--json").stdout
    with interop.open("set"):
        used = python("-m", "gpumem", "keep", "--drop", "set", status=1).stderr
        assert used == f"gpumem: InUseError: the set 'set' is in use by process {os.getpid()}\n"
    python("-m", "gpumem", "keep", "--drop", "set")
    assert python("-m", "gpumem", "keep", "--list").stdout == "no set is kept\n"
    python("-m", "gpumem", "keep", "--force", status=2)
    python("-m", "gpumem", "keep", "--list", "--idle", "1", status=2)
    python("-m", "gpumem", "keep", "--drop", "-", status=2)
    again = python("-m", "gpumem", "keep", status=keeper.RUNS_ALREADY).stderr
    assert again == f"gpumem keep: a keeper runs in {folder} already\n"


def test_keeper_restarted_by_systemd_has_its_sets(folder):
    command = (sys.executable, "-m", "gpumem", "keep")
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.bind(f"{folder}/notify")
        manager.settimeout(60)
        env = os.environ | {"NOTIFY_SOCKET": f"{folder}/notify"}
        with subprocess.Popen(command, env=env) as first:
            assert manager.recv(100) == b"READY=1"
            interop.seal("set", numbers()).close()
            stored = [socket.recv_fds(manager, 1000, 1) for _ in range(2)]
            first.kill()
        names = [said.decode().partition("FDNAME=")[2] for said, _, _, _ in stored]
        assert names == ["0,set", "1,set"]
        files = [stored[1][1][0], stored[0][1][0]]  # in any order
        moves = " ".join(f"{3 + at}<&{file}" for at, file in enumerate(files))
        script = f'LISTEN_PID=$$ LISTEN_FDS=2 LISTEN_FDNAMES=1,set:0,set exec "$@" {moves}'
        shell = ["bash", "-c", script, "keeper", *command]
        with subprocess.Popen(shell, env=env, pass_fds=files) as second:
            assert manager.recv(100) == b"READY=1"
            with interop.open("set") as found:
                assert found["a"].tolist() == list(range(10))
            interop.drop("set")
            said = [manager.recv(100) for _ in range(2)]
            assert said == [b"FDSTOREREMOVE=1\nFDNAME=%d,set" % each for each in range(2)]
            second.kill()
        for file in files:
            os.close(file)


def test_folder_of_others_is_refused(folder):
    os.chmod(folder, 0o755)
    with pytest.raises(errors.KeeperError, match="mode 0700"):
        interop.seal("set", numbers())
    os.chmod(folder, 0o700)
    assert program("ls", folder).stdout == ""
