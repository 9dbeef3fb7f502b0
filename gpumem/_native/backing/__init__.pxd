"""Backings: the memory of regions."""

from gpumem._native.backing.backing cimport (
    Backing, backing_frees_in_order, backing_init, backing_release, backing_reserve,
    backing_set_access, file_init, HOST_PAGE, host_pages_end, host_pages_left, HOST_SIDE,
    HostPages, listed_init, managed_advise, managed_init, managed_prefetch, Mapped, mapped_add,
    mapped_around, memory_create, memory_export, numa_init, numa_try, pages_exist, pinned_begin,
    pinned_init, pinned_take, shared_init, THE_DEVICE,
)
