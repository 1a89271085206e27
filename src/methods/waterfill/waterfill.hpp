#pragma once

#include "methods/method.hpp"

namespace kvant::catalog {

// Reverse water-filling over key channels under an exact budget per page, Hadamard-rotated values, least-squares grids.
// README.md has the equation and the layout.
Method waterfill();

}  // namespace kvant::catalog
