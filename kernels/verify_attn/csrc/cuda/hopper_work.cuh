// How the `hopper` variant cuts a batch into items, and where the partial results of an item live.
//
// A stream's heads*q query rows stand in tiles of at most kRows rows, its keys in units (64-key tiles, or the fixed chunks of
// batch-invariant mode). Block (group g, lane r) takes row tiles r, r + lanes, ... of every stream over the g-th equal
// share of all units: neighbouring blocks read the same keys at the same time, so DRAM sees them once. A share is one
// contiguous run of units, hence at most one stream continued from the group before and one that goes on in the next.
// If it costs little balance (or gains some), shares end with their streams instead: then a block has one item ("whole shares").
#pragma once
#include "common.cuh"

namespace va {
namespace hopper {

constexpr int kTile = 64;           // keys a tile
constexpr int kMaxParts = 8192;     // partial results one row tile may have

struct Plan {
  int row_tiles;  // most row tiles a stream can have
  int lanes;      // row tiles worked on at once
  int groups;     // shares of the keys
  int unit;       // keys a unit
  int chunks;     // batch-invariant mode: most chunks a stream can have; 0 = off
  int key_parts;  // num_splits: most groups a stream, on average; 0 = no limit
  uint32_t heads_reciprocal, page_reciprocal;  // 2^32 / x, rounded up: division by one multiplication
};

enum Kind { kCompute, kMerge, kEnd };

/* A piece of work, kept in shared memory: one row tile over a run of keys, or the merging of one's share of it. */
struct Item {
  int kind;
  int rows, row_in_stream;  // rows of the tile; its first one, counted within the stream
  int key_begin, key_end;
  int prefix, q_len, broken;
  int part, parts;          // place among the partial results of the row tile
  int counter;
  int slot_base, slot_step, slot_shift;
  int q_begin;              // first token of the stream
  int64_t first_row;        // of q, out and lse
  int64_t page_begin, mask_begin;

  __device__ __forceinline__ int64_t slot(int j) const { return slot_base + int64_t(j) * slot_step - (j ? slot_shift : 0); }
};
static_assert(sizeof(Item) <= 96, "the kernel reserves 96 bytes an item");

constexpr int kPatience = 4;  // units a block may do more so that it has one item: about what another item and its merge cost

/* a / b for 0 <= a < 2^21, b > 0: exact, since a + 1/2 is further from a multiple of b than three roundings go. */
__device__ __forceinline__ int quotient(int a, int b) {
  float inverse;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(inverse) : "f"(__int2float_rn(b)));
  return __float2int_rz((__int2float_rn(a) + 0.5f) * inverse);
}
__device__ __forceinline__ int quotient_up(int a, int b) { return quotient(a + b - 1, b); }

/* Entry i of a table of indices, of 64-bit ones the low half: they are below 2^31. Volatile, so that loads stay in a batch. */
__device__ __forceinline__ int load_entry(const void *table, int i, int wide) {
  int found;
  asm volatile("ld.global.nc.b32 %0, [%1];" : "=r"(found) : "l"(static_cast<const int *>(table) + (int64_t(i) << wide)));
  return found;
}

/* Volatile: to be read again where it is used, rather than kept for the whole kernel. */
__device__ __forceinline__ int lane_of_thread() {
  int lane;
  asm volatile("mov.u32 %0, %%laneid;" : "=r"(lane));
  return lane;
}

/* What a warp knows of the batch: lane i has stream base + i. */
struct Streams {
  int base, q_begin, q_len, prefix, page_begin, broken;

  /* Have lane i hold stream at + i. */
  __device__ __forceinline__ void look(const Params &p, int at) {
    base = at;
    int b = at + lane_of_thread(), here = min(b, p.streams - 1);
    int from = load_entry(p.qo_indptr, here, p.index64), to = load_entry(p.qo_indptr, here + 1, p.index64);
    int length = load_entry(p.prefix_lens, here, 0);
    page_begin = load_entry(p.kv_indptr, here, p.index64);
    if (page_begin < 0) length = -1;  // no table before its start; and so the four loads are waited for together
    int n = b < p.streams ? to - from : 0;
    q_begin = from, broken = (unsigned(n) > unsigned(p.max_q)) | (unsigned(length) > unsigned(p.max_prefix));  // or negative
    q_len = min(max(n, 0), p.max_q), prefix = min(max(length, 0), p.max_prefix);
  }

  static __device__ __forceinline__ int units_of(const Plan &plan, int q_len, int prefix) {
    int keys = prefix + q_len + plan.unit - 1;
    return !q_len ? 0 : plan.chunks ? keys / plan.unit : unsigned(keys) / kTile;
  }

