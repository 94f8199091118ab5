// The producer side of the `hopper` variant: where operands live in shared memory, and the warpgroup that gathers them there.
#pragma once
#include "hopper_merge.cuh"

namespace va {
namespace hopper {

constexpr int kLatent = 512, kRow = 576;
// Where dynamic shared memory starts in a kernel without static shared memory (checked at run time): known addresses make
// the wgmma descriptors constants.
constexpr uint32_t kBase = 1024;

/* Shared memory, offsets in bytes; every operand starts at a multiple of 1024. */
template <int kRows> struct Shared {
  static constexpr int kQChunk = kRows * 128;  // 64 columns of Q
  static constexpr int kLatent0 = 9 * kQChunk, kRope0 = kLatent0 + 65536, kExtra = kRope0 + 8192;
  static constexpr int kRope1 = kExtra + 1024, kLatent1 = kRope1 + 8192, kMisc = kLatent1 + 65536;
  // mbarriers, for halves of the columns where there are four: [buffer][half]
  static constexpr int kFull = kMisc, kEmpty = kMisc + 32, kQFull = kMisc + 64, kDrained = kMisc + 72, kDealt = kMisc + 80;
  static constexpr int kRescale = kMisc + 104, kItems = kMisc + 112, kReference = kItems + 3 * 96;
  static constexpr int kAlpha = kReference + kRows * 4, kStarted = kMisc + 1016, kBytes = kMisc + 1024;
  static_assert(kAlpha + kRows * 4 <= kStarted && kQChunk % 1024 == 0, "layout");

  static __device__ __forceinline__ int latents(int buffer) { return buffer ? kLatent1 : kLatent0; }
  static __device__ __forceinline__ int rope(int buffer) { return buffer ? kRope1 : kRope0; }
  static __device__ __forceinline__ int probs(int buffer) { return buffer ? kExtra : kRope0; }
};

/* Named barriers; those of a pair are one per buffer. */
enum Barrier { kOwn = 2, kProbs = 4, kExtraKiB = 6, kBehind = 8 };

/* Tiles done so far by this block: the buffer, which is also the owner, and the parity of its mbarriers. */
struct Turn {
  int count = 0;
  __device__ __forceinline__ int buffer() const { return count & 1; }
  __device__ __forceinline__ uint32_t parity() const { return (count >> 1) & 1; }
};

constexpr int kNoKey = INT32_MIN;

/* Where key k is: a pool slot, -1 - token for a draft row beside the pool, or kNoKey. One load, whatever the key. */
__device__ __forceinline__ int find_key(const Params &p, const Plan &plan, const Item &item, int k) {
  bool draft = k >= item.prefix, slots = p.page_size == 1 || draft;
  int token = item.q_begin + k - item.prefix, page = slots ? k : __umulhi(k, plan.page_reciprocal);
  if (k >= item.key_end) return kNoKey;
  if (draft && p.draft_kv) return -1 - token;
  int found = load_entry(draft ? p.draft_slots : p.kv_indices, draft ? token : int(item.page_begin) + page, p.index64);
  return slots ? found : found * p.page_size + k - page * p.page_size;
}

/* The same with pages of one slot, where it is what the load brings: nothing waits for that here. */
__device__ __forceinline__ int find_slot(const Params &p, const Item &item, int k) {
  bool draft = k >= item.prefix;
  int token = item.q_begin + k - item.prefix;
  if (k >= item.key_end) return kNoKey;
  if (draft && p.draft_kv) return -1 - token;
  return load_entry(draft ? p.draft_slots : p.kv_indices, draft ? token : int(item.page_begin) + k, p.index64);
}

template <typename T> __device__ __forceinline__ const char *row_at(const Params &p, int place) {
  if (place < 0 && place != kNoKey)
    return reinterpret_cast<const char *>(static_cast<const T *>(p.draft_kv) + (-1 - place) * p.draft_row_stride);
  return reinterpret_cast<const char *>(static_cast<const T *>(p.kv_pool) + (place == kNoKey ? 0 : place) * p.kv_row_stride);
}

/* Q rows of the item, by the consumers; rows past its end become zero. */
template <typename T, int kRows> __device__ __forceinline__ void copy_q(const Params &p, const Item &item) {
  int piece = threadIdx.x & 7, rows = item.rows;
  const char *q = reinterpret_cast<const char *>(static_cast<const T *>(p.q) + item.first_row * kRow) + piece * 16;
#pragma unroll 1
  for (int n = (threadIdx.x & (kMergers - 1)) >> 3; n < kRows; n += kMergers / 8) {  // masked: bounds the rounds for the compiler
    bool valid = n < rows;
    const char *from = q + (valid ? n : 0) * (kRow * 2);
    uint32_t to = kBase + n * 128 + ((piece ^ (n & 7)) << 4);
#pragma unroll
    for (int c = 0; c < 9; ++c) copy16(to + c * Shared<kRows>::kQChunk, from + c * 128, valid ? 16 : 0);
  }
  barrier_arrive_after_copies(kBase + Shared<kRows>::kQFull);
}

/* Where the row of a tile lies that this lane looked up; bit 0: past the end, to become zeros. */
template <typename T> __device__ __forceinline__ unsigned long long find_row(const Params &p, int place) {
  return reinterpret_cast<unsigned long long>(row_at<T>(p, place)) | (place == kNoKey);
}

/* Volatile: worked out again where it is used, rather than kept in one of the producer's few registers. */
__device__ __forceinline__ int thread_of_block() {
  int thread;
  asm volatile("mov.u32 %0, %%tid.x;" : "=r"(thread));
  return thread;
}

/* Copy 64-column chunks [kFrom, kTo) of the warp's 16 rows, 16 bytes a thread and chunk; lane l has found row l. */
template <int kRows, int kFrom, int kTo> __device__ __forceinline__ void copy_rows(unsigned long long row, int buffer) {
  using S = Shared<kRows>;
  int thread = thread_of_block(), lane = thread & 31, line = lane >> 3;
  uint32_t to = kBase + (((thread & 127) >> 5) * 16 + line) * 128 + (((lane & 7) ^ line) << 4);
#pragma unroll
  for (int i = 0; i < 4; ++i, to = (to + 512) ^ 64) {  // four rows on; the swizzle's third bit flips
    unsigned long long at = __shfl_sync(~0u, row, i * 4 + line);
    int bytes = at & 1 ? 0 : 16;
    const char *from = reinterpret_cast<const char *>((at & ~1ull) + (lane & 7) * 16);
#pragma unroll
    for (int c = kFrom; c < kTo; ++c)
      copy16(to + (c < 8 ? S::latents(buffer) + c * 8192 : S::rope(buffer)), from + c * 128, bytes);
  }
}

/* The row of a tile that a thread looks up: lanes 0 to 15 have the warp's rows. */
__device__ __forceinline__ int row_of(int thread) { return ((thread & 127) >> 5) * 16 + (thread & 15); }

/* The producer warpgroup: the tiles of one item after the other. If the block has but one (`alone`), that is known and
 * `place` is where the first tile's row lies. */
template <typename T, int kRows>
__device__ __forceinline__ void produce(const Params &p, const Plan &plan, const Item *items, bool alone, int place) {
  using S = Shared<kRows>;
  Turn turn;
#pragma unroll 1
  for (int k = 0, at = 0;; ++k, at = at == 2 ? 0 : at + 1) {
    const Item &item = items[at];
    if (!alone) barrier_wait(kBase + S::kDealt + at * 8, (k / 3) & 1);
    if (item.kind != kCompute) return;
    int key = item.key_begin, end = item.key_end;
    if (!alone || p.page_size != 1) place = find_key(p, plan, item, key + row_of(threadIdx.x));
    if (k) barrier_wait(kBase + S::kDrained, (k - 1) & 1);  // the item before has used the buffers to pass on its results
#pragma unroll 1
    for (; key < end; ++turn.count) {
      int buffer = turn.buffer();
      uint32_t empty = kBase + S::kEmpty + buffer * 16, full = kBase + S::kFull + buffer * 16;
      unsigned long long row = find_row<T>(p, place);
      key += kTile;
      place = find_key(p, plan, item, key + row_of(thread_of_block()));
      barrier_wait(empty, turn.parity() ^ 1);
      copy_rows<kRows, 0, 4>(row, buffer);
      barrier_arrive_after_copies(full);
      barrier_wait(empty + 8, turn.parity() ^ 1);
      copy_rows<kRows, 4, 9>(row, buffer);
      barrier_arrive_after_copies(full + 8);
    }
    if (alone) return;
  }
}

}  // namespace hopper
}  // namespace va
