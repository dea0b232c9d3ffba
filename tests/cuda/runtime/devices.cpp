// Devices, errors, and what torch asks of the driver and of NVML.
#include "state.h"

#include <dlfcn.h>
#include <unistd.h>

#include <cstring>

API cudaError_t cudaGetDeviceCount(int* n) {
  *n = (int)settings().devices;
  return cudaSuccess;
}
API cudaError_t cudaGetDevice(int* device) { *device = current; return cudaSuccess; }
API cudaError_t cudaSetDevice(int device) {
  if (device < 0 || device >= settings().devices) FAIL(cudaErrorInvalidDevice);
  Lock lock;
  current = device;
  touch();  // since CUDA 12, cudaSetDevice makes the primary context
  return set(sticky);
}
API cudaError_t cudaDriverGetVersion(int* v) { *v = 13000; return cudaSuccess; }
API cudaError_t cudaRuntimeGetVersion(int* v) { *v = 13000; return cudaSuccess; }
API cudaError_t cudaGetDeviceProperties(cudaDeviceProp* p, int device) {
  if (device < 0 || device >= settings().devices) FAIL(cudaErrorInvalidDevice);
  memset(p, 0, sizeof *p);
  snprintf(p->name, sizeof p->name, "fakecuda (host memory)");
  memcpy(p->uuid.bytes, "fakecuda-device0", 16); p->uuid.bytes[15] += (char)device;
  p->totalGlobalMem = (size_t)settings().mib << 20;
  p->sharedMemPerBlock = 48 << 10; p->sharedMemPerBlockOptin = 227 << 10;
  p->sharedMemPerMultiprocessor = 228 << 10; p->regsPerBlock = p->regsPerMultiprocessor = 65536; p->warpSize = 32;
  p->maxThreadsPerBlock = 1024; p->maxThreadsDim[0] = p->maxThreadsDim[1] = 1024; p->maxThreadsDim[2] = 64;
  p->maxGridSize[0] = 2147483647; p->maxGridSize[1] = p->maxGridSize[2] = 65535; p->totalConstMem = 65536;
  p->major = settings().major; p->minor = settings().minor;
  p->multiProcessorCount = 16; p->maxThreadsPerMultiProcessor = 2048; p->maxBlocksPerMultiProcessor = 32;
  p->l2CacheSize = 50 << 20; p->memoryBusWidth = 256; p->concurrentKernels = p->unifiedAddressing = 1;
  p->textureAlignment = 512; p->asyncEngineCount = 1; p->streamPrioritiesSupported = 1; p->cooperativeLaunch = 1;
  p->pciBusID = device + 1; p->memPitch = 2147483647; p->computePreemptionSupported = 1; p->canMapHostMemory = 1;
  return cudaSuccess;
}
API cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr a, int device) {
  cudaDeviceProp p;
  if (cudaGetDeviceProperties(&p, device)) return last;
  switch ((int)a) {
    case cudaDevAttrComputeCapabilityMajor: *value = p.major; break;
    case cudaDevAttrComputeCapabilityMinor: *value = p.minor; break;
    case cudaDevAttrMultiProcessorCount: *value = p.multiProcessorCount; break;
    case cudaDevAttrMaxThreadsPerBlock: *value = 1024; break;
    case cudaDevAttrMaxSharedMemoryPerBlock: *value = (int)p.sharedMemPerBlock; break;
    case cudaDevAttrMaxSharedMemoryPerBlockOptin: *value = (int)p.sharedMemPerBlockOptin; break;
    case cudaDevAttrWarpSize: *value = 32; break;
    case cudaDevAttrMaxThreadsPerMultiProcessor: *value = 2048; break;
    case cudaDevAttrUnifiedAddressing: *value = 1; break;
    default: TELL("attribute %d is 0 here", (int)a); *value = 0;
  }
  return cudaSuccess;
}
API cudaError_t cudaDeviceGetPCIBusId(char* id, int n, int device) {
  snprintf(id, n, "0000:%02x:00.0", device + 1);
  return cudaSuccess;
}
API cudaError_t cudaDeviceGetStreamPriorityRange(int* least, int* greatest) {
  *least = 0;
  *greatest = -5;
  return cudaSuccess;
}
API cudaError_t cudaDeviceCanAccessPeer(int* can, int, int) { *can = 1; return cudaSuccess; }
API cudaError_t cudaDeviceEnablePeerAccess(int, unsigned) { return cudaSuccess; }
API cudaError_t cudaDeviceSynchronize() {
  Lock lock;
  if (cudaError_t error = unsafe("cudaDeviceSynchronize")) FAIL(error);
  for (Capture* c : captures) if (c->origin->device == current) {
    invalidate(c, "cudaDeviceSynchronize");
    FAIL(cudaErrorStreamCaptureUnsupported);
  }
  return set(finish_device(lock, current));
}
API cudaError_t cudaGetLastError() {
  cudaError_t e = last ? last : sticky;
  last = cudaSuccess;
  return e;
}
API cudaError_t cudaPeekAtLastError() { return last ? last : sticky; }
API const char* cudaGetErrorName(cudaError_t e) {
  static thread_local char s[32];
  snprintf(s, 32, "cudaError %d", (int)e);
  return s;
}
API const char* cudaGetErrorString(cudaError_t e) {
  switch ((int)e) {
    case 0: return "no error";
    case 2: return "out of memory";
    case 600: return "device not ready";
    case 700: return "an illegal memory access was encountered";
    case 801: return "operation not supported";
    case 900: return "operation not permitted when stream is capturing";
    case 901: return "operation failed due to a previous error during capture";
    case 905: return "dependency created on uncaptured work in another stream";
    case 906: return "operation would make the legacy stream depend on a capturing blocking stream";
    case 907: return "operation not permitted on an event last recorded in a capturing stream";
  }
  static thread_local char s[32];
  snprintf(s, 32, "cudaError %d", (int)e);
  return s;
}
API cudaError_t cudaProfilerStart() { return cudaSuccess; }
API cudaError_t cudaProfilerStop() { return cudaSuccess; }

