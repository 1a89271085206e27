// The C ABI: every call is one call of the C++ API behind a fence that turns exceptions into status codes.
#include <cstdio>
#include <exception>
#include <new>
#include <string>
#include <vector>

#include "base/checked.hpp"
#include "kvant/cuda.h"
#include "kvant/cuda.hpp"
#include "kvant/error.hpp"
#include "kvant/recipe.hpp"
#include "kvant/rotation.hpp"

struct kvant_cuda_pool {
  kvant::cuda::PagePool value;
};
struct kvant_cuda_sequence {
  kvant::cuda::Sequence value;
};
struct kvant_cuda_batch {
  kvant::cuda::Batch value;
};
struct kvant_cuda_plan {
  kvant::cuda::AttendPlan value;
};

namespace kvant::cuda {
namespace {

// A plain array: recording that memory ran out must not need any.
thread_local char last_error[512] = "";

kvant_status record(kvant_status status, const char* message) noexcept {
  std::snprintf(last_error, sizeof(last_error), "%s", message);
  return status;
}

kvant_status status_of(ErrorCode code) noexcept {
  switch (code) {
    case ErrorCode::invalid_argument:
    case ErrorCode::not_finite:
      return KVANT_INVALID_ARGUMENT;
    case ErrorCode::out_of_range:
      return KVANT_OUT_OF_RANGE;
    case ErrorCode::unsupported:
      return KVANT_UNSUPPORTED;
    case ErrorCode::bad_format:
      return KVANT_BAD_FORMAT;
    case ErrorCode::out_of_memory:
      return KVANT_OUT_OF_MEMORY;
  }
  return KVANT_INTERNAL;
}

template <class F>
kvant_status fenced(const F& call) noexcept {
  try {
    call();
    return KVANT_OK;
  } catch (const Error& error) {
    return record(status_of(error.code()), error.what());
  } catch (const std::bad_alloc&) {
    return record(KVANT_OUT_OF_MEMORY, "the host's memory is exhausted");
  } catch (const std::exception& error) {
    return record(KVANT_INTERNAL, error.what());
  } catch (...) {
    return record(KVANT_INTERNAL, "an exception of unknown type");
  }
}

template <class T>
T& required(T* pointer, const char* name) {
  if (pointer == nullptr) base::fail(ErrorCode::invalid_argument, std::string(name) + " is a null pointer");
  return *pointer;
}

CacheShape shape_of(const kvant_cuda_shape& shape) {
  if (shape.dtype != KVANT_F16 && shape.dtype != KVANT_BF16) {
    base::fail(ErrorCode::invalid_argument,
               "dtype is " + std::to_string(static_cast<int>(shape.dtype)) + "; allowed: KVANT_F16, KVANT_BF16");
  }
  return {shape.kv_heads, shape.key_dim, shape.value_dim, shape.dtype == KVANT_BF16 ? DType::bf16 : DType::f16};
}

KeyRotation rotation_of(const kvant_key_rotation& given) {
  if (given.pairs != KVANT_PAIRS_ADJACENT && given.pairs != KVANT_PAIRS_HALVES) {
    base::fail(ErrorCode::invalid_argument, "pairs is " + std::to_string(static_cast<int>(given.pairs)) +
                                                "; allowed: KVANT_PAIRS_ADJACENT, KVANT_PAIRS_HALVES");
  }
  if (given.pair_count < 1) {
    base::fail(ErrorCode::invalid_argument,
               "pair_count is " + std::to_string(given.pair_count) + "; allowed: 1 to half of key_dim");
  }
  const double* first = &required(given.frequencies, "frequencies");
  return {given.pairs == KVANT_PAIRS_ADJACENT ? RotaryPairs::adjacent : RotaryPairs::halves,
          std::vector<double>(first, first + given.pair_count), given.magnitude};
}

// The two enumerations in step.
constexpr struct {
  kvant_cuda_path c;
  AttendPath cpp;
} kPaths[] = {{KVANT_CUDA_AUTOMATIC, AttendPath::automatic},
              {KVANT_CUDA_INTEGER, AttendPath::integer},
              {KVANT_CUDA_PREFILL, AttendPath::prefill},
              {KVANT_CUDA_REFERENCE, AttendPath::reference}};

AttendPath path_of(kvant_cuda_path path) {
  for (const auto& entry : kPaths) {
    if (entry.c == path) return entry.cpp;
  }
  base::fail(ErrorCode::invalid_argument,
             "path is " + std::to_string(static_cast<int>(path)) + "; allowed: 0 to 3 (kvant_cuda_path)");
}

}  // namespace
}  // namespace kvant::cuda

