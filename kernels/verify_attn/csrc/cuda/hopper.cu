// hopper: bf16/fp16 tree-verify MLA attention for sm_90a (wgmma), latent 512 + rope 64.
//
// The query rows of a stream (heads * q, often 72) do not fill a 64-row matrix tile, so keys stand on wgmma's M and rows
// on its N, which may be any multiple of 8:
//   S^T[64 keys x rows]  = K[64 x 576] * Q^T          A = key tile, B = Q, both K-major in 128-byte swizzle
//   O^T[512 x rows]     += V^T[512 x 64] * P^T        A = the same key tile read M-major, B = P
// One block per multiprocessor, three warpgroups, two 64-key buffers. The last warpgroup only gathers key rows with cp.async
// (any page size; it has to be its own, because the copies stall their issuer while memory is busy). Consumer g owns the
// tiles of buffer g: it computes S and the softmax, and puts P over the rope columns of the tile, dead once S is done, plus
// one KiB shared by both buffers. Both consumers then accumulate half of O^T each in registers (256 latents x rows) and
// free the tile half by half.
//
// Softmax is online in base 2 with a lazy reference: a row's reference moves only when a score exceeds it by more than
// 8 (P stays below 256 = exact in range), so the cross-warp maximum and the rescaling of O are rare. Sums stay per thread
// until the item ends. hopper_work.cuh has the work list, hopper_merge.cuh the merge of KV splits in the same launch.
#include "hopper_merge.cuh"
#include "host.cuh"

namespace va {
namespace hopper {
namespace {



constexpr int kThreads = kMergers + 128;
// Together what the launch hands out: 384 threads of 168.
constexpr int kProducerRegisters = 24, kConsumerRegisters = 240;
static_assert(kProducerRegisters + 2 * kConsumerRegisters <= 3 * 168, "setmaxnreg would wait for ever");
constexpr float kSlack = 8.f;  // log2 of the largest P
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
  static constexpr int kAlpha = kReference + kRows * 4, kBytes = kMisc + 1024;
  static_assert(kAlpha + kRows * 4 <= kBytes && kQChunk % 1024 == 0, "layout");

