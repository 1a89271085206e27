// Block pages of random caches and what kernels over them are called with, on the CPU (emulation.hpp), against the CPU
// library on the same pages; no byte behind the kernels' shared memory is touched.
#pragma once

#include "emulation.hpp"

// The emulation first.
#include <gtest/gtest.h>

#include <numeric>
#include <random>
#include <string>

#include "base/half.hpp"
#include "cuda/block_turn.hpp"
#include "cuda/decode_args.hpp"
#include "cuda/reference.hpp"
#include "kvant/cache.hpp"

namespace kvant::cuda {

constexpr std::size_t kMostShared = emulation::kShared;
alignas(128) inline std::uint8_t shared[kMostShared];

constexpr std::uint8_t kPoison = 0xA5;

inline std::vector<std::uint16_t> random_rows(std::mt19937& random, DType type, int count, int heads, int dim,
                                              float spread) {
  std::normal_distribution<float> normal;
  std::vector<std::uint16_t> out(static_cast<std::size_t>(count * heads * dim));
  for (std::size_t i = 0; i < out.size(); ++i) {
    const auto channel = static_cast<int>(i % static_cast<std::size_t>(dim));
    base::store_float(out.data(), type, static_cast<std::int64_t>(i),
                      normal(random) * (1 + spread * static_cast<float>(channel * 37 % 11)));
  }
  return out;
}

struct Call {
  int length = kPage, rows = 1, group = 1;  // length: tokens that the cache is given
  const KeyRotation* rotation = nullptr;    // of recipes with rope=before
  int first_page = 0;                       // the sequence begins there, as if a window hid what was before
  int window = 0;
  float softcap = 0;
  int parts = 1;
};

class Problem {
 public:
  Problem(const char* recipe, const CacheShape& shape, const Call& call)
      : cache_(parse_recipe(recipe), shape),
        format_(make_block_format(cache_.recipe(), shape)),
        exact_format_{shape.key_dim, shape.value_dim},
        call_(call) {
    std::mt19937 random(3);
    if (call.rotation != nullptr) {
      cache_.set_key_rotation(*call.rotation);
      turns_ = make_turn_tables(*call.rotation, shape.key_dim);
      format_.turns = turns_.at(turns_.turns.data(), turns_.offsets.data(), turns_.places.data());
    }
    std::vector<std::int64_t> positions(static_cast<std::size_t>(call.length));
    std::iota(positions.begin(), positions.end(), std::int64_t{call.first_page} * kPage);
    keys_ = random_rows(random, shape.dtype, call.length, shape.kv_heads, shape.key_dim, 0.3F);
    values_ = random_rows(random, shape.dtype, call.length, shape.kv_heads, shape.value_dim, 0);
    queries_ = random_rows(random, shape.dtype, call.rows, shape.kv_heads * call.group, shape.key_dim, 0);
    out_.resize(static_cast<std::size_t>(call.rows * shape.kv_heads * call.group * shape.value_dim));
    cache_.append(dense_view(keys_.data(), shape.dtype, call.length, shape.kv_heads, shape.key_dim),
                  dense_view(values_.data(), shape.dtype, call.length, shape.kv_heads, shape.value_dim), {}, positions);
    place_pages();
    describe();
  }

  const BlockFormat& format() const { return format_; }
  int sealed() const { return coded_ - call_.first_page; }
  const std::uint8_t* page(int number) const { return pages_.data() + number * format_.page_bytes; }

  // ranks: blocks of a cluster, if there are as many with vectors.
  template <class Kernel>
  void run(const Kernel& kernel, int threads, int vectors, int shared_bytes, int ranks = 1) {
    ASSERT_GT(sealed(), 0);
    ASSERT_EQ(pages_.size(), static_cast<std::size_t>(sealed()) * static_cast<std::size_t>(format_.page_bytes));
    ASSERT_LE(static_cast<std::size_t>(shared_bytes), kMostShared);
    vectors_ = vectors;
    blocks_ = (args_.rows * args_.group + vectors - 1) / vectors;
    ranks = std::min(ranks, blocks_);
    blocks_ = (blocks_ + ranks - 1) / ranks * ranks;
    partials_.assign(static_cast<std::size_t>(blocks_ * args_.kv_heads * call_.parts * vectors) *
                         static_cast<std::size_t>(cache_.shape().value_dim + 2),
                     NAN);
    args_.partials = partials_.data();
    emulation::fill_memory(ranks, kPoison);
    const ReferenceArgs layout{&call_.first_page, &coded_, &sinks_};
    emulation::launch(
        threads, blocks_, args_.kv_heads, [&] { kernel(args_, layout, call_.parts, format_); }, call_.parts, ranks);
    for (int rank = 0; rank < ranks; ++rank) {
      const std::uint8_t* memory = emulation::memory(rank);
      EXPECT_TRUE(
          std::all_of(memory + shared_bytes, memory + kMostShared, [](std::uint8_t x) { return x == kPoison; }));
    }
  }

