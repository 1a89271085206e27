// KVCacheConfig: the settings of the reference caches, with the reference's field names and defaults.
#pragma once

#include <cstdint>
#include <string>

namespace kvant {

// A cache checks the fields it reads when it is built: fractions of kitty and zipcache in 0..1, kvquant_n_sink >= 0 (as
// the reference does), and what the reference leaves unchecked: widths 1..8, group sizes >= 1, head_dim >= 1, a
// kvquant_outlier_fraction that is a number. A field outside is Error(invalid_argument) naming the field and its value.
struct KVCacheConfig {
  std::string method = "turboquant_rvq";  // the reference's default; make_cache() has kitty, kvquant and zipcache
  std::int64_t head_dim = 128;

  double kitty_hi_fraction = 0.25;
  std::int64_t kitty_hi_bit = 4;
  std::int64_t kitty_lo_bit = 2;
  std::int64_t kitty_group_size = 32;

  std::int64_t kvquant_bits = 3;
  double kvquant_outlier_fraction = 0.01;
  std::int64_t kvquant_group_size = 32;  // read but unused, as in the reference
  std::int64_t kvquant_lloyd_iters = 8;
  std::int64_t kvquant_refit_interval = 0;
  std::int64_t kvquant_n_sink = 1;

  std::int64_t zipcache_hi_bits = 4;
  std::int64_t zipcache_lo_bits = 2;
  double zipcache_hi_fraction = 0.20;
  std::int64_t zipcache_group_size = 32;
  bool zipcache_quantize_values = true;
};

}  // namespace kvant
