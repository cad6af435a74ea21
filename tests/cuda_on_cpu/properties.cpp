// What the device says of itself, its errors, the kernels that it does not have, and the driver.
#include "device.h"

#include <dlfcn.h>

#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <thread>

static thread_local int device = 0;
static thread_local cudaError_t last = cudaSuccess;
static thread_local std::string last_said;
static std::atomic<bool> failed{false};
static std::mutex failed_mutex;
static auto& failed_said = *new std::string;

int current_device() { return device; }

long setting(const char* name, long otherwise) {
  const char* value = getenv(name);
  return value && *value ? atol(value) : otherwise;
}

cudaError_t fail(cudaError_t error, const std::string& said) {
  last = error, last_said = said;
  return error;
}

void fail_device(const std::string& said) {
  std::lock_guard<std::mutex> lock(failed_mutex);
  if (!failed) failed_said = said;  // the first failure is told
  failed = true;
}

cudaError_t device_error() {
  if (!failed) return cudaSuccess;
  std::lock_guard<std::mutex> lock(failed_mutex);
  return fail(cudaErrorLaunchFailure, failed_said);
}

cudaError_t not_built(const std::string& name) {
  auto said = name + " is not built in the CUDA runtime made of CPU threads";
  fprintf(stderr, "%s\n", said.c_str());
  return fail(cudaErrorNotSupported, said);
}

static const char* name_of(cudaError_t error) {
  switch (error) {
    case cudaSuccess: return "no error";
    case cudaErrorInvalidValue: return "invalid argument";
    case cudaErrorMemoryAllocation: return "out of memory";
    case cudaErrorInvalidDevice: return "invalid device ordinal";
    case cudaErrorNotReady: return "device not ready";
    case cudaErrorLaunchFailure: return "unspecified launch failure";
    case cudaErrorNotSupported: return "operation not supported";
    case cudaErrorStreamCaptureUnsupported: return "operation not permitted when stream is capturing";
    case cudaErrorStreamCaptureInvalidated: return "operation failed due to a previous error during capture";
    case cudaErrorStreamCaptureUnjoined: return "capturing stream has unjoined work";
    case cudaErrorStreamCaptureIsolation: return "dependency created on uncaptured work in another stream";
    case cudaErrorStreamCaptureImplicit: return "operation would make the legacy stream depend on a capturing blocking stream";
    case cudaErrorCapturedEvent: return "operation not permitted on an event last recorded in a capturing stream";
    default: return "an error of the CUDA runtime";
  }
}

static std::map<const void*, std::string>& kernels() {
  static auto& known = *new std::map<const void*, std::string>;
  return known;
}

/// The state that torch passes to a kernel that draws (ATen's PhiloxCudaState): seed and offset, or
/// in a capture where they lie at a replay, and how far into the graph's draws the kernel is.
struct Philox {
  uint64_t seed, offset, within;
  bool captured;
};
static thread_local bool draws = false;
static thread_local Philox drawn;

/// The one kernel that runs is torch.cuda._sleep's, a nanosecond for each cycle.
static cudaError_t launch(const void* kernel, void** arguments, cudaStream_t stream) {
  auto found = kernels().find(kernel);
  const std::string name = found == kernels().end() ? "?" : found->second;
  if (draws && name.find("distribution_elementwise") != std::string::npos) {
    draws = false;
    memcpy(&drawn, arguments[1], sizeof drawn);
    return cudaSuccess;
  }
  if (name.find("spin_kernel") == std::string::npos)
    return not_built("kernel " + name.substr(0, 200));
  const std::chrono::nanoseconds span(*(int64_t*)arguments[0]);
  return submit(stream, [=] { return [=] { std::this_thread::sleep_for(span); }; });
}

