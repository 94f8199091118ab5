// Tiles in the consumers of the `hopper_rows` variant: scores, tree mask, online softmax, values.
//
// Consumer g owns the tiles of buffer g. While it waits for P of the other's tile, it starts S of its own next one, part by part as they
// land. How far it comes depends on timing, the results do not: S and O are separate sums, each always added in the same order.
#pragma once
#include "hopper_rows_load.cuh"

namespace va {
namespace rows {

constexpr float kSlack = 8.f;  // log2 of the largest P

enum Barrier { kOwn = 2 };  // and kOwn + 1: the 128 threads of a consumer

/* A consumer's state of the rows that its thread sees: r0 = 16 * warp + lane / 4 and r1 = r0 + 8. */
struct Rows {
  float reference[2], sum[2];  // sum: of this thread's columns of this warpgroup's own tiles
};

/* One item in consumer kGroup. o[i]: 64-column chunk 4 * kGroup + i of O. */
template <typename T, int kGroup> struct Run {
  const Params &p;
  const Plan &plan;
  const Item &item;
  char *shared;
  uint32_t q_parity;
  float scale;  // of scores, base 2

  static constexpr int kOther = kGroup ^ 1;
  static constexpr uint32_t kLanded = kBase + Shared::kFull + kGroup * 40, kOthersProbs = kBase + Shared::kReady + kOther * 8;

  __device__ __forceinline__ static int lane() { return threadIdx.x & 31; }
  __device__ __forceinline__ static int warp() { return (threadIdx.x & 127) >> 5; }
  __device__ __forceinline__ static void arrive(uint32_t bar) {
    if (lane() == 0) barrier_arrive(bar);
  }

  __device__ __forceinline__ bool masked(int key) const { return key + kTile > min(item.key_end, item.prefix); }

  /* Start a part of S of the own tile once it has landed: s[4 * j + i] is key 8 * j + 2 * (lane % 4) + i % 2 of row r0 (i < 2) or r1. */
  template <int kPart> __device__ __forceinline__ void start_part(Turn turn, float (&s)[32]) const {
    uint64_t keys = operand(kBase + Shared::tile(kGroup)), q = operand(kBase + Shared::kQ);
    barrier_wait(kLanded + kPart * 8, turn.parity());
    fence_async_proxy();
    pin(s);
    wgmma_begin();
#pragma unroll
    for (int k = 0; k < (kPart ? 2 : 1); ++k) {
      const int c = kPart ? k * 4 + kPart - 1 : 8;
#pragma unroll
      for (int i = 0; i < 4; ++i) Scores<T>::run(s, q + c * 512 + i * 2, keys + c * 512 + i * 2, kPart + k + i > 0);
    }
    wgmma_commit();
  }

  /* Start S from part kFrom on. */
  template <int kFrom> __device__ __forceinline__ void start_scores(Turn turn, float (&s)[32]) const {
    if (kFrom <= 0) start_part<0>(turn, s);
    if (kFrom <= 1) start_part<1>(turn, s);
    if (kFrom <= 2) start_part<2>(turn, s);
    if (kFrom <= 3) start_part<3>(turn, s);
    if (kFrom <= 4) start_part<4>(turn, s);
  }

  /* S is there: the rope columns are free. */
  __device__ __forceinline__ void finish_scores(float (&s)[32]) const {
    pin(s);
    arrive(kBase + Shared::kEmpty + kGroup * 40);
  }

  /* Bit 4 * j + i: s[4 * j + i] may not be seen. */
  __device__ __forceinline__ unsigned find_hidden(int key) const {
    unsigned hidden = 0;
    bool bits = p.mask_kind == VA_MASK_BITS, full = p.mask_kind == VA_MASK_FULL, causal = p.mask_kind == VA_MASK_CAUSAL;
    int64_t pitch = bits ? p.mask_words * 4 : full ? item.prefix + item.q_len : item.q_len;
    const uint8_t *mask = static_cast<const uint8_t *>(p.mask) + (bits ? item.q_begin * pitch : item.mask_begin);
    int tokens[2];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      unsigned row = item.row_in_stream + min(16 * warp() + (lane() >> 2) + 8 * r, item.rows - 1);
      tokens[r] = p.heads == 1 ? row : __umulhi(row, plan.heads_reciprocal);
    }
#pragma unroll 2
    for (int n = 0; n < 16; ++n) {  // the thread's columns
      int at = key + (n >> 1) * 8 + (lane() & 3) * 2 + (n & 1), j = at - item.prefix, inside = min(max(j, 0), item.q_len - 1);
      const uint8_t *column = mask + (bits ? inside >> 3 : full ? item.prefix + inside : inside);
      unsigned wanted = bits ? 1u << (inside & 7) : 0xff;
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        bool seen = causal ? j <= tokens[r] : (__ldg(column + tokens[r] * pitch) & wanted) != 0;
        if (at >= item.key_end || (j >= 0 && !seen)) hidden |= 1u << ((n >> 1) * 4 + r * 2 + (n & 1));
      }
    }
    return hidden;
  }

