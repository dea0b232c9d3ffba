// Memory: mapped host memory, dirty at first, at addresses that are never used again (FAKECUDA_REUSE=1: first fit).
#include "state.h"

#include <sys/mman.h>
#include <unistd.h>

#include <cstring>

std::map<uintptr_t, Memory>& memory = *new std::map<uintptr_t, Memory>;
static size_t capacity() { return (size_t)settings().mib << 20; }

bool map_memory(uintptr_t at, size_t size) {
  const int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED_NOREPLACE;
  if (mmap((void*)at, size, PROT_READ | PROT_WRITE, flags, -1, 0) != (void*)at) {
    perror("fakecuda: mmap");
    return false;
  }
  madvise((void*)at, size, MADV_HUGEPAGE);  // for speed alone
  if (settings().dirty) memset((void*)at, (int)settings().dirty, size);
  memory[at] = {size, current, false};
  return true;
}

cudaError_t illegal(const char* what, const void* p, size_t n) {
  SAY("illegal memory access: %s at %p, %zu bytes", what, p, n);
  return cudaErrorIllegalAddress;
}
bool live(const void* p, size_t n) {  // takes the lock; anything that is no device address is host memory
  if ((uintptr_t)p < BASE || (uintptr_t)p >= BASE + SPAN * settings().devices) return p != nullptr;
  std::lock_guard<std::mutex> lock(mu);
  auto found = memory.upper_bound((uintptr_t)p);
  if (found == memory.begin()) return false;
  --found;
  uintptr_t end = found->first + found->second.size;
  // What is mapped side by side is one.
  for (++found; found != memory.end() && found->first == end; ++found) end += found->second.size;
  return (uintptr_t)p < end && (uintptr_t)p + n <= end;
}
bool on_device(uintptr_t p) {
  std::lock_guard<std::mutex> lock(mu);
  auto found = memory.upper_bound(p);
  if (found == memory.begin()) return false;
  --found;
  return !found->second.host && p < found->first + found->second.size;
}

