// Stores whose pages hold keys as they were before RoPE: the rotation, positions, and context shifts.
#include <algorithm>
#include <array>

#include "base/half.hpp"
#include "cache/store.hpp"
#include "tiles/kernels.hpp"

namespace kvant {

using cache::Page;

std::unique_ptr<std::int32_t[]> PageStore::Impl::make_positions(const Page* from) const {
  auto positions = std::make_unique<std::int32_t[]>(static_cast<std::size_t>(tokens()));
  if (from != nullptr) std::copy_n(from->positions.get(), tokens(), positions.get());
  return positions;
}

void PageStore::Impl::check_positions(std::span<const std::int64_t> at_cells,
                                      std::span<const std::int64_t> positions) const {
  if (!needs_rotation()) return;
  if (!rotation) {
    base::fail(ErrorCode::invalid_argument,
               "recipe has rope=before: keys need set_key_rotation before the first of them is written");
  }
  for (const std::int64_t position : positions.empty() ? at_cells : positions) cache::checked_position(position);
}

bool PageStore::needs_rotation() const {
  return impl_->needs_rotation();
}

void PageStore::set_key_rotation(const KeyRotation& rotation) {
  Impl& impl = *impl_;
  if (!impl.needs_rotation() || (impl.rotation && impl.rotation->key_rotation() == rotation)) return;
  const auto is_used = [](const Page& page) { return page.key_written.any(); };
  if (impl.rotation && std::any_of(impl.pages.begin(), impl.pages.end(), is_used)) {
    base::fail(ErrorCode::invalid_argument, "key rotation: is not that of the keys that are stored");
  }
  impl.rotation = std::make_shared<const cache::Rotation>(rotation, impl.shape.key_dim);
}

void PageStore::Impl::take_rotation(const Impl& from) {
  if (!from.rotation) return;
  if (rotation && !(rotation->key_rotation() == from.rotation->key_rotation())) {
    base::fail(ErrorCode::invalid_argument, "copy_cells between stores of different key rotation");
  }
  rotation = from.rotation;
}

// A row of an open page; it is rotated already, and stays a value of the cache's type.
void PageStore::Impl::turn_open(Page& page, std::size_t token, std::int32_t distance) {
  const float limit = base::largest_stored(shape.dtype);
  std::vector<float> row(static_cast<std::size_t>(shape.key_dim));
  const auto cell = static_cast<int>(token);
  for (int head = 0; head < shape.kv_heads; ++head) {
    const auto at = [&](int d) { return page.open.get() + rows.key_at(head, d, cell); };
    for (int d = 0; d < shape.key_dim; ++d) row[static_cast<std::size_t>(d)] = base::load_float(at(d), shape.dtype, 0);
    rotation->turn(cache::Turn::shift, &distance, 1, row.data(), 1);
    for (int d = 0; d < shape.key_dim; ++d) {
      base::store_float(at(d), shape.dtype, 0, std::clamp(row[static_cast<std::size_t>(d)], -limit, limit));
    }
  }
}

void PageStore::shift_keys(std::span<const std::int64_t> cells, std::span<const std::int64_t> distances) {
  Impl& impl = *impl_;
  if (!impl.needs_rotation()) {
    base::fail(ErrorCode::invalid_argument, "shift_keys needs a recipe with rope=before");
  }
  if (cells.size() != distances.size()) {
    base::fail(ErrorCode::invalid_argument, "distances has " + std::to_string(distances.size()) + " entries for " +
                                                std::to_string(cells.size()) + " cells");
  }
  const auto page_of = [&](std::int64_t cell) -> const Page& {
    return impl.pages[static_cast<std::size_t>(cell / impl.tokens())];
  };
  const auto token_of = [&](std::int64_t cell) { return static_cast<std::size_t>(cell % impl.tokens()); };
  const auto is_moved = [&](std::size_t i) {
    return distances[i] != 0 && page_of(cells[i]).key_written[token_of(cells[i])];
  };
  for (std::size_t i = 0; i < cells.size(); ++i) {
    if (cells[i] < 0 || cells[i] >= impl.cells) {
      base::fail(ErrorCode::out_of_range,
                 "cell " + std::to_string(cells[i]) + " outside 0.." + std::to_string(impl.cells - 1));
    }
    if (!is_moved(i)) continue;
    cache::checked_position(distances[i]);
    cache::checked_position(page_of(cells[i]).positions[token_of(cells[i])] + distances[i]);
  }
  std::vector<std::int64_t> sorted(cells.begin(), cells.end());
  std::sort(sorted.begin(), sorted.end());
  const auto twice = std::adjacent_find(sorted.begin(), sorted.end());
  if (twice != sorted.end()) {
    base::fail(ErrorCode::invalid_argument, "cell " + std::to_string(*twice) + " is named twice; allowed: once");
  }
  PageStore moved(*this);  // memory may run out half way; sealed pages are shared
  Impl& to = *moved.impl_;
  // Exact rows of sealed pages are shared between copies, and a moved one is no sink any more.
  for (std::size_t i = 0; i < cells.size(); ++i) {
    if (is_moved(i) && page_of(cells[i]).exact[token_of(cells[i])]) to.open(cells[i] / impl.tokens());
  }
  for (std::size_t i = 0; i < cells.size(); ++i) {
    if (!is_moved(i)) continue;
    Page& page = to.pages[static_cast<std::size_t>(cells[i] / impl.tokens())];
    const std::size_t token = token_of(cells[i]);
    const auto distance = static_cast<std::int32_t>(distances[i]);
    if (page.open) to.turn_open(page, token, distance);
    page.positions[token] = static_cast<std::int32_t>(page.positions[token] + distances[i]);
    page.exact.reset(token);
  }
  *this = std::move(moved);
}

}  // namespace kvant
