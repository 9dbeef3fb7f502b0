"""ONNX Runtime's setting for partitioning by resources, and accountants by device.

>>> from gpumem.accounting import accountants_from_setting
>>> accountants = accountants_from_setting("1000,", device="cuda:0")
>>> accountants["CUDAExecutionProvider"] is accountants["cuda"], accountants["cuda:0"].threshold
(True, ResourceCount.from_bytes(1024000))
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TypeAlias

from gpumem._support.arguments import require
from gpumem.accounting.accountant import Accountant, AdHocAccountant
from gpumem.accounting.counts import MAX_BYTES
from gpumem.accounting.statistics import StatsAccountant
from gpumem.device import Device, MemoryInfo
from gpumem.errors import ConfigError

DeviceName: TypeAlias = Device | MemoryInfo | str

# Other libraries' names of our devices; a number may follow after a colon.
ALIASES = {
    "gpu": "cuda",
    "cudaexecutionprovider": "cuda",
    "cudapluginexecutionprovider": "cuda",
    "cpu": "host",
    "cpuexecutionprovider": "host",
}
_NUMBER = re.compile(r"[0-9]{1,20}\Z")


class Accountants(Mapping[DeviceName, Accountant]):
    """Accountants by device: every name of a device leads to one accountant.

    A device is named by a `Device`, by a memory of it, by its name with or without the index, and
    by ONNX Runtime's names in upper or lower case: ``"gpu:0"``, ``"CUDAExecutionProvider"``,
    ``"CudaPluginExecutionProvider"``, ``"cpu"``.

    Parameters
    ----------
    accountants : Mapping, optional
        Accountants by any of these names.

    Raises
    ------
    TypeError
        `accountants` is not a Mapping of accountants.
    ConfigError
        Two names of one device have different accountants.
    ValueError
        A name that no device has.

    Examples
    --------
    >>> from gpumem.accounting import Accountants, AdHocAccountant
    >>> accountants = Accountants({"gpu:1": AdHocAccountant(1 << 30)})
    >>> list(accountants), "cuda:1/host_accessible" in accountants, accountants.get("cuda:0")
    ([Device("cuda:1")], True, None)
    """

    def __init__(self, accountants: Mapping[DeviceName, Accountant] | None = None) -> None:
        accepted = "a Mapping of accountants by device"
        require("accountants", accountants, (Mapping, type(None)), accepted)
        self._by_device: dict[Device, Accountant] = {}
        for name, accountant in (accountants or {}).items():
            if not isinstance(accountant, Accountant):
                kind = type(accountant).__name__
                raise TypeError(f"the accountant of {name} must be an Accountant, not {kind}")
            device = device_named(name)
            if self._by_device.setdefault(device, accountant) is not accountant:
                raise ConfigError(f"{device} is given two accountants, one of them as {name!r}")

    def __getitem__(self, name: DeviceName) -> Accountant:
        try:
            return self._by_device[device_named(name)]
        except ValueError:
            raise KeyError(name) from None

    def __iter__(self) -> Iterator[DeviceName]:
        return iter(self._by_device)

    def __len__(self) -> int:
        return len(self._by_device)

    def __repr__(self) -> str:
        return f"Accountants({self._by_device})"


def device_named(name: DeviceName) -> Device:
    """Return the device of a name; ValueError if no device has it."""
    if isinstance(name, Device):
        return name
    if isinstance(name, MemoryInfo):
        return name.device
    if not isinstance(name, str):
        raise TypeError(f"a device is a Device, a MemoryInfo or a name, not {type(name).__name__}")
    kind, colon, rest = name.partition(":")
    return MemoryInfo.parse(ALIASES.get(kind.lower(), kind) + colon + rest).device


def accountants_from_setting(
    setting: str | None,
    *,
    device: DeviceName = "cuda:0",
    folder: str | os.PathLike[str] | None = None,
) -> Accountants:
    """Make the accountant of ``session.resource_cuda_partitioning_settings``.

    Parameters
    ----------
    setting : str or None
        ``"<limit in KiB>,<statistics file>"``; either may be empty. A limit makes the threshold,
        a file a `StatsAccountant`, no file an `AdHocAccountant`. None or an empty string: none.
    device : Device, MemoryInfo or str
        The accountant counts memory of this device.
    folder : path, optional
        Folder of the file, usually the model's; the working directory if None.

    Returns
    -------
    Accountants
        With the one accountant, or empty.

    Raises
    ------
    TypeError
        `setting` is neither a str nor None.
    ConfigError
        Not two fields, a limit that is not a number or above 2**64 - 1 bytes, or a file that
        cannot be read.

    Examples
    --------
    >>> from gpumem.accounting import accountants_from_setting
    >>> accountants = accountants_from_setting("1024,")          # 1 MiB, costs from the graph
    >>> accountants["cuda:0"].threshold
    ResourceCount.from_bytes(1048576)
    """
    require("setting", setting, (str, type(None)), "a str or None")
    if setting is None or not setting.strip():
        return Accountants()
    fields = [field.strip() for field in setting.split(",")]
    if len(fields) != 2:
        raise ConfigError(
            f"setting {setting!r} has {len(fields)} fields, expecting comma separated fields "
            '"<limit in KiB>,<statistics file>", of which either may be empty'
        )
    limit, file = fields
    threshold = _read_limit(limit) if limit else None
    accountant: Accountant = AdHocAccountant(threshold)
    if file:
        accountant = StatsAccountant(Path(folder or ".", file), threshold)
    return Accountants({device: accountant})


def _read_limit(text: str) -> int:
    if not _NUMBER.match(text) or int(text) * 1024 > MAX_BYTES:
        accepted = f"KiB from 0 to {MAX_BYTES >> 10}"
        raise ConfigError(f"invalid limit = {text!r:.40}: expected {accepted}")
    return int(text) * 1024
