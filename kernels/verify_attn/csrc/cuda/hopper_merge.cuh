// Merging of the partial results of the `hopper` variant inside the launch that made them.
//
// Each block writes its partial results, meets those that have the other parts of the row tile (hopper_meet.cuh) and merges 1/parts of the
// elements, always in the same order: reruns give the same bits.
// Values travel as fp16, divided by one power of two a warp (11 bits of them, where the output keeps 8; fewer of values more than 2^28 below
// the largest of the warp's 64 latents and all rows), in the order in which wgmma leaves them in registers: a "position" is one thread's
// 2 rows x 4 latents; rows outermost, so a slice touches few rows.
// The softmax states stand beside them once for each warp, relative to that power, so that a thread needs nothing but a position's values and
// states: both are loaded at once, and no weights are worked out in between. What cold code costs decides the rest (about 6 clocks an instruction).
#pragma once
#include "hopper_meet.cuh"
#include "hopper_work.cuh"

namespace va {
namespace hopper {

constexpr int kMergers = 256;  // threads of both consumer warpgroups
constexpr int kAll = 1;        // the named barrier of all of them

/* Between ordinary shared-memory writes by one consumer warpgroup and reads by the other. One barrier would do. With one, compute-sanitizer's
 * racecheck reports the first few reads behind it (of the other warpgroup's values only); with two it reports nothing. */
__device__ __forceinline__ void hand_over() {
  sync_threads(kAll, kMergers);
  sync_threads(kAll, kMergers);
}

struct Workspace {
  unsigned *counters;
  float2 *states;      // [slot][warp][row]: max, sum, both so that weights of them are those of the warp's values
  uint4 *values;       // [slot][position]: for latents d, d + 8, d + 64, d + 72, rows n and n + 1 as halves
};

/* Two rows x two latents to the output: {row n, row n + 1} at latent d, then the same at latent d + 8. */
template <typename T> __device__ __forceinline__ void put(T *out, int n, int rows, int d, float4 v) {
  if (n < rows) out[n * 512 + d] = from_float<T>(v.x), out[n * 512 + d + 8] = from_float<T>(v.z);
  if (n + 1 < rows) out[(n + 1) * 512 + d] = from_float<T>(v.y), out[(n + 1) * 512 + d + 8] = from_float<T>(v.w);
}

/* Latent of a position: `block` counts (warpgroup, its m64 tile), `thread` is within the warpgroup. */
__device__ __forceinline__ int latent_of(int block, int thread) {
  int group = block >> 2, tile = block & 3;
  return 64 * ((tile >> 1) * 4 + group * 2 + (tile & 1)) + 16 * (thread >> 5) + ((thread & 31) >> 2);
}

/* 16 bytes past L1. Volatile, so that a batch of loads stays a batch: the compiler would move each to its use. */
__device__ __forceinline__ uint4 load16(const void *from) {
  uint4 v;
  asm volatile("ld.global.cg.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(from));
  return v;
}

__device__ __forceinline__ void add(float4 &sum, float4 v) { sum.x += v.x, sum.y += v.y, sum.z += v.z, sum.w += v.w; }

/* sum += {first, second} (of rows n, n + 1) times the halves of a and b. */
__device__ __forceinline__ void add_scaled(float4 &sum, uint32_t a, uint32_t b, float first, float second) {
  float2 low = __half22float2(*reinterpret_cast<__half2 *>(&a)), high = __half22float2(*reinterpret_cast<__half2 *>(&b));
  sum.x += first * low.x, sum.y += second * low.y, sum.z += first * high.x, sum.w += second * high.y;
}

/* The e for which values of at most `largest` (float bits, sign cleared), times 2^-e, stay below 2^15. Not under -80, so that sums of
 * weights times 2^-e stay finite (values under 2^-94 are lost). Beside an infinite value, an e that keeps ordinary ones. */
__device__ __forceinline__ int half_exponent(uint32_t largest) {
  return largest >= 0x7f800000u ? 27 : max(int(largest >> 23), 61) - 141;
}
__device__ __forceinline__ float power_of_two(int e) { return __int_as_float((e + 127) << 23); }

constexpr int kBatch = 12, kFew = 8;  // loads of values (and as many of states) a thread has in flight; kFew: of up to four parts

/* How many teams of threads share the parts of `positions` positions: the number with the shortest longest thread, counting a batch's
 * latency as sixteen loads. Depends on the parts and kRows alone, so that in batch-invariant mode a row's bits do. Whole warp. */
__device__ __forceinline__ int teams_for(int positions, int parts) {
  int lane = threadIdx.x & 31, teams = lane + 1;
  int rounds = quotient_up(positions, quotient(kMergers, teams)), batches = quotient_up(parts, teams * kBatch);
  unsigned cost = rounds * (quotient_up(parts, teams) + batches * 16);
  return (__reduce_min_sync(~0u, teams > parts || teams > 16 ? ~0u : cost << 5 | lane) & 31) + 1;
}

/* Rows n and n + 1 at latents {d, d + 8} and {d + 64, d + 72}, as sums over some parts relative to the rows' maxima there. */
struct Partial {
  float4 value[2] = {};
  float2 max = {-INFINITY, -INFINITY}, sum = {};

  __device__ __forceinline__ void shrink(float a, float b) {
    sum.x *= a, sum.y *= b;
#pragma unroll
    for (int i = 0; i < 2; ++i) value[i].x *= a, value[i].y *= b, value[i].z *= a, value[i].w *= b;
  }

  /* Add kCount parts: their values and states. */
  template <int kCount> __device__ __forceinline__ void add_parts(const uint4 *v, const uint4 *s) {
    float2 old = max;
#pragma unroll
    for (int i = 0; i < kCount; ++i)
      max.x = fmaxf(max.x, __uint_as_float(s[i].x)), max.y = fmaxf(max.y, __uint_as_float(s[i].z));
    float2 by = {max.x == -INFINITY ? 0.f : max.x, max.y == -INFINITY ? 0.f : max.y};
    shrink(fast_exp2(old.x - by.x), fast_exp2(old.y - by.y));
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      float a = fast_exp2(__uint_as_float(s[i].x) - by.x), b = fast_exp2(__uint_as_float(s[i].z) - by.y);
      sum.x += a * __uint_as_float(s[i].y), sum.y += b * __uint_as_float(s[i].w);
      add_scaled(value[0], v[i].x, v[i].y, a, b), add_scaled(value[1], v[i].z, v[i].w, a, b);
    }
  }

  /* Add parts `from`, `from` + step, ... of `parts`. `values`, `states`: those of `from`; the next lie `stride` slots on. Part 0 lies
   * `shift` slots behind its place. */
  template <int kRows>
  __device__ __forceinline__ void gather(const uint4 *values, const float2 *states, int from, int step, int parts, int64_t stride, int shift) {
    constexpr int kValues = kRows * 64, kStates = kRows * 8;  // of a slot
#pragma unroll 1
    for (int k = from; k < parts;) {
      uint4 v[kBatch], s[kBatch];
      int behind = k ? 0 : shift;
#pragma unroll
      for (int i = 0; i < kBatch; ++i, k += step) {
        v[i] = make_uint4(0, 0, 0, 0), s[i] = make_uint4(0xff800000u, 0, 0xff800000u, 0);
        int back = i ? 0 : behind;
        if (k < parts) s[i] = load16(states + back * kStates), v[i] = load16(values + back * kValues);
        states += stride * kStates, values += stride * kValues;
      }
      add_parts<kBatch>(v, s);
    }
  }
};

/* `normaliser` to 2^-23 in fewer instructions: division has a path of its own for what cannot occur here. */
__device__ __forceinline__ float inverse_of(float sum, bool broken) {
  float inverse;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(inverse) : "f"(sum));
  return broken ? __int_as_float(0x7fffffff) : sum == 0.f ? 0.f : inverse;
}

/* Normalise one half of a position's sum over all parts and write it, and the rows' lse with latent 0. */
template <typename T>
__device__ __forceinline__ void put_merged(const Params &p, const Item &item, T *out, int n, int latent, float4 v, const Partial &all) {
  float a = inverse_of(all.sum.x, item.broken), b = inverse_of(all.sum.y, item.broken);
  put(out, n, item.rows, latent, make_float4(v.x * a, v.y * b, v.z * a, v.w * b));
  if (latent || !p.lse) return;
  if (n < item.rows) p.lse[item.first_row + n] = natural_lse(all.max.x, all.sum.x, item.broken);
  if (n + 1 < item.rows) p.lse[item.first_row + n + 1] = natural_lse(all.max.y, all.sum.y, item.broken);
}

/* Where a position is: rows n and n + 1, warp of the eight, latent of its first value. */
struct Position {
  int n, warp, latent;
  __device__ __forceinline__ explicit Position(int at) {
    int inside = at % 128, block = at / 128 % 4;
    n = at / 512 * 8 + at % 4 * 2, warp = (block >> 1) * 4 + (inside >> 5), latent = latent_of((block >> 1) * 4 + (block & 1) * 2, inside);
  }
};

/* Merge positions first .. last of a row tile of at most kParts parts, kFew / kParts positions a thread at a time. */
template <typename T, int kRows, int kParts>
__device__ __forceinline__ void merge_few(const Params &p, const Item &item, const Workspace &ws, int first, int last) {
  constexpr int kAtOnce = kFew / kParts;
  T *out = static_cast<T *>(p.out) + item.first_row * 512;
#pragma unroll 1
  for (int round = first + threadIdx.x; round < last; round += kAtOnce * kMergers) {
    uint4 v[kFew], s[kFew];
#pragma unroll
    for (int i = 0; i < kFew; ++i) {
      int at = round + i / kParts * kMergers, k = i % kParts;
      v[i] = make_uint4(0, 0, 0, 0), s[i] = make_uint4(0xff800000u, 0, 0xff800000u, 0);
      if (at >= last || k >= item.parts) continue;
      Position here(at);
      int64_t slot = item.slot(k);
      s[i] = load16(ws.states + (slot * 8 + here.warp) * kRows + here.n), v[i] = load16(ws.values + slot * (kRows * 64) + at);
    }
#pragma unroll
    for (int q = 0; q < kAtOnce; ++q) {
      int at = round + q * kMergers;
      if (at >= last) break;
      Partial mine;
      mine.add_parts<kParts>(v + q * kParts, s + q * kParts);
      Position here(at);
      put_merged(p, item, out, here.n, here.latent, mine.value[0], mine);
      put_merged(p, item, out, here.n, here.latent + 64, mine.value[1], mine);
    }
  }
}

/* The teams' partial sums of one round in shared memory: [team][seat]. */
struct Table {
  float4 value[2][kMergers], state[kMergers];  // state: maxima of rows n and n + 1, sums