  // The kernel merges its parts itself. Half of the calls are told of their pages in memory.
  template <class Kernel>
  void run_teams(const Kernel& kernel, int threads, int vectors, int shared_bytes, int parts) {
    ASSERT_GT(sealed(), 0);
    ASSERT_LE(static_cast<std::size_t>(shared_bytes), kMostShared);
    TeamLayout layout{};
    if (parts % 2 == 0) {
      layout.memory = {&call_.first_page, &coded_, &sinks_};
    } else {
      layout.first_page[0] = call_.first_page;
      layout.coded_pages[0] = coded_;
      layout.sinks[0] = sinks_;
    }
    const int blocks = (args_.rows * args_.group + vectors - 1) / vectors;
    const auto items = static_cast<std::size_t>(blocks * args_.kv_heads);
    std::vector<std::uint32_t> counters(items);
    partials_.assign(items * static_cast<std::size_t>(parts * vectors * (cache_.shape().value_dim + 2)), NAN);
    args_.counters = counters.data();
    args_.partials = partials_.data();
    std::memset(shared, kPoison, sizeof shared);
    emulation::launch(
        threads, blocks, args_.kv_heads, [&] { kernel(args_, layout, parts, format_); }, parts);
    EXPECT_EQ(counters, std::vector<std::uint32_t>(items));
    EXPECT_TRUE(std::all_of(shared + shared_bytes, shared + kMostShared, [](std::uint8_t x) { return x == kPoison; }));
  }

  double error() const {
    const CacheShape& shape = cache_.shape();
    const int heads = shape.kv_heads * args_.group;
    std::vector<float> want(out_.size());
    AttentionOptions options;
    options.threads = 1;
    options.sliding_window = call_.window;
    options.softcap = call_.softcap;
    cache_.attend(dense_view(queries_.data(), shape.dtype, args_.rows, heads, shape.key_dim),
                  dense_view(want.data(), DType::f32, args_.rows, heads, shape.value_dim), options, nullptr);
    double difference = 0;
    double norm = 0;
    for (std::size_t i = 0; i < out_.size(); ++i) {
      const double got =
          call_.parts == 1 ? base::load_float(out_.data(), shape.dtype, static_cast<std::int64_t>(i)) : merged(i);
      difference += (got - want[i]) * (got - want[i]);
      norm += static_cast<double>(want[i]) * want[i];
    }
    return std::sqrt(difference / norm);
  }

 private:
  // Sealed pages as they are; exact pages: that of the sinks, then those of the tail.
  void place_pages() {
    coded_ = static_cast<std::int32_t>(cache_.counts().sealed_pages);
    sinks_ = coded_ > 0 ? cache_.recipe().sink : 0;
    table_.resize(static_cast<std::size_t>(call_.first_page));
    for (int number = 0; number < coded_; ++number) {
      const auto block = cache_.store().sealed_block(number);
      for (const std::byte byte : block) pages_.push_back(std::to_integer<std::uint8_t>(byte));
      table_.push_back(number);
    }
    const int tail_begin = coded_ * kPage;
    exact_.assign(((call_.length - tail_begin) / kPage + 2) * exact_stride(), 0);
    for (int token = 0; token < sinks_; ++token) put(token, 0, token);
    for (int token = tail_begin; token < call_.length; ++token) {
      put(token, 1 + (token - tail_begin) / kPage, token % kPage);
    }
    exact_table_.resize(exact_.size() / exact_stride());
    std::iota(exact_table_.begin(), exact_table_.end(), 0);
    coded_ += call_.first_page;
    length_ = call_.first_page * kPage + call_.length;
  }
  std::size_t exact_stride() const {
    return static_cast<std::size_t>(cache_.shape().kv_heads * exact_format_.page_bytes());
  }
  void put(int token, int page, int in_page) {
    const CacheShape& shape = cache_.shape();
    for (int head = 0; head < shape.kv_heads; ++head) {
      std::uint8_t* to =
          exact_.data() + static_cast<std::size_t>(page) * exact_stride() + head * exact_format_.page_bytes();
      const auto row = static_cast<std::size_t>(token * shape.kv_heads + head);
      for (int c = 0; c < shape.key_dim; ++c) {
        std::memcpy(to + exact_format_.key_at(in_page, c), &keys_[row * static_cast<std::size_t>(shape.key_dim) + c],
                    2);
      }
      for (int c = 0; c < shape.value_dim; ++c) {
        std::memcpy(to + exact_format_.value_at(in_page, c),
                    &values_[row * static_cast<std::size_t>(shape.value_dim) + c], 2);
      }
    }
  }

