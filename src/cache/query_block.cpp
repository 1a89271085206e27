#include "cache/query_block.hpp"

#include <algorithm>
#include <array>
#include <cmath>
#include <limits>

#include "base/half.hpp"
#include "tiles/plane.hpp"

namespace kvant::cache {
namespace {

constexpr float kMinusInfinity = -std::numeric_limits<float>::infinity();
constexpr int kBatchPages = 4;     // pages with one softmax
constexpr int kBatchVectors = 16;  // for at most as many vectors

// Few vectors leave the CPU waiting for the results of every step; the scores of many would leave the cache.
int batch_pages(const AttentionPlan& plan) {
  return plan.block_rows * plan.group <= kBatchVectors ? kBatchPages : 1;
}

int score_stride(const AttentionPlan& plan) {
  const PageStore::Impl& store = *plan.store;
  return batch_pages(plan) * store.tokens() + (store.layout.key_rest.rows > 0 ? tiles::kLanes : 0);
}

// Where each exact cell is among the scores of its page.
std::array<int, kMaxPage> exact_places(const ExactRows& exact, const std::uint8_t* tokens) {
  std::array<int, kMaxPage> places{};
  for (std::size_t i = 0; i < exact.cells.size(); ++i) {
    places[i] = tokens == nullptr ? exact.cells[i] : 0;
    while (tokens != nullptr && tokens[places[i]] != exact.cells[i]) ++places[i];
  }
  return places;
}

int longest(const AttentionPlan& plan) {
  const CacheShape& shape = plan.store->shape;
  return std::max({shape.key_dim, shape.value_dim, plan.store->tokens()});
}

// All outliers of a page's values may be those of one head.
std::size_t most_outliers(const AttentionPlan& plan) {
  const PageLayout& layout = plan.store->layout;
  return static_cast<std::size_t>(std::max(layout.key.outliers.slots, layout.value.outliers.slots));
}

// What multiply_sparse needs.
std::size_t most_lanes(const AttentionPlan& plan) {
  const CacheShape& shape = plan.store->shape;
  if (most_outliers(plan) == 0) return 0;
  return std::size_t{16} * static_cast<std::size_t>(std::max(shape.key_dim, shape.value_dim) + plan.store->tokens());
}

struct TurnedSizes {
  std::size_t tile = 0;
  std::size_t blocks = 0;
  std::size_t room = 0;
  std::size_t positions = 0;

