// The C ABI of the CPU variant: picks the instruction set, cuts the work into tasks and splits, runs them on the pool.
//
// A task is a group of query rows of one stream, at most kGroupRows, so that its Q and its accumulator stay near the
// caches; its keys are cut into splits. Either every split is an item of its own whose partial result is stored and
// folded in order afterwards (few tasks, many threads), or one thread takes the splits in order and folds as it goes
// (enough tasks). Both run the same arithmetic in the same order, so in the batch-invariant mode (chunk > 0, where splits
// begin at multiples of chunk) the choice between them, which depends on batch and threads, cannot show in the bits.
#include "../verify_attn.h"
#include "pool.h"
#include "task.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <algorithm>
#include <chrono>
#include <new>
#include <string>
#include <vector>

using namespace verify_attn;

namespace {

thread_local std::string last_error;

int failed(const std::string& text) {
  last_error = text;
  return 1;
}

constexpr int64_t kGroupRows = 576;       // rows a task; a multiple of every panel (48, 24, 12)
constexpr int64_t kLeastSplit = 128;      // keys a split when threads would stand idle otherwise ...
constexpr int64_t kGoodSplit = 1024;      // ... and when they would not: each split costs a fold of the accumulator
constexpr double kInlineFlops = 4e6;      // less work than this is done by the caller: waking threads costs 50 us
constexpr int64_t kStoredBytes = 256 << 20; // most memory for stored partial results in the batch-invariant mode
constexpr int64_t kKeptBytes = 64 << 20;  // scratch a thread keeps between calls

// The build defines VA_HAVE_v3 and VA_HAVE_v4 for what it compiled kernel.cpp for; portable is always there.
#if defined(__x86_64__)
bool has_v3() {
  return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("bmi") &&
         __builtin_cpu_supports("bmi2");
}
#if defined(VA_HAVE_v4)
bool has_v4() {
  return has_v3() && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512cd") &&
         __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
}
#endif
#endif

const Kernels* best_kernels() {
  const char* asked = getenv("VERIFY_ATTN_ISA"); // v4, v3 or portable: to test one where a better one is at hand
  const std::string wanted = asked ? asked : "";
#if defined(__x86_64__)
  __builtin_cpu_init();
#if defined(VA_HAVE_v4)
  if ((wanted.empty() || wanted == "v4") && has_v4()) return kernels_v4();
#endif
#if defined(VA_HAVE_v3)
  if ((wanted.empty() || wanted == "v3") && has_v3()) return kernels_v3();
#endif
#endif
  return wanted.empty() || wanted == "portable" ? kernels_portable() : nullptr;
}

const Kernels* kernels() {
  static const Kernels* chosen = best_kernels();
  return chosen;
}

// 64-byte aligned memory of the calling thread, kept for the next call unless it is large.
class Arena {
 public:
  ~Arena() { free(base_); }
  char* reserve(int64_t bytes) {
    if (bytes > size_) {
      free(base_);
      base_ = nullptr, size_ = 0;
      if (posix_memalign(reinterpret_cast<void**>(&base_), 64, bytes) != 0) throw std::bad_alloc();
      size_ = bytes;
    }
    return base_;
  }
  void trim() {
    if (size_ <= kKeptBytes) return;
    free(base_);
    base_ = nullptr, size_ = 0;
  }

