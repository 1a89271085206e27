#include "kvant/zipcache.hpp"

#include <nanobind/stl/optional.h>

#include <algorithm>

#include "arrays.hpp"
#include "integers.hpp"
#include "kvant/error.hpp"
#include "module.hpp"

namespace kvant::python {
namespace {

using zipcache::ZipCacheKVCache;
using zipcache::ZipCacheState;

// Library results are dense vectors; arrays made for them are dense too.
template <typename T>
void copy_out(const std::vector<T>& from, const Out& out, const char* name) {
  if (out.size() != from.size()) throw Error(ErrorCode::invalid_argument, std::string(name) + " has another size");
  const Strided<T> to = write_grid<T>(out, name, static_cast<int>(out.ndim()));
  std::copy(from.begin(), from.end(), to.data);
}

template <typename T>
std::vector<T> copy_in(const Strided<const T>& from) {
  std::vector<T> result;
  result.reserve(static_cast<std::size_t>(from.extent[0] * (from.rank > 1 ? from.extent[1] : 1)));
  for (std::int64_t i = 0; i < from.extent[0]; ++i) {
    for (std::int64_t j = 0; j < (from.rank > 1 ? from.extent[1] : 1); ++j) {
      result.push_back(from.data[i * from.stride[0] + j * (from.rank > 1 ? from.stride[1] : 0)]);
    }
  }
  return result;
}

std::vector<std::uint8_t> copy_integers(const In& array, const char* name, int rank) {
  return copy_in(Integers<std::uint8_t>(array, name, rank).view());
}

std::vector<float> copy_floats(const In& array, const char* name, int rank) {
  return copy_in(read_grid<float>(array, name, rank));
}

void norms(const In& keys, const Out& out) {
  const ConstArray from = read_floats(keys, "keys", 2);
  copy_out(without_gil([&] { return zipcache::token_key_norms(from); }), out, "norms");
}

void mask(const In& norms, double hi_fraction, const Out& out) {
  const ConstArray from = read_floats(norms, "norms", 1);
  copy_out(without_gil([&] { return zipcache::saliency_mask(from, hi_fraction); }), out, "mask");
}

void channel_quant(const In& x, int bits, std::int64_t group_size, const Out& codes, const Out& scales,
                   const Out& zeros) {
  const ConstArray from = read_floats(x, "x", 2);
  const zipcache::ChannelCodes got = without_gil([&] { return zipcache::channel_quant(from, bits, group_size); });
  copy_out(got.codes, codes, "codes");
  copy_out(got.scales, scales, "scales");
  copy_out(got.zeros, zeros, "zeros");
}

void channel_dequant(const In& codes, const In& scales, const In& zeros, std::int64_t group_size, const Out& out) {
  const Integers<std::uint8_t> from(codes, "codes", 2);
  const Strided<const float> s = read_grid<float>(scales, "scales", 2);
  const Strided<const float> z = read_grid<float>(zeros, "zeros", 2);
  const Array to = write_floats(out, "out", 2);
  without_gil([&] { zipcache::channel_dequant(from.view(), s, z, to, group_size); });
}

ZipCacheState compress(const In& x, int hi_bits, int lo_bits, double hi_fraction, std::int64_t group_size) {
  const ConstArray from = read_floats(x, "x", 2);
  return without_gil([&] { return zipcache::zipcache_compress(from, hi_bits, lo_bits, hi_fraction, group_size); });
}

ZipCacheState make_state(const In& hi_codes, const In& hi_scales, const In& hi_zeros, const In& lo_codes,
                         const In& lo_scales, const In& lo_zeros, const In& hi_mask, int hi_bits, int lo_bits,
                         std::int64_t seq_len, std::int64_t head_dim, std::int64_t group_size) {
  ZipCacheState state;
  state.hi_codes = copy_integers(hi_codes, "hi_codes", 2);
  state.hi_scales = copy_floats(hi_scales, "hi_scales", 2);
  state.hi_zeros = copy_floats(hi_zeros, "hi_zeros", 2);
  state.lo_codes = copy_integers(lo_codes, "lo_codes", 2);
  state.lo_scales = copy_floats(lo_scales, "lo_scales", 2);
  state.lo_zeros = copy_floats(lo_zeros, "lo_zeros", 2);
  state.hi_mask = copy_integers(hi_mask, "hi_mask", 1);
  state.hi_bits = hi_bits;
  state.lo_bits = lo_bits;
  state.seq_len = seq_len;
  state.head_dim = head_dim;
  state.group_size = group_size;
  return state;
}

void read_state(const ZipCacheState& state, const Out& hi_codes, const Out& hi_scales, const Out& hi_zeros,
                const Out& lo_codes, const Out& lo_scales, const Out& lo_zeros, const Out& hi_mask) {
  copy_out(state.hi_codes, hi_codes, "hi_codes");
  copy_out(state.hi_scales, hi_scales, "hi_scales");
  copy_out(state.hi_zeros, hi_zeros, "hi_zeros");
  copy_out(state.lo_codes, lo_codes, "lo_codes");
  copy_out(state.lo_scales, lo_scales, "lo_scales");
  copy_out(state.lo_zeros, lo_zeros, "lo_zeros");
  copy_out(state.hi_mask, hi_mask, "hi_mask");
}

std::int64_t count_salient(const ZipCacheState& state) {
  return std::count(state.hi_mask.begin(), state.hi_mask.end(), std::uint8_t{1});
}

void reconstruct(const ZipCacheState& state, const Out& out) {
  const Array to = write_floats(out, "out", 2);
  without_gil([&] { zipcache::zipcache_reconstruct(state, to); });
}

void quant_dequant(const In& x, const Out& out, int hi_bits, int lo_bits, double hi_fraction, std::int64_t group_size) {
  const ConstArray from = read_floats(x, "x", 2);
  const Array to = write_floats(out, "out", 2);
  without_gil([&] { zipcache::zipcache_quant_dequant(from, to, hi_bits, lo_bits, hi_fraction, group_size); });
}

}  // namespace

void bind_zipcache(nb::module_& module) {
  module.def("token_key_norms", &norms, nb::arg("keys"), nb::arg("out"));
  module.def("saliency_mask", &mask, nb::arg("norms"), nb::arg("hi_fraction"), nb::arg("out"));
  module.def("channel_quant", &channel_quant, nb::arg("x"), nb::arg("bits"), nb::arg("group_size"), nb::arg("codes"),
             nb::arg("scales"), nb::arg("zeros"));
  module.def("channel_dequant", &channel_dequant, nb::arg("codes"), nb::arg("scales"), nb::arg("zeros"),
             nb::arg("group_size"), nb::arg("out"));
  module.def("zipcache_compress", &compress, nb::arg("x"), nb::arg("hi_bits"), nb::arg("lo_bits"),
             nb::arg("hi_fraction"), nb::arg("group_size"));
  module.def("zipcache_reconstruct", &reconstruct, nb::arg("state"), nb::arg("out"));
  module.def("zipcache_bytes", &zipcache::zipcache_bytes, nb::arg("state"), nb::arg("group_size").none());
  module.def("base_only_bytes", &zipcache::base_only_bytes, nb::arg("S"), nb::arg("D"), nb::arg("bits"),
             nb::arg("group_size"));
  module.def("zipcache_quant_dequant", &quant_dequant, nb::arg("x"), nb::arg("out"), nb::arg("hi_bits"),
             nb::arg("lo_bits"), nb::arg("hi_fraction"), nb::arg("group_size"));

  nb::class_<ZipCacheState>(module, "ZipCacheState")
      .def_static("make", &make_state, nb::arg("hi_codes"), nb::arg("hi_scales"), nb::arg("hi_zeros"),
                  nb::arg("lo_codes"), nb::arg("lo_scales"), nb::arg("lo_zeros"), nb::arg("hi_mask"),
                  nb::arg("hi_bits"), nb::arg("lo_bits"), nb::arg("seq_len"), nb::arg("head_dim"),
                  nb::arg("group_size"))
      .def("read", &read_state, nb::arg("hi_codes"), nb::arg("hi_scales"), nb::arg("hi_zeros"), nb::arg("lo_codes"),
           nb::arg("lo_scales"), nb::arg("lo_zeros"), nb::arg("hi_mask"))
      .def_prop_ro("n_hi", &count_salient)
      .def_ro("hi_bits", &ZipCacheState::hi_bits)
      .def_ro("lo_bits", &ZipCacheState::lo_bits)
      .def_ro("seq_len", &ZipCacheState::seq_len)
      .def_ro("head_dim", &ZipCacheState::head_dim)
      .def_ro("group_size", &ZipCacheState::group_size);

  nb::class_<ZipCacheKVCache, ReferenceCache>(module, "ZipCacheKVCache")
      .def(nb::init<const KVCacheConfig&>(), nb::arg("config"))
      .def_prop_ro("compressed_key_bytes", &ZipCacheKVCache::compressed_key_bytes)
      .def_prop_ro("compressed_value_bytes", &ZipCacheKVCache::compressed_value_bytes)
      .def_prop_ro("baseline_key_bytes", &ZipCacheKVCache::baseline_key_bytes)
      .def_prop_ro("baseline_value_bytes", &ZipCacheKVCache::baseline_value_bytes)
      .def_prop_ro("fp16_key_bytes", &ZipCacheKVCache::fp16_key_bytes)
      .def_prop_ro("fp16_value_bytes", &ZipCacheKVCache::fp16_value_bytes)
      .def_prop_ro("compression_ratio", &ZipCacheKVCache::compression_ratio)
      .def_prop_ro("effective_avg_bits", &ZipCacheKVCache::effective_avg_bits);
}

}  // namespace kvant::python
