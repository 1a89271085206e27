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

// Every golden history of a class, by run(case); a negative trim is decided: refused.
void expect_histories(const std::string& class_name, const std::function<std::string(const Case&)>& run);

// Configs that the reference's class refuses, by construct(config): refused with the names that the case asks for.
void expect_refused_configs(const std::string& class_name, const std::function<void(const KVCacheConfig&)>& construct);

}  // namespace kvant::golden
