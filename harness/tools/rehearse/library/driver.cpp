// The CUDA driver, which expandable segments, Triton and symmetric memory call.
#include <dlfcn.h>
#include <sys/mman.h>

#include <cstring>
#include <map>
#include <mutex>

#include "stand_in.h"

EXPORT CUresult cuInit(unsigned) { return CUDA_SUCCESS; }
EXPORT CUresult cuDriverGetVersion(int* version) {
    *version = CUDA_VERSION;
    return CUDA_SUCCESS;
}
EXPORT CUresult cuDeviceGet(CUdevice* which, int ordinal) {
    *which = ordinal;
    return CUDA_SUCCESS;
}
EXPORT CUresult cuDeviceGetCount(int* count) {
    *count = visible_devices();
    return CUDA_SUCCESS;
}
EXPORT CUresult cuDeviceGetName(char* name, int length, CUdevice) {
    strncpy(name, device.name, length);
    return CUDA_SUCCESS;
}
EXPORT CUresult cuDeviceGetUuid(CUuuid* uuid, CUdevice which) {
    memset(uuid, which, sizeof *uuid);
    return CUDA_SUCCESS;
}
EXPORT CUresult cuDeviceGetAttribute(int* value, CUdevice_attribute attribute, CUdevice which) {
    cudaDeviceGetAttribute(value, (cudaDeviceAttr)attribute, which);
    return CUDA_SUCCESS;
}
EXPORT CUresult cuGetErrorString(CUresult error, const char** text) {
    *text = error == CUDA_ERROR_OUT_OF_MEMORY ? "out of memory" : "error of the virtual GPU";
    return CUDA_SUCCESS;
}
EXPORT CUresult cuGetErrorName(CUresult error, const char** name) {
    *name = error == CUDA_ERROR_OUT_OF_MEMORY ? "CUDA_ERROR_OUT_OF_MEMORY" : "CUDA_ERROR";
    return CUDA_SUCCESS;
}

// Contexts: there is one.

static const CUcontext the_context = (CUcontext)1;

EXPORT CUresult cuDevicePrimaryCtxRetain(CUcontext* context, CUdevice) {
    *context = the_context;
    return CUDA_SUCCESS;
}
EXPORT CUresult cuDevicePrimaryCtxGetState(CUdevice, unsigned* flags, int* active) {
    *flags = 0, *active = 1;
    return CUDA_SUCCESS;
}
EXPORT CUresult cuCtxGetCurrent(CUcontext* context) {
    *context = the_context;
    return CUDA_SUCCESS;
}
EXPORT CUresult cuCtxSetCurrent(CUcontext) { return CUDA_SUCCESS; }
EXPORT CUresult cuCtxPushCurrent(CUcontext) { return CUDA_SUCCESS; }
EXPORT CUresult cuCtxPopCurrent(CUcontext* context) { return cuCtxGetCurrent(context); }
EXPORT CUresult cuCtxGetDevice(CUdevice* which) {
    cudaGetDevice(which);
    return CUDA_SUCCESS;
}
EXPORT CUresult cuCtxSynchronize() {
    return cudaDeviceSynchronize() == cudaSuccess ? CUDA_SUCCESS : CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
}
EXPORT CUresult cuCtxSetLimit(CUlimit, size_t) { return CUDA_SUCCESS; }
EXPORT CUresult cuCtxGetLimit(size_t* value, CUlimit) {
    *value = 1 << 20;
    return CUDA_SUCCESS;
}
EXPORT CUresult cuStreamSynchronize(CUstream stream) {
    if (wait_is_allowed(stream) != cudaSuccess) return CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
    record_wait("stream");
    return CUDA_SUCCESS;
}

// Memory. Physical memory is a number of bytes; it is given back when nobody holds it and nothing maps it.

namespace {

struct Physical {
    size_t bytes;
    int holders = 1;
};

std::mutex mutex;
std::map<CUdeviceptr, Physical*>& mapped() {
    static auto* all = new std::map<CUdeviceptr, Physical*>;
    return *all;
}

void let_go(Physical* physical) {
    if (--physical->holders) return;
    give_back(physical->bytes);
    delete physical;
}

}  // namespace

