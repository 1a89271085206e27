#pragma once

#include "methods/method.hpp"

namespace kvant::catalog {

// KVQuant (arXiv 2401.18079) on pages: non-uniform levels, ranges per key channel and per value token over all heads,
// two-sided outliers. README.md has the equation and the layout.
Method kvquant();

}  // namespace kvant::catalog
