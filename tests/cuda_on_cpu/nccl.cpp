// NCCL in shared memory: each call is queued on its stream, and meets the other ranks there.
#include "device.h"
// nccl.h asks for these only where a compiler of CUDA reads it.
#define __CUDA_RUNTIME_H__
#define __CUDA_FP16_H__
#define __CUDA_BF16_H__
#define __CUDA_FP8_H__
#include <fcntl.h>
#include <nccl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <atomic>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <map>
#include <thread>

namespace {
const int RANKS = 16;
const size_t SLOT = 4 << 20;  // bytes that a rank shows the others at a time

/// What the ranks of a communicator share; the slots lie behind it.
struct Shared {
  std::atomic<int> arrived[2], turn[2];  // a barrier of the hosts, and one of the streams
  std::atomic<bool> aborted;
  int color[RANKS], key[RANKS];
};
const size_t HEAD = 65536;
thread_local std::string said;  // by the last call that failed

ncclResult_t refuse(ncclResult_t result, const std::string& why) {
  fprintf(stderr, "%s\n", why.c_str());
  said = why;
  return result;
}
}  // namespace

struct ncclComm {
  std::string name;
  int rank, size, splits = 0;
  Shared* shared;
  std::atomic<bool> aborted{false};
  std::mutex mutex;
  MarkPtr behind;                           // the end of its last call
  std::map<int, std::pair<int, double>> scaled;  // operators of its own: the width, the factor

  char* slot(int r) const { return (char*)shared + HEAD + SLOT * r; }
  bool stopped() const { return aborted || shared->aborted; }

  /// Wait for all ranks, hosts (0) or streams (1); false once the communicator is aborted.
  bool meet(int which) {
    const int turn = shared->turn[which];
    if (shared->arrived[which].fetch_add(1) + 1 == size) {
      shared->arrived[which] = 0;
      ++shared->turn[which];
      return true;
    }
    for (int tries = 0; shared->turn[which] == turn && !stopped(); ++tries)
      if (tries < 50)
        std::this_thread::yield();
      else
        usleep(50);
    return !stopped();
  }
};