extern "C" {

cudaError_t cudaGetDeviceCount(int* count) {
  *count = (int)setting("CUDA_ON_CPU_DEVICES", 1);
  return cudaSuccess;
}
cudaError_t cudaGetDevice(int* out) {
  *out = device;
  return cudaSuccess;
}
cudaError_t cudaSetDevice(int index) {
  int count;
  cudaGetDeviceCount(&count);
  if (index < 0 || index >= count) return fail(cudaErrorInvalidDevice);
  device = index;
  return device_error();
}
cudaError_t cudaDriverGetVersion(int* version) {
  *version = CUDART_VERSION;
  return cudaSuccess;
}
cudaError_t cudaRuntimeGetVersion(int* version) {
  *version = CUDART_VERSION;
  return cudaSuccess;
}
cudaError_t cudaGetDeviceProperties(cudaDeviceProp* found, int) {
  memset(found, 0, sizeof *found);
  strcpy(found->name, "CUDA runtime made of CPU threads");
  found->totalGlobalMem = (size_t)setting("CUDA_ON_CPU_MIB", 8192) << 20;
  found->major = 9, found->minor = 0;
  found->multiProcessorCount = 132, found->warpSize = 32;
  found->maxThreadsPerBlock = 1024, found->maxThreadsPerMultiProcessor = 2048;
  found->l2CacheSize = 50 << 20;
  found->sharedMemPerBlock = 48 << 10, found->sharedMemPerBlockOptin = 227 << 10;
  found->regsPerMultiprocessor = 65536, found->textureAlignment = 512;
  return cudaSuccess;
}
cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int) {
  switch (attribute) {
    case cudaDevAttrComputeCapabilityMajor: *value = 9; break;
    case cudaDevAttrMultiProcessorCount: *value = 132; break;
    default: *value = 0;  // no unified addressing of pages, no pools, no multicast
  }
  return cudaSuccess;
}
cudaError_t cudaDeviceGetPCIBusId(char* id, int bytes, int index) {
  snprintf(id, bytes, "0000:%02x:00.0", index);
  return cudaSuccess;
}
cudaError_t cudaDeviceCanAccessPeer(int* can, int, int) {
  *can = 1;
  return cudaSuccess;
}
cudaError_t cudaDeviceEnablePeerAccess(int, unsigned) { return cudaSuccess; }
cudaError_t cudaProfilerStart() { return cudaSuccess; }
cudaError_t cudaProfilerStop() { return cudaSuccess; }

/// Not of CUDA: this thread's next kernel that draws only leaves its state, which the other returns.
void cuda_on_cpu_expect_draw() { draws = true; }
void cuda_on_cpu_drawn(Philox* out) { *out = drawn; }

// What torch asks for and no file defines: make_runtime.py makes calls of these.
int cuda_not_built(const char* name) { return not_built(name); }
int nccl_not_built(const char* name) {
  not_built(name);
  return 5;  // ncclInvalidUsage
}

/// The last error of this thread, which a read forgets and a peek does not.
cudaError_t cudaGetLastError() {
  auto error = last;
  last = cudaSuccess;
  return error;
}
cudaError_t cudaPeekAtLastError() { return last; }
const char* cudaGetErrorName(cudaError_t error) { return name_of(error); }
const char* cudaGetErrorString(cudaError_t error) {
  static thread_local std::string words;
  const bool told = error == cudaErrorNotSupported || error == cudaErrorLaunchFailure;
  words = name_of(error);
  if (told && !last_said.empty()) words += ": " + last_said;
  return words.c_str();
}

// Kernels are known by name and never run: torch's operators are replaced, and what is left says so.
void** __cudaRegisterFatBinary(void*) {
  static void* handle;
  return &handle;
}
void __cudaRegisterFatBinaryEnd(void**) {}
void __cudaUnregisterFatBinary(void**) {}
char __cudaInitModule(void**) { return 1; }
void __cudaRegisterFunction(void**, const char* function, char*, const char* name, int, uint3*,
                            uint3*, dim3*, dim3*, int*) {
  kernels()[function] = name;
}
void __cudaRegisterVar(void**, char*, char*, const char*, int, size_t, int, int) {}

