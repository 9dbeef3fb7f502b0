"""The package `vulkan`: where it is imported, and what its failures become.

It raises classes without a code for some results and a bare KeyError for the others; here
each is a DriverError with the function's name, the VkResult and its name.
"""

from __future__ import annotations

import errno
import fcntl
from typing import Any

from gpumem._resource.handle import Handle
from gpumem.errors import BadHandleError, DriverError, UnsupportedHandleTypeError

__all__ = [
    "call",
    "device_function",
    "library",
    "owned_descriptor",
    "struct_array",
    "typed_handle",
]

_OF_EXTENSIONS = 1_000_000_000  # their results are beyond it


def library() -> Any:
    """Return the package `vulkan`.

    Raises
    ------
    ImportError
        The package or Vulkan's loader is not installed.
    """
    try:
        import vulkan
    except ModuleNotFoundError as error:
        if error.name != "vulkan":
            raise
        raise ImportError(
            "the Python package vulkan is not installed: pip install vulkan"
        ) from None
    except OSError:
        raise ImportError("Vulkan's loader, libvulkan.so.1, is not installed") from None
    return vulkan


def call(name: str, *arguments: Any, function: Any = None) -> Any:
    """Call a Vulkan function.

    Raises
    ------
    DriverError
        It returned another VkResult than VK_SUCCESS.
    """
    vk = library()
    try:
        return (function or getattr(vk, name))(*arguments)
    except (vk.VkError, vk.VkException, KeyError) as error:
        code = _code(error)
        if code is None:
            raise
        raise DriverError(name, code, _name(code)) from None


def device_function(device: Any, name: str, extension: str) -> Any:
    """Return a function of an extension.

    Raises
    ------
    UnsupportedHandleTypeError
        The logical device does not have it: the message names the extension.
    """
    vk = library()
    try:
        return vk.vkGetDeviceProcAddr(device, name)
    except (vk.ProcedureNotFoundError, vk.ExtensionNotSupportedError):
        raise UnsupportedHandleTypeError(
            f"the Vulkan device has no {name}: {extension} is not there or was not enabled"
        ) from None


def typed_handle(kind: str, value: Any) -> Any:
    """Return a handle such as a VkDevice as the package has it; other bindings give integers."""
    return library().ffi.cast(kind, value) if isinstance(value, int) else value


def struct_array(kind: str, *structs: Any) -> Any:
    """Return structs in a row, for a pointer to several. The caller keeps what they point to."""
    return library().ffi.new(f"{kind}[]", list(structs))


def owned_descriptor(number: int, kind: Any, what: str) -> Handle:
    """Return the owner of a descriptor that Vulkan gave.

    Raises
    ------
    BadHandleError
        Vulkan gave none: what it is of was not made to be exported.
    """
    if number < 0:
        raise BadHandleError(
            errno.EBADF, f"Vulkan gave descriptor {number}: {what} was not made to be exported"
        )
    handle = Handle(number, kind=kind)
    fcntl.fcntl(number, fcntl.F_SETFD, fcntl.FD_CLOEXEC)  # lavapipe leaves it open to children
    return handle


def _code(error: Exception) -> int | None:
    """Return the VkResult behind an exception of the package; None: it is another error."""
    if isinstance(error, KeyError):
        return error.args[0] if error.args and isinstance(error.args[0], int) else None
    known = {kind: code for code, kind in library().exception_codes.items()}
    return known.get(type(error))


def _name(code: int) -> str:
    """Name a result. The package has some errors of extensions with the wrong sign."""
    wanted = (code, -code) if code < -_OF_EXTENSIONS else (code,)
    for name, value in vars(library()).items():
        if name.startswith(("VK_ERROR_", "VK_TIMEOUT", "VK_NOT_READY")) and value in wanted:
            return str(name)
    return "VK_ERROR_UNKNOWN"
