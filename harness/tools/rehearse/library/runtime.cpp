// The CUDA runtime.
#include <sys/mman.h>

#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>
#include <vector>

#include "stand_in.h"

Device device = {"NVIDIA H100 80GB HBM3", 9, 0, size_t(79) << 30, 132, 228, 8};

// Become another device; call it before anything asks. Without it a node has eight H100.
EXPORT void virtual_gpu_become(
    const char* name, int major, int minor, size_t bytes, int multiprocessors, int shared_kib, int count
) {
    snprintf(device.name, sizeof device.name, "%s", name);
    device.major = major, device.minor = minor, device.bytes = bytes;
    device.multiprocessors = multiprocessors, device.shared_kib = shared_kib, device.count = count;
}

// Devices that CUDA_VISIBLE_DEVICES leaves to the process.
int visible_devices() {
    const char* names = getenv("CUDA_VISIBLE_DEVICES");
    if (!names) return device.count;
    int listed = *names ? 1 : 0;
    for (; *names; ++names) listed += *names == ',';
    return listed < device.count ? listed : device.count;
}

namespace {

std::atomic<size_t> used{0};
thread_local int current = 0;

// Address ranges of one kind of memory.
class Ranges {
public:
    void add(const void* start, size_t bytes) {
        std::lock_guard<std::mutex> lock(mutex_);
        ranges_[(const char*)start] = bytes;
    }
    // Bytes of the range that began there; 0 if none did.
    size_t remove(const void* start) {
        std::lock_guard<std::mutex> lock(mutex_);
        auto found = ranges_.find((const char*)start);
        if (found == ranges_.end()) return 0;
        size_t bytes = found->second;
        ranges_.erase(found);
        return bytes;
    }
    // Start and bytes of the range that a place is in; none: no bytes.
    std::pair<const char*, size_t> find(const void* place) {
        std::lock_guard<std::mutex> lock(mutex_);
        auto after = ranges_.upper_bound((const char*)place);
        if (after == ranges_.begin()) return {nullptr, 0};
        --after;
        return (const char*)place < after->first + after->second ? std::pair<const char*, size_t>(*after) : std::pair<const char*, size_t>();
    }
    bool contain(const void* place) { return find(place).second; }

private:
    std::mutex mutex_;
    std::map<const char*, size_t> ranges_;
};

Ranges& on_device() {
    static Ranges* ranges = new Ranges;
    return *ranges;
}

Ranges& pinned() {
    static Ranges* ranges = new Ranges;
    return *ranges;
}

// Whether this thread's last call has waited already: torch waits once more after a copy, for nothing.
thread_local bool has_waited = false;

const char* place_of(const void* place) {
    return on_device().contain(place) ? "device" : pinned().contain(place) ? "pinned" : "pageable";
}

// Device memory is zeros and stays so, whatever is copied there: a value that one kernel was given and none
// replaced would be taken for the answer of another. More than this of zeros nobody looks at.
constexpr size_t ZEROED_AT_MOST = 64 << 10;

cudaError_t copy(void* to, const void* from, size_t bytes, bool waits, const void* stream) {
    std::string how = std::string(place_of(from)) + " to " + place_of(to);
    bool pageable = how.find("pageable") != std::string::npos;
    if (cudaError_t error = waits ? call_is_allowed() : pageable ? wait_is_allowed(stream) : cudaSuccess) return error;
    record_copy(how.c_str(), bytes, stream);
    // CUDA Runtime API, "API synchronization behavior": a copy from the device to pageable memory waits.
    if (waits || how == "device to pageable") {
        record_wait(("copy " + how).c_str());
        has_waited = true;
    }
    if (!on_device().contain(to) && bytes <= ZEROED_AT_MOST) memset(to, 0, bytes);
    return cudaSuccess;
}

}  // namespace

void* reserve(size_t bytes) {
    int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;
    void* start = mmap(nullptr, bytes ? bytes : 1, PROT_READ | PROT_WRITE, flags, -1, 0);
    return start == MAP_FAILED ? nullptr : start;
}

