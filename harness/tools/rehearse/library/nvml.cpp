// NVML, as far as torch asks it; handles and structures are opaque here.
#include <cstdio>
#include <cstring>

#include "stand_in.h"

EXPORT int nvmlInit_v2() { return 0; }
EXPORT int nvmlShutdown() { return 0; }
EXPORT const char* nvmlErrorString(int) { return "error of the virtual GPU's NVML"; }
EXPORT int nvmlSystemGetCudaDriverVersion_v2(int* version) {
    *version = CUDA_VERSION;
    return 0;
}
EXPORT int nvmlDeviceGetCount_v2(unsigned* count) {
    *count = device.count;
    return 0;
}
static int the_device(void** handle) {
    *handle = &device;
    return 0;
}
EXPORT int nvmlDeviceGetHandleByPciBusId_v2(const char*, void** handle) { return the_device(handle); }
EXPORT int nvmlDeviceGetHandleByIndex_v2(unsigned, void** handle) { return the_device(handle); }
EXPORT int nvmlDeviceGetHandleByUUID(const char*, void** handle) { return the_device(handle); }
EXPORT int nvmlDeviceGetUUID(void*, char* uuid, unsigned length) {
    snprintf(uuid, length, "GPU-00000000-0000-0000-0000-000000000000");
    return 0;
}
EXPORT int nvmlDeviceGetName(void*, char* name, unsigned length) {
    snprintf(name, length, "%s", device.name);
    return 0;
}
EXPORT int nvmlDeviceGetComputeRunningProcesses(void*, unsigned* count, void*) {
    *count = 0;
    return 0;
}
EXPORT int nvmlDeviceGetNvLinkRemoteDeviceType(void*, unsigned, int* type) {
    *type = 1;  // a switch
    return 0;
}
EXPORT int nvmlDeviceGetNvLinkRemotePciInfo_v2(void*, unsigned, void*) { return 0; }
EXPORT int nvmlDeviceGetGpuFabricInfoV(void*, void*) { return 0; }  // its state stays 0: not supported
