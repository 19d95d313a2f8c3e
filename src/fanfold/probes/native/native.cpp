// Operator statistics, labels, API usage and the export hook of torch, without any torch header: functions are looked up by
// their mangled names, and one struct of 40 bytes has the layout of torch's. One binary serves every torch on the allow-list;
// abi.cpp checks the layout against a version's headers. Plain C interface for ctypes. Never unloaded.
#include <dlfcn.h>

#include <algorithm>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <unordered_map>

#include "calls.h"
#include "device.h"

namespace {
using namespace ff;

struct Callback {  // at::RecordFunctionCallback
  void* start;
  void* end;
  double sampling;
  bool scopes[10];
  bool needs_inputs, needs_outputs, needs_ids;
};
static_assert(sizeof(Callback) == 40);
struct Context { virtual ~Context() = default; };      // at::ObserverContext
struct DebugInfo { virtual ~DebugInfo() = default; };  // c10::DebugInfoBase
struct Label : DebugInfo {
  std::atomic<uint32_t> number{0};
};

constexpr size_t kScopeAt = 96;  // in at::RecordFunction

using Started = std::unique_ptr<Context>;
using OnUsage = std::function<void(const std::string&)>;
using OnUsageData = std::function<void(const std::string&, const std::map<std::string, std::string>&)>;
using ExtraFiles = std::unordered_map<std::string, std::string>;
using OnExport = std::function<ExtraFiles(const void*)>;  // const Module&

struct Steps {  // std::optional<at::StepCallbacks>: smaller than this, and returned in memory because it has a destructor
  alignas(16) char bytes[1024];
  ~Steps() {}
};

struct Torch {
  uint64_t (*add)(Callback) = nullptr;
  Steps (*catch_up)(uint8_t) = nullptr;  // the calling thread takes over torch's list of callbacks, if that has changed
  void (*remove)(uint64_t) = nullptr;
  const char* (*name)(const void*) = nullptr;
  const char* (*overload)(const void*) = nullptr;
  void (*seed)(uint32_t) = nullptr;
  DebugInfo* (*get)(uint64_t) = nullptr;
  void (*push)(uint64_t, std::shared_ptr<DebugInfo>) = nullptr;
  void* c10 = nullptr;
  void* cpu = nullptr;
  uint64_t label_kind = 0, profiler_kind = 0;
} torch_;

std::string g_error;
int (*g_describe)(const void*, char*, int) = nullptr;  // inputs as text; built with torch's headers, see inputs.cpp
std::atomic<bool> g_labelled{false};
thread_local Label* tl_label = nullptr;  // this thread's own, whether torch holds it or not
thread_local bool tl_seeded = false, tl_timing = false;
thread_local int tl_waiting = 0;  // for data, as Python reports it
thread_local uint64_t tl_random = 0;

template <class T>
bool find(void* handle, T& f, const char* name) {
  f = reinterpret_cast<T>(dlsym(handle, name));
  if (!f) g_error += std::string(g_error.empty() ? "" : ", ") + "no symbol " + name;
  return f != nullptr;
}

uint16_t label_now() {
  if (!g_labelled.load(std::memory_order_relaxed)) return 0;  // most processes never set a label: skip torch's list
  DebugInfo* info = torch_.get(torch_.label_kind);
  Label* label = info ? static_cast<Label*>(info) : tl_label;
  return uint16_t(label ? place_of(label->number.load(std::memory_order_relaxed)) : 0);
}

// The labels of all threads. torch's stack, and tasks that inherit it, hold them as well. Needs state().mu.
std::vector<std::weak_ptr<Label>>* const g_labels = new std::vector<std::weak_ptr<Label>>();
template <class Which>
void drop_labels(Which which) {
  g_labels->erase(std::remove_if(g_labels->begin(), g_labels->end(), which), g_labels->end());
}
struct Mine {
  std::shared_ptr<Label> label = std::make_shared<Label>();
  Mine() {
    std::lock_guard<std::mutex> g(state().mu);
    drop_labels([](auto& other) { return other.expired(); });
    g_labels->push_back(label);
    tl_label = label.get();
  }
  ~Mine() { tl_label = nullptr; }
};

bool one_in_eight() {
  if (!tl_random) tl_random = random64() | 1;
  tl_random ^= tl_random << 13;
  tl_random ^= tl_random >> 7;
  tl_random ^= tl_random << 17;
  return (tl_random & 7) == 0;
}

void begin_device(Frame& frame, bool sampled) {
  if (tl_timing || !(sampled || one_in_eight())) return;
  frame.device = device().begin(frame.row, state().generation.load(std::memory_order_relaxed));
  tl_timing = frame.device != nullptr;
}

// at::RecordFunction is a vtable and its StepCallbacks, which hold the scope after four pairs of functions and a thread's id.
// Reading it lets one callback serve all scopes: torch rebuilds its list at every node of backward, callback by callback.
uint8_t scope_of(const void* call) { return static_cast<const uint8_t*>(call)[kScopeAt]; }

Started start(const void* call) {
  uint8_t scope = scope_of(call);
  Frame& frame = on_start(call, {torch_.name(call), torch_.overload(call), {}, scope, label_now()});
  if (__builtin_expect(device().on.load(std::memory_order_relaxed), 0) && scope == kForward) begin_device(frame, false);
  return nullptr;
}
Started start_sampled(const void* call) {
  // torch never seeds its sampling: without this, every thread of every process would sample the same calls
  if (!tl_seeded && torch_.seed) { torch_.seed(uint32_t(random64())); tl_seeded = true; }
  Frame& frame = on_start(call, {torch_.name(call), torch_.overload(call), {}, kSampled, label_now()});
  if (__builtin_expect(device().on.load(std::memory_order_relaxed), 0)) begin_device(frame, true);
  return nullptr;
}
Started start_inputs(const void* call) {
  char text[sizeof(Row::inputs)];
  int size = g_describe(call, text, int(sizeof text));
  std::string_view inputs(text, size > 0 ? size_t(size) : 0);
  Frame& frame = on_start(call, {torch_.name(call), torch_.overload(call), inputs, kForward, label_now()});
  if (__builtin_expect(device().on.load(std::memory_order_relaxed), 0)) begin_device(frame, false);
  return nullptr;
}
void end(const void* call, Context*) {
  if (void* pair = on_end(call); __builtin_expect(pair != nullptr, 0)) {
    tl_timing = false;
    device().end(static_cast<Pair*>(pair));
  }
}
// A wait for data that Python reports (step_hooks.py) is not counted again when torch reports it as a range.
bool told(const void* call) { return tl_waiting > 0 && !strncmp(torch_.name(call), "enumerate(DataLoader)#", 22); }
Started start_range(const void* call) { return told(call) ? nullptr : start(call); }
void end_range(const void* call, Context* context);

Callback callback(void* start, void* end, double sampling, std::initializer_list<int> scopes, bool inputs = false) {
  Callback c{};
  c.start = start;
  c.end = end;
  c.sampling = sampling;
  for (int scope : scopes) c.scopes[scope] = true;
  c.needs_inputs = inputs;
  return c;
}

// Windows. A hook of torch's optimizers counts the steps and opens a window, in which everything is observed; the end of the
// range that torch reports for a step closes it, so that the whole step is inside. Between windows torch has no callback of
// ours: with one, it copies its list twice for every node of backward.
struct Windows {
  std::mutex mu;
  std::vector<uint64_t> always, full;
  std::atomic<bool> active{false}, open{false}, overdue{false};  // overdue: the end of the range that closes it never came
  std::atomic<bool> moment{false};  // open for a moment, by ff_moment: a step that ends now was seen in part
  uint64_t every = 0, length = 1, seed = 0, early = 0;
  double worker_sampling = 0.01;
  uint64_t parent = 0;

