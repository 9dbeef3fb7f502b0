/* Copies of bytes that the CPU will not read again soon.
 *
 * An ordinary store first reads the line of the cache that it writes to. A store past the caches does
 * not, so that the copy needs two thirds of the memory's bandwidth, and leaves the caches to others.
 */
#ifndef GPUMEM_PAST_CACHES_H
#define GPUMEM_PAST_CACHES_H

#include <stddef.h>
#include <stdint.h>
#include <string.h>

#ifdef __SSE2__
#include <emmintrin.h>
#endif

enum { LINE = 64 }; /* bytes */

static inline void copy_past_caches(void *to, const void *origin, size_t nbytes) {
    char *at = (char *)to;
    const char *from = (const char *)origin;
#ifdef __SSE2__
    size_t head = (size_t)(-(uintptr_t)at % LINE);
    if (head > nbytes) head = nbytes;
    memcpy(at, from, head);
    at += head, from += head, nbytes -= head;
    for (; nbytes >= LINE; at += LINE, from += LINE, nbytes -= LINE)
        for (size_t i = 0; i < LINE; i += sizeof(__m128i))
            _mm_stream_si128((__m128i *)(at + i), _mm_loadu_si128((const __m128i *)(from + i)));
    _mm_sfence(); /* other threads see the bytes before they see that the copy is done */
#endif
    memcpy(at, from, nbytes);
}

#endif
