/* What CUDA's own file of this name sets for a compiler of host code: nothing. See host_defines.h. */
#ifndef GPUMEM_CUDA_HOST_CONFIG_H
#define GPUMEM_CUDA_HOST_CONFIG_H
#endif
