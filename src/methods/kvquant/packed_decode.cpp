// From what a PackedSide holds back to rows in the cached type.
#include <algorithm>
#include <bit>
#include <cstring>

#include "base/half.hpp"
#include "methods/kvquant/matrix.hpp"
#include "methods/kvquant/packed.hpp"
#include "tiles/kernels.hpp"

namespace kvant::kvquant {
namespace {

// A level as the bits of the cached type: fp32 -> fp16 (done by the caller) -> cached type.
template <typename T>
T level_bits(std::uint16_t half, DType type) {
  if (type == DType::f16) return half;
  const float level = base::half_to_float(half);
  if (type == DType::bf16) return base::float_to_bfloat(level);
  return static_cast<T>(std::bit_cast<std::uint32_t>(level));
}

void look_up(const std::uint8_t* codes, std::int64_t rows, std::int64_t columns, int bits, const std::uint16_t* table,
             std::int64_t stride, std::uint16_t* out, std::int64_t out_stride) {
  nuq_kernels().look_up_16(codes, rows, columns, bits, table, stride, out, out_stride);
}
void look_up(const std::uint8_t* codes, std::int64_t rows, std::int64_t columns, int bits, const std::uint32_t* table,
             std::int64_t stride, std::uint32_t* out, std::int64_t out_stride) {
  nuq_kernels().look_up_32(codes, rows, columns, bits, table, stride, out, out_stride);
}
void look_up_rows(const std::uint8_t* codes, std::int64_t rows, std::int64_t columns, int bits,
                  const std::uint16_t* table, std::uint16_t* out, std::int64_t out_stride) {
  nuq_kernels().look_up_rows_16(codes, rows, columns, bits, table, out, out_stride);
}
void look_up_rows(const std::uint8_t* codes, std::int64_t rows, std::int64_t columns, int bits,
                  const std::uint32_t* table, std::uint32_t* out, std::int64_t out_stride) {
  nuq_kernels().look_up_rows_32(codes, rows, columns, bits, table, out, out_stride);
}

}  // namespace

// The levels of a head as elements of the cached type, [levels][padded channels].
template <typename T>
std::vector<T> PackedSide::key_table(const Run& run, std::int64_t head, const float* live) const {
  const std::int64_t levels = shape_.level_count();
  const std::int64_t stride = padded_columns(shape_.channels);
  const std::int64_t first = head % shape_.heads * levels * shape_.channels;
  std::vector<T> table(static_cast<std::size_t>(levels * stride), 0);
  std::vector<std::uint16_t> halves(static_cast<std::size_t>(shape_.channels));
  for (std::int64_t l = 0; l < levels; ++l) {
    const std::int64_t at = first + l * shape_.channels;
    const std::uint16_t* row = run.levels.data() + at;
    if (run.levels.empty()) {
      tiles::kernels().narrow(live + at, halves.data(), DType::f16, shape_.channels);
      row = halves.data();
    }
    T* out = table.data() + l * stride;
    for (std::int64_t c = 0; c < shape_.channels; ++c) out[c] = level_bits<T>(row[c], shape_.type);
  }
  return table;
}

// Puts the exact values of slots slot..slot+n-1 over the looked-up ones.
template <typename T>
void PackedSide::overlay(const Page& page, std::int64_t head, std::int64_t slot, std::int64_t n, T* out,
                         std::int64_t out_stride) const {
  if (shape_.per_token) {
    for (std::int64_t i = 0; i < n; ++i) {
      const Slot token = slot_of(page, true, head, slot + i);
      for (std::int64_t k = 0; k < shape_.token_outliers; ++k) {
        std::uint16_t channel = 0;
        if (shape_.index_bytes() == 1) {
          channel = std::to_integer<std::uint16_t>(token.outlier_indices[k]);
        } else {
          std::memcpy(&channel, token.outlier_indices + 2 * k, sizeof channel);
        }
        std::memcpy(out + i * out_stride + channel, token.outlier_values + k * static_cast<std::int64_t>(sizeof(T)),
                    sizeof(T));
      }
    }
    return;
  }
  if (page.outlier_bytes == 0) return;
  const std::int64_t heads = shape_.all_heads();
  const auto* starts = reinterpret_cast<const std::uint32_t*>(page.outliers.get());
  const std::byte* values = page.outliers.get() + (heads + 1) * static_cast<std::int64_t>(sizeof(std::uint32_t));
  const auto* positions = reinterpret_cast<const std::uint16_t*>(values + starts[heads] * sizeof(T));
  const std::uint16_t* end = positions + starts[head + 1];
  const auto first = static_cast<std::int64_t>(slot * shape_.channels);
  const std::int64_t last = first + n * shape_.channels;
  for (const std::uint16_t* p = std::lower_bound(positions + starts[head], end, first); p < end && *p < last; ++p) {
    T* cell = out + (*p - first) / shape_.channels * out_stride + (*p - first) % shape_.channels;
    std::memcpy(cell, values + static_cast<std::size_t>(p - positions) * sizeof(T), sizeof(T));
  }
}

template <typename T>
void PackedSide::decode_page(const Run& run, const Page& page, std::int64_t head, std::int64_t slot, std::int64_t n,
                             const T* table, T* out, std::int64_t out_stride) const {
  const Slot from = slot_of(page, run.coded, head, slot);
  if (!run.coded) {
    for (std::int64_t i = 0; i < n; ++i) {
      std::memcpy(out + i * out_stride, from.row + i * static_cast<std::int64_t>(shape_.row_bytes()),
                  shape_.row_bytes());
    }
    return;
  }
  if (!shape_.per_token) {
    look_up(from.codes, n, shape_.channels, shape_.bits, table, padded_columns(shape_.channels), out, out_stride);
  } else if (shape_.type == DType::f16) {
    look_up_rows(from.codes, n, shape_.channels, shape_.bits, reinterpret_cast<const T*>(from.levels), out, out_stride);
  } else {
    std::vector<T> levels(static_cast<std::size_t>(n * shape_.level_count()));
    for (std::size_t i = 0; i < levels.size(); ++i) levels[i] = level_bits<T>(from.levels[i], shape_.type);
    look_up_rows(from.codes, n, shape_.channels, shape_.bits, levels.data(), out, out_stride);
  }
  overlay(page, head, slot, n, out, out_stride);
}

template <typename T>
void PackedSide::decode(std::int64_t head, std::int64_t first, std::int64_t n, const float* live, T* out,
                        std::int64_t out_stride) const {
  std::int64_t run_first = 0;
  for (const Run& run : runs_) {
    const std::int64_t run_end = run_first + run.tokens;
    if (run_end > first && run_first < first + n) {
      std::vector<T> table;
      if (run.coded && !shape_.per_token) table = key_table<T>(run, head, live);
      std::int64_t page_first = run_first;
      for (const Page& page : run.pages) {
        const std::int64_t begin = std::max(first, page_first);
        const std::int64_t end = std::min(first + n, page_first + page.tokens);
        if (begin < end) {
          decode_page(run, page, head, begin - page_first, end - begin, table.data(),
                      out + (begin - first) * out_stride, out_stride);
        }
        page_first += page.tokens;
      }
    }
    run_first = run_end;
  }
}

void PackedSide::decode_float(std::int64_t head, std::int64_t first, std::int64_t n, const float* live, float* out,
                              std::int64_t out_stride) const {
  if (shape_.type == DType::f32) {
    decode(head, first, n, live, reinterpret_cast<std::uint32_t*>(out), out_stride);
    return;
  }
  std::vector<std::uint16_t> rows(static_cast<std::size_t>(n * shape_.channels));
  decode(head, first, n, live, rows.data(), shape_.channels);
  for (std::int64_t i = 0; i < n; ++i) {
    tiles::kernels().widen(rows.data() + i * shape_.channels, shape_.type, out + i * out_stride, shape_.channels);
  }
}

template void PackedSide::decode<std::uint16_t>(std::int64_t, std::int64_t, std::int64_t, const float*, std::uint16_t*,
                                                std::int64_t) const;
template void PackedSide::decode<std::uint32_t>(std::int64_t, std::int64_t, std::int64_t, const float*, std::uint32_t*,
                                                std::int64_t) const;

}  // namespace kvant::kvquant
