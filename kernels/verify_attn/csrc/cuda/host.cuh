// Host-side helpers of the CUDA launchers: error text, device facts, dtype dispatch. No allocation, no synchronisation.
#pragma once
#include <cuda_runtime.h>
#include <stdarg.h>
#include <stdio.h>

#include <atomic>

#include "../verify_attn.h"

/* The objects are compiled with hidden visibility: only what is marked leaves them. */
#define VA_EXPORT extern "C" __attribute__((visibility("default")))

namespace va {

inline char *error_text() {
  static thread_local char text[512] = "";
  return text;
}

/* Store the calling thread's error text; returns 1, the error code of every _run. */
inline int fail(const char *format, ...) {
  va_list args;
  va_start(args, format);
  vsnprintf(error_text(), 512, format, args);
  va_end(args);
  return 1;
}

/* Format a refusal into the calling thread's text and return it. */
inline const char *refusal(const char *format, ...) {
  va_list args;
  va_start(args, format);
  vsnprintf(error_text(), 512, format, args);
  va_end(args);
  return error_text();
}

inline int launched(const char *kernel) {
  cudaError_t status = cudaGetLastError();
  return status == cudaSuccess ? 0 : fail("%s: %s", kernel, cudaGetErrorString(status));
}

constexpr int kDevices = 64;  // more are asked anew each time

/* The current device, or -1. */
inline int current_device() {
  int device = -1;
  if (cudaGetDevice(&device) != cudaSuccess) cudaGetLastError();
  return device;
}

/* One attribute of the current device, 0 without a device; asked of the driver once a device. */
template <cudaDeviceAttr kWhat> inline int device_attribute() {
  static std::atomic<int> asked[kDevices];  // plus one; 0: not yet
  int device = current_device(), value = 0;
  if (device < 0) return 0;
  if (device < kDevices && (value = asked[device].load(std::memory_order_relaxed))) return value - 1;
  if (cudaDeviceGetAttribute(&value, kWhat, device) != cudaSuccess) {
    cudaGetLastError();
    return 0;
  }
  if (device < kDevices) asked[device].store(value + 1, std::memory_order_relaxed);
  return value;
}

inline int multiprocessors() { return device_attribute<cudaDevAttrMultiProcessorCount>(); }
inline int shared_memory_limit() { return device_attribute<cudaDevAttrMaxSharedMemoryPerBlockOptin>(); }

/* Let a kernel use `bytes` of dynamic shared memory on the current device; 0 or an error code. `allowed`: a kernel's own, what it was
 * let use on each device. */
using Allowed = std::atomic<int>[kDevices];
template <typename Kernel> inline int allow_shared(Kernel *kernel, int bytes, const char *name, Allowed &allowed) {
  int device = current_device();
  bool kept = device >= 0 && device < kDevices;
  if (bytes <= 48 * 1024 || (kept && allowed[device].load(std::memory_order_relaxed) >= bytes)) return 0;
  cudaError_t status =
      cudaFuncSetAttribute(reinterpret_cast<const void *>(kernel), cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
  if (status != cudaSuccess) return fail("%s: %d bytes of shared memory: %s", name, bytes, cudaGetErrorString(status));
  if (kept) allowed[device].store(bytes, std::memory_order_relaxed);
  return 0;
}

inline int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

inline uintptr_t address(const void *at) { return reinterpret_cast<uintptr_t>(at); }

/* That the workspace is there, large enough and aligned; 0 or an error code. */
inline int check_workspace(const verify_attn_params *p, int64_t need, const char *name) {
  if (!p->workspace || p->workspace_bytes < need)
    return fail("%s: workspace of %lld bytes, needs %lld", name, (long long)p->workspace_bytes, (long long)need);
  if (address(p->workspace) % 16) return fail("%s: workspace must be aligned to 16 bytes", name);
  return 0;
}

/* Why these numbers are no batch, or NULL. Grids, sizes and divisions come from them, so a _run asks too: its caller may not have. */
inline const char *bad_numbers(const verify_attn_params *p) {
  if (p->streams < 0 || p->tokens < 0 || p->heads < 0 || p->max_q < 0 || p->max_prefix < 0)
    return "streams, tokens, heads, max_q or max_prefix is negative";
  if (p->latent_dim < 1 || p->rope_dim < 0 || p->page_size < 1) return "a dimension is not positive";
  if (p->num_splits < 0 || p->chunk < 0) return "num_splits or chunk is negative";
  return nullptr;
}

/* What no variant can do, or NULL. Pointers may be NULL here. */
inline const char *refuse_common(const verify_attn_params *p) {
  if (p->abi != VERIFY_ATTN_ABI) return refusal("built for ABI %d, called with %u", VERIFY_ATTN_ABI, p->abi);
  if (const char *bad = bad_numbers(p)) return bad;
  if (p->mask_kind == VA_MASK_BITS && p->max_q > 32 * p->mask_words)
    return refusal("mask has %d words a row, max_q = %d needs %d", p->mask_words, p->max_q, (p->max_q + 31) / 32);
  if ((p->latent_dim | p->rope_dim | p->kv_row_stride) % 4)
    return refusal("latent_dim, rope_dim and the pool's row stride must be multiples of 4 elements, not %d, %d, %lld",
                   p->latent_dim, p->rope_dim, static_cast<long long>(p->kv_row_stride));
  if (p->draft_row_stride % 4) return refusal("draft_kv's row stride must be a multiple of 4 elements");
  if ((address(p->q) | address(p->kv_pool) | address(p->draft_kv) | address(p->out)) % 16)
    return refusal("q, kv_pool, draft_kv and out must be aligned to 16 bytes");
  return nullptr;
}

}  // namespace va

VA_EXPORT __attribute__((weak, used)) const char *verify_attn_error(void) {
  return va::error_text();
}
