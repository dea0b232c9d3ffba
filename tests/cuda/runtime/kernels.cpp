// The kernels that run, in host code: fill, add, compare, max, any, all, sum, sleep. Any other launch is an error by
// name, never a silent no-op. How torch passes their arguments is private to it, so tests/cuda/smoke.py asks for each.
#include "state.h"

#include <cxxabi.h>

#include <chrono>
#include <cstring>

using u8 = unsigned char;
using std::string;

struct Kernel {
  const char* mangled;
  string name;
};
struct Config {
  dim3 grid, block;
  size_t shared;
  cudaStream_t stream;
};
static auto& kernels = *new std::unordered_map<const void*, Kernel*>;
static thread_local Config config;

static string within(const string& name, const char* marker) {  // "T" of the first "marker<T, ...>"
  size_t at = name.find(marker);
  if (at == string::npos) return "";
  at += strlen(marker);
  int depth = 0;
  size_t end = at;
  for (; end < name.size(); end++) {
    char c = name[end];
    if (c == '<' || c == '(' || c == '{') depth++;
    if ((c == '>' || c == ',') && !depth) break;
    if (c == '>' || c == ')' || c == '}') depth--;
  }
  return name.substr(at, end - at);
}
static size_t size_of(const string& type) {
  static const std::map<string, size_t> sizes{{"unsigned char", 1}, {"signed char", 1}, {"bool", 1}, {"short", 2},
    {"int", 4}, {"unsigned int", 4}, {"long", 8}, {"float", 4}, {"double", 8}, {"c10::BFloat16", 2}, {"c10::Half", 2},
    {"c10::Float8_e4m3fn", 1}, {"c10::Float8_e5m2", 1}};
  auto found = sizes.find(type);
  return found == sizes.end() ? 0 : found->second;
}
template <class F> static bool typed(const string& type, F f) {
  if (type == "unsigned char") f(u8{});
  else if (type == "bool") f(bool{});
  else if (type == "signed char") f((signed char)0);
  else if (type == "int") f(int{});
  else if (type == "long") f(long{});
  else if (type == "float") f(float{});
  else if (type == "double") f(double{});
  else return false;
  return true;
}
static bool has(const string& name, const char* part) { return name.find(part) != string::npos; }

static Run elementwise(const string& name, void** args) {
  size_t n = *(int*)args[0];
  const char* f = (const char*)args[1];
  char** data = (char**)args[2];
  Run run;
  if (has(name, "FillFunctor<")) {
    size_t size = size_of(within(name, "FillFunctor<"));
    if (!size) return run;
    string value(f, size);
    char* out = data[0];
    run = [=] {
      CHECK("fill", out, n * size);
      if (size == 1) memset(out, value[0], n);
      else for (size_t i = 0; i < n; i++) memcpy(out + i * size, value.data(), size);
      return cudaSuccess;
    };
  } else if (has(name, "CUDAFunctorOnSelf_add<")) {  // self + other * alpha
    typed(within(name, "CUDAFunctorOnSelf_add<"), [&](auto zero) {
      using T = decltype(zero);
      T other = ((T*)f)[0], alpha = ((T*)f)[1], *out = (T*)data[0], *in = (T*)data[1];
      run = [=] {
        CHECK("add", out, n * sizeof(T));
        CHECK("add", in, n * sizeof(T));
        T sum = T(other * alpha), *to = out, *from = in;  // locals, since a T may alias what the closure holds
#pragma GCC ivdep
        for (size_t i = 0, end = n; i < end; i++) to[i] = T(from[i] + sum);
        return cudaSuccess;
      };
    });
  } else if (has(name, "CUDAFunctor_add<")) {
    typed(within(name, "CUDAFunctor_add<"), [&](auto zero) {
      using T = decltype(zero);
      T alpha = *(T*)f, *out = (T*)data[0], *a = (T*)data[1], *b = (T*)data[2];
      run = [=] {
        for (T* p : {out, a, b}) CHECK("add", p, n * sizeof(T));
#pragma GCC ivdep
        for (size_t i = 0; i < n; i++) out[i] = T(a[i] + T(b[i] * alpha));
        return cudaSuccess;
      };
    });
  } else if (has(name, "CompareEqFunctor<")) {  // {EqOpType op;} EQ, NE; in a unary functor a scalar follows
    typed(within(name, "CompareEqFunctor<"), [&](auto zero) {
      using T = decltype(zero);
      int op = *(int*)f;
      bool unary = has(name, "UnaryFunctor<");
      T scalar{};
      if (unary) memcpy(&scalar, f + std::max(sizeof(int), alignof(T)), sizeof(T));
      bool* out = (bool*)data[0];
      T *a = (T*)data[1], *b = unary ? nullptr : (T*)data[2];
      run = [=] {
        CHECK("compare", out, n);
        CHECK("compare", a, n * sizeof(T));
        if (!unary) CHECK("compare", b, n * sizeof(T));
        bool same = op == 0;
        if (unary) for (size_t i = 0; i < n; i++) out[i] = (a[i] == scalar) == same;
        else for (size_t i = 0; i < n; i++) out[i] = (a[i] == b[i]) == same;
        return cudaSuccess;
      };
    });
  }
  return run;
}

