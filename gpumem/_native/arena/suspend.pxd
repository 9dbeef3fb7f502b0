"""Suspending a paged arena: its live bytes go to the host, its memory back, its addresses stay.

Suspending: nothing is handed out from here on; all work on the device ends; idle pages go; the live
blocks are copied, side by side, into host memory; every page is unmapped and released, but keeps
its place in the metadata. Resuming makes each page again, at its place, and copies back what is
still live. A block freed meanwhile is not copied, a page without a live byte not made.

The host memory is pageable, with huge pages: on an H200, 4 GiB take 0.9 s down (most of it the
kernel's first touch) and 0.4 s up; pinned memory copies in 0.08 s each way, but takes 1.6 s to be
made and given back.

A failure undoes: a suspend that fails leaves the arena running, a resume that fails leaves it
suspended, to be tried again.
"""

from gpumem._native.arena.types cimport ArenaCore

# With no lock held, without the interpreter. Nothing to do: ARENA_OK.
cdef int arena_suspend(ArenaCore* arena) noexcept nogil
cdef int arena_resume(ArenaCore* arena) noexcept nogil
# Frees the copy; no thread uses the arena any more.
cdef void copy_forget(ArenaCore* arena) noexcept nogil