API cudaError_t cudaGetDriverEntryPointByVersion(const char* name, void** f, unsigned, u64,
                                                 cudaDriverEntryPointQueryResult* status) {
  *f = dlsym(RTLD_DEFAULT, name);
  TELL("driver entry point %s: %p", name, *f);
  if (status) *status = *f ? cudaDriverEntryPointSuccess : cudaDriverEntryPointSymbolNotFound;
  return cudaSuccess;
}
API int cuInit(unsigned) { return 0; }
API int cuDriverGetVersion(int* v) { *v = 13000; return 0; }
API int cuDeviceGet(int* device, int ordinal) { *device = ordinal; return 0; }
API int cuDeviceGetAttribute(int* value, int a, int device) {
  return cudaDeviceGetAttribute(value, (cudaDeviceAttr)a, device);
}
API int cuDevicePrimaryCtxGetState(int device, unsigned* flags, int* active) {
  Lock lock;
  *flags = 0;
  *active = devices[device].context;
  return 0;
}
API int cuCtxGetCurrent(void** context) { *context = (void*)0x1; return 0; }
API int cuCtxSetCurrent(void*) { return 0; }
API int cuDevicePrimaryCtxRetain(void** context, int) { *context = (void*)0x1; return 0; }
API int cuGetErrorString(int e, const char** s) { *s = cudaGetErrorString((cudaError_t)e); return 0; }
API int nvmlInit_v2() { return 0; }
API int nvmlDeviceGetHandleByPciBusId_v2(const char*, void** device) { *device = (void*)0x1; return 0; }
// Where memory runs out, torch's message names the processes of the device.
struct Process {
  unsigned pid;
  u64 bytes;
};
API int nvmlDeviceGetComputeRunningProcesses(void*, unsigned* n, Process* processes) {
  if (*n < 1) return 7;  // NVML_ERROR_INSUFFICIENT_SIZE
  *n = 1;
  processes[0] = {(unsigned)getpid(), (u64)settings().mib << 20};
  return 0;
}
API int nvmlDeviceGetGpuFabricInfoV(void*, void*) { return 0; }  // its state stays 0: not supported
API int fakecuda_missing(const char* name) { SAY("%s is not simulated", name); return 801; }
