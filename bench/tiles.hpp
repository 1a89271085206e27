// The kernels alone: scores and mixes of one head over a ring of sealed tiles, and the softmax between them.
#pragma once

#include <cstdint>
#include <vector>

#include "base/aligned.hpp"
#include "bench/cases.hpp"
#include "bench/timing.hpp"
#include "tiles/kernels.hpp"

namespace kvant::bench {

// Pages of one kind, their codes in planes of `width` bits (0: rows of f16), multiplied by `vectors` vectors as
// attention does it: x is packed for every page, products start from the page's bias.
class TileRing {
 public:
  TileRing(const tiles::Kernels& kernels, int width, int rows, int depth, int vectors, std::int64_t pages);
  Work work();  // a unit: all pages
  // The relative error of every page's product against fp64 over the same codes (or rows) and the same v.
  double error();
  std::size_t bytes() const { return bytes_; }

 private:
  void multiply(std::int64_t page, tiles::Ahead ahead);
  const std::byte* data(std::int64_t page) const {
    return memory_.get() + static_cast<std::size_t>(page) * page_bytes_;
  }

  const tiles::Kernels& kernels_;
  int width_, rows_, depth_, vectors_;
  std::int64_t pages_;
  std::size_t page_bytes_ = 0, bytes_ = 0;
  base::AlignedBytes memory_;
  std::vector<tiles::CodePlane> planes_;  // of a page; `plane` holds the offset
  std::vector<std::uint8_t> codes_;       // [depth][stride], of every page
  std::vector<float> v_, step_, min_, middle_, mid_, scale_, bias_, out_;
  std::vector<std::int32_t> x_;
};

// Softmax of `vectors` rows of a page, over a ring of scores.
class SoftmaxRing {
 public:
  SoftmaxRing(const tiles::Kernels& kernels, int cells, int vectors, std::int64_t pages);
  Work work();
  double error();
  std::size_t bytes() const { return scores_.size() * sizeof(float); }

 private:
  void run(float* scores);

  const tiles::Kernels& kernels_;
  int cells_, vectors_;
  std::int64_t pages_;
  std::vector<float> scores_, copy_, maximum_, sum_, alpha_;
};

}  // namespace kvant::bench
