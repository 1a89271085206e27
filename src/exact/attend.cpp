#include "exact/attend.hpp"

#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "base/threads.hpp"

namespace kvant::exact {
namespace {

constexpr std::int64_t kTile = 128;  // tokens decoded at a time
constexpr float kHidden = -std::numeric_limits<float>::infinity();

std::size_t size(std::int64_t count) {
  return static_cast<std::size_t>(count);
}

class SequenceSource final : public RowSource {
 public:
  explicit SequenceSource(const Sequence& sequence) : sequence_(sequence) {}
  SideShape shape() const override { return sequence_.shape(); }
  std::int64_t tokens() const override { return sequence_.tokens(); }
  void read(std::int64_t head, std::int64_t first, std::int64_t count, float* out, std::int64_t stride) const override {
    sequence_.read(head, first, count, out, stride);
  }

 private:
  const Sequence& sequence_;
};

// The query vectors of one KV head: vector n is query row n / group of query head head * group + n % group.
class HeadAttention {
 public:
  HeadAttention(const RowSource& keys, const RowSource& values, const ConstArray& queries, float scale, bool causal)
      : keys_(keys),
        values_(values),
        rows_(queries.extent[2]),
        group_(queries.extent[1] / keys.shape().heads),
        vectors_(rows_ * group_),
        dim_(keys.shape().dim),
        width_(base::round_up(static_cast<int>(values.shape().dim), 16)),
        causal_(causal),
        queries_(size(vectors_ * dim_)),
        scores_(size(vectors_ * kTile)),
        output_(size(vectors_ * width_)),
        key_tile_(size(kTile * dim_)),
        value_tile_(size(kTile * width_)),
        masks_(size((rows_ + 1) * kTile)),
        mask_rows_(size(vectors_)),
        maximum_(size(vectors_), kHidden),
        sum_(size(vectors_)),
        alpha_(size(vectors_)),
        zeros_(size(vectors_)),
        ones_(size(vectors_), 1.0F) {
    load_scale_ = scale;
  }

  void run(std::int64_t head, const ConstArray& queries, const Array& out) {
    const std::int64_t batch = head / keys_.shape().heads;
    const std::int64_t first_query_head = head % keys_.shape().heads * group_;
    load(queries, batch, first_query_head);
    for (std::int64_t first = 0; first < keys_.tokens(); first += kTile) add_tile(head, first);
    for (std::int64_t n = 0; n < vectors_; ++n) {
      float* row = output_.data() + n * width_;
      const float factor = sum_[size(n)] > 0 ? 1.0F / sum_[size(n)] : (sum_[size(n)] == 0 ? 0.0F : sum_[size(n)]);
      for (std::int64_t c = 0; c < width_; ++c) row[c] *= factor;
      row_of(out, batch, first_query_head + n % group_, n / group_).store(row);
    }
  }

 private:
  void load(const ConstArray& queries, std::int64_t batch, std::int64_t first_query_head) {
    for (std::int64_t n = 0; n < vectors_; ++n) {
      float* row = queries_.data() + n * dim_;
      row_of(queries, batch, first_query_head + n % group_, n / group_).load(row);
      for (std::int64_t c = 0; c < dim_; ++c) row[c] *= load_scale_;
    }
    std::fill(output_.begin(), output_.end(), 0.0F);
    std::fill(maximum_.begin(), maximum_.end(), kHidden);
    std::fill(sum_.begin(), sum_.end(), 0.0F);
  }

  // Hides the cells beyond `count` and, when causal, those after the query row's own token.
  void load_masks(std::int64_t first, std::int64_t count) {
    for (std::int64_t r = 0; r < rows_; ++r) {
      const std::int64_t own = causal_ ? keys_.tokens() - rows_ + r : keys_.tokens();
      float* mask = masks_.data() + r * kTile;
      for (std::int64_t t = 0; t < kTile; ++t) mask[t] = t < count && first + t <= own ? 0.0F : kHidden;
      const bool all = count == kTile && first + count - 1 <= own;
      for (std::int64_t i = 0; i < group_; ++i) mask_rows_[size(r * group_ + i)] = all ? nullptr : mask;
    }
  }

  void add_tile(std::int64_t head, std::int64_t first) {
    const tiles::Kernels& kernels = tiles::kernels();
    const std::int64_t count = std::min(kTile, keys_.tokens() - first);
    const int vectors = static_cast<int>(vectors_);
    keys_.read(head, first, count, key_tile_.data(), dim_);
    values_.read(head, first, count, value_tile_.data(), width_);
    load_masks(first, count);
    for (std::int64_t n = 0; n < vectors_; ++n) {
      float* scores = scores_.data() + n * kTile;
      for (std::int64_t t = 0; t < count; ++t) {
        scores[t] = kernels.dot(queries_.data() + n * dim_, key_tile_.data() + t * dim_, static_cast<int>(dim_));
      }
    }
    kernels.softmax({scores_.data(), kTile, vectors, static_cast<int>(kTile), mask_rows_.data(), ones_.data(), 0.0F,
                     maximum_.data(), sum_.data(), alpha_.data()});
    const int width = static_cast<int>(width_);
    kernels.rescale(output_.data(), width_, vectors, width, alpha_.data(), zeros_.data());
    kernels.multiply_rows({value_tile_.data(),
                           DType::f32,
                           width_,
                           static_cast<int>(values_.shape().dim),
                           static_cast<int>(count),
                           scores_.data(),
                           kTile,
                           vectors,
                           output_.data(),
                           width_,
                           {}});
  }