static Run reduction(const string& name, void** args) {  // to one element, of contiguous memory
  const char* r = (const char*)args[0];
  string type = within(name, "ReduceOp<");
  Run run;
  enum { MAX, ALL, ANY, SUM } kind;
  if (has(name, "MaxNanFunctor") || has(name, "max_")) kind = MAX;
  else if (has(name, "and_kernel")) kind = ALL;
  else if (has(name, "or_kernel")) kind = ANY;
  else if (has(name, "sum_functor")) kind = SUM;
  else return run;
  // ReduceOp: ops (empty), ident, ReduceConfig (64 bytes), OffsetCalculator<1> (404), OffsetCalculator<2> (504), src,
  // dst.
  size_t ident = kind == ALL || kind == ANY ? 1 : size_of(type), end = std::max<size_t>(1, ident) + ident;
  size_t at = (end + 3) / 4 * 4;
  const int* config = (const int*)(r + at);
  const uintptr_t* found = (const uintptr_t*)(r + (at + 64 + 404 + 504 + 7) / 8 * 8);
  size_t n = config[1];
  if (config[2] != 1 || !has(name, "unsigned int") || !on_device(found[0]) || !on_device(found[1])) return run;
  typed(type == "bool" ? "unsigned char" : type, [&](auto zero) {
    using T = decltype(zero);
    T* in = (T*)found[0];
    char* out = (char*)found[1];
    run = [=] {
      CHECK("reduce", in, n * sizeof(T));
      CHECK("reduce", out, 1);
      if (kind == MAX) {
        T m = in[0];
        for (size_t i = 1; i < n; i++) m = in[i] > m ? in[i] : m;
        *(T*)out = m;
      } else if (kind == SUM) {
        T m{};
        for (size_t i = 0; i < n; i++) m += in[i];
        *(T*)out = m;
      } else {
        u8 null = 0, not_null = 0;
        for (size_t i = 0; i < n; i++) null |= in[i] == T{}, not_null |= in[i] != T{};
        *out = kind == ALL ? !null : not_null;
      }
      return cudaSuccess;
    };
  });
  return run;
}

