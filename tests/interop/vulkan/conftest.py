"""Everything here needs a Vulkan whose memory is the CPU's; the folder is skipped with the reason.

GPUMEM_REQUIRE_VULKAN=1 makes that an error: where Vulkan was installed, no test may be skipped.
"""

import os

import pytest

from gpumem.interop import Importer, vulkan

AVAILABLE = vulkan.availability("host")


def pytest_collection_modifyitems(items):
    if AVAILABLE:
        return
    if os.environ.get("GPUMEM_REQUIRE_VULKAN") == "1":
        raise pytest.UsageError(f"GPUMEM_REQUIRE_VULKAN=1, and {AVAILABLE.reason}")
    skip = pytest.mark.skip(reason=f"needs software Vulkan: {AVAILABLE.reason}")
    for item in items:
        if "vulkan" in item.path.parts:
            item.add_marker(skip)


@pytest.fixture
def device():
    """A Vulkan device that must close at the end: nobody forgot a buffer."""
    with vulkan.VulkanDevice("host") as device:
        yield device


@pytest.fixture
def importer():
    with Importer.for_device("host") as importer:
        yield importer


@pytest.fixture
def vk():
    """The package `vulkan`; at a module's top its want would be an error of collection."""
    import vulkan

    return vulkan


@pytest.fixture
def gate(device):
    """What the CPU opens."""
    with device.timeline() as gate:
        yield gate
        if gate.value() < 1:
            gate.signal(1)  # whatever a failed test left queued