EXPORT CUresult cuMemGetAllocationGranularity(
    size_t* granularity, const CUmemAllocationProp*, CUmemAllocationGranularity_flags
) {
    *granularity = 2 << 20;
    return CUDA_SUCCESS;
}
EXPORT CUresult cuMemAddressReserve(CUdeviceptr* start, size_t bytes, size_t, CUdeviceptr, unsigned long long) {
    void* reserved = reserve(bytes);
    if (!reserved) return CUDA_ERROR_OUT_OF_MEMORY;
    add_device_range(reserved, bytes);
    *start = (CUdeviceptr)reserved;
    return CUDA_SUCCESS;
}
EXPORT CUresult cuMemAddressFree(CUdeviceptr start, size_t bytes) {
    remove_device_range((void*)start);
    munmap((void*)start, bytes);
    return CUDA_SUCCESS;
}
EXPORT CUresult cuMemCreate(
    CUmemGenericAllocationHandle* handle, size_t bytes, const CUmemAllocationProp*, unsigned long long
) {
    if (!take(bytes)) return CUDA_ERROR_OUT_OF_MEMORY;
    *handle = (CUmemGenericAllocationHandle) new Physical{bytes};
    return CUDA_SUCCESS;
}
EXPORT CUresult cuMemRelease(CUmemGenericAllocationHandle handle) {
    std::lock_guard<std::mutex> lock(mutex);
    let_go((Physical*)handle);
    return CUDA_SUCCESS;
}
EXPORT CUresult cuMemMap(
    CUdeviceptr start, size_t, size_t, CUmemGenericAllocationHandle handle, unsigned long long
) {
    std::lock_guard<std::mutex> lock(mutex);
    ((Physical*)handle)->holders += 1;
    mapped()[start] = (Physical*)handle;
    return CUDA_SUCCESS;
}
EXPORT CUresult cuMemUnmap(CUdeviceptr start, size_t bytes) {
    std::lock_guard<std::mutex> lock(mutex);
    auto first = mapped().lower_bound(start), end = mapped().lower_bound(start + bytes);
    for (auto each = first; each != end; ++each) let_go(each->second);
    mapped().erase(first, end);
    madvise((void*)start, bytes, MADV_DONTNEED);
    return CUDA_SUCCESS;
}
EXPORT CUresult cuMemSetAccess(CUdeviceptr, size_t, const CUmemAccessDesc*, size_t) { return CUDA_SUCCESS; }
EXPORT CUresult cuMemRetainAllocationHandle(CUmemGenericAllocationHandle* handle, void* start) {
    std::lock_guard<std::mutex> lock(mutex);
    auto found = mapped().find((CUdeviceptr)start);
    if (found == mapped().end()) return CUDA_ERROR_INVALID_VALUE;
    found->second->holders += 1;
    *handle = (CUmemGenericAllocationHandle)found->second;
    return CUDA_SUCCESS;
}
// Memory that other processes see goes by a file, and what comes from there takes nothing here.
EXPORT CUresult cuMemExportToShareableHandle(
    void* file, CUmemGenericAllocationHandle, CUmemAllocationHandleType type, unsigned long long
) {
    if (type != CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR) return CUDA_ERROR_NOT_SUPPORTED;
    *(int*)file = memfd_create("virtual_gpu", 0);
    return *(int*)file < 0 ? CUDA_ERROR_OPERATING_SYSTEM : CUDA_SUCCESS;
}
EXPORT CUresult cuMemImportFromShareableHandle(
    CUmemGenericAllocationHandle* handle, void*, CUmemAllocationHandleType
) {
    *handle = (CUmemGenericAllocationHandle) new Physical{0};
    return CUDA_SUCCESS;
}
EXPORT CUresult cuMemGetAddressRange(CUdeviceptr* start, size_t* bytes, CUdeviceptr place) {
    size_t found = 0;
    *start = (CUdeviceptr)device_range((void*)place, &found);
    if (bytes) *bytes = found;
    return found ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}
EXPORT CUresult cuMemAlloc(CUdeviceptr* start, size_t bytes) {
    return cudaMalloc((void**)start, bytes) == cudaSuccess ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY;
}
EXPORT CUresult cuMemFree(CUdeviceptr start) {
    cudaFree((void*)start);
    return CUDA_SUCCESS;
}
EXPORT CUresult cuMemcpyHtoD(CUdeviceptr to, const void* from, size_t bytes) {
    cudaMemcpy((void*)to, from, bytes, cudaMemcpyHostToDevice);
    return CUDA_SUCCESS;
}
EXPORT CUresult cuMemsetD32Async(CUdeviceptr start, unsigned, size_t count, CUstream stream) {
    record("memset", 4.0 * count, stream);
    return CUDA_SUCCESS;
}
EXPORT CUresult cuStreamWriteValue32(CUstream, CUdeviceptr, cuuint32_t, unsigned) { return CUDA_SUCCESS; }
EXPORT CUresult cuMemHostGetDevicePointer(CUdeviceptr* there, void* place, unsigned) {
    *there = (CUdeviceptr)place;
    return CUDA_SUCCESS;
}
EXPORT CUresult cuPointerGetAttribute(void* value, CUpointer_attribute attribute, CUdeviceptr place) {
    if (attribute == CU_POINTER_ATTRIBUTE_DEVICE_POINTER)
        *(CUdeviceptr*)value = place;
    else if (attribute == CU_POINTER_ATTRIBUTE_CONTEXT)
        *(CUcontext*)value = the_context;
    else
        *(int*)value = 0;
    return CUDA_SUCCESS;
}

