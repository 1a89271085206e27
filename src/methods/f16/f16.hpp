#pragma once

#include "methods/method.hpp"

namespace kvant::catalog {

// The control: every page stays open, nothing is quantized.
Method f16();

}  // namespace kvant::catalog