  const RowSource& keys_;
  const RowSource& values_;
  std::int64_t rows_;
  std::int64_t group_;
  std::int64_t vectors_;
  std::int64_t dim_;
  std::int64_t width_;  // value channels padded to whole row tiles
  bool causal_;
  float load_scale_ = 1;
  std::vector<float> queries_;
  std::vector<float> scores_;
  std::vector<float> output_;
  std::vector<float> key_tile_;
  std::vector<float> value_tile_;
  std::vector<float> masks_;
  std::vector<const float*> mask_rows_;
  std::vector<float> maximum_;
  std::vector<float> sum_;
  std::vector<float> alpha_;
  std::vector<float> zeros_;
  std::vector<float> ones_;
};

void check_queries(const SideShape& key, const SideShape& value, const ConstArray& queries, const Array& out) {
  require_rank("queries", queries.rank, 4);
  require_rank("out", out.rank, 4);
  require_extent("queries", 0, queries.extent[0], key.batch);
  require_extent("queries", 3, queries.extent[3], key.dim);
  if (queries.extent[2] < 0) require_between("queries", queries.extent[2], 0, std::numeric_limits<int>::max());
  if (queries.extent[1] % key.heads != 0) {
    base::fail(ErrorCode::invalid_argument, "queries has " + std::to_string(queries.extent[1]) +
                                                " heads; it must be a multiple of " + std::to_string(key.heads));
  }
  for (int axis = 0; axis < 3; ++axis) require_extent("out", axis, out.extent[at(axis)], queries.extent[at(axis)]);
  require_extent("out", 3, out.extent[3], value.dim);
}

void check_side(const char* name, const SideShape& shape, const ConstArray& x) {
  require_rank(name, x.rank, 4);
  for (const int axis : {0, 1, 3}) {
    if (x.extent[at(axis)] < 1) require_between(name, x.extent[at(axis)], 1, std::numeric_limits<int>::max());
  }
  if (x.extent[2] < 0) require_between(name, x.extent[2], 0, std::numeric_limits<int>::max());
  if (shape.batch == 0) return;
  require_extent(name, 0, x.extent[0], shape.batch);
  require_extent(name, 1, x.extent[1], shape.heads);
  require_extent(name, 3, x.extent[3], shape.dim);
  if (x.type != shape.type) {
    base::fail(ErrorCode::invalid_argument,
               std::string(name) + " has type " + name_of(x.type) + "; it must be the cache's, " + name_of(shape.type));
  }
}

}  // namespace

void attend(const Sequence& keys, const Sequence& values, const ConstArray& queries, const Array& out,
            const ReferenceAttentionOptions& options) {
  attend(SequenceSource(keys), SequenceSource(values), queries, out, options);
}

void attend(const RowSource& keys, const RowSource& values, const ConstArray& queries, const Array& out,
            const ReferenceAttentionOptions& options) {
  base::require(keys.tokens() > 0, ErrorCode::invalid_argument, "attend needs a cache with tokens; this one is empty");
  check_queries(keys.shape(), values.shape(), queries, out);
  const float scale = options.scale != 0 ? options.scale : 1.0F / std::sqrt(static_cast<float>(keys.shape().dim));
  base::parallel_for(keys.shape().all_heads(), options.threads, [&](std::int64_t head, int) {
    HeadAttention(keys, values, queries, scale, options.causal).run(head, queries, out);
  });
}

void check_update(const SideShape& key_shape, const SideShape& value_shape, const ConstArray& keys,
                  const ConstArray& values) {
  check_side("keys", key_shape, keys);
  check_side("values", value_shape, values);
  for (int axis = 0; axis < 3; ++axis) require_extent("values", axis, values.extent[at(axis)], keys.extent[at(axis)]);
}

void check_fetch(const Sequence& keys, const Sequence& values, const Array& out_keys, const Array& out_values,
                 std::int64_t first) {
  require_rank("keys", out_keys.rank, 4);
  const std::int64_t count = out_keys.extent[2];
  if (first < 0 || count < 0 || first > keys.tokens() - count) {
    base::fail(ErrorCode::out_of_range, std::to_string(count) + " rows from " + std::to_string(first) +
                                            " on are outside the " + std::to_string(keys.tokens()) + " stored tokens");
  }
  if (keys.shape().batch == 0) return;  // nothing was ever stored, so no rows are asked for
  const auto check = [&](const char* name, const SideShape& shape, const Array& out) {
    require_rank(name, out.rank, 4);
    require_extent(name, 0, out.extent[0], shape.batch);
    require_extent(name, 1, out.extent[1], shape.heads);
    require_extent(name, 2, out.extent[2], count);
    require_extent(name, 3, out.extent[3], shape.dim);
  };
  check("keys", keys.shape(), out_keys);
  check("values", values.shape(), out_values);
}

}  // namespace kvant::exact
