"""Caches of small blocks, one per thread and arena, in front of the arena's table.

A block of up to 64 KiB that is freed stays *kept*: in the cache of the thread that took it, in a
stack of blocks of exactly its size and stream. Taking one again costs neither search, split nor
merge, and no lock that other threads wait for. Each stack holds up to KEPT_DEPTH blocks; what does
not fit goes to the table.

A block that another thread frees is pushed onto its cache's `remote` list without a lock (a
Treiber stack that is only ever emptied whole, so that no entry can come back unnoticed: R. K.
Treiber, 1986). The owner collects it when a stack runs dry.

A cache's lock is its owner's alone in steady state. Whoever needs to see all free memory, before
growth, a shrink or statistics, flushes every cache. Order of locks: grow lock, caches lock, a
cache's lock, arena lock.

Sums stay exact although the table is not told: it counts kept chunks as used, `kept_bytes` of the
arena is what of that the caches have published. A cache remembers the least it kept since it last
published, so that for one thread the peak of bytes in use is exact; for several it is exact but for
what other threads' caches did since they published.
"""

from libc.stdint cimport uint32_t, uint64_t

from gpumem._arena_types cimport ArenaCore, Block, ThreadCache, ThreadMark
from gpumem._bfc cimport Chunk

cdef enum:
    KEPT_QUANTA = 256           # blocks of up to so many quanta, 64 KiB, are kept
    KEPT_BYTES = 65536
    KEPT_DEPTH = 16             # of each size and stream
    REMOTE_DEPTH = 64           # freed by other threads and not yet collected

# The calling thread's cache; NULL if it has none yet.
cdef ThreadCache* cache_find(const ArenaCore* arena) noexcept nogil
# The same, made or taken over from a thread that has ended; NULL if the host has no memory.
cdef ThreadCache* cache_make(ArenaCore* arena) noexcept nogil
# A small block is handed out to the calling thread: its cache is where it goes back to.
cdef void cache_own(ArenaCore* arena, Chunk* chunk) noexcept nogil
cdef bint cache_take(ArenaCore* arena, ThreadCache* cache, uint64_t requested, uint32_t slot,
                     Block* block) noexcept nogil
# False if the table has to take it.
cdef bint cache_give(ArenaCore* arena, uint64_t handle, uint32_t slot) noexcept nogil
# With the arena lock, by the cache's owner, before the table changes; NULL: nothing to publish.
cdef void cache_publish(ArenaCore* arena, ThreadCache* cache) noexcept nogil

# The calling thread, as a name that outlives it for whoever retains it; NULL: no host memory.
cdef ThreadMark* thread_now() noexcept nogil
cdef void thread_retain(ThreadMark* thread) noexcept nogil
cdef void thread_drop(ThreadMark* thread) noexcept nogil
cdef bint thread_has_ended(const ThreadMark* thread) noexcept nogil

# Everything kept becomes free, and every count is the arena's.
cdef void caches_flush(ArenaCore* arena) noexcept nogil
# The same, and no cache changes until it is thawed; the arena lock is not held yet.
cdef void caches_freeze(ArenaCore* arena) noexcept nogil
cdef void caches_thaw(ArenaCore* arena) noexcept nogil
cdef void caches_free(ArenaCore* arena) noexcept nogil
