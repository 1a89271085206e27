#include "bench/measure.hpp"

#include <numeric>

#include "bench/bandwidth.hpp"
#include "bench/tiles.hpp"
#include "support/oracle.hpp"

namespace kvant::bench {
namespace {

Recipe control_recipe() {
  return parse_recipe("f16");
}

double query_tokens(const Case& item) {
  // Row i of the last `rows` tokens sees tokens - rows + 1 + i of them.
  return static_cast<double>(item.rows) * (static_cast<double>(item.tokens) - static_cast<double>(item.rows - 1) / 2.0);
}

// A store that tokens are written to and sealed in, over and over.
class Coded {
 public:
  Coded(const Recipe& recipe, const Tokens& tokens)
      : tokens_(tokens), store_(recipe, tokens.shape, tokens.count), cells_(static_cast<std::size_t>(tokens.count)) {
    store_.set_key_rotation(tokens.rotation());
    std::iota(cells_.begin(), cells_.end(), 0);
  }

  // Writes all tokens one by one, as decoding does.
  void write() {
    for (std::int64_t i = 0; i < tokens_.count; ++i) {
      const std::span<const std::int64_t> cell(&cells_[static_cast<std::size_t>(i)], 1);
      store_.write(Side::key, cell, tokens_.view(Side::key, i, 1));
      store_.write(Side::value, cell, tokens_.view(Side::value, i, 1));
    }
  }
  void seal() { store_.seal_ready(1); }
  void clear() { store_.clear(); }
  std::size_t stored_bytes() const { return store_.bytes().total() - store_.bytes().tables; }

