"""Where regions come from."""

from gpumem._native.backing.device cimport (
    Backing, backing_frees_in_order, backing_init, backing_release, backing_reserve,
    backing_set_access, HOST_SIDE, listed_init, managed_advise, managed_init, managed_prefetch,
    Mapped, mapped_add, mapped_around, mapped_find,
)
from gpumem._native.backing.physical cimport (
    file_init, numa_init, numa_try, shared_export, shared_init, THE_DEVICE,
)
from gpumem._native.backing.pinned cimport (
    host_pages_end, host_pages_left, HostPages, pages_exist, pinned_begin, pinned_init, pinned_take,
)
