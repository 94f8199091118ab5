// hopper: bf16/fp16 tree-verify MLA attention for sm_90a (wgmma), latent 512 + rope 64.
//
// The query rows of a stream (heads * q, often 72) do not fill a 64-row matrix tile, so keys stand on wgmma's M and rows
// on its N, which may be any multiple of 8:
//   S^T[64 keys x rows]  = K[64 x 576] * Q^T          A = key tile, B = Q, both K-major in 128-byte swizzle
//   O^T[512 x rows]     += V^T[512 x 64] * P^T        A = the same key tile read M-major, B = P
// One block per multiprocessor, three warpgroups. The producer gathers key rows (any page size) with cp.async into two
// 64-key buffers. Two consumer warpgroups take turns at S and softmax (a tile each), and each accumulates half of O^T in
// registers. P overlays the rope columns of its own tile, dead once S is done, plus one KiB shared by both buffers.
//
// Softmax is online in base 2 with a lazy reference: a row's reference moves only when a score exceeds it by more than
// 8 (P stays below 256 = exact in range), so the cross-warp maximum and the rescaling of O are rare. Sums stay per thread
// until the item ends. hopper_work.cuh has the work list, hopper_merge.cuh the merge of KV splits in the same launch.
#include "hopper_merge.cuh"
#include "host.cuh"

namespace va {
namespace hopper {
namespace {

constexpr int kThreads = 384;
// Together what the launch hands out: 384 threads of 168.
constexpr int kProducerRegisters = 40, kConsumerRegisters = 232;
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
  static constexpr int kFull = kMisc, kEmpty = kMisc + 32, kProbs = kMisc + 64, kQFull = kMisc + 80, kQEmpty = kMisc + 88;
  static constexpr int kRescale = kMisc + 96, kReference = kMisc + 112, kAlpha = kReference + kRows * 4;
  static constexpr int kBytes = kMisc + 1024;
  static_assert(kAlpha + kRows * 8 <= kBytes && kQChunk % 1024 == 0, "layout");

  static __device__ __forceinline__ int latents(int buffer) { return buffer ? kLatent1 : kLatent0; }
  static __device__ __forceinline__ int rope(int buffer) { return buffer ? kRope1 : kRope0; }
  static __device__ __forceinline__ int probs(int buffer) { return buffer ? kExtra : kRope0; }
};

/* Tiles done so far by this block: the buffer, the parity of its barriers and whose turn at S it is. */
struct Turn {
  int count = 0;
  __device__ __forceinline__ int buffer() const { return count & 1; }
  __device__ __forceinline__ uint32_t parity() const { return (count >> 1) & 1; }
};

// ---- producer -----------------------------------------------------------------------------------------------------

/* The four key rows a producer thread copies from in one tile (its 16-byte column of them). */
struct Rows {
  const char *at[4];
  int bytes[4];
};

template <typename T> __device__ __forceinline__ Rows find_rows(const Params &p, const Item &item, int key) {
  Rows rows;
  int thread = threadIdx.x & 127, first = key + (thread >> 5) * 16 + ((thread & 31) >> 3);
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    int k = first + i * 4;
    bool valid = k < item.key_end;
    rows.at[i] = reinterpret_cast<const char *>(key_row<T>(p, item.s, valid ? k : item.key_begin)) + (thread & 7) * 16;
    rows.bytes[i] = valid ? 16 : 0;
  }
  return rows;
}

/* Q rows of the item; rows past its end become zero. */
template <typename T, int kRows> __device__ __forceinline__ void copy_q(const Params &p, const Item &item) {
  int thread = threadIdx.x & 127, piece = thread & 7;
  const char *q = reinterpret_cast<const char *>(static_cast<const T *>(p.q) + item.first_row * kRow) + piece * 16;
  for (int n = thread >> 3; n < kRows; n += 16) {
    bool valid = n < item.rows;
    const char *from = q + (valid ? n : 0) * (kRow * 2);
    uint32_t to = kBase + n * 128 + ((piece ^ (n & 7)) << 4);
#pragma unroll
    for (int c = 0; c < 9; ++c) copy16(to + c * Shared<kRows>::kQChunk, from + c * 128, valid ? 16 : 0);
  }
  barrier_arrive_after_copies(kBase + Shared<kRows>::kQFull);
}

template <typename T, int kRows> __device__ __forceinline__ void produce(const Params &p, const Plan &plan) {
  using S = Shared<kRows>;
  Items items(p, plan, kRows);
  Item item;
  Turn turn;
  int thread = threadIdx.x & 127, row = (thread >> 5) * 16 + ((thread & 31) >> 3), piece = thread & 7;
  for (int done = 0; items.next(item); ++done) {
    if (done == 0) copy_q<T, kRows>(p, item);
    Rows rows = find_rows<T>(p, item, item.key_begin);
    for (int key = item.key_begin; key < item.key_end; key += kTile, ++turn.count) {
      Rows current = rows;
      if (key + kTile < item.key_end) rows = find_rows<T>(p, item, key + kTile);
      int buffer = turn.buffer();
      uint32_t empty = kBase + S::kEmpty + buffer * 16, full = kBase + S::kFull + buffer * 16;
      barrier_wait(empty, turn.parity() ^ 1);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        int r = row + i * 4;
        uint32_t to = kBase + S::latents(buffer) + r * 128 + ((piece ^ (r & 7)) << 4);
#pragma unroll
        for (int c = 0; c < 4; ++c) copy16(to + c * 8192, current.at[i] + c * 128, current.bytes[i]);
      }
      barrier_arrive_after_copies(full);
      barrier_wait(empty + 8, turn.parity() ^ 1);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        int r = row + i * 4;
        uint32_t inside = r * 128 + ((piece ^ (r & 7)) << 4), to = kBase + S::latents(buffer) + inside;
#pragma unroll
        for (int c = 4; c < 8; ++c) copy16(to + c * 8192, current.at[i] + c * 128, current.bytes[i]);
        copy16(kBase + S::rope(buffer) + inside, current.at[i] + 1024, current.bytes[i]);
      }
      barrier_arrive_after_copies(full + 8);
      if (done && key == item.key_begin) {
        barrier_wait(kBase + S::kQEmpty, (done - 1) & 1);
        copy_q<T, kRows>(p, item);
      }
    }
  }
}

