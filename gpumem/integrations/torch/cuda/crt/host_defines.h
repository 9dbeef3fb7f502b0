/* The markers in declarations of CUDA's runtime, for a compiler of host code, to which they mean
 * nothing but an alignment. CUDA's own file of this name lies in a package that PyTorch does not
 * install; where it is installed it is found first. */
#ifndef GPUMEM_CUDA_HOST_DEFINES_H
#define GPUMEM_CUDA_HOST_DEFINES_H

#define __align__(n) __attribute__((aligned(n)))
#define __builtin_align__(n) __align__(n)
#define __host__
#define __device__
#define __device_builtin__
#define __device_builtin_surface_type__
#define __device_builtin_texture_type__
#define __cudart_builtin__
#define __location__(where)
#define CUDARTAPI
#define CUDARTAPI_CDECL
#define CUDAAPI

#endif
