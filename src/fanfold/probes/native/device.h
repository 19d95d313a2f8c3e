// Device time of sampled operators on CUDA: a pair of timed events around the outermost call, read much later and never
// waited for. No CUDA header: eight functions of the runtime, one of the driver and one stable C function of torch, by name.
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
  int (*last_error)() = nullptr;
  int (*context)(void**) = nullptr;
  std::atomic<bool> on{false};
  std::atomic<uint64_t> drained{0};
  std::mutex mu;
  std::vector<Pair*> free_[kDevices], waiting;
  int made = 0;
  bool forked_awake = false;

  // torch's own runtime is among libtorch_cuda's dependencies; so is the driver, if it is linked to it.
  bool bind(const char* path) {
    void* h = dlopen(path, RTLD_NOW | RTLD_NOLOAD);
    void* driver = dlopen("libcuda.so.1", RTLD_LAZY);  // this initialises nothing
    if (!h) return false;
    auto find = [h, driver](auto& f, const char* name) {
      void* found = dlsym(h, name);
      if (!found && driver) found = dlsym(driver, name);
      return (f = reinterpret_cast<std::decay_t<decltype(f)>>(found)) != nullptr;
    };
    bool all = find(context, "cuCtxGetCurrent") && find(current, "cudaGetDevice") && find(create, "cudaEventCreateWithFlags") &&
               find(record, "cudaEventRecord") && find(query, "cudaEventQuery") && find(elapsed, "cudaEventElapsedTime") &&
               find(capturing, "cudaStreamIsCapturing") && find(exchange_mode, "cudaThreadExchangeStreamCaptureMode") &&
               find(last_error, "cudaGetLastError") && find(stream_of, "aoti_torch_get_current_cuda_stream");
    on.store(all);
    return all;
  }

  // Any result other than success, even "not ready yet", becomes this thread's last error, which torch would find after its
  // next kernel and raise: clear it.
  bool fine(int answer) {
    if (answer != 0) last_error();
    return answer == 0;
  }

  // Return whether this thread uses a device. The runtime's first call would create a context: half a gigabyte on a device that
  // nobody asked for, and no CUDA in processes forked later.
  bool awake() {
    void* now = nullptr;
    return context(&now) == 0 && now;
  }

  // Return the current stream, or nothing while a graph is being captured, when events must not be touched.
  bool usable(int& device, void*& stream) {
    int state = 0;
    return awake() && fine(current(&device)) && device >= 0 && device < kDevices && stream_of(device, &stream) == 0 &&
           fine(capturing(stream, &state)) && state == 0;
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
    if (!fine(create(&p->begin, 0)) || !fine(create(&p->end, 0))) return delete p, nullptr;
    ++made;
    p->device = device;
    return p;
  }

  Pair* begin(Row* row, uint32_t generation) {
    int device = -1;
    void* stream = nullptr;
    if (!row || !usable(device, stream)) return nullptr;
    drain_when_due();  // a program without optimizer steps has no other opportunity
    Pair* p = take(device);
    if (!p) {
      state().block->head.device_lost.fetch_add(1, std::memory_order_relaxed);
      return nullptr;
    }
    p->row = row;
    p->generation = generation;
    if (fine(record(p->begin, stream))) return p;
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
    if (!on.load(std::memory_order_relaxed)) return;  // forked in the middle of an operator
    if (!usable(device, stream) || device != p->device || !fine(record(p->end, stream))) return give(p);
    std::lock_guard<std::mutex> g(mu);
    waiting.push_back(p);
  }

  // A context does not survive in a child and must not be touched there; if there was none, the child may create its own.
  void before_fork() { forked_awake = on.load() && (made || awake()); }
  void in_child() {
    new (&mu) std::mutex;
    if (forked_awake) on.store(false);
  }

  bool due() const {
    return on.load(std::memory_order_relaxed) && mono_ns() - drained.load(std::memory_order_relaxed) > 1000000000ull;
  }
  void drain_when_due() {
    uint64_t now = mono_ns(), last = drained.load(std::memory_order_relaxed);
    if (now - last > 1000000000ull && drained.compare_exchange_strong(last, now)) drain();
  }

  // Called on threads that use the device, never on one of ours: that would use device 0, and a query in the usual mode
  // breaks a graph capture of another thread.
  void drain() {
    int device = -1;
    void* stream = nullptr;
    if (!on.load(std::memory_order_relaxed) || !usable(device, stream)) return;
    int mode = 2;  // cudaStreamCaptureModeRelaxed; the call returns the previous mode here
    exchange_mode(&mode);
    read_waiting();
    exchange_mode(&mode);
  }

  void read_waiting() {
    std::lock_guard<std::mutex> g(mu);
    size_t kept = 0;
    for (Pair* p : waiting) {
      float ms = 0;
      if (!fine(query(p->end))) {
        waiting[kept++] = p;
        continue;
      }
      if (fine(elapsed(&ms, p->begin, p->end)) && p->generation == state().generation.load()) {
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