 private:
  char* base_ = nullptr;
  int64_t size_ = 0;
};

struct TaskPlan {
  Task task;
  int64_t keys;
  int64_t split_keys; // keys a split; the last may have fewer
  int64_t splits;
  bool stored;        // splits are items of their own
  int64_t partial = 0; // floats from the start of the stored partials
};

struct Item {
  int64_t plan;
  int64_t split; // -1: all of them, folded in order
};

double flops_of(const TaskPlan& p) { return 2.0 * p.task.rows * p.keys * (p.task.shape->row + p.task.shape->latent); }

// ---- masks as bits ----

std::vector<uint32_t> mask_bits(const verify_attn_params& p, const Index& qo, const Index& mask_indptr, int words) {
  std::vector<uint32_t> bits;
  if (p.mask_kind == VA_MASK_BITS) return bits;
  bits.assign((size_t)p.tokens * words, 0);
  for (int b = 0; b < p.streams; ++b) {
    const int64_t t0 = qo[b], n = qo[b + 1] - t0;
    const int64_t skip = p.mask_kind == VA_MASK_FULL ? p.prefix_lens[b] : 0;
    for (int64_t i = 0; i < n; ++i) {
      uint32_t* row = bits.data() + (t0 + i) * words;
      const uint8_t* given = nullptr;
      if (p.mask_kind != VA_MASK_CAUSAL)
        given = static_cast<const uint8_t*>(p.mask) + mask_indptr[b] + i * (skip + n) + skip;
      for (int64_t j = 0; j < n; ++j)
        if (given ? given[j] != 0 : j <= i) row[j / 32] |= 1u << (j % 32);
    }
  }
  return bits;
}

// ---- planning ----

std::vector<TaskPlan> make_tasks(const verify_attn_params& p, const Shape& shape, const Index& qo, const Index& kv,
                                 const uint32_t* mask, int words, int64_t group) {
  std::vector<TaskPlan> plans;
  for (int b = 0; b < p.streams; ++b) {
    const int64_t t0 = qo[b], q = qo[b + 1] - t0, rows = q * p.heads, prefix = p.prefix_lens[b];
    if (rows <= 0) continue;
    const int64_t groups = (rows + group - 1) / group;
    int64_t share = (rows + groups - 1) / groups; // balanced, and whole panels
    share = (share + kernels()->panel_rows - 1) / kernels()->panel_rows * kernels()->panel_rows;
    for (int64_t r0 = 0; r0 < rows; r0 += share) {
      const Task task{&shape, t0, kv[b], prefix, q, r0, std::min(share, rows - r0), mask + t0 * words, words};
      plans.push_back({task, prefix + q, prefix + q, 1, false});
    }
  }
  return plans;
}

void split_evenly(std::vector<TaskPlan>& plans, int wanted, int threads) {
  double total = 0;
  for (const TaskPlan& p : plans) total += flops_of(p);
  const double share = total / (2.0 * threads); // two items a thread, so that a disturbed thread costs half an item
  for (TaskPlan& p : plans) {
    int64_t splits = wanted > 0 ? wanted : threads == 1 ? 1 : (int64_t)(flops_of(p) / share + 0.5);
    const int64_t most = std::max(std::min<int64_t>(threads, p.keys / kLeastSplit), p.keys / kGoodSplit);
    splits = std::max<int64_t>(1, std::min<int64_t>(splits, wanted > 0 ? p.keys : most));
    p.split_keys = (p.keys + splits - 1) / splits;
    p.splits = (p.keys + p.split_keys - 1) / p.split_keys;
    p.stored = p.splits > 1;
  }
}

// Batch-invariant mode: splits begin at multiples of `chunk`; stored ones only where tasks are too few for the threads.
void split_by_chunk(std::vector<TaskPlan>& plans, int64_t chunk, int threads, int latent) {
  int64_t bytes = 0;
  for (TaskPlan& p : plans) {
    p.split_keys = chunk;
    p.splits = (p.keys + chunk - 1) / chunk;
    bytes += p.splits * (int64_t)kernels()->partial_floats(p.task.rows, latent) * 4;
  }
  const bool store = threads > 1 && (int64_t)plans.size() < 2 * threads && bytes <= kStoredBytes;
  for (TaskPlan& p : plans) p.stored = store && p.splits > 1;
}

std::vector<TaskPlan> make_plan(const verify_attn_params& p, const Shape& shape, const Index& qo, const Index& kv,
                                const uint32_t* mask, int words, int threads) {
  int64_t group = kGroupRows;
  if (p.chunk > 0) { // rows do not depend on their group: small groups give the threads work without storing partials
    int64_t rows = 0;
    for (int b = 0; b < p.streams; ++b) rows += (qo[b + 1] - qo[b]) * p.heads;
    group = std::max<int64_t>(kernels()->panel_rows, std::min(kGroupRows, rows / (2 * threads) / 48 * 48));
  }
  std::vector<TaskPlan> plans = make_tasks(p, shape, qo, kv, mask, words, group);
  if (p.chunk > 0) split_by_chunk(plans, p.chunk, threads, shape.latent);
  else split_evenly(plans, p.num_splits, threads);
  return plans;
}

// ---- running ----

int64_t round64(int64_t bytes) { return (bytes + 63) / 64 * 64; }

struct Layout { // bytes of one thread's scratch, part by part
  int64_t queries = 0, keys = 0, scores = 0, folded = 0, partial = 0;
  int64_t thread() const { return queries + keys + scores + folded + partial; }
};

Layout layout_of(const std::vector<TaskPlan>& plans, const Shape& shape) {
  Layout layout;
  const Kernels* k = kernels();
  layout.keys = round64(k->keys_floats(shape.latent, shape.row) * 4);
  layout.scores = round64(k->scores_floats() * 4);
  for (const TaskPlan& p : plans) {
    layout.queries = std::max<int64_t>(layout.queries, round64(k->queries_floats(p.task.rows, shape.row) * 4));
    const int64_t partial = round64(k->partial_floats(p.task.rows, shape.latent) * 4);
    if (!p.stored) layout.folded = std::max(layout.folded, partial);
    if (!p.stored && p.splits > 1) layout.partial = std::max(layout.partial, partial);
  }
  return layout;
}

void run_item(const TaskPlan& p, int64_t split, float* stored, float* folded, const Scratch& scratch) {
  const Kernels* k = kernels();
  const auto attend = [&](int64_t i, float* partial) {
    k->attend(p.task, i * p.split_keys, std::min((i + 1) * p.split_keys, p.keys), scratch, partial);
  };
  if (split >= 0) {
    attend(split, stored + p.partial + split * (round64(k->partial_floats(p.task.rows, p.task.shape->latent) * 4) / 4));
    return;
  }
  attend(0, folded);
  for (int64_t i = 1; i < p.splits; ++i) {
    attend(i, scratch.partial);
    k->fold(p.task, folded, scratch.partial);
  }
  k->finish(p.task, folded);
}

void execute(std::vector<TaskPlan>& plans, const Shape& shape, int threads) {
  const Kernels* k = kernels();
  std::vector<Item> items;
  std::vector<int64_t> folds;
  int64_t stored_floats = 0;
  double flops = 0;
  for (int64_t i = 0; i < (int64_t)plans.size(); ++i) {
    TaskPlan& p = plans[i];
    flops += flops_of(p);
    if (!p.stored) {
      items.push_back({i, -1});
      continue;
    }
    p.partial = stored_floats;
    stored_floats += p.splits * round64(k->partial_floats(p.task.rows, shape.latent) * 4) / 4;
    folds.push_back(i);
    for (int64_t s = 0; s < p.splits; ++s) items.push_back({i, s});
  }
  if (flops < kInlineFlops) threads = 1;
  const Layout layout = layout_of(plans, shape);
  static thread_local Arena arena;
  char* base = arena.reserve(layout.thread() * threads + stored_floats * 4 + 64);
  float* stored = reinterpret_cast<float*>(base + layout.thread() * threads);
  std::vector<int64_t> packed(threads, -1); // the task whose queries a thread has packed
  parallel(threads, items.size(), [&](int64_t n, int worker) {
    char* at = base + layout.thread() * worker;
    const auto take = [&](int64_t bytes) { float* here = reinterpret_cast<float*>(at); at += bytes; return here; };
    Scratch scratch{take(layout.queries), take(layout.keys), take(layout.scores), nullptr};
    float* folded = take(layout.folded);
    scratch.partial = take(layout.partial);
    const TaskPlan& p = plans[items[n].plan];
    if (packed[worker] != items[n].plan) k->pack_queries(p.task, scratch.queries);
    packed[worker] = items[n].plan;
    run_item(p, items[n].split, stored, folded, scratch);
  });
  parallel(threads, folds.size(), [&](int64_t n, int) {
    const TaskPlan& p = plans[folds[n]];
    const int64_t size = round64(k->partial_floats(p.task.rows, shape.latent) * 4) / 4;
    for (int64_t s = 1; s < p.splits; ++s) k->fold(p.task, stored + p.partial, stored + p.partial + s * size);
    k->finish(p.task, stored + p.partial);
  });
  arena.trim();
}

int run(const verify_attn_params& p) {
  const int threads = p.threads > 0 ? p.threads : available_processors();
  const bool wide = p.index64 != 0;
  const Index qo{p.qo_indptr, wide}, kv{p.kv_indptr, wide}, mask_indptr{p.mask_indptr, wide};
  const Shape shape{p.dtype, p.heads, p.latent_dim, p.latent_dim + p.rope_dim, p.page_size,
                    p.scale * 1.4426950408889634f, p.q, p.kv_pool, p.kv_row_stride, p.draft_kv, p.draft_row_stride,
                    Index{p.draft_slots, wide}, Index{p.kv_indices, wide}, p.out, p.lse};
  for (int b = 0; b < p.streams; ++b) // masks have room for max_q
    if (qo[b + 1] - qo[b] > p.max_q) return failed("stream " + std::to_string(b) + " has more than max_q = " + std::to_string(p.max_q) + " queries");
  const int words = p.mask_kind == VA_MASK_BITS ? p.mask_words : (p.max_q + 31) / 32;
  const std::vector<uint32_t> converted = mask_bits(p, qo, mask_indptr, words);
  const uint32_t* mask = p.mask_kind == VA_MASK_BITS ? static_cast<const uint32_t*>(p.mask) : converted.data();
  std::vector<TaskPlan> plans = make_plan(p, shape, qo, kv, mask, words, threads);
  execute(plans, shape, threads);
  return 0;
}

} // namespace

