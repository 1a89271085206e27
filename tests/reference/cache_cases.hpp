// Runs the golden cache cases: the steps of a case against a kvant cache, every returned row, offset and property.
#pragma once

#include <functional>
#include <string>

#include "kvant/reference_cache.hpp"
#include "reference/golden.hpp"

namespace kvant::golden {

// The config of a case: the reference's defaults and the named fields.
KVCacheConfig config_of(const Case& c);

// The value of a property by the reference's name, as JSON (integers as integers).
using Property = std::function<Json(const std::string&)>;
// Called after each step for what only one method has ("internal", "state"); returns "" or a difference.
using AfterStep = std::function<std::string(const Json& step)>;

// Runs every step; "" or the first difference. Throws what the cache throws.
std::string run_cache_case(const Case& c, ReferenceCache& cache, const Property& property, const AfterStep& after = {});

}  // namespace kvant::golden
