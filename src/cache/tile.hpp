// A tile as one sealed page has it: where its planes are, which widths its depth indices have, its grid and its order.
#pragma once

#include <array>
#include <cstdint>
#include <cstring>
#include <span>
#include <vector>

#include "kvant/layout.hpp"

namespace kvant::cache {

constexpr int kMaxPlanes = 4;

// Where the widths differ, depth indices are stored by width in this order: then the 4-bit codes or upper parts of
// (6, 4, 5), the single bits of (5, 1, 3) and the 2-bit codes or upper parts of (3, 2) are one plane each, and only
// those of 6 need a plane of their own. One 1-bit plane means that at most one of its fours lacks a partner in a word
// group. Bit 0 of a code belongs to the odd widths; codes of even width are stored times two, their step is half as
// long.
constexpr std::array<int, 6> kWidthOrder = {6, 4, 5, 1, 3, 2};

// Place of a width in kWidthOrder.
int width_class(int width);
// The largest code of a width as stored: even ones times two.
constexpr int largest_code(int width) {
  return ((1 << width) - 1) << (width % 2 == 0 ? 1 : 0);
}

struct TilePlanes {
  int count = 0;
  std::array<PlaneLayout, kMaxPlanes> planes;

  std::span<const PlaneLayout> span() const { return {planes.data(), static_cast<std::size_t>(count)}; }
};

// The planes of a tile with own widths, from its counts of fours per class; offsets start at `offset`.
TilePlanes place_planes(const std::array<int, 6>& counts, int rows, std::size_t offset);
// Bytes that no counts whose widths sum to at most `budget` exceed.
std::size_t most_plane_bytes(int budget, int rows);

// Steps of the grid that table entries count.
constexpr int kTableSteps = 254;

// The outliers of one head, ascending by depth index and row; those of a key channel may end with unused slots.
struct OutlierList {
  int count = 0;
  int per_vector = 0;  // slots of a key channel
  int row_entry = 0;
  const std::byte* values = nullptr;  // of the cache's type
  const std::byte* rows = nullptr;
  const std::byte* depths = nullptr;  // null: slot i belongs to depth index i / per_vector

  int row(int i) const {
    if (row_entry == 1) return std::to_integer<int>(rows[i]);
    std::uint16_t row = 0;
    std::memcpy(&row, rows + static_cast<std::ptrdiff_t>(i) * row_entry, sizeof row);
    return row;
  }
  int depth(int i) const { return depths != nullptr ? std::to_integer<int>(depths[i]) : i / per_vector; }
  // Row and depth index of every slot.
  void places(std::uint16_t* to_rows, std::uint16_t* to_depths) const;
};

// The token in each place of a page's tiles; null where tokens lie in cell order.
const std::uint8_t* token_order(const PageLayout& layout, const std::byte* block, int head);

// One page's tile of one head.
struct TileView {
  const TileLayout* tile = nullptr;
  const std::byte* head_block = nullptr;
  const std::byte* grid = nullptr;  // what min_offset and max_offset count from
  TilePlanes planes;
  int head = 0;
  const std::uint8_t* tokens = nullptr;  // token_order()

  TileView(const PageLayout& layout, const TileLayout& tile, const std::byte* block, int head);

  // The largest code per stored depth index: the bits that its planes hold, or the steps of the table's grid.
  void levels(int* out) const { fill_levels(out); }
  void levels(float* out) const { fill_levels(out); }
  // The channel (or token) of each stored depth index.
  void order(std::uint16_t* out) const;
  OutlierList outliers() const;
  // Numbers of the list's slots where each head's begin, and where the last one's end (shared lists).
  std::uint32_t outlier_start(int at_head) const;
  bool in_order() const { return tile->order_entry == 0; }

 private:
  template <typename T>
  void fill_levels(T* out) const;
};

// Counts of a tile with own widths, as stored.
std::array<int, 6> read_counts(const TileLayout& tile, const std::byte* head_block);

}  // namespace kvant::cache
