// Stream capture and graphs: what is captured is counted whenever its graph is launched. What CUDA refuses while a
// stream is captured is refused here, by the same rules (CUDA programming guide, "Creating a graph using stream capture").
#include <atomic>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <thread>

#include "stand_in.h"

namespace {

using Nodes = std::set<long>;

struct Capture {
    unsigned long long id;
    cudaStream_t origin;
    cudaStreamCaptureMode mode;
    std::thread::id thread = std::this_thread::get_id();
    bool valid = true;
    long count = 0;
    Nodes leaves;                           // nodes that nothing follows yet
    std::map<const void*, Nodes> streams;   // streams that take part, and what their next node follows
    Recorded recorded;
};

struct Graph {
    long count;
    Recorded recorded;
};
using Shared = std::shared_ptr<Graph>;

std::mutex mutex;
std::unique_ptr<Capture> capture;       // a process has one at a time
std::atomic<bool> active{false};
std::atomic<unsigned long long> captures{0};
std::map<cudaEvent_t, std::pair<unsigned long long, Nodes>>& captured_events() {
    static auto* all = new std::map<cudaEvent_t, std::pair<unsigned long long, Nodes>>;
    return *all;
}
thread_local cudaStreamCaptureMode mode_of_thread = cudaStreamCaptureModeGlobal;

// These need the mutex.
bool takes_part(const void* stream) { return capture && capture->streams.count(stream); }

cudaError_t refuse(cudaError_t error) {
    capture->valid = false;
    record(std::string("refused in a capture\t") + cudaGetErrorString(error));
    return error;
}

}  // namespace

bool captured(const void* stream, const std::function<void(Recorded&)>& add) {
    if (!active) return false;
    std::lock_guard<std::mutex> lock(mutex);
    if (!takes_part(stream)) return false;
    Nodes& before = capture->streams[stream];
    for (long node : before) capture->leaves.erase(node);
    before = {++capture->count};
    capture->leaves.insert(capture->count);
    add(capture->recorded);
    return true;
}

const void* captured_origin() {
    if (!active) return nullptr;
    std::lock_guard<std::mutex> lock(mutex);
    return capture ? capture->origin : nullptr;
}

cudaError_t wait_is_allowed(const void* stream) {
    if (!active) return cudaSuccess;
    std::lock_guard<std::mutex> lock(mutex);
    return takes_part(stream) ? refuse(cudaErrorStreamCaptureUnsupported) : cudaSuccess;
}

cudaError_t call_is_allowed() {
    if (!active || mode_of_thread == cudaStreamCaptureModeRelaxed) return cudaSuccess;
    std::lock_guard<std::mutex> lock(mutex);
    if (!capture || capture->mode == cudaStreamCaptureModeRelaxed) return cudaSuccess;
    bool own = capture->thread == std::this_thread::get_id();
    bool concerns = own || (capture->mode == cudaStreamCaptureModeGlobal && mode_of_thread == cudaStreamCaptureModeGlobal);
    return concerns ? refuse(cudaErrorStreamCaptureUnsupported) : cudaSuccess;
}

bool record_captured(cudaEvent_t event, cudaStream_t stream) {
    if (!captures) return false;
    std::lock_guard<std::mutex> lock(mutex);
    captured_events().erase(event);
    if (!takes_part(stream)) return false;
    captured_events()[event] = {capture->id, capture->streams[stream]};
    return true;
}

void forget_captured(cudaEvent_t event) {
    if (!captures) return;
    std::lock_guard<std::mutex> lock(mutex);
    captured_events().erase(event);
}

bool is_captured(cudaEvent_t event) {
    if (!captures) return false;
    std::lock_guard<std::mutex> lock(mutex);
    return captured_events().count(event);
}

cudaError_t wait_captured(cudaStream_t stream, cudaEvent_t event, bool was_recorded) {
    if (!captures) return cudaSuccess;
    std::lock_guard<std::mutex> lock(mutex);
    auto found = captured_events().find(event);
    if (found == captured_events().end())
        return takes_part(stream) && was_recorded ? refuse(cudaErrorStreamCaptureIsolation) : cudaSuccess;
    if (!capture || found->second.first != capture->id) return cudaErrorCapturedEvent;
    capture->streams[stream].insert(found->second.second.begin(), found->second.second.end());
    return cudaSuccess;
}

