/* The machine's free memory. */
#ifndef GPUMEM_MEMINFO_H
#define GPUMEM_MEMINFO_H

#include <stdint.h>
#include <stdio.h>

/* Bytes that the kernel can hand out without swapping, other processes' use counted; 0: unknown. */
static inline uint64_t memory_available(void) {
    char line[128];
    unsigned long long kib = 0;
    FILE *file = fopen("/proc/meminfo", "re");
    while (file && fgets(line, sizeof line, file))
        if (sscanf(line, "MemAvailable: %llu", &kib) == 1) break;
    if (file) fclose(file);
    return (uint64_t)kib << 10;
}

#endif
