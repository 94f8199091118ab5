// What the `hopper` variant's consumers do with a finished item: the rows' sums, then O to the output or to the workspace.
#pragma once
#include "hopper_load.cuh"

namespace va {
namespace hopper {

/* What the values of a warp are to be divided by, as a power of two, so that they fit into halves. */
template <int kRows> __device__ __forceinline__ int exponent_of(const float (&o)[4][kRows / 2]) {
  float largest = 0.f;
#pragma unroll
  for (int i = 0; i < 4; ++i)
#pragma unroll
    for (int j = 0; j < kRows / 2; ++j) largest = fmaxf(largest, fabsf(o[i][j]));
  return half_exponent(__reduce_max_sync(~0u, __float_as_uint(largest)));
}

/* Every thread's sums of its rows, and its warp's exponent, to shared memory: over Q, dead once both warpgroups have the last P. Those of the
 * warpgroup that had the item's first tile stand first (`odd`: it was the second one), so that their order does not tell what the block did before. */
template <int kRows> __device__ __forceinline__ void sum_rows(char *shared, bool odd, int exponent, const float (&sum)[kRows / 4]) {
  int n = odd ? threadIdx.x ^ 128 : threadIdx.x, mine = (n >> 2) * (kRows / 2) + (n & 3);
#pragma unroll
  for (int j = 0; j < kRows / 8; ++j) reinterpret_cast<float2 *>(shared)[mine + j * 4] = make_float2(sum[2 * j], sum[2 * j + 1]);
  if ((threadIdx.x & 31) == 0) reinterpret_cast<int *>(shared + kRows * 256)[threadIdx.x >> 5] = exponent;
  hand_over();
}

/* Total sums of the rows, in a fixed order: to the softmax states of a part, for each warp relative to its exponent, or to lse and the
 * factors that normalise O, in alpha. Needs a barrier before what it wrote is used. */
template <int kRows>
__device__ __forceinline__ void finish_rows(const Params &p, const Item &item, const Workspace &ws, char *shared) {
  using S = Shared<kRows>;
  constexpr int kShare = kRows == 24 ? 8 : kRows < 72 ? 4 : 2;  // threads a row
  int n = threadIdx.x / kShare, sub = threadIdx.x % kShare;
  if (threadIdx.x >= kRows * kShare) return;
  float total = 0.f, max = reinterpret_cast<const float *>(shared + S::kReference)[n];
#pragma unroll
  for (int i = 0; i < 64 / kShare; ++i) total += reinterpret_cast<const float *>(shared)[(i * kShare + sub) * kRows + n];
  constexpr unsigned kLast = kRows * kShare % 32 ? (1u << kRows * kShare % 32) - 1 : ~0u;  // lanes of the last warp
  unsigned lanes = threadIdx.x / 32 == kRows * kShare / 32 ? kLast : ~0u;
#pragma unroll
  for (int step = 1; step < kShare; step <<= 1) total += __shfl_xor_sync(lanes, total, step);
  if (item.parts > 1) {
    float2 *to = ws.states + item.slot(item.part) * (kRows * 8) + n;
    const int *exponents = reinterpret_cast<const int *>(shared + kRows * 256);
#pragma unroll
    for (int i = 0; i < 8 / kShare; ++i) {
      int w = i * kShare + sub, e = exponents[w];
      __stcg(to + w * kRows, make_float2(max + e, total * power_of_two(-e)));
    }
  } else if (sub == 0) {
    if (p.lse && n < item.rows) p.lse[item.first_row + n] = natural_lse(max, total, item.broken);
    reinterpret_cast<float *>(shared + S::kAlpha)[n] = normaliser(total, item.broken);
  }
}

/* The item's O to the workspace, as the registers have it but in halves, divided by 2^exponent. */
template <int kRows>
__device__ __forceinline__ void store_part(const Item &item, const Workspace &ws, int exponent, const float (&o)[4][kRows / 2]) {
  float scale = power_of_two(-exponent);
  uint4 *to = ws.values + item.slot(item.part) * (kRows * 64) + (threadIdx.x >> 7) * 256 + (threadIdx.x & 127);
#pragma unroll
  for (int j = 0; j < kRows / 8; ++j)
#pragma unroll
    for (int i = 0; i < 4; i += 2) {
      uint32_t h[4];
#pragma unroll
      for (int k = 0; k < 4; ++k)
        h[k] = pack2<__half>(o[i + k / 2][4 * j + k % 2 * 2] * scale, o[i + k / 2][4 * j + k % 2 * 2 + 1] * scale);
      __stcg(to + j * 512 + i * 64, make_uint4(h[0], h[1], h[2], h[3]));
    }
}

/* The item's O, normalised, to the output by way of buffer 1 (rows of 1024 bytes, 16-byte pieces swizzled). */
template <typename T, int kRows>
__device__ __forceinline__ void store_whole(const Params &p, const Item &item, char *shared, float (&o)[4][kRows / 2]) {
  using S = Shared<kRows>;
  int lane = threadIdx.x & 31, warp = (threadIdx.x & 127) >> 5, group = threadIdx.x >> 7;
  uint32_t to = kBase + S::kRope1 + ((lane >> 4) * 8 + (lane & 7)) * 1024 + (((2 * warp + ((lane >> 3) & 1)) ^ (lane & 7)) << 4);
  const float2 *factors = reinterpret_cast<const float2 *>(shared + S::kAlpha) + (lane & 3);
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    uint32_t packed[4];
#pragma unroll
    for (int j = 0; j < kRows / 8; ++j) {
      float2 by = factors[j * 4];
      packed[j % 2 * 2] = pack2<T>(o[i][4 * j] * by.x, o[i][4 * j + 1] * by.y);
      packed[j % 2 * 2 + 1] = pack2<T>(o[i][4 * j + 2] * by.x, o[i][4 * j + 3] * by.y);
      uint32_t at = to + ((i >> 1) * 4 + group * 2 + (i & 1)) * 128 + (j & ~1) * 8192;
      if (j % 2) store_transposed4(at, packed[0], packed[1], packed[2], packed[3]);
      else if (j == kRows / 8 - 1) store_transposed2(at, packed[0], packed[1]);
    }
  }
  hand_over();
  const char *from = shared + S::kRope1;
  uint4 *out = reinterpret_cast<uint4 *>(static_cast<T *>(p.out) + item.first_row * kLatent);
#pragma unroll 4
  for (int i = threadIdx.x; i < item.rows * 64; i += kMergers)
    out[i] = *reinterpret_cast<const uint4 *>(from + (i >> 6) * 1024 + (((i & 63) ^ ((i >> 6) & 7)) << 4));
  sync_threads(kAll, kMergers);
}

}  // namespace hopper
}  // namespace va