bool take(size_t bytes) {
    if ((used += bytes) <= device.bytes) return true;
    used -= bytes;
    return false;
}

void give_back(size_t bytes) { used -= bytes; }
size_t taken() { return used; }
void add_device_range(void* start, size_t bytes) { on_device().add(start, bytes); }
void remove_device_range(void* start) { on_device().remove(start); }
void* device_range(void* place, size_t* bytes) {
    auto found = on_device().find(place);
    *bytes = found.second;
    return (void*)found.first;
}

// What others than torch's allocator take: context and communicators.
EXPORT int virtual_gpu_take(size_t bytes) { return take(bytes); }

// Kernels of the program: each file of it registers its own when it is loaded.

EXPORT void** __cudaRegisterFatBinary(void*) { return (void**)opaque(); }
EXPORT void __cudaRegisterFatBinaryEnd(void**) {}
EXPORT void __cudaUnregisterFatBinary(void**) {}
EXPORT char __cudaInitModule(void**) { return 1; }
EXPORT void __cudaRegisterVar(void**, char*, char*, const char*, int, size_t, int, int) {}
EXPORT void __cudaRegisterFunction(
    void**, const char* function, char*, const char* name, int, uint3*, uint3*, dim3*, dim3*, int*
) {
    name_function(function, name);
}

struct Shape {
    dim3 grid, block;
    size_t shared;
    void* stream;
};
static thread_local std::vector<Shape> shapes;

EXPORT unsigned __cudaPushCallConfiguration(dim3 grid, dim3 block, size_t shared, void* stream) {
    shapes.push_back({grid, block, shared, stream});
    return 0;
}
EXPORT cudaError_t __cudaPopCallConfiguration(dim3* grid, dim3* block, size_t* shared, void* stream) {
    Shape shape = shapes.back();
    shapes.pop_back();
    *grid = shape.grid, *block = shape.block, *shared = shape.shared, *(void**)stream = shape.stream;
    return cudaSuccess;
}

static cudaError_t launch(const void* function, cudaStream_t stream) {
    has_waited = false;
    record_launch(function, stream);
    return cudaSuccess;
}
EXPORT cudaError_t __cudaGetKernel(cudaKernel_t* kernel, const void* function) {
    *kernel = (cudaKernel_t)function;
    return cudaSuccess;
}
EXPORT cudaError_t __cudaLaunchKernel(cudaKernel_t kernel, dim3, dim3, void**, size_t, cudaStream_t stream) {
    return launch(kernel, stream);
}
EXPORT cudaError_t cudaLaunchKernel(const void* function, dim3, dim3, void**, size_t, cudaStream_t stream) {
    return launch(function, stream);
}
EXPORT cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t* how, const void* function, void**) {
    return launch(function, how->stream);
}
EXPORT cudaError_t cudaLaunchCooperativeKernel(
    const void* function, dim3, dim3, void**, size_t, cudaStream_t stream
) {
    return launch(function, stream);
}
EXPORT cudaError_t cudaLaunchHostFunc(cudaStream_t stream, cudaHostFn_t function, void* argument) {
    if (!captured(stream, [](Recorded&) {})) function(argument);
    return cudaSuccess;
}
EXPORT cudaError_t cudaStreamAddCallback(
    cudaStream_t stream, cudaStreamCallback_t callback, void* argument, unsigned
) {
    callback(stream, cudaSuccess, argument);
    return cudaSuccess;
}

