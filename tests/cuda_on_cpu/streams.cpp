// Streams, events and host functions. Each function says the rule of CUDA that it keeps.
#include "device.h"

#include <dlfcn.h>

#include <algorithm>
#include <atomic>
#include <map>
#include <thread>

// -- marks and queues ----------------------------------------------------------------------------

void Mark::reach() {
  std::lock_guard<std::mutex> lock(mutex_);
  at = std::chrono::steady_clock::now();
  reached_ = true;
  changed_.notify_all();
}

void Mark::wait() {
  std::unique_lock<std::mutex> lock(mutex_);
  changed_.wait(lock, [&] { return reached_; });
}

bool Mark::reached() {
  std::lock_guard<std::mutex> lock(mutex_);
  return reached_;
}

CUstream_st::CUstream_st(int number, int device, bool blocking, int priority)
    : number(number), device(device), priority(priority), blocking(blocking) {
  std::thread([this] { run(); }).detach();
}

/// Tasks run one by one in the order of their launch, each after a random delay of this stream.
void CUstream_st::run() {
  static const long mean = setting("CUDA_ON_CPU_DELAY_US", 0);
  std::minstd_rand random(setting("CUDA_ON_CPU_SEED", 0) * 7919 + number + 1);
  random.discard(10);
  const long most = mean ? random() % (4 * mean) : 0;  // some streams are slow, some are not
  for (;;) {
    Task task;
    {
      std::unique_lock<std::mutex> lock(mutex_);
      pushed_.wait(lock, [&] { return !tasks_.empty(); });
      task = std::move(tasks_.front());
      tasks_.pop_front();
      busy_ = true;
    }
    if (most) std::this_thread::sleep_for(std::chrono::microseconds(random() % most));
    task();
    task = nullptr;  // what it holds is let go before the stream is seen idle
    std::lock_guard<std::mutex> lock(mutex_);
    busy_ = false;
  }
}

void CUstream_st::push(Task task) {
  std::lock_guard<std::mutex> lock(mutex_);
  tasks_.push_back(std::move(task));
  pushed_.notify_one();
}

MarkPtr CUstream_st::mark() {
  auto mark = std::make_shared<Mark>();
  if (idle())
    mark->reach();
  else
    push([mark] { mark->reach(); });
  return mark;
}

bool CUstream_st::idle() {
  std::lock_guard<std::mutex> lock(mutex_);
  return tasks_.empty() && !busy_;
}

HostWaits::HostWaits() {
  static auto held = (int (*)())dlsym(RTLD_DEFAULT, "PyGILState_Check");
  static auto save = (void* (*)())dlsym(RTLD_DEFAULT, "PyEval_SaveThread");
  static auto running = (int (*)())dlsym(RTLD_DEFAULT, "Py_IsInitialized");
  if (held && save && running() && held()) state_ = save();
}

HostWaits::~HostWaits() {
  static auto restore = (void (*)(void*))dlsym(RTLD_DEFAULT, "PyEval_RestoreThread");
  if (state_) restore(state_);
}

// -- which streams there are ---------------------------------------------------------------------

static std::mutex all_mutex;
static auto& all = *new std::vector<CUstream_st*>;  // never destroyed: threads outlive main

static CUstream_st* make_stream(int device, bool blocking, int priority) {
  std::lock_guard<std::mutex> lock(all_mutex);
  all.push_back(new CUstream_st((int)all.size(), device, blocking, priority));
  return all.back();
}

static CUstream_st* legacy_stream(int device) {
  static std::mutex mutex;
  static auto& made = *new std::map<int, CUstream_st*>;
  std::lock_guard<std::mutex> lock(mutex);
  auto& stream = made[device];
  if (!stream) stream = make_stream(device, true, 0);
  return stream;
}

CUstream_st* stream_of(cudaStream_t handle) {
  static thread_local std::map<int, CUstream_st*> own;
  if (handle == cudaStreamPerThread) {
    auto& stream = own[current_device()];
    if (!stream) stream = make_stream(current_device(), true, 0);
    return stream;
  }
  return handle == nullptr || handle == cudaStreamLegacy ? legacy_stream(current_device()) : handle;
}

std::vector<CUstream_st*> streams_of(int device) {
  legacy_stream(device);
  std::lock_guard<std::mutex> lock(all_mutex);
  std::vector<CUstream_st*> found;
  std::copy_if(all.begin(), all.end(), std::back_inserter(found),
               [=](CUstream_st* stream) { return stream->device == device; });
  return found;
}

