"""Budgets of a node: one limit for several processes, on the host device."""

from __future__ import annotations

import json
import os
import signal
import struct
import threading
import time
from pathlib import Path
from uuid import UUID

import pytest
from helpers.child import python
from helpers.programs import Program, page_of
from helpers.waiting import wait_until

import gpumem
from gpumem import Budget
from gpumem._node import NodeView, node_files
from gpumem.cli import main
from gpumem.errors import BudgetExceededError, ConfigError, DeviceMismatchError, NodeError

MIB = 1 << 20


def held(node: str) -> dict[str, int]:
    return {level.name: level.used for level in NodeView(node).read()[0]}


def test_one_limit_holds_for_two_processes(node, other):
    budget = Budget("64MiB", node=node, deadline=60)
    assert other(f"(b := gpumem.Budget(None, node={node!r})).limit") == str(64 * MIB)
    other("reserved(b, '40MiB')")
    assert (budget.used, budget.free) == (0, 24 * MIB)
    with pytest.raises(BudgetExceededError) as refused:
        budget.reserve("30MiB")
    error = refused.value
    assert (error.budget, error.limit, error.missing) == (node, 64 * MIB, 6 * MIB)
    assert [nbytes for _, nbytes in error.holders] == [40 * MIB, 0]
    assert f"process {other.process.pid} ({node}), which released" in str(error)
    with budget.reserve("24MiB"):
        assert held(node) == {node: 64 * MIB}


@pytest.mark.parametrize("weights", [0, 4 * MIB])
def test_second_program_that_sizes_itself_sees_what_the_first_one_took(node, other, weights):
    found = []
    Budget(None, node=node)
    for number in range(5):  # a try fails if this process stands still for a second
        name = f"{node}/{number}"
        budget = Budget(64 * MIB + 2 * weights, node=name)
        budget.reserve(weights).commit()
        other(f"b := gpumem.Budget(None, node={name!r})")
        other(f"reserved(b, {weights})")
        reader = threading.Thread(target=lambda: found.append(other("b.free")))
        assert budget.free > 48 * MIB
        reader.start()
        time.sleep(0.1)  # in which it would read the same without the wait
        with budget.reserve("48MiB"):
            reader.join()
        if found[-1] == str(16 * MIB):
            break
    assert found[-1] == str(16 * MIB)


def test_program_that_sizes_itself_and_takes_nothing_is_not_waited_for_without_end(node, other):
    budget = Budget("64MiB", node=node)
    other(f"b := gpumem.Budget(None, node={node!r})")
    for _ in range(2):
        assert (other("b.free"), budget.free) == (str(64 * MIB), 64 * MIB)


def test_names_below_a_node_have_limits_of_their_own(node, other):
    budget = Budget("100MiB", node=node)
    tenant = Budget("30MiB", node=f"{node}/tenant-a")
    with pytest.raises(BudgetExceededError, match="tenant-a' is exceeded"):
        tenant.reserve("31MiB")
    other(f"b := gpumem.Budget('80MiB', node='{node}/tenant-b')")
    other("reserved(b, '80MiB')")
    with pytest.raises(BudgetExceededError) as refused:
        tenant.reserve("25MiB")
    assert refused.value.budget == node
    tenant.reserve("20MiB").commit()
    assert [level.name for level in refused.value.path] == [f"{node}/tenant-a", node]
    assert held(node) == {
        node: 100 * MIB,
        f"{node}/tenant-a": 20 * MIB,
        f"{node}/tenant-b": 80 * MIB,
    }
    assert (budget.node, tenant.node, Budget(None, parent=tenant).node) == (
        node,
        f"{node}/tenant-a",
        None,
    )


