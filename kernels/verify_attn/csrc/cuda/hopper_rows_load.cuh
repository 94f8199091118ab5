// The producer side of the `hopper_rows` variant: where operands live in shared memory, and the warpgroup that gathers them there.
//
// Tiles go by pairs, the first to consumer 0, the second to consumer 1. A tile (64 keys x 576 columns) is loaded, awaited and freed in four
// parts: two pairs of chunks whose O is consumer 0's, two whose O is consumer 1's. A part is freed by that consumer alone. First come those that
// the owner of the tile does not free itself, last the one with the rope columns.
#pragma once
#include "hopper_rows_work.cuh"

namespace va {
namespace rows {

constexpr int kLatent = 512, kRow = 576, kParts = 4;
constexpr int kConsumers = 256;         // threads of both consumer warpgroups
// Named: of all consumers; kProbs + g: P of consumer g's tile is in shared memory; kOwn + g: of consumer g.
enum Barrier { kAll = 1, kProbs = 2, kOwn = 4 };
// Where dynamic shared memory starts in a kernel without static shared memory (checked at run time).
constexpr uint32_t kBase = 1024;

/* Shared memory, offsets in bytes; every operand starts at a multiple of 1024. */
struct Shared {
  static constexpr int kQ = 0, kTiles = 73728, kProbs = 3 * 73728, kMisc = kProbs + 8192;  // kProbs: P of the last tile, as a thread's registers
  static constexpr int kFull = kMisc, kEmpty = kMisc + 64;  // mbarriers [buffer][part]
  static constexpr int kQFull = kMisc + 128, kDrained = kMisc + 136, kDealt = kMisc + 144;
  static constexpr int kMoved = kMisc + 168, kStarted = kMisc + 208, kItems = kMisc + 256, kAlpha = kItems + 3 * 96;
  static constexpr int kReference = kAlpha + 512, kSums = kReference + 512, kBytes = kSums + 512;
  static_assert(kBytes <= 232448, "more than a block can have");

