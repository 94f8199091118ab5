// Merging of KV-split partial results, in a fixed order, so that reruns give the same bits.
#pragma once
#include "common.cuh"

namespace va {

/* Partial results of the KV splits: unnormalised values (sum of exp2(score - max) * latent) and their softmax state. */
struct Parts {
  float *values;   // [part rows][latent_dim]
  float2 *states;  // [part rows]: {max, sum}
};

/* Parts laid out in a workspace for `rows` part rows, behind the header that belongs to other variants. */
__host__ __device__ inline Parts parts_in(void *workspace, int64_t rows, int latent) {
  float *base = reinterpret_cast<float *>(static_cast<char *>(workspace) + VERIFY_ATTN_HEADER);
  return {base, reinterpret_cast<float2 *>(base + rows * latent)};
}

inline int64_t parts_bytes(int64_t rows, int latent) { return VERIFY_ATTN_HEADER + rows * (int64_t(latent) * 4 + 8); }

/* Output row = merge of `count` part rows, `row_of(k)` being the k-th. Whole block of 128 threads, latent_dim <= 512;
 * the order of additions depends on count alone. */
template <typename T, typename RowOf>
__device__ void merge_row(const Parts &parts, int count, RowOf row_of, int latent, bool broken, T *out, float *lse) {
  float max = -INFINITY, sum = 0.f;
  int lane = threadIdx.x & 31;
  for (int k = lane; k < count; k += 32) max = fmaxf(max, parts.states[row_of(k)].x);
  for (int step = 16; step; step >>= 1) max = fmaxf(max, __shfl_xor_sync(~0u, max, step));
  for (int k = lane; k < count; k += 32) {
    float2 state = parts.states[row_of(k)];
    sum += state.y * weight(state.x, max);
  }
  for (int step = 16; step; step >>= 1) sum += __shfl_xor_sync(~0u, sum, step);

  int d = threadIdx.x * 4;
  if (d < latent) {
    float4 total = make_float4(0.f, 0.f, 0.f, 0.f);
#pragma unroll 8
    for (int k = 0; k < count; ++k) {
      int64_t row = row_of(k);
      float w = weight(parts.states[row].x, max);
      float4 v = *reinterpret_cast<const float4 *>(parts.values + row * latent + d);
      total.x += w * v.x, total.y += w * v.y, total.z += w * v.z, total.w += w * v.w;
    }
    float factor = normaliser(sum, broken);
    store4(out + d, make_float4(total.x * factor, total.y * factor, total.z * factor, total.w * factor));
  }
  if (lse && threadIdx.x == 0) *lse = natural_lse(max, sum, broken);
}

}  // namespace va