def test_idle_memory_of_another_process_is_released_before_a_refusal(node, other):
    other(f"a := gpumem.Arena('host', budget=gpumem.Budget('64MiB', node={node!r}, deadline=60))")
    other("a.allocate('50MiB').close()")
    assert int(other("a.stats().reserved")) >= 50 * MIB
    budget = Budget(None, node=node, deadline=60)
    budget.reserve("60MiB").commit()
    assert int(other("a.stats().reserved")) <= 4 * MIB


def test_callbacks_of_another_process_make_room(node, other):
    other(
        f"b := gpumem.Budget('64MiB', node={node!r}, "
        "on_pressure=lambda b, n: kept and kept.pop().release())"
    )
    other("reserved(b, '50MiB')")
    budget = Budget(None, node=node, deadline=60)
    budget.reserve("60MiB").commit()
    assert (other("b.used"), budget.used) == ("0", 60 * MIB)


def test_callbacks_of_another_process_keep_their_thread_state(node, other):
    """To make one takes a lock that the child of a fork does not get in Python 3.11."""
    other("calls := []")
    other("local := __import__('threading').local()")
    other(
        f"b := gpumem.Budget('64MiB', node={node!r}, on_pressure=lambda b, n: "
        "(setattr(local, 'calls', getattr(local, 'calls', 0) + 1), calls.append(local.calls), "
        "kept and kept.pop().release()))"
    )
    budget = Budget(None, node=node, deadline=60)
    for _ in range(2):
        other("reserved(b, '50MiB')")
        room = budget.reserve("60MiB")
        room.cancel()
    assert other("calls") == "[1, 2]"


def test_processes_of_lower_priority_are_asked_first(node, other):
    second = Program()
    try:
        for program, priority in ((other, 5), (second, -5)):
            program(
                f"b := gpumem.Budget('64MiB', node={node!r}, priority={priority}, "
                "on_pressure=lambda b, n: kept and kept.pop().release())"
            )
            program("reserved(b, '30MiB')")
        Budget(None, node=node, deadline=60).reserve("20MiB").commit()
        assert (other("b.used"), second("b.used")) == (str(30 * MIB), "0")
    finally:
        second.end()


def test_later_budget_of_a_name_changes_priority_and_deadline_only_if_it_names_them(node, other):
    other(f"b := gpumem.Budget('64MiB', node={node!r})")
    other("reserved(b, '60MiB')")
    Budget(None, node=node, priority=5, deadline=0.2)
    for expected, more in ((5, {}), (-7, {"priority": -7})):
        budget = Budget(None, node=node, **more)
        mine = NodeView(node).read()[1][-1]  # the one without bytes
        assert mine.priority == expected
    other.send(signal.SIGSTOP)
    with pytest.raises(BudgetExceededError, match=r"did not answer within 0\.2 s"):
        budget.reserve("10MiB")
    other.send(signal.SIGCONT)


def test_process_that_answered_another_one_meanwhile_is_still_asked(node, other):
    budget = Budget("64MiB", node=node, deadline=60)
    lower, third = Program(), Program()
    try:
        lower("(asked := [], pipe := os.pipe())")
        waits = "on_pressure=lambda b, n: (asked.append(1), os.read(pipe[0], 1))"
        lower(f"b := gpumem.Budget(None, node='{node}/b', priority=-1, {waits})")
        lower("reserved(b, '20MiB')")
        frees = "on_pressure=lambda b, n: kept and kept.pop().release()"
        other(f"b := gpumem.Budget('40MiB', node='{node}/a', priority=1, {frees})")
        other("(reserved(b, '25MiB'), reserved(b, '10MiB'))")
        rooms = []
        thread = threading.Thread(target=lambda: rooms.append(budget.reserve("22MiB")))
        thread.start()
        wait_until(lambda: lower("asked") == "[1]")
        third(f"reserved(gpumem.Budget(None, node='{node}/a', priority=5, deadline=60), '12MiB')")
        assert other("b.used") == str(25 * MIB)
        lower("os.write(pipe[1], b'xx')")
        thread.join()
        assert [room.nbytes for room in rooms] == [22 * MIB]
        assert other("b.used") == "0"
    finally:
        lower.end()
        third.end()


