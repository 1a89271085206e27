#pragma once

#include "methods/method.hpp"

namespace kvant::catalog {

// KIVI (arXiv 2402.02750): keys per channel, values per token, uniform asymmetric codes. README.md has the layout.
Method kivi();

}  // namespace kvant::catalog
