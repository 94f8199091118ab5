// What the `hopper_rows` variant's consumers do with a finished item: O to the output, or to the workspace, where the blocks that share a row
// tile merge it inside the launch.
//
// Each block writes its partial results, meets those that have the other parts of the row tile (hopper_meet.cuh) and merges 1/parts of the elements,
// always adding in part order: reruns give the same bits. Values travel as fp16 under one power of two a warp (11 bits; fewer of values more than
// 2^28 below the largest of the warp's 256 columns of 16 rows), in the order in which wgmma leaves them in registers: a "position" is a thread's
// rows r0 and r1 at columns c, c + 1, c + 8, c + 9; the 512 positions of a warp stand together, those of the other consumer's same rows behind them.
#pragma once
#include "hopper_meet.cuh"
#include "hopper_rows_tile.cuh"

namespace va {
namespace rows {

constexpr int kPositions = kRows * 64, kStates = kRows + 4;  // of a slot

struct Workspace {
  unsigned *counters;
  float2 *states;      // [slot][row]: max, sum; then the scales of the 8 warps, two by two
  uint4 *values;       // [slot][position]
};

/* Offsets in bytes, behind the header with the counters. */
struct Layout {
  static constexpr int64_t kStatesAt = VERIFY_ATTN_HEADER;
  int64_t slots;
  __host__ __device__ int64_t values() const { return kStatesAt + (slots * kStates * 8 + 255) / 256 * 256; }
  __host__ __device__ int64_t bytes() const { return values() + slots * kPositions * 16; }
};

/* 16 bytes past L1. Volatile, so that a batch of loads stays a batch: the compiler would move each to its use. */
__device__ __forceinline__ uint4 load_past_l1(const void *from) {
  uint4 v;
  asm volatile("ld.global.cg.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(from));
  return v;
}

/* The power of two that brings values of at most `largest` (float bits, sign cleared) below 2^15, and its inverse. Beside an infinite
 * value, a scale that keeps ordinary ones. */
__device__ __forceinline__ float2 scale_for(uint32_t largest) {
  uint32_t exponent = largest >= 0x7f800000u ? 168u : max(largest >> 23, 15u);
  return make_float2(__uint_as_float((268 - exponent) << 23), __uint_as_float((exponent - 14) << 23));
}

/* The item's O to the workspace as halves, as registers have it. Counts the part in. */
__device__ __forceinline__ void store_part(const Item &item, const Workspace &ws, const Rows &rows, float (&o)[4][32]) {
  int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;  // of all eight
  float largest = 0.f;
#pragma unroll
  for (int i = 0; i < 4; ++i)
#pragma unroll
    for (int j = 0; j < 32; ++j) largest = fmaxf(largest, fabsf(o[i][j]));
  float2 scale = scale_for(__reduce_max_sync(~0u, __float_as_uint(largest)));
  int64_t slot = item.slot(item.part);
  float2 *states = ws.states + slot * kStates;
  if (lane == 0) __stcg(reinterpret_cast<float *>(states + kRows) + warp, scale.y);
  if (warp < 4 && (lane & 3) == 0)
    for (int r = 0; r < 2; ++r) __stcg(states + 16 * warp + (lane >> 2) + 8 * r, make_float2(rows.reference[r], rows.sum[r]));
  uint4 *to = ws.values + slot * kPositions + ((warp & 3) * 2 + (warp >> 2)) * 512 + lane;
#pragma unroll
  for (int n = 0; n < 16; ++n) {  // 16 columns
    uint32_t h[4];
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      const int at = n % 4 * 8 + k * 2;
      h[k] = pack2<__half>(o[n / 4][at] * scale.x, o[n / 4][at + 1] * scale.x);
    }
    __stcg(to + n * 32, make_uint4(h[0], h[1], h[2], h[3]));
  }
  sync_threads(kAll, kConsumers);
  if (threadIdx.x == 0) arrive_part(ws.counters + item.counter);
}

/* The item's O, normalised, to the output by way of buffer 1 (rows of 1024 bytes, 16-byte pieces swizzled), and lse. */
template <typename T>
__device__ __forceinline__ void store_whole(const Params &p, const Item &item, char *shared, const Rows &rows, float (&o)[4][32]) {
  int lane = threadIdx.x & 31, warp = (threadIdx.x & 127) >> 5, group = threadIdx.x >> 7, matrix = lane >> 3, row = lane & 7;
  float by[2];
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    int n = 16 * warp + (lane >> 2) + 8 * r;
    by[r] = normaliser(rows.sum[r], item.broken);
    if (p.lse && group == 0 && (lane & 3) == 0 && n < item.rows)
      p.lse[item.first_row + n] = natural_lse(rows.reference[r], rows.sum[r], item.broken);
  }
  char *staged = shared + Shared::tile(1);
  uint32_t to = kBase + Shared::tile(1) + (16 * warp + (matrix & 1) * 8 + row) * 1024;
#pragma unroll
  for (int n = 0; n < 16; ++n) {
    uint32_t packed[4];
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      const int at = n % 4 * 8 + k * 2;
      packed[k] = pack2<T>(o[n / 4][at] * by[k & 1], o[n / 4][at + 1] * by[k & 1]);
    }
    store_matrix4(to + (((group * 32 + 2 * n + (matrix >> 1)) ^ row) << 4), packed[0], packed[1], packed[2], packed[3]);
  }
  hand_over();
  uint4 *out = reinterpret_cast<uint4 *>(static_cast<T *>(p.out) + item.first_row * kLatent);
#pragma unroll 4
  for (int i = threadIdx.x; i < item.rows * 64; i += kConsumers)
    out[i] = *reinterpret_cast<const uint4 *>(staged + (i >> 6) * 1024 + (((i & 63) ^ ((i >> 6) & 7)) << 4));
  sync_threads(kAll, kConsumers);
}

