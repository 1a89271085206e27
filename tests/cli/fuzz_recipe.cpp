// libFuzzer: any text is a list of recipes or refused with CliError, and what is accepted survives its text form.
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <string>

#include "cli/errors.hpp"
#include "cli/recipes.hpp"

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  const std::string text(reinterpret_cast<const char*>(data), size);
  try {
    for (const kvant::cli::RowSpec& row : kvant::cli::parse_rows({text})) {
      if (row.recipe && !(kvant::parse_layer_recipes(kvant::to_text(*row.recipe)) == *row.recipe)) std::abort();
    }
  } catch (const kvant::cli::CliError&) {
    return 0;  // refused, as it should be
  }
  return 0;
}
