/* Devices: their number, their size, their attributes. */
#include "internal.h"
#include "meminfo.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

/* ---- size ---- */

static char control_groups[4096] = CONTROL_GROUPS;

int hostdev_use_control_groups(const char *folder) {
    if (!folder || strlen(folder) >= sizeof control_groups) return CUDA_ERROR_INVALID_VALUE;
    strcpy(control_groups, folder);
    return CUDA_SUCCESS;
}

size_t host_default_capacity(bool *is_simulated) {
    *is_simulated = true;
    const char *wanted = getenv("GPUMEM_HOST_CAPACITY");
    if (wanted && *wanted && strspn(wanted, "0123456789") == strlen(wanted)) {
        errno = 0; /* the Python module warns of a value that is not accepted */
        unsigned long long bytes = strtoull(wanted, NULL, 10);
        if (errno == 0 && bytes > 0) return (size_t)bytes;
    }
    *is_simulated = false;
    size_t bytes = (size_t)sysconf(_SC_PHYS_PAGES) * (size_t)sysconf(_SC_PAGE_SIZE);
    uint64_t limit = group_memory(control_groups).limit;
    return limit && limit < bytes ? limit : bytes;
}

CUresult host_device_charge(int device, size_t bytes) {
    Device *at = &host.devices[device];
    size_t used = atomic_load(&at->used);
    do {
        size_t capacity = atomic_load(&at->capacity);
        if (bytes > capacity || used > capacity - bytes) return CUDA_ERROR_OUT_OF_MEMORY;
    } while (!atomic_compare_exchange_weak(&at->used, &used, used + bytes));
    return CUDA_SUCCESS;
}

void host_device_refund(int device, size_t bytes) {
    atomic_fetch_sub(&host.devices[device].used, bytes);
}

static bool ordinal_exists(int ordinal) { return ordinal >= 0 && ordinal < HOSTDEV_MAX_DEVICES; }

int hostdev_set_capacity(int ordinal, size_t bytes) {
    host_setup();
    if (!ordinal_exists(ordinal) || bytes == 0) return CUDA_ERROR_INVALID_VALUE;
    bool is_simulated;
    size_t machine = host_default_capacity(&is_simulated); /* so a size can be set back */
    atomic_store(&host.devices[ordinal].capacity, bytes);
    atomic_store(&host.devices[ordinal].is_simulated, is_simulated || bytes != machine);
    return CUDA_SUCCESS;
}

size_t hostdev_capacity(int ordinal) {
    host_setup();
    return ordinal_exists(ordinal) ? atomic_load(&host.devices[ordinal].capacity) : 0;
}

size_t hostdev_used(int ordinal) {
    return ordinal_exists(ordinal) ? atomic_load(&host.devices[ordinal].used) : 0;
}

size_t host_device_free(int device) {
    Device *at = &host.devices[device];
    size_t capacity = hostdev_capacity(device), used = hostdev_used(device);
    size_t free_bytes = used < capacity ? capacity - used : 0;
    if (atomic_load(&at->is_simulated)) return free_bytes;
    size_t available = memory_available(control_groups);
    return available && available < free_bytes ? available : free_bytes;
}

/* ---- count ---- */

int hostdev_set_device_count(int n) {
    host_setup();
    if (n < 1 || n > HOSTDEV_MAX_DEVICES) return CUDA_ERROR_INVALID_VALUE;
    pthread_mutex_lock(&host.setup_lock);
    bool settled = atomic_load(&host.device_used) && n != atomic_load(&host.device_count);
    if (!settled) atomic_store(&host.device_count, n);
    pthread_mutex_unlock(&host.setup_lock);
    return settled ? CUDA_ERROR_ILLEGAL_STATE : CUDA_SUCCESS;
}

int hostdev_device_count(void) {
    host_setup();
    return atomic_load(&host.device_count);
}

CUresult host_device_check(CUdevice device) {
    return device >= 0 && device < atomic_load(&host.device_count) ? CUDA_SUCCESS
                                                                   : CUDA_ERROR_INVALID_DEVICE;
}

CUresult host_cuDeviceGetCount(int *count) {
    ENTER(DeviceGetCount);
    if (!count) return CUDA_ERROR_INVALID_VALUE;
    *count = atomic_load(&host.device_count);
    return CUDA_SUCCESS;
}

CUresult host_cuDeviceGet(CUdevice *device, int ordinal) {
    ENTER(DeviceGet);
    if (!device) return CUDA_ERROR_INVALID_VALUE;
    HOST_TRY(host_device_check(ordinal));
    *device = ordinal;
    return CUDA_SUCCESS;
}

/* ---- access between devices ---- */

bool host_device_reaches(int device, int peer) {
    return !(atomic_load(&host.devices[device].separate) >> peer & 1);
}

int hostdev_separate(int one, int other, int on) {
    host_setup();
    if (!ordinal_exists(one) || !ordinal_exists(other) || one == other) return CUDA_ERROR_INVALID_VALUE;
    int ends[2] = {one, other};
    for (int i = 0; i < 2; i++) {
        uint64_t bit = (uint64_t)1 << ends[1 - i];
        if (on) atomic_fetch_or(&host.devices[ends[i]].separate, bit);
        else atomic_fetch_and(&host.devices[ends[i]].separate, ~bit);
    }
    return CUDA_SUCCESS;
}

