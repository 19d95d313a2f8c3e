// The begin and end of a call. One writer per row, or atomic additions: no lock and no GIL.
#pragma once
#include "rows.h"

namespace ff {

// Four buckets per octave, in nanoseconds: bucket b >= 4 begins at 2^(b/4+1) * (1 + (b%4)/4).
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

inline Frame& on_start(const void* call, Key key) {
  Shard* shard = shard_now();
  if (__builtin_expect(shard->depth >= Shard::kDepth, 0)) shard->depth = 0;  // drop calls whose end never came
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

// Remove a frame from the stack. Above it may be calls whose end never came, which are removed too, and ranges that do not
// nest (of alternating coroutines), which stay.
__attribute__((noinline)) inline void close_amid(Shard* shard, int at) {
  int kept = at;
  for (int i = at + 1; i < shard->depth; ++i) {
    if (!shard->stack[i].user) continue;
    shard->stack[kept] = shard->stack[i];
    shard->stack[kept++].backward = false;
  }
  shard->depth = kept;
}

// Returns what begin_device() stored in the call's frame.
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
    bool whole = (frame.window & 1) && frame.window == g_window.load(std::memory_order_relaxed);  // everything inside was observed
    if (__builtin_expect(row->common, 0)) add_common_call(row, took, own, whole);
    else add_call(row, took, own, whole);
  }
  return frame.device;
}

}  // namespace ff
