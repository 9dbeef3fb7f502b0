/* Shadow marks: of every byte that was accessed, its last write and the reads since.
 *
 * They are disjoint spans in an address map. A write replaces the spans that it covers by
 * one; a read is added to the spans that it crosses, and to a new one where there was none.
 * Callers hold `lock` of order.c.
 */
#include "../device/internal.h"

#include <stdlib.h>

enum { READS = 4 }; /* readers kept per span; the oldest is dropped, so one can be missed */

typedef struct Span {
    Range range; /* base and size; first, so that the map's entries are spans */
    Access write;
    bool written;
    unsigned read_count;
    Access reads[READS];
} Span;

static AddressMap spans;

static Span *span_at(uintptr_t address) { return (Span *)host_map_after(&spans, address); }

static void span_add(uintptr_t base, uintptr_t end, const Span *like) {
    Span *span = calloc(1, sizeof *span);
    if (!span) return; /* without a mark nothing is found in these bytes */
    if (like) *span = *like;
    span->range.base = base;
    span->range.size = end - base;
    host_map_insert(&spans, &span->range);
}

/* Cuts the span that `at` lies inside of. */
static void span_split(uintptr_t at) {
    Span *span = span_at(at);
    if (!span || span->range.base >= at) return;
    uintptr_t end = span->range.base + span->range.size;
    span->range.size = at - span->range.base;
    span_add(at, end, span);
}

void host_shadow_forget(uintptr_t address, size_t size) {
    uintptr_t end = address + size;
    span_split(address);
    span_split(end);
    for (Span *span; (span = span_at(address)) && span->range.base < end;) {
        host_map_remove(&spans, &span->range);
        free(span);
    }
}

/* Returns the access that conflicts with this one, or NULL. */
static const Access *conflict(const Span *span, bool write, Ordered ordered, const void *data, bool *wrote) {
    *wrote = true;
    if (span->written && !ordered(&span->write, data)) return &span->write;
    *wrote = false;
    for (unsigned i = 0; write && i < span->read_count; i++)
        if (!ordered(&span->reads[i], data)) return &span->reads[i];
    return NULL;
}

static void span_read(Span *span, Access access) {
    for (unsigned i = 0; i < span->read_count; i++)
        if (span->reads[i].slot == access.slot) {
            span->reads[i] = access;
            return;
        }
    if (span->read_count == READS) {
        for (unsigned i = 1; i < READS; i++) span->reads[i - 1] = span->reads[i];
        span->read_count--;
    }
    span->reads[span->read_count++] = access;
}

static void report_conflict(Access access, Bytes bytes, bool write, Ordered ordered,
                            const void *data) {
    uintptr_t end = bytes.marks + bytes.size;
    for (Span *span = span_at(bytes.marks); span && span->range.base < end;) {
        uintptr_t next = span->range.base + span->range.size;
        bool wrote;
        const Access *other = conflict(span, write, ordered, data, &wrote);
        if (other) { /* one finding per access is enough */
            host_misuse_unordered(access, write, *other, wrote, bytes);
            return;
        }
        span = span_at(next);
    }
}

static void mark_read(Access access, uintptr_t address, uintptr_t end) {
    span_split(address);
    span_split(end);
    for (uintptr_t at = address; at < end;) {
        Span *span = span_at(at);
        uintptr_t begin = span && span->range.base < end ? span->range.base : end;
        if (begin > at) {
            Span fresh = {.read_count = 1, .reads = {access}};
            span_add(at, begin, &fresh);
            at = begin;
            continue;
        }
        span_read(span, access);
        at = span->range.base + span->range.size;
    }
}

void host_shadow_touch(Access access, Bytes bytes, bool write, Ordered ordered, const void *data) {
    uintptr_t end = bytes.marks + bytes.size;
    report_conflict(access, bytes, write, ordered, data);
    if (!write) {
        mark_read(access, bytes.marks, end);
        return;
    }
    host_shadow_forget(bytes.marks, bytes.size);
    span_add(bytes.marks, end, &(Span){.write = access, .written = true});
}

void host_shadow_reborn(void) { spans = (AddressMap){.root = NULL}; }
