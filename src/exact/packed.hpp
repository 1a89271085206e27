// A quantized matrix in memory: bit slices of the codes, then minimum and maximum of every group and column in the
// input's own type, from which the fp32 scale is recomputed to the bit.
//
//   [chunk of 8 rows: plane 0 of all columns .. plane common-1, then `extra` planes of the wide columns] ..
//   [group: minima of all columns, maxima of all columns] ..
//
// Byte c of a plane holds one bit of column c of 8 rows, so that packing works on whole vectors of columns, any width
// costs exactly its bits, and only the last chunk of a matrix can be short.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "base/checked.hpp"
#include "exact/columns.hpp"
#include "exact/group.hpp"
#include "kvant/types.hpp"
#include "tiles/kernels.hpp"

namespace kvant::exact {

constexpr std::int64_t kChunk = 8;  // rows of a chunk: the bits of a byte

// Code widths of the columns of a matrix: `common` bits, and `extra` more in the wide columns.
struct Widths {
  int common = 0;
  int extra = 0;
  std::vector<std::uint32_t> wide;  // ascending; empty when extra is 0
  std::vector<std::uint8_t> bits;   // per column

  static Widths uniform(std::int64_t columns, int bits);
  // Columns whose mask is not 0 have hi_bits, the others lo_bits.
  static Widths mixed(std::span<const std::uint8_t> mask, int hi_bits, int lo_bits);
};

struct PackedLayout {
  std::int64_t rows = 0;
  std::int64_t columns = 0;
  std::int64_t group_size = 1;
  DType type = DType::f16;
  std::int64_t chunk_bytes = 0;
  std::size_t ends = 0;   // offset of the endpoints
  std::size_t bytes = 0;  // a multiple of 4

  PackedLayout() = default;
  PackedLayout(std::int64_t rows, std::int64_t columns, std::int64_t group_size, DType type, const Widths& widths);
  std::size_t end_row_bytes() const { return static_cast<std::size_t>(columns) * size_of(type); }
  // Rows from `row` on, at most `limit`, that share its chunk and its group.
  std::int64_t run(std::int64_t row, std::int64_t limit) const {
    return std::min({limit, kChunk - row % kChunk, group_size - row % group_size});
  }
};

class Packer {
 public:
  Packer(const PackedLayout& layout, const Widths& widths);

  // Packs layout.rows rows.
  void pack(const ConstRows& rows, std::byte* data);

 private:
  void write_chunk(std::byte* chunk);

  const PackedLayout& layout_;
  const Widths& widths_;
  GroupGrid grid_;
  std::vector<std::uint8_t> codes_;   // a chunk of rows
  std::vector<std::uint8_t> planes_;  // extra planes before their columns are gathered
};

// Reads rows of a packed matrix; neighbours share the work for their chunk and group.
class PackedReader {
 public:
  PackedReader(const PackedLayout& layout, const Widths& widths, const std::byte* data,
               Rounding rounding = Rounding::direct);
  // Rows first..first+out.count-1.
  void read(std::int64_t first, const Rows& out);

 private:
  void load_chunk(std::int64_t chunk);
  void load_group(std::int64_t group);

  const PackedLayout& layout_;
  const Widths& widths_;
  const std::byte* data_;
  Rounding rounding_;
  GroupGrid grid_;
  std::int64_t chunk_ = -1;
  std::int64_t group_ = -1;
  std::vector<std::uint8_t> codes_;
  std::vector<std::uint8_t> planes_;
};

}  // namespace kvant::exact
