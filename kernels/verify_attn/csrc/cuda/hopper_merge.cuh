// Merging of the partial results of the `hopper` variant inside the launch that made them.
//
// All blocks are resident (cooperative launch). Each writes its partial results, counts itself in, waits for the other
// parts of the row tile and merges its own 1/parts of the elements, always adding in part order: reruns give the same bits.
// Values travel in the order in which wgmma leaves them in registers (a "position" is one thread's 2 rows x 2 latents),
// rows outermost, so a block's slice touches few rows.
#pragma once
#include "hopper_ptx.cuh"
#include "hopper_work.cuh"

namespace va {
namespace hopper {

constexpr int kMergers = 256;  // threads of a block
constexpr int kAll = 1;        // the named barrier of all of them

struct Workspace {
  unsigned *counters;  // pairs: parts that arrived, blocks that left
  float2 *states;      // [slot][row]: max, sum
  float4 *values;      // [slot][position]
};

/* Two rows x two latents to the output: {row n, row n + 1} at latent d, then the same at latent d + 8. */
template <typename T> __device__ __forceinline__ void put(T *out, int n, int rows, int d, float4 v) {
  if (n < rows) out[n * 512 + d] = from_float<T>(v.x), out[n * 512 + d + 8] = from_float<T>(v.z);
  if (n + 1 < rows) out[(n + 1) * 512 + d] = from_float<T>(v.y), out[(n + 1) * 512 + d + 8] = from_float<T>(v.w);
}

/* Latent of a position: `block` counts (warpgroup, its m64 tile), `thread` is within the warpgroup. */
__device__ __forceinline__ int latent_of(int block, int thread) {
  int group = block >> 2, tile = block & 3;
  return 64 * ((tile >> 1) * 4 + group * 2 + (tile & 1)) + 16 * (thread >> 5) + ((thread & 31) >> 2);
}

__device__ __forceinline__ void add_scaled(float4 &sum, float4 v, float first, float second) {
  sum.x += first * v.x, sum.y += second * v.y, sum.z += first * v.z, sum.w += second * v.w;
}

/* Wait until all parts of the item's row tile are in the workspace. */
__device__ __forceinline__ void await_parts(const unsigned *counters, const Item &item) {
  if (threadIdx.x == 0) {
    unsigned seen;
    do {
      asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(seen) : "l"(counters + 2 * item.counter) : "memory");
    } while (seen < unsigned(item.parts));
  }
  sync_threads(kAll, kMergers);
}

/* Count this block out; the last one leaves both counters zeroed for the next launch. */
__device__ __forceinline__ void leave_parts(unsigned *counters, const Item &item) {
  sync_threads(kAll, kMergers);
  if (threadIdx.x == 0) {
    unsigned *pair = counters + 2 * item.counter;
    if (atomicAdd(pair + 1, 1u) == unsigned(item.parts) - 1) pair[0] = 0, pair[1] = 0;
  }
}

/* Merge this block's slice of a row tile. `scratch`: shared memory, free of other use; states of up to kMaxParts parts fit.
 * threadIdx.x < kMergers. */
template <typename T, int kRows>
__device__ __forceinline__ void merge_slice(const Params &p, const Item &item, const Workspace &ws, float *scratch) {
  const float2 *states = ws.states;
  const float4 *values = ws.values;
  constexpr int kPositions = kRows * 128, kBatch = 12;  // loads in flight a thread
  int first = item.part * kPositions / item.parts, last = (item.part + 1) * kPositions / item.parts;
  if (first == last) return;
  int row0 = first / 1024 * 8, columns = (last - 1) / 1024 * 8 + 8 - row0, stride = columns + 1;
  int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  float2 *totals = reinterpret_cast<float2 *>(scratch);  // per column: max, sum
  float *weights = scratch + 2 * kRows, *sums = weights + item.parts * stride;
  float4 *partial = reinterpret_cast<float4 *>(scratch);  // reuses everything, after a barrier

  for (int i = threadIdx.x; i < item.parts * columns / 2; i += kMergers) {
    int j = i / (columns / 2), n = i % (columns / 2) * 2;
    float4 two = __ldcg(reinterpret_cast<const float4 *>(states + item.slot(j) * kRows + row0 + n));
    weights[j * stride + n] = two.x, sums[j * stride + n] = two.y;
    weights[j * stride + n + 1] = two.z, sums[j * stride + n + 1] = two.w;
  }
  sync_threads(kAll, kMergers);
  for (int n = warp; n < columns; n += kMergers / 32) {
    float max = -INFINITY, sum = 0.f;
    for (int j = lane; j < item.parts; j += 32) max = fmaxf(max, weights[j * stride + n]);
    for (int step = 16; step; step >>= 1) max = fmaxf(max, __shfl_xor_sync(~0u, max, step));
    for (int j = lane; j < item.parts; j += 32) {
      float w = weight(weights[j * stride + n], max);
      weights[j * stride + n] = w;
      sum += w * sums[j * stride + n];
    }
    for (int step = 16; step; step >>= 1) sum += __shfl_xor_sync(~0u, sum, step);
    if (lane == 0) totals[n] = make_float2(max, sum);
  }
  sync_threads(kAll, kMergers);

  T *out = static_cast<T *>(p.out) + item.first_row * 512;
  auto finish = [&](int position, float4 v, float2 low, float2 high) {
    int thread = position % 128, block = position / 128 % 8, n = position / 1024 * 8 + thread % 4 * 2;
    float a = normaliser(low.y, item.broken), b = normaliser(high.y, item.broken);
    put(out, n, item.rows, latent_of(block, thread), make_float4(v.x * a, v.y * b, v.z * a, v.w * b));
    if (p.lse && block == 0 && thread < 4) {
      if (n < item.rows) p.lse[item.first_row + n] = natural_lse(low.x, low.y, item.broken);
      if (n + 1 < item.rows) p.lse[item.first_row + n + 1] = natural_lse(high.x, high.y, item.broken);
    }
  };
  auto gather = [&](int position, int from, int step) {
    float4 sum = make_float4(0.f, 0.f, 0.f, 0.f);
    int n = position / 1024 * 8 + position % 4 * 2 - row0;
    for (int j = from; j < item.parts; j += kBatch * step) {
      float4 v[kBatch];
#pragma unroll
      for (int i = 0; i < kBatch; ++i) v[i] = __ldcg(values + item.slot(min(j + i * step, item.parts - 1)) * kPositions + position);
#pragma unroll
      for (int i = 0; i < kBatch; ++i) {
        int at = min(j + i * step, item.parts - 1) * stride + n;
        if (j + i * step < item.parts) add_scaled(sum, v[i], weights[at], weights[at + 1]);
      }
    }
    return sum;
  };

  int positions = last - first, teams = kMergers / positions;
  if (teams <= 1) {
    for (int at = first + threadIdx.x; at < last; at += kMergers) {
      int n = at / 1024 * 8 + at % 4 * 2 - row0;
      finish(at, gather(at, 0, 1), totals[n], totals[n + 1]);
    }
    return;
  }
  int team = threadIdx.x / positions, at = first + threadIdx.x % positions;
  int n = at / 1024 * 8 + at % 4 * 2 - row0;
  float4 sum = team < teams ? gather(at, team, teams) : make_float4(0.f, 0.f, 0.f, 0.f);
  float2 low = totals[n], high = totals[n + 1];
  sync_threads(kAll, kMergers);
  partial[threadIdx.x] = sum;
  sync_threads(kAll, kMergers);
  if (team == 0) {
    for (int k = 1; k < teams; ++k) add_scaled(sum, partial[k * positions + threadIdx.x], 1.f, 1.f);
    finish(at, sum, low, high);
  }
}

/* Merge this block's share of the item's row tile. A function of its own to keep its registers out of the main loop's. */
template <typename T, int kRows>
__device__ __noinline__ void merge(const Params &p, const Item &item, const Workspace &ws, float *scratch) {
  await_parts(ws.counters, item);
  merge_slice<T, kRows>(p, item, ws, scratch);
  leave_parts(ws.counters, item);
}

}  // namespace hopper
}  // namespace va