// ---- consumers ----------------------------------------------------------------------------------------------------

/* S^T of the tile in `buffer`: thread holds keys 16*warp + lane/4 (+8) of rows 8*j + 2*(lane%4) (+1) at s[4*j ..]. */
template <typename T, int kRows, int kGroup> __device__ __forceinline__ void scores(Turn turn, float (&s)[kRows / 2]) {
  using S = Shared<kRows>;
  constexpr int buffer = kGroup;  // a warpgroup computes S of the tiles in its own buffer
  uint64_t latents = operand(kBase + S::latents(buffer)), rope = operand(kBase + S::rope(buffer)), q = operand(kBase);
  uint32_t full = kBase + S::kFull + buffer * 16;
  barrier_wait(full, turn.parity());
  fence_async_proxy();
  pin(s);
  wgmma_begin();
#pragma unroll
  for (int i = 0; i < 16; ++i)
    Wgmma<T, 0, kRows / 2>::run(s, latents + (i / 4) * 512 + i % 4 * 2, q + (i / 4) * (S::kQChunk / 16) + i % 4 * 2, i > 0);
  wgmma_commit();
  barrier_wait(full + 8, turn.parity());
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

/* -inf where a row may not see a key of the tile at `key`. Every mask layout is a byte and a bit in it, so that the loads
 * carry no branches and overlap. */
template <int kRows>
__device__ __forceinline__ void hide(const Params &p, const Plan &plan, const Item &item, int key, float (&s)[kRows / 2]) {
  int thread = threadIdx.x & 127;
  asm volatile("" : "+r"(thread));  // keeps the compiler from holding all of this in registers across tiles
  int lane = thread & 31, first = key + (thread >> 5) * 16 + (lane >> 2);
  bool bits = p.mask_kind == VA_MASK_BITS, causal = p.mask_kind == VA_MASK_CAUSAL;
  int64_t pitch = bits ? p.mask_words * 4 : p.mask_kind == VA_MASK_QLEN ? item.s.q_len : item.s.prefix + item.s.q_len;
  const uint8_t *mask = static_cast<const uint8_t *>(p.mask) + (bits ? item.s.q_begin * pitch : item.s.mask_begin);
  int j[2] = {first - item.s.prefix, first + 8 - item.s.prefix};  // draft rows of the thread's keys, negative: prefix
  const uint8_t *column[2];
  unsigned wanted[2];
#pragma unroll
  for (int k = 0; k < 2; ++k) {
    int at = min(max(j[k], 0), item.s.q_len - 1);
    column[k] = mask + (bits ? at >> 3 : p.mask_kind == VA_MASK_QLEN ? at : item.s.prefix + at);
    wanted[k] = bits ? 1u << (at & 7) : 0xff;
  }
#pragma unroll
  for (int i = 0; i < kRows / 4; ++i) {
    int n = (i >> 1) * 8 + (lane & 3) * 2 + (i & 1), at = (i >> 1) * 4 + (i & 1);
    unsigned row = item.row_in_stream + min(n, item.rows - 1);
    int token = p.heads == 1 ? row : __umulhi(row, plan.reciprocal);
#pragma unroll
    for (int k = 0; k < 2; ++k) {
      bool seen = causal ? j[k] <= token : (__ldg(column[k] + token * pitch) & wanted[k]) != 0;
      if (first + 8 * k >= item.key_end || (j[k] >= 0 && !seen)) s[at + 2 * k] = -INFINITY;
    }
  }
}

/* Moves the reference of rows whose scores outgrew it (s is relative to it), and records by how much O must shrink. All 128
 * threads of one warpgroup; the tile's rope columns are the scratch. */
template <int kRows, int group>
__device__ __forceinline__ void move_reference(char *shared, float (&s)[kRows / 2], float (&sum)[kRows / 4]) {
  using S = Shared<kRows>;
  constexpr int buffer = group;
  int lane = threadIdx.x & 31, warp = (threadIdx.x & 127) >> 5;
  float *scratch = reinterpret_cast<float *>(shared + S::rope(buffer));
  float *reference = reinterpret_cast<float *>(shared + S::kReference);
  float *alpha = reinterpret_cast<float *>(shared + S::kAlpha) + buffer * kRows;
#pragma unroll
  for (int i = 0; i < kRows / 4; ++i) {
    int at = (i >> 1) * 4 + (i & 1);
    float max = fmaxf(s[at], s[at + 2]);
    for (int step = 4; step < 32; step <<= 1) max = fmaxf(max, __shfl_xor_sync(~0u, max, step));
    if (lane < 4) scratch[warp * kRows + (i >> 1) * 8 + lane * 2 + (i & 1)] = max;
  }
  sync_threads(2 + group, 128);
#pragma unroll
  for (int i = 0; i < kRows / 4; ++i) {
    int at = (i >> 1) * 4 + (i & 1), n = (i >> 1) * 8 + (lane & 3) * 2 + (i & 1);
    float max = fmaxf(fmaxf(scratch[n], scratch[kRows + n]), fmaxf(scratch[2 * kRows + n], scratch[3 * kRows + n]));
    float old = reference[n];
    bool unset = old == -INFINITY, moves = unset ? max > -INFINITY : max > kSlack;
    float shrink = moves ? (unset ? 0.f : exp2_fast(-max)) : 1.f;
    if (moves) s[at] -= max, s[at + 2] -= max, sum[i] *= shrink;
    __syncwarp();
    if (warp == 0 && lane < 4) {
      alpha[n] = shrink;
      scratch[4 * kRows + n] = moves ? (unset ? max : old + max) : old;
    }
  }
  sync_threads(2 + group, 128);
  int thread = threadIdx.x & 127;
  if (thread < kRows) reference[thread] = scratch[4 * kRows + thread];
  sync_threads(2 + group, 128);
}

/* Turns scores into P in shared memory. `first`: the item's first tile. */
template <typename T, int kRows, int group>
__device__ __forceinline__ void softmax(const Params &p, const Plan &plan, const Item &item, char *shared, Turn turn, int key,
                                        bool first, float (&s)[kRows / 2], float (&sum)[kRows / 4]) {
  using S = Shared<kRows>;
  int lane = threadIdx.x & 31, warp = (threadIdx.x & 127) >> 5;
  constexpr int buffer = group;
  const float2 *reference = reinterpret_cast<const float2 *>(shared + S::kReference) + (lane & 3);
  float scale = p.scale * kLog2e, most = -INFINITY;
  bool masked = key + kTile > min(item.key_end, item.s.prefix);
  if (masked) {
#pragma unroll
    for (int i = 0; i < kRows / 2; ++i) s[i] *= scale;
    scale = 1.f;
    hide<kRows>(p, plan, item, key, s);
  }
#pragma unroll
  for (int j = 0; j < kRows / 8; ++j) {
    float2 m = first ? make_float2(-INFINITY, -INFINITY) : reference[j * 4];
    if (first || masked) m = make_float2(m.x == -INFINITY ? 0.f : m.x, m.y == -INFINITY ? 0.f : m.y);
    s[4 * j] = fmaf(s[4 * j], scale, -m.x), s[4 * j + 1] = fmaf(s[4 * j + 1], scale, -m.y);
    s[4 * j + 2] = fmaf(s[4 * j + 2], scale, -m.x), s[4 * j + 3] = fmaf(s[4 * j + 3], scale, -m.y);
    most = fmaxf(most, fmaxf(fmaxf(s[4 * j], s[4 * j + 1]), fmaxf(s[4 * j + 2], s[4 * j + 3])));
  }
  if (first) {
    int thread = threadIdx.x & 127;
    if (thread < kRows) reinterpret_cast<float *>(shared + S::kReference)[thread] = -INFINITY;
  }
  bool moving = sync_any(2 + group, 128, most > kSlack || first || masked);
  if (moving) move_reference<kRows, group>(shared, s, sum);
  if ((threadIdx.x & 127) == 0) *reinterpret_cast<int *>(shared + S::kRescale + buffer * 4) = moving && !first;

  uint32_t packed[kRows / 4];
#pragma unroll
  for (int i = 0; i < kRows / 4; ++i) {
    int at = i * 2;
    float a = exp2_fast(s[at]), b = exp2_fast(s[at + 1]);
    sum[(i >> 1) * 2] += a, sum[(i >> 1) * 2 + 1] += b;
    packed[i] = pack2<T>(a, b);
  }
  // The KiB shared by both buffers is read by the tile before.
  if (turn.count) barrier_wait(kBase + S::kEmpty + (buffer ^ 1) * 16 + 8, ((turn.count - 1) >> 1) & 1);
  uint32_t to = kBase + S::probs(buffer) + (lane & 7) * 128 + (((2 * warp + ((lane >> 3) & 1)) ^ (lane & 7)) << 4);
#pragma unroll
  for (int j = 0; j + 1 < kRows / 8; j += 2)
    store_transposed4(to + (j + (lane >> 4)) * 1024, packed[2 * j], packed[2 * j + 1], packed[2 * j + 2], packed[2 * j + 3]);
  if (kRows / 8 % 2) store_transposed2(to + (kRows / 8 - 1) * 1024, packed[kRows / 4 - 2], packed[kRows / 4 - 1]);
  fence_async_proxy();
  barrier_arrive(kBase + S::kProbs + buffer * 8);
}

/* O^T += V^T P^T of the tile in `buffer`; its latents become free for the producer half by half. */
template <typename T, int kRows, int kGroup, int buffer>
__device__ __forceinline__ void values(bool last, float (&o)[4][kRows / 2]) {
  using S = Shared<kRows>;
  constexpr uint32_t empty = kBase + S::kEmpty + buffer * 16;
  uint64_t latents = operand(kBase + S::latents(buffer) + kGroup * 16384), probs = operand(kBase + S::probs(buffer));
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
  if ((threadIdx.x & 31) == 0) barrier_arrive(empty);
  wgmma_wait<0>();
  pin(o[2]), pin(o[3]);
  if ((threadIdx.x & 31) == 0 && !last) barrier_arrive(empty + 8);
}

/* Shrink O (and the sums, in the warpgroup that did not compute this tile's S) to the rows' new references. */
template <int kRows>
__device__ __forceinline__ void rescale(const char *shared, int buffer, bool own, float (&o)[4][kRows / 2],
                                        float (&sum)[kRows / 4]) {
  const float2 *alpha = reinterpret_cast<const float2 *>(shared + Shared<kRows>::kAlpha + buffer * kRows * 4);
#pragma unroll
  for (int j = 0; j < kRows / 8; ++j) {
    float2 a = alpha[j * 4 + (threadIdx.x & 3)];
#pragma unroll
    for (int i = 0; i < 4; ++i) o[i][4 * j] *= a.x, o[i][4 * j + 1] *= a.y, o[i][4 * j + 2] *= a.x, o[i][4 * j + 3] *= a.y;
    if (!own) sum[2 * j] *= a.x, sum[2 * j + 1] *= a.y;
  }
}

/* Total sums of the rows over all consumer threads, in a fixed order, and the references; frees the item's last tile. */
template <int kRows>
__device__ __forceinline__ void reduce_sums(char *shared, int buffer, float (&sum)[kRows / 4],
                                            float (&reference)[kRows / 4]) {
  using S = Shared<kRows>;
  int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  float2 *scratch = reinterpret_cast<float2 *>(shared + S::rope(buffer));
  sync_threads(1, kMergers);  // both warpgroups are done with the last P
#pragma unroll
  for (int i = 0; i < kRows / 4; ++i)
    for (int step = 4; step < 32; step <<= 1) sum[i] += __shfl_xor_sync(~0u, sum[i], step);
#pragma unroll
  for (int j = 0; j < kRows / 8; ++j) {
    if (lane < 4) scratch[warp * (kRows / 2) + j * 4 + lane] = make_float2(sum[2 * j], sum[2 * j + 1]);
    float2 m = reinterpret_cast<const float2 *>(shared + S::kReference)[j * 4 + (lane & 3)];
    reference[2 * j] = m.x, reference[2 * j + 1] = m.y;
  }
  sync_threads(1, kMergers);
#pragma unroll
  for (int j = 0; j < kRows / 8; ++j) {
    float2 total = make_float2(0.f, 0.f);
    for (int w = 0; w < 8; ++w) {
      float2 part = scratch[w * (kRows / 2) + j * 4 + (lane & 3)];
      total.x += part.x, total.y += part.y;
    }
    sum[2 * j] = total.x, sum[2 * j + 1] = total.y;
  }
  __syncwarp();
  if (lane == 0) barrier_arrive(kBase + S::kEmpty + buffer * 16 + 8);
}

/* The item's result: to the output when it is the only part, else to the workspace. */
template <typename T, int kRows>
__device__ __forceinline__ void store(const Params &p, const Item &item, float2 *states, float4 *values_out, unsigned *counters,
                                      const float (&o)[4][kRows / 2], const float (&sum)[kRows / 4],
                                      const float (&reference)[kRows / 4]) {
  int lane = threadIdx.x & 31, thread = threadIdx.x & 127, group = threadIdx.x >> 7;
  bool whole = item.parts == 1, speaks = threadIdx.x < 4;  // these four hold every row
  T *out = static_cast<T *>(p.out) + item.first_row * kLatent;
  int64_t slot = item.slot(item.part);
#pragma unroll
  for (int j = 0; j < kRows / 8; ++j) {
    int n = j * 8 + (lane & 3) * 2;
    float a = normaliser(sum[2 * j], item.s.broken), b = normaliser(sum[2 * j + 1], item.s.broken);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      float4 v = make_float4(o[i][4 * j], o[i][4 * j + 1], o[i][4 * j + 2], o[i][4 * j + 3]);
      if (whole) put(out, n, item.rows, latent_of(group * 4 + i, thread), make_float4(v.x * a, v.y * b, v.z * a, v.w * b));
      else __stcg(values_out + slot * (kRows * 128) + (j * 8 + group * 4 + i) * 128 + thread, v);
    }
    if (!speaks) continue;
    if (!whole) {
      __stcg(reinterpret_cast<float4 *>(states + slot * kRows + n),
             make_float4(reference[2 * j], sum[2 * j], reference[2 * j + 1], sum[2 * j + 1]));
    } else if (p.lse) {
      float *lse = p.lse + item.first_row;
      if (n < item.rows) lse[n] = natural_lse(reference[2 * j], sum[2 * j], item.s.broken);
      if (n + 1 < item.rows) lse[n + 1] = natural_lse(reference[2 * j + 1], sum[2 * j + 1], item.s.broken);
    }
  }
  if (whole) return;
  __threadfence();
  sync_threads(1, kMergers);
  if (threadIdx.x == 0) {
    __threadfence();
    atomicAdd(counters + 2 * item.counter, 1u);
  }
}

