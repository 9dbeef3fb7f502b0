"""What cannot be: each is a typed error, and nothing is left open or half made."""

import mmap
import os
from collections import Counter

import pytest
from helpers import engine as application
from helpers.child import run
from helpers.files import no_file_left

from gpumem.errors import (
    AlignmentError,
    BadHandleError,
    ClosedError,
    DriverError,
    InUseError,
    InvalidDescriptorError,
    OutOfBoundsError,
    UnsupportedHandleTypeError,
)
from gpumem.interop import MemoryDescriptor, MemoryHandleType
from gpumem.interop.vulkan import VulkanDevice, memory
from gpumem.interop.vulkan.calls import call


@pytest.fixture
def engine():
    with application.engine("VK_KHR_external_memory_fd") as engine:
        yield engine


def adopted(engine):
    names = ("instance", "physical_device", "logical_device", "queue", "queue_family")
    return VulkanDevice("host", **{name: getattr(engine, name) for name in names})


def test_export_of_unexportable_memory_is_refused(engine):
    """lavapipe answers with success and descriptor -1."""
    with adopted(engine) as device, no_file_left():
        plain = application.memory_of(engine, 4096)
        with pytest.raises(BadHandleError, match="not made to be exported"):
            device.export_memory(plain, 4096)


def test_device_without_the_extension_is_refused():
    with application.engine() as engine, adopted(engine) as device:
        with pytest.raises(UnsupportedHandleTypeError, match="VK_KHR_external_memory_fd"):
            device.export_memory(application.exportable_memory_of(engine, 4096), 4096)
        with pytest.raises(UnsupportedHandleTypeError, match="VK_EXT_external_memory_host"):
            device.import_host(bytearray(4096))


def test_import_larger_than_the_allocation_is_refused(device, importer):
    with device.allocate(4096) as buffer, no_file_left():
        described = device.export_memory(buffer.memory, 2 * buffer.allocation_size)
        with pytest.raises(BadHandleError, match=r"fewer bytes than described, 8\.0 KiB"):
            importer.import_memory(described, consume=True)
        os.fstat(described.handle.fileno())
        described.handle.close()


def test_file_that_is_no_lavapipe_memory_is_refused(importer):
    number = os.memfd_create("plain")
    os.truncate(number, 8192)
    with pytest.raises(BadHandleError, match="not one of lavapipe's"):
        importer.import_memory(MemoryDescriptor(number, MemoryHandleType.LAVAPIPE_OPAQUE_FD, 4096))
    os.close(number)


def test_unknown_vulkan_result_is_a_driver_error(device, vk):
    """Vulkan's refusal of a foreign file comes as a bare KeyError out of the package."""
    number = os.memfd_create("plain")
    os.truncate(number, 8192)
    given = vk.VkImportMemoryFdInfoKHR(handleType=application.OPAQUE_FD, fd=number)
    asked = vk.VkMemoryAllocateInfo(pNext=given, allocationSize=4096, memoryTypeIndex=0)
    with pytest.raises(DriverError) as raised:
        call("vkAllocateMemory", device.logical_device, asked, None)
    assert (raised.value.call, raised.value.name, raised.value.code) == (
        "vkAllocateMemory",
        "VK_ERROR_INVALID_EXTERNAL_HANDLE",
        -1000072003,
    )


@pytest.mark.parametrize(
    ("code", "name"),
    [
        (2, "VK_TIMEOUT"),
        (-2, "VK_ERROR_OUT_OF_DEVICE_MEMORY"),
        (-4, "VK_ERROR_DEVICE_LOST"),
        (-1000069000, "VK_ERROR_OUT_OF_POOL_MEMORY"),
        (-1000012000, "VK_ERROR_INVALID_SHADER_NV"),
        (-1234567890, "VK_ERROR_UNKNOWN"),
    ],
)
def test_vulkan_results_have_code_and_name(vk, code, name):
    def failing():
        raise vk.exception_codes[code]

    with pytest.raises(DriverError) as raised:
        call("vkDoSomething", function=failing)
    assert (raised.value.code, raised.value.name) == (code, name)


def test_other_errors_pass_unchanged():
    def failing():
        raise KeyError("a field of a struct")

    with pytest.raises(KeyError, match="field"):
        call("vkDoSomething", function=failing)


def test_request_beyond_vulkans_memory_is_out_of_memory(device):
    with no_file_left():
        with pytest.raises(DriverError) as raised:
            device.allocate(1 << 50)
        assert "MEMORY" in raised.value.name
    device.close()


@pytest.mark.parametrize("step", ["vkCreateBuffer", "vkAllocateMemory", "vkBindBufferMemory"])
@pytest.mark.parametrize("kind", ["own", "host"])
def test_failed_step_undoes_earlier_ones(device, monkeypatch, step, kind):
    alive = Counter()

    def failing(name, *arguments, function=None):
        if name == step:
            raise DriverError(name, -1, "VK_ERROR_OUT_OF_HOST_MEMORY")
        for verb, by in (("Create", 1), ("Allocate", 1), ("Destroy", -1), ("Free", -1)):
            if verb in name:
                alive[name.replace(verb, "")] += by
        return call(name, *arguments, function=function)

    with mmap.mmap(-1, 4096) as pages:
        make = (
            (lambda: device.allocate(4096)) if kind == "own" else lambda: device.import_host(pages)
        )
        monkeypatch.setattr(memory, "call", failing)
        with no_file_left(), pytest.raises(DriverError, match=step):
            make()
        assert not any(alive.values())
        step = None
        make().close()
        device.synchronize()
        assert alive
        assert not any(alive.values())


