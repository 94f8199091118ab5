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
// What a tile takes is a chain through both consumers: O of the tile before, S, softmax, P handed over, O. Two things keep it short.
// A consumer begins S of its next tile, by the half of the columns that lands first, before it awaits the other's P; the wgmmas stay in flight across
// that wait. And of the two O of a tile, that of the consumer which has S and softmax of the next tile to do goes first; the owner's stands behind it.
//
// Softmax is online in base 2 with a lazy reference: a row's reference moves only when a score exceeds it by more than
// 8 (P stays below 256 = exact in range), so the cross-warp maximum and the rescaling of O are rare: P is worked out as if
// they never happened, and S computed again where they do. Sums stay per thread until the item ends.
//
// What a short prefix pays for is latency: cold loads that depend on one another (lengths, page numbers, rows) and cold code, about 6
// clocks an instruction. So a block mostly has one item, which each of its warps works out for itself from one round of loads; the producer
// has the first page numbers before the block has met for the first time, and the consumers load Q meanwhile.
//
// hopper_work.cuh has the work list, hopper_load.cuh the layout of shared memory and the producer, hopper_tile.cuh a tile in the
// consumers, hopper_store.cuh what becomes of an item, hopper_merge.cuh the merge of KV splits in the same launch, hopper_host.cuh the host side.
#include "hopper_host.cuh"
#include "hopper_store.cuh"
#include "hopper_tile.cuh"

