// One tile of the `hopper` variant in its consumers: scores, tree mask, online softmax, values.
#pragma once
#include "hopper_load.cuh"

namespace va {
namespace hopper {

constexpr float kSlack = 8.f;  // log2 of the largest P

/* The same in all lanes, and the compiler knows it: what follows from it stays in uniform registers. */
__device__ __forceinline__ int uniform(int x) { return __shfl_sync(~0u, x, 0); }

/* An operand's descriptor from its low word (`low_of`), the only one that differs. One addition a wgmma on uniform registers: so
 * both warpgroups and buffers run the same instructions, half as many as with a constant for each. */
__device__ __forceinline__ uint64_t descriptor(uint32_t low) { return uint64_t(0x40000040u) << 32 | low; }
__device__ __forceinline__ uint32_t low_of(uint32_t address) { return address >> 4 | 512u << 16; }

/* S^T of the tile in buffer `group` in two parts, by columns. Thread holds keys 16*warp + lane/4 (+8) of rows 8*j + 2*(lane%4) (+1) at
 * s[4*j ..]. The first part: issued, and in flight until finish_scores or a wait for O. */
template <typename T, int kRows> __device__ __forceinline__ void begin_scores(int group, uint32_t parity, float (&s)[kRows / 2]) {
  using S = Shared<kRows>;
  constexpr int kQ = S::kQChunk / 16;
  uint32_t latents = low_of(kBase + S::latents(group)), q = low_of(kBase);
  barrier_wait(kBase + S::kFull + group * 16, parity);
  fence_async_proxy();
  forget(s);
  wgmma_begin();
#pragma unroll
  for (int i = 0; i < 16; ++i)
    Wgmma<T, 0, kRows / 2>::run(s, descriptor(latents + (i / 4) * 512 + i % 4 * 2), descriptor(q + (i / 4) * kQ + i % 4 * 2), i > 0);
  wgmma_commit();
}

template <typename T, int kRows> __device__ __forceinline__ void finish_scores(int group, uint32_t parity, float (&s)[kRows / 2]) {
  using S = Shared<kRows>;
  constexpr int kQ = S::kQChunk / 16;
  uint32_t latents = low_of(kBase + S::latents(group)), rope = low_of(kBase + S::rope(group)), q = low_of(kBase);
  barrier_wait(kBase + S::kFull + group * 16 + 8, parity);
  fence_async_proxy();
  wgmma_begin();
#pragma unroll
  for (int i = 16; i < 32; ++i)
    Wgmma<T, 0, kRows / 2>::run(s, descriptor(latents + (i / 4) * 512 + i % 4 * 2), descriptor(q + (i / 4) * kQ + i % 4 * 2), 1);
#pragma unroll
  for (int i = 0; i < 4; ++i) Wgmma<T, 0, kRows / 2>::run(s, descriptor(rope + i * 2), descriptor(q + 8 * kQ + i * 2), 1);
  wgmma_commit();
  wgmma_wait<0>();
  pin(s);
}

/* Which of the thread's scores of the tile at `key` nobody may see: bit i of hidden[k] is s[4 * (i / 2) + i % 2 + 2 * k]. Every
 * mask layout is a byte and some bits of it, so that the loads carry no branches. Looked up before S is waited for. */
template <int kRows>
__device__ __forceinline__ void find_hidden(const Params &p, const Plan &plan, const Item &item, int key, unsigned (&hidden)[2]) {
  int lane = threadIdx.x & 31, first = key + ((threadIdx.x & 127) >> 5) * 16 + (lane >> 2);
  bool bits = p.mask_kind == VA_MASK_BITS, full = p.mask_kind == VA_MASK_FULL, causal = p.mask_kind == VA_MASK_CAUSAL;
  int64_t pitch = bits ? p.mask_words * 4 : full ? item.prefix + item.q_len : item.q_len;
  const uint8_t *mask = static_cast<const uint8_t *>(p.mask) + (bits ? item.q_begin * pitch : item.mask_begin);
#pragma unroll
  for (int k = 0; k < 2; ++k) {
    int at = first + 8 * k, j = at - item.prefix, inside = min(max(j, 0), item.q_len - 1);  // j < 0: a prefix key
    const uint8_t *column = mask + (bits ? inside >> 3 : full ? item.prefix + inside : inside);
    unsigned wanted = bits ? 1u << (inside & 7) : 0xff, found = 0;
#pragma unroll 3
    for (int i = 0; i < kRows / 4; ++i) {
      unsigned row = item.row_in_stream + min((i >> 1) * 8 + (lane & 3) * 2 + (i & 1), item.rows - 1);
      int token = p.heads == 1 ? row : __umulhi(row, plan.heads_reciprocal);
      bool seen = causal ? j <= token : (__ldg(column + token * pitch) & wanted) != 0;
      if (!seen) found |= 1u << i;
    }
    hidden[k] = at >= item.key_end ? ~0u : j < 0 ? 0u : found;
  }
}

/* Moves the reference of rows whose scores outgrew it (s is relative to it), and records by how much O must shrink. All 128
 * threads of one warpgroup; the place of P is the scratch. */
template <int kRows>
__device__ __forceinline__ void move_reference(char *shared, int buffer, bool first, float (&s)[kRows / 2], float (&sum)[kRows / 4]) {
  using S = Shared<kRows>;
  int thread = threadIdx.x & 127, mine = (thread >> 2) * (kRows / 2) + (thread & 3);
  float *scratch = reinterpret_cast<float *>(shared + S::probs(buffer));
  float *reference = reinterpret_cast<float *>(shared + S::kReference), *alpha = reinterpret_cast<float *>(shared + S::kAlpha);
#pragma unroll
  for (int j = 0; j < kRows / 8; ++j)
    reinterpret_cast<float2 *>(scratch)[mine + j * 4] = make_float2(fmaxf(s[4 * j], s[4 * j + 2]), fmaxf(s[4 * j + 1], s[4 * j + 3]));
  sync_threads(kOwn + buffer, 128);
  if (thread < kRows) {
    float max = -INFINITY, old = first ? -INFINITY : reference[thread];
#pragma unroll 16
    for (int i = 0; i < 32; ++i) max = fmaxf(max, scratch[i * kRows + thread]);
    bool unset = old == -INFINITY, moves = unset ? max > -INFINITY : max > kSlack;
    reference[thread] = moves ? (unset ? max : old + max) : old;
    alpha[thread] = moves ? (unset ? 0.f : exp2_fast(-max)) : 1.f;
    scratch[thread] = moves ? max : 0.f;  // only this thread has read this column
  }
  sync_threads(kOwn + buffer, 128);
#pragma unroll
  for (int j = 0; j < kRows / 8; ++j) {
    float2 by = reinterpret_cast<const float2 *>(scratch)[(thread & 3) + j * 4];
    float2 shrink = reinterpret_cast<const float2 *>(alpha)[(thread & 3) + j * 4];
    s[4 * j] -= by.x, s[4 * j + 1] -= by.y, s[4 * j + 2] -= by.x, s[4 * j + 3] -= by.y;
    sum[2 * j] *= shrink.x, sum[2 * j + 1] *= shrink.y;
  }
  sync_threads(kOwn + buffer, 128);
}

/* Scores relative to the rows' references, where those may move: hidden ones -inf, then the references moved. */
template <int kRows>
__device__ __forceinline__ void settle_references(float scale, char *shared, int buffer, bool first, const unsigned (&hidden)[2],
                                                  float (&s)[kRows / 2], float (&sum)[kRows / 4]) {
  const float2 *reference = reinterpret_cast<const float2 *>(shared + Shared<kRows>::kReference) + (threadIdx.x & 3);
#pragma unroll
  for (int j = 0; j < kRows / 8; ++j) {
    float2 m = first ? make_float2(0.f, 0.f) : reference[j * 4];
    m = make_float2(m.x == -INFINITY ? 0.f : m.x, m.y == -INFINITY ? 0.f : m.y);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      float x = fmaf(s[4 * j + i], scale, i & 1 ? -m.y : -m.x);
      s[4 * j + i] = hidden[i >> 1] >> (2 * j + (i & 1)) & 1 ? -INFINITY : x;
    }
  }
  if (!first) sync_threads(kExtraKiB + (buffer ^ 1), kMergers);  // the tile before has used alpha
  move_reference<kRows>(shared, buffer, first, s, sum);
}

/* P from scores relative to the references, in their place: s[4*j], s[4*j + 1] become keys n and n + 8 of rows 2*j, 2*j + 1 as pairs of T, the
 * other two what they add to the rows' sums. Returns the largest score. */
template <typename T, int kRows> __device__ __forceinline__ float exponentials(float (&s)[kRows / 2]) {
  float most = -INFINITY;
#pragma unroll
  for (int j = 0; j < kRows / 8; ++j) {
    float *at = s + 4 * j, a = exp2_fast(at[0]), b = exp2_fast(at[1]), c = exp2_fast(at[2]), d = exp2_fast(at[3]);
    most = fmaxf(most, fmaxf(fmaxf(at[0], at[1]), fmaxf(at[2], at[3])));
    at[0] = __uint_as_float(pack2<T>(a, b)), at[1] = __uint_as_float(pack2<T>(c, d));
    at[2] = a + c, at[3] = b + d;
    asm volatile("" : "+f"(at[0]), "+f"(at[1]), "+f"(at[2]), "+f"(at[3]));  // here and now, in these registers: there are no others
  }
  return most;
}

/* Turns scores into P in shared memory. Unless the references are known to move (`careful`: the item's first tile, or one with keys that some
 * row may not see), P is worked out before it is known whether they do: false if so, and then nothing was done but s spent. */
template <typename T, int kRows>
__device__ __forceinline__ bool softmax(float scale, char *shared, int buffer, bool first, bool careful, const unsigned (&hidden)[2],
                                        float (&s)[kRows / 2], float (&sum)[kRows / 4]) {
  using S = Shared<kRows>;
  int lane = threadIdx.x & 31, warp = (threadIdx.x & 127) >> 5;
  if (careful) {
    settle_references<kRows>(scale, shared, buffer, first, hidden, s, sum);
  } else {
    const float2 *reference = reinterpret_cast<const float2 *>(shared + S::kReference) + (lane & 3);
#pragma unroll
    for (int j = 0; j < kRows / 8; ++j) {
      float2 m = reference[j * 4];
      s[4 * j] = fmaf(s[4 * j], scale, -m.x), s[4 * j + 1] = fmaf(s[4 * j + 1], scale, -m.y);
      s[4 * j + 2] = fmaf(s[4 * j + 2], scale, -m.x), s[4 * j + 3] = fmaf(s[4 * j + 3], scale, -m.y);
    }
  }
  float most = exponentials<T, kRows>(s);
  if (!careful) {
    if (sync_any(kOwn + buffer, 128, most > kSlack)) return false;  // all of S is done as well, so P may go over the rope columns
    sync_threads(kExtraKiB + (buffer ^ 1), kMergers);               // the KiB shared by both buffers is read by the tile before
  }
#pragma unroll
  for (int i = 0; i < kRows / 4; ++i) sum[i] += s[i / 2 * 4 + 2 + i % 2];
  if ((threadIdx.x & 127) == 0) *reinterpret_cast<int *>(shared + S::kRescale + buffer * 4) = careful && !first;
  uint32_t to = kBase + S::probs(buffer) + (lane & 7) * 128 + (((2 * warp + ((lane >> 3) & 1)) ^ (lane & 7)) << 4);
  to += (lane >> 4) * 1024;
  auto pair = [&](int i) { return __float_as_uint(s[i]); };
#pragma unroll
  for (int j = 0; j + 1 < kRows / 8; j += 2) store_transposed4(to + j * 1024, pair(4 * j), pair(4 * j + 1), pair(4 * j + 4), pair(4 * j + 5));
  if (kRows / 8 % 2) store_transposed2(to + (kRows / 8 - 1) * 1024, pair(kRows / 2 - 4), pair(kRows / 2 - 3));
  fence_async_proxy();
  sync_threads(kOwn + buffer, 128);
  arrive_threads(kProbs + buffer, kMergers);
  return true;
}

/* O^T += V^T P^T of the tile in `buffer`. The owner's stands behind the other warpgroup's: that one goes on to the next S and P, which all wait
 * for, while the owner has nothing else to do. Each alone is done in half the time that both take together. */
template <typename T, int kRows> __device__ __forceinline__ void values(int group, int buffer, bool own, float (&o)[4][kRows / 2]) {
  using S = Shared<kRows>;
  uint32_t latents = low_of(kBase + S::latents(buffer) + group * 16384), probs = low_of(kBase + S::probs(buffer));
#pragma unroll
  for (int i = 0; i < 4; ++i) pin(o[i]);
  if (own) sync_threads(kBehind + buffer, kMergers);
  wgmma_begin();
#pragma unroll
  for (int i = 0; i < 8; ++i)
    Wgmma<T, 1, kRows / 2>::run(o[i / 4], descriptor(latents + (i / 4) * 512 + i % 4 * 128), descriptor(probs + i % 4 * 2), 1);
  wgmma_commit();
#pragma unroll
  for (int i = 0; i < 8; ++i)
    Wgmma<T, 1, kRows / 2>::run(o[2 + i / 4], descriptor(latents + 2048 + (i / 4) * 512 + i % 4 * 128), descriptor(probs + i % 4 * 2), 1);
  wgmma_commit();
  if (!own) arrive_threads(kBehind + buffer, kMergers);
  wgmma_wait<1>();
  pin(o[0]), pin(o[1]);
  if ((threadIdx.x & 31) == 0) barrier_arrive(kBase + S::kEmpty + buffer * 16);
  wgmma_wait<0>();
  pin(o[2]), pin(o[3]);
  if ((threadIdx.x & 31) == 0) barrier_arrive(kBase + S::kEmpty + buffer * 16 + 8);
}

/* Shrink O (and the sums, in the warpgroup that did not compute this tile's S) to the rows' new references. */
template <int kRows>
__device__ __forceinline__ void rescale(const char *shared, bool own, float (&o)[4][kRows / 2],
                                        float (&sum)[kRows / 4]) {
  const float2 *alpha = reinterpret_cast<const float2 *>(shared + Shared<kRows>::kAlpha);
#pragma unroll
  for (int j = 0; j < kRows / 8; ++j) {
    float2 a = alpha[j * 4 + (threadIdx.x & 3)];
#pragma unroll
    for (int i = 0; i < 4; ++i) o[i][4 * j] *= a.x, o[i][4 * j + 1] *= a.y, o[i][4 * j + 2] *= a.x, o[i][4 * j + 3] *= a.y;
    if (!own) sum[2 * j] *= a.x, sum[2 * j + 1] *= a.y;
  }
}

/* One tile: S and softmax in its owner, then O in both. While the owner is at it, the other warpgroup begins S of its own next tile. */
template <typename T, int kRows>
__device__ __forceinline__ void tile(const Params &p, const Plan &plan, const Item &item, char *shared, int key, Turn turn, uint32_t q_parity,
                                     float (&s)[kRows / 2], float (&o)[4][kRows / 2], float (&sum)[kRows / 4]) {
  using S = Shared<kRows>;
  int group = uniform(threadIdx.x >> 7), buffer = uniform(turn.buffer());
  bool own = buffer == group, first = key == item.key_begin, more = key + kTile < item.key_end;
  bool masked = own && key + kTile > min(item.key_end, item.prefix);
  unsigned hidden[2] = {0, 0};
  if (masked) find_hidden<kRows>(p, plan, item, key, hidden);
  bool begins = own ? first : more, careful = first || masked;
  for (;;) {
    if (uniform(begins)) {
      if (key < item.key_begin + 2 * kTile) barrier_wait(kBase + S::kQFull, q_parity);
      begin_scores<T, kRows>(group, Turn{turn.count + !own}.parity(), s);
    }
    if (!own) {
      sync_threads(kProbs + buffer, kMergers);
      break;
    }
    finish_scores<T, kRows>(group, turn.parity(), s);
    if (uniform(softmax<T, kRows>(p.scale * kLog2e, shared, buffer, first, careful, hidden, s, sum))) break;
    begins = careful = true;  // the references move, which is rare: S again
  }
  if (*reinterpret_cast<volatile int *>(shared + S::kRescale + buffer * 4)) rescale<kRows>(shared, own, o, sum);
  values<T, kRows>(group, buffer, own, o);
  if (own && more) arrive_threads(kExtraKiB + buffer, kMergers);  // the next P may use the shared KiB
}

}  // namespace hopper
}  // namespace va
