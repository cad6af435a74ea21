// A CUDA device made of CPU threads: what its files share.
#pragma once
#include <cuda_runtime_api.h>

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <random>
#include <string>
#include <vector>

/// Runs once, on the thread of a stream.
using Task = std::function<void()>;
/// Called by the host at each launch, a graph's replay included; gives the task of that launch.
using Launch = std::function<Task()>;

/// Memory that a launch reads or writes.
struct Use {
  const void* at;
  size_t bytes;
  bool writes;
};
/// All that a launch uses, and the call and the line that launched it.
struct Uses {
  std::vector<Use> all;
  std::string where;
};
/// By stream, the launches that come before, and the event that said so (0: no event).
struct Known {
  uint64_t launches = 0;
  long event = 0;
};
using Clock = std::map<int, Known>;

/// A point in a stream: reached once all tasks queued before it have ended.
struct Mark {
  void reach();
  void wait();
  bool reached();
  std::chrono::steady_clock::time_point at;

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  bool reached_ = false;
};
using MarkPtr = std::shared_ptr<Mark>;

/// A graph under capture, or captured: its launches in the order in which the host made them.
struct CUgraph_st {
  std::vector<std::pair<Launch, Uses>> nodes;
  unsigned long long id = 0;
  bool invalid = false;  // a call that CUDA forbids while capturing came
  cudaStreamCaptureMode mode = cudaStreamCaptureModeGlobal;
  cudaStream_t origin = nullptr;
  size_t thread = 0;  // that began the capture
  std::vector<cudaStream_t> streams;
};
using GraphPtr = std::shared_ptr<CUgraph_st>;

/// A stream: a queue and the thread that runs it. A stream lives as long as the process.
struct CUstream_st {
  CUstream_st(int number, int device, bool blocking, int priority);
  void push(Task task);
  MarkPtr mark();  // a mark behind all that is queued
  bool idle();

  const int number, device, priority;
  const bool blocking;  // ordered with the legacy default stream
  GraphPtr capture;     // the graph that its launches go to
  uint64_t captured = 0, joined = 0;  // launches in the capture; how many another stream waited for
  Clock clock;            // what its next launch comes behind
  uint64_t launches = 0;  // made so far

 private:
  void run();
  std::mutex mutex_;
  std::condition_variable pushed_;
  std::deque<Task> tasks_;
  bool busy_ = false;
};

/// While it lives, a host thread that waits has given Python's lock back, or tasks that need it hang.
class HostWaits {
 public:
  HostWaits();
  ~HostWaits();

 private:
  void* state_ = nullptr;
};

/// The stream of a handle: 0 and 1 are the legacy default stream, 2 the default one of this thread.
CUstream_st* stream_of(cudaStream_t handle);
std::vector<CUstream_st*> streams_of(int device);
/// Queue a launch behind all that its stream has to wait for, or add it to a capture.
cudaError_t submit(cudaStream_t stream, Launch launch, Uses uses = {});
/// Wait until a stream, or all streams of the device, are idle.
cudaError_t drain(cudaStream_t stream);
cudaError_t drain_device();
/// The error of a call that waits for the device while this thread may not; it ends the capture.
cudaError_t forbid_in_capture(cudaStream_t stream);
cudaError_t forbid_unsafe();

/// What comes before the next launch of a stream; `event`: the one that is recorded there.
Clock clock_of(CUstream_st* stream, long event = 0);
/// The next launches of a stream, or of the host, come behind what a clock says.
void follow(CUstream_st* stream, const Clock& clock);
void host_follows(const Clock& clock);
/// A launch is made; an error of the device if what it uses was not waited for.
void note_launch(CUstream_st* stream, const Uses& uses);
/// Memory is given back to the device.
void forget(const void* at, size_t bytes);
/// What a call uses, with the line of Python that makes it.
Uses uses_of(const char* call, std::vector<Use> all);

/// Remember an error of this thread, as cudaGetLastError tells it, with words of its own if given.
cudaError_t fail(cudaError_t error, const std::string& said = "");
/// The device has failed for good: what a task said, told by every later call.
void fail_device(const std::string& said);
cudaError_t device_error();
/// The error of a call that is not built, by name: also on stderr.
cudaError_t not_built(const std::string& name);

int current_device();
bool is_device_memory(const void* pointer);
bool is_pinned(const void* pointer);
long setting(const char* name, long otherwise);