#define VA_EXPORT extern "C" __attribute__((visibility("default")))

VA_EXPORT const char* verify_attn_error(void) { return last_error.c_str(); }

VA_EXPORT int64_t verify_attn_cpu_workspace(const verify_attn_params*) { return 0; } // scratch is the library's own

VA_EXPORT const char* verify_attn_cpu_refuse(const verify_attn_params* p) {
  if (p->abi != VERIFY_ATTN_ABI) return "the caller speaks another version of the C ABI; rebuild";
  if (!kernels()) return "VERIFY_ATTN_ISA names an instruction set this processor does not have; give v4, v3 or portable";
  if (p->dtype < VA_FLOAT32 || p->dtype > VA_FLOAT16) return "dtype is not float32, bfloat16 or float16";
  if (p->latent_dim < 1 || p->rope_dim < 0 || p->heads < 1 || p->page_size < 1) return "a dimension is not positive";
  if (p->streams < 0 || p->tokens < 0 || p->max_q < 0 || p->max_prefix < 0) return "streams, tokens, max_q or max_prefix is negative";
  if (p->num_splits < 0 || p->chunk < 0) return "num_splits or chunk is negative";
  if (p->mask_kind < VA_MASK_CAUSAL || p->mask_kind > VA_MASK_FULL) return "mask_kind is none of the four";
  if (p->mask_kind == VA_MASK_BITS && (p->mask_words < 0 || p->max_q > 32LL * p->mask_words)) return "a bit mask row is shorter than max_q";
  return nullptr;
}