  /* Row tile `row_tile` of stream b over its units from .. to; kEnd instead of `kind` if there is no such tile. Whole warp. */
  template <int kRows>
  __device__ __forceinline__ Item describe(const Params &p, const Plan &plan, int kind, int b, int row_tile, int from, int to) const {
    Item item;
    int n = __shfl_sync(~0u, q_len, b - base), length = __shfl_sync(~0u, prefix, b - base), token = __shfl_sync(~0u, q_begin, b - base);
    item.prefix = length, item.q_len = n, item.q_begin = token;
    item.broken = __shfl_sync(~0u, broken, b - base), item.page_begin = __shfl_sync(~0u, page_begin, b - base);
    item.key_begin = from * plan.unit, item.key_end = min(length + n, to * plan.unit);
    int rows = n * p.heads, tiles = unsigned(rows + kRows - 1) / kRows, each = tiles > 1 ? quotient_up(rows, tiles) : rows;
    item.kind = row_tile < tiles && from < to ? kind : kEnd;
    item.row_in_stream = row_tile * each, item.rows = min(each, rows - row_tile * each);
    item.first_row = int64_t(token) * p.heads + row_tile * each;
    item.mask_begin = p.mask_kind >= VA_MASK_QLEN ? load_index(p.mask_indptr, b, p.index64) : 0;
    return item;
  }
};

/* A block's share of one stream (units begin .. end of it), if shares end with their streams. */
struct Share {
  int stream = 0, begin = 0, end = 0, part = 0, parts = 0;  // begin == end: nothing to do
};

/* Inclusive sum over the first `lanes` lanes. */
__device__ __forceinline__ int sum_up_to(int sum, int lanes) {
  int lane = lane_of_thread();
  for (int step = 1; step < lanes; step <<= 1) {
    int other = __shfl_up_sync(~0u, sum, step);
    if (lane >= step) sum += other;
  }
  return sum;
}

/* Whole shares: every stream is cut into equal parts of at most `most` units, the least for which there are workers enough. False
 * if one line of all units had better be cut instead. Whole warp, which has looked at stream 0. */
__device__ __forceinline__ bool share_streams(const Params &p, const Plan &plan, const Streams &s, int worker, Share &share) {
  if (p.streams > 32 || plan.chunks || plan.row_tiles > plan.lanes) return false;
  int units = s.units_of(plan, s.q_len, s.prefix), longest = __reduce_max_sync(~0u, units), total = longest, streams = 1;
  if (p.streams > 1) total = __reduce_add_sync(~0u, units), streams = max(1, __popc(__ballot_sync(~0u, units)));
  int workers = plan.key_parts ? min(plan.groups, plan.key_parts * p.streams) : plan.groups;
  int most = max(1, quotient_up(total, workers)), limit = most + kPatience;
  if (streams > workers) return false;
  if (streams > 1) {
    for (int high = quotient_up(longest, quotient(workers, streams)); most < high;) {
      int middle = (most + high) >> 1;
      if (int(__reduce_add_sync(~0u, quotient_up(units, middle))) <= workers) high = middle;
      else most = middle + 1;
    }
    if (most > limit) return false;
  }
  int own = quotient_up(units, most), last = sum_up_to(own, p.streams);
  unsigned past = __ballot_sync(~0u, worker < last);
  if (!past) return true;
  share.stream = __ffs(past) - 1;
  share.parts = __shfl_sync(~0u, own, share.stream), share.part = worker - __shfl_sync(~0u, last - own, share.stream);
  units = __shfl_sync(~0u, units, share.stream);
  int each = quotient(units, share.parts), more = units - each * share.parts;
  share.begin = share.part * each + min(share.part, more), share.end = share.begin + each + (share.part < more);
  return true;
}

/* Where the partial results of an item go: `head` is the first group that works on the stream. */
__device__ __forceinline__ void place_parts(const Plan &plan, Item &item, int head, int row_tile, int part, int parts) {
  item.parts = parts, item.part = part, item.counter = head * plan.lanes + row_tile;
  item.slot_base = 2 * item.counter + 1, item.slot_step = 2 * plan.lanes, item.slot_shift = 1;
}

/* The one item of a block with a whole share: to be computed, then merged. Whole warp. */
template <int kRows>
__device__ __forceinline__ Item only_item(const Params &p, const Plan &plan, const Streams &s, const Share &share, int worker, int row_tile) {
  Item item = s.describe<kRows>(p, plan, kCompute, share.stream, row_tile, share.begin, share.end);
  place_parts(plan, item, worker - share.part, row_tile, share.part, share.parts);
  return item;
}

/* Deals out one block's items. One whole warp. */
template <int kRows> struct Dealer : Streams {
  int total, workers, worker, begin, end;    // units of all streams; this block's share
  int row_tile, at, stream, first;           // next unit, its stream, that stream's first unit
  int start_stream, start_first, kind;
  Share share;                               // in use if share.parts

  __device__ __forceinline__ void open(const Params &p, const Plan &plan) {
    worker = blockIdx.x / plan.lanes, row_tile = blockIdx.x % plan.lanes;
    begin = end = start_stream = start_first = 0, kind = kCompute;
    look(p, 0);
    if (share_streams(p, plan, *this, worker, share)) start_stream = share.stream, begin = share.begin, end = share.end;
    else cut_line(p, plan);
    at = begin, stream = start_stream, first = start_first;
  }

  /* All units in one line, cut into equal shares. */
  __device__ __noinline__ void cut_line(const Params &p, const Plan &plan) {
    int sum = 0;
    for (int b = (p.streams - 1) / 32 * 32; b >= 0; b -= 32) look(p, b), sum += units_of(plan, q_len, prefix);
    total = __reduce_add_sync(~0u, sum);
    workers = max(1, min(plan.groups, total));
    if (plan.key_parts) workers = max(1, min(workers, plan.key_parts * p.streams));
    if (worker < workers && total) begin = share_begin(worker), end = share_begin(worker + 1);
    find_start(p, plan);
  }

  /* The stream of unit `begin`. */
  __device__ __forceinline__ void find_start(const Params &p, const Plan &plan) {
    for (int before = 0; begin < end;) {
      int own = units_of(plan, q_len, prefix), sum = sum_up_to(own, 32);
      unsigned past = __ballot_sync(~0u, begin < before + sum);
      if (past) {
        int hit = __ffs(past) - 1;
        start_stream = base + hit, start_first = before + __shfl_sync(~0u, sum - own, hit);
        break;
      }
      before += __shfl_sync(~0u, sum, 31);
      look(p, base + 32);
    }
  }

  /* share_begin of common.cuh and its inverse in 32 bits; too_many_keys keeps workers * total below 2^32. */
  __device__ __forceinline__ int share_begin(int g) const { return unsigned(g) * unsigned(total) / unsigned(workers); }
  __device__ __forceinline__ int holder(int u) const { return (unsigned(u + 1) * unsigned(workers) - 1) / unsigned(total); }

  /* Write the next item: all to compute, then those to merge, then the end. Not inlined, so that the state stays out of the
   * registers of the copy loop. One lane writes. */
  __device__ __noinline__ void deal(const Params &p, const Plan &plan, Item *to) {
    Item item = next(p, plan, *this);
    if ((threadIdx.x & 31) == 0) *to = item;
  }

  /* What a line with helpers answers otherwise: where the groups' part of a stream that ends at `end` ends, and of how many parts a row tile is. */
  __device__ __forceinline__ int end_of_groups(int end) const { return end; }
  __device__ __forceinline__ int all_parts(const Plan &plan, int b, int tile, int regular) const { return regular; }

  /* `line`: the dealer itself, as what it is. */
  template <typename Line> __device__ __forceinline__ Item next(const Params &p, const Plan &plan, const Line &line) {
    for (;;) {
      if (at >= end) {
        row_tile += plan.lanes;
        if (begin >= end || row_tile >= plan.row_tiles) {
          kind = kind == kCompute && begin < end ? kMerge : kEnd;
          row_tile = blockIdx.x % plan.lanes;
        }
        at = begin, stream = start_stream, first = start_first;
        if (kind == kEnd) {
          Item item;
          item.kind = kEnd;
          return item;
        }
      }
      if (stream < base || stream >= base + 32) look(p, stream);
      int n = __shfl_sync(~0u, q_len, stream - base), length = __shfl_sync(~0u, prefix, stream - base);
      int units = units_of(plan, n, length), from = at - first, to = plan.chunks ? from + 1 : min(units, end - first);
      int b = stream, b_first = first;
      at += to - from;
      if (to >= units) ++stream, first += units;
      if (units == 0 || row_tile >= (n * p.heads + kRows - 1) / kRows) continue;
      int head = share.parts ? worker - share.part : holder(b_first);
      int count = plan.chunks ? units : share.parts ? share.parts : holder(line.end_of_groups(b_first + units) - 1) - head + 1;
      count = line.all_parts(plan, b, row_tile, count);
      if (kind == kMerge && count == 1) continue;
      Item item = describe<kRows>(p, plan, kind, b, row_tile, from, to);
      place_parts(plan, item, head, row_tile, worker - head, count);
      if (plan.chunks) {
        item.part = from, item.counter = b * plan.row_tiles + row_tile;
        item.slot_base = item.counter * plan.chunks, item.slot_step = 1, item.slot_shift = 0;
      }
      return item;
    }
  }
};

/* The workspace: the header with the counters, softmax states, values. Offsets in bytes. */
template <int kRows> struct Layout {
  static constexpr int64_t kStates = VERIFY_ATTN_HEADER;
  int64_t slots;
  __host__ __device__ int64_t values() const { return kStates + (slots * (kRows * 8) * 8 + 255) / 256 * 256; }
  __host__ __device__ int64_t bytes() const { return values() + slots * kRows * 512 * 2; }
};

}  // namespace hopper
}  // namespace va
