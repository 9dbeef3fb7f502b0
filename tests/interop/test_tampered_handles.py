"""What arrives in a pickle is not trusted: each field of a handle in turn has each value."""

from __future__ import annotations

import dataclasses
import os
import pickle

import numpy as np
import pytest

import gpumem
from gpumem import interop
from gpumem._resource.handle import received_handle
from gpumem.device import Device, MemoryInfo, MemoryKind
from gpumem.errors import BadHandleError, DeviceMismatchError
from gpumem.interop import Contents, Handle, HostTimeline, MemoryHandleType, SemaphoreType
from gpumem.interop.timelines._timeline import _arrived as make_timeline

pytestmark = pytest.mark.usefixtures("nothing_left")


def damaged_memory(**attributes) -> MemoryInfo:
    """Make what a pickle can make: a MemoryInfo that no constructor has seen."""
    memory = MemoryInfo.__new__(MemoryInfo)
    for name, value in attributes.items():
        object.__setattr__(memory, name, value)
    return memory


def damaged_dtype() -> np.dtype:
    """Make what a pickle can make: a structured dtype of which NumPy cannot compute the hash."""
    dtype = np.dtype("V9", False, True)
    fields = {"x": (np.dtype("u1"), 0), "b": (np.dtype("f8"), 1)}
    dtype.__setstate__((3, "|", None, ("a", "b"), fields, 9, 1, 16))
    return dtype


BARE_DEVICE = Device.__new__(Device)
VALUES = (
    [None, {}, [], "", "x", "\0", "\ud800", b"", b"x", bytes(64), b"\xff" * 64, object(), Device]
    + [0, 1, -1, True, 1.5, float("nan"), 1 << 31, 1 << 62, 1 << 63, 1 << 70, -(1 << 70)]
    + [10**5000, np.float32(1), (), (1, "2"), (0, 0), (-1, -1), (True, False), (1 << 40,) * 2]
    + [(1 << 70, 1), (10**5000, 1), (16,) * 70, (1,) * 65]
    + [np.dtype(name) for name in ("O", "V0", "S0", "U4", "M8[s]", "g", "(2,)f4")]
    + [np.dtype("u1,f8"), damaged_dtype()]
    + ["00112233445566778899aabbccddeeff", "GPU-x"]
    + [Device("host"), Device("host:7"), Device("cuda:7"), BARE_DEVICE, damaged_memory()]
    + [damaged_memory(device=each, kind=MemoryKind.HOST) for each in (None, "host", BARE_DEVICE)]
    + [damaged_memory(device=Device("host"), kind=each) for each in (None, "host", 3)]
    + [*MemoryHandleType, *SemaphoreType]
)
EXPORTED = {
    "a file": lambda: gpumem.Arena("host").allocate(4096, shareable=True),
    "pages": lambda: gpumem.Arena("host", {"numa_node": 0}).allocate(4096, shareable=True),
    "a pool's block": lambda: gpumem.DriverPool("host", {"shareable": True}).allocate(4096),
}


@pytest.fixture(params=EXPORTED)
def exported(request):
    """A handle of 16 rows of 64 float32."""
    buffer = EXPORTED[request.param]()
    with interop.export(gpumem.from_dlpack(buffer).view("f4").reshape((16, 64))) as handle:
        yield handle


@pytest.fixture
def timeline():
    with HostTimeline.create() as timeline:
        yield timeline


def shown(value: object) -> str:
    try:
        return ascii(value)[:60]
    except Exception:
        return f"a {type(value).__name__}"


def refusals_missing(cases) -> list[str]:
    """Call each of (text, function); return the texts of those that end as they must not."""
    wrong = []
    for text, call in cases:
        try:
            got = call()
        except (BadHandleError, DeviceMismatchError) as error:
            str(error)
        except Exception as error:
            wrong.append(f"{text}: {type(error).__name__}: {ascii(str(error))[:80]}")
        else:
            if isinstance(got, gpumem.Tensor):
                got.numpy().tobytes()  # all of it is there
            else:
                got.close()
    return wrong


def attach(fd: int, kind: object, contents: object):
    with Handle(os.dup(fd), kind=kind, contents=contents) as tampered:
        assert repr(tampered).startswith("<gpumem.Handle")
        return interop.attach(tampered)