 private:
  const Tokens& tokens_;
  PageStore store_;
  std::vector<std::int64_t> cells_;
};

// A unit: all tokens written, or all pages sealed; what has to happen before is not measured.
Work write_work(Coded& coded) {
  return [&coded](int units) {
    double seconds = 0;
    for (int i = 0; i < units; ++i) {
      coded.clear();
      seconds += seconds_of([&] { coded.write(); });
    }
    return seconds;
  };
}

Work seal_work(Coded& coded) {
  return [&coded](int units) {
    double seconds = 0;
    for (int i = 0; i < units; ++i) {
      coded.clear();
      coded.write();
      seconds += seconds_of([&] { coded.seal(); });
    }
    return seconds;
  };
}

// O1 of attention over these tokens, stored by the recipe with the kernels at hand.
double coded_error(const Recipe& recipe, const Tokens& tokens) {
  return Attend(std::make_shared<Ring>(recipe, tokens, 0), 1, 1).error();
}

}  // namespace

bool Result::passed() const {
  return error <= testing::kTolerance;
}

std::shared_ptr<Ring> Measurement::ring(const std::string& label, const Recipe& recipe, const Case& item) {
  std::erase_if(rings_, [&](const auto& entry) {
    const auto& [name, dim, place, tokens] = entry.first;
    return dim != item.dim || (name != "f16" && name != item.label);
  });
  std::shared_ptr<Ring>& ring = rings_[{label, item.dim, item.place, item.tokens}];
  if (!ring) {
    ring = std::make_shared<Ring>(recipe, Tokens(options_.heads, item.dim, item.tokens),
                                  item.place == Place::memory ? options_.ring_bytes : 0);
  }
  return ring;
}

Result Measurement::attend(const Case& item) {
  Result result;
  const std::shared_ptr<Ring> own = ring(item.label, item.recipe, item);
  Attend subject(own, item.group, item.rows);
  Attend control(ring("f16", control_recipe(), item), item.group, item.rows);
  result.error = std::max(subject.error(), control.error());
  if (!result.passed()) return result;
  const StoreBytes held = own->front().bytes();
  const std::size_t bytes = held.total() - held.tables;
  Reader reader(bytes, item.place == Place::memory ? static_cast<std::size_t>(options_.ring_bytes) : 0);
  const Samples samples =
      interleave({control.work(), subject.work(), reader.work()}, options_.rounds, options_.sample_ms / 1e3);
  const double seconds = samples.median_of(1);
  result.tokens_per_s = query_tokens(item) / seconds;
  result.gmac_per_s = result.tokens_per_s * 2 * item.dim * item.group * options_.heads / 1e9;
  result.bytes_per_s = static_cast<double>(bytes) / seconds;
  result.read_per_s = static_cast<double>(bytes) / samples.median_of(2);
  result.ratio = samples.ratio(0, 1);
  result.ratio_spread = samples.ratio_spread(0, 1);
  return result;
}

Result Measurement::threads(const Case& item) {
  Result result;
  const std::shared_ptr<Ring> own = ring(item.label, item.recipe, item);
  Attend one(own, item.group, item.rows);
  Attend all(own, item.group, item.rows, options_.threads);
  result.error = std::max(one.error(), all.error());
  if (!result.passed()) return result;
  const StoreBytes held = own->front().bytes();
  const std::size_t bytes = held.total() - held.tables;
  const Samples samples = interleave({one.wall_work(), all.wall_work()}, options_.rounds, options_.sample_ms / 1e3);
  result.tokens_per_s = query_tokens(item) / samples.median_of(1);
  result.gmac_per_s = result.tokens_per_s * 2 * item.dim * item.group * options_.heads / 1e9;
  result.bytes_per_s = static_cast<double>(bytes) / samples.median_of(1);
  result.ratio = samples.ratio(0, 1);
  result.ratio_spread = samples.ratio_spread(0, 1);
  return result;
}

Result Measurement::write(const Case& item) {
  Result result;
  const Tokens tokens(options_.heads, item.dim, item.tokens);
  result.error = coded_error(item.recipe, tokens);
  if (!result.passed()) return result;
  Coded own(item.recipe, tokens);
  Coded control(control_recipe(), tokens);
  own.write();
  const std::size_t bytes = own.stored_bytes();
  Reader reader(bytes, 0);
  const Samples samples =
      interleave({write_work(control), write_work(own), reader.work()}, options_.rounds, options_.sample_ms / 1e3);
  result.tokens_per_s = static_cast<double>(item.tokens) / samples.median_of(1);
  result.bytes_per_s = static_cast<double>(bytes) / samples.median_of(1);
  result.read_per_s = static_cast<double>(bytes) / samples.median_of(2);
  result.ratio = samples.ratio(0, 1);
  result.ratio_spread = samples.ratio_spread(0, 1);
  return result;
}

Result Measurement::seal(const Case& item) {
  Result result;
  const Tokens tokens(options_.heads, item.dim, item.tokens);
  result.error = coded_error(item.recipe, tokens);
  if (!result.passed()) return result;
  Coded own(item.recipe, tokens);
  const Work work = seal_work(own);
  work(1);
  const std::size_t bytes = own.stored_bytes();
  Reader reader(bytes, 0);
  const Samples samples = interleave({work, reader.work()}, options_.rounds, options_.sample_ms / 1e3);
  result.tokens_per_s = static_cast<double>(item.tokens) / samples.median_of(0);
  result.bytes_per_s = static_cast<double>(bytes) / samples.median_of(0);
  result.read_per_s = static_cast<double>(bytes) / samples.median_of(1);
  return result;
}

// Scores: rows are the tokens of a page, depth its channels; mixes the other way round.
Result Measurement::product(const Case& item) {
  Result result;
  const std::int64_t pages = item.tokens / 128;
  const int rows = item.what == What::score ? 128 : item.dim;
  const int depth = item.what == What::score ? item.dim : 128;
  const int vectors = item.group * static_cast<int>(item.rows);
  TileRing own(tiles::kernels(), item.width, rows, depth, vectors, pages);
  TileRing control(tiles::kernels(), 0, rows, depth, vectors, pages);
  result.error = std::max(own.error(), control.error());
  if (!result.passed()) return result;
  Reader reader(own.bytes(), 0);
  const Samples samples =
      interleave({control.work(), own.work(), reader.work()}, options_.rounds, options_.sample_ms / 1e3);
  result.tokens_per_s = static_cast<double>(item.tokens * item.rows) / samples.median_of(1);
  result.gmac_per_s = result.tokens_per_s * item.dim * item.group / 1e9;
  result.bytes_per_s = static_cast<double>(own.bytes()) / samples.median_of(1);
  result.read_per_s = static_cast<double>(own.bytes()) / samples.median_of(2);
  result.ratio = samples.ratio(0, 1);
  result.ratio_spread = samples.ratio_spread(0, 1);
  return result;
}

Result Measurement::softmax(const Case& item) {
  Result result;
  SoftmaxRing own(tiles::kernels(), 128, item.group * static_cast<int>(item.rows), item.tokens / 128);
  result.error = own.error();
  if (!result.passed()) return result;
  Reader reader(own.bytes(), 0);
  const Samples samples = interleave({own.work(), reader.work()}, options_.rounds, options_.sample_ms / 1e3);
  result.tokens_per_s = static_cast<double>(item.tokens * item.rows) / samples.median_of(0);
  result.bytes_per_s = static_cast<double>(own.bytes()) / samples.median_of(0);
  result.read_per_s = static_cast<double>(own.bytes()) / samples.median_of(1);
  return result;
}

Result Measurement::run(const Case& item, const std::string& kernel) {
  force_kernel(kernel);
  Result result = item.what == What::softmax   ? softmax(item)
                  : item.is_kernel()           ? product(item)
                  : item.what == What::attend  ? attend(item)
                  : item.what == What::threads ? threads(item)
                  : item.what == What::write   ? write(item)
                                               : seal(item);
  result.item = item;
  result.kernel = kernel;
  return result;
}

}  // namespace kvant::bench
