#include "bench/data.hpp"

#include <algorithm>
#include <cmath>
#include <limits>
#include <set>

#include "support/oracle.hpp"

namespace kvant::bench {

Tokens::Tokens(int heads, int dim, std::int64_t n)
    : shape{heads, dim, dim, DType::f16},
      count(n),
      keys(testing::random_keys(n, heads, dim, 1)),
      values(testing::random_floats(static_cast<std::size_t>(n * heads * dim), 8)) {}

ConstView Tokens::view(Side side, std::int64_t first, std::int64_t rows) const {
  const std::vector<float>& all = side == Side::key ? keys : values;
  return dense_view(all.data() + first * shape.kv_heads * shape.key_dim, DType::f32, rows, shape.kv_heads,
                    shape.key_dim);
}

KeyRotation Tokens::rotation() const {
  return make_rotation({.rotated = shape.key_dim / 2 * 2});
}

Ring::Ring(const Recipe& recipe, const Tokens& tokens, std::int64_t ring_bytes) {
  Cache cache(recipe, tokens.shape);
  cache.set_key_rotation(tokens.rotation());
  cache.append(tokens.view(Side::key, 0, tokens.count), tokens.view(Side::value, 0, tokens.count));
  const auto bytes = static_cast<std::int64_t>(cache.bytes().total());
  const std::int64_t count = std::max<std::int64_t>(1, (ring_bytes + bytes - 1) / bytes);
  caches_.reserve(static_cast<std::size_t>(count));
  // A copy shares sealed pages, an image does not.
  const std::vector<std::byte> image = count > 1 && recipe.quantizes() ? cache.save() : std::vector<std::byte>();
  for (std::int64_t i = 1; i < count; ++i) caches_.push_back(image.empty() ? cache : Cache::load(image));
  caches_.push_back(std::move(cache));
}

const Cache& Ring::next() {
  at_ = (at_ + 1) % caches_.size();
  return caches_[at_];
}

Attend::Attend(std::shared_ptr<Ring> ring, int group, std::int64_t rows, int threads)
    : ring_(std::move(ring)),
      heads_(ring_->front().shape().kv_heads * group),
      group_(group),
      rows_(rows),
      threads_(threads),
      queries_(
          testing::random_floats(static_cast<std::size_t>(rows * heads_ * ring_->front().shape().key_dim), 10, 0.7F)),
      out_(queries_.size()),
      workspace_(make_workspace()) {}

void Attend::call(const Cache& cache) {
  const int dim = cache.shape().key_dim;
  AttentionOptions options;
  options.threads = threads_;
  options.first_position = cache.length() - rows_;
  attend(cache.store(), cache.length(), dense_view(queries_.data(), DType::f32, rows_, heads_, dim),
         dense_view(out_.data(), DType::f32, rows_, heads_, dim), options, *workspace_);
}

Work Attend::work() {
  return [this](int units) {
    return seconds_of([&] {
      for (int i = 0; i < units; ++i) call(ring_->next());
    });
  };
}

Work Attend::wall_work() {
  return [this](int units) {
    return wall_seconds_of([&] {
      for (int i = 0; i < units; ++i) call(ring_->next());
    });
  };
}

double Attend::error() {
  call(ring_->next());
  const std::vector<float> first = out_;
  for (std::size_t i = 1; i < ring_->size(); ++i) {
    call(ring_->next());
    if (out_ != first) return std::numeric_limits<double>::infinity();
  }
  const Cache& cache = ring_->front();
  const auto keys = testing::read_all(cache.store(), Side::key, cache.length());
  const auto values = testing::read_all(cache.store(), Side::value, cache.length());
  const double scale = 1.0 / std::sqrt(cache.shape().key_dim);
  const std::ptrdiff_t width = std::ptrdiff_t{heads_} * cache.shape().key_dim;
  double worst = 0;
  for (const std::int64_t row : std::set<std::int64_t>{0, rows_ / 2, rows_ - 1}) {
    const auto part = [&](const std::vector<float>& all) {
      return std::vector<float>(all.begin() + row * width, all.begin() + (row + 1) * width);
    };
    const testing::Expected expected = testing::attend_fp64(cache.shape(), group_, cache.length() - rows_ + row + 1, 1,
                                                            keys, values, part(queries_), scale, 0, {});
    worst = std::max(worst, testing::relative_error(part(first), expected.out));
  }
  return worst;
}

}  // namespace kvant::bench
