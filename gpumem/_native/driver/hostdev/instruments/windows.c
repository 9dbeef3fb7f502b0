/* Windows' handles, rehearsed: what a driver there does with NT handles and names.
 *
 * While the rehearsal is on, the number of a descriptor stands for an NT handle, and the
 * name of a POSIX shared memory object for an object's name. As there, an import keeps a
 * reference of its own and the caller closes what he gave. The latest import of any kind
 * is kept, so that a test can read the driver's arguments.
 */
#include "../device/internal.h"

#include <fcntl.h>
#include <stdio.h>
#include <sys/mman.h>
#include <unistd.h>

static _Atomic bool rehearsing;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER; /* a leaf */
static HostdevImport latest;

bool rehearse_windows_on(void) { return atomic_load_explicit(&rehearsing, memory_order_relaxed); }
void hostdev_rehearse_windows(int on) { atomic_store(&rehearsing, on != 0); }
int hostdev_imports_windows_handles(void) { return rehearse_windows_on(); }

/* ---- names: UTF-16 to UTF-8 ---- */

static size_t put_utf8(char *to, uint32_t point) {
    if (point < 0x80) {
        to[0] = (char)point;
        return 1;
    }
    size_t more = point < 0x800 ? 1 : point < 0x10000 ? 2 : 3;
    static const unsigned char head[] = {0, 0xc0, 0xe0, 0xf0};
    to[0] = (char)(head[more] | point >> 6 * more);
    for (size_t i = 1; i <= more; i++) to[i] = (char)(0x80 | (point >> 6 * (more - i) & 0x3f));
    return more + 1;
}

/* False: half a surrogate pair, or too long. */
static bool name_decode(const void *utf16, char text[HOSTDEV_NAME_BYTES]) {
    const unsigned char *at = utf16; /* unaligned, perhaps; little end first, as there */
    size_t used = 0;
    for (;; at += 2) {
        uint32_t point = at[0] | (uint32_t)at[1] << 8;
        if (point >= 0xdc00 && point < 0xe000) return false;
        if (point >= 0xd800 && point < 0xdc00) {
            uint32_t low = at[2] | (uint32_t)at[3] << 8;
            if (low < 0xdc00 || low >= 0xe000) return false;
            point = 0x10000 + ((point - 0xd800) << 10) + (low - 0xdc00);
            at += 2;
        }
        if (used + 5 > HOSTDEV_NAME_BYTES) return false;
        if (point == 0) break;
        used += put_utf8(text + used, point);
    }
    text[used] = 0;
    return true;
}

/* ---- handles ---- */

/* A descriptor of our own. */
static CUresult handle_open(const GMexternalHandle *given, int *file) {
    char name[HOSTDEV_NAME_BYTES];
    uintptr_t number = (uintptr_t)given->win32.handle;
    if (!given->win32.handle == !given->win32.name) return CUDA_ERROR_INVALID_VALUE; /* one of both */
    if (!given->win32.name)
        *file = number <= INT32_MAX ? fcntl((int)number, F_DUPFD_CLOEXEC, 3) : -1;
    else
        *file = name_decode(given->win32.name, name) ? shm_open(name, O_RDWR | O_CLOEXEC, 0) : -1;
    return *file < 0 ? CUDA_ERROR_INVALID_HANDLE : CUDA_SUCCESS;
}

static CUresult flags_check(const CUDA_EXTERNAL_MEMORY_HANDLE_DESC *desc) {
    bool dedicated = desc->flags & CUDA_EXTERNAL_MEMORY_DEDICATED;
    switch (desc->type) {
    case CU_EXTERNAL_MEMORY_HANDLE_TYPE_D3D12_RESOURCE:
        return dedicated ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
    case CU_EXTERNAL_MEMORY_HANDLE_TYPE_D3D12_HEAP:
        return dedicated ? CUDA_ERROR_INVALID_VALUE : CUDA_SUCCESS;
    case CU_EXTERNAL_MEMORY_HANDLE_TYPE_OPAQUE_WIN32: return CUDA_SUCCESS;
    default: return CUDA_ERROR_NOT_SUPPORTED;
    }
}

CUresult rehearse_windows_memory(CUexternalMemory *out, const CUDA_EXTERNAL_MEMORY_HANDLE_DESC *desc) {
    int file;
    if (!rehearse_windows_on()) return CUDA_ERROR_NOT_SUPPORTED;
    HOST_TRY(flags_check(desc));
    HOST_TRY(handle_open(&desc->handle, &file));
    CUresult result = host_memory_import(out, file, desc->size);
    if (result != CUDA_SUCCESS) close(file);
    return result;
}

CUresult rehearse_windows_semaphore(CUexternalSemaphore *out, const GMexternalHandle *handle) {
    int file;
    if (!rehearse_windows_on()) return CUDA_ERROR_NOT_SUPPORTED;
    HOST_TRY(handle_open(handle, &file));
    CUresult result = host_semaphore_import(out, file, false);
    if (result != CUDA_SUCCESS) close(file);
    return result;
}

/* ---- the arguments of the latest import ---- */

static uint32_t any_set(const unsigned int reserved[16]) {
    uint32_t bits = 0;
    for (int i = 0; i < 16; i++) bits |= reserved[i];
    return bits;
}

static void keep(HostdevImport import, const GMexternalHandle *given, bool file) {
    import.handle = file ? (uint64_t)given->fd : (uint64_t)(uintptr_t)given->win32.handle;
    if (!file && given->win32.name && !name_decode(given->win32.name, import.name))
        snprintf(import.name, sizeof import.name, "?");
    pthread_mutex_lock(&lock);
    import.number = latest.number + 1;
    latest = import;
    pthread_mutex_unlock(&lock);
}

void rehearse_note_memory(const CUDA_EXTERNAL_MEMORY_HANDLE_DESC *desc) {
    bool file = desc->type == CU_EXTERNAL_MEMORY_HANDLE_TYPE_OPAQUE_FD ||
                desc->type == CU_EXTERNAL_MEMORY_HANDLE_TYPE_DMABUF_FD;
    HostdevImport import = {.kind = HOSTDEV_MEMORY, .type = desc->type, .flags = desc->flags,
                            .size = desc->size, .reserved = any_set(desc->reserved)};
    keep(import, &desc->handle, file);
}

void rehearse_note_semaphore(const CUDA_EXTERNAL_SEMAPHORE_HANDLE_DESC *desc) {
    bool file = desc->type == CU_EXTERNAL_SEMAPHORE_HANDLE_TYPE_OPAQUE_FD ||
                desc->type == CU_EXTERNAL_SEMAPHORE_HANDLE_TYPE_TIMELINE_SEMAPHORE_FD;
    HostdevImport import = {.kind = HOSTDEV_SEMAPHORE, .type = desc->type, .flags = desc->flags,
                            .reserved = any_set(desc->reserved)};
    keep(import, &desc->handle, file);
}

void hostdev_last_import(HostdevImport *import) {
    pthread_mutex_lock(&lock);
    *import = latest;
    pthread_mutex_unlock(&lock);
}
