// libFuzzer: any text is a recipe or refused with invalid_argument, and a recipe survives its own text form.
#include <cstdint>
#include <cstdlib>
#include <string_view>

#include "kvant/kvant.hpp"

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  try {
    const kvant::Recipe recipe = kvant::parse_recipe({reinterpret_cast<const char*>(data), size});
    if (!(kvant::parse_recipe(kvant::to_text(recipe)) == recipe)) std::abort();
    kvant::make_layout(recipe, kvant::CacheShape{});
  } catch (const kvant::Error& error) {
    if (error.code() != kvant::ErrorCode::invalid_argument) std::abort();
  }
  return 0;
}
