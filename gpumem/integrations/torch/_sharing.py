"""PyTorch's tensors in other processes: blocks by a text that `torch.multiprocessing` carries.

The text names a process that has the block, the block's address, and the mapping that begins there.
The other process requests of that one, by its socket (`gpumem.integrations._common.descriptors`), a
descriptor of each page that the block lies in, and maps the pages in a row. It keeps the mapping
for a moment after its last use (`_mappings`), and uses it again for a text that names the same
memory. PyTorch itself counts the references across processes, and keeps the block until the last
one has ended. From the first text until its free the block keeps its tag awake (`Arena.sleep`).
"""

from __future__ import annotations

from errno import EBADF
from itertools import count

from gpumem._resource.handle import (
    OpenedPages,
    export_page,
    keep_awake,
    make_exportable,
    mapping_of,
    pages_of,
)
from gpumem.device import Device, device_of_uuid
from gpumem.errors import BadHandleError
from gpumem.integrations._common.descriptors import Answer, ask, serve, server_name
from gpumem.integrations.torch._mappings import MappedBlock, Mappings

MARK = "gpumem-block"
KIND = "block"
_numbers = count()
_mappings = Mappings()


def pages_of_block(text: str) -> Answer:
    """Answer a request for the pages of the block at an address."""
    address = int(text, 16)
    ordinal, is_host, _, pages = pages_of(address)
    device = Device(f"{'host' if is_host else 'cuda'}:{ordinal}")
    said = {"uuid": device.uuid, "sizes": [nbytes for _, nbytes in pages]}
    return said, (export_page(address, begin) for begin, _ in pages)


serve(KIND, pages_of_block)


def prepare(device: Device) -> None:
    """Let pages that are made from now on be shared, if the device can export them."""
    if device.capabilities["posix_fd_handles"]:
        make_exportable()


def share_block(address: int) -> tuple[str, int]:
    """Return a text that names a block for other processes, and its offset in their mapping.

    Parameters
    ----------
    address : int
        Where a block begins that PyTorch has.

    Raises
    ------
    UnsupportedHandleTypeError
        No such block begins there, or its memory is not pages.
    """
    mapping = mapping_of(address)
    _, _, before, pages = pages_of(address)
    keep_awake(address)
    place = f"{address:x} {before:x} {sum(nbytes for _, nbytes in pages):x} {mapping}"
    return f"{MARK} {server_name()} {place} {next(_numbers)}", before


def open_block(text: str) -> MappedBlock:
    """Map the pages of a block of the process that the text names; they stay until `close`.

    Raises
    ------
    BadHandleError
        The text is not of `share_block`, its process is gone, or it has no such block any more.
    DeviceMismatchError
        The device that it lies on is not here.
    DriverError
        The driver refused.
    """
    try:
        mark, name, address, before, nbytes, mapping, _ = text.split(" ")
        if mark != MARK:
            raise ValueError(f"it begins with {mark!r}")
        first = int(address, 16) - int(before, 16)
    except ValueError as error:
        raise BadHandleError(EBADF, f"not the text of a shared block: {error}") from None
    # Blocks in the same pages share a mapping.
    return _mappings.take(f"{name} {first:x} {nbytes} {mapping}", lambda: _map(name, address))


def drop_idle() -> None:
    """Unmap memory that no tensor uses."""
    _mappings.drop_idle()


def _map(name: str, address: str) -> OpenedPages:
    with ask(name, KIND, address) as (said, pages):
        sizes = said["sizes"]
        opened = OpenedPages(device_of_uuid(said["uuid"]), sum(sizes))
        for page in pages:
            opened.map(page.fileno(), sizes.pop(0))
            page.close()
        if sizes:
            raise BadHandleError(EBADF, f"the other process stopped {len(sizes)} pages too early")
        opened.give_access()
        return opened
