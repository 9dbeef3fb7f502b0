/* The hooks that PyTorch calls instead of its caching allocator, and gpumem's functions below them.
 *
 * hooks.cpp is PyTorch's side: C++ signatures, exceptions, graph captures. _hooks.pyx fills in
 * gpumem's side. No hook takes the interpreter lock, except to report that memory is out and to find
 * the arena of a device that is used for the first time.
 *
 * A `hook` is an AllocatorHook of gpumem/_native/arena/allocator_hooks.pxd: the arena that serves a device or
 * a pool. Here it is opaque.
 */
#ifndef GPUMEM_TORCH_HOOKS_H
#define GPUMEM_TORCH_HOOKS_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

enum { TORCH_DEVICES = 64 };

typedef struct TorchCalls {
    /* 0, or a status that `report` explains. A segment is a block of the caching allocator: it may
       be allocated while a graph is captured, and does not belong to that graph. */
    int (*allocate)(void *hook, size_t nbytes, void *stream, void **address);
    int (*allocate_segment)(void *hook, size_t nbytes, void *stream, void **address);
    int (*release)(void *address);
    int (*record)(void *address, void *stream);
    size_t (*size)(void *address); /* requested bytes; 0: no block begins there */
    /* Make the hook of a device that has none yet; NULL: there is no arena for the device. */
    void *(*find)(int device);
    void (*shrink)(void *hook);
    void (*limit)(int device, double fraction);
    /* Memory of captured graphs: a reference to a new hook beside the device's; NULL: refused. Its
       memory is released with its last reference; each of its blocks has one. */
    void *(*open_pool)(void *hook);
    void (*begin_pool)(void *pool);
    void (*retain_pool)(void *pool);
    void (*drop_pool)(void *pool);
    /* Let a device access the memory of the arena of `owner`: NULL, or why it cannot, in a string that
       the caller frees. */
    char *(*add_peer)(int owner, int device);
    /* A copy between the devices of two hooks, neither of which need have access to the other's
       memory: a CUresult. */
    int (*copy)(void *to, void *dst, void *from, const void *src, size_t nbytes, void *stream);
    /* The reason of a failure, in a string that the caller frees. `is_memory`: memory is out. */
    char *(*report)(int device, size_t nbytes, void *stream, int status, int *is_memory);
} TorchCalls;

void torch_hooks_init(const TorchCalls *calls);
/* The arena of a device, for as long as the process lives or until it is replaced; NULL: none. */
void torch_hooks_set(int device, void *hook);
void *torch_hooks_get(int device);
/* Throws torch.OutOfMemoryError with a text, compiled for one PyTorch; NULL: a RuntimeError. */
void torch_hooks_set_thrower(void (*thrower)(const char *text));

/* Takes over what PyTorch asks of its allocator about other devices, for which it has no setter: two
   virtual functions of one object, found in its class's table by their own addresses. Returns
   whether all of them were there; else nothing is changed. */
int torch_hooks_adopt(void *object, void *table, const void *enable_peer, const void *copy);

/* Addresses of the hooks, in the order of their names in _hooks.pyx. */
enum { TORCH_HOOKS = 11 };
void torch_hooks_addresses(uintptr_t addresses[TORCH_HOOKS]);

#ifdef __cplusplus
}
#endif

#endif
