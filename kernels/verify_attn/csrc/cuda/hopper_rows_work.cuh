// How the `hopper_rows` variant deals out a batch: as hopper_work.cuh, and the blocks that its groups leave over take part of the last stream.
//
// With 9 row tiles 132 blocks are 14 groups of 9, and 6 are left. These helpers share the last `spare` units of the last stream, cut from the
// line that the groups share: row tile after row tile in one line of their own, cut into equal pieces. So a helper has one item for every row
// tile that its piece touches; a row tile is in two pieces at most. In the last stream these are the parts behind the groups', in slots as if
// there were more groups.
#pragma once
#include "hopper_rows_ptx.cuh"
#include "hopper_work.cuh"

namespace va {
namespace rows {

constexpr int kRows = 64;
constexpr int kLeastPiece = 64;  // units a helper must have so that helpers are worth their parts

/* Deals out one block's items. One whole warp. `total` is of the groups' line. */
struct RowsDealer : Dealer<kRows> {
  int helper, helpers, spare;                // this helper's number or -1; units the helpers have of each row tile, 0 if they have none
  int last, last_units;                      // the last stream that has any

  __device__ __forceinline__ void open(const Params &p, const Plan &plan) {
    worker = blockIdx.x / plan.lanes, row_tile = blockIdx.x % plan.lanes;
    helpers = gridDim.x - plan.groups * plan.lanes, helper = int(blockIdx.x) - plan.groups * plan.lanes;
    begin = end = start_stream = start_first = spare = 0, kind = kCompute, last = -1;
    if (helper >= 0) worker = plan.groups;
    look(p, 0);
    if (share_streams(p, plan, *this, worker, share)) start_stream = share.stream, begin = share.begin, end = share.end;
    else cut_line(p, plan);
    at = begin, stream = start_stream, first = start_first;
    if (spare && helper >= 0) row_tile = unsigned(piece_begin(plan, helper)) / unsigned(spare);
  }

  /* All units in one line, cut into equal shares. */
  __device__ __noinline__ void cut_line(const Params &p, const Plan &plan) {
    int sum = 0;
    for (int b = (p.streams - 1) / 32 * 32; b >= 0; b -= 32) {
      look(p, b);
      int own = units_of(plan, q_len, prefix);
      unsigned some = __ballot_sync(~0u, own != 0);
      if (last < 0 && some) last = b + 31 - __clz(some), last_units = __shfl_sync(~0u, own, 31 - __clz(some));
      sum += own;
    }
    total = __reduce_add_sync(~0u, sum);
    workers = max(1, min(plan.groups, total));
    if (plan.key_parts) workers = max(1, min(workers, plan.key_parts * p.streams));
    if (helpers) spare_some(plan);
    if (worker < workers && total) begin = share_begin(worker), end = share_begin(worker + 1);
    find_start(p, plan);
  }

  /* As many units for the helpers that all blocks are done at once, if that is less than the last stream has. */
  __device__ __forceinline__ void spare_some(const Plan &plan) {
    if (total >= 1 << 18 || workers < plan.groups) return;  // products stay below 2^32
    int units = max(total - kPatience * plan.groups, 0) * helpers / (plan.groups * plan.lanes + helpers);
    if (units * plan.lanes < kLeastPiece * helpers || units >= last_units) return;
    spare = units, total -= units;
  }

  /* share_begin and holder for the helpers' line. */
  __device__ __forceinline__ int piece_begin(const Plan &plan, int e) const { return unsigned(e) * unsigned(plan.lanes * spare) / unsigned(helpers); }
  __device__ __forceinline__ int piece_holder(const Plan &plan, int u) const {
    return (unsigned(u + 1) * unsigned(helpers) - 1) / unsigned(plan.lanes * spare);
  }

  /* As Dealer's. */
  __device__ __noinline__ void deal(const Params &p, const Plan &plan, Item *to) {
    Item item = helper < 0 ? next(p, plan, *this) : next_of_helper(p, plan);
    if ((threadIdx.x & 31) == 0) *to = item;
  }

  /* The parts of row tile `tile` of the last stream, of which the groups have `regular`. */
  __device__ __forceinline__ int parts_with_helpers(const Plan &plan, int tile, int regular) const {
    return regular + piece_holder(plan, (tile + 1) * spare - 1) - piece_holder(plan, tile * spare) + 1;
  }

  __device__ __forceinline__ int end_of_groups(int end) const { return min(end, total); }
  __device__ __forceinline__ int all_parts(const Plan &plan, int b, int tile, int regular) const {
    return spare && b == last ? parts_with_helpers(plan, tile, regular) : regular;
  }

  __device__ __forceinline__ Item next_of_helper(const Params &p, const Plan &plan) {
    Item item;
    item.kind = kEnd;
    if (!spare) return item;
    int from = piece_begin(plan, helper), to = piece_begin(plan, helper + 1);
    if (last < base || last >= base + 32) look(p, last);
    int tiles = (__shfl_sync(~0u, q_len, last - base) * p.heads + kRows - 1) / kRows;
    for (;;) {
      if (row_tile >= tiles || row_tile * spare >= to) {
        if (kind == kMerge) return item;
        kind = kMerge, row_tile = unsigned(from) / unsigned(spare);
        if (row_tile >= tiles) return item;
      }
      int tile = row_tile++, before = tile * spare, start = last_units - spare;
      item = describe<kRows>(p, plan, kind, last, tile, start + max(from - before, 0), start + min(to - before, spare));
      int head = holder(total + spare - last_units), regular = holder(total - 1) - head + 1;
      place_parts(plan, item, head, tile, regular + helper - piece_holder(plan, before), parts_with_helpers(plan, tile, regular));
      return item;
    }
  }
};

}  // namespace rows
}  // namespace va