EXPORT cudaError_t cudaFuncGetAttributes(cudaFuncAttributes* attributes, const void*) {
    *attributes = {};
    attributes->maxThreadsPerBlock = 1024;
    attributes->numRegs = 64;
    attributes->binaryVersion = attributes->ptxVersion = 10 * device.major + device.minor;
    attributes->maxDynamicSharedSizeBytes = (device.shared_kib - 1) << 10;
    return cudaSuccess;
}
EXPORT cudaError_t cudaFuncSetAttribute(const void*, cudaFuncAttribute, int) { return cudaSuccess; }
EXPORT cudaError_t cudaKernelSetAttributeForDevice(cudaKernel_t, cudaFuncAttribute, int, int) {
    return cudaSuccess;
}
EXPORT cudaError_t cudaLibraryLoadData(
    cudaLibrary_t* library, const void*, cudaJitOption*, void**, unsigned, cudaLibraryOption*, void**, unsigned
) {
    *library = (cudaLibrary_t)opaque();
    return cudaSuccess;
}
EXPORT cudaError_t cudaLibraryGetKernel(cudaKernel_t* kernel, cudaLibrary_t, const char* name) {
    *kernel = (cudaKernel_t)opaque();
    name_function(*kernel, strdup(name));
    return cudaSuccess;
}
EXPORT cudaError_t cudaLibraryUnload(cudaLibrary_t) { return cudaSuccess; }
EXPORT cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int* blocks, const void*, int, size_t) {
    *blocks = 2;
    return cudaSuccess;
}
EXPORT cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(
    int* blocks, const void*, int, size_t, unsigned
) {
    *blocks = 2;
    return cudaSuccess;
}

// Devices.

EXPORT cudaError_t cudaGetDeviceCount(int* count) {
    *count = visible_devices();
    return cudaSuccess;
}
EXPORT cudaError_t cudaGetDevice(int* which) {
    *which = current;
    return cudaSuccess;
}
EXPORT cudaError_t cudaSetDevice(int which) {
    if (which < 0 || which >= visible_devices()) return cudaErrorInvalidDevice;
    current = which;
    return cudaSuccess;
}

EXPORT cudaError_t cudaGetDeviceProperties(cudaDeviceProp* properties, int) {
    *properties = {};
    memcpy(properties->name, device.name, sizeof properties->name);
    properties->totalGlobalMem = device.bytes;
    properties->major = device.major, properties->minor = device.minor;
    properties->multiProcessorCount = device.multiprocessors;
    properties->sharedMemPerMultiprocessor = size_t(device.shared_kib) << 10;
    properties->sharedMemPerBlockOptin = size_t(device.shared_kib - 1) << 10;
    properties->sharedMemPerBlock = 48 << 10;
    properties->reservedSharedMemPerBlock = 1 << 10;
    properties->regsPerBlock = properties->regsPerMultiprocessor = 65536;
    properties->warpSize = 32;
    properties->maxThreadsPerBlock = 1024;
    properties->maxThreadsPerMultiProcessor = 2048;
    properties->maxBlocksPerMultiProcessor = 32;
    properties->maxThreadsDim[0] = properties->maxThreadsDim[1] = 1024, properties->maxThreadsDim[2] = 64;
    properties->maxGridSize[0] = 2147483647;
    properties->maxGridSize[1] = properties->maxGridSize[2] = 65535;
    properties->l2CacheSize = 50 << 20;
    properties->totalConstMem = 65536;
    properties->textureAlignment = 512;
    properties->memPitch = 2147483647;
    properties->memoryBusWidth = 5120;
    properties->concurrentKernels = properties->asyncEngineCount = properties->unifiedAddressing = 1;
    properties->canMapHostMemory = properties->hostRegisterSupported = properties->managedMemory = 1;
    properties->cooperativeLaunch = properties->streamPrioritiesSupported = 1;
    properties->memoryPoolsSupported = 1;
    properties->clusterLaunch = device.major >= 9;
    return cudaSuccess;
}

