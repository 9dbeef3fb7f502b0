/* A pool's memory: segments charged to the device, cut into blocks that are reused in
 * stream order.
 *
 * A freed block keeps the point in its stream where it was freed. It may be allocated for
 *   the same stream                       always: its queue orders the two uses;
 *   a stream that waited for that point   if the pool follows event dependencies;
 *   any stream, once the point passed     if reuse is opportunistic;
 *   any stream, which then waits for it   if internal dependencies are allowed.
 * Free neighbours merge when one point covers both.
 */
#include "../device/internal.h"

#include <fcntl.h>
#include <stdlib.h>
#include <sys/mman.h>

static const size_t SEGMENT_BYTES = (size_t)32 << 20; /* the unit of growth on an H200 */

/* ---- blocks ---- */

static void free_list_add(Pool *pool, Block *block) {
    block->free_before = NULL;
    block->free_after = pool->free_blocks;
    if (block->free_after) block->free_after->free_before = block;
    pool->free_blocks = block;
}

static void free_list_remove(Pool *pool, Block *block) {
    if (block->free_before) block->free_before->free_after = block->free_after;
    else pool->free_blocks = block->free_after;
    if (block->free_after) block->free_after->free_before = block->free_before;
}

/* Cuts the tail off a free block; the tail inherits its point. If malloc fails, the block
 * stays whole. */
static void block_trim(Pool *pool, Block *block, size_t size) {
    if (block->size == size) return;
    Block *tail = calloc(1, sizeof *tail);
    if (!tail) return;
    tail->segment = block->segment;
    tail->base = block->base + size;
    tail->size = block->size - size;
    tail->freed = block->freed;
    tail->before = block;
    tail->after = block->after;
    if (tail->after) tail->after->before = tail;
    block->after = tail;
    block->size = size;
    free_list_add(pool, tail);
}

static bool one_point_for_both(Block *left, Block *right) {
    return left->freed.stream == right->freed.stream ||
           (host_point_done(left->freed) && host_point_done(right->freed));
}

static void block_absorb_next(Pool *pool, Block *block) {
    Block *next = block->after;
    if (!next || next->used || !one_point_for_both(block, next)) return;
    if (host_point_done(block->freed) ||
        (next->freed.stream == block->freed.stream && next->freed.seq > block->freed.seq))
        block->freed = next->freed;
    block->size += next->size;
    block->after = next->after;
    if (block->after) block->after->before = block;
    free_list_remove(pool, next);
    free(next);
}

/* ---- segments ---- */

static bool on_device(const Pool *pool) {
    return pool->props.location.type == CU_MEM_LOCATION_TYPE_DEVICE;
}

static void *pages_of_file(Pool *pool, Segment *segment, size_t size) {
    void *pages = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE, pool->file,
                       (off_t)pool->file_high);
    if (pages == MAP_FAILED) return NULL;
    segment->offset = pool->file_high;
    pool->file_high += size;
    return pages;
}

static Segment *segment_map(Pool *pool, size_t size) {
    Segment *segment = calloc(1, sizeof *segment);
    Block *block = calloc(1, sizeof *block);
    Range *range = host_range_new(RANGE_SEGMENT, 0, size, NULL);
    void *pages = NULL;
    if (segment && block && range)
        pages = pool->file >= 0 ? pages_of_file(pool, segment, size) : host_pages_map(size, HOST_BLOCK);
    if (!pages) {
        free(segment);
        free(block);
        free(range);
        return NULL;
    }
    range->base = (uintptr_t)pages;
    range->flags = (unsigned)pool->props.location.type;
    range->device = on_device(pool) ? pool->props.location.id : 0;
    range->owner = segment;
    *block = (Block){.segment = segment, .base = range->base, .size = size};
    segment->pool = pool;
    segment->range = range;
    segment->first = block;
    return segment;
}

static CUresult segment_add(Pool *pool, size_t size) {
    int device = pool->props.location.id;
    if (pool->props.maxSize && pool->reserved + size > pool->props.maxSize)
        return CUDA_ERROR_OUT_OF_MEMORY;
    if (on_device(pool)) HOST_TRY(host_device_charge(device, size));
    Segment *segment = segment_map(pool, size);
    if (!segment) {
        if (on_device(pool)) host_device_refund(device, size);
        return CUDA_ERROR_OUT_OF_MEMORY;
    }
    segment->next = pool->segments;
    pool->segments = segment;
    free_list_add(pool, segment->first);
    pool->reserved += size;
    if (pool->reserved > pool->reserved_high) pool->reserved_high = pool->reserved;
    host_range_add(segment->range);
    return CUDA_SUCCESS;
}

/* Adds a multiple of SEGMENT_BYTES if the device has it, else only the needed bytes. */
static CUresult pool_grow(Pool *pool, size_t size) {
    size_t needed = host_round_up(size, HOST_BLOCK);
    size_t chunk = host_round_up(size, SEGMENT_BYTES);
    if (chunk != needed && segment_add(pool, chunk) == CUDA_SUCCESS) return CUDA_SUCCESS;
    return segment_add(pool, needed);
}

