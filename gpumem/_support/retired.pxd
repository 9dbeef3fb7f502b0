"""Lists of retired things: nothing refers to them, and a thread that may block releases them.

A last reference may end on any thread, under any lock, inside a function of the driver's, and in a
fork's child. So retiring takes no lock, allocates nothing and calls nothing. One thread that may
wait for the device, or has the interpreter lock, takes the whole list and releases it.
"""

from gpumem._support.atomics cimport pointer_swap, pointer_try, published_pointer

# Lies in the thing itself.
cdef struct Retired:
    Retired* next
    void* thing

# May be called on any thread. The list is the latest retired thing; NULL: none.
cdef inline void retire(Retired** list, Retired* link, void* thing) noexcept nogil:
    link.thing = thing
    link.next = <Retired*>published_pointer(list)
    while not pointer_try(<void**>list, link.next, link):
        link.next = <Retired*>published_pointer(list)


# Takes the whole list, in the order of retiring. The caller reads `next` before it releases a
# thing.
cdef inline Retired* take_retired(Retired** list) noexcept nogil:
    cdef Retired* latest = NULL
    cdef Retired* first = NULL
    cdef Retired* older
    if published_pointer(list) != NULL:
        latest = <Retired*>pointer_swap(<void**>list, NULL)
    while latest != NULL:
        older = latest.next
        latest.next = first
        first = latest
        latest = older
    return first


# A queue of retired things, the oldest first. Its user guards it by a lock.
cdef struct RetiredQueue:
    Retired* oldest
    Retired* newest

cdef inline void queue_add(RetiredQueue* queue, Retired* link) noexcept nogil:
    link.next = NULL
    if queue.oldest == NULL:
        queue.oldest = link
    else:
        queue.newest.next = link
    queue.newest = link

# Moves a list to the end of a queue.
cdef inline void queue_retired(RetiredQueue* queue, Retired** list) noexcept nogil:
    cdef Retired* link = take_retired(list)
    cdef Retired* later
    while link != NULL:
        later = link.next
        queue_add(queue, link)
        link = later

# Moves a queue in front of another one.
cdef inline void queue_put_first(RetiredQueue* queue, const RetiredQueue* older) noexcept nogil:
    if older.oldest == NULL:
        return
    older.newest.next = queue.oldest
    queue.oldest = older.oldest
    if queue.newest == NULL:
        queue.newest = older.newest
