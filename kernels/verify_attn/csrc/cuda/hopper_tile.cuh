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

/* S^T of the tile in buffer `group` by 16-column steps kFrom to kTo of 36, once the mbarrier `full` says that they are there. Issued, not waited
 * for. Thread holds keys 16*warp + lane/4 (+8) of rows 8*j + 2*(lane%4) (+1) at s[4*j ..]. */
template <typename T, int kRows, int kFrom, int kTo>
__device__ __forceinline__ void add_scores(int group, uint32_t full, uint32_t parity, float (&s)[kRows / 2]) {
  using S = Shared<kRows>;
  constexpr int kQ = S::kQChunk / 16;
  uint32_t latents = low_of(kBase + S::latents(group)), rope = low_of(kBase + S::rope(group)), q = low_of(kBase);
  barrier_wait(full, parity);
  fence_async_proxy();
  if (kFrom == 0) forget(s);
  wgmma_begin();
#pragma unroll
  for (int i = kFrom; i < kTo; ++i)
    Wgmma<T, 0, kRows / 2>::run(s, descriptor(i < 32 ? latents + (i / 4) * 512 + i % 4 * 2 : rope + i % 4 * 2),
                                descriptor(q + (i / 4) * kQ + i % 4 * 2), i > 0);
  wgmma_commit();
}

/* The same in two parts, by halves of the columns as the producer copies them. */
template <typename T, int kRows> __device__ __forceinline__ void begin_scores(int group, uint32_t parity, float (&s)[kRows / 2]) {
  add_scores<T, kRows, 0, 16>(group, kBase + Shared<kRows>::kFull + group * 16, parity, s);
}
template <typename T, int kRows> __device__ __forceinline__ void finish_scores(int group, uint32_t parity, float (&s)[kRows / 2]) {
  add_scores<T, kRows, 16, 36>(group, kBase + Shared<kRows>::kFull + group * 16 + 8, parity, s);
}

/* Which of the thread's scores of the tile at `key` nobody may see: bit i of hidden[k] is s[4 * (i / 2) + i % 2 + 2 * k]. Every
 * mask layout is a byte and some bits of it, so that the loads carry no branches. Looked up before S is waited for. */
template <int kRows>
__device__ __forceinline__ void find_hidden(const Params &p, const Plan &plan, const Item &item, int key, unsigned (&hidden)[2]) {
  int thread = thread_of_block() & 127, lane = thread & 31, first = key + (thread >> 5) * 16 + (lane >> 2);
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
  int thread = thread_of_block() & 127, mine = (thread >> 2) * (kRows / 2) + (thread & 3);
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

/* References of the thread's rows. Volatile: all at once, not each where it is used. */
template <int kRows> __device__ __forceinline__ void load_references(float2 (&m)[kRows / 8]) {
  int lane = thread_of_block() & 31;
#pragma unroll
  for (int j = 0; j < kRows / 8; ++j)
    asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];"
                 : "=f"(m[j].x), "=f"(m[j].y) : "r"(kBase + Shared<kRows>::kReference + (lane & 3) * 8 + j * 32));
}

/* Keys whose scores (done) are NaN or infinite: zeros for such elements of their latents. A warp has 16 keys of the tile to itself; a key's scores are
 * all broken or none, but for broken queries, which do no harm here. */
template <typename T, int kRows> __device__ __forceinline__ void mend_keys(char *shared, int buffer, const float (&s)[kRows / 2]) {
  unsigned keys[2] = {__ballot_sync(~0u, !is_finite(s[0])), __ballot_sync(~0u, !is_finite(s[2]))};  // four lanes a key
  if (__builtin_expect((keys[0] | keys[1]) == 0, 1)) return;
  int thread = thread_of_block();
  char *at = shared + Shared<kRows>::latents(buffer) + (thread & 96) * 64 + (thread & 31) * 4;
#pragma unroll 1
  for (int i = 0; i < 16 * 8; ++i)  // 64 latents of a key
    if ((i < 64 ? keys[0] : keys[1]) >> (i >> 3 & 7) * 4 & 15) mend_pair<T>(at + (i >> 3) * 128 + (i & 7) * 8192);
}