def test_bytes_of_a_killed_process_are_refunded(node, other):
    budget = Budget("64MiB", node=node)
    other(f"reserved(gpumem.Budget(None, node={node!r}), '60MiB')")
    other.send(signal.SIGKILL)
    budget.reserve("64MiB").commit()
    assert held(node) == {node: 64 * MIB}


def test_process_that_has_ended_is_not_listed_and_holds_nothing(node, other):
    other(f"reserved(gpumem.Budget('64MiB', node={node!r}), '60MiB')")
    assert [holder.process for holder in NodeView(node).read()[1]] == [other.process.pid]
    other.send(signal.SIGKILL)
    assert NodeView(node).read()[1] == ()
    assert held(node) == {node: 0}


def test_stopped_process_costs_its_deadline_and_is_named(node, other):
    budget = Budget("64MiB", node=node, deadline=0.2)
    other(f"reserved(gpumem.Budget(None, node={node!r}), '60MiB')")
    other.send(signal.SIGSTOP)
    with pytest.raises(BudgetExceededError, match=r"which did not answer within 0\.2 s: 60\.0 MiB"):
        budget.reserve("10MiB")
    other.send(signal.SIGCONT)


def test_processes_that_were_not_asked_say_so(node, other):
    budget = Budget("64MiB", node=f"{node}/a", priority=1)
    budget.reserve("1MiB").commit()
    other(f"reserved(gpumem.Budget(None, node='{node}/b', priority=5), '60MiB')")
    with pytest.raises(BudgetExceededError, match=r"/b\), which was not asked: "):
        budget.reserve("70MiB")


def test_process_of_another_pid_namespace_is_named_as_such(node, other):
    other(f"reserved(b := gpumem.Budget('64MiB', node={node!r}, deadline=60), '40MiB')")
    other.send(signal.SIGSTOP)  # it does not write its slot again
    page = page_of(node).read_bytes()
    (place,) = (
        at
        for at in range(4096, len(page), 128)
        if int.from_bytes(page[at + 36 : at + 40], "little") == other.process.pid
    )
    overwrite(page_of(node), place, changed(page[place : place + 128], 120, b"\7" + bytes(7)))
    (holder,) = NodeView(node).read()[1]
    assert not holder.is_here
    named = f"process {other.process.pid} of another PID namespace: 40.0 MiB"
    assert named in python("-m", "gpumem", "node", node).stdout
    with pytest.raises(BudgetExceededError, match=r"of another PID namespace \(test-"):
        Budget("64MiB", node=node, deadline=0.1).reserve("65MiB")
    other.send(signal.SIGCONT)


def changed(record: bytes, offset: int, data: bytes) -> bytes:
    """Return a record with other bytes and their checksum."""
    record = record[:offset] + data + record[offset + len(data) :]
    total = 0x9E3779B97F4A7C15
    for (word,) in struct.iter_unpack("<Q", record[8:]):
        total = (total ^ word) * 0x100000001B3 & (1 << 64) - 1
        total ^= total >> 29
    return (total | 1).to_bytes(8, "little") + record[8:]


def test_name_that_another_program_wrote_is_shown_without_control_characters(node):
    Budget("64MiB", node=f"{node}/a")
    record = page_of(node).read_bytes()[256:384]
    overwrite(page_of(node), 256, changed(record, 24, b"\x1b]0;x\7\0"))
    assert NodeView(node).read()[0][1].name == r"\x1b]0;x\x07"


