/* The C ABI of every verify_attn kernel, CPU and CUDA: no torch, no C++ in the interface.
 *
 * Tree-verify MLA attention in absorbed form. Stream b has q_b draft-tree queries (rows qo_indptr[b] .. qo_indptr[b+1]).
 * Each sees the whole prefix of its stream and, among the q_b draft rows, those its mask row allows. One KV row
 * (latent_dim + rope_dim elements) is shared by all heads; its first latent_dim elements are also the value.
 *
 *   score[t,h,k] = scale * dot(q[t,h,:], kv[k,:])        over latent_dim + rope_dim
 *   out[t,h,:]   = sum_k softmax(score[t,h,:])[k] * kv[k,:latent_dim]
 *   lse[t,h]     = log(sum_k exp(score[t,h,k]))          natural log, float32
 *
 * A query row that sees nothing gives out = 0, lse = -inf. Padding rows are streams with q_b = 0, or rows past
 * qo_indptr[streams]: they are not touched.
 */
#ifndef VERIFY_ATTN_H
#define VERIFY_ATTN_H
#include <stdint.h>
#ifdef __cplusplus
extern "C" {
#endif

#define VERIFY_ATTN_ABI 1
#define VERIFY_ATTN_HEADER 65536 /* bytes at the start of a CUDA workspace that are zero between launches: counters of partial results */

enum verify_attn_dtype { VA_FLOAT32 = 0, VA_BFLOAT16 = 1, VA_FLOAT16 = 2 };
enum verify_attn_mask {
  VA_MASK_CAUSAL = 0, /* no mask given: draft row j visible to row i iff j <= i */
  VA_MASK_BITS = 1,   /* uint32 [tokens, mask_words]: bit j of row t = draft row j of its stream visible */
  VA_MASK_QLEN = 2,   /* uint8, stream b at mask_indptr[b], row-major [q_b, q_b] */
  VA_MASK_FULL = 3    /* uint8, stream b at mask_indptr[b], row-major [q_b, prefix_b + q_b]; prefix columns are ones */
};

typedef struct verify_attn_params {
  uint32_t abi;        /* VERIFY_ATTN_ABI */
  int32_t dtype;       /* of q, kv_pool, draft_kv and out */
  int32_t streams, tokens, heads;
  int32_t max_q;       /* no stream has more queries; host-known bound */
  int32_t max_prefix;  /* no prefix is longer; host-known bound, sizes the grid and workspace only */
  int32_t latent_dim, rope_dim;
  int32_t page_size;
  int32_t mask_kind, mask_words;
  int32_t index64;     /* 1: qo_indptr, kv_indptr, kv_indices, draft_slots, mask_indptr are int64; 0: int32 */
  int32_t num_splits;  /* KV splits; 0 = the variant chooses */
  int32_t chunk;       /* batch-invariant mode: keys a split, fixed; 0 = off */
  int32_t threads;     /* CPU only: worker threads; 0 = all */
  float scale;
  const void *q;            /* [tokens, heads, latent+rope], contiguous */
  const void *kv_pool;      /* [slots, kv_row_stride] */
  int64_t kv_row_stride;    /* elements between pool rows, >= latent+rope */
  const void *draft_kv;     /* [tokens, draft_row_stride] beside the pool, or NULL: draft rows at draft_slots */
  int64_t draft_row_stride;
  const void *draft_slots;  /* [tokens] pool slot of each draft row, used when draft_kv is NULL */
  const void *qo_indptr;    /* [streams+1] */
  const void *kv_indptr;    /* [streams+1], counts pages */
  const void *kv_indices;   /* page numbers; key i of stream b lives in slot page[kv_indptr[b] + i / page_size] * page_size + i % page_size */
  const int32_t *prefix_lens; /* [streams] keys in the prefix, read on the device */
  const void *mask;
  const void *mask_indptr;  /* [streams+1], element offsets; VA_MASK_QLEN and VA_MASK_FULL */
  void *out;                /* [tokens, heads, latent] */
  float *lse;               /* [tokens, heads] or NULL */
  void *workspace;          /* workspace_bytes as the _workspace function of the variant asks. CUDA: aligned to 16 bytes, on the device of q, zeroed once by the
                               caller. Every variant leaves its first VERIFY_ATTN_HEADER bytes zeroed, so one serves all, one call after another on a stream */
  int64_t workspace_bytes;
  void *stream;             /* cudaStream_t; unused on the CPU */
} verify_attn_params;

/* Every variant <v> exports:
 *   int64_t     verify_attn_<v>_workspace(const verify_attn_params*)  bytes, from host-known fields only (pointers may be NULL)
 *   const char *verify_attn_<v>_refuse(const verify_attn_params*)     NULL when it can do this, else the reason
 *   int         verify_attn_<v>_run(const verify_attn_params*)        0 ok, else an error code; see verify_attn_error()
 */
const char *verify_attn_error(void); /* text of the calling thread's last error */

#ifdef __cplusplus
}
#endif
#endif
