/* The C ABI from C11: attention over rows that are all exact against double arithmetic, sealed pages against the
 * library's reference path, and what is refused. Exits with 77 after the parts that need no GPU where there is none. */
#include <cuda_runtime_api.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "kvant/cuda.h"

#define CHECK(condition)                                                                      \
  do {                                                                                        \
    if (!(condition)) {                                                                       \
      fprintf(stderr, "%s:%d: %s: %s\n", __FILE__, __LINE__, #condition, kvant_last_error()); \
      exit(1);                                                                                \
    }                                                                                         \
  } while (0)

enum { HEADS = 2, GROUP = 4, DIM = 128, QUERY_HEADS = HEADS * GROUP };

/* Multiples of 1/16 in [-2, 2): exact in binary16. */
static double number(unsigned i) {
  i = i * 2654435761U + 12345U;
  i ^= i >> 15;
  return ((double)(i * 2246822519U >> 26) - 32.0) / 16.0;
}

static uint16_t half_of(double x) {
  int exponent;
  const double fraction = frexp(fabs(x), &exponent); /* [0.5, 1) */
  if (x == 0) return 0;
  return (uint16_t)((x < 0 ? 0x8000 : 0) | (exponent + 14) << 10 | (int)((fraction * 2 - 1) * 1024));
}

static double double_of(uint16_t h) {
  const int exponent = h >> 10 & 31;
  const double x = exponent == 0 ? ldexp(h & 1023, -24) : ldexp(1024 + (h & 1023), exponent - 25);
  return h & 0x8000 ? -x : x;
}

/* `count` numbers on the device, from `seed` on. */
static void* device_numbers(size_t count, unsigned seed) {
  uint16_t* host = malloc(count * 2);
  void* device = NULL;
  CHECK(host != NULL && cudaMalloc(&device, count * 2) == cudaSuccess);
  for (size_t i = 0; i < count; ++i) host[i] = half_of(number(seed + (unsigned)i));
  CHECK(cudaMemcpy(device, host, count * 2, cudaMemcpyHostToDevice) == cudaSuccess);
  free(host);
  return device;
}

static void run_plan(const kvant_cuda_batch* batch, int rows, kvant_cuda_path path, const void* q, double* out) {
  const size_t count = (size_t)rows * QUERY_HEADS * DIM;
  uint16_t* host = malloc(count * 2);
  void* device = NULL;
  kvant_cuda_attend_options options = {0};
  kvant_cuda_plan* plan = NULL;
  kvant_cuda_path used = KVANT_CUDA_AUTOMATIC;
  options.path = path;
  CHECK(host != NULL && cudaMalloc(&device, count * 2) == cudaSuccess);
  CHECK(kvant_cuda_plan_create(batch, QUERY_HEADS, rows, &options, &plan) == KVANT_OK);
  CHECK(kvant_cuda_plan_path(plan, &used) == KVANT_OK);
  CHECK(used == (path != KVANT_CUDA_AUTOMATIC ? path : rows > 8 ? KVANT_CUDA_PREFILL : KVANT_CUDA_INTEGER));
  CHECK(kvant_cuda_plan_run(plan, q, device, NULL, NULL) == KVANT_OK);
  CHECK(cudaMemcpy(host, device, count * 2, cudaMemcpyDeviceToHost) == cudaSuccess);
  for (size_t i = 0; i < count; ++i) out[i] = double_of(host[i]);
  kvant_cuda_plan_destroy(plan);
  cudaFree(device);
  free(host);
}

static double relative_error(const double* a, const double* b, size_t count) {
  double difference = 0, norm = 0;
  for (size_t i = 0; i < count; ++i) {
    difference += (a[i] - b[i]) * (a[i] - b[i]);
    norm += b[i] * b[i];
  }
  return sqrt(difference / norm);
}

/* One sequence of `length` rows: keys from seed 1, values from seed 500000, queries from seed 900000. */
static void attend_exactly(int length, int rows, double* out) {
  double* weight = malloc((size_t)length * sizeof(double));
  CHECK(weight != NULL);
  for (int r = 0; r < rows; ++r) {
    for (int h = 0; h < QUERY_HEADS; ++h) {
      double* to = out + ((size_t)r * QUERY_HEADS + (size_t)h) * DIM;
      const unsigned q = 900000U + ((unsigned)r * QUERY_HEADS + (unsigned)h) * DIM;
      const int seen = length - rows + r + 1;
      double sum = 0;
      for (int d = 0; d < DIM; ++d) to[d] = 0;
      for (int t = 0; t < seen; ++t) {
        const unsigned row = ((unsigned)t * HEADS + (unsigned)(h / GROUP)) * DIM;
        double score = 0;
        for (int d = 0; d < DIM; ++d) score += number(q + (unsigned)d) * number(1 + row + (unsigned)d);
        weight[t] = exp(score / sqrt(DIM));
        sum += weight[t];
        for (int d = 0; d < DIM; ++d) to[d] += weight[t] * number(500000U + row + (unsigned)d);
      }
      for (int d = 0; d < DIM; ++d) to[d] /= sum;
    }
  }
  free(weight);
}

static void test_refusals(void) {
  const kvant_cuda_shape shape = {HEADS, DIM, DIM, KVANT_F16};
  kvant_cuda_shape odd = shape;
  kvant_cuda_pool* pool = NULL;
  CHECK(kvant_last_error()[0] == '\0');
  CHECK(kvant_cuda_pool_create("nonsense:k=2", &shape, 1, 1, &pool) != KVANT_OK && pool == NULL);
  CHECK(strstr(kvant_last_error(), "nonsense") != NULL);
  CHECK(kvant_cuda_pool_create(NULL, &shape, 1, 1, &pool) == KVANT_INVALID_ARGUMENT);
  CHECK(strstr(kvant_last_error(), "recipe") != NULL);
  CHECK(kvant_cuda_pool_create("kivi:k=2,v=2", NULL, 1, 1, &pool) == KVANT_INVALID_ARGUMENT);
  CHECK(kvant_cuda_pool_create("kivi:k=2,v=2", &shape, 1, 1, NULL) == KVANT_INVALID_ARGUMENT);
  odd.key_dim = 80;
  CHECK(kvant_cuda_pool_create("kivi:k=2,v=2", &odd, 1, 1, &pool) == KVANT_INVALID_ARGUMENT);
  CHECK(strstr(kvant_last_error(), "80") != NULL);
  CHECK(kvant_cuda_batch_reserve(NULL, 1, NULL) == KVANT_INVALID_ARGUMENT);
  CHECK(kvant_cuda_pool_invalid_values(NULL, NULL, NULL) == KVANT_INVALID_ARGUMENT);
  CHECK(kvant_cuda_plan_run(NULL, NULL, NULL, NULL, NULL) == KVANT_INVALID_ARGUMENT);
  kvant_cuda_pool_destroy(NULL);
  kvant_cuda_sequence_destroy(NULL);
  kvant_cuda_batch_destroy(NULL);
  kvant_cuda_plan_destroy(NULL);
}

/* Keys before RoPE: pages sealed on the device against the library's reference path, and what is refused. */
static void test_key_rotation(void) {
  enum { TOKENS = 600 };
  const kvant_cuda_shape shape = {HEADS, DIM, DIM, KVANT_F16};
  const size_t count = (size_t)QUERY_HEADS * DIM;
  double frequencies[DIM / 2 + 1], other[DIM / 2];
  kvant_key_rotation rotation = {KVANT_PAIRS_HALVES, DIM / 2, frequencies, 1.0};
  kvant_cuda_pool *pool = NULL, *after = NULL;
  kvant_cuda_sequence* sequence = NULL;
  kvant_cuda_batch* batch = NULL;
  kvant_cuda_plan* plan = NULL;
  kvant_cuda_path path = KVANT_CUDA_AUTOMATIC;
  int sealed = 0, needed = -1;
  double* want = malloc(count * sizeof(double));
  double* got = malloc(count * sizeof(double));
  void* keys = device_numbers((size_t)TOKENS * HEADS * DIM, 1);
  void* values = device_numbers((size_t)TOKENS * HEADS * DIM, 500000);
  void* q = device_numbers(count, 900000);
  CHECK(want != NULL && got != NULL);
  for (int i = 0; i <= DIM / 2; ++i) frequencies[i] = pow(10000, -2.0 * i / DIM);
  for (int i = 0; i < DIM / 2; ++i) other[i] = 2 * frequencies[i];

  CHECK(kvant_cuda_pool_create("kvquant:k=3,v=3,rope=before", &shape, 4, 6, &pool) == KVANT_OK);
  CHECK(kvant_cuda_pool_create("kvquant:k=3,v=3", &shape, 1, 1, &after) == KVANT_OK);
  CHECK(kvant_cuda_pool_needs_rotation(pool, &needed) == KVANT_OK && needed == 1);
  CHECK(kvant_cuda_pool_needs_rotation(after, &needed) == KVANT_OK && needed == 0);
  CHECK(kvant_cuda_pool_set_key_rotation(after, &rotation) == KVANT_OK);
  CHECK(kvant_cuda_sequence_create(pool, &sequence) == KVANT_OK);
  CHECK(kvant_cuda_batch_create(pool, 1, 1024, &batch) == KVANT_OK);
  CHECK(kvant_cuda_batch_bind(batch, &sequence, 1, NULL) == KVANT_OK);
  CHECK(kvant_cuda_batch_append(batch, keys, values, TOKENS, NULL) == KVANT_INVALID_ARGUMENT);
  CHECK(strstr(kvant_last_error(), "rope=before") != NULL);
  CHECK(kvant_cuda_pool_set_key_rotation(pool, NULL) == KVANT_INVALID_ARGUMENT);
  rotation.pair_count = DIM / 2 + 1;
  CHECK(kvant_cuda_pool_set_key_rotation(pool, &rotation) == KVANT_INVALID_ARGUMENT);
  CHECK(strstr(kvant_last_error(), "65 pairs") != NULL);
  rotation.pair_count = DIM / 2;
  rotation.pairs = (kvant_rotary_pairs)2;
  CHECK(kvant_cuda_pool_set_key_rotation(pool, &rotation) == KVANT_INVALID_ARGUMENT);
  rotation.pairs = KVANT_PAIRS_HALVES;
  rotation.frequencies = NULL;
  CHECK(kvant_cuda_pool_set_key_rotation(pool, &rotation) == KVANT_INVALID_ARGUMENT);
  rotation.frequencies = frequencies;
  CHECK(kvant_cuda_pool_set_key_rotation(pool, &rotation) == KVANT_OK);
  CHECK(kvant_cuda_batch_append(batch, keys, values, TOKENS, NULL) == KVANT_OK);
  rotation.frequencies = other;
  CHECK(kvant_cuda_pool_set_key_rotation(pool, &rotation) == KVANT_INVALID_ARGUMENT);
  CHECK(kvant_cuda_batch_seal_ready(batch, NULL, &sealed) == KVANT_OK && sealed == 3);
  CHECK(kvant_cuda_plan_create(batch, QUERY_HEADS, 1, NULL, &plan) == KVANT_OK);
  CHECK(kvant_cuda_plan_path(plan, &path) == KVANT_OK && path == KVANT_CUDA_INTEGER);
  kvant_cuda_plan_destroy(plan);
  run_plan(batch, 1, KVANT_CUDA_REFERENCE, q, want);
  run_plan(batch, 1, KVANT_CUDA_INTEGER, q, got);
  CHECK(relative_error(got, want, count) < 1e-3);
  run_plan(batch, 1, KVANT_CUDA_PREFILL, q, got);
  CHECK(relative_error(got, want, count) < 1e-3);

  kvant_cuda_batch_destroy(batch);
  kvant_cuda_sequence_destroy(sequence);
  kvant_cuda_pool_destroy(pool);
  kvant_cuda_pool_destroy(after);
  cudaFree(keys);
  cudaFree(values);
  cudaFree(q);
  free(want);
  free(got);
}

static void test_attention(void) {
  enum { FIRST = 100, REST = 500, ROWS = 12 };
  const kvant_cuda_shape shape = {HEADS, DIM, DIM, KVANT_F16};
  const size_t count = (size_t)ROWS * QUERY_HEADS * DIM;
  kvant_cuda_pool* pool = NULL;
  kvant_cuda_sequence *sequence = NULL, *fork = NULL;
  kvant_cuda_batch* batch = NULL;
  kvant_cuda_plan* plan = NULL;
  int pages = 0, exact_pages = 0, sealed = 0;
  int64_t length = 0, sealed_pages = 0, blind_seals = -1, invalid = -1;
  size_t bytes = 0;
  double* want = malloc(count * sizeof(double));
  double* got = malloc(count * sizeof(double));
  void* keys = device_numbers((size_t)(FIRST + REST) * HEADS * DIM, 1);
  void* values = device_numbers((size_t)(FIRST + REST) * HEADS * DIM, 500000);
  void* q = device_numbers(count, 900000);
  CHECK(want != NULL && got != NULL);

  CHECK(kvant_cuda_pool_create("kivi:k=2,v=2", &shape, 4, 6, &pool) == KVANT_OK);
  CHECK(kvant_cuda_pool_bytes(pool, &bytes) == KVANT_OK);
  CHECK(bytes == (size_t)HEADS * (4 * 9216 + 6 * 128 * 2 * DIM * 2) + 8);
  CHECK(kvant_cuda_sequence_create(pool, &sequence) == KVANT_OK);
  CHECK(kvant_cuda_batch_create(pool, 1, 1024, &batch) == KVANT_OK);
  CHECK(kvant_cuda_batch_bind(batch, &sequence, 1, NULL) == KVANT_OK);
  CHECK(kvant_cuda_batch_append(batch, keys, values, FIRST, NULL) == KVANT_OK);

  for (int rows = 1; rows <= ROWS; rows += ROWS - 1) {
    attend_exactly(FIRST, rows, want);
    run_plan(batch, rows, KVANT_CUDA_AUTOMATIC, q, got);
    CHECK(relative_error(got, want, (size_t)rows * QUERY_HEADS * DIM) < 1e-3);
  }

  /* 600 tokens: pages 0 to 2 have 128 newer tokens or more and are sealed. */
  CHECK(kvant_cuda_batch_append(batch, (const char*)keys + FIRST * HEADS * DIM * 2,
                                (const char*)values + FIRST * HEADS * DIM * 2, REST, NULL) == KVANT_OK);
  CHECK(kvant_cuda_batch_seal_ready(batch, NULL, &sealed) == KVANT_OK && sealed == 3);
  CHECK(kvant_cuda_sequence_length(sequence, &length, &sealed_pages) == KVANT_OK);
  CHECK(length == FIRST + REST && sealed_pages == 3);
  CHECK(kvant_cuda_sequence_blind_seals(sequence, &blind_seals) == KVANT_OK && blind_seals == 0);
  CHECK(kvant_cuda_sequence_blind_seals(sequence, NULL) == KVANT_INVALID_ARGUMENT);
  CHECK(kvant_cuda_pool_free_pages(pool, &pages, &exact_pages) == KVANT_OK && pages == 1 && exact_pages == 4);
  for (int rows = 1; rows <= ROWS; rows += ROWS - 1) {
    run_plan(batch, rows, KVANT_CUDA_REFERENCE, q, want);
    run_plan(batch, rows, KVANT_CUDA_AUTOMATIC, q, got);
    CHECK(relative_error(got, want, (size_t)rows * QUERY_HEADS * DIM) < 1e-3);
  }

  CHECK(kvant_cuda_pool_invalid_values(pool, NULL, &invalid) == KVANT_OK && invalid == 0);

  /* What does not fit is refused and changes nothing. */
  CHECK(kvant_cuda_plan_create(batch, 7, 1, NULL, &plan) == KVANT_INVALID_ARGUMENT && plan == NULL);
  CHECK(kvant_cuda_plan_create(batch, QUERY_HEADS, 1, NULL, &plan) == KVANT_OK);
  CHECK(kvant_cuda_plan_run(plan, (const char*)q + 2, keys, NULL, NULL) == KVANT_INVALID_ARGUMENT);
  CHECK(strstr(kvant_last_error(), "aligned") != NULL);
  kvant_cuda_plan_destroy(plan);
  CHECK(kvant_cuda_batch_append(batch, keys, values, 600, NULL) == KVANT_OUT_OF_RANGE);
  CHECK(kvant_cuda_batch_count_appended(batch, 41) == KVANT_OUT_OF_RANGE);
  CHECK(kvant_cuda_sequence_fork(sequence, NULL, &fork) == KVANT_OK);
  CHECK(kvant_cuda_batch_bind(batch, &fork, 1, NULL) == KVANT_OK);
  CHECK(kvant_cuda_batch_append(batch, keys, values, 400, NULL) == KVANT_OUT_OF_MEMORY);
  CHECK(kvant_cuda_sequence_length(fork, &length, &sealed_pages) == KVANT_OK && length == FIRST + REST);

  /* Values that no cache stores are counted: two rows of infinities for keys. */
  CHECK(cudaMemset(keys, 0x7C, (size_t)2 * HEADS * DIM * 2) == cudaSuccess);
  CHECK(kvant_cuda_batch_append(batch, keys, values, 2, NULL) == KVANT_OK);
  CHECK(kvant_cuda_pool_invalid_values(pool, NULL, &invalid) == KVANT_OK && invalid == 2 * HEADS * DIM);

  kvant_cuda_batch_destroy(batch);
  kvant_cuda_sequence_destroy(fork);
  kvant_cuda_sequence_destroy(sequence);
  CHECK(kvant_cuda_pool_free_pages(pool, &pages, &exact_pages) == KVANT_OK && pages == 4 && exact_pages == 6);
  kvant_cuda_pool_destroy(pool);
  cudaFree(keys);
  cudaFree(values);
  cudaFree(q);
  free(want);
  free(got);
}

int main(void) {
  test_refusals();
  if (!kvant_cuda_available()) {
    const kvant_cuda_shape shape = {HEADS, DIM, DIM, KVANT_F16};
    kvant_cuda_pool* pool = NULL;
    CHECK(kvant_cuda_pool_create("kivi:k=2,v=2", &shape, 1, 1, &pool) == KVANT_UNSUPPORTED && pool == NULL);
    puts("no CUDA device of compute capability 8.0: attention was not run");
    return 77;
  }
  test_attention();
  test_key_rotation();
  puts("passed");
  return 0;
}
