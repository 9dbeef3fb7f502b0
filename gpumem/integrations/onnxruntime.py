"""ONNX Runtime on gpumem's memory: inputs and outputs without a copy, and memory for a session.

`bind` lets a session read and write tensors where they lie. `allocator` makes the memory of
sessions' CUDA providers, out of an arena that PyTorch and others use as well.

Examples
--------
>>> import gpumem, onnxruntime  # doctest: +SKIP
>>> from gpumem.integrations import onnxruntime as gpumem_ort  # doctest: +SKIP
>>> session = onnxruntime.InferenceSession("model.onnx")  # doctest: +SKIP
>>> x, y = (gpumem.zeros((8, 8), "float32", memory="host") for _ in range(2))  # doctest: +SKIP
>>> binding = gpumem_ort.bind(session, {"x": x}, {"y": y})  # doctest: +SKIP
>>> session.run_with_iobinding(binding)  # y has the result  # doctest: +SKIP
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterable, Mapping
from functools import cache
from typing import Any

import numpy as np

from gpumem._arena.arena import Arena
from gpumem._buffer.stream import Stream
from gpumem._support.forks import ForkLock
from gpumem._tensor.tensor import Tensor
from gpumem.device import MemoryKind
from gpumem.errors import ConfigError, IntegrationError, InUseError
from gpumem.integrations._common.compiled import load, over_gpumem_h
from gpumem.integrations._common.leases import lease_on
from gpumem.integrations._common.resources import REACHABLE, Resources
from gpumem.integrations._common.switch import Status
from gpumem.integrations._common.versions import import_framework
from gpumem.integrations.c._calls import address_of, capsule_of, live_blocks
from gpumem.stats import ShrinkReport

__all__ = ["SessionMemory", "allocator", "bind", "status"]
__dir__ = __all__.copy

_OLDEST = "1.20"
_INSTALL = "pip install onnxruntime-gpu"
_device_type = "cuda"  # "host" in tests without a GPU
_LEGACY_STREAM = 1

# ONNX Runtime's names of element types, and NumPy's.
_TYPES = {
    "tensor(float)": "float32",
    "tensor(double)": "float64",
    "tensor(float16)": "float16",
    "tensor(bool)": "bool",
    **{
        f"tensor({sign}int{bits})": f"{sign}int{bits}"
        for sign in ("", "u")
        for bits in (8, 16, 32, 64)
    },
}

_UNUSED = 256  # stands for an address of an output without elements; ONNX Runtime refuses 0


# ---- inputs and outputs --------------------------------------------------------------------------


def bind(
    session: Any, inputs: Mapping[str, Tensor], outputs: Mapping[str, Tensor] | None = None
) -> Any:
    """Bind tensors to a session's inputs and outputs by their addresses; nothing is copied.

    Parameters
    ----------
    session : onnxruntime.InferenceSession
    inputs : Mapping of str to Tensor
        Every input of the model, by name: contiguous, of its type and shape, in host memory, pinned
        or not, or in the memory of a CUDA device.
    outputs : Mapping of str to Tensor, optional
        Where results are written. Outputs that are not named are allocated by ONNX Runtime in host
        memory.

    Returns
    -------
    onnxruntime.IOBinding
        For ``session.run_with_iobinding``, as often as wanted. It holds the tensors' memory as a
        view does: while it exists, the memory is not used again, closed or not, and does not sleep.

    Raises
    ------
    MissingFrameworkError, IntegrationError
        ONNX Runtime is not installed or too old, or the session has no CUDA provider for a tensor
        of a CUDA device.
    ConfigError
        A name is not of the model, an input is missing, or a tensor does not fit; the message names
        it and the accepted values.
    TypeError
        An input or output is not a gpumem tensor, such as `gpumem.asarray` makes.
    ClosedError, AsleepError
        The buffer of a tensor is closed, or its memory sleeps.

    Notes
    -----
    ONNX Runtime knows no stream of a tensor: wait for the work that writes the inputs before a run,
    and for runs that were given a stream before outputs are read. Where a provider computes on a
    device, ONNX Runtime itself copies tensors in host memory.
    """
    _ort()
    wanted = {each.name: each for each in session.get_inputs()}
    given = {each.name: each for each in session.get_outputs()}
    results = outputs or {}
    _require_names("input", inputs, wanted)
    _require_names("output", results, given)
    missing = sorted(wanted.keys() - inputs.keys())
    if missing:
        raise ConfigError(f"invalid inputs: {', '.join(missing)} of the model are missing")
    for name, tensor in inputs.items():
        _require_fits(session, "input", wanted[name], tensor)
    for name, tensor in results.items():
        _require_fits(session, "output", given[name], tensor)
        if tensor.read_only:
            raise ConfigError(f"invalid output {name!r}: the tensor is read-only")
    tensors = (*inputs.values(), *results.values())
    leases = [lease_on(tensor.buffer) for tensor in tensors]
    # All checks come before the first binding.
    binding = session.io_binding()
    for name, tensor in inputs.items():
        binding.bind_input(name, *_place(tensor), tensor.dtype, tensor.shape, tensor.ptr)
    for name in given:
        if name in results:
            tensor = results[name]
            ptr = tensor.ptr or _UNUSED
            binding.bind_output(name, *_place(tensor), tensor.dtype, tensor.shape, ptr)
        else:
            binding.bind_output(name)
    binding.gpumem_tensors = tensors, leases
    return binding


def _require_names(what: str, tensors: Iterable[str], names: Iterable[str]) -> None:
    for name in tensors:
        if name not in names:
            raise ConfigError(
                f"invalid {what} {name!r}: the model has {', '.join(map(repr, names))}"
            )


def _require_fits(session: Any, what: str, declared: Any, tensor: Tensor) -> None:
    where = f"invalid {what} {declared.name!r}"
    if not isinstance(tensor, Tensor):
        raise TypeError(f"{where}: expected a gpumem.Tensor, not a {type(tensor).__name__}")
    expected = _TYPES.get(declared.type)
    if expected is None:
        raise ConfigError(f"{where}: {declared.type} is none of {', '.join(_TYPES)}")
    if tensor.dtype != np.dtype(expected):
        raise ConfigError(f"{where}: its dtype is {tensor.dtype}, the model's is {expected}")
    # A length that the model does not know is a name or None.
    fits = len(declared.shape) == len(tensor.shape) and all(
        not isinstance(length, int) or length == have
        for length, have in zip(declared.shape, tensor.shape, strict=True)
    )
    if not fits:
        raise ConfigError(f"{where}: its shape is {tensor.shape}, the model's is {declared.shape}")
    if not _is_contiguous(tensor):
        raise ConfigError(f"{where}: its strides are {tensor.strides}; expected a contiguous one")
    if _place(tensor)[0] == "cuda" and "CUDAExecutionProvider" not in session.get_providers():
        raise IntegrationError(
            f"{where} is of {tensor.memory}, and the session has no CUDA provider: it has "
            f"{', '.join(session.get_providers())}"
        )


def _is_contiguous(tensor: Tensor) -> bool:
    """Return whether the elements are adjacent and in order; lengths of 1 need no stride."""
    step = tensor.dtype.itemsize
    for length, stride in zip(reversed(tensor.shape), reversed(tensor.strides), strict=True):
        if length > 1 and stride != step:
            return tensor.size == 0
        step *= length
    return True


def _place(tensor: Tensor) -> tuple[str, int]:
    """Return how ONNX Runtime names a tensor's memory: the type of device, and its number."""
    memory = tensor.memory
    if memory.device.type == "cuda" and memory.kind is not MemoryKind.HOST_ACCESSIBLE:
        return "cuda", memory.device.index
    return "cpu", 0


