// How the blocks that share a row tile meet, in `hopper` and `hopper_rows`: each counts its part in, waits for the others' and merges its own share
// of the elements, so that merging takes a moment.
//
// Nobody relies on all blocks being resident: a foreign block may hold a multiprocessor for long, and ours that was to run there starts when
// another of ours has ended. So patience ends: a block that has waited for half as long as it has run (and some 40 us) leaves its share to the first
// block that finds all parts there. Who merges what does not show in the bits. Nor does anyone wait for ever for a workspace that was not zeroed.
//
// The counter of a row tile, zero between launches: low half, parts that arrived and, beyond them, blocks that went on once all had; high
// half, blocks that left before.
#pragma once
#include "common.cuh"
#include "hopper_ptx.cuh"

namespace va {
namespace hopper {

constexpr int kCounters = VERIFY_ATTN_HEADER / 4;
constexpr unsigned kLeft = 1u << 16, kArrived = kLeft - 1;
constexpr unsigned kLeastPatience = 1u << 16;  // clocks

enum Duty { kOwnShare, kAllShares, kNoShare };

/* Count a part in. Release: with a barrier before it, covers every thread's stores. One thread. */
__device__ __forceinline__ void arrive_part(unsigned *counter) {
  asm volatile("red.release.gpu.global.add.u32 [%0], 1;" ::"l"(counter) : "memory");
}

__device__ __forceinline__ unsigned clock_now() {
  unsigned now;
  asm volatile("mov.u32 %0, %%clock;" : "=r"(now));
  return now;
}

/* What is rare, in functions of their own: leave early, if patience has ended and no part has arrived meanwhile; `started`, `waiting`: clocks when
 * the block began and when it began to wait. */
__device__ __noinline__ bool leaves(unsigned *counter, unsigned seen, unsigned started, unsigned waiting) {
  unsigned patience = kLeastPatience + (waiting - started) / 2;
  return clock_now() - waiting > patience && atomicCAS(counter, seen, seen + kLeft) == seen;
}

/* Go on after others have left early (`seen` / kLeft of them): the first to do so has all shares, the last leaves zero. */
__device__ __noinline__ int take_over(unsigned *counter, unsigned seen, unsigned parts) {
  unsigned left = seen / kLeft, on = (atomicAdd(counter, 1u) & kArrived) - parts;
  if (on + 1 + left == parts) *counter = 0;
  return on ? kOwnShare : kAllShares;
}

/* Wait until all parts of a row tile have arrived, this block's among them, and count this block out, in the usual case to twice the parts, where
 * it wraps to zero. One thread; the parts are visible to it then, and after a barrier to all. */
__device__ __forceinline__ int await_parts(unsigned *counter, unsigned parts, const volatile unsigned *started) {
  unsigned seen, waiting = 0;
  for (int polls = 0;; ++polls) {
    asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(seen) : "l"(counter) : "memory");
    if ((seen & kArrived) >= parts) break;
    if (__builtin_expect(polls == 16, 0)) waiting = clock_now();
    if (__builtin_expect(polls > 16, 0) && leaves(counter, seen, *started, waiting)) return kNoShare;
  }
  if (__builtin_expect(seen >= kLeft, 0)) return take_over(counter, seen, parts);
  asm volatile("red.relaxed.gpu.global.inc.u32 [%0], %1;" ::"l"(counter), "r"(2 * parts - 1) : "memory");
  return kOwnShare;
}

/* The same for all `threads` threads of named barrier `id`, thread 0 among them. `started`: where the clock of the block's beginning is, in shared memory;
 * `scratch`: a free word there. */
__device__ __forceinline__ int meet(unsigned *counter, unsigned parts, const volatile unsigned *started, int id, int threads, int *scratch) {
  int duty = kOwnShare;
  if (threadIdx.x == 0) {
    duty = await_parts(counter, parts, started);
    if (__builtin_expect(duty != kOwnShare, 0)) *scratch = duty;
  }
  if (__builtin_expect(!sync_any(id, threads, duty != kOwnShare), 1)) return kOwnShare;
  duty = *static_cast<volatile int *>(scratch);
  sync_threads(id, threads);
  return duty;
}

}  // namespace hopper
}  // namespace va