/* Scores relative to the rows' references m, where those may move: hidden ones -inf, then the references moved. */
template <typename T, int kRows>
__device__ __forceinline__ void settle_references(float scale, char *shared, int buffer, bool first, const unsigned (&hidden)[2],
                                                  float2 (&m)[kRows / 8], float (&s)[kRows / 2], float (&sum)[kRows / 4]) {
  mend_keys<T, kRows>(shared, buffer, s);
#pragma unroll
  for (int j = 0; j < kRows / 8; ++j) {
    m[j] = make_float2(first || m[j].x == -INFINITY ? 0.f : m[j].x, first || m[j].y == -INFINITY ? 0.f : m[j].y);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      float x = fmaf(s[4 * j + i], scale, fmaf(s[4 * j + i], 0.f, i & 1 ? -m[j].y : -m[j].x));  // NaN of an infinite score
      s[4 * j + i] = hidden[i >> 1] >> (2 * j + (i & 1)) & 1 ? -INFINITY : x;
    }
  }
  move_reference<kRows>(shared, buffer, first, s, sum);
}

/* P of 16 rows (or the last 8) from scores relative to the references, in their place: quads of pairs of T as store_transposed takes them, then
 * what they add to the rows' sums. Returns the largest score. */
template <typename T, int kCount> __device__ __forceinline__ float exponentials(float *s) {
  float most = -INFINITY, pairs[kCount / 2], add[kCount / 2];
#pragma unroll
  for (int j = 0; j < kCount; j += 4) {
    float a = exp2_fast(s[j]), b = exp2_fast(s[j + 1]), c = exp2_fast(s[j + 2]), d = exp2_fast(s[j + 3]);
    most = fmaxf(most, fmaxf(fmaxf(s[j], s[j + 1]), fmaxf(s[j + 2], s[j + 3])));
    pairs[j / 2] = __uint_as_float(pack2<T>(a, b)), pairs[j / 2 + 1] = __uint_as_float(pack2<T>(c, d));
    add[j / 2] = a + c, add[j / 2 + 1] = b + d;
  }
#pragma unroll
  for (int i = 0; i < kCount / 2; ++i) {
    s[i] = pairs[i], s[kCount / 2 + i] = add[i];
    asm volatile("" : "+f"(s[i]), "+f"(s[kCount / 2 + i]));  // here and now, in these registers: there are no others
  }
  return most;
}

/* Turns scores into P in shared memory. Unless the references are known to move (`careful`: the item's first tile, or one with keys that some
 * row may not see), P is worked out before it is known whether they do: false if so, and then nothing was done but s spent. `m`: the rows'
 * references, which the thread has loaded while S was under way. */