// Modules.

EXPORT CUresult cuModuleLoadData(CUmodule* module, const void*) {
    *module = (CUmodule)opaque();
    return CUDA_SUCCESS;
}
EXPORT CUresult cuModuleLoadDataEx(CUmodule* module, const void* image, unsigned, CUjit_option*, void**) {
    return cuModuleLoadData(module, image);
}
EXPORT CUresult cuModuleLoad(CUmodule* module, const char*) { return cuModuleLoadData(module, nullptr); }
EXPORT CUresult cuModuleUnload(CUmodule) { return CUDA_SUCCESS; }
EXPORT CUresult cuModuleGetFunction(CUfunction* function, CUmodule, const char* name) {
    *function = (CUfunction)opaque();
    name_function(*function, strdup(name));
    return CUDA_SUCCESS;
}
EXPORT CUresult cuFuncGetAttribute(int* value, CUfunction_attribute attribute, CUfunction) {
    *value = attribute == CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK ? 1024
             : attribute == CU_FUNC_ATTRIBUTE_NUM_REGS            ? 64
                                                                  : 0;
    return CUDA_SUCCESS;
}
EXPORT CUresult cuFuncSetAttribute(CUfunction, CUfunction_attribute, int) { return CUDA_SUCCESS; }
EXPORT CUresult cuFuncSetCacheConfig(CUfunction, CUfunc_cache) { return CUDA_SUCCESS; }

static CUresult launch(CUfunction function, CUstream stream) {
    record_launch(function, stream);
    return CUDA_SUCCESS;
}
EXPORT CUresult cuLaunchKernel(
    CUfunction function, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, CUstream stream, void**, void**
) {
    return launch(function, stream);
}
EXPORT CUresult cuLaunchKernelEx(const CUlaunchConfig* how, CUfunction function, void**, void**) {
    return launch(function, how->hStream);
}
EXPORT CUresult cuLaunchCooperativeKernel(
    CUfunction function, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, CUstream stream, void**
) {
    return launch(function, stream);
}
EXPORT CUresult cuOccupancyMaxActiveBlocksPerMultiprocessor(int* blocks, CUfunction, int, size_t) {
    *blocks = 2;
    return CUDA_SUCCESS;
}
EXPORT CUresult cuOccupancyMaxActiveClusters(int* clusters, CUfunction, const CUlaunchConfig*) {
    *clusters = 32;
    return CUDA_SUCCESS;
}
EXPORT CUresult cuTensorMapEncodeTiled(
    CUtensorMap* map, CUtensorMapDataType, cuuint32_t, void*, const cuuint64_t*, const cuuint64_t*,
    const cuuint32_t*, const cuuint32_t*, CUtensorMapInterleave, CUtensorMapSwizzle, CUtensorMapL2promotion,
    CUtensorMapFloatOOBfill
) {
    *map = {};
    return CUDA_SUCCESS;
}

// Profilers get no events. CUPTI 13.2 would ask for tables of the driver's functions until its stack is full.
EXPORT int cuptiGetVersion(uint32_t*) { return 999; }  // CUPTI_ERROR_UNKNOWN
EXPORT int cuptiGetResultString(int, const char** text) {
    *text = "there is no CUPTI";
    return 0;
}

// Entry points by name: the newest of a function's versions, as the driver does.

static void* entry_point(const char* name) {
    for (const char* version : {"_v4", "_v3", "_v2", ""})
        if (void* found = dlsym(RTLD_DEFAULT, (std::string(name) + version).c_str())) return found;
    record(std::string("not found\t") + name);
    return nullptr;
}
#undef cuGetProcAddress
EXPORT CUresult cuGetProcAddress_v2(
    const char* name, void** entry, int, cuuint64_t, CUdriverProcAddressQueryResult* result
) {
    *entry = entry_point(name);
    if (result) *result = *entry ? CU_GET_PROC_ADDRESS_SUCCESS : CU_GET_PROC_ADDRESS_SYMBOL_NOT_FOUND;
    return *entry ? CUDA_SUCCESS : CUDA_ERROR_NOT_FOUND;
}
EXPORT cudaError_t cudaGetDriverEntryPointByVersion(
    const char* name, void** entry, unsigned, unsigned long long, cudaDriverEntryPointQueryResult* result
) {
    *entry = entry_point(name);
    if (result) *result = *entry ? cudaDriverEntryPointSuccess : cudaDriverEntryPointSymbolNotFound;
    return cudaSuccess;
}