using kvant::cuda::fenced;
using kvant::cuda::required;

const char* kvant_last_error(void) {
  return kvant::cuda::last_error;
}

int kvant_cuda_available(void) {
  return kvant::cuda::is_available() ? 1 : 0;
}

kvant_status kvant_cuda_pool_create(const char* recipe, const kvant_cuda_shape* shape, int pages, int exact_pages,
                                    kvant_cuda_pool** pool) {
  return fenced([&] {
    kvant_cuda_pool*& out = required(pool, "pool");
    const kvant::Recipe parsed = kvant::parse_recipe(&required(recipe, "recipe"));
    const kvant::CacheShape cache = kvant::cuda::shape_of(required(shape, "shape"));
    out = new kvant_cuda_pool{kvant::cuda::PagePool(parsed, cache, pages, exact_pages)};
  });
}

void kvant_cuda_pool_destroy(kvant_cuda_pool* pool) {
  delete pool;
}

kvant_status kvant_cuda_pool_free_pages(const kvant_cuda_pool* pool, int* pages, int* exact_pages) {
  return fenced([&] {
    const kvant::cuda::PagePool& value = required(pool, "pool").value;
    int& exact = required(exact_pages, "exact_pages");
    required(pages, "pages") = value.free_pages();
    exact = value.free_exact_pages();
  });
}

kvant_status kvant_cuda_pool_bytes(const kvant_cuda_pool* pool, size_t* bytes) {
  return fenced([&] { required(bytes, "bytes") = required(pool, "pool").value.bytes(); });
}

kvant_status kvant_cuda_pool_invalid_values(const kvant_cuda_pool* pool, void* stream, int64_t* values) {
  return fenced([&] { required(values, "values") = required(pool, "pool").value.invalid_values(stream); });
}

kvant_status kvant_cuda_pool_set_key_rotation(kvant_cuda_pool* pool, const kvant_key_rotation* rotation) {
  return fenced([&] {
    kvant::cuda::PagePool& value = required(pool, "pool").value;
    value.set_key_rotation(kvant::cuda::rotation_of(required(rotation, "rotation")));
  });
}

kvant_status kvant_cuda_pool_needs_rotation(const kvant_cuda_pool* pool, int* needed) {
  return fenced([&] { required(needed, "needed") = required(pool, "pool").value.needs_rotation() ? 1 : 0; });
}

kvant_status kvant_cuda_sequence_create(const kvant_cuda_pool* pool, kvant_cuda_sequence** sequence) {
  return fenced([&] {
    kvant_cuda_sequence*& out = required(sequence, "sequence");
    out = new kvant_cuda_sequence{kvant::cuda::Sequence(required(pool, "pool").value)};
  });
}

void kvant_cuda_sequence_destroy(kvant_cuda_sequence* sequence) {
  delete sequence;
}

kvant_status kvant_cuda_sequence_fork(const kvant_cuda_sequence* sequence, void* stream, kvant_cuda_sequence** fork) {
  return fenced([&] {
    kvant_cuda_sequence*& out = required(fork, "fork");
    out = new kvant_cuda_sequence{required(sequence, "sequence").value.fork(stream)};
  });
}

kvant_status kvant_cuda_sequence_length(const kvant_cuda_sequence* sequence, int64_t* tokens, int64_t* sealed_pages) {
  return fenced([&] {
    const kvant::cuda::Sequence& value = required(sequence, "sequence").value;
    int64_t& sealed = required(sealed_pages, "sealed_pages");
    required(tokens, "tokens") = value.length();
    sealed = value.sealed_pages();
  });
}

kvant_status kvant_cuda_sequence_blind_seals(const kvant_cuda_sequence* sequence, int64_t* pages) {
  return fenced([&] { required(pages, "pages") = required(sequence, "sequence").value.blind_seals(); });
}