// The driver numbers attributes alike.
EXPORT cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int) {
    switch (attribute) {
        case cudaDevAttrComputeCapabilityMajor: *value = device.major; break;
        case cudaDevAttrComputeCapabilityMinor: *value = device.minor; break;
        case cudaDevAttrMultiProcessorCount: *value = device.multiprocessors; break;
        case cudaDevAttrMaxSharedMemoryPerMultiprocessor: *value = device.shared_kib << 10; break;
        case cudaDevAttrMaxSharedMemoryPerBlockOptin: *value = (device.shared_kib - 1) << 10; break;
        case cudaDevAttrMaxSharedMemoryPerBlock: *value = 48 << 10; break;
        case cudaDevAttrMaxRegistersPerBlock:
        case cudaDevAttrMaxRegistersPerMultiprocessor: *value = 65536; break;
        case cudaDevAttrWarpSize:
        case cudaDevAttrMaxBlocksPerMultiprocessor: *value = 32; break;
        case cudaDevAttrMaxThreadsPerBlock:
        case cudaDevAttrMaxBlockDimX:
        case cudaDevAttrMaxBlockDimY: *value = 1024; break;
        case cudaDevAttrMaxBlockDimZ: *value = 64; break;
        case cudaDevAttrMaxThreadsPerMultiProcessor: *value = 2048; break;
        case cudaDevAttrMaxGridDimX: *value = 2147483647; break;
        case cudaDevAttrMaxGridDimY:
        case cudaDevAttrMaxGridDimZ: *value = 65535; break;
        case cudaDevAttrL2CacheSize: *value = 50 << 20; break;
        case cudaDevAttrGlobalMemoryBusWidth: *value = 5120; break;
        case cudaDevAttrMemoryClockRate: *value = 2619000; break;
        case cudaDevAttrClockRate: *value = 1980000; break;
        case cudaDevAttrUnifiedAddressing:
        case cudaDevAttrCooperativeLaunch:
        case cudaDevAttrMemoryPoolsSupported: *value = 1; break;
        default:
            // Memory that is mapped, and multicast over NVLink; no fabric of several nodes.
            *value = int(attribute) == CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED ||
                     int(attribute) == CU_DEVICE_ATTRIBUTE_MULTICAST_SUPPORTED;
    }
    return cudaSuccess;
}
EXPORT cudaError_t cudaDeviceGetPCIBusId(char* id, int length, int which) {
    snprintf(id, length, "0000:%02X:00.0", which + 1);
    return cudaSuccess;
}
EXPORT cudaError_t cudaDeviceCanAccessPeer(int* can, int, int) {
    *can = 1;
    return cudaSuccess;
}
EXPORT cudaError_t cudaDeviceEnablePeerAccess(int, unsigned) { return cudaSuccess; }
EXPORT cudaError_t cudaDeviceGetStreamPriorityRange(int* least, int* greatest) {
    *least = 0, *greatest = -5;
    return cudaSuccess;
}
EXPORT cudaError_t cudaDeviceSynchronize() {
    if (cudaError_t error = call_is_allowed()) return error;
    record_wait("device");
    return cudaSuccess;
}
EXPORT cudaError_t cudaDriverGetVersion(int* version) {
    *version = CUDART_VERSION;
    return cudaSuccess;
}
EXPORT cudaError_t cudaRuntimeGetVersion(int* version) { return cudaDriverGetVersion(version); }
EXPORT const char* cudaGetErrorString(cudaError_t error) {
    switch (error) {
        case cudaSuccess: return "no error";
        case cudaErrorMemoryAllocation: return "out of memory";
        case cudaErrorNotSupported: return "operation not supported by the virtual GPU";
        case cudaErrorStreamCaptureUnsupported: return "operation not permitted when stream is capturing";
        case cudaErrorStreamCaptureInvalidated: return "operation failed due to a previous error during capture";
        case cudaErrorStreamCaptureUnjoined: return "capturing stream has unjoined work";
        case cudaErrorStreamCaptureIsolation: return "dependency created on uncaptured work in another stream";
        case cudaErrorCapturedEvent: return "operation not permitted on an event last recorded in a capturing stream";
        default: return "error of the virtual GPU";
    }
}
EXPORT const char* cudaGetErrorName(cudaError_t error) {
    return error == cudaSuccess ? "cudaSuccess" : "cudaError";
}
EXPORT cudaError_t cudaGetLastError() { return cudaSuccess; }
EXPORT cudaError_t cudaPeekAtLastError() { return cudaSuccess; }
EXPORT cudaError_t cudaProfilerStart() { return cudaSuccess; }
EXPORT cudaError_t cudaProfilerStop() { return cudaSuccess; }

