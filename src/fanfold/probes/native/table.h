// The table of operator statistics: rows of fixed size in one block of memory that is mapped to a file of the run, so that
// another process can read it at any time and SIGKILL loses nothing.
#pragma once
#include <fcntl.h>
#include <pthread.h>
#include <sys/mman.h>

#include <atomic>
#include <cstddef>
#include <cstdio>
#include <cstring>
#include <mutex>
#include <string_view>
#include <vector>

#include "clock.h"

namespace ff {

constexpr uint32_t kMaxRows = 4096, kWorkerRows = 1024, kLabels = 256, kKinds = 64, kUsageBytes = 65536, kBuckets = 128;
constexpr uint32_t kOwnRows = 4, kCommon = 2 * kMaxRows;  // threads of a kind with their own rows; slots for shared rows
constexpr uint8_t kForward = 0, kBackward = 1, kScript = 2, kUser = 7, kCompile = 10, kSampled = 11, kTold = 12;

// The head of the table. probes/op_table.py reads it: change both, and the version.
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
  uint32_t ranges, spare;  // ranges: whether they are observed between windows too
  // CPU time of the process at the start of the table, when a window opened, inside windows, and when last read.
  std::atomic<uint64_t> cpu_started, cpu_opened, cpu_seen, cpu_now;
  char rest[208];
};
static_assert(sizeof(Head) == 480);

struct Row {
  std::atomic<uint32_t> ready;  // set last: the row may be read from then on
  uint16_t name_len, overload_len, inputs_len, label;
  uint8_t scope, kind;
  uint16_t common;  // written by several threads
  uint64_t hash;
  std::atomic<uint64_t> count, total, self, whole, max, device_count, device_ns;  // whole: time of calls whose self time is known
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

struct Frame {
  const void* call;
  Row* row;
  uint64_t start, child;
  void* device;
  uint32_t window;
  bool backward, user;
};

// One thread's view of the table: its rows, and its open calls.
struct Shard {
  static constexpr int kDepth = 256;
  uint32_t generation = 0;
  uint8_t kind = 0;
  bool crowded = false;  // many threads of its kind have rows already, so it shares rows
  char kind_name[16] = {0};
  std::vector<Row*> index = std::vector<Row*>(512, nullptr);
  size_t used = 0;
  int depth = 0;
  uint32_t compiling = 0;  // the round of compiling that this thread started, if any
  Frame stack[kDepth];
};

struct State {
  std::mutex mu;            // for shards, labels, kinds and the file; not taken for an operator whose row exists
  std::mutex usage_mu;
  Block* block = nullptr;   // one address for the whole process: files are mapped over it, so a late write is harmless
  std::atomic<uint32_t> generation{1};
  std::atomic<bool> want_file{false};
  std::vector<Shard*> idle;  // of threads that ended: the next thread of that kind reuses their rows
  std::atomic<uint32_t> round{kLabels};  // of labels, in steps of their number: each profile has one, and forgets earlier ones
  uint32_t labels = 1, kinds = 0;
  char label_text[kLabels][128] = {{0}};
  char kind_text[kKinds][16] = {{0}};
  char dir[3072] = {0};
  char node[64] = {0};
  int32_t rank = 0;
  uint32_t capacity = kMaxRows;
  bool ranges_always = false;
  pthread_key_t key{};
  uint32_t counted = 0;     // the generation of the counts below
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
  h.cpu_started.store(clock_ns(CLOCK_PROCESS_CPUTIME_ID));
  h.sampling = sampling;
  memcpy(h.node, s.node, sizeof h.node);
  memcpy(b->labels, s.label_text, sizeof b->labels);
  memcpy(b->kinds, s.kind_text, sizeof b->kinds);
  h.labels.store(s.labels);
  h.kinds.store(s.kinds);
}

// Map fresh memory at the block: this process loses its earlier pages; a file behind them is not touched.
inline bool fresh_memory(int fd, size_t bytes) {
  auto& s = state();
  void* at = s.block;
  int flags = at ? MAP_FIXED : 0;
  void* p = mmap(at, sizeof(Block), PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | flags, -1, 0);
  if (p == MAP_FAILED) return false;
  if (!at) s.block = static_cast<Block*>(p);  // otherwise it has not moved, and others may be reading the pointer
  if (fd < 0) return true;
  return mmap(p, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, fd, 0) != MAP_FAILED;
}

void forget_names();
void reopen_in_child();

inline size_t bytes_for(uint32_t capacity) { return offsetof(Block, rows) + size_t(capacity) * sizeof(Row); }

// Returns false if only memory is available. The file's pages are allocated at once: a write to a page that a full disk
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
  {
    std::lock_guard<std::mutex> names_lock(s.mu);
    if (!worker) forget_names();
    write_head(b, parent, capacity, worker, sampling, every, window);
  }
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

// A label's number: its index in the table, and above that the round in which it was assigned; 0 is no label in any round.
static_assert((kLabels & (kLabels - 1)) == 0);
inline uint32_t place_of(uint32_t number) {
  uint32_t place = number & (kLabels - 1);
  return number - place == state().round.load() ? place : 0;
}
inline uint32_t numbered(uint32_t place) { return place ? state().round.load() | place : 0; }

inline uint32_t intern_label(const char* text) {  // returns its index; needs the lock
  auto& s = state();
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
