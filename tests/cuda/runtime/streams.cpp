// Streams, events, and the order in which what is queued runs. A stream is a queue with a thread.
#include "state.h"

#include <chrono>

std::mutex& mu = *new std::mutex;
std::condition_variable& cv = *new std::condition_variable;
std::vector<Stream*>& streams = *new std::vector<Stream*>;
std::set<Capture*>& captures = *new std::set<Capture*>;
std::vector<Device>& devices = *new std::vector<Device>;
cudaError_t sticky = cudaSuccess;
thread_local cudaError_t last = cudaSuccess;
thread_local int current = 0;
thread_local cudaStreamCaptureMode thread_mode = cudaStreamCaptureModeGlobal;

static long setting(const char* name, long otherwise) {
  const char* value = getenv(name);
  return value && *value ? strtol(value, nullptr, 0) : otherwise;
}
const Settings& settings() {
  static const Settings read = [] {
    Settings s{setting("FAKECUDA_DEVICES", 1), setting("FAKECUDA_MIB", 8192), setting("FAKECUDA_DIRTY", 0xCD),
               setting("FAKECUDA_REUSE", 0), setting("FAKECUDA_UNSAFE_SYNC", 1), setting("FAKECUDA_TRACE", 0)};
    if (const char* cc = getenv("FAKECUDA_CC")) sscanf(cc, "%d.%d", &s.major, &s.minor);
    return s;
  }();
  return read;
}
cudaError_t set(cudaError_t error) {
  if (error) last = error;
  return error;
}
Lock::Lock() : std::unique_lock<std::mutex>(mu) {
  for (int i = (int)devices.size(); i < settings().devices; i++) {
    devices.push_back({BASE + i * SPAN, 0, new Stream{i, true}});
    streams.push_back(devices[i].legacy);
  }
}
void touch() {
  if (!devices[current].context) TELL("primary context of device %d", current);
  devices[current].context = true;
}
static bool ready(const Op& op) {
  for (auto& [stream, ticket] : op.after) if (stream->completed < ticket) return false;
  return true;
}
static void work(Stream* s) {
  std::unique_lock<std::mutex> lock(mu);
  for (;;) {
    cv.wait(lock, [&] { return !s->queue.empty() && ready(s->queue.front()); });
    Op op = std::move(s->queue.front());
    s->queue.pop_front();
    lock.unlock();
    cudaError_t error = sticky ? sticky : op.run();
    lock.lock();
    if (error && !sticky) sticky = error;
    s->completed++;
    cv.notify_all();
  }
}
Stream* resolve(cudaStream_t handle) {
  return (uintptr_t)handle <= 2 ? devices[current].legacy : (Stream*)handle;
}
void invalidate(Capture* c, const char* why) {
  if (!c->invalid) TELL("capture %llu invalidated by %s", c->id, why);
  c->invalid = true;
}
// cudaThreadExchangeStreamCaptureMode's rules for a potentially unsafe call, such as cudaMalloc.
cudaError_t unsafe(const char* call) {
  if (thread_mode == cudaStreamCaptureModeRelaxed) return cudaSuccess;
  for (Capture* c : captures) {
    bool mine = c->owner == std::this_thread::get_id() && c->mode != cudaStreamCaptureModeRelaxed;
    bool others = thread_mode == cudaStreamCaptureModeGlobal && c->mode == cudaStreamCaptureModeGlobal;
    if (mine || others) { invalidate(c, call); return cudaErrorStreamCaptureUnsupported; }
  }
  return cudaSuccess;
}
cudaError_t enqueue(cudaStream_t handle, Run run) {  // with the lock held
  if (sticky) return sticky;
  touch();
  Stream* s = resolve(handle);
  if (s->capture) {
    if (s->capture->invalid) return cudaErrorStreamCaptureInvalidated;
    s->capture->graph->ops.push_back(std::move(run));
    return cudaSuccess;
  }
  Op op{std::move(s->waits), std::move(run)};
  s->waits.clear();
  Stream* legacy = devices[s->device].legacy;
  if (s == legacy) {
    for (Stream* other : streams) if (other->blocking && other->device == s->device && other != s) {
      if (other->capture) { invalidate(other->capture, "legacy stream"); return cudaErrorStreamCaptureImplicit; }
      op.after.push_back({other, other->submitted});
    }
  } else if (s->blocking) op.after.push_back({legacy, legacy->submitted});
  s->queue.push_back(std::move(op));
  s->submitted++;
  if (!s->started) { s->started = true; std::thread(work, s).detach(); }
  cv.notify_all();
  return cudaSuccess;
}
cudaError_t finish(Lock& lock, Stream* s, u64 ticket) {
  cv.wait(lock, [&] { return s->completed >= ticket; });
  return sticky;
}
cudaError_t finish_device(Lock& lock, int device) {
  for (size_t i = 0; i < streams.size(); i++)  // more may be made meanwhile
    if (streams[i]->device == device) finish(lock, streams[i], streams[i]->submitted);
  return sticky;
}
// --- what torch calls --------------------------------------------------------------------------------------------
API cudaError_t cudaStreamCreateWithPriority(cudaStream_t* stream, unsigned flags, int priority) {
  Lock lock;
  touch();
  Stream* s = new Stream{current, !(flags & cudaStreamNonBlocking), priority};
  streams.push_back(s);
  *stream = (cudaStream_t)s;
  return cudaSuccess;
}
API cudaError_t cudaStreamCreateWithFlags(cudaStream_t* s, unsigned flags) {
  return cudaStreamCreateWithPriority(s, flags, 0);
}
API cudaError_t cudaStreamCreate(cudaStream_t* s) { return cudaStreamCreateWithPriority(s, 0, 0); }
API cudaError_t cudaStreamDestroy(cudaStream_t) { return cudaSuccess; }  // its object stays, for events that name it
API cudaError_t cudaStreamGetPriority(cudaStream_t stream, int* priority) {
  Lock lock;
  *priority = resolve(stream)->priority;
  return cudaSuccess;
}
static cudaError_t may_wait(Stream* s, const char* call) {
  if (s->capture) { invalidate(s->capture, call); return cudaErrorStreamCaptureUnsupported; }
  return settings().unsafe_sync ? unsafe(call) : cudaSuccess;
}
API cudaError_t cudaStreamSynchronize(cudaStream_t stream) {
  Lock lock;
  Stream* s = resolve(stream);
  if (cudaError_t error = may_wait(s, "cudaStreamSynchronize")) FAIL(error);
  return set(finish(lock, s, s->submitted));
}
API cudaError_t cudaStreamQuery(cudaStream_t stream) {
  Lock lock;
  Stream* s = resolve(stream);
  if (cudaError_t error = may_wait(s, "cudaStreamQuery")) FAIL(error);
  return sticky ? set(sticky) : s->completed < s->submitted ? cudaErrorNotReady : cudaSuccess;
}
API cudaError_t cudaEventCreateWithFlags(cudaEvent_t* e, unsigned) {
  *e = (cudaEvent_t) new Event{current};
  return cudaSuccess;
}
API cudaError_t cudaEventCreate(cudaEvent_t* e) { return cudaEventCreateWithFlags(e, 0); }
API cudaError_t cudaEventDestroy(cudaEvent_t e) { delete (Event*)e; return cudaSuccess; }
API cudaError_t cudaEventRecordWithFlags(cudaEvent_t event, cudaStream_t stream, unsigned) {
  Lock lock;
  Stream* s = resolve(stream);
  Event* e = (Event*)event;
  e->capture = s->capture;
  if (s->capture) return set(s->capture->invalid ? cudaErrorStreamCaptureInvalidated : cudaSuccess);
  auto at = e->at = std::make_shared<double>(0);
  cudaError_t error = enqueue(stream, [at] {
    *at = std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now().time_since_epoch()).count();
    return cudaSuccess;
  });
  e->stream = s;
  e->ticket = s->submitted;
  return set(error);
}
API cudaError_t cudaEventRecord(cudaEvent_t e, cudaStream_t s) { return cudaEventRecordWithFlags(e, s, 0); }
static cudaError_t may_wait(Event* e, const char* call) {
  if (e->capture && captures.count(e->capture)) { invalidate(e->capture, call); return cudaErrorCapturedEvent; }
  return cudaSuccess;
}
API cudaError_t cudaEventQuery(cudaEvent_t event) {
  Lock lock;
  Event* e = (Event*)event;
  if (cudaError_t error = may_wait(e, "cudaEventQuery")) FAIL(error);
  if (cudaError_t error = unsafe("cudaEventQuery")) FAIL(error);
  if (sticky) FAIL(sticky);
  return e->stream && e->stream->completed < e->ticket ? cudaErrorNotReady : cudaSuccess;
}
API cudaError_t cudaEventSynchronize(cudaEvent_t event) {
  Lock lock;
  Event* e = (Event*)event;
  if (cudaError_t error = may_wait(e, "cudaEventSynchronize")) FAIL(error);
  if (settings().unsafe_sync) if (cudaError_t error = unsafe("cudaEventSynchronize")) FAIL(error);
  return set(e->stream ? finish(lock, e->stream, e->ticket) : sticky);
}
API cudaError_t cudaEventElapsedTime(float* ms, cudaEvent_t a, cudaEvent_t b) {
  Lock lock;
  *ms = (float)(*((Event*)b)->at - *((Event*)a)->at);
  return cudaSuccess;
}
API cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned) {
  Lock lock;
  Stream* s = resolve(stream);
  Event* e = (Event*)event;
  if (e->capture && captures.count(e->capture)) {
    if (s->capture && s->capture != e->capture) {
      invalidate(s->capture, "cudaStreamWaitEvent");
      FAIL(cudaErrorStreamCaptureMerge);
    }
    s->capture = e->capture;  // the stream joins the capture
    e->capture->streams.insert(s);
    return cudaSuccess;
  }
  if (!e->stream) return cudaSuccess;
  if (s->capture) {
    invalidate(s->capture, "cudaStreamWaitEvent");
    FAIL(cudaErrorStreamCaptureIsolation);
  }
  s->waits.push_back({e->stream, e->ticket});
  return cudaSuccess;
}
