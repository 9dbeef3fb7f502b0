"""Devices and memories as values, who shares memory with whom, and what a device answers."""

import itertools
import pickle
from types import SimpleNamespace

import pytest

import gpumem
from gpumem import Device, MemoryInfo, MemoryKind, can_access

CUDA = gpumem.driver_status().available


# ---- Device --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "kind", "index"),
    [("cuda", "cuda", 0), ("cuda:7", "cuda", 7), ("host", "host", 0), ("host:12", "host", 12)],
)
def test_device_is_parsed_without_a_driver(name, kind, index):
    device = Device(name)
    assert (device.type, device.index, str(device)) == (kind, index, f"{kind}:{index}")
    assert Device(device) == device
    assert eval(repr(device), {"Device": Device}) == device


@pytest.mark.parametrize(
    "name",
    ["", "cpu", "gpu", "cuda:", "cuda:-1", "cuda:x", "cuda:1 ", " host", "CUDA", "host:0/managed",
     "cuda:12345", "host\n", "cuda:\u0661", b"host", None, 0, MemoryInfo(Device("host"))],
)  # fmt: skip
def test_unknown_device_name_is_refused(name):
    with pytest.raises(ValueError, match="unknown device"):
        Device(name)


def test_name_of_another_library_is_told_the_one_here():
    for make in (Device, gpumem.Arena):
        with pytest.raises(ValueError, match="'cpu': 'cpu' is called 'host' here"):
            make("cpu")
        with pytest.raises(ValueError, match="'gpu:1': 'gpu' is called 'cuda' here"):
            make("gpu:1")


def test_device_of_pytorch_is_taken_as_its_name():
    torchs = SimpleNamespace(type="cuda", index=3)
    assert Device(torchs) == Device("cuda:3")
    assert MemoryInfo.parse(torchs) == MemoryInfo.parse("cuda:3") == MemoryInfo(torchs)
    assert MemoryInfo.parse(SimpleNamespace(type="cuda", index=None)).device == Device("cuda:0")
    for other in (SimpleNamespace(type="xpu", index=0), SimpleNamespace(type="cuda", index="x")):
        with pytest.raises(ValueError, match="unknown device"):
            Device(other)


def test_devices_are_values():
    assert Device("cuda") == Device("cuda:0") != Device("host")
    assert Device("host:0") != "host:0"
    assert len({Device("host"), Device("host:0"), Device("host:1")}) == 2
    assert pickle.loads(pickle.dumps(Device("cuda:3"))) == Device("cuda:3")


def test_host_device_answers_every_property(host):
    device = Device("host")
    assert device in gpumem.devices()
    assert device.name
    assert len(bytes.fromhex(device.uuid)) == 16
    host.set_capacity(0, 1 << 40)
    assert device.total_bytes == 1 << 40
    assert 0 < device.free_bytes <= 1 << 40
    device.synchronize()


def test_missing_device_raises_when_used():
    for use in (lambda: Device("host:63").name, lambda: gpumem.Arena("host:63")):
        with pytest.raises(ValueError, match="unknown device 'host:63'"):
            use()


@pytest.mark.parametrize(
    ("count", "told"),
    [(1, "the only host device is 'host:0'"), (2, "there are 2 host devices, .* counted from 0")],
)
def test_missing_device_of_a_type_that_is_there_names_what_there_is(monkeypatch, count, told):
    monkeypatch.setattr("gpumem._native.driver.host.device_count", lambda: count)
    with pytest.raises(ValueError, match=f"unknown device 'host:63': {told}"):
        gpumem.Arena("host:63")


@pytest.mark.skipif(CUDA, reason="a CUDA device is here")
def test_without_a_driver_cuda_reports_the_reason_and_host_is_the_default():
    status = gpumem.driver_status()
    assert bool(status) is status.available
    assert status.reason
    assert (status.version, status.missing) == (0, ())
    assert gpumem.default_device() == Device("host:0")
    assert all(device.type == "host" for device in gpumem.devices())
    with pytest.raises(ValueError, match="unknown device 'cuda:0'"):
        gpumem.Arena("cuda:0")
    capabilities = Device("cuda:0").capabilities
    assert not any(capabilities.values())
    assert all(capability.reason for capability in capabilities.values())


def test_capabilities_answer_with_a_reason_and_do_not_raise():
    for device in (Device("host"), Device("host:63"), Device("cuda:9999")):
        for name, capability in device.capabilities.items():
            assert isinstance(name, str)
            assert bool(capability) == capability.supported
            assert capability.supported or capability.reason
    assert Device("host").capabilities["allocate"]


@pytest.mark.parametrize("count", [0, -1, 65, True, 1.0, "2", None])
def test_invalid_host_device_count_is_refused(count):
    with pytest.raises(ValueError, match="host device count"):
        gpumem.device.set_host_device_count(count)


def test_host_device_count_is_fixed_after_first_use(arena):
    with pytest.raises(gpumem.ConfigError, match="before one is used"):
        gpumem.device.set_host_device_count(64 if len(gpumem.devices()) != 64 else 63)
    gpumem.device.set_host_device_count(sum(device.type == "host" for device in gpumem.devices()))


# ---- MemoryInfo ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "device", "kind", "text"),
    [
        ("host", "host:0", MemoryKind.HOST, "host:0"),
        ("host:1", "host:1", MemoryKind.HOST, "host:1"),
        ("host/device", "host:0", MemoryKind.HOST, "host:0"),
        ("host/managed", "host:0", MemoryKind.MANAGED, "host:0/managed"),
        ("cuda:0", "cuda:0", MemoryKind.DEVICE, "cuda:0"),
        ("cuda:2/device", "cuda:2", MemoryKind.DEVICE, "cuda:2"),
        ("cuda:0/host_accessible", "cuda:0", MemoryKind.HOST_ACCESSIBLE, "cuda:0/host_accessible"),
    ],
)
def test_memory_info_is_parsed_from_its_name(name, device, kind, text):
    memory = MemoryInfo.parse(name)
    assert (str(memory.device), memory.kind, str(memory)) == (device, kind, text)
    assert MemoryInfo.parse(text) == memory
    assert MemoryInfo.parse(memory) is memory
    assert memory.host_accessible == (kind is not MemoryKind.DEVICE)


