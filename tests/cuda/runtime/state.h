// A CUDA runtime of host memory, on which PyTorch's own host code runs without a GPU: its caching allocator, graph
// pools, streams, events and capture state. Here is what it knows, and the one lock over all of it.
//
// Known to differ from a driver: no cuDNN, cuBLAS, Triton, cudaMallocAsync, IPC; few kernels (kernels.cpp); streams
// that are not joined at the end of a capture are no error; a capture that the wrong thread ends stays active; timing
// means nothing. Whether a wait for another stream ends a capture of mode "global" is not known: FAKECUDA_UNSAFE_SYNC.
#pragma once
#include <cuda_runtime_api.h>

#include <condition_variable>
#include <cstdio>
#include <cstdlib>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <thread>
#include <unordered_map>
#include <vector>

#define API extern "C" __attribute__((visibility("default")))
using u64 = unsigned long long;

struct Settings {
  long devices;      // FAKECUDA_DEVICES=1
  long mib;          // FAKECUDA_MIB=8192: the memory of each
  long dirty;        // FAKECUDA_DIRTY=0xCD: what fresh memory is full of
  long reuse;        // FAKECUDA_REUSE=0; 1: addresses that were freed are handed out again, else never
  long unsafe_sync;  // FAKECUDA_UNSAFE_SYNC=1; 0: while another thread captures, a stream or an event may be waited for
  long trace;        // FAKECUDA_TRACE=0; 1: what the runtime is asked for, on standard error
  int major = 9, minor = 0;  // FAKECUDA_CC=9.0, the compute capability
};
// Read when the process first asks: a test may set them after it has loaded torch, and after a fork.
const Settings& settings();

#define SAY(...) (fprintf(stderr, "fakecuda: " __VA_ARGS__), fputc('\n', stderr))
#define TELL(...) (settings().trace ? (void)SAY(__VA_ARGS__) : (void)0)
#define FAIL(error, ...) do { TELL("%s -> %d", __func__, (int)(error)); return set(error); } while (0)

constexpr size_t PAGE = 2 << 20;
constexpr uintptr_t BASE = 0x200000000000, SPAN = 1ull << 40;  // of device 0; each device has its own terabyte

using Run = std::function<cudaError_t()>;
struct Stream;
struct Graph {
  std::vector<Run> ops;
};
struct Capture {
  u64 id;
  cudaStreamCaptureMode mode;
  Stream* origin;
  std::thread::id owner;
  bool invalid = false;
  std::shared_ptr<Graph> graph = std::make_shared<Graph>();
  std::set<Stream*> streams;
};
struct Op {
  std::vector<std::pair<Stream*, u64>> after;
  Run run;
};
struct Stream {
  int device;
  bool blocking;  // against the legacy default stream of its device
  int priority = 0;
  u64 submitted = 0, completed = 0;  // operations
  std::deque<Op> queue;
  bool started = false;  // its thread
  Capture* capture = nullptr;
  std::vector<std::pair<Stream*, u64>> waits;  // of the next operation
};
struct Event {
  int device;
  Stream* stream = nullptr;
  u64 ticket = 0;
  Capture* capture = nullptr;
  std::shared_ptr<double> at = std::make_shared<double>(0);  // milliseconds
};
struct Memory {
  size_t size;
  int device;
  bool host;
};
struct Device {
  uintptr_t next;  // address that was never used
  size_t used = 0;
  Stream* legacy;
  bool context = false;
};

// Never destroyed: the threads of the streams outlive main().
extern std::mutex& mu;
extern std::condition_variable& cv;  // an operation was queued, or is done
extern std::map<uintptr_t, Memory>& memory;
extern std::vector<Stream*>& streams;
extern std::set<Capture*>& captures;
extern std::vector<Device>& devices;
extern cudaError_t sticky;  // after it, nothing works any more
extern thread_local cudaError_t last;
extern thread_local int current;  // device
extern thread_local cudaStreamCaptureMode thread_mode;

struct Lock : std::unique_lock<std::mutex> {
  Lock();
};
cudaError_t set(cudaError_t error);

// With the lock held.
void touch();                               // makes the current device's context
Stream* resolve(cudaStream_t handle);
void invalidate(Capture* c, const char* why);
cudaError_t unsafe(const char* call);       // cudaThreadExchangeStreamCaptureMode's rules
cudaError_t enqueue(cudaStream_t handle, Run run);
cudaError_t finish(Lock& lock, Stream* s, u64 ticket);
cudaError_t finish_device(Lock& lock, int device);
bool map_memory(uintptr_t at, size_t size);  // dirty, on the current device
bool known(const void* p);                   // memory of a device, or pinned

// Without it.
bool live(const void* p, size_t n);
bool on_device(uintptr_t p);
cudaError_t illegal(const char* what, const void* p, size_t n);
#define CHECK(what, p, n) do { if (!live(p, n)) return illegal(what, p, n); } while (0)