# ---- memory for a session ------------------------------------------------------------------------


def allocator(resource: Arena) -> SessionMemory:
    """Return the memory of sessions' CUDA providers, out of an arena that others use as well.

    Parameters
    ----------
    resource : Arena
        Of a CUDA device. Sessions and every other library that uses it have one limit.

    Returns
    -------
    SessionMemory
        Its `provider_options` go to ``onnxruntime.InferenceSession``, for any number of sessions.
        Close it after the last of them.

    Raises
    ------
    MissingFrameworkError, IntegrationError
        ONNX Runtime is not installed or too old, its CUDA provider is the plugin, the C functions
        cannot be compiled, or there are 64 of them open.
    TypeError, ConfigError, ClosedError
        `resource` is not an Arena, is not of a CUDA device, or is closed.

    Notes
    -----
    ONNX Runtime names no stream in these calls. With them its CUDA provider computes and copies on
    the legacy default stream, and refuses ``user_compute_stream``. So a block that it frees is used
    again for the legacy default stream at once, PyTorch's default stream among its users, and for
    other streams after the work that was queued there before the free. It does not capture graphs
    (``enable_cuda_graph``), since that stream cannot. The provider that is a plugin, of builds of
    ONNX Runtime since 1.31, computes on a stream that gpumem does not know, and is refused.

    A refused allocation is an exception of ONNX Runtime's, without gpumem's report.

    Of weights that ONNX Runtime reserves apart (``session.use_device_allocator_for_initializers``)
    it requests after each free that idle memory be released. It is where it exceeds 1/64 of the
    memory in use; `SessionMemory.shrink` releases the remainder.
    """
    if not isinstance(resource, Arena):
        raise TypeError(f"invalid resource = {resource!r}: expected a gpumem.Arena")
    kinds = (MemoryKind.HOST,) if _device_type == "host" else REACHABLE
    Resources("ONNX Runtime", resource, kinds=kinds, device_type=_device_type)
    if "cuda-plugin-ep=1" in getattr(_ort(), "get_build_info", str)():
        raise IntegrationError(
            "this ONNX Runtime's CUDA provider is a plugin, which computes on a stream that gpumem "
            "does not know; the one in `pip install onnxruntime-gpu` does not"
        )
    return SessionMemory(resource)


def status() -> Status:
    """Return which arenas sessions have now, of each device the one that was passed last."""
    held = {each.resource.memory.device.index: each.resource for each in list(_open.values())}
    return Status(bool(held), held)


