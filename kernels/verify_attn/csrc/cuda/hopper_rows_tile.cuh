// Tiles in the consumers of the `hopper_rows` variant: scores, tree mask, online softmax, values.
//
// Consumer g owns every other tile. Both run the same loop over their own tiles, half a pair apart and in a fixed order: O of the own tile
// before; the first half of S; O of the other's tile before, once its P is there; behind it without a wait the second half of S; softmax; P to
// the other. While one is in its softmax, the matrix unit has work of the other; wgmmas are a warpgroup's, hence no warp decides on its own what
// comes next. One copy of code serves both: the group is in uniform registers.
#pragma once
#include "hopper_rows_load.cuh"

namespace va {
namespace rows {

constexpr float kSlack = 8.f;  // log2 of the largest P

/* A consumer's state of the rows that its thread sees: r0 = 16 * warp + lane / 4 and r1 = r0 + 8. */
struct Rows {
  float reference[2], sum[2];  // sum: of this thread's columns of this warpgroup's own tiles
};

/* Tells the compiler that x is the same in the whole warp. */
__device__ __forceinline__ int uniform(int x) { return __shfl_sync(~0u, x, 0); }

/* One item in consumer `group`. o[i]: 64-column chunk 4 * group + i of O. */
template <typename T> struct Run {
  const Params &p;
  const Plan &plan;
  const Item &item;
  char *shared;
  uint32_t q_parity;
  int group;    // the consumer, uniform
  float scale;  // of scores, base 2

  __device__ __forceinline__ static int lane() { return threadIdx.x & 31; }
  __device__ __forceinline__ static int warp() { return (threadIdx.x & 127) >> 5; }
  __device__ __forceinline__ static void arrive(uint32_t bar) {
    if (lane() == 0) barrier_arrive(bar);
  }

  __device__ __forceinline__ bool masked(int key) const { return key + kTile > min(item.key_end, item.prefix); }

  /* Start a part of S of the own tile once it has landed: s[4 * j + i] is key 8 * j + 2 * (lane % 4) + i % 2 of row r0 (i < 2) or r1. */
  template <bool kFirst, bool kRope> __device__ __forceinline__ void start_part(int part, uint32_t parity, float (&s)[32]) const {
    uint64_t keys = operand(kBase + Shared::tile(group) + part * 16384), q = operand(kBase + Shared::kQ + part * 16384);
    barrier_wait(kBase + Shared::kFull + (group * kParts + part) * 8, parity);
    fence_async_proxy();
    pin(s);
    wgmma_begin();
#pragma unroll
    for (int c = 0; c < 2; ++c)
#pragma unroll
      for (int i = 0; i < 4; ++i) Scores<T>::run(s, q + c * 512 + i * 2, keys + c * 512 + i * 2, !kFirst || c > 0 || i > 0);
    if (kRope) {
      uint64_t rope = operand(kBase + Shared::tile(group) + 8 * 8192), of_q = operand(kBase + Shared::kQ + 8 * 8192);
#pragma unroll
      for (int i = 0; i < 4; ++i) Scores<T>::run(s, of_q + i * 2, rope + i * 2, 1);
    }
    wgmma_commit();
  }

  /* First half of S of the own tile: columns that the other consumer has freed; second half: those that this one frees. */
  __device__ __forceinline__ void start_scores(uint32_t parity, float (&s)[32]) const {
    start_part<true, false>((group ^ 1) * 2, parity, s);
    start_part<false, false>((group ^ 1) * 2 + 1, parity, s);
  }
  __device__ __forceinline__ void go_on_with_scores(uint32_t parity, float (&s)[32]) const {
    start_part<false, false>(group * 2, parity, s);
    start_part<false, true>(group * 2 + 1, parity, s);
  }
  __device__ __forceinline__ void finish_scores(float (&s)[32]) const {
    wgmma_wait<0>();
    pin(s);
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
        int at = group * 64 + 16 * warp() + (lane() >> 2) + 8 * r;
        reinterpret_cast<float *>(shared + Shared::kAlpha)[at] = alpha[r];
        reinterpret_cast<float *>(shared + Shared::kReference)[at] = rows.reference[r];
      }
    }
    return __any_sync(~0u, moves[0] || moves[1]);
  }