// Memory.

EXPORT cudaError_t cudaMalloc(void** start, size_t bytes) {
    if (cudaError_t error = call_is_allowed()) return error;
    *start = take(bytes) ? reserve(bytes) : nullptr;
    if (!*start) return cudaErrorMemoryAllocation;
    on_device().add(*start, bytes);
    return cudaSuccess;
}
EXPORT cudaError_t cudaMallocAsync(void** start, size_t bytes, cudaStream_t) { return cudaMalloc(start, bytes); }
EXPORT cudaError_t cudaFree(void* start) {
    if (cudaError_t error = call_is_allowed()) return error;
    size_t bytes = on_device().remove(start);
    if (!bytes) return cudaSuccess;
    munmap(start, bytes);
    give_back(bytes);
    // CUDA Runtime API, cudaFree: it waits for what the device has to do.
    record_wait("free");
    return cudaSuccess;
}
EXPORT cudaError_t cudaFreeAsync(void* start, cudaStream_t) { return cudaFree(start); }
EXPORT cudaError_t cudaHostAlloc(void** start, size_t bytes, unsigned) {
    if (cudaError_t error = call_is_allowed()) return error;
    record("pinned", double(bytes));
    *start = reserve(bytes);
    if (!*start) return cudaErrorMemoryAllocation;
    pinned().add(*start, bytes);
    return cudaSuccess;
}
EXPORT cudaError_t cudaFreeHost(void* start) {
    if (size_t bytes = pinned().remove(start)) munmap(start, bytes);
    return cudaSuccess;
}
EXPORT cudaError_t cudaHostRegister(void* start, size_t bytes, unsigned) {
    record("pinned", double(bytes));
    pinned().add(start, bytes);
    return cudaSuccess;
}
EXPORT cudaError_t cudaHostUnregister(void* start) {
    pinned().remove(start);
    return cudaSuccess;
}
EXPORT cudaError_t cudaMemGetInfo(size_t* free, size_t* total) {
    *total = device.bytes, *free = device.bytes - used;
    return cudaSuccess;
}
EXPORT cudaError_t cudaPointerGetAttributes(cudaPointerAttributes* attributes, const void* place) {
    *attributes = {};
    attributes->device = current;
    attributes->devicePointer = attributes->hostPointer = (void*)place;
    attributes->type = on_device().contain(place) ? cudaMemoryTypeDevice
                       : pinned().contain(place)  ? cudaMemoryTypeHost
                                                  : cudaMemoryTypeUnregistered;
    return cudaSuccess;
}
EXPORT cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t bytes, cudaMemcpyKind, cudaStream_t stream) {
    return copy(to, from, bytes, false, stream);
}
EXPORT cudaError_t cudaMemcpy(void* to, const void* from, size_t bytes, cudaMemcpyKind) {
    return copy(to, from, bytes, true, nullptr);
}
EXPORT cudaError_t cudaMemcpyPeerAsync(void* to, int, const void* from, int, size_t bytes, cudaStream_t stream) {
    return copy(to, from, bytes, false, stream);
}
EXPORT cudaError_t cudaMemcpy2DAsync(
    void* to, size_t, const void* from, size_t, size_t width, size_t height, cudaMemcpyKind, cudaStream_t stream
) {
    record_copy((std::string(place_of(from)) + " to " + place_of(to)).c_str(), width * height, stream);
    return cudaSuccess;
}
EXPORT cudaError_t cudaMemcpyToSymbol(const void*, const void*, size_t, size_t, cudaMemcpyKind) {
    return cudaSuccess;
}
EXPORT cudaError_t cudaGetSymbolAddress(void** place, const void*) {
    static void* symbols = reserve(1 << 20);
    *place = symbols;
    return cudaSuccess;
}
EXPORT cudaError_t cudaMemsetAsync(void*, int, size_t bytes, cudaStream_t stream) {
    record("memset", double(bytes), stream);
    return cudaSuccess;
}
EXPORT cudaError_t cudaMemset(void* start, int value, size_t bytes) {
    return cudaMemsetAsync(start, value, bytes, nullptr);
}
EXPORT cudaError_t cudaDeviceGetDefaultMemPool(cudaMemPool_t* pool, int) {
    *pool = (cudaMemPool_t)opaque();
    return cudaSuccess;
}
EXPORT cudaError_t cudaMemPoolGetAttribute(cudaMemPool_t, cudaMemPoolAttr, void* value) {
    *(size_t*)value = used;
    return cudaSuccess;
}
EXPORT cudaError_t cudaMemPoolSetAttribute(cudaMemPool_t, cudaMemPoolAttr, void*) { return cudaSuccess; }
EXPORT cudaError_t cudaMemPoolSetAccess(cudaMemPool_t, const cudaMemAccessDesc*, size_t) { return cudaSuccess; }
EXPORT cudaError_t cudaMemPoolTrimTo(cudaMemPool_t, size_t) { return cudaSuccess; }