def test_fork_child_has_a_slot_of_its_own(node, other):
    other(f"b := gpumem.Budget('64MiB', node={node!r})")
    other("reserved(b, '20MiB')")
    other("pipe := os.pipe()")
    other(
        "(child := os.fork()) == 0 "
        "and (reserved(b, '30MiB'), os.write(pipe[1], b'x'), time.sleep(600))"
    )
    Budget(None, node=node)
    assert other("os.read(pipe[0], 1)") == "b'x'"
    assert held(node) == {node: 50 * MIB}
    # The child keeps its own bytes when its parent is killed, and not its parent's.
    child = int(other("child"))
    try:
        other.send(signal.SIGKILL)
        with pytest.raises(BudgetExceededError):
            Budget(None, node=node).reserve("35MiB")
        assert held(node) == {node: 30 * MIB}
    finally:
        os.kill(child, signal.SIGKILL)


def test_limit_is_changed_for_all_processes(node, other):
    budget = Budget("64MiB", node=node)
    other(f"b := gpumem.Budget('64MiB', node={node!r})")
    budget.limit = "10MiB"
    assert other("b.limit") == str(10 * MIB)
    assert other("reserved(b, '20MiB')").startswith("BudgetExceededError")
    NodeView(node).set_limit(None)
    assert budget.limit is None
    assert budget.free is None
    other("reserved(b, '20MiB')")
    with pytest.raises(NodeError, match="expected one of"):
        NodeView(f"{node}/absent").set_limit(1)


def test_bytes_leased_above_a_lowered_limit_are_returned(node, other):
    budget = Budget("100MiB", node=node)
    room = budget.reserve("80MiB")
    room.commit()
    room.release()
    budget.limit = "10MiB"
    assert held(node) == {node: 0}
    with pytest.raises(BudgetExceededError):
        budget.reserve("20MiB")
    budget.limit = "100MiB"
    other(f"b := gpumem.Budget(None, node={node!r})")
    other("(r := b.reserve('80MiB')).commit() or r.release()")
    NodeView(node).set_limit(10 * MIB)
    wait_until(lambda: held(node) == {node: 0})
    assert other("reserved(b, '20MiB')").startswith("BudgetExceededError")


def test_arena_may_use_a_raised_limit_at_once(node):
    budget = Budget("20MiB", node=node)
    arena = gpumem.Arena("host", budget=budget)
    budget.limit = "200MiB"
    arena.allocate(150 * MIB).close()
    arena.close()


def test_name_in_use_is_not_given_another_limit(node, other):
    other(f"b := gpumem.Budget('64MiB', node={node!r})")
    with pytest.raises(NodeError, match="in use with another limit"):
        Budget("65MiB", node=node)
    assert Budget(None, node=node).limit == 64 * MIB


def test_node_is_removed_once_no_process_uses_it(node, other):
    other(f"b := gpumem.Budget('64MiB', node={node!r})")
    assert node in node_files()
    with pytest.raises(NodeError, match=f"in use by process {other.process.pid}"):
        NodeView(node).remove()
    other.send(signal.SIGKILL)
    NodeView(node).remove()
    assert node not in node_files()
    with pytest.raises(NodeError, match="there is no node"):
        NodeView(node)


def test_names_that_no_process_uses_are_removed_with_those_below(node, other):
    budget = Budget("64MiB", node=node)
    other(f"bs := [gpumem.Budget('5MiB', node='{node}/a' + each) for each in ('', '/b', '/b/c')]")
    with pytest.raises(NodeError, match=f"a/b' is in use by process {other.process.pid}"):
        NodeView(f"{node}/a/b").remove()
    other.send(signal.SIGKILL)
    NodeView(f"{node}/a/b").remove()
    assert list(held(node)) == [node, f"{node}/a"]
    python("-m", "gpumem", "node", f"{node}/a", "--remove")
    assert held(node) == {node: 0}
    with pytest.raises(NodeError, match="there is no name"):
        NodeView(f"{node}/a").remove()
    assert Budget(None, node=f"{node}/a").limit is None
    budget.reserve("64MiB").cancel()


