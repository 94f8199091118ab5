// The CPU kernel, compiled once for each instruction set (VA_ISA names it).
//
// How the work is mapped: query rows (token x head) lie along the vector lanes, in panels of 3 vectors. Q is transposed
// once a task, so that a KV row loaded once is broadcast to all rows: scores S^T[key][row] and O^T[latent][row] are two
// matrix products whose register tiles are VA_TILE keys (or latents) x 3 vectors. KV rows are gathered and converted to
// float once a block of kBlock keys; softmax runs vertically, without horizontal reductions.
//
// Every element is accumulated in one order (dims 0.., keys 0.. of the split) whatever its place in a tile, so a row's
// bits depend only on where its splits begin and end.
#include "simd.h"
#include "task.h"

#include <algorithm>
#include <cmath>
#include <limits>

namespace {

using verify_attn::Scratch;
using verify_attn::Shape;
using verify_attn::Task;

constexpr int kBlock = 128;   // keys a block: 295 KB of float at 576, in the second-level cache
constexpr int kDepth = 96;    // dims of Q a pass: 18 KB a panel, in the first-level cache
constexpr int kPanel = kPanelVectors * kLanes;
constexpr float kMinusInf = -std::numeric_limits<float>::infinity();

inline int64_t up(int64_t n, int64_t to) { return (n + to - 1) / to * to; }
inline int64_t key_stride(int latent, int row) { return up(std::max<int64_t>(up(latent, kTile), row), 16) + 16; }
inline int64_t latent_rows(int latent) { return up(latent, kTile); }
inline int panel_vectors(int64_t rows_left) { return (int)std::min<int64_t>(kPanelVectors, up(rows_left, kLanes) / kLanes); }

// ---- element types ----

inline float half_to_float(uint16_t h) {
  uint32_t bits = (uint32_t)(h & 0x7fff) << 13;
  float value;
  if ((h & 0x7c00) == 0x7c00) {
    bits |= 0x7f800000u;
    memcpy(&value, &bits, 4);
  } else {
    memcpy(&value, &bits, 4);
    value *= 0x1p112f; // rebias the exponent; subnormal halves come out right
  }
  return (h & 0x8000) ? -value : value;
}

inline float bfloat_to_float(uint16_t b) {
  const uint32_t bits = (uint32_t)b << 16;
  float value;
  memcpy(&value, &bits, 4);
  return value;
}

inline uint16_t float_to_bfloat(float x) { // to nearest even
  uint32_t bits;
  memcpy(&bits, &x, 4);
  if ((bits & 0x7fffffff) > 0x7f800000) return (uint16_t)((bits >> 16) | 0x40);
  return (uint16_t)((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

inline uint16_t float_to_half(float x) { // to nearest even
  uint32_t bits;
  memcpy(&bits, &x, 4);
  const uint16_t sign = (uint16_t)((bits >> 16) & 0x8000);
  bits &= 0x7fffffff;
  if (bits > 0x7f800000) return sign | 0x7e00;
  if (bits >= 0x47800000) return sign | 0x7c00; // 65536 and over
  if (bits < 0x38800000) {                      // subnormal half: let a float addition round
    float magnitude;
    memcpy(&magnitude, &bits, 4);
    magnitude += 0.5f;
    uint32_t rounded;
    memcpy(&rounded, &magnitude, 4);
    return sign | (uint16_t)(rounded - 0x3f000000);
  }
  bits += 0xc8000fff + ((bits >> 13) & 1); // rebias by -112, round
  return sign | (uint16_t)(bits >> 13);
}

template <int DTYPE> inline float element(const void* base, int64_t i) {
  if (DTYPE == 0) return static_cast<const float*>(base)[i];
  const uint16_t raw = static_cast<const uint16_t*>(base)[i];
  return DTYPE == 1 ? bfloat_to_float(raw) : half_to_float(raw);
}

template <int DTYPE> inline void copy_row(const void* base, int64_t offset, int n, float* to) {
  for (int i = 0; i < n; ++i) to[i] = element<DTYPE>(base, offset + i);
}

// ---- packing ----

template <int DTYPE> void pack_queries_as(const Task& t, float* queries) {
  const Shape& s = *t.shape;
  const int64_t first = t.token0 * s.heads + t.row0;
  for (int64_t r0 = 0; r0 < t.rows; r0 += kPanel) {
    const int width = panel_vectors(t.rows - r0) * kLanes;
    float* panel = queries + r0 * s.row;
    for (int d0 = 0; d0 < s.row; d0 += 16) { // 16 dims at a time: a cache line of each row
      const int d1 = std::min(d0 + 16, s.row);
      for (int lane = 0; lane < width; ++lane) {
        const bool live = r0 + lane < t.rows;
        const int64_t offset = (first + r0 + lane) * s.row;
        for (int d = d0; d < d1; ++d) panel[(int64_t)d * width + lane] = live ? element<DTYPE>(s.q, offset + d) : 0.0f;
      }
    }
  }
}

void pack_queries(const Task& t, float* queries) {
  if (t.shape->dtype == 0) pack_queries_as<0>(t, queries);
  else if (t.shape->dtype == 1) pack_queries_as<1>(t, queries);
  else pack_queries_as<2>(t, queries);
}

// Where KV row `key` of the task's stream lies: base pointer and element offset.
inline const void* locate(const Task& t, int64_t key, int64_t* offset) {
  const Shape& s = *t.shape;
  if (key < t.prefix) {
    const int64_t page = s.pages[t.page0 + key / s.page_size];
    *offset = (page * s.page_size + key % s.page_size) * s.pool_stride;
    return s.pool;
  }
  const int64_t token = t.token0 + (key - t.prefix);
  *offset = s.draft ? token * s.draft_stride : s.draft_slots[token] * s.pool_stride;
  return s.draft ? s.draft : s.pool;
}

inline bool finite_row(const float* row, int n) {
  float poison = 0.0f; // 0 * inf and 0 * NaN are NaN
  for (int i = 0; i < n; ++i) poison += row[i] * 0.0f;
  return poison == 0.0f;
}

// Gathers keys [begin, begin + n) as float and zeroes the rows up to a whole tile. A draft row with a NaN or infinity
// is zeroed and noted in `broken`: rows that see it become NaN (apply_mask), rows that do not must not (0 * NaN would).
template <int DTYPE> void pack_keys_as(const Task& t, int64_t begin, int n, float* keys, bool* broken) {
  const Shape& s = *t.shape;
  const int64_t stride = key_stride(s.latent, s.row);
  for (int i = 0; i < n; ++i) {
    int64_t offset;
    const void* base = locate(t, begin + i, &offset);
    float* to = keys + i * stride;
    copy_row<DTYPE>(base, offset, s.row, to);
    broken[i] = begin + i >= t.prefix && !finite_row(to, s.row);
    if (broken[i]) std::fill(to, to + s.row, 0.0f);
  }
  for (int i = n; i < up(n, kTile); ++i) std::fill(keys + i * stride, keys + (i + 1) * stride, 0.0f);
}

void pack_keys(const Task& t, int64_t begin, int n, float* keys, bool* broken) {
  if (t.shape->dtype == 0) pack_keys_as<0>(t, begin, n, keys, broken);
  else if (t.shape->dtype == 1) pack_keys_as<1>(t, begin, n, keys, broken);
  else pack_keys_as<2>(t, begin, n, keys, broken);
}

// Asks for the KV rows of a coming block a few cache lines at a time, between register tiles, so that their way from
// memory hides behind the products; asked for in bulk they would fill the miss queue and stall it.
class Prefetcher {
 public:
  Prefetcher(const Task& t, int64_t begin, int64_t end, int64_t steps)
      : task_(t), key_(begin), end_(end), row_bytes_((int64_t)t.shape->row * (t.shape->dtype == 0 ? 4 : 2)) {
    const int64_t lines = (row_bytes_ + 63) / 64;
    lines_a_step_ = ((end - begin) * lines + steps - 1) / steps;
  }
  void step() {
    for (int64_t n = 0; n < lines_a_step_ && key_ < end_; ++n) {
      if (byte_ == 0) row_ = address();
      __builtin_prefetch(row_ + byte_, 0, 2);
      byte_ += 64;
      if (byte_ >= row_bytes_) byte_ = 0, ++key_;
    }
  }

 private:
  const char* address() const {
    int64_t offset;
    const char* base = static_cast<const char*>(locate(task_, key_, &offset));
    return base + offset * (task_.shape->dtype == 0 ? 4 : 2);
  }
  const Task& task_;
  int64_t key_, end_, row_bytes_, lines_a_step_;
  int64_t byte_ = 0;
  const char* row_ = nullptr;
};

// ---- the two products ----

// scores[key][row] (+)= sum over `depth` dims of keys[key][dim] * queries[dim][row], for VA_TILE keys.
template <int V> inline void score_tile(const float* keys, int64_t stride, const float* queries, int depth, float* scores,
                                        bool first) {
  constexpr int width = V * kLanes;
  vfloat sum[kTile][V];
  for (int m = 0; m < kTile; ++m)
    for (int v = 0; v < V; ++v) sum[m][v] = first ? vfloat{} : load(scores + m * width + v * kLanes);
  for (int d = 0; d < depth; ++d) {
    vfloat q[V];
    for (int v = 0; v < V; ++v) q[v] = load(queries + (int64_t)d * width + v * kLanes);
    for (int m = 0; m < kTile; ++m) {
      const vfloat k = splat(keys[m * stride + d]);
      for (int v = 0; v < V; ++v) sum[m][v] += k * q[v];
    }
  }
  for (int m = 0; m < kTile; ++m)
    for (int v = 0; v < V; ++v) store(scores + m * width + v * kLanes, sum[m][v]);
}

// output[latent][row] += sum over n keys of keys[key][latent] * weights[key][row], for VA_TILE latents.
template <int V> inline void output_tile(const float* keys, int64_t stride, const float* weights, int n, float* output) {
  constexpr int width = V * kLanes;
  vfloat sum[kTile][V];
  for (int m = 0; m < kTile; ++m)
    for (int v = 0; v < V; ++v) sum[m][v] = load(output + m * width + v * kLanes);
  for (int k = 0; k < n; ++k) {
    vfloat w[V];
    for (int v = 0; v < V; ++v) w[v] = load(weights + k * width + v * kLanes);
    for (int m = 0; m < kTile; ++m) {
      const vfloat x = splat(keys[k * stride + m]);
      for (int v = 0; v < V; ++v) sum[m][v] += x * w[v];
    }
  }
  for (int m = 0; m < kTile; ++m)
    for (int v = 0; v < V; ++v) store(output + m * width + v * kLanes, sum[m][v]);
}

// ---- one block of keys for one panel of rows ----

// Scores of draft keys that a row may not see become -inf; of a broken draft row that it sees, NaN.
void apply_mask(const Task& t, int64_t begin, int n, int64_t row0, int width, const bool* broken, float* scores) {
  const int heads = t.shape->heads;
  for (int i = (int)std::max<int64_t>(0, t.prefix - begin); i < n; ++i) {
    const int64_t j = begin + i - t.prefix;
    for (int lane = 0; lane < width; ++lane) {
      if (row0 + lane >= t.rows) break;
      const int64_t token = (t.row0 + row0 + lane) / heads;
      const bool visible = t.mask[token * t.mask_words + j / 32] >> (j % 32) & 1;
      if (!visible) scores[i * width + lane] = kMinusInf;
      else if (broken[i]) scores[i * width + lane] = std::numeric_limits<float>::quiet_NaN();
    }
  }
}

// Online softmax (arXiv:1805.02867): turns scores into weights exp2(score - max) and returns in `shrink` what
// older sums must be multiplied by; whether any of them is not 1.
template <int V> bool softmax_block(float* scores, int n, float scale_log2, float* max, float* sum, vfloat* shrink) {
  constexpr int width = V * kLanes;
  bool changed = false;
  for (int v = 0; v < V; ++v) {
    float* column = scores + v * kLanes;
    const vfloat scale = splat(scale_log2), old_max = load(max + v * kLanes);
    vfloat top = old_max;
    for (int k = 0; k < n; ++k) {
      const vfloat x = load(column + k * width) * scale;
      store(column + k * width, x);
      top = greater(x, top);
    }
    const vfloat base = select(top == splat(kMinusInf), vfloat{}, top); // a row that has seen nothing yet
    vfloat total = vfloat{};
    for (int k = 0; k < n; ++k) {
      const vfloat w = exp2_nonpositive(load(column + k * width) - base);
      store(column + k * width, w);
      total += w;
    }
    shrink[v] = exp2_nonpositive(old_max - base);
    store(max + v * kLanes, top);
    store(sum + v * kLanes, load(sum + v * kLanes) * shrink[v] + total);
    const vint same = shrink[v] == splat(1.0f);
    for (int lane = 0; lane < kLanes; ++lane) changed |= same[lane] == 0;
  }
  return changed;
}

struct Block {
  int64_t begin;
  int n; // keys
  const bool* broken;
};

inline int passes(const Shape& s) { return (s.row + kDepth - 1) / kDepth; }
inline int64_t tiles(int64_t n) { return up(n, kTile) / kTile; }

template <int V> void attend_panel(const Task& t, const Block& b, int64_t row0, const Scratch& scratch, float* output,
                                   float* max, float* sum, Prefetcher& ahead) {
  constexpr int width = V * kLanes;
  const Shape& s = *t.shape;
  const int64_t stride = key_stride(s.latent, s.row);
  for (int d0 = 0; d0 < s.row; d0 += kDepth) {
    const float* queries = scratch.queries + row0 * s.row + (int64_t)d0 * width;
    for (int64_t tile = 0; tile < tiles(b.n); ++tile) {
      ahead.step();
      score_tile<V>(scratch.keys + tile * kTile * stride + d0, stride, queries, std::min(kDepth, s.row - d0),
                    scratch.scores + tile * kTile * width, d0 == 0);
    }
  }
  if (b.begin + b.n > t.prefix) apply_mask(t, b.begin, b.n, row0, width, b.broken, scratch.scores);
  vfloat shrink[V];
  const bool changed = softmax_block<V>(scratch.scores, b.n, s.scale_log2, max, sum, shrink);
  const int64_t latents = latent_rows(s.latent);
  if (changed)
    for (int64_t l = 0; l < latents; ++l)
      for (int v = 0; v < V; ++v) {
        float* o = output + l * width + v * kLanes;
        store(o, load(o) * shrink[v]);
      }
  for (int64_t l = 0; l < latents; l += kTile) {
    ahead.step();
    output_tile<V>(scratch.keys + l, stride, scratch.scores, b.n, output + l * width);
  }
}

// ---- partial results: O transposed panel by panel, then the maxima, then the sums ----

inline size_t partial_floats(int64_t rows, int latent) { return up(rows, kLanes) * (latent_rows(latent) + 2); }
inline float* maxima(const Task& t, float* partial) { return partial + up(t.rows, kLanes) * latent_rows(t.shape->latent); }
inline float* sums(const Task& t, float* partial) { return maxima(t, partial) + up(t.rows, kLanes); }

void attend(const Task& t, int64_t key_begin, int64_t key_end, const Scratch& scratch, float* partial) {
  const int64_t latents = latent_rows(t.shape->latent);
  float *max = maxima(t, partial), *sum = sums(t, partial);
  std::fill(partial, max, 0.0f);
  std::fill(max, sum, kMinusInf);
  std::fill(sum, sum + (sum - max), 0.0f);
  bool broken[kBlock];
  for (int64_t k0 = key_begin; k0 < key_end; k0 += kBlock) {
    const Block b{k0, (int)std::min<int64_t>(kBlock, key_end - k0), broken};
    pack_keys(t, k0, b.n, scratch.keys, broken);
    const int64_t steps = (t.rows + kPanel - 1) / kPanel * (passes(*t.shape) * tiles(b.n) + latents / kTile);
    Prefetcher ahead(t, std::min(k0 + kBlock, key_end), std::min(k0 + 2 * kBlock, key_end), steps);
    for (int64_t r0 = 0; r0 < t.rows; r0 += kPanel) {
      float* output = partial + r0 * latents;
      switch (panel_vectors(t.rows - r0)) {
        case 1: attend_panel<1>(t, b, r0, scratch, output, max + r0, sum + r0, ahead); break;
        case 2: attend_panel<2>(t, b, r0, scratch, output, max + r0, sum + r0, ahead); break;
        default: attend_panel<3>(t, b, r0, scratch, output, max + r0, sum + r0, ahead);
      }
    }
  }
}

void fold(const Task& t, float* into, const float* partial) {
  const int64_t latents = latent_rows(t.shape->latent);
  float *max = maxima(t, into), *sum = sums(t, into);
  const float *other_max = maxima(t, const_cast<float*>(partial)), *other_sum = sums(t, const_cast<float*>(partial));
  for (int64_t r0 = 0; r0 < t.rows; r0 += kPanel) {
    const int vectors = panel_vectors(t.rows - r0), width = vectors * kLanes;
    for (int v = 0; v < vectors; ++v) {
      const int64_t r = r0 + v * kLanes;
      const vfloat a = load(max + r), b = load(other_max + r), top = greater(b, a);
      const vfloat base = select(top == splat(kMinusInf), vfloat{}, top);
      const vfloat mine = exp2_nonpositive(a - base), theirs = exp2_nonpositive(b - base);
      store(max + r, top);
      store(sum + r, load(sum + r) * mine + load(other_sum + r) * theirs);
      float* o = into + r0 * latents + v * kLanes;
      const float* p = partial + r0 * latents + v * kLanes;
      for (int64_t l = 0; l < latents; ++l) store(o + l * width, load(o + l * width) * mine + load(p + l * width) * theirs);
    }
  }
}

template <int DTYPE> void finish_as(const Task& t, const float* partial) {
  const Shape& s = *t.shape;
  const int64_t latents = latent_rows(s.latent), first = t.token0 * s.heads + t.row0;
  const float *max = maxima(t, const_cast<float*>(partial)), *sum = sums(t, const_cast<float*>(partial));
  for (int64_t r0 = 0; r0 < t.rows; r0 += kPanel) {
    const int width = panel_vectors(t.rows - r0) * kLanes, live = (int)std::min<int64_t>(width, t.rows - r0);
    const float* panel = partial + r0 * latents;
    float inverse[kPanel];
    for (int lane = 0; lane < live; ++lane) {
      const float total = sum[r0 + lane];
      inverse[lane] = total == 0.0f ? 0.0f : 1.0f / total; // saw nothing: output 0
      if (s.lse)
        s.lse[first + r0 + lane] =
            total == 0.0f ? kMinusInf : (float)((max[r0 + lane] + std::log2((double)total)) * 0.693147180559945309);
    }
    for (int l0 = 0; l0 < s.latent; l0 += 16) { // 16 latents at a time: a cache line of each row
      const int l1 = std::min(l0 + 16, s.latent);
      for (int lane = 0; lane < live; ++lane) {
        const int64_t offset = (first + r0 + lane) * s.latent;
        for (int l = l0; l < l1; ++l) {
          const float x = panel[(int64_t)l * width + lane] * inverse[lane];
          if (DTYPE == 0) static_cast<float*>(s.out)[offset + l] = x;
          else static_cast<uint16_t*>(s.out)[offset + l] = DTYPE == 1 ? float_to_bfloat(x) : float_to_half(x);
        }
      }
    }
  }
}

void finish(const Task& t, const float* partial) {
  if (t.shape->dtype == 0) finish_as<0>(t, partial);
  else if (t.shape->dtype == 1) finish_as<1>(t, partial);
  else finish_as<2>(t, partial);
}

// ---- for the tests and the ceilings ----

void exp2_array(const float* x, float* y, int64_t n) {
  for (int64_t i = 0; i < n; i += kLanes) {
    float in[kLanes] = {}, out[kLanes];
    const int live = (int)std::min<int64_t>(kLanes, n - i);
    std::copy(x + i, x + i + live, in);
    store(out, exp2_nonpositive(load(in)));
    std::copy(out, out + live, y + i);
  }
}

double fma_flops(int64_t rounds) {
  constexpr int chains = VA_TILE * kPanelVectors; // as many independent accumulators as the kernel keeps
  vfloat sum[chains];
#pragma GCC unroll 32
  for (int i = 0; i < chains; ++i) sum[i] = splat((float)i);
  const vfloat a = splat(0.999f), b = splat(0.001f);
  for (int64_t r = 0; r < rounds; ++r) {
#pragma GCC unroll 32
    for (int i = 0; i < chains; ++i) sum[i] = sum[i] * a + b;
  }
  vfloat total = vfloat{};
  for (int i = 0; i < chains; ++i) total += sum[i];
  volatile float keep = total[0];
  (void)keep;
  return 2.0 * kLanes * chains * (double)rounds;
}

double read_sum(const float* data, int64_t n) {
  vfloat sum[8] = {};
  for (int64_t i = 0; i + 8 * kLanes <= n; i += 8 * kLanes)
    for (int j = 0; j < 8; ++j) sum[j] += load(data + i + j * kLanes);
  vfloat total = vfloat{};
  for (int j = 0; j < 8; ++j) total += sum[j];
  double result = 0;
  for (int lane = 0; lane < kLanes; ++lane) result += total[lane];
  return result;
}

size_t queries_floats(int64_t rows, int row) { return up(rows, kLanes) * row; }
size_t keys_floats(int latent, int row) { return up(kBlock, kTile) * key_stride(latent, row); }
size_t scores_floats() { return (size_t)kBlock * kPanel; }

#define VA_TEXT2(x) #x
#define VA_TEXT(x) VA_TEXT2(x)
#define VA_JOIN2(a, b) a##b
#define VA_JOIN(a, b) VA_JOIN2(a, b)

constexpr verify_attn::Kernels kTable = {VA_TEXT(VA_ISA), kPanel,  queries_floats, keys_floats, scores_floats, partial_floats,
                                         pack_queries,    attend,  fold,           finish,      exp2_array,    fma_flops,
                                         read_sum};

} // namespace

const verify_attn::Kernels* verify_attn::VA_JOIN(kernels_, VA_ISA)() { return &kTable; }
