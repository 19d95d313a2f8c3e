// Device time of sampled operators on CUDA: a pair of timed events around the outermost call, read much later and never
// waited for. No CUDA header: seven runtime functions and one stable C function of torch, looked up by name.
#pragma once
#include <dlfcn.h>

#include "table.h"

namespace ff {

struct Pair {
  void* begin;
  void* end;
  Row* row;
  uint32_t generation;
  int device;
};

struct Device {
  static constexpr int kDevices = 16, kPairs = 1024;
  int (*current)(int*) = nullptr;
  int (*create)(void**, unsigned) = nullptr;
  int (*record)(void*, void*) = nullptr;
  int (*query)(void*) = nullptr;
  int (*elapsed)(float*, void*, void*) = nullptr;
  int (*capturing)(void*, int*) = nullptr;
  int (*stream_of)(int32_t, void**) = nullptr;
  int (*exchange_mode)(int*) = nullptr;
  std::atomic<bool> on{false};
  std::atomic<uint64_t> drained{0};
  std::mutex mu;
  std::vector<Pair*> free_[kDevices], waiting;
  int made = 0;

  // The runtime torch itself uses stands among libtorch_cuda's own dependencies, so one handle finds everything.
  bool bind(const char* path) {
    void* h = dlopen(path, RTLD_NOW | RTLD_NOLOAD);
    if (!h) return false;
    auto find = [h](auto& f, const char* name) { return (f = reinterpret_cast<std::decay_t<decltype(f)>>(dlsym(h, name))) != nullptr; };
    bool all = find(current, "cudaGetDevice") & find(create, "cudaEventCreateWithFlags") & find(record, "cudaEventRecord") &
               find(query, "cudaEventQuery") & find(elapsed, "cudaEventElapsedTime") & find(capturing, "cudaStreamIsCapturing") &
               find(exchange_mode, "cudaThreadExchangeStreamCaptureMode") & find(stream_of, "aoti_torch_get_current_cuda_stream");
    on.store(all);
    return all;
  }

  // Return the current stream, or nothing where an event must not be touched: while a graph is being captured.
  bool usable(int& device, void*& stream) {
    int state = 0;
    return current(&device) == 0 && device >= 0 && device < kDevices && stream_of(device, &stream) == 0 &&
           capturing(stream, &state) == 0 && state == 0;
  }

  Pair* take(int device) {
    std::lock_guard<std::mutex> g(mu);
    auto& pool = free_[device];
    if (!pool.empty()) {
      Pair* p = pool.back();
      pool.pop_back();
      return p;
    }
    if (made == kPairs) return nullptr;
    auto* p = new Pair{};
    if (create(&p->begin, 0) != 0 || create(&p->end, 0) != 0) return delete p, nullptr;
    ++made;
    p->device = device;
    return p;
  }

  Pair* begin(Row* row, uint32_t generation) {
    int device = -1;
    void* stream = nullptr;
    if (!row || !usable(device, stream)) return nullptr;
    drain_when_due();  // a program without optimizer steps has no other moment for it
    Pair* p = take(device);
    if (!p) {
      state().block->head.device_lost.fetch_add(1, std::memory_order_relaxed);
      return nullptr;
    }
    p->row = row;
    p->generation = generation;
    if (record(p->begin, stream) == 0) return p;
    give(p);
    return nullptr;
  }

  void give(Pair* p) {
    std::lock_guard<std::mutex> g(mu);
    free_[p->device].push_back(p);
  }

  void end(Pair* p) {
    int device = -1;
    void* stream = nullptr;
    if (!usable(device, stream) || device != p->device || record(p->end, stream) != 0) return give(p);
    std::lock_guard<std::mutex> g(mu);
    waiting.push_back(p);
  }

  void drain_when_due() {
    uint64_t now = mono_ns(), last = drained.load(std::memory_order_relaxed);
    if (now - last > 1000000000ull && drained.compare_exchange_strong(last, now)) drain();
  }

  // Called on threads that work on the device, never from one of ours: that would have device 0 for its own, and a query in
  // the usual mode breaks a graph capture of another thread.
  void drain() {
    int device = -1;
    void* stream = nullptr;
    if (!on.load(std::memory_order_relaxed) || !usable(device, stream)) return;
    int mode = 2;  // cudaStreamCaptureModeRelaxed; comes back as what it was
    exchange_mode(&mode);
    read_waiting();
    exchange_mode(&mode);
  }

  void read_waiting() {
    std::lock_guard<std::mutex> g(mu);
    size_t kept = 0;
    for (Pair* p : waiting) {
      float ms = 0;
      if (query(p->end) != 0) {
        waiting[kept++] = p;
        continue;
      }
      if (elapsed(&ms, p->begin, p->end) == 0 && p->generation == state().generation.load()) {
        p->row->device_count.fetch_add(1, std::memory_order_relaxed);
        p->row->device_ns.fetch_add(uint64_t(double(ms) * 1e6), std::memory_order_relaxed);
      }
      free_[p->device].push_back(p);
    }
    waiting.resize(kept);
  }
};
inline Device* const g_device = new Device();
inline Device& device() { return *g_device; }

}  // namespace ff
