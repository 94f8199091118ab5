// hopper_rows: bf16/fp16 tree-verify MLA attention for sm_90a (wgmma), latent 512 + rope 64, for many query rows a stream.
//
// Many rows fill 64-row matrix tiles, and rows on wgmma's M cost less shared-memory traffic and a cheaper softmax than keys on M (variant
// hopper). Of use for very many rows (heads * q): on an H200 the faster one at 16 streams of 2112 rows and at one stream of 576; in between
// hopper is.
//   S[64 rows x 64 keys]   = Q[64 x 576] * K^T         A = Q, B = key tile, both K-major in 128-byte swizzle
//   O[64 rows x 256] each += P[64 x 64] * V            A = P in registers, B = half of the columns of the same key tile read N-major
// One block per multiprocessor: two consumer warpgroups, a producer warpgroup that gathers key rows with cp.async (any page size), Q and two
// 64-key buffers in shared memory. Consumer g owns the tiles of buffer g: S and softmax; P stays in its registers and goes through shared
// memory to the same threads of the other consumer, and each accumulates its half of O.
// Softmax is online in base 2 with a lazy reference, as in variant hopper: it moves only when a score exceeds it by more than 2^8.
//
// hopper_work.cuh has the work list and hopper_host.cuh the host side (both shared with variant hopper), hopper_rows_work.cuh what blocks do that
// the groups leave over, hopper_rows_load.cuh the layout of shared memory and the producer, hopper_rows_tile.cuh the tiles in the consumers,
// hopper_rows_merge.cuh what becomes of an item and the merge of KV splits.
#include "hopper_host.cuh"
#include "hopper_rows_merge.cuh"

namespace va {
namespace rows {
namespace {

constexpr int kThreads = kConsumers + 128;
// Together what the launch hands out: 384 threads of 168.
constexpr int kProducerRegisters = 40, kConsumerRegisters = 232;
static_assert(kProducerRegisters + 2 * kConsumerRegisters <= 3 * 168, "setmaxnreg would wait for ever");

template <typename T>
__device__ __forceinline__ void consume(const Params &p, const Plan &plan, char *shared, const Workspace &ws) {
  Item *items = reinterpret_cast<Item *>(shared + Shared::kItems);
  bool deals = threadIdx.x >= 128 && threadIdx.x < 160, speaks = (threadIdx.x & 31) == 0;
  RowsDealer dealer;
  Turns turns;
  auto deal = [&](int at) {
    dealer.deal(p, plan, &items[at]);
    __syncwarp();
    if (speaks) barrier_arrive(kBase + Shared::kDealt + at * 8);
  };
  if (deals) dealer.open(p, plan), deal(0);
  sync_threads(kAll, kConsumers);
  uint32_t q_parity = 0;
  for (int k = 0;; q_parity ^= 1) {
    const Item &item = items[k];
    k = k == 2 ? 0 : k + 1;  // three slots: some threads may still look at the item before
    if (item.kind == kEnd) break;
    if (deals) deal(k);
    if (item.kind == kMerge) {
      merge<T>(p, item, ws, reinterpret_cast<float *>(shared), reinterpret_cast<unsigned *>(shared + Shared::kStarted));
      continue;
    }
    float o[4][32] = {};
    Rows state{{-INFINITY, -INFINITY}, {0.f, 0.f}};
    Run<T>{p, plan, item, shared, q_parity, uniform(threadIdx.x >> 7), p.scale * kLog2e}.attend(turns, state, o);
    bool whole = item.parts == 1;
    if (whole) store_whole<T>(p, item, shared, state, o);
    if (speaks) barrier_arrive(kBase + Shared::kDrained);
    if (!whole) store_part(item, ws, state, o);
  }
}

__device__ __forceinline__ void init_barriers(char *shared) {
  if (shared_address(shared) != kBase) __trap();
  *reinterpret_cast<volatile unsigned *>(shared + Shared::kStarted) = clock_now();
  for (int i = 0; i < 2 * kParts; ++i)
    barrier_init(kBase + Shared::kFull + i * 8, 128), barrier_init(kBase + Shared::kEmpty + i * 8, 4);
  for (int i = 0; i < 3; ++i) barrier_init(kBase + Shared::kDealt + i * 8, 1);
  barrier_init(kBase + Shared::kQFull, 128), barrier_init(kBase + Shared::kDrained, 8);
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

template <typename T>
__global__ void __launch_bounds__(kThreads, 1)
    hopper_rows_kernel(const __grid_constant__ Params p, const __grid_constant__ Plan plan, Layout layout) {
  extern __shared__ __align__(1024) char shared[];
  if (threadIdx.x == 0) init_barriers(shared);
  __syncthreads();
  char *at = static_cast<char *>(p.workspace);
  Workspace ws{reinterpret_cast<unsigned *>(at), reinterpret_cast<float2 *>(at + layout.kStatesAt), reinterpret_cast<uint4 *>(at + layout.values())};
  if (threadIdx.x >= kConsumers) {
    give_registers<kProducerRegisters>();
    produce<T>(p, plan, reinterpret_cast<const Item *>(shared + Shared::kItems));
  } else {
    take_registers<kConsumerRegisters>();
    consume<T>(p, plan, shared, ws);
  }
}

// ---- host ---------------------------------------------------------------------------------------------------------

/* Blocks that the groups leave over and that can help them (RowsDealer). */
int helpers_of(const Plan &plan) {
  bool can = plan.groups > 1 && plan.row_tiles == plan.lanes && !plan.chunks && !plan.key_parts;
  return can ? hopper::blocks_of_device() - plan.groups * plan.lanes : 0;
}

/* With one group nothing is split, and there are no partial results. A row tile of the last stream may have two helpers' parts more. */
int64_t slots_of(const Params *p, const Plan &plan) {
  if (plan.chunks) return int64_t(p->streams) * plan.row_tiles * plan.chunks;
  return plan.groups > 1 ? int64_t(plan.groups + 2) * plan.row_tiles * 2 : 0;
}

template <typename T> int launch(const Params *p) {
  static Allowed allowed;
  Plan plan = hopper::plan_of(p, kRows);
  Layout layout{slots_of(p, plan)};
  return hopper::launch_plan(hopper_rows_kernel<T>, "hopper_rows", p, plan, layout, kThreads, Shared::kBytes, allowed, helpers_of(plan));
}

}  // namespace
}  // namespace rows
}  // namespace va

extern "C" int64_t verify_attn_hopper_rows_workspace(const verify_attn_params *p) {
  return va::rows::Layout{va::rows::slots_of(p, va::hopper::plan_of(p, va::rows::kRows))}.bytes();
}

extern "C" const char *verify_attn_hopper_rows_refuse(const verify_attn_params *p) {
  using namespace va;
  constexpr int kMost = 700;  // the states of as many parts fit in shared memory
  if (const char *reason = hopper::refuse_batch(p)) return reason;
  return hopper::refuse_chunks(p, hopper::plan_of(p, rows::kRows), kMost);
}

extern "C" int verify_attn_hopper_rows_run(const verify_attn_params *p) {
  if (const char *bad = va::bad_numbers(p)) return va::fail("hopper_rows: %s", bad);
  if (p->tokens == 0 || p->heads == 0 || p->streams == 0 || p->max_q == 0) return 0;
  if (p->dtype == VA_FLOAT16) return va::rows::launch<__half>(p);
  return va::rows::launch<__nv_bfloat16>(p);
}
