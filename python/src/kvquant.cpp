#include "kvant/kvquant.hpp"

#include <algorithm>

#include "arrays.hpp"
#include "integers.hpp"
#include "kvant/error.hpp"
#include "module.hpp"

namespace kvant::python {
namespace {

using kvquant::KVQuantKVCache;

// Every function has a plain form of rank 2 and a batched one of rank 3; the two fits and codings are different
// algorithms.
void split(const In& x, double outlier_fraction, const Out& inliers, const Out& mask, const Out& values, int rank) {
  const ConstArray from = read_floats(x, "x", rank);
  const Strided<float> in = write_grid<float>(inliers, "inliers", rank);
  const Strided<bool> is_outlier = write_grid<bool>(mask, "outlier_mask", rank);
  const Strided<float> out = write_grid<float>(values, "outlier_vals", rank);
  without_gil([&] {
    if (rank == 2) {
      kvquant::split_dense_sparse(from, outlier_fraction, in, is_outlier, out);
    } else {
      kvquant::split_dense_sparse_batched(from, outlier_fraction, in, is_outlier, out);
    }
  });
}

void fit(const In& x, std::int64_t bits, std::int64_t n_iters, const Out& levels, int rank) {
  const ConstArray from = read_floats(x, "x", rank);
  const Strided<float> to = write_grid<float>(levels, "levels", rank);
  without_gil([&] {
    if (rank == 2) {
      kvquant::fit_nuq_levels(from, bits, n_iters, to);
    } else {
      kvquant::fit_nuq_levels_batched(from, bits, n_iters, to);
    }
  });
}

void quantize(const In& x, const In& levels, const Out& codes, int rank) {
  const ConstArray from = read_floats(x, "x", rank);
  const ConstArray table = read_floats(levels, "levels", rank);
  const Strided<std::int32_t> to = write_grid<std::int32_t>(codes, "codes", rank);
  without_gil([&] {
    if (rank == 2) {
      kvquant::quantize_nuq(from, table, to);
    } else {
      kvquant::quantize_nuq_batched(from, table, to);
    }
  });
}

void dequant(const In& codes, const In& levels, const Out& out, int rank) {
  const Integers<std::int32_t> from(codes, "codes", rank);
  const ConstArray table = read_floats(levels, "levels", rank);
  const Array to = write_floats(out, "out", rank);
  without_gil([&] {
    if (rank == 2) {
      kvquant::dequant_nuq(from.view(), table, to);
    } else {
      kvquant::dequant_nuq_batched(from.view(), table, to);
    }
  });
}

void quant_dequant(const In& x, std::int64_t bits, double outlier_fraction, std::int64_t lloyd_iters, const Out& out) {
  const ConstArray from = read_floats(x, "x", 2);
  const Array to = write_floats(out, "out", 2);
  without_gil([&] { kvquant::nuq_quant_dequant(from, bits, outlier_fraction, lloyd_iters, to); });
}

double distortion(const In& x, const In& levels) {
  const ConstArray from = read_floats(x, "x", 2);
  const ConstArray table = read_floats(levels, "levels", 2);
  return without_gil([&] { return kvquant::nuq_distortion(from, table); });
}

// A table of the cache: its shape, or None where the reference has None.
nb::object shape_of(const Strided<const float>& table) {
  if (table.rank == 0) return nb::none();
  nb::list shape;
  for (int axis = 0; axis < table.rank; ++axis) shape.append(table.extent[static_cast<std::size_t>(axis)]);
  return nb::tuple(shape);
}

// `out` is dense and has the shape that shape_of said.
void copy_table(const Strided<const float>& table, const Out& out) {
  const Strided<float> to = write_grid<float>(out, "out", table.rank);
  if (to.extent != table.extent) throw Error(ErrorCode::invalid_argument, "out has another shape than the table");
  float* next = to.data;
  const std::int64_t depth = table.rank > 2 ? table.extent[0] : 1;
  const std::size_t row_axis = table.rank > 2 ? 1 : 0;
  for (std::int64_t i = 0; i < depth; ++i) {
    for (std::int64_t j = 0; j < table.extent[row_axis]; ++j) {
      const float* row = table.data + (table.rank > 2 ? i * table.stride[0] : 0) + j * table.stride[row_axis];
      for (std::int64_t k = 0; k < table.extent[row_axis + 1]; ++k) *next++ = row[k * table.stride[row_axis + 1]];
    }
  }
}

}  // namespace

void bind_kvquant(nb::module_& module) {
  module.def("split_dense_sparse", &split, nb::arg("x"), nb::arg("outlier_fraction"), nb::arg("inliers"),
             nb::arg("outlier_mask"), nb::arg("outlier_vals"), nb::arg("rank"));
  module.def("fit_nuq_levels", &fit, nb::arg("x"), nb::arg("bits"), nb::arg("n_iters"), nb::arg("levels"),
             nb::arg("rank"));
  module.def("quantize_nuq", &quantize, nb::arg("x"), nb::arg("levels"), nb::arg("codes"), nb::arg("rank"));
  module.def("dequant_nuq", &dequant, nb::arg("codes"), nb::arg("levels"), nb::arg("out"), nb::arg("rank"));
  module.def("nuq_quant_dequant", &quant_dequant, nb::arg("x"), nb::arg("bits"), nb::arg("outlier_fraction"),
             nb::arg("lloyd_iters"), nb::arg("out"));
  module.def("nuq_distortion", &distortion, nb::arg("x"), nb::arg("levels"));

  nb::class_<KVQuantKVCache, ReferenceCache>(module, "KVQuantKVCache")
      .def(nb::init<const KVCacheConfig&>(), nb::arg("config"))
      .def_prop_ro("nuq_bits", &KVQuantKVCache::nuq_bits)
      .def_prop_ro("outlier_fraction", &KVQuantKVCache::outlier_fraction)
      .def_prop_ro("outlier_count", &KVQuantKVCache::outlier_count)
      .def_prop_ro("n_sink", &KVQuantKVCache::n_sink)
      .def_prop_ro("sink_kept", &KVQuantKVCache::sink_kept)
      .def_prop_ro("compressed_key_bytes", &KVQuantKVCache::compressed_key_bytes)
      .def_prop_ro("compressed_value_bytes", &KVQuantKVCache::compressed_value_bytes)
      .def_prop_ro("fp16_key_bytes", &KVQuantKVCache::fp16_key_bytes)
      .def_prop_ro("fp16_value_bytes", &KVQuantKVCache::fp16_value_bytes)
      .def_prop_ro("effective_bits", &KVQuantKVCache::effective_bits)
      .def("key_outlier_thresh_shape", [](const KVQuantKVCache& cache) { return shape_of(cache.key_outlier_thresh()); })
      .def("key_levels_shape", [](const KVQuantKVCache& cache) { return shape_of(cache.key_levels()); })
      .def("value_levels_shape", [](const KVQuantKVCache& cache) { return shape_of(cache.value_levels()); })
      .def("key_outlier_thresh",
           [](const KVQuantKVCache& cache, const Out& out) { copy_table(cache.key_outlier_thresh(), out); })
      .def("key_levels", [](const KVQuantKVCache& cache, const Out& out) { copy_table(cache.key_levels(), out); })
      .def("value_levels", [](const KVQuantKVCache& cache, const Out& out) { copy_table(cache.value_levels(), out); });
}

}  // namespace kvant::python