/* One tile: S and softmax in the warpgroup whose turn it is, then O in both. */
template <typename T, int kRows, int kGroup, int kBuffer>
__device__ __forceinline__ void tile(const Params &p, const Plan &plan, const Item &item, char *shared, Turn turn, int key, float (&o)[4][kRows / 2],
                                     float (&sum)[kRows / 4]) {
  using S = Shared<kRows>;
  bool last = key + kTile >= item.key_end;
  if (kBuffer == kGroup) {
    float s[kRows / 2];
    scores<T, kRows, kGroup>(turn, s);
    if (last && (threadIdx.x & 31) == 0) barrier_arrive(kBase + S::kQEmpty);
    softmax<T, kRows, kGroup>(p, plan, item, shared, turn, key, key == item.key_begin, s, sum);
  }
  barrier_wait(kBase + S::kProbs + kBuffer * 8, turn.parity());
  if (*reinterpret_cast<volatile int *>(shared + S::kRescale + kBuffer * 4))
    rescale<kRows>(shared, kBuffer, kBuffer == kGroup, o, sum);
  values<T, kRows, kGroup, kBuffer>(last, o);
}

template <typename T, int kRows, int kGroup>
__device__ __forceinline__ void consume(const Params &p, const Plan &plan, char *shared, Layout<kRows> layout) {
  using S = Shared<kRows>;
  unsigned *counters = static_cast<unsigned *>(p.workspace);
  float2 *states = reinterpret_cast<float2 *>(static_cast<char *>(p.workspace) + layout.kStates);
  float4 *partial = reinterpret_cast<float4 *>(static_cast<char *>(p.workspace) + layout.values());
  bool shared_rows = false;
  Turn turn;
  {
    Items items(p, plan, kRows);
    Item item;
    for (int done = 0; items.next(item); ++done) {
      float o[4][kRows / 2] = {}, sum[kRows / 4] = {};
      barrier_wait(kBase + S::kQFull, done & 1);
      fence_async_proxy();
      for (int key = item.key_begin; key < item.key_end; key += kTile, ++turn.count) {
        if (turn.buffer()) tile<T, kRows, kGroup, 1>(p, plan, item, shared, turn, key, o, sum);
        else tile<T, kRows, kGroup, 0>(p, plan, item, shared, turn, key, o, sum);
      }
      float reference[kRows / 4];
      reduce_sums<kRows>(shared, turn.buffer() ^ 1, sum, reference);
      store<T, kRows>(p, item, states, partial, counters, o, sum, reference);
      shared_rows |= item.parts > 1;
    }
  }
  if (!shared_rows) return;
  Items items(p, plan, kRows);
  Item item;
  while (items.next(item)) {
    if (item.parts == 1) continue;
    await_parts(counters, item);
    merge_slice<T, kRows>(p, item, states, partial, reinterpret_cast<float *>(shared));
    leave_parts(counters, item);
  }
}