EXPORT cudaError_t cudaThreadExchangeStreamCaptureMode(cudaStreamCaptureMode* mode) {
    std::swap(*mode, mode_of_thread);
    return cudaSuccess;
}
EXPORT cudaError_t cudaStreamBeginCapture(cudaStream_t stream, cudaStreamCaptureMode mode) {
    std::lock_guard<std::mutex> lock(mutex);
    if (capture || !stream) return cudaErrorStreamCaptureUnsupported;
    capture.reset(new Capture{++captures, stream, mode});
    capture->streams[stream];
    active = true;
    return cudaSuccess;
}
EXPORT cudaError_t cudaStreamEndCapture(cudaStream_t stream, cudaGraph_t* graph) {
    std::lock_guard<std::mutex> lock(mutex);
    *graph = nullptr;
    if (!capture || capture->origin != stream) return cudaErrorStreamCaptureUnmatched;
    const Nodes& last = capture->streams[stream];
    bool joined = true;
    for (long node : capture->leaves) joined = joined && last.count(node);
    cudaError_t error = !capture->valid ? cudaErrorStreamCaptureInvalidated
                        : !joined       ? refuse(cudaErrorStreamCaptureUnjoined)
                                        : cudaSuccess;
    if (error == cudaSuccess)
        *graph = (cudaGraph_t) new Shared(new Graph{capture->count, std::move(capture->recorded)});
    capture.reset();
    active = false;
    return error;
}
EXPORT cudaError_t cudaStreamIsCapturing(cudaStream_t stream, cudaStreamCaptureStatus* status) {
    std::lock_guard<std::mutex> lock(mutex);
    *status = !takes_part(stream) ? cudaStreamCaptureStatusNone
              : capture->valid    ? cudaStreamCaptureStatusActive
                                  : cudaStreamCaptureStatusInvalidated;
    return cudaSuccess;
}
// The parameters changed from CUDA 12 to 13; only the first four matter.
#undef cudaStreamGetCaptureInfo
EXPORT cudaError_t virtual_gpu_capture_info(cudaStream_t stream, cudaStreamCaptureStatus* status, unsigned long long* id) {
    cudaStreamIsCapturing(stream, status);
    if (id) *id = *status == cudaStreamCaptureStatusNone ? 0 : captures.load();
    return cudaSuccess;
}
asm(".globl cudaStreamGetCaptureInfo\n.set cudaStreamGetCaptureInfo, virtual_gpu_capture_info");
asm(".globl cudaStreamGetCaptureInfo_v2\n.set cudaStreamGetCaptureInfo_v2, virtual_gpu_capture_info");
asm(".globl cudaStreamGetCaptureInfo_v3\n.set cudaStreamGetCaptureInfo_v3, virtual_gpu_capture_info");

EXPORT cudaError_t cudaGraphGetNodes(cudaGraph_t graph, cudaGraphNode_t* nodes, size_t* count) {
    if (nodes) return cudaErrorNotSupported;
    *count = (*(Shared*)graph)->count;
    return cudaSuccess;
}
EXPORT cudaError_t cudaGraphInstantiateWithFlags(cudaGraphExec_t* executable, cudaGraph_t graph, unsigned long long) {
    *executable = (cudaGraphExec_t) new Shared(*(Shared*)graph);
    return cudaSuccess;
}
EXPORT cudaError_t cudaGraphDestroy(cudaGraph_t graph) {
    delete (Shared*)graph;
    return cudaSuccess;
}
EXPORT cudaError_t cudaGraphExecDestroy(cudaGraphExec_t executable) {
    delete (Shared*)executable;
    return cudaSuccess;
}
EXPORT cudaError_t cudaGraphLaunch(cudaGraphExec_t executable, cudaStream_t) {
    record_graph((*(Shared*)executable)->recorded);
    return cudaSuccess;
}
