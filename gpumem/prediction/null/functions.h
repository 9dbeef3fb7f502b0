/* The functions of the null CUDA that are not implemented: one list for each kind.
 *
 * They are those that PyTorch 2.10 to 2.14 imports, in builds for CUDA 12 and 13. A function of
 * the driver that is in driver_table.h and is not implemented is refused, too.
 */
#ifndef GPUMEM_NULL_FUNCTIONS_H
#define GPUMEM_NULL_FUNCTIONS_H

/* One name for each type of elements. */
#define TYPES(F, library, name) \
    F(library##S##name) F(library##D##name) F(library##C##name) F(library##Z##name)

/* They have no output on the host, or one that says nothing about the device. */
#define NULL_HARMLESS(F)                                                                          \
    /* runtime: work is finished once it is queued, and a kernel's code is of no use */           \
    F(cudaDeviceEnablePeerAccess) F(cudaDeviceSetGraphMemAttribute) F(cudaStreamQuery)            \
    F(cudaLaunchKernel) F(cudaLaunchKernelExC) F(cudaLaunchCooperativeKernel)                     \
    F(__cudaLaunchKernel) F(cudaThreadExchangeStreamCaptureMode) F(cudaFuncSetAttribute)          \
    F(cudaKernelSetAttributeForDevice) F(cudaLibraryUnload) F(cudaProfilerStart)                  \
    F(cudaProfilerStop) F(cudaMemcpyToSymbol) F(cudaMemcpyPeerAsync) F(cudaMemPoolSetAccess)      \
    F(cudaMemPoolSetAttribute) F(cudaMemPoolTrimTo) F(cudaGraphDestroy) F(cudaGraphExecDestroy)   \
    F(cudaGraphLaunch) F(cudaGraphDebugDotPrint) F(__cudaRegisterFatBinaryEnd)                    \
    F(__cudaRegisterFunction) F(__cudaRegisterVar) F(__cudaUnregisterFatBinary)                   \
    F(__cudaPushCallConfiguration) F(__cudaInitModule)                                            \
    /* driver */                                                                                  \
    F(cuCtxSynchronize) F(cuCtxRecordEvent) F(cuCtxEnablePeerAccess) F(cuCtxDisablePeerAccess)    \
    F(cuDevicePrimaryCtxRelease) F(cuStreamQuery) F(cuStreamSynchronize) F(cuStreamWaitValue32)   \
    F(cuStreamWaitValue64) F(cuEventRecord) F(cuEventQuery) F(cuEventSynchronize)                 \
    F(cuGraphDestroy) F(cuGraphExecDestroy) F(cuGraphLaunch) F(cuMemcpyPeerAsync)                 \
    F(cuFuncSetAttribute) F(cuFuncSetCacheConfig) F(cuLaunchKernel) F(cuLaunchKernelEx)           \
    F(cuLaunchCooperativeKernel) F(cuThreadExchangeStreamCaptureMode) F(cuModuleUnload)           \
    F(cuLibraryUnload) F(cuKernelSetAttribute) F(cuLinkAddData) F(cuLinkAddData_v2)               \
    F(cuLinkComplete) F(cuLinkDestroy) F(cuTensorMapEncodeTiled) F(cuTensorMapEncodeIm2col)       \
    F(cuCtxSetLimit)                                                                              \
    /* cuBLAS: outputs are on the device; PyTorch passes a pointer of the device for scalars */   \
    TYPES(F, cublas, gemm_v2) TYPES(F, cublas, gemmStridedBatched) TYPES(F, cublas, gemv_v2)      \
    TYPES(F, cublas, trsm_v2) TYPES(F, cublas, trsmBatched) TYPES(F, cublas, getrfBatched)        \
    F(cublasSdot_v2) F(cublasDdot_v2) F(cublasCdotc_v2) F(cublasCdotu_v2) F(cublasZdotc_v2)       \
    F(cublasZdotu_v2) F(cublasDotEx) F(cublasGemmEx) F(cublasSgemmEx)                             \
    F(cublasGemmStridedBatchedEx) F(cublasDestroy_v2) F(cublasSetMathMode)                        \
    F(cublasSetPointerMode_v2) F(cublasSetSmCountTarget) F(cublasSetStream_v2)                    \
    F(cublasSetWorkspace_v2) F(cublasLtMatmul) F(cublasLtMatmulDescDestroy)                       \
    F(cublasLtMatmulDescSetAttribute) F(cublasLtMatmulPreferenceDestroy)                          \
    F(cublasLtMatmulPreferenceSetAttribute) F(cublasLtMatrixLayoutDestroy)                        \
    F(cublasLtMatrixLayoutSetAttribute)                                                           \
    /* cuDNN */                                                                                   \
    F(cudnnBackendExecute) F(cudnnRNNForward) F(cudnnRNNBackwardData_v8)                          \
    F(cudnnRNNBackwardWeights_v8) F(cudnnBatchNormalizationBackwardEx)                            \
    F(cudnnBatchNormalizationForwardInference) F(cudnnBatchNormalizationForwardTrainingEx)        \
    F(cudnnDestroyActivationDescriptor) F(cudnnDestroyCTCLossDescriptor)                          \
    F(cudnnDestroyConvolutionDescriptor) F(cudnnDestroySpatialTransformerDescriptor)              \
    F(cudnnPoolingForward) F(cudnnSetActivationDescriptor) F(cudnnSetCTCLossDescriptorEx)         \
    F(cudnnSetCTCLossDescriptor_v9) F(cudnnSetConvolutionGroupCount)                              \
    F(cudnnSetConvolutionMathType) F(cudnnSetConvolutionNdDescriptor)                             \
    F(cudnnSetPooling2dDescriptor) F(cudnnSetSpatialTransformerNdDescriptor) F(cudnnSetStream)    \
    F(cudnnSpatialTfGridGeneratorBackward) F(cudnnSpatialTfGridGeneratorForward)                  \
    F(cudnnSpatialTfSamplerBackward) F(cudnnSpatialTfSamplerForward)                              \
    /* NCCL: no other rank is there */                                                            \
    F(ncclAllGather) F(ncclAllReduce) F(ncclAlltoAll) F(ncclGather) F(ncclRecv) F(ncclReduce)     \
    F(ncclReduceScatter) F(ncclSend) F(ncclGroupStart) F(ncclGroupEnd) F(ncclCommAbort)           \
    F(ncclCommDestroy) F(ncclCommFinalize) F(ncclCommDeregister) F(ncclRedOpDestroy)

/* Their first argument receives a handle, and they have no other output. */
#define NULL_HANDLES(F)                                                                           \
    F(cudaDeviceGetDefaultMemPool) F(cudaLibraryLoadData) F(cudaLibraryGetKernel)                 \
    F(cudaGraphInstantiate) F(cudaGraphInstantiateWithFlags) F(cuGraphInstantiateWithFlags)       \
    F(cuModuleLoad) F(cuModuleLoadData) F(cuModuleLoadDataEx) F(cuModuleGetFunction)              \
    F(cuLibraryLoadData) F(cuLibraryLoadFromFile) F(cuLibraryGetKernel) F(cublasCreate_v2)        \
    F(cublasLtMatmulDescCreate) F(cublasLtMatmulPreferenceCreate) F(cublasLtMatrixLayoutCreate)   \
    F(cudnnCreateActivationDescriptor) F(cudnnCreateCTCLossDescriptor)                            \
    F(cudnnCreateConvolutionDescriptor) F(cudnnCreatePoolingDescriptor)                           \
    F(cudnnCreateSpatialTransformerDescriptor)

/* Their outputs on the host are unknown. */
#define NULL_REFUSED_FUNCTIONS(F)                                                                 \
    /* without these no other function of their libraries can be called */                        \
    F(cusolverDnCreate) F(cusparseCreate) F(cufftCreate) F(cusparseLtInit)                        \
    /* a library with a CUDA runtime of its own begins with this one */                           \
    F(cuGetExportTable)                                                                           \
    /* runtime: graphs made by hand, other processes' memory */                                   \
    F(cudaMemcpy2DAsync) F(cudaGraphAddNode) F(cudaGraphConditionalHandleCreate)                  \
    F(cudaGraphRetainUserObject) F(cudaStreamBeginCaptureToGraph)                                 \
    F(cudaStreamUpdateCaptureDependencies) F(cudaUserObjectCreate) F(cudaUserObjectRelease)       \
    F(cudaDeviceGetGraphMemAttribute) F(cudaMemPoolGetAttribute) F(cudaIpcCloseMemHandle)         \
    F(cudaIpcGetEventHandle) F(cudaIpcGetMemHandle) F(cudaIpcOpenEventHandle)                     \
    F(cudaIpcOpenMemHandle)                                                                       \
    /* driver */                                                                                  \
    F(cuMulticastAddDevice) F(cuMulticastBindMem) F(cuMulticastCreate) F(cuMulticastUnbind)       \
    F(cuCtxFromGreenCtx) F(cuGreenCtxCreate) F(cuGreenCtxDestroy) F(cuGreenCtxStreamCreate)       \
    F(cuDevSmResourceSplitByCount) F(cuDeviceGetDevResource) F(cuDevResourceGenerateDesc)         \
    F(cuLinkCreate) F(cuLinkCreate_v2) F(cuKernelGetAttribute) F(cuCtxGetLimit)                   \
    /* cuBLAS: `info` is on the host */                                                           \
    TYPES(F, cublas, gelsBatched) TYPES(F, cublas, geqrfBatched) TYPES(F, cublas, getrsBatched)   \
    F(cublasLtMatmulAlgoCheck) F(cublasLtMatmulAlgoConfigGetAttribute)                            \
    F(cublasLtMatmulAlgoConfigSetAttribute) F(cublasLtMatmulAlgoInit)                             \
    /* cuDNN: CTC loss, and convolutions by its older interface */                                \
    F(cudnnCTCLoss) F(cudnnCTCLoss_v8) F(cudnnGetCTCLossWorkspaceSize)                            \
    F(cudnnGetCTCLossWorkspaceSize_v8) F(cudnnConvolutionBackwardData)                            \
    F(cudnnConvolutionBackwardFilter) F(cudnnConvolutionBiasActivationForward)                    \
    F(cudnnConvolutionForward) F(cudnnFindConvolutionBackwardDataAlgorithmEx)                     \
    F(cudnnFindConvolutionBackwardFilterAlgorithmEx) F(cudnnFindConvolutionForwardAlgorithmEx)    \
    F(cudnnGetConvolutionBackwardDataAlgorithm_v7)                                                \
    F(cudnnGetConvolutionBackwardDataWorkspaceSize)                                               \
    F(cudnnGetConvolutionBackwardFilterAlgorithm_v7)                                              \
    F(cudnnGetConvolutionBackwardFilterWorkspaceSize) F(cudnnGetConvolutionForwardAlgorithm_v7)   \
    F(cudnnGetConvolutionForwardWorkspaceSize)                                                    \
    /* NCCL: windows, one-sided calls, changes of a communicator */                               \
    F(ncclCommGetUniqueId) F(ncclCommGrow) F(ncclCommInitAll) F(ncclCommMemStats)                 \
    F(ncclCommRegister) F(ncclCommResume) F(ncclCommRevoke) F(ncclCommShrink) F(ncclCommSuspend)  \
    F(ncclCommWindowDeregister) F(ncclCommWindowRegister) F(ncclDevCommCreate)                    \
    F(ncclDevCommDestroy) F(ncclGetLsaMultimemDevicePointer) F(ncclGetPeerDevicePointer)          \
    F(ncclGroupSimulateEnd) F(ncclPutSignal) F(ncclSignal) F(ncclWaitSignal) F(ncclWinGetUserPtr)

#endif