def test_command_lists_sets_and_removes(node, other):
    command = ("-m", "gpumem", "node")
    other(f"b := gpumem.Budget('64MiB', node='{node}/a')")
    other("reserved(b, '64MiB')")
    listed = python(*command, node).stdout.splitlines()
    assert listed == [
        f"{node}: 64.0 MiB leased, no limit",
        f"  {node}/a: 64.0 MiB leased, of 64.0 MiB",
        f"    process {other.process.pid}: 64.0 MiB",
    ]
    shown = python("-m", "gpumem", "top").stdout
    assert "\n".join(listed) in shown
    assert "publishes its counters" not in shown
    python(*command, f"{node}/a", "--limit", "96MiB")
    assert other("b.limit") == str(96 * MIB)
    refused = python(*command, f"{node}/a", "--limit", "80%", status=2).stderr
    assert "a percentage needs the node of a device" in refused
    python(*command, f"{node}/a", "--limit", "none")
    facts = json.loads(python(*command, node, "--json").stdout)["nodes"][0]
    assert [level["limit"] for level in facts["names"]] == [None, None]
    assert "is in use by process" in python(*command, node, "--remove", status=1).stderr
    other.send(signal.SIGKILL)
    python(*command, node, "--remove")
    assert f"there is no node '{node}'" in python(*command, node).stdout
    for wrong in (("--remove",), ("a b",), (node, "--limit", "x")):
        python(*command, *wrong, status=2)


@pytest.mark.parametrize(
    ("damage", "text"),
    [
        (lambda page: page.write_bytes(os.urandom(20480)), "cut or overwritten"),
        (lambda page: os.truncate(page, 5000), "cut or overwritten"),
        (lambda page: page.unlink(), "was removed"),
        (lambda page: overwrite(page, 8, b"\xff"), "another version"),
        (lambda page: overwrite(page, 4096 + 128, b"\x01" * 128), "cut or overwritten"),
    ],
)
def test_damaged_page_is_an_error_and_no_crash(node, other, damage, text):
    other(f"b := gpumem.Budget('64MiB', node={node!r}, deadline=0.1)")
    damage(page_of(node))
    assert text in other("reserved(b, '10MiB')")
    assert "NodeError" in other("b.free")
    assert text in other("b")  # its repr raises nothing
    if "removed" not in text:
        with pytest.raises(NodeError, match=text):
            Budget("64MiB", node=node)


def overwrite(page: Path, offset: int, data: bytes) -> None:
    with page.open("r+b") as file:
        file.seek(offset)
        file.write(data)


def test_page_that_is_open_to_others_is_refused(node):
    page_of(node).touch()
    page_of(node).chmod(0o666)
    with pytest.raises(NodeError, match="open to others: expected a regular file of this user"):
        Budget("64MiB", node=node)


def test_page_of_a_group_is_for_the_group(node, monkeypatch):
    monkeypatch.setenv("GPUMEM_NODE_GROUP", "no such group")
    with pytest.raises(NodeError, match="GPUMEM_NODE_GROUP = 'no such group'"):
        Budget("64MiB", node=node)
    group = os.getegid() or 65534
    page = Path(f"/dev/shm/gpumem-node-g{group}-{node}")
    monkeypatch.setenv("GPUMEM_NODE_GROUP", str(group))
    try:
        Budget("64MiB", node=node)
        status = page.stat()
        assert (status.st_mode & 0o777, status.st_gid) == (0o660, group)
    finally:
        page.unlink(missing_ok=True)


@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    [
        ({"node": "a b"}, ValueError, "invalid node = 'a b'"),
        ({"node": "../x"}, ValueError, "invalid node"),
        ({"node": "a/b/c/d/e"}, ValueError, "1 to 4 parts"),
        ({"node": 5}, TypeError, "node must be a str"),
        ({"priority": 1 << 31}, ValueError, "invalid priority"),
        ({"priority": "high"}, TypeError, "priority must be an integer, not str"),
        ({"node": None, "priority": 1}, ValueError, "expected node"),
        ({"deadline": 0}, ValueError, "above 0 to 3600"),
        ({"deadline": "soon"}, TypeError, "deadline must be a number"),
        ({"parent": Budget(5)}, ValueError, "a node's budget is a root"),
    ],
)
def test_invalid_argument_is_refused(node, arguments, error, text):
    with pytest.raises(error, match=text):
        Budget("64MiB", **{"node": node, **arguments})
    assert node not in node_files()


