// A CUDA without a GPU: calls succeed, take the memory they would take, and compute nothing.
//
// runtime.cpp  the runtime: memory, streams, events, launches
// driver.cpp   the driver: virtual memory, modules (Triton's kernels), entry points by name
// blas.cpp     cuBLAS and cuBLASLt: products, with their shapes
// nccl.cpp     communicators and collectives, with their bytes
// nvml.cpp     what torch asks of NVML
// capture.cpp  stream capture and graphs
// record.cpp   what was called, for whoever looks on; stand_in.h: what these files share
#pragma once

// cuBLAS and NCCL name 16- and 8-bit numbers; the headers that have them need a C++ library for devices.
#define __CUDA_FP16_H__
#define __CUDA_BF16_H__
#define __CUDA_FP8_H__
struct __half;
struct __nv_bfloat16;

#include <cuda.h>
#include <cuda_runtime_api.h>

#include <cstddef>
#include <functional>
#include <map>
#include <string>
#include <unordered_map>

#define EXPORT extern "C" __attribute__((visibility("default"), used))

// The device that every call is about. A process has one; CUDA counts as many as the node has.
struct Device {
    char name[256];
    int major, minor;
    size_t bytes;
    int multiprocessors;
    int shared_kib;  // of a multiprocessor; a block can have one KiB less
    int count;
};
extern Device device;
int visible_devices();

// Memory (runtime.cpp). Device memory is address space whose pages are never touched.
void* reserve(size_t bytes);
bool take(size_t bytes);  // false: the device is full
void give_back(size_t bytes);
size_t taken();
void add_device_range(void* start, size_t bytes);
void remove_device_range(void* start);
void* device_range(void* place, size_t* bytes);  // the range that a place is in

// An object that the caller knows by its address only.
inline void* opaque() { return ::operator new(64); }

// Record (record.cpp).
struct Tally {
    long count = 0;
    double amount = 0;
};
struct Recorded {
    std::map<std::string, Tally> events;  // fields are separated by tabs
    std::unordered_map<const void*, long> launches;
};
// With a stream that is captured, the capture's graph records it.
void record(const std::string& event, double amount = 0, const void* stream = nullptr);
void record_launch(const void* function, const void* stream);
void record_graph(const Recorded& graph);         // a graph is launched
void name_function(const void* function, const char* mangled);
void record_wait(const char* how);                // the host waits for the device
long this_step();                                 // the number of virtual_gpu_clear's calls
bool has_launched();                              // whether a kernel was launched since the last one
void record_copy(const char* how, size_t bytes, const void* stream);

// Capture (capture.cpp).
bool captured(const void* stream, const std::function<void(Recorded&)>& add);  // false: the stream is not captured
const void* captured_origin();                         // the stream whose capture began; null: no capture
cudaError_t wait_is_allowed(const void* stream);       // not for what is captured
cudaError_t call_is_allowed();                         // of those that may wait: memory
bool record_captured(cudaEvent_t event, cudaStream_t stream);
bool is_captured(cudaEvent_t event);
void forget_captured(cudaEvent_t event);
cudaError_t wait_captured(cudaStream_t stream, cudaEvent_t event, bool was_recorded);