def test_tampered_handle_of_memory_is_a_bad_handle(exported):
    fd, kind, contents = exported.fileno(), exported.kind, exported.contents
    cases = []
    for field in dataclasses.fields(Contents):
        for value in VALUES:
            changed = dataclasses.replace(contents, **{field.name: value})
            case = f"{field.name} = {shown(value)}"
            cases.append((case, lambda changed=changed: attach(fd, kind, changed)))
        partial = pickle.loads(pickle.dumps(contents))
        del partial.__dict__[field.name]
        case = f"without {field.name}"
        cases.append((case, lambda partial=partial: attach(fd, kind, partial)))
    for value in VALUES:
        cases.append((f"kind = {shown(value)}", lambda value=value: attach(fd, value, contents)))
        cases.append((f"contents = {shown(value)}", lambda value=value: attach(fd, kind, value)))
    assert refusals_missing(cases) == []


@pytest.mark.parametrize(
    "change",
    [
        *({"shape": (1 << 20, 64)}, {"offset": 1 << 21}, {"offset": 2}, {"strides": (256,)}),
        *({"strides": (1 << 20, 4)}, {"size": 1 << 40}, {"size": 1}),
    ],
    ids=str,
)
def test_contents_beyond_their_memory_are_a_bad_handle(exported, change):
    contents = dataclasses.replace(exported.contents, **change)
    with pytest.raises(BadHandleError):
        attach(exported.fileno(), exported.kind, contents)


def test_message_names_the_field_of_a_tampered_handle(exported):
    contents = pickle.loads(pickle.dumps(exported.contents))
    del contents.__dict__["size"]
    with pytest.raises(BadHandleError, match="invalid size = nothing: expected a number of bytes"):
        attach(exported.fileno(), exported.kind, contents)
    with pytest.raises(BadHandleError, match="invalid contents = None: expected the Contents"):
        attach(exported.fileno(), exported.kind, None)


def other_files() -> list[int]:
    """Open descriptors of what no memory or timeline is."""
    read, write = os.pipe()
    return [
        *(read, write, os.memfd_create("empty"), os.eventfd(0)),
        *(os.open("/dev/null", os.O_RDWR), os.open("/", os.O_RDONLY), os.open("/", os.O_PATH)),
    ]


def test_descriptor_of_another_file_is_a_bad_handle(exported, timeline):
    opened = other_files()
    cases = [
        (
            f"file {number} with a {kind.name}",
            lambda fd=fd, kind=kind, said=said: attach(fd, kind, said),
        )
        for number, fd in enumerate(opened)
        for kind, said in ((exported.kind, exported.contents), (SemaphoreType.HOST_TIMELINE, None))
    ]
    wrong = refusals_missing(cases)
    for fd in opened:
        os.close(fd)
    assert wrong == []


def test_tampered_handle_of_a_timeline_is_a_bad_handle(timeline):
    with timeline.export() as handle:
        fd = handle.fileno()
        cases = [(f"kind = {shown(value)}", lambda value=value: attach(fd, value, None))
                 for value in VALUES]  # fmt: skip
        assert refusals_missing(cases) == []


class Sent:
    """What a DupFd is for the receiver of a pickle."""

    def __init__(self, number: object) -> None:
        self.number = number

    def detach(self) -> object:
        return self.number


def test_pickle_of_a_tampered_timeline_or_handle_is_a_bad_handle(timeline):
    with timeline.export() as handle:
        fd = handle.fileno()
        cases = [
            (f"device = {shown(value)}", lambda v=value: make_timeline(Sent(os.dup(fd)), v))
            for value in VALUES
        ]
        for make in (
            lambda sent: make_timeline(sent, None),
            lambda sent: received_handle(sent, None, None),
        ):
            for value in VALUES:
                said = shown(value)
                cases.append((f"sent = {said}", lambda v=value, m=make: m(v)))
                if value not in (0, 1):  # descriptors of this process
                    cases.append((f"descriptor = {said}", lambda v=value, m=make: m(Sent(v))))
        assert refusals_missing(cases) == []
