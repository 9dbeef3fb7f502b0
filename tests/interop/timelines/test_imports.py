"""Importing what others made: which types, whose handle it is, what the driver is told."""

import errno
import os
import subprocess
import sys

import pytest

import gpumem
from gpumem._testing import timelines
from gpumem.errors import (
    BadHandleError,
    ClosedError,
    DeviceMismatchError,
    DriverError,
    InUseError,
    NonMonotonicError,
    TimelineTimeout,
    UnsupportedHandleTypeError,
)
from gpumem.interop import DriverTimeline, HostTimeline, SemaphoreDescriptor, SemaphoreType
from gpumem.interop.timelines.semaphores import import_semaphore, semaphore_capability

FAILED = 719
FD_TYPES = [SemaphoreType.TIMELINE_OPAQUE_FD, SemaphoreType.HOST_TIMELINE]
WINDOWS = [SemaphoreType.D3D12_FENCE, SemaphoreType.TIMELINE_WIN32]


def is_open(fd):
    try:
        os.fstat(fd)
    except OSError:
        return False
    return True


@pytest.fixture
def made():
    """The exporter's side; first of all, so that it is there before files are counted."""
    with HostTimeline.create() as made:
        yield made


# ---- what can be imported ----


def test_semaphore_capability_never_raises():
    for kind in FD_TYPES:
        assert semaphore_capability("host", kind)
    for kind in WINDOWS:
        answer = semaphore_capability("host", kind)
        assert not answer
        assert "Windows" in answer.reason
    for kind in SemaphoreType:
        answer = semaphore_capability("cuda:63", kind)
        assert not answer
        assert answer.reason
    with pytest.raises(TypeError):
        semaphore_capability("host", "D3D12_FENCE")


@pytest.mark.parametrize("kind", WINDOWS)
def test_unsupported_semaphore_type_is_refused_with_the_reason(made, same_files, kind):
    with made.export() as handle:
        with pytest.raises(UnsupportedHandleTypeError) as caught:
            import_semaphore("host", SemaphoreDescriptor(handle, kind), consume=True)
        assert str(caught.value) == semaphore_capability("host", kind).reason
        assert is_open(handle.fileno())


def test_timeline_of_another_device_is_refused(made, same_files):
    with made.export() as handle:
        other = SemaphoreDescriptor(handle, SemaphoreType.HOST_TIMELINE, "0" * 31 + "1")
        with pytest.raises(DeviceMismatchError):
            import_semaphore("host", other, consume=True)
        assert is_open(handle.fileno())
        uuid = gpumem.Device("host").uuid
        own = SemaphoreDescriptor(handle, SemaphoreType.HOST_TIMELINE, uuid)
        import_semaphore("host", own).close()


# ---- whose handle it is ----


@pytest.mark.parametrize("kind", FD_TYPES)
@pytest.mark.parametrize("consume", [False, True])
def test_descriptor_is_closed_only_with_consume(made, same_files, kind, consume):
    fd = made.export().detach()
    timeline = import_semaphore("host", SemaphoreDescriptor(fd, kind), consume)
    assert is_open(fd) is not consume
    if not consume:
        os.close(fd)
    timeline.signal(1 << 35)
    assert made.value() == timeline.value() == 1 << 35
    timeline.close()


@pytest.mark.parametrize("kind", FD_TYPES)
def test_consumed_handle_is_closed_once(made, same_files, kind):
    handle = made.export()
    timeline = import_semaphore("host", SemaphoreDescriptor(handle, kind), consume=True)
    assert handle.closed
    handle.close()
    timeline.close()


def test_reused_descriptor_number_is_not_closed(made, tmp_path):
    fd = made.export().detach()
    descriptor = SemaphoreDescriptor(fd, SemaphoreType.TIMELINE_OPAQUE_FD)
    timeline = import_semaphore("host", descriptor, consume=True)
    path = tmp_path / "file"
    path.write_text("here")
    files = [path.open() for _ in range(8)]
    timeline.close()
    assert [file.read() for file in files] == ["here"] * 8
    for file in files:
        file.close()


@pytest.mark.parametrize("kind", FD_TYPES)
@pytest.mark.parametrize("number", [-1, 1 << 20])
def test_closed_handle_is_refused(same_files, kind, number):
    class Closed:
        def fileno(self):
            return number

        def close(self):
            raise AssertionError("nothing was imported")

    with pytest.raises(BadHandleError) as caught:
        import_semaphore("host", SemaphoreDescriptor(Closed(), kind), consume=True)
    assert caught.value.errno == errno.EBADF


def test_file_of_another_kind_is_refused_as_a_host_timeline(same_files, tmp_path):
    import fcntl

    unsealed = os.memfd_create("x", os.MFD_ALLOW_SEALING)
    os.truncate(unsealed, 4096)
    unmarked = os.memfd_create("x", os.MFD_ALLOW_SEALING)
    os.truncate(unmarked, 4096)
    fcntl.fcntl(unmarked, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK)
    small = os.memfd_create("x")
    folder = os.open(tmp_path, os.O_RDONLY)
    reading, writing = os.pipe()
    for fd in (unsealed, unmarked, small, folder, reading):
        with pytest.raises(BadHandleError, match="not a timeline") as caught:
            import_semaphore("host", SemaphoreDescriptor(fd, SemaphoreType.HOST_TIMELINE), True)
        assert caught.value.errno == errno.EINVAL
        assert is_open(fd)
    for fd in (unsealed, unmarked, small, folder, reading, writing):
        os.close(fd)


