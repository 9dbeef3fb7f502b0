"""Files of sleeping bytes: what other processes and the system do to them."""

from __future__ import annotations

import errno
import os

import pytest
from helpers import child
from helpers.files import no_file_left

import gpumem
from gpumem.errors import SleepFileError

MIB = 1 << 20


def filled(arena, nbytes, value):
    return gpumem.full((nbytes,), value, "uint8", resource=arena)


def holds(tensor, value):
    return bool((tensor.numpy() == value).all())


def refusal(call):
    """Call it and return number, file and text of the error, without what its traceback holds."""
    try:
        call()
    except SleepFileError as error:
        return error.errno, error.filename, str(error)
    raise AssertionError("not refused")


@pytest.fixture
def path(tmp_path):
    return tmp_path / "asleep"


@pytest.fixture
def tensor(arena, path):
    """A tensor that sleeps in the file."""
    tensor = filled(arena, 32 * MIB, 9)
    arena.sleep(to=path)
    yield tensor
    tensor.buffer.close()


@pytest.mark.parametrize("left", [0, 1000, 20 * MIB])
def test_wake_from_a_file_that_became_shorter_names_it_and_works_once_it_is_repaired(
    arena, path, left
):
    tensor = filled(arena, 32 * MIB, 9)
    with no_file_left():
        arena.sleep(to=path)
        content = path.read_bytes()
        os.truncate(path, left)
        for _ in range(2):
            code, name, text = refusal(arena.wake)
            assert (code, name) == (errno.ENODATA, str(path))
            assert f"it has {left:,} bytes, expected {len(content):,}" in text
            assert arena.asleep == ("default",)
            assert arena.stats().reserved == 0
            arena.check_invariants()
        path.write_bytes(content)
        arena.wake()
        assert holds(tensor, 9)
        assert not path.exists()


def test_wake_from_a_file_with_other_bytes_is_refused(arena, tensor, path):
    with open(path, "r+b") as file:
        file.seek(17 * MIB)
        file.write(bytes(4))
    with pytest.raises(SleepFileError, match="has other bytes than were written"):
        arena.wake()
    with open(path, "r+b") as file:
        file.seek(17 * MIB)
        file.write(bytes([9] * 4))
    arena.wake()
    assert holds(tensor, 9)


def test_each_tag_of_a_damaged_file_wakes_or_stays_asleep_on_its_own(arena, path):
    kept = {}
    for number, name in enumerate(("first", "second", "third"), start=1):
        with arena.tag(name):
            kept[name] = filled(arena, 2 * MIB, number)
    arena.sleep(["first", "second", "third"], to=path)
    content = path.read_bytes()
    os.truncate(path, 3 * MIB)
    arena.wake("first")
    for name in ("second", "third"):
        with pytest.raises(SleepFileError, match=str(path)):
            arena.wake(name)
    assert arena.asleep == ("second", "third")
    path.write_bytes(content)
    arena.wake()
    assert [holds(tensor, number) for number, tensor in enumerate(kept.values(), 1)] == [True] * 3


def test_freed_and_scattered_blocks_round_trip_through_a_file(arena, path):
    blocks = [filled(arena, nbytes, n % 251) for n, nbytes in enumerate([300, 9 * MIB, 70_000] * 8)]
    del blocks[1::4]
    arena.sleep(to=path)
    del blocks[::5]  # freed while they sleep
    arena.wake()
    assert all(int(block.numpy()[0]) == int(block.numpy()[-1]) for block in blocks)
    assert len({int(block.numpy()[0]) for block in blocks}) == len(blocks)


@pytest.mark.parametrize("replaced", [False, True])
def test_wake_does_not_need_the_name_of_the_file(arena, tensor, path, replaced):
    path.unlink()
    if replaced:
        path.write_text("of another program")
    arena.wake()
    assert holds(tensor, 9)
    assert path.exists() == replaced


def test_failed_read_is_an_error_with_the_systems_number(arena, tensor, path):
    number = descriptor_of(path)
    kept, (reads, writes) = os.dup(number), os.pipe()
    os.dup2(reads, number)  # a pipe has no offsets
    assert refusal(arena.wake)[:2] == (errno.ESPIPE, str(path))
    assert arena.asleep == ("default",)
    os.dup2(kept, number)
    for each in (kept, reads, writes):
        os.close(each)
    arena.wake()
    assert holds(tensor, 9)


def descriptor_of(path):
    (found,) = (
        int(entry)
        for entry in os.listdir("/proc/self/fd")
        if os.path.realpath(f"/proc/self/fd/{entry}") == str(path)
    )
    return found


def test_full_disk_refuses_the_sleep_and_leaves_all_tags_awake(tmp_path):
    # A limit on the size of files stands for the disk. The host device's memory is a file, too.
    script = """
        import errno, os, resource, signal, sys
        import gpumem
        from gpumem.errors import SleepFileError
        arena = gpumem.Arena("host")
        with arena.tag("small"):
            small = gpumem.full((1 << 20,), 7, "uint8", resource=arena)
        large = gpumem.full((64 << 20,), 9, "uint8", resource=arena)
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        hard = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
        resource.setrlimit(resource.RLIMIT_FSIZE, (8 << 20, hard))
        try:
            arena.sleep(["small", "default"], to=sys.argv[1])
        except SleepFileError as error:
            assert (error.errno, error.filename) == (errno.EFBIG, sys.argv[1]), error
        else:
            raise AssertionError("not refused")
        assert not os.path.exists(sys.argv[1])
        assert arena.asleep == ()
        resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
        assert (small.numpy() == 7).all() and (large.numpy() == 9).all()
        arena.sleep(to=sys.argv[1])
        arena.wake()
        assert (large.numpy() == 9).all()
    """
    child.run_quietly(script, str(tmp_path / "asleep"))


def test_place_of_a_sleep_is_not_that_of_the_sleep_before(tmp_path):
    script = """
        import sys
        import gpumem
        from gpumem._testing import host_device as host
        gpumem.device.set_host_device_count(2)
        arena = gpumem.Arena("host:0")
        tensor = gpumem.full((4 << 20,), 9, "uint8", resource=arena)
        for place in ("host:1", "host", sys.argv[1], "host:1", sys.argv[1], "host"):
            arena.sleep(to=place)
            assert (host.used(1) > 0) == (place == "host:1"), place
            arena.wake()
            assert (tensor.numpy() == 9).all() and host.used(1) == 0, place
    """
    child.run_quietly(script, str(tmp_path / "asleep"))


def test_refusal_after_a_part_of_the_bytes_is_in_the_file_restores_them(tmp_path):
    script = """
        import sys
        import gpumem
        from gpumem._testing import host_device as host
        arena = gpumem.Arena("host:0")
        blocks = [gpumem.full((180 << 20,), n, "uint8", resource=arena) for n in range(1, 5)]
        host.fail("cuMemUnmap", 2, 1)     # one group of 128 MiB has gone to the driver
        try:
            arena.sleep(to=sys.argv[1])
        except gpumem.errors.DriverError:
            host.clear_faults()
        else:
            raise AssertionError("not refused")
        assert arena.asleep == ()
        assert all((block.numpy()[::4096] == n).all() for n, block in enumerate(blocks, 1))
        arena.sleep(to=sys.argv[1])
        arena.wake()
        assert all((block.numpy()[::4096] == n).all() for n, block in enumerate(blocks, 1))
    """
    child.run_quietly(script, str(tmp_path / "asleep"))
