#include "exact/packed.hpp"

#include <cstring>

namespace kvant::exact {
namespace {

std::size_t size(std::int64_t count) {
  return static_cast<std::size_t>(count);
}

}  // namespace

Widths Widths::uniform(std::int64_t columns, int bits) {
  return {bits, 0, {}, std::vector<std::uint8_t>(size(columns), static_cast<std::uint8_t>(bits))};
}

Widths Widths::mixed(std::span<const std::uint8_t> mask, int hi_bits, int lo_bits) {
  Widths widths{std::min(hi_bits, lo_bits), std::abs(hi_bits - lo_bits), {}, {}};
  widths.bits.reserve(mask.size());
  widths.wide.reserve(mask.size());
  for (std::size_t c = 0; c < mask.size(); ++c) {
    const int bits = mask[c] != 0 ? hi_bits : lo_bits;
    widths.bits.push_back(static_cast<std::uint8_t>(bits));
    if (bits > widths.common) widths.wide.push_back(static_cast<std::uint32_t>(c));
  }
  return widths;
}

PackedLayout::PackedLayout(std::int64_t row_count, std::int64_t column_count, std::int64_t group, DType dtype,
                           const Widths& widths)
    : rows(row_count),
      columns(column_count),
      group_size(std::max<std::int64_t>(1, std::min(group, row_count))),
      type(dtype),
      chunk_bytes(widths.common * column_count + widths.extra * static_cast<std::int64_t>(widths.wide.size())) {
  ends = base::round_up(base::checked_multiply(size(ceil_divide(rows, kChunk)), size(chunk_bytes)), std::size_t{4});
  const std::size_t groups = size(ceil_divide(rows, group_size));
  bytes = base::round_up(base::checked_add(ends, base::checked_multiply(groups, 2 * end_row_bytes())), std::size_t{4});
}

Packer::Packer(const PackedLayout& layout, const Widths& widths)
    : layout_(layout),
      widths_(widths),
      grid_(widths.bits),
      codes_(size(kChunk * layout.columns)),
      planes_(size(widths.extra * layout.columns)) {}

void Packer::pack(const ConstRows& rows, std::byte* data) {
  const std::int64_t n = layout_.columns;
  for (std::int64_t row = 0; row < layout_.rows;) {
    if (row % layout_.group_size == 0) {
      grid_.fit(rows.part(row, std::min(layout_.group_size, layout_.rows - row)));
      std::byte* ends = data + layout_.ends + size(row / layout_.group_size) * 2 * layout_.end_row_bytes();
      tiles::kernels().narrow(grid_.min(), ends, layout_.type, n);
      tiles::kernels().narrow(grid_.max(), ends + layout_.end_row_bytes(), layout_.type, n);
    }
    const std::int64_t place = row % kChunk;
    const std::int64_t count = layout_.run(row, layout_.rows - row);
    grid_.encode(rows.part(row, count), codes_.data() + place * n);
    row += count;
    const bool last = row == layout_.rows;
    if (last) std::fill(codes_.begin() + (place + count) * n, codes_.end(), std::uint8_t{0});
    if (last || row % kChunk == 0) write_chunk(data + ((row - 1) / kChunk) * layout_.chunk_bytes);
  }
}

void Packer::write_chunk(std::byte* chunk) {
  auto* planes = reinterpret_cast<std::uint8_t*>(chunk);
  const std::int64_t n = layout_.columns;
  columns().slice(codes_.data(), n, 0, widths_.common, n, planes, n);
  if (widths_.wide.empty()) return;
  columns().slice(codes_.data(), n, widths_.common, widths_.extra, n, planes_.data(), n);
  std::uint8_t* out = planes + widths_.common * n;
  for (int p = 0; p < widths_.extra; ++p) {
    for (const std::uint32_t column : widths_.wide) *out++ = planes_[size(p * n + column)];
  }
}

PackedReader::PackedReader(const PackedLayout& layout, const Widths& widths, const std::byte* data, Rounding rounding)
    : layout_(layout),
      widths_(widths),
      data_(data),
      rounding_(rounding),
      grid_(widths.bits),
      codes_(size(kChunk * layout.columns)),
      planes_(size(widths.extra * layout.columns)) {}

void PackedReader::load_chunk(std::int64_t chunk) {
  const auto* planes = reinterpret_cast<const std::uint8_t*>(data_ + chunk * layout_.chunk_bytes);
  const std::int64_t n = layout_.columns;
  columns().unslice(planes, n, 0, widths_.common, n, codes_.data(), n);
  if (!widths_.wide.empty()) {
    const std::uint8_t* from = planes + widths_.common * n;
    for (int p = 0; p < widths_.extra; ++p) {  // planes_ stays 0 in the narrow columns
      for (const std::uint32_t column : widths_.wide) planes_[size(p * n + column)] = *from++;
    }
    columns().unslice(planes_.data(), n, widths_.common, widths_.extra, n, codes_.data(), n);
  }
  chunk_ = chunk;
}

void PackedReader::load_group(std::int64_t group) {
  const std::byte* ends = data_ + layout_.ends + size(group) * 2 * layout_.end_row_bytes();
  tiles::kernels().widen(ends, layout_.type, grid_.min(), layout_.columns);
  tiles::kernels().widen(ends + layout_.end_row_bytes(), layout_.type, grid_.max(), layout_.columns);
  grid_.rescale();
  group_ = group;
}

void PackedReader::read(std::int64_t first, const Rows& out) {
  for (std::int64_t done = 0; done < out.count;) {
    const std::int64_t row = first + done;
    if (row / kChunk != chunk_) load_chunk(row / kChunk);
    if (row / layout_.group_size != group_) load_group(row / layout_.group_size);
    const std::int64_t count = layout_.run(row, out.count - done);
    grid_.decode(codes_.data() + row % kChunk * layout_.columns, out.part(done, count), rounding_);
    done += count;
  }
}

}  // namespace kvant::exact
