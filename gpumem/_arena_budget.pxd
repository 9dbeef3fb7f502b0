"""What an arena charges its budget: bytes that it holds, or bytes that it has handed out.

Held bytes are charged with the grow lock, before the driver is asked, and given back when the
driver has them, by one function that compares with the books (`arena_reconcile`). So whatever fails
half-way, at rest the account's `used` is what the arena holds. The fast path knows nothing of it.

Bytes handed out are charged around taking a block and given back with its free, whatever the
thread's cache then does with it: what a cache keeps is not in use.
"""

from libc.stdint cimport uint32_t, uint64_t

from gpumem._arena_types cimport ArenaCore, Block

# A graph pool charges what its arena charges, to an account of its own. False: no host memory.
cdef bint arena_join_as(ArenaCore* pool, const ArenaCore* arena) noexcept nogil
# With the grow lock: charges bytes that the driver will be asked for. False: the budget refuses.
cdef bint arena_charge(ArenaCore* arena, uint64_t nbytes) noexcept nogil
# The same for a region: as much of `wanted` as there is room for, at least `size`.
cdef bint arena_charge_region(ArenaCore* arena, uint64_t size, uint64_t* wanted) noexcept nogil
# The same for a suspended arena that takes its memory again.
cdef bint arena_charge_pages_anew(ArenaCore* arena) noexcept nogil
# With the grow lock, nothing under way: gives back what is charged beyond what it holds.
cdef void arena_reconcile(ArenaCore* arena) noexcept nogil
# Bytes up to which it may hold memory now; all ones without a budget.
cdef uint64_t arena_budget_bound(const ArenaCore* arena) noexcept nogil
# Could a block of this size ever be held?
cdef bint arena_budget_allows(const ArenaCore* arena, uint64_t nbytes) noexcept nogil
cdef void note_over_budget(ArenaCore* arena, uint64_t nbytes) noexcept nogil

# Charges a block in use: what is asked for before it is looked for, the rest of its size once it is
# found, because only then it is known. False: the budget refuses; nothing more is charged.
cdef bint charge_request(ArenaCore* arena, uint64_t nbytes) noexcept nogil
cdef bint charge_padding(ArenaCore* arena, uint64_t nbytes, const Block* block) noexcept nogil
# Bytes that a block counts for; 0: it is not counted, or the handle names no live block.
cdef uint64_t counted_bytes(ArenaCore* arena, uint64_t handle) noexcept nogil
cdef void count_out(ArenaCore* arena, uint64_t nbytes) noexcept nogil
