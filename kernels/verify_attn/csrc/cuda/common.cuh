// Device-side vocabulary shared by the CUDA variants: element types, streams, key rows, tree mask, work list, merge.
// Everything is read on the device at run time (lengths, page table, mask), so a captured graph serves any batch that
// stays inside the host-known bounds max_q and max_prefix.
#pragma once
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>
#include <stdint.h>

#include "../verify_attn.h"

namespace va {

using Params = verify_attn_params;

constexpr float kLog2e = 1.4426950408889634f;
constexpr float kLn2 = 0.6931471805599453f;

// ---- element types ------------------------------------------------------------------------------------------------

__device__ __forceinline__ float to_float(float x) { return x; }
__device__ __forceinline__ float to_float(__nv_bfloat16 x) { return __bfloat162float(x); }
__device__ __forceinline__ float to_float(__half x) { return __half2float(x); }

template <typename T> __device__ __forceinline__ T from_float(float x);
template <> __device__ __forceinline__ float from_float<float>(float x) { return x; }
template <> __device__ __forceinline__ __nv_bfloat16 from_float<__nv_bfloat16>(float x) { return __float2bfloat16_rn(x); }
template <> __device__ __forceinline__ __half from_float<__half>(float x) { return __float2half_rn(x); }

/* Two floats to one packed register, the first in the low half. */
template <typename T> __device__ __forceinline__ uint32_t pack2(float low, float high);
template <> __device__ __forceinline__ uint32_t pack2<__nv_bfloat16>(float low, float high) {
  __nv_bfloat162 v = __floats2bfloat162_rn(low, high);
  return *reinterpret_cast<uint32_t *>(&v);
}
template <> __device__ __forceinline__ uint32_t pack2<__half>(float low, float high) {
  __half2 v = __floats2half2_rn(low, high);
  return *reinterpret_cast<uint32_t *>(&v);
}

/* Four consecutive elements as floats; the address is aligned to four elements. */
__device__ __forceinline__ float4 load4(const float *at) { return *reinterpret_cast<const float4 *>(at); }
template <typename T> __device__ __forceinline__ float4 load4(const T *at) {
  uint2 raw = *reinterpret_cast<const uint2 *>(at);
  const T *e = reinterpret_cast<const T *>(&raw);
  return make_float4(to_float(e[0]), to_float(e[1]), to_float(e[2]), to_float(e[3]));
}

__device__ __forceinline__ void store4(float *at, float4 v) { *reinterpret_cast<float4 *>(at) = v; }
template <typename T> __device__ __forceinline__ void store4(T *at, float4 v) {
  *reinterpret_cast<uint2 *>(at) = make_uint2(pack2<T>(v.x, v.y), pack2<T>(v.z, v.w));
}

// ---- streams ------------------------------------------------------------------------------------------------------

__device__ __forceinline__ int64_t load_index(const void *base, int64_t i, int wide) {
  return wide ? static_cast<const int64_t *>(base)[i] : static_cast<const int32_t *>(base)[i];
}

struct Stream {
  int64_t q_begin;     // first token
  int64_t page_begin;  // first entry in kv_indices
  int64_t mask_begin;  // first element in mask (QLEN, FULL)
  int q_len, prefix;
  bool broken;         // the caller broke a bound (max_q, max_prefix): lengths are clamped, outputs become NaN

