// The functions whose columns share one algorithm with the cache: the split, the batched fit and coding, the lookup.
#include <algorithm>
#include <vector>

#include "base/half.hpp"
#include "base/threads.hpp"
#include "kvant/kvquant.hpp"
#include "methods/kvquant/arguments.hpp"
#include "methods/kvquant/matrix.hpp"

namespace kvant::kvquant {
namespace {

void split_block(const ConstArray& x, std::int64_t batch, std::int64_t k, const Strided<float>& inliers,
                 const Strided<bool>& mask, const Strided<float>& values) {
  const BlockShape shape = block_shape("x", x, x.rank);
  Matrix block(shape.rows, shape.columns);
  load_rows("x", x, batch, 0, block);
  std::vector<std::uint8_t> marked(block.padded_size(), 0);
  Matrix kept(shape.rows, shape.columns);
  if (k > 0) {
    const Scratch<float> scratch(float_scratch(shape.rows, k));
    nuq_kernels().mark_outliers(block.view(), k, marked.data(), scratch.get());
    nuq_kernels().fill_outliers(block.view(), marked.data(), kept.data());
  }
  std::vector<float> outliers(static_cast<std::size_t>(shape.columns));
  for (std::int64_t r = 0; r < shape.rows; ++r) {
    const std::uint8_t* row = marked.data() + r * block.stride();
    for (std::int64_t c = 0; c < shape.columns; ++c) {
      outliers[static_cast<std::size_t>(c)] = row[c] != 0 ? block.row(r)[c] : 0.0F;
    }
    store_row(inliers, batch, r, shape.columns, k > 0 ? kept.row(r) : block.row(r));
    store_row(mask, batch, r, shape.columns, row);
    store_row(values, batch, r, shape.columns, outliers.data());
  }
}

void split(const ConstArray& x, double fraction, const Strided<float>& inliers, const Strided<bool>& mask,
           const Strided<float>& values, int rank, int threads) {
  const BlockShape shape = block_shape("x", x, rank);
  require_block("inliers", inliers, rank, shape);
  require_block("outlier_mask", mask, rank, shape);
  require_block("outlier_values", values, rank, shape);
  require_fraction("outlier_fraction", fraction);
  const std::int64_t k = outlier_count(shape.rows, fraction);
  base::parallel_for(shape.batch, threads,
                     [&](std::int64_t batch, int) { split_block(x, batch, k, inliers, mask, values); });
}

// The levels of one batch element, padded.
Matrix load_levels(const ConstArray& levels, std::int64_t batch) {
  const BlockShape shape = block_shape("levels", levels, levels.rank);
  Matrix table(shape.rows, shape.columns);
  for (std::int64_t l = 0; l < shape.rows; ++l) exact::row_of(levels, batch, 0, l).load(table.row(l));
  return table;
}

void look_up_block(const Strided<const std::int32_t>& codes, const ConstArray& levels, const Array& out,
                   std::int64_t batch) {
  const BlockShape shape = block_shape("codes", codes, codes.rank);
  const Matrix table = load_levels(levels, batch);
  std::vector<float> row(static_cast<std::size_t>(shape.columns));
  const std::int64_t step = codes.stride[exact::at(codes.rank - 1)];
  for (std::int64_t r = 0; r < shape.rows; ++r) {
    const std::int32_t* code = codes.data + exact::row_start(codes, batch, 0, r);
    for (std::int64_t c = 0; c < shape.columns; ++c) {
      const float level = table.row(code[c * step])[c];
      row[static_cast<std::size_t>(c)] = base::half_to_float(base::float_to_half(level));
    }
    exact::row_of(out, batch, 0, r).store(row.data());
  }
}

void require_codes(const Strided<const std::int32_t>& codes, const BlockShape& shape, std::int64_t level_count) {
  const std::int64_t step = codes.stride[exact::at(codes.rank - 1)];
  for (std::int64_t b = 0; b < shape.batch; ++b) {
    for (std::int64_t r = 0; r < shape.rows; ++r) {
      const std::int32_t* code = codes.data + exact::row_start(codes, b, 0, r);
      for (std::int64_t c = 0; c < shape.columns; ++c) {
        if (code[c * step] >= 0 && code[c * step] < level_count) continue;
        base::fail(ErrorCode::out_of_range, "codes holds " + std::to_string(code[c * step]) + "; it must be in 0.." +
                                                std::to_string(level_count - 1));
      }
    }
  }
}

void look_up(const Strided<const std::int32_t>& codes, const ConstArray& levels, const Array& out, int rank,
             int threads) {
  const BlockShape shape = block_shape("codes", codes, rank);
  require_block("out", out, rank, shape);
  require_levels(levels, rank, shape);
  require_codes(codes, shape, levels.extent[exact::at(rank - 2)]);
  base::parallel_for(shape.batch, threads, [&](std::int64_t batch, int) { look_up_block(codes, levels, out, batch); });
}

}  // namespace

void split_dense_sparse(const ConstArray& x, double outlier_fraction, const Strided<float>& inliers,
                        const Strided<bool>& outlier_mask, const Strided<float>& outlier_values) {
  split(x, outlier_fraction, inliers, outlier_mask, outlier_values, 2, 1);
}

void split_dense_sparse_batched(const ConstArray& x, double outlier_fraction, const Strided<float>& inliers,
                                const Strided<bool>& outlier_mask, const Strided<float>& outlier_values, int threads) {
  split(x, outlier_fraction, inliers, outlier_mask, outlier_values, 3, threads);
}

void fit_nuq_levels_batched(const ConstArray& x, std::int64_t bits, std::int64_t n_iters, const Strided<float>& levels,
                            int threads) {
  const BlockShape shape = block_shape("x", x, 3);
  exact::require_bits("bits", bits);
  require_samples(shape.rows);
  const int level_count = 1 << bits;
  require_block("levels", levels, 3, {shape.batch, level_count, shape.columns});
  base::parallel_for(shape.batch, threads, [&](std::int64_t batch, int) {
    Matrix block(shape.rows, shape.columns);
    load_rows("x", x, batch, 0, block);
    const Matrix fitted(level_count, shape.columns);
    const Scratch<float> scratch(float_scratch(shape.rows, 0));
    nuq_kernels().fit(block.view(), level_count, n_iters, fitted.data(), scratch.get());
    for (int l = 0; l < level_count; ++l) store_row(levels, batch, l, shape.columns, fitted.row(l));
  });
}

void quantize_nuq_batched(const ConstArray& x, const ConstArray& levels, const Strided<std::int32_t>& codes,
                          int threads) {
  const BlockShape shape = block_shape("x", x, 3);
  require_block("codes", codes, 3, shape);
  require_levels(levels, 3, shape);
  base::parallel_for(shape.batch, threads, [&](std::int64_t batch, int) {
    Matrix block(shape.rows, shape.columns);
    load_rows("x", x, batch, 0, block);
    const Matrix table = load_levels(levels, batch);
    std::vector<std::uint8_t> found(block.padded_size());
    nuq_kernels().encode(block.view(), static_cast<int>(table.rows()), table.data(), found.data());
    for (std::int64_t r = 0; r < shape.rows; ++r) {
      store_row(codes, batch, r, shape.columns, found.data() + r * block.stride());
    }
  });
}

void dequant_nuq(const Strided<const std::int32_t>& codes, const ConstArray& levels, const Array& out) {
  look_up(codes, levels, out, 2, 1);
}

void dequant_nuq_batched(const Strided<const std::int32_t>& codes, const ConstArray& levels, const Array& out,
                         int threads) {
  look_up(codes, levels, out, 3, threads);
}

}  // namespace kvant::kvquant
