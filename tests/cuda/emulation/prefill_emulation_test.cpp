// The prefill kernels (of sm_90a; of waterfill those of mma.sync too) on the CPU (emulation.hpp) against the CPU
// library on the same pages: sinks, sealed pages and an open tail, cut into parts or not; no byte behind their shared
// memory is touched.
#include "emulation.hpp"

// The emulation first.
#include <gtest/gtest.h>

#include <random>

#include "base/half.hpp"
#include "cuda/device_format.hpp"
#include "cuda/prefill_ahead.cuh"
#include "cuda/prefill_kernel.cuh"
#include "kvant/cache.hpp"

namespace kvant::cuda {

constexpr std::size_t kMostShared = emulation::kShared;
alignas(128) std::uint8_t shared[kMostShared];

namespace {

constexpr std::uint8_t kPoison = 0xA5;

// KeyBits 0: waterfill.
template <int KeyBits, int ValueBits, int KeyDim, int ValueDim, bool Bfloat, int HighSteps = 0>
struct Format {
  static constexpr KeyFormat key{KeyBits, KeyDim, HighSteps};
  static constexpr ValueFormat value{ValueBits, ValueDim};
  static constexpr bool rotated = KeyBits == 0;
  static constexpr bool bfloat = Bfloat;
};

std::vector<std::uint16_t> random_rows(std::mt19937& random, DType type, int count, int dim, float spread) {
  std::normal_distribution<float> normal;
  std::vector<std::uint16_t> out(static_cast<std::size_t>(count * dim));
  for (std::size_t i = 0; i < out.size(); ++i) {
    const auto channel = static_cast<int>(i % static_cast<std::size_t>(dim));
    base::store_float(out.data(), type, static_cast<std::int64_t>(i),
                      normal(random) * (1 + spread * static_cast<float>(channel * 37 % 11)));
  }
  return out;
}

// One KV head.
template <class C>
class Problem {
 public:
  // growth: of keys over the tokens.
  Problem(const char* recipe, int length, int rows, int group, int window, float softcap, float growth)
      : shape_{1, C::key.dim, C::value.dim, C::bfloat ? DType::bf16 : DType::f16},
        cache_(parse_recipe(recipe), shape_),
        length_(length),
        rows_(rows),
        group_(group),
        window_(window),
        softcap_(softcap) {
    std::mt19937 random(3);
    keys_ = random_rows(random, shape_.dtype, length, C::key.dim, 0.3F);
    for (int i = 0; growth > 0 && i < length * C::key.dim; ++i) {
      const float x = base::load_float(keys_.data(), shape_.dtype, i);
      base::store_float(keys_.data(), shape_.dtype, i, x * growth * static_cast<float>(i / C::key.dim) / length);
    }
    values_ = random_rows(random, shape_.dtype, length, C::value.dim, 0);
    queries_ = random_rows(random, shape_.dtype, rows * group, C::key.dim, 0);
    out_.resize(static_cast<std::size_t>(rows * group) * C::value.dim);
    cache_.append(dense_view(keys_.data(), shape_.dtype, length, 1, C::key.dim),
                  dense_view(values_.data(), shape_.dtype, length, 1, C::value.dim));
    seal();
  }

  int coded() const { return coded_; }

  void run(int parts) {
    DecodeArgs args;
    args.pages = reinterpret_cast<const std::uint8_t*>(pages_.data());
    args.page_stride = static_cast<std::int64_t>(format_.head_bytes());
    args.exact = exact_.data();
    args.exact_stride = C::exact.page_bytes();
    std::vector<std::int32_t> table(16);
    for (int i = 0; i < 16; ++i) table[static_cast<std::size_t>(i)] = i;
    args.table = table.data();
    args.exact_table = table.data();
    args.lengths = &length_;
    args.q = queries_.data();
    args.q_head = C::key.dim;
    args.q_row = C::key.dim * group_;
    args.out = out_.data();
    args.out_head = C::value.dim;
    args.out_row = C::value.dim * group_;
    args.scale = 1 / std::sqrt(static_cast<float>(C::key.dim));
    args.window = window_;
    args.rows = rows_;
    args.group = group_;
    args.kv_heads = 1;
    args.key_bytes = format_.key.bytes();
    args.boosted = format_.boosted;
    args.softcap = softcap_;
    args.softcap_rate = softcap_ > 0 ? 2 / softcap_ : 0;
    const std::int32_t none = 0;
    const ReferenceArgs layout{&none, &coded_, &sinks_};
    const int full = (rows_ * group_ + C::vectors - 1) / C::vectors;
    const int ranks = std::min(C::ranks, full);
    const int blocks = (full + ranks - 1) / ranks * ranks;
    partials_.assign(static_cast<std::size_t>(blocks * parts) * C::vectors * (C::value.dim + 2), NAN);
    args.partials = partials_.data();
    emulation::fill_memory(ranks, kPoison);
    const auto kernel = [&] {
      if constexpr (C::wgmma) {
        prefill_ahead_kernel<C>(args, layout, parts);
      } else {
        prefill_kernel<C>(args, layout, parts);
      }
    };
    emulation::launch(C::threads, blocks, 1, kernel, parts, ranks);
    const std::size_t used =
        C::shared_bytes + static_cast<std::size_t>(C::sorted_keys(args.key_bytes) * args.key_bytes);
    ASSERT_LE(used, kMostShared);
    for (int rank = 0; rank < ranks; ++rank) {
      const std::uint8_t* memory = emulation::memory(rank);
      EXPECT_TRUE(std::all_of(memory + used, memory + kMostShared, [](std::uint8_t x) { return x == kPoison; }));
    }
  }

