/* The GPU library (kvant/cuda.hpp) for C and for whoever calls C: opaque handles, status codes, no exception crosses.
 *
 * Every function that returns kvant_status sets its outputs only on KVANT_OK; objects are unchanged after a failed
 * call, and kvant_last_error() says which argument was refused and why. Handles are made by *_create and *_fork and
 * given back by *_destroy, which takes NULL. A pool may go before what was made from it; a sequence must outlive the
 * batches that it is bound to, a batch its plans. Work is enqueued on the stream given (a cudaStream_t; NULL is the
 * default stream), device pointers are plain pointers. Calls that share a pool belong on one thread at a time. */
#ifndef KVANT_CUDA_H
#define KVANT_CUDA_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

typedef enum kvant_status {
  KVANT_OK = 0,
  KVANT_INVALID_ARGUMENT = 1, /* a value outside its documented range, a null pointer */
  KVANT_OUT_OF_RANGE = 2,     /* beyond what the object was made for */
  KVANT_UNSUPPORTED = 3,      /* this build or this machine cannot do it; a CUDA call that failed */
  KVANT_BAD_FORMAT = 4,       /* text that is no recipe */
  KVANT_OUT_OF_MEMORY = 5,    /* the device's, the host's, or the pool has no free page */
  KVANT_INTERNAL = 6          /* none of these: a defect of the library */
} kvant_status;

/* The message of this thread's last failed call; "" before the first. Valid until the thread's next failed call. */
const char* kvant_last_error(void);

/* 1 when the current device can run the kernels of this build, else 0. */
int kvant_cuda_available(void);

typedef enum kvant_dtype { KVANT_F16 = 1, KVANT_BF16 = 2 } kvant_dtype;

/* What one layer caches per token. */
typedef struct kvant_cuda_shape {
  int kv_heads;
  int key_dim; /* 64, 96, 128, 192 or 256 */
  int value_dim;
  kvant_dtype dtype;
} kvant_cuda_shape;

typedef struct kvant_cuda_pool kvant_cuda_pool;
typedef struct kvant_cuda_sequence kvant_cuda_sequence;
typedef struct kvant_cuda_batch kvant_cuda_batch;
typedef struct kvant_cuda_plan kvant_cuda_plan;

/* ---- pool: device memory for sealed pages and for exact pages of 128 tokens, one layer */

/* recipe: a recipe text, for example "kitty:sink=4"; any that seals pages. */
kvant_status kvant_cuda_pool_create(const char* recipe, const kvant_cuda_shape* shape, int pages, int exact_pages,
                                    kvant_cuda_pool** pool);
void kvant_cuda_pool_destroy(kvant_cuda_pool* pool);
kvant_status kvant_cuda_pool_free_pages(const kvant_cuda_pool* pool, int* pages, int* exact_pages);
/* Bytes of device memory that the pool holds. */
kvant_status kvant_cuda_pool_bytes(const kvant_cuda_pool* pool, size_t* bytes);

/* Which channels of a head turn together: 2 i and 2 i + 1 ("norm" in ggml), or i and i + the number of pairs ("neox").
 */
typedef enum kvant_rotary_pairs { KVANT_PAIRS_ADJACENT = 0, KVANT_PAIRS_HALVES = 1 } kvant_rotary_pairs;

/* What the model does to a key of position p (RoPE): pair i turns by p * frequencies[i] radians and is multiplied by
 * `magnitude`; channels beyond the pairs stay as they are. */
typedef struct kvant_key_rotation {
  kvant_rotary_pairs pairs;
  int pair_count;            /* 1 to key_dim / 2 */
  const double* frequencies; /* host memory, [pair_count], magnitudes up to 10^6 */
  double magnitude;          /* 1/1024 to 1024 */
} kvant_key_rotation;

/* For recipes with rope=before, whose pools must know it before the first append; ignored by others. A token's position
 * is its number in the sequence. KVANT_INVALID_ARGUMENT for a rotation that does not fit the shape, or is another one
 * than that of the pages in use. */
kvant_status kvant_cuda_pool_set_key_rotation(kvant_cuda_pool* pool, const kvant_key_rotation* rotation);
/* values: how many numbers of the rows appended so far the CPU would refuse (NaN, infinities, bfloat16 beyond half of
 * its range). Zeros stand in their place, and their sequence's results are wrong from then on; those of others are
 * as they would be. Waits for the work on the stream. */
kvant_status kvant_cuda_pool_invalid_values(const kvant_cuda_pool* pool, void* stream, int64_t* values);
/* needed: 1 where the recipe has rope=before, else 0. */
kvant_status kvant_cuda_pool_needs_rotation(const kvant_cuda_pool* pool, int* needed);