  __device__ __forceinline__ int keys() const { return q_len ? prefix + q_len : 0; }
};

__device__ __forceinline__ Stream load_stream(const Params &p, int b) {
  Stream s;
  s.q_begin = load_index(p.qo_indptr, b, p.index64);
  int64_t q_len = load_index(p.qo_indptr, b + 1, p.index64) - s.q_begin;
  int prefix = p.prefix_lens[b];
  s.page_begin = load_index(p.kv_indptr, b, p.index64);
  s.mask_begin = p.mask_kind >= VA_MASK_QLEN ? load_index(p.mask_indptr, b, p.index64) : 0;
  s.broken = q_len > p.max_q || prefix > p.max_prefix || q_len < 0 || prefix < 0;
  s.q_len = static_cast<int>(q_len < 0 ? 0 : q_len > p.max_q ? p.max_q : q_len);
  s.prefix = prefix < 0 ? 0 : prefix > p.max_prefix ? p.max_prefix : prefix;
  return s;
}

/* Stream of a token, or -1 for a padding row past the last stream. Binary search, one thread. */
__device__ __forceinline__ int stream_of_token(const Params &p, int token) {
  if (token >= load_index(p.qo_indptr, p.streams, p.index64)) return -1;
  int low = 0, high = p.streams;  // qo_indptr[low] <= token < qo_indptr[high]
  while (high - low > 1) {
    int middle = (low + high) / 2;
    if (load_index(p.qo_indptr, middle, p.index64) <= token) low = middle; else high = middle;
  }
  return low;
}

// ---- keys and mask ------------------------------------------------------------------------------------------------

/* Pool row (slot) of prefix key k. */
__device__ __forceinline__ int64_t prefix_slot(const Params &p, const Stream &s, int k) {
  if (p.page_size == 1) return load_index(p.kv_indices, s.page_begin + k, p.index64);
  unsigned page = unsigned(k) / unsigned(p.page_size), inside = unsigned(k) - page * p.page_size;
  return load_index(p.kv_indices, s.page_begin + page, p.index64) * p.page_size + inside;
}

/* First element of key k of a stream: prefix keys first, then the draft rows. */
template <typename T> __device__ __forceinline__ const T *key_row(const Params &p, const Stream &s, int k) {
  const T *pool = static_cast<const T *>(p.kv_pool);
  if (k < s.prefix) return pool + prefix_slot(p, s, k) * p.kv_row_stride;
  int64_t token = s.q_begin + (k - s.prefix);
  if (p.draft_kv) return static_cast<const T *>(p.draft_kv) + token * p.draft_row_stride;
  return pool + load_index(p.draft_slots, token, p.index64) * p.kv_row_stride;
}

/* May draft row i of the stream see draft row j of it? */
__device__ __forceinline__ bool draft_visible(const Params &p, const Stream &s, int i, int j) {
  const uint8_t *bytes = static_cast<const uint8_t *>(p.mask) + s.mask_begin;
  switch (p.mask_kind) {
    case VA_MASK_BITS:
      return (static_cast<const uint32_t *>(p.mask)[(s.q_begin + i) * p.mask_words + (j >> 5)] >> (j & 31)) & 1u;
    case VA_MASK_QLEN: return bytes[int64_t(i) * s.q_len + j] != 0;
    case VA_MASK_FULL: return bytes[int64_t(i) * (s.prefix + s.q_len) + s.prefix + j] != 0;
    default: return j <= i;
  }
}

/* May draft row i see key k (prefix or draft)? Keys past the end are never seen. */
__device__ __forceinline__ bool key_visible(const Params &p, const Stream &s, int i, int k) {
  if (k < s.prefix) return true;
  return k < s.prefix + s.q_len && draft_visible(p, s, i, k - s.prefix);
}

/* Start fetching the first line of every input whose address is known at launch. The loads that follow depend on one
 * another (lengths, page table, rows), and each would meet a cold cache and a cold TLB in turn. Threads 0 to 6 of a block. */
__device__ __forceinline__ void prefetch_inputs(const Params &p) {
  const void *at = nullptr;
  switch (threadIdx.x) {
    case 0: at = p.qo_indptr; break;
    case 1: at = p.prefix_lens; break;
    case 2: at = p.kv_indptr; break;
    case 3: at = p.kv_indices; break;
    case 4: at = p.draft_kv ? p.draft_kv : p.draft_slots; break;
    case 5: at = p.mask; break;
    case 6: at = p.mask_indptr; break;
  }
  if (at) asm volatile("prefetch.global.L2 [%0];" ::"l"(at));
}

// ---- flat work list -----------------------------------------------------------------------------------------------
// A stream's keys are cut into units of `unit` keys; the units of all streams stand in one line, and worker g of G takes
// [g*total/G, (g+1)*total/G). Units are key tiles (any cut) or, in batch-invariant mode, the fixed chunks.

__device__ __forceinline__ int stream_units(const Params &p, int b, int unit) {
  Stream s = load_stream(p, b);
  return (s.keys() + unit - 1) / unit;
}

/* Units of all streams together. Whole warp; every lane gets the sum. */
__device__ __forceinline__ int total_units(const Params &p, int unit) {
  int sum = 0;
  for (int b = threadIdx.x & 31; b < p.streams; b += 32) sum += stream_units(p, b, unit);
  for (int step = 16; step; step >>= 1) sum += __shfl_xor_sync(~0u, sum, step);
  return sum;
}

/* Units of the streams before stream b. Whole warp; every lane gets the sum. */
__device__ __forceinline__ int units_before(const Params &p, int b, int unit) {
  int sum = 0;
  for (int i = threadIdx.x & 31; i < b; i += 32) sum += stream_units(p, i, unit);
  for (int step = 16; step; step >>= 1) sum += __shfl_xor_sync(~0u, sum, step);
  return sum;
}

struct Place {
  int stream;  // whose units hold the target; p.streams when the target is past the end
  int first;   // place of that stream's first unit in the line
};

/* The stream holding unit `target` of the line. Whole warp, same target in every lane. */
__device__ __forceinline__ Place seek_unit(const Params &p, int unit, int target) {
  int lane = threadIdx.x & 31, before = 0;
  for (int base = 0; base < p.streams; base += 32) {
    int own = base + lane < p.streams ? stream_units(p, base + lane, unit) : 0, end = own;
    for (int step = 1; step < 32; step <<= 1) {
      int other = __shfl_up_sync(~0u, end, step);
      if (lane >= step) end += other;
    }
    unsigned past = __ballot_sync(~0u, target < before + end);
    if (past) {
      int hit = __ffs(past) - 1;
      return {base + hit, before + __shfl_sync(~0u, end - own, hit)};
    }
    before += __shfl_sync(~0u, end, 31);
  }
  return {p.streams, before};
}

__device__ __forceinline__ int share_begin(int worker, int workers, int total) {
  return static_cast<int>(int64_t(worker) * total / workers);
}

/* The worker whose share holds unit u (inverse of share_begin). */
__device__ __forceinline__ int share_of(int u, int workers, int total) {
  int worker = static_cast<int>((int64_t(u) * workers) / total);
  while (worker + 1 < workers && share_begin(worker + 1, workers, total) <= u) ++worker;
  return worker;
}

// ---- softmax state ------------------------------------------------------------------------------------------------

/* Online softmax of one row in base 2: running maximum of score*log2e and the sum of exp2(score - max). */
struct RowState {
  float max = -INFINITY, sum = 0.f;
};

/* exp2 by the special function unit: relative error below 2^-22, results under 2^-126 become 0. NaN stays NaN. */
__device__ __forceinline__ float fast_exp2(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

/* exp2(x - max), with a row that saw nothing yet (max = -inf) giving 0 for x = -inf. A NaN stays NaN. */
__device__ __forceinline__ float weight(float x, float max) { return fast_exp2(x - (max == -INFINITY ? 0.f : max)); }

/* Factor on the accumulated values: 0 for a row that saw nothing, NaN for a broken stream. */
__device__ __forceinline__ float normaliser(float sum, bool broken) {
  if (broken) return __int_as_float(0x7fffffff);
  return sum == 0.f ? 0.f : 1.f / sum;
}

/* Natural log-sum-exp of a row in base-2 state. */
__device__ __forceinline__ float natural_lse(float max, float sum, bool broken) {
  if (broken) return __int_as_float(0x7fffffff);
  return sum == 0.f ? -INFINITY : (max + log2f(sum)) * kLn2;
}

// ---- NaN and infinity ----------------------------------------------------------------------------------------------
// They reach every row that sees them, and no other. All scores of such a key are NaN or infinite, which tells it: a row that sees it gets NaN,
// and where rows may not (draft rows) the key's own such elements become zeros before they are weighted, since 0 * NaN is NaN.

__device__ __forceinline__ bool is_finite(float x) { return fabsf(x) < INFINITY; }
__device__ __forceinline__ float nan_unless_finite(float x) { return is_finite(x) ? x : __int_as_float(0x7fffffff); }

template <typename T> constexpr uint32_t kExponentBits = 0;
template <> constexpr uint32_t kExponentBits<__nv_bfloat16> = 0x7f80;
template <> constexpr uint32_t kExponentBits<__half> = 0x7c00;

/* Two packed elements, the NaN and infinite ones replaced by zeros. */
template <typename T> __device__ __forceinline__ uint32_t finite_or_zero(uint32_t pair) {
  constexpr uint32_t kExponent = kExponentBits<T>;
  if ((pair & kExponent) == kExponent) pair &= 0xffff0000u;
  if ((pair >> 16 & kExponent) == kExponent) pair &= 0xffffu;
  return pair;
}

/* The same in shared memory. One pair at a time: this is rare, and where it is done there are no registers to spare. */
template <typename T> __device__ __forceinline__ void mend_pair(void *at) {
  volatile uint32_t *pair = static_cast<uint32_t *>(at);
  *pair = finite_or_zero<T>(*pair);
}

}  // namespace va