class SessionMemory:
    """Memory for the CUDA providers of sessions; made by `allocator`.

    Dropping it releases nothing, since ONNX Runtime keeps the addresses of its functions: `close`
    it, once the sessions are gone.

    Attributes
    ----------
    resource : Arena
        The arena that was given.
    """

    def __init__(self, resource: Arena) -> None:
        self.resource = resource
        self._capsule = capsule_of(resource, "onnxruntime")
        self._library = _functions()
        with _lock:
            free = sorted(set(range(_SLOTS)) - _open.keys())
            if not free:
                raise IntegrationError(
                    f"{_SLOTS} allocators for ONNX Runtime are open, and there are at most that "
                    "many: close one first"
                )
            self._slot = free[0]
            self._library.gpumem_ort_set(self._slot, address_of(self._capsule))
            _open[self._slot] = self

    @property
    def provider_options(self) -> dict[str, str]:
        """Options of ``("CUDAExecutionProvider", options)``, to which others may be added."""
        alloc, free, empty_cache = self._library.gpumem_ort_functions(self._slot)[:3]
        return {
            "device_id": str(self.resource.memory.device.index),
            "gpu_external_alloc": str(alloc),
            "gpu_external_free": str(free),
            "gpu_external_empty_cache": str(empty_cache),
            "do_copy_in_default_stream": "1",
        }

    @property
    def blocks(self) -> int:
        """Number of blocks that the sessions have: weights, and between runs nothing else."""
        return live_blocks(self._capsule)

    def shrink(self) -> ShrinkReport:
        """Release the arena's idle memory to the device, between runs.

        Waits for the legacy default stream's work.
        """
        Stream.from_handle(self.resource.memory.device, _LEGACY_STREAM).synchronize()
        return self.resource.shrink()

    def close(self) -> None:
        """Refuse all later allocations of the functions that ONNX Runtime has. Idempotent.

        Raises
        ------
        InUseError
            A session has blocks: delete it first.
        """
        with _lock:
            if _open.get(self._slot) is not self:
                return
            if self.blocks:
                raise InUseError(
                    f"the memory of ONNX Runtime's sessions cannot be closed: {self.blocks} blocks "
                    f"of {self.resource.name!r} are in use; delete the sessions first"
                )
            self._library.gpumem_ort_set(self._slot, None)
            del _open[self._slot]

    def __repr__(self) -> str:
        return f"<gpumem.integrations.onnxruntime.SessionMemory of {self.resource!r}>"


_SLOTS = 64
_lock = ForkLock()
_open: dict[int, SessionMemory] = {}

# The functions have no argument that names their arena: there is one set for each slot.
_SOURCE = """\
#include <gpumem.h>

#include <array>
#include <atomic>
#include <cstddef>
#include <utility>

namespace {
constexpr int SLOTS = 64;
std::atomic<gpumem_arena *> arenas[SLOTS]; /* nullptr: closed, and without a block */

/* For the legacy default stream, on which the provider computes. */
template <int N> void *allocate(std::size_t nbytes) {
    gpumem_arena *arena = arenas[N];
    void *block = nullptr;
    if (arena) arena->calls->allocate(arena, nbytes, 0, nullptr, &block);
    return block; /* nullptr: ONNX Runtime reports that memory is out */
}
template <int N> void release(void *block) {
    gpumem_arena *arena = arenas[N];
    if (arena) arena->calls->deallocate(arena, block);
}
/* Called for each weight of a session that ends, with a lock of ONNX Runtime's held: a shrink looks
 * at the whole arena. So only where the idle memory exceeds 1/64 of the memory in use. */
template <int N> void empty_cache() {
    gpumem_arena *arena = arenas[N];
    gpumem_stats now{};
    now.size = sizeof now;
    if (arena && arena->calls->stats(arena, &now) == GPUMEM_OK &&
        now.reserved > now.in_use + now.in_use / 64)
        arena->calls->shrink(arena, nullptr);
}

struct Functions {
    void *(*allocate)(std::size_t);
    void (*release)(void *);
    void (*empty_cache)();
};
template <int... N> constexpr std::array<Functions, SLOTS> all(std::integer_sequence<int, N...>) {
    return {{{allocate<N>, release<N>, empty_cache<N>}...}};
}
constexpr auto functions = all(std::make_integer_sequence<int, SLOTS>{});
} // namespace

extern "C" {
void gpumem_ort_set(int slot, gpumem_arena *arena) { arenas[slot] = arena; }
Functions const *gpumem_ort_functions(int slot) { return &functions[slot]; }
}
"""


@cache
def _functions() -> ctypes.CDLL:
    try:
        library = load(over_gpumem_h("onnxruntime", _SOURCE))
    except (OSError, RuntimeError) as error:
        raise IntegrationError(f"the functions for ONNX Runtime cannot be used: {error}") from error
    library.gpumem_ort_set.argtypes = [ctypes.c_int, ctypes.c_void_p]
    library.gpumem_ort_set.restype = None
    library.gpumem_ort_functions.restype = ctypes.POINTER(ctypes.c_size_t)
    return library


def _ort() -> Any:
    return import_framework("ONNX Runtime", "onnxruntime", _OLDEST, install=_INSTALL)
