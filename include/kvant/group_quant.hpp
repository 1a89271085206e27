// The group quantizer that the reference modules share: minimum and maximum of `group_size` consecutive rows per
// column, codes of `bits` bits between them.
//
// x is [N, D], or [B, N, D] for the reference's "_batched" forms (B independent matrices, the same bits as one by one).
// There are G = ceil(N / group_size) groups; the last one may be short. All arithmetic is fp32 with round-half-to-even;
// a NaN or an infinity makes its whole (group, column) NaN. Error(invalid_argument) unless 1 <= bits <= 8,
// group_size >= 1 and every shape fits.
#pragma once

#include "kvant/array.hpp"

namespace kvant {

// codes [.., G, group_size, D] (rows missing in the last group repeat its last row), scale and zero [.., G, 1, D];
// "zero" is the group's minimum, scale = max((max - min) / (2^bits - 1), 1e-8).
void group_quant_codes(const ConstArray& x, int bits, std::int64_t group_size, const Strided<std::uint8_t>& codes,
                       const Strided<float>& scale, const Strided<float>& zero);

// out [.., n, D] = code * scale + zero for the first n rows of codes [.., G, group_size, D], rounded to out's type.
void group_dequant_codes(const Strided<const std::uint8_t>& codes, const Strided<const float>& scale,
                         const Strided<const float>& zero, const Array& out);

// Both in one: out [.., N, D]; the reference's result when out is f16.
void group_quant_dequant(const ConstArray& x, int bits, std::int64_t group_size, const Array& out);

}  // namespace kvant