VA_EXPORT int verify_attn_cpu_run(const verify_attn_params* p) {
  if (const char* reason = verify_attn_cpu_refuse(p)) return failed(reason); // the caller may not have asked
  try {
    return run(*p);
  } catch (const std::exception& error) { // bad_alloc; nothing else is thrown
    return failed(std::string("not enough memory for the scratch: ") + error.what());
  }
}

// Name of the instruction set in use: v4, v3 or portable.
VA_EXPORT const char* verify_attn_cpu_isa(void) { return kernels() ? kernels()->name : ""; }

// FLOP/s of FMAs that touch only registers, on `threads` threads for about `seconds`: the ceiling of the arithmetic.
VA_EXPORT double verify_attn_cpu_flops(int threads, double seconds) {
  using clock = std::chrono::steady_clock;
  std::vector<double> done(threads, 0.0);
  const auto start = clock::now();
  const auto elapsed = [&] { return std::chrono::duration<double>(clock::now() - start).count(); };
  parallel(threads, threads, [&](int64_t item, int) {
    while (elapsed() < seconds) done[item] += kernels()->fma_flops(20000);
  });
  double total = 0;
  for (double d : done) total += d;
  return total / elapsed();
}

// Bytes/s of reading `bytes` at `data` once, on `threads` threads.
VA_EXPORT double verify_attn_cpu_read(int threads, const void* data, int64_t bytes) {
  using clock = std::chrono::steady_clock;
  const int64_t floats = bytes / 4, share = floats / threads / 128 * 128;
  std::vector<double> sums(threads);
  const auto start = clock::now();
  parallel(threads, threads, [&](int64_t i, int) {
    sums[i] = kernels()->read_sum(static_cast<const float*>(data) + i * share, share);
  });
  const double seconds = std::chrono::duration<double>(clock::now() - start).count();
  volatile double keep = sums[0];
  (void)keep;
  return (double)share * threads * 4 / seconds;
}

VA_EXPORT void verify_attn_cpu_exp2(const float* x, float* y, int64_t n) { kernels()->exp2(x, y, n); }
