// Merging of the partial results of the `hopper` variant inside the launch that made them.
//
// All blocks are resident (cooperative launch). Each writes its partial results, counts itself in, waits for the other
// parts of the row tile and merges its own 1/parts of the elements, always adding in part order: reruns give the same bits.
// Values travel as fp16 under one power of two a warp (11 bits of them, where the output keeps 8), in the order in which wgmma
// leaves them in registers: a "position" is one thread's 2 rows x 4 latents; rows outermost, so a slice touches few rows.
#pragma once
#include "hopper_ptx.cuh"
#include "hopper_work.cuh"

namespace va {
namespace hopper {

constexpr int kMergers = 256;  // threads of both consumer warpgroups
constexpr int kAll = 1;        // the named barrier of all of them

struct Workspace {
  unsigned *counters;  // pairs: parts that arrived, blocks that left
  float2 *states;      // [slot][row]: max, sum; then the scales of the 8 warps, two by two
  uint4 *values;       // [slot][position]: for latents d, d + 8, d + 64, d + 72, rows n and n + 1 as halves
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

/* 16 bytes past L1. Volatile, so that a batch of loads stays a batch: the compiler would move each to its use. */
__device__ __forceinline__ uint4 load16(const void *from) {
  uint4 v;
  asm volatile("ld.global.cg.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(from));
  return v;
}

__device__ __forceinline__ void add(float4 &sum, float4 v) { sum.x += v.x, sum.y += v.y, sum.z += v.z, sum.w += v.w; }

/* sum += {first, second} (of rows n, n + 1) times the halves of a and b. */
__device__ __forceinline__ void add_scaled(float4 &sum, uint32_t a, uint32_t b, float first, float second) {
  float2 low = __half22float2(*reinterpret_cast<__half2 *>(&a)), high = __half22float2(*reinterpret_cast<__half2 *>(&b));
  sum.x += first * low.x, sum.y += second * low.y, sum.z += first * high.x, sum.w += second * high.y;
}

/* The power of two that brings values of at most `largest` (float bits, sign cleared) below 2^15, and its inverse. Beside an
 * infinite value, a scale that keeps ordinary ones. */
__device__ __forceinline__ float2 half_scale(uint32_t largest) {
  uint32_t exponent = largest >= 0x7f800000u ? 168u : max(largest >> 23, 15u);
  return make_float2(__uint_as_float((268 - exponent) << 23), __uint_as_float((exponent - 14) << 23));
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

/* Weight of every part for rows row0 .. row0 + columns: weights[j * stride + n], normalised; lse of those rows (blocks that
 * share a row write the same value). `weights` holds the parts' maxima, `sums` their sums. */
__device__ __forceinline__ void weigh_parts(const Params &p, const Item &item, int row0, int columns, int parts, int stride,
                                            float *weights, const float *sums) {
  int lane = threadIdx.x & 31;
  for (int n = threadIdx.x >> 5; n < columns; n += kMergers / 32) {
    float max = -INFINITY, sum = 0.f;
#pragma unroll 1
    for (int j = lane; j < parts; j += 32) max = fmaxf(max, weights[j * stride + n]);
    for (int step = 16; step; step >>= 1) max = fmaxf(max, __shfl_xor_sync(~0u, max, step));
#pragma unroll 1
    for (int j = lane; j < parts; j += 32) sum += weight(weights[j * stride + n], max) * sums[j * stride + n];
    for (int step = 16; step; step >>= 1) sum += __shfl_xor_sync(~0u, sum, step);
    float factor = normaliser(sum, item.broken);
#pragma unroll 1
    for (int j = lane; j < parts; j += 32) weights[j * stride + n] = factor * weight(weights[j * stride + n], max);
    if (lane == 0 && p.lse && row0 + n < item.rows)
      p.lse[item.first_row + row0 + n] = natural_lse(max, sum, item.broken);
  }
}

/* Merge this block's slice of a row tile. `scratch`: shared memory, free of other use; states of up to kMaxParts parts fit.
 * threadIdx.x < kMergers. */
template <typename T, int kRows>
__device__ __forceinline__ void merge_slice(const Params &p, const Item &item, const Workspace &ws, float *scratch) {
  constexpr int kPositions = kRows * 64, kStates = kRows + 4, kBatch = 12;  // kBatch: loads in flight a thread
  int parts = item.parts, rows = item.rows, thread = threadIdx.x;
  int64_t step = item.slot_step, shift = item.slot_shift;
  int first = item.part * kPositions / parts, last = (item.part + 1) * kPositions / parts, count = last - first;
  if (count == 0) return;
  int row0 = first / 512 * 8, columns = (last - 1) / 512 * 8 + 8 - row0, stride = columns + 1;
  float *scales = scratch, *weights = scales + parts * 8, *sums = weights + parts * stride;

  const float2 *states = ws.states + item.slot_base * kStates;
  int pairs = columns / 2 + 2;  // of states; the last two are the scales
#pragma unroll 1
  for (int i = thread; i < parts * pairs; i += 4 * kMergers) {
    uint4 two[4];
#pragma unroll
    for (int b = 0; b < 4; ++b) {
      int at = min(i + b * kMergers, parts * pairs - 1), j = at / pairs, n = (at - j * pairs) * 2;
      two[b] = load16(states + (j * step - (j ? shift : 0)) * kStates + (n < columns ? row0 + n : kRows + n - columns));
    }
#pragma unroll
    for (int b = 0; b < 4; ++b) {
      int at = i + b * kMergers, j = at / pairs, n = (at - j * pairs) * 2;
      if (at >= parts * pairs) break;
      if (n >= columns) {
        reinterpret_cast<uint4 *>(scales)[j * 2 + (n - columns) / 2] = two[b];
      } else {
        weights[j * stride + n] = __uint_as_float(two[b].x), sums[j * stride + n] = __uint_as_float(two[b].y);
        weights[j * stride + n + 1] = __uint_as_float(two[b].z), sums[j * stride + n + 1] = __uint_as_float(two[b].w);
      }
    }
  }
  sync_threads(kAll, kMergers);
  weigh_parts(p, item, row0, columns, parts, stride, weights, sums);
  sync_threads(kAll, kMergers);

  // Teams share a position's parts. How many depends on the parts alone, so that a row's bits do not depend on kRows.
  int teams = parts < 14 ? 1 : parts < 28 ? 2 : 4, seats = kMergers / teams, team = thread / seats;
  float4 *partial = reinterpret_cast<float4 *>(scratch + (parts * (8 + 2 * stride) + 3) / 4 * 4);
  T *out = static_cast<T *>(p.out) + item.first_row * 512;
#pragma unroll 1
  for (int round = first; round < last; round += seats) {  // the same rounds for every thread
    int at = round + thread % seats;
    float4 sum[2] = {};
    int here = min(at, last - 1), n = here / 512 * 8 + here % 4 * 2, inside = here % 128, block = here / 128 % 4;
    const uint4 *values = ws.values + item.slot_base * kPositions + here;
    const float *w = weights + n - row0, *scale = scales + (block >> 1) * 4 + (inside >> 5);
#pragma unroll 1
    for (int j = team; j < parts; j += kBatch * teams) {
      uint4 v[kBatch];
#pragma unroll
      for (int i = 0; i < kBatch; ++i) {
        int k = min(j + i * teams, parts - 1);
        v[i] = load16(values + (k * step - (k ? shift : 0)) * kPositions);
      }
#pragma unroll
      for (int i = 0; i < kBatch; ++i) {
        int k = j + i * teams;
        if (k < parts) {
          float by = scale[k * 8], a = w[k * stride] * by, b = w[k * stride + 1] * by;
          add_scaled(sum[0], v[i].x, v[i].y, a, b), add_scaled(sum[1], v[i].z, v[i].w, a, b);
        }
      }
    }
    if (teams > 1) {
      sync_threads(kAll, kMergers);
      partial[thread] = sum[0], partial[kMergers + thread] = sum[1];
      sync_threads(kAll, kMergers);
      for (int k = 1; k < teams; ++k) {
        int other = (k * seats + thread) % kMergers;
        add(sum[0], partial[other]), add(sum[1], partial[kMergers + other]);
      }
    }
    if (team || at >= last) continue;
    int d = latent_of((block >> 1) * 4 + (block & 1) * 2, inside);
    put(out, n, rows, d, sum[0]), put(out, n, rows, d + 64, sum[1]);
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
