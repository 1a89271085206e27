// The reference kernels in plain C++, written from the format's definition and compiled without vectorization.
#pragma once

#include "tiles/kernels.hpp"

namespace kvant::tiles {

Kernels scalar_kernels();

}  // namespace kvant::tiles
