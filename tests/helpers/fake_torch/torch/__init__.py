"""As much of PyTorch as gpumem needs to be put in place of its allocator; it allocates nothing."""

import types

__version__ = "2.11.0"
version = types.SimpleNamespace(git_version="0" * 40)


_C = types.SimpleNamespace(_cuda_customAllocator=None, _GLIBCXX_USE_CXX11_ABI=True)
cuda = types.SimpleNamespace(
    get_allocator_backend=lambda: "native", is_initialized=lambda: False, device_count=lambda: 1
)
