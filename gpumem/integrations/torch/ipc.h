/* Tensors for other processes; _sharing.py has how. */
#ifndef GPUMEM_TORCH_IPC_H
#define GPUMEM_TORCH_IPC_H

#include <memory>
#include <string>

#include "compat.h"
#include "pools.h"

namespace gpumem {

/* The handle by which another process opens the block that begins at an address. */
inline cca::ShareableHandle share_block(const TorchCalls &calls, void *address) {
    size_t offset = 0;
    char *refused = nullptr;
    Text text(calls.share(address, &offset, &refused), &std::free);
    Text reason(refused, &std::free);
    TORCH_CHECK(text, reason ? reason.get() : "gpumem: a block cannot be shared as the process ends");
    return {static_cast<ptrdiff_t>(offset), text.get()};
}

/* The block of another process, for as long as the pointer lives. */
inline std::shared_ptr<void> open_block(const TorchCalls &calls, const std::string &text) {
    void *address = nullptr;
    char *refused = nullptr;
    void *opened = calls.open_shared(text.c_str(), &address, &refused);
    Text reason(refused, &std::free);
    TORCH_CHECK(opened, reason ? reason.get() : "gpumem: no block can be opened as the process ends");
    auto close = calls.close_shared;
    return {address, [opened, close](void *) { close(opened); }};
}

}  // namespace gpumem

#endif