  /* Moves the references of rows that outgrew them by more than kSlack, or that had none, given the thread's largest scores relative to
   * them. by: what to subtract from the scores; alpha: the factors for O. True if any row of the warp moved. */
  __device__ __forceinline__ bool move_references(const float (&largest)[2], Rows &rows, float (&by)[2], float (&alpha)[2]) const {
    bool moves[2];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      float most = fmaxf(largest[r], __shfl_xor_sync(~0u, largest[r], 1));
      most = fmaxf(most, __shfl_xor_sync(~0u, most, 2));
      bool unset = rows.reference[r] == -INFINITY;
      moves[r] = unset ? most > -INFINITY : most > kSlack;
      by[r] = moves[r] ? most : 0.f;
      if (moves[r]) {
        alpha[r] = unset ? 0.f : exp2_fast(-most);
        rows.reference[r] = unset ? most : rows.reference[r] + most;
        rows.sum[r] *= alpha[r];
      }
      if ((lane() & 3) == 0) {
        int at = kGroup * 64 + 16 * warp() + (lane() >> 2) + 8 * r;
        reinterpret_cast<float *>(shared + Shared::kAlpha)[at] = alpha[r];
        reinterpret_cast<float *>(shared + Shared::kReference)[at] = rows.reference[r];
      }
    }
    return __any_sync(~0u, moves[0] || moves[1]);
  }

  /* s (done) becomes P: operand A in `probs`, and for the other consumer in shared memory. The sums are kept up to date here, O is not: alpha
   * has its factors, and the result is whether any is not 1. */
  __device__ __forceinline__ bool softmax(int key, float (&s)[32], unsigned hidden, Rows &rows, float (&alpha)[2], uint32_t (&probs)[16]) const {
    if (masked(key)) {
#pragma unroll
      for (int i = 0; i < 32; ++i) s[i] = hidden >> i & 1 ? -INFINITY : s[i];
    }
    float largest[2] = {-INFINITY, -INFINITY}, offset[2];
#pragma unroll
    for (int r = 0; r < 2; ++r) offset[r] = rows.reference[r] == -INFINITY ? 0.f : -rows.reference[r], alpha[r] = 1.f;
#pragma unroll
    for (int i = 0; i < 32; ++i) {
      s[i] = fmaf(s[i], scale, offset[i >> 1 & 1]);
      largest[i >> 1 & 1] = fmaxf(largest[i >> 1 & 1], s[i]);
    }
    bool unset = rows.reference[0] == -INFINITY || rows.reference[1] == -INFINITY, moved = false;
    if (__any_sync(~0u, unset || largest[0] > kSlack || largest[1] > kSlack)) {
      float by[2];
      moved = move_references(largest, rows, by, alpha);
#pragma unroll
      for (int i = 0; i < 32; ++i) s[i] -= by[i >> 1 & 1];
    }
    if (lane() == 0) reinterpret_cast<int *>(shared + Shared::kMoved)[kGroup * 4 + warp()] = moved;
#pragma unroll
    for (int i = 0; i < 4; ++i) {  // 16 keys
#pragma unroll
      for (int k = 0; k < 4; ++k) {
        float a = exp2_fast(s[8 * i + 2 * k]), b = exp2_fast(s[8 * i + 2 * k + 1]);
        rows.sum[k & 1] += a + b;
        probs[4 * i + k] = pack2<T>(a, b);
      }
      reinterpret_cast<uint4 *>(shared + Shared::kProbs)[i * 128 + (threadIdx.x & 127)] =
          make_uint4(probs[4 * i], probs[4 * i + 1], probs[4 * i + 2], probs[4 * i + 3]);
    }
    __syncwarp();
    arrive(kBase + Shared::kReady + kGroup * 8);
    return moved;
  }

  /* The other's P, which the same thread there has left (and which this thread's next own P will overwrite). */
  __device__ __forceinline__ void take_probs(uint32_t (&probs)[16]) const {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      uint4 v = reinterpret_cast<const uint4 *>(shared + Shared::kProbs)[i * 128 + (threadIdx.x & 127)];
      probs[4 * i] = v.x, probs[4 * i + 1] = v.y, probs[4 * i + 2] = v.z, probs[4 * i + 3] = v.w;
    }
  }

  /* What the other's tile did to the references; true if it moved any of the warp's. */
  __device__ __forceinline__ bool follow(Rows &rows, float (&alpha)[2]) const {
    if (!reinterpret_cast<volatile int *>(shared + Shared::kMoved)[kOther * 4 + warp()]) return false;
    int at = kOther * 64 + 16 * warp() + (lane() >> 2);
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      alpha[r] = reinterpret_cast<volatile float *>(shared + Shared::kAlpha)[at + 8 * r];
      rows.reference[r] = reinterpret_cast<volatile float *>(shared + Shared::kReference)[at + 8 * r];
      rows.sum[r] *= alpha[r];
    }
    return true;
  }

  __device__ __forceinline__ static void rescale(const float (&alpha)[2], float (&o)[4][32]) {
#pragma unroll
    for (int i = 0; i < 4; ++i)
#pragma unroll
      for (int j = 0; j < 32; ++j) o[i][j] *= alpha[j >> 1 & 1];
  }

  /* Keeps the compiler from reusing the registers of an operand in flight. */
  __device__ __forceinline__ static void pin_probs(uint32_t (&probs)[16]) {
#pragma unroll
    for (int i = 0; i < 16; ++i) asm volatile("" : "+r"(probs[i])::"memory");
  }

  /* Start O += P V of the tile in kBuffer, chunk by chunk. */
  template <int kBuffer> __device__ __forceinline__ void start_values(uint32_t (&probs)[16], float (&o)[4][32]) const {
    uint64_t latents = operand(kBase + Shared::tile(kBuffer) + kGroup * 32768);
#pragma unroll
    for (int i = 0; i < 4; ++i) pin(o[i]);
    pin_probs(probs);
    wgmma_begin();
#pragma unroll
    for (int i = 0; i < 4; ++i) {
#pragma unroll
      for (int k = 0; k < 4; ++k) Values<T>::run(o[i], probs + 4 * k, latents + i * 512 + k * 128);  // 16 keys: 2 KiB
      wgmma_commit();
    }
  }

  /* Wait for that O, and free the tile part by part. */
  template <int kBuffer> __device__ __forceinline__ void finish_values(uint32_t (&probs)[16], float (&o)[4][32]) const {
    constexpr uint32_t empty = kBase + Shared::kEmpty + kBuffer * 40;
    wgmma_wait<3>(), arrive(empty + 8);
    wgmma_wait<2>(), arrive(empty + 16);
    wgmma_wait<1>(), arrive(empty + 24);
    wgmma_wait<0>(), arrive(empty + 32);
#pragma unroll
    for (int i = 0; i < 4; ++i) pin(o[i]);
    pin_probs(probs);
  }

  __device__ __forceinline__ void own_values(uint32_t (&probs)[16], const float (&alpha)[2], bool moved, float (&o)[4][32]) const {
    if (moved) rescale(alpha, o);
    start_values<kGroup>(probs, o);
    finish_values<kGroup>(probs, o);
  }

  /* The own tile as the first of an item. */
  __device__ __forceinline__ void own_tile(int key, Turn turn, Rows &rows, float (&o)[4][32]) const {
    float s[32], alpha[2];
    uint32_t probs[16];
    unsigned hidden = masked(key) ? find_hidden(key) : 0;
    barrier_wait(kBase + Shared::kQFull, q_parity);
    start_scores<0>(turn, s);
    wgmma_wait<0>();
    finish_scores(s);
    bool moved = softmax(key, s, hidden, rows, alpha, probs);
    own_values(probs, alpha, moved, o);
  }

  /* Has a part of the own next tile landed before P of the other's tile is there? The same answer in all four warps. */
  __device__ __forceinline__ bool lands_first(int part, Turn next, Turn turn) const {
    bool landed;
    while (!(landed = has_passed(kLanded + part * 8, next.parity())) && !has_passed(kOthersProbs, turn.parity())) {
    }
    return sync_any(kOwn + kGroup, 128, landed);
  }

  /* The other's tile, and then the own one at `key` if there is one (`more`), of whose S kBegun parts are started. Returns how many tiles. */
  template <int kBegun>
  __device__ __forceinline__ int finish_pair(int key, Turn turn, bool more, unsigned hidden, float (&s)[32], Rows &rows, float (&o)[4][32]) const {
    Turn next{turn.count + 1};
    float alpha[2];
    uint32_t others[16], probs[16];
    bool moved;
    barrier_wait(kOthersProbs, turn.parity());
    if (follow(rows, alpha)) {
      if (kBegun) {  // O may not be touched beside a wgmma in flight
        wgmma_wait<0>();
        pin(s);
      }
      rescale(alpha, o);
    }
    take_probs(others);
    start_values<kOther>(others, o);
    if constexpr (kBegun == kParts) {
      wgmma_wait<4>();
      finish_scores(s);
      moved = softmax(key, s, hidden, rows, alpha, probs);
      finish_values<kOther>(others, o);
    } else {
      finish_values<kOther>(others, o);
      if (!more) return 1;
      if (kBegun) pin(s);
      start_scores<kBegun>(next, s);
      wgmma_wait<0>();
      finish_scores(s);
      moved = softmax(key, s, hidden, rows, alpha, probs);
    }
    own_values(probs, alpha, moved, o);
    return 2;
  }

  /* Starts S of the own next tile part by part as they land, until P of the other's tile is there first; then the rest of both. */
  __device__ __forceinline__ int other_tile(int key, Turn turn, Rows &rows, float (&o)[4][32]) const {
    Turn next{turn.count + 1};
    float s[32];
    bool more = key + kTile < item.key_end;
    unsigned hidden = 0;
    if (more) {
      key += kTile;
      if (masked(key)) hidden = find_hidden(key);
      barrier_wait(kBase + Shared::kQFull, q_parity);
    }
    if (!more || !lands_first(0, next, turn)) return finish_pair<0>(key, turn, more, hidden, s, rows, o);
    start_part<0>(next, s);
    if (!lands_first(1, next, turn)) return finish_pair<1>(key, turn, true, hidden, s, rows, o);
    start_part<1>(next, s);
    if (!lands_first(2, next, turn)) return finish_pair<2>(key, turn, true, hidden, s, rows, o);
    start_part<2>(next, s);
    if (!lands_first(3, next, turn)) return finish_pair<3>(key, turn, true, hidden, s, rows, o);
    start_part<3>(next, s);
    if (!lands_first(4, next, turn)) return finish_pair<4>(key, turn, true, hidden, s, rows, o);
    start_part<4>(next, s);
    return finish_pair<5>(key, turn, true, hidden, s, rows, o);
  }

  /* All tiles of the item, then its rows' sums; o is left relative to rows.reference, rows.sum is the total of both consumers. */
  __device__ __forceinline__ void attend(Turn &turn, Rows &rows, float (&o)[4][32]) const {
    for (int key = item.key_begin, done; key < item.key_end; key += done * kTile, turn.count += done) {
      done = 1;
      if (turn.buffer() == kGroup) own_tile(key, turn, rows, o);
      else done = other_tile(key, turn, rows, o);
    }
    float *sums = reinterpret_cast<float *>(shared + Shared::kSums);
    int r0 = 16 * warp() + (lane() >> 2);
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      rows.sum[r] += __shfl_xor_sync(~0u, rows.sum[r], 1);
      rows.sum[r] += __shfl_xor_sync(~0u, rows.sum[r], 2);
      if ((lane() & 3) == 0) sums[kGroup * 64 + r0 + 8 * r] = rows.sum[r];
    }
    sync_threads(kAll, kConsumers);
#pragma unroll
    for (int r = 0; r < 2; ++r) rows.sum[r] = sums[r0 + 8 * r] + sums[64 + r0 + 8 * r];
  }
};

}  // namespace rows
}  // namespace va