API cudaError_t cudaMalloc(void** p, size_t n) {
  Lock lock;
  *p = nullptr;
  if (sticky) FAIL(sticky);
  if (cudaError_t error = unsafe("cudaMalloc")) FAIL(error);
  if (!n) return cudaSuccess;
  touch();
  size_t size = (n + PAGE - 1) / PAGE * PAGE;
  Device& d = devices[current];
  if (d.used + size > capacity()) FAIL(cudaErrorMemoryAllocation);
  uintptr_t at = d.next;
  if (settings().reuse) {
    at = BASE + current * SPAN;
    for (auto& [start, m] : memory) {
      if (m.host || m.device != current) continue;
      if (at + size <= start) break;
      at = start + m.size;
    }
  }
  if (!map_memory(at, size)) FAIL(cudaErrorMemoryAllocation);
  d.next = std::max(d.next, at + size);
  d.used += size;
  *p = (void*)at;
  TELL("cudaMalloc %zu -> %p", n, *p);
  return cudaSuccess;
}
API cudaError_t cudaFree(void* p) {
  Lock lock;
  if (!p) return set(sticky);
  if (cudaError_t error = unsafe("cudaFree")) FAIL(error);
  auto found = memory.find((uintptr_t)p);
  if (found == memory.end() || found->second.host) FAIL(cudaErrorInvalidValue);
  finish_device(lock, found->second.device);
  TELL("cudaFree %p, %zu", p, found->second.size);
  munmap(p, found->second.size);
  devices[found->second.device].used -= found->second.size;
  memory.erase(found);
  return set(sticky);
}
API cudaError_t cudaHostAlloc(void** p, size_t n, unsigned) {
  Lock lock;
  if (cudaError_t error = unsafe("cudaHostAlloc")) FAIL(error);
  if (posix_memalign(p, 4096, n ? n : 1)) FAIL(cudaErrorMemoryAllocation);
  memory[(uintptr_t)*p] = {n, current, true};
  return cudaSuccess;
}
API cudaError_t cudaFreeHost(void* p) {
  Lock lock;
  if (!p) return cudaSuccess;
  if (cudaError_t error = unsafe("cudaFreeHost")) FAIL(error);
  finish_device(lock, current);
  memory.erase((uintptr_t)p);
  free(p);
  return cudaSuccess;
}
API cudaError_t cudaMemGetInfo(size_t* unused, size_t* total) {
  Lock lock;
  *total = capacity();
  *unused = capacity() - devices[current].used;
  return cudaSuccess;
}
API cudaError_t cudaPointerGetAttributes(cudaPointerAttributes* a, const void* p) {
  Lock lock;
  memset(a, 0, sizeof *a);
  a->device = -1;
  auto found = memory.upper_bound((uintptr_t)p);
  if (found == memory.begin()) return cudaSuccess;
  --found;
  if ((uintptr_t)p >= found->first + found->second.size) return cudaSuccess;
  a->type = found->second.host ? cudaMemoryTypeHost : cudaMemoryTypeDevice;
  a->device = found->second.device;
  a->devicePointer = (void*)p;
  if (found->second.host) a->hostPointer = (void*)p;
  return cudaSuccess;
}
bool known(const void* p) {
  auto found = memory.upper_bound((uintptr_t)p);
  return found != memory.begin() && (uintptr_t)p < (--found)->first + found->second.size;
}
API cudaError_t cudaMemcpyAsync(void* dst, const void* src, size_t n, cudaMemcpyKind, cudaStream_t stream) {
  Lock lock;
  TELL("memcpy %p <- %p, %zu on %p", dst, src, n, (void*)stream);
  std::shared_ptr<std::string> staged;
  if (!known(src) && ((uintptr_t)src < BASE || (uintptr_t)src >= BASE + SPAN * settings().devices))
    staged = std::make_shared<std::string>((const char*)src, n);  // pageable memory may change once we return
  cudaError_t error = enqueue(stream, [=] {
    const void* from = staged ? staged->data() : src;
    CHECK("memcpy to", dst, n);
    CHECK("memcpy from", from, n);
    memmove(dst, from, n);
    return cudaSuccess;
  });
  Stream* s = resolve(stream);
  if (!error && !s->capture && !known(dst)) error = finish(lock, s, s->submitted);
  return set(error);
}
API cudaError_t cudaMemcpyPeerAsync(void* dst, int, const void* src, int, size_t n, cudaStream_t stream) {
  return cudaMemcpyAsync(dst, src, n, cudaMemcpyDefault, stream);
}
API cudaError_t cudaMemcpy(void* dst, const void* src, size_t n, cudaMemcpyKind kind) {
  { Lock lock; if (cudaError_t error = unsafe("cudaMemcpy")) FAIL(error); }
  cudaError_t error = cudaMemcpyAsync(dst, src, n, kind, nullptr);
  Lock lock;
  return set(error ? error : finish(lock, resolve(nullptr), resolve(nullptr)->submitted));
}
API cudaError_t cudaMemsetAsync(void* p, int value, size_t n, cudaStream_t stream) {
  Lock lock;
  TELL("memset %p, %d, %zu on %p", p, value, n, (void*)stream);
  return set(enqueue(stream, [=] { CHECK("memset", p, n); memset(p, value, n); return cudaSuccess; }));
}
API cudaError_t cudaMemset(void* p, int value, size_t n) {
  { Lock lock; if (cudaError_t error = unsafe("cudaMemset")) FAIL(error); }
  return cudaMemsetAsync(p, value, n, nullptr);
}

// Virtual memory, for torch's expandable segments. A handle is only a size: what it held is lost when it is unmapped.
struct Handle { size_t size; int device; };
API int cuMemAddressReserve(uintptr_t* p, size_t n, size_t, uintptr_t, u64) {
  Lock lock;
  touch();
  *p = devices[current].next;
  devices[current].next += (n + PAGE - 1) / PAGE * PAGE;
  return 0;
}
API int cuMemAddressFree(uintptr_t, size_t) { return 0; }
API int cuMemCreate(u64* handle, size_t n, const void*, u64) {
  Lock lock;
  if (devices[current].used + n > capacity()) return 2;
  devices[current].used += n;
  *handle = (u64) new Handle{n, current};
  return 0;
}
API int cuMemRelease(u64 handle) {
  Lock lock;
  Handle* h = (Handle*)handle;
  devices[h->device].used -= h->size;
  delete h;
  return 0;
}
API int cuMemMap(uintptr_t p, size_t n, size_t, u64 handle, u64) {
  Lock lock;
  if (!map_memory(p, n)) return 1;
  memory[p].device = ((Handle*)handle)->device;
  return 0;
}
API int cuMemSetAccess(uintptr_t, size_t, const void*, size_t) { return 0; }
API int cuMemUnmap(uintptr_t p, size_t n) {
  Lock lock;
  for (auto it = memory.lower_bound(p); it != memory.end() && it->first < p + n;) {
    munmap((void*)it->first, it->second.size);
    it = memory.erase(it);
  }
  return 0;
}
API int cuMemGetAllocationGranularity(size_t* n, const void*, int) { *n = PAGE; return 0; }
