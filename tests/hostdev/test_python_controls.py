"""The host device's controls as gpumem's own module offers them. One child per test."""

import textwrap

import pytest
from helpers.child import python


@pytest.fixture
def run():
    def run(code: str, expect: int = 0) -> str:
        head = "import gpumem\nfrom gpumem._testing import host_device\n"
        return python("-c", head + textwrap.dedent(code), status=expect).stderr

    return run


def test_call_can_be_made_to_fail(run):
    run("""
        arena = gpumem.Arena("host")
        host_device.fail("cuMemAlloc", 1, 2, times=0)
        host_device.fail("cuMemCreate", 1, 2, times=0)
        try:
            arena.allocate(1 << 20)
        except MemoryError:
            pass
        else:
            raise AssertionError("nothing failed")
        host_device.clear_faults()
        arena.allocate(1 << 20)
    """)


def test_thread_fault_affects_only_calls_of_that_thread(run):
    run("""
        import threading
        device = gpumem.Device("host")
        device.synchronize()
        host_device.fail("cuEventCreate", 1, 2, this_thread=True)
        other = threading.Thread(target=gpumem.Event, args=("host",))
        other.start()
        other.join()
        try:
            gpumem.Event("host")
        except gpumem.errors.DriverError as error:
            assert "cuEventCreate" in str(error)
        else:
            raise AssertionError("nothing failed")
    """)


@pytest.mark.parametrize(
    "call",
    [
        "fail('cuNothing', 1, 2)",
        "fail('cuMemAlloc', 0, 2)",
        "delay_record(0, 5)",
        "lose_device(63, 700)",
    ],
)
def test_unknown_faults_are_refused(run, call):
    run(f"""
        try:
            host_device.{call}
        except ValueError:
            pass
        else:
            raise AssertionError("accepted")
    """)


def test_live_objects_and_charges_can_be_counted(run):
    run("""
        before = host_device.live()
        arena = gpumem.Arena("host")
        block = arena.allocate(3 << 20)
        assert host_device.used(0) >= 3 << 20
        assert sum(host_device.live().values()) > sum(before.values())
        host_device.reset_counts()
        assert host_device.call_count() == 0
    """)


def test_misuse_is_found_through_the_module(run):
    run("""
        host_device.find_misuse(True)
        assert {kind: host_device.misuse_count(kind) for kind in host_device.MISUSE} == {
            "use after free": 0, "wrong context": 0, "unordered access": 0, "leak": 0}
        assert host_device.misuse_report() == ""
    """)


def test_leaks_at_interpreter_exit_are_reported(run):
    told = run("""
        host_device.find_misuse(True)
        arena = gpumem.Arena("host")
        block = arena.allocate(1 << 20)
    """)
    assert "gpumem host device: left at the end: " in told
