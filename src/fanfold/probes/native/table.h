// Where operator statistics live: rows of fixed size in one block of memory that is a file of the run, so that another
// process can read it at any time and SIGKILL loses nothing. One writer per row, or atomic additions: no lock, no GIL on the way.
#pragma once
#include <fcntl.h>
#include <pthread.h>
#include <sys/mman.h>
#include <sys/random.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <mutex>
#include <new>
#include <string_view>
#include <vector>
#if defined(__x86_64__)
#include <cpuid.h>
#include <x86intrin.h>
#endif

namespace ff {

constexpr uint32_t kMaxRows = 4096, kWorkerRows = 1024, kLabels = 256, kKinds = 64, kUsageBytes = 65536, kBuckets = 128;
constexpr uint32_t kOwnRows = 4, kCommon = 2 * kMaxRows;  // threads of a kind with rows of their own; places for rows in common
constexpr uint8_t kForward = 0, kBackward = 1, kScript = 2, kUser = 7, kCompile = 10, kSampled = 11, kTold = 12;

// What the whole table is about. probes/image.py reads it: change both, and the version.
struct Head {
  char magic[8];
  uint32_t version, row_size, capacity, pid;
  int32_t rank;
  uint32_t every, window, worker;
  uint64_t id, parent, started;
  double sampling;
  std::atomic<uint32_t> used, labels, kinds, usage;
  std::atomic<uint64_t> steps, observed, windows, seen_ns, opened, orphans, overflow, usage_lost, device_lost, now;
  char node[64];
  uint32_t ranges;  // whether ranges are observed between windows, too
  char rest[244];
};
static_assert(sizeof(Head) == 480);

struct Row {
  std::atomic<uint32_t> ready;  // set last: from then on the row may be read
  uint16_t name_len, overload_len, inputs_len, label;
  uint8_t scope, kind;
  uint16_t common;  // several threads write it
  uint64_t hash;
  std::atomic<uint64_t> count, total, self, whole, max, device_count, device_ns;  // whole: time of calls whose own time is known
  char name[96];
  char inputs[80];
  std::atomic<uint32_t> hist[kBuckets];
};
static_assert(sizeof(Row) == 768);

struct Block {
  Head head;
  char spare[32];
  char kinds[kKinds][16];
  char labels[kLabels][128];
  char usage[kUsageBytes];
  Row rows[kMaxRows];
};
static_assert(offsetof(Block, rows) == 512 + 1024 + 32768 + 65536);
static_assert(std::atomic<uint64_t>::is_always_lock_free);

inline uint64_t clock_ns(clockid_t which) {
  timespec t;
  clock_gettime(which, &t);
  return uint64_t(t.tv_sec) * 1000000000ull + uint64_t(t.tv_nsec);
}
inline uint64_t mono_ns() { return clock_ns(CLOCK_MONOTONIC); }

// The processor's own counter costs a fifth of clock_gettime, but serves only where it never stops or changes pace.
inline bool g_counter = false;
inline uint64_t g_mult = 1ull << 32;  // nanoseconds per tick, times 2^32
inline uint64_t ticks() {
#if defined(__x86_64__)
  if (__builtin_expect(g_counter, 1)) return __rdtsc();
#elif defined(__aarch64__)
  uint64_t v;
  asm volatile("mrs %0, cntvct_el0" : "=r"(v));
  return v;
#endif
  return mono_ns();
}
inline uint64_t to_ns(uint64_t t) { return uint64_t((static_cast<unsigned __int128>(t) * g_mult) >> 32); }

// Read both clocks close together: of several tries, the one that was interrupted least.
inline void both_clocks(uint64_t& tick, uint64_t& ns) {
  uint64_t best = ~0ull;
  for (int i = 0; i < 8; ++i) {
    uint64_t a = ticks(), n = mono_ns(), b = ticks();
    if (b - a < best) { best = b - a; tick = a + (b - a) / 2; ns = n; }
  }
}
inline void calibrate() {
#if defined(__x86_64__)
  unsigned a, b, c, d = 0;
  g_counter = __get_cpuid(0x80000007, &a, &b, &c, &d) && (d & (1u << 8));
  if (!g_counter) return;
#elif !defined(__aarch64__)
  return;
#endif
  uint64_t t0 = 0, n0 = 0, t1 = 0, n1 = 0;
  both_clocks(t0, n0);
  timespec pause{0, 5000000};
  nanosleep(&pause, nullptr);
  both_clocks(t1, n1);
  if (t1 > t0) g_mult = uint64_t((static_cast<unsigned __int128>(n1 - n0) << 32) / (t1 - t0));
}

// Four buckets an octave, in nanoseconds: bucket b of 4 or more begins at 2^(b/4+1) * (1 + (b%4)/4).
inline int bucket_of(uint64_t t) {
  if (t < 4) return int(t);
  int e = 63 - __builtin_clzll(t);
  int b = (e - 1) * 4 + int((t >> (e - 2)) & 3);
  return b < int(kBuckets) ? b : int(kBuckets) - 1;
}

template <class T>
inline void bump(std::atomic<T>& a, T d) {  // single writer: no locked instruction needed
  a.store(a.load(std::memory_order_relaxed) + d, std::memory_order_relaxed);
}

inline uint64_t random64() {
  uint64_t v = 0;
  if (getrandom(&v, sizeof v, GRND_NONBLOCK) != ssize_t(sizeof v)) v = mono_ns() * 0x9E3779B97F4A7C15ull ^ uint64_t(getpid());
  return v;
}

struct Frame {
  const void* call;
  Row* row;
  uint64_t start, child;
  void* device;
  uint32_t window;
  bool backward, user;
};

// One thread's own view of the table: which rows are its, and which calls are open.
struct Shard {
  static constexpr int kDepth = 256;
  uint32_t generation = 0;
  uint8_t kind = 0;
  bool crowded = false;  // many threads of its kind have rows already: it shares those of the others like it
  char kind_name[16] = {0};
  std::vector<Row*> index = std::vector<Row*>(512, nullptr);
  size_t used = 0;
  int depth = 0;
  uint32_t compiling = 0;  // the round of compiling this thread began, if any
  Frame stack[kDepth];
};

struct State {
  std::mutex mu;            // shards, labels, kinds, the file; never taken for an operator whose row exists
  std::mutex usage_mu;
  Block* block = nullptr;   // one address for the life of the process: files are mapped over it, so a late write is harmless
  std::atomic<uint32_t> generation{1};
  std::atomic<bool> want_file{false};
  std::vector<Shard*> idle;  // of threads that ended: the next thread of the kind goes on with their rows
  uint32_t labels = 1, kinds = 0;
  char label_text[kLabels][128] = {{0}};
  char kind_text[kKinds][16] = {{0}};
  char dir[3072] = {0};
  char node[64] = {0};
  int32_t rank = 0;
  uint32_t capacity = kMaxRows;
  bool ranges_always = false;
  pthread_key_t key{};
  uint32_t counted = 0;     // the generation that those below are about
  std::atomic<uint32_t> ranges{0};  // rows of user ranges
  uint32_t threads[kKinds] = {0};
  std::atomic<Row*> common[kCommon] = {};
};
inline State* const g_state = new State();  // never destroyed: threads may outlive static objects
inline State& state() { return *g_state; }
inline thread_local Shard* tl_shard = nullptr;
inline std::atomic<uint32_t> g_compiling{1};  // counts rounds of compiling that ended
inline std::atomic<uint32_t> g_window{0};  // counts openings and closings: odd while everything is observed

inline void write_head(Block* b, uint64_t parent, uint32_t capacity, bool worker, double sampling, uint32_t every, uint32_t window) {
  auto& s = state();
  Head& h = b->head;
  memcpy(h.magic, "FANFOPS", 8);
  h.version = 2;
  h.row_size = sizeof(Row);
  h.capacity = capacity;
  h.pid = uint32_t(getpid());
  h.rank = s.rank;
  h.worker = worker;
  h.every = every;
  h.window = window;
  h.ranges = worker || s.ranges_always;
  h.id = random64();
  h.parent = parent;
  h.started = clock_ns(CLOCK_REALTIME);
  h.sampling = sampling;
  memcpy(h.node, s.node, sizeof h.node);
  memcpy(b->labels, s.label_text, sizeof b->labels);
  memcpy(b->kinds, s.kind_text, sizeof b->kinds);
  h.labels.store(s.labels);
  h.kinds.store(s.kinds);
}

// Put fresh memory under the block: what pages it had before are gone from this process, a file behind them is not touched.
inline bool fresh_memory(int fd, size_t bytes) {
  auto& s = state();
  void* at = s.block;
  int flags = at ? MAP_FIXED : 0;
  void* p = mmap(at, sizeof(Block), PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | flags, -1, 0);
  if (p == MAP_FAILED) return false;
  s.block = static_cast<Block*>(p);
  if (fd < 0) return true;
  return mmap(p, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, fd, 0) != MAP_FAILED;
}

inline size_t bytes_for(uint32_t capacity) { return offsetof(Block, rows) + size_t(capacity) * sizeof(Row); }

// Returns false when only memory could be had. The file's pages are allocated at once: a write to a page that a full disk
// cannot provide would be a SIGBUS in the middle of training.
inline bool open_block(uint64_t parent, bool worker, double sampling, uint32_t every, uint32_t window) {
  auto& s = state();
  uint32_t capacity = worker && s.capacity > kWorkerRows ? kWorkerRows : s.capacity;
  std::lock_guard<std::mutex> usage_lock(s.usage_mu);
  static char kept[kUsageBytes];
  uint32_t kept_bytes = 0;
  if (s.block) {
    kept_bytes = s.block->head.usage.load();
    memcpy(kept, s.block->usage, kept_bytes);
  }
  int fd = -1;
  char path[3200], aside[3200];
  if (s.dir[0]) {
    snprintf(aside, sizeof aside, "%s/.%d-%016llx.part", s.dir, s.rank, static_cast<unsigned long long>(random64()));
    fd = ::open(aside, O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC, 0600);
    if (fd >= 0 && posix_fallocate(fd, 0, off_t(bytes_for(capacity))) != 0) {
      ::close(fd);
      ::unlink(aside);
      fd = -1;
    }
  }
  bool mapped = fresh_memory(fd, bytes_for(capacity));
  if (!mapped) fresh_memory(-1, 0);
  Block* b = s.block;
  write_head(b, parent, capacity, worker, sampling, every, window);
  memcpy(b->usage, kept, kept_bytes);
  b->head.usage.store(kept_bytes);
  if (fd >= 0) {
    ::close(fd);
    snprintf(path, sizeof path, "%s/%d-%016llx.ops", s.dir, s.rank, static_cast<unsigned long long>(b->head.id));
    if (!mapped || ::rename(aside, path) != 0) ::unlink(aside);
  }
  s.generation.fetch_add(1);
  return fd >= 0 && mapped;
}

inline void retire_shard(void* p) {
  auto& s = state();
  std::lock_guard<std::mutex> g(s.mu);
  auto* shard = static_cast<Shard*>(p);
  tl_shard = nullptr;
  if (shard->crowded) return delete shard;  // its rows are others' as well
  shard->depth = 0;
  shard->compiling = 0;
  s.idle.push_back(shard);
}

// main, thread (a plain Python thread), or the kernel's name for a thread of torch's own.
inline void name_kind(char* out) {
  char name[16] = {0}, process[16] = {0};
  pid_t tid = pid_t(syscall(SYS_gettid));
  pthread_getname_np(pthread_self(), name, sizeof name);
  if (tid == getpid()) { strcpy(out, "main"); return; }
  int fd = ::open("/proc/self/comm", O_RDONLY | O_CLOEXEC);
  if (fd >= 0) {
    ssize_t n = ::read(fd, process, 15);
    ::close(fd);
    if (n > 0 && process[n - 1] == '\n') process[n - 1] = 0;
  }
  if (!name[0] || !strcmp(name, process) || !strncmp(name, "Thread-", 7)) { strcpy(out, "thread"); return; }
  memcpy(out, name, 16);
}

inline uint8_t kind_id(const char* name) {  // with the lock held
  auto& s = state();
  for (uint32_t i = 0; i < s.kinds; ++i)
    if (!strcmp(s.kind_text[i], name)) return uint8_t(i);
  if (s.kinds == kKinds) return uint8_t(kKinds - 1);
  const char* text = s.kinds == kKinds - 1 ? "(other threads)" : name;
  snprintf(s.kind_text[s.kinds], 16, "%s", text);
  memcpy(s.block->kinds[s.kinds], s.kind_text[s.kinds], 16);
  s.block->head.kinds.store(++s.kinds);
  return uint8_t(s.kinds - 1);
}

void reopen_in_child();

// A hundred threads with rows of their own would fill the table with the same operators: beyond a few, they share.
inline void join_generation(Shard* shard) {  // with the lock held
  auto& s = state();
  uint32_t now = s.generation.load();
  if (s.counted != now) {
    memset(s.threads, 0, sizeof s.threads);
    s.ranges.store(0, std::memory_order_relaxed);
    for (auto& row : s.common) row.store(nullptr, std::memory_order_relaxed);
    s.counted = now;
  }
  shard->generation = now;
  shard->kind = kind_id(shard->kind_name);
  shard->crowded = ++s.threads[shard->kind] > kOwnRows;
}

__attribute__((noinline)) inline Shard* make_shard() {
  auto& s = state();
  if (s.want_file.exchange(false)) reopen_in_child();
  char kind[16] = {0};
  name_kind(kind);
  std::lock_guard<std::mutex> g(s.mu);
  Shard** found = nullptr;  // with rows of this table, or else of an earlier one, which the thread will renew
  for (auto& shard : s.idle) {
    bool current = shard->generation == s.generation.load();
    if (current && strcmp(shard->kind_name, kind)) continue;
    found = &shard;
    if (current) break;
  }
  Shard* shard = found ? *found : new Shard();
  if (found) {
    *found = s.idle.back();
    s.idle.pop_back();
  }
  if (shard->generation != s.generation.load()) {
    memcpy(shard->kind_name, kind, 16);
    if (!shard->generation) join_generation(shard);
  }
  pthread_setspecific(s.key, shard);
  return tl_shard = shard;
}

__attribute__((noinline)) inline void renew(Shard* shard) {
  auto& s = state();
  std::lock_guard<std::mutex> g(s.mu);
  shard->index.assign(512, nullptr);
  shard->used = 0;
  shard->depth = 0;
  join_generation(shard);
}

inline Shard* shard_now() {
  Shard* shard = tl_shard;
  if (__builtin_expect(!shard, 0)) shard = make_shard();
  if (__builtin_expect(shard->generation != state().generation.load(std::memory_order_relaxed), 0)) renew(shard);
  return shard;
}

inline uint64_t eight(const char* p) {
  uint64_t v;
  memcpy(&v, p, 8);
  return v;
}
// Eight bytes at a time; the last eight may overlap those before, which saves a copy of odd length.
inline uint64_t mix(uint64_t h, std::string_view s) {
  const char* p = s.data();
  size_t n = s.size();
  uint64_t v = 0;
  if (n >= 8) {
    for (; n > 8; p += 8, n -= 8) h = (h ^ eight(p)) * 0x9E3779B97F4A7C15ull, h ^= h >> 29;
    v = eight(p + n - 8);
  } else {
    for (size_t i = 0; i < n; ++i) v = v << 8 | uint8_t(p[i]);
  }
  h = (h ^ v ^ (uint64_t(s.size()) << 56)) * 0xD6E8FEB86659FD93ull;
  return h ^ (h >> 32);
}

inline uint16_t put(char* to, size_t room, std::string_view text) {
  size_t n = text.size() < room ? text.size() : room;
  if (n) memcpy(to, text.data(), n);
  return uint16_t(n);
}

inline bool is_range(uint8_t scope) { return scope == kUser || scope == kTold; }

struct Key {
  std::string_view name, overload, inputs;
  uint8_t scope;
  uint16_t label;
};

inline Row* new_row(Shard* shard, uint64_t hash, const Key& key) {
  Head& head = state().block->head;
  uint32_t at = head.used.fetch_add(1, std::memory_order_relaxed);
  if (at >= head.capacity) {
    head.used.store(head.capacity, std::memory_order_relaxed);
    return nullptr;
  }
  Row* row = &state().block->rows[at];
  row->hash = hash;
  row->scope = key.scope;
  row->kind = shard->kind;
  row->common = shard->crowded;
  row->label = key.label;
  row->name_len = put(row->name, sizeof row->name, key.name);
  row->overload_len = put(row->name + row->name_len, sizeof row->name - row->name_len, key.overload);
  row->inputs_len = put(row->inputs, sizeof row->inputs, key.inputs);
  row->ready.store(1, std::memory_order_release);
  if (is_range(key.scope)) state().ranges.fetch_add(1, std::memory_order_relaxed);
  return row;
}

inline std::string_view without_numbers(std::string_view name, char* to, size_t room) {
  size_t n = 0;
  for (char c : name) {
    bool digit = c >= '0' && c <= '9';
    if (digit && n && to[n - 1] == '#') continue;
    if (n == room) break;
    to[n++] = digit ? '#' : c;
  }
  return {to, n};
}

inline Row* find_row(Shard* shard, const Key& key);

// Ranges with a number in each name ("batch 12345") would take the whole table within minutes: when a quarter of it is ranges,
// further ones are counted without their numbers. torch.profiler numbers each step, and those never tell anything apart.
inline Row* unnumbered_row(Shard* shard, const Key& key) {
  auto& s = state();
  bool steps = key.name.substr(0, 13) == "ProfilerStep#";
  if (!steps && s.ranges.load(std::memory_order_relaxed) < s.block->head.capacity / 4) return nullptr;
  char text[sizeof(Row::name)];
  Key plain = key;
  plain.name = without_numbers(key.name, text, sizeof text);
  return plain.name == key.name.substr(0, sizeof text) ? nullptr : find_row(shard, plain);
}

// Find the place of a row that threads share: that row's, or the empty one where it would stand.
inline std::atomic<Row*>* common_place(const Shard* shard, uint64_t hash) {
  for (uint64_t i = hash + shard->kind;; ++i) {
    auto* place = &state().common[i % kCommon];
    Row* row = place->load(std::memory_order_acquire);
    if (!row || (row->hash == hash && row->kind == shard->kind)) return place;
  }
}
inline Row* common_row(Shard* shard, uint64_t hash, const Key& key) {
  auto& s = state();
  if (Row* row = common_place(shard, hash)->load(std::memory_order_acquire)) return row;
  if (s.block->head.used.load(std::memory_order_relaxed) >= s.block->head.capacity) return nullptr;
  std::lock_guard<std::mutex> g(s.mu);
  auto* place = common_place(shard, hash);
  Row* row = place->load(std::memory_order_relaxed);
  if (!row && (row = new_row(shard, hash, key))) place->store(row, std::memory_order_release);
  return row;
}

__attribute__((noinline)) inline Row* add_row(Shard* shard, uint64_t hash, const Key& key) {
  if (is_range(key.scope))
    if (Row* row = unnumbered_row(shard, key)) return row;
  Row* row = shard->crowded ? common_row(shard, hash, key) : new_row(shard, hash, key);
  if (!row) return nullptr;
  if ((shard->used + 1) * 2 > shard->index.size()) {
    std::vector<Row*> wider(shard->index.size() * 2, nullptr);
    for (Row* old : shard->index) {
      if (!old) continue;
      size_t i = old->hash & (wider.size() - 1);
      while (wider[i]) i = (i + 1) & (wider.size() - 1);
      wider[i] = old;
    }
    shard->index.swap(wider);
  }
  size_t mask = shard->index.size() - 1, i = hash & mask;
  while (shard->index[i]) i = (i + 1) & mask;
  shard->index[i] = row;
  ++shard->used;
  return row;
}

inline Row* find_row(Shard* shard, const Key& key) {
  uint64_t hash = mix(0x51ED27ull + key.scope * 131ull + key.label * 0x9E37ull, key.name);
  if (!key.overload.empty()) hash = mix(hash, key.overload);
  if (!key.inputs.empty()) hash = mix(hash, key.inputs);
  size_t mask = shard->index.size() - 1;
  for (size_t i = hash & mask; Row* row = shard->index[i]; i = (i + 1) & mask)
    if (row->hash == hash) return row;  // 64 bits over a few thousand rows: two that agree are the same
  return add_row(shard, hash, key);
}

inline Frame& on_start(const void* call, Key key) {
  Shard* shard = shard_now();
  if (__builtin_expect(shard->depth >= Shard::kDepth, 0)) shard->depth = 0;  // calls whose end never came
  bool inside = shard->depth > 0 && shard->stack[shard->depth - 1].backward;
  bool backward = inside || key.scope == kBackward || (key.name.size() > 26 && !memcmp(key.name.data(), "autograd::engine::evaluate", 26));
  if (key.scope == kForward && backward) key.scope = kBackward;
  if (__builtin_expect(shard->compiling != 0, 0) && shard->compiling == g_compiling.load(std::memory_order_relaxed) && !is_range(key.scope))
    key.scope = kCompile;
  Row* row = find_row(shard, key);
  if (__builtin_expect(!row, 0)) state().block->head.overflow.fetch_add(1, std::memory_order_relaxed);
  Frame& frame = shard->stack[shard->depth++];
  frame = Frame{call, row, 0, 0, nullptr, g_window.load(std::memory_order_relaxed), backward, key.scope == kUser};
  frame.start = ticks();
  return frame;
}

// A frame without a row: what it takes belongs to the call around it, and it ends calls inside it whose end never came.
inline void on_mark(const void* call) {
  Shard* shard = shard_now();
  if (__builtin_expect(shard->depth >= Shard::kDepth, 0)) shard->depth = 0;
  Frame& frame = shard->stack[shard->depth++];
  frame = Frame{call, nullptr, ticks(), 0, nullptr, 0, false, true};
}

inline void add_call(Row* row, uint64_t took, uint64_t own, bool whole) {
  bump<uint64_t>(row->count, 1);
  bump<uint64_t>(row->total, took);
  if (whole) {
    bump<uint64_t>(row->self, own);
    bump<uint64_t>(row->whole, took);
  }
  if (took > row->max.load(std::memory_order_relaxed)) row->max.store(took, std::memory_order_relaxed);
  bump<uint32_t>(row->hist[bucket_of(took)], 1u);
}
__attribute__((noinline)) inline void add_common_call(Row* row, uint64_t took, uint64_t own, bool whole) {
  constexpr auto relaxed = std::memory_order_relaxed;
  row->count.fetch_add(1, relaxed);
  row->total.fetch_add(took, relaxed);
  if (whole) {
    row->self.fetch_add(own, relaxed);
    row->whole.fetch_add(took, relaxed);
  }
  for (uint64_t most = row->max.load(relaxed); took > most && !row->max.compare_exchange_weak(most, took, relaxed);) {}
  row->hist[bucket_of(took)].fetch_add(1, relaxed);
}

// Take a frame off the stack. Above it may be calls whose end never came, which go with it, and ranges that do not nest
// (of coroutines that take turns), which stay.
__attribute__((noinline)) inline void close_amid(Shard* shard, int at) {
  int kept = at;
  for (int i = at + 1; i < shard->depth; ++i) {
    if (!shard->stack[i].user) continue;
    shard->stack[kept] = shard->stack[i];
    shard->stack[kept++].backward = false;
  }
  shard->depth = kept;
}

// Returns what begin_device() left in the call's frame.
inline void* on_end(const void* call) {
  uint64_t now = ticks();
  Shard* shard = shard_now();
  int d = shard->depth;
  while (d > 0 && shard->stack[d - 1].call != call) --d;
  if (__builtin_expect(d == 0, 0)) {  // it began on another thread, before a fork, or before the table was renewed
    state().block->head.orphans.fetch_add(1, std::memory_order_relaxed);
    return nullptr;
  }
  Frame frame = shard->stack[d - 1];
  if (__builtin_expect(d == shard->depth, 1)) shard->depth = d - 1;
  else close_amid(shard, d - 1);
  uint64_t took = now > frame.start ? to_ns(now - frame.start) : 0;
  if (d > 1) shard->stack[d - 2].child += took;
  if (Row* row = frame.row) {
    uint64_t own = took > frame.child ? took - frame.child : 0;
    bool whole = (frame.window & 1) && frame.window == g_window.load(std::memory_order_relaxed);  // nothing inside went unseen
    if (__builtin_expect(row->common, 0)) add_common_call(row, took, own, whole);
    else add_call(row, took, own, whole);
  }
  return frame.device;
}

inline uint32_t intern_label(const char* text) {
  auto& s = state();
  std::lock_guard<std::mutex> g(s.mu);
  char cut[128];
  snprintf(cut, sizeof cut, "%s", text);
  for (uint32_t i = 0; i < s.labels; ++i)
    if (!strcmp(s.label_text[i], cut)) return i;
  if (s.labels == kLabels) return kLabels - 1;
  snprintf(s.label_text[s.labels], 128, "%s", s.labels == kLabels - 1 ? "(other labels)" : cut);
  memcpy(s.block->labels[s.labels], s.label_text[s.labels], 128);
  s.block->head.labels.store(++s.labels);
  return s.labels - 1;
}

// One record: length u32, time u64 (ns since 1970), then key \0 name \0 value \0 …
inline void add_usage(std::string_view record) {
  auto& s = state();
  if (s.want_file.exchange(false)) reopen_in_child();
  std::lock_guard<std::mutex> g(s.usage_mu);
  Head& head = s.block->head;
  uint32_t at = head.usage.load(), size = uint32_t(record.size());
  if (size + 12 > kUsageBytes - at) {
    head.usage_lost.fetch_add(1);
    return;
  }
  uint64_t now = clock_ns(CLOCK_REALTIME);
  memcpy(s.block->usage + at, &size, 4);
  memcpy(s.block->usage + at + 4, &now, 8);
  memcpy(s.block->usage + at + 12, record.data(), size);
  head.usage.store(at + 12 + size, std::memory_order_release);
}

}  // namespace ff