namespace va {
namespace hopper {
namespace {

constexpr int kThreads = kMergers + 128;
// Together what the launch hands out: 384 threads of 168.
constexpr int kProducerRegisters = 24, kConsumerRegisters = 240;
static_assert(kProducerRegisters + 2 * kConsumerRegisters <= 3 * 168, "setmaxnreg would wait for ever");

template <typename T, int kRows>
__device__ __forceinline__ void consume(const Params &p, const Plan &plan, char *shared, Workspace ws, bool alone) {
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
  if (!alone) {
    if (deals) dealer.open(p, plan), deal(0);
    sync_threads(kAll, kMergers);
  }
  uint32_t q_parity = 0;
  const int group = uniform(threadIdx.x >> 7);
  for (int k = 0;; q_parity ^= 1) {
    const Item &item = items[k];
    k = k == 2 ? 0 : k + 1;  // three slots: some threads may still look at the item before
    if (item.kind == kEnd) break;
    if (deals && !alone) deal(k);
    if (item.kind == kMerge) {
      merge<T, kRows>(p, item, ws, reinterpret_cast<float *>(shared), reinterpret_cast<unsigned *>(shared + S::kStarted));
      continue;
    }
    copy_q<T, kRows>(p, item);
    float s[kRows / 2], o[4][kRows / 2] = {}, sum[kRows / 4] = {};
    Stretch at{item.key_begin, item.key_begin, item.key_end};
    for (; at.key < at.end; at.key += kTile, ++turn.count)
      tile<T, kRows>(p, plan, item, shared, group, at, turn, q_parity, s, o, sum);
    bool whole = item.parts == 1, odd = (turn.count - unsigned(item.key_end - item.key_begin + kTile - 1) / kTile) & 1;
    int exponent = whole ? 0 : exponent_of<kRows>(o);
    sum_rows<kRows>(shared, odd, exponent, sum);
    finish_rows<kRows>(p, item, ws, shared);
    if (!whole) store_part<kRows>(item, ws, exponent, o);
    hand_over();
    if (whole) store_whole<T, kRows>(p, item, shared, o);
    else if (threadIdx.x == 0) arrive_part(ws.counters + item.counter);
    if (alone) {
      if (!whole) merge<T, kRows>(p, item, ws, reinterpret_cast<float *>(shared), reinterpret_cast<unsigned *>(shared + S::kStarted));
      break;
    }
    if (speaks) barrier_arrive(kBase + S::kDrained);
  }
}

template <int kRows> __device__ __forceinline__ void init_barriers(char *shared) {
  using S = Shared<kRows>;
  if (shared_address(shared) != kBase) __trap();
  *reinterpret_cast<volatile unsigned *>(shared + S::kStarted) = clock_now();
  for (int i = 0; i < 4; ++i) barrier_init(kBase + S::kFull + i * 8, 128), barrier_init(kBase + S::kEmpty + i * 8, 8);
  for (int i = 0; i < 3; ++i) barrier_init(kBase + S::kDealt + i * 8, 1);
  barrier_init(kBase + S::kQFull, kMergers), barrier_init(kBase + S::kDrained, 8);
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

/* Every warp finds the block's item for itself: handing it on would cost as much again. */
template <typename T, int kRows>
__global__ void __launch_bounds__(kThreads, 1)
    hopper_kernel(const __grid_constant__ Params p, const __grid_constant__ Plan plan, Layout<kRows> layout) {
  using S = Shared<kRows>;
  extern __shared__ __align__(1024) char shared[];
  Item *items = reinterpret_cast<Item *>(shared + S::kItems);
  if (threadIdx.x == 0) init_barriers<kRows>(shared);
  Streams streams;
  Share share;
  int worker = quotient(blockIdx.x, plan.lanes), row_tile = blockIdx.x - worker * plan.lanes;
  streams.look(p, 0);
  bool alone = __any_sync(~0u, share_streams(p, plan, streams, worker, share));  // the same in all lanes, and the compiler knows it
  int place = kNoKey;
  if (alone) {
    Item item = only_item<kRows>(p, plan, streams, share, worker, row_tile);
    if (threadIdx.x >= kMergers && p.page_size == 1) place = find_slot(p, item, item.key_begin + row_of(threadIdx.x));
    if (threadIdx.x == 128) items[0] = item;
  }
  __syncthreads();
  if (threadIdx.x >= kMergers) {
    give_registers<kProducerRegisters>();
    produce<T, kRows>(p, plan, items, alone, place);
  } else {
    take_registers<kConsumerRegisters>();
    char *ws = static_cast<char *>(p.workspace);
    consume<T, kRows>(p, plan, shared, Workspace{reinterpret_cast<unsigned *>(ws), reinterpret_cast<float2 *>(ws + layout.kStates),
                                                reinterpret_cast<uint4 *>(ws + layout.values())}, alone);
  }
}

// ---- host ---------------------------------------------------------------------------------------------------------

int64_t units_of(const Params *p) { return p->streams * ceil_div(int64_t(p->max_prefix) + p->max_q, kTile); }

/* Rows of a row tile: few rows mean small partial results to merge, many rows fewer passes over the keys; and up to a batch of parts is gathered
 * in one go. Clocks measured; of the four sizes this rule takes the fastest measured one at each of the shapes in NOTES.md. */
int rows_a_tile(const Params *p) {
  const int sizes[4] = {24, 40, 48, 72}, tile[4] = {3000, 3400, 3700, 4400}, merge = 250, many_parts = 1500;
  int blocks = blocks_of_device(), best = 72;
  if (p->chunk) return 72;  // which rows share a tile must not depend on the batch
  int64_t rows = most_rows(p), least = INT64_MAX;
  for (int i = 3; i >= 0; --i) {
    int64_t tiles = ceil_div(rows, sizes[i]), lanes = tiles < blocks ? tiles : blocks, groups = blocks / lanes;
    int64_t cost = ceil_div(tiles, lanes) * ceil_div(units_of(p), groups) * tile[i] + (groups > 1) * merge * sizes[i];
    if (groups > kBatch * int64_t(p->streams)) cost += many_parts;
    if (cost < least) least = cost, best = sizes[i];
  }
  return best;
}

int64_t slots_of(const Params *p, const Plan &plan) {
  return plan.chunks ? int64_t(p->streams) * plan.row_tiles * plan.chunks : int64_t(plan.groups) * plan.lanes * 2;
}

template <typename T, int kRows> int launch(const Params *p) {
  Plan plan = plan_of(p, kRows);
  Layout<kRows> layout{slots_of(p, plan)};
  static Allowed allowed;
  return launch_plan(hopper_kernel<T, kRows>, "hopper", p, plan, layout, kThreads, Shared<kRows>::kBytes, allowed);
}

template <typename T> int launch_rows(const Params *p) {
  switch (rows_a_tile(p)) {
    case 24: return launch<T, 24>(p);
    case 40: return launch<T, 40>(p);
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
  switch (rows) {
    case 24: return Layout<24>{slots}.bytes();
    case 40: return Layout<40>{slots}.bytes();
    case 48: return Layout<48>{slots}.bytes();
    default: return Layout<72>{slots}.bytes();
  }
}

extern "C" const char *verify_attn_hopper_refuse(const verify_attn_params *p) {
  using namespace va::hopper;
  if (const char *reason = refuse_batch(p)) return reason;
  return refuse_chunks(p, plan_of(p, rows_a_tile(p)), kMaxParts);
}

extern "C" int verify_attn_hopper_run(const verify_attn_params *p) {
  if (const char *bad = va::bad_numbers(p)) return va::fail("hopper: %s", bad);
  if (p->tokens == 0 || p->heads == 0 || p->streams == 0 || p->max_q == 0) return 0;
  if (p->dtype == VA_FLOAT16) return va::hopper::launch_rows<__half>(p);
  return va::hopper::launch_rows<__nv_bfloat16>(p);
}