  static __device__ __forceinline__ int latents(int buffer) { return buffer ? kLatent1 : kLatent0; }
  static __device__ __forceinline__ int rope(int buffer) { return buffer ? kRope1 : kRope0; }
  static __device__ __forceinline__ int probs(int buffer) { return buffer ? kExtra : kRope0; }
};

/* Named barriers; those of a pair are one per buffer. */
enum Barrier { kOwn = 2, kProbs = 4, kExtraKiB = 6 };

/* Tiles done so far by this block: the buffer, which is also the owner, and the parity of its mbarriers. */
struct Turn {
  int count = 0;
  __device__ __forceinline__ int buffer() const { return count & 1; }
  __device__ __forceinline__ uint32_t parity() const { return (count >> 1) & 1; }
};

// ---- loads --------------------------------------------------------------------------------------------------------

constexpr int kNoKey = INT32_MIN;

/* Where key k is: a pool slot, -1 - token for a draft row beside the pool, or kNoKey. */
__device__ __forceinline__ int find_key(const Params &p, const Plan &plan, const Item &item, int k) {
  if (k >= item.key_end) return kNoKey;
  if (k >= item.prefix) {
    int token = item.q_begin + k - item.prefix;
    return p.draft_kv ? -1 - token : static_cast<int>(load_index(p.draft_slots, token, p.index64));
  }
  if (p.page_size == 1) return static_cast<int>(load_index(p.kv_indices, item.page_begin + k, p.index64));
  int page = __umulhi(k, plan.page_reciprocal);
  return static_cast<int>(load_index(p.kv_indices, item.page_begin + page, p.index64)) * p.page_size + k - page * p.page_size;
}

template <typename T> __device__ __forceinline__ const char *row_at(const Params &p, int place) {
  if (place < 0 && place != kNoKey)
    return reinterpret_cast<const char *>(static_cast<const T *>(p.draft_kv) + (-1 - place) * p.draft_row_stride);
  return reinterpret_cast<const char *>(static_cast<const T *>(p.kv_pool) + (place == kNoKey ? 0 : place) * p.kv_row_stride);
}

/* Q rows of the item; rows past its end become zero. */
template <typename T, int kRows> __device__ __forceinline__ void copy_q(const Params &p, const Item &item) {
  int thread = threadIdx.x & 127, piece = thread & 7, rows = item.rows;
  const char *q = reinterpret_cast<const char *>(static_cast<const T *>(p.q) + item.first_row * kRow) + piece * 16;
#pragma unroll 1
  for (int n = thread >> 3; n < kRows; n += 16) {
    bool valid = n < rows;
    const char *from = q + (valid ? n : 0) * (kRow * 2);
    uint32_t to = kBase + n * 128 + ((piece ^ (n & 7)) << 4);
#pragma unroll
    for (int c = 0; c < 9; ++c) copy16(to + c * Shared<kRows>::kQChunk, from + c * 128, valid ? 16 : 0);
  }
  barrier_arrive_after_copies(kBase + Shared<kRows>::kQFull);
}

/* Copy 64-column chunks [kFrom, kTo) of the warp's 16 rows, 16 bytes a thread and chunk. Lane l knows where row l is. */
template <typename T, int kRows, int kFrom, int kTo>
__device__ __forceinline__ void copy_chunks(const Params &p, int place, int buffer) {
  using S = Shared<kRows>;
  int lane = threadIdx.x & 31, row = lane >> 3, piece = lane & 7;
  uint32_t to = kBase + (((threadIdx.x & 127) >> 5) * 16 + row) * 128 + ((piece ^ row) << 4);
#pragma unroll 1
  for (int i = 0; i < 4; ++i, to = (to + 512) ^ 64) {  // four rows on; the swizzle's third bit flips
    int at = __shfl_sync(~0u, place, i * 4 + row), bytes = at == kNoKey ? 0 : 16;
    const char *from = row_at<T>(p, at) + piece * 16;
#pragma unroll
    for (int c = kFrom; c < kTo; ++c)
      copy16(to + (c < 8 ? S::latents(buffer) + c * 8192 : S::rope(buffer)), from + c * 128, bytes);
  }
}

/* The producer warpgroup: Q, then the tiles, of one item after the other. */
template <typename T, int kRows> __device__ __forceinline__ void produce(const Params &p, const Plan &plan, const Item *items) {
  using S = Shared<kRows>;
  int thread = threadIdx.x & 127, row = (thread >> 5) * 16 + (thread & 15);
  Turn turn;
  for (int k = 0, at = 0;; ++k, at = at == 2 ? 0 : at + 1) {
    const Item &item = items[at];
    barrier_wait(kBase + S::kDealt + at * 8, (k / 3) & 1);
    if (item.kind != kCompute) return;
    int key = item.key_begin, end = item.key_end, place = find_key(p, plan, item, key + row);
    if (k) barrier_wait(kBase + S::kDrained, (k - 1) & 1);  // the item before has used the buffers to pass on its results
    copy_q<T, kRows>(p, item);
    for (; key < end; ++turn.count) {
      int buffer = turn.buffer();
      uint32_t empty = kBase + S::kEmpty + buffer * 16, full = kBase + S::kFull + buffer * 16;
      barrier_wait(empty, turn.parity() ^ 1);
      copy_chunks<T, kRows, 0, 4>(p, place, buffer);
      barrier_arrive_after_copies(full);
      barrier_wait(empty + 8, turn.parity() ^ 1);
      copy_chunks<T, kRows, 4, 9>(p, place, buffer);
      barrier_arrive_after_copies(full + 8);
      key += kTile;
      if (key < end) place = find_key(p, plan, item, key + row);
    }
  }
}

// ---- matrix work and softmax ----------------------------------------------------------------------------------------------------

/* S^T of the tile in `buffer`: thread holds keys 16*warp + lane/4 (+8) of rows 8*j + 2*(lane%4) (+1) at s[4*j ..]. */
template <typename T, int kRows, int kGroup> __device__ __forceinline__ void scores(uint32_t parity, float (&s)[kRows / 2]) {
  using S = Shared<kRows>;
  uint64_t latents = operand(kBase + S::latents(kGroup)), rope = operand(kBase + S::rope(kGroup)), q = operand(kBase);
  barrier_wait(kBase + S::kFull + kGroup * 16, parity);
  fence_async_proxy();
  pin(s);
  wgmma_begin();
#pragma unroll
  for (int i = 0; i < 16; ++i)
    Wgmma<T, 0, kRows / 2>::run(s, latents + (i / 4) * 512 + i % 4 * 2, q + (i / 4) * (S::kQChunk / 16) + i % 4 * 2, i > 0);
  wgmma_commit();
  barrier_wait(kBase + S::kFull + kGroup * 16 + 8, parity);
  fence_async_proxy();
  wgmma_begin();
#pragma unroll
  for (int i = 16; i < 32; ++i)
    Wgmma<T, 0, kRows / 2>::run(s, latents + (i / 4) * 512 + i % 4 * 2, q + (i / 4) * (S::kQChunk / 16) + i % 4 * 2, 1);
#pragma unroll
  for (int i = 0; i < 4; ++i)
    Wgmma<T, 0, kRows / 2>::run(s, rope + i * 2, q + 8 * (S::kQChunk / 16) + i * 2, 1);
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

/* Turns scores into P in shared memory. `masked`: the tile has keys that some row may not see. */
template <typename T, int kRows>
__device__ __forceinline__ void softmax(float scale, char *shared, int buffer, bool first, bool masked, const unsigned (&hidden)[2],
                                        float (&s)[kRows / 2], float (&sum)[kRows / 4]) {
  using S = Shared<kRows>;
  int lane = threadIdx.x & 31, warp = (threadIdx.x & 127) >> 5;
  const float2 *reference = reinterpret_cast<const float2 *>(shared + S::kReference) + (lane & 3);
  float most = -INFINITY;
  if (first || masked) {
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
  } else {
#pragma unroll
    for (int j = 0; j < kRows / 8; ++j) {
      float2 m = reference[j * 4];
      s[4 * j] = fmaf(s[4 * j], scale, -m.x), s[4 * j + 1] = fmaf(s[4 * j + 1], scale, -m.y);
      s[4 * j + 2] = fmaf(s[4 * j + 2], scale, -m.x), s[4 * j + 3] = fmaf(s[4 * j + 3], scale, -m.y);
      most = fmaxf(most, fmaxf(fmaxf(s[4 * j], s[4 * j + 1]), fmaxf(s[4 * j + 2], s[4 * j + 3])));
    }
  }
  bool moving = first || masked || sync_any(kOwn + buffer, 128, most > kSlack);
  // The KiB shared by both buffers (and alpha) is read by the tile before.
  if (!first) sync_threads(kExtraKiB + (buffer ^ 1), kMergers);
  if (moving) move_reference<kRows>(shared, buffer, first, s, sum);
  if ((threadIdx.x & 127) == 0) *reinterpret_cast<int *>(shared + S::kRescale + buffer * 4) = moving && !first;

  uint32_t to = kBase + S::probs(buffer) + (lane & 7) * 128 + (((2 * warp + ((lane >> 3) & 1)) ^ (lane & 7)) << 4);
  to += (lane >> 4) * 1024;
  uint32_t packed[4];
#pragma unroll
  for (int i = 0; i < kRows / 4; ++i) {
    float a = exp2_fast(s[i * 2]), b = exp2_fast(s[i * 2 + 1]);
    sum[(i >> 1) * 2] += a, sum[(i >> 1) * 2 + 1] += b;
    packed[i & 3] = pack2<T>(a, b);
    if (i % 4 == 3) store_transposed4(to + (i / 4) * 2048, packed[0], packed[1], packed[2], packed[3]);
  }
  if (kRows / 8 % 2) store_transposed2(to + (kRows / 8 - 1) * 1024, packed[0], packed[1]);
  fence_async_proxy();
  sync_threads(kOwn + buffer, 128);
  arrive_threads(kProbs + buffer, kMergers);
}

/* O^T += V^T P^T of the tile in `buffer`. */
template <typename T, int kRows, int kGroup, int kBuffer> __device__ __forceinline__ void values(float (&o)[4][kRows / 2]) {
  using S = Shared<kRows>;
  uint64_t latents = operand(kBase + S::latents(kBuffer) + kGroup * 16384), probs = operand(kBase + S::probs(kBuffer));
#pragma unroll
  for (int i = 0; i < 4; ++i) pin(o[i]);
  wgmma_begin();
#pragma unroll
  for (int i = 0; i < 8; ++i) Wgmma<T, 1, kRows / 2>::run(o[i / 4], latents + (i / 4) * 512 + i % 4 * 128, probs + i % 4 * 2, 1);
  wgmma_commit();
#pragma unroll
  for (int i = 0; i < 8; ++i)
    Wgmma<T, 1, kRows / 2>::run(o[2 + i / 4], latents + 2048 + (i / 4) * 512 + i % 4 * 128, probs + i % 4 * 2, 1);
  wgmma_commit();
  wgmma_wait<1>();
  pin(o[0]), pin(o[1]);
  if ((threadIdx.x & 31) == 0) barrier_arrive(kBase + S::kEmpty + kBuffer * 16);
  wgmma_wait<0>();
  pin(o[2]), pin(o[3]);
  if ((threadIdx.x & 31) == 0) barrier_arrive(kBase + S::kEmpty + kBuffer * 16 + 8);
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

/* Total sums of the rows over all threads, in a fixed order; writes the softmax states (or lse). Afterwards alpha holds the
 * factors that normalise O, and everything but those is free shared memory. */
template <int kRows>
__device__ __forceinline__ void finish_rows(const Params &p, const Item &item, const Workspace &ws, char *shared,
                                            const float (&sum)[kRows / 4]) {
  using S = Shared<kRows>;
  int n = threadIdx.x, mine = (n >> 2) * (kRows / 2) + (n & 3);
  float *scratch = reinterpret_cast<float *>(shared + S::kLatent0);
  sync_threads(kAll, kMergers);  // both warpgroups are done with the last tile
#pragma unroll
  for (int j = 0; j < kRows / 8; ++j) reinterpret_cast<float2 *>(scratch)[mine + j * 4] = make_float2(sum[2 * j], sum[2 * j + 1]);
  sync_threads(kAll, kMergers);
  if (n < kRows) {
    float total = 0.f, max = reinterpret_cast<const float *>(shared + S::kReference)[n];
#pragma unroll 16
    for (int i = 0; i < 64; ++i) total += scratch[i * kRows + n];
    if (item.parts > 1) __stcg(ws.states + item.slot(item.part) * (kRows + 4) + n, make_float2(max, total));
    else if (p.lse && n < item.rows) p.lse[item.first_row + n] = natural_lse(max, total, item.broken);
    reinterpret_cast<float *>(shared + S::kAlpha)[n] = normaliser(total, item.broken);
  }
  sync_threads(kAll, kMergers);
}

/* The item's O to the workspace, as the registers have it but in halves; counts the part in. */
template <int kRows>
__device__ __forceinline__ void store_part(const Item &item, const Workspace &ws, float (&o)[4][kRows / 2]) {
  int group = threadIdx.x >> 7;
  float largest = 0.f;
#pragma unroll
  for (int i = 0; i < 4; ++i)
#pragma unroll
    for (int j = 0; j < kRows / 2; ++j) largest = fmaxf(largest, fabsf(o[i][j]));
  float2 scale = half_scale(__reduce_max_sync(~0u, __float_as_uint(largest)));
  int64_t slot = item.slot(item.part);
  if ((threadIdx.x & 31) == 0)
    __stcg(reinterpret_cast<float *>(ws.states + slot * (kRows + 4) + kRows) + (threadIdx.x >> 5), scale.y);
  uint4 *to = ws.values + slot * (kRows * 64) + group * 256 + (threadIdx.x & 127);
#pragma unroll
  for (int j = 0; j < kRows / 8; ++j)
#pragma unroll
    for (int i = 0; i < 4; i += 2) {
      uint32_t h[4];
#pragma unroll
      for (int k = 0; k < 4; ++k)
        h[k] = pack2<__half>(o[i + k / 2][4 * j + k % 2 * 2] * scale.x, o[i + k / 2][4 * j + k % 2 * 2 + 1] * scale.x);
      __stcg(to + j * 512 + i * 64, make_uint4(h[0], h[1], h[2], h[3]));
    }
  sync_threads(kAll, kMergers);
  if (threadIdx.x == 0)  // release: with the barrier before it, covers every thread's stores
    asm volatile("red.release.gpu.global.add.u32 [%0], 1;" ::"l"(ws.counters + 2 * item.counter) : "memory");
}

/* The item's O, normalised, to the output by way of buffer 1 (rows of 1024 bytes, 16-byte pieces swizzled). */
template <typename T, int kRows>
__device__ __forceinline__ void store_whole(const Params &p, const Item &item, char *shared, float (&o)[4][kRows / 2]) {
  using S = Shared<kRows>;
  int lane = threadIdx.x & 31, warp = (threadIdx.x & 127) >> 5, group = threadIdx.x >> 7;
  uint32_t to = kBase + S::kRope1 + ((lane >> 4) * 8 + (lane & 7)) * 1024 + (((2 * warp + ((lane >> 3) & 1)) ^ (lane & 7)) << 4);
  const float2 *factors = reinterpret_cast<const float2 *>(shared + S::kAlpha) + (lane & 3);
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    uint32_t packed[4];
#pragma unroll
    for (int j = 0; j < kRows / 8; ++j) {
      float2 by = factors[j * 4];
      packed[j % 2 * 2] = pack2<T>(o[i][4 * j] * by.x, o[i][4 * j + 1] * by.y);
      packed[j % 2 * 2 + 1] = pack2<T>(o[i][4 * j + 2] * by.x, o[i][4 * j + 3] * by.y);
      uint32_t at = to + ((i >> 1) * 4 + group * 2 + (i & 1)) * 128 + (j & ~1) * 8192;
      if (j % 2) store_transposed4(at, packed[0], packed[1], packed[2], packed[3]);
      else if (j == kRows / 8 - 1) store_transposed2(at, packed[0], packed[1]);
    }
  }
  sync_threads(kAll, kMergers);
  const char *from = shared + S::kRope1;
  uint4 *out = reinterpret_cast<uint4 *>(static_cast<T *>(p.out) + item.first_row * kLatent);
#pragma unroll 4
  for (int i = threadIdx.x; i < item.rows * 64; i += kMergers)
    out[i] = *reinterpret_cast<const uint4 *>(from + (i >> 6) * 1024 + (((i & 63) ^ ((i >> 6) & 7)) << 4));
  sync_threads(kAll, kMergers);
}

/* One tile: S and softmax in its owner, then O in both. */
template <typename T, int kRows>
__device__ __forceinline__ void tile(const Params &p, const Plan &plan, const Item &item, char *shared, int key, Turn turn,
                                     uint32_t q_parity, float (&o)[4][kRows / 2], float (&sum)[kRows / 4]) {
  using S = Shared<kRows>;
  int group = threadIdx.x >> 7, buffer = turn.buffer();
  bool own = buffer == group;
  if (own) {
    float s[kRows / 2];
    bool first = key == item.key_begin, masked = key + kTile > min(item.key_end, item.prefix);
    unsigned hidden[2] = {0, 0};
    if (masked) find_hidden<kRows>(p, plan, item, key, hidden);
    if (key < item.key_begin + 2 * kTile) barrier_wait(kBase + S::kQFull, q_parity);
    if (group) scores<T, kRows, 1>(turn.parity(), s);
    else scores<T, kRows, 0>(turn.parity(), s);
    softmax<T, kRows>(p.scale * kLog2e, shared, buffer, first, masked, hidden, s, sum);
  } else {
    sync_threads(kProbs + buffer, kMergers);
  }
  if (*reinterpret_cast<volatile int *>(shared + S::kRescale + buffer * 4)) rescale<kRows>(shared, own, o, sum);
  if (group == 0 && !buffer) values<T, kRows, 0, 0>(o);
  else if (group == 0) values<T, kRows, 0, 1>(o);
  else if (!buffer) values<T, kRows, 1, 0>(o);
  else values<T, kRows, 1, 1>(o);
  if (own && key + kTile < item.key_end) arrive_threads(kExtraKiB + buffer, kMergers);  // the next P may use the shared KiB
}

template <typename T, int kRows>
__device__ __forceinline__ void consume(const Params &p, const Plan &plan, char *shared, Workspace ws) {
  using S = Shared<kRows>;
  Item *items = reinterpret_cast<Item *>(shared + S::kItems);
  bool deals = threadIdx.x >= 128 && threadIdx.x < 160, speaks = (threadIdx.x & 31) == 0;
  Dealer<kRows> dealer;
  Turn turn;
  auto deal = [&](int at) {
    dealer.deal(p, plan, &items[at]);
    __syncwarp();
    if (speaks) barrier_arrive(kBase + S::kDealt + at * 8);
  };
  if (deals) dealer.open(p, plan), deal(0);
  sync_threads(kAll, kMergers);
  uint32_t q_parity = 0;
  for (int k = 0;; q_parity ^= 1) {
    const Item &item = items[k];
    k = k == 2 ? 0 : k + 1;  // three slots: some threads may still look at the item before
    if (item.kind == kEnd) break;
    if (deals) deal(k);
    if (item.kind == kMerge) {
      merge<T, kRows>(p, item, ws, reinterpret_cast<float *>(shared));
      continue;
    }
    float o[4][kRows / 2] = {}, sum[kRows / 4] = {};
    for (int key = item.key_begin; key < item.key_end; key += kTile, ++turn.count)
      tile<T, kRows>(p, plan, item, shared, key, turn, q_parity, o, sum);
    finish_rows<kRows>(p, item, ws, shared, sum);
    bool whole = item.parts == 1;
    if (whole) store_whole<T, kRows>(p, item, shared, o);
    if (speaks) barrier_arrive(kBase + S::kDrained);
    if (!whole) store_part<kRows>(item, ws, o);
  }
}

template <typename T, int kRows>
__global__ void __launch_bounds__(kThreads, 1)
    hopper_kernel(const __grid_constant__ Params p, const __grid_constant__ Plan plan, Layout<kRows> layout) {
  using S = Shared<kRows>;
  extern __shared__ __align__(1024) char shared[];
  if (threadIdx.x == 0) {
    if (shared_address(shared) != kBase) __trap();
    for (int i = 0; i < 4; ++i) barrier_init(kBase + S::kFull + i * 8, 128), barrier_init(kBase + S::kEmpty + i * 8, 8);
    for (int i = 0; i < 3; ++i) barrier_init(kBase + S::kDealt + i * 8, 1);
    barrier_init(kBase + S::kQFull, 128), barrier_init(kBase + S::kDrained, 8);
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  }
  __syncthreads();
  if (threadIdx.x >= kMergers) {
    give_registers<kProducerRegisters>();
    return produce<T, kRows>(p, plan, reinterpret_cast<const Item *>(shared + S::kItems));
  }
  take_registers<kConsumerRegisters>();
  char *ws = static_cast<char *>(p.workspace);
  consume<T, kRows>(p, plan, shared, Workspace{reinterpret_cast<unsigned *>(ws), reinterpret_cast<float2 *>(ws + layout.kStates),
                                              reinterpret_cast<uint4 *>(ws + layout.values())});
}

// ---- host ---------------------------------------------------------------------------------------------------------

int64_t units_of(const Params *p) { return p->streams * ceil_div(int64_t(p->max_prefix) + p->max_q, kTile); }

/* Rows of a row tile: few rows mean small partial results to merge, many rows fewer passes over the keys. Clocks measured. */
int rows_a_tile(const Params *p) {
  const int sizes[3] = {24, 48, 72}, tile[3] = {3000, 3700, 4400}, merge = 250;
  int blocks = multiprocessors() ? multiprocessors() : 132, best = 72;
  if (p->chunk) return 72;  // which rows share a tile must not depend on the batch
  int64_t rows = int64_t(p->heads) * p->max_q, least = INT64_MAX;
  for (int i = 2; i >= 0; --i) {
    int64_t tiles = ceil_div(rows, sizes[i]), lanes = tiles < blocks ? tiles : blocks, groups = blocks / lanes;
    int64_t cost = ceil_div(tiles, lanes) * ceil_div(units_of(p), groups) * tile[i] + (groups > 1) * merge * sizes[i];
    if (cost < least) least = cost, best = sizes[i];
  }
  return best;
}

Plan plan_of(const Params *p, int rows) {
  Plan plan;
  int units = multiprocessors() ? multiprocessors() : 132;
  plan.row_tiles = static_cast<int>(ceil_div(int64_t(p->heads) * p->max_q, rows));
  plan.lanes = plan.row_tiles < units ? plan.row_tiles : units;
  plan.groups = units / plan.lanes;
  plan.unit = p->chunk ? p->chunk : kTile;
  plan.chunks = p->chunk ? static_cast<int>(ceil_div(int64_t(p->max_prefix) + p->max_q, p->chunk)) : 0;
  plan.key_parts = p->num_splits;
  plan.heads_reciprocal = static_cast<uint32_t>((uint64_t(1) << 32) / p->heads + 1);
  plan.page_reciprocal = static_cast<uint32_t>((uint64_t(1) << 32) / p->page_size + 1);
  return plan;
}

int64_t slots_of(const Params *p, const Plan &plan) {
  return plan.chunks ? int64_t(p->streams) * plan.row_tiles * plan.chunks : int64_t(plan.groups) * plan.lanes * 2;
}

template <typename T, int kRows> int launch(const Params *p) {
  Plan plan = plan_of(p, kRows);
  Layout<kRows> layout{slots_of(p, plan)};
  if (!p->workspace || p->workspace_bytes < layout.bytes())
    return fail("hopper: workspace of %lld bytes, needs %lld", (long long)p->workspace_bytes, (long long)layout.bytes());
  auto kernel = hopper_kernel<T, kRows>;
  if (int failed = allow_shared(kernel, Shared<kRows>::kBytes, "hopper")) return failed;
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(plan.groups * plan.lanes), config.blockDim = dim3(kThreads);
  config.dynamicSmemBytes = Shared<kRows>::kBytes, config.stream = static_cast<cudaStream_t>(p->stream);
  cudaLaunchAttribute cooperative = {};
  cooperative.id = cudaLaunchAttributeCooperative, cooperative.val.cooperative = 1;
  config.attrs = &cooperative, config.numAttrs = 1;
  cudaError_t status = cudaLaunchKernelEx(&config, kernel, *p, plan, layout);
  return status == cudaSuccess ? 0 : fail("hopper: %s", cudaGetErrorString(status));
}

template <typename T> int launch_rows(const Params *p) {
  switch (rows_a_tile(p)) {
    case 24: return launch<T, 24>(p);
    case 48: return launch<T, 48>(p);
    default: return launch<T, 72>(p);
  }
}

}  // namespace
}  // namespace hopper
}  // namespace va

