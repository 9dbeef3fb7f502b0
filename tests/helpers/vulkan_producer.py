"""The Vulkan device of examples/vulkan, and why it cannot be had here."""

from __future__ import annotations

import os

from .examples import add_example

add_example("vulkan")


def reason_without(device: str) -> str:
    """Return why there is no Vulkan on a device; empty if there is.

    With GPUMEM_REQUIRE_VULKAN=1 its absence is an error: no test may be skipped where Vulkan was
    installed.
    """
    try:
        from vulkan_device import VulkanDevice

        VulkanDevice(device).close()
    except Exception as error:
        if device == "host" and os.environ.get("GPUMEM_REQUIRE_VULKAN") == "1":
            raise
        return f"needs Vulkan on {device}: {error!r}"
    return ""