template <typename T, int kRows>
__global__ void __launch_bounds__(kThreads, 1)
    hopper_kernel(const __grid_constant__ Params p, const __grid_constant__ Plan plan, Layout<kRows> layout) {
  using S = Shared<kRows>;
  extern __shared__ __align__(1024) char shared[];
  if (threadIdx.x == 0) {
    for (int i = 0; i < 4; ++i) barrier_init(kBase + S::kFull + i * 8, 128), barrier_init(kBase + S::kEmpty + i * 8, 8);
    barrier_init(kBase + S::kProbs, 128), barrier_init(kBase + S::kProbs + 8, 128);
    barrier_init(kBase + S::kQFull, 128), barrier_init(kBase + S::kQEmpty, 4);
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    if (shared_address(shared) != kBase) __trap();
  }
  __syncthreads();
  if (threadIdx.x >= 256) {
    give_registers<kProducerRegisters>();
    produce<T, kRows>(p, plan);
  } else if (threadIdx.x >= 128) {
    take_registers<kConsumerRegisters>();
    consume<T, kRows, 1>(p, plan, shared, layout);
  } else {
    take_registers<kConsumerRegisters>();
    consume<T, kRows, 0>(p, plan, shared, layout);
  }
}

// ---- host ---------------------------------------------------------------------------------------------------------