@pytest.mark.parametrize("call", ["cuImportExternalSemaphore", "cuCtxPushCurrent"])
def test_failed_import_leaves_the_handle_open(made, same_files, host, call):
    handle = made.export()
    descriptor = SemaphoreDescriptor(handle, SemaphoreType.TIMELINE_OPAQUE_FD)
    host.fail(call, 1, FAILED)
    with pytest.raises(DriverError):
        import_semaphore("host", descriptor, consume=True)
    host.clear_faults()
    assert not handle.closed
    import_semaphore("host", descriptor, consume=True).close()


def test_file_refused_by_the_driver_stays_open(same_files):
    small = os.memfd_create("x")
    with pytest.raises(DriverError, match="cuImportExternalSemaphore"):
        import_semaphore(
            "host", SemaphoreDescriptor(small, SemaphoreType.TIMELINE_OPAQUE_FD), consume=True
        )
    os.close(small)


def test_duplicated_descriptors_are_closed_on_exec(made):
    descriptor = SemaphoreDescriptor(made.export(), SemaphoreType.TIMELINE_OPAQUE_FD)
    with import_semaphore("host", descriptor, consume=True), made.export() as handle:
        assert not os.get_inheritable(handle.fileno())
        seen = subprocess.run(
            [sys.executable, "-c", "import os; print(os.listdir('/proc/self/fd'))"],
            close_fds=False, capture_output=True, text=True, check=True,
        )  # fmt: skip
        links = [
            os.readlink(f"/proc/self/fd/{fd}")
            for fd in os.listdir("/proc/self/fd")
            if os.path.exists(f"/proc/self/fd/{fd}") and os.get_inheritable(int(fd))
        ]
        assert not any("timeline" in link for link in links)
        assert seen.returncode == 0


# ---- what an imported timeline does ----


@pytest.fixture
def unreadable(made):
    """A timeline with a value that only the driver knows, as all that CUDA imports."""
    kind = SemaphoreType.TIMELINE_OPAQUE_FD
    timelines.hide_values(True)
    try:
        timeline = import_semaphore("host", SemaphoreDescriptor(made.export(), kind), consume=True)
    finally:
        timelines.hide_values(False)
    with timeline:
        yield timeline


def test_opaque_timeline_is_waited_for_through_a_stream(made, unreadable):
    made.signal(3)
    unreadable.wait(3, timeout=60)
    with pytest.raises(TimelineTimeout):
        unreadable.wait(4, timeout=0.02)
    with pytest.raises(InUseError):
        unreadable.close()
    made.signal(4)
    unreadable.close(timeout=60)


def test_opaque_timeline_is_signalled_through_a_stream(made, unreadable):
    unreadable.signal(2)
    made.wait(2, timeout=60)
    assert unreadable.pending == 2
    for value in (1, 2):
        with pytest.raises(NonMonotonicError):
            unreadable.signal(value)


def test_opaque_timeline_cannot_be_read_or_exported(unreadable):
    for call in (unreadable.value, unreadable.export):
        with pytest.raises(UnsupportedHandleTypeError):
            call()
    assert isinstance(unreadable, DriverTimeline)
    with pytest.raises(TypeError, match="export"):
        unreadable.__reduce__()


def test_signals_of_two_streams_on_an_opaque_timeline_stay_in_order(made, unreadable):
    from helpers.driver import HostDriver

    one, two = gpumem.Stream("host"), gpumem.Stream("host")
    with HostDriver().block(one):
        unreadable.enqueue_signal(one, 5)
        unreadable.enqueue_signal(two, 7)
        assert not two.query()  # it comes behind the first
        assert made.value() == 0
    two.synchronize()
    assert made.value() == 7


def test_failed_operation_leaves_an_imported_timeline_unchanged(made, unreadable, host, stream):
    for call in ("cuCtxPushCurrent", "cuEventCreate", "cuSignalExternalSemaphoresAsync"):
        host.fail(call, 1, FAILED, 0, this_thread=True)  # a late end takes not the only one
        with pytest.raises(DriverError, match=call):
            unreadable.enqueue_signal(stream, 9)
        host.clear_faults()
        assert unreadable.pending == 0
    unreadable.enqueue_signal(stream, 1)
    made.wait(1, timeout=60)


def test_readable_import_can_be_exported_again(made, same_files):
    handle = made.export()
    descriptor = SemaphoreDescriptor(handle, SemaphoreType.TIMELINE_OPAQUE_FD)
    timeline = import_semaphore("host", descriptor, consume=True)
    with timeline.export() as again:
        assert again.kind is SemaphoreType.TIMELINE_OPAQUE_FD
        with HostTimeline.from_fd(again) as there:
            timeline.signal(1)
            there.wait(1, timeout=0)
    timeline.close()
    with pytest.raises(ClosedError):
        timeline.export()


def test_hundreds_of_imports_leak_nothing(made, same_files, stream):
    for value in range(1, 301):
        descriptor = SemaphoreDescriptor(made.export(), SemaphoreType.TIMELINE_OPAQUE_FD)
        with import_semaphore("host", descriptor, consume=True) as timeline:
            timeline.enqueue_signal(stream, value)
    stream.synchronize()
    assert made.value() == 300


@pytest.mark.parametrize("kind", FD_TYPES)
def test_end_that_the_driver_refuses_is_tried_once_more(made, host, kind):
    before = host.live()
    stream = gpumem.Stream("host")
    timeline = import_semaphore("host", SemaphoreDescriptor(made.export(), kind), consume=True)
    timeline.enqueue_signal(stream, 1)
    stream.synchronize()
    for call in ("cuDestroyExternalSemaphore", "cuMemHostUnregister"):
        host.fail(call, 1, FAILED)
    timeline.close()
    del stream
    host.clear_faults()
    gpumem.Device("host").free_bytes  # noqa: B018  # releases what nothing refers to
    after = host.live()
    assert (after["imports"], after["allocations"]) == (before["imports"], before["allocations"])