  explicit TurnedSizes(const AttentionPlan& plan) {
    if (!plan.store->rotation) return;
    positions = static_cast<std::size_t>(plan.store->tokens());
    tile = positions * static_cast<std::size_t>(plan.store->shape.key_dim);
    blocks = positions / tiles::kLanes;
    room = blocks * plan.store->rotation->block_floats();
  }
};

}  // namespace

std::size_t QueryBlock::arena_bytes(const AttentionPlan& plan) {
  using Arena = Workspace::Arena;
  const CacheShape& shape = plan.store->shape;
  const auto n = static_cast<std::size_t>(plan.block_rows) * static_cast<std::size_t>(plan.group);
  const auto page = static_cast<std::size_t>(score_stride(plan));
  const auto key = static_cast<std::size_t>(base::round_up(shape.key_dim, 16));
  const auto value = static_cast<std::size_t>(base::round_up(shape.value_dim, 16));
  const auto deep = static_cast<std::size_t>(base::round_up(longest(plan), tiles::kDepthPad));
  const bool gathers = plan.store->layout.key.order_entry > 0;
  const bool rotates = plan.store->layout.value.rotation > 1;
  const TurnedSizes turned(plan);
  return Arena::padded<float>(n * key) + 3 * Arena::padded<float>(n * page) + Arena::padded<float>(n * value) +
         7 * Arena::padded<float>(n) + (4 + 2 * kKinds) * Arena::padded<float>(deep) + Arena::padded<const float*>(n) +
         Arena::padded<std::int32_t>(tiles::packed_words(longest(plan), static_cast<int>(n))) +
         (gathers ? Arena::padded<std::uint16_t>(deep) + Arena::padded<float>(n * key) +
                        Arena::padded<float>(base::round_up(n, std::size_t{4}) * key)
                  : 0) +
         (rotates ? Arena::padded<float>(n * value) + Arena::padded<float>(n) : 0) +
         Arena::padded<float>(most_outliers(plan)) + 2 * Arena::padded<std::uint16_t>(most_outliers(plan)) +
         Arena::padded<float>(most_lanes(plan)) + Arena::padded<float>(turned.tile) +
         Arena::padded<tiles::TurnBlock>(turned.blocks) + Arena::padded<float>(turned.room) +
         Arena::padded<std::int32_t>(turned.positions) +
         (plan.store->layout.value.channel_factors ? Arena::padded<float>(n * value) + Arena::padded<float>(value) : 0);
}

QueryBlock::QueryBlock(const AttentionPlan& plan, Workspace::Arena& arena)
    : plan_(plan), store_(*plan.store), kernels_(tiles::kernels()), capacity_(plan.block_rows * plan.group) {
  const CacheShape& shape = store_.shape;
  query_stride_ = base::round_up(shape.key_dim, 16);
  output_stride_ = base::round_up(shape.value_dim, 16);
  batch_ = batch_pages(plan);
  score_stride_ = score_stride(plan);
  const auto n = static_cast<std::size_t>(capacity_);
  const auto page = static_cast<std::size_t>(score_stride_);
  const auto deep = static_cast<std::size_t>(base::round_up(longest(plan), tiles::kDepthPad));
  queries_ = arena.take<float>(n * static_cast<std::size_t>(query_stride_));
  scores_ = arena.take<float>(n * page);
  exact_ = arena.take<float>(n * page);
  mask_ = arena.take<float>(n * page);
  plain_.values = arena.take<float>(n * static_cast<std::size_t>(output_stride_));
  for (float** vector : {&maximum_, &sum_, &alpha_, &bias_, &slope_, &plain_.owed, &x_scale_}) {
    *vector = arena.take<float>(n);
  }
  for (float** line : {&middle_, &step_, &min_, &max_}) *line = arena.take<float>(deep);
  for (Levels& levels : levels_) {
    levels.inverse = arena.take<float>(deep);
    levels.half = arena.take<float>(deep);
  }
  mask_rows_ = arena.take<const float*>(n);
  packed_ = arena.take<std::int32_t>(tiles::packed_words(longest(plan), capacity_));
  residuals_ = arena.take<float>(most_outliers(plan));
  outlier_rows_ = arena.take<std::uint16_t>(most_outliers(plan));
  outlier_depths_ = arena.take<std::uint16_t>(most_outliers(plan));
  lanes_ = arena.take<float>(most_lanes(plan));
  const TurnedSizes turned(plan);
  turned_ = arena.take<float>(turned.tile);
  turn_blocks_ = arena.take<tiles::TurnBlock>(turned.blocks);
  turn_room_ = arena.take<float>(turned.room);
  positions_ = arena.take<std::int32_t>(turned.positions);
  if (store_.layout.key.order_entry > 0) {
    order_ = arena.take<std::uint16_t>(deep);
    gathered_ = arena.take<float>(n * static_cast<std::size_t>(query_stride_));
    query_lanes_ = arena.take<float>(base::round_up(n, std::size_t{4}) * static_cast<std::size_t>(query_stride_));
  }
  if (store_.layout.value.rotation > 1) {
    rotated_.values = arena.take<float>(n * static_cast<std::size_t>(output_stride_));
    rotated_.owed = arena.take<float>(n);
  }
  if (store_.layout.value.channel_factors) {
    page_sum_ = arena.take<float>(n * static_cast<std::size_t>(output_stride_));
    factors_ = arena.take<float>(static_cast<std::size_t>(output_stride_));
  }
}

void QueryBlock::start(int head, std::int64_t first_row, int rows) {
  head_ = head;
  first_row_ = first_row;
  rows_ = rows;
  vectors_ = rows * plan_.group;
  const ConstView& view = plan_.queries;
  for (int n = 0; n < vectors_; ++n) {
    const std::int64_t row = first_row + n / plan_.group;
    const int query_head = head * plan_.group + n % plan_.group;
    float* out = queries_ + n * query_stride_;
    const std::int64_t at = row * view.stride[0] + query_head * view.stride[1];
    if (view.stride[2] == 1) {
      kernels_.widen(static_cast<const std::byte*>(view.data) + at * static_cast<std::int64_t>(size_of(view.type)),
                     view.type, out, store_.shape.key_dim);
    } else {
      for (int d = 0; d < store_.shape.key_dim; ++d) {
        out[d] = base::load_float(view.data, view.type, at + d * view.stride[2]);
      }
    }
    for (int d = 0; d < store_.shape.key_dim; ++d) out[d] *= plan_.scale;
    slope_[n] = plan_.slopes[static_cast<std::size_t>(query_head)];
  }
  has_lanes_ = false;
  std::fill_n(maximum_, vectors_, kMinusInfinity);
  std::fill_n(sum_, vectors_, 0.0F);
  for (Mixed* mixed : {&plain_, &rotated_}) {
    mixed->is_zero = true;
    if (mixed->values == nullptr) continue;
    std::fill_n(mixed->values, vectors_ * output_stride_, 0.0F);
    std::fill_n(mixed->owed, vectors_, 1.0F);
  }
}

void QueryBlock::score_exact(const ExactRows& exact, const std::uint8_t* tokens) {
  const std::array<int, kMaxPage> places = exact_places(exact, tokens);
  const RowsLayout rows(store_.shape, exact.capacity);
  std::fill_n(exact_, vectors_ * score_stride_, 0.0F);
  multiply_open(exact.rows.get() + rows.key_at(head_, 0, 0), exact.capacity, exact.capacity, store_.shape.key_dim,
                queries_, query_stride_, exact_, score_stride_);
  for (int n = 0; n < vectors_; ++n) {
    for (std::size_t i = 0; i < exact.cells.size(); ++i) {
      scores_[n * score_stride_ + places[i]] = exact_[n * score_stride_ + static_cast<std::ptrdiff_t>(i)];
    }
  }
}

void QueryBlock::score_tiles(const Page& page) {
  std::ptrdiff_t first = 0;
  for (const TileLayout* tile : {&store_.layout.key, &store_.layout.key_rest}) {
    if (tile->rows == 0) continue;
    const TileView view(store_.layout, *tile, page.sealed->block.get(), head_);
    pack_tile(view, queries_, query_stride_);
    // The padding of its rows is written too: places that the next tile fills, or such behind the page.
    multiply_tile(view, tiles::Start::replace, first == 0 ? ahead_key_ : tiles::Ahead(), scores_ + first,
                  score_stride_);
    add_outliers(view, queries_, query_stride_, scores_ + first, score_stride_);
    first += tile->rows;
  }
}

void QueryBlock::score_page(const Page& page, int cells) {
  if (page.open) {
    for (int n = 0; n < vectors_; ++n) std::fill_n(scores_ + n * score_stride_, cells, 0.0F);
    multiply_open(page.open.get() + store_.rows.key_at(head_, 0, 0), store_.tokens(), cells, store_.shape.key_dim,
                  queries_, query_stride_, scores_, score_stride_, ahead_key_);
    return;
  }
  if (store_.needs_rotation()) {
    score_turned(page);
  } else {
    score_tiles(page);
  }
  const ExactRows& exact = page.sealed->exact;
  if (!exact.cells.empty()) score_exact(exact, token_order(store_.layout, page.sealed->block.get(), head_));
}

// Moves the weights of exact cells out of the page's weights and mixes their values.
void QueryBlock::mix_exact(const ExactRows& exact, const std::uint8_t* tokens) {
  const std::array<int, kMaxPage> places = exact_places(exact, tokens);
  for (int n = 0; n < vectors_; ++n) {
    float* weights = scores_ + n * score_stride_;
    float* own = exact_ + n * score_stride_;
    std::fill_n(own, exact.capacity, 0.0F);
    for (std::size_t i = 0; i < exact.cells.size(); ++i) {
      own[i] = weights[places[i]];
      weights[places[i]] = 0;
    }
  }
  const RowsLayout rows(store_.shape, exact.capacity);
  multiply_open(exact.rows.get() + rows.value_at(head_, 0, 0), rows.value_stride, store_.shape.value_dim,
                exact.capacity, exact_, score_stride_, plain_.values, output_stride_);
}

void QueryBlock::settle(Mixed& to, Mixed& other) {
  for (int n = 0; n < vectors_; ++n) {
    if (other.values != nullptr) other.owed[n] *= alpha_[n];
    alpha_[n] *= to.owed[n];
    to.owed[n] = 1;
  }
  to.is_zero = false;
}

void QueryBlock::rescale(Mixed& to, Mixed& other) {
  settle(to, other);
  kernels_.rescale(to.values, output_stride_, vectors_, static_cast<int>(output_stride_), alpha_, bias_);
  std::fill_n(alpha_, vectors_, 1.0F);
}

void QueryBlock::mix_page(const Page& page, int cells) {
  if (page.open) {
    std::fill_n(bias_, vectors_, 0.0F);
    rescale(plain_, rotated_);
    multiply_open(page.open.get() + store_.rows.value_at(head_, 0, 0), store_.rows.value_stride, store_.shape.value_dim,
                  cells, scores_, score_stride_, plain_.values, output_stride_, ahead_value_);
    return;
  }
  // Exact values are added after a rescaling without the page's own bias, from weights taken out before that is
  // computed.
  const ExactRows& exact = page.sealed->exact;
  if (!exact.cells.empty()) {
    std::fill_n(bias_, vectors_, 0.0F);
    rescale(plain_, rotated_);
    mix_exact(exact, token_order(store_.layout, page.sealed->block.get(), head_));
  }
  const TileView view(store_.layout, store_.layout.value, page.sealed->block.get(), head_);
  pack_tile(view, scores_, score_stride_);
  if (view.tile->channel_factors) return mix_factored(view);
  Mixed& sum = rotated_.values != nullptr ? rotated_ : plain_;
  settle(sum, &sum == &plain_ ? rotated_ : plain_);
  multiply_tile(view, tiles::Start::rescale, ahead_value_, sum.values, output_stride_);
  add_outliers(view, scores_, score_stride_, sum.values, output_stride_);
}

// Factors are the page's own: its sum is made apart from that of the pages before.
void QueryBlock::mix_factored(const TileView& view) {
  const int channels = view.tile->rows;
  kernels_.widen(view.head_block + view.tile->factor_offset, store_.shape.dtype, factors_, channels);
  multiply_tile(view, tiles::Start::replace, ahead_value_, page_sum_, output_stride_);
  std::fill_n(bias_, vectors_, 0.0F);
  rescale(plain_, rotated_);
  for (int n = 0; n < vectors_; ++n) {
    const float* from = page_sum_ + n * output_stride_;
    float* to = plain_.values + n * output_stride_;
    for (int d = 0; d < channels; ++d) to[d] += from[d] * factors_[d];
  }
}

void QueryBlock::finish() {
  if (rotated_.is_zero) return;
  const CacheShape& shape = store_.shape;
  for (int n = 0; n < vectors_; ++n) {
    float* out = plain_.values + n * output_stride_;
    float* rotated = rotated_.values + n * output_stride_;
    kernels_.hadamard(rotated, shape.value_dim, store_.layout.value.rotation);
    for (int d = 0; d < shape.value_dim; ++d) out[d] = out[d] * plain_.owed[n] + rotated[d] * rotated_.owed[n];
  }
}

// Where a page keeps this head's keys or values, so that products ask for it bit by bit. Grids are small.
tiles::Ahead QueryBlock::ahead_of(std::int64_t number, Side side) const {
  if (number >= static_cast<std::int64_t>(store_.pages.size())) return {};
  const Page& page = store_.pages[static_cast<std::size_t>(number)];
  const bool keys = side == Side::key;
  if (page.sealed) {
    const PageLayout& layout = store_.layout;
    const std::byte* block = page.sealed->block.get() + static_cast<std::size_t>(head_) * layout.head_bytes;
    const std::size_t value = layout.value.planes.front().offset;
    if (keys) return {block, value};
    const std::size_t heads_bytes = static_cast<std::size_t>(store_.shape.kv_heads) * layout.head_bytes;
    for (std::size_t i = heads_bytes; i < layout.page_bytes; i += base::kAlignment) {
      __builtin_prefetch(page.sealed->block.get() + i, 0, 2);
    }
    return {block + value, layout.head_bytes - value};
  }
  if (!page.open) return {};
  return keys ? tiles::Ahead{page.open.get() + store_.rows.key_at(head_, 0, 0), store_.rows.key_head}
              : tiles::Ahead{page.open.get() + store_.rows.value_at(head_, 0, 0), store_.rows.value_head};
}

int QueryBlock::read_cells(const Page& page) const {
  if (!page.open) return store_.tokens();
  const CellSet written = page.written();
  int cells = store_.tokens();
  while (cells > 0 && !written[static_cast<std::size_t>(cells - 1)]) --cells;
  return base::round_up(cells, tiles::kLanes);
}

void QueryBlock::add_page(std::int64_t number) {
  const Page& page = store_.pages[static_cast<std::size_t>(number)];
  if (page.is_empty()) return;
  const int cells = read_cells(page);
  if (cells == 0 || !load_mask(number, cells)) return;
  if (page.sealed && store_.layout.salient > 0) {
    order_masks(token_order(store_.layout, page.sealed->block.get(), head_));
  }
  ahead_key_ = ahead_of(number + 1, Side::key);
  ahead_value_ = ahead_of(number + 1, Side::value);
  score_page(page, cells);
  kernels_.softmax(
      {scores_, score_stride_, vectors_, cells, mask_rows_, slope_, plan_.options->softcap, maximum_, sum_, alpha_});
  mix_page(page, cells);
}

bool QueryBlock::is_whole(std::int64_t number) {
  const Page& page = store_.pages[static_cast<std::size_t>(number)];
  return page.sealed && page.sealed->exact.cells.empty() && load_mask(number, store_.tokens()) &&
         std::all_of(mask_rows_, mask_rows_ + vectors_, [](const float* row) { return row == nullptr; });
}

void QueryBlock::add_pages(std::int64_t first, std::int64_t last) {
  while (first < last) {
    int count = 0;
    while (batch_ > 1 && count < batch_ && first + count < last && is_whole(first + count)) ++count;
    if (count > 1) {
      add_batch(first, count);
      first += count;
    } else {
      add_page(first++);
    }
  }
}

void QueryBlock::add_batch(std::int64_t first, int count) {
  const int tokens = store_.tokens();
  float* const scores = scores_;
  const auto page = [&](int i) -> const Page& { return store_.pages[static_cast<std::size_t>(first + i)]; };
  // Every product asks for what the one after it reads.
  for (int i = 0; i < count; ++i, scores_ += tokens) {
    ahead_key_ = i + 1 < count ? ahead_of(first + i + 1, Side::key) : ahead_of(first, Side::value);
    score_page(page(i), tokens);
  }
  scores_ = scores;
  kernels_.softmax({scores_, score_stride_, vectors_, count * tokens, nullptr, slope_, plan_.options->softcap, maximum_,
                    sum_, alpha_});
  for (int i = 0; i < count; ++i, scores_ += tokens) {
    ahead_value_ = i + 1 < count ? ahead_of(first + i + 1, Side::value) : ahead_of(first + count, Side::key);
    mix_page(page(i), tokens);
    std::fill_n(alpha_, vectors_, 1.0F);  // applied
  }
  scores_ = scores;
}

void QueryBlock::add_scores(std::int64_t number, const std::int64_t* clocks) {
  const Page& page = store_.pages[static_cast<std::size_t>(number)];
  if (page.is_empty()) return;
  const int cells = read_cells(page);
  if (cells == 0 || !load_clocks(page, cells, clocks)) return;
  if (page.sealed && store_.layout.salient > 0) {
    order_masks(token_order(store_.layout, page.sealed->block.get(), head_));
  }
  score_page(page, cells);
  kernels_.softmax(
      {scores_, score_stride_, vectors_, cells, mask_rows_, slope_, plan_.options->softcap, maximum_, sum_, alpha_});
}

}  // namespace kvant::cache