// Streams and events: whatever is queued is done.

EXPORT cudaError_t cudaStreamCreate(cudaStream_t* stream) {
    *stream = (cudaStream_t)opaque();
    return cudaSuccess;
}
EXPORT cudaError_t cudaStreamCreateWithFlags(cudaStream_t* stream, unsigned) { return cudaStreamCreate(stream); }
EXPORT cudaError_t cudaStreamCreateWithPriority(cudaStream_t* stream, unsigned, int) {
    return cudaStreamCreate(stream);
}
EXPORT cudaError_t cudaStreamDestroy(cudaStream_t stream) {
    ::operator delete(stream);
    return cudaSuccess;
}
EXPORT cudaError_t cudaStreamGetPriority(cudaStream_t, int* priority) {
    *priority = 0;
    return cudaSuccess;
}
EXPORT cudaError_t cudaStreamQuery(cudaStream_t stream) { return wait_is_allowed(stream); }
EXPORT cudaError_t cudaStreamSynchronize(cudaStream_t stream) {
    if (cudaError_t error = wait_is_allowed(stream)) return error;
    if (!has_waited) record_wait("stream");
    has_waited = false;
    return cudaSuccess;
}
EXPORT cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned) {
    return wait_captured(stream, event, *(long*)event >= 0);
}
EXPORT cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned) {
    *event = (cudaEvent_t)opaque();
    *(long*)*event = -1;
    return cudaSuccess;
}
EXPORT cudaError_t cudaEventCreate(cudaEvent_t* event) { return cudaEventCreateWithFlags(event, 0); }
EXPORT cudaError_t cudaEventDestroy(cudaEvent_t event) {
    forget_captured(event);
    ::operator delete(event);
    return cudaSuccess;
}
// An event holds the step in which it was recorded.
EXPORT cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
    if (!record_captured(event, stream)) *(long*)event = this_step();
    return cudaSuccess;
}
EXPORT cudaError_t cudaEventRecordWithFlags(cudaEvent_t event, cudaStream_t stream, unsigned) {
    return cudaEventRecord(event, stream);
}
EXPORT cudaError_t cudaEventQuery(cudaEvent_t event) {
    return is_captured(event) ? cudaErrorCapturedEvent : cudaSuccess;
}
EXPORT cudaError_t cudaEventSynchronize(cudaEvent_t event) {
    if (is_captured(event)) return cudaErrorCapturedEvent;
    // For an earlier step the host waits while the device has this one to do.
    if (*(long*)event == this_step() || !has_launched()) record_wait("event");
    return cudaSuccess;
}
EXPORT cudaError_t cudaEventElapsedTime(float* milliseconds, cudaEvent_t, cudaEvent_t) {
    *milliseconds = 5;  // whoever measures kernels does not go on for long
    return cudaSuccess;
}
