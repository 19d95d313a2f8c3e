// Finds the row of a call: each thread has its own rows, without a lock; beyond a few threads of a kind, they share.
#pragma once
#include <sys/syscall.h>

#include "table.h"

namespace ff {

inline void retire_shard(void* p) {
  auto& s = state();
  std::lock_guard<std::mutex> g(s.mu);
  auto* shard = static_cast<Shard*>(p);
  tl_shard = nullptr;
  if (shard->crowded) return delete shard;  // its rows are shared with others
  shard->depth = 0;
  shard->compiling = 0;
  s.idle.push_back(shard);
}

// main, thread (a plain Python thread), or the kernel's name for one of torch's own threads.
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

// A hundred threads with their own rows would fill the table with the same operators: beyond a few, they share.
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
  Shard** found = nullptr;  // with rows of this table, or else of an earlier one, which the thread will replace
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
// Eight bytes at a time; the last eight may overlap those before, which avoids a copy of odd length.
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
// further ones are counted without their numbers. torch.profiler numbers each step, which never distinguishes anything.
inline Row* unnumbered_row(Shard* shard, const Key& key) {
  auto& s = state();
  bool steps = key.name.substr(0, 13) == "ProfilerStep#";
  if (!steps && s.ranges.load(std::memory_order_relaxed) < s.block->head.capacity / 4) return nullptr;
  char text[sizeof(Row::name)];
  Key plain = key;
  plain.name = without_numbers(key.name, text, sizeof text);
  return plain.name == key.name.substr(0, sizeof text) ? nullptr : find_row(shard, plain);
}

// Find the slot of a row that threads share, or the empty slot where it belongs.
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
    if (row->hash == hash) return row;  // 64 bits over a few thousand rows: equal hashes mean equal rows
  return add_row(shard, hash, key);
}

}  // namespace ff
