"""Sealed sets: tensors by name in memory that outlives the process that made them.

`seal` copies tensors into one block in each memory and passes the blocks' descriptors, with a
manifest, to the keeper (`gpumem.interop.keeper`); `open` maps the same memory in any process of the
same user.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import os
import socket
import subprocess
import sys
import time
import weakref
from collections.abc import Iterable, Iterator, Mapping
from math import prod
from typing import Any

from gpumem._arena.arena import Arena
from gpumem._budget import Budget
from gpumem._buffer.buffer import Buffer
from gpumem._node import hand_over_leased
from gpumem._resource.handle import Handle
from gpumem._support.arguments import refuse, require, require_each
from gpumem._support.closing import Closable
from gpumem._support.releases import release_retired
from gpumem._support.texts import counted, shown
from gpumem._tensor import Tensor, empty
from gpumem._tensor import copy as copy_elements
from gpumem._tensor.stored import stored_tensor
from gpumem.device import Device, MemoryInfo, MemoryKind
from gpumem.errors import (
    BadHandleError,
    ConfigError,
    GpumemError,
    InUseError,
    InvalidDescriptorError,
    KeeperError,
    NotSealedError,
)
from gpumem.interop import keeper
from gpumem.interop._sockets import connect_until, limit_until, receive
from gpumem.interop.descriptors import MemoryHandleType, duplicate, number_of, seconds_of
from gpumem.interop.sharing import Contents, attach, export

TIMEOUT = 10.0  # seconds for an answer of the keeper
MAX_MANIFEST = 1 << 26  # bytes
MAX_SECONDS = 1e6  # of a timeout, which may be infinite
IDLE_SECONDS = 10.0  # for which a keeper started on demand stays without a set
ALIGNMENT = 256  # bytes, of each tensor
_PAUSE = 0.01

_open_sets: weakref.WeakSet[SealedSet] = weakref.WeakSet()


class SealedSet(Closable, Mapping[str, Tensor]):
    """Tensors of a sealed set by name; made by `open` and `seal`.

    They are read only, except copies. Closing the set tells the keeper that this process no longer
    uses it; tensors that the program still has stay valid.

    Attributes
    ----------
    name : str

    Examples
    --------
    >>> import numpy
    >>> from gpumem import interop
    >>> with interop.seal("weights", {"bias": numpy.ones(3)}) as made:
    ...     made["bias"].tolist()
    [1.0, 1.0, 1.0]
    >>> interop.drop("weights")
    """

    def __init__(self, name: str, tensors: dict[str, Tensor], *held: Handle) -> None:
        self.name = name
        self._tensors = tensors
        # The connection by which the keeper knows that this process uses the set, and a slot of a
        # node's page, which charges the set as long as a process has it.
        self._held = held
        self._blocks: list[Buffer] = []  # of the maker, which its budget is charged for
        _open_sets.add(self)

    def __getitem__(self, name: str) -> Tensor:
        self._require_open()
        try:
            return self._tensors[name]
        except (KeyError, TypeError):
            raise NotSealedError(f"the set {self.name!r} has no tensor {shown(name)}") from None

    def __iter__(self) -> Iterator[str]:
        self._require_open()
        return iter(self._tensors)

    def __len__(self) -> int:
        self._require_open()
        return len(self._tensors)

    __hash__ = object.__hash__

    def __eq__(self, other: object) -> bool:
        return self is other

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(tensor.nbytes for tensor in self.values())

    def state_dict(self) -> dict[str, Any]:
        """Return PyTorch's tensors in the same memory, for ``load_state_dict(..., assign=True)``.

        PyTorch does not know that they are read only. Its write to one in host memory ends the
        program (SIGSEGV); in a GPU's memory it changes the bytes of every process.
        """
        import torch

        return {name: torch.from_dlpack(tensor) for name, tensor in self.items()}

    def close(self) -> None:
        """End the use of the set. Idempotent."""
        self._closed = True
        self._tensors = {}
        self._blocks = []
        self._release_held()
        release_retired()  # otherwise memory of a dropped set stays until this process allocates

    def _release_held(self) -> None:
        for each in self._held:
            each.close()

    def __repr__(self) -> str:
        state = "closed" if self._closed else counted(len(self._tensors), "tensor")
        return f"<gpumem.interop.SealedSet {self.name!r}, {state}>"


def seal(
    name: str,
    tensors: Mapping[str, Any],
    *,
    memory: MemoryInfo | Device | str | None = None,
    digest: bool = False,
    budget: Budget | None = None,
    timeout: float = TIMEOUT,
) -> SealedSet:
    """Keep tensors under a name, in memory that outlives this process.

    Parameters
    ----------
    name : str
        1 to 100 letters, digits and ``._/@+-``; the first is a letter or a digit.
    tensors : Mapping of str to array
        Copied once. If a value is a tuple of a shape and a dtype, the result is to be used in a
        ``with`` statement: its tensors can be written, and are kept at the end of the block.
    memory : MemoryInfo, Device or str, optional
        Where the set lies. None: each tensor on the device that it is on, host memory else.
    digest : bool
        Note a digest of each tensor's bytes, for `open` with ``verify=True``.
    budget : Budget, optional
        Charged while this process makes the set and has the returned one open; the limit of a node
        above it, until the set is dropped and no process has it open. No process that opens the set
        is charged.
    timeout : float
        Seconds to wait for an answer of the keeper, which is started if none runs.

    Returns
    -------
    SealedSet
        As `open` returns it; or one that is kept at the end of its block, if a value is a tuple.

    Raises
    ------
    TypeError, ValueError, InvalidDescriptorError
        An invalid argument, or a dtype with fields.
    KeeperError
        The name is taken, or the keeper does not start, answer or accept the set.
    OutOfMemoryError, UnsupportedHandleTypeError, DriverError
        As `Arena.allocate`, `copy` and `export`.

    Examples
    --------
    >>> from gpumem import interop
    >>> with interop.seal("cache", {"keys": ((2, 3), "float32")}) as empty:
    ...     empty["keys"].fill(7)
    >>> with interop.open("cache") as kept:
    ...     kept["keys"].tolist()
    [[7.0, 7.0, 7.0], [7.0, 7.0, 7.0]]
    >>> interop.drop("cache")
    """
    _require_name(name)
    require("digest", digest, bool, "True or False")
    seconds = seconds_of(timeout)
    require("tensors", tensors, Mapping, "a mapping of names to arrays, or to (shape, dtype)")
    if not tensors or not all(isinstance(each, str) and each for each in tensors):
        raise ValueError("invalid tensors: expected at least one, and each name a str, not empty")
    where = None if memory is None else MemoryInfo.parse(memory)
    if any(each["name"] == name for each in _listed(seconds, start=True)):
        raise KeeperError(f"a set {name!r} is kept already: drop it first")
    forms = {}
    arrays = {}
    for key, each in tensors.items():
        if isinstance(each, tuple):
            if len(each) != 2:
                refuse(f"tensors[{key!r}]", each, "an array, or a tuple of a shape and a dtype")
            forms[key] = (*each, where or MemoryInfo.parse("host"))
        else:
            array = arrays[key] = stored_tensor(key, each)
            forms[key] = (array.shape, array.dtype, where or _home(array))
    making = UnsealedSet(name, forms, digest, budget, seconds)
    for key, array in arrays.items():
        copy_elements(making[key], array)
    return making if len(arrays) < len(forms) else making.publish()


def open(
    name: str, *, copy: Iterable[str] = (), verify: bool = False, timeout: float = TIMEOUT
) -> SealedSet:
    """Map a sealed set of this user.

    Parameters
    ----------
    name : str
    copy : iterable of str
        Tensors that the program writes: they are copied to memory of this process.
    verify : bool
        Compare each tensor's bytes with the digest that `seal` noted.
    timeout : float
        Seconds to wait for an answer of the keeper.

    Returns
    -------
    SealedSet

    Raises
    ------
    TypeError, ValueError
        An invalid argument.
    NotSealedError
        No such set is kept, or `copy` names a tensor that is not in it.
    KeeperError
        No keeper runs, or it does not answer.
    BadHandleError
        The set is damaged; or with `verify`, its bytes have changed, or it has no digests.
    DeviceMismatchError
        The device of a tensor is not here.
    UnsupportedHandleTypeError, DriverError
        As `attach`.

    Examples
    --------
    >>> import numpy
    >>> from gpumem import interop
    >>> interop.seal("weights", {"scale": numpy.ones(2)}).close()
    >>> with interop.open("weights", copy=["scale"]) as kept:
    ...     kept["scale"].fill(3)
    >>> interop.open("weights")["scale"].tolist()
    [1.0, 1.0]
    >>> interop.drop("weights", force=True)
    """
    _require_name(name)
    copied = set(require_each("copy", copy, str, "a str"))
    require("verify", verify, bool, "True or False")
    _, handles, connection = _ask({"call": "open", "name": name}, seconds_of(timeout))
    return _mapped(name, handles, connection, copied, verify)


def drop(name: str, *, force: bool = False, timeout: float = TIMEOUT) -> None:
    """Let the keeper forget a set; its memory is released with its last user.

    Parameters
    ----------
    name : str
    force : bool
        Also while processes use it: they keep their tensors.
    timeout : float
        Seconds to wait for an answer of the keeper.

    Raises
    ------
    TypeError, ValueError
        An invalid argument.
    NotSealedError
        No such set is kept.
    InUseError
        Processes have it open; the message names them.
    KeeperError
        No keeper runs, or it does not answer.

    Examples
    --------
    >>> import numpy
    >>> from gpumem import interop
    >>> interop.seal("weights", {"bias": numpy.ones(3)}).close()
    >>> interop.drop("weights")
    >>> interop.sealed_sets()
    []
    """
    _require_name(name)
    require("force", force, bool, "True or False")
    _ask({"call": "drop", "name": name, "force": force}, seconds_of(timeout))[2].close()


def sealed_sets(*, timeout: float = TIMEOUT) -> list[dict[str, Any]]:
    """Return the sets that the keeper of this user holds; none if no keeper runs.

    Each has ``name``, ``bytes``, ``tensors``, ``parts``, ``process`` (that made it) and ``users``
    (processes that have it open).

    Raises
    ------
    TypeError, ValueError
        An invalid timeout.
    KeeperError
        The keeper does not answer.

    Examples
    --------
    >>> from gpumem import interop
    >>> interop.sealed_sets()
    []
    """
    seconds = seconds_of(timeout)
    try:
        return _listed(seconds, start=False)
    except KeeperError as error:
        if error.errno == errno.ECONNREFUSED:
            return []
        raise


def _require_name(name: object) -> None:
    require("name", name, str, "a str")
    if not isinstance(name, str) or not keeper.NAME.fullmatch(name):
        raise ValueError(f"invalid name = {shown(name)}: expected {keeper.NAME.pattern}")


# ---- making a set --------------------------------------------------------------------------------


def _home(tensor: Tensor) -> MemoryInfo:
    is_device = tensor.memory.kind is MemoryKind.DEVICE
    return MemoryInfo.parse(tensor.device if is_device else "host")


class UnsealedSet(SealedSet):
    """A set that is being made: a block in each memory, and the tensors in them."""

    def __init__(
        self,
        name: str,
        forms: dict[str, tuple[Any, Any, MemoryInfo]],
        digest: bool,
        budget: Budget | None,
        seconds: float,
    ) -> None:
        super().__init__(name, {})
        self.digest = digest
        self.budget = budget
        self.seconds = seconds
        self.places: dict[str, tuple[int, int]] = {}  # of the tensor's block, and in it
        dtypes = {key: _dtype_of(dtype) for key, (_, dtype, _) in forms.items()}
        sizes: dict[MemoryInfo, int] = {}  # of the block in each memory
        for key, (shape, _, home) in forms.items():
            if dtypes[key].names is not None:
                raise InvalidDescriptorError(f"dtype {dtypes[key]} of {key!r} has fields")
            lengths = [shape] if hasattr(shape, "__index__") else shape
            count = prod(number_of(each, "a length of the shape") for each in lengths)
            nbytes = max(count * dtypes[key].itemsize, 1)
            start = sizes.setdefault(home, 0)
            self.places[key] = list(sizes).index(home), start
            sizes[home] += -(-nbytes // ALIGNMENT) * ALIGNMENT
        self._blocks = [
            Arena(home, name=f"sealed set {name}", budget=budget).allocate(nbytes, shareable=True)
            for home, nbytes in sizes.items()
        ]
        self._tensors = {
            key: self._blocks[part].tensor(forms[key][0], dtypes[key], offset=offset)
            for key, (part, offset) in self.places.items()
        }

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is None:
            self.publish().close()
        self.close()

    def publish(self) -> SealedSet:
        """Pass the set to the keeper, and map it as any other process does."""
        parts, handles = self._exported()
        rows = [
            (key, tensor.shape, _text_of(tensor.dtype), *self.places[key], self._digest_of(tensor))
            for key, tensor in self.items()
        ]
        head = {"name": self.name, "bytes": self.nbytes, "tensors": len(rows)}
        if (node := _node_of(self.budget)) is not None:
            # Without blocks this process no longer charges its own part of the node.
            self.close()
            nbytes = sum(each.contents.size for each in handles)
            handles.append(Handle._owning(hand_over_leased(node, nbytes)))
        head |= {"parts": len(handles), "process": os.getpid()}
        manifest = json.dumps(head) + "\n" + json.dumps({"parts": parts, "tensors": rows})
        handles.insert(0, _sealed_file(manifest.encode()))
        request = {"call": "put", "name": self.name}
        _, _, connection = _ask(request, self.seconds, handles, start=True)
        made = _mapped(self.name, handles, connection, set(), False)
        made._blocks = self._blocks
        self.close()
        return made

    def _exported(self) -> tuple[list[dict[str, Any]], list[Handle]]:
        parts, handles = [], []
        for each in self._blocks:
            each.memory.device.synchronize()  # also work of other libraries
            # A program that writes to host memory through a pointer is stopped by the kernel. On a
            # GPU such a fault would end all work of the process, so there the mapping is writable.
            handle = export(each, read_only=each.memory.kind is MemoryKind.HOST)
            handles.append(handle)
            memory, dtype = str(handle.contents.memory), handle.contents.dtype.str
            contents = vars(handle.contents) | {"memory": memory, "dtype": dtype}
            parts.append({"kind": handle.kind.name, "contents": contents})
        return parts, handles

    def _digest_of(self, tensor: Tensor) -> str | None:
        return _digest(tensor) if self.digest else None


def _node_of(budget: Budget | None) -> str | None:
    while budget is not None and budget.parent is not None:
        budget = budget.parent
    return None if budget is None else budget.node


def _dtype_of(dtype: Any) -> Any:
    return empty((0,), dtype, memory="host").dtype


def _text_of(dtype: Any) -> str:
    # NumPy's own text of a dtype of ml_dtypes does not name it.
    return str(dtype.name if dtype.isbuiltin == 2 else dtype.str)


def _digest(tensor: Tensor) -> str:
    flat = tensor.buffer.tensor(tensor.nbytes, "uint8", offset=tensor.ptr - tensor.buffer.ptr)
    return hashlib.blake2b(flat.to("host").numpy().data, digest_size=16).hexdigest()


def _sealed_file(data: bytes) -> Handle:
    if len(data) > MAX_MANIFEST:
        raise ValueError(f"the manifest has {len(data)} bytes: expected at most {MAX_MANIFEST}")
    flags = os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING
    handle = Handle._owning(os.memfd_create("gpumem manifest", flags))
    with os.fdopen(handle.fileno(), "wb", closefd=False) as file:
        file.write(data)
    fcntl.fcntl(handle.fileno(), fcntl.F_ADD_SEALS, keeper.SEALS)
    return handle


# ---- mapping a set -------------------------------------------------------------------------------


def _mapped(
    name: str, handles: list[Handle], connection: Handle, copied: set[str], verify: bool
) -> SealedSet:
    """Map a set, of which the first handle has the manifest; all of the handles are closed."""
    try:
        manifest = _manifest(handles[0])
        count = 1 + len(manifest["parts"])
        parts = [
            _part(handle, about)
            for handle, about in zip(handles[1:count], manifest["parts"], strict=True)
        ]
        rows = {row[0]: row[1:] for row in manifest["tensors"]}
        tensors = {
            key: parts[part].buffer.tensor(shape, dtype, offset=offset).as_read_only()
            for key, (shape, dtype, part, offset, _) in rows.items()
        }
        if unknown := sorted(copied - tensors.keys()):
            raise NotSealedError(f"invalid copy = {unknown}: the set {name!r} has no such tensors")
        for key, tensor in tensors.items() if verify else ():
            if _digest(tensor) != rows[key][-1]:
                reason = "has no digest" if rows[key][-1] is None else "was changed after seal()"
                raise BadHandleError(errno.EINVAL, f"tensor {key!r} of set {name!r} {reason}")
        for key in copied:
            tensors[key] = tensors[key].to(tensors[key].memory, copy=True)
        return SealedSet(name, tensors, connection, *map(duplicate, handles[count:]))
    except BaseException as error:
        connection.close()
        if isinstance(error, GpumemError) or not isinstance(error, keeper.DAMAGES):
            raise
        text = f"the manifest of set {name!r} is damaged: {error!r}"
        raise BadHandleError(errno.EINVAL, text) from error
    finally:
        for handle in handles:
            handle.close()


def _manifest(handle: Handle) -> dict[str, Any]:
    nbytes = os.fstat(handle.fileno()).st_size
    if nbytes > MAX_MANIFEST:
        raise ValueError(f"it has {nbytes} bytes: expected at most {MAX_MANIFEST}")
    body: dict[str, Any] = json.loads(os.pread(handle.fileno(), nbytes, 0).partition(b"\n")[2])
    return body


def _part(handle: Handle, about: dict[str, Any]) -> Tensor:
    values = dict(about["contents"])
    values |= {key: tuple(values[key]) for key in ("shape", "strides")}
    values["memory"] = MemoryInfo.parse(values["memory"])
    values["dtype"] = _dtype_of(values["dtype"])
    contents = Contents(**values)
    handle._describe(MemoryHandleType[about["kind"]], contents)
    part: Tensor = attach(handle)
    return part


# ---- the keeper ----------------------------------------------------------------------------------


def _listed(seconds: float, *, start: bool) -> list[dict[str, Any]]:
    answer, _, connection = _ask({"call": "list"}, seconds, start=start)
    connection.close()
    listed: list[dict[str, Any]] = answer["sets"]
    return listed


def _ask(
    request: dict[str, Any], seconds: float, sent: Iterable[Handle] = (), *, start: bool = False
) -> tuple[dict[str, Any], list[Handle], Handle]:
    """Ask the keeper; return its answer, the handles beside it, and the connection."""
    until = time.monotonic() + min(seconds, MAX_SECONDS)
    message = [json.dumps(request | {"version": keeper.VERSION}).encode()]
    numbers = [each.fileno() for each in sent]
    folder = keeper.folder()
    while True:
        try:
            keeper.require_private(folder)
            with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as peer:
                connect_until(peer, f"{folder}/keeper", until)
                limit_until(peer, until)
                socket.send_fds(peer, message, numbers)
                data, handles = receive(peer, keeper.MAX_ANSWER, keeper.MAX_PARTS + 1)
                if not data:
                    raise ConnectionResetError("the keeper has ended")
                return _require_answer(data), handles, Handle._owning(peer.detach())
        except (FileNotFoundError, ConnectionError) as error:
            if not start or time.monotonic() > until:
                text = (
                    f"no keeper of sealed sets runs in {folder}: the sets of an ended one are gone"
                )
                raise KeeperError(errno.ECONNREFUSED, text) from error
            _start(folder, until)
        except (TimeoutError, BlockingIOError) as error:
            text = f"the keeper in {folder} did not answer within {seconds} s"
            raise KeeperError(errno.ETIMEDOUT, text) from error
        except GpumemError:
            raise
        except OSError as error:
            text = f"the keeper in {folder}: {error.strerror or error}"
            raise KeeperError(error.errno, text) from error


def _require_answer(data: bytes) -> dict[str, Any]:
    try:
        answer: dict[str, Any] = json.loads(data)
        version, refused = answer["version"], answer.get("refused")
    except keeper.DAMAGES as error:
        raise KeeperError(errno.EPROTO, f"the keeper sent something else: {error!r}") from error
    if version != keeper.VERSION:
        raise KeeperError(
            errno.EPROTO,
            f"the keeper speaks version {shown(version)} of the messages, and this gpumem version "
            f"{keeper.VERSION}: drop its sets with its own gpumem and end it",
        )
    if refused is not None:
        kind = {"name": NotSealedError, "used": InUseError}.get(refused, KeeperError)
        raise kind(str(answer.get("text")))
    return answer


def _start(folder: str, until: float) -> None:
    """Start a keeper, unless another process does so at the same time."""
    idle = os.environ.get("GPUMEM_KEEPER_IDLE") or str(IDLE_SECONDS)
    try:
        is_time = float(idle) > 0
    except ValueError:
        is_time = False
    if not is_time:
        raise ConfigError(f"invalid GPUMEM_KEEPER_IDLE = {idle!r}: expected seconds above 0")
    command = [sys.executable, "-I", "-S", keeper.__file__, "--detach", "--idle", idle]
    try:
        ended = subprocess.run(
            [*command, "--folder", folder],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            start_new_session=True,
            timeout=max(until - time.monotonic(), _PAUSE),
        )
    except subprocess.TimeoutExpired as error:
        raise KeeperError(errno.ETIMEDOUT, f"the keeper did not start: {error}") from None
    if ended.returncode == keeper.RUNS_ALREADY:
        time.sleep(_PAUSE)  # the other one begins to listen, or is ending
    elif ended.returncode:
        text = ended.stderr.decode(errors="replace").strip().rpartition("\n")[2]
        raise KeeperError(errno.ECHILD, f"the keeper did not start: {text}")


def _forget_connections() -> None:
    # The child of a fork would keep the connections of its parent open.
    for each in list(_open_sets):
        each._release_held()


os.register_at_fork(after_in_child=_forget_connections)
