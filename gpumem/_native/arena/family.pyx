"""References of arenas, and their tags."""

from gpumem._native.arena.types cimport ArenaCore, root_of
from gpumem._native.driver cimport context_is_dead
from gpumem._support.atomics cimport count_add, count_retain_live, load64
from gpumem._support.lock cimport lock_acquire, lock_release
from gpumem._support.process cimport on_fork
from gpumem._support.retired cimport retire, Retired, take_retired

# Arenas without references; their memory goes back to the driver at the next call that may block.
# Finalizers put them here, because they must neither block nor call the driver.
cdef Retired* retired_arenas = NULL


cdef extern from *:
    """
    /* Of this module alone, as thread-local storage is; the innermost tag first. */
    static __thread void *opened_tags;
    static inline void *gm_opened_tags(void) { return opened_tags; }
    static inline void gm_set_opened_tags(void *tags) { opened_tags = tags; }
    """
    void* gm_opened_tags() noexcept nogil
    void gm_set_opened_tags(void* tags) noexcept nogil


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


cdef void forget_after_fork() noexcept nogil:
    global retired_arenas
    retired_arenas = NULL       # the parent's


on_fork(NULL, NULL, forget_after_fork)


# ---- tags ----------------------------------------------------------------------------------------

cdef void tag_open(OpenTag* tag) noexcept nogil:
    tag.outer = <OpenTag*>gm_opened_tags()
    gm_set_opened_tags(tag)
    count_add(&tag.arena.detour, 1)


cdef bint tag_close(OpenTag* tag) noexcept nogil:
    cdef OpenTag* each = <OpenTag*>gm_opened_tags()
    if each == tag:
        gm_set_opened_tags(tag.outer)
    else:
        # Generators may close them in another order.
        while each != NULL and each.outer != tag:
            each = each.outer
        if each == NULL:
            return False
        each.outer = tag.outer
    count_add(&tag.arena.detour, -1)
    return True


cdef ArenaCore* tag_now(const ArenaCore* arena) noexcept nogil:
    cdef OpenTag* each = <OpenTag*>gm_opened_tags()
    while each != NULL and each.arena != arena:
        each = each.outer
    if each == NULL or each.tagged == arena:
        return NULL
    return each.tagged


cdef void tag_adopt(ArenaCore* tagged, ArenaCore* arena) noexcept nogil:
    arena_retain(arena)
    tagged.parent = arena
    tagged.has_tag = True
    lock_acquire(&arena.lock)
    tagged.next_tagged = arena.tagged
    arena.tagged = tagged
    lock_release(&arena.lock)


cdef void tag_leave_parent(ArenaCore* arena) noexcept nogil:
    cdef ArenaCore** link = &arena.parent.tagged
    if not arena.has_tag:
        return
    lock_acquire(&arena.parent.lock)
    while link[0] != NULL and link[0] != arena:
        link = &link[0].next_tagged
    if link[0] == arena:
        link[0] = arena.next_tagged
    lock_release(&arena.parent.lock)


cdef ArenaCore* tag_next(ArenaCore* arena, ArenaCore* before) noexcept nogil:
    cdef ArenaCore* root = <ArenaCore*>root_of(arena)
    cdef ArenaCore* found = root
    if before == NULL:
        arena_retain(root)
        return root
    lock_acquire(&root.lock)
    # One that is ending has no references left, and stays in the list until it is gone.
    found = root.tagged if before == root else before.next_tagged
    while found != NULL and not arena_retain_live(found):
        found = found.next_tagged
    lock_release(&root.lock)
    arena_drop(before)
    return found