static void wait_for(CUstream_st* stream, CUstream_st* other) {
  follow(stream, clock_of(other));
  auto mark = other->mark();
  if (!mark->reached()) stream->push([mark] { mark->wait(); });
}

cudaError_t submit(cudaStream_t handle, Launch launch, Uses uses) {
  if (auto error = device_error()) return error;
  auto stream = stream_of(handle);
  auto legacy = legacy_stream(stream->device);
  if (auto graph = stream->capture) {
    graph->nodes.emplace_back(std::move(launch), std::move(uses));
    ++stream->captured;
    return cudaSuccess;
  }
  // The legacy default stream waits for all blocking streams, and these wait for it.
  if (stream == legacy) {
    for (auto other : streams_of(stream->device)) {
      if (other == stream || !other->blocking) continue;
      if (other->capture) {
        other->capture->invalid = true;
        return fail(cudaErrorStreamCaptureImplicit);
      }
      wait_for(stream, other);
    }
  } else if (stream->blocking) {
    wait_for(stream, legacy);
  }
  note_launch(stream, uses);
  stream->push(launch());
  return cudaSuccess;
}

cudaError_t drain(cudaStream_t handle) {
  if (auto error = forbid_in_capture(handle)) return error;
  const auto clock = clock_of(stream_of(handle));
  auto mark = stream_of(handle)->mark();
  if (!mark->reached()) {
    HostWaits waits;
    mark->wait();
  }
  host_follows(clock);
  return device_error();
}

cudaError_t drain_device() {
  if (auto error = forbid_unsafe()) return error;
  for (auto stream : streams_of(current_device())) {
    if (stream->capture) {
      stream->capture->invalid = true;
      return fail(cudaErrorStreamCaptureUnsupported);
    }
    const auto clock = clock_of(stream);
    auto mark = stream->mark();
    if (!mark->reached()) {
      HostWaits waits;
      mark->wait();
    }
    host_follows(clock);
  }
  return device_error();
}

// -- events --------------------------------------------------------------------------------------

/// An event never recorded counts as reached.
struct CUevent_st {
  std::mutex mutex;
  MarkPtr mark;
  Clock clock;
  const long number = ++made;
  static inline std::atomic<long> made{0};
  GraphPtr capture;  // it was recorded while capturing
  CUstream_st* stream = nullptr;
  uint64_t captured = 0;

  MarkPtr last() {
    std::lock_guard<std::mutex> lock(mutex);
    return mark;
  }
  Clock known() {
    std::lock_guard<std::mutex> lock(mutex);
    return clock;
  }
};

extern "C" {

cudaError_t cudaStreamCreateWithPriority(cudaStream_t* stream, unsigned flags, int priority) {
  // A non-blocking stream is not ordered with the legacy default stream.
  *stream = make_stream(current_device(), !(flags & cudaStreamNonBlocking), priority);
  return device_error();
}
cudaError_t cudaStreamCreateWithFlags(cudaStream_t* stream, unsigned flags) {
  return cudaStreamCreateWithPriority(stream, flags, 0);
}
cudaError_t cudaStreamCreate(cudaStream_t* stream) {
  return cudaStreamCreateWithPriority(stream, cudaStreamDefault, 0);
}
cudaError_t cudaStreamDestroy(cudaStream_t) {
  return cudaSuccess;  // It returns at once; work on the stream still runs to its end.
}
cudaError_t cudaStreamGetPriority(cudaStream_t stream, int* priority) {
  *priority = stream_of(stream)->priority;
  return cudaSuccess;
}
cudaError_t cudaDeviceGetStreamPriorityRange(int* least, int* greatest) {
  *least = 0, *greatest = -5;
  return cudaSuccess;
}
cudaError_t cudaStreamQuery(cudaStream_t stream) {
  if (auto error = forbid_in_capture(stream)) return error;
  if (auto error = device_error()) return error;
  const auto clock = clock_of(stream_of(stream));
  if (!stream_of(stream)->idle()) return fail(cudaErrorNotReady);
  host_follows(clock);
  return cudaSuccess;
}
cudaError_t cudaStreamSynchronize(cudaStream_t stream) { return drain(stream); }
cudaError_t cudaDeviceSynchronize() { return drain_device(); }

cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned) {
  *event = new CUevent_st;
  return device_error();
}
cudaError_t cudaEventCreate(cudaEvent_t* event) { return cudaEventCreateWithFlags(event, 0); }
cudaError_t cudaEventDestroy(cudaEvent_t event) {
  delete event;  // Waits for it that are queued still hold its mark.
  return cudaSuccess;
}

