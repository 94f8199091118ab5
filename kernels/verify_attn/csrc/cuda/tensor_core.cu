// tensor_core: bf16 and fp16 on mma.sync with cp.async, at most 99 KB of shared memory a block: sm_80, sm_90 and sm_120.
//
// Mapping. The rows (heads x queries) of a stream stand in one line and are cut into tiles of 40; keys go on mma's M, rows
// on its N (a multiple of 8, so 72 rows cost 80, not 128). A block holds one row tile and walks a range of keys in tiles
// of 32, gathered row by row (any page size) into two stages of shared memory. Budget of a block, 256 threads of up to 255
// registers:
//   output   512 latents x 40 rows, fp32, in registers: 8 warps x 64 latents        80 registers a thread
//   queries  in registers as mma fragments: the 576-long dot products are cut into 4 slices, a warp keeps its slice and
//            does 16 of the 32 keys, so a KV element is read from shared memory once  90 registers a thread
//   scores   the four slices' partial sums meet in shared memory, where a warp finishes the softmax of five rows
//   KV       2 x 32 x 1152 bytes
// The keys of all streams are one flat line of work, cut evenly among groups of blocks; the blocks of a group take the
// row tiles of the same keys at the same time, so that device memory is read once and L2 serves the rest. A block that
// did not see all keys of a stream leaves a partial result; a second small kernel merges them in a fixed order.
// In batch-invariant mode (chunk > 0) every chunk of a stream is a partial result of its own, wherever it is computed.
#include "host.cuh"
#include "merge.cuh"
#include "tensor_core.cuh"

namespace {

using namespace va;
using namespace va::tc;

constexpr int kMergeThreads = 128;

/* How a launch is cut. */
struct Cut {
  int row_tiles;  // of the longest stream
  int groups;     // of row_tiles blocks each
  int unit;       // keys of a unit of the work line
  int slots;      // partial results a row tile can leave
};

/* Part row of a slot, row tile and row: the layout of the workspace. */
__device__ __forceinline__ int64_t part_row(const Cut &c, int slot, int row) {
  return (int64_t(slot) * c.row_tiles + row / kRows) * kRows + row % kRows;
}

/* Slot of a part: its unit in batch-invariant mode, else one of the two a group has (its first and its last stream). */
__device__ __forceinline__ int slot_of(const Cut &c, bool fixed, int unit, int group, bool begins_stream) {
  return fixed ? unit : 2 * group + begins_stream;
}

/* Write the tile's rows: the output itself when the block saw all keys of the stream, else the slot's partial result. */
template <typename T>
__device__ void write_rows(Shared &sh, const Values &values, WarpRows &rows, const Params &p, const Cut &c, int slot,
                           bool whole) {
  const Segment &g = sh.segment;
  int lane = threadIdx.x & 31, warp = threadIdx.x / 32;
  Parts parts = parts_in(p.workspace, int64_t(c.slots) * c.row_tiles * kRows, kLatent);
  int64_t out_row = g.s.q_begin * p.heads + g.row_begin;
#pragma unroll
  for (int r = 0; r < kWarpRows; ++r) {
    int row = warp * kWarpRows + r;
    float sum = rows.sum[r];
    for (int step = 16; step; step >>= 1) sum += __shfl_xor_sync(~0u, sum, step);
    if (lane == 0) sh.factor[row] = whole ? normaliser(sum, g.s.broken) : 1.f;
    if (lane == 0 && row < g.rows) {
      if (!whole) parts.states[part_row(c, slot, g.row_begin + row)] = make_float2(rows.max[r], sum);
      else if (p.lse) p.lse[out_row + row] = natural_lse(rows.max[r], sum, g.s.broken);
    }
  }
  __syncthreads();
  T *out = static_cast<T *>(p.out) + out_row * kLatent;
  float *part = parts.values + part_row(c, slot, g.row_begin) * kLatent;
#pragma unroll
  for (int n = 0; n < kRowTiles; ++n)
#pragma unroll
    for (int m = 0; m < kLatentTiles; ++m)
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        int row = n * 8 + lane % 4 * 2 + i % 2, latent = (warp * kLatentTiles + m) * 16 + i / 2 * 8 + lane / 4;
        if (row >= g.rows) continue;
        if (whole) out[row * kLatent + latent] = from_float<T>(values[m][n][i] * sh.factor[row]);
        else part[row * kLatent + latent] = values[m][n][i];
      }
}

template <typename T>
__global__ void __launch_bounds__(kThreads, 1) tensor_core_kernel(const __grid_constant__ Params p, const __grid_constant__ Cut c) {
  extern __shared__ __align__(128) unsigned char memory[];
  Shared &sh = *reinterpret_cast<Shared *>(memory);
  prefetch_inputs(p);
  int group = blockIdx.x / c.row_tiles, row_begin = blockIdx.x % c.row_tiles * kRows;
  int total = total_units(p, c.unit), groups = min(c.groups, total), loaded = -1;
  if (group >= groups) return;
  int unit = share_begin(group, groups, total), end = share_begin(group + 1, groups, total);
  Place place = seek_unit(p, c.unit, unit);
  QueryFragments q;
  for (int b = place.stream, first = place.first; unit < end;) {
    Stream s = load_stream(p, b);
    int units = (s.keys() + c.unit - 1) / c.unit, to = p.chunk ? unit + 1 : min(end, first + units);
    if (units == 0) { ++b; continue; }
    int rows_here = min(kRows, s.q_len * p.heads - row_begin);
    if (rows_here > 0) {
      if (threadIdx.x == 0)
        sh.segment = {s, row_begin, rows_here, (unit - first) * c.unit, min(s.keys(), (to - first) * c.unit)};
      __syncthreads();
      if (loaded != b) load_queries<T>(q, p, sh.segment), loaded = b;
      Values values = {};
      WarpRows rows;
#pragma unroll
      for (int r = 0; r < kWarpRows; ++r) rows.max[r] = -INFINITY, rows.sum[r] = 0.f;
      attend<T>(sh, values, rows, q, p);
      bool whole = unit == first && to == first + units;
      write_rows<T>(sh, values, rows, p, c, slot_of(c, p.chunk, unit, group, unit == first), whole);
      __syncthreads();
    }
    unit = to;
    if (unit == first + units) first = unit, ++b;
  }
}