/* ---- attributes ---- */

CUresult host_cuDeviceGetName(char *name, int length, CUdevice device) {
    ENTER(DeviceGetName);
    if (!name || length <= 0) return CUDA_ERROR_INVALID_VALUE;
    HOST_TRY(host_device_check(device));
    snprintf(name, (size_t)length, "gpumem host device %d", device);
    return CUDA_SUCCESS;
}

/* The same in every process, so that two processes agree on which device a handle is of. */
CUresult host_cuDeviceGetUuid(CUuuid *uuid, CUdevice device) {
    ENTER(DeviceGetUuid);
    if (!uuid) return CUDA_ERROR_INVALID_VALUE;
    HOST_TRY(host_device_check(device));
    memcpy(uuid->bytes, "gpumem-host-dev", 15);
    uuid->bytes[15] = (char)device;
    return CUDA_SUCCESS;
}

CUresult host_cuDeviceTotalMem(size_t *bytes, CUdevice device) {
    ENTER(DeviceTotalMem);
    if (!bytes) return CUDA_ERROR_INVALID_VALUE;
    HOST_TRY(host_device_check(device));
    *bytes = hostdev_capacity(device);
    return CUDA_SUCCESS;
}

/* Compute capability and processor count are an H200's, so that libraries which
 * require a minimum go on; nothing can be launched. Pageable memory is reported as on an x86
 * machine without heterogeneous memory management: not accessible from the device. */
static int attribute_value(int attribute, CUdevice device) {
    switch (attribute) {
    case CU_DEVICE_ATTRIBUTE_CLOCK_RATE: return 1980000; /* kHz */
    case CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT: return (int)sysconf(_SC_NPROCESSORS_ONLN);
    case CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR: return 9;
    case CU_DEVICE_ATTRIBUTE_PCI_BUS_ID: return device + 1;
    case CU_DEVICE_ATTRIBUTE_ASYNC_ENGINE_COUNT: return 3;
    case CU_DEVICE_ATTRIBUTE_CAN_MAP_HOST_MEMORY:
    case CU_DEVICE_ATTRIBUTE_UNIFIED_ADDRESSING:
    case CU_DEVICE_ATTRIBUTE_STREAM_PRIORITIES_SUPPORTED:
    case CU_DEVICE_ATTRIBUTE_MANAGED_MEMORY:
    case CU_DEVICE_ATTRIBUTE_CONCURRENT_MANAGED_ACCESS:
    case CU_DEVICE_ATTRIBUTE_CAN_USE_HOST_POINTER_FOR_REGISTERED_MEM:
    case CU_DEVICE_ATTRIBUTE_HOST_REGISTER_SUPPORTED:
    case CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED:
    case CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED:
    case CU_DEVICE_ATTRIBUTE_READ_ONLY_HOST_REGISTER_SUPPORTED:
    case CU_DEVICE_ATTRIBUTE_TIMELINE_SEMAPHORE_INTEROP_SUPPORTED:
    case CU_DEVICE_ATTRIBUTE_MEMORY_POOLS_SUPPORTED:
    case CU_DEVICE_ATTRIBUTE_CAN_USE_64_BIT_STREAM_MEM_OPS: return 1;
    case CU_DEVICE_ATTRIBUTE_MEMPOOL_SUPPORTED_HANDLE_TYPES:
        return CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;
    case CU_DEVICE_ATTRIBUTE_HOST_NUMA_ID: return -1; /* no node is nearer than another */
    default: return 0; /* dma-buf among them: a memfd has no such kernel object */
    }
}

CUresult host_cuDeviceGetAttribute(int *value, CUdevice_attribute attribute, CUdevice device) {
    enum { ATTRIBUTE_END = 200 }; /* past every attribute of CUDA 13 */
    ENTER(DeviceGetAttribute);
    if (!value || (int)attribute <= 0 || (int)attribute >= ATTRIBUTE_END)
        return CUDA_ERROR_INVALID_VALUE;
    HOST_TRY(host_device_check(device));
    *value = attribute_value((int)attribute, device);
    return CUDA_SUCCESS;
}

CUresult host_cuDeviceCanAccessPeer(int *can, CUdevice device, CUdevice peer) {
    ENTER(DeviceCanAccessPeer);
    if (!can) return CUDA_ERROR_INVALID_VALUE;
    HOST_TRY(host_device_check(device));
    HOST_TRY(host_device_check(peer));
    *can = device != peer && host_device_reaches(device, peer);
    return CUDA_SUCCESS;
}

CUresult host_cuDriverGetVersion(int *version) {
    HOST_TRY(host_enter(HOST_CALL_DriverGetVersion));
    if (!version) return CUDA_ERROR_INVALID_VALUE;
    *version = 13000;
    return CUDA_SUCCESS;
}
