// Uses of memory that no wait keeps apart, by vector clocks (Fidge 1988; Mattern 1989).
//
// A launch comes behind the launches before it on its stream, those behind which an event was
// recorded that the stream waited for, and those that the host waited for. Two uses of a byte, one
// of them a write, that neither way come behind each other are an error of the device.
#include <pthread.h>

#include <atomic>
#include <cstring>
#include <map>

#include "device.h"

namespace {
std::mutex mutex;
auto& host = *new Clock;  // of all threads of the host but those that watch NCCL
std::atomic<bool> reports{setting("CUDA_ON_CPU_RACES", 1) != 0};
std::string first;  // the first race since it was asked for

struct Past {
  int stream;
  uint64_t launch;
  bool writes;
  std::string where;
};
struct Region {
  uintptr_t end;
  std::vector<Past> uses;  // the last write, and the last read of each stream since
};
auto& regions = *new std::map<uintptr_t, Region>;

void merge(Clock& clock, const Clock& other) {
  for (auto& [stream, known] : other)
    if (auto& own = clock[stream]; known.launches > own.launches) own = known;
}

/// Let a region begin at `at`, if one goes across it.
void split(uintptr_t at) {
  auto next = regions.upper_bound(at);
  if (next == regions.begin()) return;
  auto& [begin, region] = *std::prev(next);
  if (begin == at || region.end <= at) return;
  regions[at] = region;
  region.end = at;
}

std::string conflict(CUstream_st* stream, const Use& use, const std::string& where,
                     const Past& past) {
  auto known = stream->clock[past.stream];
  if (past.stream == stream->number || known.launches >= past.launch) return "";
  auto n = [](auto number) { return std::to_string(number); };
  auto by = known.event ? " (event " + n(known.event) + ")" : std::string();
  return "stream " + n(stream->number) + (use.writes ? " writes " : " reads ") + n(use.bytes) +
         " bytes in " + where + " that stream " + n(past.stream) +
         (past.writes ? " writes" : " reads") + " in " + past.where +
         ", and has not waited for it: that is launch " + n(past.launch) +
         ", and it waited for launch " + n(known.launches) + by;
}

std::string take(CUstream_st* stream, const Use& use, const std::string& where) {
  const auto begin = (uintptr_t)use.at, end = begin + use.bytes;
  split(begin), split(end);
  std::string wrong;
  const Past now{stream->number, stream->launches, use.writes, where};
  auto next = begin;
  for (auto it = regions.lower_bound(begin); it != regions.end() && it->first < end;) {
    for (auto& past : it->second.uses)
      if ((past.writes || use.writes) && wrong.empty())
        wrong = conflict(stream, use, where, past);
    if (use.writes) {
      it = regions.erase(it);
      continue;
    }
    if (it->first > next) regions[next] = {it->first, {now}};
    next = it->second.end;
    auto& uses = it->second.uses;
    for (auto old = uses.begin(); old != uses.end(); ++old)
      if (!old->writes && old->stream == now.stream) {
        uses.erase(old);
        break;
      }
    uses.push_back(now);
    ++it;
  }
  if (use.writes)
    regions[begin] = {end, {now}};
  else if (next < end)
    regions[next] = {end, {now}};
  return wrong;
}

bool watches_nccl() {
  char name[32] = "";
  pthread_getname_np(pthread_self(), name, sizeof name);
  return strncmp(name, "pt_nccl", 7) == 0;
}
}  // namespace

Clock clock_of(CUstream_st* stream, long event) {
  std::lock_guard<std::mutex> lock(mutex);
  auto clock = stream->clock;
  clock[stream->number] = {stream->launches, event};
  return clock;
}
void follow(CUstream_st* stream, const Clock& clock) {
  std::lock_guard<std::mutex> lock(mutex);
  merge(stream->clock, clock);
}
void host_follows(const Clock& clock) {
  if (watches_nccl()) return;
  std::lock_guard<std::mutex> lock(mutex);
  merge(host, clock);
}
void note_launch(CUstream_st* stream, const Uses& uses) {
  std::string wrong;
  {
    std::lock_guard<std::mutex> lock(mutex);
    merge(stream->clock, host);
    ++stream->launches;
    for (auto& use : uses.all) {
      if (!use.bytes) continue;
      auto found = take(stream, use, uses.where);
      if (wrong.empty()) wrong = found;
    }
    if (first.empty()) first = wrong;
  }
  if (reports && !wrong.empty()) fail_device(wrong);
}
void forget(const void* at, size_t bytes) {
  std::lock_guard<std::mutex> lock(mutex);
  const auto begin = (uintptr_t)at, end = begin + bytes;
  split(begin), split(end);
  regions.erase(regions.lower_bound(begin), regions.lower_bound(end));
}

static void (*locate)(char* to, int size) = nullptr;

Uses uses_of(const char* call, std::vector<Use> all) {
  char line[512] = "";
  if (locate) locate(line, sizeof line);
  return {std::move(all), std::string(call) + line};
}

extern "C" {
/// Not of CUDA: whether such uses are errors from here on.
void cuda_on_cpu_report_races(bool whether) { reports = whether; }
/// Not of CUDA: the first such use since the last call, or nothing.
void cuda_on_cpu_take_race(char* to, int size) {
  std::lock_guard<std::mutex> lock(mutex);
  snprintf(to, size, "%s", first.c_str());
  first.clear();
}
/// Not of CUDA: the function that writes the line of Python that this thread is at.
void cuda_on_cpu_locate(void (*function)(char*, int)) { locate = function; }
/// Not of CUDA: memory that the host itself uses, behind a stream that it has waited for.
void cuda_on_cpu_use(cudaStream_t handle, const Use* uses, int count, const char* where) {
  auto stream = stream_of(handle);
  note_launch(stream, {{uses, uses + count}, where});
  host_follows(clock_of(stream));
}
}
