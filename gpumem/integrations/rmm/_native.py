"""An arena as a C++ resource of RMM's, which RMM and cuDF call without the interpreter.

`gpumem_resource.hpp` is compiled at the first use, against the headers of the installed librmm and
its CCCL, because these change from version to version. Python passes an object of
``rmm.mr.DeviceMemoryResource`` to RMM; it has one field, a reference to a C++ resource, that RMM
has no public way to set. It is set where the class is exactly as its published declaration, which
is checked on objects that RMM made itself.
"""

from __future__ import annotations

import contextlib
import ctypes
import sysconfig
import weakref
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

from gpumem._arena.arena import Arena
from gpumem.integrations._common.compiled import INCLUDE, Recipe, cuda_folders, load
from gpumem.integrations.c._calls import address_of, capsule_of

SOURCE = """\
#include <rmm/error.hpp>
#include <rmm/resource_ref.hpp>

#include <gpumem_resource.hpp>

#include <cstddef>
#include <new>
#include <optional>

using Resource = gpumem::basic_resource<rmm::out_of_memory>;
static_assert(cuda::mr::resource_with<Resource, cuda::mr::device_accessible>);

/* The field of rmm.pylibrmm's DeviceMemoryResource, as its .pxd declares it. */
struct Reference {
    std::optional<rmm::device_async_resource_ref> resource;
};
using Field = std::optional<Reference>;

extern "C" {
std::size_t gpumem_rmm_field_bytes() { return sizeof(Field); }
int gpumem_rmm_is_set(void const *at) {
    Field const &field = *static_cast<Field const *>(at);
    return field.has_value() && field->resource.has_value();
}
void *gpumem_rmm_make(gpumem_arena *arena) { return new (std::nothrow) Resource(arena); }
void gpumem_rmm_set(void *at, void *resource) {
    *static_cast<Field *>(at) =
        Reference{rmm::device_async_resource_ref{*static_cast<Resource *>(resource)}};
}
void gpumem_rmm_end(void *resource) { delete static_cast<Resource *>(resource); }
}
"""
_HEAD_BYTES = object.__basicsize__ + 8  # CPython's own, and the table of compiled methods
_OBJECT = ctypes.c_void_p


def resource_over(arena: Arena) -> Any:
    """Return an RMM resource over an arena, which it keeps alive.

    Raises
    ------
    RuntimeError
        It cannot be compiled, or this RMM's class is another one; the message says why.
    ConfigError, ClosedError
        The arena's memory has an alignment above 256, or it is closed.
    """
    parts = _parts()
    if parts.library is None:
        raise RuntimeError(parts.why_not)
    made = parts.kind()
    capsule = capsule_of(arena, "rmm", captures=True)
    pointer = parts.library.gpumem_rmm_make(address_of(capsule))
    if not pointer:
        raise MemoryError("out of host memory while making a resource for RMM")
    parts.library.gpumem_rmm_set(id(made) + _HEAD_BYTES, pointer)
    # The C++ resource has its own reference to the arena, and RMM's C++ has copies of it.
    weakref.finalize(made, parts.library.gpumem_rmm_end, pointer).atexit = False
    return made


def why_not() -> str | None:
    """Return why RMM has to call Python; None if it can call an arena directly."""
    return _parts().why_not


class _Parts(NamedTuple):
    """Facts about the installed RMM. Without a library there is a reason."""

    library: ctypes.CDLL | None
    kind: Any  # the class of the objects that RMM gets
    why_not: str | None


@cache
def _parts() -> _Parts:
    try:
        library = _library()
    except (OSError, RuntimeError) as error:
        return _Parts(None, None, f"it was not compiled: {error}")
    mr = import_module("rmm").mr
    reason = _other_layout(library, mr)
    if reason is not None:
        return _Parts(None, None, reason)
    doc = "A gpumem.Arena that RMM calls without the interpreter."
    names = {"__doc__": doc, "__module__": __name__}
    return _Parts(library, type("ArenaResource", (mr.DeviceMemoryResource,), names), None)


def _other_layout(library: ctypes.CDLL, mr: Any) -> str | None:
    """Return how this RMM's class differs from its declaration; None if it does not."""
    base = mr.DeviceMemoryResource
    expected = _HEAD_BYTES + library.gpumem_rmm_field_bytes()
    if base.__basicsize__ != expected or base.__dictoffset__ or base.__weakrefoffset__:
        return (
            f"this RMM's DeviceMemoryResource has {base.__basicsize__} bytes, "
            f"and as declared it has {expected}"
        )
    # RMM's own objects: one with a resource, which needs no device, and one without.
    with_one, without = mr.CudaMemoryResource(), base()
    seen = [bool(library.gpumem_rmm_is_set(id(each) + _HEAD_BYTES)) for each in (with_one, without)]
    if seen != [True, False]:
        return "this RMM's DeviceMemoryResource does not have its reference where it is declared"
    return None


def _library() -> ctypes.CDLL:
    library = load(_recipe())
    library.gpumem_rmm_field_bytes.restype = ctypes.c_size_t
    library.gpumem_rmm_is_set.argtypes = [_OBJECT]
    library.gpumem_rmm_make.argtypes = [_OBJECT]
    library.gpumem_rmm_make.restype = ctypes.c_void_p
    library.gpumem_rmm_set.argtypes = [_OBJECT, _OBJECT]
    library.gpumem_rmm_set.restype = None
    library.gpumem_rmm_end.argtypes = [_OBJECT]
    library.gpumem_rmm_end.restype = None
    return library


# ---- headers and libraries -----------------------------------------------------------------------


def _recipe() -> Recipe:
    rmm: Any = import_module("rmm")
    found = _rmm_headers()
    headers = [found, found / "rapids", INCLUDE, _cuda_headers()]
    options = [f"-I{each}" for each in headers]
    for folder in (found.parent / "lib64", found.parent / "lib"):
        if (folder / "librmm.so").exists():
            options += [f"-L{folder}", f"-Wl,-rpath,{folder}", "-lrmm"]
            break
    else:
        raise RuntimeError(f"there is no librmm.so in lib64 or lib of {found.parent}")
    included = (INCLUDE / "gpumem.h", INCLUDE / "gpumem_resource.hpp")
    return Recipe(f"rmm-{rmm.__version__}", SOURCE, tuple(options), included)


def _rmm_headers() -> Path:
    """Return the folder of librmm's headers: of its wheel, or of a Conda environment."""
    folders = []
    with contextlib.suppress(ImportError):
        folders.append(Path(str(import_module("librmm").__file__)).parent / "include")
    folders.append(Path(sysconfig.get_path("data")) / "include")
    return _first(folders, ("rmm/resource_ref.hpp",), "librmm's headers")


def _cuda_headers() -> Path:
    folders = cuda_folders(Path(sysconfig.get_path("purelib")))
    return _first(folders, ("cuda_runtime_api.h", "crt/host_defines.h"), "CUDA's headers")


def _first(folders: list[Path], wanted: tuple[str, ...], what: str) -> Path:
    for folder in folders:
        if all((folder / name).exists() for name in wanted):
            return folder
    searched = ", ".join(map(str, folders))
    raise RuntimeError(f"{what} ({' and '.join(wanted)}) are in none of {searched}")
