/* Tensors for other processes. */
#ifndef GPUMEM_TORCH_IPC_H
#define GPUMEM_TORCH_IPC_H

#include <memory>
#include <string>

#include "compat.h"
#include "hooks.h"

namespace gpumem {

/* What another process needs to open the block that begins at an address. */
inline cca::ShareableHandle share_block(const TorchCalls &, void *) {
    TORCH_CHECK(false,
                "gpumem: a tensor of gpumem's memory cannot be sent to another process by PyTorch; "
                "gpumem.interop.export shares memory between processes");
}

/* The block of another process, for as long as the pointer lives. */
inline std::shared_ptr<void> open_block(const TorchCalls &, const std::string &) {
    TORCH_CHECK(false,
                "gpumem: a tensor of another process cannot be opened by PyTorch; "
                "gpumem.interop.export shares memory between processes");
}

}  // namespace gpumem

#endif
