// What the planner (entry.cpp) hands to the kernels compiled for one instruction set (kernel.cpp).
#pragma once
#include <stddef.h>
#include <stdint.h>

namespace verify_attn {

// Where element i of an int32 or int64 array is read.
struct Index {
  const void* data;
  bool wide;
  int64_t operator[](int64_t i) const {
    return wide ? static_cast<const int64_t*>(data)[i] : static_cast<const int32_t*>(data)[i];
  }
};

struct Shape {
  int dtype, heads, latent, row; // row = latent + rope
  int page_size;
  float scale_log2; // scale * log2(e): scores are kept in the base-2 domain
  const void* q;
  const void* pool;
  int64_t pool_stride;
  const void* draft; // beside the pool, or null
  int64_t draft_stride;
  Index draft_slots, pages;
  void* out;
  float* lse;
};

// A group of query rows of one stream. Row r of a stream is token r / heads, head r % heads.
struct Task {
  const Shape* shape;
  int64_t token0;      // first token of the stream
  int64_t page0;       // first entry of the stream in `pages`
  int64_t prefix;      // keys 0 .. prefix are the prefix, prefix .. prefix + draft the stream's draft rows
  int64_t draft;       // q_b
  int64_t row0, rows;  // rows of the stream this task owns
  const uint32_t* mask; // [draft, mask_words] bits: draft key j visible to token t
  int mask_words;
};

// Scratch of one thread; each pointer is 64-byte aligned.
struct Scratch {
  float* queries; // Q transposed, panel by panel: [row][panel rows]
  float* keys;    // a block of KV rows as float: [block][key_stride]
  float* scores;  // [block][panel rows]
  float* partial; // a second accumulator, for folding splits one after another
};

// Functions compiled once for each instruction set.
struct Kernels {
  const char* name;
  int panel_rows;
  size_t (*queries_floats)(int64_t rows, int row);
  size_t (*keys_floats)(int latent, int row);
  size_t (*scores_floats)();
  size_t (*partial_floats)(int64_t rows, int latent); // of one (task, split): O transposed, then max, then sum
  void (*pack_queries)(const Task&, float* queries);
  void (*attend)(const Task&, int64_t key_begin, int64_t key_end, const Scratch&, float* partial);
  void (*fold)(const Task&, float* into, const float* partial); // into = into merged with partial
  void (*finish)(const Task&, const float* partial);            // writes out and lse
  void (*exp2)(const float* x, float* y, int64_t n);            // the exponential it uses, for the tests
  double (*fma_flops)(int64_t rounds);                          // runs FMAs in registers; returns the FLOPs done
  double (*read_sum)(const float* data, int64_t n);             // reads n floats
};

const Kernels* kernels_v3();       // x86-64-v3: AVX2 and FMA
const Kernels* kernels_v4();       // x86-64-v4: AVX-512
const Kernels* kernels_portable(); // whatever the compiler's default target has: NEON on aarch64

} // namespace verify_attn
