/* The machine's memory, and the limits of the process's control groups. */
#ifndef GPUMEM_MEMINFO_H
#define GPUMEM_MEMINFO_H

#include <inttypes.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>

#define CONTROL_GROUPS "/sys/fs/cgroup"

/* Bytes; UINT64_MAX: no control group has a limit. */
typedef struct GroupMemory {
    uint64_t limit; /* the minimum of the process's group and those above it */
    uint64_t room;  /* the minimum that is free below one, other processes' use counted */
} GroupMemory;

/* One version of control groups: where it is mounted, its files, and the lines of memory.stat that
 * count cached files. */
typedef struct GroupFiles {
    const char *folder, *limit, *used, *inactive, *active;
} GroupFiles;

/* The number after a word, or the first one for "". UINT64_MAX: none, such as "max". */
static inline uint64_t group_number(const char *folder, const char *name, const char *word) {
    char path[4096], line[256];
    uint64_t found = UINT64_MAX;
    size_t length = strlen(word);
    if (snprintf(path, sizeof path, "%s/%s", folder, name) >= (int)sizeof path) return found;
    FILE *file = fopen(path, "re");
    while (file && fgets(line, sizeof line, file))
        if (strncmp(line, word, length) == 0 && sscanf(line + length, "%" SCNu64, &found) == 1)
            break;
    if (file) fclose(file);
    return found;
}

static inline void group_add(const char *folder, const GroupFiles *files, GroupMemory *memory) {
    uint64_t limit = group_number(folder, files->limit, "");
    if (limit >= UINT64_C(1) << 60) return;
    uint64_t used = group_number(folder, files->used, ""), room = limit;
    uint64_t inactive = group_number(folder, "memory.stat", files->inactive);
    uint64_t active = group_number(folder, "memory.stat", files->active);
    uint64_t cache = (inactive == UINT64_MAX ? 0 : inactive) + (active == UINT64_MAX ? 0 : active);
    if (used != UINT64_MAX) {
        used = used > cache ? used - cache : 0;
        room = used < limit ? limit - used : 0;
    }
    if (limit < memory->limit) memory->limit = limit;
    if (room < memory->room) memory->room = room;
}

/* From the process's own group, "" where it cannot be seen, up to the folder of all. */
static inline void groups_add(const char *groups, char *group, const GroupFiles *files,
                              GroupMemory *memory) {
    char path[4096];
    for (;;) {
        if (snprintf(path, sizeof path, "%s%s%s", groups, files->folder, group) >= (int)sizeof path)
            return;
        group_add(path, files, memory);
        char *end = strrchr(group, '/');
        if (end == NULL) return;
        *end = 0;
    }
}

/* `groups`: where control groups are mounted. */
static inline GroupMemory group_memory(const char *groups) {
    static const GroupFiles second = {"", "memory.max", "memory.current", "inactive_file ",
                                      "active_file "};
    static const GroupFiles first = {"/memory", "memory.limit_in_bytes", "memory.usage_in_bytes",
                                     "total_inactive_file ", "total_active_file "};
    GroupMemory memory = {UINT64_MAX, UINT64_MAX};
    char line[2048], own[2048] = "", of_memory[2048] = "";
    FILE *file = fopen("/proc/self/cgroup", "re"); /* number:controllers:group */
    while (file && fgets(line, sizeof line, file)) {
        line[strcspn(line, "\n")] = 0;
        char *controllers = strchr(line, ':');
        char *group = controllers ? strchr(controllers + 1, ':') : NULL;
        if (group == NULL) continue;
        *group++ = 0;
        if (controllers[1] == 0) strcpy(own, group);
        if (strcmp(controllers + 1, "memory") == 0) strcpy(of_memory, group);
    }
    if (file) fclose(file);
    groups_add(groups, own, &second, &memory);
    groups_add(groups, of_memory, &first, &memory);
    return memory;
}

/* Bytes that the kernel can allocate without swapping, other processes' use counted; 0: unknown. */
static inline uint64_t memory_available_in(GroupMemory group) {
    uint64_t kib = group_number("/proc", "meminfo", "MemAvailable:"), room = group.room;
    if (kib != UINT64_MAX && kib != 0 && kib << 10 < room) return kib << 10;
    if (room == UINT64_MAX) return 0;
    return room ? room : 1; /* 0 would mean unknown, but nothing is left */
}

static inline uint64_t memory_available(const char *groups) {
    return memory_available_in(group_memory(groups));
}

#endif