@pytest.mark.parametrize("nbytes", [0, -1, True, 1.5, "4096", 1 << 63])
def test_invalid_sizes_are_refused(device, nbytes):
    with pytest.raises(InvalidDescriptorError, match="nbytes"):
        device.allocate(nbytes)


@pytest.mark.parametrize(
    ("error", "word", "part"),
    [
        (AlignmentError, 0, {"offset": 2}),
        (AlignmentError, 0, {"nbytes": 6}),
        (OutOfBoundsError, 0, {"offset": 64, "nbytes": 4}),
        (OutOfBoundsError, 0, {"nbytes": 68}),
        (InvalidDescriptorError, 0, {"offset": -4}),
        (InvalidDescriptorError, 0, {"nbytes": 4.0}),
        (InvalidDescriptorError, 1 << 32, {}),
        (InvalidDescriptorError, -1, {}),
        (InvalidDescriptorError, True, {}),
    ],
)
def test_invalid_fills_are_refused(device, error, word, part):
    with device.allocate(64) as buffer, pytest.raises(error):
        device.fill(buffer, word, **part)


def test_invalid_copies_are_refused(device):
    with device.allocate(64) as small, device.allocate(128) as large:
        for arguments in (
            {"destination": small, "source": large},
            {"destination": large, "source": small, "destination_offset": 65},
            {"destination": large, "source": small, "nbytes": 65},
            {"destination": large, "source": small, "source_offset": 65, "nbytes": 0},
        ):
            with pytest.raises(OutOfBoundsError) as raised:
                device.copy(**arguments)
            assert raised.value.size in (64, 128)


def test_close_of_a_device_with_buffers_is_refused(device):
    with device.allocate(64), pytest.raises(InUseError, match="1 buffers and timelines"):
        device.close()
    assert not device.closed


def test_exception_of_a_with_statement_is_not_hidden_by_the_close():
    device = VulkanDevice("host")
    buffer = device.allocate(64)
    with pytest.raises(KeyError, match="mine") as raised, device:
        raise KeyError("mine")
    assert "buffers and timelines in use" in raised.value.__notes__[0]
    buffer.close()
    device.close()


def test_exception_of_a_with_statement_is_raised_while_work_waits_for_a_signal():
    device = VulkanDevice("host")
    gate, done = device.timeline(), device.timeline()
    device.run(wait=(gate, 1), signal=(done, 1))
    with pytest.raises(KeyError, match="mine"), device:
        raise KeyError("mine")
    assert not device.closed
    gate.signal(1)
    done.wait(1)
    gate.close()
    done.close()
    device.close()


def test_closed_device_and_buffer_refuse_every_call(device):
    buffer = device.allocate(64)
    buffer.close()
    buffer.close()
    for use in (buffer.descriptor, lambda: device.fill(buffer, 0)):
        with pytest.raises(ClosedError, match="VulkanBuffer is closed"):
            use()
    device.close()
    device.close()
    for use in (device.synchronize, device.timeline, lambda: device.allocate(64), device.run):
        with pytest.raises(ClosedError, match="Vulkan device of host:0 is closed"):
            use()


def test_failed_recording_submits_nothing(device):
    with device.timeline() as timeline:

        def fail(commands):
            raise LookupError("no pipeline")

        with pytest.raises(LookupError):
            device.run(fail, signal=(timeline, 5))
        assert timeline.pending == 0
        device.run(signal=(timeline, 5))
        timeline.wait(5, 10)


def test_forked_child_has_no_device_and_exits_quietly():
    done = run(
        """
        import os
        import gpumem
        from gpumem.interop.vulkan import memory, VulkanDevice

        device = VulkanDevice("host")
        buffer = device.allocate(64)
        child = os.fork()
        if not child:
            try:
                device.fill(buffer, 1)
            except gpumem.errors.ClosedError as error:
                assert "parent" in str(error)
                buffer.close()
                device.close()
                os._exit(0)
            os._exit(1)
        assert os.waitpid(child, 0)[1] == 0
        device.fill(buffer, 1)
        device.synchronize()
        """
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_missing_vulkan_package_is_named():
    done = run(
        """
        import sys
        sys.modules["vulkan"] = None
        from gpumem.interop import vulkan

        print(vulkan.availability("host").reason)
        try:
            vulkan.VulkanDevice("host")
        except ImportError as error:
            print(error)
        """
    )
    assert done.stderr == ""
    assert (
        done.stdout.splitlines()
        == ["the Python package vulkan is not installed: pip install vulkan"] * 2
    )


def test_missing_vulkan_drivers_are_named():
    done = run(
        """
        from gpumem.interop import vulkan
        print(vulkan.availability("host").reason)
        """,
        env={"VK_DRIVER_FILES": "/nowhere.json", "VK_ICD_FILENAMES": "/nowhere.json"},
    )
    assert "VK_ERROR_INCOMPATIBLE_DRIVER" in done.stdout
