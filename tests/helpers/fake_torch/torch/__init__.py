"""As much of PyTorch as gpumem needs to be put in place of its allocator; it allocates nothing."""

import types

__version__ = "2.11.0"
version = types.SimpleNamespace(git_version="0" * 40)


_C = types.SimpleNamespace(_cuda_customAllocator=None, _GLIBCXX_USE_CXX11_ABI=True)
cuda = types.SimpleNamespace(
    get_allocator_backend=lambda: "native",
    is_initialized=lambda: False,
    device_count=lambda: 1,
    mem_get_info=lambda device=None: (70 << 30, 80 << 30),
    memory=types.SimpleNamespace(),
    _lazy_call=lambda call: None,
)


class Tensor:
    """Nothing makes one."""


class _Module:
    def __call__(self):
        """Do nothing."""

    forward = __call__


nn = types.SimpleNamespace(Module=_Module)
compiler = types.SimpleNamespace(is_compiling=lambda: False)
autograd = types.SimpleNamespace(
    graph=types.SimpleNamespace(_engine_run_backward=lambda: None),
    profiler=types.SimpleNamespace(
        record_function=type(
            "record_function",
            (),
            {
                "__enter__": lambda self: self,
                "__exit__": lambda self, *exception: None,
            },
        )
    ),
)