static thread_local struct {
  dim3 grid, block;
  size_t shared;
  void* stream;
} configuration;
unsigned __cudaPushCallConfiguration(dim3 grid, dim3 block, size_t shared, void* stream) {
  configuration = {grid, block, shared, stream};
  return 0;
}
cudaError_t __cudaPopCallConfiguration(dim3* grid, dim3* block, size_t* shared, void* stream) {
  *grid = configuration.grid, *block = configuration.block, *shared = configuration.shared;
  *(void**)stream = configuration.stream;
  return cudaSuccess;
}
cudaError_t __cudaGetKernel(cudaKernel_t* kernel, const void* function) {
  *kernel = (cudaKernel_t)function;
  return cudaSuccess;
}
cudaError_t __cudaLaunchKernel(cudaKernel_t kernel, dim3, dim3, void** arguments, size_t,
                               cudaStream_t stream) {
  return launch((const void*)kernel, arguments, stream);
}
cudaError_t cudaLaunchKernel(const void* kernel, dim3, dim3, void** arguments, size_t,
                             cudaStream_t stream) {
  return launch(kernel, arguments, stream);
}
cudaError_t cudaLaunchCooperativeKernel(const void* kernel, dim3, dim3, void** arguments, size_t,
                                        cudaStream_t stream) {
  return launch(kernel, arguments, stream);
}
cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t* how, const void* kernel, void** arguments) {
  return launch(kernel, arguments, how->stream);
}
cudaError_t cudaFuncGetAttributes(cudaFuncAttributes* found, const void*) {
  memset(found, 0, sizeof *found);
  found->maxThreadsPerBlock = 1024, found->binaryVersion = found->ptxVersion = 90;
  return cudaSuccess;
}

// The driver: as much as torch asks of it. A name that it lacks is an error where it is called.
using CUresult = int;
CUresult cuInit(unsigned) { return 0; }
CUresult cuDriverGetVersion(int* version) { return cudaDriverGetVersion(version); }
CUresult cuDeviceGet(int* found, int index) { return *found = index, 0; }
CUresult cuDeviceGetCount(int* count) { return cudaGetDeviceCount(count); }
CUresult cuDeviceGetAttribute(int* value, int, int) { return *value = 0, 0; }  // it can nothing
CUresult cuCtxGetCurrent(void** context) { return *context = (void*)8, 0; }
CUresult cuCtxSetCurrent(void*) { return 0; }
CUresult cuDevicePrimaryCtxGetState(int, unsigned* flags, int* active) {
  return *flags = 0, *active = 1, 0;
}
CUresult cuDevicePrimaryCtxRetain(void** context, int) { return *context = (void*)8, 0; }
CUresult cuGetErrorString(int error, const char** said) {
  return *said = cudaGetErrorString((cudaError_t)error), 0;
}
}

/// Functions that tell by which name the driver was asked for them.
template <int N>
struct Absent {
  static inline std::string name;
  static CUresult call() { return not_built(name); }
  static void* of(const std::string& wanted) {
    if (name.empty()) name = wanted;
    return name == wanted ? (void*)&call : Absent<N - 1>::of(wanted);
  }
};
template <>
struct Absent<0> {
  static void* of(const std::string&) { return nullptr; }
};

extern "C" cudaError_t cudaGetDriverEntryPointByVersion(const char* name, void** function, unsigned,
                                                        unsigned long long,
                                                        cudaDriverEntryPointQueryResult* result) {
  static void* here = dlopen("libcuda.so.1", RTLD_LAZY | RTLD_NOLOAD);
  static std::mutex mutex;
  std::lock_guard<std::mutex> lock(mutex);
  *function = here ? dlsym(here, name) : nullptr;
  if (!*function) *function = Absent<120>::of(name);
  if (result)
    *result = *function ? cudaDriverEntryPointSuccess : cudaDriverEntryPointSymbolNotFound;
  return *function ? cudaSuccess : fail(cudaErrorSymbolNotFound);
}
