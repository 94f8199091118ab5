// per_head: fp32 arithmetic, one block per (stream, head, tile of 9 queries, KV split); a warp takes two keys at a time.
//
// Mapping: a KV row is read once per head (not once per query and head as cuda_naive does) with float4 loads, a lane
// holding every 32nd float4 of it, and meets all nine queries of the tile while it is in registers. The 18 dot products
// of a key pair are summed across the warp together (31 shuffles instead of 90), so that lane 2i+k ends up with the score
// of query i and key k and one exp2 serves it. Every warp keeps an online softmax of its own; warps merge in shared
// memory, splits in a second small kernel, both in a fixed order.
#include "host.cuh"
#include "merge.cuh"

namespace {

using namespace va;

constexpr int kQueries = 9, kKeys = 2, kScores = kQueries * kKeys;
constexpr int kWarps = 8, kThreads = kWarps * 32, kMergeThreads = 128;

/* Where this block's work lies. */
struct Tile {
  Stream s;
  int head, q_first, queries;  // queries <= kQueries
  int key_begin, key_end;
};

/* Keys of one split: fixed chunks in batch-invariant mode, else an even cut rounded to whole block steps. */
__host__ __device__ __forceinline__ int split_keys(int keys, int splits, int chunk) {
  if (chunk) return chunk;
  int step = kWarps * kKeys, even = (keys + splits - 1) / splits;
  return (even + step - 1) / step * step;
}

/* Sum 32 values across the warp at once: afterwards values[0] of lane l holds the total of values[l]. */
template <int half = 16> __device__ __forceinline__ void sum_transposed(float (&values)[32]) {
  bool upper = threadIdx.x & half;
#pragma unroll
  for (int i = 0; i < half; ++i) {
    float keep = upper ? values[i + half] : values[i], send = upper ? values[i] : values[i + half];
    values[i] = keep + __shfl_xor_sync(~0u, send, half);
  }
  if constexpr (half > 1) sum_transposed<half / 2>(values);
}

template <typename T, int kRowQuads>
__device__ __forceinline__ void load_key(float4 (&kv)[kRowQuads], const Params &p, const Tile &t, int k) {
  int lane = threadIdx.x & 31, quads = (p.latent_dim + p.rope_dim) / 4;
  const T *row = k < t.key_end ? key_row<T>(p, t.s, k) : nullptr;
#pragma unroll
  for (int i = 0; i < kRowQuads; ++i) {
    int quad = i * 32 + lane;
    kv[i] = row && quad < quads ? load4(row + quad * 4) : make_float4(0.f, 0.f, 0.f, 0.f);
  }
}

/* Zeros for what is NaN or infinite in those of the two keys that have broken scores (lane 2i+k: of key k). */
template <int kRowQuads> __device__ __forceinline__ void mend_keys(float4 (&kv)[kKeys][kRowQuads], unsigned broken) {
#pragma unroll
  for (int j = 0; j < kKeys; ++j)
#pragma unroll
    for (int d = 0; d < kRowQuads; ++d) {
      float *x = &kv[j][d].x;
#pragma unroll
      for (int e = 0; e < 4; ++e) x[e] = (broken & 0x55555555u << j) && !is_finite(x[e]) ? 0.f : x[e];
    }
}

/* The warp's keys of this split against the tile's queries: online softmax into `row` (lane 2i+k: query i) and `sum`. */
template <typename T, int kRowQuads, int kLatentQuads>
__device__ void attend(const Params &p, const Tile &t, const float4 *query, RowState &row,
                       float4 (&sum)[kQueries][kLatentQuads]) {
  int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  for (int k = t.key_begin + warp * kKeys; k < t.key_end; k += kWarps * kKeys) {
    float4 kv[kKeys][kRowQuads];
#pragma unroll
    for (int j = 0; j < kKeys; ++j) load_key<T>(kv[j], p, t, k + j);

    float dots[32] = {};
#pragma unroll
    for (int i = 0; i < kQueries; ++i)
#pragma unroll
      for (int d = 0; d < kRowQuads; ++d) {
        float4 a = query[(i * kRowQuads + d) * 32 + lane];
#pragma unroll
        for (int j = 0; j < kKeys; ++j) {
          float &dot = dots[i * kKeys + j];
          dot += a.x * kv[j][d].x, dot += a.y * kv[j][d].y, dot += a.z * kv[j][d].z, dot += a.w * kv[j][d].w;
        }
      }
    int i = lane / kKeys, key = k + lane % kKeys;
    sum_transposed(dots);
    float score = dots[0] * p.scale * kLog2e;
    bool seen = i < t.queries && key < t.key_end && key_visible(p, t.s, t.q_first + i, key);
    if (k + kKeys > t.s.prefix) {
      unsigned broken = __ballot_sync(~0u, lane < kScores && !is_finite(score));
      score = nan_unless_finite(score);
      if (broken) mend_keys<kRowQuads>(kv, broken);
    }
    score = seen ? score : -INFINITY;

    float max = fmaxf(row.max, fmaxf(score, __shfl_xor_sync(~0u, score, 1)));
    float rescale = weight(row.max, max), w = weight(score, max);
    row.max = max, row.sum = row.sum * rescale + w;
    bool grown = __any_sync(~0u, rescale != 1.f);
#pragma unroll
    for (int q = 0; q < kQueries; ++q) {
      if (grown) {
        float r = __shfl_sync(~0u, rescale, q * kKeys);
#pragma unroll
        for (int d = 0; d < kLatentQuads; ++d) sum[q][d].x *= r, sum[q][d].y *= r, sum[q][d].z *= r, sum[q][d].w *= r;
      }
#pragma unroll
      for (int j = 0; j < kKeys; ++j) {
        float wj = __shfl_sync(~0u, w, q * kKeys + j);
#pragma unroll
        for (int d = 0; d < kLatentQuads; ++d) {
          sum[q][d].x += wj * kv[j][d].x, sum[q][d].y += wj * kv[j][d].y;
          sum[q][d].z += wj * kv[j][d].z, sum[q][d].w += wj * kv[j][d].w;
        }
      }
    }
  }
  row.sum += __shfl_xor_sync(~0u, row.sum, 1);
}

template <typename T, int kRowQuads>
__device__ void load_queries(const Params &p, const Tile &t, float4 *query) {
  int quads = (p.latent_dim + p.rope_dim) / 4;
  for (int at = threadIdx.x; at < kQueries * kRowQuads * 32; at += kThreads) {
    int i = at / (kRowQuads * 32), quad = at % (kRowQuads * 32);
    const T *row = static_cast<const T *>(p.q) + ((t.s.q_begin + t.q_first + i) * p.heads + t.head) * (quads * 4);
    query[at] = i < t.queries && quad < quads ? load4(row + quad * 4) : make_float4(0.f, 0.f, 0.f, 0.f);
  }
}

template <typename T, int kRowQuads, int kLatentQuads>
__global__ void __launch_bounds__(kThreads, 1) per_head_kernel(const __grid_constant__ Params p, int splits) {
  __shared__ float4 query[kQueries * kRowQuads * 32];
  __shared__ float4 merged[kQueries * kLatentQuads * 32];
  __shared__ float maxima[kWarps][kQueries], sums[kWarps][kQueries];
  int split = blockIdx.x, lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  Tile t;
  t.s = load_stream(p, blockIdx.z);
  t.head = blockIdx.y % p.heads;
  t.q_first = blockIdx.y / p.heads * kQueries;
  t.queries = min(kQueries, t.s.q_len - t.q_first);
  int keys = t.s.keys(), each = split_keys(keys, splits, p.chunk);
  t.key_begin = split * each;
  t.key_end = min(keys, t.key_begin + each);
  if (t.queries <= 0 || t.key_begin >= t.key_end) return;

  load_queries<T, kRowQuads>(p, t, query);
  __syncthreads();
  RowState row;
  float4 sum[kQueries][kLatentQuads] = {};
  attend<T, kRowQuads, kLatentQuads>(p, t, query, row, sum);

  if (lane < kScores && lane % kKeys == 0) maxima[warp][lane / kKeys] = row.max, sums[warp][lane / kKeys] = row.sum;
  for (int at = threadIdx.x; at < kQueries * kLatentQuads * 32; at += kThreads) merged[at] = make_float4(0, 0, 0, 0);
  __syncthreads();
  for (int turn = 0; turn < kWarps; ++turn) {  // in warp order: the same bits every time
    if (turn == warp) {
#pragma unroll
      for (int q = 0; q < kQueries; ++q) {
        float max = maxima[0][q];
        for (int w = 1; w < kWarps; ++w) max = fmaxf(max, maxima[w][q]);
        float r = weight(maxima[warp][q], max);
#pragma unroll
        for (int d = 0; d < kLatentQuads; ++d) {
          float4 &to = merged[(q * kLatentQuads + d) * 32 + lane];
          to.x += r * sum[q][d].x, to.y += r * sum[q][d].y, to.z += r * sum[q][d].z, to.w += r * sum[q][d].w;
        }
      }
    }
    __syncthreads();
  }

  int64_t rows = int64_t(p.tokens) * p.heads;
  Parts parts = parts_in(p.workspace, rows * splits, p.latent_dim);
  for (int q = warp; q < t.queries; q += kWarps) {
    float max = maxima[0][q], total = 0.f;
    for (int w = 1; w < kWarps; ++w) max = fmaxf(max, maxima[w][q]);
    for (int w = 0; w < kWarps; ++w) total += sums[w][q] * weight(maxima[w][q], max);
    int64_t at = split * rows + (t.s.q_begin + t.q_first + q) * p.heads + t.head;
    for (int quad = lane; quad < p.latent_dim / 4; quad += 32)
      store4(parts.values + at * p.latent_dim + quad * 4, merged[q * kLatentQuads * 32 + quad]);
    if (lane == 0) parts.states[at] = make_float2(max, total);
  }
}

template <typename T>
__global__ void __launch_bounds__(kMergeThreads) merge_kernel(const __grid_constant__ Params p, int splits) {
  int64_t rows = int64_t(p.tokens) * p.heads, row = int64_t(blockIdx.x) * p.heads + blockIdx.y;
  int b = stream_of_token(p, blockIdx.x);
  if (b < 0) return;
  Stream s = load_stream(p, b);
  int64_t i = blockIdx.x - s.q_begin;
  if (i < 0 || i >= s.q_len) return;
  int keys = s.keys(), each = split_keys(keys, splits, p.chunk), count = (keys + each - 1) / each;
  merge_row<T>(parts_in(p.workspace, rows * splits, p.latent_dim), count,
               [=](int k) { return int64_t(k) * rows + row; }, p.latent_dim, s.broken,
               static_cast<T *>(p.out) + row * p.latent_dim, p.lse ? p.lse + row : nullptr);
}

/* KV splits of the launch: as asked, as batch-invariant chunks need, or what fills the chip in the fewest key steps. */
int splits_of(const Params *p) {
  int64_t keys = int64_t(p->max_prefix) + p->max_q;
  if (p->chunk) return static_cast<int>(ceil_div(keys, p->chunk));
  if (p->num_splits > 0) return p->num_splits;
  int64_t blocks = int64_t(p->heads) * ceil_div(p->max_q, kQueries) * p->streams;
  int units = multiprocessors() ? multiprocessors() : 128, best = 1;
  double least = 0;
  for (int splits = 1; splits <= 64 && (splits == 1 || keys / splits >= 4 * kWarps * kKeys); ++splits) {
    double cost = ceil_div(blocks * splits, units) * (double(keys) / splits + 100);
    if (splits == 1 || cost < least * 0.97) least = cost, best = splits;
  }
  return best;
}

template <typename T, int kRowQuads, int kLatentQuads> int launch(const Params *p) {
  int splits = splits_of(p);
  dim3 grid(splits, p->heads * static_cast<int>(ceil_div(p->max_q, kQueries)), p->streams);
  cudaStream_t stream = static_cast<cudaStream_t>(p->stream);
  per_head_kernel<T, kRowQuads, kLatentQuads><<<grid, kThreads, 0, stream>>>(*p, splits);
  if (int failed = launched("per_head")) return failed;
  merge_kernel<T><<<dim3(p->tokens, p->heads), kMergeThreads, 0, stream>>>(*p, splits);
  return launched("per_head merge");
}

bool small(const Params *p) { return p->latent_dim + p->rope_dim <= 128; }

template <typename T> int launch_sized(const Params *p) {
  return small(p) ? launch<T, 1, 1>(p) : launch<T, 5, 4>(p);
}

}  // namespace

