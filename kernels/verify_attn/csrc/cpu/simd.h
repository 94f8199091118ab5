// Vectors by the compiler's vector extension, as wide as the instruction set of the translation unit: 16 floats with
// AVX-512, 8 with AVX2, 4 elsewhere (SSE2, NEON). No intrinsics: the same source serves x86-64 and aarch64.
#pragma once
#include <stdint.h>
#include <string.h>

#if defined(__AVX512F__)
#define VA_LANES 16
#define VA_TILE 8 // keys or latents a register tile: 8 x 3 accumulators of 32 registers
#elif defined(__AVX2__)
#define VA_LANES 8
#define VA_TILE 4 // 4 x 3 accumulators of 16 registers
#elif defined(__aarch64__)
#define VA_LANES 4
#define VA_TILE 8
#else
#define VA_LANES 4
#define VA_TILE 4
#endif

namespace {

constexpr int kLanes = VA_LANES;
constexpr int kTile = VA_TILE;
constexpr int kPanelVectors = 3; // vectors of query rows a panel

typedef float vfloat __attribute__((vector_size(VA_LANES * 4)));
typedef int32_t vint __attribute__((vector_size(VA_LANES * 4)));

inline vfloat load(const float* p) { vfloat v; memcpy(&v, p, sizeof v); return v; }
inline void store(float* p, vfloat v) { memcpy(p, &v, sizeof v); }
inline vfloat splat(float x) { return x - vfloat{}; }
inline vint bits_of(vfloat v) { vint i; memcpy(&i, &v, sizeof i); return i; }
inline vfloat float_of(vint i) { vfloat v; memcpy(&v, &i, sizeof v); return v; }
inline vfloat select(vint mask, vfloat yes, vfloat no) { return float_of((mask & bits_of(yes)) | (~mask & bits_of(no))); }
inline vfloat greater(vfloat a, vfloat b) { return select(a > b, a, b); } // b where a is NaN

// 2^x for x <= 0, relative error below 3e-7 (measured over every float in [-126, 0]: see tests). 0 below -126, which
// is where -inf (a masked score) ends; NaN stays NaN.
// Method: x = n + f with n the nearest integer, 2^f by a degree-6 polynomial (Taylor of e^(f ln 2), |f| <= 1/2).
inline vfloat exp2_nonpositive(vfloat x) {
  const vint tiny = x < splat(-126.0f);
  x = select(tiny, splat(-126.0f), x);
  const vfloat magic = splat(12582912.0f); // 1.5 * 2^23: adding it rounds to an integer in the low mantissa bits
  const vfloat shifted = x + magic;
  const vfloat f = x - (shifted - magic);
  vfloat p = splat(1.5403530e-4f);
  p = p * f + splat(1.3333558e-3f);
  p = p * f + splat(9.6181291e-3f);
  p = p * f + splat(5.5504109e-2f);
  p = p * f + splat(2.4022651e-1f);
  p = p * f + splat(6.9314718e-1f);
  p = p * f + splat(1.0f);
  const vint n = bits_of(shifted) - bits_of(magic);
  return select(tiny, vfloat{}, p * float_of((n + 127) << 23));
}

} // namespace