@pytest.mark.parametrize(
    "allocate",
    [
        lambda budget: gpumem.Arena("host/host_accessible", budget=budget).allocate("20MiB"),
        lambda budget: gpumem.DriverPool("host", budget=budget).allocate("20MiB"),
        lambda budget: gpumem.Arena("host", budget=budget).virtual(
            (20, MIB), "uint8", committed=20
        ),
    ],
    ids=["pinned", "pool", "virtual"],
)
def test_memory_of_each_kind_is_charged_and_refused(node, allocate):
    budget = Budget("64MiB", node=node)
    kept = [allocate(Budget(None, parent=budget)) for _ in range(3)]
    assert budget.used == held(node)[node] == 60 * MIB
    with pytest.raises(BudgetExceededError):
        allocate(budget)
    kept.clear()


def test_dropped_budgets_and_their_arenas_leave_the_node_usable(node):
    arena = gpumem.Arena("host", budget=Budget("64MiB", node=node))
    buffer = arena.allocate("20MiB")
    del arena
    assert buffer.nbytes == 20 * MIB
    del buffer
    assert Budget(None, node=node).free == 64 * MIB


def unused_uuid() -> str:
    return f"{time.monotonic_ns():032x}"


@pytest.fixture
def device(node, monkeypatch, leave_room):
    """A node of the host device, which has 256 MiB left; other tests have other devices."""
    uuid = unused_uuid()
    monkeypatch.setattr(gpumem.Device, "uuid", uuid)
    leave_room(256 * MIB)
    yield "host:0"
    page_of(uuid).unlink(missing_ok=True)


def test_memory_outside_of_a_devices_node_counts(device):
    budget = Budget(None, node=f"{device}/a")
    with gpumem.Arena("host") as other, other.allocate("100MiB"):
        assert budget.free == 156 * MIB
        with pytest.raises(BudgetExceededError, match="within the device") as refused:
            budget.reserve("160MiB")
        assert (refused.value.budget, refused.value.missing) == ("the device", 4 * MIB)
    budget.reserve("160MiB").cancel()
    assert gpumem.Arena("host", budget=budget).allocate("250MiB").nbytes == 250 * MIB


@pytest.mark.parametrize("form", ["{}", "GPU-{}", "MIG-{}"])
def test_node_named_by_the_uuid_of_a_device_is_the_devices(device, form):
    uuid = str(UUID(gpumem.Device("host").uuid))
    budget = Budget(None, node=form.format(uuid) + "/a")
    assert budget.node == Budget(None, node=f"{device}/a").node
    with gpumem.Arena("host").allocate("100MiB"):
        assert budget.free == 156 * MIB
    assert "/a" in str(NodeView(form.format(uuid)).read()[0])
    absent = unused_uuid()
    with pytest.raises(DeviceMismatchError, match=f"device {absent} is not here"):
        Budget(None, node=absent)
    assert absent not in node_files()


def test_limit_of_a_devices_name_may_be_a_share_of_the_device(device):
    total = gpumem.Device("host").total_bytes
    budget = Budget("50%", node=f"{device}/a")
    assert budget.limit == total // 2
    budget.limit = "25%"
    assert budget.limit == total // 4
    with pytest.raises(ConfigError, match="above 0% and at most 100%"):
        budget.limit = "101%"
    budget.soft = "20%"
    assert budget.soft == total // 5
    assert Budget(None, node=f"{device}/a", soft="10%").soft == total // 10
    NodeView(f"{device}/a").set_limit("75%")
    assert budget.limit == total // 4 * 3


