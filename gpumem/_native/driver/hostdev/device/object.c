/* Handles: numbers that name slots; any number can be looked up safely.
 *
 *   63..58   57..52   51..44   43..20        19..0
 *   zero     kind     birth    generation    slot
 *
 * A slot's memory lives as long as the process, so a find races with nothing worse than
 * a stale object, which the object's own lock and a second comparison detect. After a
 * fork the tables start empty and the birth differs: the parent's handles find nothing.
 */
#include "internal.h"

#include <stdlib.h>
#include <string.h>

enum { INDEX_BITS = 20, GENERATION_BITS = 24, BIRTH_SHIFT = 44, KIND_SHIFT = 52 };

uint64_t host_handle_make(ObjectKind kind, uint32_t index, uint32_t generation) {
    uint64_t low = (uint64_t)(generation & ((1u << GENERATION_BITS) - 1)) << INDEX_BITS | index;
    return (uint64_t)kind << KIND_SHIFT | (uint64_t)(host.birth & 0xff) << BIRTH_SHIFT | low;
}

uint32_t host_handle_index(uint64_t handle) {
    return (uint32_t)(handle & ((1u << INDEX_BITS) - 1));
}

bool host_handle_is(uint64_t handle, ObjectKind kind) {
    return handle >> BIRTH_SHIFT == ((uint64_t)kind << 8 | (host.birth & 0xff));
}

void host_table_build(Table *table, ObjectKind kind, size_t size, void (*build)(void *)) {
    memset(table, 0, sizeof *table);
    table->kind = kind;
    table->size = size;
    table->build = build;
    pthread_mutex_init(&table->lock, NULL);
}

static Object *slot_at(Table *table, uint32_t index) {
    char *segment = atomic_load_explicit(&table->segments[index / SEGMENT_SLOTS],
                                         memory_order_acquire);
    return segment ? (Object *)(void *)(segment + (index % SEGMENT_SLOTS) * table->size) : NULL;
}

/* A slot never used before; NULL when memory or the 20 bits of index are used up. */
static Object *slot_new(Table *table) {
    uint32_t index = table->high;
    if (index / SEGMENT_SLOTS >= SEGMENT_COUNT) return NULL;
    if (index % SEGMENT_SLOTS == 0) {
        char *segment = calloc(SEGMENT_SLOTS, table->size);
        if (!segment) return NULL;
        atomic_store_explicit(&table->segments[index / SEGMENT_SLOTS], segment,
                              memory_order_release);
    }
    table->high++;
    Object *object = slot_at(table, index);
    object->index = index;
    pthread_mutex_init(&object->lock, NULL);
    if (table->build) table->build(object);
    return object;
}

static Object *slot_reuse(Table *table) {
    Object *object = table->oldest_free;
    table->oldest_free = object->next_free;
    if (!table->oldest_free) table->youngest_free = NULL;
    object->next_free = NULL;
    return object;
}

void *host_object_take(Table *table) {
    pthread_mutex_lock(&table->lock);
    Object *object = table->oldest_free ? slot_reuse(table) : slot_new(table);
    pthread_mutex_unlock(&table->lock);
    return object;
}

uint64_t host_object_publish(Table *table, void *pointer) {
    Object *object = pointer;
    uint64_t handle = host_handle_make(table->kind, object->index, ++object->generation);
    atomic_fetch_add(&table->live, 1);
    atomic_store_explicit(&object->handle, handle, memory_order_release);
    return handle;
}

bool host_object_hide(Table *table, void *pointer, uint64_t handle) {
    Object *object = pointer;
    if (!atomic_compare_exchange_strong(&object->handle, &handle, 0)) return false;
    atomic_fetch_sub(&table->live, 1);
    return true;
}

void host_object_give(Table *table, void *pointer) {
    Object *object = pointer;
    pthread_mutex_lock(&table->lock);
    object->next_free = NULL;
    if (table->youngest_free) table->youngest_free->next_free = object;
    else table->oldest_free = object;
    table->youngest_free = object;
    pthread_mutex_unlock(&table->lock);
}

void host_object_end(Table *table, void *pointer) {
    Object *object = pointer;
    host_object_hide(table, object, atomic_load(&object->handle));
    pthread_mutex_unlock(&object->lock);
    host_object_give(table, object);
}

void *host_object_find(Table *table, uint64_t handle) {
    if (!host_handle_is(handle, table->kind)) return NULL;
    Object *object = slot_at(table, host_handle_index(handle));
    if (!object || atomic_load_explicit(&object->handle, memory_order_acquire) != handle) return NULL;
    return object;
}

void *host_object_lock(Table *table, const void *handle) {
    uint64_t number = (uint64_t)(uintptr_t)handle;
    Object *object = host_object_find(table, number);
    if (!object) return NULL;
    pthread_mutex_lock(&object->lock);
    if (atomic_load(&object->handle) == number) return object;
    pthread_mutex_unlock(&object->lock); /* it ended before it was locked */
    return NULL;
}

/* Visits every slot ever used: the visitor checks under the object's lock whether it is live. */
void host_object_each(Table *table, void (*visit)(void *object, void *data), void *data) {
    pthread_mutex_lock(&table->lock);
    uint32_t high = table->high;
    pthread_mutex_unlock(&table->lock);
    for (uint32_t index = 0; index < high; index++) visit(slot_at(table, index), data);
}
