// The wgmma shape of the `hopper_rows` variant, m64n64k16 with rows on M.
#pragma once
#include "hopper_ptx.cuh"

namespace va {
namespace rows {

using namespace hopper;

/* d[64 x 64] += A[64 x 16] * B[16 x 64] (d = A * B when !accumulate); both in shared memory, K-major. */
template <typename T> struct Scores;
/* d[64 x 64] += A[64 x 16] * B[16 x 64]; A in registers, as an accumulator of 16 columns converted to T; B in shared memory, N-major. */
template <typename T> struct Values;

#define VA_R4(i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define VA_R16(i) VA_R4(i), VA_R4(i + 4), VA_R4(i + 8), VA_R4(i + 12)
#define VA_N32 "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31"
#define VA_ROWS(TYPE, NAME)                                                                                            \
  template <> struct Scores<TYPE> {                                                                                    \
    static __device__ __forceinline__ void run(float (&d)[32], uint64_t a, uint64_t b, int accumulate) {               \
      asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %34, 0;\n"                                                        \
                   "wgmma.mma_async.sync.aligned.m64n64k16.f32." NAME "." NAME " {" VA_N32 "}, %32, %33, p, 1, 1, 0, 0;\n}\n" \
                   : VA_R16(0), VA_R16(16) : "l"(a), "l"(b), "r"(accumulate));                                         \
    }                                                                                                                  \
  };                                                                                                                   \
  template <> struct Values<TYPE> {                                                                                    \
    static __device__ __forceinline__ void run(float (&d)[32], const uint32_t *a, uint64_t b) {                        \
      asm volatile("wgmma.mma_async.sync.aligned.m64n64k16.f32." NAME "." NAME " {" VA_N32 "}, {%32,%33,%34,%35}, %36, 1, 1, 1, 1;\n" \
                   : VA_R16(0), VA_R16(16) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));                      \
    }                                                                                                                  \
  }
VA_ROWS(__nv_bfloat16, "bf16");
VA_ROWS(__half, "f16");
#undef VA_R4
#undef VA_R16
#undef VA_N32
#undef VA_ROWS

/* Four 8x8 matrices of 16-bit elements to the 16-byte rows whose addresses the lanes hold. */
__device__ __forceinline__ void store_matrix4(uint32_t at, uint32_t a, uint32_t b, uint32_t c, uint32_t d) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(at), "r"(a), "r"(b), "r"(c), "r"(d) : "memory");
}

}  // namespace rows
}  // namespace va