namespace {
ncclResult_t open_comm(ncclComm_t* out, const std::string& name, int rank, int size) {
  if (size > RANKS) return refuse(ncclInvalidArgument, "more than 16 ranks are not built");
  const size_t bytes = HEAD + SLOT * size;
  const int file = shm_open(name.c_str(), O_CREAT | O_RDWR, 0600);
  if (file < 0 || ftruncate(file, bytes)) return refuse(ncclSystemError, "no shared memory");
  auto comm = new ncclComm;
  comm->name = name, comm->rank = rank, comm->size = size;
  comm->shared = (Shared*)mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
  close(file);
  HostWaits waits;
  const bool met = comm->meet(0);
  if (rank == 0) shm_unlink(name.c_str());
  *out = comm;
  return met ? ncclSuccess : refuse(ncclRemoteError, "the communicator was aborted");
}

// -- sums ----------------------------------------------------------------------------------------

size_t width(ncclDataType_t type) {
  switch (type) {
    case ncclInt8: case ncclUint8: case ncclFloat8e4m3: case ncclFloat8e5m2: return 1;
    case ncclFloat16: case ncclBfloat16: return 2;
    case ncclInt64: case ncclUint64: case ncclFloat64: return 8;
    default: return 4;
  }
}

/// 16-bit floats are added as floats and rounded once.
struct Bfloat16 {
  uint16_t bits;
  operator float() const {
    const uint32_t wide = (uint32_t)bits << 16;
    float value;
    memcpy(&value, &wide, 4);
    return value;
  }
  Bfloat16(float value) {
    uint32_t wide;
    memcpy(&wide, &value, 4);
    bits = std::isnan(value) ? 0x7fc0 : (wide + 0x7fff + ((wide >> 16) & 1)) >> 16;
  }
};
using Float16 = _Float16;

template <class T> struct Sum { using type = T; };
template <> struct Sum<Bfloat16> { using type = float; };
template <> struct Sum<Float16> { using type = float; };

/// What an operator does: a factor before the sum, a division after it.
struct Reduction {
  ncclRedOp_t op = ncclSum;
  double factor = 1;
  int divide = 1;
};

/// Reduce `count` values that rank r shows at from(r), in the order of the ranks.
template <class T, class From>
void reduce_as(char* to, From from, size_t count, const Reduction& how, int size) {
  using S = typename Sum<T>::type;
  for (size_t i = 0; i < count; ++i) {
    S total = 0;
    for (int r = 0; r < size; ++r) {
      S value = (S)((const T*)from(r))[i];
      if (how.factor != 1) value = (S)(T)(S)(value * (S)how.factor);
      if (r == 0) total = value;
      else if (how.op == ncclMax) total = value > total ? value : total;
      else if (how.op == ncclMin) total = value < total ? value : total;
      else if (how.op == ncclProd) total = total * value;
      else total = total + value;
    }
    ((T*)to)[i] = (T)(how.divide > 1 ? (S)(total / how.divide) : total);
  }
}

template <class From>
void reduce(char* to, From from, size_t n, ncclDataType_t type, const Reduction& how, int size) {
  switch (type) {
    case ncclFloat32: return reduce_as<float>(to, from, n, how, size);
    case ncclFloat64: return reduce_as<double>(to, from, n, how, size);
    case ncclFloat16: return reduce_as<Float16>(to, from, n, how, size);
    case ncclBfloat16: return reduce_as<Bfloat16>(to, from, n, how, size);
    case ncclInt32: return reduce_as<int32_t>(to, from, n, how, size);
    case ncclInt64: return reduce_as<int64_t>(to, from, n, how, size);
    case ncclUint32: return reduce_as<uint32_t>(to, from, n, how, size);
    case ncclUint64: return reduce_as<uint64_t>(to, from, n, how, size);
    case ncclInt8: return reduce_as<int8_t>(to, from, n, how, size);
    case ncclUint8: return reduce_as<uint8_t>(to, from, n, how, size);
    default: return fail_device("NCCL's sum of this type is not built");
  }
}

/// AVG scales floats by 1/n before the sum, and divides integers after it.
Reduction reduction_of(ncclComm_t comm, ncclRedOp_t op, ncclDataType_t type) {
  const bool floats = type == ncclFloat16 || type == ncclBfloat16 || type == ncclFloat32 ||
                      type == ncclFloat64;
  Reduction how{op};
  if (op == ncclAvg && floats) how.factor = 1.0 / comm->size;
  if (op == ncclAvg && !floats) how.divide = comm->size;
  if (op >= ncclNumOps) how.factor = comm->scaled.at(op).second;
  return how;
}

// -- calls in order ------------------------------------------------------------------------------

/// A call: on the thread of its stream.
struct Call {
  ncclComm_t comm;
  cudaStream_t stream;
  Task work;
  Uses uses;
};
thread_local int depth = 0;
thread_local std::vector<Call> held;

/// The calls of a communicator run in the order of the host, whatever streams they are on.
Task in_order(ncclComm_t comm, Task work) {
  std::lock_guard<std::mutex> lock(comm->mutex);
  auto before = comm->behind, after = std::make_shared<Mark>();
  comm->behind = after;
  return [=] {
    if (before) before->wait();
    if (!comm->stopped()) work();
    after->reach();
  };
}

ncclResult_t queue(ncclComm_t comm, cudaStream_t stream, Uses uses, Task work) {
  if (comm->stopped()) return refuse(ncclInvalidUsage, "the communicator was aborted");
  if (depth) {
    held.push_back({comm, stream, work, uses});
    return ncclSuccess;
  }
  auto error = submit(stream, [=] { return in_order(comm, work); }, uses);
  return error ? refuse(ncclUnhandledCudaError, cudaGetErrorString(error)) : ncclSuccess;
}

/// Show `bytes` at `from` to the others; each slot holds what the reader may take until all met.
template <class Show, class Take>
void exchange(ncclComm_t comm, size_t count, size_t step, Show show, Take take) {
  for (size_t at = 0; at < count; at += step) {
    const size_t n = std::min(step, count - at);
    show(at, n);
    if (!comm->meet(1)) return;
    take(at, n);
    if (!comm->meet(1)) return;
  }
}
constexpr int EVERY_RANK = -1;

/// Each rank shows its whole operand, and `root` (or every rank) sums those of all.
ncclResult_t reduce_whole(const void* from, void* to, size_t count, ncclDataType_t type,
                          ncclRedOp_t op, int root, ncclComm_t comm, cudaStream_t stream) {
  const size_t w = width(type);
  const auto how = reduction_of(comm, op, type);
  std::vector<Use> uses = {{from, count * w, false}};
  if (root == EVERY_RANK || root == comm->rank) uses.push_back({to, count * w, true});
  return queue(comm, stream, uses_of("NCCL's reduce", uses), [=] {
    auto show = [&](size_t at, size_t n) {
      memcpy(comm->slot(comm->rank), (char*)from + at * w, n * w);
    };
    auto take = [&](size_t at, size_t n) {
      auto whole = [&](int r) { return comm->slot(r); };
      if (root == EVERY_RANK || root == comm->rank)
        reduce((char*)to + at * w, whole, n, type, how, comm->size);
    };
    exchange(comm, count, SLOT / w, show, take);
  });
}
}  // namespace