/* Whether every block is free and its point has passed, so that nothing can still write there. */
static bool segment_is_quiet(const Segment *segment) {
    if (segment->used > 0) return false;
    for (Block *block = segment->first; block; block = block->after)
        if (!host_point_done(block->freed)) return false;
    return true;
}

static void segment_remove(Pool *pool, Segment **hook) {
    Segment *segment = *hook;
    Range *range = segment->range;
    *hook = segment->next;
    pool->reserved -= range->size;
    for (Block *block = segment->first, *after; block; block = after) {
        after = block->after;
        free_list_remove(pool, block);
        free(block);
    }
    pthread_rwlock_wrlock(&host.map_lock);
    host_map_remove(&host.ranges, range);
    pthread_rwlock_unlock(&host.map_lock);
    munmap((void *)range->base, range->size);
    if (pool->file >= 0)
        fallocate(pool->file, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, (off_t)segment->offset,
                  (off_t)range->size);
    if (on_device(pool)) host_device_refund(pool->props.location.id, range->size);
    free(range);
    free(segment);
}

void host_pool_shrink(Pool *pool, uint64_t keep) {
    Segment **hook = &pool->segments;
    while (*hook && pool->reserved > keep) {
        bool fits = pool->reserved - (*hook)->range->size >= keep;
        if (fits && segment_is_quiet(*hook)) segment_remove(pool, hook);
        else hook = &(*hook)->next;
    }
}

/* ---- take and give ---- */

typedef enum Claim { CLAIM_NONE, CLAIM_WAIT, CLAIM_NOW } Claim; /* in order of preference */

static Claim claim(const Pool *pool, const Stream *stream, const Block *block) {
    Point freed = block->freed;
    if (!freed.stream || freed.stream == stream) return CLAIM_NOW;
    if (pool->opportunistic && host_point_done(freed)) return CLAIM_NOW;
    if (pool->follow_events && host_stream_has_seen(stream, freed)) return CLAIM_NOW;
    return pool->internal_dependencies ? CLAIM_WAIT : CLAIM_NONE;
}

/* Finds the best fit among blocks that need no wait, else among the others. */
static Block *block_find(Pool *pool, const Stream *stream, size_t size) {
    Block *best = NULL;
    Claim best_claim = CLAIM_NONE;
    for (Block *block = pool->free_blocks; block; block = block->free_after) {
        if (block->size < size) continue;
        Claim how = claim(pool, stream, block);
        bool better = how > best_claim || (how == best_claim && best && block->size < best->size);
        if (how == CLAIM_NONE || !better) continue;
        best = block;
        best_claim = how;
        if (how == CLAIM_NOW && block->size == size) break;
    }
    return best;
}

static void block_use(Pool *pool, Block *block, Range *range) {
    free_list_remove(pool, block);
    block->used = true;
    block->range = range;
    block->segment->used += block->size;
    pool->used += range->size; /* requested bytes; the device is charged more */
    if (pool->used > pool->used_high) pool->used_high = pool->used;
    range->base = block->base;
    range->owner = block;
    range->flags = block->segment->range->flags;
    range->device = block->segment->range->device;
    pthread_rwlock_wrlock(&host.map_lock);
    host_map_insert(&host.pooled, range);
    pthread_rwlock_unlock(&host.map_lock);
}

CUresult host_block_take(Pool *pool, Stream *stream, size_t size, Block **out) {
    size_t rounded = host_round_up(size, HOST_SMALL_UNIT);
    Block *block = block_find(pool, stream, rounded);
    if (!block) {
        HOST_TRY(pool_grow(pool, rounded));
        block = block_find(pool, stream, rounded);
    }
    Range *range = block ? host_range_new(RANGE_POOLED, 0, size, NULL) : NULL;
    CUresult result = range ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY;
    if (range && claim(pool, stream, block) == CLAIM_WAIT)
        result = host_stream_wait_point(stream, block->freed);
    if (result != CUDA_SUCCESS) {
        free(range);
        return result;
    }
    block_trim(pool, block, rounded);
    block_use(pool, block, range);
    *out = block;
    return CUDA_SUCCESS;
}

void host_block_give(Block *block, Point freed) {
    Pool *pool = block->segment->pool;
    pool->used -= block->range->size;
    block->segment->used -= block->size;
    pthread_rwlock_wrlock(&host.map_lock);
    host_map_remove(&host.pooled, block->range);
    pthread_rwlock_unlock(&host.map_lock);
    free(block->range);
    block->range = NULL;
    block->used = false;
    block->freed = freed;
    free_list_add(pool, block);
    block_absorb_next(pool, block);
    if (block->before && !block->before->used) block_absorb_next(pool, block->before);
}