  static __device__ __forceinline__ int tile(int buffer) { return kTiles + buffer * 73728; }
};

/* Between ordinary shared-memory writes by one consumer and reads by the other. One barrier would do; with one, compute-sanitizer's
 * racecheck reports the first few reads behind it, with two nothing (as in hopper_merge.cuh). */
__device__ __forceinline__ void hand_over() {
  sync_threads(kAll, kConsumers);
  sync_threads(kAll, kConsumers);
}

/* Tiles of each buffer that this block has begun: the parity of their mbarriers. */
struct Turns {
  int count[2] = {0, 0};
  __device__ __forceinline__ uint32_t parity(int buffer) const { return count[buffer] & 1; }
};

constexpr int kNoKey = INT32_MIN;

/* Entry of a table of indices, of 64-bit ones the low half (they are below 2^31). Volatile: asked for here, whenever it is used. */
__device__ __forceinline__ int load_entry_now(const void *table, int64_t i, int wide) {
  int found;
  asm volatile("ld.global.nc.b32 %0, [%1];" : "=r"(found) : "l"(static_cast<const int *>(table) + (i << wide)) : "memory");
  return found;
}

/* Ask where key k is: its slot's page, -1 - token for a draft row beside the pool, or kNoKey. `settle` makes a slot of it. */
__device__ __forceinline__ int ask_for(const Params &p, const Plan &plan, const Item &item, int k) {
  if (k >= item.key_end) return kNoKey;
  bool draft = k >= item.prefix;
  int token = item.q_begin + k - item.prefix;
  if (draft && p.draft_kv) return -1 - token;
  int page = p.page_size == 1 ? k : __umulhi(k, plan.page_reciprocal);
  return load_entry_now(draft ? p.draft_slots : p.kv_indices, draft ? token : item.page_begin + page, p.index64);
}

__device__ __forceinline__ int settle(const Params &p, const Plan &plan, const Item &item, int k, int found) {
  if (p.page_size == 1 || found < 0 || k >= item.prefix) return found;
  return (found - int(__umulhi(k, plan.page_reciprocal))) * p.page_size + k;
}

template <typename T> __device__ __forceinline__ const char *row_at(const Params &p, int place) {
  if (place < 0 && place != kNoKey)
    return reinterpret_cast<const char *>(static_cast<const T *>(p.draft_kv) + (-1 - place) * p.draft_row_stride);
  return reinterpret_cast<const char *>(static_cast<const T *>(p.kv_pool) + (place == kNoKey ? 0 : place) * p.kv_row_stride);
}

/* Q rows of the item; rows past its end become zero. */
template <typename T> __device__ __forceinline__ void copy_q(const Params &p, const Item &item) {
  int thread = threadIdx.x & 127, piece = thread & 7, rows = item.rows;
  const char *q = reinterpret_cast<const char *>(static_cast<const T *>(p.q) + item.first_row * kRow) + piece * 16;
#pragma unroll 1
  for (int n = thread >> 3; n < kRows; n += 16) {
    bool valid = n < rows;
    const char *from = q + (valid ? n : 0) * (kRow * 2);
    uint32_t to = kBase + Shared::kQ + n * 128 + ((piece ^ (n & 7)) << 4);
#pragma unroll
    for (int c = 0; c < 9; ++c) copy16(to + c * 8192, from + c * 128, valid ? 16 : 0);
  }
  barrier_arrive_after_copies(kBase + Shared::kQFull);
}

/* Where the thread's 16-byte pieces of a tile come from: rows 4 * i + lane / 8 of the warp's 16. */
struct Sources {
  const char *from[4];
  unsigned none;  // bit 4 * i: row i is past the end, zeros
};

/* Sources of tile kBuffer of the pair. Lane 16 * kBuffer + r has the address of the warp's row r; bit 16 * kBuffer + r of `none`: it is past the
 * end. */
template <int kBuffer> __device__ __forceinline__ Sources locate(const char *address, unsigned none) {
  Sources s;
  int row = (threadIdx.x & 31) >> 3, piece = threadIdx.x & 7;
  uint64_t own = reinterpret_cast<uint64_t>(address);
  s.none = none >> (16 * kBuffer + row);
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    uint32_t low = __shfl_sync(~0u, uint32_t(own), 16 * kBuffer + i * 4 + row);
    uint32_t high = __shfl_sync(~0u, uint32_t(own >> 32), 16 * kBuffer + i * 4 + row);
    s.from[i] = reinterpret_cast<const char *>(uint64_t(high) << 32 | low) + piece * 16;
  }
  return s;
}

/* Part k of a tile: chunks 2 * k and 2 * k + 1, and behind the last the rope columns. */
template <int kBuffer, int kPart> __device__ __forceinline__ void copy_part(const Sources &s, const Turns &turns) {
  constexpr bool kRope = kPart == (kBuffer ? 3 : 1);
  int lane = threadIdx.x & 31, row = lane >> 3, piece = lane & 7;
  uint32_t to = kBase + Shared::tile(kBuffer) + (((threadIdx.x & 127) >> 5) * 16 + row) * 128 + ((piece ^ row) << 4);
  barrier_wait(kBase + Shared::kEmpty + kBuffer * 32 + kPart * 8, turns.parity(kBuffer) ^ 1);
#pragma unroll
  for (int i = 0; i < 4; ++i) {
#pragma unroll
    for (int j = 0; j < 2 + kRope; ++j) {
      const int c = j < 2 ? 2 * kPart + j : 8;
      copy16((i & 1 ? to ^ 64 : to) + i * 512 + c * 8192, s.from[i] + c * 128, s.none >> (4 * i) & 1 ? 0 : 16);
    }
  }
  barrier_arrive_after_copies(kBase + Shared::kFull + kBuffer * 32 + kPart * 8);
}

/* Tile kBuffer of the pair. */
template <int kBuffer> __device__ __forceinline__ void copy_tile(const char *address, unsigned none, const Turns &turns) {
  const Sources s = locate<kBuffer>(address, none);
  constexpr int kFirst = kBuffer ? 0 : 2;  // what the other consumer has freed
  copy_part<kBuffer, kFirst>(s, turns);
  copy_part<kBuffer, kFirst + 1>(s, turns);
  copy_part<kBuffer, 2 - kFirst>(s, turns);
  copy_part<kBuffer, 3 - kFirst>(s, turns);
}

/* Rows of a pair of tiles that are fetched into L2 before the pair's turn: the blocks that work on the same keys (one a row tile) divide
 * them, so that each asks for a few lines only. */
struct Ahead {
  static constexpr int kPairs = 1, kMost = 2;  // pairs between a fetch and its copies; rows a thread
  int first, step;                             // its rows of the pair
  int found[kMost];

