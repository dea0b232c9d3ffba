// Capture and graphs. A graph is a list of closures, which a launch runs one after the other.
#include "state.h"

static u64 next = 1;

API cudaError_t cudaThreadExchangeStreamCaptureMode(cudaStreamCaptureMode* mode) {
  std::swap(*mode, thread_mode);
  return cudaSuccess;
}
API cudaError_t cudaStreamBeginCapture(cudaStream_t stream, cudaStreamCaptureMode mode) {
  Lock lock;
  Stream* s = resolve(stream);
  if (s == devices[s->device].legacy) FAIL(cudaErrorStreamCaptureUnsupported);
  if (s->capture) FAIL(cudaErrorIllegalState);
  Capture* c = s->capture = new Capture{next++, mode, s, std::this_thread::get_id()};
  c->streams.insert(s);
  captures.insert(c);
  TELL("capture %llu begins, mode %d", c->id, (int)mode);
  return cudaSuccess;
}
API cudaError_t cudaStreamEndCapture(cudaStream_t stream, cudaGraph_t* graph) {
  Lock lock;
  Stream* s = resolve(stream);
  Capture* c = s->capture;
  *graph = nullptr;
  if (!c) FAIL(cudaErrorIllegalState);
  if (c->origin != s) { invalidate(c, "cudaStreamEndCapture"); FAIL(cudaErrorStreamCaptureUnmatched); }
  if (c->mode != cudaStreamCaptureModeRelaxed && c->owner != std::this_thread::get_id())
    FAIL(cudaErrorStreamCaptureWrongThread);
  for (Stream* member : c->streams) member->capture = nullptr;
  captures.erase(c);  // the object stays, for events that name it
  TELL("capture %llu ends, %zu operations%s", c->id, c->graph->ops.size(), c->invalid ? ", invalid" : "");
  if (c->invalid) FAIL(cudaErrorStreamCaptureInvalidated);
  *graph = (cudaGraph_t) new Graph(*c->graph);
  return cudaSuccess;
}
API cudaError_t cudaStreamIsCapturing(cudaStream_t stream, cudaStreamCaptureStatus* status) {
  Lock lock;
  Capture* c = resolve(stream)->capture;
  *status = !c ? cudaStreamCaptureStatusNone
               : c->invalid ? cudaStreamCaptureStatusInvalidated : cudaStreamCaptureStatusActive;
  return cudaSuccess;
}
API cudaError_t cudaStreamGetCaptureInfo(cudaStream_t stream, cudaStreamCaptureStatus* status, u64* id,
                                         cudaGraph_t* graph, const cudaGraphNode_t** nodes,
                                         const cudaGraphEdgeData** edges, size_t* n) {
  cudaStreamIsCapturing(stream, status);
  Lock lock;
  Capture* c = resolve(stream)->capture;
  if (c && id) *id = c->id;
  if (graph) *graph = c ? (cudaGraph_t)c->graph.get() : nullptr;
  if (nodes) *nodes = nullptr;
  if (edges) *edges = nullptr;
  if (n) *n = 0;
  return cudaSuccess;
}
API cudaError_t cudaGraphGetNodes(cudaGraph_t graph, cudaGraphNode_t* nodes, size_t* n) {
  size_t count = ((Graph*)graph)->ops.size();
  if (nodes) for (size_t i = 0; i < *n && i < count; i++) nodes[i] = (cudaGraphNode_t)(i + 1);
  *n = count;
  return cudaSuccess;
}
API cudaError_t cudaGraphInstantiateWithFlags(cudaGraphExec_t* exec, cudaGraph_t graph, u64) {
  *exec = (cudaGraphExec_t) new Graph(*(Graph*)graph);
  return cudaSuccess;
}
API cudaError_t cudaGraphLaunch(cudaGraphExec_t exec, cudaStream_t stream) {
  Lock lock;
  auto graph = std::make_shared<Graph>(*(Graph*)exec);
  return set(enqueue(stream, [graph] {
    for (auto& op : graph->ops) if (cudaError_t error = op()) return error;
    return cudaSuccess;
  }));
}
API cudaError_t cudaGraphDestroy(cudaGraph_t graph) { delete (Graph*)graph; return cudaSuccess; }
API cudaError_t cudaGraphExecDestroy(cudaGraphExec_t exec) { delete (Graph*)exec; return cudaSuccess; }