  __device__ __forceinline__ void put_in(const Partial &mine) {
    value[0][threadIdx.x] = mine.value[0], value[1][threadIdx.x] = mine.value[1];
    state[threadIdx.x] = make_float4(mine.max.x, mine.max.y, mine.sum.x, mine.sum.y);
  }

  /* Half `half` of a seat's value over all teams, in order, as value[0] of the result. */
  __device__ __forceinline__ Partial total(int seat, int half, int teams, int seats) const {
    Partial all;
    for (int k = 0; k < teams; ++k) {
      float4 s = state[k * seats + seat];
      all.max.x = fmaxf(all.max.x, s.x), all.max.y = fmaxf(all.max.y, s.y);
    }
    for (int k = 0; k < teams; ++k) {
      float4 s = state[k * seats + seat], v = value[half][k * seats + seat];
      float a = weight(s.x, all.max.x), b = weight(s.y, all.max.y);
      all.sum.x += a * s.z, all.sum.y += b * s.w;
      add(all.value[0], make_float4(a * v.x, b * v.y, a * v.z, b * v.w));
    }
    return all;
  }
};

/* Merge slice `part` of a row tile, once all parts are there: waits for them unless `started` is NULL, and returns what this block has to do.
 * Everything that can be worked out before is. `table`: free shared memory. threadIdx.x < kMergers. */
template <typename T, int kRows>
__device__ __forceinline__ int merge_slice(const Params &p, const Item &item, const Workspace &ws, Table &table, int part,
                                           const volatile unsigned *started) {
  constexpr int kPositions = kRows * 64;
  int parts = item.parts, rows = item.rows, thread = threadIdx.x;
  int first = part * kPositions / parts, last = (part + 1) * kPositions / parts;
  int teams = teams_for(quotient_up(kPositions, parts), parts), seats = quotient(kMergers, teams), team = quotient(thread, seats);
  int seat = thread - team * seats;
  int64_t start = item.slot_base + int64_t(team) * item.slot_step - item.slot_shift, stride = int64_t(teams) * item.slot_step;
  T *out = static_cast<T *>(p.out) + item.first_row * 512;
  int duty = kOwnShare;
  if (__builtin_expect(started != nullptr, 1))
    duty = meet(ws.counters + item.counter, parts, started, kAll, kMergers, reinterpret_cast<int *>(&table));
  if (__builtin_expect(duty == kNoShare, 0)) return duty;
  if (parts <= 4) {
    if (parts <= 2) merge_few<T, kRows, 2>(p, item, ws, first, last);
    else merge_few<T, kRows, 4>(p, item, ws, first, last);
    return duty;
  }
#pragma unroll 1
  for (int round = first; round < last; round += seats) {  // the same rounds for every thread
    int at = round + seat, here = min(at, last - 1), n = here / 512 * 8 + here % 4 * 2, inside = here % 128, block = here / 128 % 4;
    Partial mine;
    if (team < teams) {
      const uint4 *values = ws.values + start * kPositions + here;
      const float2 *states = ws.states + (start * 8 + (block >> 1) * 4 + (inside >> 5)) * kRows + n;
      mine.gather<kRows>(values, states, team, teams, parts, stride, item.slot_shift);
    }
    if (teams > 1) {
      table.put_in(mine);
      hand_over();
      if (team < 2) mine = table.total(seat, team, teams, seats);
    }
    if (team < min(teams, 2) && at < last) {
      float a = inverse_of(mine.sum.x, item.broken), b = inverse_of(mine.sum.y, item.broken);
      int d = latent_of((block >> 1) * 4 + (block & 1) * 2, inside) + team * 64;
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        float4 v = mine.value[i];
        if (i == 0 || teams == 1) put(out, n, rows, d + i * 64, make_float4(v.x * a, v.y * b, v.z * a, v.w * b));
      }
      if (d == 0 && p.lse && n < rows) p.lse[item.first_row + n] = natural_lse(mine.max.x, mine.sum.x, item.broken);
      if (d == 0 && p.lse && n + 1 < rows) p.lse[item.first_row + n + 1] = natural_lse(mine.max.y, mine.sum.y, item.broken);
    }
    if (teams > 1 && round + seats < last) sync_threads(kAll, kMergers);  // the table has been read
  }
  return duty;
}

/* Merge this block's share of the item's row tile. A function of its own to keep its registers out of the main loop's. */
template <typename T, int kRows>
__device__ __noinline__ void merge(const Params &p, const Item &item, const Workspace &ws, float *scratch, const volatile unsigned *started) {
  int part = item.part, left = 1;
#pragma unroll 1
  for (;;) {
    int duty = merge_slice<T, kRows>(p, item, ws, *reinterpret_cast<Table *>(scratch), part, started);
    if (__builtin_expect(duty == kAllShares, 0)) left = item.parts;
    if (duty == kNoShare || --left == 0) return;
    part = part + 1 < item.parts ? part + 1 : 0, started = nullptr;
    sync_threads(kAll, kMergers);  // the table has been read
  }
}

}  // namespace hopper
}  // namespace va
