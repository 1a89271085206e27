#pragma once

#include "methods/method.hpp"

namespace kvant::catalog {

// Kitty (arXiv 2511.18643) in its paper form: 2-bit keys per channel and page, the loudest channels with a second 2-bit
// plane. README.md has the layout.
Method kitty();

}  // namespace kvant::catalog
