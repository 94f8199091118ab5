// One KV segment against one tile of 40 rows: the inner loop of tensor_core.cu (its header comment gives the mapping).
#pragma once
#include "mma.cuh"

namespace va::tc {

constexpr int kLatent = 512, kRope = 64, kDim = kLatent + kRope;
constexpr int kRows = 40, kRowTiles = kRows / 8;    // rows of heads x queries on mma's N
constexpr int kKeys = 32;                           // keys of a tile, on mma's M in the scores
constexpr int kWarps = 8, kThreads = kWarps * 32;
constexpr int kSlices = 4, kSliceSteps = kDim / kSlices / 16;  // dot products cut over warps: every 4th of 36 mma steps
constexpr int kLatentTiles = kLatent / kWarps / 16;            // 16-latent tiles of a warp's 64 output columns
constexpr int kWarpRows = kRows / kWarps;                      // rows whose softmax a warp keeps
constexpr int kStages = 2, kRowBytes = kDim * 2;
constexpr float kSlack = 8.f;  // a row's reference may stay this far (base 2) under its maximum: rescaling becomes rare
constexpr int kScoreStride = kKeys + 4;  // floats; +4: the four rows a warp stores at once fall in different banks
constexpr int kWeightStride = kKeys * 2 + 16;  // bytes; +16: eight rows of an ldmatrix fall in different banks

/* What a block works on: rows [row_begin, row_begin + rows) of the stream's heads x queries, keys [begin, end). */
struct Segment {
  Stream s;
  int row_begin, rows;
  int begin, end;
};

struct Shared {
  unsigned char kv[kStages][kKeys * kRowBytes];   // 16-byte pieces xor-swizzled by the key's low 3 bits
  float scores[kSlices][kRows * kScoreStride];    // partial scores of each dot-product slice, [row][key]
  unsigned char weights[kRows * kWeightStride];   // exp2(score - max) in T, [row][key]
  float factor[kRows];                            // what the accumulators of a row are to be multiplied with
  Segment segment;                                // here and not in registers, of which there are none to spare
};
static_assert(sizeof(Shared) <= 99 * 1024, "must fit a block of sm_120");

/* Softmax state of the rows a warp keeps: the reference (maximum within kSlack) in every lane, the sum still spread over the lanes (by key). */
struct WarpRows {
  float max[kWarpRows], sum[kWarpRows];
};

using Values = float[kLatentTiles][kRowTiles][4];           // accumulators: latents on M, rows on N
using QueryFragments = uint32_t[kSliceSteps][kRowTiles][2];  // this warp's slice of the queries, kept in registers

/* Where 16-byte piece `chunk` of 8 stands within its 128 bytes of key row `key`; the other bits of an address add up. */
__device__ __forceinline__ int swizzled(int key, int chunk) { return key * kRowBytes + ((chunk ^ (key & 7)) << 4); }

/* Fragments of this warp's slice of the queries: mma steps slice, slice + 4, ... of the 36. */
template <typename T> __device__ __forceinline__ void load_queries(QueryFragments &q, const Params &p, const Segment &g) {
  int lane = threadIdx.x & 31, slice = threadIdx.x / 64;
  const T *first = static_cast<const T *>(p.q) + (g.s.q_begin * p.heads + g.row_begin) * kDim + slice * 16 + lane % 4 * 2;
#pragma unroll
  for (int n = 0; n < kRowTiles; ++n) {
    int row = n * 8 + lane / 4;
    const T *at = first + int64_t(row) * kDim;
#pragma unroll
    for (int k = 0; k < kSliceSteps; ++k) {
      q[k][n][0] = row < g.rows ? *reinterpret_cast<const uint32_t *>(at + k * kSlices * 16) : 0;
      q[k][n][1] = row < g.rows ? *reinterpret_cast<const uint32_t *>(at + k * kSlices * 16 + 8) : 0;
    }
  }
}

/* The page or slot number of the key this thread copies for the tile at `begin`, fetched a tile ahead of its use: one
 * unconditional load whose result nothing waits for. Numbers fit 32 bits (the low half of an int64 index is read). */
__device__ __forceinline__ int fetch_number(const Params &p, const Segment &g, int begin) {
  int key = begin + threadIdx.x / 8;
  bool draft = key >= g.s.prefix;
  int64_t at = draft ? g.s.q_begin + (key - g.s.prefix) : g.s.page_begin + (p.page_size == 1 ? key : key / p.page_size);
  const void *base = draft ? p.draft_slots : p.kv_indices;
  if (key >= g.end || !base) base = p.prefix_lens, at = 0;  // any readable word: the number will not be used
  return __ldg(static_cast<const int *>(base) + (at << p.index64));
}

/* The KV row this thread copies for that tile, NULL past the segment's end. Eight threads share a row. */
template <typename T>
__device__ __forceinline__ const T *copied_row(const Params &p, const Segment &g, int begin, int number) {
  int key = begin + threadIdx.x / 8;
  if (key >= g.end) return nullptr;
  int64_t slot = number;
  if (key >= g.s.prefix) {
    if (p.draft_kv) return static_cast<const T *>(p.draft_kv) + (g.s.q_begin + key - g.s.prefix) * p.draft_row_stride;
  } else if (p.page_size != 1) {
    slot = slot * p.page_size + key % p.page_size;
  }
  return static_cast<const T *>(p.kv_pool) + slot * p.kv_row_stride;
}

template <typename T> __device__ __forceinline__ void copy_tile(uint32_t tile, const Params &p, const T *row) {
  int key = threadIdx.x / 8, first = threadIdx.x % 8;
  const T *from = (row ? row : static_cast<const T *>(p.kv_pool)) + first * 8;  // not read when row is NULL
  uint32_t to = tile + swizzled(key, first);
#pragma unroll
  for (int i = 0; i < kRowBytes / 128; ++i) copy16_async(to + i * 128, from + i * 64, row);
  copies_commit();
}

/* Partial scores of 16 keys x 40 rows over this warp's slice of the dimensions. */
template <typename T> __device__ __forceinline__ void score_tile(Shared &sh, uint32_t tile, const QueryFragments &q) {
  int lane = threadIdx.x & 31, warp = threadIdx.x / 32, keys = warp % 2 * 16, slice = warp / 2;
  float dots[kRowTiles][4] = {};
  uint32_t from = tile + swizzled(keys + lane % 16, slice * 2 + lane / 16);
#pragma unroll
  for (int k = 0; k < kSliceSteps; ++k) {
    uint32_t a[4];
    load_matrices(a, from + k * kSlices * 32);
#pragma unroll
    for (int n = 0; n < kRowTiles; ++n) multiply_add<T>(dots[n], a, q[k][n][0], q[k][n][1]);
  }
  float *to = sh.scores[slice] + lane % 4 * 2 * kScoreStride + keys + lane / 4;
#pragma unroll
  for (int n = 0; n < kRowTiles; ++n, to += 8 * kScoreStride)
    to[0] = dots[n][0], to[kScoreStride] = dots[n][1], to[8] = dots[n][2], to[kScoreStride + 8] = dots[n][3];
}

/* Bit r: row `first + r` of the tile sees this key. A loop of its own, out of the way of the tiles that need none. */
__device__ __noinline__ uint32_t rows_seeing(const Params &p, const Segment &g, int first, int key) {
  uint32_t seen = 0;
#pragma unroll 1
  for (int r = 0; r < kWarpRows; ++r)
    if (key < g.end && first + r < g.rows && key_visible(p, g.s, (g.row_begin + first + r) / p.heads, key)) seen |= 1u << r;
  return seen;
}

/* Scores of this warp's five rows become weights; lane = key of the tile. */
template <typename T>
__device__ __forceinline__ void softmax_tile(Shared &sh, WarpRows &rows, const Params &p, const Segment &g, int begin) {
  int lane = threadIdx.x & 31, first = threadIdx.x / 32 * kWarpRows;
  float score[kWarpRows], max[kWarpRows];  // of the tile
#pragma unroll
  for (int r = 0; r < kWarpRows; ++r) {
    int at = (first + r) * kScoreStride + lane;
    score[r] = ((sh.scores[0][at] + sh.scores[1][at]) + (sh.scores[2][at] + sh.scores[3][at])) * (p.scale * kLog2e);
  }
  if (begin + kKeys > min(g.s.prefix, g.end)) {
    uint32_t seen = rows_seeing(p, g, first, begin + lane);
#pragma unroll
    for (int r = 0; r < kWarpRows; ++r) score[r] = seen >> r & 1 ? score[r] : -INFINITY;
  }
#pragma unroll
  for (int r = 0; r < kWarpRows; ++r) max[r] = score[r];
#pragma unroll
  for (int step = 16; step; step >>= 1)
#pragma unroll
    for (int r = 0; r < kWarpRows; ++r) max[r] = fmaxf(max[r], __shfl_xor_sync(~0u, max[r], step));
#pragma unroll
  for (int r = 0; r < kWarpRows; ++r) {
    float factor = 1.f;
    if (max[r] > rows.max[r] + kSlack) factor = weight(rows.max[r], max[r]), rows.max[r] = max[r];
    float w = weight(score[r], rows.max[r]);
    rows.sum[r] = rows.sum[r] * factor + w;
    reinterpret_cast<T *>(sh.weights + (first + r) * kWeightStride)[lane] = from_float<T>(w);
    if (lane == 0) sh.factor[first + r] = factor;
  }
}

__device__ __forceinline__ void scale_values(Values &values, const Shared &sh) {
  int lane = threadIdx.x & 31;
  float2 factor[kRowTiles];
  bool all_one = true;
#pragma unroll
  for (int n = 0; n < kRowTiles; ++n) {
    factor[n] = *reinterpret_cast<const float2 *>(sh.factor + n * 8 + lane % 4 * 2);
    all_one &= factor[n].x == 1.f && factor[n].y == 1.f;
  }
  if (__all_sync(~0u, all_one)) return;  // most tiles: no row found a new maximum
#pragma unroll
  for (int m = 0; m < kLatentTiles; ++m)
#pragma unroll
    for (int n = 0; n < kRowTiles; ++n) {
      values[m][n][0] *= factor[n].x, values[m][n][1] *= factor[n].y;
      values[m][n][2] *= factor[n].x, values[m][n][3] *= factor[n].y;
    }
}

/* values += latents of the tile (transposed) x weights, for this warp's 64 latents. */
template <typename T> __device__ __forceinline__ void add_tile(Values &values, const Shared &sh, uint32_t tile) {
  int lane = threadIdx.x & 31, warp = threadIdx.x / 32;
  uint32_t w[kRowTiles][4], weights = shared_address(sh.weights) + lane % 8 * kWeightStride + lane / 8 * 16;
#pragma unroll
  for (int n = 0; n < kRowTiles; ++n) load_matrices(w[n], weights + n * 8 * kWeightStride);
#pragma unroll
  for (int k = 0; k < kKeys / 16; ++k)
#pragma unroll
    for (int m = 0; m < kLatentTiles; ++m) {
      uint32_t a[4];
      int key = lane / 16 * 8 + lane % 8;
      load_matrices_transposed(a, tile + k * 16 * kRowBytes + warp * 128 + swizzled(key, m * 2 + lane / 8 % 2));
#pragma unroll
      for (int n = 0; n < kRowTiles; ++n) multiply_add<T>(values[m][n], a, w[n][k * 2], w[n][k * 2 + 1]);
    }
}

/* All keys of the segment: tile i computes while tile i + 1 is in flight. Ends with every warp past its last tile. */
template <typename T>
__device__ __forceinline__ void attend(Shared &sh, Values &values, WarpRows &rows, const QueryFragments &q, const Params &p) {
  const Segment &g = sh.segment;
  uint32_t stages = shared_address(sh.kv);
  int begin = g.begin, end = g.end, stage = 0;
  copy_tile<T>(stages, p, copied_row<T>(p, g, begin, fetch_number(p, g, begin)));
  int number = fetch_number(p, g, begin + kKeys);
  for (; begin < end; begin += kKeys, stage ^= 1) {
    uint32_t tile = stages + stage * (kKeys * kRowBytes);
    copies_wait<0>();
    __syncthreads();  // the tile is here, and everyone is done with the other stage
    if (begin + kKeys < end) {
      copy_tile<T>(stages + (stage ^ 1) * (kKeys * kRowBytes), p, copied_row<T>(p, g, begin + kKeys, number));
      number = fetch_number(p, g, begin + 2 * kKeys);
    }
    score_tile<T>(sh, tile, q);
    __syncthreads();
    softmax_tile<T>(sh, rows, p, g, begin);
    __syncthreads();
    scale_values(values, sh);
    add_tile<T>(values, sh, tile);
  }
  __syncthreads();
}

}  // namespace va::tc
