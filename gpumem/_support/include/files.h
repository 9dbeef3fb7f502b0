/* Files that another process can change, and memory that processes share.
 *
 * A file that has a name is read and written by pread and pwrite, never mapped: an access of a
 * mapped page that another process has cut off the file ends the process by SIGBUS. Memory that
 * processes share is mapped, and is a file in memory that is sealed against shrinking.
 */
#ifndef GPUMEM_FILES_H
#define GPUMEM_FILES_H

#include <errno.h>
#include <fcntl.h>
#include <stdint.h>
#include <sys/mman.h>
#include <unistd.h>

/* Makes a file in memory of a size that stays: no process can remove pages from the others. -1: no
 * memory, or no descriptor. */
static inline int file_in_memory(const char *name, uint64_t nbytes) {
    int file = memfd_create(name, MFD_CLOEXEC | MFD_ALLOW_SEALING);
    if (file < 0 || (ftruncate(file, (off_t)nbytes) == 0 &&
                     fcntl(file, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL) == 0))
        return file;
    close(file);
    return -1;
}

/* Writes all bytes; returns 0 or an errno. */
static inline int file_write(int file, const void *bytes, size_t nbytes, uint64_t offset) {
    while (nbytes > 0) {
        ssize_t done = pwrite(file, bytes, nbytes, (off_t)offset);
        if (done < 0 && errno == EINTR) continue;
        if (done <= 0) return done < 0 ? errno : EIO;
        bytes = (const char *)bytes + done;
        offset += (uint64_t)done;
        nbytes -= (size_t)done;
    }
    return 0;
}

/* Reads all bytes; returns 0 or an errno: ENODATA, if the file has fewer bytes. */
static inline int file_read(int file, void *bytes, size_t nbytes, uint64_t offset) {
    while (nbytes > 0) {
        ssize_t done = pread(file, bytes, nbytes, (off_t)offset);
        if (done < 0 && errno == EINTR) continue;
        if (done <= 0) return done < 0 ? errno : ENODATA;
        bytes = (char *)bytes + done;
        offset += (uint64_t)done;
        nbytes -= (size_t)done;
    }
    return 0;
}

/* Adds samples to Fletcher's two sums, which depend on their order: the word at each KiB of the
 * addresses. They show bytes that another process has cut off and filled up; a sum of all bytes
 * takes as long as a third of the writing. */
static inline void file_sum(const void *bytes, size_t nbytes, uint64_t sums[2]) {
    const uint64_t *end = (const uint64_t *)((const char *)bytes + nbytes);
    const uint64_t *word = (const uint64_t *)(((uintptr_t)bytes + 1023) & ~(uintptr_t)1023);
    for (; word + 1 <= end; word += 128) sums[1] += sums[0] += *word;
}

#endif
