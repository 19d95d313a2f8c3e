// Many threads, windows opening and closing, labels, usage, forks and a full table, without torch and under sanitizers:
// a stand-in for torch's dispatcher calls the callbacks as torch does. `make native-check` builds and runs it.
#include <sys/wait.h>

#include <cstdlib>
#include <thread>

// The sanitizers' own locks do not survive a fork while other threads run: under them, fork before the threads or not at all.
#if defined(__SANITIZE_THREAD__)
constexpr int kForksBefore = 0, kForksAmid = 0;
#elif defined(__SANITIZE_ADDRESS__)
constexpr int kForksBefore = 5, kForksAmid = 0;
#else
constexpr int kForksBefore = 0, kForksAmid = 20;
#endif

#include "native.cpp"

namespace {
constexpr int kThreads = 8;  // half of them share rows
struct Call {
  uint8_t before[kScopeAt], scope;
  const char* name;
  const char* overload;
};
std::mutex stress_mu;
std::vector<std::pair<uint64_t, Callback>> stress_callbacks;
uint64_t stress_next = 1;

uint64_t stress_add(Callback c) {
  std::lock_guard<std::mutex> g(stress_mu);
  stress_callbacks.emplace_back(stress_next, c);
  return stress_next++;
}
void stress_remove(uint64_t handle) {
  std::lock_guard<std::mutex> g(stress_mu);
  for (auto it = stress_callbacks.begin(); it != stress_callbacks.end(); ++it)
    if (it->first == handle) { stress_callbacks.erase(it); return; }
}
const char* stress_name(const void* call) { return static_cast<const Call*>(call)->name; }
const char* stress_overload(const void* call) { return static_cast<const Call*>(call)->overload; }
thread_local std::shared_ptr<DebugInfo> stress_info;
DebugInfo* stress_get(uint64_t kind) { return kind == torch_.label_kind ? stress_info.get() : nullptr; }
void stress_push(uint64_t, std::shared_ptr<DebugInfo> info) { stress_info = std::move(info); }

// A device whose events complete at once: pairs are handed out, recorded and read by all threads.
void keep_time() {
  auto& d = device();
  d.current = [](int* device) { return *device = 0; };
  d.create = [](void** event, unsigned) { *event = &stress_next; return 0; };
  d.record = [](void*, void*) { return 0; };
  d.query = [](void*) { return 0; };
  d.elapsed = [](float* ms, void*, void*) { *ms = 1; return 0; };
  d.capturing = [](void*, int* state) { return *state = 0; };
  d.stream_of = [](int32_t, void** stream) { *stream = nullptr; return 0; };
  d.exchange_mode = [](int*) { return 0; };
  d.last_error = [] { return 0; };
  d.context = [](void** now) { *now = &stress_next; return 0; };
  d.on.store(true);
}

// Call the callbacks registered for a scope, with the list as it was when the call began, as torch does.
void observe(int scope, const char* name, const char* overload, const std::function<void()>& inside) {
  std::vector<Callback> active;
  {
    std::lock_guard<std::mutex> g(stress_mu);
    for (auto& item : stress_callbacks)
      if (item.second.scopes[scope]) active.push_back(item.second);
  }
  Call call{{}, uint8_t(scope), name, overload};
  for (auto& c : active) reinterpret_cast<Started (*)(const void*)>(c.start)(&call);
  inside();
  for (auto& c : active) reinterpret_cast<void (*)(const void*, Context*)>(c.end)(&call, nullptr);
}

void train(int thread, int steps) {
  std::string own = "request " + std::to_string(thread);
  char name[64];
  for (int step = 0; step < steps; ++step) {
    ff_label_set(ff_label_id(step % 3 ? own.c_str() : ""));
    for (int i = 0; i < 20; ++i) {
      snprintf(name, sizeof name, "aten::op%d", (thread * 7 + i * (step % 40)) % 300);
      observe(kForward, name, "Tensor", [&] { observe(kForward, "aten::inner", "", [] {}); });
      observe(kBackward, "MulBackward0", "", [&] { observe(kForward, name, "", [] {}); });
    }
    add_usage(std::string_view("some.api\0file\0x", 15));
    ff_wait_begin(uint64_t(&own), "enumerate(DataLoader)#Iter.__next__");
    observe(kUser, "enumerate(DataLoader)#Iter.__next__", "", [] {});
    ff_wait_end(uint64_t(&own));
    observe(kUser, "a range", "", [] {});
    observe(kUser, "Optimizer.step#SGD.step", "", [&] {
      if (step % 5 && ff_step()) ff_step_turn();  // some steps raise
    });
  }
}
void fail(const char* what) {
  fprintf(stderr, "stress: %s\n", what);
  exit(1);
}
void have_child() {
  pid_t child = fork();
  if (child == 0) {
    ff_child();
    train(9, 5);
    _exit(state().block->head.steps.load() == 4 ? 0 : 3);
  }
  int status = 0;
  if (waitpid(child, &status, 0) != child || !WIFEXITED(status) || WEXITSTATUS(status)) fail("a forked child went wrong");
}
}  // namespace

