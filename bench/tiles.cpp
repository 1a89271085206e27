#include "bench/tiles.hpp"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

#include "base/half.hpp"
#include "support/data.hpp"
#include "tiles/plane.hpp"

namespace kvant::bench {
namespace {

std::size_t size(std::int64_t count) {
  return static_cast<std::size_t>(count);
}

}  // namespace

TileRing::TileRing(const tiles::Kernels& kernels, int width, int rows, int depth, int vectors, std::int64_t pages)
    : kernels_(kernels),
      width_(width),
      rows_(rows),
      depth_(depth),
      vectors_(vectors),
      pages_(pages),
      codes_(size(depth * rows)),
      v_(testing::random_floats(size(vectors * depth), 3)),
      step_(testing::random_floats(size(depth), 4)),
      min_(testing::random_floats(size(depth), 5)),
      middle_(size(depth)),
      mid_(size(base::round_up(depth, tiles::kDepthPad))),
      scale_(size(vectors)),
      bias_(size(vectors)),
      out_(size(vectors * rows)),
      x_(tiles::packed_words(depth, vectors)) {
  for (int shift = width; shift > 0;) {
    const int bits = shift >= 4 ? 4 : (shift >= 2 ? 2 : 1);
    shift -= bits;
    planes_.push_back({reinterpret_cast<const std::byte*>(page_bytes_), bits, shift, 0, depth});
    page_bytes_ += tiles::plane_bytes(bits, rows, depth);
  }
  const std::vector<float> random = testing::random_floats(codes_.size(), 6);
  for (std::size_t i = 0; i < codes_.size(); ++i) {
    codes_[i] = static_cast<std::uint8_t>(static_cast<int>(std::fabs(random[i]) * 977.0F) & ((1 << width) - 1));
  }
  std::fill_n(mid_.begin(), depth, 0.5F * static_cast<float>((1 << width) - 1));
  for (std::size_t i = 0; i < middle_.size(); ++i) middle_[i] = min_[i] + mid_[i] * step_[i];
  if (width == 0) page_bytes_ = size(depth * rows) * 2;
  bytes_ = page_bytes_ * size(pages);
  memory_ = base::allocate_aligned(bytes_);
  kernels_.narrow(random.data(), memory_.get(), DType::f16, width == 0 ? depth * rows : 0);
  for (const tiles::CodePlane& plane : planes_) {
    kernels_.pack_plane(codes_.data(), rows, nullptr, plane.bits, plane.shift, rows, depth,
                        memory_.get() + reinterpret_cast<std::size_t>(plane.plane));
  }
  for (std::int64_t page = 1; page < pages; ++page) {
    std::memcpy(memory_.get() + size(page) * page_bytes_, memory_.get(), page_bytes_);
  }
}

void TileRing::multiply(std::int64_t page, tiles::Ahead ahead) {
  if (width_ == 0) {
    std::fill(out_.begin(), out_.end(), 0.0F);
    kernels_.multiply_rows(
        {data(page), DType::f16, rows_, rows_, depth_, v_.data(), depth_, vectors_, out_.data(), rows_, ahead});
    return;
  }
  tiles::PackArgs pack;
  pack.v = v_.data();
  pack.v_stride = depth_;
  pack.step = step_.data();
  pack.middle = middle_.data();
  pack.depth = depth_;
  pack.vectors = vectors_;
  pack.mid = mid_.data();
  pack.x = x_.data();
  pack.scale = scale_.data();
  pack.bias = bias_.data();
  kernels_.pack_x(pack);
  std::vector<tiles::CodePlane> planes = planes_;
  for (tiles::CodePlane& plane : planes) plane.plane = data(page) + reinterpret_cast<std::size_t>(plane.plane);
  kernels_.multiply_codes({planes.data(), static_cast<int>(planes.size()), rows_, x_.data(), depth_, vectors_, true,
                           scale_.data(), out_.data(), rows_, tiles::Start::replace, nullptr, bias_.data(), ahead});
}

Work TileRing::work() {
  return [this](int units) {
    return seconds_of([&] {
      for (int i = 0; i < units; ++i) {
        for (std::int64_t page = 0; page < pages_; ++page) {
          multiply(page, page + 1 < pages_ ? tiles::Ahead{data(page + 1), page_bytes_} : tiles::Ahead{});
        }
      }
    });
  };
}

double TileRing::error() {
  multiply(0, {});
  const std::vector<float> first = out_;
  for (std::int64_t page = 1; page < pages_; ++page) {
    multiply(page, {});
    if (out_ != first) return std::numeric_limits<double>::infinity();
  }
  double square = 0, norm = 0;
  for (int n = 0; n < vectors_; ++n) {
    for (int row = 0; row < rows_; ++row) {
      double sum = 0;
      for (int d = 0; d < depth_; ++d) {
        const auto at = size(d * rows_ + row);
        const double value = width_ == 0 ? base::load_float(memory_.get(), DType::f16, d * rows_ + row)
                                         : min_[size(d)] + static_cast<double>(step_[size(d)]) * codes_[at];
        sum += static_cast<double>(v_[size(n * depth_ + d)]) * value;
      }
      const double lost = sum - static_cast<double>(first[size(n * rows_ + row)]);
      square += lost * lost;
      norm += sum * sum;
    }
  }
  return std::sqrt(square / norm);
}

SoftmaxRing::SoftmaxRing(const tiles::Kernels& kernels, int cells, int vectors, std::int64_t pages)
    : kernels_(kernels),
      cells_(cells),
      vectors_(vectors),
      pages_(pages),
      scores_(testing::random_floats(size(pages * vectors * cells), 7)),
      copy_(size(vectors * cells)),
      maximum_(size(vectors)),
      sum_(size(vectors)),
      alpha_(size(vectors)) {}

void SoftmaxRing::run(float* scores) {
  kernels_.softmax(
      {scores, cells_, vectors_, cells_, nullptr, nullptr, 0, maximum_.data(), sum_.data(), alpha_.data()});
}

Work SoftmaxRing::work() {
  return [this](int units) {
    return seconds_of([&] {
      for (int i = 0; i < units; ++i) {
        std::fill(maximum_.begin(), maximum_.end(), -std::numeric_limits<float>::infinity());
        for (std::int64_t page = 0; page < pages_; ++page) {
          // In place as in attention; the copy keeps the input and is a small part.
          std::copy_n(scores_.data() + page * vectors_ * cells_, copy_.size(), copy_.data());
          run(copy_.data());
        }
      }
    });
  };
}

double SoftmaxRing::error() {
  std::fill(maximum_.begin(), maximum_.end(), -std::numeric_limits<float>::infinity());
  std::fill(sum_.begin(), sum_.end(), 0.0F);
  std::copy_n(scores_.data(), copy_.size(), copy_.data());
  run(copy_.data());
  double worst = 0;
  for (int n = 0; n < vectors_; ++n) {
    const float* row = scores_.data() + std::ptrdiff_t{n} * cells_;
    const double peak = *std::max_element(row, row + cells_);
    for (int i = 0; i < cells_; ++i) {
      const double exact = std::exp(row[i] - peak);
      worst = std::max(worst, std::fabs(copy_[size(n * cells_ + i)] / exact - 1));
    }
  }
  return worst;
}

}  // namespace kvant::bench