VA_EXPORT int64_t verify_attn_per_head_workspace(const verify_attn_params *p) {
  return parts_bytes(int64_t(p->tokens) * p->heads * splits_of(p), p->latent_dim);
}

VA_EXPORT const char *verify_attn_per_head_refuse(const verify_attn_params *p) {
  if (const char *reason = refuse_common(p)) return reason;
  if (p->latent_dim > 512 || p->latent_dim + p->rope_dim > 640)
    return refusal("rows of %d + %d elements are over 512 + 128", p->latent_dim, p->rope_dim);
  if (p->heads * ceil_div(p->max_q, kQueries) > 65535 || p->streams > 65535)
    return refusal("%d heads, max_q %d, %d streams: more blocks than a grid takes", p->heads, p->max_q, p->streams);
  return nullptr;
}

VA_EXPORT int verify_attn_per_head_run(const verify_attn_params *p) {
  if (const char *bad = bad_numbers(p)) return fail("per_head: %s", bad);
  if (p->tokens == 0 || p->heads == 0 || p->streams == 0 || p->max_q == 0) return 0;
  if (int failed = check_workspace(p, verify_attn_per_head_workspace(p), "per_head")) return failed;
  switch (p->dtype) {
    case VA_FLOAT32: return launch_sized<float>(p);
    case VA_BFLOAT16: return launch_sized<__nv_bfloat16>(p);
    case VA_FLOAT16: return launch_sized<__half>(p);
    default: return fail("per_head: unknown dtype %d", p->dtype);
  }
}
