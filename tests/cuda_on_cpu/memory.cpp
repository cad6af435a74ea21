// Memory of the device and pinned memory: pages of the host, poisoned when new and when freed.
#include "device.h"

#include <sys/mman.h>

#include <cstring>
#include <map>

namespace {
struct Block {
  size_t bytes;
  int device;
};
std::mutex mutex;
auto& blocks = *new std::map<const char*, Block>;   // of the device
auto& pinned = *new std::map<const char*, size_t>;  // of the host
size_t used = 0;
const int POISON = 0xff;  // NaN in every float type, -1 in integers

size_t capacity() { return (size_t)setting("CUDA_ON_CPU_MIB", 8192) << 20; }

char* map_pages(size_t bytes) {
  void* p = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (p == MAP_FAILED) return nullptr;
  memset(p, POISON, bytes);
  return (char*)p;
}

template <class Map>
auto around(Map& map, const void* pointer) {
  auto next = map.upper_bound((const char*)pointer);
  return next == map.begin() ? map.end() : std::prev(next);
}

const Block* block_of(const void* pointer) {
  auto found = around(blocks, pointer);
  if (found == blocks.end()) return nullptr;
  return (const char*)pointer < found->first + found->second.bytes ? &found->second : nullptr;
}

bool pinned_at(const void* pointer) {
  auto found = around(pinned, pointer);
  return found != pinned.end() && (const char*)pointer < found->first + found->second;
}
}  // namespace

bool is_device_memory(const void* pointer) {
  std::lock_guard<std::mutex> lock(mutex);
  return block_of(pointer) != nullptr;
}
bool is_pinned(const void* pointer) {
  std::lock_guard<std::mutex> lock(mutex);
  return pinned_at(pointer);
}

extern "C" {

/// It fails, and changes nothing, where the device has no room.
cudaError_t cudaMalloc(void** out, size_t bytes) {
  if (auto error = forbid_unsafe()) return error;
  if (auto error = device_error()) return error;
  *out = nullptr;
  if (!bytes) return cudaSuccess;
  std::lock_guard<std::mutex> lock(mutex);
  if (used + bytes > capacity()) return fail(cudaErrorMemoryAllocation);
  char* made = map_pages(bytes);
  if (!made) return fail(cudaErrorMemoryAllocation);
  blocks[made] = {bytes, current_device()};
  used += bytes;
  *out = made;
  return cudaSuccess;
}
/// It waits for the device; what touches the memory later is an illegal access.
cudaError_t cudaFree(void* pointer) {
  if (!pointer) return cudaSuccess;
  if (auto error = drain_device()) return error;
  std::lock_guard<std::mutex> lock(mutex);
  auto found = blocks.find((char*)pointer);
  if (found == blocks.end()) return fail(cudaErrorInvalidValue);
  used -= found->second.bytes;
  forget(pointer, found->second.bytes);
  munmap(pointer, found->second.bytes);
  blocks.erase(found);
  return cudaSuccess;
}
cudaError_t cudaMemGetInfo(size_t* free, size_t* total) {
  std::lock_guard<std::mutex> lock(mutex);
  *total = capacity(), *free = capacity() - used;
  return cudaSuccess;
}

cudaError_t cudaHostAlloc(void** out, size_t bytes, unsigned) {
  if (auto error = forbid_unsafe()) return error;
  std::lock_guard<std::mutex> lock(mutex);
  char* made = map_pages(bytes);
  if (!made) return fail(cudaErrorMemoryAllocation);
  pinned[made] = bytes;
  *out = made;
  return cudaSuccess;
}
cudaError_t cudaFreeHost(void* pointer) {
  if (auto error = drain_device()) return error;  // It waits for the device.
  std::lock_guard<std::mutex> lock(mutex);
  auto found = pinned.find((char*)pointer);
  if (found == pinned.end()) return fail(cudaErrorInvalidValue);
  forget(pointer, found->second);
  munmap(pointer, found->second);
  pinned.erase(found);
  return cudaSuccess;
}
cudaError_t cudaHostRegister(void* pointer, size_t bytes, unsigned) {
  std::lock_guard<std::mutex> lock(mutex);
  if (pinned_at(pointer)) return fail(cudaErrorHostMemoryAlreadyRegistered);
  pinned[(char*)pointer] = bytes;
  return cudaSuccess;
}
cudaError_t cudaHostUnregister(void* pointer) {
  std::lock_guard<std::mutex> lock(mutex);
  return pinned.erase((char*)pointer) ? cudaSuccess : fail(cudaErrorHostMemoryNotRegistered);
}
cudaError_t cudaPointerGetAttributes(cudaPointerAttributes* found, const void* pointer) {
  std::lock_guard<std::mutex> lock(mutex);
  memset(found, 0, sizeof *found);
  const Block* block = block_of(pointer);
  const bool host = !block && pinned_at(pointer);
  found->type = block  ? cudaMemoryTypeDevice
                : host ? cudaMemoryTypeHost
                       : cudaMemoryTypeUnregistered;
  found->device = block ? block->device : host ? 0 : cudaInvalidDeviceId;
  found->devicePointer = block || host ? (void*)pointer : nullptr;
  found->hostPointer = block ? nullptr : (void*)pointer;
  return cudaSuccess;
}

/// Asynchronous between the device and pinned memory. Pageable memory is read before the call
/// returns, and written before it returns; so neither can be captured.
cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t bytes, cudaMemcpyKind,
                            cudaStream_t stream) {
  const bool reads_pages = !is_device_memory(from) && !is_pinned(from);
  const bool writes_pages = !is_device_memory(to) && !is_pinned(to);
  if (reads_pages || writes_pages)
    if (auto error = forbid_in_capture(stream)) return error;
  if (reads_pages) {
    auto staged = std::make_shared<std::string>((const char*)from, bytes);
    return submit(stream, [=] { return [=] { memcpy(to, staged->data(), bytes); }; },
                  uses_of("cudaMemcpyAsync", {{to, bytes, true}}));
  }
  std::vector<Use> uses = {{from, bytes, false}};
  if (!writes_pages) uses.push_back({to, bytes, true});
  auto copy = [=] { return [=] { memcpy(to, from, bytes); }; };
  if (auto error = submit(stream, copy, uses_of("cudaMemcpyAsync", uses))) return error;
  return writes_pages ? drain(stream) : cudaSuccess;
}
cudaError_t cudaMemcpyPeerAsync(void* to, int, const void* from, int, size_t n, cudaStream_t s) {
  return cudaMemcpyAsync(to, from, n, cudaMemcpyDefault, s);
}
/// On the legacy default stream; the host waits for it.
cudaError_t cudaMemcpy(void* to, const void* from, size_t bytes, cudaMemcpyKind kind) {
  if (auto error = cudaMemcpyAsync(to, from, bytes, kind, cudaStreamLegacy)) return error;
  return drain(cudaStreamLegacy);
}
cudaError_t cudaMemsetAsync(void* to, int value, size_t bytes, cudaStream_t stream) {
  return submit(stream, [=] { return [=] { memset(to, value, bytes); }; },
                uses_of("cudaMemsetAsync", {{to, bytes, true}}));
}
/// On the legacy default stream; the host does not wait for device memory to be set.
cudaError_t cudaMemset(void* to, int value, size_t bytes) {
  return cudaMemsetAsync(to, value, bytes, cudaStreamLegacy);
}
}
