// From the rows of one call to the slots that a PackedSide reserved for them.
#pragma once

#include <cstdint>
#include <vector>

#include "kvant/array.hpp"
#include "methods/kvquant/packed.hpp"

namespace kvant::kvquant {

struct KeyEncoding {
  const ConstArray* keys = nullptr;  // [B, H, S, D]
  std::int64_t exact = 0;            // leading rows that are kept as they are
  const float* levels = nullptr;     // fp32 [H][L][D]
  const float* threshold = nullptr;  // [D]: |k| >= threshold is an outlier; null: by rank within the call
  std::int64_t rank_outliers = 0;    // their number per channel and head
  int threads = 0;
};

// Writes the rows; returns the outliers of the coded rows per head and adds all (sinks included) to `count`.
std::vector<std::vector<Outlier>> encode_keys(const KeyEncoding& call, const PackedSide& side,
                                              const PackedSide::Places& places, std::int64_t& count);
// Rows as they are, for keys that cannot be coded yet.
void copy_rows(const ConstArray& rows, const PackedSide& side, const PackedSide::Places& places, std::int64_t n);

struct ValueEncoding {
  const ConstArray* values = nullptr;  // [B, H, S, D]
  std::int64_t sinks = 0;              // leading rows that are kept as they are
  std::int64_t sweeps = 8;
  int threads = 0;
};

// Fits, codes and writes every row; returns the fp32 levels [L][S] of batch element 0, head 0.
std::vector<float> encode_values(const ValueEncoding& call, const PackedSide& side, const PackedSide::Places& places);

}  // namespace kvant::kvquant
