"""Sleep of one arena: its memory goes back, its live bytes to a store, its addresses stay.

Going to sleep: nothing is handed out from here on; all work on the device ends; idle pages go; the
handles go back behind the copies of the live blocks, but each page keeps its place in the metadata.
Waking makes each page again, at its place, and copies back what is still live. A block freed
meanwhile is not copied, a page without a live byte not made.

A graph pool of a paged arena sleeps the same way: its regions are a handle each. So its graphs work
on after it has woken.

A failure undoes: a sleep that fails leaves the arena awake, a wake that fails leaves it asleep, to
be tried again. Where the undoing fails too, the arena is half asleep, and a wake completes it.
"""

from gpumem._native.arena.types cimport ArenaCore
from gpumem._native.pages cimport StorePlace

# With no lock held, without the interpreter. Nothing to do: ARENA_OK. `place`: where the bytes go;
# NULL: nowhere, they are dropped.
cdef int arena_sleep(ArenaCore* arena, const StorePlace* place) noexcept nogil
cdef int arena_wake(ArenaCore* arena) noexcept nogil
# Has it memory that can sleep?
cdef bint arena_can_sleep(const ArenaCore* arena) noexcept nogil
# Frees the copy; no thread uses the arena any more.
cdef void copy_forget(ArenaCore* arena) noexcept nogil