  __device__ __forceinline__ void start(const Plan &plan) {
    first = blockIdx.x % plan.lanes + plan.lanes * ((threadIdx.x & 127) >> 3), step = plan.lanes * 16;
  }

  /* Ask where its rows of the pair at `key` are. */
  __device__ __forceinline__ void ask(const Params &p, const Plan &plan, const Item &item, int key) {
    int end = min(item.prefix, item.key_end);
#pragma unroll
    for (int j = 0; j < kMost; ++j) {
      int row = first + j * step, k = key + row;
      found[j] = kNoKey;
      if (row < 2 * kTile && k < end)
        found[j] = load_entry_now(p.kv_indices, item.page_begin + (p.page_size == 1 ? k : __umulhi(k, plan.page_reciprocal)), p.index64);
    }
  }

  template <typename T> __device__ __forceinline__ void fetch(const Params &p, const Plan &plan, int key) const {
#pragma unroll
    for (int j = 0; j < kMost; ++j) {
      if (found[j] == kNoKey) continue;
      int k = key + first + j * step, slot = found[j];
      if (p.page_size != 1) slot = (slot - int(__umulhi(k, plan.page_reciprocal))) * p.page_size + k;
      const T *from = static_cast<const T *>(p.kv_pool) + slot * p.kv_row_stride + (threadIdx.x & 7) * 64;
      asm volatile("prefetch.global.L2 [%0];" ::"l"(from));
      if ((threadIdx.x & 7) == 0) asm volatile("prefetch.global.L2 [%0];" ::"l"(from + 512));
    }
  }
};

/* The producer warpgroup: Q, then the tiles, two by two, of one item after the other. A lane knows where one of the warp's rows of the two tiles
 * is; the next two tiles' are asked for before the copies that they would otherwise wait behind. */
template <typename T> __device__ __forceinline__ void produce(const Params &p, const Plan &plan, const Item *items) {
  int lane = threadIdx.x & 31, row = ((threadIdx.x & 127) >> 5) * 16 + (lane & 15) + (lane & 16) * 4;
  Turns turns;
  Ahead ahead;
  ahead.start(plan);
#pragma unroll 1
  for (int k = 0, at = 0;; ++k, at = at == 2 ? 0 : at + 1) {
    const Item &item = items[at];
    barrier_wait(kBase + Shared::kDealt + at * 8, (k / 3) & 1);
    if (item.kind != kCompute) break;
    int key = item.key_begin, end = item.key_end, found = ask_for(p, plan, item, key + row);
    ahead.ask(p, plan, item, key + Ahead::kPairs * 2 * kTile);
    if (k) barrier_wait(kBase + Shared::kDrained, (k - 1) & 1);  // the item before has used the buffers to pass on its results
    copy_q<T>(p, item);
#pragma unroll 1
    for (; key < end; key += 2 * kTile) {
      int place = settle(p, plan, item, key + row, found);
      const char *address = row_at<T>(p, place);
      unsigned none = __ballot_sync(~0u, place == kNoKey);
      ahead.fetch<T>(p, plan, key + Ahead::kPairs * 2 * kTile);
      found = ask_for(p, plan, item, key + 2 * kTile + row);
      ahead.ask(p, plan, item, key + (Ahead::kPairs + 1) * 2 * kTile);
      bool second = key + kTile < end;
      copy_tile<0>(address, none, turns);
      if (second) copy_tile<1>(address, none, turns), ++turns.count[1];
      ++turns.count[0];
    }
  }
}

}  // namespace rows
}  // namespace va