  // Each group of `every` steps has its own phase: with a fixed one, periodic work (an evaluation, the second of two
  // optimizers) would be observed every time or never.
  bool due(uint64_t step) const {
    if (!every || step == early) return every != 0;
    if (step == 1) return length >= every;  // otherwise a program that never steps would be observed in full forever
    uint64_t mixed = (seed ^ ((step - 1) / every)) * 0x9E3779B97F4A7C15ull;
    mixed = (mixed ^ (mixed >> 31)) * 0xD6E8FEB86659FD93ull;
    return (step + (mixed ^ (mixed >> 32))) % every < length;
  }

  void set(bool on) {
    std::lock_guard<std::mutex> g(mu);
    set_locked(on);
  }
  void set_locked(bool on) {
    Head& head = state().block->head;
    if (on == open.load() || !torch_.add) return;
    open.store(on);
    overdue.store(false);
    if (!on) {
      g_window.fetch_add(1);
      for (uint64_t handle : full) torch_.remove(handle);
      full.clear();
      uint64_t cpu = clock_ns(CLOCK_PROCESS_CPUTIME_ID);
      head.seen_ns.fetch_add(mono_ns() - head.opened.load());
      head.cpu_seen.fetch_add(cpu - head.cpu_opened.load());
      head.cpu_now.store(cpu);
      head.opened.store(0);
      return;
    }
    auto add = [this](Started (*from)(const void*), std::initializer_list<int> scopes, bool inputs) {
      full.push_back(torch_.add(callback(reinterpret_cast<void*>(from), reinterpret_cast<void*>(end), 1.0, scopes, inputs)));
    };
    if (g_describe) add(start_inputs, {kForward}, true), add(start, {kBackward, kScript}, false);
    else add(start, {kForward, kBackward, kScript}, false);
    if (always.empty()) full.push_back(add_ranges());
    head.windows.fetch_add(1);
    head.cpu_opened.store(clock_ns(CLOCK_PROCESS_CPUTIME_ID));
    head.opened.store(mono_ns());
    g_window.fetch_add(1);
  }
  static uint64_t add_ranges() {
    return torch_.add(callback(reinterpret_cast<void*>(start_range), reinterpret_cast<void*>(end_range), 1.0, {kUser}));
  }
  void sample(double p) {
    if (torch_.seed) torch_.seed(uint32_t(random64()));
    tl_seeded = true;
    std::initializer_list<int> scopes{kForward, kBackward, kScript};  // operators, nodes of backward, TorchScript functions
    always.push_back(torch_.add(callback(reinterpret_cast<void*>(start_sampled), reinterpret_cast<void*>(end), p, scopes)));
  }
  // Count a step; return whether turn() has work to do, for which a Python thread releases the GIL.
  bool step() {
    Head& head = state().block->head;
    uint64_t done = head.steps.fetch_add(1) + 1;
    bool partly = moment.load() && moment.exchange(false);  // before `open`; from here on, steps open and close
    bool was = open.load(), late = false;
    if (was && !partly) head.observed.fetch_add(1);
    if (every && due(done + 1) != was) late = !was || overdue.exchange(true);
    return late || device().due();
  }
  void turn() {
    std::lock_guard<std::mutex> g(mu);
    if (active.load() && every) set_locked(due(state().block->head.steps.load() + 1));
  }
  void forget() {  // with the lock held
    for (auto* list : {&full, &always}) {
      for (uint64_t handle : *list) torch_.remove(handle);
      list->clear();
    }
    if (open.exchange(false)) g_window.fetch_add(1);
    moment.store(false);
  }
};
Windows* const g_windows = new Windows();
Windows& windows() { return *g_windows; }

void end_range(const void* call, Context* context) {
  if (told(call)) return;
  bool step = !strncmp(torch_.name(call), "Optimizer.step#", 15);
  end(call, context);
  if (step) windows().turn();
}

void before_fork() {
  device().before_fork();
  windows().mu.lock();
  if (torch_.catch_up && windows().active.load()) torch_.catch_up(kForward);  // so that the child need not: see list_is_free
  state().usage_mu.lock();
  state().mu.lock();
}
void after_fork_in_parent() {
  state().mu.unlock();
  state().usage_mu.unlock();
  windows().mu.unlock();
}
// A forked child counts from zero and never writes into its parent's file; its own file is created when it has data.
void after_fork_in_child() {
  auto& s = state();
  auto& w = windows();
  w.parent = s.block->head.worker ? s.block->head.parent : s.block->head.id;  // a grandchild belongs to the run as well
  tl_shard = nullptr;
  pthread_setspecific(s.key, nullptr);
  s.idle.clear();
  drop_labels([](auto& other) { return other.lock().get() != tl_label; });
  fresh_memory(-1, 0);
  write_head(s.block, w.parent, kWorkerRows, true, 0.0, uint32_t(w.every), uint32_t(w.length));
  s.generation.fetch_add(1);
  s.want_file.store(w.active.load());
  device().in_child();
  after_fork_in_parent();
}

// Whether a forked child can have the lock of torch's list of callbacks. A thread of its parent may have held it at the fork, since
// each node of backward takes it, and then nobody will release it. So it is asked for on a thread of its own, which waits for ever.
bool list_is_free() {
  static std::atomic<bool> seen;
  seen.store(false);
  pthread_t thread;
  auto ask = [](void*) -> void* {
    torch_.remove(Windows::add_ranges());
    seen.store(true);
    return nullptr;
  };
  if (pthread_create(&thread, nullptr, ask, nullptr)) return true;
  pthread_detach(thread);
  const timespec pause{0, 50000};
  for (int left = 20000; left && !seen.load(); left--) nanosleep(&pause, nullptr);  // a second, and more on a busy machine
  return seen.load();
}

int64_t hand_out(const char* data, size_t size, char* to, int64_t room) {
  if (int64_t(size) > room) return -int64_t(size);
  memcpy(to, data, size);
  return int64_t(size);
}

const std::string_view kLabelName = "FANFOLD_LABEL";
}  // namespace

