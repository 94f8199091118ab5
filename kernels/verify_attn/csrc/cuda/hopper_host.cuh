// Host side of `hopper` and `hopper_rows`: the plan by what the host knows of a batch, what both refuse, the launch.
#pragma once
#include "hopper_meet.cuh"
#include "hopper_work.cuh"
#include "host.cuh"

namespace va {
namespace hopper {

inline int blocks_of_device() {
  int blocks = multiprocessors();
  return blocks ? blocks : 132;
}

/* At least one: a batch without rows is planned (and refused or given a workspace) as any other, and never launched. */
inline int64_t most_rows(const Params *p) {
  int64_t rows = int64_t(p->heads) * p->max_q;
  return rows > 0 ? rows : 1;
}

inline Plan plan_of(const Params *p, int rows_a_tile) {
  Plan plan;
  int units = blocks_of_device();
  plan.row_tiles = static_cast<int>(ceil_div(most_rows(p), rows_a_tile));
  plan.lanes = plan.row_tiles < units ? plan.row_tiles : units;
  plan.groups = units / plan.lanes;
  plan.unit = p->chunk ? p->chunk : kTile;
  plan.chunks = p->chunk ? static_cast<int>(ceil_div(int64_t(p->max_prefix) + p->max_q, p->chunk)) : 0;
  plan.key_parts = p->num_splits;
  plan.heads_reciprocal = static_cast<uint32_t>((uint64_t(1) << 32) / (p->heads > 0 ? p->heads : 1) + 1);
  plan.page_reciprocal = static_cast<uint32_t>((uint64_t(1) << 32) / (p->page_size > 0 ? p->page_size : 1) + 1);
  return plan;
}

/* By its bounds: whole shares need exact quotients of the number of key tiles, the flat cut products below 2^32. */
inline bool too_many_keys(const Params *p) {
  int64_t tiles = p->streams * ((int64_t(p->max_prefix) + p->max_q + kTile - 1) / kTile);
  return tiles > (p->streams <= 32 ? (1 << 21) - 1024 : 1 << 24);
}

/* What both refuse whatever their plan is, or NULL. */
inline const char *refuse_batch(const Params *p) {
  if (const char *reason = refuse_common(p)) return reason;
  if (p->dtype != VA_BFLOAT16 && p->dtype != VA_FLOAT16) return "bfloat16 or float16 only";
  if (p->latent_dim != 512 || p->rope_dim != 64)
    return refusal("written for latent 512 + rope 64, not %d + %d", p->latent_dim, p->rope_dim);
  if (p->kv_row_stride % 8 || (p->draft_kv && p->draft_row_stride % 8)) return "row strides must be multiples of 8 elements";
  if (too_many_keys(p))
    return refusal("%d streams of up to %d keys: lower max_prefix or the number of streams", p->streams, p->max_prefix);
  return nullptr;
}

/* More chunks than a merge has room for, or more row tiles than there are counters, or NULL. */
inline const char *refuse_chunks(const Params *p, const Plan &plan, int most_chunks) {
  if (plan.chunks > most_chunks) return refusal("%d chunks a stream, at most %d: use larger chunks", plan.chunks, most_chunks);
  if (plan.chunks && int64_t(p->streams) * plan.row_tiles > kCounters)
    return refusal("%d streams of %d row tiles in chunk mode, at most %d together", p->streams, plan.row_tiles, kCounters);
  return nullptr;
}

/* Launch a block a multiprocessor, or fewer; 0 or an error code. */
template <typename Layout>
inline int launch_plan(void (*kernel)(const Params, const Plan, Layout), const char *name, const Params *p, const Plan &plan, Layout layout,
                       int threads, int shared_bytes, Allowed &allowed, int more_blocks = 0) {
  if (int failed = check_workspace(p, layout.bytes(), name)) return failed;
  if (int failed = allow_shared(kernel, shared_bytes, name, allowed)) return failed;
  kernel<<<plan.groups * plan.lanes + more_blocks, threads, shared_bytes, static_cast<cudaStream_t>(p->stream)>>>(*p, plan, layout);
  return launched(name);
}

}  // namespace hopper
}  // namespace va
