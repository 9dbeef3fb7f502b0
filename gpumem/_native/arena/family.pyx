"""References of arenas, and their tags."""

from libc.stdint cimport int32_t
from libc.string cimport memset

from gpumem._native.arena.types cimport ArenaCore, root_of
from gpumem._native.budget cimport budget_move
from gpumem._native.driver cimport context_is_dead
from gpumem._support.atomics cimport count_add, count_retain_live, load64, publish_pointer
from gpumem._support.contexts cimport open_tags, OpenLink
from gpumem._support.events cimport event_sources_visit, EventSource, OWNER_ARENA
from gpumem._support.lock cimport lock_acquire, lock_release
from gpumem._support.memory cimport array_reserve
from gpumem._support.process cimport on_fork
from gpumem._support.retired cimport retire, Retired, take_retired

# Arenas without references; the next call that may block releases their memory to the driver.
# Finalizers put them here, because they must neither block nor call the driver.
cdef Retired* retired_arenas = NULL


# ---- references ----------------------------------------------------------------------------------

cdef void arena_retain(ArenaCore* arena) noexcept nogil:
    count_add(&arena.references, 1)


cdef bint arena_retain_live(ArenaCore* arena) noexcept nogil:
    return count_retain_live(&arena.references)


cdef void arena_drop(ArenaCore* arena) noexcept nogil:
    if count_add(&arena.references, -1) != 0 or context_is_dead(arena.context):
        return                      # in a fork's child the metadata stays as it was
    # For streams that cannot be named any more: a wait for the device that begins after this.
    arena.end_wait = load64(&arena.context.waits_begun) + 1
    arena_retire(arena)


cdef void arena_retire(ArenaCore* arena) noexcept nogil:
    retire(&retired_arenas, &arena.end, arena)


cdef Retired* arenas_take_retired() noexcept nogil:
    return take_retired(&retired_arenas)


cdef void arenas_find(Found* found) noexcept nogil:
    memset(found, 0, sizeof(found[0]))
    event_sources_visit(find_arena, found)


cdef void find_arena(EventSource* source, void* context) noexcept nogil:
    # Caller holds the lock of the event sources, so that the driver is queried later.
    cdef Found* found = <Found*>context
    cdef ArenaCore* arena = <ArenaCore*>source.owner
    if source.owner_is != OWNER_ARENA or not arena_retain_live(arena):
        return
    if not array_reserve(<void**>&found.arenas, &found.room, found.count + 1, 16,
                         sizeof(ArenaCore*)):
        found.failed = True
        arena_drop(arena)
        return
    found.arenas[found.count] = arena
    found.count += 1


cdef void forget_after_fork() noexcept nogil:
    global retired_arenas
    retired_arenas = NULL       # the parent's


on_fork(NULL, NULL, forget_after_fork)


# ---- tags ----------------------------------------------------------------------------------------

cdef void tag_count(ArenaCore* arena, int32_t by) noexcept nogil:
    count_add(&(<ArenaFront*>arena).detour, by)


cdef ArenaCore* tag_now(const ArenaCore* arena) noexcept nogil:
    cdef const OpenLink* each = open_tags(True)
    while each != NULL and (each.tag.arena != arena or each.tag.is_over):
        each = each.outer
    if each == NULL or each.tag.tagged == arena:
        return NULL
    return <ArenaCore*>each.tag.tagged


cdef void tag_adopt(ArenaCore* tagged, ArenaCore* arena) noexcept nogil:
    tagged.has_tag = True
    join(tagged, arena, &arena.tagged)


# ---- children ------------------------------------------------------------------------------------

cdef void pool_join(ArenaCore* pool, ArenaCore* owner, ArenaCore* part_of) noexcept nogil:
    cdef ArenaCore* root = <ArenaCore*>root_of(owner)
    # Memory of another allocator stays when the arena sleeps.
    if pool.backing.source == NULL:
        arena_retain(owner)
        pool.sleeps_with = owner
    if part_of != NULL:
        arena_retain(pool)
        pool.part_of = part_of
    join(pool, root, &root.pools)


cdef void join(ArenaCore* child, ArenaCore* parent, ArenaCore** first) noexcept nogil:
    arena_retain(parent)
    child.parent = parent
    budget_move(child.level, parent.level.parent)
    lock_acquire(&parent.lock)
    child.next_child = first[0]
    publish_pointer(<void**>first, child)       # shares_limit reads it without the lock
    lock_release(&parent.lock)


cdef void child_leave(ArenaCore* arena) noexcept nogil:
    cdef ArenaCore* parent = arena.parent
    cdef ArenaCore** link
    cdef ArenaCore* part
    if parent == NULL:
        return
    part = part_next(arena, NULL)
    while part != NULL:
        lock_acquire(&parent.lock)
        part.part_of = NULL
        lock_release(&parent.lock)
        arena_drop(part)        # the reference of the whole pool; the walk has its own
        part = part_next(arena, part)
    lock_acquire(&parent.lock)
    link = &parent.tagged if arena.has_tag else &parent.pools
    while link[0] != NULL and link[0] != arena:
        link = &link[0].next_child
    if link[0] == arena:
        publish_pointer(<void**>link, arena.next_child)
    lock_release(&parent.lock)
    if arena.sleeps_with != NULL:
        arena_drop(arena.sleeps_with)
    arena_drop(parent)


cdef ArenaCore* tag_next(ArenaCore* arena, ArenaCore* before) noexcept nogil:
    cdef ArenaCore* root = <ArenaCore*>root_of(arena)
    cdef ArenaCore* found = root
    if before == NULL:
        arena_retain(root)
        return root
    lock_acquire(&root.lock)
    # An arena that is ending has no references left, and stays in the list until it is freed.
    found = root.tagged if before == root else before.next_child
    while found != NULL and not arena_retain_live(found):
        found = found.next_child
    lock_release(&root.lock)
    arena_drop(before)
    return found


cdef ArenaCore* pool_next(ArenaCore* owner, ArenaCore* before) noexcept nogil:
    return pool_after(<ArenaCore*>root_of(owner), owner, NULL, before)


cdef ArenaCore* any_pool_next(ArenaCore* arena, ArenaCore* before) noexcept nogil:
    return pool_after(<ArenaCore*>root_of(arena), NULL, NULL, before)


cdef ArenaCore* part_next(ArenaCore* pool, ArenaCore* before) noexcept nogil:
    return pool_after(<ArenaCore*>root_of(pool), NULL, pool, before)


cdef ArenaCore* pool_after(ArenaCore* root, const ArenaCore* owner, const ArenaCore* whole,
                           ArenaCore* before) noexcept nogil:
    # Finds a pool of one owner, or a part of one whole pool; both NULL: any pool.
    cdef ArenaCore* found
    lock_acquire(&root.lock)
    found = root.pools if before == NULL else before.next_child
    while found != NULL and (owner != NULL and found.sleeps_with != owner
                             or whole != NULL and found.part_of != whole
                             or not arena_retain_live(found)):
        found = found.next_child
    lock_release(&root.lock)
    if before != NULL:
        arena_drop(before)
    return found