static cudaError_t launch(Kernel* k, void** args, cudaStream_t stream) {
  if (k->name.empty()) {
    int status;
    char* plain = abi::__cxa_demangle(k->mangled, nullptr, nullptr, &status);
    k->name = plain ? plain : k->mangled;
    free(plain);
  }
  TELL("launch on %p: %.600s", (void*)stream, k->name.c_str());
  Run run;
  if (has(k->name, "vectorized_elementwise_kernel<") || has(k->name, "unrolled_elementwise_kernel<"))
    run = elementwise(k->name, args);
  else if (has(k->name, "reduce_kernel<")) run = reduction(k->name, args);
  else if (has(k->name, "spin_kernel")) {
    long cycles = *(long*)args[0];
    run = [=] { std::this_thread::sleep_for(std::chrono::nanoseconds(cycles / 2)); return cudaSuccess; };
  }
  if (!run) {
    SAY("no such kernel here: %s", k->name.c_str());
    return set(cudaErrorNotSupported);
  }
  Lock lock;
  return set(enqueue(stream, run));
}
static Kernel* kernel_of(const void* function) {
  auto found = kernels.find(function);
  return found == kernels.end() ? nullptr : found->second;
}


// --- registration and launches ---------------------------------------------------------------------------------------
API void** __cudaRegisterFatBinary(void*) { return (void**)new void*[4](); }
API void __cudaRegisterFatBinaryEnd(void**) {}
API void __cudaUnregisterFatBinary(void**) {}
API char __cudaInitModule(void**) { return 1; }
API void __cudaRegisterVar(void**, char*, char*, const char*, int, size_t, int, int) {}
API void __cudaRegisterFunction(void**, const char* host, char*, const char* name, int, uint3*, uint3*, dim3*, dim3*,
                                int*) {
  std::lock_guard<std::mutex> lock(mu);  // no Lock: settings are not read yet while libraries load
  kernels[host] = new Kernel{name, ""};
}
API unsigned __cudaPushCallConfiguration(dim3 grid, dim3 block, size_t shared, cudaStream_t stream) {
  config = {grid, block, shared, stream};
  return 0;
}
API cudaError_t __cudaPopCallConfiguration(dim3* grid, dim3* block, size_t* shared, void* stream) {
  *grid = config.grid; *block = config.block; *shared = config.shared; *(cudaStream_t*)stream = config.stream;
  return cudaSuccess;
}
API cudaError_t __cudaGetKernel(cudaKernel_t* kernel, const void* function) {
  *kernel = (cudaKernel_t)kernel_of(function);
  return set(*kernel ? cudaSuccess : cudaErrorInvalidDeviceFunction);
}
API cudaError_t __cudaLaunchKernel(cudaKernel_t kernel, dim3, dim3, void** args, size_t, cudaStream_t stream) {
  return launch((Kernel*)kernel, args, stream);
}
API cudaError_t cudaLaunchKernel(const void* function, dim3, dim3, void** args, size_t, cudaStream_t stream) {
  Kernel* k = kernel_of(function);
  return k ? launch(k, args, stream) : set(cudaErrorInvalidDeviceFunction);
}
API cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t* c, const void* function, void** args) {
  return cudaLaunchKernel(function, c->gridDim, c->blockDim, args, 0, c->stream);
}
API cudaError_t cudaFuncGetAttributes(cudaFuncAttributes* a, const void*) {
  memset(a, 0, sizeof *a);
  a->maxThreadsPerBlock = 1024;
  a->numRegs = 32;
  a->binaryVersion = a->ptxVersion = 10 * settings().major + settings().minor;
  return cudaSuccess;
}
API cudaError_t cudaFuncSetAttribute(const void*, cudaFuncAttribute, int) { return cudaSuccess; }
API cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int* n, const void*, int, size_t) {
  *n = 2;
  return cudaSuccess;
}
API cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int* n, const void*, int, size_t, unsigned) {
  *n = 2;
  return cudaSuccess;
}
API cudaError_t cudaLaunchHostFunc(cudaStream_t stream, cudaHostFn_t f, void* data) {
  Lock lock;
  return set(enqueue(stream, [=] { f(data); return cudaSuccess; }));
}
API cudaError_t cudaStreamAddCallback(cudaStream_t stream, cudaStreamCallback_t f, void* data, unsigned) {
  Lock lock;
  return set(enqueue(stream, [=] { f(stream, cudaSuccess, data); return cudaSuccess; }));
}

