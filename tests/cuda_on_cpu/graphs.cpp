// CUDA graphs: a capture keeps launches in the order of the host, a replay queues them in that order.
#include "device.h"

#include <algorithm>
#include <functional>
#include <thread>

struct CUgraphExec_st {
  GraphPtr graph;
};

static auto& graphs = *new std::vector<GraphPtr>;  // those that handles stand for
static auto& captures = *new std::vector<GraphPtr>;
static std::mutex graphs_mutex;
static thread_local cudaStreamCaptureMode thread_mode = cudaStreamCaptureModeGlobal;

static size_t this_thread() { return std::hash<std::thread::id>{}(std::this_thread::get_id()); }

static GraphPtr find(cudaGraph_t graph) {
  std::lock_guard<std::mutex> lock(graphs_mutex);
  for (auto& known : graphs)
    if (known.get() == graph) return known;
  return nullptr;
}

/// A call that waits for a stream under capture is forbidden in every mode.
cudaError_t forbid_in_capture(cudaStream_t handle) {
  auto graph = stream_of(handle)->capture;
  if (!graph) return forbid_unsafe();
  graph->invalid = true;
  return fail(cudaErrorStreamCaptureUnsupported);
}

/// An unsafe call is forbidden to a thread in a capture of its own, or of any thread if it is global.
cudaError_t forbid_unsafe() {
  if (thread_mode == cudaStreamCaptureModeRelaxed) return cudaSuccess;
  std::lock_guard<std::mutex> lock(graphs_mutex);
  for (auto& graph : captures) {
    const bool own = graph->thread == this_thread() && graph->mode != cudaStreamCaptureModeRelaxed;
    const bool global = graph->mode == cudaStreamCaptureModeGlobal &&
                        thread_mode == cudaStreamCaptureModeGlobal;
    if (!own && !global) continue;
    graph->invalid = true;
    return fail(cudaErrorStreamCaptureUnsupported);
  }
  return cudaSuccess;
}

extern "C" {

cudaError_t cudaStreamBeginCapture(cudaStream_t handle, cudaStreamCaptureMode mode) {
  static unsigned long long ids = 0;
  auto stream = stream_of(handle);
  // The legacy default stream cannot be captured.
  if (handle == nullptr || handle == cudaStreamLegacy || stream->capture)
    return fail(cudaErrorStreamCaptureUnsupported);
  auto graph = std::make_shared<CUgraph_st>();
  std::lock_guard<std::mutex> lock(graphs_mutex);
  graph->id = ++ids;
  graph->mode = mode;
  graph->origin = stream;
  graph->thread = this_thread();
  graph->streams = {stream};
  stream->capture = graph;
  stream->captured = stream->joined = 0;
  captures.push_back(graph);
  return cudaSuccess;
}

/// The graph, or an error if a forbidden call came or a stream was not joined to the first.
cudaError_t cudaStreamEndCapture(cudaStream_t handle, cudaGraph_t* out) {
  *out = nullptr;
  auto graph = stream_of(handle)->capture;
  if (!graph) return fail(cudaErrorIllegalState);
  if (graph->origin != stream_of(handle)) return fail(cudaErrorStreamCaptureUnmatched);
  bool unjoined = false;
  for (auto stream : graph->streams) {
    unjoined |= stream != graph->origin && stream->joined < stream->captured;
    stream->capture = nullptr;
  }
  std::lock_guard<std::mutex> lock(graphs_mutex);
  captures.erase(std::remove(captures.begin(), captures.end(), graph), captures.end());
  if (graph->invalid) return fail(cudaErrorStreamCaptureInvalidated);
  if (unjoined) return fail(cudaErrorStreamCaptureUnjoined);
  graphs.push_back(graph);
  *out = graph.get();
  return cudaSuccess;
}

cudaError_t cudaStreamIsCapturing(cudaStream_t handle, cudaStreamCaptureStatus* status) {
  auto graph = stream_of(handle)->capture;
  *status = !graph           ? cudaStreamCaptureStatusNone
            : graph->invalid ? cudaStreamCaptureStatusInvalidated
                             : cudaStreamCaptureStatusActive;
  return cudaSuccess;
}
cudaError_t cudaStreamGetCaptureInfo(cudaStream_t handle, cudaStreamCaptureStatus* status,
                                     unsigned long long* id, cudaGraph_t* graph,
                                     const cudaGraphNode_t** dependencies,
                                     const cudaGraphEdgeData** edges, size_t* count) {
  cudaStreamIsCapturing(handle, status);
  auto found = stream_of(handle)->capture;
  if (id) *id = found ? found->id : 0;
  if (graph) *graph = found.get();
  if (dependencies) *dependencies = nullptr;
  if (edges) *edges = nullptr;
  if (count) *count = 0;
  return cudaSuccess;
}
cudaError_t cudaThreadExchangeStreamCaptureMode(cudaStreamCaptureMode* mode) {
  std::swap(thread_mode, *mode);
  return cudaSuccess;
}

cudaError_t cudaGraphGetNodes(cudaGraph_t graph, cudaGraphNode_t* nodes, size_t* count) {
  if (nodes) return not_built("cudaGraphGetNodes with a list");
  *count = graph->nodes.size();
  return cudaSuccess;
}
cudaError_t cudaGraphInstantiateWithFlags(cudaGraphExec_t* exec, cudaGraph_t graph,
                                          unsigned long long) {
  *exec = (cudaGraphExec_t) new CUgraphExec_st{find(graph)};  // It no longer needs the graph.
  return cudaSuccess;
}
/// All nodes run behind the work of the stream, and later work of the stream behind them.
cudaError_t cudaGraphLaunch(cudaGraphExec_t exec, cudaStream_t stream) {
  for (auto& [launch, uses] : ((CUgraphExec_st*)exec)->graph->nodes)
    if (auto error = submit(stream, launch, uses)) return error;
  return cudaSuccess;
}
/// A launch that is under way ends first.
cudaError_t cudaGraphExecDestroy(cudaGraphExec_t exec) {
  delete (CUgraphExec_st*)exec;
  return cudaSuccess;
}
cudaError_t cudaGraphDestroy(cudaGraph_t graph) {
  GraphPtr last = find(graph);  // let go outside of the lock
  std::lock_guard<std::mutex> lock(graphs_mutex);
  graphs.erase(std::remove(graphs.begin(), graphs.end(), last), graphs.end());
  return cudaSuccess;
}
}