int rows_a_tile(const Params *p) {
  int64_t rows = int64_t(p->heads) * p->max_q;
  return rows <= 24 ? 24 : rows <= 48 ? 48 : 72;
}

Plan plan_of(const Params *p, int rows) {
  Plan plan;
  int units = multiprocessors() ? multiprocessors() : 132;
  plan.row_tiles = static_cast<int>(ceil_div(int64_t(p->heads) * p->max_q, rows));
  plan.lanes = plan.row_tiles < units ? plan.row_tiles : units;
  plan.groups = units / plan.lanes;
  plan.unit = p->chunk ? p->chunk : kTile;
  plan.least = 1;
  plan.chunks = p->chunk ? static_cast<int>(ceil_div(int64_t(p->max_prefix) + p->max_q, p->chunk)) : 0;
  plan.key_parts = p->num_splits;
  plan.reciprocal = static_cast<uint32_t>((uint64_t(1) << 32) / p->heads + 1);
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
#ifndef VA_HOPPER_ONLY72
    case 24: return launch<T, 24>(p);
    case 48: return launch<T, 48>(p);
#endif
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
#ifndef VA_HOPPER_ONLY72
  if (p->dtype == VA_FLOAT16) return va::hopper::launch_rows<__half>(p);
#endif
  return va::hopper::launch_rows<__nv_bfloat16>(p);
}