namespace ff {
// A new table forgets all names, except the labels that threads have now. Needs the lock.
void forget_names() {
  auto& s = state();
  static char old[kLabels][128];
  memcpy(old, s.label_text, sizeof old);
  memset(s.label_text, 0, sizeof s.label_text);
  memset(s.kind_text, 0, sizeof s.kind_text);
  s.labels = 1;
  s.kinds = 0;
  uint32_t next = s.round.load() + kLabels;
  g_labelled.store(false);  // the self-test has a label; a thread that sets one meanwhile is seen here, or sets this again
  for (auto& each : *g_labels) {
    auto label = each.lock();
    uint32_t number = label ? label->number.load() : 0, place;
    while ((place = place_of(number)) && !label->number.compare_exchange_weak(number, next | intern_label(old[place]))) {}
    if (place) g_labelled.store(true);
  }
  s.round.store(next);
}
void reopen_in_child() {
  auto& w = windows();
  Head& head = state().block->head;
  open_block(w.parent, true, head.sampling, head.every, head.window);
}
}  // namespace ff

#pragma GCC visibility push(default)
extern "C" {

int ff_version() { return 1; }
const char* ff_error() { return g_error.c_str(); }
void* ff_block() { return state().block; }
int64_t ff_rows_offset() { return int64_t(offsetof(Block, rows)); }

// Set up memory, clock and fork handlers; once per process, before anything else.
int ff_init() {
  auto& s = state();
  if (s.block) return 1;
  calibrate();
  if (!fresh_memory(-1, 0)) return 0;
  pthread_key_create(&s.key, retire_shard);
  pthread_atfork(before_fork, after_fork_in_parent, after_fork_in_child);
  write_head(s.block, 0, kMaxRows, false, 0.0, 0, 0);
  return 1;
}

// Needs libc10 alone, so it can run before torch is imported.
int ff_bind_c10(const char* path) {
  g_error.clear();
  torch_.c10 = dlopen(path, RTLD_NOW | RTLD_GLOBAL);
  if (!torch_.c10) { g_error = dlerror(); return 0; }
  void* producer = dlsym(torch_.c10, "_ZN3c1013DebugInfoKind13PRODUCER_INFOE");
  void* profiler = dlsym(torch_.c10, "_ZN3c1013DebugInfoKind14PROFILER_STATEE");
  // Since 2.13 a kind is the address of a name, before that a small number: use one that is not taken.
  torch_.label_kind = producer ? reinterpret_cast<uint64_t>(&kLabelName) : 201;
  torch_.profiler_kind = profiler ? *static_cast<uint64_t*>(profiler) : 2;
  return find(torch_.c10, torch_.get, "_ZN3c1020ThreadLocalDebugInfo3getENS_13DebugInfoKindE") &
         find(torch_.c10, torch_.push, "_ZN3c1020ThreadLocalDebugInfo5_pushENS_13DebugInfoKindESt10shared_ptrINS_13DebugInfoBaseEE");
}

int ff_bind_cpu(const char* path) {
  g_error.clear();
  torch_.cpu = dlopen(path, RTLD_NOW | RTLD_GLOBAL);
  if (!torch_.cpu) { g_error = dlerror(); return 0; }
  torch_.catch_up = reinterpret_cast<Steps (*)(uint8_t)>(dlsym(torch_.cpu, "_ZN2at27getStepCallbacksUnlessEmptyENS_11RecordScopeE"));
  torch_.seed = reinterpret_cast<void (*)(uint32_t)>(dlsym(torch_.cpu, "_ZN2at36set_record_function_seed_for_testingEj"));
  return find(torch_.cpu, torch_.add, "_ZN2at17addGlobalCallbackENS_22RecordFunctionCallbackE") &
         find(torch_.cpu, torch_.remove, "_ZN2at14removeCallbackEm") &
         find(torch_.cpu, torch_.name, "_ZNK2at14RecordFunction4nameEv") &
         find(torch_.cpu, torch_.overload, "_ZNK2at14RecordFunction13overload_nameEv");
}
int ff_bind_cuda(const char* path) { return device().bind(path); }
void ff_describe(void* f) { g_describe = reinterpret_cast<int (*)(const void*, char*, int)>(f); }

// Start in `dir` (empty: memory only). Returns 2 with a file, 1 without, 0 if torch is not bound.
int ff_start(const char* dir, const char* node, int32_t rank, uint32_t capacity, uint64_t every, uint64_t window, uint64_t early,
             double sampling, int ranges) {
  auto& s = state();
  auto& w = windows();
  if (!torch_.add) return 0;
  std::lock_guard<std::mutex> g(w.mu);
  snprintf(s.dir, sizeof s.dir, "%s", dir);
  memset(s.node, 0, sizeof s.node);
  snprintf(s.node, sizeof s.node, "%s", node);
  s.rank = rank;
  s.capacity = capacity < kMaxRows ? capacity : kMaxRows;
  w.every = sampling > 0 ? 0 : every;
  w.length = window;
  w.early = early;
  w.seed = random64();
  w.worker_sampling = sampling > 0 ? sampling : double(window) / double(every ? every : 1);
  w.forget();  // a forked child may have inherited its parent's setup
  s.want_file.store(false);
  s.ranges_always = ranges || sampling > 0;
  int file = open_block(0, false, sampling, uint32_t(w.every), uint32_t(window));
  if (s.ranges_always) w.always.push_back(w.add_ranges());
  if (sampling > 0) w.sample(sampling);
  w.active.store(true);
  w.set_locked(w.due(1));
  return file ? 2 : 1;
}

void ff_stop() {
  auto& w = windows();
  std::lock_guard<std::mutex> g(w.mu);
  if (!w.active.exchange(false)) return;
  w.set_locked(false);
  for (uint64_t handle : w.always) torch_.remove(handle);
  w.always.clear();
  device().drain();
}

// Detach the file: from now on, counts stay in memory. The caller has read or removed it.
void ff_detach() {
  auto& s = state();
  s.dir[0] = 0;
  open_block(0, false, 0.0, 0, 0);
}

// For a forked Python child: it has no steps to align to, so it samples; a window inherited from its parent is closed.
void ff_child() {
  auto& w = windows();
  if (!w.active.load() || !torch_.add) return;
  if (!list_is_free()) {  // no profile of this process
    w.active.store(false);
    w.full.clear();
    w.always.clear();
    torch_.add = nullptr;
    return;
  }
  std::lock_guard<std::mutex> g(w.mu);
  w.forget();
  Head& head = state().block->head;
  double p = w.worker_sampling;
  w.always.push_back(w.add_ranges());
  if (p < 1.0) {
    w.every = 0;
    head.sampling = p;
    w.sample(p);
  } else {
    w.set_locked(true);
  }
}

void ff_window(int on) { windows().set(on != 0); }
uint64_t ff_steps() { return state().block->head.steps.load(); }

// For programs without an optimizer: observe everything for a moment. Called from a separate thread.
void ff_moment(uint32_t milliseconds) {
  auto& w = windows();
  {
    std::lock_guard<std::mutex> g(w.mu);
    if (!w.active.load() || w.open.load()) return;
    w.moment.store(true);
    w.set_locked(true);
    if (!w.moment.load()) return w.set_locked(false);  // the first step ended meanwhile
  }
  timespec pause{0, long(milliseconds) * 1000000};
  nanosleep(&pause, nullptr);
  std::lock_guard<std::mutex> g(w.mu);
  if (w.moment.load()) w.set_locked(false);
  w.moment.store(false);
}

// Python reports every step, and every wait for data; `token` is the iterator it waits for.
int ff_step() { return windows().active.load(std::memory_order_relaxed) && windows().step(); }
void ff_step_turn() {
  windows().turn();
  if (device().on.load(std::memory_order_relaxed)) device().drain_when_due();
}
void ff_wait_begin(uint64_t token, const char* name) {
  ++tl_waiting;
  on_start(reinterpret_cast<const void*>(token), {name, {}, {}, kTold, label_now()});
}
void ff_wait_end(uint64_t token) {
  --tl_waiting;
  on_end(reinterpret_cast<const void*>(token));
}

// torch reports when the first of several threads starts to compile and when the last one ends. That may be another thread, and
// the start may have come before we listened. So an end ends the round for all threads, instead of counting down.
void ff_compiling(int began) {
  shard_now()->compiling = began > 0 ? g_compiling.load() : 0;
  if (began <= 0) g_compiling.fetch_add(1);
}
void ff_stamp_time() {
  state().block->head.now.store(clock_ns(CLOCK_REALTIME));
  state().block->head.cpu_now.store(clock_ns(CLOCK_PROCESS_CPUTIME_ID));
}

// Labels. torch's stack of debug information is shared with its profiler and popped strictly in order, so ours is pushed
// once per thread, never above an open profiler, and changed in place; a profiler may start and stop at any moment.
uint32_t ff_label_id(const char* text) {
  std::lock_guard<std::mutex> g(state().mu);
  return numbered(intern_label(text));
}
// Returns 0 for a number of an earlier profile: request a new one; until then there is no label.
int ff_label_set(uint32_t number) {
  try {
    static thread_local Mine mine;
    mine.label->number.store(number);
    if (number) g_labelled.store(true);  // after the number: see forget_names()
    // The entry may be another thread's: backward brings one along from the thread that called it.
    bool there = !torch_.get || torch_.get(torch_.label_kind) == mine.label.get();
    if (!there && !torch_.get(torch_.profiler_kind)) torch_.push(torch_.label_kind, mine.label);
  } catch (...) {
  }
  return !number || place_of(number);
}
uint32_t ff_label_now() { return numbered(label_now()); }

// API usage. The handlers run inside static-initialisation locks: never call Python here.
int ff_usage_watch() {
  g_error.clear();
  void (*set)(OnUsage) = nullptr;
  void (*set_data)(OnUsageData) = nullptr;
  if (!find(torch_.c10, set, "_ZN3c1017SetAPIUsageLoggerESt8functionIFvRKNSt7__cxx1112basic_stringIcSt11char_traitsIcESaIcEEEEE")) return 0;
  set([](const std::string& key) { add_usage(key); });
  if (find(torch_.c10, set_data,
           "_ZN3c1025SetAPIUsageMetadataLoggerESt8functionIFvRKNSt7__cxx1112basic_stringIcSt11char_traitsIcESaIcEEERKSt3mapIS6_S6_"
           "St4lessIS6_ESaISt4pairIS7_S6_EEEEE"))
    set_data([](const std::string& key, const std::map<std::string, std::string>& data) {
      std::string record = key;
      for (auto& item : data) record.append(1, '\0').append(item.first).append(1, '\0').append(item.second);
      add_usage(record);
    });
  return 1;
}
int64_t ff_usage_take(char* to, int64_t room) {
  auto& s = state();
  std::lock_guard<std::mutex> g(s.usage_mu);
  int64_t size = hand_out(s.block->usage, s.block->head.usage.load(), to, room);
  if (size >= 0) s.block->head.usage.store(0);
  return size;
}

// Add one extra file to every exported TorchScript module; a caller's own file of that name wins. No name: remove it.
int ff_export_file(const char* name, const char* content, int64_t size) {
  g_error.clear();
  void (*set)(OnExport) = nullptr;
  if (!torch_.cpu || !find(torch_.cpu, set,
      "_ZN5torch3jit29SetExportModuleExtraFilesHookESt8functionIFSt13unordered_mapINSt7__cxx1112basic_stringIcSt11char_traitsIcES"
      "aIcEEES8_St4hashIS8_ESt8equal_toIS8_ESaISt4pairIKS8_S8_EEERKNS0_6ModuleEEE"))
    return 0;
  std::string file(name), text(content, size_t(size));
  if (file.empty()) set(nullptr);
  else set([file, text](const void*) { return ExtraFiles{{file, text}}; });
  return 1;
}
}
#pragma GCC visibility pop
