"""Everything here needs a Vulkan whose memory is the CPU's; the folder is skipped with the reason.

GPUMEM_REQUIRE_VULKAN=1 makes that an error: where Vulkan was installed, no test may be skipped.
"""

import pytest
from helpers.vulkan_producer import reason_without

from gpumem.interop import Importer

REASON = reason_without("host")


def pytest_collection_modifyitems(items):
    if REASON:
        for item in items:
            if "vulkan" in item.path.parts:
                item.add_marker(pytest.mark.skip(reason=REASON))


@pytest.fixture
def device():
    from vulkan_device import VulkanDevice

    with VulkanDevice("host") as device:
        yield device


@pytest.fixture
def importer():
    with Importer.for_device("host") as importer:
        yield importer


@pytest.fixture
def gate(device):
    """A timeline that the CPU signals."""
    with device.timeline() as gate:
        yield gate
        if gate.value() < 1:
            gate.signal(1)  # commands that a failed test left queued