/* One block merges the parts of one row of one stream (rows the main kernel finished itself are left alone). */
template <typename T>
__global__ void __launch_bounds__(kMergeThreads) merge_kernel(const __grid_constant__ Params p, const Cut c) {
  int b = blockIdx.y, row = blockIdx.x;
  prefetch_inputs(p);
  Stream s = load_stream(p, b);
  if (row >= s.q_len * p.heads) return;
  int units = (s.keys() + c.unit - 1) / c.unit, first = units_before(p, b, c.unit), total = total_units(p, c.unit);
  int groups = min(c.groups, total), group = share_of(first, groups, total);
  int count = p.chunk ? units : share_of(first + units - 1, groups, total) - group + 1;
  if (count == 1) return;
  auto row_of = [&](int k) { return part_row(c, slot_of(c, p.chunk, first + k, group + k, k == 0), row); };
  int64_t at = s.q_begin * p.heads + row;
  merge_row<T>(parts_in(p.workspace, int64_t(c.slots) * c.row_tiles * kRows, kLatent), count, row_of, kLatent, s.broken,
               static_cast<T *>(p.out) + at * kLatent, p.lse ? p.lse + at : nullptr);
}

/* Groups whose blocks fill whole waves of the chip best, fewest waves first. */
int balanced_groups(int row_tiles, int processors) {
  int best = 1;
  double filled = 0;
  for (int waves = 1; waves <= 4; ++waves) {
    int groups = waves * processors / row_tiles;
    if (groups < 1) continue;
    double fill = double(groups) * row_tiles / (double(ceil_div(int64_t(groups) * row_tiles, processors)) * processors);
    if (fill > filled * 1.05) filled = fill, best = groups;
  }
  return best;
}

Cut cut_of(const Params *p) {
  int64_t keys = int64_t(p->max_prefix) + p->max_q;
  Cut c;
  c.row_tiles = static_cast<int>(ceil_div(int64_t(p->heads) * p->max_q, kRows));
  if (c.row_tiles < 1) c.row_tiles = 1;
  c.unit = p->chunk ? p->chunk : kKeys;
  int64_t units = p->streams * ceil_div(keys, c.unit);
  int processors = multiprocessors() ? multiprocessors() : 132;
  int64_t groups = p->num_splits > 0 ? int64_t(p->num_splits) * p->streams : balanced_groups(c.row_tiles, processors);
  c.groups = static_cast<int>(groups < units ? groups : units > 0 ? units : 1);
  c.slots = p->chunk ? static_cast<int>(units) : 2 * c.groups;
  return c;
}

template <typename T> int launch(const Params *p) {
  static Allowed allowed;
  Cut c = cut_of(p);
  cudaStream_t stream = static_cast<cudaStream_t>(p->stream);
  if (int failed = allow_shared(tensor_core_kernel<T>, sizeof(Shared), "tensor_core", allowed)) return failed;
  tensor_core_kernel<T><<<c.groups * c.row_tiles, kThreads, sizeof(Shared), stream>>>(*p, c);
  if (int failed = launched("tensor_core")) return failed;
  merge_kernel<T><<<dim3(p->heads * p->max_q, p->streams), kMergeThreads, 0, stream>>>(*p, c);
  return launched("tensor_core merge");
}

}  // namespace

VA_EXPORT int64_t verify_attn_tensor_core_workspace(const verify_attn_params *p) {
  Cut c = cut_of(p);
  return parts_bytes(int64_t(c.slots) * c.row_tiles * kRows, kLatent);
}

VA_EXPORT const char *verify_attn_tensor_core_refuse(const verify_attn_params *p) {
  if (const char *reason = refuse_common(p)) return reason;
  if (p->dtype != VA_BFLOAT16 && p->dtype != VA_FLOAT16) return refusal("bfloat16 and float16 only");
  if (p->latent_dim != kLatent || p->rope_dim != kRope)
    return refusal("rows of 512 + 64 only, not %d + %d", p->latent_dim, p->rope_dim);
  if (p->kv_row_stride % 8 || p->draft_row_stride % 8)
    return refusal("row strides must be multiples of 8 elements (16-byte copies), not %lld and %lld",
                   static_cast<long long>(p->kv_row_stride), static_cast<long long>(p->draft_row_stride));
  if (p->streams > 65535) return refusal("%d streams: more than a grid takes", p->streams);
  int have = shared_memory_limit();
  if (have && have < static_cast<int>(sizeof(Shared)))
    return refusal("needs %d bytes of shared memory, a block of this GPU has %d", static_cast<int>(sizeof(Shared)), have);
  return nullptr;
}

VA_EXPORT int verify_attn_tensor_core_run(const verify_attn_params *p) {
  if (const char *bad = bad_numbers(p)) return fail("tensor_core: %s", bad);
  if (p->tokens == 0 || p->heads == 0 || p->streams == 0 || p->max_q == 0) return 0;
  if (int failed = check_workspace(p, verify_attn_tensor_core_workspace(p), "tensor_core")) return failed;
  return p->dtype == VA_BFLOAT16 ? launch<__nv_bfloat16>(p) : launch<__half>(p);
}
