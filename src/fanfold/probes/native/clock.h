// The cheapest clock available, and random numbers that differ in every process.
#pragma once
#include <sys/random.h>
#include <time.h>
#include <unistd.h>

#include <cstdint>
#if defined(__x86_64__)
#include <cpuid.h>
#include <x86intrin.h>
#endif

namespace ff {

inline uint64_t clock_ns(clockid_t which) {
  timespec t;
  clock_gettime(which, &t);
  return uint64_t(t.tv_sec) * 1000000000ull + uint64_t(t.tv_nsec);
}
inline uint64_t mono_ns() { return clock_ns(CLOCK_MONOTONIC); }

// The processor's own counter costs a fifth of clock_gettime, but is only usable if it never stops or changes its rate.
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

// Read both clocks close together: of several tries, use the one that was interrupted least.
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

inline uint64_t random64() {
  uint64_t v = 0;
  if (getrandom(&v, sizeof v, GRND_NONBLOCK) != ssize_t(sizeof v)) v = mono_ns() * 0x9E3779B97F4A7C15ull ^ uint64_t(getpid());
  return v;
}

}  // namespace ff
