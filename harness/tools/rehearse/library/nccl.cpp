// NCCL: communicators of ranks of which only this one is there.
#include "stand_in.h"

#include <nccl.h>

#include <atomic>
#include <cstring>
#include <map>

// What is told of a collective is the name of its communicator: of the unique id, or of the colour of a split.
struct ncclComm {
    int ranks, rank;
    std::string name;
};

namespace {

std::atomic<int> ids{0};
size_t communicator_bytes = 0;

ncclResult_t make(ncclComm_t* comm, int ranks, int rank, const std::string& name) {
    if (!take(communicator_bytes)) return ncclUnhandledCudaError;
    *comm = new ncclComm{ranks, rank, name};
    record("communicator\t" + name, ranks);
    return ncclSuccess;
}

double size_of(ncclDataType_t type) {
    switch (type) {
        case ncclInt8: case ncclUint8: case ncclFloat8e4m3: case ncclFloat8e5m2: return 1;
        case ncclFloat16: case ncclBfloat16: return 2;
        case ncclInt32: case ncclUint32: case ncclFloat32: return 4;
        default: return 8;
    }
}

// The amount is what the rank puts in, in bytes.
ncclResult_t collective(const char* kind, ncclComm_t comm, double elements, ncclDataType_t type, cudaStream_t stream) {
    record(std::string("collective\t") + kind + "\t" + comm->name, elements * size_of(type), stream);
    return ncclSuccess;
}

// Sends between the start and the end of a group are one exchange, with as many bytes as go to others.
thread_local int depth = 0;
thread_local std::map<std::pair<ncclComm_t, cudaStream_t>, double> sent;

void end_group() {
    for (auto& [of, bytes] : sent) record("collective\texchange\t" + of.first->name, bytes, of.second);
    sent.clear();
}

ncclResult_t point_to_point(const char* kind, ncclComm_t comm, int peer, double bytes, cudaStream_t stream) {
    if (peer != comm->rank) record(std::string("point to point\t") + kind + "\t" + comm->name, bytes, stream);
    sent[{comm, stream}] += kind == std::string("send") && peer != comm->rank ? bytes : 0;
    if (!depth) end_group();
    return ncclSuccess;
}

}  // namespace

// Memory of each communicator's buffers.
EXPORT void virtual_gpu_communicators_take(size_t bytes) { communicator_bytes = bytes; }

EXPORT ncclResult_t ncclGetVersion(int* version) {
    *version = NCCL_VERSION_CODE;
    return ncclSuccess;
}
EXPORT const char* ncclGetErrorString(ncclResult_t) { return "error of the virtual GPU's NCCL"; }
EXPORT const char* ncclGetLastError(ncclComm_t) { return ""; }