/* ---- sequence */

/* An empty sequence. */
kvant_status kvant_cuda_sequence_create(const kvant_cuda_pool* pool, kvant_cuda_sequence** sequence);
void kvant_cuda_sequence_destroy(kvant_cuda_sequence* sequence);
/* Shares the sealed pages and copies the open ones. */
kvant_status kvant_cuda_sequence_fork(const kvant_cuda_sequence* sequence, void* stream, kvant_cuda_sequence** fork);
kvant_status kvant_cuda_sequence_length(const kvant_cuda_sequence* sequence, int64_t* tokens, int64_t* sealed_pages);

/* Pages of it that were sealed without the queries that the recipe would look at (waterfill, zipcache with
 * saliency=attention, kitty with selector=query): the device sees none. */
kvant_status kvant_cuda_sequence_blind_seals(const kvant_cuda_sequence* sequence, int64_t* pages);

/* ---- batch: the sequences of one call */

kvant_status kvant_cuda_batch_create(const kvant_cuda_pool* pool, int max_sequences, int64_t max_tokens,
                                     kvant_cuda_batch** batch);
void kvant_cuda_batch_destroy(kvant_cuda_batch* batch);
/* From now on row b of every call is sequences[b], all of them different. A sequence that another batch has changed
 * since is refused by every call until it is bound anew: KVANT_INVALID_ARGUMENT. */
kvant_status kvant_cuda_batch_bind(kvant_cuda_batch* batch, kvant_cuda_sequence* const* sequences, int count,
                                   void* stream);
/* Makes room for `tokens` more tokens per sequence; before a capture, in which pages that are missing are refused. */
kvant_status kvant_cuda_batch_reserve(kvant_cuda_batch* batch, int tokens, void* stream);
/* keys [sequence][row][kv_head][key_dim], rotated, and values [..][value_dim], dense, device memory. */
kvant_status kvant_cuda_batch_append(kvant_cuda_batch* batch, const void* keys, const void* values, int rows,
                                     void* stream);
/* Tells the host's side that a graph with an append of `rows` rows was launched once more; the append that was captured
 * has counted for the first launch. */
kvant_status kvant_cuda_batch_count_appended(kvant_cuda_batch* batch, int rows);
/* Encodes every full page that has at least the recipe's window of newer tokens. sealed: how many, a first page
 * of sinks only among them; plans made before are void unless it is 0. May be NULL. */
kvant_status kvant_cuda_batch_seal_ready(kvant_cuda_batch* batch, void* stream, int* sealed);

/* ---- attention */

typedef enum kvant_cuda_path {
  KVANT_CUDA_AUTOMATIC = 0, /* integer up to 8 rows, prefill beyond; reference where this build has none */
  KVANT_CUDA_INTEGER = 1,
  KVANT_CUDA_PREFILL = 2,
  KVANT_CUDA_REFERENCE = 3
} kvant_cuda_path;

/* All zero is a good start: {0}. */
typedef struct kvant_cuda_attend_options {
  float scale;        /* multiplies q.k; 0 means 1/sqrt(key_dim) */
  float softcap;      /* c > 0: scores become c * tanh(score / c) */
  const float* sinks; /* device pointer, learned sink logit per query head; NULL: none */
  int sliding_window; /* 0: unlimited */
  int overlap;        /* 1: the launch may begin while its predecessor in the stream ends */
  int pages_settled;  /* with overlap, 1: no page of the batch is written by the predecessor */
  int headroom;       /* tokens by which sequences may grow while the plan is valid, up to the batch's max_tokens */
  kvant_cuda_path path;
} kvant_cuda_attend_options;

/* Valid until pages of the batch are sealed or it is bound anew. rows: query rows per sequence, the last tokens of it,
 * 1 to 65535. query_heads: 1 to 16 times the KV heads. options: NULL for all zero. */
kvant_status kvant_cuda_plan_create(const kvant_cuda_batch* batch, int query_heads, int rows,
                                    const kvant_cuda_attend_options* options, kvant_cuda_plan** plan);
void kvant_cuda_plan_destroy(kvant_cuda_plan* plan);
/* Which kernel serves the plan: never KVANT_CUDA_AUTOMATIC. */
kvant_status kvant_cuda_plan_path(const kvant_cuda_plan* plan, kvant_cuda_path* path);
/* q [sequence][row][query_head][key_dim], out [..][value_dim], dense, aligned to 8 and 4 bytes; lse NULL or float
 * [sequence][row][query_head]. */
kvant_status kvant_cuda_plan_run(const kvant_cuda_plan* plan, const void* q, void* out, float* lse, void* stream);

#ifdef __cplusplus
}
#endif

#endif /* KVANT_CUDA_H */