/// An event stands for what its stream held at the last record; an earlier wait keeps the earlier.
cudaError_t cudaEventRecordWithFlags(cudaEvent_t event, cudaStream_t handle, unsigned flags) {
  auto stream = stream_of(handle);
  auto mark = std::make_shared<Mark>();
  const bool within = stream->capture && flags != cudaEventRecordExternal;
  if (!within)
    if (auto error = submit(handle, [mark] { return [mark] { mark->reach(); }; })) return error;
  std::lock_guard<std::mutex> lock(event->mutex);
  event->mark = mark;
  event->clock = clock_of(stream, event->number);
  event->capture = within ? stream->capture : nullptr;
  event->stream = stream;
  event->captured = stream->captured;
  return cudaSuccess;
}
cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
  return cudaEventRecordWithFlags(event, stream, cudaEventRecordDefault);
}

/// The stream, not the host, waits for what the event stands for now, and joins its capture.
cudaError_t cudaStreamWaitEvent(cudaStream_t handle, cudaEvent_t event, unsigned) {
  if (auto error = device_error()) return error;
  auto stream = stream_of(handle);
  if (auto graph = event->capture) {
    if (!stream->capture) {
      stream->capture = graph;
      graph->streams.push_back(stream);
      stream->captured = stream->joined = 0;
    } else if (stream->capture != graph) {
      return fail(cudaErrorStreamCaptureMerge);
    }
    if (event->stream != stream) {
      event->stream->joined = std::max(event->stream->joined, event->captured);
      ++stream->captured;  // its owner has to wait for it too
    }
    return cudaSuccess;
  }
  auto mark = event->last();
  if (stream->capture && mark) {
    stream->capture->invalid = true;
    return fail(cudaErrorStreamCaptureIsolation);  // work of the graph on work outside of it
  }
  if (mark) follow(stream, event->known());
  if (mark && !mark->reached()) return submit(handle, [mark] { return [mark] { mark->wait(); }; });
  return cudaSuccess;
}
cudaError_t cudaEventSynchronize(cudaEvent_t event) {
  if (auto error = forbid_unsafe()) return error;
  if (event->capture) return fail(cudaErrorCapturedEvent);
  if (auto mark = event->last(); mark && !mark->reached()) {
    HostWaits waits;
    mark->wait();
  }
  host_follows(event->known());
  return device_error();
}
cudaError_t cudaEventQuery(cudaEvent_t event) {
  if (auto error = forbid_unsafe()) return error;
  if (event->capture) return fail(cudaErrorCapturedEvent);
  if (auto error = device_error()) return error;
  const auto clock = event->known();
  auto mark = event->last();
  if (mark && !mark->reached()) return fail(cudaErrorNotReady);
  host_follows(clock);
  return cudaSuccess;
}
cudaError_t cudaEventElapsedTime(float* ms, cudaEvent_t first, cudaEvent_t second) {
  auto from = first->last(), to = second->last();
  if (!from || !to) return fail(cudaErrorInvalidResourceHandle);  // never recorded
  if (!from->reached() || !to->reached()) return fail(cudaErrorNotReady);
  *ms = std::chrono::duration<float, std::milli>(to->at - from->at).count();
  return cudaSuccess;
}

cudaError_t cudaLaunchHostFunc(cudaStream_t stream, cudaHostFn_t call, void* data) {
  return submit(stream, [=] { return [=] { call(data); }; });  // again at each replay
}
cudaError_t cudaStreamAddCallback(cudaStream_t s, cudaStreamCallback_t call, void* data, unsigned) {
  if (auto error = forbid_in_capture(s)) return error;
  return submit(s, [=] { return [=] { call(s, device_error(), data); }; });
}

/// Not of CUDA: queue `run(data)`, which uses memory, on a stream; `drop(data)` once it cannot run
/// again.
cudaError_t cuda_on_cpu_submit(cudaStream_t stream, void (*run)(void*), void (*drop)(void*),
                               void* data, const Use* uses, int count, const char* where) {
  std::shared_ptr<void> held(data, drop);
  return submit(stream, [=] { return [=] { run(held.get()); }; }, {{uses, uses + count}, where});
}
/// Not of CUDA: a handle of a device's default stream that does not depend on the current device.
cudaStream_t cuda_on_cpu_stream(int device, cudaStream_t handle) {
  return handle ? stream_of(handle) : legacy_stream(device);
}
void cuda_on_cpu_fail(const char* said) { fail_device(said); }
}
