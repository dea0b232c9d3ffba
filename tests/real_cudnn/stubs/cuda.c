/* libcuda.so.1 of a machine without a device. It takes every kernel as loaded, without a look at it: cuDNN builds its plans for a
   GPU that is described to it, and loads their kernels; nothing here can run one. */

enum { SUCCESS = 0, NO_DEVICE = 100 };

#define SAYS(answer, function) int function(void) { return answer; }
#define NONE(function) SAYS(NO_DEVICE, function)
#define TAKES(function) SAYS(SUCCESS, function)
#define LOADS(function) int function(void **handle) { static char *last; *handle = last += 16; return SUCCESS; }
#define ZERO(function) int function(int *value) { *value = 0; return SUCCESS; }

NONE(cuInit) NONE(cuDeviceGet) NONE(cuDeviceGetCount) NONE(cuDeviceGetAttribute) NONE(cuGetProcAddress) NONE(cuGetProcAddress_v2)
NONE(cuCtxGetCurrent) NONE(cuCtxGetLimit) NONE(cuCtxPushCurrent) NONE(cuCtxPopCurrent) NONE(cuStreamGetCtx)
NONE(cuThreadExchangeStreamCaptureMode) NONE(cuLaunchKernel) NONE(cuLaunchKernelEx) NONE(cuLaunchCooperativeKernel)
NONE(cuLinkCreate) NONE(cuLinkAddData) NONE(cuLinkComplete) NONE(cuLinkDestroy) NONE(cuOccupancyMaxPotentialClusterSize)
NONE(cuTensorMapEncodeTiled) NONE(cuTensorMapEncodeIm2col)

LOADS(cuLibraryLoadData) LOADS(cuLibraryLoadFromFile) LOADS(cuLibraryGetKernel) LOADS(cuLibraryGetModule) LOADS(cuLibraryGetGlobal)
LOADS(cuKernelGetFunction) LOADS(cuModuleLoadData) LOADS(cuModuleLoadDataEx) LOADS(cuModuleGetFunction) LOADS(cuModuleGetGlobal_v2)
TAKES(cuLibraryUnload) TAKES(cuModuleUnload) TAKES(cuKernelSetAttribute) TAKES(cuFuncSetAttribute)
ZERO(cuKernelGetAttribute) ZERO(cuFuncGetAttribute)

int cuDriverGetVersion(int *version) { *version = 13020; return SUCCESS; }
int cuGetErrorName(int error, const char **name) { *name = "CUDA_ERROR_NO_DEVICE"; return SUCCESS; }
int cuGetErrorString(int error, const char **text) { *text = "there is no device"; return SUCCESS; }