  double error(int parts) const {
    std::vector<float> want(out_.size());
    AttentionOptions options;
    options.threads = 1;
    options.sliding_window = window_;
    options.softcap = softcap_;
    cache_.attend(dense_view(queries_.data(), shape_.dtype, rows_, group_, C::key.dim),
                  dense_view(want.data(), DType::f32, rows_, group_, C::value.dim), options, nullptr);
    double difference = 0;
    double norm = 0;
    for (int vector = 0; vector < rows_ * group_; ++vector) {
      for (int c = 0; c < C::value.dim; ++c) {
        const auto at = static_cast<std::size_t>(vector) * C::value.dim + static_cast<std::size_t>(c);
        const double got = parts == 1 ? base::load_float(out_.data(), shape_.dtype, static_cast<std::int64_t>(at))
                                      : merged(vector, c, parts);
        difference += (got - want[at]) * (got - want[at]);
        norm += static_cast<double>(want[at]) * want[at];
      }
    }
    return std::sqrt(difference / norm);
  }

 private:
  // Pages as the device has them; exact pages: that of the sinks, then those of the tail.
  void seal() {
    const Recipe& recipe = cache_.recipe();
    const PageLayout layout = make_layout(recipe, shape_);
    format_ = make_device_format(recipe, shape_);
    coded_ = static_cast<std::int32_t>(cache_.counts().sealed_pages);
    sinks_ = coded_ > 0 ? recipe.sink : 0;
    pages_.resize(static_cast<std::size_t>(coded_) * format_.head_bytes());
    for (int page = 0; page < coded_; ++page) {
      to_device(format_, layout, cache_.store().sealed_block(page), 0,
                std::span(pages_).subspan(static_cast<std::size_t>(page) * format_.head_bytes(), format_.head_bytes()));
    }
    exact_.assign(static_cast<std::size_t>((length_ - coded_ * kPage) / kPage + 2) * C::exact.page_bytes(), 0);
    const ExactFormat exact = C::exact;
    const auto put = [&](int token, int page, int in_page) {
      std::uint8_t* to = exact_.data() + static_cast<std::size_t>(page) * C::exact.page_bytes();
      for (int c = 0; c < C::key.dim; ++c)
        std::memcpy(to + exact.key_at(in_page, c), &keys_[token * C::key.dim + c], 2);
      for (int c = 0; c < C::value.dim; ++c) {
        std::memcpy(to + exact.value_at(in_page, c), &values_[token * C::value.dim + c], 2);
      }
    };
    for (int token = 0; token < sinks_; ++token) put(token, 0, token);
    for (int token = coded_ * kPage; token < length_; ++token) {
      put(token, 1 + (token / kPage - coded_), token % kPage);
    }
  }

  // What merge_parts_kernel makes of the parts' results.
  double merged(int vector, int channel, int parts) const {
    const int stride = C::value.dim + 2;
    const float* first = partials_.data() + (vector / C::vectors * parts * C::vectors + vector % C::vectors) * stride;
    double peak = -INFINITY;
    for (int part = 0; part < parts; ++part) {
      peak = std::max<double>(peak, first[part * C::vectors * stride + C::value.dim]);
    }
    double sum = 0;
    double out = 0;
    for (int part = 0; part < parts; ++part) {
      const float* at = first + part * C::vectors * stride;
      const double weight = std::exp2(at[C::value.dim] - peak);
      sum += weight * at[C::value.dim + 1];
      out += weight * at[channel];
    }
    return out / sum;
  }