int main(int, char** argv) {
  char dir[] = "/tmp/fanfold-stress-XXXXXX";
  if (!mkdtemp(dir)) fail("no temporary folder");
  // torch's own list may be locked by another thread at a fork: tests/probes/test_ops.py
  pthread_atfork([] { stress_mu.lock(); }, [] { stress_mu.unlock(); }, [] { stress_mu.unlock(); });
  int steps = argv[1] ? atoi(argv[1]) : 150;
  ff_init();
  torch_.add = stress_add;
  torch_.remove = stress_remove;
  torch_.name = stress_name;
  torch_.overload = stress_overload;
  torch_.get = stress_get;
  torch_.push = stress_push;
  torch_.label_kind = 1;
  torch_.profiler_kind = 2;
  keep_time();
  for (int round = 0; round < 3; ++round) {
    std::thread labelled([round] {  // while the table is reset
      std::string own = "of round " + std::to_string(round);
      for (int i = 0; i < 2000; ++i) ff_label_set(i % 2 ? ff_label_id(own.c_str()) : 0);
      while (!ff_label_set(ff_label_id(own.c_str()))) {}
      std::lock_guard<std::mutex> g(state().mu);
      if (own != state().label_text[ff_label_now() % kLabels]) fail("a label has another's name");
    });
    if (ff_start(dir, "node", 0, round == 2 ? 64 : 4096, round == 1 ? 1 : 7, 1, 3, 0.0, round == 0) != 2) fail("no file");
    labelled.join();
    for (auto& text : state().label_text)
      if (text[0] && text[9] != '0' + round) fail("a label of an earlier round is left");
    uint64_t before = ff_steps();
    for (int i = 0; i < kForksBefore; ++i) have_child();
    std::vector<std::thread> threads;
    for (int t = 0; t < kThreads; ++t) threads.emplace_back(train, t, steps);
    for (int t = 0; t < 2; ++t)
      threads.emplace_back([] {
        for (int i = 0; i < 200; ++i) { ff_window(i & 1); std::this_thread::yield(); }
      });
    for (int i = 0; i < kForksAmid; ++i) have_child();
    std::vector<char> usage(kUsageBytes);
    for (auto& t : threads) { ff_usage_take(usage.data(), kUsageBytes); t.join(); }
    Head& head = state().block->head;
    if (ff_steps() - before != uint64_t(kThreads * (steps - (steps + 4) / 5))) fail("steps were lost");
    if (round == 2 && !head.overflow.load()) fail("the table should be full");
    device().drain();
    uint64_t counted = 0, timed = 0;
    for (uint32_t i = 0; i < head.used.load(); ++i) {
      Row& row = state().block->rows[i];
      uint64_t sum = 0;
      for (auto& bucket : row.hist) sum += bucket.load();
      if (row.ready.load() == 1 && sum != row.count.load()) fail("a histogram does not add up");
      counted += row.count.load();
      timed += row.device_count.load();
    }
    if (!timed) fail("no call was timed on the device");
    fprintf(stderr, "round %d: %u rows, %llu calls, %llu orphans, %llu without a row\n", round, head.used.load(), (unsigned long long)counted,
           (unsigned long long)head.orphans.load(), (unsigned long long)head.overflow.load());
    ff_stop();
    ff_detach();
  }
  std::string clean = std::string("rm -r ") + dir;
  return system(clean.c_str());
}
