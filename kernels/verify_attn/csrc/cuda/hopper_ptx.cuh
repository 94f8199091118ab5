// The Hopper instructions the `hopper` variant is made of: mbarriers, named barriers, cp.async, stmatrix, wgmma and its descriptors.
#pragma once
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <stdint.h>

namespace va {
namespace hopper {

__device__ __forceinline__ uint32_t shared_address(const void *at) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(at));
}

// ---- barriers -----------------------------------------------------------------------------------------------------

__device__ __forceinline__ void barrier_init(uint32_t bar, int count) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(bar), "r"(count) : "memory");
}

__device__ __forceinline__ void barrier_arrive(uint32_t bar) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(bar) : "memory");
}

/* Arrive once all earlier cp.async of this thread have landed. Counts as one of the barrier's expected arrivals. */
__device__ __forceinline__ void barrier_arrive_after_copies(uint32_t bar) {
  asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(bar) : "memory");
}

__device__ __forceinline__ bool barrier_done(uint32_t bar, uint32_t parity) {
  uint32_t done;
  asm volatile(
      "{\n .reg .pred p;\n mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\n selp.u32 %0, 1, 0, p;\n}\n"
      : "=r"(done) : "r"(bar), "r"(parity) : "memory");
  return done;
}

__device__ __forceinline__ void barrier_wait(uint32_t bar, uint32_t parity) {
  while (!barrier_done(bar, parity)) {
  }
}

/* Named barrier among `threads` threads of the block. These are `.aligned`: whole warps, not diverged. */
__device__ __forceinline__ void sync_threads(int id, int threads) {
  asm volatile("barrier.cta.sync.aligned %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

/* Count in without waiting. */
__device__ __forceinline__ void arrive_threads(int id, int threads) {
  asm volatile("barrier.cta.arrive.aligned %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

/* Wait, and get the disjunction of `vote` over those threads. */
__device__ __forceinline__ bool sync_any(int id, int threads, bool vote) {
  int any;
  asm volatile(
      "{\n .reg .pred p, q;\n setp.ne.b32 p, %3, 0;\n barrier.cta.red.or.aligned.pred q, %1, %2, p;\n selp.b32 %0, 1, 0, q;\n}\n"
      : "=r"(any) : "r"(id), "r"(threads), "r"(int(vote)) : "memory");
  return any;
}

/* Orders this thread's (and, after a barrier, other threads' observed) ordinary shared-memory writes before wgmma reads. */
__device__ __forceinline__ void fence_async_proxy() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

template <int kRegisters> __device__ __forceinline__ void take_registers() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
}
template <int kRegisters> __device__ __forceinline__ void give_registers() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

// ---- copies -------------------------------------------------------------------------------------------------------

/* 16 bytes from global to shared memory; zeros when `bytes` is 0 instead of 16. */
__device__ __forceinline__ void copy16(uint32_t to, const void *from, int bytes) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(bytes) : "memory");
}

/* Four (two) 8x8 matrices of 16-bit elements, transposed, to the 16-byte rows whose addresses the lanes hold. */
__device__ __forceinline__ void store_transposed4(uint32_t at, uint32_t a, uint32_t b, uint32_t c, uint32_t d) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(at), "r"(a), "r"(b), "r"(c),
               "r"(d) : "memory");
}
__device__ __forceinline__ void store_transposed2(uint32_t at, uint32_t a, uint32_t b) {
  asm volatile("stmatrix.sync.aligned.m8n8.x2.trans.shared.b16 [%0], {%1, %2};" ::"r"(at), "r"(a), "r"(b) : "memory");
}

__device__ __forceinline__ float exp2_fast(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// ---- wgmma --------------------------------------------------------------------------------------------------------

/* Descriptor of an operand in 128-byte swizzle: 8-row groups (K-major), or 8-key groups (M-major), 1024 bytes apart. */
__device__ __forceinline__ uint64_t operand(uint32_t address) {
  return uint64_t((address & 0x3ffff) >> 4) | (uint64_t(8192 >> 4) << 16) | (uint64_t(1024 >> 4) << 32) | (uint64_t(1) << 62);
}

__device__ __forceinline__ void wgmma_begin() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int kPending> __device__ __forceinline__ void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
}
/* Keeps the compiler from moving uses of accumulators across a wait. */
template <int kCount> __device__ __forceinline__ void pin(float (&d)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) asm volatile("" : "+f"(d[i])::"memory");
}

/* Tells the compiler that what is in these registers is of no use any more, so that it need not keep it. */
template <int kCount> __device__ __forceinline__ void forget(float (&d)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) asm volatile("" : "=f"(d[i])::"memory");
}

/* d[64 x N] += A[64 x 16] * B[16 x N] (d = A * B when !accumulate). A K-major, or M-major with kTransposeA; B K-major. */
template <typename T, int kTransposeA, int kCount> struct Wgmma;

#define VA_R4(i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define VA_R12(i) VA_R4(i), VA_R4(i + 4), VA_R4(i + 8)
#define VA_N12 "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11"
#define VA_R8(i) VA_R4(i), VA_R4(i + 4)
#define VA_N20 VA_N12 ",%12,%13,%14,%15,%16,%17,%18,%19"
#define VA_N24 VA_N12 ",%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23"
#define VA_N36 VA_N24 ",%24,%25,%26,%27,%28,%29,%30,%31,%32,%33,%34,%35"
#define VA_WGMMA(TYPE, NAME, TRANSPOSE, N, COUNT, LIST, A, B, P, ...)                                                  \
  template <> struct Wgmma<TYPE, TRANSPOSE, COUNT> {                                                                   \
    static __device__ __forceinline__ void run(float (&d)[COUNT], uint64_t a, uint64_t b, int accumulate) {            \
      asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, " P ", 0;\n"                                                      \
                   "wgmma.mma_async.sync.aligned.m64n" N "k16.f32." NAME "." NAME " {" LIST "}, " A ", " B             \
                   ", p, 1, 1, " #TRANSPOSE ", 0;\n}\n"                                                                \
                   : __VA_ARGS__ : "l"(a), "l"(b), "r"(accumulate));                                                   \
    }                                                                                                                  \
  }
#define VA_WGMMA_SIZES(TYPE, NAME, TRANSPOSE)                                                                          \
  VA_WGMMA(TYPE, NAME, TRANSPOSE, "24", 12, VA_N12, "%12", "%13", "%14", VA_R12(0));                                   \
  VA_WGMMA(TYPE, NAME, TRANSPOSE, "40", 20, VA_N20, "%20", "%21", "%22", VA_R12(0), VA_R8(12));                        \
  VA_WGMMA(TYPE, NAME, TRANSPOSE, "48", 24, VA_N24, "%24", "%25", "%26", VA_R12(0), VA_R12(12));                       \
  VA_WGMMA(TYPE, NAME, TRANSPOSE, "72", 36, VA_N36, "%36", "%37", "%38", VA_R12(0), VA_R12(12), VA_R12(24))
VA_WGMMA_SIZES(__nv_bfloat16, "bf16", 0);
VA_WGMMA_SIZES(__nv_bfloat16, "bf16", 1);
VA_WGMMA_SIZES(__half, "f16", 0);
VA_WGMMA_SIZES(__half, "f16", 1);
#undef VA_R4
#undef VA_R8
#undef VA_R12
#undef VA_N12
#undef VA_N20
#undef VA_N24
#undef VA_N36
#undef VA_WGMMA
#undef VA_WGMMA_SIZES

}  // namespace hopper
}  // namespace va