// ---- merging ------------------------------------------------------------------------------------------------------

/* A block's slice of the positions of a row tile, and the states of its rows in shared memory: [part][row], rows `stride` apart. */
struct Slice {
  int first, last, row0, columns, stride;
  float *scales, *weights, *sums;

  __device__ __forceinline__ Slice(int part, int parts, float *scratch) {
    first = part * kPositions / parts, last = (part + 1) * kPositions / parts;
    row0 = first / 1024 * 16, columns = (last - 1) / 1024 * 16 + 16 - row0, stride = columns + 1;
    scales = scratch, weights = scales + parts * 8, sums = weights + parts * stride;
  }
};

/* Distance of part j's slot from part 0's, in slots. */
__device__ __forceinline__ int64_t slots_to(const Item &item, int j) { return j * int64_t(item.slot_step) - (j ? item.slot_shift : 0); }

__device__ __forceinline__ void load_states(const Item &item, const float2 *states, const Slice &s) {
  int pairs = s.columns / 2 + 2;  // of states; the last two are the scales
#pragma unroll 1
  for (int i = threadIdx.x; i < item.parts * pairs; i += kConsumers) {
    int j = i / pairs, n = (i - j * pairs) * 2;
    uint4 two = load_past_l1(states + slots_to(item, j) * kStates + (n < s.columns ? s.row0 + n : kRows + n - s.columns));
    if (n >= s.columns) {
      reinterpret_cast<uint4 *>(s.scales)[j * 2 + (n - s.columns) / 2] = two;
    } else {
      float *w = s.weights + j * s.stride + n, *sum = s.sums + j * s.stride + n;
      w[0] = __uint_as_float(two.x), sum[0] = __uint_as_float(two.y);
      w[1] = __uint_as_float(two.z), sum[1] = __uint_as_float(two.w);
    }
  }
}

/* The parts' maxima become their weights, normalised; lse of those rows (blocks that share a row write the same value). */
__device__ __forceinline__ void weigh(const Params &p, const Item &item, const Slice &s) {
  int lane = threadIdx.x & 31;
  for (int n = threadIdx.x >> 5; n < s.columns; n += kConsumers / 32) {
    float max = -INFINITY, sum = 0.f, *weights = s.weights + n;
#pragma unroll 1
    for (int j = lane; j < item.parts; j += 32) max = fmaxf(max, weights[j * s.stride]);
    for (int step = 16; step; step >>= 1) max = fmaxf(max, __shfl_xor_sync(~0u, max, step));
#pragma unroll 1
    for (int j = lane; j < item.parts; j += 32) sum += weight(weights[j * s.stride], max) * s.sums[j * s.stride + n];
    for (int step = 16; step; step >>= 1) sum += __shfl_xor_sync(~0u, sum, step);
    float factor = normaliser(sum, item.broken);
#pragma unroll 1
    for (int j = lane; j < item.parts; j += 32) weights[j * s.stride] = factor * weight(weights[j * s.stride], max);
    if (lane == 0 && p.lse && s.row0 + n < item.rows) p.lse[item.first_row + s.row0 + n] = natural_lse(max, sum, item.broken);
  }
}