  CacheShape shape_;
  Cache cache_;
  DeviceFormat format_;
  std::int32_t length_, coded_ = 0, sinks_ = 0;
  int rows_, group_, window_;
  float softcap_;
  std::vector<std::uint16_t> keys_, values_, queries_, out_;
  std::vector<std::byte> pages_;
  std::vector<std::uint8_t> exact_;
  std::vector<float> partials_;
};

struct Call {
  const char* recipe;
  int length, rows, group;
  int window = 0;
  int parts = 1;
  float softcap = 0;
  float growth = 0;
};

template <class F, bool Wgmma>
void expect_same(const Call& call) {
  SCOPED_TRACE(std::string(call.recipe) + (Wgmma ? " wgmma" : ""));
  using C = PrefillConfig<F, Wgmma>;
  Problem<C> problem(call.recipe, call.length, call.rows, call.group, call.window, call.softcap, call.growth);
  ASSERT_GT(problem.coded(), 0);
  problem.run(call.parts);
  EXPECT_LE(problem.error(call.parts), F::bfloat ? 5e-3 : 1e-3);
}
template <class F>
void expect_both(const Call& call) {
  expect_same<F, false>(call);
  expect_same<F, true>(call);
}

// Every width; key dimensions other than the values'; blocks of the transform shorter than a head.
TEST(PrefillEmulation, Waterfill) {
  expect_both<Format<0, 2, 64, 64, false>>({"waterfill:k=3.5,low=1,high=6,v=2,sink=5,window=20", 190, 20, 2});
  expect_both<Format<0, 3, 96, 96, true>>({"waterfill:k=2.28,low=1,high=6,v=3,shared=1,sink=0,window=0", 128, 9, 3});
  expect_both<Format<0, 4, 192, 128, false>>({"near-lossless:sink=70,window=16", 150, 5, 4});
  expect_both<Format<0, 3, 256, 256, false>>({"balanced:sink=0,window=16", 144, 5, 5});
}

// Parts with and without exact stages turn their own outputs; a window that begins inside a page.
TEST(PrefillEmulation, WaterfillInParts) {
  expect_both<Format<0, 2, 64, 64, false>>({"small:sink=5,window=40", 300, 10, 2, 0, 5});
  expect_both<Format<0, 2, 64, 64, false>>({"small:sink=5,window=40", 430, 30, 2, 130, 2});
}

TEST(PrefillEmulation, Warpgroups) {
  expect_same<Format<2, 2, 128, 128, false>, true>({"kivi:k=2,v=2,sink=5,window=20", 330, 40, 7});
  expect_same<Format<2, 2, 64, 64, false, 1>, true>({"kitty:sink=40,window=16", 300, 9, 3});
  expect_same<Format<4, 4, 256, 256, false>, true>({"kivi:k=4,v=4,sink=0,window=0", 144, 5, 3});
  expect_same<Format<3, 3, 96, 96, true>, true>({"kivi:k=3,v=3,sink=0,window=30", 170, 20, 3});
  expect_same<Format<2, 2, 192, 192, false, 2>, true>({"kitty:sink=0,window=16", 160, 5, 4});
}

TEST(PrefillEmulation, WarpgroupsWindowCapAndParts) {
  expect_same<Format<2, 2, 64, 64, false>, true>({"kivi:k=2,v=2,sink=70,window=30", 430, 30, 2, 130, 3});
  expect_same<Format<2, 2, 64, 64, false>, true>({"kivi:k=2,v=2,sink=70,window=30", 430, 90, 3, 0, 1, 2.0F});
}

// Two blocks that unpack for each other and three, for which there are four; windows; parts that begin and end in the
// middle of pages.
TEST(PrefillEmulation, Clusters) {
  expect_same<Format<2, 2, 64, 64, false>, true>({"kivi:k=2,v=2,sink=70,window=30", 900, 140, 4, 200, 3});
  expect_same<Format<2, 2, 64, 64, false>, true>({"kivi:k=2,v=2,sink=0,window=0", 300, 65, 4, 0, 1});
  expect_same<Format<2, 2, 96, 96, true, 1>, true>({"kitty:sink=5,window=16", 700, 70, 4, 0, 3});
  expect_same<Format<4, 4, 128, 128, false>, true>({"kivi:k=4,v=4,sink=0,window=20", 430, 90, 3, 130, 1});
  expect_same<Format<0, 2, 64, 64, false>, true>({"small:sink=5,window=40", 900, 150, 4, 0, 2});
  expect_same<Format<0, 3, 96, 96, true>, true>({"balanced:sink=0,window=40", 500, 70, 4, 130, 2});
}

// Keys so wide that there is room for one page of them.
TEST(PrefillEmulation, WidePages) {
  using F = Format<0, 4, 128, 128, false>;
  const char* recipe = "waterfill:k=6,low=1,high=6,v=4,sink=0,window=40";
  const DeviceFormat format = make_device_format(parse_recipe(recipe), {1, 128, 128, DType::f16});
  EXPECT_EQ((PrefillConfig<F, true>::sorted_keys(format.key.bytes())), 1);
  expect_same<F, true>({recipe, 500, 70, 4, 0, 2});
  expect_same<F, true>({recipe, 300, 10, 4});
}

// Scores outgrow the reference of the weights again and again, while products are under way.
TEST(PrefillEmulation, GrowingScores) {
  expect_both<Format<0, 2, 64, 64, false>>({"small:sink=5,window=40", 900, 5, 2, 0, 1, 0, 6});
  expect_same<Format<2, 2, 128, 128, false>, true>({"kivi:k=2,v=2,sink=5,window=20", 700, 33, 4, 0, 1, 0, 6});
  expect_same<Format<4, 4, 256, 256, false>, true>({"kivi:k=4,v=4,sink=0,window=0", 700, 5, 3, 0, 1, 0, 6});
}

}  // namespace
}  // namespace kvant::cuda