extern "C" {

ncclResult_t ncclGetVersion(int* version) {
  *version = NCCL_VERSION_CODE;
  return ncclSuccess;
}
ncclResult_t ncclGetUniqueId(ncclUniqueId* id) {
  memset(id, 0, sizeof *id);
  snprintf(id->internal, sizeof id->internal, "/cuda_on_cpu_%d_%u", getpid(),
           std::random_device{}());
  return ncclSuccess;
}
/// It returns once all ranks have called it with the same id.
ncclResult_t ncclCommInitRankConfig(ncclComm_t* comm, int size, ncclUniqueId id, int rank,
                                    ncclConfig_t*) {
  return open_comm(comm, id.internal, rank, size);
}
ncclResult_t ncclCommInitRank(ncclComm_t* comm, int size, ncclUniqueId id, int rank) {
  return open_comm(comm, id.internal, rank, size);
}
ncclResult_t ncclCommInitRankScalable(ncclComm_t* comm, int size, int rank, int, ncclUniqueId* id,
                                      ncclConfig_t*) {
  return open_comm(comm, id->internal, rank, size);
}
/// All ranks call it: those of a color form a communicator, in the order of key, then of rank.
ncclResult_t ncclCommSplit(ncclComm_t from, int color, int key, ncclComm_t* out, ncclConfig_t*) {
  HostWaits waits;
  from->shared->color[from->rank] = color;
  from->shared->key[from->rank] = key;
  if (!from->meet(0)) return refuse(ncclRemoteError, "the communicator was aborted");
  int rank = 0, size = 0;
  for (int r = 0; r < from->size; ++r) {
    if (from->shared->color[r] != color) continue;
    ++size;
    const int other = from->shared->key[r];
    rank += other < key || (other == key && r < from->rank);
  }
  if (!from->meet(0)) return refuse(ncclRemoteError, "the communicator was aborted");
  const int split = ++from->splits;
  *out = nullptr;
  if (color == NCCL_SPLIT_NOCOLOR) return ncclSuccess;
  auto name = from->name + "_" + std::to_string(split) + "_" + std::to_string(color);
  return open_comm(out, name, rank, size);
}
ncclResult_t ncclCommFinalize(ncclComm_t) { return ncclSuccess; }
/// Its calls that are queued still run; its memory stays with the process.
ncclResult_t ncclCommDestroy(ncclComm_t) { return ncclSuccess; }
/// What waits for other ranks ends at once, here and in them.
ncclResult_t ncclCommAbort(ncclComm_t comm) {
  comm->aborted = true;
  comm->shared->aborted = true;
  return ncclSuccess;
}
ncclResult_t ncclCommGetAsyncError(ncclComm_t comm, ncclResult_t* error) {
  *error = comm->shared->aborted && !comm->aborted ? ncclRemoteError : ncclSuccess;
  return ncclSuccess;
}
ncclResult_t ncclCommCount(const ncclComm_t comm, int* count) {
  *count = comm->size;
  return ncclSuccess;
}
ncclResult_t ncclCommUserRank(const ncclComm_t comm, int* rank) {
  *rank = comm->rank;
  return ncclSuccess;
}
const char* ncclGetErrorString(ncclResult_t result) {
  return result == ncclSuccess ? "no error" : "an error of NCCL made of CPU threads";
}
const char* ncclGetLastError(ncclComm_t) { return said.c_str(); }

// Registration makes calls quicker on a device and changes no value.
ncclResult_t ncclMemAlloc(void** pointer, size_t bytes) {
  return cudaMalloc(pointer, bytes) ? ncclUnhandledCudaError : ncclSuccess;
}
ncclResult_t ncclMemFree(void* pointer) {
  return cudaFree(pointer) ? ncclUnhandledCudaError : ncclSuccess;
}
ncclResult_t ncclCommRegister(const ncclComm_t, void* pointer, size_t, void** handle) {
  *handle = pointer;
  return is_device_memory(pointer) ? ncclSuccess : ncclInvalidArgument;
}
ncclResult_t ncclCommDeregister(const ncclComm_t, void*) { return ncclSuccess; }
/// All ranks call it, each for memory that NCCL gave.
ncclResult_t ncclCommWindowRegister(ncclComm_t comm, void* pointer, size_t, ncclWindow_t* window,
                                    int) {
  HostWaits waits;
  *window = (ncclWindow_t)pointer;
  return comm->meet(0) ? ncclSuccess : ncclRemoteError;
}
ncclResult_t ncclCommWindowDeregister(ncclComm_t, ncclWindow_t) { return ncclSuccess; }

ncclResult_t ncclGroupStart() {
  ++depth;
  return ncclSuccess;
}
/// The calls of a group are one launch of each communicator, on the stream that they came with.
ncclResult_t ncclGroupEnd() {
  if (--depth) return ncclSuccess;
  auto calls = std::move(held);
  held.clear();
  while (!calls.empty()) {
    const auto comm = calls.front().comm;
    const auto stream = calls.front().stream;
    std::vector<Task> works;
    Uses uses{{}, calls.front().uses.where};
    std::vector<Call> rest;
    for (auto& call : calls) {
      if (call.comm != comm) {
        rest.push_back(call);
        continue;
      }
      if (call.stream != stream)
        return refuse(ncclInvalidUsage, "a group of several streams of a communicator is not built");
      works.push_back(call.work);
      uses.all.insert(uses.all.end(), call.uses.all.begin(), call.uses.all.end());
    }
    calls = rest;
    auto all = [works] {
      for (auto& work : works) work();
    };
    if (auto result = queue(comm, stream, uses, all)) return result;
  }
  return ncclSuccess;
}

/// PREMUL_SUM: an operator of the communicator, with a factor that the host gives now.
ncclResult_t ncclRedOpCreatePreMulSum(ncclRedOp_t* op, void* scalar, ncclDataType_t type,
                                      ncclScalarResidence_t where, ncclComm_t comm) {
  if (where != ncclScalarHostImmediate)
    return refuse(ncclInvalidUsage, "PREMUL_SUM by a factor on the device is not built");
  double factor = 0;
  switch (type) {
    case ncclFloat32: factor = *(float*)scalar; break;
    case ncclFloat64: factor = *(double*)scalar; break;
    case ncclFloat16: factor = (float)*(Float16*)scalar; break;
    case ncclBfloat16: factor = (float)*(Bfloat16*)scalar; break;
    default: return refuse(ncclInvalidUsage, "PREMUL_SUM of integers is not built");
  }
  int number = ncclNumOps;
  while (comm->scaled.count(number)) ++number;
  comm->scaled[number] = {(int)type, factor};
  *op = (ncclRedOp_t)number;
  return ncclSuccess;
}
/// Calls that were given it keep its factor.
ncclResult_t ncclRedOpDestroy(ncclRedOp_t op, ncclComm_t comm) {
  comm->scaled.erase(op);
  return ncclSuccess;
}

/// The results lie in the order of ranks.
ncclResult_t ncclAllGather(const void* from, void* to, size_t count, ncclDataType_t type,
                           ncclComm_t comm, cudaStream_t stream) {
  const size_t bytes = count * width(type);
  auto uses = uses_of("ncclAllGather", {{from, bytes, false}, {to, bytes * comm->size, true}});
  return queue(comm, stream, uses, [=] {
    auto show = [&](size_t at, size_t n) { memcpy(comm->slot(comm->rank), (char*)from + at, n); };
    auto take = [&](size_t at, size_t n) {
      for (int r = 0; r < comm->size; ++r) memcpy((char*)to + r * bytes + at, comm->slot(r), n);
    };
    exchange(comm, bytes, SLOT, show, take);
  });
}
/// Rank r gets the sum of all ranks' part r; `to` may be that part of `from`.
ncclResult_t ncclReduceScatter(const void* from, void* to, size_t count, ncclDataType_t type,
                               ncclRedOp_t op, ncclComm_t comm, cudaStream_t stream) {
  const size_t w = width(type);
  const auto how = reduction_of(comm, op, type);
  const std::vector<Use> uses = {{from, count * comm->size * w, false}, {to, count * w, true}};
  return queue(comm, stream, uses_of("ncclReduceScatter", uses), [=] {
    auto show = [&](size_t at, size_t n) {
      for (int r = 0; r < comm->size; ++r)
        memcpy(comm->slot(comm->rank) + r * n * w, (char*)from + (r * count + at) * w, n * w);
    };
    auto take = [&](size_t at, size_t n) {
      auto part = [&](int r) { return comm->slot(r) + comm->rank * n * w; };
      reduce((char*)to + at * w, part, n, type, how, comm->size);
    };
    exchange(comm, count, SLOT / w / comm->size, show, take);
  });
}
ncclResult_t ncclAllReduce(const void* from, void* to, size_t count, ncclDataType_t type,
                           ncclRedOp_t op, ncclComm_t comm, cudaStream_t stream) {
  return reduce_whole(from, to, count, type, op, EVERY_RANK, comm, stream);
}
/// Only the root gets the sum.
ncclResult_t ncclReduce(const void* from, void* to, size_t count, ncclDataType_t type,
                        ncclRedOp_t op, int root, ncclComm_t comm, cudaStream_t stream) {
  return reduce_whole(from, to, count, type, op, root, comm, stream);
}
ncclResult_t ncclBroadcast(const void* from, void* to, size_t count, ncclDataType_t type, int root,
                           ncclComm_t comm, cudaStream_t stream) {
  const size_t bytes = count * width(type);
  std::vector<Use> uses = {{to, bytes, true}};
  if (comm->rank == root) uses.push_back({from, bytes, false});
  return queue(comm, stream, uses_of("ncclBroadcast", uses), [=] {
    auto show = [&](size_t at, size_t n) {
      if (comm->rank == root) memcpy(comm->slot(root), (char*)from + at, n);
    };
    auto take = [&](size_t at, size_t n) { memcpy((char*)to + at, comm->slot(root), n); };
    exchange(comm, bytes, SLOT, show, take);
  });
}
ncclResult_t ncclBcast(void* data, size_t count, ncclDataType_t type, int root, ncclComm_t comm,
                       cudaStream_t stream) {
  return ncclBroadcast(data, data, count, type, root, comm, stream);
}
}