  /* Scores of keys with NaN or infinity: NaN where they are not finite, and zeros for such elements of the keys' latents. Every warp has scores of
   * all keys and mends them itself, once no other's S reads the tile: the same zeros. */
  __device__ __forceinline__ void mend_keys(float (&s)[32]) const {
    unsigned broken = 0;  // of the thread's 16 keys, by row r0
#pragma unroll
    for (int i = 0; i < 16; ++i)
      if (!is_finite(s[i / 2 * 4 + i % 2])) broken |= 1u << i;
    if (__builtin_expect(!sync_any(kOwn + group, 128, broken), 1)) return;
#pragma unroll
    for (int i = 0; i < 32; ++i) s[i] = nan_unless_finite(s[i]);
#pragma unroll 1
    for (int key = 0; key < kTile; ++key) {
      if (!(__shfl_sync(~0u, broken, (key & 7) >> 1) >> ((key >> 3) * 2 + (key & 1)) & 1)) continue;
#pragma unroll 1
      for (int chunk = 0; chunk < 8; ++chunk) mend_pair<T>(shared + Shared::tile(group) + chunk * 8192 + key * 128 + lane() * 4);
    }
    fence_async_proxy();
  }

  /* Makes s (done) relative to the references, which move if they must; alpha has the factors for O, and the result is whether any is not 1. */
  __device__ __forceinline__ bool refer(int key, float (&s)[32], unsigned hidden, Rows &rows, float (&alpha)[2]) const {
    if (masked(key)) {
      mend_keys(s);
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
    if (lane() == 0) reinterpret_cast<int *>(shared + Shared::kMoved)[group * 4 + warp()] = moved;
    return moved;
  }

  /* P of scores relative to the references, as operand A. */
  __device__ __forceinline__ void exponentials(const float (&s)[32], Rows &rows, uint32_t (&probs)[16]) const {
#pragma unroll
    for (int i = 0; i < 16; ++i) {
      float a = exp2_fast(s[2 * i]), b = exp2_fast(s[2 * i + 1]);
      rows.sum[i & 1] += a + b;
      probs[i] = pack2<T>(a, b);
    }
  }

  /* P to the other consumer. */
  __device__ __forceinline__ void give_probs(const uint32_t (&probs)[16]) const {
#pragma unroll
    for (int i = 0; i < 4; ++i)
      reinterpret_cast<uint4 *>(shared + Shared::kProbs)[i * 128 + (threadIdx.x & 127)] =
          make_uint4(probs[4 * i], probs[4 * i + 1], probs[4 * i + 2], probs[4 * i + 3]);
    arrive_threads(kProbs + group, kConsumers);
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
    if (!reinterpret_cast<volatile int *>(shared + Shared::kMoved)[(group ^ 1) * 4 + warp()]) return false;
    int at = (group ^ 1) * 64 + 16 * warp() + (lane() >> 2);
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

  /* Start O += P V of the tile in buffer, chunk by chunk. */
  __device__ __forceinline__ void start_values(int buffer, uint32_t (&probs)[16], float (&o)[4][32]) const {
    uint64_t latents = operand(kBase + Shared::tile(buffer) + group * 32768);
#pragma unroll
    for (int i = 0; i < 4; ++i) pin(o[i]);
    pin_probs(probs);
    wgmma_begin();
#pragma unroll
    for (int i = 0; i < 4; ++i) {
#pragma unroll
      for (int k = 0; k < 4; ++k) Values<T>::run(o[i], probs + 4 * k, latents + i * 512 + k * 128);  // 16 keys: 2 KiB
      if (i & 1) wgmma_commit();
    }
  }

  /* Wait until all but the kPending groups of wgmmas started last are done, and free a half of the columns that this consumer reads for O. */
  template <int kPending> __device__ __forceinline__ void free_part(int buffer, int half) const {
    wgmma_wait<kPending>();
    arrive(kBase + Shared::kEmpty + (buffer * kParts + group * 2 + half) * 8);
  }

  /* O is done: the compiler may use the registers again. */
  __device__ __forceinline__ static void finish_values(uint32_t (&probs)[16], float (&o)[4][32]) {
#pragma unroll
    for (int i = 0; i < 4; ++i) pin(o[i]);
    pin_probs(probs);
  }

  /* O += P V of one tile, waited for. */
  __device__ __forceinline__ void values(int buffer, uint32_t (&probs)[16], float (&o)[4][32]) const {
    start_values(buffer, probs, o);
    free_part<1>(buffer, 0);
    free_part<0>(buffer, 1);
    finish_values(probs, o);
  }

  /* O of the other's tile, which its P allows. */
  __device__ __forceinline__ void others_values(Rows &rows, float (&o)[4][32]) const {
    float alpha[2];
    uint32_t probs[16];
    sync_threads(kProbs + (group ^ 1), kConsumers);
    if (follow(rows, alpha)) rescale(alpha, o);
    take_probs(probs);
    values(group ^ 1, probs, o);
  }

  /* S of an own tile, with what comes before it in the matrix unit: O of the own tile before (kOwn), whose P is in probs, under the first half
   * of S, and O of the other's tile before (kOther) under the second half. Then its softmax; P to the other and left in probs. */
  template <bool kOwn, bool kOther>
  __device__ __forceinline__ void one_tile(int key, Turns &turns, Rows &rows, float (&o)[4][32], uint32_t (&probs)[16]) const {
    float s[32], alpha[2];
    unsigned hidden = masked(key) ? find_hidden(key) : 0;
    uint32_t parity = turns.parity(0);
    ++turns.count[0];
    if (kOwn) start_values(group, probs, o), free_part<1>(group, 0);
    start_scores(parity, s);
    if (kOwn) free_part<2>(group, 1), finish_values(probs, o);
    if (kOther) {
      sync_threads(kProbs + (group ^ 1), kConsumers);
      if (follow(rows, alpha)) rescale(alpha, o);
      take_probs(probs);
      start_values(group ^ 1, probs, o);
      free_part<1>(group ^ 1, 0);
    }
    go_on_with_scores(parity, s);
    if (kOther) free_part<2>(group ^ 1, 1);
    finish_scores(s);
    if (kOther) finish_values(probs, o);
    bool moved = refer(key, s, hidden, rows, alpha);
    exponentials(s, rows, probs), give_probs(probs);
    if (moved) rescale(alpha, o);
  }

  /* All tiles of the item, then its rows' sums; o is left relative to rows.reference, rows.sum is the total of both consumers. */
  __device__ __forceinline__ void attend(Turns &turns, Rows &rows, float (&o)[4][32]) const {
    barrier_wait(kBase + Shared::kQFull, q_parity);
    uint32_t probs[16];
    int key = item.key_begin + group * kTile;
    if (key < item.key_end) {
      if (group) one_tile<false, true>(key, turns, rows, o, probs);
      else one_tile<false, false>(key, turns, rows, o, probs);
      for (key += 2 * kTile; key < item.key_end; key += 2 * kTile) one_tile<true, true>(key, turns, rows, o, probs);
      values(group, probs, o);
    }
    if (key - kTile < item.key_end) others_values(rows, o);
    float *sums = reinterpret_cast<float *>(shared + Shared::kSums);
    int r0 = 16 * warp() + (lane() >> 2);
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      rows.sum[r] += __shfl_xor_sync(~0u, rows.sum[r], 1);
      rows.sum[r] += __shfl_xor_sync(~0u, rows.sum[r], 2);
      if ((lane() & 3) == 0) sums[group * 64 + r0 + 8 * r] = rows.sum[r];
    }
    hand_over();
#pragma unroll
    for (int r = 0; r < 2; ++r) rows.sum[r] = sums[r0 + 8 * r] + sums[64 + r0 + 8 * r];
  }
};

}  // namespace rows
}  // namespace va