  void describe() {
    const CacheShape& shape = cache_.shape();
    args_.pages = pages_.data();
    args_.page_stride = format_.page_bytes;
    args_.exact = exact_.data();
    args_.exact_stride = static_cast<std::int64_t>(exact_stride());
    args_.table = table_.data();
    args_.exact_table = exact_table_.data();
    args_.lengths = &length_;
    args_.q = queries_.data();
    args_.q_head = shape.key_dim;
    args_.q_row = args_.q_head * shape.kv_heads * call_.group;
    args_.out = out_.data();
    args_.out_head = shape.value_dim;
    args_.out_row = args_.out_head * shape.kv_heads * call_.group;
    args_.scale = 1 / std::sqrt(static_cast<float>(shape.key_dim));
    args_.window = call_.window;
    args_.softcap = call_.softcap;
    args_.softcap_rate = call_.softcap > 0 ? 2 / call_.softcap : 0;
    args_.rows = call_.rows;
    args_.group = call_.group;
    args_.kv_heads = shape.kv_heads;
  }

  // What merge_parts_kernel makes of the parts' results for element i of the output.
  double merged(std::size_t i) const {
    const int dim = cache_.shape().value_dim;
    const int heads = args_.kv_heads * args_.group;
    const int vector_head = static_cast<int>(i) / dim;
    const int head = vector_head % heads;
    const int vector = vector_head / heads * args_.group + head % args_.group;
    const int stride = dim + 2;
    const int item = head / args_.group * blocks_ + vector / vectors_;
    const auto at = [&](int part) {
      return partials_.data() +
             (static_cast<std::ptrdiff_t>(item * call_.parts + part) * vectors_ + vector % vectors_) * stride;
    };
    double peak = -INFINITY;
    for (int part = 0; part < call_.parts; ++part) peak = std::max<double>(peak, at(part)[dim]);
    double sum = 0;
    double out = 0;
    for (int part = 0; part < call_.parts; ++part) {
      const double weight = std::exp2(at(part)[dim] - peak);
      sum += weight * at(part)[dim + 1];
      out += weight * at(part)[static_cast<int>(i) % dim];
    }
    return out / sum;
  }

  Cache cache_;
  BlockFormat format_;
  ExactFormat exact_format_;
  Call call_;
  std::vector<std::uint8_t> pages_, exact_;
  std::vector<std::int32_t> table_, exact_table_;
  std::vector<std::uint16_t> keys_, values_, queries_, out_;
  std::vector<float> partials_;
  std::int32_t length_ = 0, coded_ = 0, sinks_ = 0;
  int vectors_ = 0, blocks_ = 0;
  TurnTables turns_;
  DecodeArgs args_;
};

// Both kinds, whole and partial, any number of pairs, magnitudes; a fast pair turns by radians.
struct NamedRotation {
  const char* name;
  KeyRotation rotation;
};
inline std::vector<NamedRotation> rotations(int key_dim) {
  const auto make = [](RotaryPairs pairs, int rotated, double magnitude) {
    KeyRotation rotation = make_rotation({pairs, rotated, 500000});
    rotation.magnitude = magnitude;
    return rotation;
  };
  return {{"halves", make(RotaryPairs::halves, key_dim, 1)},
          {"adjacent", make(RotaryPairs::adjacent, key_dim, 1.3)},
          {"40 of halves", make(RotaryPairs::halves, 40, 0.7)},
          {"14 of halves", make(RotaryPairs::halves, 14, 1)},
          {"10 of neighbours", make(RotaryPairs::adjacent, 10, 1)}};
}
// Those that kernels for few vectors take.
inline std::vector<NamedRotation> few_rotations(int key_dim) {
  std::vector<NamedRotation> all = rotations(key_dim);
  all.erase(all.begin() + 2, all.begin() + 4);
  KeyRotation half = make_rotation({RotaryPairs::halves, 32, 10000});
  half.magnitude = 0.7;
  all.push_back({"32 of halves", half});
  return all;
}

}  // namespace kvant::cuda
