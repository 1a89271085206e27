#include "base/checked.hpp"
#include "kvant/kitty.hpp"
#include "kvant/kvquant.hpp"
#include "kvant/reference_cache.hpp"
#include "kvant/zipcache.hpp"

namespace kvant {

std::unique_ptr<ReferenceCache> make_cache(const KVCacheConfig& config) {
  if (config.method == "kitty") return std::make_unique<kitty::KittyKVCache>(config);
  if (config.method == "kvquant") return std::make_unique<kvquant::KVQuantKVCache>(config);
  if (config.method == "zipcache") return std::make_unique<zipcache::ZipCacheKVCache>(config);
  base::fail(ErrorCode::invalid_argument,
             "method = \"" + config.method + "\" is unknown; the choices are kitty, kvquant, zipcache");
}

}  // namespace kvant
