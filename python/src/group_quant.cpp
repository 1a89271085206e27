// The shared group quantizer: kvant/group_quant.hpp. Rank 2 arrays are one matrix, rank 3 arrays a batch.
#include "kvant/group_quant.hpp"

#include <memory>

#include "arrays.hpp"
#include "integers.hpp"
#include "module.hpp"

namespace kvant::python {
namespace {

// The reference hands codes out as fp32; `codes` is dense.
void group_quant_codes(const In& x, int bits, std::int64_t group_size, const Out& codes, const Out& scale,
                       const Out& zero, int rank) {
  const ConstArray from = read_floats(x, "x", rank);
  const Strided<float> wide = write_grid<float>(codes, "codes", rank + 1);
  const Strided<float> scales = write_grid<float>(scale, "scale", rank + 1);
  const Strided<float> zeros = write_grid<float>(zero, "zero", rank + 1);
  const std::size_t count = codes.size();
  without_gil([&] {
    const auto narrow = std::make_unique<std::uint8_t[]>(count);
    const Strided<std::uint8_t> view{narrow.get(), rank + 1, wide.extent, dense_strides(rank + 1, wide.extent)};
    kvant::group_quant_codes(from, bits, group_size, view, scales, zeros);
    for (std::size_t i = 0; i < count; ++i) wide.data[i] = static_cast<float>(narrow[i]);
  });
}

void group_dequant_codes(const In& codes, const In& scale, const In& zero, const Out& out, int rank) {
  const Integers<std::uint8_t> from(codes, "codes", rank + 1);
  const Strided<const float> scales = read_grid<float>(scale, "scale", rank + 1);
  const Strided<const float> zeros = read_grid<float>(zero, "zero", rank + 1);
  const Array to = write_floats(out, "out", rank);
  without_gil([&] { kvant::group_dequant_codes(from.view(), scales, zeros, to); });
}

void group_quant_dequant(const In& x, int bits, std::int64_t group_size, const Out& out, int rank) {
  const ConstArray from = read_floats(x, "x", rank);
  const Array to = write_floats(out, "out", rank);
  without_gil([&] { kvant::group_quant_dequant(from, bits, group_size, to); });
}

}  // namespace

void bind_group_quant(nb::module_& module) {
  module.def("group_quant_codes", &group_quant_codes, nb::arg("x"), nb::arg("bits"), nb::arg("group_size"),
             nb::arg("codes"), nb::arg("scale"), nb::arg("zero"), nb::arg("rank"));
  module.def("group_dequant_codes", &group_dequant_codes, nb::arg("codes"), nb::arg("scale"), nb::arg("zero"),
             nb::arg("out"), nb::arg("rank"));
  module.def("group_quant_dequant", &group_quant_dequant, nb::arg("x"), nb::arg("bits"), nb::arg("group_size"),
             nb::arg("out"), nb::arg("rank"));
}

}  // namespace kvant::python
