// cuda_naive: the straightforward kernel others are measured against.
//
// Mapping: one block per (query, head). The block's warps take the keys in turn and dot them with the query; the whole
// score row stays in shared memory, so the longest prefix is bounded by it (227 KB: about 58,000 keys on sm_90). Then an
// ordinary softmax over the row, and every thread sums its own output columns over all keys. Nothing is shared between
// the heads of a query: each block reads the KV rows twice by itself.
#include "common.cuh"
#include "host.cuh"

namespace {

using namespace va;

constexpr int kThreads = 256, kWarps = kThreads / 32;
constexpr int kColumnsPerThread = 4;  // output columns a thread can own: latent_dim <= 1024
constexpr int kSumKeys = 128;         // keys of an inner sum

__device__ float warp_sum(float x) {
  for (int step = 16; step; step >>= 1) x += __shfl_xor_sync(~0u, x, step);
  return x;
}

__device__ float warp_max(float x) {
  for (int step = 16; step; step >>= 1) x = fmaxf(x, __shfl_xor_sync(~0u, x, step));
  return x;
}

/* One value a warp reduced over the block, in warp order; every thread gets it. */
template <typename Op> __device__ float block_reduce(float own, float *scratch, Op op) {
  __syncthreads();  // scratch may still be read from the reduction before
  if (threadIdx.x % 32 == 0) scratch[threadIdx.x / 32] = own;
  __syncthreads();
  float all = scratch[0];
  for (int w = 1; w < kWarps; ++w) all = op(all, scratch[w]);
  return all;
}

template <typename T>
__device__ void score_row(const Params &p, const Stream &s, int i, const float *query, float *scores) {
  int dim = p.latent_dim + p.rope_dim, lane = threadIdx.x % 32;
  for (int k = threadIdx.x / 32; k < s.keys(); k += kWarps) {
    const T *row = key_row<T>(p, s, k);
    float dot = 0.f;
    for (int d = lane; d < dim; d += 32) dot += query[d] * to_float(row[d]);
    dot = warp_sum(dot);
    if (lane == 0) scores[k] = key_visible(p, s, i, k) ? nan_unless_finite(dot * p.scale * kLog2e) : -INFINITY;
  }
}

/* Scores become weights in place; returns the row's state. */
__device__ RowState softmax_row(float *scores, int keys, float *scratch) {
  RowState row;
  for (int k = threadIdx.x; k < keys; k += kThreads) row.max = fmaxf(row.max, scores[k]);
  row.max = block_reduce(warp_max(row.max), scratch, [](float a, float b) { return fmaxf(a, b); });
  for (int k = threadIdx.x; k < keys; k += kThreads) row.sum += scores[k] = weight(scores[k], row.max);
  row.sum = block_reduce(warp_sum(row.sum), scratch, [](float a, float b) { return a + b; });
  return row;
}

template <typename T>
__device__ void weighted_sum(const Params &p, const Stream &s, const float *weights, float factor, T *out) {
  float sum[kColumnsPerThread] = {};
  for (int begin = 0; begin < s.keys(); begin += kSumKeys) {
    float part[kColumnsPerThread] = {};  // summed in two levels: one long fp32 sum over 16,384 keys loses digits
    for (int k = begin; k < min(s.keys(), begin + kSumKeys); ++k) {
      const T *row = key_row<T>(p, s, k);
      float w = weights[k];
      if (w == 0.f) continue;  // hidden keys: whatever they hold does not reach this row
#pragma unroll
      for (int c = 0; c < kColumnsPerThread; ++c) {
        int d = threadIdx.x + c * kThreads;
        if (d < p.latent_dim) part[c] += w * to_float(row[d]);
      }
    }
#pragma unroll
    for (int c = 0; c < kColumnsPerThread; ++c) sum[c] += part[c];
  }
#pragma unroll
  for (int c = 0; c < kColumnsPerThread; ++c) {
    int d = threadIdx.x + c * kThreads;
    if (d < p.latent_dim) out[d] = from_float<T>(sum[c] * factor);
  }
}

template <typename T> __global__ void __launch_bounds__(kThreads) naive_kernel(const __grid_constant__ Params p) {
  extern __shared__ float shared[];
  float *query = shared, *scratch = query + p.latent_dim + p.rope_dim, *scores = scratch + kWarps;
  int token = blockIdx.x, head = blockIdx.y, dim = p.latent_dim + p.rope_dim;
  int b = stream_of_token(p, token);
  if (b < 0) return;
  Stream s = load_stream(p, b);
  int i = static_cast<int>(token - s.q_begin);
  if (i < 0) return;
  int64_t row = int64_t(token) * p.heads + head;

  for (int d = threadIdx.x; d < dim; d += kThreads) query[d] = to_float(static_cast<const T *>(p.q)[row * dim + d]);
  __syncthreads();
  score_row<T>(p, s, i, query, scores);
  __syncthreads();
  RowState state = softmax_row(scores, s.keys(), scratch);
  weighted_sum<T>(p, s, scores, normaliser(state.sum, s.broken), static_cast<T *>(p.out) + row * p.latent_dim);
  if (p.lse && threadIdx.x == 0) p.lse[row] = natural_lse(state.max, state.sum, s.broken);
}

int64_t shared_bytes(const Params *p) {
  return 4 * (int64_t(p->latent_dim) + p->rope_dim + kWarps + p->max_prefix + p->max_q);
}

template <typename T> int launch(const Params *p) {
  static Allowed allowed;
  int bytes = static_cast<int>(shared_bytes(p));
  if (int failed = allow_shared(naive_kernel<T>, bytes, "cuda_naive", allowed)) return failed;
  naive_kernel<T><<<dim3(p->tokens, p->heads), kThreads, bytes, static_cast<cudaStream_t>(p->stream)>>>(*p);
  return launched("cuda_naive");
}

}  // namespace

VA_EXPORT int64_t verify_attn_cuda_naive_workspace(const verify_attn_params *) { return 0; }

VA_EXPORT const char *verify_attn_cuda_naive_refuse(const verify_attn_params *p) {
  if (const char *reason = refuse_common(p)) return reason;
  if (p->latent_dim > kThreads * kColumnsPerThread) return refusal("latent_dim %d is over 1024", p->latent_dim);
  int64_t need = shared_bytes(p), have = shared_memory_limit();
  if (need > have)
    return refusal("the score row of %d keys needs %lld bytes of shared memory, a block of this GPU has %lld",
                   p->max_prefix + p->max_q, static_cast<long long>(need), static_cast<long long>(have));
  return nullptr;
}

VA_EXPORT int verify_attn_cuda_naive_run(const verify_attn_params *p) {
  if (const char *bad = bad_numbers(p)) return fail("cuda_naive: %s", bad);
  if (p->tokens == 0 || p->heads == 0 || p->streams == 0) return 0;
  switch (p->dtype) {
    case VA_FLOAT32: return launch<float>(p);
    case VA_BFLOAT16: return launch<__nv_bfloat16>(p);
    case VA_FLOAT16: return launch<__half>(p);
    default: return fail("cuda_naive: unknown dtype %d", p->dtype);
  }
}