extern "C" int64_t verify_attn_hopper_workspace(const verify_attn_params *p) {
  using namespace va::hopper;
  int rows = rows_a_tile(p);
  int64_t slots = slots_of(p, plan_of(p, rows));
  return rows == 24 ? Layout<24>{slots}.bytes() : rows == 48 ? Layout<48>{slots}.bytes() : Layout<72>{slots}.bytes();
}

extern "C" const char *verify_attn_hopper_refuse(const verify_attn_params *p) {
  using namespace va;
  using namespace va::hopper;
  if (const char *reason = refuse_common(p)) return reason;
  if (p->dtype != VA_BFLOAT16 && p->dtype != VA_FLOAT16) return "bfloat16 or float16 only";
  if (p->latent_dim != 512 || p->rope_dim != 64)
    return refusal("written for latent 512 + rope 64, not %d + %d", p->latent_dim, p->rope_dim);
  if (p->kv_row_stride % 8 || (p->draft_kv && p->draft_row_stride % 8)) return "row strides must be multiples of 8 elements";
  if (reinterpret_cast<uintptr_t>(p->kv_pool) % 16 || reinterpret_cast<uintptr_t>(p->q) % 16 ||
      reinterpret_cast<uintptr_t>(p->draft_kv) % 16)
    return "q, kv_pool and draft_kv must be aligned to 16 bytes";
  Plan plan = plan_of(p, rows_a_tile(p));
  if (plan.chunks > kMaxParts) return refusal("%d chunks a stream, at most %d: use larger chunks", plan.chunks, kMaxParts);
  if (plan.chunks && int64_t(p->streams) * plan.row_tiles > kCounters)
    return refusal("%d streams of %d row tiles in chunk mode, at most %d together", p->streams, plan.row_tiles, kCounters);
  return nullptr;
}

extern "C" int verify_attn_hopper_run(const verify_attn_params *p) {
  if (p->tokens == 0 || p->heads == 0 || p->streams == 0 || p->max_q == 0) return 0;
  if (p->dtype == VA_FLOAT16) return va::hopper::launch_rows<__half>(p);
  return va::hopper::launch_rows<__nv_bfloat16>(p);
}

