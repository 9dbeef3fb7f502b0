"""What a descriptor accepts, and what it says of the rest."""

from __future__ import annotations

import pickle
import uuid

import pytest

from gpumem.errors import InvalidDescriptorError
from gpumem.interop import MemoryDescriptor, MemoryHandleType, SemaphoreDescriptor, SemaphoreType

UUID = "00112233445566778899aabbccddeeff"


@pytest.mark.parametrize(
    ("changes", "names"),
    [
        ({"size": 0}, "size 0"),
        ({"size": -1}, "size -1"),
        ({"size": True}, "size True"),
        ({"size": 1.5}, r"size 1\.5"),
        ({"size": 1 << 63}, "size 9223372036854775808"),
        ({"offset": -1}, "offset -1"),
        ({"offset": 65537}, "offset 65537"),
        ({"handle": -1}, "handle -1"),
        ({"handle": True}, "handle True"),
        ({"handle": None}, "handle None"),
        ({"handle": 1 << 31}, "handle 2147483648"),
        ({"handle": "a-name"}, "'a-name'"),
        ({"handle": object()}, "fileno"),
        ({"handle_type": MemoryHandleType.SHM_NAME}, "a SHM_NAME is a text"),
        ({"handle_type": MemoryHandleType.SHM_NAME, "handle": ""}, "is not a name"),
        ({"handle_type": MemoryHandleType.HOST_ALLOCATION, "handle": 0}, "handle 0"),
        ({"read_only": 1}, "read_only 1"),
        ({"dedicated": "yes"}, "dedicated 'yes'"),
        ({"device_uuid": "xyz"}, "device_uuid 'xyz'"),
        ({"device_uuid": b"short"}, "device_uuid b'short'"),
        ({"owner": object()}, "owner"),
        ({"pool_pointer": b"x"}, "pool_pointer"),
        ({"handle_type": MemoryHandleType.CUDA_POOL_FD}, "pool_pointer"),
    ],
)
def test_malformed_descriptor_is_refused_with_its_value(describe, changes, names):
    with pytest.raises(InvalidDescriptorError, match=names):
        describe(**changes)


def test_memory_and_semaphore_handle_types_are_distinct(fd):
    with pytest.raises(TypeError, match="MemoryHandleType"):
        MemoryDescriptor(fd, SemaphoreType.TIMELINE_OPAQUE_FD, 4096)
    with pytest.raises(TypeError, match="MemoryHandleType"):
        MemoryDescriptor(fd, 3, 4096)
    with pytest.raises(TypeError, match="SemaphoreType"):
        SemaphoreDescriptor(fd, MemoryHandleType.OPAQUE_FD)


@pytest.mark.parametrize(
    "given", [UUID, UUID.upper(), bytes.fromhex(UUID), uuid.UUID(UUID), f"GPU-{uuid.UUID(UUID)}"]
)
def test_device_uuid_is_normalised(describe, given):
    assert describe(device_uuid=given).device_uuid == UUID


def test_descriptor_is_a_value(describe):
    assert describe() == describe()
    assert describe(offset=16).nbytes == (1 << 16) - 16
    assert pickle.loads(pickle.dumps(describe())) == describe()
    with pytest.raises(AttributeError):
        describe().size = 5


def test_numbers_of_shared_types_are_those_of_onnx_runtime():
    assert [kind.value for kind in list(MemoryHandleType)[:5]] == [0, 1, 2, 3, 4]
    assert [kind.name for kind in list(MemoryHandleType)[:5]] == [
        "D3D12_RESOURCE", "D3D12_HEAP", "OPAQUE_WIN32", "OPAQUE_FD", "HOST_ALLOCATION",
    ]  # fmt: skip
    assert [(kind.name, kind.value) for kind in list(SemaphoreType)[:3]] == [
        ("D3D12_FENCE", 0), ("TIMELINE_WIN32", 1), ("TIMELINE_OPAQUE_FD", 2),
    ]  # fmt: skip
