// How the `hopper` variant cuts a batch into items, and where the partial results of an item live.
//
// A stream's heads*q query rows stand in tiles of at most kRows rows, its keys in units (64-key tiles, or the fixed chunks of
// batch-invariant mode). Block (group g, lane r) takes row tiles r, r + lanes, ... of every stream over the g-th equal
// share of all units: neighbouring blocks read the same keys at the same time, so DRAM sees them once. A share is one
// contiguous run of units, hence at most one stream continued from the group before and one that goes on in the next.
#pragma once
#include "common.cuh"

namespace va {
namespace hopper {

constexpr int kTile = 64;           // keys a tile
constexpr int kCounters = 8192;     // counter pairs at the start of the workspace
constexpr int kMaxParts = 1024;     // partial results one row tile may have

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

/* Deals out one block's items. One whole warp; lane i knows stream base + i. */
template <int kRows> struct Dealer {
  int base, q_begin, q_len, prefix, broken, page_begin;  // this lane's stream
  int total, workers, worker, begin, end;    // units of all streams; this block's share
  int row_tile, at, stream, first;           // next unit, its stream, that stream's first unit
  int start_stream, start_first, kind;

  static __device__ __forceinline__ int units_of(const Plan &plan, int q_len, int prefix) {
    return q_len ? (prefix + q_len + plan.unit - 1) / plan.unit : 0;
  }

  /* Have lane i hold stream at + i. */
  __device__ __forceinline__ void look(const Params &p, int at) {
    base = at;
    int b = at + (threadIdx.x & 31);
    q_len = prefix = q_begin = broken = page_begin = 0;
    if (b >= p.streams) return;
    int64_t from = load_index(p.qo_indptr, b, p.index64), to = load_index(p.qo_indptr, b + 1, p.index64);
    prefix = p.prefix_lens[b];
    page_begin = static_cast<int>(load_index(p.kv_indptr, b, p.index64));
    q_begin = static_cast<int>(from), q_len = static_cast<int>(to - from);
    broken = q_len > p.max_q || prefix > p.max_prefix || q_len < 0 || prefix < 0;
    q_len = min(max(q_len, 0), p.max_q), prefix = min(max(prefix, 0), p.max_prefix);
  }

  __device__ __noinline__ void open(const Params &p, const Plan &plan) {
    int lane = threadIdx.x & 31, sum = 0;
    for (int b = (p.streams - 1) / 32 * 32; b >= 0; b -= 32) look(p, b), sum += units_of(plan, q_len, prefix);
    total = __reduce_add_sync(~0u, sum);
    workers = max(1, min(plan.groups, total));
    if (plan.key_parts) workers = max(1, min(workers, plan.key_parts * p.streams));
    worker = blockIdx.x / plan.lanes, row_tile = blockIdx.x % plan.lanes;
    begin = end = start_stream = start_first = 0, kind = kCompute;
    if (worker < workers && total) begin = share(worker), end = share(worker + 1);
    for (int before = 0; begin < end;) {  // find the stream of unit `begin`
      int own = units_of(plan, q_len, prefix), sum = own;
      for (int step = 1; step < 32; step <<= 1) {
        int other = __shfl_up_sync(~0u, sum, step);
        if (lane >= step) sum += other;
      }
      unsigned past = __ballot_sync(~0u, begin < before + sum);
      if (past) {
        int hit = __ffs(past) - 1;
        start_stream = base + hit, start_first = before + __shfl_sync(~0u, sum - own, hit);
        break;
      }
      before += __shfl_sync(~0u, sum, 31);
      look(p, base + 32);
    }
    at = begin, stream = start_stream, first = start_first;
  }

  /* share_begin of common.cuh and its inverse in 32 bits; workers * total < 2^32 is checked on the host. */
  __device__ __forceinline__ int share(int g) const { return unsigned(g) * unsigned(total) / unsigned(workers); }
  __device__ __forceinline__ int holder(int u) const { return (unsigned(u + 1) * unsigned(workers) - 1) / unsigned(total); }

  /* Write the next item: all to compute, then those to merge, then the end. Not inlined, so that the state stays out of the
   * registers of the copy loop. */
  __device__ __noinline__ void deal(const Params &p, const Plan &plan, Item *item) {
    for (;;) {
      if (at >= end) {
        row_tile += plan.lanes;
        if (begin >= end || row_tile >= plan.row_tiles) {
          kind = kind == kCompute && begin < end ? kMerge : kEnd;
          row_tile = blockIdx.x % plan.lanes;
        }
        at = begin, stream = start_stream, first = start_first;
        if (kind == kEnd) {
          item->kind = kEnd;
          return;
        }
      }
      if (stream < base || stream >= base + 32) look(p, stream);
      int n = __shfl_sync(~0u, q_len, stream - base), length = __shfl_sync(~0u, prefix, stream - base);
      int token = __shfl_sync(~0u, q_begin, stream - base), bad = __shfl_sync(~0u, broken, stream - base);
      int pages = __shfl_sync(~0u, page_begin, stream - base);
      int units = units_of(plan, n, length), from = at - first, to = plan.chunks ? from + 1 : min(units, end - first);
      int b = stream, b_first = first;
      at += to - from;
      if (to >= units) ++stream, first += units;
      int rows = n * p.heads, tiles = (rows + kRows - 1) / kRows;
      if (units == 0 || row_tile >= tiles) continue;
      int head = holder(b_first), parts = plan.chunks ? units : holder(b_first + units - 1) - head + 1;
      if (kind == kMerge && parts == 1) continue;

      int each = (rows + tiles - 1) / tiles;
      item->kind = kind;
      item->row_in_stream = row_tile * each, item->rows = min(each, rows - row_tile * each);
      item->first_row = int64_t(token) * p.heads + row_tile * each;
      item->key_begin = from * plan.unit, item->key_end = min(length + n, to * plan.unit);
      item->prefix = length, item->q_len = n, item->broken = bad, item->q_begin = token;
      item->page_begin = pages;
      item->mask_begin = p.mask_kind >= VA_MASK_QLEN ? load_index(p.mask_indptr, b, p.index64) : 0;
      item->parts = parts;
      if (plan.chunks) {
        item->part = from, item->counter = b * plan.row_tiles + row_tile;
        item->slot_base = item->counter * plan.chunks, item->slot_step = 1, item->slot_shift = 0;
      } else {
        item->part = worker - head, item->counter = head * plan.lanes + row_tile;
        item->slot_base = 2 * item->counter + 1, item->slot_step = 2 * plan.lanes, item->slot_shift = 1;
      }
      return;
    }
  }
};

/* The workspace: counters (zero between launches), softmax states, values. Offsets in bytes. */
template <int kRows> struct Layout {
  static constexpr int64_t kStates = kCounters * 8;
  int64_t slots;
  __host__ __device__ int64_t values() const { return kStates + (slots * (kRows + 4) * 8 + 255) / 256 * 256; }
  __host__ __device__ int64_t bytes() const { return values() + slots * kRows * 512 * 2; }
};

}  // namespace hopper
}  // namespace va