@pytest.mark.parametrize(
    "name", ["", "/", "host/", "host/host ", "cuda:0/host", "cuda:0/pinned ", "cuda:0/DEVICE",
             "host/managed/x", "cpu/managed"]
)  # fmt: skip
def test_unknown_memory_name_is_refused(name):
    with pytest.raises(ValueError, match=r"unknown|has no HOST memory"):
        MemoryInfo.parse(name)


def test_unknown_kind_is_told_every_name_of_one():
    with pytest.raises(ValueError, match=r"unknown memory kind 'pined': .*\bpinned\b"):
        MemoryInfo.parse("cuda:0/pined")


def test_memory_name_of_a_wrong_type_is_refused():
    for thing in (None, 0, b"host", MemoryKind.HOST):
        with pytest.raises(TypeError, match="memory must be"):
            MemoryInfo.parse(thing)


def test_memory_info_is_a_value():
    memory = MemoryInfo(Device("cuda:0"))
    assert memory == MemoryInfo("cuda", "device") == MemoryInfo.parse(Device("cuda"))
    assert pickle.loads(pickle.dumps(memory)) == memory
    assert len({memory, MemoryInfo("cuda"), MemoryInfo("cuda", "managed")}) == 2
    with pytest.raises(AttributeError):
        memory.kind = MemoryKind.HOST


@pytest.mark.parametrize("alignment", [0, -256, 3, 384])
def test_memory_info_alignment_must_be_a_power_of_two(alignment):
    with pytest.raises(ValueError, match="not a power of two"):
        MemoryInfo("host", alignment=alignment)


# ---- compatibility: one test per rule ------------------------------------------------------------

HOST, HOST1 = "host:0", "host:1"
GPU, GPU1 = "cuda:0", "cuda:1"
PINNED, PINNED1 = "cuda:0/host_accessible", "cuda:1/host_accessible"
MANAGED, MANAGED1 = "cuda:0/managed", "cuda:1/managed"
MEMORIES = [HOST, HOST1, GPU, GPU1, PINNED, PINNED1, MANAGED, MANAGED1]


def compatible(a, b):
    a, b = MemoryInfo.parse(a), MemoryInfo.parse(b)
    answers = a.shares_memory_with(b), b.shares_memory_with(a)
    assert answers[0] == answers[1], "the predicate is symmetric"
    return answers[0]


@pytest.mark.parametrize("memory", MEMORIES)
def test_equal_memories_are_compatible(memory):
    assert compatible(memory, memory)


def test_alignment_and_name_play_no_part_in_compatibility():
    assert compatible(MemoryInfo("cuda", alignment=64, name="a"), MemoryInfo("cuda"))


def test_two_cpu_memories_are_compatible():
    assert compatible(HOST, HOST1)


@pytest.mark.parametrize("memory", [PINNED, PINNED1, MANAGED, MANAGED1])
def test_cpu_memory_is_compatible_with_host_accessible_and_managed_of_any_device(memory):
    assert compatible(HOST, memory)
    assert compatible(HOST1, memory)


@pytest.mark.parametrize("memory", [PINNED, MANAGED])
def test_host_accessible_and_managed_are_compatible_with_the_memory_of_their_own_device(memory):
    assert compatible(GPU, memory)


@pytest.mark.parametrize(
    ("a", "b"),
    [
        (GPU, GPU1),
        (GPU, HOST),
        (GPU, PINNED1),
        (GPU, MANAGED1),
        (PINNED, PINNED1),
        (MANAGED, MANAGED1),
        (PINNED, MANAGED),
        (PINNED, MANAGED1),
    ],
)
def test_all_other_pairs_are_incompatible(a, b):
    assert not compatible(a, b)


def test_compatibility_rules_cover_every_pair():
    pairs = itertools.combinations_with_replacement(MEMORIES, 2)
    assert sum(compatible(a, b) for a, b in pairs) == 8 + 1 + 2 * 4 + 2 * 2


# ---- access --------------------------------------------------------------------------------------


@pytest.mark.parametrize("reader", [HOST, HOST1])
def test_cpu_can_access_all_but_device_memory(reader):
    for memory in MEMORIES:
        assert can_access(reader, memory) == (memory not in (GPU, GPU1))


@pytest.mark.parametrize(
    ("reader", "reads"), [(GPU, {GPU, PINNED, MANAGED}), (GPU1, {GPU1, PINNED1, MANAGED1})]
)
def test_gpu_can_access_memory_of_its_own_index(reader, reads):
    for memory in MEMORIES:
        assert can_access(reader, memory) == (memory in reads)


def test_compatible_memory_need_not_be_cpu_accessible():
    assert compatible(PINNED, GPU)
    assert can_access(HOST, PINNED)
    assert not can_access(HOST, GPU)


def test_capability_says_that_the_driver_did_not_answer(host):
    host.fail("cuDeviceGetAttribute", 1, 999)
    try:
        answer = Device("host").capabilities["virtual_memory"]
    finally:
        host.clear_faults()
    assert not answer
    assert answer.reason.startswith("cuDeviceGetAttribute failed with CUDA_ERROR_UNKNOWN")
    assert Device("host").capabilities["virtual_memory"]
