// One KV segment against one tile of 40 rows: the inner loop of tensor_core.cu (its header comment gives the mapping).
#pragma once
#include "mma.cuh"

namespace va::tc {

constexpr int kLatent = 512, kRope = 64, kDim = kLatent + kRope;
constexpr int kRows = 40, kRowTiles = kRows / 8;    // rows of heads x queries on mma's N
constexpr int kKeys = 32;                           // keys of a tile, on mma's M in the scores
constexpr int kWarps = 8, kThreads = kWarps * 32;  // a ninth warp would halve the registers of all
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
  alignas(8) unsigned char rescale[kWarps];                  // did any row of that warp change its reference in this tile?
  Segment segment;                                // here and not in registers, of which there are none to spare
  int numbers[kStages][kKeys];                    // page or slot numbers of the keys of the next tiles
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

/* The keys a thread copies: row threadIdx.x / 8 of every tile, which eight threads share. What most tiles need is in
 * registers; the segment is looked at only where draft rows or the end come into a tile. */
struct Keys {
  const int *pages;        // first page number of the stream (of an int64 index the low half: numbers fit 32 bits)
  int prefix_end;          // tiles up to here hold prefix keys only
  __device__ __forceinline__ Keys(const Params &p, const Segment &g)
      : pages(static_cast<const int *>(p.kv_indices) + (g.s.page_begin << p.index64)), prefix_end(min(g.end, g.s.prefix)) {}
};

/* Start fetching the page or slot numbers of the tile at `begin`: through shared memory, since a load into a register is
 * waited for by whatever comes after it. A warp fetches the numbers of the four rows it copies. */
__device__ __forceinline__ void fetch_numbers(int *to, const Params &p, const Segment &g, const Keys &keys, int begin) {
  if (threadIdx.x % 8) return;
  int key = begin + threadIdx.x / 8;
  const int *from = keys.pages + (int64_t(p.page_size == 1 ? key : key / p.page_size) << p.index64);
  bool needed = true;
  if (begin + kKeys > keys.prefix_end) {
    if (key >= g.s.prefix) from = static_cast<const int *>(p.draft_slots) + ((g.s.q_begin + key - g.s.prefix) << p.index64);
    needed = key < g.end && (key < g.s.prefix || p.draft_slots);
    if (!needed) from = p.prefix_lens;  // any readable word
  }
  copy4_async(shared_address(to + threadIdx.x / 8), from, needed);
}

/* The KV row this thread copies for the tile at `begin`, NULL past the segment's end. */
template <typename T>
__device__ __forceinline__ const T *copied_row(const Params &p, const Segment &g, const Keys &keys, int begin, const int *numbers) {
  int key = begin + threadIdx.x / 8;
  int64_t slot = numbers[threadIdx.x / 8];
  if (p.page_size != 1) slot = slot * p.page_size + key % p.page_size;
  if (begin + kKeys > keys.prefix_end) {
    if (key >= g.end) return nullptr;
    if (key >= g.s.prefix) {
      if (p.draft_kv) return static_cast<const T *>(p.draft_kv) + (g.s.q_begin + key - g.s.prefix) * p.draft_row_stride;
      slot = numbers[threadIdx.x / 8];
    }
  }
  return static_cast<const T *>(p.kv_pool) + slot * p.kv_row_stride;
}

/* This thread's part of the copy of a tile, a ninth at a time: piece i is 128 bytes of each of the warp's four rows. */
template <typename T> struct TileCopy {
  const T *from;
  uint32_t to, bytes;  // 16, or 0 where this thread's row does not exist: zeros are stored

  __device__ __forceinline__ TileCopy(uint32_t tile, const Params &p, const T *row) {
    int key = threadIdx.x / 8, first = threadIdx.x % 8;
    from = (row ? row : static_cast<const T *>(p.kv_pool)) + first * 8;
    to = tile + swizzled(key, first);
    bytes = row ? 16 : 0;
    asm volatile("" : "+r"(to), "+l"(from), "+r"(bytes));  // keep them: the compiler would compute them anew for every piece
  }
  __device__ __forceinline__ void piece(int i) const { copy16_async(to + i * 128, from + i * 64, bytes); }
};
static_assert(kRowBytes / 128 == kSliceSteps, "a piece of the copy goes with each step of the scores");

/* Partial scores of 16 keys x 40 rows over this warp's slice of the dimensions. The next tile's copy is issued piece by
 * piece in between (none unless wanted): all at once it would stand before the matrix loads in the queue to memory. */
template <typename T>
__device__ __forceinline__ void score_tile(Shared &sh, uint32_t tile, const QueryFragments &q, const TileCopy<T> &next, bool wanted) {
  int lane = threadIdx.x & 31, warp = threadIdx.x / 32, keys = warp % 2 * 16, slice = warp / 2;
  float dots[kRowTiles][4] = {};
  uint32_t from = tile + swizzled(keys + lane % 16, slice * 2 + lane / 16), a[2][4];
  load_matrices(a[0], from);
#pragma unroll
  for (int k = 0; k < kSliceSteps; ++k) {
    if (k + 1 < kSliceSteps) load_matrices(a[(k + 1) % 2], from + (k + 1) * kSlices * 32);
    if (wanted) next.piece(k);
#pragma unroll
    for (int n = 0; n < kRowTiles; ++n) multiply_add<T>(dots[n], a[k % 2], q[k][n][0], q[k][n][1]);
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

/* Zeros for what is NaN or infinite in this warp's 64 columns of those keys of the tile; only this warp reads them after the scores. */
template <typename T> __device__ __noinline__ void mend_keys(unsigned char *tile, unsigned keys) {
  for (int key = 0; key < kKeys; ++key)
    if (keys >> key & 1) mend_pair<T>(tile + key * kRowBytes + threadIdx.x * 4);
  __syncwarp();
}

/* New references for the rows of which some key of the tile exceeds the old by more than kSlack. */
__device__ __forceinline__ void raise_references(Shared &sh, WarpRows &rows, const float (&score)[kWarpRows], int first) {
  float max[kWarpRows];  // of the tile
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
    rows.sum[r] *= factor;
    if (threadIdx.x % 32 == 0) sh.factor[first + r] = factor;
  }
}

/* Scores of this warp's five rows become weights; lane = key of the tile. */
template <typename T>
__device__ __forceinline__ void softmax_tile(Shared &sh, WarpRows &rows, const Params &p, int begin, int unmasked_end, int stage) {
  int lane = threadIdx.x & 31, warp = threadIdx.x / 32, first = warp * kWarpRows;
  float score[kWarpRows];
#pragma unroll
  for (int r = 0; r < kWarpRows; ++r) {
    int at = (first + r) * kScoreStride + lane;
    score[r] = ((sh.scores[0][at] + sh.scores[1][at]) + (sh.scores[2][at] + sh.scores[3][at])) * (p.scale * kLog2e);
  }
  if (begin + kKeys > unmasked_end) {
    uint32_t seen = rows_seeing(p, sh.segment, first, begin + lane);
    bool broken = false;
#pragma unroll
    for (int r = 0; r < kWarpRows; ++r) {
      broken |= !is_finite(score[r]);
      score[r] = seen >> r & 1 ? nan_unless_finite(score[r]) : -INFINITY;
    }
    if (unsigned keys = __ballot_sync(~0u, broken)) mend_keys<T>(sh.kv[stage], keys);
  }
  bool above = false;
#pragma unroll
  for (int r = 0; r < kWarpRows; ++r) above |= score[r] > rows.max[r] + kSlack;
  above = __any_sync(~0u, above);
  if (lane == 0) sh.rescale[warp] = above;
  if (above) raise_references(sh, rows, score, first);
#pragma unroll
  for (int r = 0; r < kWarpRows; ++r) {
    float w = weight(score[r], rows.max[r]);
    rows.sum[r] += w;
    reinterpret_cast<T *>(sh.weights + (first + r) * kWeightStride)[lane] = from_float<T>(w);
  }
}

/* Rescale the accumulators of the rows whose reference changed; in most tiles there is none. */
__device__ __forceinline__ void scale_values(Values &values, const Shared &sh) {
  unsigned long long changed = *reinterpret_cast<const unsigned long long *>(sh.rescale);
  if (!changed) return;
  int lane = threadIdx.x & 31;
#pragma unroll
  for (int n = 0; n < kRowTiles; ++n) {
    float factor[2];
    for (int i = 0; i < 2; ++i) {
      int row = n * 8 + lane % 4 * 2 + i;
      factor[i] = sh.rescale[row / kWarpRows] ? sh.factor[row] : 1.f;
    }
#pragma unroll
    for (int m = 0; m < kLatentTiles; ++m) {
      values[m][n][0] *= factor[0], values[m][n][1] *= factor[1];
      values[m][n][2] *= factor[0], values[m][n][3] *= factor[1];
    }
  }
}

/* 16 latents x 16 keys of the tile, transposed: latents on mma's M. */
__device__ __forceinline__ void load_latents(uint32_t (&to)[4], uint32_t tile, int k, int m) {
  int lane = threadIdx.x & 31, warp = threadIdx.x / 32, key = lane / 16 * 8 + lane % 8;
  load_matrices_transposed(to, tile + k * 16 * kRowBytes + warp * 128 + swizzled(key, m * 2 + lane / 8 % 2));
}

/* values += latents of the tile x weights, for this warp's 64 latents. `ahead`: the first latents, loaded already. */
template <typename T>
__device__ __forceinline__ void add_tile(Values &values, const Shared &sh, uint32_t tile, const uint32_t (&ahead)[4]) {
  int lane = threadIdx.x & 31;
  uint32_t w[kRowTiles][4], weights = shared_address(sh.weights) + lane % 8 * kWeightStride + lane / 8 * 16;
#pragma unroll
  for (int n = 0; n < kRowTiles; ++n) load_matrices(w[n], weights + n * 8 * kWeightStride);
  uint32_t a[2][4] = {{ahead[0], ahead[1], ahead[2], ahead[3]}};
  constexpr int kSteps = kKeys / 16 * kLatentTiles;
#pragma unroll
  for (int step = 0; step < kSteps; ++step) {
    int k = step / kLatentTiles, m = step % kLatentTiles, next = step + 1;
    if (next < kSteps) load_latents(a[next % 2], tile, next / kLatentTiles, next % kLatentTiles);
#pragma unroll
    for (int n = 0; n < kRowTiles; ++n) multiply_add<T>(values[m][n], a[step % 2], w[n][k * 2], w[n][k * 2 + 1]);
  }
}

/* All keys of the segment: while tile i computes, tile i + 1 is in flight, and so are the numbers of tile i + 3. Ends with
 * every warp past its last tile. */
template <typename T>
__device__ __forceinline__ void attend(Shared &sh, Values &values, WarpRows &rows, const QueryFragments &q, const Params &p) {
  const Segment &g = sh.segment;
  Keys keys(p, g);
  int begin = g.begin, end = g.end, stage = 0;
  fetch_numbers(sh.numbers[0], p, g, keys, begin);
  fetch_numbers(sh.numbers[1], p, g, keys, begin + kKeys);
  copies_wait();
  __syncwarp();
  TileCopy<T> first(shared_address(sh.kv[0]), p, copied_row<T>(p, g, keys, begin, sh.numbers[0]));
  for (int i = 0; i < kSliceSteps; ++i) first.piece(i);
  const T *row = copied_row<T>(p, g, keys, begin + kKeys, sh.numbers[1]);
  __syncwarp();
  fetch_numbers(sh.numbers[0], p, g, keys, begin + 2 * kKeys);
  for (; begin < end; begin += kKeys, stage ^= 1) {
    uint32_t tile = shared_address(sh.kv[stage]), ahead[4];
    TileCopy<T> next(shared_address(sh.kv[stage ^ 1]), p, row);
    copies_wait();
    __syncthreads();  // the tile is here, and everyone is done with the other stage
    score_tile<T>(sh, tile, q, next, begin + kKeys < end);
    fetch_numbers(sh.numbers[stage ^ 1], p, g, keys, begin + 3 * kKeys);
    __syncthreads();
    softmax_tile<T>(sh, rows, p, begin, keys.prefix_end, stage);
    load_latents(ahead, tile, 0, 0);
    __syncthreads();
    scale_values(values, sh);
    add_tile<T>(values, sh, tile, ahead);
    row = copied_row<T>(p, g, keys, begin + 2 * kKeys, sh.numbers[stage]);
  }
  __syncthreads();
}

}  // namespace va::tc
