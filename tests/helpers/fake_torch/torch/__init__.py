"""As much of PyTorch as gpumem needs to be put in place of its allocator; it allocates nothing."""

import types

__version__ = "2.11.0"
version = types.SimpleNamespace(git_version="0" * 40)


class _Allocator:
    """A pluggable allocator, which takes every hook."""

    def __init__(self, allocate, free):
        pass

    def _take(self, address):
        pass

    set_init_fn = set_reset_fn = set_memory_fraction_fn = set_base_alloc_fn = _take
    set_record_stream_fn = set_begin_allocate_to_pool = set_end_allocate_to_pool_fn = _take
    set_release_pool = _take


_C = types.SimpleNamespace(_cuda_customAllocator=_Allocator, _GLIBCXX_USE_CXX11_ABI=True)
cuda = types.SimpleNamespace(
    get_allocator_backend=lambda: "native",
    is_initialized=lambda: False,
    device_count=lambda: 1,
    memory=types.SimpleNamespace(
        change_current_allocator=lambda allocator: None, _CUDAAllocator=lambda allocator: allocator
    ),
)
