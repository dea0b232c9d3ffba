/* libnvrtc.so.13 that "compiles" any source into 64 zero bytes, which the libcuda beside it takes for a kernel. */
#include <stddef.h>
#include <string.h>

enum { SUCCESS = 0, SIZE = 64 };

int nvrtcVersion(int *major, int *minor) { *major = 13; *minor = 2; return SUCCESS; }
int nvrtcCreateProgram(void **program, const char *source, const char *name, int headers, const char *const *texts,
                       const char *const *names) { *program = (void *)1; return SUCCESS; }
int nvrtcDestroyProgram(void **program) { return SUCCESS; }
int nvrtcCompileProgram(void *program, int options, const char *const *values) { return SUCCESS; }
int nvrtcGetProgramLogSize(void *program, size_t *size) { *size = 1; return SUCCESS; }
int nvrtcGetProgramLog(void *program, char *log) { *log = 0; return SUCCESS; }
int nvrtcGetPTXSize(void *program, size_t *size) { *size = SIZE; return SUCCESS; }
int nvrtcGetPTX(void *program, char *ptx) { memset(ptx, 0, SIZE); return SUCCESS; }
int nvrtcGetCUBINSize(void *program, size_t *size) { *size = SIZE; return SUCCESS; }
int nvrtcGetCUBIN(void *program, char *cubin) { memset(cubin, 0, SIZE); return SUCCESS; }
int nvrtcAddNameExpression(void *program, const char *name) { return SUCCESS; }
int nvrtcGetLoweredName(void *program, const char *name, const char **lowered) { *lowered = name; return SUCCESS; }
const char *nvrtcGetErrorString(int error) { return "no error"; }

/* In no header: cuDNN 9.20 says in its log that it misses this one, and then lists engine 0 alone. */
int __nvrtcCPEx(void *program, void *unknown) { return SUCCESS; }