def test_command_names_the_device_of_a_node_and_sets_a_share_of_it(device, capsys):
    host = gpumem.Device(device)
    Budget(None, node=f"{device}/a")
    assert main(["node", f"{device}/a", "--limit", "50%"]) == 0
    listed = capsys.readouterr().out
    assert listed.startswith(f"{device}, {host.name}: 0 B leased, no limit\n  {device}/a: ")
    assert host.uuid not in listed
    assert main(["node", device, "--json"]) == 0
    (facts,) = json.loads(capsys.readouterr().out)["nodes"]
    assert facts["device"] == {"name": host.name, "ordinal": device, "uuid": host.uuid}
    assert [level["limit"] for level in facts["names"]] == [None, host.total_bytes // 2]


def test_leases_of_a_device_count_until_they_are_allocated(device):
    budgets = [Budget(None, node=f"{device}/{name}") for name in "ab"]
    assert budgets[0].node == f"{gpumem.Device('host').uuid}/a"
    assert [level.name for level in NodeView(f"{device}/a").read()[0]][1] == budgets[0].node
    room = budgets[0].reserve("150MiB")
    assert budgets[1].free <= 106 * MIB
    with gpumem.Arena("host").allocate("150MiB"):
        room.commit()
        budgets[1].reserve("100MiB").cancel()


def test_lease_of_a_device_that_is_not_used_is_returned_without_callbacks(device):
    called = []
    first = Budget(None, node=f"{device}/a", on_pressure=lambda *_: called.append(1))
    arena = gpumem.Arena("host", budget=first)
    with arena.allocate("100MiB"):
        # Of what `first` leased, it has allocated 100 MiB since it last wrote.
        Budget(None, node=f"{device}/b").reserve("150MiB").cancel()
    assert called == []


def test_bytes_of_a_killed_process_are_waited_for_until_the_device_has_them(device, other):
    other(f"setattr(gpumem.Device, 'uuid', {gpumem.Device('host').uuid!r})")
    other(f"b := gpumem.Budget(None, node='{device}/a')")
    other("reserved(b, '200MiB')")
    budget = Budget(None, node=f"{device}/b", deadline=60)
    held = gpumem.Arena("host")  # the memory that the driver releases after the process has ended
    held.allocate("200MiB")
    other.send(signal.SIGKILL)
    release = threading.Timer(0.2, held.close)
    release.start()
    budget.reserve("150MiB").cancel()
    release.join()


@pytest.mark.parametrize("of_device", [True, False])
@pytest.mark.parametrize("backing", ["virtual", "regions"])
def test_arena_waits_for_the_memory_of_a_killed_process(
    device, node, other, leave_room, of_device, backing
):
    leave_room(1 << 30)
    name = device if of_device else node
    other(f"setattr(gpumem.Device, 'uuid', {gpumem.Device('host').uuid!r})")
    other(f"b := gpumem.Budget('800MiB', node='{name}')")
    other("reserved(b, '600MiB')")
    budget = Budget(None, node=name, deadline=60)
    held = gpumem.Arena("host")  # the memory that the driver releases after the process has ended
    held.allocate("600MiB")
    arena = gpumem.Arena("host", budget=budget, backing=backing)
    other.send(signal.SIGKILL)
    release = threading.Timer(0.2, held.close)
    release.start()
    assert arena.allocate("600MiB").nbytes == 600 * MIB
    release.join()


def test_request_beyond_the_devices_free_memory_is_asked_for(device, leave_room):
    leave_room(1 << 30)
    outside = gpumem.Arena("host")  # memory that a callback frees
    kept = [outside.allocate("600MiB")]
    first = Budget(None, node=f"{device}/a", deadline=60)
    arena = gpumem.Arena(
        "host",
        budget=Budget(None, parent=first, on_pressure=lambda *_: (kept.clear(), outside.shrink())),
    )
    assert arena.allocate("600MiB").nbytes == 600 * MIB
