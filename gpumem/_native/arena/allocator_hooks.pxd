"""Arenas that serve C hooks of other libraries: streams by native handle, blocks by address.

An `AllocatorHook` is one arena for such callers. The blocks of all hooks are in one table, by
address, because a hook's free may name nothing else of a block. None of it needs the interpreter,
and every function may be called from any thread.

It is a hash table with linear probing, in shards with a lock each; an entry is removed before its
block is freed, so that an address that is allocated again never meets its old entry. The block is
then freed with the shard's lock held, in the order shard, cache, arena. So a live block takes no
reference to its hook: the end of a hook visits every shard. As long as one thread alone calls
hooks, a pair of calls has no atomic operation.
"""

from libc.stdint cimport int32_t, uint32_t, uint64_t, uint8_t

from gpumem._native.arena.types cimport ArenaCore
from gpumem._native.arena.values cimport (
    HOOK_KINDS, HOOK_LARGE, HOOK_SMALL, HookBlock, HookCounts, HookKind, HookLive, HookSums,
)
from gpumem._native.driver cimport CUstream
from gpumem._support.lock cimport Lock, OwnerLock

cdef enum:
    HOOK_SHARDS = 64        # of the table
    HOOK_STREAMS = 64       # that a hook remembers by handle; others are searched at every use

cdef struct StreamName:
    uint64_t handle
    uint32_t slot           # of the arena; retained by the hook

cdef struct AllocatorHook "AllocatorHook":
    ArenaCore* arena        # a reference
    # Callers that may allocate (atomic). When the last one ends, each live block gets a reference.
    int32_t owners
    # References to its memory (atomic): one of all owners, those of `hooks_of` and of calls that
    # free; once the owners have ended, one of each live block.
    int32_t references
    uint32_t live[HOOK_SHARDS]  # blocks in each shard, with its lock
    uint8_t framework       # that calls it, by its number in _support/events
    uint64_t label[2]       # by which its caller knows it; gpumem does not read it
    AllocatorHook* counted  # another hook that counts its blocks, a reference; NULL: none
    AllocatorHook* next     # in the list of all hooks
    AllocatorHook* counter  # that counts its blocks: this one, `counted`, or NULL: none
    OwnerLock counting      # of `counts`; the last to be taken
    HookCounts counts
    uint32_t count          # of `names`; only rises, read without the lock
    Lock lock               # of adding one
    StreamName names[HOOK_STREAMS]

# NULL: out of host memory. `hook_drop` ends an owner's reference. `counts`: whether sums and peaks
# of its blocks are kept, for which each call takes one more lock; `counted`: the hook that keeps
# them, NULL: the new one.
cdef AllocatorHook* hook_create(ArenaCore* arena, AllocatorHook* counted, bint counts,
                                uint8_t framework) noexcept nogil
cdef void hook_retain(AllocatorHook* hook) noexcept nogil
cdef void hook_drop(AllocatorHook* hook) noexcept nogil
# Ends a reference of `hooks_of`.
cdef void hook_let_go(AllocatorHook* hook) noexcept nogil

# A block of at least one byte for work on the stream; an ArenaStatus. `flags` are AllocateFlags: a
# persistent block is also given to a stream that captures.
cdef int hook_allocate(AllocatorHook* hook, uint64_t nbytes, CUstream stream, uint32_t flags,
                       uint64_t* address) noexcept nogil
# Allocates exactly the bytes of an earlier block, after all work of the arena's streams is done;
# see arena_allocate_range.
cdef int hook_allocate_range(AllocatorHook* hook, uint64_t address, uint64_t size, uint64_t nbytes,
                             CUstream stream) noexcept nogil
# Frees a block on the stream it was allocated for. ARENA_STALE: no live block of a hook begins
# there. ARENA_OK too where the block is left to the driver, or may be a parent process's.
cdef int hook_free(uint64_t address) noexcept nogil
# The same on another stream, which waits for all uses of the block by then. Any other status: the
# block is as before.
cdef int hook_free_on(uint64_t address, CUstream stream) noexcept nogil
# Another stream uses the block, too: it is allocated again only after that use.
cdef int hook_record(uint64_t address, CUstream stream) noexcept nogil
# False: no live block of a hook begins at the address.
cdef bint hook_find(uint64_t address, HookBlock* block) noexcept nogil
# The arena of the block at the address, with a reference for the caller, and the bytes requested
# for the block; NULL: no live block of a hook begins there.
cdef ArenaCore* hook_arena(uint64_t address, uint64_t* nbytes) noexcept nogil
# Notes that other processes have the block's memory: until its free its arena counts it among
# `shared_blocks`. ARENA_STALE: no live block of a hook begins there. ARENA_NO_METADATA.
cdef int hook_share(uint64_t address) noexcept nogil
# Finds at most `most` hooks of a framework, ended ones with live blocks too, each with a reference
# for the caller, which does not allow allocation; returns how many.
cdef uint64_t hooks_of(uint8_t framework, AllocatorHook** found, uint64_t most) noexcept nogil
# Copies address and framework (NULL: not wanted) of up to `most` live blocks of an arena; returns
# how many there are.
cdef uint64_t hooks_blocks(const ArenaCore* arena, uint64_t* addresses, uint8_t* frameworks,
                           uint64_t most) noexcept nogil
# Adds the requested bytes of an arena's live blocks to the sums of their callers' frameworks.
cdef void hooks_bytes(const ArenaCore* arena, uint64_t* by_framework) noexcept nogil
cdef HookCounts hook_counts(AllocatorHook* hook) noexcept nogil
# Returns how many live blocks a hook has that has an owner.
cdef uint64_t hook_live(const AllocatorHook* hook) noexcept nogil
# Returns the highest sums of both kinds since the last call, and those of now.
cdef HookLive hook_peak_since(AllocatorHook* hook, HookLive* now) noexcept nogil
# Sets the peaks to what is in use now.
cdef void hook_reset_peak(AllocatorHook* hook) noexcept nogil