template <typename T, int kRows>
__device__ __forceinline__ bool softmax(float scale, char *shared, int buffer, bool first, bool careful, const unsigned (&hidden)[2],
                                        float2 (&m)[kRows / 8], float (&s)[kRows / 2], float (&sum)[kRows / 4]) {
  using S = Shared<kRows>;
  if (__builtin_expect(careful, 0)) {
    settle_references<T, kRows>(scale, shared, buffer, first, hidden, m, s, sum);
  } else {
#pragma unroll
    for (int j = 0; j < kRows / 8; ++j) {
      s[4 * j] = fmaf(s[4 * j], scale, -m[j].x), s[4 * j + 1] = fmaf(s[4 * j + 1], scale, -m[j].y);
      s[4 * j + 2] = fmaf(s[4 * j + 2], scale, -m[j].x), s[4 * j + 3] = fmaf(s[4 * j + 3], scale, -m[j].y);
    }
  }
  float most = -INFINITY;
#pragma unroll
  for (int j = 0; j + 8 <= kRows / 2; j += 8) most = fmaxf(most, exponentials<T, 8>(s + j));
  if (kRows / 8 % 2) most = fmaxf(most, exponentials<T, 4>(s + kRows / 2 - 4));
  if (!careful && sync_any(kOwn + buffer, 128, most > kSlack)) return false;  // all of S is done as well, so P may go over the rope columns
  int thread = thread_of_block() & 127, lane = thread & 31, warp = thread >> 5;
  if (thread == 0) *reinterpret_cast<int *>(shared + S::kRescale + buffer * 4) = careful && !first;
  uint32_t to = kBase + S::probs(buffer) + (lane & 7) * 128 + (((2 * warp + ((lane >> 3) & 1)) ^ (lane & 7)) << 4);
  to += (lane >> 4) * 1024;
  auto pair = [&](int i) { return __float_as_uint(s[i]); };
#pragma unroll
  for (int j = 0; j + 8 <= kRows / 2; j += 8) store_transposed4(to + j * 256, pair(j), pair(j + 1), pair(j + 2), pair(j + 3));
  if (kRows / 8 % 2) store_transposed2(to + (kRows / 8 - 1) * 1024, pair(kRows / 2 - 4), pair(kRows / 2 - 3));
  fence_async_proxy();
  sync_threads(kOwn + buffer, 128);
  arrive_threads(kProbs + buffer, kMergers);
#pragma unroll
  for (int j = 0; j < kRows / 2; j += 8)  // behind what the other warpgroup waits for
#pragma unroll
    for (int i = 0; i < 4 && j / 2 + i < kRows / 4; ++i) sum[j / 2 + i] += s[j + (j + 8 <= kRows / 2 ? 4 : 2) + i];
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

/* Where a block is in its item, in registers: the same for all threads. */
struct Stretch {
  int key, begin, end;  // first key of the tile; first key, and the one behind the last, of the item
};

/* One tile: S and softmax in its owner, then O in both. While the owner is at it, the other warpgroup begins S of its own next tile. */
template <typename T, int kRows>
__device__ __forceinline__ void tile(const Params &p, const Plan &plan, const Item &item, char *shared, int group, const Stretch &at, Turn turn,
                                     uint32_t q_parity, float (&s)[kRows / 2], float (&o)[4][kRows / 2], float (&sum)[kRows / 4]) {
  using S = Shared<kRows>;
  int buffer = uniform(turn.buffer());
  bool own = buffer == group, first = at.key == at.begin, more = at.key + kTile < at.end;
  bool masked = own && at.key + kTile > min(at.end, item.prefix);
  unsigned hidden[2] = {0, 0};
  if (__builtin_expect(masked, 0)) find_hidden<kRows>(p, plan, item, at.key, hidden);
  bool begins = own ? first : more, careful = first || masked, waits = !first;
  for (;;) {
    if (uniform(begins)) {
      if (first) barrier_wait(kBase + S::kQFull, q_parity);
      begin_scores<T, kRows>(group, Turn{turn.count + !own}.parity(), s);
    }
    if (!own) {
      sync_threads(kProbs + buffer, kMergers);
      break;
    }
    finish_scores<T, kRows>(group, turn.parity(), s);
    float2 m[kRows / 8];
    load_references<kRows>(m);
    if (waits) sync_threads(kExtraKiB + (buffer ^ 1), kMergers);  // the tile before has used alpha and the KiB shared by both buffers
    wgmma_wait<0>();
    pin(s);
    if (uniform(softmax<T, kRows>(p.scale * kLog2e, shared, buffer, first, careful, hidden, m, s, sum))) break;
    begins = careful = true, waits = false;  // the references move, which is rare: S again
  }
  if (__builtin_expect(*reinterpret_cast<volatile int *>(shared + S::kRescale + buffer * 4), 0)) rescale<kRows>(shared, own, o, sum);
  values<T, kRows>(group, buffer, own, o);
  if (own && more) arrive_threads(kExtraKiB + buffer, kMergers);  // the next P may use the shared KiB
}

}  // namespace hopper
}  // namespace va
