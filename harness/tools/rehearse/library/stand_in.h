// A CUDA without a GPU: calls succeed, take the memory they would take, and compute nothing.
//
// runtime.cpp  the runtime: memory, streams, events, launches
// driver.cpp   the driver: virtual memory, modules (Triton's kernels), entry points by name
// blas.cpp     cuBLAS and cuBLASLt: products, with their shapes
// nccl.cpp     communicators and collectives, with their bytes
// nvml.cpp     what torch asks of NVML
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
#include <string>

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
void record(const std::string& event, double amount = 0);  // fields are separated by tabs
void record_launch(const void* function);
void name_function(const void* function, const char* mangled);
void record_wait(const char* how);                // the host waits for the device
long this_step();                                 // the number of virtual_gpu_clear's calls
bool has_launched();                              // whether a kernel was launched since the last one
void record_copy(const char* how, size_t bytes);