// An id is text, so that it identifies a communicator. Ids of other ranks come from LoneStore
// (harness/tools/rehearse/substitutes.py).
EXPORT ncclResult_t ncclGetUniqueId(ncclUniqueId* id) {
    *id = {};
    snprintf(id->internal, sizeof id->internal, "id %d", ids++);
    return ncclSuccess;
}
EXPORT ncclResult_t ncclCommInitRank(ncclComm_t* comm, int ranks, ncclUniqueId id, int rank) {
    return make(comm, ranks, rank, id.internal);
}
EXPORT ncclResult_t ncclCommInitRankConfig(ncclComm_t* comm, int ranks, ncclUniqueId id, int rank, ncclConfig_t*) {
    return make(comm, ranks, rank, id.internal);
}
EXPORT ncclResult_t ncclCommInitRankScalable(
    ncclComm_t* comm, int ranks, int rank, int, ncclUniqueId* ids, ncclConfig_t*
) {
    return make(comm, ranks, rank, ids[0].internal);
}
EXPORT ncclResult_t ncclCommSplit(ncclComm_t from, int color, int key, ncclComm_t* comm, ncclConfig_t*) {
    *comm = nullptr;
    if (color == NCCL_SPLIT_NOCOLOR) return ncclSuccess;
    return make(comm, from->ranks, key, "split " + std::to_string(color));
}
EXPORT ncclResult_t ncclCommDestroy(ncclComm_t) { return ncclSuccess; }
EXPORT ncclResult_t ncclCommFinalize(ncclComm_t) { return ncclSuccess; }
EXPORT ncclResult_t ncclCommAbort(ncclComm_t) { return ncclSuccess; }
EXPORT ncclResult_t ncclCommGetAsyncError(ncclComm_t, ncclResult_t* error) {
    *error = ncclSuccess;
    return ncclSuccess;
}
EXPORT ncclResult_t ncclCommCount(const ncclComm_t comm, int* ranks) {
    *ranks = comm->ranks;
    return ncclSuccess;
}
EXPORT ncclResult_t ncclCommUserRank(const ncclComm_t comm, int* rank) {
    *rank = comm->rank;
    return ncclSuccess;
}
EXPORT ncclResult_t ncclCommRegister(const ncclComm_t, void*, size_t, void** handle) {
    *handle = opaque();
    return ncclSuccess;
}
EXPORT ncclResult_t ncclCommDeregister(const ncclComm_t, void* handle) {
    ::operator delete(handle);
    return ncclSuccess;
}
// Symmetric memory; that of other ranks is this rank's.
EXPORT ncclResult_t ncclCommWindowRegister(ncclComm_t, void* start, size_t, ncclWindow_t* window, int) {
    *window = (ncclWindow_t)start;
    return ncclSuccess;
}
EXPORT ncclResult_t ncclCommWindowDeregister(ncclComm_t, ncclWindow_t) { return ncclSuccess; }
EXPORT ncclResult_t ncclGetPeerDevicePointer(ncclWindow_t window, size_t offset, int, void** start) {
    *start = (char*)window + offset;
    return ncclSuccess;
}
EXPORT ncclResult_t ncclGetLsaMultimemDevicePointer(ncclWindow_t, size_t, void** start) {
    *start = nullptr;
    return ncclSuccess;
}
EXPORT ncclResult_t ncclMemAlloc(void** start, size_t bytes) {
    return cudaMalloc(start, bytes) == cudaSuccess ? ncclSuccess : ncclUnhandledCudaError;
}
EXPORT ncclResult_t ncclMemFree(void* start) {
    cudaFree(start);
    return ncclSuccess;
}
EXPORT ncclResult_t ncclRedOpCreatePreMulSum(
    ncclRedOp_t* operation, void*, ncclDataType_t, ncclScalarResidence_t, ncclComm_t
) {
    *operation = ncclSum;
    return ncclSuccess;
}
EXPORT ncclResult_t ncclRedOpDestroy(ncclRedOp_t, ncclComm_t) { return ncclSuccess; }

EXPORT ncclResult_t ncclGroupStart() {
    depth += 1;
    return ncclSuccess;
}
EXPORT ncclResult_t ncclGroupEnd() {
    if (--depth == 0) end_group();
    return ncclSuccess;
}

EXPORT ncclResult_t ncclAllGather(
    const void*, void*, size_t count, ncclDataType_t type, ncclComm_t comm, cudaStream_t stream
) {
    return collective("all_gather", comm, count, type, stream);
}
EXPORT ncclResult_t ncclReduceScatter(
    const void*, void*, size_t count, ncclDataType_t type, ncclRedOp_t, ncclComm_t comm, cudaStream_t stream
) {
    return collective("reduce_scatter", comm, double(count) * comm->ranks, type, stream);
}
EXPORT ncclResult_t ncclAllReduce(
    const void*, void*, size_t count, ncclDataType_t type, ncclRedOp_t, ncclComm_t comm, cudaStream_t stream
) {
    return collective("all_reduce", comm, count, type, stream);
}
EXPORT ncclResult_t ncclAlltoAll(
    const void*, void*, size_t count, ncclDataType_t type, ncclComm_t comm, cudaStream_t stream
) {
    return collective("all_to_all", comm, double(count) * comm->ranks, type, stream);
}
EXPORT ncclResult_t ncclBroadcast(
    const void*, void*, size_t count, ncclDataType_t type, int, ncclComm_t comm, cudaStream_t stream
) {
    return collective("broadcast", comm, count, type, stream);
}
EXPORT ncclResult_t ncclBcast(void*, size_t count, ncclDataType_t type, int, ncclComm_t comm, cudaStream_t stream) {
    return collective("broadcast", comm, count, type, stream);
}
EXPORT ncclResult_t ncclReduce(
    const void*, void*, size_t count, ncclDataType_t type, ncclRedOp_t, int, ncclComm_t comm, cudaStream_t stream
) {
    return collective("reduce", comm, count, type, stream);
}
EXPORT ncclResult_t ncclSend(const void*, size_t count, ncclDataType_t type, int peer, ncclComm_t comm, cudaStream_t stream) {
    return point_to_point("send", comm, peer, count * size_of(type), stream);
}
EXPORT ncclResult_t ncclRecv(void*, size_t count, ncclDataType_t type, int peer, ncclComm_t comm, cudaStream_t stream) {
    return point_to_point("receive", comm, peer, count * size_of(type), stream);
}
