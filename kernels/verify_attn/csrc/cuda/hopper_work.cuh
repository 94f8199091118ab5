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
  int least;      // units a group takes at least, so that tiny batches do not pay for merging
  int chunks;     // batch-invariant mode: most chunks a stream can have; 0 = off
  int key_parts;  // num_splits: most groups a stream, on average; 0 = no limit
  uint32_t reciprocal;  // 2^32 / heads, rounded up: token of a row by one multiplication
};

struct Item {
  Stream s;
  int64_t first_row;  // of q, out and lse
  int row_in_stream;  // the same, counted from the stream's first row
  int rows;
  int key_begin, key_end;
  int part, parts;    // this item's place among the partial results of its row tile
  int counter;
  int64_t slot_base, slot_step, slot_shift;

  __device__ __forceinline__ int64_t slot(int j) const { return slot_base + j * slot_step - (j ? slot_shift : 0); }
};

/* share_begin and share_of in 32 bits: fewer instructions before the first load. workers * total < 2^32 (checked on the host). */
__device__ __forceinline__ int share_start(int worker, int workers, int total) {
  return unsigned(worker) * unsigned(total) / unsigned(workers);
}
__device__ __forceinline__ int share_holding(int u, int workers, int total) {
  return (unsigned(u + 1) * unsigned(workers) - 1) / unsigned(total);
}

/* Walks one block's items, the same in every warp. Whole warps only. */
struct Items {
  const Params &p;
  const Plan &plan;
  int kRows, lane, total, workers, worker;
  int row_tile, begin, end, at;
  Place start, place;

  __device__ __forceinline__ Items(const Params &p, const Plan &plan, int rows_a_tile) : p(p), plan(plan), kRows(rows_a_tile) {
    lane = blockIdx.x % plan.lanes, worker = blockIdx.x / plan.lanes;
    total = total_units(p, plan.unit);
    workers = max(1, min(plan.groups, total / plan.least));
    if (plan.key_parts) workers = max(1, min(workers, plan.key_parts * p.streams));
    bool idle = worker >= workers || total == 0;
    begin = idle ? 0 : share_start(worker, workers, total);
    end = idle ? 0 : share_start(worker + 1, workers, total);
    if (begin < end) start = seek_unit(p, plan.unit, begin);
    row_tile = lane, at = begin, place = start;
  }

  __device__ __forceinline__ bool next(Item &item) {
    while (begin < end && row_tile < plan.row_tiles) {
      if (at >= end) {
        row_tile += plan.lanes, at = begin, place = start;
        continue;
      }
      item.s = load_stream(p, place.stream);
      int units = (item.s.keys() + plan.unit - 1) / plan.unit, from = at - place.first;
      int to = plan.chunks ? from + 1 : min(units, end - place.first);
      int b = place.stream, first = place.first;
      at += to - from;
      if (to == units) place.stream = b + 1, place.first = first + units;
      int rows = item.s.q_len * p.heads, tiles = (rows + kRows - 1) / kRows;
      if (units == 0 || row_tile >= tiles) continue;

      int each = (rows + tiles - 1) / tiles;
      item.row_in_stream = row_tile * each;
      item.first_row = item.s.q_begin * p.heads + item.row_in_stream;
      item.rows = min(each, rows - item.row_in_stream);
      item.key_begin = from * plan.unit;
      item.key_end = min(item.s.keys(), to * plan.unit);
      if (plan.chunks) {
        item.part = from, item.parts = units;
        item.counter = b * plan.row_tiles + row_tile;
        item.slot_base = int64_t(item.counter) * plan.chunks, item.slot_step = 1, item.slot_shift = 0;
      } else {
        int head = share_holding(first, workers, total);
        item.part = worker - head;
        item.parts = share_holding(first + units - 1, workers, total) - head + 1;
        item.counter = head * plan.lanes + lane;
        item.slot_base = 2 * int64_t(item.counter) + 1, item.slot_step = 2 * plan.lanes, item.slot_shift = 1;
      }
      return true;
    }
    return false;
  }
};

/* The workspace: counters (zero between launches), softmax states, values. Offsets in bytes. */
template <int kRows> struct Layout {
  static constexpr int64_t kStates = kCounters * 8;
  int64_t slots;
  __host__ __device__ int64_t values() const { return kStates + (slots * kRows * 8 + 255) / 256 * 256; }
  __host__ __device__ int64_t bytes() const { return values() + slots * kRows * 512 * 4; }
};

}  // namespace hopper
}  // namespace va
