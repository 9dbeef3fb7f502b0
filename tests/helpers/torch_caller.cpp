/* Calls the hooks of gpumem.integrations.torch as PyTorch does: with std::function filters, pool
 * ids by value, and exceptions that it catches. Addresses of hooks come from Python. */
#include <cstdint>
#include <cstring>
#include <functional>
#include <stdexcept>
#include <string>
#include <utility>

using Stream = void *;
using PoolId = std::pair<unsigned long long, unsigned long long>;
using Filter = std::function<bool(Stream)>;

namespace {
template <typename Call>
int guarded(char *said, size_t room, Call call) {
    try {
        call();
        return 0;
    } catch (const std::exception &error) {
        std::strncpy(said, error.what(), room - 1);
        return 1;
    }
}
}  // namespace

extern "C" {

/* 0: done; 1: an exception. */
int caller_alloc(uintptr_t hook, size_t nbytes, int device, Stream stream, void **address,
                 char *said, size_t room) {
    return guarded(said, room, [&] {
        *address = reinterpret_cast<void *(*)(size_t, int, Stream)>(hook)(nbytes, device, stream);
    });
}

void caller_free(uintptr_t hook, void *address, size_t nbytes, int device, Stream stream) {
    reinterpret_cast<void (*)(void *, size_t, int, Stream)>(hook)(address, nbytes, device, stream);
}

int caller_record(uintptr_t hook, void *address, Stream stream, char *said, size_t room) {
    return guarded(said, room, [&] {
        reinterpret_cast<void (*)(void *, Stream)>(hook)(address, stream);
    });
}

int caller_begin(uintptr_t hook, int device, unsigned long long id, Stream accepted, char *said,
                 size_t room) {
    return guarded(said, room, [&] {
        reinterpret_cast<void (*)(int, PoolId, Filter)>(hook)(
            device, PoolId{0, id}, [accepted](Stream stream) { return stream == accepted; });
    });
}

void caller_pool(uintptr_t hook, int device, unsigned long long id) {
    reinterpret_cast<void (*)(int, PoolId)>(hook)(device, PoolId{0, id});
}
}