kvant_status kvant_cuda_batch_create(const kvant_cuda_pool* pool, int max_sequences, int64_t max_tokens,
                                     kvant_cuda_batch** batch) {
  return fenced([&] {
    kvant_cuda_batch*& out = required(batch, "batch");
    out = new kvant_cuda_batch{{required(pool, "pool").value, max_sequences, max_tokens}};
  });
}

void kvant_cuda_batch_destroy(kvant_cuda_batch* batch) {
  delete batch;
}

kvant_status kvant_cuda_batch_bind(kvant_cuda_batch* batch, kvant_cuda_sequence* const* sequences, int count,
                                   void* stream) {
  return fenced([&] {
    kvant::cuda::Batch& value = required(batch, "batch").value;
    if (count < 0) {
      kvant::base::fail(kvant::ErrorCode::invalid_argument,
                        "count is " + std::to_string(count) + "; allowed: 0 and more");
    }
    if (count > 0) required(sequences, "sequences");
    std::vector<kvant::cuda::Sequence*> pointers;
    for (int i = 0; i < count; ++i) pointers.push_back(&required(sequences[i], "a sequence").value);
    value.bind(pointers, stream);
  });
}

kvant_status kvant_cuda_batch_reserve(kvant_cuda_batch* batch, int tokens, void* stream) {
  return fenced([&] { required(batch, "batch").value.reserve(tokens, stream); });
}

kvant_status kvant_cuda_batch_append(kvant_cuda_batch* batch, const void* keys, const void* values, int rows,
                                     void* stream) {
  return fenced([&] {
    kvant::cuda::Batch& value = required(batch, "batch").value;
    required(static_cast<const char*>(keys), "keys");
    required(static_cast<const char*>(values), "values");
    value.append(keys, values, rows, stream);
  });
}

kvant_status kvant_cuda_batch_count_appended(kvant_cuda_batch* batch, int rows) {
  return fenced([&] { required(batch, "batch").value.count_appended(rows); });
}

kvant_status kvant_cuda_batch_seal_ready(kvant_cuda_batch* batch, void* stream, int* sealed) {
  return fenced([&] {
    const int count = required(batch, "batch").value.seal_ready(stream);
    if (sealed != nullptr) *sealed = count;
  });
}

kvant_status kvant_cuda_plan_create(const kvant_cuda_batch* batch, int query_heads, int rows,
                                    const kvant_cuda_attend_options* options, kvant_cuda_plan** plan) {
  return fenced([&] {
    kvant_cuda_plan*& out = required(plan, "plan");
    const kvant_cuda_attend_options given = options != nullptr ? *options : kvant_cuda_attend_options{};
    kvant::cuda::AttendOptions wanted;
    wanted.scale = given.scale;
    wanted.softcap = given.softcap;
    wanted.sinks = given.sinks;
    wanted.sliding_window = given.sliding_window;
    wanted.overlap = given.overlap != 0;
    wanted.pages_settled = given.pages_settled != 0;
    out = new kvant_cuda_plan{kvant::cuda::AttendPlan(required(batch, "batch").value, query_heads, rows, wanted,
                                                      given.headroom, kvant::cuda::path_of(given.path))};
  });
}

void kvant_cuda_plan_destroy(kvant_cuda_plan* plan) {
  delete plan;
}

kvant_status kvant_cuda_plan_path(const kvant_cuda_plan* plan, kvant_cuda_path* path) {
  return fenced([&] {
    kvant_cuda_path& out = required(path, "path");
    const kvant::cuda::AttendPath used = required(plan, "plan").value.path();
    for (const auto& entry : kvant::cuda::kPaths) {
      if (entry.cpp == used) out = entry.c;
    }
  });
}

kvant_status kvant_cuda_plan_run(const kvant_cuda_plan* plan, const void* q, void* out, float* lse, void* stream) {
  return fenced([&] {
    const kvant::cuda::AttendPlan& value = required(plan, "plan").value;
    required(static_cast<const char*>(q), "q");
    required(static_cast<char*>(out), "out");
    value.run(q, out, lse, stream);
  });
}