/* Position `at` summed over the parts: rows r0 and r1. */
__device__ __forceinline__ void sum_parts(const Item &item, const Slice &s, const uint4 *values, int at, float4 (&sum)[2]) {
  constexpr int kBatch = 12;  // loads in flight a thread
  int warp = at / 1024, group = at / 512 % 2, n = warp * 16 + (at % 32 >> 2);
  const float *w = s.weights + n - s.row0, *scale = s.scales + group * 4 + warp;
#pragma unroll 1
  for (int j = 0; j < item.parts; j += kBatch) {
    uint4 v[kBatch];
#pragma unroll
    for (int i = 0; i < kBatch; ++i) v[i] = load_past_l1(values + slots_to(item, min(j + i, item.parts - 1)) * kPositions + at);
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      int k = j + i;
      if (k < item.parts) {
        float by = scale[k * 8], a = w[k * s.stride] * by, b = w[k * s.stride + 8] * by;
        float2 x = __half22float2(*reinterpret_cast<__half2 *>(&v[i].x)), y = __half22float2(*reinterpret_cast<__half2 *>(&v[i].y));
        float2 z = __half22float2(*reinterpret_cast<__half2 *>(&v[i].z)), u = __half22float2(*reinterpret_cast<__half2 *>(&v[i].w));
        sum[0].x += a * x.x, sum[0].y += a * x.y, sum[0].z += a * z.x, sum[0].w += a * z.y;
        sum[1].x += b * y.x, sum[1].y += b * y.y, sum[1].z += b * u.x, sum[1].w += b * u.y;
      }
    }
  }
}

/* Merge slice `part` of a row tile. `scratch`: shared memory, free of other use. */
template <typename T> __device__ __forceinline__ void merge_slice(const Params &p, const Item &item, const Workspace &ws, float *scratch, int part) {
  Slice s(part, item.parts, scratch);
  if (s.first >= s.last) return;
  load_states(item, ws.states + item.slot_base * int64_t(kStates), s);
  hand_over();
  weigh(p, item, s);
  hand_over();
  T *out = static_cast<T *>(p.out) + item.first_row * kLatent;
  for (int at = s.first + threadIdx.x; at < s.last; at += kConsumers) {
    int lane = at % 32, n = at / 1024 * 16 + (lane >> 2), c = at / 512 % 2 * 256 + at % 512 / 32 * 16 + (lane & 3) * 2;
    float4 sum[2] = {};
    sum_parts(item, s, ws.values + item.slot_base * int64_t(kPositions), at, sum);
#pragma unroll
    for (int r = 0; r < 2; ++r)
      if (n + 8 * r < item.rows) {
        uint32_t *to = reinterpret_cast<uint32_t *>(out + (n + 8 * r) * kLatent + c);
        to[0] = pack2<T>(sum[r].x, sum[r].y), to[4] = pack2<T>(sum[r].z, sum[r].w);
      }
  }
}

/* Merge this block's share of the item's row tile. A function of its own to keep its registers out of the main loop's. */
template <typename T>
__device__ __noinline__ void merge(const Params &p, const Item &item, const Workspace &ws, float *scratch, const volatile unsigned *started) {
  int duty = meet(ws.counters + item.counter, item.parts, started, kAll, kConsumers, reinterpret_cast<int *>(scratch));
  if (duty == kNoShare) return;
  int part = item.part, end = part + 1;
  if (duty == kAllShares) part = 0, end = item.parts;
#pragma unroll 1
  for (;; ++part) {
    merge_slice<T>(p, item, ws, scratch, part);
    sync_threads(kAll, kConsumers);  // the scratch has been read
    if (part + 1 >= end) break;
  }
}

}  // namespace rows
}  // namespace va
