/* What one core can do: fused multiply-adds from registers, streaming reads, reads of random rows.
 * Compiled on the machine it measures (-O3 -march=native); called from one thread per core. Portable through vector
 * extensions: the compiler splits a 64-byte vector where the machine has narrower ones. */
#include <stddef.h>
#include <stdint.h>

typedef float vec __attribute__((vector_size(64), aligned(4), may_alias));
#define LANES 16
#define CHAINS 12 /* independent accumulators: latency times issue width of every core we know */

float probe_fma(int64_t rounds, float seed) {
  vec acc[CHAINS], a, b;
  for (int i = 0; i < LANES; i++) { a[i] = 0.999f + seed; b[i] = 1e-3f * i + seed; }
  for (int c = 0; c < CHAINS; c++) acc[c] = b + (float)c;
  for (int64_t r = 0; r < rounds; r++)
    for (int c = 0; c < CHAINS; c++) acc[c] = acc[c] * a + b;
  vec sum = acc[0];
  for (int c = 1; c < CHAINS; c++) sum += acc[c];
  float total = 0;
  for (int i = 0; i < LANES; i++) total += sum[i];
  return total; /* rounds * CHAINS * LANES * 2 operations */
}

static vec sum_row(const float *row, int64_t floats) {
  vec s0 = {0}, s1 = {0}, s2 = {0}, s3 = {0};
  int64_t i = 0;
  for (; i + 4 * LANES <= floats; i += 4 * LANES) {
    s0 += *(const vec *)(row + i);
    s1 += *(const vec *)(row + i + LANES);
    s2 += *(const vec *)(row + i + 2 * LANES);
    s3 += *(const vec *)(row + i + 3 * LANES);
  }
  for (; i + LANES <= floats; i += LANES) s0 += *(const vec *)(row + i);
  return (s0 + s1) + (s2 + s3);
}

/* Sums rows[order[k]] for k in [0, count); order NULL reads rows 0 .. count-1 one after the other. */
float probe_read(const float *base, const int64_t *order, int64_t count, int64_t floats) {
  vec sum = {0};
  for (int64_t k = 0; k < count; k++) {
    if (order && k + 8 < count) { /* a kernel may look ahead in its page table, so the ceiling does too */
      const float *next = base + order[k + 8] * floats;
      for (int64_t line = 0; line < floats; line += 16) __builtin_prefetch(next + line);
    }
    sum += sum_row(base + (order ? order[k] : k) * floats, floats);
  }
  float total = 0;
  for (int i = 0; i < LANES; i++) total += sum[i];
  return total;
}
